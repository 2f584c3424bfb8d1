"""Finds the fastest step that fits: which layers are gathered, recomputed or offloaded, and the prefetch depth.

The planner first searches for the fastest setting without a memory limit, among gathers alone, and takes it if it fits.
Otherwise three searches start at the floor, the setting that takes the least memory, and look only at settings that
fit. One repeats the change that saves most seconds per byte, one the change that saves most seconds, and one keeps the
best few settings at each step. The best setting that any has met wins. Every setting is computed for the full step,
because the effects of two changes do not add up. That is quick: of a run of equal choices, a few layers determine the
cost of all (Note [Extrapolation]).
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
from ..buffers.flat_buffer import FlatBuffer
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
from . import joint_graph
from .capture import Capture
from .joint_graph import Treatment
from .layer_match import described_by, layer_of, operator_of

ALLOWED = ("gathered", "recompute", "offload", "optimizer", "prefetch")
"""What a plan may choose."""

WAYS = (((0, 0),), ((1, 0), (0, 1), (1, 1)), ((2, 1), (1, 2), (2, 2)))
"""Pairs (prefetch depth, reduce lag) that a plan may choose, in groups by memory. If the last pair of a group gains
nothing, the planner skips the group and all later groups. (`mfsdp.cost_model.auto_prefetch.DEPTHS` has more depths.)
"""

WORTH = 0.01
"""The least gain, as a fraction of the step, for which prefetching or keeping gathered is considered."""

TRIES, SLACK = 4, 0.01
"""How often the search is repeated, corrected by the last estimate's error, and the fraction of the budget that may
stay unused without a repetition.
"""

EQUAL = 1e-9
"""Steps are equally fast if they differ by at most this fraction."""

WIDTH, ENOUGH, PATIENCE = 4, 0.1, 2
"""The third search: how many settings it keeps, how much slower than the best they may be (a fraction of the step), and
after how many steps without a better setting it stops.
"""

LEVELS = 5
"""How many levels of saving there are if many layers are recomputed, from nothing to all that is worth it."""

FEW = 4
"""If no kind has more layers than this, every setting is scored with its own program."""


@dataclass(frozen=True)
class Setting:
    """One combination of all choices."""

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
    """Time and memory of a step under a setting: smaller is better."""

    seconds: float
    peak: int
    """Bytes on the device."""
    host: int = 0
    """Bytes of host memory."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disables garbage collection, which would take a fifth of a search: its many graphs live on."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # most objects live on: the next collection does not scan them all
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@dataclass(frozen=True)
class Repeat:
    """A period of the kept layers, which is repeated `times` more times."""

    layers: tuple[str, ...]
    """Paths of all layers of the kind, in forward's order."""
    start: int
    """Index of the period's first layer."""
    period: int
    times: int

    def borders(self, backward: bool, before: int = 0, behind: int = 0) -> list[str]:
        """Returns the first layers of the period, of `before` and `behind` periods around it, and of the one after."""
        first, step = (self.start + self.period - 1, -self.period) if backward else (self.start, self.period)
        return [self.layers[first + i * step] for i in range(-before, behind + 2)]


