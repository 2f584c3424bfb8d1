"""What one rank keeps: for each unit flat buffers of main weights and gradients, and parameters that are views."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from ..runtime import devices, engine, immediate, owners, runs, transport
from ..spec.config import MixedPrecisionPolicy, Precision
from ..spec.layout import Layout, Local, Slot
from .placement import Placement
from .sharded import Sharding
from .tensors import ShardedDTensor, ShardedParameter, carry_attributes


@dataclass(frozen=True)
class Frame:
    """Names for listings: of the module that was sharded, and of its forward's parameters."""

    name: str
    inputs: tuple[str, ...]
    syncs: list[int] = field(default_factory=lambda: [0], compare=False)
    """How often gradients of any unit have been synchronised."""


GradHook = Callable[[torch.Tensor], torch.Tensor | None]
PostHook = Callable[[torch.Tensor], None]


class FlatBuffer:
    """The parameters of one unit that share dtypes, device and whether they train.

    ``main`` is this rank's flat part of the main weights, [layout.shard_numel] in ``precision.main``. ``params[i]`` is
    parameter i as a DTensor, its local tensor a view into ``main``. ``gradient`` is the accumulator,
    [layout.shard_numel] in ``precision.grad``, there from the first reduction until every ``.grad`` is set to ``None``;
    whoever reads a ``.grad`` sees it in ``precision.main``: a wider one is what the accumulator becomes until more is
    accumulated, a narrower one is a copy, whose changes count.
    ``source`` is what programs read parameters from, a leaf: ``main`` itself, or, where the strategy cuts the optimizer
    state further than the parameters, a copy that lasts, [spec.source_numel] in ``precision.comm``.

    Args:
        unit: the module's unit that it belongs to.
        layout: where each parameter lies; over all ranks that cut the main weights.
        placement: the strategy, and the ranks.
        precision: dtypes.
        trainable: whether the parameters require gradients, at first (`set_trains`).
        reshard: whether forward frees the gathered buffer.
        device: where the shard lives.
    """

    def __init__(
        self,
        unit: UnitState,
        layout: Layout,
        placement: Placement,
        precision: Precision,
        *,
        trainable: bool,
        reshard: bool,
        device: torch.device,
    ):
        self.unit, self.layout, self.placement, self.precision = unit, layout, placement, precision
        self.trains = [trainable] * len(layout.slots)
        """Which parameters require gradients; Dynamo reads it where they are read."""
        self.trainable = self.born_trainable = trainable
        """Whether any does; whether they did at first."""
        self.spec = placement.spec(layout, precision, reshard)
        self.text = self.spec.encode()
        """The spec as markers carry it."""
        home = weakref.ref(self)
        slots = range(len(layout.slots))
        shardings = [Sharding(layout, i, placement.mesh, placement.copies, home) for i in slots]
        self.rank = placement.rank
        self.locals: tuple[Local, ...] = tuple(layout.local(i, self.rank) for i in range(len(layout.slots)))
        self.main = torch.zeros(layout.shard_numel, dtype=precision.main, device=device)
        self.params = [ShardedParameter(self.view(self.main, i), s, trainable, self) for i, s in enumerate(shardings)]
        self.source = self.main
        if self.spec.kept:
            self.source = torch.zeros(self.spec.source_numel, dtype=precision.comm, device=device)
        self.stale = True
        """Whether the source has to be filled again."""
        self._version = -1
        owners.own(self.source, self)
        self.source.requires_grad_()  # nobody may register a hook otherwise
        done = weakref.WeakMethod(self._backward_done)  # a tensor's hooks are no garbage to Python
        self.source.register_post_accumulate_grad_hook(lambda source: (done() or _nobody)(source))
        self._node = engine.accumulation_node(self.source)
        self.source.requires_grad_(trainable)
        self.sync = True
        """Whether backward reduces gradients over the outer axis, or at all (`no_sync`)."""
        self._kept: dict[int, torch.Tensor] = {}
        """Gradients that wait for the next synchronisation, by elements: before or after the first reduction."""
        self._kept_offsets: set[int] = set()
        self._stream: torch.Stream | None = None
        """Where gradients were accumulated last."""
        self._kept_at = 0
        """`Frame.syncs` when something was kept last."""
        self.hooks: dict[int, OrderedDict[int, GradHook]] = {}
        """What wants to see, and may change, a slot's gradient before it is added to what is there."""
        self.post_hooks: dict[int, OrderedDict[int, PostHook]] = {}
        """What wants to know that a slot's ``.grad`` is complete."""
        self._pending: torch.Tensor | None = None
        """What a backward has brought, [layout.shard_numel] in ``precision.grad``, until hooks have seen it."""
        self._arrived: set[int] = set()
        """Slots that it has brought gradients for."""
        self._backward = -1
        """Which backward that was."""
        self._finishes = -1
        """The last backward whose end was asked for."""
        self._votes: list[torch.Tensor] = []
        """Which slots have a gradient on any rank, [slots], of reductions whose programs may differ by rank."""
        self._dropped: set[int] = set()
        """Slots whose gradient has been set to ``None`` while others of the buffer have theirs."""
        self.before_first_gradient: Callable[[FlatBuffer], None] | None = None
        """Asked once, before anything is accumulated; may raise."""
        self.gradient: torch.Tensor | None = None
        self._has: set[int] = set()
        """Slots that have a gradient."""
        self._looked: torch.Tensor | None = None
        """The accumulator in a narrower ``precision.main``, while somebody looks at ``.grad``."""
        self._touched = _Touched()
        """Whether it has been written, through DTensors; through plain tensors its version says."""
        self._grads: dict[int, ShardedDTensor] = {}
        """Every ``.grad`` that has been looked at, views of the accumulator or of ``_looked``."""
        self._index = {slot.offset: i for i, slot in enumerate(layout.slots)}
        self.places: dict[tuple[int, str], tuple[dict[str, Any], int]] = {}
        """Where its parameters hang: a module's ``_parameters`` and the slot, by ``id`` of the dict and name in it."""
        self.born_on_meta: dict[int, torch.dtype] = {}
        """Slots whose parameter was built on the meta device, and its dtype there."""
        self.written: set[int] = set()
        """Those that an initialiser has written."""
        self.initialised = False
        """Whether initialisers are through; what has been written since is real."""
        self.summoned: torch.Tensor | None = None
        """The full main weights while `summon_full_params` is open."""

    @property
    def path(self) -> str:
        """What errors call it: the model, the unit, and which of the unit's buffers it is."""
        number = self.unit.buffers.index(self)
        which = f", buffer {number}" if number else ""
        return f"unit {self.unit.fqn!r} of {self.unit.frame.name}{which}  ({self.spec.cutting})"

    def view(self, flat: torch.Tensor, slot: int) -> torch.Tensor:
        """This rank's rows of a parameter, as a view into a flat shard."""
        at = self.locals[slot]
        return flat.detach()[at.shard_offset : at.shard_offset + at.numel].view(at.shape)

    def full_view(self, full: torch.Tensor, slot: int) -> torch.Tensor:
        """A whole parameter, as a tensor over the full buffer's storage that autograd does not take for a view."""
        s = self.layout.slots[slot]
        strides = torch.empty(s.shape, device="meta").stride()
        return full.new_empty(0).set_(full.untyped_storage(), s.offset, s.shape, strides)

    def respec(self, **changes: object) -> None:
        """Changes the spec; programs that carry the old one recompile."""
        self.spec = replace(self.spec, **changes)  # type: ignore[arg-type]
        self.text = self.spec.encode()

    def __deepcopy__(self, memo: dict[int, object]) -> FlatBuffer:
        if self.summoned is not None:
            raise RuntimeError(f"mfsdp: {self.path} is summoned; leave mfsdp.summon_full_params before copying")
        twin = FlatBuffer(
            self.unit, self.layout, self.placement, self.precision,
            trainable=False, reshard=self.spec.reshard, device=self.main.device,
        )  # fmt: skip
        memo[id(self)] = twin
        twin.unit = copy.deepcopy(self.unit, memo)
        twin.respec(divide=self.spec.divide, hold=self.spec.hold)
        twin.sync = self.sync
        self._settle()
        twin._kept = {size: kept.clone() for size, kept in self._kept.items()}
        twin._kept_offsets, twin._kept_at = set(self._kept_offsets), self._kept_at
        if self in _holding:
            _holding.add(twin)
        twin._has, twin._dropped = set(self._has), set(self._dropped)
        with torch.no_grad():
            total = self.total()
            twin.gradient = None if total is None else total.clone()
            twin.main.copy_(self.main)
            for mine, its in zip(self.params, twin.params, strict=True):
                carry_attributes(mine, its)
                its.requires_grad_(mine.requires_grad)
                memo[id(mine)] = its
        return twin

    def place(self, params: dict[str, Any], name: str, slot: int) -> None:
        """Says where a parameter hangs."""
        self.places[id(params), name] = params, slot

    def in_place(self) -> None:
        """Makes sure that modules still have these parameters: a compiled program reads them, whatever hangs there.

        Raises:
            RuntimeError: another tensor is in the place of one: `summon_full_params` is open, or somebody has put it
                there (``torch.func.functional_call``).
        """
        for (_, name), (params, slot) in self.places.items():
            there = params.get(name)
            if there is not None and there is not self.params[slot]:
                raise RuntimeError(
                    f"mfsdp: a compiled model reads sharded parameters, and another tensor is in the place of {name} "
                    f"of {self.path}. "
                    + (
                        "Values that are put there (torch.func.functional_call) are seen by uncompiled code only: call "
                        "it under torch.compiler.set_stance('force_eager')."
                        if self.summoned is None
                        else "Leave mfsdp.summon_full_params first, or call the model uncompiled."
                    )
                )

    # parameters that last

    def due(self) -> bool:
        """Whether main weights have been written since the source was filled last. All ranks agree: writes through
        DTensors count on every rank, also where it holds no rows.
        """
        return self.spec.kept and (self.stale or self.main._version != self._version)

    def refresh(self) -> list[Callable[[], object]]:
        """Launches the gather into the source if it is due; gives what has to be called before it may be read."""
        if not self.due():
            return []
        version = self.main._version
        with torch.no_grad():
            ends = immediate.replicate(self.main.detach(), self.source.detach(), self.spec)
        self.stale, self._version = False, version
        return ends

    # gradients

    def set_trains(self, slot: int, trains: bool) -> None:
        """Freezes or unfreezes a parameter; compiled graphs that read it recompile. A buffer in which any parameter
        trains reduces whole gradients, with zeros for those that do not.
        """
        self.trains[slot] = trains
        self.trainable = any(self.trains)
        self.source.requires_grad_(self.trainable)

    def hold(self, grads: torch.Tensor, offsets: Iterable[int]) -> bool:
        """Whether gradients stay here for now: then they are kept. Otherwise what was kept is added to them."""
        if not engine.accumulates(self._node):
            return not self.sync
        kept = self._kept.pop(grads.numel(), None)
        if self.sync:
            if kept is not None:
                torch.add(kept, grads, out=grads)
            return False
        _reach_zero_grad()
        _holding.add(self)
        self._kept[grads.numel()] = grads.to(self.precision.grad, copy=True) if kept is None else kept.add_(grads)
        self._kept_offsets.update(offsets)
        self._kept_at = self.unit.frame.syncs[0]
        return True

    @property
    def waits(self) -> bool:
        """Whether gradients wait for the next synchronisation, or for hooks."""
        return bool(self._kept) or self._pending is not None

    def forget(self, slots: Iterable[int] | None = None) -> None:
        """Drops what waits for the next synchronisation, or some parameters' part of it."""
        if slots is not None:
            chosen = [self.layout.slots[slot] for slot in slots]
            self._kept_offsets -= {s.offset for s in chosen}
            if self._kept_offsets:
                for kept in self._kept.values():
                    kept.masked_fill_(self._mask(chosen, kept.numel()), 0)
                return
        self._kept.clear()
        self._kept_offsets.clear()
        self._votes.clear()
        self._pending = None
        _holding.discard(self)

    def _mask(self, slots: Iterable[Slot], numel: int) -> torch.Tensor:
        """Where some parameters lie in whole gradients, or in this rank's shard of them; booleans, [numel]."""
        full = torch.zeros(self.spec.full_numel, dtype=torch.bool, device=self.main.device)
        for slot in slots:
            full[slot.offset : slot.offset + slot.numel] = True
        if numel == full.numel():
            return full
        shard = full.new_empty(numel)
        rank = self.rank * self.spec.world // self.layout.world
        for whole, part in transport.segments(self.spec.splits, self.spec.world, full, shard):
            part.copy_(whole.view(self.spec.world, -1)[rank])
        return shard

    def vote(self, offsets: Iterable[int]) -> None:
        """Asks all ranks which parameters have a gradient, before an `accumulate` whose offsets may differ by rank:
        what any rank has counts on all of them. Nobody waits for the answer until a ``.grad`` is read.
        """
        if not engine.accumulates(self._node):
            return
        mine = self._slots(self._kept_offsets.union(offsets))
        votes = [slot in mine for slot in range(len(self.layout.slots))]
        self._votes.append(immediate.everywhere(torch.tensor(votes, device=self.main.device), self.spec))

    def accumulate(self, gshard: torch.Tensor, offsets: Iterable[int], scale: float) -> None:
        """Adds ``scale * gshard`` ([shard_numel]) in the accumulator's dtype; the first write is a store. Does nothing
        in a backward that is not for parameters (``torch.autograd.grad``, ``backward(inputs=...)``).
        """
        if not engine.accumulates(self._node):
            return
        self._ask_before_first()
        slots = self._slots(self._kept_offsets.union(offsets))
        self._kept_offsets.clear()
        if not self._kept:
            _holding.discard(self)
        self._stream = devices.current_stream(self.main.device)
        if any(self.hooks.values()):
            self._pending = self._sum(self._of_this_backward(), gshard, scale)
            self._arrived |= slots
        else:
            self._ready()
            self._become(self._sum(self.gradient, gshard, scale))
            self._has |= slots
        if self.sync:
            self.unit.frame.syncs[0] += 1

    def bring(self, slot: int, rows: torch.Tensor) -> None:
        """Adds what autograd has brought to a parameter itself, from what was computed with it outside of forward."""
        self._ask_before_first()
        if any(self.hooks.values()) or any(self.post_hooks.values()):
            if self._of_this_backward() is None:
                self._pending = torch.zeros_like(self.main, dtype=self.precision.grad)
            assert self._pending is not None
            self.view(self._pending, slot).add_(rows)
            self._arrived.add(slot)
            self._finish_later()
            return
        total = self._ready()
        if total is None:
            total = torch.zeros_like(self.main, dtype=self.precision.grad)
        devices.follow(self._stream, total)
        self.view(total, slot).add_(rows)
        self._become(total)
        self._has.add(slot)

    def _ask_before_first(self) -> None:
        if self.before_first_gradient is not None:
            self.before_first_gradient(self)
            self.before_first_gradient = None

    def _of_this_backward(self) -> torch.Tensor | None:
        """What hooks are to see of it so far. What an earlier one has left, it died of an exception."""
        now = engine.backward_number()
        if self._backward != now:
            self._backward, self._pending, self._arrived = now, None, set()
        return self._pending

    def _slots(self, offsets: Iterable[int]) -> set[int]:
        """Those that start there, and train."""
        return {slot for offset in offsets if self.trains[slot := self._index[offset]]}

    def _sum(self, total: torch.Tensor | None, gshard: torch.Tensor, scale: float) -> torch.Tensor:
        """Scales and adds in a dtype that holds both; rounds once."""
        if total is not None:
            return total.add_(gshard, alpha=scale)
        total = torch.empty_like(self.main, dtype=self.precision.grad)
        wide = torch.promote_types(gshard.dtype, total.dtype)
        if wide is total.dtype is not gshard.dtype:
            return total.copy_(gshard).mul_(scale)
        return torch.mul(gshard.to(wide), scale, out=total)

    def _ready(self) -> torch.Tensor | None:
        """The accumulator in its own dtype, without what was dropped: more may be added."""
        total = self.total()
        if total is not None:
            for slot in self._dropped:
                self.view(total, slot).zero_()
            self._become(total.to(self.precision.grad))
        self._dropped.clear()
        self._looked = None
        return self.gradient

    def total(self) -> torch.Tensor | None:
        """The accumulator, with what has been done to ``.grad``; ``None`` where there is no gradient."""
        looked = self._looked
        if looked is not None and self.gradient is not None and self._touched != _Touched(looked._version):
            self.gradient.copy_(looked)
            self._touched.version, self._touched.stale = looked._version, False
        return self.gradient

    def _become(self, total: torch.Tensor | None) -> None:
        """Makes a tensor the accumulator."""
        if total is not self.gradient or self._looked is not None:
            self._grads.clear()
        self.gradient = total

    def _backward_done(self, source: torch.Tensor) -> None:
        """Autograd calls it once per backward, when all programs that read the source are through with it, with what
        reached it through autograd itself: gradients of programs that ran without our passes.
        """
        if source.is_meta:
            return  # nothing runs
        if source.grad is not None:
            groups = self.spec.meets if self.spec.replica or self.spec.outer > 1 else ()
            with runs.announced(f"reduction of {self.path}", *groups):
                rest = immediate.reduce_rest(source.grad, self.text)
            self.accumulate(rest, self._index, 1.0)
            source.grad = None
        for gradients in (self._pending, self.gradient):
            if gradients is not None:  # whoever called backward waits for this stream
                devices.follow(self._stream, gradients)
        hooked = {slot for slot, hooks in (*self.hooks.items(), *self.post_hooks.items()) if hooks}
        if any(engine.accumulates(engine.accumulation_node(self.params[slot])) for slot in hooked):
            self._finish_later()  # more is to come, from outside of forward
        else:
            self._finish()

    def _finish_later(self) -> None:
        """`_finish`, once, when the backward that is running ends."""
        now = engine.backward_number()
        if self._finishes != now:
            self._finishes = now
            engine.after_backward(self._finish)

    def _finish(self) -> None:
        """Runs hooks, when a backward has brought everything."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._arrived |= self._counted()
            for slot in sorted(self._arrived):
                self._ask_hooks(pending, slot)
            self._ready()
            self._become(self._sum(self.gradient, pending, 1.0))
            self._has |= self._arrived
        if self.sync and any(self.post_hooks.values()):
            self._settle()
            for slot in sorted(self._has):
                for hook in tuple(self.post_hooks.get(slot, {}).values()):
                    hook(self.params[slot])

    def _ask_hooks(self, gradients: torch.Tensor, slot: int) -> None:
        for hook in tuple(self.hooks.get(slot, {}).values()):
            mine = self._shown(gradients, slot)
            with torch.no_grad():
                changed = hook(mine)
                if changed is not None and changed is not mine:
                    if not isinstance(changed, torch.Tensor) or changed.shape != mine.shape:
                        raise RuntimeError(
                            f"mfsdp: a gradient hook of {self.layout.slots[slot].name} in unit {self.unit.fqn!r} "
                            f"returned {changed!r}; return None or a gradient of shape {tuple(mine.shape)}"
                        )
                    mine.copy_(changed)

    def _shown(self, gradients: torch.Tensor, slot: int) -> ShardedDTensor:
        """A parameter's part of flat gradients."""
        return ShardedDTensor(self.view(gradients, slot), self.params[slot].sharding)

    def _counted(self) -> set[int]:
        """Slots that somebody has voted for; the votes are gone."""
        slots = {slot for votes in self._votes for slot in votes.nonzero().flatten().tolist()}
        self._votes.clear()
        return slots

    def _settle(self) -> None:
        """Counts votes of what has landed."""
        if self._votes and self.gradient is not None:
            self._has |= self._counted()

    def has_grad(self, slot: int) -> bool:
        """Whether a parameter has a gradient.

        Raises:
            RuntimeError: a backward has synchronised other units, while this one has gradients waiting from before.
        """
        if self._kept and self.unit.frame.syncs[0] > self._kept_at:
            raise RuntimeError(
                f"mfsdp: unit {self.unit.fqn!r} has gradients from backward calls under no_sync, and the one that "
                "synchronised did not use it. Let every unit take part in it, or do without no_sync."
            )
        self._settle()
        return slot in self._has

    def grad_of(self, slot: int) -> ShardedDTensor | None:
        """The gradient of a parameter in ``precision.main``, a view, or ``None``; raises as `has_grad` does."""
        if not self.has_grad(slot):
            return None
        assert self.gradient is not None
        main = self.precision.main
        if self.gradient.dtype.itemsize < main.itemsize:
            self._become(self.gradient.to(main))
        elif self.gradient.dtype is not main and self._looked is None:
            self._looked = self.gradient.to(main)
            self._touched = _Touched(self._looked._version)
            self._grads.clear()
        if slot not in self._grads:
            self._grads[slot] = self._shown(self.gradient if self._looked is None else self._looked, slot)
            self._grads[slot]._mfsdp_owner = self._touched
        return self._grads[slot]

    def set_grad_of(self, slot: int, value: torch.Tensor | None) -> None:
        """``None`` forgets the gradient (the storage goes when all are forgotten); a tensor is copied in."""
        self._settle()
        if value is None:
            if self in _holding:
                self.forget([slot])
            self._grads.pop(slot, None)
            if slot in self._has:
                self._has.remove(slot)
                self._dropped.add(slot)
            if not self._has:
                self.gradient = self._looked = None
                self._dropped.clear()
                self._grads.clear()
            return
        if value is self._grads.get(slot):
            return
        if self.gradient is None:
            self._become(torch.zeros_like(self.main))
        self._has.add(slot)
        self._dropped.discard(slot)
        mine = self.grad_of(slot)
        assert mine is not None
        with torch.no_grad():
            mine.copy_(value)

    # whole values, outside of training

    def gather_main(self) -> torch.Tensor:
        """The full main weights, [full_numel] in ``precision.main``; a collective."""
        with runs.announced(f"gather of main weights of {self.path}", *self.spec.meets):
            return immediate.gather_main(self.main, self.spec)

    def scatter_main(self, full: torch.Tensor) -> None:
        """Keeps this rank's part of full main weights."""
        self.stale = True
        with torch.no_grad():
            for slot in range(len(self.layout.slots)):
                self.keep(slot, self.full_view(full, slot))

    def keep(self, slot: int, value: torch.Tensor) -> None:
        """Keeps this rank's part of one whole parameter."""
        at = self.locals[slot]
        part = value.detach().reshape(-1)[at.param_offset : at.param_offset + at.numel]
        self.view(self.main, slot).copy_(part.view(at.shape))


