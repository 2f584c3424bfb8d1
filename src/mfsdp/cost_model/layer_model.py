"""Estimates a step layer by layer: each layer's events come from a program that treats all layers equally.

Note [Layer model]
A layer's time and memory under a choice hardly depend on the choices for other layers. So for each treatment (saved,
recomputed, ...), with and without prefetched gathers, a program that treats all layers equally is turned into events
(Note [Extrapolation]) and split where layers begin: where they wait for their parameters, or compute before that wait.
The events of a setting that mixes treatments are composed of these pieces, in a fraction of a millisecond:

    all saved         | a | a | a | a | a |
    all recomputed    | b | b | b | b | b |
    first 2 recomputed, last 1 gathered, 2. offloaded
                      | b | a'| a | a | a"|

A layer that stays gathered (a") takes no time to gather, and holds its memory from its forward to its backward. An
offloaded layer (a') copies its values in four parts while its forward runs. Each part's memory is freed after the
copy's duration, and its reload is launched as long before its backward needs it. If copies take less time than a layer,
a separate program covers that (`AWAY`). A piece's time and memory depend only on the launches in flight at its start:
pieces and in-flight states are numbered, and each pair is simulated once.

Between layers with different treatments this is not exact: fused kernels and static buffers may differ. So the search
uses these estimates, and the planner scores its result with the setting's own program.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from ..config.hardware import Transfer
from .extrapolate import Event, Extrapolated, Left, Segment, drained, segment, static_bytes

Events = tuple[Event, ...]


@dataclass(frozen=True)
class Layer:
    """A layer of a setting, and which events it takes."""

    stand: str
    """Path of the layer whose piece it takes."""
    way: int = 0
    """Number of the treatment."""
    gathered: bool = False
    """Whether its parameters stay gathered."""
    away: tuple[Transfer, Transfer, int] | None = None
    """If offloaded: the copies of one of `PARTS` parts to the host and back, and the part's bytes."""


Both = tuple[Extrapolated, Extrapolated]
"""Events of forward and of backward."""

WHOLE, AWAY = -1, -2
"""Treatments: all layers stay gathered; all layers are offloaded, as copies take no longer than layers."""

PARTS = 4
"""Number of successive copies that an offloaded layer's values are modelled with."""


