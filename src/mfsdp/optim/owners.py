"""Deals whole matrices out to the ranks that hold their rows. Integers only; the same on every rank.

Note [Owners]
The step of a whole-matrix optimizer (Muon) needs each matrix whole once, between two elementwise parts. So momentum,
decay and the addition stay on rows, and only what is between travels: each matrix goes to one rank, its *owner*, and
its update comes back. Owners follow from layouts and shapes alone, without communication; state stays rows, so
checkpoints know nothing of owners.

Matrices are exchanged in *waves*, each of some consecutive units, with one all-to-all there and one back. A wave moves
beside the Newton-Schulz iterations of the wave before:

    compute    momentum 0 | momentum 1 | matrices 0 | momentum 2 | matrices 1 | add 0 | matrices 2 | add 1 | add 2
    exchange   |-there 0--|--there 1---------------||-back 0-----||--there 2---------||-back 1----|

An exchange ends when its last rank arrives, so within a wave every owner needs the same work, not only in total. One
exchange per unit would be up to 18 times slower than the mean load (Llama-8B, 7 matrices per unit, 64 ranks). Few waves
balance better and take more memory: `plan` takes the fewest that keep staging memory within a bound, or more, up to
`OVERLAP`, where that costs no balance.

Owners are dealt by LPT (Graham, 1969): the costliest matrix first, each to the place with the least to do. Among equals
the place that holds the most of it is chosen, which saves bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..config.layout import Layout
from ..ir.byte_costs import size

OVERLAP = 4
"""Waves for which exchanges are hidden well enough; more are made only where staging memory is short."""

TOLERATED = 1.05
"""How much longer the critical path may become for the sake of more waves."""

SHOWN = 8
"""Ranks of a ring that a listing shows."""


@dataclass(frozen=True)
class Box:
    """The part of a matrix that one place holds: a rectangle, contiguous in that rank's part of the parameter."""

    start: int
    """First element, in the rank's part of the parameter."""
    row: int
    rows: int
    column: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Ring:
    """The ranks that a matrix is dealt out over. A *place* is a rank's index in the group."""

    group: str
    """Name of the process group for exchanges; ``""`` for one rank."""
    announced: str
    """Name of the group in which its ranks compare fingerprints."""
    me: int
    size: int
    copies: bool = False
    """Whether every place holds everything (strategy 0)."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix."""

    name: str
    unit: int
    """Index of its unit (flat buffer)."""
    slot: int
    """Its parameter, in the unit's layout."""
    group: int
    """Index of its parameter group."""
    rows: int
    columns: int
    ring: Ring
    held: tuple[tuple[int, Box], ...]
    """Places that hold a part, ascending, and which part."""

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Its work, in proportion: products with a Gram matrix of its shorter side."""
        return max(self.rows, self.columns) * min(self.rows, self.columns) ** 2

    def at(self, place: int) -> Box | None:
        """Returns the part that a place holds."""
        return next((box for other, box in self.held if other == place), None)


def held_rows(layout: Layout, slot: int, start: int, rows: int, columns: int) -> Iterator[tuple[int, Box]]:
    """Yields the ranks of a layout that hold rows of a matrix, and which: that of ``rows`` rows of ``columns`` elements
    from element ``start`` of the flattened parameter on.
    """
    segment, end = layout.segment(slot), start + rows * columns
    first = layout.slots[slot].offset - segment.full_start
    for rank in range((first + start) // segment.chunk, (first + end - 1) // segment.chunk + 1):
        at = layout.local(slot, rank)
        low, high = max(at.param_offset, start), min(at.param_offset + at.numel, end)
        if low < high:
            yield rank, Box(low - at.param_offset, (low - start) // columns, (high - low) // columns, 0, columns)


@dataclass(eq=False)
class Wave:
    """Matrices that travel together."""

    units: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    owner: dict[Matrix, int] = field(default_factory=dict)
    """Places."""

    @cached_property
    def rings(self) -> tuple[Ring, ...]:
        return tuple(dict.fromkeys(m.ring for m in self.matrices))

    @cached_property
    def sizes(self) -> dict[Ring, list[_Load]]:
        """What every place of a ring holds and owns."""
        out = {ring: [_Load() for _ in range(ring.size)] for ring in self.rings}
        for m in self.matrices:
            places, owner = out[m.ring], self.owner[m]
            places[owner].owned += m.numel
            places[owner].cost += m.cost
            for place, box in m.held:
                places[place].held += box.numel
                if m.ring.copies and place != owner:
                    places[owner].returned += box.numel
                elif not m.ring.copies and place != owner:
                    places[place].sent += box.numel
                    places[owner].returned += box.numel
        return out

    def routes(self, ring: Ring) -> tuple[Route, Route]:
        """Returns what this rank exchanges over a ring: to owners, and back."""
        mine: list[list[Cut]] = [[] for _ in range(ring.size)]
        others: list[list[Cut]] = [[] for _ in range(ring.size)]
        for m in self.matrices:
            if m.ring != ring:
                continue
            owner, here = self.owner[m], m.at(ring.me)
            if here is not None:
                mine[owner].append((m, here))
            if owner == ring.me:
                for place, box in m.held:
                    others[place].append((m, box))
        back = Route.of(others, mine)
        if ring.copies:
            alone = [cuts if place == ring.me else [] for place, cuts in enumerate(mine)]
            return Route.of(alone, alone), back
        return Route.of(mine, others), back


Cut = tuple[Matrix, Box]


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives in an all-to-all: parts of matrices, in the order in which they lie."""

    sends: tuple[Cut, ...]
    splits: tuple[int, ...]
    """Elements for each place."""
    receives: tuple[Cut, ...]
    received: tuple[int, ...]
    """Elements from each place."""

    @staticmethod
    def of(to: Sequence[Sequence[Cut]], of: Sequence[Sequence[Cut]]) -> Route:
        """Returns the route of parts by the place that they go to, and that they come from."""
        sizes = [tuple(sum(box.numel for _, box in cuts) for cuts in each) for each in (to, of)]
        sends, receives = (tuple(cut for cuts in each for cut in cuts) for each in (to, of))
        return Route(sends, sizes[0], receives, sizes[1])


