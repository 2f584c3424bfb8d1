"""Names of ``megatron_fsdp.v2``, as Megatron-LM's repository has it: FSDP2's `fully_shard`, with settings of its own.

Modules are compiled in place. A module that another one calls is part of that one's graph.
"""

from __future__ import annotations

import logging
import types
from typing import Any

from torch import nn

from ...sharding.module import FSDPModule, buffers_of
from .. import environment
from .experimental import in_place
from .mixed_precision import MixedPrecisionPolicy, policy_of
from .uneven_dtensor import (
    gather_and_compute_chunk_metadata,
    get_state_dict,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
)

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "fully_shard",
    "gather_and_compute_chunk_metadata",
    "get_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
]

log = logging.getLogger("mfsdp")


def fully_shard(
    module: nn.Module,
    *,
    mp_policy: object = None,
    sharding_strategy: str | int = 3,
    enable_unshard_prefetch: bool = True,
    enable_async_reduce_grad: bool = True,
    gradient_scaling_factor: float | None = None,
    enable_trace_pool: bool = False,
    enable_cuda_graph: bool = False,
    cuda_graph_activation_recompute: bool = False,
    options: dict[str, Any] | None = None,
    compile: bool = True,
    **arguments: Any,
) -> nn.Module:
    """Shards what is not sharded yet of a module, in place, compiles it in place, and returns it.

    Args:
        module: one unit; call it on the model last.
        mp_policy: as in `fully_shard_model`.
        sharding_strategy: by name or number.
        enable_unshard_prefetch: ``False`` is the option ``prefetch=0``.
        enable_async_reduce_grad: ``False`` is the option ``reduce_lag=0``.
        gradient_scaling_factor: what sums of gradients over ranks are multiplied by. Default: one over the number of
            ranks.
        enable_trace_pool: no effect: buffers are static already.
        enable_cuda_graph, cuda_graph_activation_recompute: refused.
        options, compile: of the backend; whether to compile.
        arguments: ``mesh``, ``ignored_params`` and others of `mfsdp.fully_shard`.

    Raises:
        TypeError: an unknown argument.
        ValueError, NotImplementedError: see `mfsdp.fully_shard`; CUDA graphs.
    """
    if enable_cuda_graph or cuda_graph_activation_recompute:
        raise NotImplementedError(
            "enable_cuda_graph=True: leave it out, and call mfsdp.capture_step(step, model, optimizer)"
        )
    if gradient_scaling_factor is not None and not gradient_scaling_factor > 0:
        raise ValueError(f"gradient_scaling_factor={gradient_scaling_factor!r}: give a positive number")
    said = {
        **({} if enable_unshard_prefetch else {"prefetch": 0}),
        **({} if enable_async_reduce_grad else {"reduce_lag": 0}),
    }
    before = {m for m in module.modules() if isinstance(m, FSDPModule)}
    policy = policy_of(mp_policy or MixedPrecisionPolicy())
    own = {"mp_policy": policy, "strategy": sharding_strategy, "sync_module_states": True}
    in_place(module, {**own, **arguments, **environment.sharding(None)}, said | environment.options(options), compile)
    assert isinstance(module, FSDPModule)
    if gradient_scaling_factor is not None:
        for unit in module.modules():
            if isinstance(unit, FSDPModule) and unit not in before:
                unit.set_gradient_divide_factor(1 / gradient_scaling_factor)
    module.__dict__["_log_parameter_groups"] = types.MethodType(_log_parameter_groups, module)
    return module


def _log_parameter_groups(self: FSDPModule) -> None:
    """Logs units and sizes. Private there, but its example calls it."""
    for buffer in buffers_of(self, recurse=True):
        log.info("mfsdp: %s, %s", buffer.path, buffer.precision)
