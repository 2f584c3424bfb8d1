"""Static buffers that NCCL allocates and registers (option ``nccl_ub``), over doubles of its backend and of pools."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler.program_info import communicated, program_info
from mfsdp.config.options import Options
from mfsdp.runtime import devices, groups, static_buffers, user_buffers
from mfsdp.runtime.user_buffers import UserBuffers
from tests.helpers.models import MLP

GPU = torch.device("meta")
"""Stands for a GPU: its memory can be had here."""


@dataclass(frozen=True, eq=False)
class Pool:
    name: str


class Backend:
    """NCCL's, of one group."""

    def __init__(self, name: str, log: list[Any]):
        self.name, self.log, self.mem_allocator = name, log, "NCCL's"

    def register_mem_pool(self, pool: Any, symmetric: bool) -> None:
        self.log.append((pool.name, self.name, symmetric))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done, in order: pools (their numbers and allocators) are made and registered, ranks agree."""
    done: list[Any] = []
    pools: list[Any] = []

    def pool(slot: str, device: torch.device, allocator: Any) -> Any:
        if (device, slot, allocator) not in static_buffers._pools:
            pools.append(Pool(f"{len(pools)} {allocator and allocator(device)}"))
            static_buffers._pools[device, slot, allocator] = pools[-1]
        return nullcontext()

    monkeypatch.setattr(static_buffers, "_pool", pool)
    monkeypatch.setattr(static_buffers, "_pools", {})
    monkeypatch.setattr(static_buffers, "_slots", {})
    monkeypatch.setattr(devices, "current_stream", lambda device: None)
    monkeypatch.setattr(user_buffers, "_backend", lambda group, device: Backend(group, done))
    monkeypatch.setattr(groups, "process_group", lambda name: name)
    monkeypatch.setattr(groups, "default_group", lambda: "0")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: done.append(group))
    return done


def test_buffers_are_registered_once_with_each_group(log):
    """The communicator exists by then, and all ranks agree before; what others made before is made anew."""
    run: Any = SimpleNamespace(agree=lambda: log.append("agree"))
    rooms = {(GPU, "p0"): 400, (GPU, "g0"): 800, (GPU, "g1"): 800}
    static_buffers.reserve({(GPU, "p0"): 400, (GPU, "g1"): 800})
    first = UserBuffers({(GPU, "p0"): ("gather",), (GPU, "g0"): ("reduce", "all")}, symmetric=False)
    for _ in range(2):
        first.ready(run, rooms)
        static_buffers.reserve(rooms)
    assert log == [
        "agree", "gather", ("2 NCCL's", "gather", False),
        "agree", "reduce", ("3 NCCL's", "reduce", False),
        "agree", "all", ("3 NCCL's", "all", False),
    ]  # fmt: skip
    assert (GPU, "p0", None) not in static_buffers._pools, "the buffer from before is gone, and its pool"
    log.clear()
    UserBuffers({(GPU, "p0"): ("other", "gather")}).ready(run, rooms)
    assert log == ["agree", "other", ("2 NCCL's", "other", True)], "another model, over another group"
    log.clear()
    static_buffers.reserve({(GPU, "p0"): 1600, (GPU, "g2"): 8})  # of a model without the option
    first.ready(run, rooms)
    assert log == ["agree", "gather", ("4 NCCL's", "gather", False)], "it has grown"
    assert static_buffers.pool_of(GPU, "g2").name == "5 None"  # type: ignore[attr-defined]
    log.clear()
    static_buffers.reset()
    first.ready(run, rooms)
    assert not log, "pools stay, and are registered once"


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_programs_say_what_is_registered(strategy):
    """Gathered buffers with the group of gathers, gradient buffers with the group they are reduced over."""
    found: dict[str, set[str]] = {}
    for program in mfsdp.trace(MLP(), (torch.randn(2, 24),), units=[torch.nn.Linear], strategy=strategy):
        pipeline.run(program)
        assert not program_info(program, Options()).user_buffers.groups
        for (_, slot), over in communicated(program).items():
            found.setdefault(slot[0], set()).update(over)
    gather, reduce, *_ = program.units[0].spec.groups
    assert found == {"p": {gather}, "g": {reduce}} if strategy != "no_shard" else {"g": {reduce}}
    alone = mfsdp.trace(MLP(), (torch.randn(2, 24),), units=[torch.nn.Linear], world=1).forward
    pipeline.run(alone)
    assert not communicated(alone), "nothing is communicated"


def test_what_cannot_be_registered(monkeypatch):
    torch._dynamo.reset()
    with pytest.raises(Exception, match="nccl_ub=True: the model is on cpu"), mfsdp.fake_ranks(2):
        torch.compile(mfsdp.fully_shard(MLP()), backend="mfsdp", options={"nccl_ub": True})(torch.randn(2, 24))
    with pytest.raises(ValueError, match="leave pool=False out"):
        Options.parse({"nccl_ub": True, "pool": False})
    with mfsdp.fake_ranks(2), pytest.raises(RuntimeError, match="fake, which registers no buffers"):
        user_buffers.allocator(torch.device("cpu"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: True")
    with pytest.raises(RuntimeError, match="leave one of them out"):
        user_buffers.allocator(torch.device("cuda"))
