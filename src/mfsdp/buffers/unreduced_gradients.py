"""Unreduced gradients, which wait for the next synchronisation, and how ``zero_grad`` drops them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.patches import wrap
from ..dtensor.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from .gradients import Gradients

holding: weakref.WeakSet[Gradients] = weakref.WeakSet()
"""Gradients of flat buffers, those with an unreduced part."""


@functools.cache
def reach_zero_grad() -> None:
    """Makes ``zero_grad`` of every optimizer and module drop unreduced gradients.

    They are in no ``.grad``, so an abandoned step would leave them for the next one. torch has no hook there, so this
    wraps ``torch.optim.Optimizer.zero_grad`` and ``torch.nn.Module.zero_grad`` (which torch.compile's wrapper inherits)
    once, when the first gradient stays unreduced. A class whose ``zero_grad`` does not call its parent's is covered if
    it sets ``.grad`` to ``None`` unconditionally.
    """

    wrap(torch.optim.Optimizer, "zero_grad", functools.partial(_zero_grad, _of_optimizer), traced=False)
    wrap(nn.Module, "zero_grad", functools.partial(_zero_grad, nn.Module.parameters), traced=False)


def _zero_grad(
    parameters: Callable[[Any], Iterable[Any]], theirs: Callable[..., None], owner: Any, set_to_none: bool = True
) -> None:
    if holding:
        chosen: dict[Gradients, set[int]] = {}
        for p in parameters(owner):
            if isinstance(p, ShardedParameter) and p._mfsdp_owner.gradients in holding:
                chosen.setdefault(p._mfsdp_owner.gradients, set()).add(p.sharding.slot)
        for gradients, slots in chosen.items():
            gradients.forget(slots)
    theirs(owner, set_to_none)


def _of_optimizer(optimizer: Any) -> Iterable[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])
