"""FSDP2's arguments and methods: translated to ours, or refused with the alternative."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp as fsdp

from ..config.options import MixedPrecisionPolicy, Precision

Policy = MixedPrecisionPolicy | fsdp.MixedPrecisionPolicy | None
"""What `fully_shard` takes as ``mp_policy``."""


def policy_of(given: Policy) -> MixedPrecisionPolicy:
    """Returns our policy; converts torch's.

    Torch's keeps main weights in the model's dtype and communicates gradients in ``reduce_dtype``; if that is ``None``,
    in ``param_dtype`` before torch 2.15, from then on in the parameter's own dtype.

    Raises:
        ValueError: it is neither.
        NotImplementedError: it has a ``param_dtype_override_fn``.
    """
    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, fsdp.MixedPrecisionPolicy):
        if getattr(given, "param_dtype_override_fn", None) is not None:
            raise NotImplementedError(
                "MixedPrecisionPolicy(param_dtype_override_fn=...) is not supported: call fully_shard with "
                "an mp_policy of its own on the modules whose parameters compute in another dtype, before the model's"
            )
        own = given.reduce_dtype is None and _reduces_in_own_dtype()
        return (_OwnDtype if own else MixedPrecisionPolicy)(
            main_params_dtype=None,
            compute_dtype=given.param_dtype,
            grad_comm_dtype=given.reduce_dtype or (None if own else given.param_dtype),
            output_dtype=given.output_dtype,
            cast_forward_inputs=given.cast_forward_inputs,
        )
    if not isinstance(given, MixedPrecisionPolicy):
        raise ValueError(
            f"mp_policy={given!r}: give a mfsdp.MixedPrecisionPolicy, or torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    return given


class _OwnDtype(MixedPrecisionPolicy):
    """Communicates gradients in their parameters' own dtype."""

    def resolve(self, dtype: torch.dtype, trains: bool = True) -> Precision:
        return replace(super().resolve(dtype, trains), grad_comm=dtype)


def _reduces_in_own_dtype() -> bool:
    """Whether FSDP2 does so for ``reduce_dtype=None``: from torch 2.15 on."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 15)


def reshards(given: object) -> None:
    """Checks ``reshard_after_forward``.

    Raises:
        ValueError: it is not ``True``, ``False`` or ``None``.
        NotImplementedError: it is a number of ranks.
    """
    if given is None or isinstance(given, bool):
        return
    if isinstance(given, int):
        raise NotImplementedError(
            f"reshard_after_forward={given}: resharding to a smaller group of ranks after forward is not supported; "
            "choose True, or False to keep the parameters gathered until backward"
        )
    raise ValueError(f"reshard_after_forward={given!r}: choose True, False or None")


def no_offload(offload_policy: object, shard_placement_fn: object) -> None:
    """Checks two arguments without effect here.

    Raises:
        NotImplementedError: they ask for offloading or another placement.
    """
    if offload_policy is not None and type(offload_policy) is not fsdp.OffloadPolicy:
        raise NotImplementedError(
            f"offload_policy={type(offload_policy).__name__}: offloading is not supported: weights stay on the "
            "device. For optimizer state: fully_shard_optimizer(optimizer, offload='state')"
        )
    if shard_placement_fn is not None:
        raise NotImplementedError(
            "shard_placement_fn: which rows a rank holds is the layout's to choose; parameters are cut into whole rows"
        )


class Unsharding:
    """The handle of ``unshard(async_op=True)``; the parameters are already gathered."""

    def wait(self) -> None:
        """Returns at once."""


class Spelling:
    """Methods of FSDP2's ``FSDPModule`` whose behavior is fixed, or set elsewhere."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: every backward completes its reductions."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Does nothing: compiled backward gathers exactly what it reads."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Does nothing: reductions are always sums."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Does nothing: gathered parameters keep their addresses in static buffers (option ``pool``)."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accepts ``False``, the fixed behavior; raises NotImplementedError for ``True``."""
        if enabled:
            _instead("set_manual_backward_finalization(True)", "every backward finishes its reductions by itself")

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Accepts ``True``, the fixed behavior; raises NotImplementedError for ``False``."""
        if not reshard_after_backward:
            _instead(
                "set_reshard_after_backward(False)",
                "to gather once per optimizer step, shard with strategy='optim_grads'",
            )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepts ``True``, the fixed behavior; raises NotImplementedError for ``False``."""
        if not enable:
            _instead("set_separate_reduce_scatter_group(False)", "reductions have a process group of their own, always")

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepts ``False``, the fixed behavior; raises NotImplementedError for ``True``: units that ranks may skip
        are named in ``fully_shard(may_be_unused=)``.
        """
        if reduce_scatter_unused_params:
            _instead(
                "set_reduce_scatter_unused_params(True)",
                "missing gradients of a unit that a rank uses are zeros already; for units that a rank does not use: "
                "fully_shard(..., may_be_unused=[...])",
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepts ``False``, the fixed behavior; raises NotImplementedError for ``True``."""
        if enable:
            _instead("set_allocate_memory_from_process_group_for_comm", "buffers are allocated as tensors")


