"""A sharded mixture of experts beside its unsharded self."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from examples.parallel.model import Experts, Mixtral, MixtureLayer, expert_parallel
from tests.helpers.parallel import reset, twin
from tests.helpers.ranks import here


def meshes(ranks: int) -> tuple[DeviceMesh, DeviceMesh]:
    """All data-parallel ranks, and the same as (efsdp, ep)."""
    world = dist.get_world_size()
    dense = init_device_mesh(here().type, (world,), mesh_dim_names=("dp_shard",))
    return dense, init_device_mesh(here().type, (world // ranks, ranks), mesh_dim_names=("efsdp", "ep"))


def sharded(ranks: int, strategy: int = 3, of_experts: int = 3, **more: Any) -> tuple[Any, Any]:
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    dense, sparse = meshes(ranks)
    reference, model = twin(lambda: Mixtral(**more))
    expert_parallel(model, sparse["ep"])
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        mfsdp.fully_shard(experts, mesh=sparse["efsdp"], strategy=of_experts)
    mfsdp.fully_shard(model, mesh=dense, units=[MixtureLayer], strategy=strategy)
    return reference, model
