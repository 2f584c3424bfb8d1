"""The fastest step that fits: which layers stay gathered, are computed again, go to the host; how far ahead to gather.

Three searches start at the floor, the setting that takes least memory, and only ever look at what fits: one buys, step
by step, what saves most seconds per byte; one what saves most seconds; one keeps the best few at each step. The best
that any of them has met is taken. Every setting is put on the clock and into memory whole: what two changes bring does
not add up. That is quick because of a run of equal choices a few layers say what all of them cost (Note [Folding]).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import fx

from .. import pipeline
from ..costs import clock
from ..costs.estimate import optimizer_seconds
from ..costs.folding import Folded, folded, runs
from ..costs.ledger import Ledger, ledger
from ..costs.pace import Pace
from ..graph import ops
from ..graph.cost import nbytes
from ..graph.program import Program
from ..spec.choices import Choice, Choices
from ..spec.config import Options
from ..spec.hardware import Hardware, host_copy
from ..state.buffer import FlatBuffer
from . import cutting
from .capture import Capture
from .cutting import Treatment
from .leaving import LEAST

ALLOWED = ("gathered", "recompute", "offload", "optimizer", "prefetch")
"""What a plan may choose."""

WAYS = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 2))
"""How far ahead a plan may gather, and let reductions lag behind: by the memory that it takes."""

WORTH = 0.01
"""What gathering earlier, or keeping gathered, has to be worth to be looked at: a part of the step."""

WIDTH, ENOUGH = 6, 0.1
"""How many settings the third search keeps, and how much slower than the best they may be: a part of the step."""


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


Repeat = tuple[tuple[str, str], tuple[str, str], int]
"""Of forward, from the start of which layer to that of which other one; of backward the same; how often."""


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
        profile: what knows measured times.
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
    cuts: dict[Any, tuple[Program, ...]] = field(default_factory=dict, repr=False)
    short: dict[Any, tuple[Folded, ...]] = field(default_factory=dict, repr=False)
    seen: set[Setting] = field(default_factory=set, repr=False)
    """Settings that have been scored with all layers."""
    laid: dict[Any, tuple[_Laid, ...]] = field(default_factory=dict, repr=False)

    @staticmethod
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
        they are without a plan. Arguments as for :func:`mfsdp.costs.ledger.ledger`.
        """
        steps = partial(optimizer_seconds, buffers, plain, optimizer, machine)
        found = Planner(capture, options, machine, _NOTHING, _NOTHING, steps, rounds, allow, profile)
        programs = found._programs({}, ())
        for program in programs:
            pipeline.run(program, passes=pipeline.chosen(options, machine.cuda), checked=False, listings=False)
        account = partial(
            ledger, programs, buffers, inputs=inputs, other=other, plain=plain, optimizer=optimizer, fused=found.fused,
            foreach=machine.cuda, fixed=machine.fixed,
        )  # fmt: skip
        found.account, found.streamed = account(stepping="whole"), account(stepping="offloaded")
        return found

    @property
    def joint(self) -> cutting.Joint:
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
    def pace(self) -> Pace:
        """What places copies to the host."""
        return Pace(self.machine, self.fused, self.profile)

    @cached_property
    def calls(self) -> set[str]:
        """Layers that can be left out."""
        chains: dict[Any, list[str]] = {}
        for pair in cutting.pairs(self.joint.graph):
            chains.setdefault(pair.body, []).append(pair.path)
        return {path for paths in chains.values() if len(set(paths)) == len(paths) for path in paths}

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
            found = self._least([self._with(found, i, replace(choice, saved=saved)) for saved in levels])
            left = (replace(found.choices[i], offloaded=(m, len(choice.layers))) for m in self.spaces[i])
            found = self._least([found, *(self._with(found, i, other) for other in left)])
        return found

    def _least(self, settings: Sequence[Setting]) -> Setting:
        return min(settings, key=lambda s: (self.score(s).peak, self.score(s).seconds))

    @cached_property
    def spaces(self) -> list[list[int]]:
        """For each kind of layers of every how many one may go to the host: so many that copies keep up with compute,
        and more; none where nothing may go, or would.
        """
        return [self._spaces(i, choice) if "offload" in self.allow else [] for i, choice in enumerate(self.kinds)]

    def _spaces(self, place: int, choice: Choice) -> list[int]:
        forward, _, saved = self._layer(choice, Treatment())
        copy = sum(host_copy(taken, self.machine).seconds for taken in saved if taken >= LEAST)
        least, n = max(1, math.ceil(copy / max(forward, 1e-12))), len(choice.layers)
        if least > n or not self.score(self._with(self.plain, place, replace(choice, offloaded=(least, n)))).host:
            return []
        more = () if self.many(choice) else (least + 1, 2 * least)
        return sorted({least, *(m for m in more if m <= n)})

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
            for depth, lag in WAYS:
                seconds = self.score(replace(base, prefetch=depth, reduce_lag=lag)).seconds
                below = [s for (d, g), s in best.items() if d <= depth and g <= lag]
                if not below or seconds < min(below) * (1 - WORTH):
                    best[depth, lag] = seconds
            kept += best
        return list(dict.fromkeys(kept))

    @cached_property
    def gathering(self) -> bool:
        """Whether it is worth anything to keep layers gathered."""
        if "gathered" not in self.allow:
            return False
        whole = replace(self.plain, choices=tuple(replace(c, gathered=len(c.layers)) for c in self.kinds))
        return self.score(whole).seconds < self.score(self.plain).seconds * (1 - WORTH)

    @cached_property
    def streams(self) -> bool:
        """Whether the optimizer's state may go to the host."""
        return "optimizer" in self.allow and self.streamed.host > 0

    def near(self, setting: Setting) -> Iterator[Setting]:
        """Settings one move away."""
        if self.streams:
            yield replace(setting, streamed=not setting.streamed)
        for depth, lag in self.ways:
            if (depth, lag) != (setting.prefetch, setting.reduce_lag):
                yield replace(setting, prefetch=depth, reduce_lag=lag)
        for i, choice in enumerate(setting.choices):
            for other in self._near(choice, self.spaces[i]):
                yield self._with(setting, i, other)

    def _near(self, c: Choice, spaces: Sequence[int]) -> Iterator[Choice]:
        n = len(c.layers)
        sizes = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= max(1, n // 2)] + [n]
        for more in (*sizes, *(-s for s in sizes)):
            if "recompute" in self.allow:
                yield from self._settled(replace(c, recomputed=min(n, max(0, c.recomputed + more))))
            if self.gathering:
                yield from self._settled(replace(c, gathered=min(n, max(0, c.gathered + more))))
        levels = self.trails[c.name, c.layers] if "recompute" in self.allow and c.recomputed else ()
        yield from (replace(c, saved=saved) for saved in levels if saved != c.saved)
        every, first = c.offloaded
        for m in spaces:
            if first and m != every:
                yield from self._settled(replace(c, offloaded=(m, first)))
            for more in (*sizes, *(-s for s in sizes)) if m == every or not first else ():
                count = min(n, max(0, first + more * m))
                yield from self._settled(replace(c, offloaded=(m if count else 1, count)))

    def _settled(self, c: Choice) -> Iterator[Choice]:
        """Of many layers only counts of which every run of equal ones can be folded: what few layers in between cost is
        found out at the end (`_polished`).
        """
        n, least = len(c.layers), 2 * self.border(1, 1) + 1
        if not self.many(c):
            yield c
            return
        states = [(c.recomputes(i), c.gathers(i), c.offloads(i)) for i in range(n)]
        if all(count * period >= least for _, period, count in runs(states, 2, c.offloaded[0])):
            yield c

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
        dearest operators first, by the seconds that backward has less of them for each byte. What a mix of less and of
        more does as well is left out.
        """
        out = {}
        for choice in self.kinds:
            bare = Treatment(again=True)
            seconds, taken = self._body(choice, bare)
            priced = []
            for name in self._operators(choice):
                less, more = self._body(choice, replace(bare, saved=(name,)))
                if less < seconds * (1 - 1e-6):
                    priced.append(((seconds - less) / max(1, more - taken), name))
            names = [name for _, name in sorted(priced, reverse=True)]
            levels = [tuple(names[:i]) for i in range(len(names) + 1)]
            costs = [self._body(choice, replace(bare, saved=level)) for level in levels]
            costs.append(self._body(choice, Treatment()))
            hull = _hull([(taken, seconds) for seconds, taken in costs])
            kept = [level for i, level in enumerate(levels) if i in hull or i == 0]
            if self.many(choice):  # each is a cut of its own, beside all others
                kept = [kept[0], kept[len(kept) // 2], kept[-1]]
            out[choice.name, choice.layers] = list(dict.fromkeys(kept))
        return out

    def _pair(self, choice: Choice) -> cutting.Pair | None:
        """The calls of the first layer of a kind, if it is traced once for all."""
        return next((p for p in cutting.pairs(self.joint.graph) if p.path == choice.layers[0]), None)

    def _operators(self, choice: Choice) -> list[str]:
        path, pair = choice.layers[0], self._pair(choice)
        graph = self.joint.graph if pair is None else pair.body.joint
        behind = cutting.differentiated(graph)
        nodes = [n for n in graph.graph.nodes if n not in behind]
        own = nodes if pair is not None else [n for n in nodes if n.meta.get(cutting.LAYER) == path]
        return list(dict.fromkeys(name for n in own if (name := cutting.operator_of(n))))

    def _body(self, choice: Choice, treatment: Treatment) -> tuple[float, int]:
        """Seconds of a layer's backward, and bytes that its forward saves."""
        _, backward, saved = self._layer(choice, treatment)
        return backward, sum(saved)

    def _layer(self, choice: Choice, treatment: Treatment) -> tuple[float, float, list[int]]:
        """Seconds of a layer's forward and backward, and bytes of each value that its forward saves, cut as it is
        treated; of all layers, where they are not traced once for all.
        """
        pair = self._pair(choice)
        if pair is None:
            forward, backward = self._programs(dict.fromkeys(choice.layers, treatment), ())
            kept = [n for n in forward.results()[forward.returned or 0 :] if isinstance(n, fx.Node)]
            taken = [nbytes(n.meta["val"]) for n in dict.fromkeys(kept)]
            return self._seconds(forward), self._seconds(backward), taken
        with self.joint.settings():
            forward_gm, backward_gm = cutting.cut(pair.body, treatment)
        results: Any = forward_gm.graph.output_node().args[0]
        kept = results[pair.body.options["num_fwd_outputs"] :]
        taken = [nbytes(n.meta["val"]) for n in dict.fromkeys(kept) if n.op != "placeholder"]
        both = (self._seconds(Program(gm, "backward", [])) for gm in (forward_gm, backward_gm))
        return (*both, taken)  # type: ignore[return-value]

    def _seconds(self, program: Program) -> float:
        """Of products and attention, which recomputing costs."""
        found = clock.times(_Bare(program), self.machine, fused=self.fused)  # type: ignore[arg-type]
        return sum(t.seconds for t in found.values() if t.transfer is None)

    # scores

    def score(self, setting: Setting) -> Score:
        """A step under a setting."""
        if setting not in self.scores:
            self.scores[setting] = self._score(setting)
        return self.scores[setting]

    def _score(self, setting: Setting, whole: bool = False) -> Score:
        treated, repeats = (cutting.treatments(setting.choices), []) if whole else self._shortened(setting)
        key = (tuple(treated.items()), setting.prefetch, setting.reduce_lag)
        if key not in self.short:
            self.short[key] = self._folded(treated, setting)
        parts = [self._unfolded(part, repeats) for part in self.short[key]]
        played = [part.play() for part in parts]
        changed = self._slots(parts) - self.slots
        account = self.streamed if setting.streamed else self.account
        peak = max(account.at_step + changed, *(account.lasting + changed + top for _, top in played))
        between = self.rounds * sum(seconds for seconds, _ in played)
        step = between + self.steps(between if setting.streamed else None)
        away = next(part.host for part in parts if not part.backward)
        return Score(step, peak, account.host + away)

    @staticmethod
    def _unfolded(part: Folded, repeats: Sequence[Repeat]) -> Folded:
        for forth, back, times in repeats:
            part = part.repeated(*(back if part.backward else forth), times)
        return part

    @staticmethod
    def _slots(parts: Sequence[Folded]) -> int:
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

    def _shortened(self, setting: Setting) -> tuple[dict[str, Treatment], list[Repeat]]:
        """Which layers are kept, of runs of equal treatment, and what of them is to be repeated."""
        border = self.border(setting.prefetch, setting.reduce_lag)
        treated = cutting.treatments(setting.choices)
        kept: dict[str, Treatment] = {}
        repeats: list[Repeat] = []
        for choice in setting.choices:
            states = [treated[path] for path in choice.layers]
            short: list[Treatment] = []
            for start, period, count in runs(states, 2, choice.offloaded[0]):
                around = -(-border // period)
                if count > 2 * around + 1 and self.calls.issuperset(choice.layers):
                    a = len(short) + around * period
                    stand = choice.layers  # layers are equal: the first ones stand for all
                    forth, back = (stand[a], stand[a + period]), (stand[a + period - 1], stand[a - 1])
                    repeats.append((forth, back, count - 2 * around - 1))
                    count = 2 * around + 1
                short += states[start : start + period] * count
            kept |= zip(choice.layers[: len(short)], short, strict=True)
        return kept, repeats

    def _folded(self, treated: dict[str, Treatment], setting: Setting) -> tuple[Folded, ...]:
        return tuple(laid.launched(setting.prefetch, self.pace) for laid in self._laid(treated, setting))

    def _laid(self, treated: dict[str, Treatment], setting: Setting) -> tuple[_Laid, ...]:
        """Programs of layers that are treated so, ready for gathers to be launched so far ahead or so far."""
        every = {path for choice in setting.choices for path in choice.layers}
        key = tuple(treated.items())
        if (key, setting.reduce_lag) not in self.laid:
            if key not in self.cuts:
                self.cuts[key] = self._programs(treated, every - treated.keys())
            options = replace(self.options, reduce_lag=setting.reduce_lag)
            self.laid[key, setting.reduce_lag] = tuple(
                _Laid(original.copy(), options, self.machine.cuda, self.pace) for original in self.cuts[key]
            )
        return self.laid[key, setting.reduce_lag]

    def _programs(self, treated: dict[str, Treatment], without: Collection[str]) -> tuple[Program, ...]:
        """The programs of layers that are treated so, others left out."""
        capture = copy.copy(self.capture)
        capture.shards, capture.treated = dict(capture.shards), treated
        graph = cutting.copied(self.joint.graph)
        with self.joint.settings():
            done = cutting.without(graph, without)
            assert done, "a layer that cannot be left out"
            cut = capture.divide(graph, self.joint.inputs, self.joint.options)
            return capture.program(cut[0], "forward"), capture.program(cut[1], "backward")

    # searches

    def best(self, budget: int) -> Setting | None:
        """The fastest setting that fits; ``None`` if the floor does not."""
        if self.score(self.floor).peak > budget:
            return None
        while True:
            ends = [self._greedy(budget, _price), self._greedy(budget, _seconds), self._beam(budget)]
            best = self._eased(self._polished(min(ends, key=self.score), budget), budget)
            if self._sure(best).peak <= budget or best == self.floor:
                plain = replace(best, choices=tuple(map(_plain, best.choices)))
                self.scores[plain] = self.score(best)  # the same treatment of every layer
                return plain

    def _sure(self, setting: Setting) -> Score:
        """The score of a setting, of all layers: copies to the host that stand behind one another need not come to rest
        within a few of them.
        """
        if setting not in self.seen and any(c.offloaded[1] for c in setting.choices):
            self.scores[setting] = self._score(setting, whole=True)
        self.seen.add(setting)
        return self.score(setting)

    def _eased(self, setting: Setting, budget: int) -> Setting:
        """Without what the floor has and the budget does not ask for, where that is as fast."""
        eased: list[Callable[[Setting], Setting]] = [lambda s: replace(s, streamed=False)]
        eased += [partial(self._with, place=i, choice=kind) for i, kind in enumerate(self.kinds)]
        for ease in eased:
            other = ease(setting)
            if self.score(other).peak <= budget and self.score(other).seconds <= self.score(setting).seconds * (
                1 + 1e-9
            ):
                setting = other
        return setting

    def _polished(self, setting: Setting, budget: int) -> Setting:
        """With as few layers computed again, and as many gathered, as fit: of counts in between, which the searches
        left out, it is guessed from those around them which fit, and looked at whether they do.
        """
        for i in range(len(setting.choices)):
            for name, allowed, step in (("recomputed", "recompute", -1), ("gathered", "gathered", 1)):
                choice = setting.choices[i]
                here, now = getattr(choice, name), self.score(setting)
                further = [
                    n
                    for n in range(here + step, len(choice.layers) * (step > 0) + step, step)
                    if list(self._settled(_counted(choice, name, n)))
                ]
                if allowed not in self.allow or not further or abs(further[0] - here) < 2:
                    continue
                beyond = self.score(self._with(setting, i, _counted(choice, name, further[0])))
                share = (budget - now.peak) / max(1, beyond.peak - now.peak)
                guess = min(abs(further[0] - here) - 1, int(share * abs(further[0] - here)) + 1)
                while guess > 0:
                    other = self._with(setting, i, _counted(choice, name, here + step * guess))
                    score = self.score(other)
                    if score.peak <= budget and score.seconds < now.seconds:
                        setting = other
                        break
                    guess -= 1
        return setting

    @staticmethod
    def _with(setting: Setting, place: int, choice: Choice) -> Setting:
        return replace(setting, choices=(*setting.choices[:place], choice, *setting.choices[place + 1 :]))

    def _fitting(self, setting: Setting, budget: int) -> list[Setting]:
        return [s for s in self.near(setting) if self.score(s).peak <= budget]

    def _greedy(self, budget: int, worth: Callable[[Score, Score], Any]) -> Setting:
        """Buys what is worth most, until nothing is that fits."""
        now = self.floor
        while True:
            here = self.score(now)
            better = [s for s in self._fitting(now, budget) if self.score(s).seconds < here.seconds - 1e-9]
            if not better:
                return now
            now = max(better, key=lambda s: worth(here, self.score(s)))

    def _beam(self, budget: int) -> Setting:
        """Keeps the best few at each step, also those that are a little slower than what was met before."""
        seen, front, best = {self.floor}, [self.floor], self.floor
        while front:
            found = dict.fromkeys(s for now in front for s in self._fitting(now, budget) if s not in seen)
            seen |= found.keys()
            front = sorted(found, key=self.score)[:WIDTH]
            if front and self.score(front[0]) < self.score(best):
                best = front[0]
            front = [s for s in front if self.score(s).seconds < self.score(best).seconds * (1 + ENOUGH)]
        return best


def _plain(choice: Choice) -> Choice:
    """The same without what has no effect."""
    if not any(map(choice.recomputes, range(len(choice.layers)))):
        choice = replace(choice, recomputed=0, saved=())
    return choice


def _counted(choice: Choice, name: str, count: int) -> Choice:
    return replace(choice, gathered=count) if name == "gathered" else replace(choice, recomputed=count)


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
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _price(before: Score, after: Score) -> Any:
    more = after.peak - before.peak
    saved = before.seconds - after.seconds
    return (saved / more if more > 0 else float("inf"), saved)


def _seconds(before: Score, after: Score) -> Any:
    return before.seconds - after.seconds


class _Laid:
    """A program after all passes but those that launch and give places, which can be done over and over: launches of
    gathers move past what the passes between them do (`mfsdp.costs.depth`).
    """

    def __init__(self, program: Program, options: Options, wide: bool, pace: Pace):
        self.program, self.memo = program, dict[Any, Any]()
        self.options, self.wide = options, wide
        self._run(options, pace, late=False)
        self.order = program.nodes[:-1]

    def _run(self, options: Options, pace: Pace, late: bool) -> None:
        rows = pipeline.chosen(options, self.wide, pace=pace)
        rows = tuple(row for row in rows if (row[0] in _OVER_AND_OVER) is late)
        pipeline.run(self.program, passes=rows, checked=False, listings=False)

    def launched(self, depth: int, pace: Pace) -> Folded:
        """Its events, with gathers launched so far ahead."""
        p = self.program
        p.move(self.order, p.output)
        self._run(replace(self.options, prefetch=depth), pace, late=True)
        known = pace.profile.given(p) if pace.profile is not None else {}
        return folded(p, clock.times(p, pace.machine, fused=pace.fused, memo=self.memo, **known), pace.fused)


_OVER_AND_OVER = ("prefetch", "host", "pool")


class _Bare(Program):
    """A layer's graph, cut, which no unit is known of: markers cost nothing."""

    def __init__(self, program: Program):
        super().__init__(program.gm, program.phase, program.units)

    @property
    def nodes(self) -> list[Any]:
        return [n for n in self.graph.nodes if n.target not in (ops.param, ops.param_grad)]


_NOTHING = Ledger((), 0, "optimizer", "", 0, {}, {})
