"""Validates the parameters and modules given to `fully_shard`."""

from __future__ import annotations

import torch
from torch import nn

from ..buffers.flat_buffer import UnitState, refs
from ..config.options import MixedPrecisionPolicy
from ..dtensor import torchao
from ..dtensor import transformer_engine as te
from ..dtensor.sharded_parameter import ShardedParameter
from ..dtensor.tp_shards import here
from ..dtensor.unsupported import sharded_by_torch
from .module import units_of
from .parallel import hooked
from .quantized_linear import QuantizedLinear


def validate(fqn: str, param: nn.Parameter, owner: nn.Module) -> None:
    """Refuses a parameter that cannot be cut into rows of a flat buffer.

    Raises:
        ValueError: it is not floating point, has no shape yet, is not strided, is another model's shard, or has a
            gradient or hooks, which would be lost, or its module writes to it in forward (``max_norm``).
        NotImplementedError: it is a tensor subclass (except TransformerEngine's quantized ones, `wide_enough`), has
            sparse or delayed gradients, or is a local shard of a parameter not yet known.
    """
    if isinstance(owner, QuantizedLinear) and not param.is_floating_point():
        return  # bytes that `quantized_linear` has made
    _plain(fqn, param)
    if param.grad is not None:
        raise ValueError(
            f"fully_shard: parameter {fqn} has a gradient, which would be lost; call zero_grad() of the model first"
        )
    if hooked(param):
        raise ValueError(
            f"fully_shard: parameter {fqn} has hooks, which would be lost; register them after fully_shard, on the "
            "parameters that the model has then"
        )
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse and param.requires_grad:
        raise NotImplementedError(
            f"fully_shard: {fqn} belongs to {type(owner).__name__}(sparse=True); gradients of sharded parameters are "
            "dense. Set sparse=False on the module, or pass the parameter in ignored_params"
        )
    if te.shards_itself(owner):
        raise ValueError(
            f"fully_shard: {fqn} belongs to a {type(owner).__name__} that prepare_te_modules_for_fsdp has prepared for "
            "torch's first FSDP; leave out that call"
        )
    if param.is_meta and te.tensor_parallel(owner) > 1:
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} is a piece over {te.tensor_parallel(owner)} ranks of tensor parallelism, "
            f"which {type(owner).__name__} says of it when it has values only, and it is on the meta device: build the "
            "model where it will run"
        )
    later = getattr(owner, "need_backward_dw", None)  # TransformerEngine's protocol
    if param.requires_grad and callable(later) and later():
        raise NotImplementedError(
            f"fully_shard: the gradient of {fqn} comes by {type(owner).__name__}.backward_dw(), after backward, where "
            "its unit has been reduced without it. Make the module with delay_wgrad_compute=False (the pass "
            "`hide_collectives` has weights' gradients computed while collectives run), or pass the parameter in "
            "ignored_params"
        )
    if param.requires_grad and getattr(param, "skip_backward_post_hook", False):  # TransformerEngine and Megatron-LM
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} has skip_backward_post_hook=True: {type(owner).__name__} computes its "
            "gradient after backward, where its unit has been reduced without it. Build the model without delayed "
            "weight gradients (delay_wgrad_compute=False), or pass the parameter in ignored_params"
        )
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None:
        raise ValueError(
            f"fully_shard: {type(owner).__name__}(max_norm={owner.max_norm:g}) writes to its parameter {fqn} in "
            "forward, which would be lost: gathered parameters do not outlive it. Renormalise outside of forward, "
            "under torch.no_grad(), or pass the parameter in ignored_params (each rank then renormalises the rows of "
            "its own batch)."
        )


