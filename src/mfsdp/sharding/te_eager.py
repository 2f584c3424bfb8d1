"""What modules of TransformerEngine are lent on the eager path: whole weights, and room for their gradients.

Note [Lent weights]
Their autograd functions keep the weight itself from forward to backward beside what autograd saves, as ``ctx.weight``,
where saved-tensor hooks do not see it, and with it the gathered buffer of every layer. So they get a tensor of their
own over the same storage, which loses it when the unit is let go of: it keeps its shape, and reads as NaN.

With ``fuse_wgrad_accumulation`` they write a weight's gradient to ``weight.get_main_grad()``, in its dtype, and give
autograd ``None``. Room for it is the weight's place in the bucket that is reduced: nothing is copied into that. Every
use of a weight in a backward gets room of its own, zeros: so it does not matter whether they add to it or store in it
(they store in a step's first microbatch, if they are told of it), nor which of two uses comes first; and an expert
that has seen no token has zeros. What autograd brings to the same weight, from other readers, is added to that. Room
that is asked for in a backward which is not for parameters, or for a frozen weight, leads nowhere.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..runtime import engine, sync_collectives
from ..state.flat_buffer import FlatBuffer
from ..state.transformer_engine import Lent


class MainGrads:
    """Gradients that modules write themselves, of the parameters that one gather has brought."""

    def __init__(self, buffer: FlatBuffer):
        self.buffer = buffer
        self._bucket: torch.Tensor | None = None
        """[full_numel], in the dtype that travels."""
        self._more: list[tuple[int, torch.Tensor]] = []
        """Of further uses of a weight: its slot, and what is to be added."""
        self._there: set[int] = set()
        self._backward = -1
        """Which one all this is of. What an earlier one has left, it died of an exception."""

    def room(self, slot: int) -> torch.Tensor:
        """Zeros, where a use of a parameter is to put its gradient."""
        if self._backward != engine.backward_number():
            self._forget()
            self._backward = engine.backward_number()
        if self._bucket is None and self.buffer.gradients.wanted():
            self._bucket = self._zeros((self.buffer.spec.full_numel,))
        if self._bucket is not None and slot not in self._there and self.buffer.trains[slot]:
            self._there.add(slot)
            return self._view(self._bucket, slot)
        apart = self._zeros(self.buffer.layout.slots[slot].shape)
        if slot in self._there:
            self._more.append((slot, apart))
        return apart

    def packed(self, grads: dict[int, torch.Tensor]) -> tuple[torch.Tensor | None, list[int]]:
        """All gradients at their places, [full_numel], and offsets of those that are there; ``None`` if none is. What
        modules have written is forgotten here.

        Args:
            grads: what autograd has brought, by slots.
        """
        bucket, slots = self._bucket, self.buffer.layout.slots
        if bucket is None or self._backward != engine.backward_number():
            self._forget()
            offsets = [slots[slot].offset for slot in grads]
            brought = list(grads.values())
            return (
                sync_collectives.packed(brought, offsets, self.buffer.spec, brought[0].device) if grads else None
            ), offsets
        for slot, grad in (*self._more, *grads.items()):
            if slot in self._there:
                self._view(bucket, slot).add_(grad)
            else:
                self._view(bucket, slot).copy_(grad)
        offsets = [slots[slot].offset for slot in sorted(self._there | set(grads))]
        self._forget()
        return bucket, offsets

    def _view(self, bucket: torch.Tensor, slot: int) -> torch.Tensor:
        place = self.buffer.layout.slots[slot]
        return bucket[place.offset : place.offset + place.numel].view(place.shape)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self.buffer.spec.precision.grad_comm
        return torch.zeros(shape, dtype=dtype, device=self.buffer.weights.main.device)

    def _forget(self) -> None:
        self._bucket = None
        self._more.clear()
        self._there.clear()


class Loans:
    """Weights that a gathered buffer has been lent as."""

    def __init__(self, buffer: FlatBuffer):
        self.main_grads = MainGrads(buffer)
        self._lent: list[weakref.ref[Lent]] = []

    def lend(self, whole: torch.Tensor, slot: int) -> Lent:
        """A whole parameter, for one use, with autograd."""
        lent = _Lend.apply(whole, self.main_grads, slot)  # type: ignore[no-untyped-call]
        self._lent.append(weakref.ref(lent))
        return lent  # type: ignore[no-any-return]

    def end(self, hollow: bool) -> None:
        """Forgets them; where the buffer is let go of, they let go of it."""
        for ref in self._lent:
            lent = ref()
            if lent is not None and hollow:
                lent.data = lent.new_full((), torch.nan).expand(lent.shape)
        self._lent.clear()


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, main_grads: MainGrads, slot: int) -> Lent:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        lent = Lent.over(whole, lambda: main_grads.room(slot))
        if not whole.requires_grad:
            ctx.mark_non_differentiable(lent)
        return lent

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        return grad, None, None
