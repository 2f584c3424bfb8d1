"""Hooks on optimizers that step on sharded parameters, which Dynamo cannot trace.

Under ``torch.compile``, a flat optimizer's step runs uncompiled with a warning; other optimizers' steps raise a clear
error instead of an assertion inside Dynamo.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from ..config.patches import wrap
from ..runtime.transport_registry import count_step, record_load
from . import transformer_engine as te
from .eager_autograd import Args, Kwargs
from .sharded_dtensor import ShardedDTensor
from .unsupported import refuse_blocks

F = TypeVar("F", bound=Callable[..., Any])


def left_alone(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer's method so that ``torch.compile`` around it does not trace it; warns once."""

    @functools.wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiling():
            _tell(type(self).__name__, self._mfsdp_compile)
        return inside(self, *args, **kwargs)

    inside = torch.compiler.disable(step)
    return _skipped(run)


@functools.cache
def _tell(name: str, compiled: bool) -> None:
    more = "" if compiled else "; mfsdp.fully_shard_optimizer(optimizer, compile=True) compiles it"
    warnings.warn(f"mfsdp: torch.compile leaves the step of {name} on flat tensors as it is{more}", stacklevel=3)


@functools.cache
def refuse_elsewhere() -> None:
    """Registers hooks on every optimizer that gets sharded parameters.

    Before a step, a hook raises if the step is compiled from outside. After it, a hook tells weights that they were
    written: fused optimizers write through pointers, which no version counter shows. Before ``load_state_dict``, a hook
    cuts the state of an unsharded optimizer.

    torch has no hook for new optimizers, so this wraps ``torch.optim.Optimizer.add_param_group`` once, when the first
    model is sharded. Hooks are per optimizer, so other optimizers' steps are unaffected.
    """
    wrap(Optimizer, "add_param_group", _add_param_group)


def _add_param_group(
    add: Callable[[Optimizer, dict[str, Any]], None], optimizer: Optimizer, param_group: dict[str, Any]
) -> None:
    add(optimizer, param_group)
    hooks = optimizer._optimizer_step_pre_hooks
    if _refuse not in hooks.values() and any(hasattr(p, "_mfsdp_owner") for p in optimizer.param_groups[-1]["params"]):
        refuse_blocks(optimizer)
        optimizer.register_step_pre_hook(_skipped(_refuse))
        optimizer.register_step_post_hook(_skipped(_tells_weights))
        optimizer.register_load_state_dict_pre_hook(cut_whole_state)


def hooked(optimizer: Optimizer) -> bool:
    """Returns whether others have hooks after an optimizer's step, which may write to what they see. Private in torch
    (``_optimizer_step_post_hooks``); tried on 2.13, not on the others of 2.11 to 2.15.
    """
    hooks = [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    return any(hook is not _tells_weights for hook in hooks)


def _refuse(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    te.steps_plainly(optimizer)
    for buffer in buffers_of(optimizer):
        buffer.weights.before_write()
    if _compiling():
        raise RuntimeError(
            f"mfsdp: torch.compile around {type(optimizer).__name__}.step: its parameters are sharded, which Dynamo "
            "cannot trace. Call it outside of what is compiled, or compile it by "
            "mfsdp.fully_shard_optimizer(optimizer, compile=True)."
        )


@torch.no_grad()
def cut_whole_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the state dict to load, with full tensors cut like their parameters.

    Raises:
        ValueError: a tensor is not a scalar, and its shape differs from its parameter's.
    """
    kept = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(kept) != len(params):
        return None  # torch raises its own error
    state = dict(state_dict["state"])
    for key, param in zip(kept, params, strict=True):
        if key in state and isinstance(param, ShardedDTensor):
            state[key] = {name: _cut(param, name, value) for name, value in state[key].items()}
    return {**state_dict, "state": state}


_NUMBERS = ("step", "mu_product", "eta", "mu")
"""Scalar state of torch's optimizers, also for a scalar parameter."""


def _cut(param: ShardedDTensor, name: str, value: Any) -> Any:
    if type(value) is not torch.Tensor or name in _NUMBERS or (not value.dim() and param.dim()):
        return value
    path = param.sharding.layout.slots[param.sharding.slot].name
    if value.shape != param.shape:
        raise ValueError(
            f"mfsdp: {name} of {path} is {list(value.shape)} in the optimizer's state dict, the parameter is "
            f"{list(param.shape)}. Load what an optimizer of the whole model gives, or use set_optimizer_state_dict of "
            "torch.distributed.checkpoint.state_dict with StateDictOptions(full_state_dict=True), or mfsdp.Checkpoints."
        )
    owner = getattr(param, "_mfsdp_owner", None)
    if owner is not None:
        record_load(owner.spec.peer_groups, f"{name} of {path}", value, value.dtype)
    return torch.empty_like(param.detach(), dtype=value.dtype).copy_(value)


def _tells_weights(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    buffers = buffers_of(optimizer)
    for buffer in buffers:
        buffer.weights.note_write()
    count(buffers)


def count(buffers: Iterable[Any]) -> None:
    """Counts a step in every group that shares the buffers (invariant 66)."""
    shared = ((*buffer.spec.peer_groups, buffer.unit.outermost.loose.group) for buffer in buffers)
    count_step(name for names in shared for name in names if name)


def buffers_of(optimizer: Optimizer) -> list[Any]:
    """Returns the flat buffers of the parameters that an optimizer steps."""
    owners = (getattr(p, "_mfsdp_owner", None) for group in optimizer.param_groups for p in group["params"])
    return [owner for owner in dict.fromkeys(owners) if owner is not None]


def _skipped(function: F) -> F:
    """Marks a function so that Dynamo does not enter it, while `_compiling` inside still sees Dynamo. Private in torch;
    tried on 2.13, not on the others of 2.11 to 2.15.
    """
    from torch._dynamo.decorators import skip

    return skip(function)  # type: ignore[return-value]


def _compiling() -> bool:
    """Returns whether Dynamo would compile a call here. Private in torch; tried on 2.13, not on the others of
    2.11 to 2.15.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback() not in (None, False)
