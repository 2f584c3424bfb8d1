"""Memory of the host beside a device's, and copies there and back beside compute.

On a device it is pinned, and each direction has a stream of its own. On the CPU a host is played, for tests and
benchmarks: memory that torch's allocator does not count, a thread for each direction, and a link that is as fast as
`at_rate` says.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from . import devices
from .inflight import InFlight, beside

Direction = Literal["in", "out"]
"""Of a copy: to the device, or from it."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""What is copied in one go: (where to, where from)."""

_rate: float = float("inf")


class CopyHandle(Protocol):
    """Of a copy that is under way. It keeps what it reads and writes alive until it has been called."""

    def __call__(self) -> None:
        """Returns once it is complete; on a device, once the current stream is behind it.

        Raises:
            Exception: what the copy has raised, in every call.
        """

    def landed(self) -> None:
        """The same, and the host itself may read what was copied."""


@contextmanager
def at_rate(rate: float) -> Iterator[None]:
    """Inside of the ``with`` the CPU's link to its host moves this many bytes per second, each way."""
    global _rate
    before, _rate = _rate, rate
    try:
        yield
    finally:
        _rate = before


def room(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory on a device's host, [nbytes] of uint8, of any content."""
    with torch.inference_mode(False):
        if device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def copy(pairs: Pairs, direction: Direction, after: Sequence[CopyHandle | torch.Event] = ()) -> CopyHandle:
    """Launches copies between a device and its host, behind what compute has been given so far, those of the same
    direction, and others.

    Args:
        pairs: contiguous tensors. Until the end nobody may write what is read, nor touch what is written.
        after: ends of copies of the other direction; on a device also events behind them.
    """
    out, source = pairs[0]
    device = out.device if direction == "in" else source.device
    stream = devices.side(device, direction)
    if stream is None:
        ends = [end for end in after if not isinstance(end, torch.Event)]
        return _OnThread(_thread(direction, os.getpid()).submit(_copied, list(pairs), _rate, ends), pairs)

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
    pairs.clear()  # whoever has the end lets go of them
    time.sleep(max(0.0, begun + total / rate - time.perf_counter()))


@functools.cache
def _thread(direction: str, process: int) -> ThreadPoolExecutor:
    """One for each direction; a fork has none of its parent's."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"mfsdp host {direction}")


class _OnThread:
    def __init__(self, future: Future[None], held: Pairs):
        self._future, self._held = future, held

    def __call__(self) -> None:
        self._future.result()
        self._held = ()

    landed = __call__
