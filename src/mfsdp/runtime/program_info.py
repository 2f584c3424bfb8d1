"""What the execution of a compiled program has to know of it: plain values, which the compile cache keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .static_buffers import Rooms
from .step_prefetch import First
from .user_buffers import UserBuffers

PATH = "\0{}\0"
"""Stands for the path of a unit in the texts that ranks compare."""


@dataclass(frozen=True)
class Outlined:
    """One line of a compiled program."""

    name: str
    text: str
    unit: str
    operation: str
    """Its name in `mfsdp.runtime`; ``""`` for the model's own computation."""
    weight: float
    """Its share of the time between two operations, by estimate."""


@dataclass(frozen=True)
class Outline:
    """Names for errors, stacks and profiles (`mfsdp.profile`)."""

    model: str
    phase: str
    """``"forward"``, ``"backward"`` (also ``"backward input"``, ``"backward weight"``) or ``"inference"``."""
    lines: tuple[Outlined, ...]

    @property
    def name(self) -> str:
        """Name in stack traces and other profilers: ``GPT forward``."""
        return f"{self.model} {self.phase}"

    @property
    def operations(self) -> list[str]:
        """Names of sharding operations in order, with the unit's path: ``all_gather layers.3``."""
        return [f"{x.operation} {x.unit}" for x in self.lines if x.operation]

    @property
    def texts(self) -> list[str]:
        """Lines of these operations in the listing."""
        return [f"{x.name} = {x.text}" for x in self.lines if x.operation]


class Zeros(NamedTuple):
    """Zeros that stand for a tangent (Note [Optional tangents])."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class ProgramInfo:
    """Facts about a program. Arguments are named by position."""

    outline: Outline
    collectives: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """One text for each collective, by process group: every rank of the group must run the same (invariant 13). They
    are compared in every execution (Note [Desync detection])."""
    sources: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Arguments that units are gathered from, with the unit's name and its path at compile time. Equal layers may share
    a program: an execution finds the path from its arguments, and puts it in for `PATH` and into operations' names."""
    holds: Collection[int] = ()
    """Sources of units whose gradients may stay unreduced (`no_sync`); ranks compare whether they do."""
    reads: Sequence[int] = ()
    """Arguments that forward reads parameters through, sources or gathered parameters: still the modules' own?"""
    peer_groups: Sequence[str] = ()
    """All groups of its units, also those that it communicates over in another phase only."""
    static_buffers: Rooms = field(default_factory=dict)
    """Bytes of the static buffers that must exist before it begins."""
    user_buffers: UserBuffers = field(default_factory=UserBuffers)
    """Those of them that NCCL registers."""
    frames: bool = False
    """Whether its operations always run in Python frames of their names (Note [Names])."""
    exchanges: bool = False
    """Whether it has collectives of other parallelisms, and may run beside another program (Note [Interleaved
    programs]).
    """
    silent_results: int = 0
    """Number of results of a backward whose results are all ``None``; else 0."""
    caller_inputs: Sequence[int] = ()
    """Arguments of such a backward that are forward's own inputs and no parameters."""
    first_launches: Sequence[First] = ()
    """What it launches before it waits for anything: an optimizer's step may launch it ahead (Note [Step prefetch])."""
    amax_inputs: Sequence[int] = ()
    """Sources of units whose amax it reads; ranks compare whether they are due (Note [Amax])."""
    check_every: tuple[int, int] = (0, 0)
    """Steps between its checks for Inf and NaN, and between its comparisons of replicas (Note [Runtime checks])."""
    tangents: Mapping[int, Zeros] = field(default_factory=dict)
    """Arguments that may be ``None``, of which the code needs zeros."""
