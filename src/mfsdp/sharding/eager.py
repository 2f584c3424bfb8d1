"""The eager fallback: gathers full parameters for code outside of compiled graphs.

Modules read parameters through properties (`sharding.module`). Under Dynamo these leave markers in the graph. If a
unit's forward runs as plain Python (graph break, ``torch.compiler.disable``, uncompiled call), it opens a `Scope`,
which gathers the unit. All code inside reads the gathered parameters; subgraphs that Dynamo compiles take them as
inputs. The end of the forward frees them. Backward gathers again when autograd unpacks the first saved tensor. A unit
is gathered once per forward and once per backward, and what is gathered already (``unshard()``) is used.

Code may call submodules of a unit past the unit's own forward. Inside another unit's forward, such a unit stays
gathered until the next one is.

Note [Saved tensors]
Saved-tensor hooks pack what autograd saves of a gathered buffer into a ticket. The buffer dies with its last ticket,
when that backward node is done: no code has to know when a unit's backward ends, and frozen units, which have none, are
no special case. Existing hooks, such as ``torch.utils.checkpoint``'s, still get every other tensor.

Note [Recomputation]
Backward runs a checkpointed region again when the unit around it is no longer open. Modules in the region then open
that unit themselves; parameters read between them are gathered too. The unit stays gathered until backward ends.
Checkpointing compares what both runs save, so which hooks see a tensor must not depend on who opened the unit: inside a
module with sharded parameters ours are on top, elsewhere checkpoint's. A module whose unit is already open therefore
puts ours back on top of foreign ones.

A recomputed forward of a unit leaves what it gathered to the backward that follows, until another unit is gathered: of
a region with several units, all at once may not fit, and backward gathers all but the last again.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..buffers.flat_buffer import FlatBuffer, Ref, UnitState
from ..dtensor.tp_shards import here
from ..dtensor.transformer_engine import Lent
from ..runtime import buffer_registry, engine, sync_collectives
from . import eager_warnings, mutation_check
from .te_eager import MainGrads


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []
        self.visited: set[UnitState] = set()
        """Units that are read only inside another unit's scope."""
        self.again: dict[UnitState, int] = {}
        """Units that a recomputation reads and no scope closes, and the number of the backward."""
        self.called: Scope | None = None
        """The last call of a submodule past its unit's forward, inside another unit's; its unit is still gathered."""
        self.recomputed: dict[FlatBuffer, tuple[int, torch.Tensor]] = {}
        """What the last recomputed forward gathered, and the weights' version, until the backward that follows takes
        it. An exception in backward leaves it there.
        """


_here = _Thread()
_tickets: dict[int, Ticket] = {}
"""Gathered buffers that forward reads, by address of their storage. Of the process, as `UnitState.full`: on a GPU
autograd runs backward, and recomputes what was checkpointed, in a thread of its own.
"""


class Ticket:
    """One forward's use of a gathered buffer; gathers again when backward needs it."""

    def __init__(self, buffer: FlatBuffer, full: torch.Tensor | None):
        self.buffer, self.full = buffer, full
        self.version = buffer.weights.version
        self.watch: mutation_check.MutationCheck | None = None
        self.main_grads = MainGrads(buffer)

    def storage(self) -> torch.Tensor:
        """A tensor over the gathered buffer's storage.

        Raises:
            RuntimeError: the weights were written to since forward read them.
        """
        if self.version != self.buffer.weights.version:
            raise RuntimeError(
                f"mfsdp: weights of {self.buffer.path} needed for gradient computation have been modified by an "
                "inplace operation (an optimizer's step, a load) since forward read them. Run backward first, or "
                "forward again; a write to any parameter of a unit counts for all of them"
            )
        if self.full is not None:
            return self.full
        unit = self.buffer.unit
        gathered = unit.full.get(unit.buffers.index(self.buffer))
        if gathered is not None:
            return gathered[0]
        version, full = _here.recomputed.pop(self.buffer, (-1, None))
        self.full = _gathered(self.buffer) if full is None or version != self.version else full
        return self.full


