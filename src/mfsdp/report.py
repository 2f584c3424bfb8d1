"""What :func:`mfsdp.explain` gives: a step on the clock and in memory, as text, as tables, as files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cost import size
from .hardware import Hardware
from .ledger import Ledger
from .pipeline import Stage
from .units import Unit


@dataclass(frozen=True)
class Line:
    """One line of a listing, on the clock and in memory."""

    name: str
    """Of the value, the FX node's own."""
    text: str
    """What it does."""
    gutter: str
    """The whole line of the listing."""
    unit: str
    """Path of the unit it serves, ``""`` for the model's own computation."""
    lane: str
    """``"C"``, ``"G"``, ``"R"`` or ``"O"``."""
    kind: str
    """``"matrix"``, ``"other"``, ``"sharding"``, ``"collective"`` or ``"wait"``."""
    start: float
    """Seconds from the start of the step."""
    end: float
    exposed: float
    """Seconds that compute stands still here."""
    why: str
    """What decides how long it takes, or why compute stands still."""
    live: int
    """Bytes of everything on this rank while it runs."""
    after: int
    """The same, behind it."""
    flops: int
    source: str
    """Where the model's code says so: file, line, code."""


@dataclass(frozen=True)
class View:
    """One program of the step."""

    phase: str
    stages: tuple[Stage, ...]
    """The listing after every pass."""
    lines: tuple[Line, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Exposed:
    """A wait that compute stands still at."""

    phase: str
    line: str
    unit: str
    seconds: float
    why: str


@dataclass(frozen=True)
class Suggestion:
    """A change that the simulation says is worth it."""

    text: str
    step: float
    """Seconds."""
    peak: int
    """Bytes."""


@dataclass
class Report:
    """What :func:`explain` gives. ``print(report)`` shows it; :meth:`html` and :meth:`trace` write files."""

    name: str
    world: int
    mesh_shape: tuple[int, ...]
    machine: Hardware
    options: dict[str, Any]
    views: list[View]
    ledger: Ledger
    optimizer: float
    """Seconds of the optimizer."""
    step: float
    """Seconds of a whole step."""
    compute: float
    """Seconds that kernels take, the optimizer's too."""
    tokens: int
    """Per rank and step; 0 if the inputs are no token ids."""
    flops: int
    """Of the model per rank and step: three times forward's."""
    warnings: list[str] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    measured: bool = False
    """Whether a profile stands behind the times."""
    error: str = ""
    """How far such estimates have been from measured steps."""

    @property
    def peak(self) -> int:
        """Bytes on one rank at the worst line."""
        return self.ledger.peak

    @property
    def fits(self) -> bool:
        """Whether the peak is within the hardware's memory."""
        return self.peak <= self.machine.memory

    @property
    def exposed(self) -> list[Exposed]:
        """Every wait that costs time, the longest first."""
        found = [
            Exposed(view.phase, x.text, x.unit, x.exposed, x.why)
            for view in self.views
            for x in view.lines
            if x.exposed > 0
        ]
        return sorted(found, key=lambda x: -x.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens * self.world / self.step if self.step else 0.0

    @property
    def utilization(self) -> float:
        """Model FLOP/s utilization: the model's operations against the bf16 peak (PaLM, arXiv:2204.02311)."""
        return self.flops / self.step / self.machine.peak("bf16") if self.step else 0.0

    def __str__(self) -> str:
        return "\n".join([self.summary(), "", *(self.listing(view.phase) for view in self.views)])

    def summary(self, waits: int = 8) -> str:
        """All but the listings."""
        waited = sum(x.seconds for x in self.exposed)
        lines = [
            f"{self.name} on {self.world} ranks {list(self.mesh_shape)}, {self.machine.name}",
            "",
            f"step      {seconds(self.step)}   compute {seconds(self.compute)}, exposed communication "
            f"{seconds(waited)} ({waited / self.step:.0%})",
            *(f"{v.phase:<9} {seconds(v.lines[-1].end - v.lines[0].start)}" for v in self.views if v.lines),
            f"optimizer {seconds(self.optimizer)}",
        ]
        if self.tokens:
            lines.append(
                f"{self.tokens_per_second:,.0f} tokens/s, {self.tokens_per_second / self.world:,.0f} per rank; "
                f"model FLOP/s utilization {self.utilization:.1%}"
            )
        fits = "fits" if self.fits else "DOES NOT FIT"
        lines += ["", str(self.ledger), f"{fits} in {size(self.machine.memory)}", ""]
        if self.exposed:
            lines.append("exposed communication: the longest")
            lines += [
                f"  {seconds(x.seconds)}  {x.phase:<9} {x.line:<24} {x.unit:<24} {WHY[x.why]}"
                for x in self.exposed[:waits]
            ]
            by = {
                why: sum(x.seconds for x in self.exposed if x.why == why)
                for why in dict.fromkeys(x.why for x in self.exposed)
            }
            lines.append("  all of it: " + ", ".join(f"{seconds(s).strip()} {why}" for why, s in by.items()))
        for text in self.warnings:
            lines.append(f"warning: {text}")
        for s in self.suggestions:
            lines.append(f"suggestion: {s.text}: step {seconds(s.step).strip()} ({s.step / self.step - 1:+.0%}), "
                         f"peak {size(s.peak)}")  # fmt: skip
        lines.append(self.error)
        return "\n".join(lines).rstrip()

    def listing(self, phase: str, stage: str | None = None) -> str:
        """The listing of a program after a pass, the last one by default.

        Raises:
            ValueError: there is no such program or pass.
        """
        for view in self.views:
            if view.phase == phase:
                for s in view.stages if stage else view.stages[-1:]:
                    if stage in (None, s.name):
                        return s.listing
                raise ValueError(f"stage={stage!r}: choose one of {', '.join(s.name for s in view.stages)}")
        raise ValueError(f"phase={phase!r}: choose one of {', '.join(v.phase for v in self.views)}")

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes the page: one file that needs no network. Needs the extra ``report``."""
        from . import page

        Path(path).write_text(page.render(self), encoding="utf-8")

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated step as a Chrome trace (ui.perfetto.dev and chrome://tracing open it)."""
        from . import page

        Path(path).write_text(page.chrome(self), encoding="utf-8")


WHY = {
    "bandwidth": "the link is full",
    "latency": "hops take longer than bytes",
    "compute": "too little compute between launch and wait",
    "memory limit": "max_unsharded holds its launch back",
}
"""Why compute stands still, in words."""


def seconds(x: float) -> str:
    return f"{x:8.2f} s " if x >= 1 else f"{x * 1e3:8.2f} ms" if x >= 1e-3 else f"{x * 1e6:8.2f} us"


@dataclass
class Comparison:
    """Several reports side by side. ``print`` shows a table; :meth:`plot` draws it."""

    varied: list[str]
    values: list[dict[str, str]]
    reports: list[Report]

    @property
    def best(self) -> int | None:
        """Number of the one with the shortest step of those that fit; ``None`` if none does."""
        fitting = [i for i, r in enumerate(self.reports) if r.fits]
        return min(fitting, key=lambda i: (self.reports[i].step, self.reports[i].peak), default=None)

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    def __str__(self) -> str:
        head = [*self.varied, "step", "exposed", "tokens/s", "MFU", "peak", ""]
        rows = [head]
        for i, (values, r) in enumerate(zip(self.values, self.reports, strict=True)):
            note = "best that fits" if i == self.best else "" if r.fits else "does not fit"
            rows.append(
                [
                    *(values[name] for name in self.varied),
                    seconds(r.step).strip(),
                    seconds(sum(x.seconds for x in r.exposed)).strip(),
                    f"{r.tokens_per_second:,.0f}" if r.tokens else "-",
                    f"{r.utilization:.1%}",
                    size(r.peak),
                    note,
                ]
            )
        widths = [max(len(row[c]) for row in rows) for c in range(len(head))]
        return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws step times, exposed communication in them, and peaks (extra ``demo``: matplotlib)."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        labels = [", ".join(f"{k} {v}" if k != "hardware" else v for k, v in values.items()) for values in self.values]
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 1.2 + 0.4 * len(labels)), layout="constrained", sharey=True, width_ratios=(2, 1)
        )
        exposed = [1e3 * sum(x.seconds for x in r.exposed) for r in self.reports]
        steps = [1e3 * r.step for r in self.reports]
        left.barh(labels, [s - e for s, e in zip(steps, exposed, strict=True)], color="C0", label="compute")
        left.barh(
            labels, exposed, left=[s - e for s, e in zip(steps, exposed, strict=True)], color="C3", label="exposed"
        )
        left.set(xlabel="ms per step")
        left.invert_yaxis()
        left.legend()
        if self.best is not None:
            left.get_yticklabels()[self.best].set_fontweight("bold")
        right.barh(
            labels, [r.peak / 2**30 for r in self.reports], color=["C0" if r.fits else "C3" for r in self.reports]
        )
        right.axvline(min(r.machine.memory for r in self.reports) / 2**30, color="0.5", linestyle="--")
        right.set(xlabel="peak GiB per rank")
        figure.savefig(path, dpi=120)
        plt.close(figure)
