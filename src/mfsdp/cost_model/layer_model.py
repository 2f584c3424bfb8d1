"""A step put together of pieces: one layer treated in some way, as it is among others that are treated alike.

Note [Layer model]
What a layer does under a choice hardly depends on what is chosen for the others. So a program in which all layers are
treated alike is cut and folded for each way to treat them, with and without gathers ahead, and taken apart where layers
begin: where they wait for their parameters, or compute something before that. A setting that treats layers differently
is put together of those pieces, in a fraction of a millisecond:

    all saved         | a | a | a | a | a |
    all recomputed    | b | b | b | b | b |
    first 2 recomputed, last 1 gathered, 2. offloaded
                      | b | a'| a | a | a"|

What stays gathered (a") is gathered in no time, and takes its memory from its forward to its backward. What goes to
the host (a') is launched in four parts while its forward goes on, away when as much time has passed as a copy takes,
and launched back as long before its backward needs it; where copies take less time than a layer, there is a program for
that too. A piece takes what it takes by what is under way at its beginning, and nothing else: pieces and what they
leave under way are numbered, and each pair is played once.

Where unlike layers meet this is not exact: fused kernels and rooms for what is gathered may differ. So these are
estimates, for searching; what is found is scored with its own program.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from ..config.hardware import Transfer
from .extrapolate import Event, Extrapolated, Left, Segment, drained, segment

Events = tuple[Event, ...]


@dataclass(frozen=True)
class Layer:
    """One of a setting's."""

    stand: str
    """Path of the layer whose piece it takes."""
    way: int = 0
    """In which of the programs."""
    gathered: bool = False
    away: tuple[Transfer, Transfer, int] | None = None
    """Copies to the host and back of one of `PARTS` of what it saves, and its bytes."""


Both = tuple[Extrapolated, Extrapolated]
"""Of forward and of backward."""

WHOLE, AWAY = -1, -2
"""Where all layers stay gathered; where what all of them save goes to the host, as copies take no longer than layers.
"""

PARTS = 4
"""In how many copies a layer's values are taken to move, one behind the other."""


