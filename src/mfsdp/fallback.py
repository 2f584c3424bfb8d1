"""The eager path: code that no compiled graph covers still sees whole parameters.

Parameters are read through properties (`shard`). Under Dynamo these leave a marker in the graph. Where a unit's forward
runs as plain Python instead (a graph break, ``torch.compiler.disable``, an uncompiled call), it opens a `Scope`: the
unit is gathered, everything inside reads the gathered parameters, pieces that Dynamo still compiles take them as
inputs, and the end of the forward lets go of them. Backward gathers again when autograd asks for the first tensor that
forward saved. One gather per unit and pass.

Note [Saved tensors]
What autograd saves of a gathered buffer is packed into a ticket (saved-tensor hooks). The last ticket to die, when its
backward node is done, takes the gathered buffer along: nobody has to know when a unit's backward is over, and frozen
units, which have no backward of their own, are no special case. Hooks that are already there, such as
``torch.utils.checkpoint``'s, keep getting every other tensor.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import runtime
from .state import FlatBuffer, Ref, UnitState


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []
        self.tickets: dict[int, Ticket] = {}
        """Gathered buffers that forward is reading, by address of their storage."""
        self.visited: set[UnitState] = set()
        """Units that are read inside of another unit's scope only."""


_here = _Thread()
_warned: set[str] = set()


class Ticket:
    """One forward's claim on a gathered buffer; gathers again when backward needs it."""

    def __init__(self, buffer: FlatBuffer, full: torch.Tensor | None):
        self.buffer, self.full = buffer, full

    def storage(self) -> torch.Tensor:
        if self.full is None:
            self.full = runtime.gather_now(self.buffer.source, self.buffer.text)
        return self.full


class _Saved:
    """A tensor over a gathered buffer, as autograd keeps it."""

    def __init__(self, ticket: Ticket, like: torch.Tensor):
        self.ticket = ticket
        self.where = (like.storage_offset(), like.shape, like.stride())

    def tensor(self) -> torch.Tensor:
        full = self.ticket.storage()
        return full.new_empty(0).set_(full.untyped_storage(), *self.where)


class _Gather(torch.autograd.Function):
    """Whole parameters from the shard; their gradients to the accumulator."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, main: torch.Tensor, buffer: FlatBuffer, full: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.buffer = buffer
        ctx.set_materialize_grads(False)
        views = tuple(buffer.full_view(full, i) for i in range(len(buffer.layout.slots)))
        ctx.mark_non_differentiable(*(v for v, trains in zip(views, buffer.trains, strict=True) if not trains))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        buffer: FlatBuffer = ctx.buffer
        there = [
            (g, slot.offset) for g, slot in zip(grads, buffer.layout.slots, strict=True) if g is not None and slot.numel
        ]
        if there:
            tensors, offsets = [g for g, _ in there], [o for _, o in there]
            runtime.reduce_now(buffer.source, tensors, offsets, buffer.text)
        return None, None, None


class Scope:
    """A forward of a unit, in plain Python: gathers it, and lets go of it in the end."""

    def __init__(self, unit: UnitState, place: str):
        self.unit = unit
        unit.open = True
        _here.stack.append(self)
        self.hooks = _hooks() if torch.is_grad_enabled() else None
        if self.hooks is not None:
            self.hooks.__enter__()
        for index in range(len(unit.buffers)):
            _whole(unit, index, place)

    @torch.compiler.disable
    def close(self) -> None:
        if self.hooks is not None:
            self.hooks.__exit__(None, None, None)
        _here.stack.remove(self)
        self.unit.open = False
        release(self.unit)
        if not _here.stack:
            for unit in list(_here.visited):
                release(unit)
            _here.visited.clear()


@torch.compiler.disable
def scope(module: nn.Module) -> Scope:
    """Opens the scope of a module's unit; close it when the call ends."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return Scope(module.__dict__["_mfsdp_unit"], f"{type(module).__name__}.forward{line}, called from {_caller()},")


