"""Gradients of a unit's parameters: how they are reduced, held unreduced, seen by hooks, and accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..dtensor.sharded_dtensor import ShardedDTensor
from ..runtime import capturing, devices, engine, execution, sync_collectives
from ..runtime.overlap import Overlap
from ..runtime.weight_parts import WeightParts
from .accumulator import Accumulator
from .gradient_hooks import GradientHooks
from .unreduced_gradients import UnreducedGradients

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer


class Gradients:
    """The gradients of a flat buffer: what programs, eager autograd, hooks and ``.grad`` do with its accumulator.

    Args:
        buffer: the flat buffer; its weights exist already.
    """

    def __init__(self, buffer: FlatBuffer):
        self._of = buffer
        self.accumulator = Accumulator(buffer)
        self.unreduced = UnreducedGradients(buffer)
        self.hooks = GradientHooks(buffer, self.accumulator.memory)
        self.votes = _Votes(buffer)
        self.sync = True
        """Whether backward reduces gradients over the outer axis, or at all (`no_sync`)."""
        self.overlap: Overlap | None = None
        """Defers backwards (`mfsdp.overlapped`)."""
        self.weight_parts: WeightParts | None = None
        """Those of its pipeline stage (Note [Weight parts])."""
        self.due: Callable[[], None] | None = None
        """Runs a deferred backward that has gradients for this buffer."""
        self.before_first: Callable[[FlatBuffer], None] | None = None
        """Called once, before the first accumulation; may raise."""
        self._left_out: bool | None = None
        """Whether gradients are wanted, while this rank joins other ranks' reductions with zeros; else ``None``."""
        self._finishes: set[int] = set()
        """The running backwards with an end callback."""
        self.slots: dict[tuple[int, ...], frozenset[int]] = {}
        """Cache: slots that train, by start offsets; cleared when a parameter is frozen or unfrozen."""
        self.offsets: dict[int, int] = buffer.weights.slots
        """Where all parameters start, and their slots."""

    def watch(self, source: torch.Tensor) -> None:
        """Registers for the end of backwards through ``source``."""
        done = weakref.WeakMethod(self._backward_done)  # Python's GC does not see a tensor's hooks
        source.register_post_accumulate_grad_hook(lambda source: (done() or _nobody)(source))
        self._source, self._node = weakref.ref(source), engine.accumulation_node(source)
        self._node_stream = devices.current_stream(source.device)

    def follow_stream(self) -> None:
        """Makes autograd run `_backward_done` on the current stream: a node runs on the stream that it was made on."""
        source = self._source()
        if source is not None and self._node_stream != (here := devices.current_stream(source.device)):
            del self._node  # the last reference: the next call makes another
            self._node, self._node_stream = engine.accumulation_node(source), here

    def like(self, other: Gradients) -> None:
        """Copies the state of another buffer's gradients."""
        other._settle()
        for slot in other.accumulator.tied:
            other.accumulator.arrive(slot)
        self.sync = other.sync
        self.unreduced.like(other.unreduced)
        self.accumulator.like(other.accumulator)

    # The running backward

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

    def arrive(self) -> None:
        """Runs a deferred backward before gradients are read or changed."""
        if self.due is not None:
            self.due()

    def _begin(self) -> None:
        """Called before gradients of the running backward are kept or accumulated."""
        self.arrive()
        if self._left_out is None:
            self._of.unit.outermost.loose.uses(self._of)

    def _ask_before_first(self) -> None:
        if self.before_first is not None:
            self.before_first(self._of)
            self.before_first = None

    # Unreduced gradients

    @property
    def holds(self) -> bool:
        """Whether there are unreduced gradients."""
        return bool(self.unreduced.kept)

    @property
    def late(self) -> bool:
        """Whether gradients are unreduced, come in weight parts that wait, or are not summed over copies of a tied
        weight: they are in no ``.grad``.
        """
        tied = any(copy.unsent for copy in self.accumulator.tied.values())
        return self.unreduced.there or bool(self._parts()) or tied

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a reduction, for hooks, or for a deferred backward."""
        tied = any(copy.due for copy in self.accumulator.tied.values())
        return self.late or self.holds or self.hooks.pending is not None or self.due is not None or tied

    def hold(self, grads: torch.Tensor, offsets: Iterable[int]) -> bool:
        """Keeps gradients unreduced under `no_sync` and returns ``True``; else adds the unreduced ones to them."""
        if not self.wanted():
            return not self.sync
        self._begin()
        if self.sync:
            self.unreduced.add_to(grads)
        else:
            self.unreduced.add(grads, offsets)
        return not self.sync

    def forget(self, slots: Collection[int] | None = None) -> None:
        """Drops unreduced gradients, or those of some parameters; and weight parts that wait, of the whole stage."""
        self.arrive()
        if self._parts() and self.weight_parts is not None:
            self.weight_parts.clear()
        for slot, copy in self.accumulator.tied.items():
            if slots is None or slot in slots:
                copy.drop()
        if slots is None:
            self.unreduced.clear()
        else:
            self.unreduced.forget(slots)
        if not self.unreduced.offsets:
            self.votes.found.clear()
            self.hooks.pending = None

    # Accumulation

    def vote(self, offsets: Iterable[int]) -> None:
        """Asks all ranks which parameters have a gradient, before an `accumulate` whose offsets may differ by rank. A
        gradient on any rank counts on all. The host waits for the answer only when a ``.grad`` is read.
        """
        if self.wanted():
            self.votes.cast(self._slots(self.unreduced.offsets.union(offsets)))

    def accumulate(self, gshard: torch.Tensor, offsets: Iterable[int], scale: float) -> None:
        """Adds ``scale * gshard`` ([shard_numel]) in the accumulator's dtype; the first write is a store. Does nothing
        in a backward that is not for parameters (``torch.autograd.grad``, ``backward(inputs=...)``).
        """
        if not self.wanted():
            return
        self._begin()
        self._ask_before_first()
        slots = self._slots_with_unreduced(self.offsets if self._of.spec.any_optional else offsets)
        self.accumulator.stream = devices.current_stream(gshard.device)
        if any(self.hooks.grad_hooks.values()):
            self.hooks.add(gshard, scale, slots)
        else:
            self.accumulator.add(gshard, scale)
            self.accumulator.slots |= slots
        if self.sync:
            self._of.unit.outermost.syncs[0] += 1

    def bring(self, slot: int, rows: torch.Tensor) -> None:
        """Adds a gradient that eager autograd brings to a parameter, from uses outside of forward."""
        self.arrive()
        if slot in self.accumulator.tied:
            raise NotImplementedError(
                f"mfsdp: {self._of.layout.slots[slot].name} is a copy of a tied weight and has a gradient from outside "
                "of its stage's forward, which the other copies would not see: compute with it in forward"
            )
        self._ask_before_first()
        if self.heard():
            self.hooks.add_rows(slot, rows)
            self._finish_later()
        else:
            self.accumulator.add_rows(slot, rows)

    def _slots_with_unreduced(self, offsets: Iterable[int]) -> frozenset[int]:
        """Returns the slots to accumulate for: those that start at ``offsets``, and those of unreduced gradients."""
        if self.unreduced.offsets:
            return self._slots(self.unreduced.take_offsets().union(offsets))
        key = tuple(offsets)
        if key not in self.slots:
            self.slots[key] = self._slots(key)
        return self.slots[key]

    def _slots(self, offsets: Iterable[int]) -> frozenset[int]:
        """Returns the slots that start there and train."""
        return frozenset(slot for offset in offsets if self._of.trains[slot := self.offsets[offset]])

    # The end of a backward

    def heard(self) -> bool:
        """Whether any gradient hooks are registered."""
        return self.hooks.any()

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
            self.accumulate(rest, self.offsets, 1.0)
            source.grad = None
        for gradients in (self.hooks.pending, self.flat):
            if gradients is not None:  # the caller of backward waits for this stream
                devices.follow(self.accumulator.stream, gradients)
        if self.hooks.await_parameters():
            self._finish_later()
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
        if now not in self._finishes:
            self._finishes = {*self._finishes, now} if engine.nested() else {now}
            engine.after_backward(self._finish)

    def _finish(self) -> None:
        """Runs hooks after all gradients of a backward have arrived."""
        if self.hooks.pending is not None:
            gradients, slots = self.hooks.run(self.votes.counted())
            self.accumulator.add(gradients, 1.0)
            self.accumulator.slots |= slots
        if self.sync and any(self.hooks.post_hooks.values()):
            self._settle()
            self.hooks.run_post_hooks(self.accumulator.slots)

    # What users see

    @property
    def flat(self) -> torch.Tensor | None:
        """The accumulator, [layout.shard_numel]; ``None`` without a gradient."""
        return self.accumulator.flat

    @property
    def keeps(self) -> bool:
        """Whether the accumulator's memory stays while there is no gradient (Note [Stable addresses]); setting it to
        ``False`` frees it.
        """
        return self.accumulator.memory.keeps

    @keeps.setter
    def keeps(self, value: bool) -> None:
        self.arrive()
        self.accumulator.memory.keeps = value
        if not value:
            self.accumulator.memory.spare = None

    def total(self) -> torch.Tensor | None:
        """Returns the accumulator, with changes made to ``.grad``; ``None`` without a gradient."""
        self.arrive()
        self._check_parts()
        for slot in self.accumulator.tied:
            self.accumulator.arrive(slot)
        return self.accumulator.total()

    def _settle(self) -> None:
        """Counts the votes of finished reductions."""
        self.arrive()
        if self.votes.found and self.accumulator.flat is not None:
            self.accumulator.slots |= self.votes.counted()

    def has(self, slot: int) -> bool:
        """Whether a parameter has a gradient.

        Raises:
            RuntimeError: a backward has reduced other units, while this one has unreduced gradients from before; or
                weight parts of a pipeline stage's backward have not run, or the gradient of a tied weight is
                incomplete.
        """
        self._settle()
        self._check_parts()
        if self.unreduced.kept:
            self.unreduced.check()
        self.accumulator.arrive(slot)
        return slot in self.accumulator.slots

    def _parts(self) -> int:
        return self.weight_parts.waits(self._of) if self.weight_parts is not None else 0

    def _check_parts(self) -> None:
        if count := self._parts():
            raise RuntimeError(
                f"mfsdp: gradients of {self._of.path} are incomplete: weight parts of {count} microbatches of its "
                "pipeline stage have not run. Let the schedule's step end; after an exception in it, zero_grad() drops "
                "them, and you can call step again"
            )

    def of(self, slot: int) -> ShardedDTensor | None:
        """Returns a parameter's gradient in ``precision.main``, a view, or ``None``; raises like `has`."""
        return self.accumulator.grad(slot) if self.has(slot) else None

    def set(self, slot: int, value: torch.Tensor | None) -> None:
        """Drops the gradient for ``None``; else copies a tensor in."""
        self._settle()
        if value is not None:
            self.unreduced.check()
            self._check_parts()
            self.accumulator.arrive(slot)
            self.accumulator.set(slot, value)
            return
        if slot in self.accumulator.tied:
            self.accumulator.tied[slot].drop()
        if self.unreduced.kept or self.unreduced.offsets:
            self.forget([slot])
        self.accumulator.drop(slot, keep=self.keeps and engine.backward_number() < 0)


