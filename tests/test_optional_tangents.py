"""Results that the caller does not differentiate: nothing is added for them, and all gradients stay (Note [Optional
tangents]).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp
from mfsdp.ir import byte_costs, ops
from mfsdp.runtime import kernels
from mfsdp.runtime.compiled_program import CompiledProgram
from tests.helpers.program_graphs import program_graphs
from tests.helpers.without_inductor import without_inductor

Result = Callable[[Any, list[torch.Tensor], torch.Tensor], Any]
"""What a model returns, from its input and what layers kept, and the last layer's output."""


class Layer(nn.Module):
    """Keeps what it computes on the way, as layers that output attentions do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.up(x).tanh()
        return inner.sin(), inner


class Net(nn.Module):
    """Two equal layers, which are units, and a head."""

    def __init__(self, result: Result):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head, self.other = nn.Linear(8, 32), nn.Linear(8, 4)
        self.place = nn.Parameter(torch.randn(4, 6, 8))
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        h, inner = x, [x]
        for layer in self.layers:
            h, one = layer(h)
            inner.append(one)
        return self.result(self, inner, h)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).square().mean()


def scored(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(logits), logits


def unread(net: Any, inner: Any, h: torch.Tensor) -> Any:
    return loss_of(net.head(h)), net.other(h)


def read_twice(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(logits), logits, logits.sin()


def expanded_gradient(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return logits.sum(-1).square().sum(), logits


def shared_gradient(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(logits + net.head(h.sin())), logits


def shared_view(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of((logits + net.head(h.sin())).view(-1, 16)), logits


def part_of_a_sum(net: Any, inner: Any, h: torch.Tensor) -> Any:
    first, logits = net.head(h.sin()), net.head(h)
    return loss_of(logits), first + logits


def view_between_kernels(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h).tanh()
    return loss_of(logits.view(-1, 16)), logits


def transposed(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(logits.transpose(1, 2)), logits


def several_results(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(torch.nn.functional.layer_norm(logits, (32,)).sin()), logits


def broadcast_and_cut(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(torch.cat([logits, torch.ones_like(logits[:, :1])], 1).sum(0)), logits


def copied(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(Copied.apply(logits)), logits  # type: ignore[no-untyped-call]


class Copied(torch.autograd.Function):
    """Its gradient is a copy, which a compiler may leave out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clone()


def parameter(net: Any, inner: Any, h: torch.Tensor) -> Any:
    x = inner[0] + net.place
    return loss_of(net.head(x.sin())), x


def between_layers(net: Any, inner: Any, h: torch.Tensor) -> Any:
    return loss_of(net.head(h)), h


def inside_layers(net: Any, inner: Any, h: torch.Tensor) -> Any:
    return loss_of(net.head(h)), *inner[1:]


def views(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h)
    return loss_of(logits.view(-1, 16)), logits.view(-1, 16), logits.view(-1)


def narrow(net: Any, inner: Any, h: torch.Tensor) -> Any:
    logits = net.head(h).bfloat16()
    return loss_of(logits.float()), logits


RESULTS = {
    scored: 1, unread: 0, read_twice: 1, expanded_gradient: 0, shared_gradient: 0, shared_view: 0, part_of_a_sum: 0,
    view_between_kernels: 1, transposed: 0, several_results: 0, broadcast_and_cut: 0, parameter: 0, copied: 0,
    between_layers: 1, inside_layers: 0, views: 1, narrow: 1,
}  # fmt: skip
"""How many tangents are optional: those that are added to a gradient, outside of layers, in memory of its own."""


def inputs() -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("result", RESULTS, ids=lambda r: r.__name__)
def test_which_are_optional(result: Result) -> None:
    backward = mfsdp.trace(Net(result), (inputs(),), world=2, units=["layers.*"]).backward
    assert backward is not None
    found = [n for n in backward.nodes if n.target is ops.add_tangent]
    assert len(found) == RESULTS[result]


@pytest.mark.slow
def test_the_ledger_counts_none() -> None:
    def peak(result: Result) -> int:
        backward = mfsdp.trace(Net(result), (inputs(),), world=2, units=["layers.*"]).backward
        assert backward is not None
        return byte_costs.peak(byte_costs.lines(backward))

    def alone(net: Any, inner: Any, h: torch.Tensor) -> Any:
        return scored(net, inner, h)[0]

    assert peak(scored) == peak(alone)


@pytest.mark.slow
def test_microbatches_in_one_program_are_sorted_without_writes() -> None:
    backward = mfsdp.trace(Net(scored), (inputs(),), world=2, units=["layers.*"], together=2).backward
    assert backward is not None and not any(n.target is ops.add_tangent for n in backward.nodes)


