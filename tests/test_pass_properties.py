"""Every prefix of the pipeline gives the bits of the unsharded model, on random toys, strategies and options."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from torch import nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler.tracing import Programs
from mfsdp.ir import byte_costs, ops, printer
from mfsdp.ir.program import Program, operator
from mfsdp.ir.roles import Kind, is_kind, role
from mfsdp.ir.split_backward import split_backward
from mfsdp.ir.verifier import check
from tests.fuzz.parts import MLP, Attention, Convolution, Mixture, Scale
from tests.helpers.simulated_ranks import SimulatedRanks, Values, packed

LAYERS = {
    "linear": lambda w: nn.Linear(w, w),
    "bare": lambda w: nn.Linear(w, w, bias=False),
    "norm": nn.LayerNorm,
    "mlp": lambda w: MLP(w, 2 * w + 1),
    "attention": lambda w: Attention(w, 2),
    "convolution": lambda w: Convolution(w, 3),
    "mixture": lambda w: Mixture(w, 3),
    "scale": Scale,
}

PLACES: dict[str, dict[str, Any]] = {
    "optim_grads_params": {"world": 2},
    "kept": {"world": 2, "reshard_after_forward": False},
    "optim_grads": {"world": 2, "strategy": 2},
    "optim": {"world": 2, "strategy": 1},
    "no_shard": {"world": 2, "strategy": 0},
    "four": {"world": 4},
    "hsdp": {"mesh_shape": (2, 2)},
    "hfsdp": {"mesh_shape": (2, 2), "outer_strategy": "optim"},
    "hfsdp of optim": {"mesh_shape": (2, 2), "strategy": 1, "outer_strategy": "optim"},
}

PRECISIONS = {
    "fp64": torch.float64,
    "bf16 compute": mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16),
    "bf16 wires": mfsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16, param_comm_dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Layer:
    kind: str
    unit: bool = True
    residual: bool = False
    twice: bool = False
    """Whether it is called twice in a row."""
    checkpointed: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Toy:
    layers: tuple[Layer, ...]
    place: str = "optim_grads_params"
    precision: str = "fp64"
    width: int = 4


class Model(nn.Module):
    def __init__(self, toy: Toy):
        super().__init__()
        self.toy = toy
        self.layers = nn.ModuleList(LAYERS[layer.kind](toy.width) for layer in toy.layers)
        self.head = nn.Linear(toy.width, 3)
        for layer, module in zip(toy.layers, self.layers, strict=True):
            module.requires_grad_(not layer.frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, module in zip(self.toy.layers, self.layers, strict=True):
            for _ in range(1 + layer.twice):
                y = checkpoint(module, x, use_reentrant=False) if layer.checkpointed else module(x)
                x = torch.tanh(x + y if layer.residual else y)
        return self.head(x)


layers = st.builds(Layer, st.sampled_from([*LAYERS]), *[st.booleans()] * 4, st.sampled_from([False, False, True]))
toys = st.builds(
    Toy,
    st.lists(layers, min_size=1, max_size=3).map(tuple),
    st.sampled_from([*PLACES]),
    st.sampled_from([*PRECISIONS]),
    st.sampled_from([4, 6]),
)
options = st.fixed_dictionaries(
    {
        "prefetch": st.integers(0, 3),
        "reduce_lag": st.integers(0, 2),
        "max_unsharded": st.sampled_from([None, 0, 600, 2000]),
        "pool": st.booleans(),
        "keep_cast": st.booleans(),
        "quantize": st.booleans(),
        "check_finite": st.booleans(),
        "split_backward": st.booleans(),
    }
)


class Traced:
    """A toy with weights, its programs before any pass, and what it gives unsharded on each rank's data."""

    def __init__(self, toy: Toy):
        torch.manual_seed(0)
        policy = PRECISIONS[toy.precision]
        double = isinstance(policy, torch.dtype)
        main, compute = (policy, policy) if double else (torch.float32, policy.compute_dtype or torch.float32)
        model = Model(toy).to(main)
        units = [f"layers.{i}" for i, layer in enumerate(toy.layers) if layer.unit]
        more = {} if double else {"mp_policy": policy}
        example = torch.randn(2, 3, toy.width, dtype=compute, requires_grad=True)
        self.programs: Programs = mfsdp.trace(model, (example,), units=units, **PLACES[toy.place], **more)
        forward = self.programs.forward
        self.units = forward.units
        self.names = {
            (u.name, slot.offset): slot.name if u.fqn == "(root)" else f"{u.fqn}.{slot.name}"
            for u in self.units
            for slot in u.layout.slots
        }
        weights = dict(model.named_parameters())
        self.weights = {at: weights[name].detach() for at, name in self.names.items()}
        ranks = self.ranks()
        self.xs = [torch.randn(2, 3, toy.width, dtype=compute, requires_grad=True) for _ in ranks.ranks]
        self.tangents = [torch.randn(2, 3, 3, dtype=compute) for _ in ranks.ranks]
        self.results, gradients = [], []
        for rank in ranks.ranks:
            twin = copy.deepcopy(model)
            for at, name in self.names.items():
                unit = ranks.units[at[0]]
                flat = ranks.full(unit, rank)[at[1] : at[1] + weights[name].numel()]
                twin.get_parameter(name).data = flat.view(weights[name].shape)
            y = twin(self.xs[rank])
            y.backward(self.tangents[rank])
            self.results.append((y.detach(), self.xs[rank].grad))
            gradients.append({name: p.grad for name, p in twin.named_parameters() if p.grad is not None})
        self.accumulated: dict[str, Values] = {}
        for unit in self.units:
            flat = [
                packed(
                    unit,
                    {at[1]: g[name] for at, name in self.names.items() if at[0] == unit.name and name in g},
                    unit.spec.precision.compute,
                )
                for g in gradients
            ]
            self.accumulated[unit.name] = ranks.reduced(unit, flat)

    def ranks(self) -> SimulatedRanks:
        return SimulatedRanks(self.units, self.weights)

    def step(self, programs: Sequence[Program]) -> tuple[list[Values], dict[str, Values], list[dict[Node, int]]]:
        """The results, of forward and for its input, and accumulators of a step, and the bytes that rank 0 has
        allocated after each node. A backward may have two parts.
        """
        ranks, live = self.ranks(), [{} for _ in programs]
        forward, *parts = programs
        results, *given = ranks.run(forward, [[x.detach() for x in self.xs]], live[0])
        names = [n.name for n in self.programs.backward.nodes if n.op == "placeholder"]
        known = dict(zip(names, [*given, [t.clone() for t in self.tangents]], strict=True))
        del given
        outputs: list[Any] = [None] * len(self.programs.backward.results())
        for number, part in enumerate(parts, 1):
            places = part.graph.find_nodes(op="placeholder")
            mine = [known[n.name] for n in places if not is_kind(n, Kind.SHARD)]
            later = {n.name for other in parts[number:] for n in other.graph.find_nodes(op="placeholder")}
            known = {name: values for name, values in known.items() if name in later}
            found = ranks.run(part, mine, live[number])
            outputs = [a if b is None else b for a, b in zip(outputs, found, strict=False)]
            if number < len(parts):
                saved = [n.name for n in parts[number].graph.find_nodes(op="placeholder")]
                known |= zip(saved[len(saved) - len(found) + len(outputs) :], found[len(outputs) :], strict=True)
            del found
        wanted = None
        for node, values in zip(forward.nodes, outputs, strict=False):
            if values is not None and is_kind(node, Kind.SHARD):
                unit = ranks.units[role(node).unit]
                ranks.accumulators[unit.name] = ranks.reduced(unit, values)
            elif values is not None:
                wanted = values
        return [results, wanted], ranks.accumulators, live

    def check(self, programs: Sequence[Program]) -> None:
        """Results and gradients have the bits of the unsharded model, and the listing says what memory is allocated."""
        results, accumulators, live = self.step(programs)
        for got, want in zip(zip(*results, strict=True), self.results, strict=True):
            assert all(map(torch.equal, got, want)), "results"
        for name, values in accumulators.items():
            for got, want in zip(values, self.accumulated[name], strict=True):
                assert torch.equal(got, want), f"gradients of {name}: {got - want}"
        if programs[-1].reduced:  # parameters and their gradients are copies before
            for program, counted in zip(programs, live, strict=True):
                lines = byte_costs.lines(program, accumulators=False)
                said = [(line.node, line.live) for line in lines]
                assert said == [(line.node, counted[line.node]) for line in lines], "bytes"


