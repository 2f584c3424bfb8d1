"""Gradients of a unit's parameters: accumulators, unreduced gradients, and gradient hooks."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..config.layout import Slot
from ..dtensor.sharded_dtensor import ShardedDTensor
from ..runtime import buffer_registry, devices, engine, execution, sync_collectives
from ..runtime.overlap import Overlap
from ..runtime.transport import segments
from .unreduced_gradients import holding, reach_zero_grad

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer

GradHook = Callable[[torch.Tensor], torch.Tensor | None]
PostHook = Callable[[torch.Tensor], None]


class Gradients:
    """The gradients of a flat buffer.

    ``flat`` is the accumulator, [layout.shard_numel] in ``precision.grad``. It exists from the first reduction until
    every ``.grad`` is ``None``. A ``.grad`` is in ``precision.main``: if that is wider, the accumulator becomes that
    wide until more is accumulated; if it is narrower, ``.grad`` is a copy, whose changes count.

    Note [Accumulator memory]
    An accumulator exists from the first `accumulate` of a step until ``zero_grad()``, so it takes no memory while the
    loss is computed. The first gradient is stored, not added. It becomes the accumulator without a copy if nothing else
    shares its memory: the output of a reduce-scatter or, over one rank, the bucket that the gradient matmuls wrote to.
    The program does not read it afterwards, and static buffers are never given away.

    Note [Stable addresses]
    With ``keeps`` the accumulator keeps its address from step to step, so that a step can be captured and replayed:
    `set` saves its memory in ``_room``, and the next first gradient is stored there. New memory replaces it if the user
    still holds a former gradient, which must not be overwritten; if the accumulator was widened; and if gradients are
    dropped inside of a backward, as by optimizers that step there to save memory.

    Args:
        buffer: the flat buffer; its weights exist already.
    """

    def __init__(self, buffer: FlatBuffer):
        self._of = buffer
        self.flat: torch.Tensor | None = None
        self._keeps = False
        self._room: torch.Tensor | None = None
        """The accumulator's memory while there is no gradient, with ``keeps``."""
        self._dtype = buffer.precision.grad
        self.sync = True
        """Whether backward reduces gradients over the outer axis, or at all (`no_sync`)."""
        self.overlap: Overlap | None = None
        """Defers backwards (`mfsdp.overlapped`)."""
        self.due: Callable[[], None] | None = None
        """Runs a deferred backward that has gradients for this buffer."""
        self.hooks: dict[int, OrderedDict[int, GradHook]] = {}
        """Hooks per slot that see, and may change, a gradient before it is accumulated."""
        self.post_hooks: dict[int, OrderedDict[int, PostHook]] = {}
        """Hooks per slot that run once ``.grad`` is complete."""
        self.before_first: Callable[[FlatBuffer], None] | None = None
        """Called once, before the first accumulation; may raise."""
        self._there: set[int] = set()
        """Slots that have a gradient."""
        self._dropped: set[int] = set()
        """Slots whose gradient was set to ``None`` while others of the buffer have one."""
        self._votes: list[torch.Tensor] = []
        """Which slots have a gradient on any rank, [slots], one per reduction whose program may differ by rank."""
        self._ballots: dict[frozenset[int], torch.Tensor] = {}
        """This rank's vote tensors, by slots."""
        self._stream: torch.Stream | None = None
        """The stream of the last accumulation."""
        self._kept: dict[int, torch.Tensor] = {}
        """Unreduced gradients, by elements: from before or after the first reduction."""
        self._kept_offsets: set[int] = set()
        self._kept_at = 0
        """`Outermost.syncs` when a gradient was last kept unreduced."""
        self._pending: torch.Tensor | None = None
        """Gradients of this backward, [layout.shard_numel] in ``precision.grad``, until hooks have seen them."""
        self._arrived: set[int] = set()
        """Slots with a gradient in ``_pending``."""
        self._backward = -1
        """The number of that backward."""
        self._finishes = -1
        """The last backward with an end callback."""
        self._left_out: bool | None = None
        """Whether gradients are wanted, while this rank joins other ranks' reductions with zeros; else ``None``."""
        self._looked: torch.Tensor | None = None
        """The accumulator in a narrower ``precision.main``, while ``.grad`` is in use."""
        self._touched = _Touched()
        """Whether DTensors have written to it; versions show writes through plain tensors."""
        self._grads: dict[int, ShardedDTensor] = {}
        """Every ``.grad`` that was read, a view of the accumulator or of ``_looked``."""
        self.slots: dict[tuple[int, ...], frozenset[int]] = {}
        """Cache: slots that train, by start offsets; cleared when a parameter is frozen or unfrozen."""
        self._index = {slot.offset: i for i, slot in enumerate(buffer.layout.slots)}

    def watch(self, source: torch.Tensor) -> None:
        """Registers for the end of backwards through ``source``."""
        done = weakref.WeakMethod(self._backward_done)  # Python's GC does not see a tensor's hooks
        source.register_post_accumulate_grad_hook(lambda source: (done() or _nobody)(source))
        self._node = engine.accumulation_node(source)

    def like(self, other: Gradients) -> None:
        """Copies the state of another buffer's gradients."""
        other._settle()
        self.sync = other.sync
        self._kept = {size: kept.clone() for size, kept in other._kept.items()}
        self._kept_offsets, self._kept_at = set(other._kept_offsets), other._kept_at
        if other in holding:
            holding.add(self)
        self._there, self._dropped = set(other._there), set(other._dropped)
        total = other.total()
        self.flat = None if total is None else total.clone()

    def wanted(self) -> bool:
        """Whether the running backward is for parameters (not ``torch.autograd.grad``)."""
        return engine.accumulates(self._node) if self._left_out is None else self._left_out

    @contextmanager
    def left_out(self, wanted: bool) -> Iterator[None]:
        """Inside of the ``with``, gradients are wanted or not as on ranks that used the unit."""
        self._left_out = wanted
        try:
            yield
        finally:
            self._left_out = None

    def _used(self) -> None:
        if self._left_out is None:
            self._of.unit.outermost.loose.uses(self._of)

    @property
    def offsets(self) -> Iterable[int]:
        """Where all parameters start."""
        return self._index

    @property
    def holds(self) -> bool:
        """Whether there are unreduced gradients."""
        return bool(self._kept)

    def heard(self) -> bool:
        """Whether any gradient hooks are registered."""
        return any(self.hooks.values()) or any(self.post_hooks.values())

    def arrive(self) -> None:
        """Runs a deferred backward before gradients are read or changed."""
        if self.due is not None:
            self.due()

    def hold(self, grads: torch.Tensor, offsets: Iterable[int]) -> bool:
        """Keeps gradients unreduced under `no_sync` and returns ``True``; else adds the unreduced ones to them."""
        if not self.wanted():
            return not self.sync
        self.arrive()
        self._used()
        kept = self._kept.pop(grads.numel(), None)
        if self.sync:
            if kept is not None:
                torch.add(kept, grads, out=grads)
            return False
        reach_zero_grad()
        holding.add(self)
        self._kept[grads.numel()] = grads.to(self._of.precision.grad, copy=True) if kept is None else kept.add_(grads)
        self._kept_offsets.update(offsets)
        self._kept_at = self._of.unit.outermost.syncs[0]
        return True

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a reduction, for hooks, or for a deferred backward."""
        return bool(self._kept) or self._pending is not None or self.due is not None

    def forget(self, slots: Iterable[int] | None = None) -> None:
        """Drops unreduced gradients, or those of some parameters."""
        self.arrive()
        if slots is not None:
            chosen = [self._of.layout.slots[slot] for slot in slots]
            self._kept_offsets -= {s.offset for s in chosen}
            if self._kept_offsets:
                for kept in self._kept.values():
                    kept.masked_fill_(self._mask(chosen, kept.numel()), 0)
                return
        self._kept.clear()
        self._kept_offsets.clear()
        self._votes.clear()
        self._pending = None
        holding.discard(self)

    def _mask(self, slots: Iterable[Slot], numel: int) -> torch.Tensor:
        """Returns a boolean mask, [numel], of some parameters in full gradients or in this rank's shard of them."""
        full = torch.zeros(self._of.spec.full_numel, dtype=torch.bool, device=self._of.weights.main.device)
        for slot in slots:
            full[slot.offset : slot.offset + slot.numel] = True
        if numel == full.numel():
            return full
        shard = full.new_empty(numel)
        rank = self._of.placement.rank * self._of.spec.world // self._of.layout.world
        for whole, part in segments(self._of.spec.splits, self._of.spec.world, full, shard):
            part.copy_(whole.view(self._of.spec.world, -1)[rank])
        return shard

    def vote(self, offsets: Iterable[int]) -> None:
        """Asks all ranks which parameters have a gradient, before an `accumulate` whose offsets may differ by rank. A
        gradient on any rank counts on all. The host waits for the answer only when a ``.grad`` is read.
        """
        if not self.wanted():
            return
        mine = self._slots(self._kept_offsets.union(offsets))
        if mine not in self._ballots:  # cached: a copy to the device makes the host wait
            votes = [slot in mine for slot in range(len(self._of.layout.slots))]
            self._ballots[mine] = torch.tensor(votes, device=self._of.weights.main.device)
        self._votes.append(sync_collectives.on_any_rank(self._ballots[mine], self._of.spec))

    def accumulate(self, gshard: torch.Tensor, offsets: Iterable[int], scale: float) -> None:
        """Adds ``scale * gshard`` ([shard_numel]) in the accumulator's dtype; the first write is a store. Does nothing
        in a backward that is not for parameters (``torch.autograd.grad``, ``backward(inputs=...)``).
        """
        if not self.wanted():
            return
        self.arrive()
        self._used()
        if self.before_first is not None:
            self._ask_before_first()
        slots = self._of_kept_and(self._index if self._of.spec.any_optional else offsets)
        self._stream = devices.current_stream(gshard.device)
        if any(self.hooks.values()):
            pending = self._of_this_backward()
            if pending is None:
                self._pending = self._stored(gshard, scale)
            else:
                pending.add_(gshard, alpha=scale)
            self._arrived |= slots
        else:
            self._add(gshard, scale)
            self._there |= slots
        if self.sync:
            self._of.unit.outermost.syncs[0] += 1

    def bring(self, slot: int, rows: torch.Tensor) -> None:
        """Adds a gradient that eager autograd brings to a parameter, from uses outside of forward."""
        self.arrive()
        self._ask_before_first()
        if self.heard():
            if self._of_this_backward() is None:
                self._pending = self._empty().zero_()
            assert self._pending is not None
            self._of.weights.view(self._pending, slot).add_(rows)
            self._arrived.add(slot)
            self._finish_later()
            return
        total = self._ready()
        if total is None:
            total = self._accumulator().zero_()
        devices.follow(self._stream, total)
        self._of.weights.view(total, slot).add_(rows)
        self._become(total)
        self._there.add(slot)

    def _ask_before_first(self) -> None:
        if self.before_first is not None:
            self.before_first(self._of)
            self.before_first = None

    def _of_this_backward(self) -> torch.Tensor | None:
        """Returns ``_pending`` of this backward; drops that of an earlier one, which an exception ended."""
        now = engine.backward_number()
        if self._backward != now:
            self._backward, self._pending, self._arrived = now, None, set()
        return self._pending

    def _of_kept_and(self, offsets: Iterable[int]) -> frozenset[int]:
        """Returns the slots to accumulate for: those that start at ``offsets``, and those of unreduced gradients."""
        if self._kept_offsets:
            slots = self._slots(self._kept_offsets.union(offsets))
            self._kept_offsets.clear()
            if not self._kept:
                holding.discard(self)
            return slots
        key = tuple(offsets)
        if key not in self.slots:
            self.slots[key] = self._slots(key)
        return self.slots[key]

    def _slots(self, offsets: Iterable[int]) -> frozenset[int]:
        """Returns the slots that start there and train."""
        return frozenset(slot for offset in offsets if self._of.trains[slot := self._index[offset]])

    def _add(self, gshard: torch.Tensor, scale: float) -> None:
        """Adds to the accumulator, or stores the first gradient."""
        total = self._ready()
        self._become(self._stored(gshard, scale) if total is None else total.add_(gshard, alpha=scale))

    def _stored(self, gshard: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns ``scale * gshard`` in the accumulator's dtype, in its own memory, or in that of ``gshard`` if nothing
        else shares it (Note [Accumulator memory]).
        """
        room = self._left()
        if room is None and self._may_become(gshard):
            return gshard if scale == 1.0 else gshard.mul_(scale)
        return scaled(self._empty() if room is None else room, gshard, scale)

    def _may_become(self, gshard: torch.Tensor) -> bool:
        """Whether it can become the accumulator: it has its dtype and shape, and a storage of its own."""
        alike = gshard.dtype is self._dtype and gshard.shape == self._of.weights.main.shape
        plain = type(gshard) is torch.Tensor and not gshard.requires_grad and not gshard.is_inference()
        if not (alike and plain) or gshard.is_meta:
            return False
        return gshard.untyped_storage().nbytes() == gshard.nbytes and not buffer_registry.shared(gshard)

    def _accumulator(self) -> torch.Tensor:
        """Returns uninitialized memory for an accumulator."""
        room = self._left()
        return self._empty() if room is None else room

    def _left(self) -> torch.Tensor | None:
        """Returns the former accumulator's memory (Note [Stable addresses]), unless a gradient in it is still held."""
        room, self._room = self._room, None
        return None if room is None or buffer_registry.shared(room) else room

    def _empty(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty_like(self._of.weights.main, dtype=self._dtype)

    @property
    def keeps(self) -> bool:
        """Whether the accumulator's memory stays while there is no gradient (Note [Stable addresses]); setting it to
        ``False`` frees it.
        """
        return self._keeps

    @keeps.setter
    def keeps(self, value: bool) -> None:
        self.arrive()
        self._keeps = value
        if not value:
            self._room = None

    def _ready(self) -> torch.Tensor | None:
        """Returns the accumulator in its own dtype, with dropped slots zeroed, ready for more gradients."""
        if self._looked is None and not self._dropped and (self.flat is None or self.flat.dtype is self._dtype):
            return self.flat
        total = self.total()
        if total is not None:
            for slot in self._dropped:
                self._of.weights.view(total, slot).zero_()
            self._become(total.to(self._dtype))
        self._dropped.clear()
        self._looked = None
        return self.flat

    def total(self) -> torch.Tensor | None:
        """Returns the accumulator, with changes made to ``.grad``; ``None`` without a gradient."""
        self.arrive()
        looked = self._looked
        if looked is not None and self.flat is not None and self._touched != _Touched(looked._version):
            self.flat.copy_(looked)
            self._touched.version, self._touched.stale = looked._version, False
        return self.flat

    def _become(self, total: torch.Tensor | None) -> None:
        """Makes a tensor the accumulator."""
        if total is not self.flat or self._looked is not None:
            self._grads.clear()
        self.flat = total

    def _backward_done(self, source: torch.Tensor) -> None:
        """Called by autograd once per backward, after all programs that read the source. ``source.grad`` holds
        gradients of programs compiled without our passes, which autograd accumulates itself.
        """
        if source.is_meta:
            return  # nothing runs
        self._of.unit.outermost.loose.in_backward()
        if source.grad is not None:
            if self._of.spec.any_optional:
                raise NotImplementedError(
                    f"mfsdp: {self._of.path} may be unused, or another unit of its model, and was compiled by another "
                    'backend. Call torch.compile(model, backend="mfsdp") instead'
                )
            groups = self._of.spec.peer_groups if self._of.spec.replica or self._of.spec.outer > 1 else ()
            with execution.announced(f"reduction of {self._of.path}", *groups):
                rest = sync_collectives.reduce_rest(source.grad, self._of.text)
            self.accumulate(rest, self._index, 1.0)
            source.grad = None
        for gradients in (self._pending, self.flat):
            if gradients is not None:  # the caller of backward waits for this stream
                devices.follow(self._stream, gradients)
        hooked = {slot for slot, hooks in (*self.hooks.items(), *self.post_hooks.items()) if hooks}
        if any(engine.accumulates(engine.accumulation_node(self._of.params[slot])) for slot in hooked):
            self._finish_later()  # uses outside of forward bring more
        else:
            self._finish()

    def finish(self) -> None:
        """Runs hooks where autograd does not: the running backward has left the unit out."""
        if not self.heard():
            return
        if engine.backward_number() < 0:
            self._finish()
        else:
            self._finish_later()

    def _finish_later(self) -> None:
        """Runs `_finish` once, when the running backward ends."""
        now = engine.backward_number()
        if self._finishes != now:
            self._finishes = now
            engine.after_backward(self._finish)

    def _finish(self) -> None:
        """Runs hooks after all gradients of a backward have arrived."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._arrived |= self._counted()
            for slot in sorted(self._arrived):
                self._ask_hooks(pending, slot)
            self._add(pending, 1.0)
            self._there |= self._arrived
        if self.sync and any(self.post_hooks.values()):
            self._settle()
            for slot in sorted(self._there):
                for hook in tuple(self.post_hooks.get(slot, {}).values()):
                    hook(self._of.params[slot])

    def _ask_hooks(self, gradients: torch.Tensor, slot: int) -> None:
        for hook in tuple(self.hooks.get(slot, {}).values()):
            mine = self._shown(gradients, slot)
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

    def _shown(self, gradients: torch.Tensor, slot: int) -> ShardedDTensor:
        """Returns a parameter's part of flat gradients."""
        return ShardedDTensor(self._of.weights.view(gradients, slot), self._of.params[slot].sharding)

    def _counted(self) -> set[int]:
        """Returns the slots that any rank has voted for, and clears the votes."""
        slots = {slot for votes in self._votes for slot in votes.nonzero().flatten().tolist()}
        self._votes.clear()
        return slots

    def _settle(self) -> None:
        """Counts the votes of finished reductions."""
        self.arrive()
        if self._votes and self.flat is not None:
            self._there |= self._counted()

    def has(self, slot: int) -> bool:
        """Whether a parameter has a gradient.

        Raises:
            RuntimeError: a backward has reduced other units, while this one has unreduced gradients from before.
        """
        self.arrive()
        if self._kept and self._of.unit.outermost.syncs[0] > self._kept_at:
            raise RuntimeError(
                f"mfsdp: unit {self._of.unit.fqn!r} has gradients from backward calls under no_sync, and the one that "
                "synchronised did not use it. Let every unit take part in it, or do without no_sync."
            )
        self._settle()
        return slot in self._there

    def of(self, slot: int) -> ShardedDTensor | None:
        """Returns a parameter's gradient in ``precision.main``, a view, or ``None``; raises like `has`."""
        if not self.has(slot):
            return None
        assert self.flat is not None
        main = self._of.precision.main
        if self.flat.dtype.itemsize < main.itemsize:
            self._become(self.flat.to(main))
        elif self.flat.dtype is not main and self._looked is None:
            self._looked = self.flat.to(main)
            self._touched = _Touched(self._looked._version)
            self._grads.clear()
        if slot not in self._grads:
            with torch.inference_mode(False):  # the first read may be in inference mode
                self._grads[slot] = self._shown(self.flat if self._looked is None else self._looked, slot)
            self._grads[slot]._mfsdp_written = self._touched
        return self._grads[slot]

    def set(self, slot: int, value: torch.Tensor | None) -> None:
        """Drops the gradient for ``None``; else copies a tensor in."""
        self._settle()
        if value is None:
            if self in holding:
                self.forget([slot])
            self._grads.pop(slot, None)
            if slot in self._there:
                self._there.remove(slot)
                self._dropped.add(slot)
            if not self._there:
                self._grads.clear()
                self._dropped.clear()
                steady = self._keeps and engine.backward_number() < 0
                if steady and self.flat is not None and self.flat.dtype is self._dtype:
                    self._room = self.flat
                self.flat = self._looked = None
            return
        if value is self._grads.get(slot):
            return
        if self.flat is None:
            main = self._of.weights.main
            self._become(self._accumulator().zero_() if main.dtype is self._dtype else torch.zeros_like(main))
        self._there.add(slot)
        self._dropped.discard(slot)
        mine = self.of(slot)
        assert mine is not None
        with torch.no_grad():
            mine.copy_(value)


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
class _Touched:
    """A tensor's version when it was created, and whether DTensors over it have written to it since."""

    version: int = -1
    stale: bool = False
    exposed: bool = field(default=False, compare=False)

    def before_write(self) -> None:
        """Nothing depends on what gradients were."""


def _nobody(source: torch.Tensor) -> None:
    """Does nothing: the hook's buffer no longer exists."""
