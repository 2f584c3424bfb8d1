"""Estimates a step from its programs after all passes: combines cost model, simulation and memory ledger."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.fx import Node

from ..buffers.flat_buffer import FlatBuffer
from ..config.hardware import Hardware, host_copy
from ..config.options import Options
from ..config.own_source import ours
from ..ir import byte_costs, ops, printer
from ..ir.byte_costs import size
from ..ir.merge import merge
from ..ir.program import Program
from ..ir.roles import Lane, role
from ..ir.verifier import check
from ..pipeline import Stage
from . import fusion, op_cost, whole_matrices
from .caching_allocator import replayed
from .memory_model import OPTIMIZER_STATES, Entry, Ledger, Played, ledger, state_bytes
from .step_data import Line, StepData, View
from .timeline import Span, simulate


def estimate(
    programs: Sequence[Program],
    stages: Sequence[Sequence[Stage]],
    buffers: Sequence[FlatBuffer],
    inputs: Sequence[torch.Tensor],
    *,
    machine: Hardware,
    options: Options,
    other: int = 0,
    plain: int = 0,
    optimizer: str = "adamw",
    stepping: str = "whole",
    profile: op_cost.Measurements | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    axes: Mapping[str, int] | None = None,
    schedule: Schedule | None = None,
    parts: list[Part] | None = None,
) -> StepData:
    """Returns the predicted time and memory of a step.

    Args:
        programs: forward and backward, or inference, after all passes.
        stages: listings after the passes, for each program.
        buffers: every flat buffer of the model.
        inputs: a microbatch of one rank.
        other, plain, optimizer, stepping: as for `mfsdp.cost_model.memory_model.ledger`.
        mesh_shape: shape of a two-level mesh.
        axes: tensor-parallel axes and their sizes.
        schedule: schedule of the microbatches; one microbatch by default.
        parts: of `parts_of`, if they are known already.
    """
    schedule = schedule or Schedule()
    fused = options.lowering != "eager"
    parts = parts or parts_of(programs, stages, machine, fused, profile, schedule)
    merged = len(parts) > len(programs)
    known: Played = {}
    accounts = [
        ledger(
            [part.program for part in parts], buffers,
            inputs=sum(t.nbytes for t in inputs) * schedule.together * (2 if merged else 1),
            other=other, plain=plain, optimizer=optimizer, stepping=stepping, fused=fused,
            foreach=machine.cuda, fixed=machine.fixed, on_host=_on_host(parts),
            waiting=schedule.waiting(stage), rounds=schedule.rounds, captured=bool(options.cuda_graph), played=known,
        )
        for stage in range(schedule.stages)
    ]  # fmt: skip
    account = _reserved(accounts[0], parts, fused, known) if machine.cuda else accounts[0]
    spans = spans_of(parts)
    views, compute = _views(parts, spans, account)
    times = step_times(
        parts, spans, buffers, machine=machine, plain=plain, optimizer=optimizer, stepping=stepping, profile=profile,
        schedule=schedule,
    )  # fmt: skip
    facts = StepData(
        name=programs[0].name,
        world=programs[0].world,
        mesh_shape=mesh_shape or _mesh_shape(programs[0]),
        machine=machine,
        options={f.name: getattr(options, f.name) for f in fields(Options) if f.name not in ("dump", "upto")},
        views=views,
        ledger=account,
        optimizer=times.optimizer,
        step=times.step,
        bubble=times.bubble,
        stages=[a.peak for a in accounts],
        compute=compute + times.optimizer,
        tokens=_tokens(inputs) * schedule.microbatches,
        flops=_flops(programs) * schedule.rounds,
        beside=dict(axes or {}),
        measured=profile is not None,
        error=HONESTY,
        schedule=str(schedule),
    )
    if optimizer == "muon":
        facts.matrices = whole_matrices.summary(buffers), whole_matrices.listing(buffers)
    facts.warnings += _warnings(facts, buffers, schedule, merged)
    return facts


@dataclass(frozen=True)
class Schedule:
    """How a step runs its microbatches."""

    microbatches: int = 1
    together: int = 1
    """Microbatches in one program (`mfsdp.together`); divides `microbatches`."""
    overlapped: bool = False
    """Whether each backward but the last overlaps with the next forward (`mfsdp.overlapped`)."""
    stages: int = 1
    """Number of pipeline stages, of which the model is one."""
    slowest: float = 1.0
    """Compute time of the slowest rank relative to the others, which wait for it in every collective."""
    schedule: str | None = None
    """Schedule of the stages, one of `pipeline_schedule.SCHEDULES`; ``None``: 1F1B of equal stages, without sends."""
    stages_per_rank: int = 1

    @property
    def rounds(self) -> int:
        """Number of forwards in a step."""
        return self.microbatches // self.together

    def __str__(self) -> str:
        words = [f"{self.microbatches} microbatches"]
        words += [f"{self.together} together"] if self.together > 1 else []
        words += ["overlapped"] if self.overlapped else []
        words = words if self.microbatches > 1 else []
        if self.stages > 1 and self.schedule is None:
            words += [f"a stage of {self.stages} (1F1B without sends; schedule='1F1B' simulates them)"]
        words += [self.schedule] if self.schedule is not None else []
        words += [f"the slowest rank computes {self.slowest:g} times as long"] if self.slowest > 1 else []
        return ", ".join(words)

    def waiting(self, stage: int) -> int:
        """Returns how many rounds' activations a stage keeps besides the current round's. The first stage keeps the
        most.
        """
        return min(self.stages - stage, self.rounds) - 1


@dataclass(frozen=True)
class Part:
    """A program of the step."""

    program: Program
    stages: tuple[Stage, ...]
    times: Mapping[Node, op_cost.OpTime]
    runs: int

    @property
    def listed(self) -> bool:
        """Whether it has listings."""
        return bool(self.stages and self.stages[-1].listing)


def _reserved(account: Ledger, parts: Sequence[Part], fused: bool, known: Played) -> Ledger:
    """Returns the account with what CUDA's caching allocator reserves for it."""
    run = [part.program for part in parts]
    allocator = replayed(account.tensors, run, account.temporaries, fused, first=account.first, played=known)
    return replace(account, blocks=allocator.most, reserved=allocator.reserved)


