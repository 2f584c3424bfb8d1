"""Unreduced gradients, which wait for the next synchronisation, and how ``zero_grad`` drops them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from ..config.layout import Slot
from ..config.patches import wrap
from ..dtensor.sharded_parameter import ShardedParameter
from ..runtime.transport import segments
from ..runtime.weight_parts import any_waiting
from .tied_copies import any_unsent

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer

Owner = TypeVar("Owner", nn.Module, torch.optim.Optimizer)

_with_unreduced: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()
"""Flat buffers that have unreduced gradients."""


class UnreducedGradients:
    """Gradients of a flat buffer that `no_sync` has left unreduced."""

    def __init__(self, buffer: FlatBuffer):
        self._of = buffer
        self.kept: dict[int, torch.Tensor] = {}
        """By elements: from before or after the first reduction."""
        self.offsets: set[int] = set()
        """Where their parameters start."""
        self._syncs = 0
        """`Outermost.syncs` when a gradient was last kept."""

    def like(self, other: UnreducedGradients) -> None:
        """Copies another buffer's."""
        self.kept = {size: kept.clone() for size, kept in other.kept.items()}
        self.offsets, self._syncs = set(other.offsets), other._syncs
        if other._of in _with_unreduced:
            _with_unreduced.add(self._of)

    def add(self, grads: torch.Tensor, offsets: Iterable[int]) -> None:
        reach_zero_grad()
        _with_unreduced.add(self._of)
        kept = self.kept.get(grads.numel())
        if kept is None:
            self.kept[grads.numel()] = grads.to(self._of.precision.grad, copy=True)
        else:
            kept.add_(grads)
        self.offsets.update(offsets)
        self._syncs = self._of.unit.outermost.syncs[0]

    def add_to(self, grads: torch.Tensor) -> None:
        """Adds those of the same size to gradients that are about to be reduced, and drops them."""
        kept = self.kept.pop(grads.numel(), None)
        if kept is not None:
            torch.add(kept, grads, out=grads)

    def take_offsets(self) -> set[int]:
        """Returns where the parameters start whose gradients have been added to reduced ones, and forgets them."""
        offsets, self.offsets = self.offsets, set()
        if not self.kept:
            _with_unreduced.discard(self._of)
        return offsets

    def forget(self, slots: Iterable[int]) -> None:
        """Drops the gradients of some parameters."""
        chosen = [self._of.layout.slots[slot] for slot in slots]
        self.offsets -= {s.offset for s in chosen}
        if self.offsets:
            for kept in self.kept.values():
                kept.masked_fill_(self._mask(chosen, kept.numel()), 0)
        else:
            self.clear()

    @property
    def there(self) -> bool:
        """Whether any gradients are unreduced."""
        return self._of in _with_unreduced

    def clear(self) -> None:
        self.kept.clear()
        self.offsets.clear()
        _with_unreduced.discard(self._of)

    def _mask(self, slots: Iterable[Slot], numel: int) -> torch.Tensor:
        """Returns a boolean mask, [numel], of some parameters in full gradients or in this rank's shard of them."""
        spec = self._of.spec
        full = torch.zeros(spec.full_numel, dtype=torch.bool, device=self._of.weights.main.device)
        for slot in slots:
            full[slot.offset : slot.offset + slot.numel] = True
        if numel == full.numel():
            return full
        shard = full.new_empty(numel)
        rank = self._of.placement.rank * spec.world // self._of.layout.world
        for whole, part in segments(spec.splits, spec.world, full, shard):
            part.copy_(whole.view(spec.world, -1)[rank])
        return shard

    def check(self) -> None:
        """Checks that no gradients have been left behind.

        Raises:
            RuntimeError: a backward has reduced other units, while this one has unreduced gradients from before.
        """
        if self.kept and self._of.unit.outermost.syncs[0] > self._syncs:
            raise RuntimeError(
                f"mfsdp: unit {self._of.unit.fqn!r} has gradients from backward calls under no_sync, and the one that "
                "synchronised did not use it. Let every unit take part in it, or do without no_sync."
            )


@functools.cache
def reach_zero_grad() -> None:
    """Makes ``zero_grad`` of every optimizer and module drop unreduced gradients and weight parts that wait.

    They are in no ``.grad``, so an abandoned step would leave them for the next one. torch has no hook there, so this
    wraps ``torch.optim.Optimizer.zero_grad`` and ``torch.nn.Module.zero_grad`` (which torch.compile's wrapper inherits)
    once, when the first gradient stays unreduced. A class whose ``zero_grad`` does not call its parent's is covered if
    it sets ``.grad`` to ``None`` unconditionally.
    """

    wrap(torch.optim.Optimizer, "zero_grad", functools.partial(_zero_grad, _of_optimizer), traced=False)
    wrap(nn.Module, "zero_grad", functools.partial(_zero_grad, nn.Module.parameters), traced=False)


def _zero_grad(
    parameters: Callable[[Owner], Iterable[torch.Tensor]],
    theirs: Callable[[Owner, bool], None],
    owner: Owner,
    set_to_none: bool = True,
) -> None:
    if _with_unreduced or any_waiting() or any_unsent():
        chosen: dict[FlatBuffer, set[int]] = {}
        for p in parameters(owner):
            if isinstance(p, ShardedParameter) and (buffer := p._mfsdp_owner) and buffer.gradients.late:
                chosen.setdefault(buffer, set()).add(p.sharding.slot)
        for buffer, slots in chosen.items():
            buffer.gradients.forget(slots)
    theirs(owner, set_to_none)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