def reads_back(program: Program) -> None:
    """A listing has what was done, in order: names, operators, bytes."""
    lines = byte_costs.lines(program)
    head, *rows = printer.render(program, "last", fold=False, rows=lines).split("\n; C ")[1].splitlines()
    gutter = 2 * len(re.match(r"(?:[A-Z] )*", head)[0].split()) + 1  # type: ignore[index]
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        name, done = re.match(r"(?:(\w+) +(?:\w\d+)? *= )?(\w+)", row[gutter:].strip()).groups()  # type: ignore[union-attr]
        target = operator(line.node)[0]._schema.name.split("::")[1]
        assert done in (shown(target), "cast", "quantise"), (row, target)
        assert name in (None, shown(line.node.name)) and byte_costs.size(line.live) in row.split(), row


def shown(name: str) -> str:
    """Names without the device that torch traced on."""
    return re.sub("^_|_for_cpu|scaled_dot_product_", "", name)


traced = cache(Traced)
seen: set[tuple[str, ...]] = set()


def prefixes(programs: Programs, table: pipeline.Table, split: bool) -> Iterator[tuple[str, list[Program]]]:
    """The programs after each pass, checked by the verifier; ``split``: with the backward in two parts."""
    now = [p.copy() for p in programs]
    if split and (parts := split_backward(programs.backward)) is not None:
        now[1:] = [parts.input, parts.weight]
    yield "capture", now
    for name, function in table:
        for p in now:
            pipeline.rewrite(p, ((name, function),))
            check(p)
        yield name, now


