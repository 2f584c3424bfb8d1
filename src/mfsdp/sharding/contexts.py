"""Gradient synchronization and full parameters around training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar, cast

from torch import nn

from ..buffers.flat_buffer import buffers_in, refs
from ..dtensor.unsupported import not_sharded
from ..runtime import step_prefetch
from ..runtime.overlap import Overlap
from .module import FSDPModule, buffers_of, unwrapped

T = TypeVar("T")


def _units(module: nn.Module) -> list[FSDPModule]:
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def _some(found: list[T], caller: str, module: nn.Module) -> list[T]:
    """Returns what is found, or raises a ValueError if that is nothing."""
    if not found:
        raise not_sharded(caller, module)
    return found


@contextmanager
def no_sync(module: nn.Module, *, hold: bool | None = None) -> Iterator[None]:
    """Skips gradient synchronization in backwards inside the ``with``; the next one outside synchronizes them all.

    Every unit used inside must be used in the synchronizing backward. Unreduced gradients are not in ``.grad``;
    ``zero_grad`` of an optimizer, of the model or of torch.compile's wrapper drops them and abandons the step.

    Args:
        module: a sharded model, or any of its modules.
        hold: see `FSDPModule.set_requires_gradient_sync`.

    Raises:
        ValueError: nothing of the module is sharded.
    """
    with gradient_sync(_some(_units(module), "no_sync", module), False, hold):
        yield


@contextmanager
def gradient_sync(units: Sequence[FSDPModule], sync: bool, hold: bool | None = None) -> Iterator[None]:
    """Calls `FSDPModule.set_requires_gradient_sync` for units, and restores them at the end."""
    before = [(buffer, buffer.gradients.sync) for unit in units for buffer in buffers_of(unit, recurse=False)]
    for unit in units:
        unit.set_requires_gradient_sync(sync, recurse=False, hold=hold)
    try:
        yield
    finally:
        for buffer, sync in before:
            buffer.gradients.sync = sync


@contextmanager
def overlapped(module: nn.Module) -> Iterator[None]:
    """Runs each microbatch's backward together with the next forward (1F1B): one computes while the other's expert
    exchanges are communicated.

        with mfsdp.overlapped(model):
            for batch in microbatches:
                loss = model(batch)
                loss.backward()

    Leaving runs the last backward; an earlier access to gradients (``.grad``, an optimizer's step, `norms`,
    ``zero_grad``) runs it there. Gradients are bitwise those of the loop without it. Do not write to weights or
    forward's results while a backward is deferred. A backward that cannot be deferred runs at once, and the log says
    why (INFO): a model without collectives of other parallelisms, inputs that require gradients, gradient hooks. All
    ranks must enter together.

    Args:
        module: a sharded model, compiled or not (uncompiled backwards are not deferred).

    Raises:
        ValueError: nothing of the module is sharded, or it is overlapped already.
        NotImplementedError: some of its units may be unused.
        TypeError: several models.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"overlapped: give one model, not {type(module).__name__}: turns among stages of a virtual pipeline are "
            "not built (docs/guides/microbatches.md)"
        )
    buffers = _some(buffers_in(module), "overlapped", module)
    if any(buffer.gradients.overlap is not None for buffer in buffers):
        raise ValueError("overlapped: the model is overlapped already")
    if any(buffer.spec.optional or buffer.spec.any_optional for buffer in buffers):
        raise NotImplementedError(
            "overlapped: units that may be unused and backwards that wait do not go together: which rank runs what is "
            "known only while it runs. Leave overlapped, or may_be_unused"
        )
    overlap = Overlap()
    for buffer in buffers:
        buffer.gradients.overlap = overlap
    try:
        yield
        overlap.leave(type(unwrapped(module)).__name__)
    except Exception as error:
        try:
            overlap.finish()
        except Exception as other:
            error.add_note(f"mfsdp: and in the backward that waited, {type(other).__name__}: {other}")
        raise
    finally:
        overlap.drop()
        for buffer in buffers:
            buffer.gradients.overlap = None