def _instead(method: str, words: str) -> NoReturn:
    raise NotImplementedError(f"{method} is not supported: {words}")


_PREFETCH = "the compiler prefetches; torch.compile(..., options={'prefetch': n}) says how far"
_PASS = "a pass can replace collectives; see mfsdp.passes"
_ELSEWHERE = {
    "set_modules_to_forward_prefetch": _PREFETCH,
    "set_modules_to_backward_prefetch": _PREFETCH,
    "set_reduce_scatter_max_input_buffers": "torch.compile(..., options={'reduce_lag': n}) says how many are in flight",
    "finalize_backward": "every backward finishes its reductions by itself; mfsdp.no_sync holds them back",
    "set_all_reduce_hook": "hooks on parameters, param.register_hook(hook), see the reduced gradient",
    "set_post_optim_event": "programs wait for what the current stream was given before, the optimizer's step included",
    "set_custom_all_gather": _PASS,
    "set_custom_reduce_scatter": _PASS,
    "set_symm_mem_for_comm": "torch.compile(..., options={'nccl_ub': True}) registers static buffers with NCCL",
}
"""Methods without a meaning here, and their alternatives."""


def refusal(name: str, words: str) -> Callable[..., NoReturn]:
    """Returns a function or method that is not supported; ``words`` say what to do instead."""

    def method(*args: object, **kwargs: object) -> NoReturn:
        _instead(name, words)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Raises NotImplementedError: {words}."
    return method


for _name, _words in _ELSEWHERE.items():
    setattr(Spelling, _name, refusal(_name, _words))


# Casts of a unit's inputs and outputs


def with_casts(
    forward: Callable[..., Any], entering: torch.dtype | None, leaving: torch.dtype | None
) -> Callable[..., Any]:
    """Returns the forward with floating-point tensors in arguments and result cast; ``None``: not cast.

    Walks tuples, lists, dicts and dataclasses, and rebuilds those in which something was cast.
    """
    if entering is None and leaving is None:
        return forward

    def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
        if entering is not None:
            args, kwargs = cast_floats(args, entering), cast_floats(kwargs, entering)
        out = forward(self, *args, **kwargs)
        return out if leaving is None else cast_floats(out, leaving)

    return cast


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Casts 16, 32 and 64 bit floating-point tensors to ``dtype``; returns the same object if nothing changes."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _CAST and value.dtype != dtype else value
    if isinstance(value, (tuple, list)):
        items = [cast_floats(x, dtype) for x in value]
        if all(a is b for a, b in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if value is None:  # Dynamo 2.11 cannot ask a constant whether it is a dataclass
        return value
    record = is_dataclass(value) and not isinstance(value, type)
    if not record and type(value) not in (dict, OrderedDict):
        return value
    old = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    new = {k: cast_floats(x, dtype) for k, x in old.items()}
    if all(new[k] is old[k] for k in new):
        return value
    return type(value)(**new) if record else type(value)(new)


_CAST = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
