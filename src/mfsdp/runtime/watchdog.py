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
import linecache
import logging
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from . import execution, groups, transport_registry
from .desync import DesyncError, PeerLostError, end_all

log = logging.getLogger("mfsdp")

PATIENCE = 120.0
"""The option's default, in seconds."""

ANSWERS = 6.0
"""Seconds for a watchdog to answer, if its process lets Python run."""

SLOWEST = 5.0
"""Longest time between two looks, in seconds."""

GRACE = 1.0
"""Seconds to wait for a rank that is nearer to the cause."""

SHOWN = 4
"""Ranks whose stack a report shows."""


@dataclass
class Settings:
    """Settings of the model compiled last."""

    patience: float | None = PATIENCE
    raises: bool = False
    folder: str | None = None
    """For stacks of all threads, and the entries of torch's FlightRecorder."""


@dataclass
class Seen:
    """A wait and its beginning. It holds nothing that the execution has in flight."""

    whose: weakref.ref[execution.Execution]
    name: str
    waits: int
    since: float
    told: bool = False
    """Whether a call was made about it."""


@dataclass(eq=False)
class Watchdog:
    """Watches one process while its default group exists."""

    store: Any
    """A connection of its own."""
    group: Any
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
    heard: int = 0
    """News so far: processes ended by exceptions, and failed runtime checks."""
    own: set[int] = field(default_factory=set)
    """Numbers of those that this process published."""
    later: list[tuple[float, str, str, int, int]] = field(default_factory=list)
    """What it will report, and when (`tell_all`)."""
    excused: int = 0
    """Calls without a report: a rank compiled, or all had arrived."""

    def __post_init__(self) -> None:
        self.process = os.getpid()
        self.answered = self._calls()
        while self.store.check([f"news/{self.heard + 1}"]):
            self.heard += 1
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
        pause = GRACE / 2 if self.later else SLOWEST
        return pause if patience is None else min(pause, max(patience / 4, 0.05))

    def stop(self) -> None:
        """Ends the thread, which would crash the process if it were in the store when Python ends."""
        self.over = True
        self.woken.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(2 * ANSWERS)
        for _, text, *_ in self.later:
            log.error("%s", text)

    def look(self, now: float) -> None:
        """Looks once: answers calls, and makes one if there is a stall."""
        self._answer(now)
        while self.store.check([f"news/{self.heard + 1}"]):
            self.heard += 1
            ends, text = json.loads(self.store.get(f"news/{self.heard}"))
            if self.heard not in self.own:
                self._tell(text, ends)
        self._tell_later(now)
        patience = self.settings.patience
        for seen in self._waits(now):
            run = seen.whose()
            if run is not None and patience is not None and not seen.told and now - seen.since >= patience:
                seen.told = True
                met = [f"{said.company.name}:{said.company.count}" for said in run.said]
                stall = f"stall/{run.name}/{','.join(met)}"  # equal on all ranks in this stall
                if self.store.add(f"{stall}/{self.excused}", 1) == 1:
                    self._call(run, stall, now - seen.since)

    def _waits(self, now: float) -> list[Seen]:
        """What threads and devices wait for, and since when."""
        lasting = {}
        for thread, run in execution.waiting():
            known, waits = self.seen.get(thread), run.waits
            same = known is not None and known.whose() is run and known.waits == waits
            lasting[thread] = known if same and known is not None else Seen(weakref.ref(run), run.name, waits, now)
        for thread, seen in self.seen.items():
            if seen.told and lasting.get(thread) is not seen:
                log.warning("mfsdp: rank %d goes on with %s, after %.0f s", self.rank, seen.name, now - seen.since)
        self.seen = lasting
        return list(lasting.values())

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
        groups_of = {said.company.name: list(said.company.wire.ranks) for said in run.said}
        members = sorted({rank for ranks in groups_of.values() for rank in ranks} or set(range(self.world)))
        keys = {rank: f"{number}/{rank}" for rank in members if rank != self.rank}
        while not self.store.check(list(keys.values())) and time.monotonic() < now + ANSWERS and not self.over:
            time.sleep(0.02)
        mine = {**self.state(now, run), "groups": groups_of, "waited": waited}
        others = {r: json.loads(self.store.get(k).decode()) if self.store.check([k]) else None for r, k in keys.items()}
        late = {rank: theirs for rank, theirs in others.items() if theirs is None or not has_come(mine, theirs)}
        busy = any(theirs is not None and theirs["busy"] for theirs in late.values())
        arrived = not late and self.store.add(f"{stall}/all", 1) == 1  # perhaps they arrived a moment ago
        text = "" if busy or arrived or run.waits != waits else report(mine, late, len(others) + 1, self.settings)
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
                _attach(Path(self.settings.folder), number, self.rank)
        self._tell(text)

    def _tell(self, text: str, ends: bool = True) -> None:
        log.error("%s", text)
        if self.settings.raises and ends:
            end_all(list(transport_registry.group_states()), text)

    # news

    def publish(self, text: str, ends: bool) -> None:
        """Makes the other ranks log a text. ``ends``: whether it may end the run (``on_stall="raise"``)."""
        with suppress(RuntimeError):  # the store's process has ended
            number = int(self.store.add("news", 1))
            self.own.add(number)
            if ends:
                self.store.set(f"ended/{self.store.add('ends', 1)}", text)  # read by `first_to_end`
            self.store.set(f"news/{number}", json.dumps([ends, text]))

    def _tell_later(self, now: float) -> None:
        """Publishes reports that are due, unless a rank has reported one nearer to the cause (`tell_all`)."""
        for one in [one for one in self.later if one[0] <= now]:
            self.later.remove(one)
            _, text, event, far, most = one
            nearer = any(self.store.add(f"{event}/{i}", 0) for i in range(far))
            if not nearer and self.store.add(f"{event}/{far}", 1) <= most:
                log.error("%s", text)
                self.publish(text, ends=False)

    # the end of its process

    def end_with(self, error: BaseException) -> None:
        """Tells the others what ends this process, unless that is another's end."""
        if (
            isinstance(error, (DesyncError, PeerLostError))
            or groups.default() is not self.group
            or os.getpid() != self.process
        ):
            return
        said = [
            f"mfsdp: rank {self.rank} has ended with {type(error).__name__}: {error}",
            *getattr(error, "__notes__", ()),
        ]
        frames = traceback.extract_tb(error.__traceback__)[-SHOWN:]
        said += [f"    {at.filename}:{at.lineno} in {at.name}: {at.line}" for at in frames]
        self.publish("\n".join(said), ends=True)

    # the state of its process

    def state(self, now: float, run: execution.Execution | None = None) -> dict[str, Any]:
        """This process's state; ``run`` selects an execution, if it is in several."""
        frames = _frames()
        main = frames.get(threading.main_thread().ident or 0)
        run = execution.innermost() if run is None else run
        last, left = execution.last()
        return {
            "rank": self.rank,
            "counts": {company.name: company.count for company in transport_registry.group_states()},
            "name": run.name if run is not None else "",
            "place": run.place if run is not None else "",
            "line": run.line_of_listing if run is not None else "",
            "at": run.at if run is not None else -1,
            "number": run.number if run is not None else 0,
            "left": [last, now - left],
            "busy": _busy(frames.values()),
            "stack": _stack(main),
        }


