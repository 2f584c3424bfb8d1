"""Parameters without elements, which forward reads: as in the unsharded model, everywhere."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import mfsdp
from tests.helpers.parity import averaged, compiled, error, whole


class Empty(nn.Module):
    """Empty parameters first, between, last and tied, in several shapes; one unit has nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0, 4))
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.between = nn.Parameter(torch.empty(4, 0))
        self.bias = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.empty(0), requires_grad=False)
        self.alone = nn.Linear(4, 0)
        self.tied = nn.Linear(4, 0, bias=False)
        self.tied.weight = self.first
        self.last = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, self.alone(x), self.tied(x), x @ self.between], 1)
        rows = torch.cat([self.first, self.weight, self.first])
        return x + rows.sum(0) + self.bias + self.last.sum() + self.frozen.sum()


def trained(lowering: str, steps: int = 3, **sharding: Any) -> tuple[nn.Module, nn.Module, float]:
    """A sharded model and an unsharded one after some steps of each, and how far they are apart."""
    torch.manual_seed(0)
    reference = Empty()
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=["alone"], **sharding)
    run = compiled(model, lowering)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    worst = 0.0
    for _ in range(steps):
        x = torch.randn(5, 4)
        for m in (run, reference):
            m(x).square().mean().backward()
        if dist.is_initialized():
            averaged(reference)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) and p.shape == q.shape
            if p.grad is not None:
                assert p.grad.shape == q.grad.shape
                worst = max(worst, error(whole(p.grad), q.grad))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return model, optimizers[0], max(worst, *(error(whole(p.detach()), q.detach()) for p, q in pairs))


def distance(lowering: str, **sharding: Any) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trained(lowering, **sharding)[2]


@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_in_one_process(lowering):
    assert distance(lowering) < 1e-5


@pytest.mark.inductor
def test_under_inductor():
    assert distance("inductor") < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_on_two_ranks(two_ranks, lowering, strategy):
    assert max(two_ranks.run(distance, lowering, strategy=strategy)) < 1e-5


def saved_and_loaded(folder: Path) -> None:
    model, optimizer, _ = trained("eager")
    want = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(want, checkpoint_id=folder)
    other, its, _ = trained("eager", steps=1)
    got = {"model": other.state_dict(), "optim": its.state_dict()}
    dcp.load(got, checkpoint_id=folder)
    for n, p in got["model"].items():
        assert torch.equal(whole(p.detach()), whole(want["model"][n].detach())), n
    plain = Empty()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    for n, p in state["model"].items():
        assert torch.equal(p, whole(want["model"][n].detach())), n


def test_checkpoints_in_one_process(tmp_path):
    saved_and_loaded(tmp_path)


@pytest.mark.dist
def test_checkpoints_on_two_ranks(two_ranks, tmp_path):
    two_ranks.run(saved_and_loaded, tmp_path)


def test_whole_state_dicts_and_safetensors(tmp_path):
    model = Empty()
    want = {n: p.detach().clone() for n, p in model.state_dict().items()}
    mfsdp.fully_shard(model, units=["alone"])
    model.load_state_dict(want)
    twin = copy.deepcopy(model)
    with mfsdp.summon_full_params(twin):
        assert all(torch.equal(p, want[n]) for n, p in twin.state_dict().items())
    mfsdp.save_safetensors(model, tmp_path)
    mfsdp.load_safetensors(model, tmp_path)
    assert all(torch.equal(whole(p.detach()), want[n]) for n, p in model.state_dict().items())


def test_fully_sharded_optimizers():
    model = mfsdp.fully_shard(Empty(), units=["alone"])
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    run = compiled(model, "eager")
    run(torch.randn(5, 4)).sum().backward()
    before = model.weight.full_tensor().clone()
    optimizer.step()
    assert not torch.equal(before, model.weight.full_tensor())
    optimizer.load_state_dict(optimizer.state_dict())
