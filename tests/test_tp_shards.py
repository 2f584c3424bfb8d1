"""Pieces of parameters that another parallelism has cut, cut again by layouts: integers only."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mfsdp.config.layout import plan
from mfsdp.dtensor.shard_spec import ShardSpec
from mfsdp.dtensor.tp_shards import TPShard, runs_of

NOBODY: Any = None


def pieces(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> list[TPShard]:
    """Every rank's, in the order of their coordinates."""
    places = product(*map(range, mesh))
    return [TPShard(NOBODY, placements, shape, runs_of(shape, mesh, place, placements)) for place in places]


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    placements: list[Placement] = []
    for ranks in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        factor = draw(st.integers(1, 3))
        kinds: list[Placement] = [Replicate(), Shard(dim), Shard(dim - len(shape))]
        if shape[dim] % (factor * ranks) == 0 and len(mesh) == 1:  # torch's own cuts only these
            kinds.append(_StridedShard(dim, split_factor=factor))
        placements.append(draw(st.sampled_from(kinds)))
    return shape, mesh, tuple(placements)


@given(cut(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_boxes_of_all_ranks_tile_the_whole(case, world):
    shape, mesh, placements = case
    every = pieces(shape, mesh, placements)
    whole = torch.arange(prod(shape)).view(shape)
    times = torch.zeros(shape, dtype=torch.int64)
    copies = prod(n for n, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate))
    for piece in every:
        layout = plan([("w", piece.local)], world)
        mine = piece.cut(whole).reshape(-1)
        for rank in range(world):
            sharding = ShardSpec(layout, 0, NOBODY, piece=piece)
            at = layout.local(0, rank)
            found = []
            for there, here, sizes in sharding.boxes(rank):
                place = tuple(slice(o, o + n) for o, n in zip(there, sizes, strict=True))
                times[place] += 1
                inside = tuple(slice(o, o + n) for o, n in zip(here, sizes, strict=True))
                assert torch.equal(whole[place], piece.cut(whole)[inside])
                found.append(whole[place].reshape(-1))
            held = mine[at.param_offset : at.param_offset + at.numel]
            assert torch.equal(torch.cat([*found, held[:0]]).sort().values, held.sort().values)
    assert bool((times == copies).all())


@given(cut())
@settings(max_examples=50, deadline=None)
def test_copies_have_the_same_boxes(case):
    shape, mesh, placements = case
    held: dict[tuple[int, ...], Any] = {}
    for place, piece in zip(product(*map(range, mesh)), pieces(shape, mesh, placements), strict=True):
        which = tuple(i for i, p in zip(place, placements, strict=True) if not isinstance(p, Replicate))
        assert held.setdefault(which, piece.runs) == piece.runs


def test_runs_are_what_torch_cuts():
    assert runs_of((7,), (4,), (1,), (Shard(0),)) == (((2, 2),),)
    assert runs_of((3,), (4,), (3,), (Shard(0),)) == ((),)
    assert runs_of((12, 5), (2,), (1,), (_StridedShard(0, split_factor=2),)) == (((3, 3), (9, 3)), ((0, 5),))
    assert runs_of((8, 6), (2, 2), (1, 0), (Shard(0), Shard(0))) == (((4, 2),), ((0, 6),))
    assert runs_of((), (2,), (0,), (Replicate(),)) == ()