class Pair:
    """A model and its sharded, compiled copy."""

    def __init__(self, result: Result, lowering: str, **how: Any):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.plain = Net(result)
        self.model = mfsdp.fully_shard(copy.deepcopy(self.plain), units=["layers.*"], device="cpu")
        options = {"lowering": lowering, **how.pop("options", {})}
        self.run = torch.compile(self.model, backend="mfsdp", options=options, **how)

    def compare(self, use: Callable[[Any], None], bits: bool) -> None:
        """Calls both and compares what ``use`` leaves in ``.grad``."""
        x, y = inputs().requires_grad_(), inputs().requires_grad_()
        for run, given in ((self.plain, x), (self.run, y)):
            run.zero_grad()
            use(run(given))
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad, y.grad) if bits else torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-6)
        for (name, mine), theirs in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
            found = torch.zeros_like(mine) if theirs.grad is None else theirs.grad.full_tensor()  # type: ignore[attr-defined]
            assert torch.equal(grad, found) if bits else torch.allclose(grad, found, rtol=1e-4, atol=1e-6), name


def both(out: Any) -> None:
    """Twice through one graph, with other tangents each time."""
    out[0].backward(retain_graph=True)
    out[1].sin().sum().backward()


USES: dict[str, Callable[[Any], None]] = {
    "first": lambda out: out[0].backward(),
    "second": lambda out: out[1].square().sum().backward(),
    "sum": lambda out: (out[0] + out[-1].cos().sum()).backward(),
    "first again": lambda out: out[0].backward(),
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each `add_tangent` got one."""
    found: list[bool] = []
    add = kernels.add_tangent

    def spy(run: Any, grad: torch.Tensor, tangent: torch.Tensor | None) -> None:
        found.append(tangent is not None)
        add(run, grad, tangent)

    monkeypatch.setattr(kernels, "add_tangent", spy)
    yield found


FAST = (unread, views, transposed, several_results, broadcast_and_cut, parameter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "result",
    [r if r in FAST else pytest.param(r, marks=pytest.mark.exhaustive) for r in RESULTS],
    ids=lambda r: r.__name__,
)
def test_gradients_of_all_uses(result: Result) -> None:
    pair = Pair(result, "eager")
    for use in (*USES.values(), both):
        pair.compare(use, bits=True)


@pytest.mark.slow
@pytest.mark.parametrize("result", [scored, view_between_kernels, between_layers], ids=lambda r: r.__name__)
def test_one_compiled_backward_serves_all(result: Result, given: list[bool]) -> None:
    with without_inductor():
        pair = Pair(result, "stitched")
        for use in USES.values():
            pair.compare(use, bits=False)
    assert given == [False, True, True, False]


@pytest.mark.inductor
@pytest.mark.parametrize("lowering, dynamic", [("stitched", False), ("whole", False), ("whole", True)])
def test_inductor(lowering: str, dynamic: bool, given: list[bool]) -> None:
    pair = Pair(view_between_kernels, lowering, dynamic=dynamic)
    for use in USES.values():
        pair.compare(use, bits=False)
    assert given == ([False, True, True, False] if lowering == "stitched" else [])


@pytest.mark.parametrize("result", [scored, unread, between_layers], ids=lambda r: r.__name__)
def test_split_backward(result: Result) -> None:
    pair = Pair(result, "eager", options={"split_backward": True})
    for use in USES.values():
        pair.compare(use, bits=True)


@pytest.mark.slow
def test_dynamic_shapes() -> None:
    pair = Pair(unread, "eager", dynamic=True)
    for use in USES.values():
        pair.compare(use, bits=True)


def test_replayed_subgraphs() -> None:
    with without_inductor(), program_graphs() as graphs:
        pair = Pair(scored, "stitched", options={"cuda_graph": "programs"})
        for _ in range(3):
            for use in USES.values():
                pair.compare(use, bits=False)
    assert any(graph.replays for graph in graphs)


def test_a_result_that_is_an_argument() -> None:
    """Its node in autograd is another graph's, which needs its zeros."""

    def passed_on(net: Any, inner: Any, h: torch.Tensor) -> Any:
        return (inner[0].contiguous(), *scored(net, inner, h))

    def loss_and_slope(run: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = inputs().requires_grad_()
        before, _ = torch.compile(lambda x: (x.sin(), x.cos()), backend="aot_eager")(x)
        _, loss, _ = run(before)
        loss.backward()
        assert x.grad is not None
        return loss, x.grad

    pair = Pair(passed_on, "eager")
    for a, b in zip(loss_and_slope(pair.plain), loss_and_slope(pair.run), strict=True):
        assert torch.equal(a, b)


def test_zeros_are_made_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``unread``'s second tangent begins a chain of its own."""
    tangents: list[Any] = []
    run = CompiledProgram.execute

    def spy(self: Any, args: list[Any], turn: Any) -> Any:
        tangents.extend(args[i] for i in self.info.tangents)
        return run(self, args, turn)

    monkeypatch.setattr(CompiledProgram, "execute", spy)
    Pair(unread, "eager").compare(USES["first"], bits=True)
    assert len(tangents) == 2 and torch.equal(tangents[1], torch.zeros(4, 6, 4))
