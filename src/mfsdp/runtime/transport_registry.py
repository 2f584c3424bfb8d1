"""Finds a process group's transport, for tensors and for fingerprints."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import groups
from .c10d_transport import C10dTransport
from .desync import GroupState
from .fake_transport import FakeTransport
from .gloo_transport import GlooTransport
from .transport import Transport

FEW = 64
"""About how many values of a loaded tensor are compared."""


def transport_of(name: str, device: torch.device) -> Transport:
    """The transport for tensors on a device between the ranks of a group."""
    return _made(name, device.type)


def wire_of(name: str) -> Transport | None:
    """The transport for a group's fingerprints, over the CPU if possible; ``None`` if there is no other rank."""
    kinds = [kind.partition(":")[0] for kind in dist.get_backend_config(groups.process_group(name)).split(",")]
    found = _made(name, "cpu" if "cpu" in kinds else kinds[0])
    return found if found.size > 1 and found.prompt is not None else None


def group_state(name: str) -> GroupState | None:
    """A group's state; ``None`` if there is no other rank."""
    group = groups.process_group(name)
    found = _registry.states.get(name)
    if found is None or found[0]() is not group:
        line = wire_of(name)
        found = _registry.states[name] = (weakref.ref(group), None if line is None else GroupState(name, line))
    return found[1]


def group_states() -> list[GroupState]:
    """The states of all groups that exist."""
    return [c for made, c in list(_registry.states.values()) if c is not None and made() is not None]


def count_step(names: Iterable[str]) -> None:
    """Counts an optimizer step, once in each group that shares its parameters (invariant 66)."""
    counted = set(names)
    for state in group_states():  # of groups that have communicated
        state.steps += state.name in counted


def record_load(names: Iterable[str], what: str, value: Any, dtype: torch.dtype) -> None:
    """Counts a load for the ranks of some groups to compare: its name, and for a full tensor, which every rank must
    pass with equal values, some of its values, cast to ``dtype``.
    """
    content = what.encode()
    if type(value) in (torch.Tensor, nn.Parameter) and value.numel() and value.device.type != "meta":
        few = value.detach().reshape(-1)[:: max(value.numel() // FEW, 1)].to("cpu", dtype)
        content += few.contiguous().view(torch.uint8).numpy().tobytes()
    count_load(names, what, content)


def count_load(names: Iterable[str], what: str, content: bytes) -> None:
    """Counts a loaded state dict, once in each group that shares its weights (invariant 69)."""
    for name in set(names):
        with suppress(RuntimeError):  # a deleted group has nothing to compare
            if (state := group_state(name)) is not None:
                state.load(what, zlib.crc32(content))


def _made(name: str, device: str) -> Transport:
    group = groups.process_group(name)
    found = _registry.transports.get((name, device))
    if found is None or found[0]() is not group:
        found = _registry.transports[name, device] = (weakref.ref(group), _registry.make(group, device))
    return found[1]


def _make(group: dist.ProcessGroup, device: str) -> Transport:
    if dist.get_backend(group) == "fake":
        return FakeTransport(group)
    gloo = device == "cpu" and "cpu:gloo" in dist.get_backend_config(group)
    return GlooTransport(group) if gloo else C10dTransport(group)


class _Registry:
    """What was made for groups, by name; each refers to its group, which another one of that name may replace."""

    def __init__(self, make: Callable[[dist.ProcessGroup, str], Transport]):
        self.make = make
        self.transports: dict[tuple[str, str], tuple[weakref.ref[dist.ProcessGroup], Transport]] = {}
        """By name and device type."""
        self.states: dict[str, tuple[weakref.ref[dist.ProcessGroup], GroupState | None]] = {}


_registry = _Registry(_make)


@contextmanager
def carried_by(make: Callable[[dist.ProcessGroup, str], Transport]) -> Iterator[None]:
    """Replaces the transports of all groups inside of the ``with``."""
    global _registry
    previous, _registry = _registry, _Registry(make)
    try:
        yield
    finally:
        _registry = previous
