"""What the runtime reads and calls of a flat buffer (`buffers.flat_buffer` implements it)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, Self

import torch

from ..config.layout import Layout
from ..config.options import Precision
from ..config.units import UnitSpec

if TYPE_CHECKING:
    from .inflight import End
    from .join import OptionalUnits, SkippedUnit
    from .overlap import Overlap
    from .runtime_checks import Health
    from .step_prefetch import StepPrefetch
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


class ShardedModel(Protocol):
    """State of the outermost sharded module."""

    @property
    def name(self) -> str: ...
    @property
    def half(self) -> Sequence[str]: ...
    @property
    def syncs(self) -> Sequence[int]: ...
    @property
    def ahead(self) -> StepPrefetch: ...
    @property
    def health(self) -> Health: ...
    @property
    def loose(self) -> OptionalUnits: ...


class BufferUnit(Protocol):
    """The unit that a buffer belongs to."""

    fqn: str

    @property
    def outermost(self) -> ShardedModel: ...


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
