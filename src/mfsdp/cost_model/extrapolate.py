"""A step of few layers, scored as one of many: a program as events, of which a stretch is repeated.

Note [Extrapolation]
Where equal layers stand one behind the other, all but the first and the last of them do the same, at the same distance
in time and in memory. So of a run of equal layers a few are kept (more than gathers are launched ahead and reductions
may lag behind), passes run on those, and what they have made becomes events: so many seconds of compute, a launch into
a queue, a wait for what was launched so many launches before in it; and with each what memory does. Then the stretch
from one layer to the next is repeated in the middle, as often as layers were left out. The clock's simulation of the
events is that of the whole program, to the last digit but those that floating-point sums lose; so is the peak.

    forward, of 3 layers       | a | b | b' | c |
    of 5                       | a | b | b' | b' | b' | c |

Static buffers are given out anew over the whole: which one the last layer comes to depends on how many there are, and
with it what a unit of another size behind it takes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.fx import Node

from ..config.hardware import Transfer
from ..ir import ops
from ..ir.byte_costs import accumulator, lines, nbytes
from ..ir.program import LAYER, Program, base_of
from ..ir.roles import role
from ..passes.plan_memory import FAMILIES, Interval, coloured, intervals
from . import fusion
from .op_cost import OpTime
from .timeline import Links, Moving, queue_of


@dataclass
class Event:
    """What happens between two things that are launched or waited for."""

    seconds: float
    """Of compute, behind what is waited for."""
    top: int
    """Bytes that are live at most meanwhile, above those at its beginning."""
    delta: int
    """Bytes that come to be, less those that go."""
    queue: str = ""
    """What is launched, or waited for, goes through it; ``""``: nothing is."""
    launch: Transfer | None = None
    host: int = 0
    """Bytes that come to lie on the host."""
    back: int = 0
    """What is waited for: that which was launched so many launches before the last one in the queue."""
    unit: str = ""
    """Whose parameters are gathered, or waited for."""
    gradients: int = 0
    """Of `delta`, bytes of accumulators, which stay."""


@dataclass(frozen=True)
class Extrapolated:
    """A program as events.

    Args:
        events: in order.
        starts: index of the first event of each layer, by its path.
        live: bytes live at the beginning, static buffers not counted.
        buffers: those that get static ones, by what names of these begin with: each from an event and a line in it to
            others.
        backward: whether what layers free was there at the beginning.
    """

    events: tuple[Event, ...]
    starts: Mapping[str, int]
    live: int
    buffers: Mapping[str, tuple[Interval, ...]]
    backward: bool

    @cached_property
    def slots(self) -> dict[str, int]:
        """Bytes of static buffers, by name."""
        found = ((family, coloured(buffers)) for family, buffers in self.buffers.items())
        return {f"{family}{i}": held[0].nbytes for family, slots in found for i, held in enumerate(slots)}

    def repeated(self, first: str, behind: str, times: int) -> Extrapolated:
        """With what runs from the start of one layer to that of another one so many times more often.

        Args:
            first: the layer that runs first of those that are repeated, in this program.
            behind: the layer that runs behind them.
        """
        a, b = self.starts[first], self.starts[behind]
        assert a < b, f"{first} does not run before {behind}"
        events = (*self.events[:b], *(self.events[a:b] * times), *self.events[b:])
        longer = times * (b - a)
        starts = {path: i + longer if i >= b else i for path, i in self.starts.items()}
        freed = sum(e.gradients - e.delta for e in self.events[a:b]) if self.backward else 0
        buffers = {family: tuple(_again(held, a, b, times)) for family, held in self.buffers.items()}
        return replace(self, events=events, starts=starts, live=self.live + times * freed, buffers=buffers)

    def rests(self, borders: Sequence[str]) -> bool:
        """Whether what goes to the host and comes back has come to rest: in each stretch from the start of one of these
        layers to that of the next the same happens, and leaves copies as far behind.
        """
        marks = [self.starts[path] for path in borders]
        left, found = segment(self.events[: marks[0]]).left, list[tuple[Sequence[Event], Left]]()
        for a, b in itertools.pairwise(marks):
            left = segment(self.events[a:b], left).left
            found.append((self.events[a:b], tuple(x for x in left if x[0] in map(str, ops.HOST))))
        return all(
            len(before) == len(events) and all(map(_alike, before, events)) and copies == still
            for (before, copies), (events, still) in itertools.pairwise(found)
        )

    @property
    def host(self) -> int:
        """Bytes that lie on the host at the end."""
        return sum(e.host for e in self.events)

    def play(self) -> tuple[float, int]:
        """Seconds, and bytes that are live at most, static buffers not counted."""
        whole = segment(self.events)
        return whole.seconds + drained(whole.left), self.live + whole.top


Queue = tuple[str, tuple[tuple[Transfer, float, float] | None, ...]]
"""A queue, and of each launch in it from the first one on that is not complete the transfer and what is left of it,
before bytes move and of moving them, in seconds, to the picosecond; ``None`` of what takes no time.
"""

Left = tuple[Queue, ...]
"""What is under way."""


@dataclass(frozen=True)
class Segment:
    """What some events take."""

    seconds: float
    delta: int
    top: int
    """Above what was live at its beginning."""
    left: Left
    """What is under way at the end."""


def segment(events: Sequence[Event], left: Left = ()) -> Segment:
    """Time and memory, while events happen: what follows depends on nothing but what is under way.

    Args:
        left: is under way at the beginning.
    """
    links = Links()
    launched = _under_way(left, links)
    live = top = 0
    for e in events:
        if live + e.top > top:
            top = live + e.top
        live += e.delta
        if e.launch is not None:
            moving = Moving.of(e.launch, links.now)
            launched.setdefault(e.queue, []).append(moving)
            if e.launch.seconds > 0:
                links.launch(e.queue, moving)
            else:
                moving.start = moving.end = links.now
        elif e.queue and e.back < len(launched.get(e.queue, ())):
            links.until(launched[e.queue][-1 - e.back])
        if e.seconds:
            links.compute(e.seconds)
    return Segment(links.now, live, top, tuple(_left(launched)))


def drained(left: Left) -> float:
    """Seconds until nothing is under way."""
    links = Links()
    for queue in _under_way(left, links).values():
        for moving in queue:
            links.until(moving)
    return links.now


def _under_way(left: Left, links: Links) -> dict[str, list[Moving]]:
    """Launches, by queue, which time will pass for."""
    launched: dict[str, list[Moving]] = {}
    for queue, waiting in left:
        links.queues[queue] = deque()
        for x in waiting:
            transfer, fixed, rest = x or (Transfer(0.0, 0.0), 0.0, 0.0)
            moving = Moving(None, transfer, links.now, fixed, rest)
            launched.setdefault(queue, []).append(moving)
            if x is None:
                moving.start = moving.end = links.now
            else:
                links.queues[queue].append(moving)
    return launched


def _left(launched: Mapping[str, Sequence[Moving]]) -> Iterator[Queue]:
    """What is under way of all that has been launched."""
    for queue, all_of_them in sorted(launched.items()):
        waiting = tuple(itertools.dropwhile(lambda m: m.end >= 0, all_of_them))
        if waiting:
            rest = ((m.transfer, round(m.fixed, 12), round(m.left, 12)) if m.end < 0 else None for m in waiting)
            yield queue, tuple(rest)


def _again(buffers: Sequence[Interval], a: int, b: int, times: int) -> Iterator[Interval]:
    """Those of a program in which the events from a to b happen so many times more often."""
    known = {(buffer.nbytes, buffer.start) for buffer in buffers}
    longer = times * (b - a)
    for buffer in buffers:
        start, end = buffer.start[0], buffer.end[0]
        if end < b:
            yield from (_later(buffer, n * (b - a)) for n in (range(times + 1) if end >= a else [0]))
        elif start >= a or (buffer.nbytes, _later(buffer, b - a).start) in known:
            yield _later(buffer, longer)
        else:  # of no layer: it is there all along
            yield buffer._replace(end=_later(buffer, longer).end)


def _later(buffer: Interval, by: int) -> Interval:
    (start, row), (end, last) = buffer.start, buffer.end
    return Interval(buffer.nbytes, (start + by, row), (end + by, last))


def _alike(a: Event, b: Event) -> bool:
    """Whether the same happens, to whichever unit."""
    return math.isclose(a.seconds, b.seconds, rel_tol=1e-9) and replace(a, seconds=0.0, unit="") == replace(
        b, seconds=0.0, unit=""
    )


def extrapolated(
    program: Program,
    times: Mapping[Node, OpTime],
    fused: bool,
    memo: dict[Any, Any] | None = None,
    *,
    accumulators: bool = True,
) -> Extrapolated:
    """A program after all passes as events.

    Args:
        times: what its lines take (`mfsdp.cost_model.op_cost.op_times`).
        fused: whether neighbouring kernels fuse.
        memo: what is known of lines already (`mfsdp.cost_model.fusion.together`).
        accumulators: whether they come to be here (`mfsdp.ir.byte_costs.lines`).
    """
    pooled = sum(program.slots.values())
    out: list[Event] = []
    starts: dict[str, int] = {}
    where: dict[Node, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    events: dict[Node, int] = {}
    begin = live = 0
    rows = lines(program, fusion.fused(program, memo) if fused else (), accumulators=accumulators)
    seconds = [time.seconds if (time := times.get(row.node)) is not None else 0.0 for row in rows]
    firsts = _firsts([row.node.meta.get(LAYER, "") for row in rows], seconds)
    for number, row in enumerate(rows):
        node = row.node
        if number == 0:
            begin = live = row.live - row.delta
        top, delta, live = row.top - live, row.live - live, row.live
        time = times.get(node)
        new = number in firsts
        event = Event(seconds[number], top, delta)
        if accumulators and node.target is ops.accumulate:
            event.gradients = accumulator(program, node)
        if time is not None and time.transfer is not None:
            event.queue, event.launch, event.seconds = queue_of(program, node), time.transfer, 0.0
            counts[event.queue] = counts.get(event.queue, 0) + 1
            event.host = nbytes(node.meta["val"]) if node.target is ops.offload else 0
            event.unit = _gathered(node)
            product = base_of(node.args[0]) if node.target in ops.IN_PLACE else node  # type: ignore[arg-type]
            where[product] = event.queue, counts[event.queue]
        elif node.target is ops.wait:
            awaited: Node = node.args[0]  # type: ignore[assignment]
            if (found := where.get(awaited) or where.get(base_of(awaited))) is not None:
                event.queue, event.back = found[0], counts[found[0]] - found[1]
                event.unit = _gathered(awaited)
        if new:
            starts[firsts[number]] = len(out)
        if out and not new and not event.queue:
            _join(out[-1], event)
        else:
            out.append(event)
        events[node] = len(out) - 1
    return Extrapolated(tuple(out), starts, begin - pooled, _buffers(program, events), program.phase == "backward")


def _firsts(paths: Sequence[str], seconds: Sequence[float]) -> dict[int, str]:
    """Where layers begin, by line: with their first one behind which less than half is left of the layer before. Single
    lines may stand anywhere before that: what backward computes again.

    Args:
        paths: the layer of each line, or ``""``.
        seconds: of each line.
    """
    own: dict[str, list[int]] = {}
    for i, path in enumerate(paths):
        if path:
            own.setdefault(path, []).append(i)
    middles = {path: _middle(rows, seconds) for path, rows in own.items()}
    found: dict[int, str] = {}
    behind = -1
    for path, middle in sorted(middles.items(), key=lambda x: x[1]):
        found[next(i for i in own[path] if i > behind)] = path
        behind = middle
    return found


def _middle(rows: Sequence[int], seconds: Sequence[float]) -> int:
    """The line with which half of the time has passed."""
    sums = list(itertools.accumulate(seconds[i] for i in rows))
    return rows[bisect.bisect_left(sums, sums[-1] / 2)]


def _gathered(node: Node) -> str:
    """The unit whose parameters are gathered there; ``""`` for anything else."""
    return role(node).unit if node.target is ops.all_gather else ""  # type: ignore[union-attr]


def _buffers(program: Program, events: Mapping[Node, int]) -> dict[str, tuple[Interval, ...]]:
    """Those that get static ones, by what names of these begin with.

    Args:
        events: that which each line is of.
    """
    places: dict[Node, tuple[int, int]] = {}
    event = into = 0
    for node in program.nodes:
        now = events.get(node, event)
        event, into = now, into + 1 if now == event else 0
        places[node] = event, into
    return {
        family: tuple(Interval(x.nbytes, places[x.start], places[x.end]) for x in intervals(program, family))
        for family in FAMILIES
    }


def _join(event: Event, more: Event) -> None:
    """What follows, with nothing launched or waited for, is the same event."""
    event.top = max(event.top, event.delta + more.top)
    event.delta += more.delta
    event.gradients += more.gradients
    event.seconds += more.seconds


def runs(states: Sequence[object], least: int, period: int = 1) -> list[tuple[int, int, int]]:
    """Where a sequence repeats itself, one behind the other: (start, length of what is repeated, how often).

    Args:
        states: of layers, in order.
        least: how many are worth it.
        period: besides 1, what may be the length of what is repeated.
    """
    found, i = [], 0
    while i < len(states):
        best = (i, 1, 1)
        for p in {1, period}:
            count = 1
            while states[i : i + p] == states[i + count * p : i + (count + 1) * p] and i + (count + 1) * p <= len(
                states
            ):
                count += 1
            if (p == 1 or count > 1) and count * p > best[1] * best[2] and count * p >= least:
                best = (i, p, count)
        found.append(best)
        i += best[1] * best[2]
    return found
