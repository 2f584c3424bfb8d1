"""Checkpoints of torch.distributed.checkpoint: from and to every strategy, FSDP2 and plain models, on other worlds."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mfsdp
from examples.bench.bench import peak_of
from mfsdp.buffers.sharding_plan import STRATEGIES
from tests.helpers.models import CASES, GPT, Block
from tests.helpers.parity import averaged, batches, error
from tests.helpers.ranks import here
from tests.helpers.strategies import TWO_LEVELS, sharding

KINDS = [*STRATEGIES, "flat", "fsdp2", "plain"]
CASE = CASES["gpt"]


def trainer(kind: str, seed: int, units: Any = (Block,), **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; weights depend on the seed."""
    torch.manual_seed(seed)
    model = GPT(tied=False).double().to(here())
    if kind == "fsdp2":
        mesh = init_device_mesh(here().type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind != "plain":
        placement = {} if kind == "flat" else sharding(kind) if kind in TWO_LEVELS else {"strategy": kind}
        mfsdp.fully_shard(model, units=list(units), **placement, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, mfsdp.fully_shard_optimizer(optimizer) if kind == "flat" else optimizer


def train(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    warnings.simplefilter("ignore")
    for step in steps:
        CASE.loss(model, batches(CASE, step)[dist.get_rank()]).backward()
        if kind == "plain":
            averaged(model)
        optimizer.step()
        optimizer.zero_grad()


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    there = {"model": weights, "optimizer": state}
    dcp.load(there, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=there["model"], optim_state_dict=there["optimizer"])


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, whole, by name."""
    weights, state = get_state_dict(model, optimizer)
    out = {f"model.{n}": whole(t).clone() for n, t in weights.items()}
    for name, entries in state["state"].items():
        out |= {f"{name}.{key}": whole(value).clone() for key, value in entries.items()}
    return out


def matrix(folder: str, source: str) -> dict[str, float]:
    """Two steps as ``source``, then two more as each kind: how far from four steps without a stop."""
    reference, steps = trainer("plain", 0)
    train("plain", reference, steps, range(4))
    model, optimizer = trainer(source, 0)
    train(source, model, optimizer, range(2))
    save(folder, model, optimizer)
    out = {}
    for kind in KINDS:
        model, optimizer = trainer(kind, 1)
        load(folder, model, optimizer)
        train(kind, model, optimizer, range(2, 4))
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        out[kind] = max(error(whole(p), q.detach()) for p, q in pairs)
    return out


@pytest.mark.dist
@pytest.mark.parametrize(
    "source",
    [pytest.param(k, marks=pytest.mark.exhaustive) if k in ("optim", "optim_grads", "no_shard") else k for k in KINDS],
)
def test_training_goes_on_bitwise_as_any_other_kind(two_ranks, source, tmp_path):
    for errors in two_ranks.run(matrix, str(tmp_path), source):
        assert errors == dict.fromkeys(KINDS, 0.0)


PLACES: dict[int, dict[str, Any]] = {
    1: {"kind": "optim_grads_params"},
    2: {"kind": "optim_grads", "units": ["blocks.0", "blocks.1.up"]},
    3: {"kind": "flat", "units": []},
    4: {"kind": "hfsdp"},
}
"""How each world shards: another strategy, and other units."""


def saved(folder: str, kind: str, units: Any = (Block,)) -> dict[str, torch.Tensor]:
    model, optimizer = trainer(kind, 0, units)
    train(kind, model, optimizer, range(2))
    save(folder, model, optimizer)
    return everything(model, optimizer)


def loaded(folders: dict[int, str], kind: str, units: Any = (Block,)) -> dict[int, dict[str, torch.Tensor]]:
    out = {}
    for world, folder in folders.items():
        model, optimizer = trainer(kind, 1, units)
        load(folder, model, optimizer)
        out[world] = everything(model, optimizer)
    return out


@pytest.mark.dist
@pytest.mark.slow
def test_any_number_of_ranks_to_any_other(one_rank, two_ranks, three_ranks, four_ranks, tmp_path):
    worlds = {1: one_rank, 2: two_ranks, 3: three_ranks, 4: four_ranks}
    folders = {n: str(tmp_path / str(n)) for n in worlds}
    want = {n: ranks.run(saved, folders[n], **PLACES[n])[0] for n, ranks in worlds.items()}
    assert len(want[1]) == 29 * 4, "weights, two moments and a count each"
    for ranks, place in zip(worlds.values(), PLACES.values(), strict=True):
        for got in ranks.run(loaded, folders, **place):
            for n in worlds:
                assert got[n].keys() == want[n].keys()
                assert all(torch.equal(t, want[n][name]) for name, t in got[n].items())


def policies(folder: str) -> list[float]:
    """Saved under one policy, loaded under another: main weights and state are what the narrower can hold."""
    wide = {"mp_policy": mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)}
    narrow = {"mp_policy": mfsdp.MixedPrecisionPolicy(None, torch.bfloat16, torch.bfloat16)}
    torch.manual_seed(0)
    first = GPT(tied=False).bfloat16()
    errors = []
    for policy, other in ((wide, narrow), (narrow, wide)):
        model, twin = (mfsdp.fully_shard(copy.deepcopy(first), units=[Block], **p) for p in (policy, other))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
        model(batches(CASE)[dist.get_rank()]).float().square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        save(f"{folder}/{len(errors)}", model, optimizers[0])
        load(f"{folder}/{len(errors)}", twin, optimizers[1])
        a, b = everything(model, optimizers[0]), everything(twin, optimizers[1])
        assert a.keys() == b.keys()
        errors.append(max(error(b[n].float(), a[n].float()) for n in a))
    return errors


@pytest.mark.dist
def test_other_dtypes(two_ranks, tmp_path):
    for to_narrow, to_wide in two_ranks.run(policies, str(tmp_path)):
        assert 0 < to_narrow < 2**-8 and to_wide == 0


def saving(folder: str) -> tuple[int, int, int]:
    """The most bytes that saving has allocated at any one time; those of this rank's part of the weights; of all."""
    model = mfsdp.fully_shard(GPT(width=128, layers=4), units=[Block])
    optimizer = torch.optim.AdamW(model.parameters())
    train("optim_grads_params", model, optimizer, range(1))
    weights, state = get_state_dict(model, optimizer)
    most = peak_of(lambda: dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder))
    params = list(model.parameters())
    return most, sum(p.to_local().nbytes for p in params), sum(p.numel() * 4 for p in params)


@pytest.mark.dist
def test_saving_gathers_nothing(two_ranks, tmp_path):
    """torch's writer keeps copies of what are views, this rank's part of the weights, until its file is closed."""
    for most, mine, whole in two_ranks.run(saving, str(tmp_path)):
        assert 0 < most < mine + 2**18 < whole * 2 / 3


def behind(folder: str) -> bool:
    """An asynchronous save holds what was there when it was called."""
    group = dist.new_group(backend="gloo")
    model, optimizer = trainer("optim_grads_params", 0)
    train("optim_grads_params", model, optimizer, range(2))
    want = everything(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    future = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder, process_group=group)
    train("optim_grads_params", model, optimizer, range(2, 4))
    future.result()
    other, its = trainer("optim_grads", 1)
    load(folder, other, its)
    got = everything(other, its)
    return all(torch.equal(got[n], t) for n, t in want.items())


@pytest.mark.dist
def test_asynchronous_saving(two_ranks, tmp_path):
    assert two_ranks.run(behind, str(tmp_path)) == [True, True]
