"""Strategies on one and two levels, as arguments of `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.ranks import here

ONE_LEVEL: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": 0},
    "optim": {"strategy": 1},
    "optim_grads": {"strategy": 2},
    "optim_grads_params": {"strategy": 3},
    "held": {"strategy": 3},
}


TWO_LEVELS: dict[str, dict[str, Any]] = {
    "hsdp": {"strategy": 3},
    "hfsdp": {"strategy": 3, "outer_strategy": "optim"},
    "hsdp of optim_grads": {"strategy": 2},
    "hfsdp of optim_grads": {"strategy": 2, "outer_strategy": "optim"},
}


def sharding(place: str, **more: Any) -> dict[str, Any]:
    if place in ONE_LEVEL:
        return {**ONE_LEVEL[place], **more}
    mesh = init_device_mesh(here().type, (2, dist.get_world_size() // 2), mesh_dim_names=("dp_outer", "dp_shard"))
    return {**TWO_LEVELS[place], "mesh": mesh, **more}