def parts_of(
    programs: Sequence[Program],
    stages: Sequence[Sequence[Stage]],
    machine: Hardware,
    fused: bool,
    profile: op_cost.Measurements | None,
    schedule: Schedule,
) -> list[Part]:
    """Returns the programs of a step with the times of their lines. Arguments as for `estimate`."""
    parts = []
    for program, done in zip(programs, stages, strict=True):
        known: op_cost.Measured = profile.given(program) if profile is not None else {}
        times = op_cost.op_times(program, machine, fused=fused, **known)
        if schedule.slowest > 1:
            times = {node: replace(t, seconds=t.seconds * schedule.slowest) for node, t in times.items()}
        parts.append(Part(program, tuple(done), times, schedule.rounds))
    return _taking_turns(parts) if schedule.overlapped else parts


def _taking_turns(parts: list[Part]) -> list[Part]:
    """Returns the first forward, a backward merged with the next forward, and the last backward. Returns ``parts``
    unchanged for a single round, or if forward or backward has no collective of another parallelism.
    """
    if len(parts) != 2 or parts[0].runs == 1:
        return parts
    forward, backward = parts
    if not all(part.program.calls(ops.collective) for part in parts):
        return parts
    program, origins = merge(backward.program, forward.program)
    known = {**forward.times, **backward.times}
    times = {node: known[origins[node]] for node in program.nodes if origins.get(node) in known}
    check(program)
    stage = Stage("merge", printer.render(program, "merge") if forward.listed else "", 0.0)
    return [
        replace(forward, runs=1),
        Part(program, (stage,), times, forward.runs - 1),
        replace(backward, runs=1),
    ]


def _on_host(parts: Sequence[Part]) -> list[Entry]:
    """Returns the ledger's entry of activations that forward copies to the host, if there are any."""
    saved = sum(byte_costs.on_host(part.program) for part in parts if part.program.phase == "forward")
    return [Entry("activations", saved, "saved by forward, until backward")] if saved else []


def _views(parts: Sequence[Part], spans: Sequence[Sequence[Span]], account: Ledger) -> tuple[list[View], float]:
    """Returns the programs' views, one after another in time, and seconds of all kernels in a step."""
    views: list[View] = []
    now, compute = 0.0, 0.0
    for part, mine in zip(parts, spans, strict=True):
        lines = lines_of(part, mine, account, now)
        views.append(View(part.program.title, part.stages, lines, part.program.units, part.runs))
        now += views[-1].seconds
        compute += part.runs * sum(t.seconds for t in part.times.values())
    return views, compute