class _Saved:
    """A saved tensor over a gathered buffer: any view, in any dtype, or a DTensor of one."""

    def __init__(self, ticket: Ticket, like: torch.Tensor):
        self.ticket = ticket
        local = here(like)
        self.where = (local.storage_offset(), local.shape, local.stride())  # in elements of its dtype
        self.dtype, self.conjugate, self.negative = local.dtype, local.is_conj(), local.is_neg()
        self.spec = like._spec if isinstance(like, DTensor) else None

    def tensor(self) -> torch.Tensor:
        full = self.ticket.storage()
        local = full.new_empty(0, dtype=self.dtype).set_(full.untyped_storage(), *self.where)
        if self.conjugate:
            local = torch._conj(local)
        if self.negative:
            local = torch._neg_view(local)
        return local if self.spec is None else DTensor(local, self.spec, requires_grad=False)


class _Kept:
    """Any other saved tensor, with its version, which torch does not check for tensors that hooks have packed."""

    def __init__(self, tensor: torch.Tensor):
        self.value, self.version = tensor, tensor._version

    def tensor(self) -> torch.Tensor:
        if self.value._version != self.version:
            raise RuntimeError(
                "mfsdp: one of the variables needed for gradient computation has been modified by an inplace operation"
                f": {self.value.type()} {list(self.value.shape)} is at version {self.value._version}, expected version "
                f"{self.version}. Write to a clone of it; torch.autograd.set_detect_anomaly(True) shows which operator "
                "needs it."
            )
        return self.value


class _Gather(torch.autograd.Function):
    """Full parameters from the shard; backward adds their gradients to the accumulator."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, main: torch.Tensor, buffer: FlatBuffer, full: torch.Tensor, main_grads: MainGrads
    ) -> tuple[torch.Tensor, ...]:
        ctx.buffer, ctx.main_grads = buffer, main_grads
        ctx.set_materialize_grads(False)
        views = tuple(buffer.weights.full_view(full, i) for i in range(len(buffer.layout.slots)))
        ctx.mark_non_differentiable(*(v for v, trains in zip(views, buffer.trains, strict=True) if not trains))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        buffer: FlatBuffer = ctx.buffer
        there = {slot: grad for slot, grad in enumerate(grads) if grad is not None}
        gfull, offsets = ctx.main_grads.packed(there)
        if gfull is not None:
            sync_collectives.reduce_now(buffer.weights.source, gfull, offsets, buffer.text)
        return None, None, None, None


class Cover:
    """A forward of a module whose unit is already open: pushes our hooks on top of foreign ones."""

    def __init__(self, hooks: torch.autograd.graph.saved_tensors_hooks):
        self.hooks = hooks
        hooks.__enter__()

    def check(self) -> None:
        """Does nothing; the scope that opened the unit checks."""

    @torch.compiler.disable
    def close(self) -> None:
        self.hooks.__exit__(None, None, None)


class Scope:
    """A forward of a unit in plain Python: gathers the unit and frees it at the end.

    Args:
        unit: the unit.
        place: the forward's name in warnings and errors.
        own: whether it is the unit's own module's, not that of one below.
    """

    def __init__(self, unit: UnitState, place: str, own: bool):
        self.unit, self.place, self.own = unit, place, own
        _forget_recomputed()
        _forget_written(unit)
        unit.open = True
        _here.stack.append(self)
        unit.outermost.loose.begins()
        unit.outermost.loose.scopes += 1
        transformed = engine.transformed()
        self.hooks = _hooks() if torch.is_grad_enabled() and not transformed else None
        if self.hooks is not None:
            self.hooks.__enter__()
        try:
            for index in range(0 if transformed else len(unit.buffers)):
                _whole(unit, index, place)
        except BaseException:  # ranks have diverged, and no caller has the scope yet to close it
            self.close()
            raise

    @torch.compiler.disable
    def check(self) -> None:
        """Raises a RuntimeError if the completed forward has written to a parameter."""
        for unit in [self.unit, *(_here.visited if len(_here.stack) == 1 else ())]:
            check(unit, self.place)
        if _here.called is not None and len(_here.stack) == 1:
            check(_here.called.unit, _here.called.place)
        loose = self.unit.outermost.loose
        if loose and loose.scopes == 1 and self.unit.fqn == "(root)" and not torch.is_grad_enabled():
            loose.end("forward")

    @torch.compiler.disable
    def close(self) -> None:
        if self.hooks is not None:
            self.hooks.__exit__(None, None, None)
        _here.stack.remove(self)
        self.unit.outermost.loose.scopes -= 1
        self.unit.open = False
        if self.own and _recomputing():
            _keep_for_backward(self.unit)
        elif _recomputing():
            _keep_until_backward_ends(self.unit)
        elif not self.own and _here.stack:
            if _here.called is not None and _here.called.unit is not self.unit:
                _end_called()
            _here.called = self
            return
        release(self.unit)
        if not _here.stack:
            called, _here.called = _here.called, None
            if called is not None:  # `check` has looked at it
                release(called.unit)
            for unit in list(_here.visited):
                release(unit)
            _here.visited.clear()


@torch.compiler.disable
def scope(module: nn.Module, own: bool) -> Scope | Cover | None:
    """Opens the scope of a module's unit (its own, or the one around it); close it after the call."""
    if module.__dict__["_mfsdp_unit"].open:
        hooks = _hooks() if _here.stack and engine.saved_tensors_hooks() is not None else None
        return None if hooks is None else Cover(hooks)
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    place = f"{type(module).__name__}.forward{line}, called from {eager_warnings.caller()},"
    return Scope(module.__dict__["_mfsdp_unit"], place, own)


