"""Names of ``megatron_fsdp.experimental`` (v2): `fully_shard` per module in place, inner modules first.

Modules are compiled in place. A module that another one calls is part of that one's graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ...buffers.sharding_plan import OUTER
from ...sharding.contexts import gradient_sync
from ...sharding.module import FSDPModule
from ...sharding.shard import fully_shard as shard
from .. import environment
from ..compiling import not_compiled
from . import optimizer as optimizers
from .mixed_precision import MixedPrecisionPolicy, policy_of

MeshAxis = int | str


class Placement:
    """How a buffer lies on the ranks of an axis."""


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank has all of it."""


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank has a summand of it. Only sums are reduced; ``reduce_op`` is not read."""

    reduce_op: Any = None


@dataclass(frozen=True)
class Flat(Placement):
    """Every rank has a part of it."""


@dataclass(frozen=True)
class Placements:
    """Placements of parameters, gradients and optimizer state, for each of the axes ``dp_axes``.

    Raises:
        ValueError: a list has another length.
    """

    dp_axes: list[MeshAxis]
    parameter: list[Placement]
    gradient: list[Placement]
    optimizer: list[Placement]

    def __post_init__(self) -> None:
        for name in ("parameter", "gradient", "optimizer"):
            if len(getattr(self, name)) != len(self.dp_axes):
                given = len(getattr(self, name))
                raise ValueError(f"Placements: {len(self.dp_axes)} axes, and {given} placements in {name}=")

    def arguments(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Returns the arguments of `mfsdp.fully_shard` with the same meaning.

        Raises:
            NotImplementedError: there are none; lists those that there are.
        """
        names: list[MeshAxis] = list(mesh.mesh_dim_names or range(mesh.ndim))
        if [names[axis] if isinstance(axis, int) else axis for axis in self.dp_axes] != names:
            raise NotImplementedError(f"Placements: dp_axes={self.dp_axes}: give all axes of the mesh, {names}")
        kinds = zip(self.parameter, self.gradient, self.optimizer, strict=True)
        by_axis = [_STRATEGIES.get("".join(type(placement).__name__[0] for placement in axis), -1) for axis in kinds]
        match by_axis:
            case [strategy] if strategy >= 0:
                return {"mesh": mesh, "strategy": strategy}
            case [3, 3] if mesh.mesh_dim_names:
                return {"mesh": mesh, "dp_mesh_dims": {"shard": mesh.mesh_dim_names}}
            case [(0 | 1) as outer, strategy] if strategy >= 0:
                dims = {"dp_mesh_dims": mesh.mesh_dim_names} if mesh.mesh_dim_names else {}
                return {"mesh": mesh, **dims, "strategy": strategy, "outer_strategy": OUTER[outer]}
        raise NotImplementedError(
            f"{self}: mfsdp places buffers by strategy: all Flat (3), Replicate parameters (2), also Partial gradients "
            "(1), also Replicate optimizer state (0); on an outer axis the last two, with Flat parameters on the inner"
        )


_STRATEGIES = {"FFF": 3, "RFF": 2, "RPF": 1, "RRF": 1, "RPR": 0, "RRR": 0}
"""A strategy's number for each placement of parameters, gradients and optimizer state, by first letter."""


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: object = None,
    use_symm_mem: bool = False,
    *,
    options: dict[str, Any] | None = None,
    compile: bool = True,
) -> None:
    """Shards what is not sharded yet of a module, in place, and compiles it in place.

    Args:
        module: one unit; call it on the model last.
        mesh: all of its axes are those of ``placements``.
        placements: those that are a strategy of `mfsdp.fully_shard`.
        mixed_precision_policy: as in `fully_shard_model`, but ``main_params_dtype=None`` is fp32.
        use_symm_mem: the option ``nccl_ub``.
        options, compile: of the backend; whether to compile.

    Raises:
        ValueError, NotImplementedError: see `mfsdp.fully_shard`; other placements; ``use_symm_mem`` without
            ``compile``.
    """
    if use_symm_mem and not compile:
        raise NotImplementedError(
            "use_symm_mem=True: NCCL registers static buffers, which compiled programs have: leave compile=False out"
        )
    options = {"nccl_ub": True, **(options or {})} if use_symm_mem else options
    policy = policy_of(mixed_precision_policy or MixedPrecisionPolicy())
    policy = replace(policy, main_params_dtype=policy.main_params_dtype or torch.float32)
    arguments = {**placements.arguments(mesh), "mp_policy": policy, "sync_module_states": True}
    in_place(module, {**arguments, **environment.sharding(None)}, environment.options(options), compile)


def in_place(module: nn.Module, arguments: dict[str, Any], options: dict[str, Any], compile: bool) -> None:
    """Shards a module by arguments of `mfsdp.fully_shard`, and compiles it."""
    if compile:
        not_compiled(module, "fully_shard", "fully_shard(options=)", sharded=True)
    shard(module, **arguments)
    assert isinstance(module, FSDPModule)
    optimizers.remember(module, ahead=options.get("prefetch") != 0)
    if compile:
        module.compile(backend="mfsdp", options=options)


@contextmanager
def microbatch(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Says whether backwards inside the ``with`` complete the gradients of a step.

    Raises:
        ValueError: nothing of the module is sharded.
    """
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    if not units:
        raise ValueError(f"microbatch: nothing of this {type(module).__name__} is sharded; call fully_shard first")
    with gradient_sync(units, is_last):
        yield


def fully_shard_optimizer(optimizer: Optimizer, *, precision_aware: bool = False) -> None:
    """Makes an optimizer step on flat tensors.

    Args:
        optimizer: elementwise, over sharded parameters.
        precision_aware: whether it reads gradients in ``main_grads_dtype``, from ``.decoupled_grad``.

    Raises:
        TypeError, ValueError, NotImplementedError: see `mfsdp.fully_shard_optimizer`.
    """
    optimizers.adapt(optimizer, precision_aware)


class DBuffer:
    """Raises NotImplementedError: buffers are internal."""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            "DBuffer: buffers of mfsdp are internal. For sharded tensors of your own use torch.distributed.tensor; "
            "values of a parameter are param.to_local() and param.full_tensor()"
        )

    distribute_tensors = __new__
