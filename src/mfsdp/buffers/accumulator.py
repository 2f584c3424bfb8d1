"""Accumulators: what gradients of a flat buffer are added up in, and the ``.grad`` that users see of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..dtensor.sharded_dtensor import ShardedDTensor
from ..runtime import buffer_registry, devices
from ..runtime.static_buffers import holders

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer
    from .tied_copies import TiedCopy


class AccumulatorMemory:
    """Allocates accumulators, [layout.shard_numel] in ``precision.grad``.

    Note [Accumulator memory]
    An accumulator exists from the first `Gradients.accumulate` of a step until ``zero_grad()``, so it takes no memory
    while the loss is computed. The first gradient is stored, not added. It becomes the accumulator without a copy if
    nothing else shares its memory: the output of a reduce-scatter or, over one rank, the bucket that the gradient
    matmuls wrote to. The program does not read it afterwards, and static buffers are never given away.

    Note [Stable addresses]
    With ``keeps`` the accumulator keeps its address from step to step, so that a step can be captured and replayed:
    dropping the last gradient saves its memory in ``spare``, and the next first gradient is stored there. New memory
    replaces it if the user still holds a former gradient, which must not be overwritten; if the accumulator was
    widened; and if gradients are dropped inside of a backward, as by optimizers that step there to save memory.
    """

    def __init__(self, buffer: FlatBuffer):
        self._of = buffer
        self.dtype = buffer.precision.grad
        self.keeps = False
        """Whether to keep memory while there is no gradient."""
        self.spare: torch.Tensor | None = None
        """The memory kept of the former accumulator."""

    def stored(self, gshard: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns ``scale * gshard`` in the accumulator's dtype, in its own memory, or in that of ``gshard`` if nothing
        else shares it.
        """
        spare = self._take_spare()
        if spare is None and self._may_become(gshard):
            return gshard if scale == 1.0 else gshard.mul_(scale)
        return scaled(self.new() if spare is None else spare, gshard, scale)

    def _may_become(self, gshard: torch.Tensor) -> bool:
        """Whether it can become the accumulator: it has its dtype and shape, and a storage of its own."""
        alike = gshard.dtype is self.dtype and gshard.shape == self._of.weights.main.shape
        plain = type(gshard) is torch.Tensor and not gshard.requires_grad and not gshard.is_inference()
        if not (alike and plain) or gshard.is_meta:
            return False
        return gshard.untyped_storage().nbytes() == gshard.nbytes and not buffer_registry.shared(gshard)

    def zeros(self) -> torch.Tensor:
        """Returns an accumulator of zeros."""
        spare = self._take_spare()
        return (self.new() if spare is None else spare).zero_()

    def _take_spare(self) -> torch.Tensor | None:
        """Returns the memory that was kept, unless the user still holds a gradient in it."""
        spare, self.spare = self.spare, None
        return None if spare is None or buffer_registry.shared(spare) else spare

    def new(self) -> torch.Tensor:
        """Allocates uninitialized memory."""
        with torch.inference_mode(False):
            return torch.empty_like(self._of.weights.main, dtype=self.dtype)


