"""A step put together of pieces: one layer treated in some way, as it is among others that are treated alike.

Note [Pieces]
What a layer does under a choice hardly depends on what is chosen for the others. So a program in which all layers are
treated alike is cut and folded for each way to treat them, with and without gathers ahead, and taken apart where layers
begin: where they wait for their parameters, or compute something before that. A setting that treats layers differently
is put together of those pieces, in a fraction of a millisecond:

    all saved         | a | a | a | a | a |
    all recomputed    | b | b | b | b | b |
    first 2 recomputed, last 1 gathered, 2. offloaded
                      | b | a'| a | a | a"|

What stays gathered (a") is gathered in no time, and takes its memory from its forward to its backward. What goes to
the host (a') is launched behind its forward, away when compute has gone on for as long as a copy takes, and launched
back as long before its backward; where copies take less time than a layer, there is a program for that too. Where
unlike layers meet this is not exact: fused kernels and rooms for what is gathered may differ. So these are estimates,
for searching; what is found is scored with its own program.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from ..spec.hardware import Transfer
from .folding import Block, Event, Folded, play, runs

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


Both = tuple[Folded, Folded]
"""Of forward and of backward."""

WHOLE, AWAY = -1, -2
"""Where all layers stay gathered; where what all of them save goes to the host, as copies take no longer than layers.
"""

PARTS = 4
"""In how many copies a layer's values are taken to move, one behind the other."""


