"""Runs: one execution of a program, or one operation outside of programs, with all that it has under way.

What a run has launched and not waited for, the gradients that it keeps back, and where in its program it is live in one
object per execution. When an exception passes, that is dropped whole; what other ranks must hear of it, they are told.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any

import torch

from . import groups, static_buffers
from .desync import DesyncError, Fingerprint, GroupState, Left, PeerLostError, PendingCheck, operation
from .inflight import InFlight
from .instrumentation import frame, observer
from .transport import End, Pairs, Transport
from .transport_registry import group_state, transport_of


class Execution:
    """A program that is running, or an operation of the eager path (Note [Desync detection])."""

    def __init__(
        self,
        name: str = "",
        names: Callable[[], Sequence[str]] = tuple,
        meets: Iterable[str] = (),
        shown: bool = False,
    ):
        self.name = name
        self.names = names
        """Gives its operations, each with the path of its unit, ``all_gather layers.3``."""
        self.meets = meets
        """Names of all groups in which other ranks may wait for this one, once it has gone apart from some."""
        self.shown = shown
        """Whether somebody looks at its operations (Note [Names])."""
        self.loose = False
        """Whether each of its collectives is announced by itself (Note [Joining with zeros])."""
        self.reducing: dict[int, Any] = {}
        """Then: whose gradients are at an address, on their way to the first reduction."""
        self.outer: dict[int, torch.Tensor] = {}
        """Then: what the reduction over the outer axis has made of those that the first one gave, by address."""
        self.at = -1
        """Number of the operation that is running, or ran last."""
        self.launched = 0
        """Collectives so far."""
        self.waits = 0
        """Waits begun and ended: odd while one lasts (Note [Watchdog])."""
        self.number = 0
        """How often its program has run, with this one; 0: it is no program."""
        self.listed: Callable[[], Sequence[str]] = tuple
        """Gives the lines of its operations in the listing."""
        self.said: list[PendingCheck] = []
        self.tags: dict[str, int] = {}
        """Of its messages, by group."""
        self.compared = True
        self.pending: dict[int, list[End]] = {}
        """What has to be called before a collective's result may be read, by address of the result's storage."""
        self.copying: dict[int, End] = {}
        """The same of copies to and from the host, which need no other rank."""
        self.turn: Callable[[], None] | None = None
        """Lets the program beside this one run, before one of other parallelisms is waited for (Note [Interleaved
        programs]).
        """
        self.exchanges: set[int] = set()
        """Addresses of what those give, while somebody takes turns."""
        self.held: set[int] = set()
        """Gradients that stay where they are, and what reductions of them would have given, by address."""
        self.early: list[Any] = []
        """What was launched ahead, for its first collectives in their order; ``None`` where it launches one itself."""
        self.measured: Sequence[Any] = ()
        """Weights of all units whose maxima it reads (Note [Amax])."""
        self.looking: Any = None
        """What its probes look with, in the steps in which they do (Note [Runtime checks])."""
        self.lines: dict[tuple[str, torch.device], Transport] = {}
        """Transports that it has found, by group."""

    # in step

    def announce(self, sequences: Mapping[str, Fingerprint], anew: Collection[str] = ()) -> None:
        """Tells the ranks of groups what this one is about to run; those of the groups ``anew`` also that it gathers
        anew what was launched ahead, or lasts.
        """
        for name, words in sequences.items():
            company = group_state(name)
            if company is not None:
                self.waits += 1
                try:
                    said = company.announce(words, name in anew)
                    if company.standing:
                        said.check()
                except DesyncError as error:  # where the host does not wait for answers it hears of it here
                    company.lost_with(list(dict.fromkeys([company, *self.all()])), str(error))
                except RuntimeError as error:
                    self.disconnected(error, [company])
                    raise
                finally:
                    self.waits += 1
                self.part(said)

    def part(self, said: PendingCheck) -> None:
        """Takes part in what has been announced."""
        self.said.append(said)
        name = said.company.name
        self.tags[name] = said.tag
        if (other := groups.other_of(name)) is not None:
            self.tags[other] = said.tag
        self.compared = False

    def next(self, what: str, group: str, over: Iterable[str]) -> None:
        """Announces its next collective, over some groups, to another one, where each is announced by itself."""
        self.said = [said for said in self.said if said.company.name != group]
        self.announce({group: operation(what, optional=True)})
        self.carry(group, over)

    def carry(self, group: str, over: Iterable[str]) -> None:
        """Sends messages over some groups under the tag of what was announced to another one."""
        for name in over if group in self.tags else ():
            self.tags[name] = self.tags[group]
            if (other := groups.other_of(name)) is not None:
                self.tags[other] = self.tags[group]

    def anew(self, group: str, here: bool) -> bool:
        """Whether what was launched ahead, or lasts, is gathered anew: where the host waits for answers anyway, if any
        rank of the group says so; elsewhere if this one does, which then makes sure that the others do.

        Raises:
            Apart: they do not.
        """
        said = next((said for said in self.said if said.company.name == group), None)
        if said is None:
            return here
        if said.company.wire.prompt:
            self.agree()
            return said.anew
        if here:
            try:
                said.check()
            except DesyncError as error:
                said.company.lost_with(self.all(), str(error))
        return here

    def written(self, over: Sequence[str], here: bool) -> bool:
        """Whether any rank has written unseen to parameters that last and are gathered over these groups (Note [Rows
        written unseen]). Ranks of two axes ask along one, then along the other. ``here``: whether this one has.
        """
        for i, group in enumerate(over):
            company = group_state(group)
            if i and company is not None and company.wire.prompt:
                self.said = [said for said in self.said if said.company is not company]
                self.announce({group: operation("weights written unseen")}, [group] if here else ())
            here = self.anew(group, here)
        return here

    def tag(self, group: str) -> int:
        """Of its messages over a group: those of two programs never meet."""
        return self.tags.get(group, UNANNOUNCED)

    def agree(self) -> None:
        """Makes sure that all ranks are running the same, before what they send is waited for."""
        if self.compared:
            return
        self.compared = True
        self.waits += 1
        try:
            for said in self.said:
                if said.company.wire.prompt:
                    said.check()
        except DesyncError as error:
            companies = self.all()
            if len(companies) > 1:  # ranks of the other groups have seen no difference
                companies[0].lost_with(companies, str(error))
            raise
        except RuntimeError as error:
            self.disconnected(error, self.all())
            raise
        finally:
            self.waits += 1

    def all(self) -> list[GroupState]:
        """The ranks of all groups that it has to do with: those that have been told first."""
        companies = [said.company for said in self.said]
        meets = (group_state(name) for name in self.meets)
        return list(dict.fromkeys([*companies, *(c for c in meets if c is not None)]))

    def disconnected(self, error: RuntimeError, companies: list[GroupState]) -> None:
        """Raises with words what is left of a broken connection."""
        if not companies or isinstance(error, (DesyncError, PeerLostError)):
            return
        ended = next((c.lost for c in companies if c.lost), "")  # by the watch
        story = ended or next(filter(None, (c.story() for c in companies)), "") or groups.first_to_end() or f"{error}"
        at = f"{self.place} of {self.name}" if self.place else self.name
        for company in companies:
            company.wire.sever()
            company.lost = ended or f"mfsdp: rank {groups.rank()} has lost the other ranks at {at}: {story}"
        raise PeerLostError(companies[0].lost) from error

    # its operations

    @property
    def place(self) -> str:
        """The operation that is running, or ran last, with the path of its unit; ``""`` before the first."""
        names = self.names()
        return names[self.at] if 0 <= self.at < len(names) else ""

    @property
    def line_of_listing(self) -> str:
        """Of the operation that is running, or ran last."""
        lines = self.listed()
        return lines[self.at] if 0 <= self.at < len(lines) else ""

    def show(self, kernel: Callable[..., Any], *args: Any) -> Any:
        """Runs an operation in the frame of its place in the program, and tells whoever observes."""
        verb, name, seen = kernel.__name__, self.place, observer()
        if name.partition(" ")[0] != verb:  # not the order of the outline: no name is better than a wrong one
            name = verb
        if seen is None:
            return frame(name)(kernel, self, *args)
        return seen.operation(name, partial(frame(name), kernel, self), args)

    # what it has under way

    def line(self, group: str, device: torch.device) -> Transport:
        """What carries tensors on a device over a group."""
        found = self.lines.get((group, device))
        if found is None:
            found = self.lines[group, device] = transport_of(group, device)
        return found

    def gather(self, pairs: Pairs, group: str) -> End:
        """Launches all-gathers of shards into whole buffers."""
        device = pairs[0][0].device
        return InFlight(device, partial(self.finish, self.line(group, device).gather(pairs, self)), pairs)

    def scatter(self, pairs: Pairs, dtype: torch.dtype, group: str) -> End:
        """Launches reduce-scatters of whole buffers into shards; sums are taken in a dtype."""
        device = pairs[0][0].device
        return InFlight(device, partial(self.finish, self.line(group, device).scatter(pairs, dtype, self)), pairs)

    def all_reduce(self, tensor: torch.Tensor, op: str, group: str) -> End:
        """Launches an all-reduce in place."""
        device = tensor.device
        return InFlight(device, partial(self.finish, self.line(group, device).all_reduce(tensor, op, self)), tensor)

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], group: str
    ) -> End:
        """Launches an exchange of rows."""
        end = self.line(group, out.device).all_to_all(out, sent, received, splits, self)
        return InFlight(out.device, partial(self.finish, end), out, sent)

    def finish(self, arrived: End) -> None:
        """Waits for what was launched."""
        if not self.compared:
            self.agree()
        self.waits += 1
        try:
            arrived()
        except RuntimeError as error:
            self.disconnected(error, self.all())
            raise
        finally:
            self.waits += 1

    def launch(self, out: torch.Tensor, *ends: End) -> None:
        """Notes a collective: what has to be called before ``out`` may be read, behind what there is."""
        self.launched += 1
        self.pending.setdefault(out.untyped_storage().data_ptr(), []).extend(ends)

    def copy(self, out: torch.Tensor, end: End) -> None:
        """Notes a copy to or from the host: what has to be called before ``out`` may be read."""
        self.copying[out.untyped_storage().data_ptr()] = end

    def wait(self, out: torch.Tensor) -> None:
        """Returns once ``out`` may be read."""
        at = out.untyped_storage().data_ptr()
        if (copied := self.copying.pop(at, None)) is not None:
            copied()
            return
        if self.turn is not None and at in self.exchanges:
            self.exchanges.remove(at)
            self.turn()
        for end in self.pending.pop(at):
            end()

    def adopt(self, early: Any) -> torch.Tensor:
        """Takes what was launched ahead for a collective of its own."""
        self.launch(early.out, *early.ends)
        return early.out  # type: ignore[no-any-return]

    def leave(self, error: BaseException) -> None:
        """Notes that an exception has ended it, and on the exception where. What it had launched is called for when all
        ranks begin anew: not earlier, the others may not come.
        """
        if self.place:
            error.add_note(f"mfsdp: in {self.place} of {self.name}, or after it")
        while self.copying:  # these come by themselves, and their memory is anybody's afterwards
            with suppress(Exception):
                self.copying.popitem()[1]()
        companies = [said.company for said in self.said]
        ends = [end for ends in self.pending.values() for end in ends]
        ends += [end for early in self.early if early is not None for end in early.ends]
        self.early.clear()
        self.pending.clear()
        self.held.clear()
        self.outer.clear()
        if not companies:
            for end in ends:  # nobody else is there
                with suppress(Exception):  # the one under way says more
                    end()
        elif any(company.lost for company in companies):
            static_buffers.reset()  # those that it has taken will never be free
        else:
            place = f"at or after {self.place}" if self.place else "at its beginning"
            why = f"{type(error).__name__}: {error}"
            launched = 0 if self.loose else self.launched  # what they have announced tells ranks apart
            left = Left(self.name, place, launched, why, companies, self.all(), ends)
            for company in companies:
                company.leave(left)


UNANNOUNCED = 0x6D66
"""The tag of our messages that nobody has announced, so that they do not meet a user's own (pipeline stages)."""


