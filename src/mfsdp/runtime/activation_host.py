"""Memory of the host: where what forward saves lies until backward, and the copies there and back.

Note [Activation memory on the host]
A room is host memory of a size, pinned where there is a device, that stays from step to step: to pin memory takes
milliseconds. Like a static buffer (Note [Vacant static buffers]) it is free when nobody has a tensor over it, and torch
counts that. What forward saves is such a tensor, so a room is taken until backward has read it for the last time
(autograd drops it then), until a forward whose backward never comes is dropped, or until an exception has taken both
away; a second forward finds it taken, and gets another. Who is given a room that a device may still read or write has
its copy wait.

A copy runs beside compute: on a device on a stream for each direction, on a CPU, where the host is only another pool,
in a thread for each (`hosts`). What it reads and writes is kept until compute waits for it (Note [In flight]).
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import torch

from . import host_memory, static_buffers
from .inflight import InFlight
from .transport import End


class HostBuffer:
    """Memory of the host, for one device (Note [Activation memory on the host]).

    Args:
        nbytes: of it. Not of torch's allocator, which rounds pinned memory up to a power of two. Shared with forked
            processes rather than copied when it is written to, away from where a device writes.
        device: that copies to it.
    """

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes, self.round = nbytes, 0
        """When it was taken last."""
        self.storage = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()
        self.copied: torch.Event | None = None
        """Behind the last copy to it or from it."""
        if device.type == "cuda":
            _pin(self, self.storage.data_ptr(), nbytes)

    def vacant(self) -> bool:
        """Whether nobody has a tensor over it."""
        return static_buffers.holders(self.storage) <= 1

    def copying(self) -> bool:
        """Whether a device still reads or writes it: nobody waits for that before memory of the system's goes."""
        return self.copied is not None and not self.copied.query()

    def tensor(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """A tensor over it, with a version of its own: autograd does not see that copies write to it."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype).set_(self.storage, 0, size, stride)  # type: ignore[call-overload, no-any-return]


def _pin(room: HostBuffer, at: int, nbytes: int) -> None:
    """Pins memory until the room is gone. Has not run on a GPU; as torch's own checkpoints do
    (``_create_cpu_state_dict``).

    Raises:
        RuntimeError: the system does not let it.
    """
    cudart: Any = torch.cuda.cudart()
    if (error := int(cudart.cudaHostRegister(at, nbytes, 0))) != 0:
        raise RuntimeError(
            f"mfsdp: the host does not pin {nbytes} bytes for saved activations (CUDA error {error}): there is not "
            "enough memory, or it may not be locked (ulimit -l). Offload less"
        )
    weakref.finalize(room, cudart.cudaHostUnregister, at).atexit = False


class HostPool(list[HostBuffer]):
    """The rooms of a device."""

    round = 0
    """How often one of them was taken while all were free: a step, as a rule."""

    def take(self, nbytes: int, device: torch.device) -> HostBuffer:
        """The smallest that is free and not much too large, or a new one. Then those go that the last rounds have not
        needed (for a length of sequences that has not come again).
        """
        free = [room for room in self if room.vacant()]
        self.round += len(free) == len(self)
        fit = [room for room in free if nbytes <= room.nbytes <= nbytes * 5 // 4]
        if fit:
            room = min(fit, key=lambda room: room.nbytes)
        else:
            self[:] = [room for room in self if room not in free or room.copying() or self.round - room.round <= ROUNDS]
            self.append(room := HostBuffer(nbytes, device))
            _at[room.storage.data_ptr()] = room
        room.round = self.round
        return room


ROUNDS = 3

_rooms: dict[torch.device, HostPool] = {}
_at: weakref.WeakValueDictionary[int, HostBuffer] = weakref.WeakValueDictionary()
"""By address."""
_lock = threading.Lock()


def sizes() -> list[int]:
    """Bytes of every room."""
    return sorted(room.nbytes for rooms in _rooms.values() for room in rooms)


def taken() -> int:
    """Bytes of the rooms that somebody uses."""
    return sum(room.nbytes for rooms in _rooms.values() for room in rooms if not room.vacant())


def _take(x: torch.Tensor, nbytes: int) -> tuple[HostBuffer, torch.Tensor]:
    """A room, and a tensor over it, laid out as ``x``."""
    with _lock:
        room = _rooms.setdefault(x.device, HostPool()).take(nbytes, x.device)
        return room, room.tensor(x.dtype, x.shape, x.stride())


def offload(x: torch.Tensor) -> tuple[torch.Tensor, End]:
    """Launches the copy of a tensor to the host; what it gives, laid out alike, and what waits until it is complete."""
    source = _flat(x)
    room, out = _take(x, source.numel() * x.itemsize)
    return out, _copy(_flat(out), source, "out", room)


def reload(host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, End]:
    """Launches the copy back to a device."""
    out = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return out, _copy(_flat(out), _flat(host), "in", _at.get(host.data_ptr()))


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A tensor's memory from its first element to its last, in the order in which it lies there."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((extent,), (1,), x.storage_offset())


def _copy(target: torch.Tensor, source: torch.Tensor, way: host_memory.Direction, room: HostBuffer | None) -> End:
    """Launches a copy, behind the last one of the same room.

    Args:
        way: ``"out"``, to the host, or ``"in"``.
        room: the host's part of it.
    """
    last = [] if room is None or room.copied is None else [room.copied]
    end = host_memory.copy([(target, source)], way, last)
    if room is not None and isinstance(end, InFlight):
        room.copied = end.event
    return end
