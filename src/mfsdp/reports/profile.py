"""`profile`: measures real steps and assigns the times to the lines of their programs' listings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from ..config.best_effort import only_tells
from ..config.hardware import KNOWN
from ..cost_model import op_cost
from ..cost_model.step_data import StepData, seconds
from ..ir import ops, printer
from ..ir.byte_costs import is_line
from ..ir.program import Program
from ..ir.roles import role
from ..runtime import instrumentation
from ..runtime.program_info import Outline, Outlined

T = TypeVar("T")

_OPERATIONS = {x: x._schema.name.split("::")[1] for x in ops.SHOWN}
"""Operations' names in `mfsdp.runtime`."""


def outline(program: Program) -> Outline:
    """Returns the outline of a program before it is lowered."""
    times = only_tells("estimates in profiles", {}, op_cost.op_times, program, KNOWN["h100"])
    units = {u.name: u.fqn for u in program.units}
    lines = []
    for node in program.nodes:
        if is_line(node) and node.target is not ops.free:
            r, known = role(node), times.get(node)
            unit = units.get(r.unit, r.unit) if r is not None else ""
            weight = known.seconds if known is not None else 0.0
            operation = _OPERATIONS.get(node.target, "")  # type: ignore[call-overload]
            text = only_tells("lines of the listing", node.name, printer.text, node)
            lines.append(Outlined(node.name, text, unit, operation, weight))
    return Outline(program.name, program.title, tuple(lines))


@dataclass(frozen=True)
class Measured:
    """One line with its median time over steps."""

    phase: str
    line: Outlined
    seconds: float
    """Seconds of a kernel; of a launch, to launch it; of a wait, that compute waited."""


