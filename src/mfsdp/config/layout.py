"""Computes where each parameter lies in its unit's flat buffer, and each rank's shard of it. Integers only.

    full buffer (gathered), world 2, one segment          rank 0's shard      rank 1's shard
    | weight rows 0-3 | weight rows 4-5, bias, pad |  =   | weight rows 0-3 | + | weight rows 4-5, bias, pad |

The full buffer is a sequence of segments with one equal chunk per rank; a rank's shard is its chunk of every segment,
in order. Parameters are contiguous in the full buffer, so a gathered parameter is a view. No row of a parameter is
split (invariant 7).

Note [Segments]
A boundary between ranks must fall between rows of every parameter that it meets, so a segment's chunk is a multiple of
every row size in it. Where row sizes differ (an MLA layer has five), their least common multiple would add 50% of
padding. So different sizes get separate segments, launched together: as few as keep padding within 1%.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import lcm, prod

ALIGN = 16
"""Elements. Every start is a multiple of it: 16 bytes for one-byte dtypes, more for wider ones."""

TOLERATED = 100
"""Padding may be one part in ``TOLERATED`` of the unit."""

NEGLIGIBLE = 1024
"""Padding elements per rank that never justify another collective."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the full buffer. Not a slot of `plan_memory`, which is a static buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """First element in the full buffer."""
    row: int
    """Elements of one row, which is never split."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """A part of the full buffer, gathered with one chunk per rank."""

    full_start: int
    shard_start: int
    chunk: int
    """Elements per rank."""


@dataclass(frozen=True)
class Local:
    """One rank's part of one parameter: a range of rows, possibly empty."""

    shard_offset: int
    """First element in the rank's shard."""
    param_offset: int
    """First element in the flattened parameter."""
    numel: int
    shape: tuple[int, ...]
    """``(rows, *trailing)``: for a matrix ``[n, columns]``, for a vector ``[n]``."""


