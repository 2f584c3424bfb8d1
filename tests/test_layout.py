"""The laws of a layout, on random shapes and on real ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfsdp.config.layout import ALIGN, Layout, plan
from tests.helpers.model_shapes import LAYERS, WORLDS


def faults(layout: Layout) -> list[str]:
    """Every law that the layout breaks."""
    out = []
    end = 0
    for s in layout.segments:
        if s.full_start != end or s.chunk % ALIGN or s.shard_start % ALIGN:
            out.append(f"segment {s} is not where it should be")
        end = s.full_start + layout.world * s.chunk
    if end != layout.full_numel:
        out.append("segments do not fill the buffer")
    if len({s.offset for s in layout.slots}) != len(layout.slots):
        out.append("two parameters start at the same place")
    taken = 0
    for i, slot in sorted(enumerate(layout.slots), key=lambda pair: (pair[1].offset, pair[1].numel)):
        if slot.offset % ALIGN:
            out.append(f"{slot.name} starts at {slot.offset}")
        if slot.offset < taken or slot.offset + slot.numel > layout.full_numel:
            out.append(f"{slot.name} overlaps or ends outside")
        taken = max(taken, slot.offset + slot.numel)
        covered = 0
        for rank in range(layout.world):
            at = layout.local(i, rank)
            if at.numel % slot.row or prod(at.shape) != at.numel:
                out.append(f"rank {rank} cuts a row of {slot.name}")
            if not 0 <= at.shard_offset <= layout.shard_numel - at.numel:
                out.append(f"rank {rank} holds {slot.name} outside of its shard")
            if at.numel and at.param_offset != covered:
                out.append(f"rank {rank} does not go on where the one before ended in {slot.name}")
            covered += at.numel
        if covered != slot.numel:
            out.append(f"{slot.name} is not covered")
    return out


shapes = st.lists(
    st.lists(st.one_of(st.integers(0, 40), st.sampled_from([64, 127, 1000])), max_size=4)
    .map(tuple)
    .filter(lambda s: prod(s) < 200_000),
    min_size=1,
    max_size=8,
)


@given(shapes, st.integers(1, 64))
@settings(deadline=None, max_examples=200)
def test_laws_hold_for_random_shapes(shapes, world):
    params = [(f"p{i}", s) for i, s in enumerate(shapes)]
    layout = plan(params, world)
    assert not faults(layout)
    assert layout == plan(params, world)
    assert [s.name for s in layout.slots] == [n for n, _ in params]


@given(shapes, st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_scatter_and_gather_is_the_identity(shapes, world):
    layout = plan([(f"p{i}", s) for i, s in enumerate(shapes)], world)
    full = list(range(layout.full_numel))
    shards = []
    for rank in range(world):
        shard = []
        for s in layout.segments:
            start = s.full_start + rank * s.chunk
            shard += full[start : start + s.chunk]
        shards.append(shard)
    for i, slot in enumerate(layout.slots):
        got: list[int] = []
        for rank, shard in enumerate(shards):
            at = layout.local(i, rank)
            got += shard[at.shard_offset : at.shard_offset + at.numel]
        assert got == full[slot.offset : slot.offset + slot.numel]


@given(st.lists(st.integers(1, 7), max_size=4).map(tuple), st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_boxes_tile_the_parameter_in_order(shape, world):
    layout = plan([("p", shape)], world, align=1)
    seen = []
    for rank in range(world):
        at = layout.local(0, rank)
        mine = []
        for offsets, sizes in layout.chunks(0, rank):
            for index in product(*(range(o, o + n) for o, n in zip(offsets, sizes, strict=True))):
                flat = 0
                for i, n in zip(index, shape, strict=True):
                    flat = flat * n + i
                mine.append(flat)
        assert mine == list(range(at.param_offset, at.param_offset + at.numel))
        seen += mine
    assert seen == list(range(prod(shape)))


def test_the_check_catches_broken_layouts():
    layout = plan([("a", (37, 24)), ("b", (24,))], 4)
    a, b = layout.slots
    assert not faults(layout)
    assert faults(replace(layout, slots=(a, replace(b, offset=b.offset - ALIGN))))
    assert faults(replace(layout, slots=(replace(a, offset=a.offset + 16), b)))
    assert faults(replace(layout, segments=(replace(layout.segments[0], chunk=layout.segments[0].chunk - 16),)))


def test_the_toy_of_the_listing():
    layout = plan([("weight", (1024, 1024)), ("bias", (1024,))], 8)
    assert (layout.full_numel, layout.pad, [s.offset for s in layout.slots]) == (1056768, 7168, [0, 1048576])


def test_text():
    assert plan([("weight", (5, 16)), ("bias", (20,))], 2).text() == (
        "                 rank 0  rank 1\n"
        "weight[5, 16]@0  0:4     4:5\n"
        "bias[20]@80      -       0:20\n"
        "segments 64 per rank, pad 28 of 128"
    )


@pytest.mark.parametrize(
    ("params", "world", "word"),
    [([("a", (1,))], 0, "at least 1"), ([("a", (-1,))], 2, "negative"), ([("a", (1,)), ("a", (2,))], 2, "twice")],
)
def test_bad_input(params, world, word):
    with pytest.raises(ValueError, match=word):
        plan(params, world)


@pytest.mark.slow
def test_many_parameters_are_planned_quickly():
    """A thousand experts with unlike rows: the search must not try every grouping of parameters."""
    params = [(f"e{i}.{k}", (64, 128 * (1 + i % 50) + k)) for i in range(500) for k in range(2)]
    assert not faults(plan(params, 3))


def table() -> list[tuple[str, list[tuple[float, int]]]]:
    """Padding in percent, and segments, of real layers at 8 to 1024 ranks."""
    out = []
    for name, params in LAYERS.items():
        layouts = [plan(params, world) for world in WORLDS]
        out.append((name, [(100 * x.pad / (x.full_numel - x.pad), len(x.segments)) for x in layouts]))
    return out


def test_padding_of_real_layers_is_at_most_one_percent():
    print("\npadding % (segments)".ljust(31), *(f"{w:>9}" for w in WORLDS))
    rows = table()
    for name, cells in rows:
        print(f"{name:<30}", *(f"{p:5.2f} ({n})" for p, n in cells))
    assert all(p <= 1.0 for _, cells in rows for p, _ in cells)
