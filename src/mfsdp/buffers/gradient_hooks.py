"""Gradient hooks of parameters, and the gradients that wait for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ..runtime import engine

if TYPE_CHECKING:
    from .accumulator import AccumulatorMemory
    from .flat_buffer import FlatBuffer

GradHook = Callable[[torch.Tensor], torch.Tensor | None]
PostHook = Callable[[torch.Tensor], None]


class GradientHooks:
    """The gradient hooks of a flat buffer. If some see gradients before these are accumulated, the gradients of a
    backward are pending until it ends.

    Args:
        memory: allocates pending gradients, which may become the accumulator.
    """

    def __init__(self, buffer: FlatBuffer, memory: AccumulatorMemory):
        self._of, self._memory = buffer, memory
        self.grad_hooks: dict[int, OrderedDict[int, GradHook]] = {}
        """Hooks per slot that see, and may change, a gradient before it is accumulated."""
        self.post_hooks: dict[int, OrderedDict[int, PostHook]] = {}
        """Hooks per slot that run once ``.grad`` is complete."""
        self.pending: torch.Tensor | None = None
        """Gradients of this backward, [layout.shard_numel] in ``precision.grad``, until hooks have seen them."""
        self._slots: set[int] = set()
        """Slots with a gradient in ``pending``."""
        self._backward = -1
        """The number of that backward."""
        self._outer: list[tuple[int, torch.Tensor | None, set[int]]] = []
        """The same of backwards that it runs inside of (reentrant checkpoints)."""

    def any(self) -> bool:
        return any(self.grad_hooks.values()) or any(self.post_hooks.values())

    def await_parameters(self) -> bool:
        """Whether uses outside of forward bring more gradients, in this backward, to parameters with hooks."""
        slots = {slot for slot, hooks in (*self.grad_hooks.items(), *self.post_hooks.items()) if hooks}
        return any(engine.accumulates(engine.accumulation_node(self._of.params[slot])) for slot in slots)

    def add(self, gshard: torch.Tensor, scale: float, slots: Iterable[int]) -> None:
        """Adds ``scale * gshard`` to the pending gradients."""
        self._drop_former()
        if self.pending is None:
            self.pending = self._memory.stored(gshard, scale)
        else:
            self.pending.add_(gshard, alpha=scale)
        self._slots.update(slots)

    def add_rows(self, slot: int, rows: torch.Tensor) -> None:
        """Adds to the pending gradient of one parameter."""
        self._drop_former()
        if self.pending is None:
            self.pending = self._memory.new().zero_()  # the kept memory is the accumulator's
        self._of.weights.view(self.pending, slot).add_(rows)
        self._slots.add(slot)

    def _drop_former(self) -> None:
        """Drops pending gradients of an earlier backward, which an exception ended, or sets those of an outer one
        aside.
        """
        now = engine.backward_number()
        if self._backward != now:
            if engine.nested():
                self._outer.append((self._backward, self.pending, self._slots))
            else:
                self._outer.clear()
            self._backward, self.pending, self._slots = now, None, set()

    def run(self, voted: set[int]) -> tuple[torch.Tensor, set[int]]:
        """Runs hooks on the pending gradients, of their slots and those that ranks have voted for; returns the
        gradients and the slots.
        """
        assert self.pending is not None
        pending, self.pending = self.pending, None
        slots = self._slots | voted
        for slot in sorted(slots):
            self._run(pending, slot)
        if self._outer:
            self._backward, self.pending, self._slots = self._outer.pop()
        return pending, slots

    def _run(self, pending: torch.Tensor, slot: int) -> None:
        for hook in tuple(self.grad_hooks.get(slot, {}).values()):
            mine = self._of.sharded_view(pending, slot)
            with torch.no_grad():
                changed = hook(mine)
                if changed is not None and changed is not mine:
                    if not isinstance(changed, torch.Tensor) or changed.shape != mine.shape:
                        raise RuntimeError(
                            f"mfsdp: a gradient hook of {self._of.layout.slots[slot].name} in unit "
                            f"{self._of.unit.fqn!r} returned {changed!r}; return None or a gradient of shape "
                            f"{tuple(mine.shape)}"
                        )
                    mine.copy_(changed)

    def run_post_hooks(self, slots: Iterable[int]) -> None:
        for slot in sorted(slots):
            for hook in tuple(self.post_hooks.get(slot, {}).values()):
                hook(self._of.params[slot])
