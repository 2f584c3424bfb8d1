"""A compiled program that runs: finds its buffers, compares with other ranks, and hands over to the compiled code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import execution, static_buffers, step_prefetch
from .buffer_registry import owner, read_by, unfinished
from .desync import Fingerprint
from .execution import Execution
from .instrumentation import frame, observer, recorded
from .join import SeparateAnnouncements
from .overlap import Turn
from .program_info import PATH, ProgramInfo
from .runtime_checks import RuntimeChecks

if TYPE_CHECKING:
    from .buffer_api import Buffer

    Buffers = Sequence[Buffer | None]


class CompiledProgram:
    """A compiled program that says when it runs, and what each of its operations is called.

    Args:
        info: facts about it.
        code: takes its arguments as one list, which it may empty, as functions of AOTAutograd do; so does this.

    Raises:
        RuntimeError: (by the call) another rank runs something else, told on every rank with the first difference, or
            an exception has left this rank behind.
    """

    _boxed_call = True

    def __init__(self, info: ProgramInfo, code: Callable[[list[Any]], Any]):
        self.info = info
        self._named = partial(frame(info.outline.name), code)
        phase, _, part = info.outline.phase.partition(" ")
        self._forward, self._backward, self._closes = phase == "forward", phase == "backward", part != "weight"
        self._frames = info.frames or recorded()
        place = {argument: i for i, argument in enumerate(info.sources)}
        self._amax = [place[i] for i in info.sources if i in info.amax_inputs]
        self._holds = [place[i] for i in info.sources if i in info.holds]
        self._reads = [place[i] for i in info.reads if i in place], [i for i in info.reads if i not in place]
        self._first = [(place[f.argument], f.spec, f.slot, f.casts) for f in info.first_launches]
        self._numbers = itertools.count(1)
        self._checks = RuntimeChecks(phase, *info.check_every) if any(info.check_every) else None
        self._names = functools.cache(partial(_names_at, info))  # of functions: methods would be a reference cycle
        self._fingerprints = functools.cache(partial(_fingerprints_of, info))

    def __call__(self, args: list[Any]) -> Any:
        """Runs the program, or leaves it to the model's `Overlap`."""
        for i, (shape, stride, dtype, device) in self.info.tangents.items():
            if args[i] is None:
                args[i] = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        if self.info.exchanges and (self._forward or self._backward):
            buffers = [owner(args[i]) for i in self.info.sources]
            overlap = next((buffer.gradients.overlap for buffer in buffers if buffer is not None), None)
            if overlap is not None:
                take = overlap.backward if self._backward else overlap.forward
                return take(self, args, buffers)
        return self.execute(args, None)

    def execute(self, args: list[Any], turn: Turn | None) -> Any:
        """One execution; ``turn`` lets the program beside it run (Note [Interleaved programs])."""
        buffers = [owner(args[i]) for i in self.info.sources]
        model = next((buffer.unit.outermost for buffer in buffers if buffer is not None), None)
        if model is not None and model.half:
            raise unfinished(model)
        seen = observer()
        paths = tuple(["?" if buffer is None else buffer.unit.fqn for buffer in buffers])
        run = self._begin(buffers, paths, turn, shown=self._frames or seen is not None)
        prefetched = self._prefetched(buffers)
        again = prefetched is not None and prefetched.anew
        persistent = [b for b in dict.fromkeys(buffers) if b is not None and b.spec.persistent and not self._backward]
        written = {group for b in persistent if b.weights.unseen() for group in b.spec.gather_groups}
        optional = model.loose if model is not None and model.loose else None
        if optional:
            run.separate = SeparateAnnouncements()
            optional.in_backward() if self._backward else optional.begins()
        if self.info.collectives:
            self._announce(run, buffers, paths, written | {prefetched.group} if again and prefetched else written)
        if model is not None and (self._forward or self._backward) and self._closes:
            model.ahead.open += 1 if self._forward else -1
        with execution.inside(run):
            if prefetched is not None:
                prefetched.decide(run, again)
            if persistent and not optional:
                _gather_again(run, persistent, written)
            if step_prefetch.any_under_way():
                step_prefetch.make_room(self.info.static_buffers)
            if self.info.user_buffers.groups:
                self.info.user_buffers.ready(run, self.info.static_buffers)
            static_buffers.reserve(self.info.static_buffers)
            mine, others = self._reads
            for buffer in dict.fromkeys([*(buffers[at] for at in mine), *(read_by(args[i]) for i in others)]):
                if buffer is not None:
                    buffer.in_place()
            out = self._named(args) if seen is None else seen.program(self.info.outline, self._named, args)
        if optional and not (self._forward or self._backward or optional.scopes):
            optional.end("forward")
        if run.check is not None:
            run.check.close()
        return out

    def _begin(self, buffers: Buffers, paths: tuple[str, ...], turn: Turn | None, shown: bool) -> Execution:
        info = self.info
        run = Execution(info.outline.name, partial(self._names, paths), info.peer_groups, shown=shown)
        run.turn, run.number, run.forward = turn, next(self._numbers), not self._backward
        run.listed = lambda: info.outline.texts
        run.measured = [b.weights.maxima for at in self._amax if (b := buffers[at]) is not None]
        if self._checks is not None:
            run.check = self._checks.begin(run, buffers)
        return run

    def _prefetched(self, buffers: Buffers) -> step_prefetch.GatherLauncher | None:
        """What the optimizer's step has launched of this model, if the program may take it."""
        wanted = tuple(
            [(b, spec, slot, casts) for place, spec, slot, casts in self._first if (b := buffers[place]) is not None]
        )
        if not wanted or len(wanted) < len(self._first):
            return None
        return wanted[0][0].unit.outermost.ahead.meet(wanted, self._forward)

    # what ranks compare

    def _announce(self, run: Execution, buffers: Buffers, paths: tuple[str, ...], again: Collection[str]) -> None:
        """Tells the other ranks what runs, and over which groups it gathers ``again``."""
        told = self._state_of(buffers, paths, beside=run.turn is not None and self._backward)
        if run.separate is not None:  # each collective of a unit is announced by itself
            units = {group for buffer in buffers if buffer is not None for group in buffer.spec.peer_groups}
            told = {group: fingerprint for group, fingerprint in told.items() if group not in units}
        run.announce(told, again)

    def _state_of(self, buffers: Buffers, paths: tuple[str, ...], beside: bool) -> dict[str, Fingerprint]:
        """The fingerprints of an execution, by group. Also makes those that another rank may send."""
        due = tuple(paths[at] for at in self._amax if (b := buffers[at]) is not None and b.weights.maxima.due())
        if self._amax:
            self._fingerprints(paths, (), beside, () if due else tuple(paths[at] for at in self._amax))
        if self._holds:
            self._fingerprints(paths, tuple(paths[at] for at in self._holds), beside, due)
        held = tuple(paths[at] for at in self._holds if (b := buffers[at]) is not None and not b.gradients.sync)
        return self._fingerprints(paths, held, beside, due)


