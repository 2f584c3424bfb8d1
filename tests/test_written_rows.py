"""Persistent unsharded parameters are gathered again after any write to main weights (Note [Unseen writes])."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.buffers.weights import Weights
from mfsdp.runtime import execution
from tests.helpers.parity import whole
from tests.helpers.ranks import collectives_told
from tests.helpers.writes import COUNTED, PAST


class Both:
    """A sharded model, trained in compiled or plain code, and the unsharded one."""

    def __init__(self, compiled: bool, **sharding: Any):
        torch.manual_seed(0)
        self.reference = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.Linear(5, 1))
        self.model = mfsdp.fully_shard(copy.deepcopy(self.reference).double(), units=[nn.Linear], **sharding)
        self.reference.double()
        self.run = torch.compile(self.model, backend="mfsdp", options={"lowering": "eager"}) if compiled else self.model
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (self.model, self.reference)]
        self.optimizers[0] = mfsdp.fully_shard_optimizer(self.optimizers[0])
        self.first = {name: whole(value) for name, value in self.model.state_dict().items()}
        self.compared("at first")

    def compared(self, name: str) -> None:
        """Evaluation, a step and evaluation give what the unsharded model with the same weights gives."""
        self.reference.load_state_dict({k: whole(v) for k, v in self.model.state_dict().items()})
        rank, world = dist.get_rank(), dist.get_world_size()
        x = torch.linspace(-1, 1, 12 * world).double().view(world, 2, 6)
        with torch.no_grad():
            torch.testing.assert_close(self.run(x[rank]), self.reference(x[rank]), msg=lambda m: f"{name}: {m}")
        self.run(x[rank]).square().mean().backward()
        self.reference(x).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(self.run(x[rank]), self.reference(x[rank]), msg=lambda m: f"step, {name}: {m}")

    def begin(self) -> None:
        """Weights as at first, and gathered."""
        self.model.load_state_dict(self.first)
        with torch.no_grad():
            self.run(torch.ones(2, 6).double())


def written(compiled: bool, two_axes: bool, **sharding: Any) -> Counter[str]:
    """Every write by all ranks and by the last one alone; collectives of an evaluation behind a look at rows."""
    if two_axes:
        sharding["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    both = Both(compiled, **sharding)
    for write in (*COUNTED, *PAST):
        both.begin()
        write(both.model)
        both.compared(write.__name__)
    for write in PAST:
        both.begin()
        if dist.get_rank() == dist.get_world_size() - 1:
            write(both.model)
        both.compared(f"{write.__name__} by one rank")
    if dist.get_rank() == 0:
        assert all(p.to_local().sum() is not None for p in both.model.parameters())
    counts: Counter[str] = Counter()
    with collectives_told(lambda kind, group: counts.update([kind])), torch.no_grad():
        both.run(torch.ones(2, 6).double())
    return counts


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [(2, True), *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in ((1, False), (1, True), (2, False)))],
)
def test_whatever_writes_is_seen(two_ranks, strategy, compiled):
    for counts in two_ranks.run(written, compiled, False, strategy=strategy):
        assert not counts["gather"], "who only reads rows makes nobody gather"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [(3, False), *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in ((2, True), (2, False), (3, True)))],
)
def test_on_two_axes(four_ranks, strategy, compiled):
    """A rank that has written is alone on both."""
    four_ranks.run(written, compiled, True, strategy=strategy, outer_strategy="optim")


def mutated(where: str) -> str:
    """What is wrong where ``Weights.unseen`` finds nothing, or nobody hears what it has found."""
    kind, name = (Weights, "unseen") if where == "look" else (execution.Execution, "written")
    own = getattr(kind, name)
    setattr(kind, name, (lambda self: False) if where == "look" else (lambda self, over, here: here))
    try:
        both = Both(where == "look", strategy=2)
        if where == "look" or dist.get_rank() == 0:
            PAST[0](both.model)
        both.compared("")
    except (AssertionError, RuntimeError) as error:
        return str(error)
    finally:
        setattr(kind, name, own)
    return ""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("where", ["look", "word"])
def test_mutations(two_fresh_ranks, where):
    """Each part of it taken away is found by the test above."""
    answers = two_fresh_ranks.answers(mutated, where, timeout=10)
    assert any(answer is None or answer[1] for answer in answers)
