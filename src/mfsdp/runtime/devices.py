"""Devices and streams of this process."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from . import capturing, groups


def accelerator() -> torch.device | None:
    """The available accelerator's type, without an index. Does not initialize it."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def home() -> torch.device:
    """The device of this process: the default group's bound device; else, if the accelerator is not initialized, that
    of ``LOCAL_RANK`` (set by torchrun); else the current one. The CPU without an accelerator. If the accelerator is not
    initialized, the chosen device becomes the current one.
    """
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    group = dist.group.WORLD if groups.initialized() else None
    bound = None if group is None else group.bound_device_id
    index = bound.index if bound is not None and bound.type == kind.type else None
    if not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        if index is None and int(local := os.environ.get("LOCAL_RANK", "0")) < torch.accelerator.device_count():
            index = int(local)
        if index is not None:
            torch.accelerator.set_device_index(index)
    return torch.device(kind.type, torch.accelerator.current_device_index() if index is None else index)


def numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The host's numbers on a device. Nobody waits for the copy, as for one from memory that is not pinned."""
    pinned = device.type not in ("cpu", "meta")
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


def stay_on(device: torch.device) -> None:
    """Makes a device this thread's current one. A new thread is on the first device: freeing an event there would
    initialize it, which takes some 0.5 GB of it per rank (meta-pytorch/torchcomms#777).
    """
    if torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)


def collective_device(group: str) -> torch.device:
    """A device whose tensors the group's collectives accept: on a machine with an accelerator, the group of a plain
    ``init_process_group()`` has no CPU backend.
    """
    config = dist.get_backend_config(groups.process_group(group))
    return torch.device("cpu") if "cpu:" in config else home()


def alone_on(device: torch.device) -> None:
    """Checks that no other rank uses this device, where NCCL connects the ranks: NCCL's own error is unclear, or memory
    runs out first. Of two ranks on one device, the later one raises.

    Raises:
        ValueError: another rank uses the device.
    """
    config = dist.get_backend_config() if groups.initialized() else ""
    shared = device.type == "cpu" or f"{device.type}:nccl" not in config
    if shared or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    number = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    if number is not None:
        _claim(str(number), device)


@functools.cache
def _claim(number: str, device: torch.device) -> None:
    me = str(groups.rank())
    other = groups.first_to_say(f"device/{number}", me)
    if other != me:
        raise ValueError(
            f"fully_shard: ranks {other} and {me} are on the same device, {device} here. Give each rank its own before "
            f"anything uses one: torch.{device.type}.set_device(int(os.environ['LOCAL_RANK'])), or "
            "init_process_group(device_id=...)"
        )


_SLOW = {
    "TORCH_NCCL_BLOCKING_WAIT": "the host stands still in every wait for a collective",
    "CUDA_LAUNCH_BLOCKING": "the host stands still in every kernel",
    "CUDA_DEVICE_MAX_CONNECTIONS": "kernels of several streams queue up behind each other",
}


@functools.cache
def told_of_environment(kind: str) -> list[str]:
    """Warns, once per device type, of environment variables that prevent overlap of communication and compute; returns
    their names.
    """
    if kind != "cuda":
        return []
    found = [name for name in _SLOW if os.environ.get(name) == "1"]
    for name in found:
        warnings.warn(f"mfsdp: {name}=1 is set: {_SLOW[name]}, and nothing overlaps. Unset it.", stacklevel=4)
    return found


def synchronize(device: torch.device) -> None:
    """Waits for all work launched on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream this thread launches on; ``None`` on devices without streams."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


class Place:
    """The device index and stream on which the creating thread launches."""

    def __init__(self) -> None:
        self.index, self.stream = 0, None
        if accelerator() is not None:
            self.index, self.stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()

    def settle(self) -> None:
        """Makes the calling thread launch there too."""
        if self.stream is not None:
            torch.accelerator.set_device_index(self.index)
            torch.accelerator.set_stream(self.stream)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launches there inside of the ``with``; then the current stream waits for it."""
        before = Place()
        self.settle()
        before.join()
        try:
            yield
        finally:
            before.settle()
            self.join()

    def join(self) -> None:
        """Makes the current stream wait for work launched there."""
        if self.stream is not None and (here := torch.accelerator.current_stream()) != self.stream:
            here.wait_stream(self.stream)


@functools.cache
def side(device: torch.device, what: str) -> torch.Stream | None:
    """A side stream for one purpose; ``None`` on devices without streams."""
    return None if device.type in ("cpu", "meta") else torch.Stream(device)


@contextmanager
def between(stream: torch.Stream | None, device: torch.device) -> Iterator[None]:
    """Launches on another stream inside of the ``with``: after what this one has launched, before what it will."""
    here = current_stream(device)
    if stream is None or here is None:
        yield
        return
    stream.wait_stream(here)
    try:
        with stream:
            yield
    finally:
        here.wait_stream(stream)


def follow(stream: torch.Stream | None, tensor: torch.Tensor) -> None:
    """Makes the current stream wait for another one's work on a tensor, and protects the tensor's memory from reuse
    until the current stream is done. What is recorded needs no such wait (`between`), and may not have one.
    """
    if capturing.is_recording():
        return
    here = current_stream(tensor.device)
    if here is not None and stream is not None and here != stream:
        here.wait_stream(stream)
        tensor.record_stream(here)
