"""`profile`: real steps, joined to the listing of the programs that ran."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

from . import clock, listing, ops, runtime
from .cost import is_line
from .facts import Facts, seconds
from .hardware import KNOWN
from .program import Program
from .roles import role

_OPERATIONS = {
    x: x._schema.name.split("::")[1]
    for x in (ops.wait, ops.bucket, ops.pack, ops.mm, ops.hold, ops.accumulate, *ops.COLLECTIVES)
}
"""Names under which `runtime` shows them."""


@dataclass(frozen=True)
class Outlined:
    """One line of a program that has been compiled."""

    name: str
    text: str
    unit: str
    operation: str
    """What `runtime` calls it, ``""`` for the model's own computation."""
    weight: float
    """Its share of the time between two operations: an estimate."""


@dataclass(frozen=True)
class Outline:
    """A program, as far as a profile needs it."""

    model: str
    phase: str
    lines: tuple[Outlined, ...]

    @property
    def operations(self) -> list[str]:
        return [x.operation for x in self.lines if x.operation]


_compiled: deque[Outline] = deque(maxlen=256)
"""What has been compiled, the newest last."""


def remember(program: Program) -> None:
    """Keeps the outline of a program that is about to be lowered."""
    times = clock.times(program, KNOWN["h100"])
    units = {u.name: u.fqn for u in program.units}
    lines = []
    for node in program.nodes:
        if is_line(node) and node.target is not ops.free:
            r, known = role(node), times.get(node)
            unit = units[r.unit] if r is not None else ""
            weight = known.seconds if known is not None else 0.0
            lines.append(Outlined(node.name, listing.text(node), unit, _OPERATIONS.get(node.target, ""), weight))  # type: ignore[call-overload]
    _compiled.append(Outline(program.name, program.phase, tuple(lines)))


