"""Main weights in their communication dtype, kept from one optimizer step to the next.

Note [Kept casts]
If main weights do not have the communication dtype, a program casts the shard before every gather, or, under the
backend's option ``keep_cast``, gathers a cast that is kept (`KeptCast.read`); over one rank it reads that cast. The
cast is redone if main weights have been written: version counters show writes through plain tensors, `Weights.stale`
those through DTensors and flat optimizers, and other optimizers' steps mark it due (`optimizer_hooks`). Code that has
rows as a plain tensor (``to_local()``) may write past all of these (``.data``, NumPy, a collective): from then on that
unit's cast is redone for every gather. This communicates nothing, so ranks need not agree on when. Parameters
communicated as int8 are quantised from main weights for every gather, without a cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..runtime import devices

if TYPE_CHECKING:
    from .weights import Weights


class KeptCast:
    """The cast of one flat buffer's main weights; made when it is first read."""

    def __init__(self, weights: Weights):
        self._of = weights
        self.due = True
        """Whether main weights have been written past their version counter."""
        self.values: torch.Tensor | None = None
        """This rank's shard, [layout.shard_numel] in ``precision.comm``."""
        self._version = -1
        self._stream: torch.Stream | None = None

    def read(self) -> torch.Tensor:
        """Returns the shard in ``precision.comm``, up to date with main weights; read-only. If it is due, one call
        redoes all due casts of the model.
        """
        if self.values is None or self.is_due():
            _cast_again([self, *(c for c in _kept if c is not self and self._beside(c) and c.is_due())])
        assert self.values is not None
        devices.follow(self._stream, self.values)
        return self.values

    def current(self) -> torch.Tensor | None:
        """Returns the cast if it exists and is up to date: code that writes main weights may update it too. ``None``
        for 16-bit main weights, which a compiler need not round before it casts them.
        """
        there = self.values is not None and self._of.main.itemsize >= 4 and not self.is_due()
        return self.values if there else None

    def written_along(self) -> None:
        """Marks the cast as up to date."""
        self.due, self._version = False, self._of.main._version
        self._stream = devices.current_stream(self._of.main.device)

    def is_due(self) -> bool:
        """Returns whether `read` would redo it."""
        return self._of.exposed or self.written()

    def written(self) -> bool:
        """Returns whether main weights have been written since, other than through rows that are out."""
        return self.due or self._of.main._version != self._version

    def _beside(self, other: KeptCast) -> bool:
        """Whether the other belongs to the same model and device, and a write to its weights cannot go unseen."""
        mine, its = self._of, other._of
        same = its.buffer.unit.outermost is mine.buffer.unit.outermost and its.main.device == mine.main.device
        return same and not its.exposed


_kept: weakref.WeakSet[KeptCast] = weakref.WeakSet()
"""Casts that exist."""


def _cast_again(casts: Sequence[KeptCast]) -> None:
    """Redoes casts, in one kernel where the device has one."""
    with torch.inference_mode(False), torch.no_grad():
        for cast in casts:
            if cast.values is None:
                cast.values = torch.empty_like(cast._of.main, dtype=cast._of.buffer.precision.comm, requires_grad=False)
                _kept.add(cast)
            devices.follow(cast._stream, cast.values)
        values = [cast.values for cast in casts if cast.values is not None]
        torch._foreach_copy_(values, [cast._of.main.detach() for cast in casts])
    for cast in casts:
        cast.written_along()
