"""Estimates a step of a pipeline: its stages' programs, run by one of torch's schedules on all ranks.

As `mfsdp.PipelineStage` runs them: each forward and backward gathers what it needs (persistent parameters once per
step), and the last backward or weight part of a stage reduces; the others add their gradients to unreduced ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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

COMING = ("gradients", "activations saved by forward", "activations in flight", "temporaries", "gathered ahead")
"""Ledger entries that are not there throughout."""


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
    saved: int
    """Bytes that forward saves for backward."""
    kept: int
    """Bytes of it, and of what the input part adds, that the weight part reads."""
    unreduced: int
    """Bytes of unreduced gradients."""

    @property
    def splits(self) -> bool:
        return "W" in self.parts

    @property
    def lasting(self) -> int:
        """Bytes held throughout the step, without inputs."""
        return self.alone.ledger.lasting - self.boundary.inputs - self.alone.machine.fixed

    def top(self, kind: str) -> int:
        """Returns the most bytes while a program runs, besides those held throughout."""
        live = self.alone.ledger.live[self._title(kind)]
        return max(live.values(), default=self.alone.ledger.lasting) - self.alone.ledger.lasting

    def _title(self, kind: str) -> str:
        return self.parts[kind].program.title


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
    held = [b for b in buffers if b.trainable and b.spec.ranks > 1] if rounds > 1 else []
    backward = found["I" if last == "W" else "B"].program
    weight = found["W"].program if last == "W" else None
    return Stage(
        alone, found, seconds, boundary,
        saved=sum(saved(backward)[0].values()),
        kept=sum(saved(weight)[0].values()) if weight is not None else 0,
        unreduced=sum(b.layout.full_numel * b.precision.grad.itemsize for b in held),
    )  # fmt: skip


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
    """Bytes of one rank over its actions: what forward saves, from then until backward; between a backward's parts,
    what the weight part reads.
    """

    def __init__(self, order: Order, stages: Sequence[Stage], microbatches: int) -> None:
        run = [action for verb, action in order if verb == "run"]
        self.stages = tuple(sorted({action.stage for action in run}))
        mine = {s: stages[s] for s in self.stages}
        self.buffers = sum(
            microbatches * (x.boundary.inputs + (x.boundary.gradients if s < len(stages) - 1 else 0))
            for s, x in mine.items()
        )  # torch allocates what a stage receives, for every microbatch
        self.unreduced = sum(x.unreduced for x in mine.values())
        self.lasting = sum(x.lasting for x in mine.values()) + self.buffers + self.unreduced
        self.lasting += next(iter(mine.values())).alone.machine.fixed
        self.peak = self.before = 0
        self.at = ("F", self.stages[0])
        forwards, weights, held = dict.fromkeys(self.stages, 0), 0, 0
        self.in_flight = self.waiting = 0
        for kind, s, _ in run:
            stage, last = mine[s], s == len(stages) - 1
            one = stage.saved + (0 if last else stage.boundary.kept)
            if kind == "F":
                self._meet(held, stage.top("F"), (kind, s))
                held += stage.saved + stage.boundary.kept
                forwards[s] += 1
                self.in_flight = max(self.in_flight, forwards[s])
            elif kind == "W":
                if stage.splits:
                    held -= stage.kept
                    weights -= 1
                    self._meet(held, stage.top("W"), (kind, s))
            else:
                held -= stage.saved
                program = "I" if stage.splits else "B"
                self._meet(held, stage.top(program), (program, s))
                held -= one - stage.saved
                forwards[s] -= 1
                if stage.splits and kind == "B":
                    self._meet(held, stage.top("W"), ("W", s))
                elif stage.splits:
                    held += stage.kept
                    weights += 1
                    self.waiting = max(self.waiting, weights)
        stepping = sum(x.alone.ledger.at_step - x.alone.ledger.lasting for x in mine.values())
        self.optimizer = self.lasting + stepping >= self.peak
        self.peak = max(self.peak, self.lasting + stepping)

    def _meet(self, others: int, top: int, at: tuple[str, int]) -> None:
        """``others``: bytes of activations besides those of the program that runs."""
        if self.lasting + others + top > self.peak:
            self.peak, self.before, self.at = self.lasting + others + top, others, at

    def ledger(self, stages: Sequence[Stage], phase: str, line: str) -> Ledger:
        """Returns the account of its peak."""
        summed: dict[str, Entry] = {}
        for stage in stages:
            for e in stage.alone.ledger.entries:
                if e.name not in (*COMING, "inputs", "fixed"):
                    so_far = summed[e.name].nbytes if e.name in summed else 0
                    summed[e.name] = Entry(e.name, so_far + e.nbytes, e.what)
        fixed = stages[0].alone.machine.fixed
        known = sum(e.nbytes for e in summed.values()) + self.buffers + self.unreduced + fixed
        before = 0 if self.optimizer else self.before
        coming = [
            Entry("inputs", self.buffers, "of all microbatches: the batch, or what a stage receives"),
            Entry("fixed", fixed, "context, communicators, libraries: as measured"),
            Entry("gradients", self.lasting - known, "accumulators, until zero_grad"),
            Entry("unreduced gradients", self.unreduced, "of the step's microbatches, until its last backward"),
            Entry("activations in flight", before, "of other microbatches, and of waiting weight parts"),
            Entry("temporaries", self.peak - self.lasting - before, "what runs at the peak holds, saved ones included"),
        ]
        first = stages[0].alone.ledger
        return Ledger(
            tuple(e for e in [*summed.values(), *coming] if e.nbytes), self.peak, phase, line,
            sum(x.alone.ledger.padding for x in stages), {}, {}, self.lasting,
            on_host=first.on_host, first=False,
        )  # fmt: skip


def _views(
    rank: PipelineRank, mine: Sequence[Stage], variants: Mapping[Action, tuple[str, ...]], memory: _Memory
) -> tuple[list[View], float, str, str]:
    """Returns the views of a rank's programs, seconds of their kernels in a step, and program and line of its peak."""
    runs: dict[tuple[int, str], int] = {}
    for action, names in variants.items():
        for name in names if action.stage in rank.stages else ():
            runs[action.stage, name] = runs.get((action.stage, name), 0) + 1
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
            count = sum(runs.get((number, name), 0) for number in numbers)
            if not count:
                continue
            title = f"{'first ' * name.endswith('first')}{'last ' * name.endswith('last')}{part.program.title}"
            title += f" of stage {numbers[0]}" if len(alike) > 1 else ""
            lines = [
                replace(x, live=x.live + others, after=x.after + others)
                for x in lines_of(part, simulate_program(part.program, part.times), stage.alone.ledger, now)
            ]
            view = View(title, part.stages, tuple(lines), part.program.units, count)
            views.append(view)
            now += view.seconds
            compute += count * sum(t.seconds for t in part.times.values())
            if not memory.optimizer and phase == "optimizer" and memory.at[1] in numbers and memory.at[0] == name[0]:
                phase, line = title, max(lines, key=lambda x: x.live).name
    return views, compute, phase, line
