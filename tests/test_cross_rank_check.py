"""Ranks that have built different models, or the same with different values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from tests.helpers.models import GPT, MLP, Block
from tests.helpers.parity import whole


def caught(build: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> str:
    """What a rank is told."""
    model, sharding = build(dist.get_rank())
    before = [id(p) for p in model.parameters()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            mfsdp.fully_shard(model, **sharding)
        except RuntimeError as error:
            assert [id(p) for p in model.parameters()] == before and type(model).__mro__[1] is nn.Module
            return str(error)
    return " ".join(str(w.message) for w in told)


def narrower(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3 + rank)), {}


def deeper(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank))), {"units": ["0"]}


def other_units(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return GPT(), {"units": [Block] if rank else ["blocks.0"]}


def other_strategy(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return MLP(), {"strategy": 2 + rank}


def other_precision(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return MLP(), {"mp_policy": mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if rank else None)}


def frozen(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return MLP().requires_grad_(not rank), {}


def on_meta(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta" if rank else "cpu"):
        return MLP(), {"device": "cpu"}


DIFFERENT = {
    narrower: r"rank 1: 1.weight \[4, 6\]|cut",
    deeper: r"rank 1: .*unit \(root\), a Sequential",
    other_units: "unit blocks.1, a Block",
    other_strategy: "rank 0: strategy optim_grads, ",
    other_precision: "compute_dtype=torch.bfloat16",
    frozen: "trains False",
    on_meta: "on the meta device",
}


@pytest.mark.dist
@pytest.mark.parametrize("build", DIFFERENT, ids=lambda b: b.__name__)
def test_different_models_are_an_error_on_every_rank(two_ranks, build):
    import re

    for told in two_ranks.run(caught, build):
        assert "have built different models, or shard them differently" in told
        assert re.search(DIFFERENT[build], told, re.DOTALL), told


def seeded(rank: int, **sharding: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(rank)
    model = GPT()
    nn.init.ones_(model.blocks[0].up.weight)
    model.register_buffer("table", torch.full((3,), rank, dtype=torch.bool))
    return model, {"units": [Block], **sharding}


def alike(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return seeded(0)


def strategies(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return seeded(rank, strategy=0)


def made_alike(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return seeded(rank, sync_module_states=True)


@pytest.mark.dist
@pytest.mark.parametrize("build", [seeded, strategies])
def test_different_values_are_told(two_ranks, build):
    for told in two_ranks.run(caught, build):
        assert (
            "have different values of blocks.0.qkv.weight, " in told
            and " more. Each rank" in told
            and "sync_module_states=True" in told
        )
        assert "up.weight" not in told, "that is the same"


@pytest.mark.dist
@pytest.mark.parametrize("build", [alike, made_alike])
def test_the_same_values_are_not_told(two_ranks, build):
    assert two_ranks.run(caught, build) == ["", ""]


def differing_after_sync(shape: tuple[int, ...], strategy: int, outer: str) -> list[str]:
    """Names of parameters and buffers that are not rank 0's."""
    names = ("dp_outer", "dp_shard")[-len(shape) :]
    model, sharding = seeded(dist.get_rank(), sync_module_states=True, strategy=strategy, outer_strategy=outer)
    model.half()
    mfsdp.fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), **sharding)
    want = seeded(0)[0].half().state_dict()
    got = {n: whole(t) if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    return [n for n, t in want.items() if not torch.equal(got[n].to(t.dtype), t)]


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_values_of_the_first_rank(two_ranks, strategy):
    assert two_ranks.run(differing_after_sync, (2,), strategy, "no_shard") == [[], []]


@pytest.mark.dist
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_values_of_the_first_rank_on_two_levels(four_ranks, outer):
    assert four_ranks.run(differing_after_sync, (2, 2), 3, outer) == [[]] * 4


def test_one_process_has_nobody_to_ask():
    model, sharding = seeded(0, sync_module_states=True)
    mfsdp.fully_shard(model, **sharding)