@dataclass(frozen=True)
class Layout:
    """The layout of one flat buffer. Equal inputs give equal layouts on every rank, without communication."""

    world: int
    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]
    _segment_of: tuple[int, ...] = field(repr=False, default=())

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """Elements per rank of each segment."""
        return tuple(s.chunk for s in self.segments)

    @cached_property
    def shard_numel(self) -> int:
        return sum(self.splits)

    @property
    def full_numel(self) -> int:
        return self.world * self.shard_numel

    @property
    def pad(self) -> int:
        """Elements of the full buffer that belong to no parameter."""
        return self.full_numel - sum(s.numel for s in self.slots)

    def segment(self, slot: int) -> Segment:
        """Returns the segment of parameter number ``slot``."""
        return self.segments[self._segment_of[slot]]

    def local(self, slot: int, rank: int) -> Local:
        """Returns the part of parameter number ``slot`` that ``rank`` holds."""
        s, segment = self.slots[slot], self.segment(slot)
        start = segment.full_start + rank * segment.chunk
        low, high = max(s.offset, start), min(s.offset + s.numel, start + segment.chunk)
        if low >= high:
            return Local(segment.shard_start, 0, 0, (0, *_trailing(s)))
        n = high - low
        return Local(segment.shard_start + low - start, low - s.offset, n, (n // s.row, *_trailing(s)))

    def chunks(self, slot: int, rank: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Returns the rank's range, for checkpoints, as boxes ``(offsets, sizes)`` of the parameter in flattened order.

        An empty parameter is one empty box of rank 0, so that checkpoints contain it.
        """
        at, s = self.local(slot, rank), self.slots[slot]
        if not s.numel and not rank:
            return (((0,) * len(s.shape), s.shape),)
        return tuple(_boxes(self.slots[slot].shape, at.param_offset, at.numel))

    def as_elements(self, slot: int, name: str, shape: tuple[int, ...], itemsize: int) -> Layout:
        """Returns the layout, of this one slot, of a parameter of bytes as the elements that they are, of ``itemsize``
        bytes, which divides its row.
        """
        s, at = self.slots[slot], self.segment(slot)
        one = Slot(name, shape, s.offset // itemsize, s.row // itemsize)
        return Layout(self.world, (one,), (Segment(at.full_start // itemsize, 0, at.chunk // itemsize),), (0,))

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Returns the padding as ``(start, elements)``, in order."""
        out, end = [], 0
        for s in sorted((s for s in self.slots if s.numel), key=lambda s: s.offset):
            if s.offset > end:
                out.append((end, s.offset - end))
            end = max(end, s.offset + s.numel)
        if self.full_numel > end:
            out.append((end, self.full_numel - end))
        return tuple(out)

    def text(self) -> str:
        """Returns a table of each rank's rows: one line per parameter, one column per rank."""
        rows = [["", *(f"rank {r}" for r in range(self.world))]]
        for i, s in enumerate(self.slots):
            cells = [f"{s.name}{list(s.shape)}@{s.offset}"]
            for r in range(self.world):
                at = self.local(i, r)
                first = at.param_offset // s.row if s.row else 0
                cells.append(f"{first}:{first + at.numel // s.row}" if at.numel else "-")
            rows.append(cells)
        widths = [max(len(row[c]) for row in rows) for c in range(self.world + 1)]
        lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        tail = f"segments {'+'.join(map(str, self.splits))} per rank, pad {self.pad} of {self.full_numel}"
        return "\n".join([*lines, tail])


def plan(params: Sequence[tuple[str, tuple[int, ...]]], world: int, *, align: int = ALIGN) -> Layout:
    """Lays parameters out over ``world`` ranks.

    Args:
        params: names and shapes, in registration order, which every segment keeps (invariant 30).
        world: number of ranks.
        align: every start and chunk is a multiple of this many elements.

    Raises:
        ValueError: ``world`` or ``align`` is below 1, a dimension is negative, or a name occurs twice.
    """
    if world < 1 or align < 1:
        raise ValueError(f"plan: world={world} and align={align} must be at least 1")
    names = [name for name, _ in params]
    for name, shape in params:
        if min(shape, default=0) < 0:
            raise ValueError(f"plan: {name} has the negative dimension {shape}")
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"plan: the name {twice!r} occurs twice; names must be unique in a unit")
    total = sum(prod(shape) for _, shape in params)
    rows = [_row(shape, world, total) for _, shape in params]
    groups = _groups(params, rows, world, align, total)
    slots: dict[int, Slot] = {}
    segments: list[Segment] = []
    where = [0] * len(params)
    full_start = shard_start = 0
    for members in groups:
        placed, chunk = _place([(params[i][1], rows[i]) for i in members], world, align)
        for i, offset in zip(members, placed, strict=True):
            slots[i] = Slot(params[i][0], tuple(params[i][1]), full_start + offset, rows[i])
            where[i] = len(segments)
        segments.append(Segment(full_start, shard_start, chunk))
        full_start, shard_start = full_start + world * chunk, shard_start + chunk
    return Layout(world, tuple(slots[i] for i in range(len(params))), tuple(segments), tuple(where))


def _row(shape: Sequence[int], world: int, total: int) -> int:
    """Returns the elements of a row: the coarsest whose padding (at most one row per rank) is negligible, else the
    finest.

    Matrices and convolutions are split along dimension 0, stacked experts between the rows of one expert. The finest
    row is the last dimension.
    """
    if len(shape) < 2 or prod(shape) == 0:
        return 1
    limit = max(total // (2 * TOLERATED * world), NEGLIGIBLE)
    sizes = [prod(shape[d:]) for d in range(1, len(shape))]
    return next((n for n in sizes if n <= limit), sizes[-1])


def _groups(
    params: Sequence[tuple[str, tuple[int, ...]]],
    rows: Sequence[int],
    world: int,
    align: int,
    total: int,
) -> list[list[int]]:
    """Returns which parameters share a segment (Note [Segments]). Merges row sizes, cheapest pair first."""
    allowed = max(total // TOLERATED, NEGLIGIBLE * world)

    def waste(members: list[int]) -> int:
        _, chunk = _place([(params[i][1], rows[i]) for i in members], world, align)
        return world * chunk - sum(prod(params[i][1]) for i in members)

    everything = list(range(len(params)))
    if waste(everything) <= allowed:
        return [everything]
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row, []).append(i)
    parts = list(groups.values())
    wastes = [waste(p) for p in parts]
    while len(parts) > 1:
        pairs = combinations(range(len(parts)), 2)
        costs = ((waste(sorted(parts[a] + parts[b])) - wastes[a] - wastes[b], a, b) for a, b in pairs)
        change, a, b = min(costs)
        if change > 0 and sum(wastes) + change > allowed:
            break
        parts[a], wastes[a] = sorted(parts[a] + parts[b]), wastes[a] + wastes[b] + change
        del parts[b], wastes[b]
    return sorted(parts)


def _place(items: Sequence[tuple[Sequence[int], int]], world: int, align: int) -> tuple[list[int], int]:
    """Returns the offsets inside one segment, and its chunk.

    Every start, and every boundary between ranks, is a multiple of the parameter's row. An empty parameter has a start
    of its own too, which identifies its markers and gradients.
    """
    offsets, end, unit = [], 0, align
    for shape, row in items:
        step = lcm(row, align) if world > 1 else align
        unit = lcm(unit, step)
        end = -(-end // step) * step
        offsets.append(end)
        end += max(prod(shape), 1)
    chunk = -(-end // (world * unit)) * unit
    return offsets, max(chunk, unit if not items else 0) or align


def _trailing(slot: Slot) -> tuple[int, ...]:
    """Returns the dimensions of one row."""
    if len(slot.shape) < 2:
        return ()
    if slot.numel == 0:
        return slot.shape[1:]
    return next(slot.shape[d:] for d in range(1, len(slot.shape)) if prod(slot.shape[d:]) == slot.row)


def _boxes(shape: Sequence[int], start: int, numel: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Splits a range of a flattened tensor into boxes: part of the first row, full rows, part of the last row."""
    if numel == 0:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    row, rest = divmod(start, inner)
    if rest or numel < inner:
        n = min(inner - rest, numel)
        for offsets, sizes in _boxes(shape[1:], rest, n):
            yield (row, *offsets), (1, *sizes)
        row, numel = row + 1, numel - n
    whole = numel // inner
    if whole:
        yield (row, *(0 for _ in shape[1:])), (whole, *shape[1:])
    for offsets, sizes in _boxes(shape[1:], 0, numel - whole * inner):
        yield (row + whole, *offsets), (1, *sizes)
