"""Host memory of a device, and copies that overlap with compute.

On an accelerator memory is pinned, and each direction has a stream. On the CPU a host is simulated, for tests and
benchmarks: memory outside of torch's allocator, a thread per direction, and a link with the bandwidth of `at_rate`.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

import torch

from . import devices
from .inflight import InFlight, beside

Direction = Literal["in", "out"]
"""Of a copy: to the device, or from it."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source) pairs of one copy."""

_rate: float = float("inf")


@contextmanager
def at_rate(rate: float) -> Iterator[None]:
    """Sets the simulated link's bandwidth, in bytes per second and direction, inside the ``with``."""
    global _rate
    before, _rate = _rate, rate
    try:
        yield
    finally:
        _rate = before


def room(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialized host memory of a device, [nbytes] of uint8."""
    with torch.inference_mode(False):
        if device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def copy(pairs: Pairs, direction: Direction, after: Sequence[CopyHandle | torch.Event] = ()) -> CopyHandle:
    """Launches copies between a device and its host, after the compute launched so far, earlier copies of the same
    direction, and ``after``.

    Args:
        pairs: contiguous tensors. Until the end, do not write sources or touch destinations.
        after: ends of copies of the other direction; on a device also events.
    """
    out, source = pairs[0]
    device = out.device if direction == "in" else source.device
    stream = devices.side(device, direction)
    if stream is None:
        ends = [end for end in after if not isinstance(end, torch.Event)]
        return ThreadCopy(_thread(direction, os.getpid()).submit(_copied, list(pairs), _rate, ends), pairs)

    @torch.no_grad()
    def launch() -> None:
        for target, read in pairs:
            target.copy_(read, non_blocking=True)

    events = [end.event if isinstance(end, InFlight) else end for end in after]
    return beside(stream, device, launch, after=events)  # type: ignore[arg-type]


@torch.no_grad()
def _copied(pairs: list[tuple[torch.Tensor, torch.Tensor]], rate: float, after: Sequence[CopyHandle]) -> None:
    for end in after:
        end()
    begun, total = time.perf_counter(), 0
    for out, source in pairs:
        out.copy_(source)
        total += source.nbytes
    pairs.clear()  # the handle's owner holds the last references
    time.sleep(max(0.0, begun + total / rate - time.perf_counter()))


@functools.cache
def _thread(direction: str, process: int) -> ThreadPoolExecutor:
    """One thread per direction; a fork does not inherit its parent's."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"mfsdp host {direction}")


class ThreadCopy:
    """A copy on a thread; calls raise its error, if there is one."""

    def __init__(self, future: Future[None], held: Pairs):
        self._future, self._held = future, held

    def __call__(self) -> None:
        self._future.result()
        self._held = ()

    landed = __call__


CopyHandle = InFlight | ThreadCopy
"""A copy in flight: a call returns once it is complete, or on a device once the current stream waits for it; after
``landed()`` the host may read the data.
"""