def spans_of(parts: Sequence[Part]) -> list[list[Span]]:
    """Returns each program's lines in time."""
    return [simulate(part.program, part.times) for part in parts]


class StepTimes(NamedTuple):
    """Seconds of a step, and of parts of it."""

    step: float
    bubble: float
    """While a pipeline fills and drains."""
    optimizer: float


def step_times(
    parts: Sequence[Part],
    spans: Sequence[Sequence[Span]],
    buffers: Sequence[FlatBuffer],
    *,
    machine: Hardware,
    plain: int,
    optimizer: str,
    stepping: str,
    profile: op_cost.Measurements | None,
    schedule: Schedule,
) -> StepTimes:
    """Returns the predicted time of a step, given its programs' `spans_of`. Other arguments as for `estimate`."""
    step, each = 0.0, list[float]()
    for part, mine in zip(parts, spans, strict=True):
        now = sum(each)
        each.append(
            max((now + span.end for span in mine), default=0.0) - min((now + span.start for span in mine), default=0.0)
        )
        step += part.runs * each[-1]
    between = step if stepping == "offloaded" else None
    seconds = getattr(profile, "optimizer", 0.0) or optimizer_seconds(buffers, plain, optimizer, machine, between)
    seconds *= schedule.slowest
    bubble = (schedule.stages - 1) * sum(each)
    return StepTimes(step + bubble + seconds, bubble, seconds)


def _tokens(inputs: Sequence[torch.Tensor]) -> int:
    """Returns the number of token ids in a microbatch, 0 if it has none."""
    return next((t.numel() for t in inputs if t.dtype in (torch.int64, torch.int32) and t.dim() > 1), 0)


def _flops(programs: Sequence[Program]) -> int:
    """Returns the model's floating-point operations for one execution of each program: three times forward's."""
    forward = sum(fusion.total_flops(p) for p in programs if p.phase != "backward")
    return forward * (3 if any(p.phase == "backward" for p in programs) else 1)


def _mesh_shape(program: Program) -> tuple[int, ...]:
    """Returns (outer, shard) from the program's units if both are more than one, else the number of ranks."""
    specs = [u.spec for u in program.units]
    two = next(((s.outer, s.world) for s in specs if s.outer > 1 and s.world > 1), None)
    return two or (program.world,)


HONESTY = (
    "These are estimates. Given measured compute times, the cost model was at most 10% off in 46 measured steps on "
    "slow links (docs/guides/explain_and_plan.md#accuracy). Its compute times were compared with a GPU once, on one "
    "H100."
)


def optimizer_seconds(
    buffers: Sequence[FlatBuffer],
    plain: int,
    optimizer: str,
    machine: Hardware,
    between: float | None,
    measured: float = 0.0,
) -> float:
    """Returns the seconds of an optimizer step: the time to read and write weights and state and to read gradients.
    Muon's matrices come in addition.

    Args:
        between: with streamed state, whose copies are added, the seconds between two optimizer steps, in which its
            first loads and last stores run; ``None`` for state on the device.
        measured: measured seconds of a step with state on the device; compute is scaled to it. 0: not known.
    """
    if optimizer == "none":
        return 0.0
    muon = optimizer == "muon"
    owned = {b: n for b, n in zip(buffers, state_bytes(buffers, optimizer), strict=True) if b.trainable}

    def alone(main: int, state: int, gradients: int) -> float:
        return (2 * (main + state) + gradients) / (machine.bandwidth * machine.reached_bandwidth)

    steps = [
        alone(b.weights.main.nbytes, n, b.layout.shard_numel * b.precision.grad.itemsize) for b, n in owned.items()
    ]
    rest = alone(plain, (OPTIMIZER_STATES[optimizer] + muon) * plain, plain)
    rest += whole_matrices.seconds(buffers, machine) if muon else 0.0
    if measured:
        slower = measured / (sum(steps) + rest)
        steps, rest = [slower * seconds for seconds in steps], slower * rest
    if between is None:
        return sum(steps) + rest
    copies = [host_copy(n, machine) for n in owned.values()]
    taken = sum(2 * copy.cpu for copy in copies)  # both copies slow down concurrent compute
    return streamed(steps, [copy.seconds for copy in copies], between) + taken + rest