@dataclass
class _Touched:
    """What a tensor was when it was made, and whether DTensors over it have written to it since."""

    version: int = -1
    stale: bool = False


_holding: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()
"""Buffers with gradients that wait for the next synchronisation."""


@functools.cache
def _reach_zero_grad() -> None:
    """Makes ``zero_grad`` of every optimizer and of every module forget the gradients that wait for a synchronisation.

    Those are not in any ``.grad``, so a step that is given up half-way would leave them for the next one. torch has no
    hook there; so ``torch.optim.Optimizer.zero_grad`` and ``torch.nn.Module.zero_grad`` (which torch.compile's wrapper
    inherits) are wrapped, once, when the first gradient is held back: a process that never does keeps torch's own. A
    class whose ``zero_grad`` does not call its parent's is reached if it sets ``.grad`` to ``None`` unasked.
    """

    def wrapped(zero_grad: Callable[..., None], parameters: Callable[[Any], Iterable[Any]]) -> Callable[..., None]:
        @torch.compiler.disable
        @functools.wraps(zero_grad)
        def run(self: Any, set_to_none: bool = True) -> None:
            if _holding:
                chosen: dict[FlatBuffer, set[int]] = {}
                for p in parameters(self):
                    if isinstance(p, ShardedParameter) and p._mfsdp_owner in _holding:
                        chosen.setdefault(p._mfsdp_owner, set()).add(p.sharding.slot)
                for buffer, slots in chosen.items():
                    buffer.forget(slots)
            zero_grad(self, set_to_none)

        return cast(Callable[..., None], run)

    optimizer, module = torch.optim.Optimizer, nn.Module
    optimizer.zero_grad = wrapped(  # type: ignore[method-assign]
        optimizer.zero_grad, lambda self: (p for group in self.param_groups for p in group["params"])
    )
    module.zero_grad = wrapped(module.zero_grad, nn.Module.parameters)  # type: ignore[method-assign]