class _Outside(Execution):
    """What stands for neither a program nor an operation: it lasts, and process groups may go before it does."""

    def line(self, group: str, device: torch.device) -> Transport:
        return transport_of(group, device)


_stacks: dict[int, list[Execution]] = {}
"""What threads are in, by thread, for whoever looks from another one."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.runs: list[Execution] = [_Outside()]
        """What this thread is in: programs and operations, the innermost last; the first stands for neither."""
        _stacks[threading.get_ident()] = self.runs


_here = _Here()
_last: tuple[str, float] = ("", 0.0)
_behind: deque[tuple[Execution, torch.Event]] = deque(maxlen=1024)
"""Programs whose collectives run on a device, and an event behind each; the watch takes away what is there."""


def waiting() -> list[tuple[int, Execution]]:
    """What waits for a collective, in whatever thread: by thread, or by minus one for a device, on which the host does
    not wait. On a device this has not run yet.
    """
    while _behind and _behind[0][1].query():
        _behind.popleft()
    found = [(thread, each[-1]) for thread, each in list(_stacks.items()) if each[-1].waits % 2]
    return found or ([(-1, _behind[0][0])] if _behind else [])


def innermost() -> Execution | None:
    """What the threads are in, of those that are in anything."""
    return next((each[-1] for each in list(_stacks.values()) if len(each) > 1), None)


def last() -> tuple[str, float]:
    """The name of the program that was left last, ``""`` for none, and when, by ``time.monotonic``."""
    return _last


def current() -> Execution:
    """What this thread is in: the innermost program or operation."""
    return _here.runs[-1]


def in_program() -> bool:
    """Whether this thread is in any program or operation."""
    return len(_here.runs) > 1


@contextmanager
def announced(
    what: str, *over: str, meets: Sequence[str] = (), carried: Sequence[str] = (), anew: bool = False
) -> Iterator[None]:
    """Around collectives of no program: tells the ranks of groups what this one is about to do. Inside of something
    that has been announced it is part of that. ``meets``: other groups whose ranks may wait for this one later;
    ``carried``: others that it communicates over, whose ranks are in the first that is told, and stand in for it;
    ``anew``: as for `Execution.announce`, all of ``over``.
    """
    if not over or any(group in current().tags for group in over):
        yield
        return
    run = Execution(what, meets=meets)
    run.announce(dict.fromkeys(over, operation(what, optional=bool(carried))), over if anew else ())
    run.carry(over[0], carried)
    _here.runs.append(run)
    try:
        yield
    finally:
        _here.runs.pop()


def all_call(what: str, over: Sequence[str]) -> None:
    """Makes sure that all ranks of some groups are about to do something that other libraries communicate for.

    Raises:
        Apart: some do something else.
    """
    with announced(what, *over):
        current().agree()


@contextmanager
def inside(run: Execution) -> Iterator[None]:
    """Around a program: an exception ends the run."""
    global _last
    with part_of(run):
        try:
            yield
        except BaseException as error:
            run.leave(error)
            raise
        finally:
            _last = run.name, time.monotonic()
        for _, device in run.lines:
            if device.type != "cpu":
                event = torch.Event(device)
                event.record()
                _behind.append((run, event))
                break


@contextmanager
def part_of(run: Execution) -> Iterator[None]:
    """Around a part of what a run launches."""
    _here.runs.append(run)
    try:
        yield
    finally:
        _here.runs.pop()


def dispatched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as the dispatcher calls it, without the run: the next operation of the one that this thread is in."""

    @wraps(kernel)
    def call(*args: Any) -> Any:
        here = _here.runs[-1]
        here.at += 1
        return here.show(kernel, *args) if here.shown else kernel(here, *args)

    return call