class LayerModel:
    """Composes steps of layers from programs that each treat all layers equally.

    Args:
        programs: returns the programs of a treatment; of `WHOLE`, those of treatment 0 with all layers gathered.
        owners: path of the layer that reads a unit's parameters, by the unit's name.
        order: paths of the programs' layers, in the order of forward.
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
        self.simulated: dict[tuple[int, int], tuple[Segment, int]] = {}

    def _parts(self, way: int, backward: bool) -> dict[str, Events]:
        """Returns the events of each layer, and under ``""`` those before all layers."""
        events = self.programs(way)[backward].events
        return {path: events[at:end] for path, (at, end, _) in self.clock(way, backward).items()}

    def _clock(self, way: int, backward: bool, gathered: bool = False) -> dict[str, tuple[int, int, list[float]]]:
        """Returns for each layer, and under ``""`` for what comes before all layers: its first event, the one after its
        last, and the start times of these and of those between, in seconds from the first.

        Args:
            gathered: whether all layers stay gathered.
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
        """Returns the event with which a layer begins. That is its start ``at`` (recomputation may need no parameters)
        or an earlier wait for its parameters, if half of the previous layer's time has passed by then. The layer's
        gathers and waits directly before that, with no compute, belong to it.
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
        """Returns seconds and peak live bytes, without static buffers.

        Args:
            layers: in the order of forward.
        """
        now, live, top, left, gradients = 0.0, 0, 0, 0, 0
        for piece in self._sequence(layers, backward):
            if (piece, left) not in self.simulated:
                taken = segment(self.events[piece], self.states[left])
                self.simulated[piece, left] = taken, self._state(taken.left)
            taken, left = self.simulated[piece, left]
            now += taken.seconds
            top = max(top, live + taken.top)
            live += taken.delta
            gradients += self.gradients(piece)
        some = self.programs(0)[backward]
        # memory at the end of backward, without accumulators, is the same in all settings
        begin = some.live + (_delta(some.events) - _gradients(some.events) - live + gradients if backward else 0)
        return now + drained(self.states[left]), begin + top

    def _state(self, left: Left) -> int:
        """Returns the number of an in-flight state."""
        if left not in self.numbers:
            self.numbers[left] = len(self.states)
            self.states.append(left)
        return self.numbers[left]

    def static_bytes(self, layers: Sequence[Layer]) -> int:
        """Returns the bytes of static buffers."""
        ways = {WHOLE} if all(layer.gathered for layer in layers) else {layer.way for layer in layers}
        return static_bytes(part for way in ways for part in self.programs(way))

    def _sequence(self, layers: Sequence[Layer], backward: bool) -> list[int]:
        """Returns the pieces in order, as indices of ``events``: first the piece before all layers."""
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
        """Returns, for each gather that backward launches in a piece, whether its layer stays gathered."""
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
            queue = "reload" if backward else "offload"  # other queues than those of `AWAY`'s programs
            for (_, launch, delta, back), (at, end) in zip(copies, pairwise(before[1:]), strict=True):
                moved = Event(0.0, max(0, delta), delta, queue, launch, back=back if launch is None else 0)
                mixed += [moved, *events[at:end]]
            if layer.gathered:
                mixed = self._gathered(layer.stand, mixed, backward)
            self.made[key] = len(self.events)
            self.events.append(tuple(mixed))
        return self.made[key]

    def _gathered(self, stand: str, events: list[Event], backward: bool) -> list[Event]:
        """Returns the events of a layer if it stays gathered."""
        freed, kept = self.parts(0, True)[stand], self.parts(WHOLE, True)[stand]
        taken = _delta(freed) - _delta(kept)
        if not backward:
            return [Event(0.0, taken, taken), *events]
        less = sum(e.seconds for e in freed) - sum(e.seconds for e in kept)
        longest = max(events, key=lambda e: e.seconds)
        shorter = replace(longest, seconds=max(0.0, longest.seconds - less))
        return [*(shorter if e is longest else e for e in events), Event(0.0, 0, -taken)]

    def takes(self, stand: str, way: int, backward: bool, gathered: bool = False) -> float:
        """Returns the seconds of a layer. ``gathered``: whether all layers stay gathered."""
        return self.clock(way, backward, gathered)[stand][2][-1]

    def _copies(self, layers: Sequence[Layer], backward: bool) -> dict[int, Copies]:
        """Returns host copies and their waits, by number of the layer that contains them: approximately where
        `schedule_offload` places them.

        Args:
            layers: in execution order, after the piece before all layers. In forward the last one includes the head.
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
        in_flight = 0
        for when, launch, delta in moves:
            in_flight += 1 if launch is not None else -1
            behind = bisect_right(starts, when + _SOON) if backward else bisect_left(starts, when - _SOON)
            at = max(0, min(behind, len(layers)) - 1)
            line = _line(begun[at], when - starts[at], backward)
            out.setdefault(at, []).append((line, launch, delta, in_flight))
        return {n: tuple(copies) for n, copies in out.items()}


Copy = tuple[int, Transfer | None, int, int]
"""The event that follows it, the launched transfer (``None`` for a wait), the bytes allocated, and the number of copies
in flight after it.
"""

Copies = tuple[Copy, ...]

Part = tuple[float, tuple[Transfer, Transfer, int]]
"""When a part is computed (forward) or needed (backward), in seconds; its copies to the host and back; its bytes."""


def _line(begun: Sequence[float], when: float, backward: bool) -> int:
    """Returns the event before which to place something at time ``when``: in backward the one that runs then, in
    forward the next one.

    Args:
        begun: start times of the events, and the end of the last one.
    """
    line = bisect_right(begun, when + _SOON) - 1 if backward else bisect_left(begun, when - _SOON)
    return min(line, len(begun) - 1)


def _out(parts: Sequence[Part], end: float) -> Iterator[tuple[float, Transfer | None, int]]:
    """Yields launches and completions of successive copies to the host: time, transfer, change in memory."""
    free = 0.0
    for when, (copy, _, taken) in parts:
        yield when, copy, 0
        free = max(when, free) + copy.seconds
        yield min(free, end), None, -taken


def _back(parts: Sequence[Part]) -> list[tuple[float, Transfer | None, int]]:
    """Returns launches of copies from the host, each as late as it still arrives in time, and their waits."""
    moves: list[tuple[float, Transfer | None, int]] = []
    due = math.inf
    for when, (_, copy, taken) in reversed(parts):
        due = min(due, when) - copy.seconds
        moves += [(when, None, 0), (max(0.0, due), copy, taken)]
    return moves[::-1]


_SOON = 1e-9
"""Tolerance in seconds."""


def _there(event: Event) -> Event:
    """Returns an event whose gather, if it launches one, takes no time."""
    return replace(event, launch=Transfer(0.0, 0.0)) if event.launch is not None and event.unit else event


def _delta(events: Sequence[Event]) -> int:
    return sum(e.delta for e in events)


def _gradients(events: Sequence[Event]) -> int:
    return sum(e.gradients for e in events)