class LayerModel:
    """Of programs each of which has all layers treated alike.

    Args:
        programs: gives those of a way to treat them; of `WHOLE`: those of the first way, but all layers stay gathered.
        owners: the layer that reads a unit's parameters, by its name.
        order: paths of the programs' layers, in forward's order.
    """

    def __init__(self, programs: Callable[[int], Both], owners: Mapping[str, str], order: Sequence[str]):
        self.programs, self.owners = cache(programs), owners
        self.place = {path: i for i, path in enumerate(order)}
        self.parts, self.clock = cache(self._parts), cache(self._clock)
        self.gradients = cache(lambda piece: _gradients(self.events[piece]))
        self.events: list[Events] = []
        self.made: dict[object, int] = {}
        self.states: list[Left] = [()]
        self.numbers: dict[Left, int] = {(): 0}
        self.took: dict[tuple[int, int], tuple[Segment, int]] = {}

    def _parts(self, way: int, backward: bool) -> dict[str, Events]:
        """Events of each layer, and under ``""`` those before all of them."""
        events = self.programs(way)[backward].events
        return {path: events[at:end] for path, (at, end, _) in self.clock(way, backward).items()}

    def _clock(self, way: int, backward: bool, gathered: bool = False) -> dict[str, tuple[int, int, list[float]]]:
        """Of each layer, and under ``""`` of what comes before all of them, its first event and the one behind its last
        one, and when these and those between begin, in seconds from the first, where all stay gathered or none.
        """
        part = self.programs(way)[backward]
        starts = sorted((at, path) for path, at in part.starts.items() if path in self.place)
        before = [0, *(at for at, _ in starts)]
        ends = [self._begins(path, part.events, last, at) for last, (at, path) in zip(before, starts, strict=False)]
        begun = [0.0]
        left: Left = ()
        for event in part.events:
            taken = segment([_there(event) if gathered else event], left)
            left = taken.left
            begun.append(begun[-1] + taken.seconds)
        paths, borders = ["", *(path for _, path in starts)], pairwise([0, *ends, len(part.events)])
        return {
            path: (at, end, [when - begun[at] for when in begun[at : end + 1]])
            for path, (at, end) in zip(paths, borders, strict=True)
        }

    def _begins(self, layer: str, events: Events, last: int, at: int) -> int:
        """Where a layer begins: where it waits for its parameters, if it computes nothing before that (what it computes
        again may need none) and less than half is left of the layer before, or launches their gather, if nothing is
        computed until they are waited for.
        """
        passed = list(accumulate((e.seconds for e in events[last:at]), initial=0.0))
        for i in range(last, at):
            if events[i].launch is None and self.owners.get(events[i].unit) == layer:
                at = i if 2 * passed[i - last] >= passed[-1] else at
                break
        while at > last and self.owners.get(events[at - 1].unit) == layer and not events[at - 1].seconds:
            at -= 1
        return at

    def play(self, layers: Sequence[Layer], backward: bool) -> tuple[float, int]:
        """Seconds, and bytes that are live at most, static buffers not counted.

        Args:
            layers: in forward's order.
        """
        now, live, top, left, gradients = 0.0, 0, 0, 0, 0
        for piece in self._sequence(layers, backward):
            if (piece, left) not in self.took:
                taken = segment(self.events[piece], self.states[left])
                self.took[piece, left] = taken, self._state(taken.left)
            taken, left = self.took[piece, left]
            now += taken.seconds
            top = max(top, live + taken.top)
            live += taken.delta
            gradients += self.gradients(piece)
        some = self.programs(0)[backward]
        # what is there at the end of backward but accumulators is the same, however it came to be
        begin = some.live + (_delta(some.events) - _gradients(some.events) - live + gradients if backward else 0)
        return now + drained(self.states[left]), begin + top

    def _state(self, left: Left) -> int:
        """The number of what is under way."""
        if left not in self.numbers:
            self.numbers[left] = len(self.states)
            self.states.append(left)
        return self.numbers[left]

    def slots(self, layers: Sequence[Layer]) -> dict[str, int]:
        """Bytes of static buffers, by name."""
        ways = {WHOLE} if all(layer.gathered for layer in layers) else {layer.way for layer in layers}
        out: dict[str, int] = {}
        for name, taken in (slot for way in ways for part in self.programs(way) for slot in part.slots.items()):
            out[name] = max(taken, out.get(name, 0))
        return out

    def _sequence(self, layers: Sequence[Layer], backward: bool) -> list[int]:
        """What happens, as numbers of `events`: first what comes before all layers."""
        order = range(len(layers))[:: -1 if backward else 1]
        head = replace(layers[order[0]], stand="", gathered=False, away=None)
        pieces = [(len(layers), head), *((i, layers[i]) for i in order)]
        copies: Mapping[int, Copies] = {}
        if any(layer.away is not None for layer in layers):
            copies = self._copies([layer for _, layer in pieces], backward)
        return [
            self._piece(layer, backward, self._kept(layers, i, layer, backward), copies.get(n, ()))
            for n, (i, layer) in enumerate(pieces)
        ]

    def _kept(self, layers: Sequence[Layer], at: int, layer: Layer, backward: bool) -> tuple[bool, ...]:
        """Of gathers that backward launches in a piece, whether they are of layers that stay gathered."""
        if not backward or not any(other.gathered for other in layers):
            return ()
        found = []
        here = self.place.get(layer.stand, len(self.place))
        for event in self.parts(layer.way, True)[layer.stand]:
            if event.launch is not None and event.unit:
                owner = self.place.get(self.owners.get(event.unit, ""))
                there = at + owner - here if owner is not None else -1
                found.append(0 <= there < len(layers) and layers[there].gathered)
        return tuple(found)

    def _piece(self, layer: Layer, backward: bool, kept: tuple[bool, ...], copies: Copies) -> int:
        key = (layer.stand, layer.way, layer.gathered, backward, kept, copies)
        if key not in self.made:
            events = self.parts(layer.way, backward)[layer.stand]
            gone = iter(kept)
            if any(kept):
                events = tuple(_there(e) if e.launch is not None and e.unit and next(gone) else e for e in events)
            before = [0, *(at for at, *_ in copies), len(events)]
            mixed = list(events[: before[1]])
            queue = "reload" if backward else "offload"  # apart from those in programs of their own (`AWAY`)
            for (_, launch, delta, back), (at, end) in zip(copies, pairwise(before[1:]), strict=True):
                moved = Event(0.0, max(0, delta), delta, queue, launch, back=back if launch is None else 0)
                mixed += [moved, *events[at:end]]
            if layer.gathered:
                mixed = self._gathered(layer.stand, mixed, backward)
            self.made[key] = len(self.events)
            self.events.append(tuple(mixed))
        return self.made[key]

    def _gathered(self, stand: str, events: list[Event], backward: bool) -> list[Event]:
        """The same of a layer that stays gathered."""
        freed, kept = self.parts(0, True)[stand], self.parts(WHOLE, True)[stand]
        taken = _delta(freed) - _delta(kept)
        if not backward:
            return [Event(0.0, taken, taken), *events]
        less = sum(e.seconds for e in freed) - sum(e.seconds for e in kept)
        longest = max(events, key=lambda e: e.seconds)
        shorter = replace(longest, seconds=max(0.0, longest.seconds - less))
        return [*(shorter if e is longest else e for e in events), Event(0.0, 0, -taken)]

    def takes(self, stand: str, way: int, backward: bool, gathered: bool = False) -> float:
        """Seconds of a layer, where all stay gathered or none."""
        return self.clock(way, backward, gathered)[stand][2][-1]

    def _copies(self, layers: Sequence[Layer], backward: bool) -> dict[int, Copies]:
        """Copies and waits for them, by the number of the layer in which they stand: about where `schedule_offload`
        would place them.

        Args:
            layers: as they run, what comes before all of them first. In forward the last one has the head with it.
        """
        begun = [self.clock(x.way, backward, backward and x.gathered)[x.stand][2] for x in layers]
        starts = list(accumulate((times[-1] for times in begun), initial=0.0))
        parts: list[Part] = []
        for n, (layer, start, times) in enumerate(zip(layers, starts, begun, strict=False)):
            if layer.away is not None:
                last = not backward and n == len(layers) - 1 > 1
                whole = min(times[-1], begun[n - 1][-1]) if last else times[-1]
                whens = (whole * (part if backward else part + 1) / PARTS for part in range(PARTS))
                parts += ((start + times[_line(times, when, backward)], layer.away) for when in whens)
        moves = sorted(_back(parts) if backward else _out(parts, starts[-1]), key=lambda move: move[0])
        out: dict[int, list[Copy]] = {}
        under_way = 0
        for when, launch, delta in moves:
            under_way += 1 if launch is not None else -1
            behind = bisect_right(starts, when + _SOON) if backward else bisect_left(starts, when - _SOON)
            at = max(0, min(behind, len(layers)) - 1)
            line = _line(begun[at], when - starts[at], backward)
            out.setdefault(at, []).append((line, launch, delta, under_way))
        return {n: tuple(copies) for n, copies in out.items()}