def streamed(steps: Sequence[float], copies: Sequence[float], between: float) -> float:
    """Returns the seconds of an optimizer step with streamed state (Note [Streamed state]), in steady state.

    Args:
        steps: seconds of each parameter range's step alone.
        copies: seconds to copy each range's state one way.
        between: seconds from the end of one step to the start of the next.
    """
    loaded, last_load, last_store, now, duration = [0.0] * min(2, len(steps)), 0.0, 0.0, 0.0, 0.0
    turn = 0
    for _ in range(3):  # until a step ends like the one before
        start, now = now, max(now, last_store)
        for i, seconds in enumerate(steps):
            buffer, turn = turn % len(loaded), turn + 1
            now = max(now, loaded[buffer]) + seconds
            last_store = max(last_store, now) + copies[i]
            if len(steps) > 2:  # otherwise the state stays in its buffer
                loaded[buffer] = last_load = max(last_load, last_store) + copies[(i + 2) % len(steps)]
        duration, now = now - start, now + between
    return duration


def _warnings(facts: StepData, buffers: Sequence[FlatBuffer], schedule: Schedule, merged: bool) -> list[str]:
    out = []
    if not facts.fits:
        out.append(
            f"the peak of {size(facts.peak)} is more than the {size(facts.machine.memory)} of {facts.machine.name}: "
            "mfsdp.plan(memory=...) looks for the fastest step that fits"
        )
    saved = next((e.nbytes for e in facts.ledger.entries if e.name.startswith("activations")), 0)
    if not facts.fits and saved > facts.peak / 2:
        out.append(
            f"activations saved by forward are {saved / facts.peak:.0%} of the peak: checkpoint the layers "
            "(torch.utils.checkpoint), or use smaller microbatches"
        )
    for b in buffers:
        share = b.layout.pad / max(1, b.layout.full_numel)
        if share > 0.05:
            out.append(f"unit {b.unit.fqn}: {share:.0%} of its flat buffer is padding; join it with a larger unit")
            break
    if len(buffers) == 1 and facts.world > 1:
        out.append(
            "the whole model is one unit: nothing can overlap, and all parameters are gathered at once; give units="
        )
    if schedule.overlapped and not merged:
        why = "there is one at a time only" if schedule.rounds == 1 else "forward or backward exchanges nothing"
        out.append(f"overlapped: no backward runs beside a forward: {why}")
    return out


def lines_of(part: Part, spans: Sequence[Span], account: Ledger, offset: float) -> tuple[Line, ...]:
    """Returns a program's lines with their times, from ``offset`` seconds on, and their memory. Their texts are empty
    if the program has no listing.
    """
    program, times = part.program, part.times
    rows = byte_costs.lines(program) if part.listed else []
    body = dict(zip([r.node for r in rows], printer.body(program, rows), strict=True)) if rows else {}
    fqns = {u.name: u.fqn for u in program.units}
    out = []
    for span in spans:
        node, r = span.node, role(span.node)
        why = span.why
        if span.lane is not Lane.COMPUTE:
            t = times[node].transfer
            assert t is not None
            why = "latency" if t.fixed > t.moving else "bandwidth"
        out.append(
            Line(
                name=node.name,
                text=printer.text(node) if part.listed else "",
                gutter=body.get(node, ""),
                unit=fqns.get(r.unit, r.unit) if r is not None else "",
                lane=span.lane.value,
                queue=r.lane.value if r is not None else "C",
                kind=op_cost.kernel_kind(node, times.get(node)),
                start=offset + span.start,
                end=offset + span.end,
                exposed=span.exposed,
                why=why,
                live=account.live[program.title].get(node.name, 0),
                after=account.after[program.title].get(node.name, 0),
                flops=times[node].flops if node in times else 0,
                source=_source(node.meta.get("stack_trace")) if part.listed else "",
            )
        )
    return tuple(out)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.*)')


@lru_cache(4096)
def _source(trace: str | None) -> str:
    """Returns the innermost stack frame in the model's own code."""
    frames = [f for f in _FRAME.findall(trace or "") if not ours(f[0])]
    if not frames:
        return ""
    file, line, _, code = frames[-1]
    return f"{'/'.join(Path(file).parts[-2:])}:{line}  {code.strip()}"
