"""Owners, waves and routes of whole matrices, without ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mfsdp.config import layout
from mfsdp.optim import owners
from mfsdp.optim.muon import Muon, orthogonal
from mfsdp.optim.owners import Matrix, Plan, Ring, describe, held_rows, plan

Shapes = list[tuple[int, ...]]

TINY: Shapes = [(37, 24), (24, 37), (1, 24), (2, 7), (3, 10, 16)]


def llama(d: int, kv: int, f: int) -> Shapes:
    return [(d, d), (d, d), (kv, d), (kv, d), (f, d), (f, d), (d, f)]


def units_of(shapes: Shapes, count: int, world: int, me: int = 0, copies: bool = False) -> list[list[Matrix]]:
    """Equal units, each of one buffer over all ranks."""
    there = layout.plan([(f"w{i}", shape) for i, shape in enumerate(shapes)], 1 if copies else world)
    ring = Ring("exchange", "gather", me, world, copies)
    out: list[list[Matrix]] = []
    for u in range(count):
        out.append([])
        for i, shape in enumerate(shapes):
            for e, (row, m, n) in enumerate(Muon().blocks(f"w{i}", shape, {})):
                held = tuple(held_rows(there, i, row * n, m, n))
                held = tuple((place, held[0][1]) for place in range(world)) if copies else held
                out[-1].append(Matrix(f"w{i}.{e}", u, i, 0, m, n, ring, held))
    return out


def staged(units: list[list[Matrix]], bound: int) -> Plan:
    return plan(units, 2, bound)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("copies", [False, True])
def test_all_ranks_plan_the_same_and_every_element_arrives_once(world, copies):
    """Runs the exchanges of all ranks: what each sends is what the other expects, there and back."""
    plans = [staged(units_of(TINY, 3, world, me, copies), 1) for me in range(world)]
    assert len({describe(p, "Muon", "abc") for p in plans}) == 1
    for k in range(len(plans[0].waves)):
        waves = [p.waves[k] for p in plans]
        routes = [w.routes(w.rings[0]) for w in waves]
        for way in range(2):
            for a in range(world):
                for b in range(world):
                    assert routes[a][way].splits[b] == routes[b][way].received[a]
        for me, (wave, (there, back)) in enumerate(zip(waves, routes, strict=True)):
            owned = [m for m in wave.matrices if wave.owner[m] == me]
            for m in owned:
                covered = torch.zeros(m.rows, m.columns)
                for other, box in there.receives:
                    if other is m:
                        covered[box.row : box.row + box.rows, box.column : box.column + box.columns] += 1
                assert (covered == 1).all()
            assert sum(box.numel for _, box in back.receives) == sum(
                box.numel for m in wave.matrices for place, box in m.held if place == me
            )
        sent = [sum(n for b, n in enumerate(there.splits) if b != a) for a, (there, _) in enumerate(routes)]
        back = [sum(n for b, n in enumerate(back.splits) if b != a) for a, (_, back) in enumerate(routes)]
        sizes = waves[0].sizes[waves[0].rings[0]]
        assert sent == [load.sent for load in sizes] and back == [load.returned for load in sizes]


def test_bytes_are_below_those_of_owners_without_rows():
    for world in (2, 4, 8, 64):
        units = units_of(llama(512, 128, 1024), 8, world)
        numel = sum(m.numel for unit in units for m in unit)
        (sent,) = [p.sent(ring) for p in [staged(units, 1 << 40)] for ring in p.loads]
        assert sum(sent) / world <= 4 * numel / world * (world - 1) / world


@pytest.mark.parametrize(("world", "alone"), [(8, 1.2), (64, 8.5), (256, 35)])
def test_waves_balance_where_single_units_cannot(world, alone):
    """Llama-3-8B: a unit's seven matrices keep at most seven owners busy."""
    units = units_of(llama(4096, 1024, 14336), 32, world)
    best = -(-32 * 7 // world) * max(m.cost for m in units[0]) * world / sum(m.cost for unit in units for m in unit)
    found = staged(units, 1 << 30)
    assert found.staging <= 1 << 30 and found.critical <= max(1.15, best)
    assert len(found.waves) >= 2 and (len(found.waves) <= 4 or world == 8)
    assert math.isclose(owners._dealt(units, 32, 2).critical, alone, rel_tol=0.1)


def test_less_staging_memory_makes_more_waves_down_to_a_matrix():
    units = units_of(llama(4096, 1024, 14336), 32, 8)
    plans = [staged(units, bound) for bound in (1 << 40, 1 << 31, 1 << 30, 1 << 29)]
    assert all(a.staging > b.staging and len(a.waves) < len(b.waves) for a, b in itertools.pairwise(plans))
    assert all(p.staging <= bound for p, bound in zip(plans[1:], (1 << 31, 1 << 30, 1 << 29), strict=True))
    none, least = staged(units, 1), owners._dealt(units, 32, 2)
    assert none.staging <= 1.5 * least.staging and none.critical <= least.critical


def test_the_listing_of_a_step(golden):
    golden("muon.two_units", describe(staged(units_of(TINY, 2, 2), 1 << 30), "Muon", ["layers.0", "layers.1"]) + "\n")
    golden("muon.one_wave", describe(staged(units_of([(8, 4), (4, 4)], 1, 4), 1), "Muon", ["(root)"]) + "\n")


@pytest.mark.parametrize("shape", [(37, 24), (1, 24), (2, 7), (64, 200), (128, 128)])
@pytest.mark.parametrize("how", [None, "match_rms_adamw"])
def test_a_batch_is_torchs_step_one_by_one(shape, how):
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(3)]
    before = [p.detach().clone() for p in params]
    optimizer = torch.optim.Muon(params, lr=0.3, momentum=0.0, weight_decay=0.0, adjust_lr_fn=how)
    for p in params:
        p.grad = torch.randn(shape)
    optimizer.step()
    group = optimizer.param_groups[0]
    stack = torch.stack([p.grad.bfloat16() for p in params])
    made = orthogonal(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
    for p, was, update in zip(params, before, made, strict=True):
        near = was.clone()
        Muon().add({**group, "lr": torch.tensor([0.3])}, near, update, *shape)
        Muon().add(group, was, update, *shape)
        assert torch.equal(p, was) and torch.allclose(near, was, rtol=0, atol=1e-6)


def test_what_is_no_matrix():
    recipe = Muon()
    for shape in ((3,), (2, 3, 4, 5)):
        with pytest.raises(ValueError, match="matrices .* w is"):
            recipe.blocks("w", shape, {})
    for splits in ([4, 4], [12, -4], [4.0, 4.0], []):
        with pytest.raises(ValueError, match=r"split_sizes=.* does not divide w"):
            recipe.blocks("w", (9, 4), {"split_sizes": splits})
    assert recipe.blocks("w", (2, 9, 4), {"split_sizes": (4, 5)}) == [(0, 4, 4), (4, 5, 4), (9, 4, 4), (13, 5, 4)]
    assert recipe.blocks("w", (0, 4), {}) == recipe.blocks("w", (4, 0), {}) == []
