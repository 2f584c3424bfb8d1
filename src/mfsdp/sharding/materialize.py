"""Initializes models built on the meta device, module by module, into shards.

The values are those of an unsharded init under the same seed: every module's own initializer runs on full tensors, in
the order of constructors (children first), and each rank keeps its part. Initializers are ``reset_parameters()`` (or
``_reset_parameters()``), then ``_init_weights(module)``, if a module has it, on itself and everything below, as many
GPTs do in their constructors and Hugging Face models in ``post_init``; then the user's function, as by
``model.apply(function)``. Only one module's parameters are unsharded at a time.

Tensors that were not on meta keep their values (invariant 51): their own module's initializer writes to copies; writes
by others are undone.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..buffers.flat_buffer import FlatBuffer, Ref, refs
from ..dtensor.sharded_dtensor import carry_attributes
from ..runtime import groups

Init = Callable[[nn.Module], object]

_POSTPONED: ContextVar[list[Callable[[], None]] | None] = ContextVar("_POSTPONED", default=None)


@contextmanager
def postponed() -> Iterator[list[Callable[[], None]]]:
    """Defers calls of `materialize` in this block to the yielded list. A loader that first reads values from files
    calls them afterwards, in order, for values that the files lack (`came`).
    """
    calls: list[Callable[[], None]] = []
    token = _POSTPONED.set(calls)
    try:
        yield calls
    finally:
        _POSTPONED.reset(token)


def allocate(model: nn.Module) -> None:
    """Replaces what is on meta by uninitialized memory on the CPU; tied tensors stay tied."""
    new: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None or not old.is_meta:
                    continue
                if old not in new:
                    new[old] = torch.empty_like(old, device="cpu")
                    if isinstance(old, nn.Parameter):
                        new[old] = nn.Parameter(new[old], requires_grad=old.requires_grad)
                        new[old].__dict__.update(old.__dict__)
                tensors[name] = new[old]


def came(ref: Ref) -> bool:
    """Marks a parameter as loaded, so that no initializer writes it. Returns whether it was missing."""
    return ref.buffer.weights.born_on_meta.pop(ref.slot, None) is not None


def materialize(root: nn.Module, device: torch.device, over: Sequence[str], init_fn: Init | None = None) -> None:
    """Initializes the sharded parameters and the buffers of ``root`` that were built on meta.

    All ranks must call it together. They draw the random numbers of rank 0's generators.

    Warns:
        UserWarning: no initializer has written some tensors; names them. Floating-point ones hold NaN.
    """
    if (calls := _POSTPONED.get()) is not None:
        calls.append(partial(materialize, root, device, over, init_fn))
        return
    modules = list(_children_first(root, set()))
    _forget_what_was_written_since(modules)
    born = {m: None for m in modules if _on_meta(m)}
    if not born or device.type == "meta":
        return
    with torch.no_grad(), _real_values_kept(modules), _buffers_from_meta(born, device) as blank:
        _initialise(modules, born, device, over, init_fn)
    _name_what_is_missing(root, born, blank)
    for buffer in _buffers_of(born):
        buffer.weights.initialised, buffer.weights.stale, buffer.weights._version = True, False, -1


def most(root: nn.Module, again: bool = False) -> int:
    """Estimates the most device bytes that `materialize` takes besides main weights.

    One module's full parameters, and a byte per element of one of them to test whether it was written. Where an
    initializer starts from another one's values, also the gather (one part per rank, all as long as the longest, and
    the parameter itself unless it is just these) and the cast to the dtype it was built in.

    Args:
        root: sharded, built on the meta device.
        again: whether there is a user's function.
    """
    again = again or any(_initialiser_below(m) is not None for m in root.modules())
    out = 0
    for module in root.modules():
        there = largest = 0
        for ref in refs(module).values():
            if (dtype := ref.buffer.weights.born_on_meta.get(ref.slot)) is not None:
                numel, layout = math.prod(ref.shape), ref.buffer.layout
                parts = layout.world * min(numel, layout.segment(ref.slot).chunk)
                main = ref.buffer.precision.main
                gathered = (parts + (numel if parts > numel else 0)) * main.itemsize
                cast = numel * (main.itemsize + dtype.itemsize) if dtype is not main else 0
                out = max(out, there + max(gathered, cast) * again)
                there += numel * dtype.itemsize
                largest = max(largest, numel)
        out = max(out, there + largest)
    return out


def _buffers_of(modules: Iterable[nn.Module]) -> Iterable[FlatBuffer]:
    return dict.fromkeys(ref.buffer for m in modules for ref in refs(m).values())


def _forget_what_was_written_since(modules: Iterable[nn.Module]) -> None:
    """Stops counting parameters as from meta if all ranks wrote them after an earlier call."""
    for buffer in _buffers_of(modules):
        if buffer.weights.initialised and buffer.weights.stale:
            buffer.weights.born_on_meta.clear()


def _initialise(
    modules: Sequence[nn.Module],
    born: Mapping[nn.Module, None],
    device: torch.device,
    over: Sequence[str],
    init_fn: Init | None,
) -> None:
    """Calls every initializer, children first, that has something from meta to write."""
    with _same_random_numbers(device, over):
        for module in modules:
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset) and any(m in born for m in module.modules()):
                with _whole(module, device, first=True):
                    reset()
            init = _initialiser_below(module)
            if init is not None:
                for below in _children_first(module, set()):
                    if not any(m in born for m in below.modules()):
                        continue
                    with _whole(below, device, first=False):
                        init(below)
        if init_fn is not None:
            for module in born:
                with _whole(module, device, first=False):
                    init_fn(module)


def _name_what_is_missing(root: nn.Module, born: Iterable[nn.Module], blank: Iterable[tuple[nn.Module, str]]) -> None:
    names = {m: f"{fqn}." if fqn else "" for fqn, m in root.named_modules()}
    missing = [names[m] + n for m, n in blank if _untouched(m._buffers[n])]
    for m in born:
        for name, ref in refs(m).items():
            if _from_meta(ref) and ref.slot not in ref.buffer.weights.written:
                missing.append(names[m] + name)
    if missing:
        warnings.warn(
            "mfsdp: nothing has initialised " + ", ".join(dict.fromkeys(missing)) + ". Their modules have no "
            "reset_parameters() and the model no _init_weights(module) that writes them: load a checkpoint, or write "
            "them in place, before training.",
            stacklevel=4,
        )


def _initialiser_below(module: nn.Module) -> Init | None:
    """``_init_weights(module)``, or Hugging Face's ``_initialize_weights``, which knows what an inner model has
    initialized.
    """
    for name in ("_initialize_weights", "_init_weights"):
        found = getattr(module, name, None)
        if callable(found) and inspect.signature(found).parameters:
            return found  # type: ignore[no-any-return]
    return None


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _on_meta(module: nn.Module) -> bool:
    return any(b is not None and b.is_meta for b in module._buffers.values()) or any(
        _from_meta(ref) for ref in refs(module).values()
    )


def _from_meta(ref: Ref) -> bool:
    return ref.slot in ref.buffer.weights.born_on_meta


@contextmanager
def _buffers_from_meta(born: Iterable[nn.Module], device: torch.device) -> Iterator[list[tuple[nn.Module, str]]]:
    """Allocates buffers that are on meta, tied ones once, and yields their names; undone on an exception."""
    places = [(m, name, b) for m in born for name, b in m._buffers.items() if b is not None and b.is_meta]
    new = {old: _blank_like(old, device) for _, _, old in places}
    for m, name, old in places:
        m._buffers[name] = new[old]
    try:
        yield [(m, name) for m, name, _ in places]
    except BaseException:
        for m, name, old in places:
            m._buffers[name] = old
        raise


@contextmanager
def _real_values_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores at exit all values that were real at entry: parameters, sharded or ignored, and buffers."""
    places: list[tuple[nn.Module, str, torch.Tensor]] = []
    real: dict[torch.Tensor, torch.Tensor] = {}
    for m in modules:
        found = refs(m)
        mine = [ref.buffer.params[ref.slot]._local_tensor for ref in found.values() if not _from_meta(ref)]
        mine += [p for name, p in m._parameters.items() if p is not None and name not in found]
        buffers = [(m, name, b) for name, b in m._buffers.items() if b is not None and not b.is_meta]
        places += buffers
        mine += [b for _, _, b in buffers]
        real.update((t, t.detach().clone()) for t in mine if t not in real and not t.is_meta)
    try:
        yield
    finally:
        for m, name, buffer in places:
            m._buffers[name] = buffer
        for tensor, value in real.items():
            tensor.copy_(value)