class profile(AbstractContextManager["profile"]):
    """Measures real steps line by line.

    with mfsdp.profile(model, steps=3) as seen:
        for batch in loader:
            ...                      # forward, backward, optimizer
            if not seen.step():
                break
    print(seen)                                   # every line, measured
    print(seen.against(mfsdp.explain(...)))       # beside what was planned
    mfsdp.explain(..., profile=seen)              # a plan with measured times

    Collectives, waits and other sharding operations are measured one by one. The kernels between two of them are
    measured together, and their time is split by estimates. Enter it after warm-up, as a step that compiles counts.

    Args:
        model: the compiled model, or the model given to torch.compile.
        steps: number of steps to record; later ones are not recorded.

    Raises:
        ValueError: ``steps`` is not positive.
    """

    one_by_one = True
    """Disables the overlap of programs (`mfsdp.overlapped`) while measuring."""

    def __init__(self, model: nn.Module, steps: int = 3):
        if steps < 1:
            raise ValueError(f"profile: steps={steps} must be at least 1")
        self.model = type(getattr(model, "_orig_mod", model)).__name__
        self.wanted = steps
        self._begin()

    def _begin(self) -> None:
        self.lines: list[Measured] = []
        """Every line of every program of a step, in order."""
        self.total = 0.0
        """Median seconds of a step."""
        self.optimizer = 0.0
        """Seconds after the last program of a step."""
        self.outside = 0.0
        """Seconds before and between programs: data, autograd, uncompiled code."""
        self.ahead: dict[str, float] = {}
        """Seconds to launch each collective prefetched from the optimizer step (Note [Step prefetch])."""
        self._early: list[dict[str, tuple[Any, Any]]] = []
        self._logs: list[list[_Ran]] = []
        self._marks: list[Any] = []
        self._observing = ExitStack()

    def __enter__(self) -> profile:
        self._begin()
        self._observing.enter_context(instrumentation.observed(self))
        self._marks.append(_now())
        self._logs.append([])
        self._early.append({})
        return self

    def __exit__(self, *error: Any) -> None:
        self._observing.close()
        if error[0] is None:
            self._join()

    def step(self) -> bool:
        """Ends a step. Returns whether to record more."""
        if instrumentation.observer() is not self:
            return False
        self._marks.append(_now())
        if len(self._marks) > self.wanted:
            self._observing.close()
            return False
        self._logs.append([])
        self._early.append({})
        return True

    def program(self, outline: Outline, run: Callable[[list[Any]], T], args: list[Any]) -> T:
        """Runs a program and records its time (called by `mfsdp.runtime`)."""
        ran = _Ran(outline, _now(), [])
        if outline.model == self.model:
            self._logs[-1].append(ran)
        try:
            return run(args)
        finally:
            ran.ended = _now()

    def operation(self, name: str, kernel: Callable[..., T], args: tuple[object, ...]) -> T:
        """Runs an operation of a program and records its time (called by `mfsdp.runtime`)."""
        ran = self._logs[-1][-1] if self._logs[-1] and self._logs[-1][-1].ended is None else None
        if ran is None and not name.endswith(" ahead"):
            return kernel(*args)
        begun = _now()
        out = kernel(*args)
        if ran is None:
            self._early[-1][name] = begun, _now()
        else:
            ran.operations.append((begun, _now()))
        return out

    def _join(self) -> None:
        """Computes the time of every line."""
        steps = []
        for (begun, ended), log in zip(pairwise(self._marks), self._logs):
            lines = [(ran.outline.phase, line, s) for ran in log for line, s in ran.shared()]
            inside = sum(_since(ran.begun, ran.ended) for ran in log)
            total = _since(begun, ended)
            behind = _since(log[-1].ended, ended) if log else 0.0
            steps.append((total, lines, behind, total - inside - behind))
        if not steps:
            raise RuntimeError("mfsdp.profile: no step was seen; call step() at the end of each")
        first = steps[0][1]
        if not first:
            raise RuntimeError(
                f"mfsdp.profile: none of the steps ran a program of {self.model}; is it compiled with backend='mfsdp'?"
            )
        alike = [s for s in steps if [(p, x.name) for p, x, _ in s[1]] == [(p, x.name) for p, x, _ in first]]
        self.total = median(s[0] for s in alike)
        self.optimizer = median(s[2] for s in alike)
        self.outside = median(s[3] for s in alike)
        seen = [{name: _since(*times) for name, times in early.items()} for early in self._early]
        self.ahead = {name: median(s[name] for s in seen if name in s) for name in {n: None for s in seen for n in s}}
        self.lines = [
            Measured(phase, line, median(s[1][i][2] for s in alike)) for i, (phase, line, _) in enumerate(first)
        ]

    @property
    def exposed(self) -> float:
        """Seconds of a step that compute waited."""
        return sum(x.seconds for x in self.lines if x.line.operation == "wait")

    contended = True
    """Kernels were measured beside transfers, so their times include the slowdown."""

    def given(self, program: Program) -> op_cost.Measured:
        """Returns arguments of `mfsdp.cost_model.op_cost.op_times`: times of measured lines, or, if the program has
        other lines (from another lowering), the total time of all kernels.
        """
        mine = [x for x in self.lines if x.phase == program.title]
        kernels = {x.line.name: x.seconds for x in mine if x.line.operation not in _ELSEWHERE}
        names = {n.name for n in program.nodes if is_line(n)}
        if kernels and len(names & kernels.keys()) >= 0.9 * len(kernels):
            return {"measured": kernels}
        return {"compute": sum(kernels.values())} if kernels else {}

    def __str__(self) -> str:
        return self.against(None)

    def against(self, report: StepData | None) -> str:
        """Returns a table of every line's predicted and measured time, in ms.

        Args:
            report: result of `mfsdp.explain` for the same model; ``None``: measured times alone.
        """
        planned: dict[tuple[str, str], float] = {}
        for view in report.views if report is not None else ():
            for x in view.lines:
                planned[view.phase, x.name] = (
                    x.exposed if x.kind == "wait" else 0.0 if x.lane != "C" else x.end - x.start
                )
        parts = {"step": self.total, "exposed": self.exposed, "outside": self.outside, "optimizer": self.optimizer}
        lines = [f"{self.model}: " + ", ".join(f"{name} {seconds(s).strip()}" for name, s in parts.items())]
        if report is not None:
            waited = sum(x.seconds for x in report.exposed)
            lines.append(f"planned: step {seconds(report.step).strip()}, exposed {seconds(waited).strip()}")
        for phase in dict.fromkeys(x.phase for x in self.lines):
            lines += ["", f"{phase}", f"{'planned ' if report is not None else ''}measured ms"]
            for seen in (x for x in self.lines if x.phase == phase):
                known = planned.get((phase, seen.line.name))
                before = f"{1e3 * known:7.3f} " if known is not None else " " * 8
                mark = "  exposed" if seen.line.operation == "wait" and seen.seconds > 1e-4 else ""
                lines.append(f"{before if report is not None else ''}{1e3 * seen.seconds:8.3f}  {seen.line.text}{mark}")
        if self.ahead:
            lines += ["", "optimizer", "measured ms"]
            lines += [f"{1e3 * passed:8.3f}  {name} of forward" for name, passed in self.ahead.items()]
        return "\n".join(lines)


