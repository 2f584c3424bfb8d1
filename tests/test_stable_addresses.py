"""With `keep_gradients` a steady step finds everything where the step before has left it, so that it could be replayed
(Note [Stable addresses]).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import mfsdp
from mfsdp.runtime import static_buffers
from tests.helpers.buffers import buffers_of
from tests.helpers.models import GPT, MLP, Block
from tests.helpers.parity import compiled


@pytest.fixture
def four() -> Iterator[None]:
    """One of four ranks."""
    static_buffers.reset()
    with mfsdp.fake_ranks(4, rank=1):
        yield
    static_buffers.reset()


SAMPLE = {("none", "no_shard"), ("eager", "optim_grads"), ("stitched", "optim_grads_params")}
EVERY = product(("none", "eager", "stitched", "whole"), ("optim_grads_params", "optim_grads", "no_shard"))


def marks(lowering: str, strategy: str) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.inductor] if lowering in ("stitched", "whole") else []
    return found if (lowering, strategy) in SAMPLE else [*found, pytest.mark.exhaustive]


@pytest.mark.slow
@pytest.mark.parametrize(("lowering", "strategy"), [pytest.param(*case, marks=marks(*case)) for case in EVERY])
def test_addresses_and_values_stay_over_twenty_steps(four, lowering, strategy):
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(tied=False, width=64, layers=1), units=[Block], strategy=strategy)
    mfsdp.keep_gradients(model)
    run, ids = compiled(model, lowering), torch.randint(31, (4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    seen = []
    static_buffers.misses.clear()
    for _ in range(22):
        loss = run(ids).float().square().mean()
        loss.backward()
        optimizer.step()
        grads = [p.grad.to_local() for p in model.parameters()]
        flats = [t for b in buffers_of(model) for t in (b.weights.main, b.weights.source, b.gradients.flat)]
        seen.append((
            [t.data_ptr() for t in (*grads, *flats)], [s.storage.data_ptr() for s in static_buffers._slots.values()],
            loss.item(), [g.double().sum().item() for g in grads],
        ))  # fmt: skip
        del loss, grads, flats
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert all(step == seen[2] for step in seen[3:]), "but for the first two, which make what stays"
    assert not static_buffers.misses and any(seen[2][3])


@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_a_gradient_that_somebody_keeps_is_his(lowering):
    """As with tensors of torch, ``zero_grad`` does not take it away, and the next backward does not write to it."""
    model = mfsdp.fully_shard(MLP(), units=["up"])
    mfsdp.keep_gradients(model)
    run = compiled(model, lowering)
    run(torch.ones(2, 24)).sum().backward()
    mine = model.up.weight.grad
    before = mine.to_local().clone()
    model.zero_grad()
    run(torch.full((2, 24), 3.0)).sum().backward()
    assert torch.equal(mine.to_local(), before) and not torch.equal(model.up.weight.grad.to_local(), before)
    del mine
    address = model.up.weight.grad.to_local().data_ptr()
    for _ in range(2):
        model.zero_grad()
        model.up.weight.grad = torch.ones_like(model.up.weight)
        assert model.up.weight.grad.to_local().data_ptr() == address and model.up.bias.grad is None
        model.zero_grad()
        run(torch.ones(2, 24)).sum().backward()
        assert model.up.weight.grad.to_local().data_ptr() == address
        assert torch.equal(model.up.weight.grad.to_local(), before), "nothing is left of what was there"
    model.zero_grad()
    (buffer,) = {b for b in buffers_of(model) if b.unit.fqn == "up"}
    kept = StorageWeakRef(buffer.gradients.accumulator.memory.spare.untyped_storage())
    mfsdp.keep_gradients(model, False)
    assert kept.expired(), "the memory is given back"


@pytest.mark.parametrize("hook", ["post", "kept"])
def test_hooks_and_uses_outside_of_forward(hook):
    """Both at once: hooks see the sum, and the accumulator keeps its memory."""
    model = mfsdp.fully_shard(MLP(), units=["up"])
    mfsdp.keep_gradients(model)
    weight, seen = model.up.weight, []
    weight.register_hook(seen.append) if hook == "kept" else weight.register_post_accumulate_grad_hook(seen.append)
    places = set()
    for _ in range(4):
        loss = compiled(model, "eager")(torch.ones(2, 24)).sum() + (weight.full_tensor() ** 2).sum()
        loss.backward()
        places.add(weight.grad.to_local().data_ptr())
        seen.clear()
        model.zero_grad()
    assert len(places) == 1


def test_what_is_dropped_inside_of_a_backward_goes():
    """An optimizer that steps in hooks does it to save that memory."""
    model = mfsdp.fully_shard(MLP(), units=["up"])
    mfsdp.keep_gradients(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for lowering in ("none", "eager"):
        compiled(model, lowering)(torch.ones(2, 24)).sum().backward()
        assert all(b.gradients.flat is None and b.gradients.accumulator.memory.spare is None for b in buffers_of(model))
