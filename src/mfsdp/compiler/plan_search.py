"""Finds the fastest step that fits: which layers are gathered, recomputed or offloaded, and the prefetch depth.

The planner first searches for the fastest setting without a memory limit, among gathers alone, and takes it if it fits.
Otherwise three searches start at the floor, the setting that takes the least memory, and look only at settings that
fit. One repeats the change that saves most seconds per byte, one the change that saves most seconds, and one keeps the
best few settings at each step. The best setting that any has met wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from ..config.layer_choices import Choice
from .plan_score import Score, Scorer, uncollected
from .plan_space import ALLOWED, OVERLAPS, Setting, Space

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


@dataclass(eq=False)
class Planner:
    """Searches for the best setting.

    Args:
        scorer: computes time and memory of settings.
        allow: what a plan may choose, a part of `ALLOWED`.
    """

    scorer: Scorer
    allow: Collection[str] = ALLOWED
    _wrong: float = field(default=0, init=False)
    """By how many bytes the last estimate of a peak was too low: another budget's search begins with that."""

    @property
    def space(self) -> Space:
        return self.scorer.space

    @uncollected()
    def best(self, budget: int) -> Setting | None:
        """Returns the fastest setting that fits; ``None`` if the floor does not."""
        if self.fits(self.scorer.score(self.top), budget):
            return self.top
        if not self.fits(self.scorer.score(self.floor), budget):
            return None
        return _without_unused(self._tried(self.floor, budget) or self.floor)

    def fits(self, score: Score, budget: float) -> bool:
        """Returns whether a step fits the device's budget in bytes, and the host's memory if that is known."""
        return score.peak <= budget and score.host <= (self.space.machine.host_memory or math.inf)

    @cached_property
    def top(self) -> Setting:
        """The fastest setting without a memory limit, so that nothing is recomputed or offloaded."""
        return _without_unused(self._tried(self.space.plain, math.inf) or self.space.plain)

    @cached_property
    def floor(self) -> Setting:
        """The setting that takes the least memory."""
        choices, plain = self.space.kinds, self.space.plain
        if "recompute" in self.allow:
            choices = tuple(replace(c, recomputed=len(c.layers)) for c in choices)
        depth, lag = (0, 0) if "prefetch" in self.allow else (plain.prefetch, plain.reduce_lag)
        found = Setting(choices, depth, lag)
        if self._moves_state:
            found = self._least([found, replace(found, state_on_host=True)])
        for i, choice in enumerate(choices):
            levels = self.space.levels[i] if choice.recomputed else [()]
            last = min(1, choice.recomputed)  # recomputed at once in backward: saving it may even take less
            again = [replace(choice, recomputed=choice.recomputed - less) for less in (0, last)]
            found = self._least([found.with_choice(i, replace(c, saved=saved)) for c in again for saved in levels])
            found = self._least([found, *(self._offloading(found, i, m) for m in self._strides[i])])
        return found

    def _offloading(self, setting: Setting, place: int, every: int) -> Setting:
        """Returns the setting with as many of a kind's layers offloaded as fit the host, halving until they do."""
        count = len(self.space.kinds[place].layers)
        while count:
            other = setting.with_choice(place, replace(setting.choices[place], offloaded=(every, count)))
            if self.fits(self.scorer.estimate(other), math.inf):
                return other
            count //= 2
        return setting

    def _least(self, settings: Sequence[Setting]) -> Setting:
        """Returns the smallest setting that fits the host; if none does, the first, which takes least of the host."""
        estimate = self.scorer.estimate
        there = [s for s in settings if self.fits(estimate(s), math.inf)] or settings[:1]
        return min(there, key=lambda s: (estimate(s).peak, estimate(s).seconds))

    def near(self, setting: Setting) -> Iterator[Setting]:
        """Yields settings one move away; each move may also move the optimizer's state to the host or back."""
        for other in self._moved(setting):
            if other != setting:
                yield other
            if self._moves_state:
                yield replace(other, state_on_host=not other.state_on_host)

    def _moved(self, setting: Setting) -> Iterator[Setting]:
        yield setting
        yield from self._faster(setting)
        for place, choice in enumerate(setting.choices):
            for other in self._smaller(place, choice):
                yield setting.with_choice(place, other)

    def _faster(self, setting: Setting) -> Iterator[Setting]:
        """Yields moves that only memory can forbid: earlier gathers, layers that stay gathered."""
        overlaps, gathers = self._overlaps, self._gathers  # both are estimated before any move
        for depth, lag in overlaps:
            yield replace(setting, prefetch=depth, reduce_lag=lag)
        if not gathers:
            return
        for place, c in enumerate(setting.choices):
            for more in _sizes(c):
                yield setting.with_choice(place, replace(c, gathered=min(len(c.layers), max(0, c.gathered + more))))
        # a static buffer goes only with its last unit, of any kind of layers: gather one more layer of each kind
        one = (replace(c, gathered=min(len(c.layers), c.gathered + 1)) for c in setting.choices)
        yield replace(setting, choices=tuple(one))

    def _smaller(self, place: int, c: Choice) -> Iterator[Choice]:
        """Yields moves that trade seconds for memory, or back: recomputation and offload."""
        n, sizes = len(c.layers), _sizes(c)
        if "recompute" in self.allow:
            yield from (replace(c, recomputed=min(n, max(0, c.recomputed + more))) for more in sizes)
            levels = self.space.levels[place] if c.recomputed else ()
            yield from (replace(c, saved=saved) for saved in levels if saved != c.saved)
        every, first = c.offloaded
        for m in self._strides[place]:
            if first and m != every:
                yield replace(c, offloaded=(m, first))
            for more in sizes if m == every or not first else ():
                count = min(n, max(0, first + more * m))
                yield replace(c, offloaded=(m if count else 1, count))

    @property
    def _strides(self) -> list[list[int]]:
        return self.scorer.strides if "offload" in self.allow else [[] for _ in self.space.kinds]

    @property
    def _moves_state(self) -> bool:
        return "optimizer" in self.allow and self.scorer.host_state_ledger.host > 0

    @cached_property
    def _overlaps(self) -> list[tuple[int, int]]:
        """The pairs (prefetch depth, reduce lag) that a plan chooses among, without those that gain nothing, neither if
        all is saved nor if all is recomputed.
        """
        plain = self.space.plain
        if "prefetch" not in self.allow:
            return [(plain.prefetch, plain.reduce_lag)]
        kept: list[tuple[int, int]] = []
        for base in (plain, self.floor):
            best: dict[tuple[int, int], float] = {}
            for group in OVERLAPS:
                if best and self._seconds_with(base, *group[-1]) >= min(best.values()) * (1 - WORTH):
                    break
                for depth, lag in group:
                    below = [s for (d, g), s in best.items() if d <= depth and g <= lag]
                    seconds = self._seconds_with(base, depth, lag)
                    if not below or seconds < min(below) * (1 - WORTH):
                        best[depth, lag] = seconds
            kept += best
        return list(dict.fromkeys(kept))

    def _seconds_with(self, base: Setting, depth: int, lag: int) -> float:
        return self.scorer.estimate(replace(base, prefetch=depth, reduce_lag=lag)).seconds

    @cached_property
    def _gathers(self) -> bool:
        """Whether keeping layers gathered gains anything, if all is saved or if all is recomputed."""
        return "gathered" in self.allow and any(map(self._gains_gathered, (self.space.plain, self.floor)))

    def _gains_gathered(self, base: Setting) -> bool:
        whole = replace(base, choices=tuple(replace(c, gathered=len(c.layers)) for c in base.choices))
        return self.scorer.estimate(whole).seconds < self.scorer.estimate(base).seconds * (1 - WORTH)

    def _tried(self, start: Setting, budget: float) -> Setting | None:
        """Returns the fastest setting by score among those that the searches find, if any fits."""
        met: list[Setting] = []
        wrong = self._wrong if budget < math.inf else 0
        for _ in range(TRIES):
            found = self._search(start, budget - wrong)
            if found in met:
                break
            met.insert(0, found)
            peak = self.scorer.score(found).peak
            wrong = peak - self.scorer.estimate(found).peak
            if peak <= budget <= peak + SLACK * budget:
                break
        if budget < math.inf:
            self._wrong = wrong
        fit = [s for s in met if self.fits(self.scorer.score(s), budget)]
        least = min((self.scorer.score(s).seconds for s in fit), default=0.0)
        return next((s for s in fit if self.scorer.score(s).seconds <= least * (1 + EQUAL)), None)

    def _search(self, start: Setting, budget: float) -> Setting:
        ends = [self._greedy(start, budget, _price), self._greedy(start, budget, _seconds), self._beam(start, budget)]
        return self._eased(min(ends, key=self.scorer.estimate), budget)

    def _eased(self, setting: Setting, budget: float) -> Setting:
        """Returns the setting without the floor's choices that the budget does not require, if that is as fast."""
        parts = product(range(len(setting.choices)), ("offloaded", "recomputed", "gathered"))
        for other in (None, *parts):
            eased = replace(setting, state_on_host=False) if other is None else setting.without(*other)
            now, then = self.scorer.estimate(setting), self.scorer.estimate(eased)
            if self.fits(then, budget) and then.seconds <= now.seconds * (1 + EQUAL):
                setting = eased
        return setting

    def _fitting(self, setting: Setting, budget: float) -> Iterable[Setting]:
        near = self.near(setting) if budget < math.inf else self._faster(setting)
        return (s for s in near if self.fits(self.scorer.estimate(s), budget))

    def _greedy(self, start: Setting, budget: float, worth: Callable[[Score, Score], tuple[float, ...]]) -> Setting:
        """Makes the most valuable change that fits, until no change is faster."""
        estimate, now = self.scorer.estimate, start
        while True:
            here = estimate(now)
            better = [s for s in self._fitting(now, budget) if estimate(s).seconds < here.seconds - 1e-9]
            if not better:
                return now
            now = max(better, key=lambda s: worth(here, estimate(s)))

    def _beam(self, start: Setting, budget: float) -> Setting:
        """Keeps the best few settings at each step, even if they are a little slower than earlier ones."""
        estimate = self.scorer.estimate
        seen, front, best, left = {start}, [start], start, PATIENCE
        while front and left:
            found = dict.fromkeys(s for now in front for s in self._fitting(now, budget) if s not in seen)
            seen |= found.keys()
            front = sorted(found, key=estimate)[:WIDTH]
            left -= 1
            if front and estimate(front[0]) < estimate(best):
                best, left = front[0], PATIENCE
            front = [s for s in front if estimate(s).seconds < estimate(best).seconds * (1 + ENOUGH)]
        return best


def _sizes(c: Choice) -> list[int]:
    """Returns the numbers of layers by which a move changes a choice."""
    n = len(c.layers)
    sizes = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= max(1, n // 2)] + [n]
    return sizes + [-s for s in sizes]


def _without_unused(setting: Setting) -> Setting:
    """Returns the setting without choices that have no effect: every layer is treated as before."""
    choices = (
        c if any(map(c.recomputes, range(len(c.layers)))) else replace(c, recomputed=0, saved=())
        for c in setting.choices
    )
    return replace(setting, choices=tuple(choices))


def _price(before: Score, after: Score) -> tuple[float, ...]:
    more = after.peak - before.peak
    saved = before.seconds - after.seconds
    return (saved / more if more > 0 else math.inf, saved)


def _seconds(before: Score, after: Score) -> tuple[float, ...]:
    return (before.seconds - after.seconds,)