@dataclass
class _Load:
    """One place in one wave; elements, and `Matrix.cost`."""

    held: int = 0
    owned: int = 0
    sent: int = 0
    """To other places, to owners."""
    returned: int = 0
    """To other places, back."""
    cost: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """The waves of one optimizer's step."""

    waves: tuple[Wave, ...]
    itemsize: int
    """Bytes of an element that travels."""

    @cached_property
    def loads(self) -> dict[Ring, list[int]]:
        """Total cost by ring and place."""
        out: dict[Ring, list[int]] = {}
        for wave in self.waves:
            for ring, places in wave.sizes.items():
                total = out.setdefault(ring, [0] * ring.size)
                out[ring] = [a + b.cost for a, b in zip(total, places, strict=True)]
        return out

    @property
    def imbalance(self) -> float:
        """The largest load of a place over the mean."""
        return self._over_mean(sum(max(loads) for loads in self.loads.values()))

    @property
    def critical(self) -> float:
        """Length of the critical path over the mean load: a place begins a wave when all have ended the last but one,
        since its exchange is launched between these.
        """
        total = 0
        for ring in self.loads:
            done, ends = [0] * ring.size, [0, 0]
            for wave in self.waves:
                places = wave.sizes.get(ring)
                if places is not None:
                    done = [max(now, ends[-2]) + place.cost for now, place in zip(done, places, strict=True)]
                    ends.append(max(done))
            total += ends[-1]
        return self._over_mean(total)

    def _over_mean(self, cost: int) -> float:
        mean = sum(sum(loads) / len(loads) for loads in self.loads.values())
        return cost / mean if mean else 1.0

    @cached_property
    def staging(self) -> int:
        """Peak bytes of rows and matrices that a rank holds at once beside weights, gradients and state; without what
        Newton-Schulz itself needs for a batch. While a wave is computed, the next one has been sent and is arriving,
        and updates of the one before are on their way back.
        """
        out = 0
        for i in range(len(self.waves)):
            one, now, after = (self._peak(k) for k in (i - 1, i, i + 1))
            for ring in self.loads:
                none = [_Load()] * ring.size
                places = zip(*(sizes.get(ring, none) for sizes in (one, now, after)), strict=True)
                most = max(a.owned + a.held + 2 * b.owned + b.held + c.owned + c.held for a, b, c in places)
                out = max(out, self.itemsize * most)
        return out

    def _peak(self, wave: int) -> dict[Ring, list[_Load]]:
        return self.waves[wave].sizes if 0 <= wave < len(self.waves) else {}

    def sent(self, ring: Ring) -> list[int]:
        """Returns the bytes that every place sends to others in a step."""
        places = [wave.sizes.get(ring, [_Load()] * ring.size) for wave in self.waves]
        return [self.itemsize * sum(each.sent + each.returned for each in one) for one in zip(*places, strict=True)]


