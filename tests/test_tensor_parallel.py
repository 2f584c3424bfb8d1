"""Tensor parallelism beside sharding, in one graph: what an unsharded model gives on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from tests.parallel import Layer, Llama, graphs, reset, tensor_parallel, tokens, trained_alike, twin
from tests.parity import compiled

pytestmark = pytest.mark.dist


def parity(lowering: str, shape: tuple[int, int], plan: dict[str, Any], config: dict[str, Any], **sharding: Any) -> Any:
    reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    reference, model = twin(lambda: Llama(**config))
    tensor_parallel(model, mesh["tp"], **plan)
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer], **sharding)
    every = [tokens(r, config.get("vocab", 34)) for r in range(shape[0])]
    mine = every[mesh.get_local_rank("dp_shard")]
    wrong = trained_alike(model, compiled(model, lowering), reference, mine, every)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize("lowering", ["eager", "none"])
@pytest.mark.parametrize("sequence", [True, False])
def test_parity(four_ranks, lowering, sequence):
    for wrong, where, made in four_ranks.run(parity, lowering, (2, 2), {"sequence": sequence}, {}):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)
