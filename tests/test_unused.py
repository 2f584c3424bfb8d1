"""Units that some ranks do not use in a step: with ``may_be_unused`` those ranks run their collectives all the same
(Note [Joining with zeros]); without it all ranks raise (`test_desync`).
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from tests.helpers.desync import said, throwaway
from tests.helpers.parity import error, whole
from tests.helpers.ranks import here

WIDTH = 6


class Layers(nn.Module):
    """Takes the layers that it is told to, in the order that it is told; one weight is used by nobody."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.way: tuple[int, ...] = ()
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for i in self.way:
            if self.breaks:
                torch._dynamo.graph_break()
            x = x + torch.tanh(self.layers[i](x))
        return self.last(x)


WAYS = [
    [(0, 1, 2, 3), (1, 2), (3,), ()],
    [(), (2,), (0, 2), (2, 1)],
    [(2, 0, 2), (), (2, 0), (3, 0)],  # another order, and a layer twice
    [(), (), (), ()],
    [(1,), (1, 0), (0, 1, 3), (1,)],
]
"""By step and rank."""


def built(sharding: dict[str, Any], breaks: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = Layers(breaks).to(here())
    model = mfsdp.fully_shard(
        copy.deepcopy(reference), units=["first", "layers.*"], may_be_unused=["layers.*"], **sharding
    )
    return reference, model


def expected(reference: nn.Module) -> None:
    """Averages over ranks, with zeros from those that have none."""
    for p in reference.parameters():
        there = torch.tensor(float(p.grad is not None), device=here())
        dist.all_reduce(there)
        if there:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def trained(
    sharding: dict[str, Any], lowering: str, shape: tuple[int, ...] = (), breaks: bool = False, steps: int = 5
) -> float:
    """The largest error of any loss, gradient, evaluation or weight over steps of two microbatches."""
    warnings.simplefilter("ignore")
    if shape:
        sharding["mesh"] = init_device_mesh(here().type, shape, mesh_dim_names=("dp_outer", "dp_shard"))
    reference, model = built(sharding, breaks)
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, reference)]
    worst, rank = 0.0, dist.get_rank()
    for step, ways in enumerate(WAYS[:steps]):
        for micro in range(2):
            model.way = reference.way = ways[(rank + micro) % 4]
            torch.manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(3, WIDTH).to(here())
            model.zero_grad() if micro == 0 else None
            with mfsdp.no_sync(model) if micro == 0 and step % 2 == 0 else warnings.catch_warnings():
                loss, want = run(x).square().mean(), reference(x).square().mean()
                loss.backward()
                want.backward()
            worst = max(worst, error(loss.detach(), want.detach()))
        expected(reference)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (step, name)
            if q.grad is not None:
                worst = max(worst, error(whole(p.grad), q.grad, 1e-3))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, reference)]
        worst = max(worst, error(norms[0], norms[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.way = reference.way = ways[rank % 3]
            worst = max(worst, error(run(x), reference(x)))
        dist.barrier()  # nobody is left behind in evaluation
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max([worst, *(error(whole(p.detach()), q.detach()) for p, q in pairs)])


@pytest.mark.dist
@pytest.mark.parametrize(("lowering", "strategy"), [
    ("none", 0), ("none", 2), ("eager", 3),
    *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in (("eager", 1), ("none", 1), ("none", 3))),
])  # fmt: skip
def test_ranks_that_leave_units_out_stand_in(two_ranks, lowering, strategy):
    steps = 2 if (lowering, strategy) == ("eager", 1) else 5
    assert max(two_ranks.run(trained, {"strategy": strategy}, lowering, steps=steps)) < 1e-4


@pytest.mark.dist
@pytest.mark.parametrize(("lowering", "outer"), [
    ("none", "no_shard"), *(pytest.param(x, "optim", marks=pytest.mark.exhaustive) for x in ("eager", "none")),
])  # fmt: skip
def test_over_two_axes_all_ranks_are_told(four_ranks, lowering, outer):
    sharding, steps = {"outer_strategy": outer}, 5 if lowering == "none" else 1
    assert max(four_ranks.run(trained, sharding, lowering, (2, 2), steps=steps, timeout=100)) < 1e-4


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["none", pytest.param("eager", marks=pytest.mark.exhaustive)])
def test_what_is_added_up_in_two_stages(four_ranks, lowering):
    """Sums in fp32 of what is communicated in bf16, over the outer axis."""
    policy = mfsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    assert max(four_ranks.run(trained, {"mp_policy": policy}, lowering, (2, 2), steps=1, timeout=100)) < 2e-2


@pytest.mark.dist
def test_pieces_of_a_forward(two_ranks):
    assert max(two_ranks.run(trained, {}, "eager", breaks=True, steps=3)) < 1e-4


@pytest.mark.dist
@pytest.mark.inductor
@pytest.mark.exhaustive
@pytest.mark.parametrize("lowering", ["stitched", "whole"])
def test_under_inductor(two_ranks, lowering):
    assert max(two_ranks.run(trained, {}, lowering, steps=1, timeout=100)) < 1e-4


def one_compiles() -> float:
    """Rank 1 runs the model as it is, rank 0 compiles it."""
    warnings.simplefilter("ignore")
    reference, model = built({}, False)
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}) if dist.get_rank() == 0 else model
    worst = 0.0
    for step, ways in enumerate(WAYS):
        model.way = reference.way = ways[dist.get_rank()]
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(3, WIDTH)
        loss, want = run(x).square().mean(), reference(x).square().mean()
        loss.backward()
        want.backward()
        worst = max(worst, error(loss.detach(), want.detach()))
    expected(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max([worst, *(error(whole(p.grad), q.grad) for p, q in pairs)])


@pytest.mark.dist
def test_one_rank_compiles_and_another_does_not(two_ranks):
    assert max(two_ranks.run(one_compiles)) < 1e-5


def other_is_left_out(where: str) -> str:
    """Of a unit that was not said to be left out."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(
        Layers(), units=["first", "layers.*"], may_be_unused=["layers.0", "layers.1"], mesh=throwaway()
    )
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}) if where == "compiled" else model
    model.way = (0, 2) if dist.get_rank() == 0 else (1,)
    return said(lambda: run(torch.ones(2, WIDTH)).sum().backward())


@pytest.mark.dist
@pytest.mark.parametrize("where", ["compiled", "uncompiled"])
def test_a_unit_that_has_to_be_used(two_ranks, where):
    for text in two_ranks.run(other_is_left_out, where):
        assert "(invariant 13)" in text, text
        assert "with gradients of (root), first, layers.2" in text, text
        assert "with gradients of (root), first\n" in text, text


def hooks() -> tuple[list[str], bool]:
    """What hooks on a rank that leaves a layer out see, and what a copy of the model does."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Layers(), units=["layers.*"], may_be_unused=["layers.*"])
    twin = copy.deepcopy(model)
    seen: list[str] = []
    weight: Any = model.layers[1].weight
    weight.register_hook(lambda grad: seen.append(f"grad {grad.to_local().sum():.3f}"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"there {p.grad.to_local().sum():.3f}"))
    for each in (model, twin):
        each.way = (1,) if dist.get_rank() == 0 else (2,)
        each(torch.ones(2, WIDTH)).sum().backward()
    same = all(
        torch.equal(whole(p.grad), whole(q.grad))
        for p, q in zip(model.parameters(), twin.parameters())
        if p.grad is not None
    )
    x = torch.ones(2, WIDTH, requires_grad=True)
    model.zero_grad()
    torch.autograd.grad(model(x).sum(), x)
    return seen, same and all(p.grad is None for p in model.parameters())


@pytest.mark.dist
def test_hooks_copies_and_backwards_for_inputs(two_ranks):
    (seen, right), other = two_ranks.run(hooks)
    assert right and other[1] and len(seen) == len(other[0]) == 2, (seen, other)
    assert all(a[5:] == b[6:] for a, b in (seen, other[0])), (seen, other)


def test_what_is_no_unit_of_the_call():
    model = Layers()
    with pytest.raises(ValueError, match="may_be_unused: first, a Linear, is no unit of this call"):
        mfsdp.fully_shard(model, units=["layers.*"], may_be_unused=["first"])
    mfsdp.fully_shard(model, units=["layers.*"], may_be_unused=["layers.*"])  # alone
    model.way = (0,)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert [model.layers[i].weight.grad is not None for i in range(4)] == [True, False, False, False]
    with pytest.raises(NotImplementedError, match="overlapped: units that may be unused"), mfsdp.overlapped(model):
        pass


class Cond(nn.Module):
    """A branch on data that Dynamo traces, and another inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)

        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 100, lambda x: self.c(x), lambda x: torch.tanh(self.b(x)), (x,))

        return torch.cond(x.sum() > 0, lambda x: self.a(x) + self.first.bias, inner, (x,))


def branches(lowering: str) -> float:
    torch.manual_seed(0)
    reference = Cond()
    with torch.no_grad():
        reference.first.weight.copy_(torch.eye(WIDTH))
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["first", "a", "b", "c"])
    run = torch.compile(model, backend="mfsdp", fullgraph=True, options={"lowering": lowering})
    refer = torch.compile(reference, backend="aot_eager")
    worst = 0.0
    for sign in (1, -1):
        x = sign * (1 - 2 * dist.get_rank()) * (1 + torch.rand(2, WIDTH))
        out, want = run(x), refer(x)
        out.sum().backward()
        want.sum().backward()
        worst = max(worst, error(out.detach(), want.detach()))
    expected(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max([worst, *(error(whole(p.grad), q.grad) for p, q in pairs)])


@pytest.mark.dist
@pytest.mark.parametrize(
    "lowering",
    ["eager", pytest.param("stitched", marks=[pytest.mark.inductor, pytest.mark.exhaustive])],
)
def test_branches_that_are_traced(two_ranks, lowering):
    """Parameters that any branch reads are gathered in front of it, on all ranks: without may_be_unused."""
    assert max(two_ranks.run(branches, lowering, timeout=100)) < 1e-5


def dropped(lowering: str) -> float:
    """transformers' OPT drops other layers on each rank, as its layerdrop says."""
    from transformers import OPTConfig, OPTForCausalLM

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=32, layerdrop=0.5, attn_implementation="eager",
    )  # fmt: skip
    reference = OPTForCausalLM(config).train()
    layer = type(reference.model.decoder.layers[0])
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[layer], may_be_unused=[layer])
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(3):
        for called in (run, reference):
            torch.manual_seed(10 * step + dist.get_rank())
            ids = torch.randint(64, (2, 12))
            called(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        expected(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(whole(p.detach()), q.detach()) for p, q in pairs)


@pytest.mark.dist
@pytest.mark.slow
def test_layers_that_transformers_drops(two_ranks):
    assert two_ranks.run(dropped, "eager") == [0.0, 0.0]
