"""Lends TransformerEngine's modules full weights and gradient memory in the eager fallback.

Note [Lent weights]
Their autograd functions keep the weight itself from forward to backward, as ``ctx.weight``, where saved-tensor hooks do
not see it; it would keep every layer's gathered buffer alive. So they get another tensor over the same storage. When
the unit is freed, it loses the storage, keeps its shape, and reads as NaN.

With ``fuse_wgrad_accumulation`` they write a weight's gradient to ``weight.get_main_grad()``, in its dtype, and give
autograd ``None``. That memory is the weight's place in the reduced bucket, so nothing is copied. Every use in a
backward gets its own zeros: it does not matter whether they add or store (they store in a step's first microbatch, if
told of it), nor which use comes first, and an expert without tokens has zeros. Gradients that autograd brings from
other readers are added. Memory requested for a frozen weight, or in a backward that is not for parameters, is
discarded.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..buffers.flat_buffer import FlatBuffer
from ..dtensor.transformer_engine import Lent
from ..runtime import engine, sync_collectives


class MainGrads:
    """The parameters of one gather that are lent to modules, and the gradients that these write themselves."""

    def __init__(self, buffer: FlatBuffer):
        self.buffer = buffer
        self._lent: list[weakref.ref[Lent]] = []
        self._bucket: torch.Tensor | None = None
        """[full_numel], in the communication dtype."""
        self._further: list[tuple[int, torch.Tensor]] = []
        """Further uses of a weight: (slot, gradient to add)."""
        self._written: set[int] = set()
        self._backward = -1
        """Their backward. Leftovers of another one: it raised an exception."""

    def lend(self, whole: torch.Tensor, slot: int) -> Lent:
        """Returns a full parameter for one use, with autograd."""
        lent = _Lend.apply(whole, self, slot)  # type: ignore[no-untyped-call]
        self._lent.append(weakref.ref(lent))
        return lent  # type: ignore[no-any-return]

    def end_loans(self, hollow: bool) -> None:
        """Forgets the lent tensors; if the buffer is freed, they drop its storage."""
        for ref in self._lent:
            lent = ref()
            if lent is not None and hollow:
                lent.data = lent.new_full((), torch.nan).expand(lent.shape)
        self._lent.clear()

    def memory(self, slot: int) -> torch.Tensor:
        """Returns zeroed memory for the gradient of one use of a parameter."""
        if self._backward != engine.backward_number():
            self._forget()
            self._backward = engine.backward_number()
        if self._bucket is None and self.buffer.gradients.wanted():
            self._bucket = self._zeros((self.buffer.spec.full_numel,))
        if self._bucket is not None and slot not in self._written and self.buffer.trains[slot]:
            self._written.add(slot)
            return self._view(self._bucket, slot)
        apart = self._zeros(self.buffer.layout.slots[slot].shape)
        if slot in self._written:
            self._further.append((slot, apart))
        return apart

    def packed(self, grads: dict[int, torch.Tensor]) -> tuple[torch.Tensor | None, list[int]]:
        """All gradients at their offsets, [full_numel], and the offsets that have one; ``None`` if none has. Forgets
        what modules have written.

        Args:
            grads: autograd's, by slot.
        """
        bucket, slots = self._bucket, self.buffer.layout.slots
        if bucket is None or self._backward != engine.backward_number():
            self._forget()
            offsets = [slots[slot].offset for slot in grads]
            brought = list(grads.values())
            return (
                sync_collectives.packed(brought, offsets, self.buffer.spec, brought[0].device) if grads else None
            ), offsets
        for slot, grad in (*self._further, *grads.items()):
            if slot in self._written:
                self._view(bucket, slot).add_(grad)
            else:
                self._view(bucket, slot).copy_(grad)
        offsets = [slots[slot].offset for slot in sorted(self._written | set(grads))]
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
        self._further.clear()
        self._written.clear()


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, main_grads: MainGrads, slot: int) -> Lent:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        lent = Lent.over(whole, lambda: main_grads.memory(slot))
        if not whole.requires_grad:
            ctx.mark_non_differentiable(lent)
        return lent

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        return grad, None, None
