"""A step on the clock and in memory, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..config.hardware import KNOWN, Hardware
from ..config.plans import Plan
from ..config.units import Unit
from ..pipeline import Stage
from .memory_model import Ledger


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
    """``"C"``, ``"G"``, ``"R"``, ``"O"``, ``"T"``, ``"A"`` or ``"H"`` (`Lane`)."""
    queue: str
    """Of a wait: the lane that compute waits for; else as ``lane``."""
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
    """On the clock as if each program of the step ran once, one behind the other."""
    units: tuple[Unit, ...]
    runs: int = 1
    """How often it runs in a step."""

    @property
    def seconds(self) -> float:
        """Of one run."""
        return max((x.end for x in self.lines), default=0.0) - min((x.start for x in self.lines), default=0.0)


@dataclass(frozen=True)
class Exposed:
    """A wait that compute stands still at."""

    phase: str
    line: str
    unit: str
    seconds: float
    """In all runs of the program."""
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
class StepData:
    """What `mfsdp.explain` has found out."""

    name: str
    world: int
    """Ranks whose losses are averaged."""
    mesh_shape: tuple[int, ...]
    """Of them."""
    machine: Hardware
    options: dict[str, Any]
    views: list[View]
    ledger: Ledger
    optimizer: float
    """Seconds of the optimizer."""
    step: float
    """Seconds of a whole step, all its microbatches."""
    compute: float
    """Seconds that kernels take, the optimizer's too."""
    tokens: int
    """Per rank and step; 0 if the inputs are no token ids."""
    flops: int
    """Of the model per rank and step: three times forward's."""
    warnings: list[str] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was done to the model's graph before any pass, or could not be."""
    beside: dict[str, int] = field(default_factory=dict)
    """Axes of tensor parallelism, and their ranks: each of ``world`` is so many."""
    measured: bool = False
    """Whether a profile stands behind the times."""
    error: str = ""
    """How far such estimates have been from measured steps."""
    plan: Plan | None = None
    """What the programs follow."""
    schedule: str = ""
    """How a step goes through several microbatches, in words; ``""`` if it has one."""

    bubble: float = 0.0
    """Seconds that a stage of a pipeline waits for its first microbatch, and the first stage for its last."""
    stages: list[int] = field(default_factory=list)
    """Peak of each stage of a pipeline, in bytes: the first keeps activations of the most microbatches."""
    price: float = 0.0
    """Of a rank and an hour; 0: not known."""

    @property
    def peak(self) -> int:
        """Bytes on one rank at the worst line."""
        return self.ledger.peak

    @property
    def fits(self) -> bool:
        """Whether the peak is within the hardware's memory."""
        return self.peak <= self.machine.memory

    def fits_on(self, *others: Hardware) -> dict[str, bool]:
        """Whether this step, on as many ranks, would fit in the memory of other hardware, by its name; of all that is
        known by default. What `fixed` takes of this one is taken to be the same there.
        """
        return {machine.name: self.peak <= machine.memory for machine in others or KNOWN.values()}

    @property
    def communicators(self) -> int:
        """Process groups of our own that the plan's units communicate over: two per axis of more than one rank."""
        return len({group for view in self.views for unit in view.units for group in unit.spec.groups if group})

    @property
    def uncounted(self) -> str:
        """What takes memory of a CUDA device and is in no ledger, in words; ``""`` on other hardware. Figures: reports
        of 2023, NVIDIA/nccl#864 (1.6 GB for one communicator, 6 GB for three) and #964 (544 to 688 MB for each); ATen's
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
        """Every wait that costs time, the longest first."""
        found = [
            Exposed(view.phase, x.text + (" (outer)" if x.queue == "O" else ""), x.unit, view.runs * x.exposed, x.why)
            for view in self.views
            for x in view.lines
            if x.exposed > 0
        ]
        return sorted(found, key=lambda x: -x.seconds)

    @property
    def slowed(self) -> float:
        """Seconds that computation takes longer because bytes move beside it."""
        return max(0.0, self.step - self.bubble - self.compute - sum(x.seconds for x in self.exposed))

    @property
    def drawn(self) -> float:
        """Seconds of the step as it is drawn: every program once, and the optimizer."""
        return sum(view.seconds for view in self.views) + self.optimizer

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.world * math.prod(self.beside.values()) * max(1, len(self.stages))

    @property
    def grid(self) -> str:
        """The mesh, for people: ``[2, 64] x tp 8``."""
        stages = [f"{len(self.stages)} stages"] if len(self.stages) > 1 else []
        return " x ".join([str(list(self.mesh_shape)), *(f"{name} {n}" for name, n in self.beside.items()), *stages])

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens * self.world / self.step if self.step else 0.0

    @property
    def cost(self) -> float:
        """Of a million tokens, in what the price is in; 0 if it or they are not known."""
        return 1e6 * self.price * self.ranks / 3600 / self.tokens_per_second if self.tokens else 0.0

    @property
    def utilization(self) -> float:
        """Model FLOP/s utilization: the model's operations against the bf16 peak (PaLM, arXiv:2204.02311)."""
        return self.flops / self.step / self.machine.peak("bf16") if self.step else 0.0

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


WHY = {
    "bandwidth": "the link is full",
    "latency": "hops take longer than bytes",
    "compute": "too little compute between launch and wait",
    "memory limit": "max_unsharded holds its launch back",
}
"""Why compute stands still, in words."""


def seconds(x: float) -> str:
    return f"{x:8.2f} s " if x >= 1 else f"{x * 1e3:8.2f} ms" if x >= 1e-3 else f"{x * 1e6:8.2f} us"
