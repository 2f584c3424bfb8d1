"""Muon on shards: weights and momentum bitwise those of `torch.optim.Muon` on one process, for equal gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.optim.flat_optimizer import fully_shard_optimizer
from tests.helpers.parity import whole


class Block(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.a = nn.Linear(24, 37 + number)
        self.b = nn.Linear(37 + number, 24)
        self.norm = nn.LayerNorm(24)
        self.tiny = nn.Linear(24, 1, bias=False)
        self.two = nn.Linear(7, 2, bias=False)
        self.qkv = nn.Linear(24, 72)
        self.experts = nn.Parameter(torch.randn(3, 10, 16))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(Block(i % 2) for i in range(3))
        self.head = nn.Linear(24, 50, bias=False)


def groups_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter], Any]:
    """Matrices, fused matrices, stacked matrices, and the rest."""
    named = dict(model.named_parameters())
    fused = [p for n, p in named.items() if "qkv.weight" in n]
    stacked = [p for n, p in named.items() if "experts" in n]
    taken = {id(p) for p in (*fused, *stacked)}
    matrices = [
        p for n, p in named.items() if p.dim() == 2 and "emb" not in n and "head" not in n and id(p) not in taken
    ]
    taken |= {id(p) for p in matrices}
    return matrices, fused, stacked, [p for p in named.values() if id(p) not in taken]


def muon(model: nn.Module, **settings: Any) -> torch.optim.Muon:
    matrices, fused, stacked, _ = groups_of(model)
    optimizer = torch.optim.Muon([{"params": matrices}, {"params": fused, "split_sizes": [24, 24, 24]}], **settings)
    optimizer.add_param_group({"params": stacked, "lr": 0.05})
    return optimizer


class Reference:
    """The same on one process: `torch.optim.Muon` on parameters that are cut up by hand."""

    def __init__(self, model: nn.Module, **settings: Any):
        matrices, fused, stacked, _ = groups_of(model)
        self.parts = [(p, [p.detach().clone()]) for p in matrices]
        self.parts += [(p, [x.clone() for x in p.detach().split(24)]) for p in fused]
        self.parts += [(p, [x.clone() for x in p.detach()]) for p in stacked]
        late = [nn.Parameter(x) for p, each in self.parts[-len(stacked) :] for x in each]
        early = [nn.Parameter(x) for p, each in self.parts[: -len(stacked)] for x in each]
        self.params = [*early, *late]
        self.optimizer = torch.optim.Muon([{"params": early}, {"params": late, "lr": 0.05}], **settings)

    def step(self, grads: dict[nn.Parameter, torch.Tensor]) -> None:
        found = iter(self.params)
        for p, each in self.parts:
            grad = grads[p]
            parts = [grad] if len(each) == 1 else list(grad.split(24) if grad.dim() == 2 else grad)
            for part in parts:
                next(found).grad = part.clone()
        self.optimizer.step()

    def values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
        found = iter(self.params)
        for p, each in self.parts:
            mine = [next(found) for _ in each]
            momenta = [self.optimizer.state[x]["momentum_buffer"] for x in mine]
            join = (lambda xs: xs[0]) if len(each) == 1 else torch.cat if p.dim() == 2 else torch.stack
            yield p, join([x.detach() for x in mine]), join(momenta)


def give(p: Any, grad: torch.Tensor) -> None:
    at = p.sharding.local()
    part = grad.reshape(-1)[at.param_offset : at.param_offset + at.numel].view(at.shape)
    p.grad = type(p)._alike(part, p.sharding, False)


def alike(optimizing: dict[str, Any], settings: dict[str, Any], sharding: dict[str, Any], steps: int = 3) -> str:
    """What is not bitwise the same, and the step as text."""
    torch.manual_seed(0)
    one = Model()
    model = mfsdp.fully_shard(copy.deepcopy(one), units=[Block], **sharding)
    reference, optimizer = (
        Reference(one, lr=0.02, **settings),
        fully_shard_optimizer(muon(model, lr=0.02, **settings), **optimizing),
    )
    pairs = dict(zip(one.parameters(), model.parameters(), strict=True))
    for step in range(steps):
        torch.manual_seed(100 + step)
        grads = {p: torch.randn(p.shape) for p in one.parameters()}
        for p, grad in grads.items():
            give(pairs[p], grad)
        reference.step(grads)
        optimizer.step()
        optimizer.zero_grad()
    names = {p: n for n, p in one.named_parameters()}
    wrong = []
    for p, weights, momentum in reference.values():
        mine = pairs[p]
        if not torch.equal(whole(mine), weights):
            wrong.append(f"{names[p]} by {(whole(mine) - weights).abs().max()}")
        if not torch.equal(whole(optimizer.state[mine]["momentum_buffer"]), momentum):
            wrong.append(f"momentum of {names[p]}")
    return "; ".join(wrong) or optimizer.describe().splitlines()[0]


def every_way() -> dict[str, str]:
    world = dist.get_world_size()
    found = {
        "plain": alike({}, {}, {}),
        "one unit per wave": alike({"max_staging": 1}, {}, {}),
        "no nesterov": alike({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}, {}),
        "host": alike({"offload": "state"}, {}, {}),
        **{f"strategy {s}": alike({}, {}, {"strategy": s}) for s in (0, 1, 2)},
    }
    if world == 4:
        for name, more in {
            "hsdp": {}, "hfsdp": {"outer_strategy": "optim"}, "hfsdp 1": {"outer_strategy": "optim", "strategy": 1},
        }.items():  # fmt: skip
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
            found[name] = alike({}, {}, {"mesh": mesh, **more})
    return found


def checked(answers: list[dict[str, str]]) -> None:
    for found in answers:
        assert all(text.startswith("; Muon: 30 matrices") for text in found.values()), found


@pytest.mark.dist
def test_bitwise_on_two_ranks(two_ranks):
    checked(two_ranks.run(every_way))


@pytest.mark.dist
def test_bitwise_on_three_ranks(three_ranks):
    checked(three_ranks.run(every_way))


@pytest.mark.dist
def test_bitwise_on_four_ranks(four_ranks):
    checked(four_ranks.run(every_way))


def test_bitwise_on_one_rank():
    assert alike({}, {}, {}).startswith("; Muon: 30 matrices")