@torch.compiler.disable
def read(module: nn.Module, name: str, ref: Ref) -> torch.Tensor:
    """A parameter as plain Python sees it now: whole inside of a forward, a DTensor elsewhere."""
    outside = not _here.stack and ref.index not in ref.unit.full
    if ref.buffer.summoned is not None or outside:
        return module._parameters[name]  # type: ignore[return-value]
    if ref.index not in ref.unit.full:
        _here.visited.add(ref.unit)
    return _whole(ref.unit, ref.index, _caller())[ref.slot]


def _whole(unit: UnitState, index: int, place: str) -> Sequence[torch.Tensor]:
    if index not in unit.full:
        _warn(unit, place)
        unit.full[index] = gather(unit.buffers[index])
    return unit.full[index]


def gather(buffer: FlatBuffer) -> Sequence[torch.Tensor]:
    """All parameters of a buffer, whole, with autograd; one collective."""
    full = runtime.gather_now(buffer.source, buffer.text)
    _here.tickets[full.untyped_storage().data_ptr()] = Ticket(buffer, full)
    with torch.enable_grad():  # whoever reads them next may want gradients
        return _Gather.apply(buffer.source, buffer, full)  # type: ignore[no-any-return, no-untyped-call]


def release(unit: UnitState) -> None:
    """Lets go of what the unit gathered, unless it is kept; backward gathers again."""
    if unit.kept or unit.open:
        return
    unit.full.clear()
    for ticket in list(_here.tickets.values()):
        if ticket.buffer in unit.buffers:
            _drop(ticket)


def _drop(ticket: Ticket) -> None:
    assert ticket.full is not None
    _here.tickets.pop(ticket.full.untyped_storage().data_ptr(), None)
    if ticket.buffer.spec.reshard and ticket.buffer.spec.gathers:
        ticket.full = None


def _hooks() -> torch.autograd.graph.saved_tensors_hooks | None:
    outer = _outer_hooks()
    if outer is not None and getattr(outer[0], "_mfsdp", False):
        return None  # ours are there already

    def pack(t: torch.Tensor) -> Any:
        ticket = _here.tickets.get(t.untyped_storage().data_ptr()) if _plain(t) else None
        if ticket is not None:
            return _Saved(ticket, t)
        return outer[0](t) if outer else t

    def unpack(saved: Any) -> Any:
        if isinstance(saved, _Saved):
            return saved.tensor()
        return outer[1](saved) if outer else saved

    never_a_frame(pack)
    never_a_frame(unpack)
    pack._mfsdp = True  # type: ignore[attr-defined]
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def never_a_frame(function: Any) -> None:
    """Dynamo may inline the function but not compile it by itself. Private in torch; tried on 2.11 to 2.13."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def _plain(t: torch.Tensor) -> bool:
    return type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided


def _outer_hooks() -> tuple[Any, Any] | None:
    """The saved-tensor hooks in force, as (pack, unpack). Private in torch; tried on 2.11 to 2.13."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks  # type: ignore[no-any-return]


def _warn(unit: UnitState, place: str) -> None:
    """Names the place that runs outside of a compiled graph, once for each place."""
    if place in _warned:
        return
    _warned.add(place)
    warnings.warn(
        f"mfsdp: {place} reads parameters of unit {unit.fqn!r} outside of a compiled graph: the eager path gathers "
        "the unit there, without overlap. If it should be compiled, look for a graph break (TORCH_LOGS=graph_breaks) "
        "or call the model through torch.compile(model, backend='mfsdp').",
        stacklevel=2,
    )


def _caller() -> str:
    """The innermost line of code that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _internal(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _internal(file: str) -> bool:
    parts = file.replace("\\", "/").split("/")
    return "torch" in parts or file.startswith((_PACKAGE, "<"))


_PACKAGE = __file__.rsplit("fallback", 1)[0]
