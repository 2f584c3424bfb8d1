"""Host buffers for offloaded activations, and the copies to and from them.

Note [Activation memory on the host]
A `HostBuffer` is host memory of a fixed size, pinned for a device, and persists between steps, since pinning takes
milliseconds. Like a static buffer (Note [Vacant static buffers]) it is free when no tensor uses its storage; torch
counts the references. A saved activation is such a tensor. It holds the buffer until autograd drops it: after
backward's last read, with a forward that has no backward, or after an exception. A second forward gets another buffer.
A copy waits for a device's earlier copies of the same buffer.

Copies overlap with compute: each direction has a stream on a device, and a thread on the CPU, where the host is just
another pool. Operands stay alive until compute has waited for the copy (Note [In flight]).
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import torch

from . import capturing, host_memory, static_buffers
from .inflight import InFlight
from .transport import End


class HostBuffer:
    """Host memory for one device (Note [Activation memory on the host]).

    Args:
        nbytes: size. mmap provides it, because torch's allocator rounds pinned memory up to a power of two. Forked
            processes share it: copy-on-write would move its pages away from those that a device writes to.
        device: copies to the buffer.
    """

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes, self.round = nbytes, 0
        """`HostPool.round` when the buffer was last taken."""
        self.storage = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()
        self.copied: torch.Event | None = None
        """Recorded after the last copy to or from the buffer."""
        if device.type == "cuda":
            _pin(self, self.storage.data_ptr(), nbytes)

    def vacant(self) -> bool:
        """Whether no tensor uses the storage."""
        return static_buffers.holders(self.storage) <= 1

    def copying(self) -> bool:
        """Whether a device still reads or writes the buffer. Freeing system memory does not wait for that."""
        return self.copied is not None and not self.copied.query()

    def tensor(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """A tensor on this storage with its own version counter: autograd does not see the copies' writes."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype).set_(self.storage, 0, size, stride)  # type: ignore[call-overload, no-any-return]


def _pin(room: HostBuffer, at: int, nbytes: int) -> None:
    """Pins memory until the buffer is deleted, like torch's own checkpoints (``_create_cpu_state_dict``). Has not run
    on a GPU.

    Raises:
        RuntimeError: the system refuses to pin it.
    """
    cudart: Any = torch.cuda.cudart()
    if (error := int(cudart.cudaHostRegister(at, nbytes, 0))) != 0:
        raise RuntimeError(
            f"mfsdp: the host does not pin {nbytes} bytes for saved activations (CUDA error {error}): there is not "
            "enough memory, or it may not be locked (ulimit -l). Offload less"
        )
    weakref.finalize(room, cudart.cudaHostUnregister, at).atexit = False


class HostPool(list[HostBuffer]):
    """The host buffers of one device."""

    round = 0
    """How often a buffer was taken while all were free; normally the number of steps."""

    def take(self, nbytes: int, device: torch.device) -> HostBuffer:
        """Returns the smallest free buffer that fits and is at most a quarter too large, else a new one. Before
        allocating, drops free buffers unused for `ROUNDS` rounds (sizes of sequence lengths that did not recur).
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
    """Bytes of each host buffer."""
    return sorted(room.nbytes for rooms in _rooms.values() for room in rooms)


def taken() -> int:
    """Bytes of the host buffers in use."""
    return sum(room.nbytes for rooms in _rooms.values() for room in rooms if not room.vacant())


def _take(x: torch.Tensor, nbytes: int) -> tuple[HostBuffer, torch.Tensor]:
    """A host buffer, and a tensor in it with the layout of ``x``."""
    with _lock:
        room = _rooms.setdefault(x.device, HostPool()).take(nbytes, x.device)
        return room, room.tensor(x.dtype, x.shape, x.stride())


def offload(x: torch.Tensor) -> tuple[torch.Tensor, End]:
    """Launches a tensor's copy to the host. Returns the host tensor, of equal layout, and a function that waits for the
    copy.
    """
    capturing.obstacle("activations wait on the host")
    source = _flat(x)
    room, out = _take(x, source.numel() * x.itemsize)
    return out, _copy(_flat(out), source, "out", room)


def reload(host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, End]:
    """Launches the copy back to a device; returns the same pair."""
    out = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return out, _copy(_flat(out), _flat(host), "in", _at.get(host.data_ptr()))


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A tensor's memory from first to last element, flat and in memory order."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((extent,), (1,), x.storage_offset())


def _copy(target: torch.Tensor, source: torch.Tensor, way: host_memory.Direction, room: HostBuffer | None) -> End:
    """Launches a copy after the last one of the same host buffer.

    Args:
        way: ``"out"`` to the host, ``"in"`` to the device.
        room: the host buffer.
    """
    last = [] if room is None or room.copied is None else [room.copied]
    end = host_memory.copy([(target, source)], way, last)
    if room is not None and isinstance(end, InFlight):
        room.copied = end.event
    return end
