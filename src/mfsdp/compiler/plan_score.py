"""Computes time and memory of a setting: exactly, or by the layer model. What is computed once is kept here alone.

Every setting is computed for the full step, because the effects of two changes do not add up. That is quick: of a run
of equal choices, a few layers determine the cost of all (Note [Extrapolation]).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from .. import pipeline
from ..buffers.flat_buffer import FlatBuffer
from ..config.best_effort import doing
from ..config.hardware import Transfer
from ..config.layer_choices import Choice
from ..cost_model.auto_prefetch import Schedules
from ..cost_model.estimate import optimizer_seconds
from ..cost_model.extrapolate import Extrapolated, extrapolated, runs, static_bytes
from ..cost_model.layer_model import AWAY, PARTS, WHOLE, Both, Layer, LayerModel
from ..cost_model.memory_model import Ledger, ledger
from ..cost_model.offload_schedule import OffloadTiming
from ..cost_model.op_cost import Measurements
from ..ir.program import Program
from . import joint_graph
from .joint_graph import Treatment
from .plan_space import Setting, Space

FEW = 4
"""If no kind has more layers than this, every setting is scored with its own program."""

Treatments = tuple[tuple[str, Treatment], ...]
"""Layers of a program and their treatments."""

Simulated = tuple[list[tuple[float, int]], int, int]
"""A step's programs: seconds and peak bytes of live tensors of each, bytes of static buffers, and bytes that forward
saves on the host.
"""


@dataclass(frozen=True, order=True)
class Score:
    """Time and memory of a step under a setting: smaller is better."""

    seconds: float
    peak: int
    """Bytes on the device."""
    host: int = 0
    """Bytes of host memory."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection, which would take a fifth of a search: its many graphs live on."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            many = gc.get_count()[0] > 100_000  # to count frozen objects takes longer than to collect a few new ones
            if many and not gc.get_freeze_count():  # most live on: the next collection does not scan them all
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


