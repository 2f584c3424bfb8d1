"""Records device work, to launch it again at once: of a whole training step (`optim.captured_step`), or of compute in
programs (`program_graphs`).

While a step is recorded, its Python runs and the device does nothing. So nothing in it may wait for the device, and
what ranks tell each other before each program is told once, before the recording and before every replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

T = TypeVar("T")


@dataclass
class Pool:
    """A memory pool that graphs share."""

    handle: Any = None


class CudaGraph:
    """A CUDA graph. Has not run on a GPU yet; written after torch 2.13.

    All captured steps of a device share one memory pool: nothing in it outlives a replay. Collectives of NCCL are
    recorded like kernels; its watchdog and autograd's device threads go on, so only this thread's calls are restricted.
    """

    _pools: ClassVar[dict[torch.device, Pool]] = {}
    """Of captured steps."""

    def __init__(self, device: torch.device, pool: Pool | None = None):
        self._device, self._graph = device, torch.cuda.CUDAGraph()
        self.nbytes = 0
        """Memory that only its replays use."""
        self._pool = pool or self._pools.setdefault(device, Pool())

    def record(self, work: Callable[[], T], stream: torch.Stream | None) -> T:
        """Runs ``work`` without executing what it launches on ``stream``, and returns its result.

        Raises:
            RuntimeError: it cannot be recorded. The current stream is as before, and the pool is a new one: torch
                leaves both as they are in the recording (before 2.15, the stream).
        """
        assert stream is not None
        names = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
        here = torch.cuda.Stream(**names)
        self._pool.handle = self._pool.handle or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        before, outside = torch.cuda.memory_reserved(self._device), torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(self._graph, pool=self._pool.handle, stream=here, capture_error_mode="thread_local"):
                out = work()
        except BaseException:
            torch.cuda.set_stream(outside)
            _end_recording(self._device, self._pool)
            raise
        self.nbytes = max(0, torch.cuda.memory_reserved(self._device) - before)
        return out

    def replay(self) -> None:
        """Launches on the current stream what was recorded."""
        self._graph.replay()


def _end_recording(device: torch.device, pool: Pool) -> None:
    """Ends allocation in a pool after a failed recording, and forgets the pool. Private in torch
    (``_cuda_endAllocateToPool``); there in 2.11 to 2.15, not tried: it needs a GPU.
    """
    handle, pool.handle = pool.handle, None
    with suppress(RuntimeError):  # torch has ended it
        torch._C._cuda_endAllocateToPool(device.index, handle)


GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}
"""What records, by device type."""


class _State:
    """Of the process: autograd runs backward in threads of its own."""

    recording = False
    obstacles: dict[str, None] | None = None
    """Why the step that is being watched cannot be recorded."""


@contextmanager
def recording() -> Iterator[None]:
    """Marks what runs inside of the ``with`` as recorded."""
    _State.recording = True
    try:
        yield
    finally:
        _State.recording = False


def is_recording() -> bool:
    """Whether launches are recorded and not executed."""
    return _State.recording


@contextmanager
def watching() -> Iterator[dict[str, None]]:
    """Collects why what runs inside of the ``with`` could not be recorded."""
    before, found = _State.obstacles, dict[str, None]()
    _State.obstacles = found
    try:
        yield found
    finally:
        _State.obstacles = before


@contextmanager
def host_waits(device: torch.device) -> Iterator[None]:
    """Makes every wait of the host for a GPU inside of the ``with`` an obstacle."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in found:
        if "synchronizing CUDA operation" in str(warning.message):
            obstacle(f"the host waits for the device ({warning.filename}:{warning.lineno})")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def obstacle(why: str) -> None:
    """Says that the running step cannot be recorded, if somebody asks."""
    if _State.obstacles is not None:
        _State.obstacles[why] = None
