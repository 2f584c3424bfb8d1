"""The fastest step that fits: which layers stay gathered, are computed again, go to the host; how far ahead to gather.

Three searches start at the floor, the setting that takes least memory, and only ever look at what fits: one buys, step
by step, what saves most seconds per byte; one what saves most seconds; one keeps the best few at each step. The best
that any of them has met is taken. Before that the fastest setting of all is looked for, among gathers alone; nothing
else is, if it fits. Every setting is put on the clock and into memory whole: what two changes bring does not add up.
That is quick because of a run of equal choices a few layers say what all of them cost (Note [Extrapolation]).
"""

from __future__ import annotations

import copy
import gc
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import fx

from .. import pipeline
from ..config.best_effort import doing
from ..config.hardware import Hardware, Transfer, host_copy
from ..config.layer_choices import Choice, Choices
from ..config.options import Options
from ..cost_model import op_cost
from ..cost_model.estimate import optimizer_seconds
from ..cost_model.extrapolate import Extrapolated, extrapolated, runs
from ..cost_model.layer_model import AWAY, PARTS, WHOLE, Both, Layer, LayerModel
from ..cost_model.memory_model import Ledger, ledger
from ..cost_model.offload_schedule import OffloadTiming
from ..ir import ops
from ..ir.byte_costs import nbytes
from ..ir.program import Program, is_element
from ..ir.roles import Kind, role
from ..state.flat_buffer import FlatBuffer
from . import joint_graph
from .capture import Capture
from .joint_graph import Treatment
from .layer_match import layer_of

ALLOWED = ("gathered", "recompute", "offload", "optimizer", "prefetch")
"""What a plan may choose."""

WAYS = (((0, 0),), ((1, 0), (0, 1), (1, 1)), ((2, 1), (1, 2), (2, 2)))
"""How far ahead a plan may gather, and let reductions lag behind: by the memory that it takes. Where the last of some
is nothing worth, neither are the others of them, nor what is behind them. (Of more:
`mfsdp.cost_model.auto_prefetch.DEPTHS`.)
"""

WORTH = 0.01
"""What gathering earlier, or keeping gathered, has to be worth to be looked at: a part of the step."""

TRIES, SLACK = 4, 0.01
"""How often it is searched anew, with what the last estimate was wrong by, and how much of the budget may be left over
without that.
"""

EQUAL = 1e-9
"""Steps that differ by no more, as a part of them, are as fast as one another."""

WIDTH, ENOUGH, PATIENCE = 4, 0.1, 2
"""How many settings the third search keeps, how much slower than the best they may be, as a part of the step, and how
many steps it goes on without finding a better one."""

LEVELS = 5
"""How much may be saved where many layers are computed again, from nothing to all that is worth it."""

FEW = 4
"""Layers of a kind so few that every setting is looked at with its own program."""


@dataclass(frozen=True)
class Setting:
    """What is chosen, of all that can be."""

    choices: Choices
    prefetch: int = 1
    reduce_lag: int = 1
    streamed: bool = False
    """Whether the optimizer's state is on the host."""

    def __str__(self) -> str:
        parts = [str(c) for c in self.choices if str(c)]
        parts += [f"prefetch {self.prefetch}", f"reduce_lag {self.reduce_lag}"]
        return ", ".join(parts + ["optimizer state on the host"] * self.streamed)


@dataclass(frozen=True, order=True)
class Score:
    """What a step takes under a setting: smaller is better."""

    seconds: float
    peak: int
    """Bytes on the device."""
    host: int = 0
    """Bytes of host memory."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for garbage, which among so many graphs that live on is a fifth of a search."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # most of it lives on: it is not looked through at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@dataclass(frozen=True)
class Repeat:
    """What few layers stand for: a period of them happens so many times more often."""

    layers: tuple[str, ...]
    """Paths of those of the kind, in forward's order."""
    start: int
    """The first one of the period."""
    period: int
    times: int

    def borders(self, backward: bool, before: int = 0, behind: int = 0) -> list[str]:
        """The layers with which the period and so many more before and behind it begin, and that which comes then."""
        first, step = (self.start + self.period - 1, -self.period) if backward else (self.start, self.period)
        return [self.layers[first + i * step] for i in range(-before, behind + 2)]