class Accumulator:
    """The sum of a flat buffer's gradients, and each parameter's ``.grad``, a view of it.

    ``flat`` is the sum, [layout.shard_numel]. It exists from the first reduction until every ``.grad`` is ``None``, in
    ``precision.grad``. A ``.grad`` is in ``precision.main``: if that is wider, ``flat`` becomes that wide until more is
    added; if it is narrower, ``.grad`` is a copy, whose changes count.
    """

    def __init__(self, buffer: FlatBuffer):
        self._of = buffer
        self.memory = AccumulatorMemory(buffer)
        self.flat: torch.Tensor | None = None
        self.slots: set[int] = set()
        """Slots that have a gradient."""
        self.dropped: set[int] = set()
        """Slots whose gradient was set to ``None`` while others of the buffer have one."""
        self.stream: torch.Stream | None = None
        """The stream of the last addition."""
        self.narrow: torch.Tensor | None = None
        """The sum in a narrower ``precision.main``, while ``.grad`` is in use."""
        self._written = _Written()
        """Whether DTensors have written to ``narrow``; versions show writes through plain tensors."""
        self._grads: dict[int, ShardedDTensor] = {}
        """Every ``.grad`` that was read, a view of ``flat`` or of ``narrow``."""
        self.tied: dict[int, TiedCopy] = {}
        """By slot, copies of tied weights, whose gradients come by another way (Note [Tied weights])."""

    @property
    def lent(self) -> bool:
        """Whether somebody holds a ``.grad`` or a view of one."""
        total = self.memory.spare if self.flat is None else self.flat
        seen = total if self.narrow is None else self.narrow
        if seen is None:
            return False
        views = self._grads.values()
        return holders(seen.untyped_storage()) > 2 + len(views) or _referred(views) > _referred({0: object()}.values())

    def like(self, other: Accumulator) -> None:
        """Copies the state of another buffer's accumulator."""
        self.slots, self.dropped = set(other.slots), set(other.dropped)
        total = other.total()
        self.flat = None if total is None else total.clone()

    def total(self) -> torch.Tensor | None:
        """Returns the sum, with changes made to ``.grad``; ``None`` without a gradient."""
        narrow = self.narrow
        if narrow is not None and self.flat is not None and self._written != _Written(narrow._version):
            self.flat.copy_(narrow)
            self._written.version, self._written.stale = narrow._version, False
        return self.flat

    def add(self, gshard: torch.Tensor, scale: float) -> None:
        """Adds ``scale * gshard``, or stores it if it is the first gradient."""
        for copy in self.tied.values():
            copy.take(gshard, scale)
        flat = self._ready()
        self._become(self.memory.stored(gshard, scale) if flat is None else flat.add_(gshard, alpha=scale))

    def arrive(self, slot: int) -> None:
        """Completes the gradient of a tied weight."""
        if slot in self.tied:
            self.tied[slot].arrive()

    def add_rows(self, slot: int, rows: torch.Tensor) -> None:
        """Adds to the gradient of one parameter."""
        flat = self._ready()
        if flat is None:
            flat = self.memory.zeros()
        devices.follow(self.stream, flat)
        self._of.weights.view(flat, slot).add_(rows)
        self._become(flat)
        self.slots.add(slot)

    def _ready(self) -> torch.Tensor | None:
        """Returns the sum in ``precision.grad``, with dropped slots zeroed, ready for more gradients."""
        dtype = self.memory.dtype
        if self.narrow is None and not self.dropped and (self.flat is None or self.flat.dtype is dtype):
            return self.flat
        total = self.total()
        if total is not None:
            for slot in self.dropped:
                self._of.weights.view(total, slot).zero_()
            self._become(total.to(dtype))
        self.dropped.clear()
        self.narrow = None
        return self.flat

    def _become(self, flat: torch.Tensor) -> None:
        if flat is not self.flat or self.narrow is not None:
            self._grads.clear()
        self.flat = flat

    def grad(self, slot: int) -> ShardedDTensor:
        """Returns the gradient of a slot that has one, in ``precision.main``, a view."""
        assert self.flat is not None
        main = self._of.precision.main
        if self.flat.dtype.itemsize < main.itemsize:
            self._become(self.flat.to(main))
        elif self.flat.dtype is not main and self.narrow is None:
            self.narrow = self.flat.to(main)
            self._written = _Written(self.narrow._version)
            self._grads.clear()
        if slot not in self._grads:
            with torch.inference_mode(False):  # the first read may be in inference mode
                self._grads[slot] = self._of.sharded_view(self.flat if self.narrow is None else self.narrow, slot)
            self._grads[slot]._mfsdp_written = self._written
        return self._grads[slot]

    def set(self, slot: int, value: torch.Tensor) -> None:
        """Copies a gradient in."""
        if value is self._grads.get(slot):
            return
        if self.flat is None:
            main = self._of.weights.main
            self._become(self.memory.zeros() if main.dtype is self.memory.dtype else torch.zeros_like(main))
        self.slots.add(slot)
        self.dropped.discard(slot)
        with torch.no_grad():
            self.grad(slot).copy_(value)

    def drop(self, slot: int, keep: bool) -> None:
        """Drops a parameter's gradient; with the last one the accumulator, whose memory stays if ``keep``."""
        self._grads.pop(slot, None)
        if slot in self.slots:
            self.slots.remove(slot)
            self.dropped.add(slot)
        if not self.slots:
            self._grads.clear()
            self.dropped.clear()
            if keep and self.flat is not None and self.flat.dtype is self.memory.dtype:
                self.memory.spare = self.flat
            self.flat = self.narrow = None


def _referred(values: Iterable[object]) -> int:
    """The largest number of references to one of some values, these included."""
    return max((sys.getrefcount(value) for value in values), default=0)


def scaled(out: torch.Tensor, x: torch.Tensor, scale: float, *, fused: bool | None = None) -> torch.Tensor:
    """Writes ``scale * x`` to ``out``, multiplied in a dtype that holds both and rounded once.

    Args:
        fused: whether one kernel casts and multiplies a narrower ``x``; ``None``: except on the CPU, where torch would
            copy it first, and two passes are faster.
    """
    if scale == 1.0:
        return out.copy_(x)
    wide = torch.promote_types(x.dtype, out.dtype)
    if wide is out.dtype is not x.dtype:
        if fused or (fused is None and out.device.type != "cpu"):
            # a number, or a tensor without dimensions, would make it multiply in the dtype of x
            return torch.mul(x, torch.full((1,), scale, dtype=wide, device=out.device), out=out)
        return out.copy_(x).mul_(scale)
    return torch.mul(x.to(wide), scale, out=out)


@dataclass
class _Written:
    """A tensor's version when it was created, and whether DTensors over it have written to it since."""

    version: int = -1
    stale: bool = False
    exposed: bool = field(default=False, compare=False)

    def before_write(self, rows: torch.Tensor | None = None) -> None:
        """Nothing depends on what gradients were."""

    def hand_out(self, rows: torch.Tensor) -> None:
        self.exposed = True
