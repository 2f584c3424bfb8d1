"""Restores a model if `fully_shard` fails half-way."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..buffers.flat_buffer import Ref
from ..dtensor.sharded_dtensor import carry_attributes


class Rollback:
    """Undoes changes in reverse order after an exception.

    Originals are freed once their values are copied. The rollback puts an original back if it is alive, or gives its
    values to a new parameter if this rank has all of them. Otherwise the parameter ends on the meta device with an
    error: a gather would be a collective that other ranks, which have not failed, do not join.

    Args:
        whole: whether this rank's buffers hold full parameters.
        keep: whether to keep originals to the end, as for models partly on meta, where little but users' initializers
            can fail.
    """

    def __init__(self, whole: bool, keep: bool):
        self.whole, self.keep = whole, keep
        self.steps: list[Callable[[], None]] = []
        self.lost: list[str] = []

    def __enter__(self) -> Rollback:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        for step in reversed(self.steps):
            step()
        if self.lost:
            raise RuntimeError(
                f"fully_shard failed ({type(error).__name__}: {error}) when it had freed "
                f"{', '.join(self.lost[:8])}{', ...' if len(self.lost) > 8 else ''}, of which this rank has only a "
                "part: they are on the meta device now. Build the model anew"
            ) from error

    def original(self, param: nn.Parameter, ref: Ref) -> Callable[[], nn.Parameter]:
        """Returns a function that restores the parameter that `ref` replaces, the same one every time."""
        found: list[nn.Parameter] = [param] if self.keep or param.is_meta else []
        weak, dtype, trainable = weakref.ref(param), param.dtype, param.requires_grad

        def get() -> nn.Parameter:
            if not found:
                there = weak()
                found.append(there if there is not None else self._made_anew(ref, dtype, trainable))
            return found[0]

        return get

    def _made_anew(self, ref: Ref, dtype: torch.dtype, trainable: bool) -> nn.Parameter:
        buffer = ref.buffer
        if self.whole:
            value = buffer.weights.full_view(buffer.weights.main, ref.slot).to(dtype, copy=True)
        else:
            self.lost.append(f"{buffer.layout.slots[ref.slot].name} of unit {buffer.unit.fqn!r}")
            value = torch.empty(ref.shape, dtype=dtype, device="meta")
        out = nn.Parameter(ref.piece.found(value) if ref.piece else value, trainable)
        carry_attributes(buffer.params[ref.slot], out)
        return out
