"""Static buffers: memory that programs share and that stays from step to step.

Note [Vacant static buffers]
A static buffer is vacant when only this file has tensors over it. torch counts them: each holds the storage once. The
tensors kept here (a flat one for each size, and the views that operations request) are made once and counted
(`StaticBuffer.own`). A caller gets a new tensor (``.data``, one small object), so the count shows whether that still
exists.

Kept tensors are lent only for a call, or until a collective has been waited for; until then the execution also holds
the caller's tensor (`Execution.gather`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from . import devices

log = logging.getLogger("mfsdp")

Allocator = Callable[[torch.device], Any]
"""Finds a device's allocator for a pool: a ``torch._C._cuda_CUDAAllocator``."""

_pools: dict[tuple[torch.device, str, Allocator | None], torch.cuda.MemPool] = {}
"""Memory pools of GPU buffers, one each: a pool frees memory only when it is destroyed. They are defined above the
buffers because Python clears modules from the top: a pool that goes before its buffer frees nothing, and so does not
wait, at exit, for a collective that never completes.
"""

Cut = Callable[..., Sequence[torch.Tensor]]
"""Cuts views out of a flat tensor."""


class StaticBuffer:
    """A static buffer (Note [Vacant static buffers]).

    Args:
        storage: its memory.
        allocator: what found its pool's allocator; ``None``: torch's.
    """

    def __init__(self, storage: torch.UntypedStorage, allocator: Allocator | None = None):
        self.storage, self.allocator = storage, allocator
        self.own = 1
        """Tensors and handles over it that are kept here."""
        self.flats: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """By size."""
        self.cuts: dict[tuple[Cut, torch.dtype, tuple[Hashable, ...]], Sequence[torch.Tensor]] = {}
        """Views, by cut function, dtype and arguments."""

    def vacant(self) -> bool:
        """Whether nothing else uses it."""
        return holders(self.storage) <= self.own

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over it."""
        flat = self.flats.get((numel, dtype))
        if flat is None:
            with torch.inference_mode(False):  # no inference tensor: autograd may save it
                flat = torch.empty(0, dtype=dtype, device=self.storage.device)
                self.flats[numel, dtype] = flat.set_(self.storage, 0, (numel,))  # type: ignore[call-overload]
            self.own += 1
        return flat.data

    def views(self, like: torch.Tensor, cut: Cut, args: tuple[Hashable, ...]) -> Sequence[torch.Tensor]:
        """Applies ``cut`` to a flat tensor that was taken; the views are kept."""
        key = cut, like.dtype, args
        with _lock, torch.inference_mode(False), torch.no_grad():
            if key not in self.cuts:
                self.cuts[key] = cut(self.flats[like.numel(), like.dtype], *args)
                self.own += len(self.cuts[key])
        return self.cuts[key]


_slots: dict[tuple[torch.device, str], StaticBuffer] = {}
"""By device and name."""

_at: dict[int, StaticBuffer] = {}
"""By address."""

_lock = threading.Lock()
"""Keeps two threads from taking the same buffer."""

PATIENCE = 0.002
"""Seconds to wait for a static buffer on the CPU: gloo's threads release a collective's tensors a moment after they
wake its waiter.
"""


def sizes() -> dict[str, int]:
    """Bytes of every static buffer, by name."""
    return {name: static.storage.nbytes() for (_, name), static in sorted(_slots.items(), key=lambda kv: kv[0][1])}


def of_stream(stream: torch.Stream | None) -> list[tuple[str, StaticBuffer]]:
    """The static buffers of programs on a stream, by name; ``None``: all. Hold a buffer, not its storage: that stays
    vacant.
    """
    ending = "" if stream is None else f"@{stream.stream_id}"
    return [(name, static) for (_, name), static in list(_slots.items()) if name.endswith(ending)]


def reset() -> None:
    """Drops all static buffers; programs make new ones. Free memory stays in its pool: to return it, the host would
    wait for the device, and so for a collective that others have left.
    """
    _slots.clear()
    _at.clear()


def release() -> None:
    """Frees unused static buffers when the last model is gone. The garbage collector may call it anywhere, so it waits
    for no thread; the next model uses what is left.
    """
    if _lock.acquire(blocking=False):
        try:
            for key in [key for key, static in list(_slots.items()) if static.vacant()]:
                _drop(*key)
        finally:
            _lock.release()


misses: Counter[str] = Counter()
"""How often each static buffer was still in use, by name."""


def _miss(slot: str, size: int) -> None:
    misses[slot] += 1
    if misses[slot] == 1:
        log.warning(
            "mfsdp: static buffer %s is still in use: what was meant for it takes %d bytes of its own; this is told "
            "once. Two forwards before a backward do that, and whatever keeps an alias of gathered parameters.",
            slot,
            size,
        )


def room(slot: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized flat tensor, in a static buffer if one is named. If that is in use (two forwards before a
    backward, a lowering that kept an alias), the tensor has its own memory.
    """
    if not slot:
        return torch.empty(numel, dtype=dtype, device=device)
    key = device, _of_stream(slot, device)
    with _lock:
        static = _slots.get(key)
        if static is None or static.vacant() or _becomes_vacant(static, device):
            if static is None or static.storage.nbytes() < numel * dtype.itemsize:
                del static
                static = _make(*key, numel * dtype.itemsize)
            return static.take(numel, dtype)
    _miss(key[1], numel * dtype.itemsize)
    return torch.empty(numel, dtype=dtype, device=device)


