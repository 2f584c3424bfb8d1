"""A step's predicted time and memory, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..config.hardware import KNOWN, Hardware
from ..config.plans import Plan
from ..config.units import Unit
from ..pipeline import Stage
from .memory_model import Ledger
from .pipeline_schedule import Span


@dataclass(frozen=True)
class Line:
    """One line of a listing, with its time and memory."""

    name: str
    """Name of the FX node."""
    text: str
    """The line's text."""
    gutter: str
    """The full line of the listing, with its columns."""
    unit: str
    """Path of its unit, ``""`` for the model's own computation."""
    lane: str
    """``"C"``, ``"G"``, ``"R"``, ``"O"``, ``"T"``, ``"A"`` or ``"H"`` (`Lane`)."""
    queue: str
    """The lane that a wait waits for; else as ``lane``."""
    kind: str
    """``"matrix"``, ``"other"``, ``"sharding"``, ``"collective"`` or ``"wait"``."""
    start: float
    """Seconds from the start of the step."""
    end: float
    exposed: float
    """Seconds that compute waits here."""
    why: str
    """What limits its time, or why compute waits."""
    live: int
    """Total bytes on this rank while it runs."""
    after: int
    """Total bytes on this rank after it."""
    flops: int
    source: str
    """Its line in the model's code: file, line number, code."""


@dataclass(frozen=True)
class View:
    """One program of the step."""

    phase: str
    stages: tuple[Stage, ...]
    """Listings after every pass."""
    lines: tuple[Line, ...]
    """Lines with times as if each program of the step ran once, one after another."""
    units: tuple[Unit, ...]
    runs: int = 1
    """Executions in a step."""

    @property
    def seconds(self) -> float:
        """Seconds of one execution."""
        return max((x.end for x in self.lines), default=0.0) - min((x.start for x in self.lines), default=0.0)


@dataclass(frozen=True)
class Exposed:
    """A wait with exposed communication."""

    phase: str
    line: str
    unit: str
    seconds: float
    """Seconds over all executions of the program."""
    why: str


@dataclass(frozen=True)
class Suggestion:
    """A change that pays off in the simulation."""

    text: str
    step: float
    """Seconds of the step with it."""
    peak: int
    """Peak bytes with it."""


@dataclass(frozen=True)
class PipelineRank:
    """What one rank of each pipeline does in a step."""

    stages: tuple[int, ...]
    computing: float
    """Seconds in which its programs run, their exposed collectives included."""
    bubble: float
    """Share of the schedule's time in which none of them runs."""
    peak: int
    """Peak bytes."""
    in_flight: int
    """Most microbatches of a stage whose activations it holds."""
    waiting: int
    """Most microbatches whose weight parts wait."""


@dataclass(frozen=True)
class Pipeline:
    """A simulated schedule of a pipeline (`mfsdp.cost_model.pipeline_schedule`)."""

    schedule: str
    seconds: float
    """Seconds until the last rank has computed its gradients."""
    ranks: tuple[PipelineRank, ...]
    spans: tuple[Span, ...]
    """Actions and messages of all ranks."""
    shown: int
    """The rank with the highest peak: the other fields of the report are of it."""
    sending: float
    """Seconds of all messages that this rank sends."""