def inside() -> bool:
    """Whether ``parameters()`` yields full parameters: in a plain Python forward with gradients enabled. Under
    ``torch.no_grad()`` it yields shards there too, since updates made to them last (moving averages).
    """
    return bool(_here.stack) and torch.is_grad_enabled()


@torch.compiler.disable
def read(module: nn.Module, name: str, ref: Ref) -> torch.Tensor:
    """A parameter as plain Python sees it: full inside a forward, else a DTensor; or what
    ``torch.func.functional_call`` has put in its place.

    Raises:
        NotImplementedError: inside a ``torch.func`` transform, which cannot transform a gather.
    """
    now: Any = module._parameters[name]
    if now is not ref.buffer.params[ref.slot]:
        return now  # type: ignore[no-any-return]
    _forget_recomputed()
    _forget_written(ref.unit)
    again = not _here.stack and _recomputing()
    lasts = ref.index in ref.unit.full and ref.unit not in _here.again
    if not (_here.stack or again or lasts):
        return now  # type: ignore[no-any-return]
    if engine.transformed():
        raise mutation_check.not_transformed(f"{type(module).__name__}.{name} of unit {ref.unit.fqn!r}")
    if again and not ref.unit.kept:
        _keep_until_backward_ends(ref.unit)
    elif ref.index not in ref.unit.full:
        _here.visited.add(ref.unit)
    return ref.seen(_whole(ref.unit, ref.index, eager_warnings.caller())[ref.slot])


def _whole(unit: UnitState, index: int, place: str) -> Sequence[torch.Tensor]:
    if index not in unit.full:
        if _here.called is not None and _here.called.unit is not unit:
            _end_called()
        eager_warnings.warn_of_read(unit, place)
        unit.full[index] = gather(unit.buffers[index])
    return unit.full[index]


def gather(buffer: FlatBuffer) -> Sequence[torch.Tensor]:
    """Returns all parameters of a buffer, full, with autograd; one collective."""
    full = _gathered(buffer)
    ticket = _tickets[full.untyped_storage().data_ptr()] = Ticket(buffer, full)
    with torch.enable_grad():  # later readers may need gradients
        params = _Gather.apply(buffer.weights.source, buffer, full, ticket.main_grads)  # type: ignore[no-untyped-call]
    ticket.watch = mutation_check.MutationCheck(buffer, params)
    buffer_registry.register_full(params, buffer)
    return params  # type: ignore[no-any-return]


def _gathered(buffer: FlatBuffer) -> torch.Tensor:
    """The buffer's full parameters, [full_numel]; a collective."""
    _here.recomputed.clear()
    return sync_collectives.gather_now(buffer.weights.source, buffer.text)


def lend(value: torch.Tensor) -> torch.Tensor:
    """What a module that keeps weights outside of autograd gets for one that it has read (Note [Lent weights])."""
    ticket = _tickets.get(value.untyped_storage().data_ptr()) if type(value) is torch.Tensor else None
    if ticket is None or not torch.is_grad_enabled():
        return value
    starts = [slot.offset if slot.numel else -1 for slot in ticket.buffer.layout.slots]
    return ticket.main_grads.lend(value, starts.index(int(value.storage_offset())))


