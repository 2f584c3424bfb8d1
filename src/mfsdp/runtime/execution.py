"""Executions: one call of a program, or one operation outside of programs.

An `Execution` holds launched work, unreduced gradients and the position in the program. An exception drops it as a
whole; other ranks are told what concerns them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from . import capturing, devices, static_buffers
from .announcements import Announcements
from .desync import Left, operation
from .inflight import InFlight
from .instrumentation import frame, observer
from .transport import End, Messages, Pairs, Transport
from .transport_registry import transport_of

if TYPE_CHECKING:
    from .buffer_api import BlockAmax
    from .join import SeparateAnnouncements
    from .runtime_checks import Check
    from .step_prefetch import PrefetchedGather


class Execution(Announcements):
    """A running program, or an operation of the eager fallback.

    Beside `Announcements` it has more attributes than other classes: each is read or written once per collective or
    operation, where another object in between would cost time.
    """

    def __init__(
        self,
        name: str = "",
        names: Callable[[], Sequence[str]] = tuple,
        meets: Iterable[str] = (),
        shown: bool = False,
    ):
        super().__init__(name, meets)
        self.names = names
        """Returns its operations' names with unit paths, such as ``all_gather layers.3``."""
        self.shown = shown
        """Whether somebody observes its operations (Note [Names])."""
        self.separate: SeparateAnnouncements | None = None
        """Announces each collective separately, where ranks may skip units (Note [Joining with zeros])."""
        self.forward = False
        """Whether it executes a program that is no backward."""
        self.at = -1
        """Index of the current or last operation."""
        self.launched = 0
        """Collectives so far."""
        self.number = 0
        """Executions of its program so far, this one included; 0: not a program."""
        self.listed: Callable[[], Sequence[str]] = tuple
        """Returns its operations' lines of the listing."""
        self.pending: dict[int, list[End]] = {}
        """What to call before a collective's result may be read, by address of the result's storage."""
        self.copying: dict[int, End] = {}
        """The same for host copies, which need no other rank."""
        self.turn: Callable[[], None] | None = None
        """Lets the interleaved program run before a wait for a collective of another parallelism (Note [Interleaved
        programs]).
        """
        self.exchanges: set[int] = set()
        """Addresses of these collectives' results, while programs interleave."""
        self.held: set[int] = set()
        """Addresses of unreduced gradients, and of what their reductions would have produced."""
        self.early: list[PrefetchedGather | None] = []
        """Prefetched gathers for its first collectives, in order; ``None`` where it launches one itself."""
        self.measured: Sequence[BlockAmax] = ()
        """The amax of all units that it reads (Note [Amax])."""
        self.check: Check | None = None
        """Its runtime checks, in steps that check (Note [Runtime checks])."""
        self.lines: dict[tuple[str, torch.device], Transport] = {}
        """Transports found so far."""

    # operations

    @property
    def place(self) -> str:
        names = self.names()
        return names[self.at] if 0 <= self.at < len(names) else ""

    @property
    def line_of_listing(self) -> str:
        """The same operation's line of the listing."""
        lines = self.listed()
        return lines[self.at] if 0 <= self.at < len(lines) else ""

    def show(self, kernel: Callable[..., Any], *args: Any) -> Any:
        """Runs an operation in a frame of its name, and notifies the observer."""
        verb, name, seen = kernel.__name__, self.place, observer()
        if name.partition(" ")[0] != verb:  # not in the outline's order: no name is better than a wrong one
            name = verb
        if seen is None:
            return frame(name)(kernel, self, *args)
        return seen.operation(name, partial(frame(name), kernel, self), args)

    # work in flight

    def line(self, group: str, device: torch.device) -> Transport:
        """The transport of a group for tensors on a device."""
        found = self.lines.get((group, device))
        if found is None:
            found = self.lines[group, device] = transport_of(group, device)
        return found

    def gather(self, pairs: Pairs, group: str) -> End:
        """Launches all-gathers of shards into full buffers."""
        device = pairs[0][0].device
        return InFlight(device, partial(self.finish, self.line(group, device).gather(pairs, self)), pairs)

    def scatter(self, pairs: Pairs, dtype: torch.dtype, group: str) -> End:
        """Launches reduce-scatters of full buffers into shards, summed in ``dtype``."""
        device = pairs[0][0].device
        return InFlight(device, partial(self.finish, self.line(group, device).scatter(pairs, dtype, self)), pairs)

    def all_reduce(self, tensor: torch.Tensor, op: str, group: str) -> End:
        """Launches an all-reduce in place."""
        device = tensor.device
        return InFlight(device, partial(self.finish, self.line(group, device).all_reduce(tensor, op, self)), tensor)

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], group: str
    ) -> End:
        """Launches an all-to-all of rows."""
        end = self.line(group, out.device).all_to_all(out, sent, received, splits, self)
        return InFlight(out.device, partial(self.finish, end), out, sent)

    def trade(self, received: Messages, sent: Messages, group: str) -> End:
        """Launches messages between some ranks of a group."""
        device = sent[0][1].device
        end = self.line(group, device).trade(received, sent, self)
        return InFlight(device, partial(self.finish, end), received, sent)

    def finish(self, arrived: End) -> None:
        """Waits for launched work."""
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
        """Records a collective: what to call, after earlier entries, before ``out`` may be read."""
        self.launched += 1
        self.pending.setdefault(out.untyped_storage().data_ptr(), []).extend(ends)

    def copy(self, out: torch.Tensor, end: End) -> None:
        """Records a host copy: what to call before ``out`` may be read."""
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

    def adopt(self, early: PrefetchedGather) -> torch.Tensor:
        """Uses a prefetched gather as its own collective."""
        self.launch(early.out, *early.ends)
        return early.out

    def leave(self, error: BaseException) -> None:
        """Records that an exception has ended it, and notes the operation on the exception. Launched collectives are
        waited for only when all ranks start over: the others may never join.
        """
        if self.place:
            error.add_note(f"mfsdp: in {self.place} of {self.name}, or after it")
        while self.copying:  # copies need no other rank, and their memory may be reused afterwards
            with suppress(Exception):
                self.copying.popitem()[1]()
        states = [pending.group for pending in self.announced]
        ends = [end for ends in self.pending.values() for end in ends]
        ends += [end for early in self.early if early is not None for end in early.ends]
        self.early.clear()
        self.pending.clear()
        self.held.clear()
        if not states:
            for end in ends:  # no other rank is involved
                with suppress(Exception):  # the current error says more
                    end()
        elif any(state.lost for state in states):
            static_buffers.reset()  # those taken here would never become free
        else:
            place = f"at or after {self.place}" if self.place else "at its beginning"
            why = f"{type(error).__name__}: {error}"
            launched = 0 if self.separate else self.launched  # announcements already distinguish the ranks
            left = Left(self.name, place, launched, why, states, self.all(), ends)
            for state in states:
                state.leave(left)
        self.separate = None


