"""Static buffers: memory that stays from step to step, and that programs share."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from . import devices

log = logging.getLogger("mfsdp")

_pools: dict[tuple[torch.device, str], torch.cuda.MemPool] = {}
"""Where the buffers of GPUs come from, one each: a pool gives memory back only when it goes. Above the buffers, because
Python clears modules from the top: a pool that goes before its buffer frees nothing, and so does not wait, when a
process ends, for a collective that will never be complete.
"""

_slots: dict[tuple[torch.device, str], torch.UntypedStorage] = {}
"""By device and name."""

PATIENCE = 0.002
"""Seconds that a static buffer on the CPU is waited for: gloo's threads let go of a collective's tensors a moment after
they have woken whoever waits for it.
"""


def sizes() -> dict[str, int]:
    """Bytes of every static buffer, by name."""
    return {name: storage.nbytes() for (_, name), storage in sorted(_slots.items(), key=lambda kv: kv[0][1])}


def forget() -> None:
    """Lets go of all static buffers; programs make them anew. What is free in a pool stays there: to give it back, the
    host would wait for the device, and with it for a collective that others have left.
    """
    _slots.clear()


misses: Counter[str] = Counter()
"""How often a static buffer was still in use, by name."""


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
    """An uninitialised flat tensor, in a static buffer if one is named. A buffer that is still in use (two forwards
    before a backward, a lowering that kept an alias) is left alone: then the tensor has memory of its own.
    """
    if not slot:
        return torch.empty(numel, dtype=dtype, device=device)
    slot = _of_stream(slot, device)
    storage = _slots.get((device, slot))
    size = numel * dtype.itemsize
    if storage is not None and not _vacant(storage, device):
        _miss(slot, size)
        return torch.empty(numel, dtype=dtype, device=device)
    if storage is None or storage.nbytes() < size:
        del storage
        storage = _make(slot, size, device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,))  # type: ignore[no-any-return, call-overload]


Rooms = Mapping[tuple[torch.device, str], int]
"""Bytes of static buffers, by device and name."""


def reserve(rooms: Rooms) -> None:
    """Makes static buffers for the current stream before a program begins, so that none is cut out of a block that
    others have left. On the CPU, nothing: there they are made as they are used.
    """
    for (device, slot), size in rooms.items():
        if device.type != "cpu":
            slot = _of_stream(slot, device)
            storage = _slots.get((device, slot))
            if storage is None or storage.nbytes() < size:
                del storage
                _make(slot, size, device)


def _of_stream(slot: str, device: torch.device) -> str:
    """A static buffer's name on the current stream: nobody orders two streams, so each has buffers of its own."""
    stream = devices.current_stream(device)
    return slot if stream is None or not stream.stream_id else f"{slot}@{stream.stream_id}"


def _make(slot: str, size: int, device: torch.device) -> torch.UntypedStorage:
    if _slots.pop((device, slot), None) is not None:  # the old and the new one are never there at once
        _pools.pop((device, slot), None)
    with _pool(slot, device):
        storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    _slots[device, slot] = storage
    return storage


def _pool(slot: str, device: torch.device) -> AbstractContextManager[None]:
    """Takes what this thread allocates on a GPU from the pool of a static buffer. Has not run on a GPU; written after
    torch 2.13. NCCL registers such a pool with one call (``register_mem_pool`` of its backend); for symmetric windows
    the pool has to have NCCL's own allocator, which does not compose with expandable segments.
    """
    if device.type != "cuda":
        return nullcontext()
    if (device, slot) not in _pools:
        with torch.cuda.device(device):
            _pools[device, slot] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(_pools[device, slot], device)


def _vacant(storage: torch.UntypedStorage, device: torch.device) -> bool:
    """Whether nobody else uses a static buffer."""
    deadline = time.monotonic() + (PATIENCE if device.type == "cpu" else 0)
    while (taken := holders(storage) > 1) and time.monotonic() < deadline:
        time.sleep(1e-5)
    return not taken


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles share the storage. Private in torch; tried on 2.11 to 2.15."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[no-any-return, attr-defined]
