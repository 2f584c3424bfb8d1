"""Compiled programs, when they run: what ranks compare of them, and whose parameters they read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from . import execution, static_buffers, step_prefetch
from .buffer_registry import owner, read_by, unfinished
from .desync import Fingerprint
from .instrumentation import frame, observer, recorded
from .overlap import Part, Turn
from .runtime_checks import RuntimeChecks
from .step_prefetch import First


class ProgramOutline(Protocol):
    """What is known of a compiled program (`mfsdp.profile`)."""

    @property
    def name(self) -> str:
        """The model and the phase."""

    @property
    def phase(self) -> str:
        """``"forward"``, ``"backward"`` or ``"inference"``."""

    @property
    def operations(self) -> Sequence[str]:
        """Names of its operations in their order, with the unit's: ``all_gather layers.3``."""

    @property
    def texts(self) -> Sequence[str]:
        """Their lines in the listing."""


PATH = "\0{}\0"
"""Stands for the path of a unit in what ranks compare."""


def compiled_program(
    outline: ProgramOutline,
    run: Callable[[list[Any]], Any],
    sequences: Mapping[str, Sequence[str]] | None = None,
    sources: Mapping[int, tuple[str, str]] | None = None,
    keeping: Collection[int] = (),
    reads: Sequence[int] = (),
    meets: Sequence[str] = (),
    rooms: static_buffers.Rooms | None = None,
    frames: bool = False,
    exchanges: bool = False,
    silent: int = 0,
    given: Sequence[int] = (),
    first: Sequence[First] = (),
    measured: Sequence[int] = (),
    probed: tuple[int, int] = (0, 0),
) -> Callable[[list[Any]], Any]:
    """A compiled program that says when it runs, and what each of its operations is called. It takes its arguments as
    one list and may empty that, as functions of AOTAutograd do.

    Args:
        outline: names.
        run: the program.
        sequences: its collectives by group, one text each: what all ranks of the group must have alike (law 13). They
            are compared every time that it runs (Note [In step]).
        sources: which of its arguments are sources, of which unit, ``u0``, and its path when it was compiled. Equal
            layers may share a program: whose parameters it reads is told from its arguments, and stands in
            ``sequences`` where `PATH` says, and in the names of its operations.
        keeping: which of them may keep gradients back (`no_sync`); whether they do is compared too.
        reads: which of its arguments parameters are read through in forward (sources, or gathered parameters):
            they have to be the modules' still.
        meets: all groups of its units, also those that it communicates over in another phase only.
        rooms: static buffers that there have to be before it begins.
        frames: whether its operations run in frames of their names, also while nobody looks (Note [Names]).
        exchanges: whether it has collectives of other parallelisms: then it may run beside another (Note [Turns]).
        silent: how many results it has, if it is a backward and all of them are ``None``; else 0.
        given: which arguments of such a backward are forward's own, and no parameters.
        measured: which of its arguments are sources of units whose maxima it reads; whether they are due is compared
            too (Note [Maxima]).
        probed: every how many steps its probes look for what is not finite, and compare replicas (Note [Probes]).
        first: what it launches before it waits for anything, which an optimizer's step may launch ahead of it (Note
            [Borders]).

    Raises:
        RuntimeError: another rank runs something else (from the program, on every rank, with the first difference), or
            has been left behind by an exception.
    """
    named = partial(frame(outline.name), run)
    units = {i: unit for i, (unit, _) in (sources or {}).items()}
    compiled = tuple(path for _, path in (sources or {}).values())
    measures = [at for at, i in enumerate(units) if i in measured]
    keeps = [at for at, i in enumerate(units) if i in keeping]
    read = [at for at, i in enumerate(units) if i in reads], [i for i in reads if i not in units]
    always = frames or recorded()
    trains, brings = outline.phase == "forward", outline.phase == "backward"
    at = {i: place for place, i in enumerate(units)}
    heads = [(at[f.argument], f.spec, f.slot, f.casts) for f in first]

    numbers = itertools.count(1)
    probes = RuntimeChecks(outline.phase, *probed) if any(probed) else None

    def texts() -> Sequence[str]:
        return outline.texts

    @functools.cache
    def names(paths: tuple[str, ...]) -> tuple[str, ...]:
        moved = dict(zip(compiled, paths, strict=True))
        called = (name.partition(" ") for name in outline.operations)
        return tuple(f"{verb} {moved.get(path, path)}" for verb, _, path in called)

    @functools.cache
    def words(
        paths: tuple[str, ...], kept: tuple[str, ...], beside: bool = False, due: tuple[str, ...] = ()
    ) -> dict[str, Fingerprint]:
        more = [f"largest magnitudes in blocks of {', '.join(due)}, written since they were taken"] if due else []
        more += [f"gradients of {', '.join(kept)} are kept back under no_sync"] if kept else []
        more += ["beside the next forward, under mfsdp.overlapped"] if beside else []

        def told(line: str) -> str:
            for unit, path in zip(units.values(), paths, strict=True):
                line = line.replace(PATH.format(unit), path)
            return line

        return {
            group: Fingerprint(outline.name, (*map(told, lines), *more)) for group, lines in (sequences or {}).items()
        }

    def said(paths: tuple[str, ...], buffers: Sequence[Any], beside: bool) -> dict[str, Fingerprint]:
        due = (at for at in measures if buffers[at] is not None and buffers[at].weights.maxima.due())
        written = tuple(paths[at] for at in due)
        if measures:  # what another rank may say
            words(paths, (), beside, () if written else tuple(paths[at] for at in measures))
        if not keeps:
            return words(paths, (), beside, written)
        words(paths, tuple(paths[at] for at in keeps), beside, written)  # likewise
        kept = (at for at in keeps if buffers[at] is not None and not buffers[at].gradients.sync)
        return words(paths, tuple(paths[at] for at in kept), beside, written)

    def met(buffers: Sequence[Any]) -> step_prefetch.StepPrefetch | None:
        """The model for which something has been launched ahead that this may take."""
        wanted = tuple([(buffers[place], *rest) for place, *rest in heads])
        if any(buffer is None for buffer, *_ in wanted):
            return None
        model: step_prefetch.StepPrefetch = wanted[0][0].unit.outermost.ahead
        return model if model.meet(wanted, trains) else None

    def program(args: list[Any]) -> Any:
        if exchanges and (trains or brings):
            buffers = [owner(args[i]) for i in units]
            overlap = next((buffer.gradients.overlap for buffer in buffers if buffer is not None), None)
            if overlap is not None:
                take = overlap.backward if brings else overlap.forward
                return take(Part(outline.name, execute, args, buffers, silent, given))
        return execute(args, None)

    def execute(args: list[Any], turn: Turn | None) -> Any:
        buffers = [owner(args[i]) for i in units]
        model_of = next((buffer.unit.outermost for buffer in buffers if buffer is not None), None)
        if model_of is not None and model_of.half:
            raise unfinished(model_of)
        paths = tuple(["?" if buffer is None else buffer.unit.fqn for buffer in buffers])
        seen = observer()
        here = execution.Execution(outline.name, partial(names, paths), meets, shown=always or seen is not None)
        here.turn = turn
        here.number, here.listed = next(numbers), texts
        here.measured = [buffers[at].weights for at in measures if buffers[at] is not None]
        if probes is not None:
            here.looking = probes.begin(here, buffers)
        model = met(buffers) if heads else None
        anew = model is not None and model.anew
        lasting = [b for b in dict.fromkeys(buffers) if b is not None and b.spec.kept and not brings]
        unseen = {group for b in lasting if b.weights.unseen() for group in b.spec.gathering}
        loose = model_of.loose if model_of is not None and model_of.loose else None
        if loose:
            here.loose = True
            loose.in_backward() if brings else loose.begins()
        if sequences:
            told = said(paths, buffers, turn is not None and brings)
            if loose:  # its own collectives are announced one by one
                owned = {group for buffer in buffers if buffer is not None for group in buffer.spec.meets}
                told = {group: words for group, words in told.items() if group not in owned}
            here.announce(told, unseen | {model.group} if anew and model is not None else unseen)
        step = model_of.ahead if model_of is not None else None
        if step is not None and (trains or brings):
            step.open += 1 if trains else -1
        with execution.inside(here):
            if model is not None:
                model.decide(here, anew)
            if lasting and not loose:
                _gather_again(here, lasting, unseen)
            if step_prefetch.any_under_way():
                step_prefetch.make_room(rooms or {})
            static_buffers.reserve(rooms or {})
            for buffer in dict.fromkeys([*(buffers[at] for at in read[0]), *(read_by(args[i]) for i in read[1])]):
                if buffer is not None:
                    buffer.in_place()
            out = named(args) if seen is None else seen.program(outline, named, args)
        if loose and not (trains or brings or loose.scopes):
            loose.end("forward")
        if here.looking is not None:
            here.looking.close()
        return out

    program._boxed_call = True  # type: ignore[attr-defined]
    return program


def _gather_again(run: execution.Execution, buffers: Sequence[Any], unseen: Collection[str]) -> None:
    """Makes parameters that last due where any rank has written to them unseen, over the groups ``unseen`` this one."""
    for over in dict.fromkeys(buffer.spec.gathering for buffer in buffers):
        if run.written(over, any(group in unseen for group in over)):
            for buffer in buffers:
                if buffer.spec.gathering == over:
                    buffer.weights.stale = True
