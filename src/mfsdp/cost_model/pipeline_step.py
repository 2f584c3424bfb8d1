"""Estimates a step of a pipeline: its stages' programs, run by one of torch's schedules on all ranks.

As `mfsdp.PipelineStage` runs them: each forward and backward gathers what it needs (persistent parameters once per
step), and the last backward or weight part of a stage reduces; the others add their gradients to unreduced ones.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.fx import Node

from ..buffers.flat_buffer import FlatBuffer
from ..config.hardware import Hardware, Transfer, message
from ..ir import ops
from ..ir.byte_costs import nbytes, saved, size
from ..ir.program import Program, storage_of
from ..ir.roles import Kind, is_kind
from .estimate import Part, Schedule, lines_of
from .memory_model import Entry, Ledger
from .op_cost import OpTime
from .pipeline_schedule import Action, Order, Span, orders, simulate
from .step_data import Pipeline, PipelineRank, StepData, View
from .timeline import simulate as simulate_program

TITLES = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}
"""The program of each kind of action."""

SLOTS = {"p": "gathered parameters", "g": "gradient buckets"}
"""Ledger entries of static buffers, by the first letter of their names. All stages of a rank share these buffers."""

COMING = (
    "gradients", "activations saved by forward", "activations in flight", "temporaries", "gathered ahead", "inputs",
    "fixed", *SLOTS.values(),
)  # fmt: skip
"""Ledger entries that are not there throughout, or not of one stage."""


class Boundary(NamedTuple):
    """Bytes of a microbatch between stages."""

    inputs: int
    outputs: int
    gradients: int
    """Of the outputs."""
    kept: int
    """Of outputs that backward does not read, but torch's stage keeps until then."""

    @classmethod
    def of(cls, forward: Program, inputs: int) -> Boundary:
        """Returns those of a forward at capture."""
        results = forward.results()
        given = [r for r in results[: forward.returned] if isinstance(r, Node)]
        read = {storage_of(r) for r in results[forward.returned :] if isinstance(r, Node)}
        values = [(node, node.meta["val"]) for node in given]
        return cls(
            inputs,
            sum(nbytes(value) for _, value in values),
            sum(nbytes(value) for _, value in values if value.is_floating_point()),
            sum(nbytes(value) for node, value in values if storage_of(node) not in read),
        )


@dataclass(frozen=True)
class Stage:
    """What a stage costs. Actions have variants: ``"F first"`` refreshes persistent parameters, ``"B last"`` or ``"W
    last"`` reduces gradients.
    """

    alone: StepData
    """A step of this stage without the others."""
    parts: Mapping[str, Part]
    """Programs by variant."""
    seconds: Mapping[str, float]
    """Seconds by variant."""
    boundary: Boundary
    read: Mapping[str, tuple[int, int]]
    """Bytes that backward, or each of its parts, gets from forward and from the input part, and of outputs' gradients.
    """
    unreduced: int
    """Bytes of unreduced gradients, from the step's first gradients to the last."""
    accumulators: int
    """Bytes of accumulators: from the last gradients to the end of the step, or from the first without unreduced ones.
    """

    @property
    def splits(self) -> bool:
        return "W" in self.parts

    @property
    def slots(self) -> dict[str, int]:
        """Bytes of static buffers, by name."""
        return most(part.program.slots for part in self.parts.values())

    @property
    def lasting(self) -> int:
        """Bytes held throughout the step, without inputs and static buffers."""
        beside = self.boundary.inputs + self.alone.machine.fixed + sum(self.slots.values()) + self.accumulators
        return self.alone.ledger.lasting - beside

    def top(self, kind: str) -> int:
        """Returns the most bytes while a program runs, besides those held throughout."""
        live = self.alone.ledger.live[self._title(kind)]
        return max(live.values(), default=self.alone.ledger.lasting) - self.alone.ledger.lasting

    def _title(self, kind: str) -> str:
        return self.parts[kind].program.title