class Scorer:
    """Computes time and memory of settings. The programs without a plan give the memory that is allocated throughout a
    step.

    Args:
        space: the model's layers.
        buffers, inputs, other, plain, optimizer, rounds: as for `mfsdp.cost_model.memory_model.ledger`.
        profile: measured times; its optimizer time is for state on the device.
    """

    @uncollected()
    def __init__(
        self,
        space: Space,
        buffers: Sequence[FlatBuffer],
        *,
        inputs: int = 0,
        other: int = 0,
        plain: int = 0,
        optimizer: str = "adamw",
        rounds: int = 1,
        profile: Measurements | None = None,
    ):
        self.space, self.rounds, self.profile = space, rounds, profile
        machine = space.machine
        self.timing = OffloadTiming(machine, space.fused)
        self._programs, self._schedules = cache(self._first_passes), cache(self._middle_passes)
        self._events, self._layer_model = cache(self._last_passes), cache(self._new_layer_model)
        self._described = cache(self._describe)
        self._scores, self._estimates, self._simulated = cache(self._score), cache(self._estimate), cache(self._compose)
        known = getattr(profile, "optimizer", 0.0)
        self.optimizer_seconds = partial(optimizer_seconds, buffers, plain, optimizer, machine, measured=known)
        """Returns seconds of the optimizer's step; with state on the host, given the seconds between two steps."""
        kept = space.treated_sample(space.kinds)
        programs = [part.program for part in self._schedules(tuple(kept.items()), space.plain.reduce_lag)]
        account = partial(
            ledger, programs, buffers, inputs=inputs, other=other, plain=plain, optimizer=optimizer, fused=space.fused,
            foreach=machine.cuda, fixed=machine.fixed, stands=space.equal_modules(kept), rounds=rounds,
        )  # fmt: skip
        self.ledger = account(stepping="whole")
        """Of the programs without a plan, after all passes."""
        self.host_state_ledger = account(stepping="offloaded")
        """The same, with the optimizer's state on the host."""

    def score(self, setting: Setting) -> Score:
        """Returns time and memory of a step under a setting."""
        return self._scores(setting)

    def estimate(self, setting: Setting) -> Score:
        """Returns about what a step takes under a setting (Note [Layer model]); exactly if there are few layers."""
        few = all(len(kind.layers) <= FEW for kind in self.space.kinds)
        return self._scores(setting) if few else self._estimates(setting)

    def _tell_progress(self) -> None:
        estimated, simulated = (known.cache_info().currsize for known in (self._estimates, self._scores))
        doing(f"planning: {estimated} settings estimated, {simulated} simulated")

    # exactly

    @uncollected()
    def _score(self, setting: Setting) -> Score:
        """Queued copies to the host may not reach a steady state within a few layers, nor within some more; then all
        layers are simulated.
        """
        self._tell_progress()
        offloads = any(choice.offloaded[1] for choice in setting.choices)
        for more in (1, 2) if offloads else (0,):
            treated, repeats = self.shortened(setting, more)
            parts = self.events(treated, setting)
            if not offloads or all(part.rests(r.borders(part.backward, 1, 1)) for part in parts for r in repeats):
                break
        else:
            parts, repeats = self.events(joint_graph.treatments(setting.choices), setting), []
        return self.total(setting, simulated([lengthened(part, repeats) for part in parts]))

    def total(self, setting: Setting, programs: Simulated) -> Score:
        """Returns time and memory of a step, from those of its programs."""
        played, slots, on_host = programs
        changed = slots - self._slots
        account = self._ledger(setting)
        peak = max(account.at_step + changed, *(account.lasting + changed + top for _, top in played))
        between = self.rounds * sum(seconds for seconds, _ in played)
        step = between + (self.optimizer_seconds(between) if setting.state_on_host else self._resident_step)
        return Score(step, peak, account.host + on_host)

    def peak_in_optimizer(self, setting: Setting) -> int:
        """Returns the peak bytes while the optimizer steps."""
        treated, _ = self.shortened(setting)
        return self._ledger(setting).at_step + static_bytes(self.events(treated, setting)) - self._slots

    def _ledger(self, setting: Setting) -> Ledger:
        return self.host_state_ledger if setting.state_on_host else self.ledger

    @cached_property
    def _resident_step(self) -> float:
        """Seconds of the optimizer's step with its state on the device."""
        return self.optimizer_seconds(None)

    @cached_property
    def _slots(self) -> int:
        """Bytes of static buffers in the ledger."""
        return sum(e.nbytes for e in self.ledger.entries if e.name in ("gathered parameters", "gradient buckets"))

    def shortened(self, setting: Setting, more: int = 0) -> tuple[dict[str, Treatment], list[Repeat]]:
        """Returns the layers that are kept of runs of equal treatment, and which of them are repeated.

        Args:
            more: how many more periods to keep at either end of a run than necessary.
        """
        treated = joint_graph.treatments(setting.choices)
        kept: dict[str, Treatment] = {}
        repeats: list[Repeat] = []
        for choice in setting.choices:
            states = [treated[path] for path in choice.layers]
            short: list[Treatment] = []
            for start, period, count in runs(states, 2, choice.offloaded[0]):
                around = -(-setting.border // period) + more
                few = 2 * around + 1
                if count == len(states):  # programs of those may exist already
                    few = max(few, len(self.space.sample(choice)))
                if few < count and self.space.removable.issuperset(choice.layers):
                    # layers are equal: the first ones represent all
                    repeats.append(Repeat(choice.layers, len(short) + around * period, period, count - few))
                    count = few
                short += states[start : start + period] * count
            kept |= zip(choice.layers[: len(short)], short, strict=True)
        return kept, repeats

    # programs

    def events(self, treated: Mapping[str, Treatment], setting: Setting) -> tuple[Extrapolated, ...]:
        """Returns the programs with these treatments, after all passes, as events."""
        return self._events(tuple(treated.items()), setting.prefetch, setting.reduce_lag)

    def _last_passes(self, treated: Treatments, depth: int, lag: int) -> tuple[Extrapolated, ...]:
        schedules = self._schedules(treated, lag)
        return tuple(
            extrapolated(s.launch(depth), s.times(), s.fused, s.memo, accumulators=self.rounds == 1) for s in schedules
        )

    def _middle_passes(self, treated: Treatments, lag: int) -> tuple[Schedules, ...]:
        options, machine = replace(self.space.options, reduce_lag=lag), self.space.machine
        copies = (program.copy() for program in self._programs(treated))
        return tuple(Schedules(p, options, machine, machine.cuda, self.timing, self.profile) for p in copies)

    def _first_passes(self, treated: Treatments) -> tuple[Program, ...]:
        layers = dict(treated)
        programs = self.space.programs(layers, self.space.others(layers))
        rows = pipeline.chosen(self.space.options, self.space.machine.cuda, pace=self.timing)
        for program in programs:
            pipeline.rewrite(program, pipeline.phases(rows).first)
        return programs

    # by the layer model

    def _estimate(self, setting: Setting) -> Score:
        self._tell_progress()
        # the programs do not depend on where the optimizer's state is
        return self.total(setting, self._simulated(replace(setting, state_on_host=False)))

    def _compose(self, setting: Setting) -> Simulated:
        model = self._layer_model(setting.prefetch, setting.reduce_lag)
        layers = self._layers(setting)
        played = [model.play(layers, backward) for backward in (False, True)]
        on_host = 0
        for place, choice in enumerate(setting.choices):
            count = sum(map(choice.offloads, range(len(choice.layers))))
            if count and (copies := self.space.copies[place]) is not None:
                on_host += PARTS * copies[2] * count
        return played, model.static_bytes(layers), on_host

    def _new_layer_model(self, depth: int, lag: int) -> LayerModel:
        few = {path for kind in self.space.kinds for path in self.space.sample(kind)}
        order = [path for path in self.space.order if path in few]
        return LayerModel(partial(self._equally_treated, depth, lag), self.space.owners, order)

    def _equally_treated(self, depth: int, lag: int, way: int) -> Both:
        """Returns programs with equal treatment of all layers: 0 saved, `WHOLE` gathered, `AWAY` offloaded, else
        recomputed.
        """
        choices = self.space.kinds
        if way == WHOLE:
            choices = tuple(replace(c, gathered=len(c.layers)) for c in choices)
        elif way == AWAY:
            choices = tuple(
                replace(c, offloaded=(1, len(c.layers))) if strides[:1] == [1] else c
                for c, strides in zip(choices, self.strides, strict=True)
            )
        elif way:
            choices = tuple(
                replace(c, recomputed=len(c.layers), saved=levels[min(way, len(levels)) - 1])
                for c, levels in zip(choices, self.space.levels, strict=True)
            )
        forward, backward = self.events(self.space.treated_sample(choices), Setting(choices, depth, lag))
        return forward, backward

    def _layers(self, setting: Setting) -> list[Layer]:
        """Returns each layer of the setting as the layer model describes it, in forward's order."""
        found: dict[str, Layer] = {}
        for place, choice in enumerate(setting.choices):
            found |= self._described(place, choice)
        return [found[path] for path in self.space.order]

    def _describe(self, place: int, c: Choice) -> dict[str, Layer]:
        """Returns the layer model's description of each layer of a kind, by path."""
        n, kept = len(c.layers), len(self.space.sample(c))
        way = 1 + self.space.levels[place].index(c.saved) if c.recomputed else 0
        around = (kept - 1) // 2
        found = {}
        for i, path in enumerate(c.layers):
            stand = c.layers[i if i <= around or kept == n else max(around, i - (n - kept))]
            if c.offloads(i) and self.strides[place][:1] == [1]:
                found[path] = Layer(stand, AWAY, c.gathers(i))
            else:
                copies = self.space.copies[place] if c.offloads(i) else None
                found[path] = Layer(stand, way if c.recomputes(i) else 0, c.gathers(i), copies)
        return found

    @cached_property
    def strides(self) -> list[list[int]]:
        """For each kind of layers, values of m for offloading every m-th layer: those for which copies keep up with
        layers, resharded or gathered, and larger ones. Empty if nothing would be offloaded.
        """
        pairs = zip(self.space.kinds, self.space.copies, strict=True)
        return [self._strides(choice, copies[0]) if copies is not None else [] for choice, copies in pairs]

    def _strides(self, choice: Choice, copy: Transfer) -> list[int]:
        few, n = self.space.sample(choice), len(choice.layers)
        model = self._layer_model(self.space.plain.prefetch, self.space.plain.reduce_lag)
        takes = partial(model.takes, few[len(few) // 2], 0)
        forward, backward, gathered = takes(False), takes(True), takes(True, gathered=True)
        least, most = (
            max(1, math.ceil(PARTS * copy.seconds / max(1e-12, min(forward, back)))) for back in (backward, gathered)
        )
        return sorted(m for m in {least, least + 1, 2 * least, most} if m <= n)


def lengthened(part: Extrapolated, repeats: Iterable[Repeat]) -> Extrapolated:
    """Returns a program with all layers, from one with those that `Scorer.shortened` keeps."""
    for repeat in repeats:
        first, behind = repeat.borders(part.backward)
        part = part.repeated(first, behind, repeat.times)
    return part


def simulated(parts: Sequence[Extrapolated]) -> Simulated:
    """Returns what a step's programs take."""
    on_host = next(part.host for part in parts if not part.backward)
    return [part.play() for part in parts], static_bytes(parts), on_host
