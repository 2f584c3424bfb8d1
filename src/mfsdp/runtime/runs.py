"""Runs: one execution of a program, or one operation outside of programs, with all that it has under way.

What a run has launched and not waited for, the gradients that it keeps back, and where in its program it is live in one
object per execution. When an exception passes, that is dropped whole; what other ranks must hear of it, they are told.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch

from . import groups, slots
from .agreement import Apart, Company, Left, Said, Words, operation
from .carriers import company_of, transport_of
from .owners import owner, read_by
from .transport import End, Pairs


class Run:
    """A program that is running, or an operation of the eager path (Note [In step])."""

    def __init__(
        self,
        name: str = "",
        frames: Sequence[tuple[str, Callable[..., Any]]] = (),
        meets: Iterable[str] = (),
    ):
        self.name = name
        self.meets = meets
        """Names of all groups in which other ranks may wait for this one, once it has gone apart from some."""
        self.frames = frames
        """Its operations, by name, and their frames."""
        self.coming = iter(frames)
        """Those still to come, where the order is not known beforehand."""
        self.at = ""
        """The one that is running, or ran last, with the path of its unit."""
        self.launched = 0
        """Collectives so far."""
        self.said: list[Said] = []
        self.tags: dict[str, int] = {}
        """Of its messages, by group."""
        self.compared = True
        self.pending: dict[int, list[End]] = {}
        """What has to be called before a collective's result may be read, by address of the result's storage."""
        self.held: set[int] = set()
        """Gradients that stay where they are, and what reductions of them would have given, by address."""

    # in step

    def announce(self, sequences: Mapping[str, Words]) -> None:
        """Tells the ranks of groups what this one is about to run."""
        for name, words in sequences.items():
            company = company_of(name)
            if company is not None:
                try:
                    said = company.announce(words)
                except Apart as error:  # where the host does not wait for answers it hears of it here
                    company.lost_with(list(dict.fromkeys([company, *self.all()])), str(error))
                except RuntimeError as error:
                    self.disconnected(error, [company])
                    raise
                self.said.append(said)
                self.tags[name] = said.tag
                if (other := groups.other_of(name)) is not None:
                    self.tags[other] = said.tag
                self.compared = False

    def tag(self, group: str) -> int:
        """Of its messages over a group: those of two programs never meet."""
        return self.tags.get(group, UNANNOUNCED)

    def agree(self) -> None:
        """Makes sure that all ranks are running the same, before what they send is waited for."""
        if self.compared:
            return
        self.compared = True
        try:
            for said in self.said:
                if said.company.wire.prompt:
                    said.check()
        except Apart as error:
            companies = self.all()
            if len(companies) > 1:  # ranks of the other groups have seen no difference
                companies[0].lost_with(companies, str(error))
            raise
        except RuntimeError as error:
            self.disconnected(error, self.all())
            raise

    def all(self) -> list[Company]:
        """The ranks of all groups that it has to do with: those that have been told first."""
        companies = [said.company for said in self.said]
        meets = (company_of(name) for name in self.meets)
        return list(dict.fromkeys([*companies, *(c for c in meets if c is not None)]))

    def disconnected(self, error: RuntimeError, companies: list[Company]) -> None:
        """Raises with words what is left of a broken connection."""
        if not companies or isinstance(error, Apart):
            return
        story = next(filter(None, (c.story() for c in companies)), f"{error}")
        at = f"{self.at} of {self.name}" if self.at else self.name
        for company in companies:
            company.wire.sever()
            company.lost = f"mfsdp: rank {groups.rank()} has lost the other ranks at {at}: {story}"
        raise RuntimeError(companies[0].lost) from error

    # its operations

    def do(self, number: int, launches: bool, kernel: Callable[..., Any], *args: Any) -> Any:
        """Runs its operation of that number in the frame of its place in the program, and tells whoever observes.
        ``launches``: whether it is a collective.
        """
        return self.show(self.frames[number][1], launches, kernel, *args)

    def show(self, named: Callable[..., Any], launches: bool, kernel: Callable[..., Any], *args: Any) -> Any:
        """The same in a frame that is given."""
        self.at = named.__name__
        if _observer is None:
            out = named(kernel, *args)
        else:
            out = _observer.operation(self.at, partial(named, kernel), args)
        self.launched += launches
        return out

    def next(self, number: int) -> None:
        """Says which operation comes next, where a compiled body will run it."""
        self.coming = iter(self.frames[number:])

    # what it has under way

    def gather(self, pairs: Pairs, group: str) -> End:
        """Launches all-gathers of shards into whole buffers."""
        return partial(self.finish, transport_of(group, pairs[0][0].device).gather(pairs, self))

    def scatter(self, pairs: Pairs, dtype: torch.dtype, group: str) -> End:
        """Launches reduce-scatters of whole buffers into shards; sums are taken in a dtype."""
        return partial(self.finish, transport_of(group, pairs[0][0].device).scatter(pairs, dtype, self))

    def all_reduce(self, tensor: torch.Tensor, op: str, group: str) -> End:
        """Launches an all-reduce in place."""
        return partial(self.finish, transport_of(group, tensor.device).all_reduce(tensor, op, self))

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], group: str
    ) -> End:
        """Launches an exchange of rows."""
        return partial(self.finish, transport_of(group, out.device).all_to_all(out, sent, received, splits, self))

    def finish(self, arrived: End) -> None:
        """Waits for what was launched."""
        self.agree()
        try:
            arrived()
        except RuntimeError as error:
            self.disconnected(error, self.all())
            raise

    def launch(self, out: torch.Tensor, *ends: End) -> None:
        """Notes what has to be called before ``out`` may be read, behind what there is."""
        self.pending.setdefault(out.untyped_storage().data_ptr(), []).extend(ends)

    def wait(self, out: torch.Tensor) -> None:
        """Returns once ``out`` may be read."""
        for end in self.pending.pop(out.untyped_storage().data_ptr()):
            end()

    def leave(self, error: BaseException) -> None:
        """Notes that an exception has ended it. What it had launched is called for when all ranks begin anew: not
        earlier, the others may not come.
        """
        companies = [said.company for said in self.said]
        ends = [end for ends in self.pending.values() for end in ends]
        self.pending.clear()
        self.held.clear()
        if not companies:
            for end in ends:  # nobody else is there
                with suppress(Exception):  # the one under way says more
                    end()
        elif any(company.lost for company in companies):
            slots.forget()  # those that it has taken will never be free
        else:
            place = f"at or after {self.at}" if self.at else "at its beginning"
            why = f"{type(error).__name__}: {error}"
            left = Left(self.name, place, self.launched, why, companies, self.all(), ends)
            for company in companies:
                company.leave(left)


UNANNOUNCED = 0x6D66
"""The tag of our messages that nobody has announced, so that they do not meet a user's own (pipeline stages)."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = [Run()]
        """What this thread is in: programs and operations, the innermost last; the first stands for neither."""


