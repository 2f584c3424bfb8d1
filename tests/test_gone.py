"""Memory of a model that is gone is gone: parameters, casts, accumulators, state, static buffers, what is under way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp
from mfsdp.runtime import inflight, static_buffers, step_prefetch
from mfsdp.sharding.module import buffers_of
from tests.helpers.models import GPT, Block
from tests.helpers.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """A process without a group where no other test has left a model, whose static buffers would stay."""
    process = Ranks(1, backend="", start="forkserver")
    yield process
    process.stop()


def live() -> dict[int, int]:
    """Bytes by storage, of all tensors that Python knows."""
    torch._dynamo.reset()
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu"]
    return {s._cdata: s.nbytes() for s in storages if s.nbytes()}


def trained(how: str) -> list[weakref.ref[Any]]:
    """Trains a model and drops it; its buffers and what lies in them."""
    torch.manual_seed(0)
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    strategy = 1 if how == "lasts" else 3
    model = mfsdp.fully_shard(GPT(tied=False, width=32, layers=2), units=[Block], mp_policy=policy, strategy=strategy)
    options = {"lowering": "eager", "keep_cast": how == "kept casts"}
    run = torch.compile(model, backend="mfsdp", dynamic=False, options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    if how in ("flat", "streamed"):
        mfsdp.fully_shard_optimizer(optimizer, offload="state" if how == "streamed" else False)
    for _ in range(3):
        run(torch.randint(31, (2, 8))).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert bool(static_buffers.sizes()) is dist.is_initialized(), "over one rank buckets become accumulators"
    buffers = buffers_of(model, True)
    there = [t.untyped_storage() for b in buffers for t in (b.weights.main, b.weights.source)]
    return [weakref.ref(each) for each in (*buffers, *there, *(s.storage for s in static_buffers._slots.values()))]


def gone(world: int, how: str) -> None:
    with mfsdp.fake_ranks(world, rank=world - 1) if world > 1 else nullcontext():
        for _ in range(2):  # the first time fills caches of torch's
            before = live()
            left = trained(how)
            live()
            step_prefetch.complete([])  # what was launched for a forward that does not come: as the next program does
        after = live()
        assert not any(each() is not None for each in left)
        assert sum(n for key, n in after.items() if key not in before) == 0
        assert not static_buffers.sizes() and not step_prefetch._under_way and not inflight._unfinished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "how"),
    [
        *((4, how) for how in ("flat", "streamed", "lasts")),
        *(pytest.param(4, how, marks=pytest.mark.exhaustive) for how in ("plain", "kept casts")),
        *(
            pytest.param(1, how, marks=pytest.mark.exhaustive)
            for how in ("plain", "flat", "streamed", "kept casts", "lasts")
        ),
    ],
)
def test_a_model_that_is_gone_leaves_nothing(alone, world, how):
    alone.run(gone, world, how)


def another() -> None:
    with mfsdp.fake_ranks(4):
        other = mfsdp.fully_shard(torch.nn.Linear(4, 4))
        trained("plain")
        live()
        assert static_buffers.sizes()
        del other
        live()
        assert not static_buffers.sizes()


@pytest.mark.slow
def test_static_buffers_of_a_model_stay_while_there_is_another(alone):
    alone.run(another)


class Pool:
    """A pool of a GPU's: what is not back when it goes stays reserved."""


def test_a_pool_goes_behind_its_static_buffer():
    """One that grows: on a GPU its memory stayed reserved otherwise."""
    static = static_buffers._make(CPU, "t9", 64)
    storage, seen = weakref.ref(static.storage), list[bool]()
    pool = static_buffers._pools[CPU, "t9", None] = Pool()  # type: ignore[assignment]
    weakref.finalize(pool, lambda: seen.append(storage() is None))
    del static, pool
    static_buffers._make(CPU, "t9", 128)
    assert seen == [True]
    static_buffers.reset()
