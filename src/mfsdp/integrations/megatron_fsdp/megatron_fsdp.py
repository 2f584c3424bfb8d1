"""`MegatronFSDP`: the model that `fully_shard_model` returns, with the methods of megatron-fsdp's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...buffers.norms import check_finite
from ...buffers.replica_check import check_replicas
from ...sharding.contexts import synchronize
from ...sharding.fsdp2_api import refusal
from ...sharding.module import FSDPModule, buffers_of
from ...sharding.shard import fully_shard
from ..compiling import not_compiled
from . import optimizer as optimizers
from .arguments import Arguments
from .configuration import DistributedDataParallelConfig, FSDPDistributedIndex

_FIXED = "the policy is fixed when the model is sharded: give fully_shard_model(mixed_precision_policy=)"


class MegatronFSDP(nn.Module):
    """A model that mfsdp shards, and compiles in place; `module` is the model itself.

    Names in ``state_dict()`` begin with ``module.``, as megatron-fsdp's do, so that its checkpoints load. The
    constructor takes megatron-fsdp's arguments; `fully_shard_model` is the usual way.

    Args:
        module: the model, sharded and compiled in place.
        dist_index: the mesh.
        ddp_config: other settings. Default: strategy 3.
        arguments: those of `fully_shard_model`, except strategies and mesh.

    Raises:
        ValueError, NotImplementedError, TypeError: see `Arguments` and `mfsdp.fully_shard`. Nothing has changed then,
            but experts may be sharded over ``expt_device_mesh`` when the rest is refused.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: object = None,
        fsdp_unit_modules: Any = None,
        *,
        sync_model_each_microbatch: bool = False,
        **arguments: Any,
    ):
        hook = arguments.pop("enable_fine_grained_param_gather_hook", False)
        for name in ("enable_fine_grained_param_gather_backward_hook", "fine_grained_recurse_module_types"):
            if arguments.pop(name, None):
                raise NotImplementedError(
                    f"{name}: compiled backward gathers what it reads, unit by unit; leave it out"
                )
        said = {} if ddp_config is None else ddp_config.arguments()
        if mixed_precision_policy is not None:
            said["mixed_precision_policy"] = mixed_precision_policy
        said |= {"sync_model_each_microbatch": sync_model_each_microbatch, "fsdp_unit_modules": fsdp_unit_modules}
        if hook:
            said["enable_fine_grained_param_gather"] = True
        mesh = dist_index.arguments()
        outer = said.get("outer_dp_sharding_strategy", "no_shard")
        if not dist_index.hsdp_outer_dp_shard and outer != "no_shard":
            mesh["outer_dp_sharding_strategy"] = outer
        self._begin(module, Arguments(**{**said, **mesh, **arguments}))

    def _begin(self, module: nn.Module, arguments: Arguments) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard_model: {module!r} is no module")
        if arguments.compile:
            not_compiled(module, "fully_shard_model", "fully_shard_model(options=)")
        options = arguments.backend_options()
        said = arguments.for_module(module)
        experts, apart = arguments.for_experts(module)
        for each in experts:
            fully_shard(each, **apart)
        fully_shard(module, **said)
        super().__init__()
        self.module, self.mp_policy = module, arguments.policy()
        self._arguments = arguments
        self._last, self._auto = True, arguments.sync_model_each_microbatch
        if arguments.calculate_per_token_loss:
            self._root.set_gradient_divide_factor(1.0, recurse=True)
        self._options = options
        self._finish()

    def _finish(self) -> None:
        """Tells optimizers the settings, and compiles the module."""
        arguments = self._arguments
        optimizers.remember(
            self._root,
            decoupled=arguments.use_decoupled_grad,
            ahead=self._options.get("prefetch") != 0,
            finite=arguments.report_nan_in_param_grad or bool(arguments.check_for_nan_in_grad),
        )
        if arguments.compile:
            self.module.compile(backend="mfsdp", options=self._options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, which torch leaves uncompiled."""
        super().__setstate__(state)
        self._finish()

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    @torch.compiler.disable(recursive=False)  # ``torch.compile(model)`` leaves the compiled module as it is
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.module(*inputs, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in ``nn.Module``.

        Raises:
            ValueError: no name begins with ``module.``; with ``strict=False`` nothing would be loaded.
        """
        if state_dict and not any(name.startswith("module.") for name in state_dict):
            raise ValueError(
                f"load_state_dict: names of this model begin with 'module.', and those given do not "
                f"({next(iter(state_dict))!r}): load them by model.module.load_state_dict(...)"
            )
        return super().load_state_dict(state_dict, strict, assign)

    # When gradients are reduced

    @property
    def model_auto_sync(self) -> bool:
        """Whether every backward reduces gradients completely, whatever ``is_last_microbatch`` says."""
        return self._auto

    @model_auto_sync.setter
    def model_auto_sync(self, value: bool) -> None:
        self._auto = bool(value)
        self._root.set_requires_gradient_sync(self._auto or self._last)

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward completes the gradients of a step. With ``model_auto_sync``, every one does."""
        return self._last

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._last = bool(value)
        self._root.set_requires_gradient_sync(self._auto or self._last)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Sets ``model_auto_sync``."""
        self.model_auto_sync = sync_model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside the ``with`` are not the last of their step; without effect under ``model_auto_sync``."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Sets ``model_auto_sync`` inside the ``with``, and resets it at the end."""
        self.model_auto_sync = True
        try:
            yield
        finally:
            self.model_auto_sync = False

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Checks that gradients are reduced: the last backward of a step has done so.

        Raises:
            RuntimeError: that backward has not run.
        """
        optimizers.complete(buffers_of(self._root, recurse=True))
        if self._arguments.report_nan_in_param_grad or self._arguments.check_for_nan_in_grad:
            check_finite(self.module)

    synchronize_gradient_reduce = finish_grad_sync

    def start_grad_sync(self, *unused: object) -> None:
        """Does nothing: backward's graph reduces gradients."""

    def attach_grad_to_optimizer_state(self) -> None:
        """Does nothing: ``param.grad`` is there after backward."""

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by a number."""
        self.finish_grad_sync()
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drops all gradients."""
        self.zero_grad()

    # Weights

    def start_param_sync(self, *unused: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Does nothing: forward's graph launches its first gather."""

    def synchronize_param_gather(self) -> None:
        """Waits for gathers in flight (`mfsdp.synchronize`)."""
        synchronize(self.module)

    def install_optimized_model_weights(self) -> None:
        """Does nothing: the next gather reads the main weights."""

    def broadcast_params(self) -> None:
        """Compares replicas: `fully_shard_model` has given all ranks the values of the first.

        Raises:
            RuntimeError: they differ; see `mfsdp.check_replicas`.
        """
        check_replicas(self.module)

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Returns the mesh and the names that were given.

        Raises:
            ValueError: no ``device_mesh`` was given.
        """
        args = self._arguments
        if args.device_mesh is None:
            raise ValueError(
                "get_distributed_index: no device_mesh was given; that of a parameter is param.device_mesh"
            )
        names = inspect.signature(FSDPDistributedIndex).parameters.keys() - {"hsdp_outer_dp_shard"}
        outer = args.strategies()[1] == "optim"
        return FSDPDistributedIndex(**{name: getattr(args, name) for name in names}, hsdp_outer_dp_shard=outer)

    def _replace_param_with_distributed_if_needed(self) -> None:
        """Does nothing: ``parameters()`` are always what the optimizer steps. Documented there although private."""

    # What is not there

    all_gather_and_wait_parameters_ready = refusal(
        "MegatronFSDP.all_gather_and_wait_parameters_ready",
        "graphs gather by themselves; for other code: model.module.unshard(), mfsdp.unsharded(model) or "
        "mfsdp.summon_full_params(model)",
    )
    mixed_precision_context = refusal("MegatronFSDP.mixed_precision_context", _FIXED)
    reset_mixed_precision_policy = refusal("MegatronFSDP.reset_mixed_precision_policy", _FIXED)

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(f"MegatronFSDP.{name} does not exist in mfsdp: {_ABSENT[name]}")
        return super().__getattr__(name)


_ABSENT = {
    "param_and_grad_buffer": "buffers are internal; model.named_parameters() are what the optimizer steps",
    "param_to_name": "model.named_parameters() is the only set of parameters",
    "raw_param": "model.named_parameters() is the only set of parameters",
    "microbatch_count": "set model.is_last_microbatch, or use model.no_sync()",
    "pre_backward": "the graph launches its gathers",
    "post_backward": "param.grad is there after backward",
    "post_forward_release_module": "the graph frees what it gathered; after model.module.unshard(): reshard()",
    "post_backward_release_module": "the graph frees what it gathered; after model.module.unshard(): reshard()",
    "ddp_config": "its settings are arguments of fully_shard_model",
    "dist_index": "model.get_distributed_index() returns it",
}
"""Attributes of megatron-fsdp's class, and what to use instead; ``hasattr`` is ``False``."""


def wrapped(module: nn.Module, arguments: Arguments) -> MegatronFSDP:
    """Returns a module, sharded and compiled by `Arguments`."""
    model = MegatronFSDP.__new__(MegatronFSDP)
    model._begin(module, arguments)
    return model
