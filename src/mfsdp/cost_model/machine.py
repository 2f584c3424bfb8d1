"""Describes this machine: from the maker's data, or measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from ..config.hardware import KNOWN, Hardware, Link
from ..config.options import SHORT
from ..ir import ops
from ..runtime import devices, execution, groups


def this_machine() -> Hardware | None:
    """Returns this process's GPU by its maker's data, with its actual memory and the ranks per node that torchrun
    started (``LOCAL_WORLD_SIZE``); ``None`` if it is not in `KNOWN`. Measures nothing.
    """
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    key = max((key for key in KNOWN if key in name), key=len, default=None)  # the longest: "b200" is in "gb200"
    if key is None:
        return None
    known = KNOWN[key]
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdigit() and int(local) > 0 else known.ranks_per_node
    return replace(known, ranks_per_node=ranks, memory=int(torch.accelerator.get_memory_info()[1]))


def machine_of(inputs: Sequence[object]) -> Hardware | None:
    """Returns `this_machine` for a graph with inputs on the GPU, else ``None``."""
    return this_machine() if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs) else None


def measure() -> Hardware:
    """Measures this process's accelerator, or its share of the CPU: matrix products per dtype, memory bandwidth, the
    smallest kernel, copies to the host, and with several ranks the link between them (all ranks must call it). Takes a
    few seconds.
    """
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
    assert device is not None
    width, copied = (8192, 2**30) if gpu else (768, 2**26)
    flops = {}
    for dtype, short in SHORT.items():
        if gpu or dtype is not torch.float16:  # CPUs emulate it slowly
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
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // groups.world()
    if groups.world() == 1:
        link = Link(bandwidth / 2, 1e-6)
        name = "this machine, one process: links as fast as memory"
    else:
        one = torch.ones(width, width, dtype=torch.bfloat16 if gpu else torch.float32, device=device)
        link = _link(device, lambda: (one @ one, target.copy_(source)))
        name = f"this machine, {groups.world()} ranks"
    return Hardware(
        name, flops, memory, bandwidth, link, link, reached=1.0, reached_bandwidth=1.0, kernel=kernel,
        cuda=ops.widens(device), host=_host(device, bandwidth), fixed=fixed(),
    )  # fmt: skip


def fixed() -> int:
    """Returns the GPU bytes in use besides this process's tensors: context, loaded kernels, communicators' buffers,
    libraries' workspaces, and other processes' memory; 0 on the CPU. Call it after the first collectives and matrix
    products, which allocate their buffers.
    """
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _best(function: Callable[[], object], rounds: int = 5) -> float:
    """Returns the fastest time in seconds, after a warm-up call."""
    best = float("inf")
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        function()
        _synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def _host(device: torch.device, bandwidth: float, nbytes: int = 2**28) -> Link:
    """Measures copies to pinned host memory and back, and returns the slower direction. On the CPU, host and device
    memory are the same: the link has the rate of a copy in memory, which takes the processor's time.
    """
    if device.type == "cpu":
        return Link(bandwidth / 2, 0.0, cpu=2 / bandwidth)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    ways = ((here, there), (there, here))
    took = max(_best(lambda a=a, b=b: a.copy_(b, non_blocking=True)) for a, b in ways)  # type: ignore[misc]
    return Link(nbytes / took, 1e-5)


def _link(device: torch.device, work: Callable[[], object], nbytes: int = 2**22, rounds: int = 8) -> Link:
    """Measures the link between the ranks of the default group with gathers. Returns the same result on all ranks,
    which must call it together.

    Args:
        work: compute that runs beside gathers, to measure how much they slow it down.
        nbytes: bytes of each gather.
    """
    ranks, everybody = groups.world(), groups.default_group()
    shard = torch.zeros(nbytes // ranks, dtype=torch.uint8, device=device)
    full = shard.new_empty(shard.numel() * ranks)

    def timed(count: int, part: torch.Tensor, whole: torch.Tensor, queued: bool) -> tuple[float, float]:
        groups.barrier()
        begun, burnt = time.perf_counter(), time.process_time()
        ends = []
        for _ in range(count):
            end = execution.current().gather([(whole, part)], everybody)
            if queued:
                ends.append(end)
            else:
                end()
        for end in ends:
            end()
        devices.synchronize(device)
        return (time.perf_counter() - begun) / count, (time.process_time() - burnt) / count

    timed(rounds, shard, full, True)
    small = min(timed(rounds, shard[:1], full[:ranks], False)[0] for _ in range(3))
    alone = min(timed(rounds, shard, full, False)[0] for _ in range(3))
    queued, burnt = min(timed(rounds, shard, full, True) for _ in range(3))
    sent = shard.numel() * (ranks - 1)
    taken = lost([lambda: execution.current().gather([(full, shard)], everybody)] * rounds, work, queued) / rounds
    taken = max(taken, burnt) if device.type == "cpu" else taken  # at least the CPU time of gathers alone
    numbers = torch.tensor([sent / queued, small / (ranks - 1), taken, max(0.0, alone / queued - 1)])
    rate, hop, taken, restart = groups.broadcast(numbers.double().to(device), everybody).tolist()
    if device.type == "cpu":
        return Link(rate, hop, cpu=min(taken, 0.9 * queued) / sent, restart=restart)
    return Link(rate, hop, slows=min(0.9, taken / queued), restart=restart)


def lost(
    launches: Sequence[Callable[[], Callable[[], None]]], work: Callable[[], object], seconds: float, rounds: int = 7
) -> float:
    """Returns how many seconds longer computation takes beside transfers than alone, measured alternately. On the CPU,
    whose cores other processes may use, it measures this process's CPU time, including the threads that move the bytes.
    As in a program, each transfer is launched separately and awaited after compute that hides it, so that each one
    wakes the threads that move its bytes. All ranks must call it together.

    Args:
        launches: each starts a transfer and returns a function that waits for it.
        work: compute, repeated until a transfer has certainly completed.
        seconds: time of one transfer alone.
        rounds: number of measurements; the result is from their medians.
    """
    now = time.perf_counter if torch.accelerator.is_available() else time.process_time

    def worked(beside: bool) -> float:
        groups.barrier()
        begun = now()
        for launch in launches:
            end = launch() if beside else None
            for _ in range(count):
                work()
            if end is not None:
                end()
        _synchronize()
        return now() - begun

    count = 1 + int(1.5 * seconds / min(_best(work, 1) for _ in range(3)))
    both = [(worked(False), worked(True)) for _ in range(rounds)]
    alone, beside = (median(column) for column in zip(*both, strict=True))
    return max(0.0, float(beside - alone))


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
