"""Gives an optimizer that was built before sharding the sharded parameters, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import nn

from ..sharding.module import FSDPModule, unwrapped

Places = list[list[tuple[nn.Module, str]]]
"""For each group's parameters, the modules that hold them, and their names there."""


Refusal = Callable[[torch.optim.Optimizer, torch.Tensor | None], NoReturn]
"""Raises the caller's error for an optimizer: with state, or with a parameter of no model, which it gets."""


@contextmanager
def parameters_freed(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, refuse: Refusal) -> Iterator[None]:
    """Removes the model's parameters from optimizers, so that they are freed one by one, and afterwards gives
    optimizers the parameters in the same places, in the same group dicts.

    Parameters are found by module and name: addresses are the same for all on the meta device.
    """
    found = [places(optimizer, [model], refuse) for optimizer in optimizers]
    for optimizer in optimizers:
        if optimizer.state and not isinstance(model, FSDPModule):
            refuse(optimizer, None)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = []
    try:
        yield
    finally:
        for optimizer, own in zip(optimizers, found):
            groups = list(optimizer.param_groups)
            optimizer.param_groups.clear()
            for group, held in zip(groups, own):
                group["params"] = [owner._parameters[name] for owner, name in held]
                optimizer.add_param_group(group)  # which registers hooks for sharded parameters


def places(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], refuse: Refusal) -> Places:
    """Returns where an optimizer's parameters are in models; refuses one that is in none."""
    known = {
        id(p): (m, name)
        for model in models
        for m in unwrapped(model).modules()
        for name, p in m._parameters.items()
        if p is not None
    }
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if id(param) not in known:
            refuse(optimizer, param)
    return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]
