"""Equal layers, captured once: the program is flat, computes the same bits, and what cannot be a call is none."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import layer_match, lowering, outlining, schedule_check
from mfsdp.ir.program import STORAGE, Program
from tests.helpers.models import CASES, GPT, Block
from tests.helpers.parity import batches, build, compiled, whole

NEVER = 1 << 30


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    out: list[str] = []
    monkeypatch.setattr(outlining.log, "info", lambda text, *words: out.append(text % words))
    return out


def programs(model: nn.Module, x: torch.Tensor, least: int = 3, **more: Any) -> list[Program]:
    before, outlining.MIN_LAYERS = outlining.MIN_LAYERS, least
    try:
        with torch.device("meta"):
            return list(mfsdp.trace(copy.deepcopy(model), (x,), world=2, **{"lowering": "inductor", **more}))
    finally:
        outlining.MIN_LAYERS = before


def schedule(program: Program) -> list[str]:
    """What a program communicates, once all passes have run, and their laws been checked."""
    pipeline.run(program, listings=False)
    return [re.sub(r"\b(?!u\d)[a-z]\w*", "_", operation.text) for operation in schedule_check.listed(program)]


def ids() -> torch.Tensor:
    return torch.empty(2, 8, dtype=torch.long)


@cache
def _traced(least: int, train: bool, recompute: bool) -> list[Program]:
    return programs(GPT(layers=3, recompute=recompute), ids(), least, units=[Block], train=train)


def gpt(least: int, train: bool = True, recompute: bool = False) -> list[Program]:
    """A GPT of three layers, before any pass."""
    return [p.copy() for p in _traced(least, train, recompute)]


def linears(least: int = 3) -> list[Program]:
    """The smallest model whose layers are captured once: all but the first, whose input needs no gradient."""
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)))
    return programs(model, torch.empty(4, 6), least, units=["*"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "recompute"),
    [
        (False, False),
        pytest.param(False, True, marks=pytest.mark.exhaustive),
        pytest.param(True, False, marks=pytest.mark.exhaustive),
        (True, True),
    ],
)
def test_programs_are_flat_and_follow_the_same_schedule(told, train, recompute):
    flat, once = (gpt(least, train, recompute) for least in (NEVER, 3))
    assert [p.phase for p in flat] == [p.phase for p in once] == (["forward", "backward"] if train else ["inference"])
    for a, b in zip(flat, once, strict=True):
        assert not any(n.op == "get_attr" or n.target is outlining.CALL for n in b.nodes)
        assert not any(isinstance(m, torch.fx.GraphModule) for m in b.gm.children()), "caches could not write that down"
        assert schedule(a) == schedule(b)
    assert not told


@pytest.mark.slow
def test_every_layer_has_its_own_values():
    """Two calls save for backward in different storages (invariant 58), in fake tensors too: AOTAutograd decides from
    those what may be overwritten.
    """
    forward, backward = gpt(3)
    saved = [n for n in backward.gm.graph.find_nodes(op="placeholder") if STORAGE in n.meta]
    numbers: dict[Any, set[Any]] = {}
    for node in saved:
        numbers.setdefault(node.meta["val"].untyped_storage()._cdata, set()).add(node.meta[STORAGE][0])
    assert len(saved) > 36 and all(len(of) == 1 for of in numbers.values())
    results = [n for n in forward.results() if isinstance(n, torch.fx.Node)]
    assert {n.name for n in saved} <= {n.name for n in results}


@pytest.mark.slow
def test_few_layers_are_not_worth_it(monkeypatch):
    calls = []
    monkeypatch.setattr(layer_match.Layer, "body", lambda self: calls.append(self))
    few = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))  # the first one's input needs no gradient
    programs(few, torch.empty(4, 6), outlining.MIN_LAYERS, units=["*"])
    assert outlining.MIN_LAYERS == 4 and not calls


class Counting(nn.Module):
    """Counts tokens per expert as transformers does, and makes a tensor on the input's device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        tokens = torch.histc(y.argmax(1).int(), bins=6, min=0, max=5)
        rank = torch.arange(6, device=x.device)
        return y * tokens.cumsum(0).to(y.dtype) + rank


