"""Models CUDA's caching allocator: how many bytes it reserves for a step, which is more than the live bytes.

The allocator rounds sizes and cuts blocks from segments; free blocks that are too small for a request fragment memory.
The rules are torch's (``c10/core/AllocatorConfig.h``, ``c10/cuda/CUDACachingAllocator.cpp``; as of 2.13, also in 2.11)
with default settings and one stream. ``expandable_segments``, with almost no fragmentation, is not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ..ir import ops
from ..ir.byte_costs import WORKSPACE, Move, nbytes, saved
from ..ir.program import Program
from .memory_model import Played, lines_and_moves

ROUNDED = 512
"""Block sizes are multiples of this, in bytes."""

SMALL, SMALL_SEGMENT = 2**20, 2**21
"""Requests up to this many bytes are small and come from a separate pool; bytes of its segments."""

MIDDLE, MIDDLE_SEGMENT = 10 * 2**20, 20 * 2**20
"""Requests below this many bytes share a segment, larger ones get their own; bytes of a shared segment."""

OWN = 2**21
"""Sizes of segments for one large request are multiples of this, in bytes."""


@dataclass(eq=False)
class _Block:
    """A contiguous part of a segment."""

    size: int
    address: int
    small: bool
    before: _Block | None = None
    behind: _Block | None = None
    free: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of free blocks: smallest first, then lowest address."""
        return self.size, self.address


@dataclass(eq=False)
class CachingAllocator:
    """The allocator's state. Numbers are bytes."""

    reserved: int = 0
    """Bytes of segments, none of which is returned to CUDA."""
    allocated: int = 0
    """Bytes of blocks in use."""
    most: int = 0
    """Maximum of `allocated` so far."""
    _taken: dict[Hashable, _Block] = field(default_factory=dict)
    _free: dict[bool, list[tuple[tuple[int, int], _Block]]] = field(default_factory=lambda: {True: [], False: []})

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Takes the smallest free block that is large enough, or cuts one from a new segment."""
        size = max(ROUNDED, _up(nbytes, ROUNDED))
        small = size <= SMALL
        free = self._free[small]
        found = bisect_left(free, size, key=lambda entry: entry[0][0])
        block = free.pop(found)[1] if found < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= ROUNDED if small else rest > SMALL:
            behind = _Block(rest, block.address + size, small, block, block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.size, block.behind = size, behind
            self._keep(behind)
        block.free = False
        self.allocated += block.size
        self.most = max(self.most, self.allocated)
        self._taken[key] = block

    def free(self, key: Hashable) -> None:
        """Frees a block and merges it with free neighbours. Ignores keys that are not allocated."""
        block = self._taken.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.free:
                free = self._free[block.small]
                free.pop(bisect_left(free, other.rank, key=lambda entry: entry[0]))
                first, second = (other, block) if other is block.before else (block, other)
                first.size, first.behind = first.size + second.size, second.behind
                if second.behind is not None:
                    second.behind.before = first
                block = first
        self._keep(block)

    def rename(self, key: Hashable, old: Hashable) -> None:
        """Moves a block from the key ``old`` to ``key``."""
        if old in self._taken:
            self._taken[key] = self._taken.pop(old)

    def _segment(self, size: int, small: bool) -> _Block:
        own = size >= MIDDLE
        length = SMALL_SEGMENT if small else _up(size, OWN) if own else MIDDLE_SEGMENT
        block = _Block(length, self.reserved, small)
        self.reserved += length
        return block

    def _keep(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.rank, block), key=lambda entry: entry[0])


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def replayed(
    lasting: Iterable[int],
    programs: Sequence[Program],
    temporaries: Sequence[int],
    fused: bool,
    steps: int = 2,
    *,
    first: bool = True,
    played: Played | None = None,
) -> CachingAllocator:
    """Returns an allocator after some steps.

    Args:
        lasting: bytes of each tensor that exists throughout.
        programs: the programs of a step, in order.
        temporaries: bytes of each temporary of the optimizer's step.
        fused: whether neighbouring kernels fuse.
        first: whether backward allocates the accumulators (`Ledger.first`).
        played: cache of the programs' lines, as for `ledger`.
    """
    out = CachingAllocator()
    for i, n in enumerate(lasting):
        out.allocate(i, n)
    played = {} if played is None else played
    known = [(program, lines_and_moves(program, fused, first, played)[1]) for program in programs]
    for _ in range(steps):
        there: dict[_Value, int] = {}
        for program, moves in known:
            there = _run(out, program, moves, there)
        gradients = [value for value in there if value[0].target is ops.accumulate]
        for value in there.keys() - set(gradients):
            out.free(value)
        for i, n in enumerate(temporaries):
            out.allocate(("temporary", i), n)
        for i in range(len(temporaries)):
            out.free(("temporary", i))
        for value in gradients:
            out.free(value)
    return out


_Value = tuple[Node, int]
"""A node and the index of one of its results."""


def _run(out: CachingAllocator, program: Program, moves: Sequence[Move], there: dict[_Value, int]) -> dict[_Value, int]:
    """Returns the bytes of live values after a program, given those before it. An input of the program takes over a
    live value of equal size, if there is one.
    """
    given = saved(program)[0]
    for node, n in given.items():
        held = (value for value, size in there.items() if size == n and value[0].target is not ops.accumulate)
        old = next(held, None)
        if old is None:
            out.allocate((node, 0), n)
        else:
            del there[old]
            out.rename((node, 0), old)
    there |= {(node, 0): n for node, n in given.items()}
    for node, n, part, place in moves:
        if place is not None:
            there[node, 0] = there.pop((place, 0))
            out.rename((node, 0), (place, 0))
        elif n > 0:
            values = [n] if part == WORKSPACE or node.target is ops.accumulate else _parts(node.meta["val"])
            for i, size in enumerate(values, WORKSPACE if part == WORKSPACE else 0):
                there[node, i] = size
                out.allocate((node, i), size)
        elif n < 0:
            gone = range(len(_parts(node.meta["val"]))) if part is None else (part,)
            for i in gone:
                there.pop((node, i), None)
                out.free((node, i))
    return there


def _parts(value: Any) -> list[int]:
    """Returns the bytes of each tensor of a value."""
    return [nbytes(v) for v in value] if isinstance(value, (list, tuple)) else [nbytes(value)]
