"""Extrapolates a step with few layers to many layers: turns a program into events and repeats a section of them.

Note [Extrapolation]
In a sequence of equal layers, all but the first and the last take the same time and memory. So a program is cut to a
few of its equal layers (more than the prefetch depth and the reduce lag), and the passes run on that program. It is
turned into events: seconds of compute, a launch into a queue, a wait for an earlier launch in the queue, each with its
change in memory. Then the events from one layer to the next are repeated in the middle, once for each removed layer.
Simulated time and peak memory equal those of the full program, up to floating-point rounding.

    forward, of 3 layers       | a | b | b' | c |
    of 5                       | a | b | b' | b' | b' | c |

Static buffers are assigned again over all repeated events: the number of layers decides which buffer the last layer
gets, and so what a later unit of another size needs.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.fx import Node

from ..config.hardware import Transfer
from ..ir import ops
from ..ir.byte_costs import accumulator, lines, nbytes
from ..ir.program import LAYER, Program, base_of, product_of
from ..ir.roles import unit_of
from ..passes.plan_memory import FAMILIES, Interval, coloured, intervals
from . import fusion
from .op_cost import OpTime
from .timeline import Links, Moving, queue_of


@dataclass
class Event:
    """A launch or a wait, if any, and the compute after it."""

    seconds: float
    """Seconds of compute, after the wait."""
    top: int
    """Peak live bytes during the event, relative to its start."""
    delta: int
    """Bytes allocated less bytes freed."""
    queue: str = ""
    """Queue of the launch or the wait; ``""`` for none."""
    launch: Transfer | None = None
    host: int = 0
    """Bytes offloaded to the host."""
    back: int = 0
    """Of a wait: which launch it awaits, counted back from the last one in the queue."""
    unit: str = ""
    """Unit whose gather is launched or awaited."""
    gradients: int = 0
    """Bytes of `delta` that are accumulators, which stay allocated."""


@dataclass(frozen=True)
class Extrapolated:
    """A program as events.

    Args:
        events: in order.
        starts: index of each layer's first event, by the layer's path.
        live: live bytes at the start, without static buffers.
        buffers: lifetimes of the values in static buffers, by name prefix of the buffers (`FAMILIES`); a lifetime
            starts and ends at (event, line in the event).
        backward: whether the bytes that layers free were live at the start.
    """

    events: tuple[Event, ...]
    starts: Mapping[str, int]
    live: int
    buffers: Mapping[str, tuple[Interval, ...]]
    backward: bool

    @cached_property
    def slots(self) -> dict[str, int]:
        """Bytes of static buffers by name."""
        found = ((family, coloured(buffers)) for family, buffers in self.buffers.items())
        return {f"{family}{i}": held[0].nbytes for family, slots in found for i, held in enumerate(slots)}

    def repeated(self, first: str, behind: str, times: int) -> Extrapolated:
        """Returns a copy that repeats the events from one layer's start to another's.

        Args:
            first: the first repeated layer, in the order of this program.
            behind: the layer after the last repeated one.
            times: number of additional repetitions.
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
        """Returns whether host copies have reached a steady state: whether the events from each of these layers to the
        next are equal, and leave equal host copies in flight.
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
        """Bytes on the host at the end."""
        return sum(e.host for e in self.events)

    def play(self) -> tuple[float, int]:
        """Returns seconds and peak live bytes, without static buffers."""
        whole = segment(self.events)
        return whole.seconds + drained(whole.left), self.live + whole.top


def static_bytes(programs: Iterable[Extrapolated]) -> int:
    """Returns bytes of static buffers that serve all programs."""
    largest: dict[str, int] = {}
    for program in programs:
        for name, taken in program.slots.items():
            largest[name] = max(taken, largest.get(name, 0))
    return sum(largest.values())


Queue = tuple[str, tuple[tuple[Transfer, float, float] | None, ...]]
"""A queue and its launches from the first incomplete one on: the transfer, and what is left of its fixed and its moving
time in seconds, rounded to picoseconds; ``None`` for a completed launch.
"""

Left = tuple[Queue, ...]
"""Launches in flight, by queue."""


@dataclass(frozen=True)
class Segment:
    """Time and memory of a sequence of events."""

    seconds: float
    delta: int
    top: int
    """Peak live bytes relative to the start."""
    left: Left
    """Launches in flight at the end."""


def segment(events: Sequence[Event], left: Left = ()) -> Segment:
    """Returns time and memory of events. They depend only on the events and the launches in flight at the start.

    Args:
        left: launches in flight at the start.
    """
    links = Links()
    launched = _resumed(left, links)
    live = top = 0
    for e in events:
        if live + e.top > top:
            top = live + e.top
        live += e.delta
        if e.launch is not None:
            launched.setdefault(e.queue, []).append(links.launch(e.queue, e.launch))
        elif e.queue and e.back < len(launched.get(e.queue, ())):
            links.until(launched[e.queue][-1 - e.back])
        if e.seconds:
            links.compute(e.seconds)
    return Segment(links.now, live, top, tuple(_left(launched)))


def drained(left: Left) -> float:
    """Returns the seconds until all launches in flight are complete."""
    links = Links()
    for queue in _resumed(left, links).values():
        for moving in queue:
            links.until(moving)
    return links.now


def _resumed(left: Left, links: Links) -> dict[str, list[Moving]]:
    """Adds launches in flight to ``links``. Returns them by queue."""
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
    """Yields the launches that are still in flight."""
    for queue, all_of_them in sorted(launched.items()):
        waiting = tuple(itertools.dropwhile(lambda m: m.end >= 0, all_of_them))
        if waiting:
            rest = ((m.transfer, round(m.fixed, 12), round(m.left, 12)) if m.end < 0 else None for m in waiting)
            yield queue, tuple(rest)


def _again(buffers: Sequence[Interval], a: int, b: int, times: int) -> Iterator[Interval]:
    """Yields the lifetimes in a program that repeats the events from ``a`` to ``b`` this many more times."""
    known = {(buffer.nbytes, buffer.start) for buffer in buffers}
    longer = times * (b - a)
    for buffer in buffers:
        start, end = buffer.start[0], buffer.end[0]
        if end < b:
            yield from (_later(buffer, n * (b - a)) for n in (range(times + 1) if end >= a else [0]))
        elif start >= a or (buffer.nbytes, _later(buffer, b - a).start) in known:
            yield _later(buffer, longer)
        else:  # belongs to no layer: live throughout
            yield buffer._replace(end=_later(buffer, longer).end)


def _later(buffer: Interval, by: int) -> Interval:
    (start, row), (end, last) = buffer.start, buffer.end
    return Interval(buffer.nbytes, (start + by, row), (end + by, last))


def _alike(a: Event, b: Event) -> bool:
    """Returns whether two events are equal except for their units."""
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
    """Returns a program after all passes as events.

    Args:
        times: times of its lines (`mfsdp.cost_model.op_cost.op_times`).
        fused: whether neighbouring kernels fuse.
        memo: cache of fusion decisions (`mfsdp.cost_model.fusion.together`).
        accumulators: whether the program allocates the accumulators (`mfsdp.ir.byte_costs.lines`).
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
            where[base_of(product_of(node))] = event.queue, counts[event.queue]
        elif node.target is ops.wait:
            awaited = base_of(node.args[0])  # type: ignore[arg-type]
            if (found := where.get(awaited)) is not None:
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
    """Returns the layers by the number of their first line. A layer begins at its first line after half of the previous
    layer's time has passed; earlier lines, which backward recomputes, do not count.

    Args:
        paths: the layer of each line, or ``""``.
        seconds: the time of each line.
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
    """Returns the line at which half of the rows' time has passed."""
    sums = list(itertools.accumulate(seconds[i] for i in rows))
    return rows[bisect.bisect_left(sums, sums[-1] / 2)]


