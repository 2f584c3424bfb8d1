"""The watchdog: reports collectives that do not complete in time, and ranks that have not arrived.

Note [Watchdog]
One thread per process looks, every few seconds, at what the other threads execute. This costs those threads a counter
of waits begun and ended, which is odd during a wait. On a device, where the host does not wait, every program records
an event after itself instead. A wait longer than `patience` is a stall.

The first rank to see one calls all ranks, over its own connection to the store, not the group that hangs. Every
watchdog answers, whatever its process does: announcements made in each group (Note [Desync detection]), current
execution, last execution and its age, the main thread's stack. A rank with fewer announcements, or earlier in the same
program, has not arrived. The first rank writes the report; all log it, once per stall, and go on waiting: a late rank
costs only time. Only ``on_stall="raise"`` ends the run, on all ranks.

A process that an exception ends tells the others in the same way, before they wait for it. So does one that finds
non-finite values (Note [Runtime checks]).

Time in which a late rank compiles, or agrees with others on what it shards, does not count.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from . import execution, groups, stall_report, transport_registry
from .desync import DesyncError, PeerLostError, end_all
from .stall_report import SHOWN, RankState, Settings, WaitingState, has_come, lines_of, report

log = logging.getLogger("mfsdp")

ANSWERS = 6.0
"""Seconds for a watchdog to answer, if its process lets Python run."""

SLOWEST = 5.0
"""Longest time between two looks, in seconds."""

GRACE = 1.0
"""Seconds to wait for a rank that is nearer to the cause."""


@dataclass
class Seen:
    """A wait and its beginning. It holds nothing that the execution has in flight."""

    whose: weakref.ref[execution.Execution]
    name: str
    waits: int
    since: float
    told: bool = False
    """Whether a call was made about it."""


class News:
    """Texts that one rank makes all others log: what has ended its process, and failed runtime checks."""

    def __init__(self, store: dist.Store, rank: int):
        self._store, self._rank = store, rank
        self._heard = 0
        """How many have been read."""
        self.later: list[tuple[float, str, str, int, int]] = []
        """What it will report, and when (`tell_all`)."""
        deque(self.read(), 0)

    def read(self) -> Iterator[tuple[bool, str]]:
        """Other ranks' texts since the last call, each after whether it may end the run."""
        while self._store.check([f"news/{self._heard + 1}"]):
            self._heard += 1
            rank, ends, text = json.loads(self._store.get(f"news/{self._heard}"))
            if rank != self._rank:
                yield ends, text

    def publish(self, text: str, ends: bool) -> None:
        """Makes the other ranks log a text. ``ends``: whether it may end the run (``on_stall="raise"``)."""
        with suppress(RuntimeError):  # the store's process has ended
            if ends:
                self._store.set(f"ended/{self._store.add('ends', 1)}", text)  # read by `first_to_end`
            self._store.set(f"news/{self._store.add('news', 1)}", json.dumps([self._rank, ends, text]))

    def publish_due(self, now: float) -> None:
        """Publishes reports that are due, unless a rank has reported one nearer to the cause (`tell_all`)."""
        for one in [one for one in self.later if one[0] <= now]:
            self.later.remove(one)
            _, text, event, far, most = one
            nearer = any(self._store.add(f"{event}/{i}", 0) for i in range(far))
            if not nearer and self._store.add(f"{event}/{far}", 1) <= most:
                log.error("%s", text)
                self.publish(text, ends=False)