Copy = tuple[int, Transfer | None, int, int]
"""The event it stands in front of, what is launched (``None``: what was launched before is waited for), the bytes that
come to be, and how many others are under way behind it.
"""

Copies = tuple[Copy, ...]

Part = tuple[float, tuple[Transfer, Transfer, int]]
"""When it is there, or needed, in seconds; copies to the host and back, and bytes."""


def _line(begun: Sequence[float], when: float, backward: bool) -> int:
    """The event in front of which something stands that happens then: in backward before what runs then, in forward
    behind it.

    Args:
        begun: when events begin, and when the last one ends.
    """
    line = bisect_right(begun, when + _SOON) - 1 if backward else bisect_left(begun, when - _SOON)
    return min(line, len(begun) - 1)


def _out(parts: Sequence[Part], end: float) -> Iterator[tuple[float, Transfer | None, int]]:
    """When copies to the host are launched and complete, one behind the other, and what that takes."""
    free = 0.0
    for when, (copy, _, taken) in parts:
        yield when, copy, 0
        free = max(when, free) + copy.seconds
        yield min(free, end), None, -taken


def _back(parts: Sequence[Part]) -> list[tuple[float, Transfer | None, int]]:
    """When copies from the host are launched, as late as they still arrive, and needed."""
    moves: list[tuple[float, Transfer | None, int]] = []
    due = math.inf
    for when, (_, copy, taken) in reversed(parts):
        due = min(due, when) - copy.seconds
        moves += [(when, None, 0), (max(0.0, due), copy, taken)]
    return moves[::-1]


_SOON = 1e-9
"""Seconds that make no difference."""


def _there(event: Event) -> Event:
    """The same where parameters that it gathers are there."""
    return replace(event, launch=Transfer(0.0, 0.0)) if event.launch is not None and event.unit else event


def _delta(events: Sequence[Event]) -> int:
    return sum(e.delta for e in events)


def _gradients(events: Sequence[Event]) -> int:
    return sum(e.gradients for e in events)