def plan(units: Sequence[Sequence[Matrix]], itemsize: int, max_staging: int) -> Plan:
    """Returns waves and owners.

    Args:
        units: the matrices of each unit, in the order of the step.
        itemsize: bytes of an element that travels.
        max_staging: bound of `Plan.staging` in bytes. A wave has at least one unit, and its owners whole matrices; if
            no plan is within the bound, it is the one with the fewest waves of those that take about the least.
    """
    tried = [_dealt(units, 1, itemsize)]
    count = 1
    while tried[-1].staging > max_staging and count < len(units):
        count = min(len(units), max(count + 1, count * 5 // 4))
        tried.append(_dealt(units, count, itemsize))
    least = min(each.staging for each in tried)
    bound = max_staging if least <= max_staging else least * 3 // 2
    found = next(each for each in tried if each.staging <= bound)
    for count in range(min(OVERLAP, len(units)), len(found.waves), -1):
        more = _dealt(units, count, itemsize)
        if more.staging <= bound and more.critical <= TOLERATED * found.critical:
            return more
    return found


def _dealt(units: Sequence[Sequence[Matrix]], count: int, itemsize: int) -> Plan:
    """Returns ``count`` waves of about as many elements each, with owners. Loads of earlier waves count."""
    total, done = sum(m.numel for unit in units for m in unit), 0
    members: list[list[int]] = [[] for _ in range(count)]
    for i, unit in enumerate(units):
        numel = sum(m.numel for m in unit)
        members[min(count - 1, (2 * done + numel) * count // max(2 * total, 1))].append(i)
        done += numel
    waves, loads = [], dict[Ring, list[int]]()
    for some in filter(None, members):
        wave = Wave(tuple(some), tuple(m for i in some for m in units[i]))
        for ring in wave.rings:
            _deal(wave, ring, loads.setdefault(ring, [0] * ring.size))
        waves.append(wave)
    return Plan(tuple(waves), itemsize)


def _deal(wave: Wave, ring: Ring, loads: list[int]) -> None:
    """Deals a wave's matrices over a ring (LPT) and adds their costs to the loads."""
    queue = [(load, place) for place, load in enumerate(loads)]
    heapq.heapify(queue)
    for m in sorted((m for m in wave.matrices if m.ring == ring), key=lambda m: -m.cost):
        while loads[queue[0][1]] != queue[0][0]:
            heapq.heappop(queue)
        least, place = queue[0]
        idle = [(-box.numel, other) for other, box in m.held if loads[other] == least]
        wave.owner[m] = owner = min(idle)[1] if idle else place
        loads[owner] += m.cost
        heapq.heappush(queue, (loads[owner], owner))


def describe(step: Plan, name: str, units: Sequence[str]) -> str:
    """Returns the step as text: its lanes, then what every wave holds, sends and costs. ``name`` is the optimizer's;
    ``units`` are the names of units.

    `C` computes and `A` exchanges: ``*`` runs or launches, ``|`` is in flight, ``<-o`` waits.
    """
    matrices = sum(len(wave.matrices) for wave in step.waves)
    rings = " and ".join(counted(ring.size, "rank") for ring in step.loads) or "no rank"
    head = (
        f"{name}: {matrices} matrices over {rings} in {counted(len(step.waves), 'wave')}, staging {size(step.staging)}"
    )
    rows = [f"; {head}", f"; load max/mean {step.imbalance:.3f}, critical path/mean {step.critical:.3f}", "; C A"]
    exchanged = any(ring.size > 1 for ring in step.loads)
    rows += [f"{gutter if exchanged else gutter.replace('|', '.')} {text}" for gutter, text in _lanes(step, exchanged)]
    for k, wave in enumerate(step.waves):
        members = dict.fromkeys(m.unit for m in wave.matrices)
        rows.append(f"; wave {k}: {', '.join(units[i] for i in members)}")
        for ring, places in wave.sizes.items():
            rows += [f";   over {ring.size} ranks"] if len(step.loads) > 1 else []
            for place, load in enumerate(places[:SHOWN]):
                owned = [m.name for m in wave.matrices if m.ring == ring and wave.owner[m] == place]
                out, back = (size(step.itemsize * n) for n in (load.sent, load.returned))
                rows.append(f";   rank {place}: cost {load.cost}, sends {out}, {back} back, owns {_some(owned)}")
            rows += [f";   and {counted(ring.size - SHOWN, 'more rank')}"] if ring.size > SHOWN else []
    return "\n".join(rows)


def _lanes(step: Plan, exchanged: bool) -> Iterator[tuple[str, str]]:
    """Yields gutter and text of every line, in the order in which a rank runs them."""
    flying: set[str] = set()

    def line(text: str, launches: str = "", waits: str = "") -> Iterator[tuple[str, str]]:
        if waits and exchanged:
            yield "<-o", f"wait {waits}"
            flying.discard(waits)
        yield f"* {'|' if flying else '.'}", text
        if launches and exchanged:
            flying.add(launches)
            yield ". *", launches

    last = len(step.waves) - 1
    for k in range(-1, last + 2):
        if k + 1 <= last:
            yield from line(f"momentum of wave {k + 1}", launches=f"all_to_all wave {k + 1} to owners")
        if 0 <= k <= last:
            there, back = (f"all_to_all wave {k} {way}" for way in ("to owners", "back"))
            yield from line(f"matrices of wave {k}", back, there)
        if k >= 1:
            yield from line(f"decay and add wave {k - 1}", waits=f"all_to_all wave {k - 1} back")


def counted(n: int, what: str) -> str:
    """Returns a number with its noun."""
    return f"{n} {what}{'s' if n != 1 else ''}"


def _some(names: Sequence[str]) -> str:
    """Returns a few of the names."""
    more = [f"{len(names) - 4} more"] if len(names) > 5 else []
    return ", ".join([*names[: 4 if more else 5], *more]) or "nothing"
