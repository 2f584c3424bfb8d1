"""A step abandoned under `no_sync` leaves no gradient for the next one, however gradients are zeroed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from tests.helpers.parity import averaged, compiled, error, whole

pytestmark = pytest.mark.dist


class Wrapper:
    """An optimizer of somebody else's around torch's, as accelerate has it."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self.optimizer.zero_grad(True if set_to_none is None else set_to_none)


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


WAYS: dict[str, Any] = {
    "sgd": lambda model, run, params: torch.optim.SGD(params, 0.1).zero_grad(),
    "adamw, zeros": lambda model, run, params: torch.optim.AdamW(params, foreach=True).zero_grad(set_to_none=False),
    "wrapper": lambda model, run, params: Wrapper(torch.optim.SGD(params, 0.1)).zero_grad(),
    "compiled": lambda model, run, params: run.zero_grad(),
    "model": lambda model, run, params: model.zero_grad(),
    "children": lambda model, run, params: [m.zero_grad() for m in model.children()],
    "by hand": lambda model, run, params: by_hand(model),
    "flat": lambda model, run, params: mfsdp.fully_shard_optimizer(torch.optim.AdamW(params)).zero_grad(),
}

PLACES: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": 0},
    "optim": {"strategy": 1},
    "held": {"strategy": 3},
    "hsdp": {"strategy": 3},
}


def model_of(place: str) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    sharding = dict(PLACES[place])
    if place == "hsdp":
        ranks = dist.get_world_size()
        sharding["mesh"] = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp_outer", "dp_shard"))
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["0"] if place != "optim" else None, **sharding)
    return reference, model, compiled(model, "eager" if place != "held" else "none")


def given_up(place: str) -> dict[str, float]:
    """By way of zeroing gradients: their largest error after an abandoned step and one of two microbatches, twice."""
    reference, model, run = model_of(place)
    hold = True if place == "held" else None
    torch.manual_seed(dist.get_rank())
    worst = dict.fromkeys(WAYS, 0.0)
    for way in [way for way in WAYS for _ in range(2)]:
        with mfsdp.no_sync(model, hold=hold):
            run(100 * torch.randn(2, 4)).sum().backward()
        WAYS[way](model, run, list(model.parameters()))
        reference.zero_grad()
        assert way == "adamw, zeros" or all(p.grad is None for p in model.parameters())
        x, y = torch.randn(2, 4), torch.randn(2, 4)
        with mfsdp.no_sync(model, hold=hold):
            run(x).square().sum().backward()
        run(y).square().sum().backward()
        for z in (x, y):
            reference(z).square().sum().backward()
        averaged(reference)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        worst[way] = max([worst[way], *(error(whole(p.grad), q.grad) for p, q in pairs)])
        by_hand(model)
    return worst


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_left_of_a_step_that_was_given_up(two_ranks, place):
    for worst in two_ranks.run(given_up, place):
        assert max(worst.values()) < 1e-5, worst


def one_parameter(place: str) -> list[float]:
    """Only some parameters of a unit are given up: the others keep what they wait for."""
    reference, model, run = model_of(place)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    with mfsdp.no_sync(model, hold=True if place == "held" else None):
        run(x).square().sum().backward()
    reference(x).square().sum().backward()
    for m in (model, reference):
        torch.optim.SGD([m.get_parameter("0.weight"), m.get_parameter("2.bias")], 0.1).zero_grad()
    run(y).square().sum().backward()
    reference(y).square().sum().backward()
    averaged(reference)
    return [error(whole(p.grad), q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]


@pytest.mark.parametrize("place", PLACES)
def test_some_parameters_of_a_unit(two_ranks, place):
    assert max(max(errors) for errors in two_ranks.run(one_parameter, place)) < 1e-5


@pytest.mark.slow
def test_some_parameters_on_four_ranks(four_ranks):
    assert max(max(errors) for errors in four_ranks.run(one_parameter, "hsdp")) < 1e-5


def left_alone() -> float:
    """Zeroing the gradients of one model leaves what another one keeps back."""
    _, model, run = model_of("optim")
    _, other, other_run = model_of("optim")
    with mfsdp.no_sync(model):
        run(torch.ones(1, 4)).sum().backward()
    with mfsdp.no_sync(other):
        other_run(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).zero_grad()
    run(torch.ones(1, 4)).sum().backward()
    other_run(torch.ones(1, 4)).sum().backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(error(whole(p.grad), 2 * whole(q.grad)) for p, q in pairs)


def test_other_models_keep_theirs(two_ranks):
    assert max(two_ranks.run(left_alone)) < 1e-6