def _fingerprints_of(
    info: ProgramInfo, paths: tuple[str, ...], held: tuple[str, ...], beside: bool, due: tuple[str, ...]
) -> dict[str, Fingerprint]:
    """The fingerprints of an execution by group. ``paths``: of the sources; ``held``, ``due``: of units whose gradients
    stay unreduced, and whose amax is taken anew; ``beside``: whether it runs beside a forward.
    """
    more = [f"largest magnitudes in blocks of {', '.join(due)}, written since they were taken"] if due else []
    more += [f"gradients of {', '.join(held)} stay unreduced under no_sync"] if held else []
    more += ["beside the next forward, under mfsdp.overlapped"] if beside else []
    units = [unit for unit, _ in info.sources.values()]

    def at_paths(line: str) -> str:
        for unit, path in zip(units, paths, strict=True):
            line = line.replace(PATH.format(unit), path)
        return line

    return {g: Fingerprint(info.outline.name, (*map(at_paths, lines), *more)) for g, lines in info.collectives.items()}


def _names_at(info: ProgramInfo, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a program's operations, with the paths of this execution's units."""
    moved = dict(zip((path for _, path in info.sources.values()), paths, strict=True))
    parts = (name.partition(" ") for name in info.outline.operations)
    return tuple(f"{verb} {moved.get(path, path)}" for verb, _, path in parts)


def _gather_again(run: Execution, buffers: Sequence[Buffer], written: Collection[str]) -> None:
    """Makes persistent parameters due for a gather where any rank has written to them; ``written``: this rank, by
    group.
    """
    for over in dict.fromkeys(buffer.spec.gather_groups for buffer in buffers):
        if run.written(over, any(group in written for group in over)):
            for buffer in buffers:
                if buffer.spec.gather_groups == over:
                    buffer.weights.stale = True
