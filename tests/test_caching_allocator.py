"""CUDA's caching allocator, played: its rules by hand, what holds whatever happens, and a step."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mfsdp
from mfsdp import pipeline
from mfsdp.cost_model import fusion
from mfsdp.cost_model.caching_allocator import CachingAllocator, replayed
from mfsdp.ir import ops
from mfsdp.ir.byte_costs import Move, lines, peak, size
from tests.helpers.explained import PLAIN, toy
from tests.helpers.models import GPT, Block

MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "count", "reserved"),
    [
        (512, 1, 2 * MIB),
        (MIB, 2, 2 * MIB),
        (MIB, 3, 4 * MIB),
        (MIB + 512, 1, 20 * MIB),
        (10 * MIB - 512, 2, 20 * MIB),
        (10 * MIB - 512, 3, 40 * MIB),
        (10 * MIB + 512, 3, 36 * MIB),
    ],
)
def test_segments(nbytes, count, reserved):
    """Sizes of segments as torch's own test of its statistics has them
    (``test_graph_memory_stats_and_use_result_after_destroy_graph``).
    """
    memory = CachingAllocator()
    for i in range(count):
        memory.allocate(i, nbytes)
    assert memory.reserved == reserved and memory.most >= count * nbytes


def test_holes_stay_holes_and_neighbours_become_one():
    memory = CachingAllocator()
    for i, n in enumerate((12, 12, 12)):  # a segment each
        memory.allocate(i, n * MIB)
    for i in (0, 1):
        memory.free(i)
    memory.allocate("both", 24 * MIB)
    assert memory.reserved == 60 * MIB, "two segments are no hole of their sum"
    memory.allocate("some", 11 * MIB)
    assert (memory.reserved, memory.allocated) == (60 * MIB, (12 + 24 + 12) * MIB), "a rest of 1 MiB is not split off"
    memory = CachingAllocator()
    for i in range(4):
        memory.allocate(i, 5 * MIB)  # all of one segment
    for i in (1, 3):
        memory.free(i)
    memory.allocate("more", 6 * MIB)
    assert memory.reserved == 40 * MIB, "two holes of 5 are not one of 6"
    memory.free(2)
    memory.allocate("again", 29 * MIB // 2)
    assert (memory.reserved, memory.allocated) == (40 * MIB, 26 * MIB), "three are one of 15"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40 * MIB)), max_size=60))
def test_whatever_happens(events):
    memory, there = CachingAllocator(), dict[int, int]()
    for key, n in events:
        if key in there:
            del there[key]
            memory.free(key)
        else:
            there[key] = n
            memory.allocate(key, n)
        assert sum(there.values()) <= memory.allocated <= memory.reserved
    for key in there:
        memory.free(key)
    free = [block for entries in memory._free.values() for _, block in entries]
    assert memory.allocated == 0 and sum(block.size for block in free) == memory.reserved
    assert all(block.before is None and block.behind is None for block in free), "segments are whole again"


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_what_comes_and_goes_is_what_lines_say(fused):
    model = GPT(layers=3, width=32)
    for program in mfsdp.trace(model, (torch.zeros(2, 8, dtype=torch.long),), world=2, units=[Block]):
        pipeline.run(program, checked=False, listings=False)
        moves: list[Move] = []
        rows = lines(program, fusion.fused(program) if fused else (), moves)
        live = list(accumulate((m.nbytes for m in moves), initial=sum(program.slots.values())))
        begun = rows[0].live - rows[0].delta - live[0]
        assert begun + max(live) == peak(rows) and begun + live[-1] == rows[-1].live
        assert any(m.place for m in moves if m.node.target is not ops.accumulate) is fused


def test_a_step_takes_its_peak_and_little_more():
    """Values that forward saves are there when backward begins, whichever program names them."""
    report = toy(hardware="h100", world=2, suggest=False)
    account = report.ledger
    assert sum(account.tensors) == account.lasting
    assert account.peak <= account.blocks < 1.02 * account.peak
    assert account.blocks <= account.reserved < account.peak + 64 * MIB and account.reserved % (2 * MIB) == 0
    assert account.taken == account.reserved and f"{size(account.taken)}   reserved by CUDA's" in str(report)
    assert not toy(hardware=PLAIN, suggest=False).ledger.reserved, "a CPU has no such allocator"


def test_temporaries_find_holes():
    assert replayed([12 * MIB], [], [3 * MIB, 3 * MIB], False).reserved == (12 + 20) * MIB
