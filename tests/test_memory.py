"""Per rank memory, measured from live tensors: persistent state is sharded, nothing gathered outlives its use."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp
from examples.bench.bench import peak_of
from mfsdp.cost_model.memory_model import ledger as account
from mfsdp.runtime import static_buffers
from tests.helpers.models import GPT, Block
from tests.helpers.parity import compiled
from tests.helpers.ranks import collectives_told

pytestmark = pytest.mark.dist

WIDTH, LAYERS = 64, 2


def live() -> dict[int, int]:
    """Bytes of every storage that some tensor of this process holds, by address; without vacant static buffers."""
    gc.collect()
    found = {}
    free = {static.storage.data_ptr() for static in static_buffers._slots.values() if static.vacant()}
    for x in gc.get_objects():
        if issubclass(type(x), torch.Tensor) and hasattr(x, "untyped_storage") and x.device.type == "cpu":
            if type(x) not in (torch.Tensor, nn.Parameter):
                continue  # DTensors hold theirs as plain tensors
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in found.items() if address not in free}


def new_since(before: Iterable[int]) -> dict[int, int]:
    return {k: v for k, v in live().items() if k not in before and v}


def gathered(before: Iterable[int], sizes: set[int]) -> int:
    """How many buffers of these sizes stay. gloo's threads let go of a collective's tensors a moment after they have
    woken whoever waits for it: what is gone within a second was no leak.
    """
    deadline = time.monotonic() + 1
    while (found := sum(v in sizes for v in new_since(before).values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT(width=WIDTH, layers=LAYERS)


def ledger(lowering: str) -> dict[str, int]:
    """Bytes at each point of a second step, beyond those before the model was built."""
    empty = set(live())
    with torch.device("meta"):
        model = build()
    numel = sum(p.numel() for p in model.parameters())
    mfsdp.fully_shard(model, units=[Block], device="cpu")
    run = compiled(model, lowering)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(31, (2, 8))
    out: dict[str, int] = {"numel": numel}
    units = [u for m in model.modules() if (u := m.__dict__.get("_mfsdp_unit"))]
    fulls = {b.layout.full_numel * 4 for u in units for b in u.buffers}
    gathered(empty, {torch.get_rng_state().nbytes})  # rank 0's, which all have been given
    for step in range(2):
        persistent = set(live())
        out["sharded" if step == 0 else "before"] = sum(new_since(empty).values())
        loss = run(ids).float().square().mean()
        out["gathered after forward"] = gathered(persistent, fulls)
        loss.backward()
        del loss
        out["gathered after backward"] = gathered(persistent, fulls)
        out["gradients"] = sum(new_since(persistent).values())
        optimizer.step()
        out["after step"] = sum(new_since(empty).values())
        optimizer.zero_grad()
        out["gathered after step"] = gathered(persistent, fulls)
        out["after zero_grad"] = sum(new_since(empty).values())
    out["pad"] = sum(b.layout.pad for u in {id(u): u for u in units}.values() for b in u.buffers) * 4
    out["rows"] = sum(max(s.row for s in b.layout.slots) for u in units for b in u.buffers) * 4
    return out


@pytest.mark.parametrize(
    "lowering", ["eager", "none", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
)
def test_state_is_a_share_and_nothing_gathered_stays(two_ranks, lowering):
    for m in two_ranks.run(ledger, lowering, timeout=300):
        weights, small = 4 * m["numel"] / 2, 2048  # ids, losses, step counts
        share = weights + m["pad"] / 2
        assert abs(m["sharded"] - share) < small, m
        assert abs(m["gradients"] - share) < small or lowering != "none", m
        # Adam keeps two states of the weights' size, without the padding.
        assert m["after step"] < 4 * share + small and m["after step"] > 4 * weights - 4 * m["pad"] - small, m
        assert m["after zero_grad"] < 3 * share + small, m
        assert not m["gathered after forward"] and not m["gathered after backward"] and not m["gathered after step"], m


def kept(lowering: str) -> tuple[int, int]:
    model = mfsdp.fully_shard(build(), units=[Block], reshard_after_forward=False)
    run = compiled(model, lowering)
    sizes = {m._mfsdp_unit.buffers[0].layout.full_numel * 4 for m in model.modules() if isinstance(m, mfsdp.FSDPModule)}
    before = set(live())
    loss = run(torch.randint(31, (2, 8))).float().square().mean()
    after_forward = gathered(before, sizes)
    loss.backward()
    del loss
    return after_forward, gathered(before, sizes)


@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_kept_parameters_are_seen_by_the_same_count(two_ranks, lowering):
    """The measure itself: with reshard_after_forward=False it finds the gathered buffers, until backward is done."""
    for after_forward, after_backward in two_ranks.run(kept, lowering):
        assert after_forward == LAYERS + 1 and after_backward == 0


def count_collectives(lowering: str) -> dict[str, int]:
    model = mfsdp.fully_shard(build(), units=[Block])
    run = compiled(model, lowering)
    optimizer = torch.optim.AdamW(model.parameters())
    calls: Counter[str] = Counter()
    for _ in range(2):
        calls.clear()
        with collectives_told(lambda kind, group: calls.update([kind])):
            run(torch.randint(31, (2, 8))).float().square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(calls)


@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_one_collective_per_unit_none_per_parameter(two_ranks, lowering):
    units, backward = LAYERS + 1, LAYERS + 1
    for calls in two_ranks.run(count_collectives, lowering):
        assert calls["gather"] == units + backward, calls
        # Clipping takes one; the eager path asks in another, per unit, which parameters have a gradient anywhere.
        asked = units if lowering == "none" else 0
        assert calls["scatter"] == units and calls.get("all_reduce", 0) == 1 + asked, calls


@pytest.mark.parametrize(
    ("kind", "foreach"),
    [
        *product(["adamw", "adam", "adagrad", "rmsprop", "sgd", "momentum"], [False, True]),
        ("fused_adamw", True),
        ("fused_adam", True),
    ],
)
def test_what_an_optimizer_holds_during_its_step(kind, foreach):
    """On all tensors at once, as on CUDA, or on one after another, as on the CPU: by the allocator's events."""
    model = mfsdp.fully_shard(GPT(width=192, layers=2, tied=False), units=[Block])
    name = kind.removeprefix("fused_")
    make = {"adamw": "AdamW", "adam": "Adam", "adagrad": "Adagrad", "rmsprop": "RMSprop"}.get(name, "SGD")
    more: dict[str, Any] = {"fused": True} if name != kind else {"foreach": foreach}
    more |= {"momentum": 0.9} if kind == "momentum" else {}
    optimizer = getattr(torch.optim, make)(model.parameters(), **more)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    units = dict.fromkeys(m._mfsdp_unit for m in model.modules() if isinstance(m, mfsdp.FSDPModule))
    told = account([], [b for u in units for b in u.buffers], inputs=0, other=0, optimizer=kind, foreach=foreach)
    want = next((e.nbytes for e in told.entries if e.name == "temporaries"), 0)
    assert peak_of(optimizer.step) == pytest.approx(want, rel=0.01, abs=4096)