def keep_gradients(module: nn.Module, keep: bool = True) -> None:
    """Keeps the memory of gradients when ``zero_grad()`` sets them to ``None``: every step finds them at the same
    addresses, as a captured step requires. By default, as in FSDP2, the next backward allocates new memory.

    Args:
        module: a sharded model, or any of its modules.
        keep: ``False`` restores the default and frees kept memory.
    """
    for buffer in buffers_in(module):
        buffer.gradients.keeps = keep


def synchronize(module: nn.Module) -> None:
    """Waits for gathers that an optimizer step prefetched (`fully_shard_optimizer`); on a device, what this thread
    launches next waits. Forward still uses them.

    Call it before code unknown to torch reads or writes weights, and before destroying process groups.

    Args:
        module: a sharded model, or any of its modules.

    Raises:
        ValueError: nothing of the module is sharded.
    """
    buffers = _some(buffers_in(module), "synchronize", module)
    step_prefetch.complete(buffers)


@contextmanager
def summon_full_params(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Shows full main weights as plain parameters inside the ``with``, and keeps edits. Parameters that tensor or
    expert parallelism has cut are DTensors over its mesh, as before `fully_shard`. All ranks must enter together.

    Args:
        module: a sharded model, or any of its modules.
        writeback: whether to write edits to the shards; each rank writes its part, so ranks must edit equally.

    Raises:
        ValueError: nothing of the module is sharded, or it is summoned already.
    """
    found = _some(buffers_in(module), "summon_full_params", module)
    if any(b.weights.summoned is not None for b in found):
        raise ValueError("summon_full_params: the parameters are summoned already")
    places = [(m, name, ref) for m in module.modules() for name, ref in refs(m).items()]
    whole: dict[tuple[int, int], nn.Parameter] = {}
    try:
        for buffer in found:
            buffer.weights.summoned = buffer.weights.gather()
        for m, name, ref in places:
            full = ref.buffer.weights.summoned
            assert full is not None
            view = ref.buffer.weights.full_view(full, ref.slot)
            key = (id(ref.buffer), ref.slot)
            if key not in whole:
                value = ref.piece.found(view) if ref.piece else view
                whole[key] = nn.Parameter(value, requires_grad=ref.buffer.trains[ref.slot])
            m._parameters[name] = whole[key]
        yield
        if writeback:
            for buffer in found:
                assert buffer.weights.summoned is not None
                buffer.weights.scatter(buffer.weights.summoned)
    finally:
        for m, name, ref in places:
            param, edited = ref.buffer.params[ref.slot], whole.get((id(ref.buffer), ref.slot))
            if edited is not None and edited.requires_grad != param.requires_grad:
                param.requires_grad_(edited.requires_grad)
            m._parameters[name] = cast(nn.Parameter, param)
        for buffer in found:
            buffer.weights.summoned = None


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Keeps all parameters gathered inside the ``with``, for many forwards with the same weights (generation,
    evaluation). Forwards communicate nothing, compiled or not; memory holds the full model in ``compute_dtype``. All
    ranks must enter together; what they run inside may differ.

    Compiled graphs compile once more, without collectives. Parameters keep their values from entry: leave before the
    optimizer steps. A backward inside reduces gradients unit by unit, so ranks must call it together.

    Args:
        module: a sharded model, or any of its modules.

    Raises:
        ValueError: nothing of the module is sharded.
        RuntimeError: it is nested, or called in a forward of the model.
    """
    units = _some(_units(module), "unsharded", module)
    if any(m._mfsdp_unit.open for m in units):
        raise RuntimeError("unsharded: the model is unsharded already, or in a forward")
    with ExitStack() as leaving:
        for m in units:
            if not m._mfsdp_unit.kept:
                leaving.callback(m.reshard)
            leaving.callback(setattr, m._mfsdp_unit, "open", False)
            m.unshard()
            m._mfsdp_unit.open = True
        yield
