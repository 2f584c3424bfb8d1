"""Gradient buffers exist from a backward to ``zero_grad()``, not longer (Note [Accumulator memory])."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import mfsdp
from mfsdp.buffers.accumulator import AccumulatorMemory, scaled
from mfsdp.runtime import static_buffers
from tests.helpers.buffers import buffers_of
from tests.helpers.models import MLP
from tests.helpers.parity import compiled

LOWERINGS = ["none", "eager", pytest.param("whole", marks=pytest.mark.inductor)]


def sharded(**sharding: Any) -> nn.Module:
    torch.manual_seed(0)
    return mfsdp.fully_shard(MLP(), units=["up"], **sharding)


def refs(model: nn.Module) -> list[StorageWeakRef]:
    return [StorageWeakRef(b.gradients.flat.untyped_storage()) for b in buffers_of(model) if b.trainable]


def expired(kept: list[StorageWeakRef]) -> bool:
    gc.collect()
    return all(ref.expired() for ref in kept)


ZERO: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "module": lambda model, optimizer: model.zero_grad(),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "one by one": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "through", "flat"),
    [
        ("none", "module", False),
        ("none", "optimizer", True),
        ("eager", "one by one", False),
        ("eager", "module", True),
        pytest.param("whole", "optimizer", False, marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
        pytest.param("whole", "one by one", True, marks=pytest.mark.inductor),
    ],
)
def test_nothing_of_gradients_is_alive_behind_zero_grad(lowering, through, flat):
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    if flat:
        mfsdp.fully_shard_optimizer(optimizer)
    run = compiled(model, lowering)
    for _ in range(2):
        run(torch.ones(2, 24)).sum().backward()
        kept = refs(model)
        assert not expired(kept)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ZERO[through](model, optimizer)
        assert expired(kept) and all(p.grad is None for p in model.parameters())
        assert all(b.gradients.flat is None and b.gradients.accumulator.memory.spare is None for b in buffers_of(model))


@pytest.fixture
def poisoned(monkeypatch):
    """New accumulators hold NaN."""
    empty = AccumulatorMemory.new
    monkeypatch.setattr(AccumulatorMemory, "new", lambda self: empty(self).fill_(torch.nan))


@pytest.mark.parametrize("policy", ["same", "wide", "narrow"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_first_gradient_is_stored_and_others_are_added(lowering, policy, poisoned):
    """Over three microbatches, twice; whatever the dtype in which gradients come."""
    dtypes = {
        "same": {},
        "wide": {"compute_dtype": torch.bfloat16},
        "narrow": {"grad_comm_dtype": torch.bfloat16, "main_grads_dtype": torch.float32},
    }[policy]
    model, plain = sharded(mp_policy=mfsdp.MixedPrecisionPolicy(**dtypes)), sharded()
    run = compiled(model, lowering)
    one, three = [], []
    for _ in range(2):
        for number, seen in ((1, one), (3, three)):
            for _ in range(number):
                run(torch.ones(2, 24)).sum().backward()
            seen.append([p.grad.to_local().clone() for p in model.parameters()])
            model.zero_grad()
    for a, b in zip(one[0], three[0], strict=True):
        assert torch.equal(a + a + a, b) and a.abs().sum()
    for first, second in ((one[0], one[1]), (three[0], three[1])):
        assert all(map(torch.equal, first, second))
    plain(torch.ones(2, 24)).sum().backward()
    for p, q in zip(plain.parameters(), one[0], strict=True):
        torch.testing.assert_close(p.grad.to_local(), q, rtol=0 if policy == "same" else 0.03, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_no_sync_and_hooks(lowering, poisoned):
    model = sharded()
    run = compiled(model, lowering)
    run(torch.ones(2, 24)).sum().backward()
    whole = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    seen = []
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append(grad.to_local().isfinite().all().item()))
    for _ in range(2):
        with mfsdp.no_sync(model):
            run(torch.ones(2, 24)).sum().backward()
        run(torch.ones(2, 24)).sum().backward()
        for p, q in zip(model.parameters(), whole, strict=True):
            torch.testing.assert_close(p.grad.to_local(), 2 * q)
        kept = refs(model)
        model.zero_grad()
        assert expired(kept)
    assert seen and all(seen)


@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_a_hook_keeps_what_it_is_given(lowering):
    """What it was given is not what later backwards add to."""
    model, given = sharded(), []
    model.up.weight.register_hook(given.append)
    run = compiled(model, lowering)
    for _ in range(3):
        run(torch.ones(2, 24)).sum().backward()
    assert all(torch.equal(given[0].to_local(), g.to_local()) for g in given)
    torch.testing.assert_close(model.up.weight.grad.to_local(), 3 * given[0].to_local())


@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_zeros_and_gradients_that_somebody_keeps(lowering):
    model = sharded()
    run = compiled(model, lowering)
    run(torch.ones(2, 24)).sum().backward()
    mine = model.up.weight.grad
    before, kept = mine.to_local().clone(), refs(model)
    model.zero_grad(set_to_none=False)
    assert model.up.weight.grad is mine and not mine.to_local().any() and not any(r.expired() for r in kept)
    run(torch.ones(2, 24)).sum().backward()
    assert torch.equal(mine.to_local(), before), "added to zeros, where they were"
    model.zero_grad()
    run(torch.full((2, 24), 3.0)).sum().backward()
    assert torch.equal(mine.to_local(), before) and not torch.equal(model.up.weight.grad.to_local(), before)
    del mine
    assert expired(kept)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_a_unit_that_may_be_unused(lowering):
    model = sharded(may_be_unused=["up"]) if lowering == "none" else sharded()
    run = compiled(model, lowering)
    for _ in range(2):
        run(torch.ones(2, 24)).sum().backward()
        kept = refs(model)
        model.zero_grad()
        assert expired(kept)


@pytest.mark.slow
def test_an_optimizer_in_backward():
    model, kept = sharded(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (kept.extend(refs_of(p)), setattr(p, "grad", None)))
    for lowering in ("none", "eager"):
        compiled(model, lowering)(torch.ones(2, 24)).sum().backward()
        assert kept and expired(kept) and all(b.gradients.flat is None for b in buffers_of(model))


def refs_of(p: Any) -> list[StorageWeakRef]:
    return [StorageWeakRef(p._mfsdp_owner.gradients.flat.untyped_storage())]


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("world", [1, 4])
def test_what_arrives_becomes_the_accumulator(lowering, world, monkeypatch):
    """No accumulator is allocated for the first gradient of a step, and none is copied or multiplied by one."""
    made, multiplied = [], []
    monkeypatch.setattr(AccumulatorMemory, "new", lambda self: made.append(self))
    mul_ = torch.Tensor.mul_
    monkeypatch.setattr(torch.Tensor, "mul_", lambda x, scale: (multiplied.append(scale), mul_(x, scale))[1])
    static_buffers.reset()
    with mfsdp.fake_ranks(world):
        model = sharded()
        run = compiled(model, lowering)
        for _ in range(2):
            run(torch.ones(2, 24)).sum().backward()
            model.zero_grad()
    static_buffers.reset()
    assert not made and 1.0 not in multiplied
    assert multiplied.count(1 / world) == (0 if world == 1 else 2 * len(buffers_of(model)))


def test_what_others_have_is_not_taken():
    """A view, a part of something, another dtype, a static buffer: those are copied."""
    model = sharded()
    (buffer,) = {b for b in buffers_of(model) if b.unit.fqn == "up"}
    mine, numel = buffer.gradients.accumulator.memory, buffer.layout.shard_numel
    assert mine._may_become(torch.ones(numel))
    seen = torch.ones(numel)
    view = seen.view(-1)
    assert not mine._may_become(seen) and view is not None
    assert not mine._may_become(torch.ones(numel + 1)[:numel])
    assert not mine._may_become(torch.ones(numel, dtype=torch.bfloat16))
    assert not mine._may_become(static_buffers.room("g0", numel, torch.float32, torch.device("cpu")))
    with torch.inference_mode():
        assert not mine._may_become(torch.ones(numel))
    static_buffers.reset()


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaling_rounds_once(dtype, into):
    torch.manual_seed(0)
    x = torch.randn(1000).to(dtype)
    for scale in (1.0, 0.125, 1 / 3):
        want = (x.float() * scale).to(into)
        for fused in (True, False, None):
            assert torch.equal(scaled(torch.full((1000,), torch.nan, dtype=into), x, scale, fused=fused), want)