def _nobody(source: torch.Tensor) -> None:
    """What a hook does for a buffer that is gone."""


@dataclass
class Ref:
    """How a module finds one of its parameters. Plain attributes: Dynamo reads them."""

    buffer: FlatBuffer
    slot: int
    offset: int
    shape: tuple[int, ...]
    unit: UnitState
    index: int
    """Which of the unit's buffers."""


@dataclass(eq=False)
class UnitState:
    """A unit at run time: its module's buffers, and what the eager path has gathered."""

    fqn: str
    """Path of the module from the outermost one that was sharded, ``"(root)"`` for that one."""
    frame: Frame
    policy: MixedPrecisionPolicy
    buffers: list[FlatBuffer] = field(default_factory=list)
    open: bool = False
    """Whether a forward of the unit runs in plain Python now; Dynamo guards on it where parameters are read."""
    full: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    """Eager path: parameters of gathered buffers, by index of the buffer."""
    kept: bool = False
    """Whether `unshard()` asked to keep them."""
    root_keeps: bool = False
    """Whether it does not reshard after forward because it is the outermost, until there is one around it."""


def refs(module: nn.Module) -> dict[str, Ref]:
    """The sharded parameters that the module itself owns."""
    return cast(dict[str, Ref], module.__dict__.get("_mfsdp_refs", {}))
