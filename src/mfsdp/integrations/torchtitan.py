"""torchtitan integration: `parallelize` replaces a model's ``parallelize_fn``.

    spec = dataclasses.replace(model_registry("8B"), parallelize_fn=mfsdp.integrations.torchtitan.parallelize)

The Trainer continues as after its own function: it empties the model onto the device, initializes shards in place, and
divides by all ranks' tokens. Tried with torchtitan 0.3.0; this module imports nothing of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import nn

from ..config.options import MixedPrecisionPolicy
from ..sharding.shard import fully_shard

LOWERINGS = {"inductor": "inductor", "mfsdp": "inductor", "aot_eager": "eager", "eager": "eager"}
"""The option ``lowering`` for each ``--compile.backend``."""


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Shards and compiles one of torchtitan's decoders: a unit for each layer, one for norm and head, one for the rest.

    Tensor, sequence and expert parallelism and activation checkpointing are torchtitan's own; experts are units on
    their own ranks, and turn ``torch._dynamo.config.capture_scalar_outputs`` on. The model is one compiled graph, not
    one per layer. With ``--compile.enable`` Inductor compiles subgraphs of compute, otherwise ATen kernels run.

    Args:
        model: on any device, also meta; ``to_empty`` and ``init_weights`` come later.
        parallel_dims, training, parallelism, compile_config, ac_config, dump_folder: torchtitan's. Used are
            ``dp_shard``, ``dp_replicate``, ``tp``, ``ep``, the dtypes of mixed precision,
            ``fsdp_reshard_after_forward``, and whether and by which backend to compile.
        options: of the backend, as ``functools.partial(parallelize, options=...)`` gives them.

    Raises:
        NotImplementedError: what has not been tried, as pipeline parallelism, another ``spmd_backend`` than
            ``"partial_dtensor"``, CPU offload; the message names it.
        ValueError: an unknown compile backend or reshard policy; errors of `mfsdp.fully_shard`.
    """
    _tried(parallel_dims, training, parallelism, compile_config)
    reshard = _reshards(parallelism.fsdp_reshard_after_forward)
    lowering = _lowering(compile_config)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)  # type: ignore[operator]
        if model.enable_weight_tying:  # each module has new parameters now
            model.tok_embeddings.weight = model.lm_head.weight  # type: ignore[union-attr,assignment]
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    sharding: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(names),
        "mp_policy": MixedPrecisionPolicy(
            main_params_dtype=None,
            compute_dtype=getattr(torch, training.mixed_precision_param),
            grad_comm_dtype=getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,
        ),
    }
    with warnings.catch_warnings():  # the Trainer initializes everything, buffers too
        warnings.filterwarnings("ignore", message="mfsdp: nothing has initialised")
        if parallel_dims.ep_enabled:
            there = {**sharding, "mesh": parallel_dims.get_mesh("efsdp"), "reshard_after_forward": reshard["layers"]}
            _shard_experts(model, there)
        ends = [m for m in (model.norm, model.lm_head) if isinstance(m, nn.Module)]
        if ends and not model.enable_weight_tying:
            fully_shard(ends, **sharding, reshard_after_forward=reshard["ends"])
        fully_shard(model, units=["layers.*"], **sharding, reshard_after_forward=reshard["layers"])
    model.set_gradient_divide_factor(1.0, recurse=True)  # type: ignore[operator]
    model.compile(backend="mfsdp", options={"lowering": lowering, **(options or {})})
    return model


def _shard_experts(model: nn.Module, sharding: Mapping[str, Any]) -> None:
    """Makes each layer's experts a unit over the ranks that hold the same ones.

    Private in torch (``torch._dynamo.config``); tried on 2.13, there in 2.11 to 2.15.
    """
    dynamo_config.capture_scalar_outputs = True  # splits of all-to-alls depend on data; torchtitan does the same
    for layer in model.layers.values():  # type: ignore[operator,union-attr]
        if getattr(layer, "moe_enabled", False):
            fully_shard(layer.moe.routed_experts.inner_experts, **sharding)


def _tried(parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any) -> None:
    """Refuses settings that have not been tried. Without sequence parallelism, torchtitan's plan for experts beside
    tensor parallelism makes sequence-sharded tensors partial, which DTensor refuses.
    """
    unsplit = parallel_dims.tp_enabled and not parallelism.enable_sequence_parallel
    asked = {
        "context parallelism": parallel_dims.cp_enabled,
        "pipeline parallelism": parallel_dims.pp_enabled,
        "expert and tensor parallelism without enable_sequence_parallel": parallel_dims.ep_enabled and unsplit,
        "expert parallelism beside replicas": parallel_dims.ep_enabled and parallel_dims.dp_replicate_enabled,
        f"spmd_backend={parallelism.spmd_backend!r}": parallelism.spmd_backend != "partial_dtensor",
        "enable_cpu_offload": training.enable_cpu_offload,
        "enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
        "enable_async_tensor_parallel": compile_config.enable_async_tensor_parallel and parallel_dims.tp_enabled,
    }
    found = [name for name, on in asked.items() if on]
    if found:
        raise NotImplementedError(
            f"mfsdp.integrations.torchtitan with {' and '.join(found)} has not been tried: use spmd_backend="
            "'partial_dtensor' with data_parallel_shard_degree, data_parallel_replicate_degree, "
            "tensor_parallel_degree and expert_parallel_degree only, or torchtitan's own parallelize_fn"
        )


def _reshards(policy: str) -> dict[str, bool]:
    """Returns whether layers, and norm and head after them, are freed after forward."""
    if policy not in ("default", "always", "never"):
        raise ValueError(f"fsdp_reshard_after_forward={policy!r}: choose default, always or never")
    return {"layers": policy != "never", "ends": policy == "always"}


def _lowering(compile_config: Any) -> str:
    """Returns the option ``lowering`` for torchtitan's configuration."""
    if not (compile_config.enable and "model" in compile_config.components):
        return "eager"
    if compile_config.backend not in LOWERINGS:
        raise ValueError(f"compile.backend={compile_config.backend!r}: choose one of {', '.join(LOWERINGS)}")
    return LOWERINGS[compile_config.backend]