def report(mine: dict[str, Any], late: dict[int, dict[str, Any] | None], ranks: int, settings: Settings) -> str:
    """The report of a stall.

    Args:
        mine: state of the rank that waited too long, what it waited for and how long.
        late: states of ranks that have not arrived; ``None`` without an answer.
        ranks: number of ranks that may have to arrive.
        settings: whether the run ends, and the folder.
    """
    lines = [f"mfsdp: rank {mine['rank']} has waited {mine['waited']:.0f} s at {_where(mine)}"]
    if mine["line"]:
        lines.append(f"    {mine['line']}")
    lines.append(f"  {ranks - len(late)} of {ranks} ranks have come")
    for rank, state in list(late.items())[:SHOWN]:
        lines.append(f"  not come: rank {rank}, {_what(state)}")
        lines += [f"      {at}" for at in (state or {"stack": []})["stack"]]
    if len(late) > SHOWN:
        lines.append(f"  nor have ranks {_list(sorted(late)[SHOWN:])}")
    if not late:
        lines.append("  What they send does not arrive, or a device is not done.")
    if settings.folder:
        lines.append(f"  Stacks of all threads of all ranks: {settings.folder}")
    lines.append(f"  {_ENDS if settings.raises else _GOES_ON}")
    return "\n".join(lines)