def most(slots: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the largest number under each name."""
    found: dict[str, int] = {}
    for some in slots:
        found |= {name: max(n, found.get(name, 0)) for name, n in some.items()}
    return found


def stage_of(
    alone: StepData, parts: Sequence[Part], buffers: Sequence[FlatBuffer], boundary: Boundary, rounds: int
) -> Stage:
    """Returns what a stage costs.

    Args:
        alone: the estimate of a step of this stage alone.
        parts: its programs: forward, and backward or its two parts.
        buffers: its flat buffers.
        boundary: bytes that it gets and gives.
        rounds: microbatches of a step.
    """
    by_title = {part.program.title: part for part in parts}
    last = "W" if "backward weight" in by_title else "B"
    found: dict[str, Part] = {}
    for kind, title in TITLES.items():
        if (part := by_title.get(title)) is not None:
            late, early = _variants(part, alone.machine, held=rounds > 1)
            if kind == "F":
                refreshes = any(map(_once, part.times))
                found |= {"F first": early, "F": late} if refreshes else {"F": early}
            elif kind == last:
                found |= {kind: late, f"{kind} last": early}
            else:
                found[kind] = early
    seconds = {
        name: max((span.end for span in simulate_program(part.program, part.times)), default=0.0)
        for name, part in found.items()
    }
    trained = [b for b in buffers if b.trainable] if rounds > 1 else []
    return Stage(
        alone, found, seconds, boundary,
        read={kind: _read(found[kind].program) for kind in "BIW" if kind in found},
        unreduced=sum(b.layout.full_numel * b.precision.grad.itemsize for b in trained if b.spec.ranks > 1),
        accumulators=sum(b.layout.shard_numel * b.precision.grad.itemsize for b in trained),
    )  # fmt: skip


def _read(program: Program) -> tuple[int, int]:
    held = saved(program)[0]
    tangents = sum(n for node, n in held.items() if "tangents" in node.name)
    return sum(held.values()) - tangents, tangents


def _variants(part: Part, machine: Hardware, held: bool) -> tuple[Part, Part]:
    """Returns a program that neither refreshes parameters nor reduces gradients, and one that does both.

    Args:
        held: whether gradients are added to unreduced ones, at three times their bytes (two reads and a write).
    """
    rate = machine.bandwidth * machine.reached_bandwidth
    full: dict[Node, OpTime] = {}
    less: dict[Node, OpTime] = {}
    free = Transfer(0.0, 0.0)
    skipped = {node for node in part.times if _once(node)}
    if any(node.target in (ops.reduce_scatter, ops.all_reduce) for node in skipped):
        skipped |= {node for node in part.times if node.target is ops.accumulate}
    for node, time in part.times.items():
        adds = held and node.target is ops.hold
        time = replace(time, seconds=3 * nbytes(node.args[1].meta["val"]) / rate) if adds else time  # type: ignore[union-attr]
        full[node] = less[node] = time
        if node in skipped:
            less[node] = replace(time, seconds=0.0, transfer=None if time.transfer is None else free)
        elif node.target is ops.wait and skipped & {node.args[0], *node.args[0].users}:  # type: ignore[misc, union-attr]
            less[node] = replace(time, seconds=0.0)
    return replace(part, times=less), replace(part, times=full)


def _once(node: Node) -> bool:
    """Whether a line runs once per step: refreshes and reductions."""
    once = is_kind(node, Kind.REFRESH, Kind.CODES, Kind.GSHARD, Kind.GOUTER, Kind.ALL_REDUCE)
    return once and node.target is not ops.wait


def pipelined(stages: Sequence[Stage], schedule: Schedule, name: str) -> StepData:
    """Returns the estimate of a pipeline's step.

    Args:
        stages: all of them, in order; equal ones may be one object.
        schedule: with the schedule's name, as ``schedule.schedule``.
        name: of the model.

    Raises:
        ValueError: torch refuses these numbers of stages and microbatches.
    """
    assert schedule.schedule is not None
    order = orders(schedule.schedule, len(stages), schedule.stages_per_rank, schedule.microbatches)
    variants = {action: variant for mine in order for action, variant in _variants_of(mine, stages)}
    seconds = {action: sum(stages[action.stage].seconds[v] for v in variant) for action, variant in variants.items()}
    spans = simulate(order, seconds, _moving(order, stages))
    memories = [_Memory(mine, stages, schedule.microbatches) for mine in order]
    shown = max(range(len(order)), key=lambda r: memories[r].peak)
    time = max(span.end for span in spans if not span.is_message)
    ranks = tuple(_rank(r, memory, spans, time) for r, memory in enumerate(memories))
    run = Pipeline(
        schedule.schedule, time, ranks, tuple(spans), shown,
        sum(s.end - s.start for s in spans if s.is_message and s.rank == shown),
    )  # fmt: skip
    optimizer = max(sum(stages[s].alone.optimizer for s in rank.stages) for rank in ranks)
    mine = [stages[s] for s in ranks[shown].stages]
    views, compute, phase, line = _views(ranks[shown], mine, variants, memories[shown])
    return replace(
        stages[0].alone,
        name=name, views=views, ledger=memories[shown].ledger(mine, phase, line), optimizer=optimizer,
        step=time + optimizer, bubble=time - ranks[shown].computing, stages=[m.peak for m in memories],
        compute=compute + optimizer,
        flops=sum(x.alone.flops for x in stages) // len(ranks), schedule=str(schedule), pipeline=run,
        warnings=list(_warnings(memories, stages[0].alone.machine)),
    )  # fmt: skip


def _warnings(memories: Sequence[_Memory], machine: Hardware) -> Iterator[str]:
    for rank, memory in enumerate(memories):
        if memory.peak > machine.memory:
            yield (
                f"rank {rank} of the pipeline: the peak of {size(memory.peak)} is more than the "
                f"{size(machine.memory)} of {machine.name}"
            )


def _rank(rank: int, memory: _Memory, spans: Sequence[Span], seconds: float) -> PipelineRank:
    computing = sum(s.end - s.start for s in spans if s.rank == rank and not s.is_message)
    bubble = 1 - computing / seconds if seconds else 0.0
    return PipelineRank(memory.stages, computing, bubble, memory.peak, memory.in_flight, memory.waiting)


def _variants_of(order: Order, stages: Sequence[Stage]) -> Iterator[tuple[Action, tuple[str, ...]]]:
    """Yields a rank's actions with the variants of programs that each runs. Of an action whose program does not exist
    there is none: a backward that is not split computes all in its input part.
    """
    run = [action for verb, action in order if verb == "run"]
    last: dict[int, Action] = {}
    for action in run:
        if action.kind == "B" or action.kind == ("W" if stages[action.stage].splits else "I"):
            last[action.stage] = action
    first = {a.stage: a for a in reversed(run) if a.kind == "F"}
    for action in run:
        kind, stage = action.kind, action.stage
        late = " last" if last[stage] is action else ""
        if kind == "F":
            refreshes = first[stage] is action and "F first" in stages[stage].parts
            yield action, ("F first" if refreshes else "F",)
        elif stages[stage].splits:
            yield action, {"I": ("I",), "W": (f"W{late}",), "B": ("I", f"W{late}")}[kind]
        else:
            yield action, () if kind == "W" else (f"B{late}",)


def _moving(order: Sequence[Order], stages: Sequence[Stage]) -> dict[tuple[str, int], float]:
    """Returns the seconds of messages by kind and sending stage."""
    home = {action.stage: rank for rank, mine in enumerate(order) for verb, action in mine if verb == "run"}
    machine, world = stages[0].alone.machine, stages[0].alone.world
    apart = world * math.prod(stages[0].alone.beside.values())
    found = {}
    for stage in range(len(stages) - 1):
        here, there = home[stage] * apart, home[stage + 1] * apart
        across = any((here + i) // machine.linked != (there + i) // machine.linked for i in range(apart))
        sent = stages[stage].boundary
        for key, n in ((("F", stage), sent.outputs), (("B", stage + 1), sent.gradients)):
            cost = message(n, machine, across)
            found[key] = cost.seconds + cost.restart
    return found


class _Memory:
    """Bytes of one rank over its actions."""

    def __init__(self, order: Order, stages: Sequence[Stage], microbatches: int) -> None:
        run = [action for verb, action in order if verb == "run"]
        self.stages = tuple(sorted({action.stage for action in run}))
        mine = [stages[s] for s in self.stages]
        self.buffers = sum(
            microbatches * (stages[s].boundary.inputs + (stages[s].boundary.gradients if s < len(stages) - 1 else 0))
            for s in self.stages
        )  # torch allocates what a stage receives, for every microbatch
        self.slots = most(x.slots for x in mine)
        self.fixed = mine[0].alone.machine.fixed
        self.lasting = sum(x.lasting for x in mine) + self.buffers + sum(self.slots.values()) + self.fixed
        at_step = sum(x.accumulators + x.alone.ledger.at_step - x.alone.ledger.lasting for x in mine)
        self.peak, self.at = self.lasting + at_step, ("optimizer", -1)
        self.held = Counter(gradients=sum(x.accumulators for x in mine))
        """At the peak, besides what lasts and what the program of the peak holds."""
        for program, s, held in _held(order, stages, microbatches):
            nbytes = self.lasting + held.total() + stages[s].top(program)
            if nbytes > self.peak:
                self.peak, self.at, self.held = nbytes, (program, s), held
        self.in_flight = max(_running(run, s, "F", "BI") for s in self.stages)
        split = [action for action in run if stages[action.stage].splits]
        self.waiting = _running(split, None, "I", "W")

    @property
    def before(self) -> int:
        """Bytes at the peak besides those that last, before its program."""
        return self.held.total()

    def ledger(self, stages: Sequence[Stage], phase: str, line: str) -> Ledger:
        """Returns the account of its peak."""
        summed: dict[str, Entry] = {}
        for e in (e for stage in stages for e in stage.alone.ledger.entries if e.name not in COMING):
            so_far = summed[e.name].nbytes if e.name in summed else 0
            summed[e.name] = Entry(e.name, so_far + e.nbytes, e.what)
        rest = self.peak - self.lasting - self.before
        slots = {kind: [name for name in self.slots if name.startswith(kind)] for kind in SLOTS}
        coming = [
            *(
                Entry(SLOTS[kind], sum(self.slots[name] for name in names), "static buffers " + " ".join(names))
                for kind, names in slots.items()
            ),
            Entry("inputs", self.buffers, "of all microbatches: the batch, or what a stage receives"),
            Entry("fixed", self.fixed, "context, communicators, libraries: as measured"),
            Entry("gradients", self.held["gradients"], "accumulators, until zero_grad"),
            Entry("unreduced gradients", self.held["unreduced"], "of the step's microbatches, until its last backward"),
            Entry("activations in flight", self.held["activations"], "of other microbatches, and of weight parts"),
            Entry("temporaries", rest, "what runs at the peak holds, saved ones included"),
        ]
        first = stages[0].alone.ledger
        return Ledger(
            tuple(e for e in [*summed.values(), *coming] if e.nbytes), self.peak, phase, line,
            sum(x.alone.ledger.padding for x in stages), {}, {}, self.lasting,
            on_host=first.on_host, first=False,
        )  # fmt: skip


def _running(run: Sequence[Action], stage: int | None, begin: str, end: str) -> int:
    """Returns the most microbatches between two kinds of actions, of one stage or all."""
    steps = [(a.kind in begin) - (a.kind in end) for a in run if stage in (None, a.stage)]
    return max(itertools.accumulate(steps), default=0)


def _held(order: Order, stages: Sequence[Stage], microbatches: int) -> Iterator[tuple[str, int, Counter[str]]]:
    """Yields a rank's programs, by name and stage, and what it holds besides their own memory: what forward has saved,
    until backward; between a backward's parts, what the weight part reads; what is being sent; gradients of the step.
    """
    held, done = Counter[str](), Counter[int]()
    for program, s, taken, left in _activations(order, stages):
        stage, gives = stages[s], program in ("B", "W")
        done[s] += gives
        first, last = gives and done[s] == 1, gives and done[s] == microbatches
        held["activations"] -= taken
        held["unreduced"] += first * stage.unreduced
        held["gradients"] += (last if stage.unreduced else first) * stage.accumulators
        if program:
            yield program, s, held.copy()
        held["activations"] += left
        held["unreduced"] -= last * stage.unreduced


def _activations(order: Order, stages: Sequence[Stage]) -> Iterator[tuple[str, int, int, int]]:
    """Yields a rank's programs, by name and stage, with the bytes that each takes over at its beginning, and those that
    it leaves at its end less those that are freed then; with the name ``""`` also what the end of a send frees.
    """
    local = {action.stage for verb, action in order if verb == "run"}
    sent: set[Action] = set()
    gone: set[tuple[int, int]] = set()
    for verb, action in order:
        kind, s, microbatch = action
        stage, last = stages[s], s == len(stages) - 1
        if verb == "send":
            sent.add(action)
            if kind == "B":
                yield "", s, 0, stages[s - 1].boundary.gradients
        elif verb == "wait" and action in sent:
            sent.remove(action)
            if kind == "B" or (s, microbatch) in gone:
                yield "", s, 0, -(stages[s - 1].boundary.gradients if kind == "B" else stage.boundary.outputs)
        if verb != "run":
            continue
        output = stage.boundary.kept if s + 1 not in local else 0  # what a stage here receives is counted already
        begin, weights = stage.read["I" if stage.splits else "B"], stage.read.get("W", (0, 0))
        received = [0 if last else tangents for _, tangents in (begin, weights)]
        if kind == "F":
            yield "F", s, 0, begin[0] + output
        elif kind != "W":
            gone.add((s, microbatch))
            freed = 0 if last else output  # torch keeps the last stage's outputs
            sends = stage.boundary.outputs if Action("F", s, microbatch) in sent else 0
            waits = sum(weights) - received[1] if kind == "I" else 0
            yield "I" if stage.splits else "B", s, begin[0] + received[0], received[0] + sends + waits - freed
        if stage.splits and kind in ("B", "W"):
            yield "W", s, sum(weights) if kind == "W" else received[1], received[1]


def _views(
    rank: PipelineRank, mine: Sequence[Stage], variants: Mapping[Action, tuple[str, ...]], memory: _Memory
) -> tuple[list[View], float, str, str]:
    """Returns the views of a rank's programs, seconds of their kernels in a step, and program and line of its peak."""
    runs = Counter((action.stage, name) for action, names in variants.items() for name in names)
    alike: dict[int, list[int]] = {}
    for stage, number in zip(mine, rank.stages, strict=True):
        alike.setdefault(id(stage), []).append(number)
    views: list[View] = []
    now = compute = 0.0
    phase, line = "optimizer", ""
    for stage in {id(stage): stage for stage in mine}.values():
        numbers = alike[id(stage)]
        others = memory.lasting + memory.before - stage.alone.ledger.lasting
        for name, part in stage.parts.items():
            count = sum(runs[number, name] for number in numbers)
            if not count:
                continue
            which = name[2:] and f"{name[2:]} "  # "F first", "W last"
            title = f"{which}{part.program.title}" + (f" of stage {numbers[0]}" if len(alike) > 1 else "")
            alone = lines_of(part, simulate_program(part.program, part.times), stage.alone.ledger, now)
            lines = tuple(replace(x, live=x.live + others, after=x.after + others) for x in alone)
            views.append(View(title, part.stages, lines, part.program.units, count))
            now += views[-1].seconds
            compute += count * sum(t.seconds for t in part.times.values())
            if phase == "optimizer" and memory.at[1] in numbers and memory.at[0] == name[0]:
                phase, line = title, max(lines, key=lambda x: x.live).name
    return views, compute, phase, line