class _Votes:
    """Which parameters of a flat buffer have a gradient on any rank."""

    def __init__(self, buffer: FlatBuffer):
        self._of = buffer
        self.found: list[torch.Tensor] = []
        """[slots], one per reduction whose program may differ by rank."""
        self._ballots: dict[frozenset[int], torch.Tensor] = {}
        """This rank's votes, by slots. Cached: a copy to the device makes the host wait."""

    def cast(self, slots: frozenset[int]) -> None:
        """Launches a vote of all ranks, of this one for some slots."""
        capturing.obstacle("ranks ask each other which parameters have a gradient (uncompiled code, may_be_unused)")
        if slots not in self._ballots:
            votes = [slot in slots for slot in range(len(self._of.layout.slots))]
            self._ballots[slots] = torch.tensor(votes, device=self._of.weights.main.device)
        self.found.append(sync_collectives.on_any_rank(self._ballots[slots], self._of.spec))

    def counted(self) -> set[int]:
        """Returns the slots that any rank has voted for, and clears the votes. The host waits for them."""
        slots = {slot for votes in self.found for slot in votes.nonzero().flatten().tolist()}
        self.found.clear()
        return slots


def _nobody(source: torch.Tensor) -> None:
    """Does nothing: the hook's buffer no longer exists."""
