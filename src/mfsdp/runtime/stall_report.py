"""The report of a stall: what a rank says of itself, who has not arrived, and where they are."""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TypedDict

import torch

SHOWN = 4
"""Ranks whose stack a report shows."""


@dataclass
class Settings:
    """Settings of the model compiled last."""

    patience: float | None = 120.0
    """Seconds; ``None``: it does not look for stalls."""
    raises: bool = False
    folder: str | None = None
    """For stacks of all threads, and the entries of torch's FlightRecorder."""


class RankState(TypedDict):
    """What a process says of itself, as JSON."""

    rank: int
    counts: dict[str, int]
    """Announcements by group."""
    name: str
    place: str
    line: str
    at: int
    number: int
    """Of an execution: its program, the operation, its line of the listing, its index, executions so far."""
    left: tuple[str, float]
    """The last program, and the seconds since its end."""
    busy: bool
    """Whether it compiles, or agrees with other ranks on what is sharded."""
    stack: list[str]
    """The main thread's frames."""


class WaitingState(RankState):
    """The state of the rank that has waited too long."""

    groups: dict[str, list[int]]
    """Ranks of the groups that it waits for."""
    waited: float
    """Seconds."""


def report(mine: WaitingState, late: Mapping[int, RankState | None], ranks: int, settings: Settings) -> str:
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
    lines.append(f"  {ranks - len(late)} of {ranks} ranks have arrived")
    for rank, state in list(late.items())[:SHOWN]:
        lines.append(f"  missing: rank {rank}, {_what(state)}")
        lines += [f"      {at}" for at in state["stack"]] if state is not None else []
    if len(late) > SHOWN:
        lines.append(f"  missing: ranks {_list(sorted(late)[SHOWN:])}")
    if not late:
        lines.append("  What they send does not arrive, or a device is not done.")
    if settings.folder:
        lines.append(f"  Stacks of all threads of all ranks: {settings.folder}")
    lines.append(f"  {_ENDS if settings.raises else _GOES_ON}")
    return "\n".join(lines)


_ENDS = "The run ends (on_stall='raise')."
_GOES_ON = "It continues once they arrive, or ends at the process group's timeout; on_stall='raise' would end it now."


def has_come(mine: WaitingState, theirs: RankState) -> bool:
    """Whether another rank is where this one waits, or further, according to both states."""
    shared = [name for name, ranks in mine["groups"].items() if theirs["rank"] in ranks]
    further = [theirs["counts"].get(name, 0) - mine["counts"][name] for name in shared]
    if min(further, default=0) < 0:
        return False
    return max(further, default=0) > 0 or theirs["name"] != mine["name"] or theirs["at"] >= mine["at"]


def _where(state: RankState) -> str:
    number = f", run {state['number']} of it" if state["number"] else ""
    name = state["name"] or "a collective of no program"
    return (f"{state['place']} of {name}" if state["place"] else name) + number


def _what(state: RankState | None) -> str:
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


def frames_of_others() -> dict[int, FrameType]:
    """Frames of other threads. Its own would form a cycle that keeps all frames and their tensors until the next
    garbage collection.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return frames


def stack(frame: FrameType | None, most: int = 8) -> list[str]:
    """The innermost frames, outermost first."""
    if frame is None:
        return []
    found = [(at.f_code, line) for at, line in islice(traceback.walk_stack(frame), most)][::-1]
    # Not traceback.StackSummary, which looks at each file: a file system that hangs is a reason of stalls.
    lines = ((code, number, linecache.getline(code.co_filename, number).strip()) for code, number in found)
    return [f"{code.co_filename}:{number} in {code.co_name}: {text}" for code, number, text in lines]


def lines_of(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """A line for each frame."""
    return [f"{at.filename}:{at.lineno} in {at.name}: {at.line}" for at in frames]


_BUSY = re.compile(
    r"torch/(_dynamo/convert_frame|_inductor/compile_fx|_functorch/_aot_autograd/graph_compile)\.py$"
    r"|mfsdp/compiler/(backend|capture)\.py$"
)
"""Files whose functions compile."""


def busy(frames: Iterable[FrameType]) -> bool:
    """Whether a thread compiles, or agrees with other ranks on what is sharded."""
    for frame in frames:
        for one, _ in traceback.walk_stack(frame):
            code = one.f_code
            if _BUSY.search(code.co_filename.replace(os.sep, "/")) or code.co_name == "others_that_differ":
                return True
    return False


def attach(folder: Path, number: int, rank: int) -> None:
    """Writes stacks of all threads, and the entries of torch's FlightRecorder, if it records. Private in torch
    (``_dump_fr_trace_json``); tried on 2.13, and left out where a version lacks it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames_of_others().items()
    ]
    (folder / f"stall{number}.rank{rank}.txt").write_text("\n".join(stacks))
    kept = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if kept is not None:
        entries = json.loads(kept())
        if entries.get("entries"):
            (folder / f"stall{number}.rank{rank}.flight_recorder.json").write_text(json.dumps(entries))