@dataclass(eq=False)
class Planner:
    """Puts settings on the clock and into memory.

    Args:
        capture: that has kept its joint graph.
        options: those of the backend; what a plan chooses replaces theirs.
        machine: on what.
        account: of the programs as they were traced, all passes done.
        streamed: the same, with the optimizer's state on the host.
        steps: seconds of the optimizer's step; where its state is on the host, by those from one step to the next.
        rounds: how often forward and backward run in a step.
        allow: of `ALLOWED`.
        profile: what knows measured times; its optimizer's are of a step whose state is on the device.
    """

    capture: Capture
    options: Options
    machine: Hardware
    account: Ledger
    streamed: Ledger
    steps: Callable[[float | None], float]
    rounds: int = 1
    allow: Collection[str] = ALLOWED
    profile: Any = None
    scores: dict[Setting, Score] = field(default_factory=dict, repr=False)
    estimates: dict[Setting, Score] = field(default_factory=dict, repr=False)
    played: dict[Setting, tuple[list[tuple[float, int]], int, int]] = field(default_factory=dict, repr=False)
    pieces: dict[tuple[int, int], LayerModel] = field(default_factory=dict, repr=False)
    cuts: dict[Any, tuple[Program, ...]] = field(default_factory=dict, repr=False)
    short: dict[Any, tuple[Extrapolated, ...]] = field(default_factory=dict, repr=False)
    layers: dict[Choice, dict[str, Layer]] = field(default_factory=dict, repr=False)
    graphs: dict[Any, fx.GraphModule] = field(default_factory=dict, repr=False)
    laid: dict[Any, tuple[_Laid, ...]] = field(default_factory=dict, repr=False)

    @staticmethod
    @_uncollected()
    def of(
        capture: Capture,
        buffers: Sequence[FlatBuffer],
        options: Options,
        machine: Hardware,
        *,
        inputs: int = 0,
        other: int = 0,
        plain: int = 0,
        optimizer: str = "adamw",
        rounds: int = 1,
        allow: Collection[str] = ALLOWED,
        profile: Any = None,
    ) -> Planner:
        """For a capture that has kept its joint graph: what is there throughout a step follows from the programs as
        they are without a plan. Arguments as for `mfsdp.cost_model.memory_model.ledger`.
        """
        known = getattr(profile, "optimizer", 0.0)
        steps = partial(optimizer_seconds, buffers, plain, optimizer, machine, measured=known)
        found = Planner(capture, options, machine, _NOTHING, _NOTHING, steps, rounds, allow, profile)
        treated = joint_graph.treatments(found.kinds)
        few = {path: treated[path] for kind in found.kinds for path in found._few(kind)}
        programs = [laid.program for laid in found._laid(few, found.plain)]
        account = partial(
            ledger, programs, buffers, inputs=inputs, other=other, plain=plain, optimizer=optimizer, fused=found.fused,
            foreach=machine.cuda, fixed=machine.fixed, stands=found._stands(few), rounds=rounds,
        )  # fmt: skip
        found.account, found.streamed = account(stepping="whole"), account(stepping="offloaded")
        return found

    @property
    def joint(self) -> joint_graph.JointGraph:
        assert self.capture.joint is not None, "nothing was kept to be cut again"
        return self.capture.joint

    @cached_property
    def kinds(self) -> Choices:
        """Equal layers, nothing chosen for them."""
        return tuple(self.joint.kinds())

    @cached_property
    def fused(self) -> bool:
        return self.options.lowering != "eager"

    @cached_property
    def pace(self) -> OffloadTiming:
        """What places copies to the host."""
        return OffloadTiming(self.machine, self.fused)

    @cached_property
    def calls(self) -> set[str]:
        """Layers that can be left out."""
        return joint_graph.removable(self.joint.graph)

    # settings

    @cached_property
    def plain(self) -> Setting:
        """What is done without a plan."""
        depth = self.options.prefetch if isinstance(self.options.prefetch, int) else 1
        return Setting(self.kinds, depth, self.options.reduce_lag)

    @cached_property
    def floor(self) -> Setting:
        """What takes least memory."""
        choices = self.kinds
        if "recompute" in self.allow:
            choices = tuple(replace(c, recomputed=len(c.layers)) for c in choices)
        depth, lag = (0, 0) if "prefetch" in self.allow else (self.plain.prefetch, self.plain.reduce_lag)
        found = Setting(choices, depth, lag)
        if self.streams:
            found = self._least([found, replace(found, streamed=True)])
        for i, choice in enumerate(choices):
            levels = self.trails[choice.name, choice.layers] if choice.recomputed else [()]
            last = min(1, choice.recomputed)  # which is computed again at once: to save it may even take less
            again = [replace(choice, recomputed=choice.recomputed - less) for less in (0, last)]
            found = self._least([self._with(found, i, replace(c, saved=saved)) for c in again for saved in levels])
            found = self._least([found, *(self._leaving(found, i, m) for m in self.spaces[i])])
        return found

    def _leaving(self, setting: Setting, place: int, every: int) -> Setting:
        """With as many of a kind's layers on the host as fit it, halved until they do."""
        count = len(self.kinds[place].layers)
        while count:
            other = self._changed(place, setting, offloaded=(every, count))
            if self.fits(self.estimate(other), math.inf):
                return other
            count //= 2
        return setting

    def _least(self, settings: Sequence[Setting]) -> Setting:
        """The smallest of those that fit the host; the first one takes least of it."""
        there = [s for s in settings if self.fits(self.estimate(s), math.inf)] or settings[:1]
        return min(there, key=lambda s: (self.estimate(s).peak, self.estimate(s).seconds))

    def fits(self, score: Score, budget: float) -> bool:
        """Whether a step fits the device, of which it may take so many bytes, and what is known of its host."""
        return score.peak <= budget and score.host <= (self.machine.host_memory or math.inf)

    @cached_property
    def spaces(self) -> list[list[int]]:
        """For each kind of layers of every how many one may go to the host: so many that copies keep up with layers,
        also with those that stay gathered, and more; none where nothing may go, or would.
        """
        pairs = zip(self.kinds, self.copies, strict=True)
        return [self._spaces(choice, copy[0]) if copy is not None else [] for choice, copy in pairs]

    def _spaces(self, choice: Choice, copy: Transfer) -> list[int]:
        few, n = self._few(choice), len(choice.layers)
        takes = partial(self._pieces(self.plain.prefetch, self.plain.reduce_lag).takes, few[len(few) // 2], 0)
        forward, backward, gathered = takes(False), takes(True), takes(True, gathered=True)
        least, most = (
            max(1, math.ceil(PARTS * copy.seconds / max(1e-12, min(forward, back)))) for back in (backward, gathered)
        )
        return sorted(m for m in {least, least + 1, 2 * least, most} if m <= n)

    @cached_property
    def copies(self) -> list[tuple[Transfer, Transfer, int] | None]:
        """For each kind of layers copies to the host and back, and the bytes of what one of them moves; ``None`` where
        nothing may go, or would.
        """
        if "offload" not in self.allow:
            return [None] * len(self.kinds)
        moved = {choice.layers[:2][-1]: Treatment(offloaded=True) for choice in self.kinds}
        few = dict.fromkeys((path for kind in self.kinds for path in kind.layers[:3]), Treatment()) | moved
        forward, _ = self._programs(few, self._left_out(few) & self.calls)
        away = Counter[str]()
        for launch in forward.find(Kind.OFFLOAD):
            away[role(launch).unit] += nbytes(launch.meta["val"])  # type: ignore[union-attr]
        return [self._copied(away[path] // PARTS) for path in moved]

    def _copied(self, part: int) -> tuple[Transfer, Transfer, int] | None:
        return (host_copy(part, self.machine), host_copy(part, self.machine, back=True), part) if part else None

    @cached_property
    def ways(self) -> list[tuple[int, int]]:
        """How far ahead to gather and how long to let reductions lag that a plan chooses among: what is nothing worth
        where all is saved, and where all is computed again, is left out.
        """
        if "prefetch" not in self.allow:
            return [(self.plain.prefetch, self.plain.reduce_lag)]
        kept: list[tuple[int, int]] = []
        for base in (self.plain, self.floor):
            best: dict[tuple[int, int], float] = {}
            for ways in WAYS:
                takes = {way: partial(self._seconds_ahead, base, *way) for way in ways}
                if best and takes[ways[-1]]() >= min(best.values()) * (1 - WORTH):
                    break
                for (depth, lag), seconds in takes.items():
                    below = [s for (d, g), s in best.items() if d <= depth and g <= lag]
                    if not below or seconds() < min(below) * (1 - WORTH):
                        best[depth, lag] = seconds()
            kept += best
        return list(dict.fromkeys(kept))

    def _seconds_ahead(self, base: Setting, depth: int, lag: int) -> float:
        return self.estimate(replace(base, prefetch=depth, reduce_lag=lag)).seconds

    @cached_property
    def gathering(self) -> bool:
        """Whether it is worth anything to keep layers gathered, where all is saved or where all is computed again."""
        return "gathered" in self.allow and any(map(self._gathering, (self.plain, self.floor)))

    def _gathering(self, base: Setting) -> bool:
        whole = replace(base, choices=tuple(replace(c, gathered=len(c.layers)) for c in base.choices))
        return self.estimate(whole).seconds < self.estimate(base).seconds * (1 - WORTH)

    @cached_property
    def streams(self) -> bool:
        """Whether the optimizer's state may go to the host."""
        return "optimizer" in self.allow and self.streamed.host > 0

    def near(self, setting: Setting) -> Iterator[Setting]:
        """Settings one move away; with every move the optimizer's state may go, or come back."""
        for other in self._moved(setting):
            if other != setting:
                yield other
            if self.streams:
                yield replace(other, streamed=not other.streamed)

    def _moved(self, setting: Setting) -> Iterator[Setting]:
        yield setting
        yield from self._faster(setting)
        for i, choice in enumerate(setting.choices):
            for other in self._smaller(choice, self.spaces[i]):
                yield self._with(setting, i, other)

    def _faster(self, setting: Setting) -> Iterator[Setting]:
        """Moves of which only memory may keep one: gathers ahead, what stays gathered."""
        for depth, lag in self.ways:
            yield replace(setting, prefetch=depth, reduce_lag=lag)
        if not self.gathering:
            return
        for i, c in enumerate(setting.choices):
            for more in self._sizes(c):
                yield self._with(setting, i, replace(c, gathered=min(len(c.layers), max(0, c.gathered + more))))
        # a static buffer goes only with the last unit that takes it, of whichever kind
        one = (replace(c, gathered=min(len(c.layers), c.gathered + 1)) for c in setting.choices)
        yield replace(setting, choices=tuple(one))

    def _smaller(self, c: Choice, spaces: Sequence[int]) -> Iterator[Choice]:
        """Moves that give seconds for memory, or back: what is computed again, what goes to the host."""
        n, sizes = len(c.layers), self._sizes(c)
        if "recompute" in self.allow:
            yield from (replace(c, recomputed=min(n, max(0, c.recomputed + more))) for more in sizes)
            levels = self.trails[c.name, c.layers] if c.recomputed else ()
            yield from (replace(c, saved=saved) for saved in levels if saved != c.saved)
        every, first = c.offloaded
        for m in spaces:
            if first and m != every:
                yield replace(c, offloaded=(m, first))
            for more in sizes if m == every or not first else ():
                count = min(n, max(0, first + more * m))
                yield replace(c, offloaded=(m if count else 1, count))

    @staticmethod
    def _sizes(c: Choice) -> list[int]:
        """By how many layers a move changes what is chosen for them."""
        n = len(c.layers)
        sizes = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= max(1, n // 2)] + [n]
        return sizes + [-s for s in sizes]

    def many(self, c: Choice) -> bool:
        """Whether there are so many layers that few of them stand for all."""
        return len(c.layers) >= 3 * (2 * self.border(1, 1) + 1) and self.calls.issuperset(c.layers)

    @staticmethod
    def border(depth: int, lag: int) -> int:
        """How many layers of a run differ from those in its middle, at either end."""
        return max(depth, lag) + 1

    @cached_property
    def trails(self) -> dict[Any, list[tuple[str, ...]]]:
        """For each kind of layers what may be saved where they are computed again: nothing, then more and more, the
        dearest operators first, by the seconds that they take in backward for each byte of what they give. What a mix
        of less and of more does as well is left out.
        """
        return {(choice.name, choice.layers): self._trail(choice) for choice in self.kinds}

    def _trail(self, choice: Choice) -> list[tuple[str, ...]]:
        forward, backward = self._layer(choice, Treatment(again=True))
        again = self._computed(choice, backward)
        names = sorted(again, key=lambda name: again[name][0] / max(1, again[name][1]), reverse=True)
        levels = [tuple(names[:i]) for i in range(len(names) + 1)]
        costs = [(sum(_saved(forward)), self._seconds(backward))]
        for seconds, taken in map(again.__getitem__, names):
            costs.append((costs[-1][0] + taken, costs[-1][1] - seconds))
        forward, backward = self._layer(choice, Treatment())
        hull = _hull([*costs, (sum(_saved(forward)), self._seconds(backward))])
        kept = [i for i in range(len(levels)) if i in hull or i == 0]
        if any(map(self.many, self.kinds)):  # each is a cut of all layers
            step = (costs[kept[-1]][0] - costs[0][0]) / (LEVELS - 1)
            even = [costs[0][0] + n * step for n in range(LEVELS)]
            kept = [min(kept, key=lambda i: abs(costs[i][0] - taken)) for taken in even]
        return list(dict.fromkeys(levels[i] for i in kept))

    def _computed(self, choice: Choice, backward: Program) -> dict[str, tuple[float, int]]:
        """Operators of layers that backward computes again: their seconds, and bytes of what they give."""
        behind, times = joint_graph.differentiated(backward.gm), self._times(backward)
        found: dict[str, tuple[float, int]] = {}
        for node in backward.nodes:
            own = node not in behind and layer_of(joint_graph.described(node)) in choice.layers
            if own and (name := joint_graph.operator_of(node)):
                seconds, taken = found.get(name, (0.0, 0))
                results = [x.meta["val"] for x in node.users if is_element(x)] or node.meta["val"]
                found[name] = seconds + times[node].seconds, taken + nbytes(results)
        return found

    def _layer(self, choice: Choice, treatment: Treatment) -> tuple[Program, ...]:
        """Programs of a layer, cut as it is treated; of all layers that cannot be left out, where they are not traced
        once for all.
        """
        pair = next((p for p in joint_graph.pairs(self.joint.graph) if p.path == choice.layers[0]), None)
        if pair is None:
            others = {path for kind in self.kinds for path in kind.layers[1:] if path in self.calls}
            return self._programs(dict.fromkeys(choice.layers, treatment), others)
        with self.joint.settings():
            forward, backward = (Program(gm, "backward", []) for gm in joint_graph.cut(pair.body, treatment))
        forward.returned = pair.body.options["num_fwd_outputs"]
        return forward, backward

    def _times(self, program: Program) -> dict[fx.Node, op_cost.OpTime]:
        return op_cost.op_times(_Bare(program), self.machine, fused=self.fused)

    def _seconds(self, program: Program) -> float:
        """Of all kernels."""
        return sum(t.seconds for t in self._times(program).values() if t.transfer is None)

    # estimates

    def estimate(self, setting: Setting) -> Score:
        """About what a step takes under a setting (Note [Layer model]), where there are more than a few layers."""
        if all(len(kind.layers) <= FEW for kind in self.kinds):
            return self.score(setting)
        if setting not in self.estimates:
            self._doing()
            self.estimates[setting] = self._estimate(setting)
        return self.estimates[setting]

    def _estimate(self, setting: Setting) -> Score:
        between = replace(setting, streamed=False)  # where the optimizer's state is changes none of it
        if between not in self.played:
            self.played[between] = self._played(between)
        return self._total(setting, *self.played[between])

    def _played(self, setting: Setting) -> tuple[list[tuple[float, int]], int, int]:
        """What `_total` asks for."""
        pieces = self._pieces(setting.prefetch, setting.reduce_lag)
        layers = self._layers(setting)
        played = [pieces.play(layers, backward) for backward in (False, True)]
        moved = (
            PARTS * copy[2] * sum(map(choice.offloads, range(len(choice.layers))))
            for choice, copy in zip(setting.choices, self.copies, strict=True)
            if copy is not None
        )
        return played, sum(pieces.slots(layers).values()), sum(moved)

    def _pieces(self, depth: int, lag: int) -> LayerModel:
        if (depth, lag) not in self.pieces:
            few = {path for kind in self.kinds for path in self._few(kind)}
            order = [path for path in self.order if path in few]
            self.pieces[depth, lag] = LayerModel(partial(self._alike, depth, lag), self.owners, order)
        return self.pieces[depth, lag]

    def _few(self, choice: Choice) -> tuple[str, ...]:
        """The layers that pieces are taken of: the same few for every way, as each number of them is a cut."""
        few = 2 * max(self.border(*way) for ways in WAYS for way in ways) + 1
        return choice.layers[:few] if self.calls.issuperset(choice.layers) else choice.layers

    def _alike(self, depth: int, lag: int, way: int) -> Both:
        """Programs in which all layers are treated alike: saved in the first way, in others computed again."""
        choices = self.kinds
        if way == WHOLE:
            choices = tuple(replace(c, gathered=len(c.layers)) for c in choices)
        elif way == AWAY:
            choices = tuple(
                replace(c, offloaded=(1, len(c.layers))) if spaces[:1] == [1] else c
                for c, spaces in zip(choices, self.spaces, strict=True)
            )
        elif way:
            levels = [self.trails[c.name, c.layers] for c in choices]
            choices = tuple(
                replace(c, recomputed=len(c.layers), saved=level[min(way, len(level)) - 1])
                for c, level in zip(choices, levels, strict=True)
            )
        treated = joint_graph.treatments(choices)
        few = {path: treated[path] for choice in choices for path in self._few(choice)}
        forward, backward = self._folded(few, Setting(choices, depth, lag))
        return forward, backward

    def _layers(self, setting: Setting) -> list[Layer]:
        """Which piece every layer takes, in forward's order."""
        found: dict[str, Layer] = {}
        for place, choice in enumerate(setting.choices):
            if choice not in self.layers:
                self.layers[choice] = dict(self._stand_ins(place, choice))
            found |= self.layers[choice]
        return [found[path] for path in self.order]

    def _stand_ins(self, place: int, c: Choice) -> Iterator[tuple[str, Layer]]:
        """The piece that each layer takes, by its path."""
        n, kept = len(c.layers), len(self._few(c))
        way = 1 + self.trails[c.name, c.layers].index(c.saved) if c.recomputed else 0
        around = (kept - 1) // 2
        for i, path in enumerate(c.layers):
            stand = c.layers[i if i <= around or kept == n else max(around, i - (n - kept))]
            if c.offloads(i) and self.spaces[place][:1] == [1]:
                yield path, Layer(stand, AWAY, c.gathers(i))
            else:
                away = self.copies[place] if c.offloads(i) else None
                yield path, Layer(stand, way if c.recomputes(i) else 0, c.gathers(i), away)

    @cached_property
    def owners(self) -> dict[str, str]:
        """The layer that reads a unit's parameters, by its name."""
        return joint_graph.owners(self.joint.graph)

    @cached_property
    def order(self) -> list[str]:
        """Paths of all layers, in forward's order."""
        known = {path for kind in self.kinds for path in kind.layers}
        return [path for path in joint_graph.ordered(self.joint.graph) if path in known]

    # scores

    def score(self, setting: Setting) -> Score:
        """A step under a setting. Copies to the host that stand behind one another need not come to rest within a few
        layers, nor within some more: then it is of all layers.
        """
        if setting not in self.scores:
            self._doing()
            self.scores[setting] = self._score(setting)
        return self.scores[setting]

    def _doing(self) -> None:
        doing(f"planning: {len(self.estimates)} settings estimated, {len(self.scores)} simulated")

    @_uncollected()
    def _score(self, setting: Setting) -> Score:
        leaves = any(choice.offloaded[1] for choice in setting.choices)
        for beside in (1, 2) if leaves else (0,):
            treated, repeats = self._shortened(setting, beside)
            parts = self._folded(treated, setting)
            if not leaves or all(part.rests(r.borders(part.backward, 1, 1)) for part in parts for r in repeats):
                break
        else:
            parts, repeats = self._folded(joint_graph.treatments(setting.choices), setting), []
        parts = tuple(self._unfolded(part, repeats) for part in parts)
        away = next(part.host for part in parts if not part.backward)
        return self._total(setting, [part.play() for part in parts], self._slots(parts), away)

    def _total(self, setting: Setting, played: Sequence[tuple[float, int]], slots: int, away: int) -> Score:
        """A step, of what its programs take.

        Args:
            played: seconds, and bytes that are live at most.
            slots: bytes of static buffers.
            away: bytes that forward saves on the host.
        """
        changed = slots - self.slots
        account = self.streamed if setting.streamed else self.account
        peak = max(account.at_step + changed, *(account.lasting + changed + top for _, top in played))
        between = self.rounds * sum(seconds for seconds, _ in played)
        step = between + (self.steps(between) if setting.streamed else self.at_once)
        return Score(step, peak, account.host + away)

    @cached_property
    def at_once(self) -> float:
        """Seconds of the optimizer's step, where its state is on the device."""
        return self.steps(None)

    @staticmethod
    def _unfolded(part: Extrapolated, repeats: Sequence[Repeat]) -> Extrapolated:
        for repeat in repeats:
            first, behind = repeat.borders(part.backward)
            part = part.repeated(first, behind, repeat.times)
        return part

    @staticmethod
    def _slots(parts: Sequence[Extrapolated]) -> int:
        """Bytes of static buffers that serve all of them."""
        largest: dict[str, int] = {}
        for part in parts:
            for name, taken in part.slots.items():
                largest[name] = max(taken, largest.get(name, 0))
        return sum(largest.values())

    def changed(self, setting: Setting) -> int:
        """Bytes of static buffers that a setting takes more than the account has."""
        treated, _ = self._shortened(setting)
        return self._slots(self._folded(treated, setting)) - self.slots

    @cached_property
    def slots(self) -> int:
        """Bytes of static buffers in the account."""
        return sum(e.nbytes for e in self.account.entries if e.name in ("gathered parameters", "gradient buckets"))

    def _shortened(self, setting: Setting, beside: int = 0) -> tuple[dict[str, Treatment], list[Repeat]]:
        """Which layers are kept, of runs of equal treatment, and what of them is to be repeated.

        Args:
            beside: how many periods more to keep at either end of a run than it takes.
        """
        border = self.border(setting.prefetch, setting.reduce_lag)
        treated = joint_graph.treatments(setting.choices)
        kept: dict[str, Treatment] = {}
        repeats: list[Repeat] = []
        for choice in setting.choices:
            states = [treated[path] for path in choice.layers]
            short: list[Treatment] = []
            for start, period, count in runs(states, 2, choice.offloaded[0]):
                around = -(-border // period) + beside
                few = 2 * around + 1
                if count == len(states):  # there may be programs of those already
                    few = max(few, len(self._few(choice)))
                if few < count and self.calls.issuperset(choice.layers):
                    # layers are equal: the first ones stand for all
                    repeats.append(Repeat(choice.layers, len(short) + around * period, period, count - few))
                    count = few
                short += states[start : start + period] * count
            kept |= zip(choice.layers[: len(short)], short, strict=True)
        return kept, repeats

    def _folded(self, treated: dict[str, Treatment], setting: Setting) -> tuple[Extrapolated, ...]:
        key = (tuple(treated.items()), setting.prefetch, setting.reduce_lag)
        if key not in self.short:
            laid = self._laid(treated, setting)
            self.short[key] = tuple(part.launched(setting.prefetch, self.pace, self.profile) for part in laid)
        return self.short[key]

    def _laid(self, treated: dict[str, Treatment], setting: Setting) -> tuple[_Laid, ...]:
        """Programs of layers that are treated so, ready for gathers to be launched so far ahead or so far."""
        key = tuple(treated.items())
        if (key, setting.reduce_lag) not in self.laid:
            options = replace(self.options, reduce_lag=setting.reduce_lag)
            if key not in self.cuts:
                self.cuts[key] = self._programs(treated, self._left_out(treated))
                for program in self.cuts[key]:
                    rows = pipeline.chosen(options, self.machine.cuda, pace=self.pace)
                    pipeline.rewrite(program, pipeline.phases(rows).first)
            self.laid[key, setting.reduce_lag] = tuple(
                _Laid(original.copy(), options, self.machine.cuda, self.pace, self.rounds == 1)
                for original in self.cuts[key]
            )
        return self.laid[key, setting.reduce_lag]

    def _left_out(self, few: Collection[str]) -> set[str]:
        """Layers that are not among those."""
        return {path for kind in self.kinds for path in kind.layers}.difference(few)

    def _stands(self, few: Collection[str]) -> dict[str, str]:
        """The module of a layer among those whose parameters are like another layer's, by the latter's path."""
        first = {path: kind.layers[0] for kind in self.kinds for path in kind.layers if path not in few}
        units = {unit.name: unit.fqn for unit in self.capture.units}
        layers = {units[name]: path for name, path in self.owners.items() if path in first and name in units}
        return {fqn: first[path] + fqn.removeprefix(path) for fqn, path in layers.items() if fqn.startswith(path)}

    def _programs(self, treated: dict[str, Treatment], without: Collection[str]) -> tuple[Program, ...]:
        """The programs of layers that are treated so, others left out."""
        capture = copy.copy(self.capture)
        capture.shards, capture.treated = dict(capture.shards), treated
        key = frozenset(without)
        with self.joint.settings():
            if key not in self.graphs:
                self.graphs[key] = joint_graph.copied(self.joint.graph)
                done = joint_graph.without(self.graphs[key], without)
                assert done, "a layer that cannot be left out"
            cut = capture.divide(joint_graph.copied(self.graphs[key]), self.joint.inputs, self.joint.options)
            return capture.program(cut[0], "forward"), capture.program(cut[1], "backward")

    # searches

    @_uncollected()
    def best(self, budget: int) -> Setting | None:
        """The fastest setting that fits; ``None`` if the floor does not."""
        if self.fits(self.score(self.top), budget):
            return self.top
        if not self.fits(self.score(self.floor), budget):
            return None
        return self._cleared(self._tried(self.floor, budget) or self.floor)

    @cached_property
    def top(self) -> Setting:
        """The fastest setting where memory is no matter, so that nothing is computed again or goes to the host."""
        return self._cleared(self._tried(self.plain, math.inf) or self.plain)

    def _cleared(self, setting: Setting) -> Setting:
        """Without what has no effect."""
        plain = replace(setting, choices=tuple(map(_plain, setting.choices)))
        self.scores[plain] = self.score(setting)  # the same treatment of every layer
        return plain

    def _tried(self, start: Setting, budget: float) -> Setting | None:
        """The fastest setting by its score, of those that searches find, if any fits."""
        met: list[Setting] = []
        wrong = 0
        for _ in range(TRIES):
            found = self._search(start, budget - wrong)
            if found in met:
                break
            met.insert(0, found)
            peak = self.score(found).peak
            wrong = peak - self.estimate(found).peak
            if peak <= budget <= peak + SLACK * budget:
                break
        fit = [s for s in met if self.fits(self.score(s), budget)]
        least = min((self.score(s).seconds for s in fit), default=0.0)
        return next((s for s in fit if self.score(s).seconds <= least * (1 + EQUAL)), None)

    def _search(self, start: Setting, budget: float) -> Setting:
        ends = [self._greedy(start, budget, _price), self._greedy(start, budget, _seconds), self._beam(start, budget)]
        return self._eased(min(ends, key=self.estimate), budget)

    def _eased(self, setting: Setting, budget: float) -> Setting:
        """Without what the floor has and the budget does not ask for, where that is as fast."""
        eased: list[Callable[[Setting], Setting]] = [lambda s: replace(s, streamed=False)]
        for i, kind in enumerate(self.kinds):
            for less in ("offloaded", "recomputed", "gathered"):
                eased.append(partial(self._changed, i, **{less: getattr(kind, less)}))
        for ease in eased:
            other = ease(setting)
            here, there = self.estimate(setting), self.estimate(other)
            if self.fits(there, budget) and there.seconds <= here.seconds * (1 + EQUAL):
                setting = other
        return setting

    @staticmethod
    def _with(setting: Setting, place: int, choice: Choice) -> Setting:
        return replace(setting, choices=(*setting.choices[:place], choice, *setting.choices[place + 1 :]))

    def _changed(self, place: int, setting: Setting, **choice: Any) -> Setting:
        return self._with(setting, place, replace(setting.choices[place], **choice))

    def _fitting(self, setting: Setting, budget: float) -> list[Setting]:
        near = self.near(setting) if budget < math.inf else self._faster(setting)
        return [s for s in near if self.fits(self.estimate(s), budget)]

    def _greedy(self, start: Setting, budget: float, worth: Callable[[Score, Score], Any]) -> Setting:
        """Buys what is worth most, until nothing is that fits."""
        now = start
        while True:
            here = self.estimate(now)
            better = [s for s in self._fitting(now, budget) if self.estimate(s).seconds < here.seconds - 1e-9]
            if not better:
                return now
            now = max(better, key=lambda s: worth(here, self.estimate(s)))

    def _beam(self, start: Setting, budget: float) -> Setting:
        """Keeps the best few at each step, also those that are a little slower than what was met before."""
        seen, front, best, left = {start}, [start], start, PATIENCE
        while front and left:
            found = dict.fromkeys(s for now in front for s in self._fitting(now, budget) if s not in seen)
            seen |= found.keys()
            front = sorted(found, key=self.estimate)[:WIDTH]
            left -= 1
            if front and self.estimate(front[0]) < self.estimate(best):
                best, left = front[0], PATIENCE
            front = [s for s in front if self.estimate(s).seconds < self.estimate(best).seconds * (1 + ENOUGH)]
        return best


def _plain(choice: Choice) -> Choice:
    """The same without what has no effect."""
    if not any(map(choice.recomputes, range(len(choice.layers)))):
        choice = replace(choice, recomputed=0, saved=())
    return choice


def _saved(forward: Program) -> list[int]:
    """Bytes of each value that forward saves."""
    kept = [n for n in forward.results()[forward.returned or 0 :] if isinstance(n, fx.Node) and n.op != "placeholder"]
    return [nbytes(n.meta["val"]) for n in dict.fromkeys(kept)]


def _hull(points: Sequence[tuple[float, float]]) -> set[int]:
    """Which points no mix of two others is below and left of: the lower convex hull, by index."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    hull: list[int] = []
    for i in order:
        while hull and points[i][1] >= points[hull[-1]][1] and points[i][0] >= points[hull[-1]][0]:
            break
        else:
            while len(hull) > 1 and _above(points[hull[-2]], points[hull[-1]], points[i]):
                hull.pop()
            hull.append(i)
    return set(hull)


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies above the line from a to c."""
    this, that = (b[1] - a[1]) * (c[0] - a[0]), (c[1] - a[1]) * (b[0] - a[0])
    return this > that and not math.isclose(this, that, rel_tol=1e-9)


def _price(before: Score, after: Score) -> Any:
    more = after.peak - before.peak
    saved = before.seconds - after.seconds
    return (saved / more if more > 0 else float("inf"), saved)


def _seconds(before: Score, after: Score) -> Any:
    return before.seconds - after.seconds


class _Laid:
    """A program after all passes but those that launch and give places, which can be done over and over: launches of
    gathers move past what the passes between them do (`mfsdp.cost_model.auto_prefetch`).

    Args:
        program: behind the first of its passes (`pipeline.Phases`).
        first: whether accumulators come to be in it (`mfsdp.cost_model.memory_model.Ledger.first`).
    """

    def __init__(self, program: Program, options: Options, wide: bool, pace: OffloadTiming, first: bool):
        self.program, self.memo, self.first = program, dict[Any, Any](), first
        self.options, self.wide = options, wide
        pipeline.rewrite(program, pipeline.phases(pipeline.chosen(options, wide, pace=pace)).deferred)
        self.order = program.nodes[:-1]

    def launched(self, depth: int, pace: OffloadTiming, profile: Any) -> Extrapolated:
        """Its events, with gathers launched so far ahead."""
        p = self.program
        p.move(self.order, p.output)
        rows = pipeline.chosen(replace(self.options, prefetch=depth), self.wide, pace=pace)
        pipeline.rewrite(p, pipeline.phases(rows).again)
        known = profile.given(p) if profile is not None else {}
        times = op_cost.op_times(p, pace.machine, fused=pace.fused, memo=self.memo, **known)
        return extrapolated(p, times, pace.fused, self.memo, accumulators=self.first)


class _Bare(Program):
    """A layer's graph, cut, which no unit is known of: markers cost nothing."""

    def __init__(self, program: Program):
        super().__init__(program.gm, program.phase, program.units)

    @property
    def nodes(self) -> list[Any]:
        return [n for n in self.graph.nodes if n.target not in (ops.param, ops.param_grad)]


_NOTHING = Ledger((), 0, "optimizer", "", 0, {}, {})