def views(flat: torch.Tensor, cut: Cut, *args: Hashable) -> Sequence[torch.Tensor]:
    """Views into a tensor from `room`: ``cut(flat, *args)``. Those of a static buffer are made once: hold them no
    longer than ``flat``.
    """
    static = _at.get(flat.data_ptr())
    if static is None:
        return cut(flat, *args)
    found = static.cuts.get((cut, flat.dtype, args))
    return static.views(flat, cut, args) if found is None else found


Rooms = Mapping[tuple[torch.device, str], int]
"""Bytes of static buffers, by device and name."""


def reserve(rooms: Rooms, allocator: Allocator | None = None) -> None:
    """Makes static buffers for the current stream before a program begins, so that none is cut from a block that others
    freed; with an allocator, makes those anew that are not from it. On the CPU, does nothing: they are made at first
    use.
    """
    for (device, slot), size in rooms.items():
        if device.type != "cpu":
            slot = _of_stream(slot, device)
            static = _slots.get((device, slot))
            if static is None or static.storage.nbytes() < size or allocator not in (None, static.allocator):
                del static
                _make(device, slot, size, allocator)


def pool_of(device: torch.device, slot: str) -> torch.cuda.MemPool:
    """The memory pool of a static buffer of the current stream."""
    slot = _of_stream(slot, device)
    return _pools[device, slot, _slots[device, slot].allocator]


class _Here(threading.local):
    beside = ""
    """Suffix of static buffers' names in this thread."""


_here = _Here()


@contextmanager
def beside() -> Iterator[None]:
    """Gives this thread separate static buffers, beside a program in another thread (Note [Interleaved programs])."""
    _here.beside = "+"
    try:
        yield
    finally:
        _here.beside = ""


def forget_beside() -> None:
    """Frees static buffers of programs that ran beside others, except those in use."""
    with _lock:
        for key in [key for key, static in _slots.items() if "+" in key[1] and static.vacant()]:
            _drop(*key)


def _of_stream(slot: str, device: torch.device) -> str:
    """A static buffer's name in this thread and stream: streams are not ordered, so each has its own."""
    slot += _here.beside
    stream = devices.current_stream(device)
    return slot if stream is None or not stream.stream_id else f"{slot}@{stream.stream_id}"


def _make(device: torch.device, slot: str, size: int, allocator: Allocator | None = None) -> StaticBuffer:
    before = _drop(device, slot)  # the old and the new buffer never coexist
    allocator = allocator or before
    with _pool(slot, device, allocator):
        memory = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        static = _slots[device, slot] = StaticBuffer(memory, allocator)
    if static.storage.data_ptr():
        _at[static.storage.data_ptr()] = static
    return static


def _drop(device: torch.device, slot: str) -> Allocator | None:
    """Frees a static buffer's memory, if nothing else has it, and returns its allocator. The pool must go last, or it
    frees nothing.
    """
    dropped = _slots.pop((device, slot), None)
    if dropped is None:
        return None
    allocator = dropped.allocator
    pool = _pools.pop((device, slot, allocator), None)
    _at.pop(dropped.storage.data_ptr(), None)
    del dropped
    del pool
    return allocator


def _pool(slot: str, device: torch.device, allocator: Allocator | None) -> AbstractContextManager[None]:
    """Takes this thread's GPU allocations from a static buffer's pool. Has not run on a GPU; written after torch
    2.13.
    """
    if device.type != "cuda":
        return nullcontext()
    key = device, slot, allocator
    if key not in _pools:
        with torch.cuda.device(device):
            _pools[key] = torch.cuda.MemPool(None if allocator is None else allocator(device))
    return torch.cuda.use_mem_pool(_pools[key], device)


def _becomes_vacant(static: StaticBuffer, device: torch.device) -> bool:
    """Whether a static buffer becomes vacant within a moment."""
    deadline = time.monotonic() + (PATIENCE if device.type == "cpu" else 0)
    while not (free := static.vacant()) and time.monotonic() < deadline:
        time.sleep(1e-5)
    return free


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles share the storage. Private in torch; tried on 2.11 to 2.15."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[no-any-return, attr-defined]