_ENDS = "The run ends (on_stall='raise')."
_GOES_ON = "It goes on once they come, or ends at the process group's own timeout; on_stall='raise' would end it now."


def has_come(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether another rank is where this one waits, or further, according to both states."""
    shared = [name for name, ranks in mine["groups"].items() if theirs["rank"] in ranks]
    further = [theirs["counts"].get(name, 0) - mine["counts"][name] for name in shared]
    if min(further, default=0) < 0:
        return False
    return max(further, default=0) > 0 or theirs["name"] != mine["name"] or bool(theirs["at"] >= mine["at"])


def _where(state: dict[str, Any]) -> str:
    number = f", run {state['number']} of it" if state["number"] else ""
    name = state["name"] or "a collective of no program"
    return (f"{state['place']} of {name}" if state["place"] else name) + number


def _what(state: dict[str, Any] | None) -> str:
    if state is None:
        return "which does not answer: it has died, or lets no Python run"
    if state["name"]:
        return f"which is in {_where(state)}, at"
    name, ago = state["left"]
    return f"which left {name} {ago:.0f} s ago, and is at" if name else "which has run nothing yet, and is at"


def _list(ranks: Sequence[int]) -> str:
    """Ranks as text: ``"0-2, 5"``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _frames() -> dict[int, FrameType]:
    """Frames of other threads. Its own would form a cycle that keeps all frames and their tensors until the next
    garbage collection.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return frames


def _stack(frame: FrameType | None, most: int = 8) -> list[str]:
    """The innermost frames, outermost first."""
    lines = []
    for one, number in list(traceback.walk_stack(frame))[:most] if frame is not None else ():
        code = one.f_code
        text = linecache.getline(code.co_filename, number).strip()
        lines.append(f"{code.co_filename}:{number} in {code.co_name}: {text}")
    return lines[::-1]


_BUSY = re.compile(
    r"torch/(_dynamo/convert_frame|_inductor/compile_fx|_functorch/_aot_autograd/graph_compile)\.py$"
    r"|mfsdp/compiler/(backend|capture)\.py$"
)
"""Files whose functions compile."""

_AGREES = frozenset({"others_that_differ"})


def _busy(frames: Iterable[FrameType]) -> bool:
    """Whether a thread compiles, or agrees with other ranks on what is sharded."""
    for frame in frames:
        for one, _ in traceback.walk_stack(frame):
            code = one.f_code
            if _BUSY.search(code.co_filename.replace(os.sep, "/")) or code.co_name in _AGREES:
                return True
    return False


def _attach(folder: Path, number: int, rank: int) -> None:
    """Writes stacks of all threads, and the entries of torch's FlightRecorder, if it records. Private in torch
    (``_dump_fr_trace_json``); tried on 2.13, and left out where a version lacks it.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}" for ident, frame in _frames().items()
    ]
    (folder / f"stall{number}.rank{rank}.txt").write_text("\n".join(stacks))
    kept = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if kept is not None:
        told = kept()
        if json.loads(told).get("entries"):
            (folder / f"stall{number}.rank{rank}.flight_recorder.json").write_bytes(
                told if isinstance(told, bytes) else told.encode()
            )


# The watchdog of this process

_watch: Watchdog | None = None
_settings = Settings()


_former: list[Any] = []


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """``sys.excepthook``, for an exception that ends the process."""
    if _watch is not None:
        _watch.end_with(error)
    _former[0](kind, error, trace)


def begin() -> None:
    """Starts this process's watchdog, if there are other ranks. Called again, it does nothing."""
    global _watch
    group = groups.default()
    if _watch is not None and _watch.group is group and _watch.thread.is_alive():
        return
    end()
    if group is None or groups.world() == 1 or not groups.real():
        return
    store = groups.watch_store()
    if store is not None:
        if sys.excepthook is not _hook:
            _former[:], sys.excepthook = [sys.excepthook], _hook
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
    watch.later.append((time.monotonic() + far * GRACE, text, event, far, most))
    watch.woken.set()


def end() -> None:
    """Stops this process's watchdog."""
    global _watch
    if _watch is not None and _watch.process == os.getpid():
        _watch.stop()
    _watch = None


atexit.register(end)