@dataclass(frozen=True)
class Measured:
    """One line, the median over steps."""

    phase: str
    line: Outlined
    seconds: float
    """Of a kernel; of a launch, what launching takes; of a wait, how long compute stood still."""


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

    Collectives, waits and what sharding adds are measured one by one; the kernels between two of them together, and
    shared by estimates. Enter when the model is warm: a step that compiles would count.

    Args:
        model: as it was compiled, or what was given to torch.compile.
        steps: how many to record; later ones run unseen.

    Raises:
        ValueError: ``steps`` is not positive.
    """

    def __init__(self, model: nn.Module, steps: int = 3):
        if steps < 1:
            raise ValueError(f"profile: steps={steps} must be at least 1")
        self.model = type(getattr(model, "_orig_mod", model)).__name__
        self.wanted = steps
        self.lines: list[Measured] = []
        """Every line of every program of a step, in order."""
        self.total = 0.0
        """Seconds of a step, the median."""
        self.optimizer = 0.0
        """Seconds behind the last program of a step."""
        self._logs: list[list[tuple[str, Any, Any]]] = []
        self._marks: list[Any] = []
        self._observing: Any = None

    def __enter__(self) -> profile:
        self._observing = runtime.observed(self._see)
        self._observing.__enter__()
        self._marks.append(_now())
        self._logs.append([])
        return self

    def __exit__(self, *error: Any) -> None:
        if self._observing is not None:
            self._observing.__exit__(*error)
            self._observing = None
        if error[0] is None:
            self._join()

    def step(self) -> bool:
        """Ends a step. Whether more are wanted."""
        if self._observing is None:
            return False
        self._marks.append(_now())
        if len(self._marks) > self.wanted:
            self._observing.__exit__(None, None, None)
            self._observing = None
            return False
        self._logs.append([])
        return True

    def _see(self, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        begun = _now()
        out = kernel(*args)
        self._logs[-1].append((kernel.__name__, begun, _now()))
        return out

    def _join(self) -> None:
        """Finds the programs in what was seen, and gives every line its time."""
        outlines = [o for o in _compiled if o.model == self.model] or list(_compiled)
        steps = []
        for (begun, ended), log in zip(pairwise(self._marks), self._logs):
            clocked = [(name, _since(begun, a), _since(begun, b)) for name, a, b in log]
            steps.append((_since(begun, ended), *_joined(clocked, outlines, _since(begun, ended))))
        if not steps:
            raise RuntimeError("mfsdp.profile: no step was seen; call step() at the end of each")
        first = steps[0][1]
        alike = [s for s in steps if [(p, x.name) for p, x, _ in s[1]] == [(p, x.name) for p, x, _ in first]]
        if not first:
            raise RuntimeError(
                "mfsdp.profile: none of the steps ran a program of this model; is it compiled with backend='mfsdp'?"
            )
        self.total = median(s[0] for s in alike)
        self.optimizer = median(s[2] for s in alike)
        self.lines = [
            Measured(phase, line, median(s[1][i][2] for s in alike)) for i, (phase, line, _) in enumerate(first)
        ]

    @property
    def exposed(self) -> float:
        """Seconds of a step that compute stood still."""
        return sum(x.seconds for x in self.lines if x.line.operation == "wait")

    def given(self, program: Program) -> dict[str, Any]:
        """What :func:`mfsdp.clock.times` takes: measured lines, or, if the program has others (Inductor's
        decompositions), what all of them take together.
        """
        mine = [x for x in self.lines if x.phase == program.phase]
        kernels = {x.line.name: x.seconds for x in mine if x.line.operation not in _ELSEWHERE}
        names = {n.name for n in program.nodes if is_line(n)}
        if kernels and len(names & kernels.keys()) >= 0.9 * len(kernels):
            return {"measured": kernels}
        return {"compute": sum(kernels.values())} if kernels else {}

    def __str__(self) -> str:
        return self._text(None)

    def against(self, report: Facts) -> str:
        """Every line as it was planned and as it was measured, in ms.

        Args:
            report: of :func:`mfsdp.explain`, of the same model.
        """
        return self._text(report)

    def _text(self, report: Facts | None) -> str:
        planned: dict[tuple[str, str], float] = {}
        for view in report.views if report is not None else ():
            for x in view.lines:
                planned[view.phase, x.name] = (
                    x.exposed if x.kind == "wait" else 0.0 if x.lane != "C" else x.end - x.start
                )
        head = f"{self.model}: step {seconds(self.total).strip()}, exposed {seconds(self.exposed).strip()}, "
        lines = [head + f"optimizer {seconds(self.optimizer).strip()}"]
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
        return "\n".join(lines)


_ELSEWHERE = ("wait", *(_OPERATIONS[x] for x in ops.COLLECTIVES))
"""Operations that are no kernels."""

Found = tuple[str, Outlined, float]


def _joined(
    log: Sequence[tuple[str, float, float]], outlines: Sequence[Outline], end: float
) -> tuple[list[Found], float]:
    """Phase, line and seconds of every line of the programs found in a log, and the seconds behind the last."""
    out: list[Found] = []
    pending: list[tuple[str, Outlined]] = []
    at = 0.0
    names = [name for name, _, _ in log]
    for start, outline in _programs(names, outlines):
        operations = iter(log[start : start + len(outline.operations)])
        for line in outline.lines:
            if not line.operation:
                pending.append((outline.phase, line))
                continue
            _, begun, ended = next(operations)
            if not pending:
                begun = at  # what lies between two operations belongs to the second
            out += _shared(pending, begun - at)
            pending = []
            out.append((outline.phase, line, ended - begun))
            at = ended
    # What follows the last operation is not told apart from the optimizer.
    out += _shared(pending, 0.0)
    return out, end - at


def _shared(lines: Sequence[tuple[str, Outlined]], passed: float) -> Iterator[Found]:
    total = sum(line.weight for _, line in lines)
    for phase, line in lines:
        yield phase, line, passed * (line.weight / total if total else 1 / len(lines))


def _programs(names: Sequence[str], outlines: Sequence[Outline]) -> list[tuple[int, Outline]]:
    """Which programs ran, and where each begins in a sequence of operations: those that leave the fewest operations
    unexplained, the newest of several.
    """
    known: dict[tuple[str, ...], tuple[int, Outline]] = {}
    for age, outline in enumerate(reversed(outlines)):
        known.setdefault(tuple(outline.operations), (age, outline))
    known.pop((), None)
    # From the end: (operations unexplained, ages of programs), and the program to begin with.
    best: list[tuple[tuple[int, int], Outline | None]] = [((0, 0), None)]
    for at in range(len(names) - 1, -1, -1):
        (skipped, ages), _ = best[-1]
        choice: tuple[tuple[int, int], Outline | None] = ((skipped + 1, ages), None)
        for sequence, (age, outline) in known.items():
            if tuple(names[at : at + len(sequence)]) == sequence:
                skipped, ages = best[-len(sequence)][0]
                choice = min(choice, ((skipped, ages + age), outline), key=lambda c: c[0])
        best.append(choice)
    best.reverse()
    out, at = [], 0
    while at < len(names):
        chosen = best[at][1]
        if chosen is not None:
            out.append((at, chosen))
        at += len(chosen.operations) if chosen is not None else 1
    return out


def _now() -> Any:
    """A moment: of the processor, or of the accelerator's current stream."""
    if not torch.accelerator.is_available():
        return time.perf_counter()
    event = torch.Event(device=torch.accelerator.current_accelerator(), enable_timing=True)
    event.record()
    return event


def _since(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended) / 1e3)