@dataclass(eq=False)
class Planner:
    """Computes time and memory of settings, and searches for the best one.

    Args:
        capture: has kept its joint graph.
        options: the backend's options; a plan's choices replace theirs.
        machine: the hardware.
        account: memory ledger of the programs as they were traced, after all passes.
        streamed: the same, with optimizer state on the host.
        steps: seconds of the optimizer's step; with state on the host, given the seconds between two steps.
        rounds: how often forward and backward run in a step.
        allow: a part of `ALLOWED`.
        profile: measured times; its optimizer time is for state on the device.
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
        """Returns a planner for a capture that has kept its joint graph. The programs without a plan give the memory
        that is allocated throughout a step. Arguments as for `mfsdp.cost_model.memory_model.ledger`.
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
        """Kinds of equal layers, with nothing chosen for them."""
        return tuple(self.joint.kinds())

    @cached_property
    def fused(self) -> bool:
        return self.options.lowering != "eager"

    @cached_property
    def pace(self) -> OffloadTiming:
        """Places copies to the host."""
        return OffloadTiming(self.machine, self.fused)

    @cached_property
    def calls(self) -> set[str]:
        """Layers that can be left out."""
        return joint_graph.removable(self.joint.graph)

    # settings

    @cached_property
    def plain(self) -> Setting:
        """The setting without a plan."""
        depth = self.options.prefetch if isinstance(self.options.prefetch, int) else 1
        return Setting(self.kinds, depth, self.options.reduce_lag)

    @cached_property
    def floor(self) -> Setting:
        """The setting that takes the least memory."""
        choices = self.kinds
        if "recompute" in self.allow:
            choices = tuple(replace(c, recomputed=len(c.layers)) for c in choices)
        depth, lag = (0, 0) if "prefetch" in self.allow else (self.plain.prefetch, self.plain.reduce_lag)
        found = Setting(choices, depth, lag)
        if self.streams:
            found = self._least([found, replace(found, streamed=True)])
        for i, choice in enumerate(choices):
            levels = self.trails[choice.name, choice.layers] if choice.recomputed else [()]
            last = min(1, choice.recomputed)  # recomputed at once in backward: saving it may even take less
            again = [replace(choice, recomputed=choice.recomputed - less) for less in (0, last)]
            found = self._least([self._with(found, i, replace(c, saved=saved)) for c in again for saved in levels])
            found = self._least([found, *(self._leaving(found, i, m) for m in self.spaces[i])])
        return found

    def _leaving(self, setting: Setting, place: int, every: int) -> Setting:
        """Returns the setting with as many of a kind's layers offloaded as fit the host, halving until they do."""
        count = len(self.kinds[place].layers)
        while count:
            other = self._changed(place, setting, offloaded=(every, count))
            if self.fits(self.estimate(other), math.inf):
                return other
            count //= 2
        return setting

    def _least(self, settings: Sequence[Setting]) -> Setting:
        """Returns the smallest setting that fits the host; if none does, the first, which takes least of the host."""
        there = [s for s in settings if self.fits(self.estimate(s), math.inf)] or settings[:1]
        return min(there, key=lambda s: (self.estimate(s).peak, self.estimate(s).seconds))

    def fits(self, score: Score, budget: float) -> bool:
        """Returns whether a step fits the device's budget in bytes, and the host's memory if that is known."""
        return score.peak <= budget and score.host <= (self.machine.host_memory or math.inf)

    @cached_property
    def spaces(self) -> list[list[int]]:
        """For each kind of layers, values of m for offloading every m-th layer: those for which copies keep up with
        layers, resharded or gathered, and larger ones. Empty if nothing may or would be offloaded.
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
        """For each kind of layers, the copies of one part of a layer's values to the host and back, and the part's
        bytes; ``None`` if nothing may or would be offloaded.
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
        """The pairs (prefetch depth, reduce lag) that a plan chooses among, without those that gain nothing, neither if
        all is saved nor if all is recomputed.
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
        """Whether keeping layers gathered gains anything, if all is saved or if all is recomputed."""
        return "gathered" in self.allow and any(map(self._gathering, (self.plain, self.floor)))

    def _gathering(self, base: Setting) -> bool:
        whole = replace(base, choices=tuple(replace(c, gathered=len(c.layers)) for c in base.choices))
        return self.estimate(whole).seconds < self.estimate(base).seconds * (1 - WORTH)

    @cached_property
    def streams(self) -> bool:
        """Whether the optimizer's state may go to the host."""
        return "optimizer" in self.allow and self.streamed.host > 0

    def near(self, setting: Setting) -> Iterator[Setting]:
        """Yields settings one move away; each move may also move the optimizer's state to the host or back."""
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
        """Yields moves that only memory can forbid: earlier gathers, layers that stay gathered."""
        for depth, lag in self.ways:
            yield replace(setting, prefetch=depth, reduce_lag=lag)
        if not self.gathering:
            return
        for i, c in enumerate(setting.choices):
            for more in self._sizes(c):
                yield self._with(setting, i, replace(c, gathered=min(len(c.layers), max(0, c.gathered + more))))
        # a static buffer goes only with its last unit, of any kind of layers: gather one more layer of each kind
        one = (replace(c, gathered=min(len(c.layers), c.gathered + 1)) for c in setting.choices)
        yield replace(setting, choices=tuple(one))

    def _smaller(self, c: Choice, spaces: Sequence[int]) -> Iterator[Choice]:
        """Yields moves that trade seconds for memory, or back: recomputation and offload."""
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
        """Returns the numbers of layers by which a move changes a choice."""
        n = len(c.layers)
        sizes = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= max(1, n // 2)] + [n]
        return sizes + [-s for s in sizes]

    def many(self, c: Choice) -> bool:
        """Returns whether there are enough layers that a few of them determine the cost of all."""
        return len(c.layers) >= 3 * (2 * self.border(1, 1) + 1) and self.calls.issuperset(c.layers)

    @staticmethod
    def border(depth: int, lag: int) -> int:
        """Returns how many layers at either end of a run differ from those in its middle."""
        return max(depth, lag) + 1

    @cached_property
    def trails(self) -> dict[Any, list[tuple[str, ...]]]:
        """For each kind of layers, what may be saved if they are recomputed: nothing, then more and more operators,
        those with the most seconds in backward per byte of their results first. Levels that a mix of two others equals
        are left out.
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
        if any(map(self.many, self.kinds)):  # each is another partition of all layers
            step = (costs[kept[-1]][0] - costs[0][0]) / (LEVELS - 1)
            even = [costs[0][0] + n * step for n in range(LEVELS)]
            kept = [min(kept, key=lambda i: abs(costs[i][0] - taken)) for taken in even]
        return list(dict.fromkeys(levels[i] for i in kept))

    def _computed(self, choice: Choice, backward: Program) -> dict[str, tuple[float, int]]:
        """Returns operators of layers that backward recomputes: their seconds, and bytes of their results."""
        behind, times = joint_graph.differentiated(backward.gm), self._times(backward)
        found: dict[str, tuple[float, int]] = {}
        for node in backward.nodes:
            own = node not in behind and layer_of(described_by(node)) in choice.layers
            if own and (name := operator_of(node)):
                seconds, taken = found.get(name, (0.0, 0))
                results = [x.meta["val"] for x in node.users if is_element(x)] or node.meta["val"]
                found[name] = seconds + times[node].seconds, taken + nbytes(results)
        return found

    def _layer(self, choice: Choice, treatment: Treatment) -> tuple[Program, ...]:
        """Returns the programs of a layer, partitioned as it is treated; those of all layers that cannot be left out,
        if layers are not traced once for all.
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
        return sum(t.seconds for t in self._times(program).values() if t.transfer is None)

    # estimates

    def estimate(self, setting: Setting) -> Score:
        """Returns about what a step takes under a setting (Note [Layer model]); exactly if there are few layers."""
        if all(len(kind.layers) <= FEW for kind in self.kinds):
            return self.score(setting)
        if setting not in self.estimates:
            self._doing()
            self.estimates[setting] = self._estimate(setting)
        return self.estimates[setting]

    def _estimate(self, setting: Setting) -> Score:
        between = replace(setting, streamed=False)  # it does not depend on where the optimizer's state is
        if between not in self.played:
            self.played[between] = self._played(between)
        return self._total(setting, *self.played[between])

    def _played(self, setting: Setting) -> tuple[list[tuple[float, int]], int, int]:
        """Returns the arguments of `_total`."""
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
        """Returns the layers in the layer model, the same for all ways: each number of layers is another partition."""
        few = 2 * max(self.border(*way) for ways in WAYS for way in ways) + 1
        return choice.layers[:few] if self.calls.issuperset(choice.layers) else choice.layers

    def _alike(self, depth: int, lag: int, way: int) -> Both:
        """Returns programs with equal treatment of all layers: 0 saved, `WHOLE` gathered, `AWAY` offloaded, else
        recomputed.
        """
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
        """Returns each layer of the setting as the layer model describes it, in forward's order."""
        found: dict[str, Layer] = {}
        for place, choice in enumerate(setting.choices):
            if choice not in self.layers:
                self.layers[choice] = dict(self._stand_ins(place, choice))
            found |= self.layers[choice]
        return [found[path] for path in self.order]

    def _stand_ins(self, place: int, c: Choice) -> Iterator[tuple[str, Layer]]:
        """Yields each layer's path and its description for the layer model."""
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
        """The layer that reads a unit's parameters, by the unit's name."""
        return joint_graph.owners(self.joint.graph)

    @cached_property
    def order(self) -> list[str]:
        """Paths of all layers, in forward's order."""
        known = {path for kind in self.kinds for path in kind.layers}
        return [path for path in joint_graph.ordered(self.joint.graph) if path in known]

    # scores

    def score(self, setting: Setting) -> Score:
        """Returns time and memory of a step under a setting. Queued copies to the host may not reach a steady state
        within a few layers, nor within some more; then all layers are simulated.
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
        """Returns time and memory of a step, from those of its programs.

        Args:
            played: seconds, and peak bytes of live tensors.
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
        """Seconds of the optimizer's step with its state on the device."""
        return self.steps(None)

    @staticmethod
    def _unfolded(part: Extrapolated, repeats: Sequence[Repeat]) -> Extrapolated:
        for repeat in repeats:
            first, behind = repeat.borders(part.backward)
            part = part.repeated(first, behind, repeat.times)
        return part

    @staticmethod
    def _slots(parts: Sequence[Extrapolated]) -> int:
        """Returns bytes of static buffers that serve all parts."""
        largest: dict[str, int] = {}
        for part in parts:
            for name, taken in part.slots.items():
                largest[name] = max(taken, largest.get(name, 0))
        return sum(largest.values())

    def changed(self, setting: Setting) -> int:
        """Returns bytes of static buffers that a setting takes beyond those in the ledger."""
        treated, _ = self._shortened(setting)
        return self._slots(self._folded(treated, setting)) - self.slots

    @cached_property
    def slots(self) -> int:
        return sum(e.nbytes for e in self.account.entries if e.name in ("gathered parameters", "gradient buckets"))

    def _shortened(self, setting: Setting, beside: int = 0) -> tuple[dict[str, Treatment], list[Repeat]]:
        """Returns the layers that are kept of runs of equal treatment, and which of them are repeated.

        Args:
            beside: how many more periods to keep at either end of a run than necessary.
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
                if count == len(states):  # programs of those may exist already
                    few = max(few, len(self._few(choice)))
                if few < count and self.calls.issuperset(choice.layers):
                    # layers are equal: the first ones represent all
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
        """Returns programs with these treatments, before the passes that run again for each prefetch depth."""
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
        """Returns layers that are not in `few`."""
        return {path for kind in self.kinds for path in kind.layers}.difference(few)

    def _stands(self, few: Collection[str]) -> dict[str, str]:
        """Maps units' modules in layers that are not in `few` to the equal module in the kind's first layer."""
        first = {path: kind.layers[0] for kind in self.kinds for path in kind.layers if path not in few}
        units = {unit.name: unit.fqn for unit in self.capture.units}
        layers = {units[name]: path for name, path in self.owners.items() if path in first and name in units}
        return {fqn: first[path] + fqn.removeprefix(path) for fqn, path in layers.items() if fqn.startswith(path)}

    def _programs(self, treated: dict[str, Treatment], without: Collection[str]) -> tuple[Program, ...]:
        """Returns the programs with these treatments, without some layers."""
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
        """Returns the fastest setting that fits; ``None`` if the floor does not."""
        if self.fits(self.score(self.top), budget):
            return self.top
        if not self.fits(self.score(self.floor), budget):
            return None
        return self._cleared(self._tried(self.floor, budget) or self.floor)

    @cached_property
    def top(self) -> Setting:
        """The fastest setting without a memory limit, so that nothing is recomputed or offloaded."""
        return self._cleared(self._tried(self.plain, math.inf) or self.plain)

    def _cleared(self, setting: Setting) -> Setting:
        """Returns the setting without choices that have no effect."""
        plain = replace(setting, choices=tuple(map(_plain, setting.choices)))
        self.scores[plain] = self.score(setting)  # every layer is treated as before
        return plain

    def _tried(self, start: Setting, budget: float) -> Setting | None:
        """Returns the fastest setting by score among those that the searches find, if any fits."""
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
        """Returns the setting without the floor's choices that the budget does not require, if that is as fast."""
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
        """Makes the most valuable change that fits, until no change is faster."""
        now = start
        while True:
            here = self.estimate(now)
            better = [s for s in self._fitting(now, budget) if self.estimate(s).seconds < here.seconds - 1e-9]
            if not better:
                return now
            now = max(better, key=lambda s: worth(here, self.estimate(s)))

    def _beam(self, start: Setting, budget: float) -> Setting:
        """Keeps the best few settings at each step, even if they are a little slower than earlier ones."""
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
    """Returns the choice without parts that have no effect."""
    if not any(map(choice.recomputes, range(len(choice.layers)))):
        choice = replace(choice, recomputed=0, saved=())
    return choice


def _saved(forward: Program) -> list[int]:
    """Returns bytes of each value that forward saves."""
    kept = [n for n in forward.results()[forward.returned or 0 :] if isinstance(n, fx.Node) and n.op != "placeholder"]
    return [nbytes(n.meta["val"]) for n in dict.fromkeys(kept)]


def _hull(points: Sequence[tuple[float, float]]) -> set[int]:
    """Returns indices of the points on the lower convex hull: no mix of two others is below and left of them."""
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
    """Returns whether b lies above the line from a to c."""
    this, that = (b[1] - a[1]) * (c[0] - a[0]), (c[1] - a[1]) * (b[0] - a[0])
    return this > that and not math.isclose(this, that, rel_tol=1e-9)


def _price(before: Score, after: Score) -> Any:
    more = after.peak - before.peak
    saved = before.seconds - after.seconds
    return (saved / more if more > 0 else float("inf"), saved)


def _seconds(before: Score, after: Score) -> Any:
    return before.seconds - after.seconds


class _Laid:
    """A program after all passes except those that place launches and buffers, which can run on it again and again:
    launches of gathers move past the results of the passes in between (`mfsdp.cost_model.auto_prefetch`).

    Args:
        program: after the first of its passes (`pipeline.Phases`).
        first: whether accumulators are allocated in it (`mfsdp.cost_model.memory_model.Ledger.first`).
    """

    def __init__(self, program: Program, options: Options, wide: bool, pace: OffloadTiming, first: bool):
        self.program, self.memo, self.first = program, dict[Any, Any](), first
        self.options, self.wide = options, wide
        pipeline.rewrite(program, pipeline.phases(pipeline.chosen(options, wide, pace=pace)).deferred)
        self.order = program.nodes[:-1]

    def launched(self, depth: int, pace: OffloadTiming, profile: Any) -> Extrapolated:
        """Returns its events, with gathers launched at a prefetch depth."""
        p = self.program
        p.move(self.order, p.output)
        rows = pipeline.chosen(replace(self.options, prefetch=depth), self.wide, pace=pace)
        pipeline.rewrite(p, pipeline.phases(rows).again)
        known = profile.given(p) if profile is not None else {}
        times = op_cost.op_times(p, pace.machine, fused=pace.fused, memo=self.memo, **known)
        return extrapolated(p, times, pace.fused, self.memo, accumulators=self.first)


class _Bare(Program):
    """The partitioned graph of a layer, without units: markers cost nothing."""

    def __init__(self, program: Program):
        super().__init__(program.gm, program.phase, program.units)

    @property
    def nodes(self) -> list[Any]:
        return [n for n in self.graph.nodes if n.target not in (ops.param, ops.param_grad)]


_NOTHING = Ledger((), 0, "optimizer", "", 0, {}, {})
