"""Parametrizations of sharded parameters: those from before `fully_shard` stay; none comes or goes after it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn
from torch.nn.utils import parametrize

from ..buffers.flat_buffer import refs
from ..config.patches import wrap


def too_late(kind: type[nn.Module], name: str) -> RuntimeError:
    """The error for weight_norm, spectral_norm, pruning, parametrizations and ties applied after `fully_shard`."""
    return RuntimeError(
        f"mfsdp: {kind.__name__}.{name}: sharded, it stays where and what it is; nothing was changed. Tie weights, and "
        "apply weight_norm, spectral_norm, pruning and parametrizations, or remove them, before fully_shard"
    )


def refuse() -> None:
    """Wraps the function with which torch begins to register and to remove a parametrization, in both: callers may
    have imported these by name. Private in torch (that both begin so); tried on 2.13.
    """
    wrap(parametrize, "is_parametrized", _ask)


def _ask(theirs: Callable[..., bool], module: nn.Module, tensor_name: str | None = None) -> bool:
    found, asks = theirs(module, tensor_name), sys._getframe(2).f_code
    comes = asks is parametrize.register_parametrization.__code__ and tensor_name in refs(module)
    goes = asks is parametrize.remove_parametrizations.__code__ and found and "_mfsdp_unit" in module.__dict__
    if (comes or goes) and tensor_name is not None:
        raise too_late(type(module), tensor_name)
    return found