@dataclass
class StepData:
    """The results of `mfsdp.explain`: one field for each number that reports, charts and suggestions read."""

    name: str
    world: int
    """Ranks whose losses are averaged."""
    mesh_shape: tuple[int, ...]
    """Mesh of these ranks."""
    machine: Hardware
    options: dict[str, Any]
    views: list[View]
    ledger: Ledger
    optimizer: float
    """Seconds of the optimizer."""
    step: float
    """Seconds of a step with all its microbatches."""
    compute: float
    """Seconds of kernels, including the optimizer's."""
    tokens: int
    """Tokens per rank and step; 0 if the inputs are not token ids."""
    flops: int
    """Floating-point operations of the model per rank and step: three times forward's."""
    warnings: list[str] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Changes to the model's graph before the passes, and failed attempts at them."""
    beside: dict[str, int] = field(default_factory=dict)
    """Tensor-parallel axes and their sizes; the ranks of ``world`` are multiplied by them."""
    measured: bool = False
    """Whether times come from a profile."""
    error: str = ""
    """Accuracy of such estimates against measured steps."""
    plan: Plan | None = None
    """Plan that the programs follow."""
    schedule: str = ""
    """Text that describes the schedule of several microbatches; ``""`` for one."""

    bubble: float = 0.0
    """Seconds of the pipeline bubble: a stage waits for its first microbatch, the first stage for its last."""
    stages: list[int] = field(default_factory=list)
    """Peak bytes of each rank of a pipeline; under 1F1B the first holds activations of the most microbatches."""
    pipeline: Pipeline | None = None
    """The schedule of all stages, if one was asked for."""
    price: float = 0.0
    """Price of a rank per hour; 0: not known."""
    matrices: tuple[str, str] = ("", "")
    """A line on a step of whole matrices, and its listing."""

    @property
    def peak(self) -> int:
        """Peak bytes on one rank."""
        return self.ledger.peak

    @property
    def fits(self) -> bool:
        """Whether the peak is within the hardware's memory."""
        return self.peak <= self.machine.memory

    def fits_on(self, *others: Hardware) -> dict[str, bool]:
        """Returns whether this step, on as many ranks, fits in other hardware's memory, by hardware name. By default it
        checks all of `KNOWN`. It assumes the same fixed memory (`Hardware.fixed`) there.
        """
        return {machine.name: self.peak <= machine.memory for machine in others or KNOWN.values()}

    @property
    def communicators(self) -> int:
        """Number of mfsdp's own process groups that the units use: two per axis of more than one rank."""
        return len({group for view in self.views for unit in view.units for group in unit.spec.groups if group})

    @property
    def uncounted(self) -> str:
        """Text that lists CUDA memory missing in the ledger; ``""`` on other hardware. Figures: NVIDIA/nccl#864 (1.6 GB
        for one communicator, 6 GB for three) and #964 (544 to 688 MB each), both reported in 2023; ATen's
        cuda/CublasHandlePool.cpp.
        """
        if not self.machine.cuda:
            return ""
        if self.machine.fixed:
            return "not counted: communicators that were not there yet"
        nccl = (
            f", NCCL's buffers for {self.communicators} communicators and for groups of your own (0.5 to 2 GB each "
            "were reported in NVIDIA/nccl#864 and #964)"
        )
        return (
            f"not counted: the CUDA context{nccl if self.communicators else ''}, and cuBLAS's workspaces (8 MiB for "
            "each handle and stream, 32 on Hopper and Blackwell)"
        )

    @property
    def exposed(self) -> list[Exposed]:
        """All waits with exposed time, the longest first."""
        found = [
            Exposed(view.phase, x.text + (" (outer)" if x.queue == "O" else ""), x.unit, view.runs * x.exposed, x.why)
            for view in self.views
            for x in view.lines
            if x.exposed > 0
        ]
        return sorted(found, key=lambda x: -x.seconds)

    @property
    def slowed(self) -> float:
        """Seconds that concurrent transfers add to computation."""
        return max(0.0, self.step - self.bubble - self.compute - sum(x.seconds for x in self.exposed))

    @property
    def drawn(self) -> float:
        """Seconds of the step in charts: every program once, and the optimizer."""
        return sum(view.seconds for view in self.views) + self.optimizer

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return self.world * math.prod(self.beside.values()) * max(1, len(self.stages))

    @property
    def grid(self) -> str:
        """Text of the mesh: ``[2, 64] x tp 8``."""
        number = sum(len(r.stages) for r in self.pipeline.ranks) if self.pipeline else len(self.stages)
        on = f" on {len(self.stages)}" if number > len(self.stages) else ""
        stages = [f"{number} stages{on}"] if number > 1 else []
        return " x ".join([str(list(self.mesh_shape)), *(f"{name} {n}" for name, n in self.beside.items()), *stages])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens * self.world / self.step if self.step else 0.0

    @property
    def cost(self) -> float:
        """Cost of a million tokens, in the currency of ``price``; 0 if the price or the tokens are not known."""
        return 1e6 * self.price * self.ranks / 3600 / self.tokens_per_second if self.tokens else 0.0

    @property
    def utilization(self) -> float:
        """Model FLOP/s utilization, relative to the bf16 peak (PaLM, arXiv:2204.02311)."""
        return self.flops / self.step / self.machine.peak("bf16") if self.step else 0.0

    def listing(self, phase: str, stage: str | None = None) -> str:
        """Returns the listing of a program after a pass, by default the last one.

        Raises:
            ValueError: ``phase`` or ``stage`` is unknown.
        """
        for view in self.views:
            if view.phase == phase:
                for s in view.stages if stage else view.stages[-1:]:
                    if stage in (None, s.name):
                        return s.listing
                raise ValueError(f"stage={stage!r}: choose one of {', '.join(s.name for s in view.stages)}")
        raise ValueError(f"phase={phase!r}: choose one of {', '.join(v.phase for v in self.views)}")


WHY = {
    "bandwidth": "the link is full",
    "latency": "hops take longer than bytes",
    "compute": "too little compute between launch and wait",
    "memory limit": "max_unsharded holds its launch back",
}
"""Reasons for exposed communication, as text."""


def seconds(x: float) -> str:
    return f"{x:8.2f} s " if x >= 1 else f"{x * 1e3:8.2f} ms" if x >= 1e-3 else f"{x * 1e6:8.2f} us"
