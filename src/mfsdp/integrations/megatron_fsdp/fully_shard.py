"""megatron-fsdp's three functions."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...optim.flat_optimizer import steps_flat
from ..optimizer_groups import parameters_freed
from . import optimizer as optimizers
from .arguments import Arguments
from .megatron_fsdp import MegatronFSDP, wrapped
from .optimizer import fully_shard_optimizer as _fully_shard_optimizer


def fully_shard_model(module: nn.Module, *args: Any, **kwargs: Any) -> MegatronFSDP:
    """Shards a model, compiles it in place, and returns it in a `MegatronFSDP`.

    Args:
        module: on any device, also meta. All ranks start from the first rank's values.
        args, kwargs: see `Arguments`: ``fsdp_unit_modules``, ``zero_dp_strategy``, ``device_mesh``, ...

    Raises:
        TypeError, ValueError, NotImplementedError: see `Arguments` and `mfsdp.fully_shard`. Nothing has changed then,
            but experts may be sharded over ``expt_device_mesh`` when the rest is refused.
    """
    return wrapped(module, Arguments(*args, **kwargs))


def fully_shard_optimizer(*args: Any, **kwargs: Any) -> Optimizer:
    """See `mfsdp.integrations.megatron_fsdp.optimizer.fully_shard_optimizer`. Versions before 0.2.3 took the model as
    first argument; it is accepted, with a DeprecationWarning.
    """
    if "model" in kwargs or (args and isinstance(args[0], nn.Module)):
        warnings.warn("fully_shard_optimizer(model, optimizer): leave out model", DeprecationWarning, stacklevel=2)
        args = args if "model" in kwargs else args[1:]
        kwargs.pop("model", None)
    return _fully_shard_optimizer(*args, **kwargs)


def fully_shard(module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[MegatronFSDP, Optimizer]:
    """Shards a model and gives an optimizer, built before, its parameters, in the same groups.

    Args:
        module: see `fully_shard_model`.
        optimizer: over parameters of the module, without state. (megatron-fsdp makes one group of all parameters.)
        args, kwargs: see `fully_shard_model`.

    Returns:
        The model, and the same optimizer.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fully_shard_model` and `fully_shard_optimizer`; an optimizer
            with state, or with a parameter of another model. Nothing has changed then.
    """
    arguments = Arguments(*args, **kwargs)
    steps_flat(optimizer, use_decoupled_grad=arguments.use_decoupled_grad)
    with parameters_freed([optimizer], module, optimizers.refuse):
        model = wrapped(module, arguments)
    return model, _fully_shard_optimizer(optimizer)


def _sign(function: Any, own: int) -> None:
    """Gives a function the signature of its first parameters and of `Arguments`."""
    signature = inspect.signature(function)
    mine = list(signature.parameters.values())[:own]
    theirs = inspect.signature(Arguments).parameters.values()
    function.__signature__ = signature.replace(parameters=[*mine, *theirs])


_sign(fully_shard_model, 1)
_sign(fully_shard, 2)
fully_shard_optimizer.__signature__ = inspect.signature(_fully_shard_optimizer)  # type: ignore[attr-defined]
