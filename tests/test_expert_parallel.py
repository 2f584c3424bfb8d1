"""Experts on a mesh of their own, tokens sent to them by all-to-alls whose splits depend on data, in one graph."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from examples.parallel.model import Experts, Mixtral, MixtureLayer, expert_parallel
from mfsdp import pipeline
from mfsdp.graph.program import Program, is_functional_collective
from tests.parallel import graphs, next_token, reset, tokens, trained_alike, twin
from tests.parity import compiled, error

pytestmark = pytest.mark.dist


def meshes(ranks: int) -> tuple[DeviceMesh, DeviceMesh]:
    """All data-parallel ranks, and the same as (efsdp, ep)."""
    world = dist.get_world_size()
    dense = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    return dense, init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("efsdp", "ep"))


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


def parity(lowering: str, ranks: int) -> Any:
    reference, model = sharded(ranks, layers=1)
    every = [tokens(r) for r in range(dist.get_world_size())]
    wrong: dict[str, float] = {}
    left: list[str] = []

    def look(p: Program) -> None:
        left.extend(n.name for n in p.nodes if is_functional_collective(n))

    more = {} if lowering == "none" else {"passes": (*pipeline.PIPELINE, ("look", look))}
    run = compiled(model, lowering, **more)
    for turn in range(3):  # the routing changes
        turned = [batch.roll(turn, 1) for batch in every]
        wrong |= trained_alike(model, run, reference, turned[dist.get_rank()], turned, steps=1)
    assert not left, f"not launched and waited for by us: {left}"
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_parity(four_ranks, lowering, ranks):
    for wrong, where, made in four_ranks.run(parity, lowering, ranks, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


@pytest.mark.slow
@pytest.mark.inductor
def test_parity_of_inductors_code(four_ranks):
    for wrong, where, made in four_ranks.run(parity, "inductor", 2, timeout=400):
        assert wrong < 1e-9 and made == (1, 0), where


def microbatches(strategy: int, of_experts: int) -> float:
    reference, model = sharded(2, strategy, of_experts, layers=1)
    run = compiled(model, "eager")
    for micro in range(2):
        batches = [tokens(100 * micro + r) for r in range(4)]
        with mfsdp.no_sync(model) if micro == 0 else nullcontext():
            next_token(run, batches[dist.get_rank()]).backward()
        (sum(next_token(reference, b) for b in batches) / 4).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(p.grad.full_tensor(), q.grad) for p, q in pairs)


@pytest.mark.parametrize("strategies", [(3, 3), (1, 3), (2, 0)])
def test_microbatches(four_ranks, strategies):
    assert max(four_ranks.run(microbatches, *strategies, timeout=300)) < 1e-9
