"""Every prefix of the pipeline gives the bits of the unsharded model, on random toys, strategies and options."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from torch import nn
from torch._prims import rng_prims
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler.tracing import Programs
from mfsdp.config.block_grid import decode, encode
from mfsdp.config.units import Unit
from mfsdp.ir import byte_costs, ops, printer
from mfsdp.ir.program import Program, operator
from mfsdp.ir.roles import Kind, is_kind, role
from mfsdp.ir.split_backward import split_backward
from mfsdp.ir.verifier import check
from tests.fuzz.parts import MLP, Attention, Convolution, Mixture, Scale
from tests.helpers.fp8 import Coded
from tests.helpers.simulated_ranks import SimulatedRanks, Values, packed
from tests.helpers.toys import offloaded


def coded(width: int, recipe: str) -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 1), Coded(width, width, recipe, bias=True), nn.Unflatten(0, (2, 3)))


LAYERS = {
    "linear": lambda w: nn.Linear(w, w),
    "bare": lambda w: nn.Linear(w, w, bias=False),
    "norm": nn.LayerNorm,
    "mlp": lambda w: MLP(w, 2 * w + 1),
    "attention": lambda w: Attention(w, 2),
    "convolution": lambda w: Convolution(w, 3),
    "mixture": lambda w: Mixture(w, 3),
    "scale": Scale,
    "tensorwise": lambda w: coded(w, "tensorwise"),
    "rowwise": lambda w: coded(w, "rowwise"),
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

MOST = 3
"""Microbatches of a step, at most."""

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
    away: bool = False
    """Whether what its forward saves goes to the host."""


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


seldom = st.sampled_from([False, False, True])
layers = st.builds(Layer, st.sampled_from([*LAYERS]), *[st.booleans()] * 4, seldom, seldom)
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
        "microbatches": st.sampled_from([1, 1, 3]),
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
        with offloaded(*(f"layers.{i}" for i, layer in enumerate(toy.layers) if layer.away), least=1):
            example = torch.randn(2, 3, toy.width, dtype=compute, requires_grad=True)
            self.programs: Programs = mfsdp.trace(model, (example,), units=units, **PLACES[toy.place], **more)
        forward = self.programs.forward
        self.units = forward.units
        self.names = {
            (u.name, slot.offset): slot.name if u.fqn == "(root)" else f"{u.fqn}.{slot.name}"
            for u in self.units
            for slot in u.layout.slots
        }
        self.weights = {at: model.get_parameter(name).detach() for at, name in self.names.items()}
        ranks = self.ranks()
        made = torch.Generator().manual_seed(0)
        self.batches = [
            [[torch.randn(2, 3, n, dtype=compute, generator=made) for _ in ranks.ranks] for n in (toy.width, 3)]
            for _ in range(MOST)
        ]
        """By microbatch: inputs, and gradients of the results, by rank."""
        self.twins = [self._twin(model, ranks, rank) for rank in ranks.ranks]

    def _twin(self, model: Model, ranks: SimulatedRanks, rank: int) -> Model:
        """The unsharded model with the weights that a rank gathers."""
        twin = copy.deepcopy(model)
        for at, name in self.names.items():
            old, flat = twin.get_parameter(name), ranks.full(ranks.units[at[0]], rank)
            old.data = flat[at[1] : at[1] + old.numel()].view(old.shape)
        return twin

    @cached_property
    def wanted(self) -> tuple[list[list[Values]], list[dict[str, Values]]]:
        """By microbatch: results, of forward and for its input; and by their number what a step accumulates."""
        results, gradients = [], []
        for xs, tangents in self.batches:
            results.append(([], []))
            gradients.append([])
            for twin, x, tangent in zip(self.twins, xs, tangents, strict=True):
                x = x.clone().requires_grad_()
                y = twin(x)
                y.backward(tangent)
                results[-1][0].append(y.detach())
                results[-1][1].append(x.grad)
                gradients[-1].append({n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
                twin.zero_grad()
        ranks = self.ranks()
        flat = {unit.name: [self._flat(unit, found) for found in gradients] for unit in self.units}
        return results, [
            {unit.name: ranks.reduced(unit, flat[unit.name][:n]) for unit in self.units} for n in range(1, MOST + 1)
        ]

    def _flat(self, unit: Unit, gradients: list[dict[str, torch.Tensor]]) -> Values:
        names = {at[1]: name for at, name in self.names.items() if at[0] == unit.name}
        dtype = unit.spec.precision.compute
        return [packed(unit, {at: g[name] for at, name in names.items() if name in g}, dtype) for g in gradients]

    def ranks(self) -> SimulatedRanks:
        return SimulatedRanks(self.units, self.weights)

    def step(self, programs: Sequence[Program], ranks: SimulatedRanks, number: int) -> tuple[list[Any], Any, Any]:
        """A microbatch: its results, of forward and for its input; its gradients by unit, if they are results; and the
        bytes that rank 0 has allocated after each node. A backward may have two parts.
        """
        live: list[dict[Node, int]] = [{} for _ in programs]
        forward, *parts = programs
        xs, tangents = self.batches[number]
        results, *given = ranks.run(forward, [list(xs)], live[0])
        names = [n.name for n in self.programs.backward.nodes if n.op == "placeholder"]
        known = dict(zip(names, [*given, [t.clone() for t in tangents]], strict=True))
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
        wanted, unreduced = None, {}
        for node, values in zip(forward.nodes, outputs, strict=False):
            if values is not None and is_kind(node, Kind.SHARD):
                unreduced[role(node).unit] = values
            elif values is not None:
                wanted = values
        return [results, wanted], unreduced, live

    def check(self, programs: Sequence[Program], microbatches: int = 1) -> None:
        """Results and gradients have the bits of the unsharded model, and the listing says what memory is allocated."""
        ranks, unreduced = self.ranks(), {unit.name: [] for unit in self.units}
        results, accumulated = self.wanted
        for number in range(microbatches):
            ranks.sync = number == microbatches - 1
            found, gradients, live = self.step(programs, ranks, number)
            for got, want in zip(found, results[number], strict=True):
                assert all(map(torch.equal, got, want)), "results"
            for name, values in gradients.items():
                unreduced[name].append(values)
        assert not ranks.unreduced, "left unreduced"
        for unit in self.units:
            got, want = ranks.accumulators[unit.name], accumulated[microbatches - 1][unit.name]
            got = ranks.reduced(unit, unreduced[unit.name]) if unreduced[unit.name] else got
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), f"gradients of {unit.name}: {a - b}"
        alone = any(p.calls(rng_prims.run_and_save_rng_state) for p in programs)  # its results are counted as one
        if programs[-1].reduced and not alone:  # parameters and their gradients are copies before
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


def prefixes(
    programs: Programs, table: pipeline.Table, split: bool, known: dict[Any, list[Program]]
) -> Iterator[tuple[Any, list[Program]]]:
    """The programs after each pass, with what was done to get them. The verifier checks them, where they are not known.

    Args:
        split: with the backward in two parts.
        known: programs by what was done; receives the others.
    """
    done: tuple[Any, ...] = (split,)
    if done not in known:
        known[done] = now = [p.copy() for p in programs]
        if split and (parts := split_backward(programs.backward)) is not None:
            now[1:] = [parts.input, parts.weight]
    yield done, known[done]
    for name, function in table:
        before, done = known[done], (*done, (name, repr(getattr(function, "keywords", ""))))
        if done not in known:
            known[done] = [p.copy() for p in before]
            for p in known[done]:
                pipeline.rewrite(p, ((name, function),))
                check(p)
        yield done, known[done]


def holds(toy: Toy, several: list[dict[str, Any]]) -> None:
    """What must hold after every pass, under several options."""
    want, known, seen = traced(toy), {}, {}
    for chosen in several:
        knobs = {name: value for name, value in chosen.items() if name not in ("split_backward", "microbatches")}
        for done, programs in prefixes(want.programs, pipeline.table(**knobs), chosen["split_backward"], known):
            microbatches = chosen["microbatches"] if programs[-1].reduced else 1  # before, nothing is left unreduced
            text = "\n".join(f"{p.slots}\n{p.graph}" for p in programs) if seen.get(done, 0) < microbatches else done
            if max(seen.get(done, 0), seen.get(text, 0)) < microbatches:
                note(f"after {done[-1]}, options {chosen}")
                want.check(programs, microbatches)
            seen[done] = seen[text] = max(microbatches, seen.get(done, 0))
        for program in programs:
            reads_back(program)


settled = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
several_options, some_options = (st.lists(options, min_size=n, max_size=n) for n in (34, 12))
DEFAULT = {
    "prefetch": 1, "reduce_lag": 1, "max_unsharded": None, "pool": True, "keep_cast": True, "quantize": True,
    "check_finite": False, "split_backward": False, "microbatches": 3,
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=6, derandomize=True, **settled)
@given(toys, some_options)
@example(Toy((Layer("scale", residual=True), Layer("mlp")), "hfsdp", "bf16 compute"), [DEFAULT])
@example(Toy((Layer("norm", residual=True, twice=True, away=True),)), [{**DEFAULT, "check_finite": True}])
@example(Toy((Layer("linear", away=True), Layer("mlp"))), [{**DEFAULT, "check_finite": True}])
def test_every_prefix_gives_the_bits_of_the_unsharded_model(toy, several):
    holds(toy, several)


@pytest.mark.exhaustive
@settings(max_examples=200, **settled)
@given(toys, several_options)
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


def late_hold(p: Program) -> None:
    hold = p.find(Kind.HOLD)[0]
    p.move([hold], p.find(Kind.ACCUMULATE)[0])


def not_held(p: Program) -> None:
    p.erase(p.find(Kind.HOLD)[0])


def held_early(p: Program) -> None:
    p.move([p.find(Kind.HOLD)[0]], p.find(Kind.PACK)[0])


def late_reload(p: Program) -> None:
    (wait,) = [n for n in p.find(Kind.WAIT) if n.args[0] is p.find(Kind.RELOAD)[0]]
    p.move([wait], p.readers(wait.args[0])[-1].next)


def other_copy(p: Program) -> None:
    a, b, *_ = p.find(Kind.RELOAD)
    a.args, b.args = b.args, a.args


def late_maxima(p: Program) -> None:
    (wait,) = [n for n in p.find(Kind.WAIT) if n.args[0] is p.find(Kind.MAXIMA)[0]]
    p.move([wait], p.find(Kind.FULL)[0])


def other_blocks(p: Program) -> None:
    maxima = p.find(Kind.MAXIMA)[0]
    (grid,) = decode(maxima.args[1])
    maxima.args = (maxima.args[0], encode((replace(grid, offset=grid.offset + 1),)), maxima.args[2])


def without_scale(p: Program) -> None:
    for spread in p.calls(ops.spread):
        spread.args = (spread.args[0], [], encode(()), spread.args[3])


def late_codes(p: Program) -> None:
    (wait,) = [n for n in p.find(Kind.WAIT) if n.args[0] is p.find(Kind.CODES)[0]]
    p.move([wait], p.readers(wait.args[0])[-1].next)


FAULTS: dict[Any, tuple[tuple[Any, ...], Toy, int]] = {
    "one microbatch": (
        (late_wait, early_free, wrong_place, not_divided, not_added, early_sum, one_buffer),
        Toy((Layer("bare"), Layer("mlp"))),
        1,
    ),
    "no_sync": ((late_hold, not_held, held_early), Toy((Layer("bare"),), "optim"), 2),
    "host": ((late_reload, other_copy), Toy((Layer("mlp", away=True), Layer("mlp", away=True))), 1),
    "FP8": ((late_maxima, other_blocks, without_scale), Toy((Layer("rowwise"),), precision="bf16 compute"), 1),
    "persistent FP8": ((late_codes,), Toy((Layer("rowwise"),), "optim", "bf16 compute"), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, fault", [(kind, fault) for kind, (faults, *_) in FAULTS.items() for fault in faults])
def test_what_the_interpreter_sees(kind, fault):
    _, toy, microbatches = FAULTS[kind]
    want = traced(toy)
    programs = list(prefixes(want.programs, pipeline.PIPELINE, False, {}))[-1][1]
    want.check(programs, microbatches)
    fault(programs[1])
    with pytest.raises((AssertionError, StopIteration)):
        want.check(programs, microbatches)