def _gathered(node: Node) -> str:
    """Returns the unit that an all-gather gathers; ``""`` for other nodes."""
    return unit_of(node) if node.target is ops.all_gather else ""


def _buffers(program: Program, events: Mapping[Node, int]) -> dict[str, tuple[Interval, ...]]:
    """Returns lifetimes of values in static buffers, by name prefix of the buffers.

    Args:
        events: the event of each line.
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
    """Appends compute without a launch or wait to an event."""
    event.top = max(event.top, event.delta + more.top)
    event.delta += more.delta
    event.gradients += more.gradients
    event.seconds += more.seconds


def runs(states: Sequence[object], least: int, period: int = 1) -> list[tuple[int, int, int]]:
    """Splits a sequence into repetitions: (start, length of the repeated part, count).

    Args:
        states: states of layers, in order.
        least: smallest number of layers worth repeating.
        period: a length of the repeated part to try besides 1.
    """
    found, i = [], 0
    while i < len(states):
        best = (i, 1, 1)
        for p in {1, period}:
            count = 1
            while i + (count + 1) * p <= len(states) and states[i : i + p] == states[i + count * p :][:p]:
                count += 1
            if (p == 1 or count > 1) and count * p > best[1] * best[2] and count * p >= least:
                best = (i, p, count)
        found.append(best)
        i += best[1] * best[2]
    return found
