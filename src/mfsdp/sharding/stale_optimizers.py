"""Finds parameters from before sharding, and optimizers that still hold them."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..buffers.flat_buffer import FlatBuffer, UnitState

ORIGINALS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters from before sharding that are still alive, and what replaced them; by identity."""


def no_optimizer(module: nn.Module) -> None:
    """Refuses if an optimizer holds a parameter of the module: it would keep stepping on the old ones."""
    if (holder := optimizer_of(module)) is not None:
        raise ValueError(
            f"fully_shard: an optimizer ({type(holder).__name__}) holds parameters of this module; build the optimizer "
            "after fully_shard, from model.parameters()"
        )


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer | None:
    """Returns an optimizer that holds a parameter of the module."""
    if _references(module) <= _references(nn.Linear(1, 1, device="meta")):
        return None  # only modules hold references: no need to search all objects
    return _optimizer_of(set(module.parameters()))


def _references(module: nn.Module) -> int:
    """The most references to any parameter, besides those of its modules."""
    owners = [m._parameters for m in module.modules()]
    places = Counter(id(p) for own in owners for p in own.values())
    counts = [sys.getrefcount(p) - places[id(p)] for own in owners for p in own.values() if p is not None]
    return max(counts, default=0)


def no_stale_optimizer(buffer: FlatBuffer) -> None:
    """Repeats the check in the first backward, for an optimizer built from a parameter list from before sharding."""
    mine = {p for p, ref in ORIGINALS.items() if ref.buffer is buffer}
    holder = _optimizer_of(mine) if mine else None
    if holder is not None:
        raise ValueError(
            f"mfsdp: a {type(holder).__name__} holds parameters of unit {buffer.unit.fqn!r} from before fully_shard "
            "and would step on those; build it from model.parameters() after fully_shard"
        )


def _optimizer_of(params: set[nn.Parameter]) -> torch.optim.Optimizer | None:
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer):
            optimizer = cast(torch.optim.Optimizer, thing)
            if any(p in params for group in optimizer.param_groups for p in group["params"]):
                return optimizer
    return None


def forget_originals(unit: UnitState) -> None:
    for param in [p for p, ref in ORIGINALS.items() if ref.unit is unit]:
        del ORIGINALS[param]