@pytest.mark.slow
def test_layers_that_count_are_captured_once(told):
    """`trace` gives the count another dtype, and captures as on the CPU."""
    model = nn.Sequential(*(Counting() for _ in range(4)))
    once = programs(model, torch.empty(4, 6, requires_grad=True), units=["*"])
    assert not told and sum("histc" in str(n.target) for n in once[0].nodes) == 4


class Layers(nn.Module):
    """Layers that do what they are told, on what all of them read besides."""

    def __init__(self, do: Callable[..., Any], layers: int = 4):
        super().__init__()
        self.do = do
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.shared = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        given = self.shared(x)
        out, seen = [x], []
        for layer in self.layers:
            y = layer(self.do, out[-1], given)
            y, beside = y if isinstance(y, tuple) else (y, y)
            seen.append(beside.detach())
            out.append(y.mul_(2) if self.do is _is_written else y)
        return out, seen


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, do: Callable[..., Any], x: torch.Tensor, given: torch.Tensor) -> Any:
        return do(self, x, given)


def _writes(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    layer.seen.add_(1)
    return layer.inner(x)


def _hands_on(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    layer.inner(x).relu_()
    return x.view(-1, 6)


def _gives_parameter(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return layer.inner.weight.t()


def _adds_up(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return layer.inner(x) * given + given.sin()


def _adds_up_again(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return layer.inner(x) + checkpoint(lambda value: value * value.sin(), given, use_reentrant=False)


def _is_written(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return layer.inner(x).sin()


def _casts(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer.inner(x)


def _tells(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, layer.inner(x).sin()


def _kernels(layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*3 * [layer.inner(x)[None]])[0]


REFUSED = {
    "writes": (_writes, "writes to what it is given"),
    "hands on": (_hands_on, "shares storage"),
    "gives a parameter": (_gives_parameter, "a parameter goes out"),
    "adds up": (_adds_up, "added up in another order"),
    "adds up in a checkpoint": (_adds_up_again, "added up in another order"),
    "is written": (_is_written, "what it gives is written to"),
    "casts": (_casts, "under autocast"),
    "chooses kernels": (_kernels, "which neither reads nor gives a tensor"),
    "is not differentiated": (_tells, "not differentiated"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_call_is_captured_as_it_is(name, told):
    do, why = REFUSED[name]
    flat, once = (
        programs(Layers(do), torch.empty(6, 6), least, units=["layers.*"], lowering="eager") for least in (NEVER, 3)
    )
    assert len(told) == 1 and re.search(
        f"captured one by one: [34] equal layers, .*layers.[01] the first of them: .*{why}", told[0]
    )
    assert [str(p.gm.graph) for p in flat] == [str(p.gm.graph) for p in once]


@pytest.mark.slow
def test_where_torch_cannot_cut_it_the_graph_is_captured_flat(monkeypatch, told):
    flat = linears(NEVER)

    def raises(joint: Any) -> None:
        raise AssertionError("not with this torch")

    monkeypatch.setattr(outlining, "check_functional", raises)
    monkeypatch.setattr(outlining.log, "warning", outlining.log.info)
    once = linears()
    assert told == ["mfsdp: layers are captured one by one: AssertionError: not with this torch"]
    assert [len(p.nodes) for p in once] == [len(p.nodes) for p in flat]
    for a, b in zip(flat, once, strict=True):
        assert schedule(a) == schedule(b)


@pytest.mark.slow
def test_what_cannot_be_looked_at_is_captured_as_it_is(monkeypatch, told):
    monkeypatch.setattr(outlining, "unfit", lambda alike: 1 / 0)
    forward, _ = linears()
    assert told == ["mfsdp: layers are captured one by one: ZeroDivisionError: division by zero"]
    assert schedule(forward)


@pytest.mark.slow
def test_layers_in_a_checkpoint_in_a_checkpoint():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))  # the first one's input needs no gradient

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(checkpoint, layer, x, use_reentrant=False)
            return x

    flat, once = (programs(Nested(), torch.empty(4, 6), least, units=["layers.*"]) for least in (NEVER, 3))
    assert [schedule(p) for p in flat] == [schedule(p) for p in once]


@pytest.mark.slow
def test_policies_of_checkpoints_are_no_others():
    """Layers that are equal but for what their checkpoints save."""

    def saves(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def recomputes(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                saved = partial(create_selective_checkpoint_contexts, saves if i < 3 else recomputes)
                x = checkpoint(layer, x, use_reentrant=False, context_fn=saved)
            return x

    flat, once = (programs(Selective(), torch.empty(4, 6), least, units=["layers.*"]) for least in (NEVER, 3))
    for programs_ in (flat, once):
        kinds = [Counter(str(n.target) for n in p.nodes) for p in programs_]
        assert [of["aten.tanh.default"] for of in kinds] == [6, 3]
    assert [schedule(p) for p in flat] == [schedule(p) for p in once]


@pytest.mark.slow
def test_what_raises_later_is_not_tried_again(monkeypatch):
    """A law that is broken, a bad option: once is enough, and the error is its own."""
    calls = []

    def raises(*args: Any) -> Any:
        calls.append(args)
        raise ValueError("a pass of mine")

    monkeypatch.setattr(lowering, "forget_visible", raises)
    with pytest.raises(Exception, match="a pass of mine"):
        linears()
    assert len(calls) == 1


class Both(nn.Module):
    """Layers with random numbers, two kinds of them in turn."""

    def __init__(self, again: bool):
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(Kind(i % 2 == 0) for i in range(4))
        self.extra = nn.ModuleList(Kind(True) for _ in range(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.extra):
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.square().sum()


class Kind(nn.Module):
    def __init__(self, first: bool):
        super().__init__()
        self.first, self.linear, self.norm = first, nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.linear(self.norm(x)), 0.3, self.training)
        return x + (y.relu_() if self.first else y.tanh())


def differences(expected: dict[str, int]) -> list[str]:
    """What differs bitwise between a model whose layers are captured once and one by one, after two steps, or is not
    captured once in training; ``expected``: how many layers are.
    """
    out: list[str] = []
    called: list[str] = []
    call, least_ = layer_match.Layer.call, outlining.MIN_LAYERS
    layer_match.Layer.call = lambda self, name, moved: (called.append(name), call(self, name, moved))[1]  # type: ignore[method-assign, assignment, func-returns-value]
    for name, count in expected.items():
        torch.manual_seed(0)
        if name in CASES:
            _, model = build(CASES[name])
            given, of = (lambda step, name=name: batches(CASES[name], step)), CASES[name].loss
        else:
            model = mfsdp.fully_shard(Both(name == "again"), units=[Kind])
            given, of = (lambda step: [torch.randn(4, 6) + step + rank for rank in range(2)]), Both.__call__
        runs = []
        for least in (NEVER, 2):
            twin = copy.deepcopy(model)
            torch._dynamo.reset()  # or the first one's code would serve both
            outlining.MIN_LAYERS = least
            called.clear()
            run, losses = compiled(twin, "eager"), []
            for step in range(2):
                torch.manual_seed(step)
                batch = given(step)[torch.distributed.get_rank()]
                torch.manual_seed(step)
                losses.append(of(run, batch))
                losses[-1].backward()
                if least == 2 and step == 0 and len(called) != count:
                    out.append(f"{name}: {len(called)} calls")
                with torch.no_grad():
                    losses.append(of(run.eval(), batch))
                run.train()
            runs.append((losses, [whole(p.grad) for p in twin.parameters()], list(twin.buffers())))
        for a, b in zip(*runs, strict=True):
            same = all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))
            out += [] if same else [name]
    layer_match.Layer.call, outlining.MIN_LAYERS = call, least_  # type: ignore[method-assign]
    return out


@pytest.mark.dist
@pytest.mark.parametrize(
    "expected",
    [
        {"both": 4, "again": 4},
        pytest.param({"gpt_checkpointed": 2, "conv": 0, "mixtral": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_same_bits(two_ranks, expected):
    assert two_ranks.run(differences, expected, timeout=300) == [[], []]
