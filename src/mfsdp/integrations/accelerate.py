"""Accelerate integration, also for transformers' Trainer, TRL and PEFT: after the import, FSDP version 2 means mfsdp.

    import mfsdp.integrations.accelerate

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`prepare` returns the same model, sharded and compiled in place. `ShardingPlugin` takes settings that Accelerate's
configuration has no field for. If other code creates the plugin (Trainer, ``accelerate launch``), two environment
variables take them, each a JSON object: ``MFSDP_OPTIONS``, the backend's options, and ``MFSDP_SHARDING``, arguments of
`mfsdp.fully_shard`.

`_install` lists every replacement in accelerate; tried with accelerate 1.15. Replacements are permanent, but act only
on FSDP version 2.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate import accelerator as theirs
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin, broadcast_object_list
from accelerate.utils import fsdp_utils as utils
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..compiler.microbatches import settings
from ..config.options import MixedPrecisionPolicy, Options
from ..config.patches import around
from ..sharding import materialize
from ..sharding.fsdp2_api import policy_of
from ..sharding.module import FSDPModule, unwrapped
from ..sharding.shard import fully_shard
from ..sharding.stale_optimizers import optimizer_of
from . import environment
from .optimizer_groups import parameters_freed, places

log = logging.getLogger("mfsdp")


class ShardingPlugin(FullyShardedDataParallelPlugin):
    """Accelerate's plugin, version 2, with settings that it has no field for.

    Args:
        options: of the backend, as in ``torch.compile(..., options=...)``; they override ``MFSDP_OPTIONS``.
        sharding: arguments of `mfsdp.fully_shard` (``units``, ``strategy``, ``mp_policy``, ...). They override
            ``MFSDP_SHARDING``, which overrides the plugin's own fields.
        fields: the plugin's own.

    Raises:
        ValueError: an option that the backend does not have; errors of accelerate's plugin.
    """

    def __init__(self, *, options: dict[str, Any] | None = None, sharding: dict[str, Any] | None = None, **fields: Any):
        super().__init__(**{"fsdp_version": 2, **fields})
        Options.parse(options)
        self.options, self.sharding = options, sharding


# Models


def prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shards and compiles a model in place, by the accelerator's FSDP plugin, as far as not done yet, and returns it.

    Args:
        accelerator: its FSDP configuration is version 2.
        model: on any device; it may be on the meta device on all ranks, or on all but the first.

    Raises:
        ValueError: the model is wrapped or compiled by something else, or an optimizer holds its parameters; an invalid
            configuration (see `_refuse`); errors of `mfsdp.fully_shard`.
        NotImplementedError: an unsupported configuration; errors of `mfsdp.fully_shard`.
    """
    inner = unwrapped(model)
    _refuse(accelerator, model)
    options = environment.options(getattr(accelerator.state.fsdp_plugin, "options", None))
    if not isinstance(inner, FSDPModule):
        _shard(accelerator, inner)
    if inner is model and model._compiled_call_impl is None:
        model.compile(backend="mfsdp", options=options)
    return model


def _shard(accelerator: Accelerator, model: nn.Module) -> None:
    plugin = accelerator.state.fsdp_plugin
    if (holder := optimizer_of(model)) is not None:
        raise ValueError(
            f"Accelerator.prepare: a {type(holder).__name__} holds parameters of this {type(model).__name__} and would "
            "go on stepping on those from before it is sharded. Give both to one call, prepare(model, optimizer), or "
            "build the optimizer from the parameters of the prepared model"
        )
    blocks = _blocks(plugin, model)
    synced = plugin.cpu_ram_efficient_loading and _of_first_rank(model)
    if plugin.activation_checkpointing:
        _checkpoint(model, blocks)
    arguments = {
        "units": [name for name, m in model.named_modules() if m in blocks] or "auto",
        "mp_policy": _policy(accelerator),
        "reshard_after_forward": plugin.reshard_after_forward,
        "ignored_params": utils.get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device),
        "offload_policy": plugin.cpu_offload,
        "device": accelerator.device,
        "sync_module_states": synced,
        **_mesh(accelerator),
        **environment.sharding(getattr(plugin, "sharding", None)),
    }
    fully_shard(model, **arguments)