def _plain(fqn: str, param: nn.Parameter) -> None:
    if isinstance(param, ShardedParameter):
        raise ValueError(
            f"fully_shard: parameter {fqn} is a shard of unit {_unit_of(param)!r}, hung into a module that is not "
            "sharded; tie weights before sharding and shard both modules in one call, fully_shard(root, units=[...])"
        )
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"fully_shard: parameter {fqn} has no shape yet ({type(param).__name__}); run one forward of the lazy "
            "module first, on every rank"
        )
    local = here(param)
    if te.grouped(local):
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} is a {type(local).__name__} {list(param.shape)}, matrices of several "
            "experts in one, which its module would not take back as a plain tensor. Make the module with "
            "single_grouped_weight=False, single_grouped_bias=False (unset NVTE_GROUPED_LINEAR_SINGLE_PARAM)"
        )
    if te.quantised(param) or torchao.wrapped(param):
        return
    if why := torchao.refusal(param):
        raise NotImplementedError(f"fully_shard: parameter {fqn} {why}")
    if not _trivial(type(param)) and not _fake(local) and (local is param or type(local) is not torch.Tensor):
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} is a {type(param).__name__}, a tensor subclass, of which the flat buffer "
            "would keep one plain tensor. Shard the model before its weights are converted, or pass the parameter in "
            "ignored_params"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"fully_shard: parameter {fqn} is {param.dtype}; only floating-point parameters can be sharded. "
            "Pass it in ignored_params, or make it a buffer."
        )
    if param.layout is not torch.strided:
        raise ValueError(
            f"fully_shard: parameter {fqn} has layout {param.layout}; only strided parameters can be sharded. Call "
            ".to_dense(), or pass it in ignored_params"
        )


def wide_enough(fqn: str, param: torch.Tensor, policy: MixedPrecisionPolicy) -> None:
    """Refuses main weights in the nominal dtype of a quantized parameter: they would lose a step's updates.

    Raises:
        ValueError: the policy asks for that.
    """
    if policy.main_params_dtype is None and te.quantised(param):
        raise ValueError(
            f"fully_shard: parameter {fqn} is a {type(param).__name__}, and main_params_dtype=None would keep its main "
            f"weights in {param.dtype}, which it has in name only. Give mfsdp.MixedPrecisionPolicy(main_params_dtype="
            "torch.float32), the default, or build the model without quantized_model_init"
        )


def _trivial(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of the class behave like ``nn.Parameter``."""
    return bool(
        nn.Parameter in kind.__mro__
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and kind.__torch_function__ is nn.Parameter.__torch_function__
    )


def _fake(param: torch.Tensor) -> bool:
    """Whether it is a fake plain tensor. Private in torch (``FakeTensor``); tried on 2.11 to 2.15."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(param, FakeTensor)


def _unit_of(param: ShardedParameter) -> str:
    unit = getattr(param._mfsdp_owner, "unit", None)
    return unit.fqn if isinstance(unit, UnitState) else "?"


# Modules that are already sharded


def at_rest(module: nn.Module) -> None:
    """Refuses a model that torch's FSDP2 or FSDP has sharded, and one with a unit that is gathered or has gradients
    (invariant 27).

    Raises:
        ValueError: names the unit by its path in ``module``, and what to do.
    """
    if instead := sharded_by_torch(module):
        raise ValueError(f"fully_shard: {instead}")
    below = {r.unit: None for m in module.modules() for r in refs(m).values()}
    paths = units_of(module)  # a block that was sharded by itself is "(root)" of that call
    for unit in below:
        name = "+".join(filter(None, paths.get(unit, ()))) or unit.fqn
        if any(b.weights.summoned is not None for b in unit.buffers):
            raise ValueError(f"fully_shard: unit {name!r} is summoned; leave mfsdp.summon_full_params first")
        if unit.open or unit.kept or unit.full:
            raise ValueError(
                f"fully_shard: unit {name!r} is gathered; call reshard() on it, or leave mfsdp.unsharded or the "
                "forward that is running, first"
            )
        if any(b.gradients.flat is not None or b.gradients.waits for b in unit.buffers):
            raise ValueError(
                f"fully_shard: unit {name!r} has gradients; wrap before the first backward, or after module.zero_grad()"
            )