def holds(toy: Toy, several: list[dict[str, Any]]) -> None:
    """What must hold after every pass, under several options."""
    want = traced(toy)
    for chosen in several:
        knobs = {name: value for name, value in chosen.items() if name != "split_backward"}
        for name, programs in prefixes(want.programs, pipeline.table(**knobs), chosen["split_backward"]):
            text = (repr(toy), *(f"{p.slots}\n{p.graph}" for p in programs))
            if text not in seen:
                note(f"after {name}, options {chosen}")
                want.check(programs)
                seen.add(text)
        for program in programs:
            reads_back(program)


settled = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
five_options = st.lists(options, min_size=5, max_size=5)


@pytest.mark.slow
@settings(max_examples=40, derandomize=True, **settled)
@given(toys, five_options)
def test_every_prefix_gives_the_bits_of_the_unsharded_model(toy, several):
    holds(toy, several)


@pytest.mark.exhaustive
@settings(max_examples=400, **settled)
@given(toys, five_options)
def test_the_same_on_other_toys(toy, several):
    holds(toy, several)


def late_wait(p: Program) -> None:
    (wait,) = [n for n in p.find(Kind.WAIT) if n.args[0] is p.find(Kind.FULL)[0]]
    p.move([wait], p.readers(wait.args[0])[-1].next)


def early_free(p: Program) -> None:
    free = p.find(Kind.FREE)[0]
    p.move([free], p.readers(free.args[0])[-2])


def wrong_place(p: Program) -> None:
    pack = next(n for n in p.find(Kind.PACK) if n.target is ops.pack)
    pack.args = (*pack.args[:2], [o + 1 for o in pack.args[2]], pack.args[3])


def not_divided(p: Program) -> None:
    node = p.find(Kind.ACCUMULATE)[0]
    node.args = (*node.args[:3], 1.0)


def not_added(p: Program) -> None:
    p.erase(p.find(Kind.ACCUMULATE)[0])


def early_sum(p: Program) -> None:
    p.move([p.find(Kind.GSHARD)[0]], p.find(Kind.PACK)[0])


def one_buffer(p: Program) -> None:
    for node in p.find(Kind.FULL):
        node.args = (*node.args[:2], 0)


@pytest.mark.parametrize("fault", [late_wait, early_free, wrong_place, not_divided, not_added, early_sum, one_buffer])
def test_what_the_interpreter_sees(fault):
    want = traced(Toy((Layer("bare"), Layer("mlp"))))
    programs = list(prefixes(want.programs, pipeline.PIPELINE, split=False))[-1][1]
    want.check(programs)
    fault(programs[1])
    with pytest.raises((AssertionError, StopIteration)):
        want.check(programs)