@dataclass(eq=False)
class Watchdog:
    """Watches one process while its default group exists."""

    store: dist.Store
    """A connection of its own."""
    group: dist.ProcessGroup
    rank: int
    world: int
    settings: Settings
    woken: threading.Event = field(default_factory=threading.Event)
    over: bool = False
    seen: dict[int, Seen] = field(default_factory=dict)
    """By thread."""
    answered: int = 0
    """Calls so far."""
    open: dict[int, float] = field(default_factory=dict)
    """Calls without a report yet, and when they were answered."""
    excused: int = 0
    """Calls without a report: a rank compiled, or all had arrived."""

    def __post_init__(self) -> None:
        self.process = os.getpid()
        self.answered = self._calls()
        self.news = News(self.store, self.rank)
        self.thread = threading.Thread(target=self._look_after, name="mfsdp watch", daemon=True)

    # its thread

    def _look_after(self) -> None:
        while True:
            self.woken.wait(self._pause())
            self.woken.clear()
            if self.over or groups.default() is not self.group:
                return
            try:
                self.look(time.monotonic())
            except Exception as error:  # most often, the store's process has ended
                log.debug("mfsdp: the watch ends: %s", error)
                return

    def _pause(self) -> float:
        patience = self.settings.patience
        pause = GRACE / 2 if self.news.later else SLOWEST
        return pause if patience is None else min(pause, max(patience / 4, 0.05))

    def stop(self) -> None:
        """Ends the thread, which would crash the process if it were in the store when Python ends."""
        self.over = True
        self.woken.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(2 * ANSWERS)
        for _, text, *_ in self.news.later:
            log.error("%s", text)

    def look(self, now: float) -> None:
        """Looks once: answers calls, and makes one if there is a stall."""
        self._answer(now)
        for ends, text in self.news.read():
            self._tell(text, ends)
        self.news.publish_due(now)
        patience = self.settings.patience
        for seen in self._waits(now):
            run = seen.whose()
            if run is not None and patience is not None and not seen.told and now - seen.since >= patience:
                seen.told = True
                met = [f"{pending.group.name}:{pending.group.count}" for pending in run.announced]
                stall = f"stall/{run.name}/{','.join(met)}"  # equal on all ranks in this stall
                if self.store.add(f"{stall}/{self.excused}", 1) == 1:
                    self._call(run, stall, now - seen.since)

    def _waits(self, now: float) -> list[Seen]:
        """What threads and devices wait for, and since when."""
        before, self.seen = self.seen, {}
        for thread, run in execution.waiting():
            seen, waits = before.get(thread), run.waits
            if seen is None or seen.whose() is not run or seen.waits != waits:
                seen = Seen(weakref.ref(run), run.name, waits, now)
            self.seen[thread] = seen
        for thread, seen in before.items():
            if seen.told and self.seen.get(thread) is not seen:
                log.warning("mfsdp: rank %d goes on with %s, after %.0f s", self.rank, seen.name, now - seen.since)
        return list(self.seen.values())

    # calls

    def _calls(self) -> int:
        return int(self.store.add("calls", 0))

    def _answer(self, now: float) -> None:
        for number in range(self.answered + 1, self._calls() + 1):
            self.store.set(f"{number}/{self.rank}", json.dumps(self.state(now)))
            self.open[number] = now
            self.answered = number
        for number, since in list(self.open.items()):
            if self.store.check([f"{number}/report"]):
                del self.open[number]
                self._heard(number, self.store.get(f"{number}/report").decode(), now)
            elif now - since > 5 * ANSWERS:
                del self.open[number]

    def _call(self, run: execution.Execution, stall: str, waited: float) -> None:
        """Asks all ranks for their state, and gives them the report."""
        waits, now = run.waits, time.monotonic()
        number = int(self.store.add("calls", 1))
        self._answer(now)
        groups_of = {pending.group.name: list(pending.group.wire.ranks) for pending in run.announced}
        members = sorted({rank for ranks in groups_of.values() for rank in ranks} or set(range(self.world)))
        keys = {rank: f"{number}/{rank}" for rank in members if rank != self.rank}
        while not self.store.check(list(keys.values())) and time.monotonic() < now + ANSWERS and not self.over:
            time.sleep(0.02)
        mine: WaitingState = {**self.state(now, run), "groups": groups_of, "waited": waited}
        others: dict[int, RankState | None] = {
            r: json.loads(self.store.get(k)) if self.store.check([k]) else None for r, k in keys.items()
        }
        late = {rank: theirs for rank, theirs in others.items() if theirs is None or not has_come(mine, theirs)}
        compiling = any(theirs is not None and theirs["busy"] for theirs in late.values())
        arrived = not late and self.store.add(f"{stall}/all", 1) == 1  # perhaps they arrived a moment ago
        text = "" if compiling or arrived or run.waits != waits else report(mine, late, len(others) + 1, self.settings)
        self.store.set(f"{number}/report", text)
        self._answer(now)

    def _heard(self, number: int, text: str, now: float) -> None:
        if not text:  # no stall, or not yet: patience starts again
            self.excused += 1
            for seen in self.seen.values():
                seen.since, seen.told = now, False
            return
        if self.settings.folder:
            with suppress(OSError):
                stall_report.attach(Path(self.settings.folder), number, self.rank)
        self._tell(text)

    def _tell(self, text: str, ends: bool = True) -> None:
        log.error("%s", text)
        if self.settings.raises and ends:
            end_all(list(transport_registry.group_states()), text)

    # the end of its process

    def end_with(self, error: BaseException) -> None:
        """Tells the others what ends this process, unless that is another's end."""
        if (
            isinstance(error, (DesyncError, PeerLostError))
            or groups.default() is not self.group
            or os.getpid() != self.process
        ):
            return
        lines = [f"mfsdp: rank {self.rank} has ended with {type(error).__name__}: {error}"]
        lines += getattr(error, "__notes__", ())
        lines += [f"    {line}" for line in lines_of(traceback.extract_tb(error.__traceback__)[-SHOWN:])]
        self.news.publish("\n".join(lines), ends=True)

    # the state of its process

    def state(self, now: float, run: execution.Execution | None = None) -> RankState:
        """This process's state; ``run`` selects an execution, if it is in several."""
        frames = stall_report.frames_of_others()
        main = frames.get(threading.main_thread().ident or 0)
        run = run or execution.innermost() or execution.Execution()
        last, left = execution.last()
        return {
            "rank": self.rank,
            "counts": {group.name: group.count for group in transport_registry.group_states()},
            "name": run.name,
            "place": run.place,
            "line": run.line_of_listing,
            "at": run.at,
            "number": run.number,
            "left": (last, now - left),
            "busy": stall_report.busy(frames.values()),
            "stack": stall_report.stack(main),
        }