class _Outside(Execution):
    """The execution outside of programs and operations. It may outlive process groups, so it caches no transports."""

    def line(self, group: str, device: torch.device) -> Transport:
        return transport_of(group, device)


_stacks: dict[int, list[Execution]] = {}
"""Executions per thread, for access from other threads."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.runs: list[Execution] = [_Outside()]
        """This thread's programs and operations, the innermost last; the first entry is neither."""
        _stacks[threading.get_ident()] = self.runs


_here = _Here()
_last: tuple[str, float] = ("", 0.0)
_behind: deque[tuple[Execution, torch.device, torch.Event]] = deque(maxlen=1024)
"""Programs with collectives on a device, each with an event after it; `waiting` removes complete ones."""


def waiting() -> list[tuple[int, Execution]]:
    """Executions that wait for a collective, with their thread, or -1 for a device, on which the host does not wait.
    For a thread that does nothing else: it stays on that device. The device part has not run yet.
    """
    while _behind:
        _, device, event = _behind[0]
        devices.stay_on(device)
        if not event.query():
            break
        _behind.popleft()
    found = [(thread, each[-1]) for thread, each in list(_stacks.items()) if each[-1].waits % 2]
    return found or ([(-1, _behind[0][0])] if _behind else [])


def innermost() -> Execution | None:
    """The innermost execution of any thread that has one."""
    return next((each[-1] for each in list(_stacks.values()) if len(each) > 1), None)


def last() -> tuple[str, float]:
    """The name of the program that ended last, ``""`` for none, and its ``time.monotonic``."""
    return _last


def current() -> Execution:
    """This thread's innermost program or operation."""
    return _here.runs[-1]


def in_program() -> bool:
    """Whether this thread is in a program or operation."""
    return len(_here.runs) > 1


@contextmanager
def announced(
    what: str, *over: str, meets: Sequence[str] = (), carried: Sequence[str] = (), anew: bool = False
) -> Iterator[None]:
    """Surrounds collectives outside of programs with an announcement; does nothing inside of another one over any of
    these groups.

    Args:
        what: the announced text.
        over: groups that are told.
        meets: other groups whose ranks may wait for this one later.
        carried: other groups it communicates over; their ranks are in the first of ``over``, and may join with zeros.
        anew: as for `Execution.announce`, in all of ``over``.
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
    """Checks that all ranks of some groups are about to run something whose collectives another library launches.

    Raises:
        DesyncError: some run something else.
    """
    with announced(what, *over):
        current().agree()


@contextmanager
def inside(run: Execution) -> Iterator[None]:
    """Surrounds a program: an exception ends its execution."""
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
            if device.type != "cpu" and not capturing.is_recording():
                event = torch.Event(device)
                event.record()
                _behind.append((run, device, event))
                break


@contextmanager
def part_of(run: Execution) -> Iterator[None]:
    """Surrounds a part of what an execution launches."""
    _here.runs.append(run)
    try:
        yield
    finally:
        _here.runs.pop()


def dispatched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts a kernel to the dispatcher: each call is the next operation of this thread's innermost execution."""

    @wraps(kernel)
    def call(*args: Any) -> Any:
        here = _here.runs[-1]
        here.at += 1
        return here.show(kernel, *args) if here.shown else kernel(here, *args)

    return call