class ranges(AbstractContextManager["ranges"]):
    """Names sharding operations in other profilers' timelines: inside the ``with``, every program and each of its
    sharding operations is a range of ``torch.profiler.record_function``, and of NVTX on CUDA, with the path of its unit
    (``all_gather layers.3``).

    with torch.profiler.profile() as profile, mfsdp.ranges():
        ...                                       # steps

    Raises:
        RuntimeError: a `profile` is running.
    """

    def __init__(self) -> None:
        self._observing = ExitStack()

    def __enter__(self) -> ranges:
        self._observing.enter_context(instrumentation.observed(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._observing.close()

    def program(self, outline: Outline, run: Callable[[list[Any]], T], args: list[Any]) -> T:
        """Runs a program in a range (called by `mfsdp.runtime`)."""
        with _range(outline.name):
            return run(args)

    def operation(self, name: str, kernel: Callable[..., T], args: tuple[object, ...]) -> T:
        """Runs an operation of a program in a range (called by `mfsdp.runtime`)."""
        with _range(name):
            return kernel(*args)


@contextmanager
def _range(name: str) -> Iterator[None]:
    with ExitStack() as inside:
        only_tells("ranges of profilers", None, _enter, inside, name)
        yield


def _enter(inside: ExitStack, name: str) -> None:
    inside.enter_context(torch.profiler.record_function(name))
    if torch.cuda.is_available():
        inside.enter_context(torch.cuda.nvtx.range(name))


_ELSEWHERE = ("wait", *(_OPERATIONS[x] for x in ops.LAUNCHED))
"""Operations that are not kernels."""


@dataclass
class _Ran:
    """One execution of a program: the times of it and of its operations."""

    outline: Outline
    begun: Any
    operations: list[tuple[Any, Any]]
    ended: Any = None

    def shared(self) -> Iterator[tuple[Outlined, float]]:
        """Yields every line with its seconds: operations as measured, the time between two of them split by weight."""
        seen = iter(self.operations)
        pending: list[Outlined] = []
        at = 0.0
        for line in self.outline.lines:
            if not line.operation:
                pending.append(line)
                continue
            begun, ended = (_since(self.begun, x) for x in next(seen))
            yield from _by_weight(pending, begun - at)
            yield line, ended - (begun if pending else at)
            pending, at = [], ended
        yield from _by_weight(pending, _since(self.begun, self.ended) - at)


def _by_weight(lines: Sequence[Outlined], passed: float) -> Iterator[tuple[Outlined, float]]:
    total = sum(line.weight for line in lines)
    for line in lines:
        yield line, passed * (line.weight / total if total else 1 / len(lines))


def _now() -> float | torch.Event:
    """Returns the current time: of the processor, or an event on the accelerator's current stream."""
    if not torch.accelerator.is_available():
        return time.perf_counter()
    event = torch.Event(device=torch.accelerator.current_accelerator(), enable_timing=True)
    event.record()
    return event


def _since(begun: float | torch.Event, ended: float | torch.Event) -> float:
    if isinstance(begun, float) or isinstance(ended, float):
        return float(ended - begun)  # type: ignore[operator]
    ended.synchronize()
    return float(begun.elapsed_time(ended) / 1e3)