def check(unit: UnitState, place: str) -> None:
    """Raises a RuntimeError if a gathered parameter of the unit has been written to."""
    for ticket in _tickets_of(unit):
        if ticket.watch is not None:
            slot = ticket.watch.written()
            if slot is not None:
                ticket.buffer.weights.stale = True  # a persistent buffer may have been written to
                raise mutation_check.refuse(ticket.buffer, slot, place)


def release(unit: UnitState) -> None:
    """Frees what the unit gathered, unless it is kept; backward gathers again."""
    if unit not in _here.again:
        _release(unit)


def _release(unit: UnitState) -> None:
    if unit.kept or unit.open:
        return
    unit.full.clear()
    for address, ticket in list(_tickets.items()):
        if ticket.buffer in unit.buffers:
            _tickets.pop(address, None)
            _drop(ticket)


def _drop(ticket: Ticket) -> None:
    ticket.watch = None
    freed = ticket.buffer.spec.reshard and ticket.buffer.spec.gathers
    ticket.main_grads.end_loans(hollow=freed)
    if freed:
        ticket.full = None


def _recomputing() -> bool:
    """Whether a checkpointed region runs again: inside a backward, with gradients enabled."""
    return torch.is_grad_enabled() and engine.backward_number() >= 0


def _end_called() -> None:
    called, _here.called = _here.called, None
    if called is not None:
        try:
            check(called.unit, called.place)
        finally:
            release(called.unit)


def _forget_written(unit: UnitState) -> None:
    """Frees a unit whose weights have been written since it was gathered: one that was called, or one that a backward
    has gathered again in its thread and left, after an exception.
    """
    if unit.open or not any(t.version != t.buffer.weights.version for t in _tickets_of(unit)):
        return
    if _here.called is not None and _here.called.unit is unit:
        _end_called()
    else:
        _release(unit)


def _tickets_of(unit: UnitState) -> list[Ticket]:
    return [ticket for ticket in list(_tickets.values()) if ticket.buffer in unit.buffers]


def _keep_for_backward(unit: UnitState) -> None:
    """Frees a unit whose forward was recomputed, except for what backward reads next."""
    if not _here.recomputed:
        engine.after_backward(_here.recomputed.clear)  # may run in another thread
    gathered = [(ticket, ticket.full) for ticket in _tickets_of(unit)]
    release(unit)
    for ticket, full in gathered:
        if ticket.full is None and full is not None:
            _here.recomputed[ticket.buffer] = ticket.version, full


def _keep_until_backward_ends(unit: UnitState) -> None:
    if unit in _here.again:
        return
    if not _here.again:
        again = _here.again  # the callback may run in another thread
        engine.after_backward(lambda: _recomputed(again))
    _here.again[unit] = engine.backward_number()


def _recomputed(again: dict[UnitState, int]) -> None:
    """Frees what a backward has gathered for recomputation."""
    units = list(again)
    again.clear()
    for unit in units:
        _release(unit)


def _forget_recomputed() -> None:
    """The same for a backward that an exception has ended, or that was nested in another."""
    if _here.again and engine.backward_number() not in _here.again.values():
        _recomputed(_here.again)


def _hooks() -> torch.autograd.graph.saved_tensors_hooks | None:
    outer = engine.saved_tensors_hooks()
    if outer is not None and getattr(outer[0], "_mfsdp", False):
        return None  # our hooks are on top already

    def pack(t: torch.Tensor) -> object:
        local = here(t) if type(t) is DTensor else t
        ticket = _tickets.get(local.untyped_storage().data_ptr()) if _plain(local) else None
        if ticket is not None:
            return _Saved(ticket, t)
        return outer[0](t) if outer else _Kept(t)

    def unpack(saved: object) -> torch.Tensor:
        if isinstance(saved, (_Saved, _Kept)):
            return saved.tensor()
        assert outer is not None
        return outer[1](saved)

    never_a_frame(pack)
    never_a_frame(unpack)
    pack._mfsdp = True  # type: ignore[attr-defined]
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def never_a_frame(function: Any) -> None:
    """Lets Dynamo inline the function but never compile it as a frame. Private in torch; tried on 2.11 to 2.15."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def _plain(t: torch.Tensor) -> bool:
    return type(t) in (torch.Tensor, nn.Parameter, Lent) and t.layout is torch.strided
