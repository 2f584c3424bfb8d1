"""Static buffers: memory that stays from step to step, and that programs share."""

from __future__ import annotations

import logging
import time
from collections import Counter

import torch

from . import devices

log = logging.getLogger("mfsdp")

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
    """Lets go of all static buffers; programs make them anew."""
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
    stream = devices.current_stream(device)
    if stream is not None and stream.stream_id:
        slot = f"{slot}@{stream.stream_id}"  # nobody orders two streams: each has buffers of its own
    storage = _slots.get((device, slot))
    size = numel * dtype.itemsize
    if storage is not None and not _vacant(storage, device):
        _miss(slot, size)
        return torch.empty(numel, dtype=dtype, device=device)
    if storage is None or storage.nbytes() < size:
        storage = None
        _slots.pop((device, slot), None)  # the old and the new one are never there at once
        storage = _slots[device, slot] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,))  # type: ignore[no-any-return, call-overload]


def _vacant(storage: torch.UntypedStorage, device: torch.device) -> bool:
    """Whether nobody else uses a static buffer."""
    deadline = time.monotonic() + (PATIENCE if device.type == "cpu" else 0)
    while (taken := holders(storage) > 1) and time.monotonic() < deadline:
        time.sleep(1e-5)
    return not taken


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles share the storage. Private in torch; tried on 2.11 to 2.15."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[no-any-return, attr-defined]
