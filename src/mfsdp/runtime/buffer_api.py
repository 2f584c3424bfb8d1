"""What the runtime reads and calls of a flat buffer (`buffers.flat_buffer` implements it) and of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from ..config.layout import Layout
from ..config.options import Precision
from ..config.plans import Plan
from ..config.units import UnitSpec
from .join import OptionalUnits, SkippedUnit
from .runtime_checks import Health
from .step_prefetch import StepPrefetch

if TYPE_CHECKING:
    from .inflight import End
    from .overlap import Overlap
    from .weight_parts import WeightParts


class BlockAmax(Protocol):
    """The amax of a buffer's blocks."""

    def due(self) -> bool: ...
    def read(self, text: str, out: torch.Tensor, beside: Iterable[Self]) -> list[End]: ...


class Fp8Payloads(Protocol):
    """A buffer's persistent FP8 payloads."""

    def read_in_full(self) -> None: ...
    def refresh(self, key: str, code: torch.Tensor, back: bool) -> tuple[torch.Tensor, list[End]]: ...


class BufferWeights(Protocol):
    """This rank's main weights, and the tensor that programs read parameters from."""

    main: torch.Tensor
    source: torch.Tensor
    stale: bool

    @property
    def history(self) -> tuple[int, int]: ...
    @property
    def exposed(self) -> bool: ...
    @property
    def maxima(self) -> BlockAmax: ...
    @property
    def lasting(self) -> Fp8Payloads: ...
    def due(self) -> bool: ...
    def unseen(self) -> bool: ...
    def refresh(self) -> list[End]: ...
    def cast(self) -> torch.Tensor: ...
    def rows(self, flat: torch.Tensor, offset: int) -> tuple[torch.Tensor, int]: ...
    def view(self, flat: torch.Tensor, slot: int) -> torch.Tensor: ...


class BufferGradients(Protocol):
    """The accumulator and the unreduced gradients."""

    sync: bool
    due: Callable[[], None] | None

    @property
    def holds(self) -> bool: ...
    @property
    def offsets(self) -> Iterable[int]: ...
    @property
    def overlap(self) -> Overlap | None: ...
    @property
    def weight_parts(self) -> WeightParts | None: ...
    def wanted(self) -> bool: ...
    def heard(self) -> bool: ...
    def hold(self, grads: torch.Tensor, offsets: Iterable[int]) -> bool: ...
    def vote(self, offsets: Iterable[int]) -> None: ...
    def accumulate(self, gshard: torch.Tensor, offsets: Iterable[int], scale: float) -> None: ...
    def left_out(self, wanted: bool) -> AbstractContextManager[None]: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class Outermost:
    """State of the outermost sharded module; its name and the names of its forward's parameters, for listings."""

    name: str
    inputs: tuple[str, ...]
    syncs: list[int] = field(default_factory=lambda: [0], compare=False)
    """How often gradients of any unit have been reduced."""
    ahead: StepPrefetch = field(default_factory=StepPrefetch, compare=False, repr=False)
    """Gathers that optimizer steps launch for its forward."""
    health: Health = field(default_factory=Health, compare=False, repr=False)
    """Findings of runtime checks."""
    half: list[str] = field(default_factory=list, compare=False)
    """Names a load that has begun and not finished."""
    loose: OptionalUnits = field(default_factory=OptionalUnits, compare=False, repr=False)
    """Units that a rank may leave out of a step."""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    """The plan that programs reading the model follow."""
    sharding: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """How it was sharded, for planning."""


class BufferUnit(Protocol):
    """The unit that a buffer belongs to."""

    fqn: str

    @property
    def outermost(self) -> Outermost: ...


class Buffer(Protocol):
    """A flat buffer."""

    layout: Layout
    precision: Precision
    spec: UnitSpec
    text: str
    trains: list[bool]
    left_out: SkippedUnit | None

    @property
    def unit(self) -> BufferUnit: ...
    @property
    def path(self) -> str: ...
    @property
    def weights(self) -> BufferWeights: ...
    @property
    def gradients(self) -> BufferGradients: ...
    @property
    def params(self) -> Sequence[torch.Tensor]: ...
    def copies(self, slot: int) -> Sequence[str]: ...
    def in_place(self) -> None: ...