def _unwritten(dtype: torch.dtype) -> float:
    """The value that marks an element as unwritten."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _blank(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, _unwritten(dtype), dtype=dtype, device=device)


def _blank_like(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An unwritten tensor like a buffer; for a DTensor, with its placements."""
    if not isinstance(buffer, DTensor):
        return _blank(buffer.shape, buffer.dtype, device)
    local = _blank(buffer.to_local().shape, buffer.dtype, device)
    layout = (buffer.device_mesh, buffer.placements)
    return DTensor.from_local(local, *layout, run_check=False, shape=buffer.shape, stride=buffer.stride())


def _untouched(tensor: torch.Tensor | None) -> bool:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor is None or tensor.numel() == 0 or tensor.dtype is torch.bool:
        return False
    mark = _unwritten(tensor.dtype)
    return bool((torch.isnan(tensor) if math.isnan(mark) else tensor == mark).all())


@contextmanager
def _whole(module: nn.Module, device: torch.device, first: bool) -> Iterator[None]:
    """Makes the module's own parameters full tensors if any was built on meta; each rank keeps its part of those.

    In the ``first`` round they start blank, but a tied one keeps what its first module wrote; later rounds start from
    current values. Real parameters are replaced by copies, which are discarded.
    """
    mine: list[tuple[str, Ref, nn.Parameter, bool]] = []
    found = refs(module) if any(_from_meta(ref) for ref in refs(module).values()) else {}
    for name, ref in found.items():
        dtype = ref.buffer.weights.born_on_meta.get(ref.slot)
        done = ref.slot in ref.buffer.weights.written
        if dtype is None or (done and not first):
            value = ref.buffer.params[ref.slot].full_tensor().to(dtype or ref.buffer.precision.main)
        else:
            value = _blank(ref.buffer.params[ref.slot].shape, dtype, device)
        whole = nn.Parameter(value, requires_grad=ref.buffer.trains[ref.slot])
        carry_attributes(ref.buffer.params[ref.slot], whole)
        module._parameters[name] = whole
        mine.append((name, ref, whole, dtype is None or (first and done)))
    try:
        yield
        for _, ref, whole, discard in mine:
            if not discard and not _untouched(whole.data):
                ref.buffer.weights.keep(ref.slot, ref.piece.cut(whole) if ref.piece else whole)
                ref.buffer.weights.written.add(ref.slot)
    finally:
        for name, ref, _, _ in mine:
            module._parameters[name] = ref.buffer.params[ref.slot]  # type: ignore[assignment]


@contextmanager
def _same_random_numbers(device: torch.device, over: Sequence[str]) -> Iterator[None]:
    """Sets rank 0's generator states on every rank; a rank with another seed gets its own back at the end."""
    kinds: list[Any] = [torch, *([] if device.type == "cpu" else [torch.get_device_module(device)])]
    changed: list[Callable[[], None]] = []
    for kind in kinds:
        own = kind.get_rng_state()
        shared = own.to(device, copy=True)
        for group in over:
            shared = groups.broadcast(shared, group)
        shared = shared.cpu()
        kind.set_rng_state(shared)
        if not torch.equal(own, shared):
            changed.append(partial(kind.set_rng_state, own))
    yield
    for restore in changed:
        restore()
