"""`split_backward`: both parts as listings, what stands in which, and what is not split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

import mfsdp
from mfsdp import pipeline
from mfsdp.ir import ops
from mfsdp.ir.program import Program, base_of, view_of
from mfsdp.ir.split_backward import SplitBackward, split_backward
from tests.helpers.models import GPT, LoRA
from tests.helpers.toys import BF16, Toy2

aten = torch.ops.aten


class Inner(nn.Module):
    """The blocks of a GPT: a stage that is neither the first nor the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = GPT().blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def parts_of(model: nn.Module, *args: Any, **sharding: Any) -> tuple[Program, SplitBackward]:
    backward = mfsdp.trace(model, args, world=4, **sharding).backward
    assert backward is not None
    split = split_backward(backward)
    assert split is not None
    return backward, split


def inner() -> tuple[Program, SplitBackward]:
    return parts_of(Inner(), torch.randn(2, 16, 16, requires_grad=True), units=["layers.*"])


def test_listing(golden: Callable[[str, str], None]) -> None:
    x = torch.randn(64, 1024, dtype=torch.bfloat16, requires_grad=True)
    sharding = {"units": ["layers.0", "layers.2"], "mp_policy": BF16}
    _, split = parts_of(Toy2().bfloat16(), x, **sharding)
    golden("split_backward", "\n".join(pipeline.run(p)[-1].listing for p in (split.input, split.weight)))


def faults(whole: Program, split: SplitBackward) -> list[str]:
    """Why a split is not the right one: each value is computed once, in the part that needs it."""
    found = []
    names = [{n.name for n in p.nodes if n.op == "call_function"} for p in (split.input, split.weight)]
    free = {n.name for n in whole.nodes if view_of(n) is not None or n.target is ops.param}
    found += [f"{name} is computed twice" for name in sorted(names[0] & names[1] - free)]
    found += [f"{n.name} is lost" for n in whole.nodes if n.op == "call_function" and n.name not in names[0] | names[1]]
    inputs = split.input.results()[: len(whole.results())]
    needed: set[Node] = set()
    todo = [r for r in inputs if isinstance(r, Node)]
    while todo:
        node = todo.pop()
        needed.add(node)
        todo += [i for i in node.all_input_nodes if i not in needed]
    for node in split.input.nodes:
        if node.op == "call_function" and node not in needed and not any(i in needed for i in node.all_input_nodes):
            found.append(f"{node.name} is only for weights")
        if node.target in (aten.mm.default, aten.bmm.default) and node not in needed:
            found.append(f"{node.name} is only for weights")
    return found


@pytest.mark.slow
def test_each_product_stands_in_its_part() -> None:
    whole, split = inner()
    assert not faults(whole, split)
    for part in (split.input, split.weight):
        pipeline.run(part)
    counts = [[len(p.calls(ops.all_gather)), len(p.calls(ops.reduce_scatter))] for p in (split.input, split.weight)]
    assert counts == [[2, 0], [0, 2]]


@pytest.mark.slow
def test_a_product_in_the_wrong_part_is_seen() -> None:
    """A mutation: a product for a weight moves to the input part, which hands it over."""
    whole, _ = inner()
    computed = [base_of(n.args[0]) for n in whole.nodes if n.target is ops.param_grad]  # type: ignore[arg-type]
    product = next(n for n in computed if n.target is aten.mm.default)
    whole.set_results([*whole.results(), product])  # as if a caller wanted it
    split = split_backward(whole)
    assert split is not None
    split.input.set_results([r for r in split.input.results() if r is None or r.name != product.name])
    whole.set_results(whole.results()[:-1])
    assert f"{product.name} is only for weights" in faults(whole, split)


def test_frozen_weights_are_gathered_again_for_adapters() -> None:
    """The weight part of LoRA recomputes nothing that reads frozen weights, and parameters are never handed over."""
    whole, split = parts_of(LoRA(), torch.randn(4, 20, requires_grad=True), units=[])
    assert not faults(whole, split)
    saved = split.input.results()[len(whole.results()) :]
    assert split.saved == len(saved) and not any(n.target is ops.param for n in saved)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["plain", "frozen", "optional"])
def test_what_stays_whole(why: str) -> None:
    model: nn.Module = Inner()
    sharding: dict[str, Any] = {"units": ["layers.*"]}
    if why == "frozen":
        model.requires_grad_(False)
    backward = mfsdp.trace(model, (torch.randn(2, 16, 16, requires_grad=True),), world=4, **sharding).backward
    assert backward is not None
    if why == "plain":
        backward.gradients = {0: ("u0", 0)}
    if why == "optional":
        backward.units = tuple(replace(u, spec=replace(u.spec, any_optional=True)) for u in backward.units)
    assert split_backward(backward) is None


@pytest.mark.slow
def test_a_split_backward_is_right_in_any_loop(one_rank: Any) -> None:
    assert one_rank.run(in_one_process) == [[]]


def in_one_process() -> list[str]:
    """Without a schedule the weight part runs at once: `backward`, twice, and not in `torch.autograd.grad`."""
    torch.manual_seed(0)
    reference, model = Inner().double(), Inner().double()
    model.load_state_dict(reference.state_dict())
    mfsdp.fully_shard(model, units=["layers.*"])
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", "split_backward": True})
    wrong = []
    for number in range(2):
        xs = [
            torch.randn(2, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(number)) for _ in "ab"
        ]
        outs = [m(x.requires_grad_()) for m, x in zip((reference, run), xs, strict=True)]
        for out, x, m in zip(outs, xs, (reference, model), strict=True):
            before = [p.grad for p in m.parameters()]
            torch.autograd.grad(out.sum(), x, retain_graph=True)
            if number == 0 and [p.grad for p in m.parameters()] != before:
                wrong.append("autograd.grad left gradients")
            out.sin().sum().backward(retain_graph=True)
            out.sum().backward()
        wrong += ["x"] * (not torch.equal(xs[0].grad, xs[1].grad))
    pairs = zip(reference.named_parameters(), model.parameters(), strict=True)
    return wrong + [
        n for (n, p), q in pairs if not torch.allclose(p.grad, q.grad.full_tensor(), rtol=1e-12, atol=1e-14)
    ]