class Pieces:
    """Of programs each of which has all layers treated alike.

    Args:
        programs: gives those of a way to treat them; of `WHOLE`: those of the first way, but all layers stay gathered.
        owners: the layer that reads a unit's parameters, by its name.
        order: paths of the programs' layers, in forward's order.
    """

    def __init__(self, programs: Callable[[int], Both], owners: Mapping[str, str], order: Sequence[str]):
        self.programs, self.owners = cache(programs), owners
        self.place = {path: i for i, path in enumerate(order)}
        self.parts, self.takes = cache(self._parts), cache(self._takes)
        self.pace = [part.play()[0] / max(1e-12, sum(e.seconds for e in part.events)) for part in self.programs(0)]
        self.made: dict[object, Events] = {}

    def _parts(self, way: int, backward: bool) -> dict[str, Events]:
        """Events of each layer, and under ``""`` those before all of them."""
        part = self.programs(way)[backward]
        starts = sorted((at, path) for path, at in part.starts.items() if path in self.place)
        before = [0, *(at for at, _ in starts)]
        ends = [self._begins(path, part.events, last, at) for last, (at, path) in zip(before, starts, strict=False)]
        ends.append(len(part.events))
        out = {"": part.events[: ends[0]]}
        return out | {path: part.events[at:end] for (_, path), (at, end) in zip(starts, pairwise(ends), strict=True)}

    def _begins(self, layer: str, events: Events, last: int, at: int) -> int:
        """Where a layer begins: where it waits for its parameters, if it computes nothing before that (what it computes
        again may need none), or launches their gather, if nothing is computed until they are waited for.
        """
        for i in range(last, at):
            if events[i].launch is None and self.owners.get(events[i].unit) == layer:
                at = i
                break
        while at > last and self.owners.get(events[at - 1].unit) == layer and not events[at - 1].seconds:
            at -= 1
        return at

    def play(self, layers: Sequence[Layer], backward: bool, period: int = 1) -> tuple[float, int]:
        """Seconds, and bytes that are live at most, static buffers not counted.

        Args:
            layers: in forward's order.
            period: after how many layers choices may repeat themselves.
        """
        sequence = self._sequence(layers, backward)
        blocks: list[Block] = []
        for start, length, count in runs(sequence, 3, period):
            blocks.append(([e for key in sequence[start : start + length] for e in self.made[key]], count))
        some = self.programs(0)[backward]
        live = some.live
        if backward:  # what is there at the end is the same, however it came to be
            live += _delta(some.events) - sum(count * _delta(events) for events, count in blocks)
        return play(blocks, live)

    def slots(self, layers: Sequence[Layer]) -> dict[str, int]:
        """Bytes of static buffers, by name."""
        ways = {WHOLE} if all(layer.gathered for layer in layers) else {layer.way for layer in layers}
        out: dict[str, int] = {}
        for name, taken in (slot for way in ways for part in self.programs(way) for slot in part.slots.items()):
            out[name] = max(taken, out.get(name, 0))
        return out

    def _sequence(self, layers: Sequence[Layer], backward: bool) -> list[object]:
        """What happens, as keys of `made`: first what comes before all layers."""
        copies: Sequence[Sequence[Event]] = [()] * len(layers)
        if any(layer.away is not None for layer in layers):
            copies = self._back(layers) if backward else self._out(layers)
        order = range(len(layers))[:: -1 if backward else 1]
        head = replace(layers[order[0]], stand="", gathered=False)
        out = [self._piece(head, backward, self._kept(layers, len(layers), head, backward), ())]
        for i in order:
            out.append(self._piece(layers[i], backward, self._kept(layers, i, layers[i], backward), tuple(copies[i])))
        return out

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

    def _piece(self, layer: Layer, backward: bool, kept: tuple[bool, ...], copies: Events) -> object:
        moved = tuple((e.queue, e.back, e.delta, e.launch) for e in copies)
        key = (layer.stand, layer.way, layer.gathered, backward, kept, moved)
        if key not in self.made:
            events = self.parts(layer.way, backward)[layer.stand]
            gone = iter(kept)
            if any(kept):
                events = tuple(
                    replace(e, launch=_NOTHING) if e.launch is not None and e.unit and next(gone) else e for e in events
                )
            if layer.gathered:
                events = self._gathered(layer.stand, events, backward)
            self.made[key] = (*copies, *events) if backward else (*events, *copies)
        return key

    def _gathered(self, stand: str, events: Events, backward: bool) -> Events:
        """The same of a layer that stays gathered."""
        freed, kept = self.parts(0, True)[stand], self.parts(WHOLE, True)[stand]
        taken = _delta(freed) - _delta(kept)
        if not backward:
            return (Event(0.0, taken, taken), *events)
        less = sum(e.seconds for e in freed) - sum(e.seconds for e in kept)
        longest = max(events, key=lambda e: e.seconds)
        shorter = replace(longest, seconds=max(0.0, longest.seconds - less))
        return (*(shorter if e is longest else e for e in events), Event(0.0, 0, -taken))

    def _takes(self, stand: str, way: int, backward: bool) -> float:
        """Seconds of a layer."""
        return self.pace[backward] * sum(e.seconds for e in self.parts(way, backward)[stand])

    def _out(self, layers: Sequence[Layer]) -> list[list[Event]]:
        """Copies to the host and waits for them, behind each layer: as the pass `host` would place them."""
        out: list[list[Event]] = [[] for _ in layers]
        due: deque[tuple[float, int]] = deque()
        now = free = 0.0
        for i, layer in enumerate(layers):
            now += self.takes(layer.stand, layer.way, False)
            for _ in range(PARTS if layer.away is not None else 0):
                copy, _, taken = layer.away  # type: ignore[misc]
                out[i].append(Event(0.0, 0, 0, "offload", copy))
                free = max(now, free) + copy.seconds
                due.append((free, taken))
            while due and (due[0][0] <= now or i == len(layers) - 1):
                _, taken = due.popleft()
                out[i].append(Event(0.0, 0, -taken, "offload", back=len(due)))
        return out

    def _back(self, layers: Sequence[Layer]) -> list[list[Event]]:
        """Copies from the host, before the layer in whose time they have to begin, and waits for them."""
        begins, now = [0.0] * len(layers), 0.0
        for i in reversed(range(len(layers))):
            begins[i], now = now, now + self.takes(layers[i].stand, layers[i].way, True)
        launched: dict[int, list[int]] = {}
        due, at = math.inf, 0
        for i, layer in enumerate(layers):
            for _ in range(PARTS if layer.away is not None else 0):
                due, at = min(due, begins[i]) - layer.away[1].seconds, max(at, i)  # type: ignore[index]
                while at + 1 < len(layers) and begins[at] > due:
                    at += 1
                launched.setdefault(at, []).append(i)
        out: list[list[Event]] = [[] for _ in layers]
        under_way = 0
        for i in reversed(range(len(layers))):
            for j in reversed(launched.get(i, ())):
                _, copy, taken = layers[j].away  # type: ignore[misc]
                out[i].append(Event(0.0, taken, taken, "reload", copy))
                under_way += 1
            for _ in range(PARTS if layers[i].away is not None else 0):
                under_way -= 1
                out[i].append(Event(0.0, 0, 0, "reload", back=under_way))
        return out


_NOTHING = Transfer(0.0, 0.0)


def _delta(events: Sequence[Event]) -> int:
    return sum(e.delta for e in events)