# The watchdog of this process

_watch: Watchdog | None = None
_settings = Settings()


_previous: list[Callable[..., object]] = []


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """``sys.excepthook``, for an exception that ends the process."""
    if _watch is not None:
        _watch.end_with(error)
    _previous[0](kind, error, trace)


def begin() -> None:
    """Starts this process's watchdog, if there are other ranks. Called again, it does nothing."""
    global _watch
    group = groups.default()
    if _watch is not None and _watch.group is group and _watch.thread.is_alive():
        return
    end()
    if group is None or groups.alone():
        return
    store = groups.watch_store()
    if store is not None:
        if sys.excepthook is not _hook:
            _previous[:], sys.excepthook = [sys.excepthook], _hook
        _watch = Watchdog(store, group, groups.rank(), groups.world(), _settings)
        _watch.thread.start()


def settle(patience: float | None, raises: bool, folder: str | None) -> None:
    """Applies the settings of a model that is compiled; the last one's hold."""
    _settings.patience, _settings.raises, _settings.folder = patience, raises, folder
    begin()
    if _watch is not None:
        _watch.woken.set()


def tell_all(text: str, event: str, far: int, most: int) -> None:
    """Logs an error on all ranks.

    Args:
        text: the message.
        event: identifies the event; equal on all ranks that report it.
        far: distance from the cause; logged only if no rank has reported one nearer.
        most: how many ranks report at this distance.
    """
    watch = _watch if _watch is not None and _watch.process == os.getpid() else None
    if watch is None:
        log.error("%s", text)
        return
    watch.news.later.append((time.monotonic() + far * GRACE, text, event, far, most))
    watch.woken.set()


def end() -> None:
    """Stops this process's watchdog."""
    global _watch
    if _watch is not None and _watch.process == os.getpid():
        _watch.stop()
    _watch = None


atexit.register(end)