def _blocks(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> set[nn.Module]:
    """Returns the modules that the auto-wrap policy selects; none without a policy."""
    plugin.set_auto_wrap_policy(model)
    policy = utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    if policy is None and plugin.auto_wrap_policy is not None:
        raise NotImplementedError(
            f"auto_wrap_policy={plugin.auto_wrap_policy!r}: FSDP of version 2 knows 'transformer_based_wrap', "
            "'size_based_wrap' and 'no_wrap'. Name the modules instead, ShardingPlugin(sharding={'units': [YourBlock]})"
        )
    return {m for m in model.modules() if m is not model and policy is not None and policy(m)}


def _checkpoint(model: nn.Module, blocks: set[nn.Module]) -> None:
    """Recomputes the blocks' activations in backward, with the same RNG state. Private in torch
    (``checkpoint_wrapper``); tried on 2.13, not on the others of 2.11 to 2.15. Without a block, raises a ValueError.
    """
    if not blocks:
        raise ValueError(
            "activation_checkpointing: the auto-wrap policy names no module to checkpoint; set auto_wrap_policy="
            "'transformer_based_wrap' and transformer_cls_names_to_wrap=['YourBlock']"
        )
    for name, module in list(model.named_modules()):
        if module in blocks:
            model.set_submodule(name, checkpoint_wrapper(module))


def _policy(accelerator: Accelerator) -> MixedPrecisionPolicy:
    """Returns the plugin's policy. With mixed precision, trained main weights are fp32, as in accelerate."""
    given = accelerator.state.fsdp_plugin.mixed_precision_policy
    policy = policy_of(given) if given is not None else MixedPrecisionPolicy(main_params_dtype=None)
    if isinstance(given, MixedPrecisionPolicy) or accelerator.mixed_precision == "no":
        return policy
    return replace(policy, main_params_dtype=torch.float32)


def _mesh(accelerator: Accelerator) -> dict[str, Any]:
    """Returns mesh arguments for accelerate's ``ParallelismConfig``, if there is one."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None:
        return {}
    *outer, shard = accelerator.parallelism_config.fsdp_dim_names
    return {"mesh": mesh[(*outer, shard)], "dp_mesh_dims": (*outer, shard) if outer else {"shard": shard}}


def _of_first_rank(model: nn.Module) -> bool:
    """Whether rank 0 has the values and the others are to receive them. Then allocates what is on meta, on the CPU;
    memory that is never written takes no space.
    """
    everywhere = [any(t.is_meta for t in (*model.parameters(), *model.buffers()))]
    broadcast_object_list(everywhere)
    if not everywhere[0]:
        materialize.allocate(model)
    return not everywhere[0]


# Refusals


def _refuse(accelerator: Accelerator, model: nn.Module) -> None:
    """Refuses invalid and unsupported configurations before anything changes."""
    name, state = type(model).__name__, accelerator.state
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        raise ValueError(f"Accelerator.prepare: the model is wrapped in {name}; give it the plain model, model.module")
    if any(isinstance(m, TorchFSDPModule) for m in model.modules()):
        raise ValueError(
            "Accelerator.prepare: torch's fully_shard has sharded the model; leave that out, or call mfsdp.fully_shard"
        )
    if unwrapped(model) is not model or model._compiled_call_impl is not None:
        try:
            settings(model, "Accelerator.prepare")
        except TypeError as refused:  # another backend compiles it
            raise ValueError(_COMPILES.format(refused)) from None
    if state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(_COMPILES.format(f"Accelerate is to compile by {state.dynamo_plugin.backend.value!r}"))
    if state.mixed_precision == "fp16" and accelerator.scaler is None:
        raise ValueError("mixed_precision='fp16' on a CPU has no gradient scaler, and gradients vanish: choose 'bf16'")
    if accelerator.fp8_enabled or accelerator.has_fp8_handler:
        raise NotImplementedError(
            "mixed_precision='fp8' is not supported; choose 'bf16', and call torchao's "
            "convert_to_float8_training(model) before prepare: its weights are gathered in FP8 by themselves"
        )
    others = [n for n in ("tp", "cp", "sp") if getattr(accelerator.parallelism_config, f"{n}_enabled", False)]
    if others:
        raise NotImplementedError(
            f"ParallelismConfig with {', '.join(others)} is not supported: call mfsdp.fully_shard(model, mesh=mesh, "
            "units=[YourBlock]) yourself (docs/guides/parallelism.md), and give prepare what comes back"
        )
    if state.fsdp_plugin.activation_checkpointing_offload:
        raise NotImplementedError("activation_checkpointing_offload is not supported; activation_checkpointing is")


_COMPILES = (
    "{}. FSDP of version 2 is mfsdp here, which compiles the model itself: leave out torch_compile, "
    "torch_compile_backend, dynamo_backend and torch.compile. Options of the backend go into the environment, "
    "MFSDP_OPTIONS='{{\"prefetch\": 2}}', or into ShardingPlugin(options=...)"
)


def _not_sharded(model: nn.Module) -> None:
    """Raises a ValueError for a sharded model if FSDP version 2 is not configured: accelerate would wrap it in DDP, or
    not at all.
    """
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ValueError(
            f"Accelerator.prepare: {type(unwrapped(model)).__name__} is sharded by mfsdp, and this Accelerator is "
            "configured for something else. Give it fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or "
            "leave the model out of prepare"
        )


# Accelerator


def _state(own: Callable[..., None], self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """Replaces ``AcceleratorState.__init__``, which supports FSDP on accelerators only, to support it on CPUs too."""
    plugin = inspect.signature(own).bind(self, *args, **kwargs).arguments.get("fsdp_plugin")
    if plugin is not None and plugin.fsdp_version != 2:
        raise ValueError(
            "mfsdp.integrations.accelerate is imported, and the FSDP configuration is of version "
            f"{plugin.fsdp_version}, accelerate's default: set fsdp_version to 2 (fsdp_version: 2 in the file, "
            "--fsdp_version 2, FSDP_VERSION=2, FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_config="
            "{'version': 2} of Trainer), or leave out the import"
        )
    own(self, *args, **kwargs)
    if plugin is None:
        return
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin
    elif self.distributed_type == DistributedType.NO:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            AcceleratorState._reset_state(reset_partial_state=True)
            raise ValueError(
                f"Accelerate takes this process for the only one, of {ranks} that were started: without a GPU say "
                "Accelerator(cpu=True), TrainingArguments(use_cpu=True), or, for accelerate launch --use_fsdp too, "
                "ACCELERATE_USE_CPU=true in the environment"
            )
        log.warning(
            "mfsdp: Accelerate runs one process without a process group: the model is neither sharded nor compiled"
        )


def _prepare(own: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Accelerator.prepare``, which requires model and optimizer in one call; here either may come alone."""
    models = [x for x in args if isinstance(x, nn.Module)]
    if not self.is_fsdp2:
        for model in models:
            _not_sharded(model)
    elif bool(models) != any(isinstance(x, torch.optim.Optimizer) for x in args) and len(models) < 2:
        out = _prepare_fsdp2(self, *args)
        return out if len(out) > 1 else out[0]
    return own(self, *args, **kwargs)


def _prepare_fsdp2(self: Accelerator, *args: Any) -> tuple[Any, ...]:
    """Replaces ``Accelerator._prepare_fsdp2``: shards the model, and gives optimizers its new parameters.

    Accelerate's own identifies parameters by address, which is the same for all on the meta device.
    """
    model = next((x for x in args if isinstance(x, nn.Module)), None)
    if model is not None:
        _refuse(self, model)
    containers = (self._models, self._optimizers, self._dataloaders, self._schedulers)
    before = [list(found) for found in containers]
    try:
        result = [x if isinstance(x, nn.Module) else self._prepare_one(x, first_pass=True) for x in args]
        result = [x if isinstance(x, nn.Module) else self._prepare_one(x) for x in result]
        optimizers = [x for x in result if isinstance(x, torch.optim.Optimizer)]
        if model is not None:
            with parameters_freed(optimizers, unwrapped(model), _refuse_optimizer):
                prepare_model(self, model)
            if not any(model is other for other in self._models):
                self._models.append(model)
        _pair(self)
    except BaseException:
        for found, earlier in zip(containers, before):
            found[:] = earlier
        raise
    for item in result:
        if any(item is known for found in containers for known in found):
            item._is_accelerate_prepared = True
    return tuple(result)


def _pair(accelerator: Accelerator) -> None:
    """Sorts models by the order of their optimizers, those without one last: checkpoints pair them by number."""
    homes = {id(m): model for model in accelerator._models for m in unwrapped(model).modules()}
    held = [places(optimizer, accelerator._models, _refuse_optimizer) for optimizer in accelerator._optimizers]
    owners = [homes[id(owner)] for groups in held for owner, _ in groups[0][:1]]
    accelerator._models[:] = dict.fromkeys([*owners, *accelerator._models])


def _refuse_optimizer(optimizer: torch.optim.Optimizer, strange: torch.Tensor | None) -> NoReturn:
    name = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if strange is None:
        raise ValueError(
            f"Accelerator.prepare: {name} has state of unsharded parameters already. Call prepare "
            "before the first step, and load_state afterwards; one that makes its state when it is built, as "
            "Adagrad does, is built from the parameters of the prepared model"
        )
    raise ValueError(
        f"Accelerator.prepare: {name} holds a parameter of shape {tuple(strange.shape)} that is in "
        "no prepared model: nobody would average its gradients. "
        "Give model and optimizer to one call, prepare(model, optimizer), or build the optimizer from the "
        "parameters of the prepared model; what else trains has to be a part of the model"
    )


def _prepare_alone(own: Callable[..., Any], self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Accelerator.prepare_model``, which refuses to shard, and does not wrap the model for evaluation."""
    if self.is_fsdp2:
        return self.prepare(model)
    if not inspect.signature(own).bind(self, model, *args, **kwargs).arguments.get("evaluation_mode"):
        _not_sharded(model)
    return own(self, model, *args, **kwargs)


@contextmanager
def _no_sync(own: Callable[..., Any], self: Accelerator, model: nn.Module) -> Iterator[None]:
    """Replaces ``Accelerator.no_sync``: full gradients are accumulated, and none is communicated.
    (``sync_each_batch=True`` of accelerate's ``GradientAccumulationPlugin`` reduce-scatters them in every backward
    instead, which takes less memory.)
    """
    if isinstance(unwrapped(model), FSDPModule):
        unwrapped(model).set_requires_gradient_sync(False, hold=True)  # type: ignore[operator]
    with own(self, model):
        yield


def _clip_grad_norm(
    own: Callable[..., torch.Tensor | None], self: Accelerator, parameters: Any, max_norm: float, norm_type: float = 2
) -> torch.Tensor | None:
    """Replaces ``Accelerator.clip_grad_norm_``, which compares lists of tensors to find the model."""
    if not self.is_fsdp2:
        return own(self, parameters, max_norm, norm_type)
    self.unscale_gradients()
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def _no_such_backend(cls: type[DynamoBackend], value: object) -> None:
    """Raises a ValueError that explains that ``DynamoBackend``, a closed list, does not contain this backend."""
    if str(value).lower() == "mfsdp":
        raise ValueError(_COMPILES.format("torch_compile_backend='mfsdp' is no backend of Accelerate's"))


def _install() -> None:
    """Replaces accelerate's functions, once. Private in accelerate (``_prepare_fsdp2``, and that ``prepare`` and other
    packages look up ``fsdp2_prepare_model`` in two places); tried with 1.15.
    """
    table: list[tuple[Any, str, Any]] = [
        (AcceleratorState, "__init__", around(AcceleratorState.__init__, _state)),
        (Accelerator, "prepare", around(Accelerator.prepare, _prepare)),
        (Accelerator, "prepare_model", around(Accelerator.prepare_model, _prepare_alone)),
        (Accelerator, "no_sync", around(Accelerator.no_sync, _no_sync)),
        (Accelerator, "clip_grad_norm_", around(Accelerator.clip_grad_norm_, _clip_grad_norm)),
        (Accelerator, "_prepare_fsdp2", _prepare_fsdp2),
        (theirs, "fsdp2_prepare_model", prepare_model),
        (utils, "fsdp2_prepare_model", prepare_model),
        (DynamoBackend, "_missing_", classmethod(_no_such_backend)),
    ]
    for where, name, function in table:
        setattr(where, name, function)


_install()