_here = _Here()


def current() -> Run:
    """What this thread is in: the innermost program or operation."""
    return _here.runs[-1]


def in_program() -> bool:
    """Whether this thread is in any program or operation."""
    return len(_here.runs) > 1


@contextmanager
def announced(what: str, *over: str, meets: Sequence[str] = ()) -> Iterator[None]:
    """Around collectives of no program: tells the ranks of groups what this one is about to do. Inside of something
    that has been announced it is part of that. ``meets``: other groups whose ranks may wait for this one later.
    """
    if not over or any(group in current().tags for group in over):
        yield
        return
    run = Run(what, meets=meets)
    run.announce(dict.fromkeys(over, operation(what)))
    _here.runs.append(run)
    try:
        yield
    finally:
        _here.runs.pop()


# Programs


class Observer(Protocol):
    """Whoever wants to see what programs do as they run (`mfsdp.profile`): called instead of it, with it."""

    def program(self, outline: Any, run: Callable[[list[Any]], Any], args: list[Any]) -> Any: ...

    def operation(self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...


_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Shows an observer every program and every operation inside of the ``with``.

    Raises:
        RuntimeError: there is one already.
    """
    global _observer
    if _observer is not None:
        raise RuntimeError("mfsdp.profile: another profile is running; end it first")
    _observer = observer
    try:
        yield
    finally:
        _observer = None


class Outline(Protocol):
    """What is known of a compiled program (`mfsdp.profile`)."""

    @property
    def name(self) -> str:
        """The model and the phase."""

    @property
    def operations(self) -> Sequence[str]:
        """Names of its operations in their order, with the unit's: ``all_gather layers.3``."""


def marked(
    outline: Outline,
    run: Callable[[list[Any]], Any],
    sequences: Mapping[str, Sequence[str]] | None = None,
    sources: Mapping[int, tuple[str, str]] | None = None,
    keeping: Collection[int] = (),
    reads: Sequence[int] = (),
    meets: Sequence[str] = (),
    rooms: slots.Rooms | None = None,
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

    Raises:
        RuntimeError: another rank runs something else (from the program, on every rank, with the first difference), or
            has been left behind by an exception.
    """
    named = partial(frame(outline.name), run)
    units = {i: unit for i, (unit, _) in (sources or {}).items()}
    compiled = tuple(path for _, path in (sources or {}).values())

    @functools.cache
    def frames(paths: tuple[str, ...]) -> tuple[tuple[str, Callable[..., Any]], ...]:
        moved = dict(zip(compiled, paths, strict=True))
        called = (name.partition(" ") for name in outline.operations)
        return tuple((verb, frame(f"{verb} {moved.get(path, path)}")) for verb, _, path in called)

    @functools.cache
    def words(paths: tuple[str, ...], kept: tuple[str, ...]) -> dict[str, Words]:
        more = (f"gradients of {', '.join(kept)} are kept back under no_sync",) if kept else ()

        def told(line: str) -> str:
            for unit, path in zip(units.values(), paths, strict=True):
                line = line.replace(PATH.format(unit), path)
            return line

        return {group: Words(outline.name, (*map(told, lines), *more)) for group, lines in (sequences or {}).items()}

    def said(args: list[Any], paths: tuple[str, ...]) -> dict[str, Words]:
        if not keeping:
            return words(paths, ())
        may_keep = [(i, path) for i, path in zip(units, paths, strict=True) if i in keeping]
        words(paths, tuple(path for _, path in may_keep))  # what another rank may say
        return words(paths, tuple(path for i, path in may_keep if _keeps(args[i])))

    def program(args: list[Any]) -> Any:
        paths = tuple(_fqn(args[i]) for i in units)
        here = Run(outline.name, frames(paths), meets)
        here.announce(said(args, paths) if sequences else {})
        _here.runs.append(here)
        try:
            slots.reserve(rooms or {})
            for buffer in dict.fromkeys(read_by(args[i]) for i in reads):
                if buffer is not None:
                    buffer.in_place()
            return named(args) if _observer is None else _observer.program(outline, named, args)
        except BaseException as error:
            here.leave(error)
            raise
        finally:
            _here.runs.pop()

    program._boxed_call = True  # type: ignore[attr-defined]
    return program


PATH = "\0{}\0"
"""Stands for the path of a unit in what ranks compare."""


def _fqn(source: torch.Tensor) -> str:
    """The path of the unit that a source belongs to."""
    buffer = owner(source)
    return "?" if buffer is None else str(buffer.unit.fqn)


def _keeps(source: torch.Tensor) -> bool:
    buffer = owner(source)
    return buffer is not None and not buffer.gradients.sync


@functools.cache
def frame(name: str) -> Callable[..., Any]:
    """Calls what it is given in a frame of that name, for whoever looks at stacks: tracebacks, py-spy, and torch's
    FlightRecorder, whose entries have no other room for a unit.
    """

    def named(kernel: Callable[..., Any], *args: Any) -> Any:
        return kernel(*args)

    named.__name__ = name
    named.__code__ = named.__code__.replace(co_name=name, co_qualname=name)
    return named


def shown(kernel: Callable[..., Any], *, launches: bool) -> Callable[..., Any]:
    """A kernel that runs in the frame of its place in the program, and tells whoever observes. ``launches``: whether it
    is a collective.
    """
    nameless = (kernel.__name__, frame(kernel.__name__))

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        here = current()
        operation, named = next(here.coming, nameless)
        if operation != kernel.__name__:  # not the order of the outline: no name is better than a wrong one
            _, named = nameless
        return here.show(named, launches, kernel, *args)

    return run
