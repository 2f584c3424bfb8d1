"""What this machine can do, measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from .. import runtime
from ..spec.config import SHORT
from ..spec.hardware import Hardware, Link


def measure() -> Hardware:
    """Measures the accelerator of this process, or its share of the CPU: matrix products per dtype, memory bandwidth,
    the smallest kernel; and, if there are several ranks, what connects them (all must call it). Takes a few seconds.
    """
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
    assert device is not None
    width, copied = (8192, 2**30) if gpu else (768, 2**26)
    flops = {}
    for dtype, short in SHORT.items():
        if gpu or dtype is not torch.float16:  # emulated, and slow
            a = torch.ones(width, width, dtype=dtype, device=device)
            flops[short] = 2 * width**3 / _best(lambda a=a: a @ a)  # type: ignore[misc]
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copied / _best(lambda: target.copy_(source))
    one = torch.ones(1, device=device)
    kernel = _best(lambda: [one.add_(1) for _ in range(100)]) / 100
    if gpu:
        memory = int(torch.accelerator.get_memory_info()[1])
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // runtime.world()
    if runtime.world() == 1:
        link = Link(bandwidth / 2, 1e-6)
        name = "this machine, one process: links as fast as memory"
    else:
        link = Link(*runtime.measured_link(device))
        name = f"this machine, {runtime.world()} ranks"
    return Hardware(name, flops, memory, bandwidth, link, link, reached=1.0, reached_bandwidth=1.0, kernel=kernel)


def _best(function: Callable[[], object], rounds: int = 5) -> float:
    """Seconds, once warm."""
    best = float("inf")
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        function()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best
