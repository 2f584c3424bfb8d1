"""Registers static buffers with NCCL as user buffers (option ``nccl_ub``): its collectives then work on them in place,
by NVLink SHARP or, over symmetric windows, by its symmetric kernels and copy engines (NCCL's policy decides).

Such a static buffer is a pool of memory from NCCL's allocator. Its registration is a collective of the group: all ranks
make it before the same program launches anything, in the same order. torch takes it back when the pool is freed.
Has not run on a GPU. Private in torch (``_get_backend``); ``mem_allocator`` and ``register_mem_pool`` were read on 2.11
to 2.15.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from . import groups, static_buffers
from .execution import Execution
from .static_buffers import Rooms

log = logging.getLogger("mfsdp")


@dataclass(frozen=True)
class UserBuffers:
    """Static buffers that a program needs registered."""

    groups: Mapping[tuple[torch.device, str], Sequence[str]] = field(default_factory=dict)
    """Groups that they are communicated over, by device and name."""
    symmetric: bool = True
    """Whether as symmetric windows."""

    def ready(self, run: Execution, rooms: Rooms) -> None:
        """Makes and registers what is not registered yet. All ranks call it in the same program.

        Raises:
            RuntimeError: the device's memory cannot be registered.
            DesyncError: another rank runs something else.
        """
        static_buffers.reserve({key: rooms[key] for key in self.groups}, allocator)
        for (device, slot), over in self.groups.items():
            pool = static_buffers.pool_of(device, slot)
            done = _registered.setdefault(pool, set())
            for name in over:
                if name not in done:
                    run.agree()
                    _register(groups.process_group(name), device, pool, self.symmetric)
                    done.add(name)
                    log.info("mfsdp: NCCL has registered static buffer %s with %s", slot, name)


_registered: WeakKeyDictionary[torch.cuda.MemPool, set[str]] = WeakKeyDictionary()
"""Groups that pools are registered with."""


def allocator(device: torch.device) -> Any:
    """Returns NCCL's allocator.

    Raises:
        RuntimeError: there is none, or torch would not use it.
    """
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in settings.replace(" ", "").lower():
        raise RuntimeError(
            "option nccl_ub=True: torch takes no memory from NCCL with expandable_segments:True in "
            "PYTORCH_CUDA_ALLOC_CONF; leave one of them out"
        )
    return _backend(groups.process_group(groups.default_group()), device).mem_allocator


def _register(group: dist.ProcessGroup, device: torch.device, pool: object, symmetric: bool) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # the first collective makes the communicator
    _backend(group, device).register_mem_pool(pool, symmetric)


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend: Any = group._get_backend(device) if device.type == "cuda" else None
    if not hasattr(backend, "register_mem_pool"):
        name = dist.get_backend(group)
        raise RuntimeError(
            f"option nccl_ub=True: the backend of process groups on {device} is {name}, which registers no buffers. "
            'Use a GPU and init_process_group("nccl"), or leave nccl_ub out'
        )
    return backend
