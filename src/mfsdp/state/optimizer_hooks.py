"""What Dynamo meets where an optimizer steps on sharded parameters: it cannot trace those steps, and nobody should find
that out from an assertion inside of it. A flat optimizer's step is left alone, in words; that of any other is refused.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from ..runtime.transport_registry import count_step
from . import load_count
from . import transformer_engine as te
from .sharded_dtensor import ShardedDTensor
from .unsupported import refuse_blocks


def left_alone(step: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an optimizer that ``torch.compile`` around it does not enter; it says so once."""

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
    """Gives every optimizer that gets sharded parameters a hook that raises when its step is compiled from outside, one
    that tells weights of a step (fused optimizers write by address, which no version shows), and one that cuts the
    state of an unsharded optimizer that is loaded into it.

    torch has no hook where optimizers are made: ``torch.optim.Optimizer.add_param_group`` is wrapped, once, when the
    first model is sharded. The hook is the optimizer's own, so that no other one's step is touched.
    """
    add = Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        hooks = self._optimizer_step_pre_hooks
        if _refuse not in hooks.values() and any(hasattr(p, "_mfsdp_owner") for p in self.param_groups[-1]["params"]):
            refuse_blocks(self)
            self.register_step_pre_hook(_skipped(_refuse))
            self.register_step_post_hook(_skipped(_tells_weights))
            self.register_load_state_dict_pre_hook(cut_whole_state)

    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def hooked(optimizer: Any) -> bool:
    """Whether others have hooks behind the steps of an optimizer, which may write to what they see. Private in torch
    (``_optimizer_step_post_hooks``); tried on 2.13, not on the others of 2.11 to 2.15.
    """
    hooks = [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    return any(hook is not _tells_weights for hook in hooks)


def _refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
    te.steps_plainly(optimizer)
    for owner in dict.fromkeys(getattr(p, "_mfsdp_owner", None) for g in optimizer.param_groups for p in g["params"]):
        if owner is not None:
            owner.weights.before_write()
    if _compiling():
        raise RuntimeError(
            f"mfsdp: torch.compile around {type(optimizer).__name__}.step: its parameters are sharded, which Dynamo "
            "cannot trace. Call it outside of what is compiled, or compile it by "
            "mfsdp.fully_shard_optimizer(optimizer, compile=True)."
        )


@torch.no_grad()
def cut_whole_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """What an optimizer loads, with whole tensors cut as their parameters are.

    Raises:
        ValueError: a tensor has neither the shape of its parameter, nor is it a number.
    """
    kept = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(kept) != len(params):
        return None  # torch says so
    state = dict(state_dict["state"])
    for key, param in zip(kept, params, strict=True):
        if key in state and isinstance(param, ShardedDTensor):
            state[key] = {name: _cut(param, name, value) for name, value in state[key].items()}
    return {**state_dict, "state": state}


_NUMBERS = ("step", "mu_product", "eta", "mu")
"""State of torch's optimizers that is one number, also of a parameter that is one."""


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
        load_count.record_load(owner.spec.peer_groups, f"{name} of {path}", value, value.dtype)
    return torch.empty_like(param.detach(), dtype=value.dtype).copy_(value)


def _tells_weights(optimizer: Any, args: Any, kwargs: Any) -> None:
    buffers = _buffers(optimizer)
    for buffer in buffers:
        buffer.weights.note_write()
    count(buffers)


def count(buffers: Iterable[Any]) -> None:
    """Counts a step of an optimizer in every group that shares buffers whose parameters it has (invariant 66)."""
    shared = ((*buffer.spec.peer_groups, buffer.unit.outermost.loose.group) for buffer in buffers)
    count_step(name for names in shared for name in names if name)


def _buffers(optimizer: Any) -> set[Any]:
    """Those whose parameters an optimizer has."""
    owners = (getattr(p, "_mfsdp_owner", None) for group in optimizer.param_groups for p in group["params"])
    return {owner for owner in owners if owner is not None}


def _skipped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo does not enter, but in which it is known to be at work. Private in torch; tried on 2.13,
    not on the others of 2.11 to 2.15.
    """
    from torch._dynamo.decorators import skip

    return skip(function)


def _compiling() -> bool:
    """Whether Dynamo would compile what is called here. Private in torch; tried on 2.13, not on the others of 2.11 to
    2.15.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback() not in (None, False)
