"""Writes a simulated step in Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..cost_model.step_data import Line, StepData

LANES = {"C": "Compute", "G": "Gather", "R": "Reduce", "O": "Outer", "T": "Tensor", "A": "All-to-all", "H": "Host"}


def chrome(report: StepData) -> str:
    """Returns the simulated step as a Chrome trace: one thread per lane, and the live bytes. Times in microseconds."""
    used = [lane for lane in LANES if lane == "C" or any(x.lane == lane for v in report.views for x in v.lines)]
    threads = {lane: i for i, lane in enumerate(used)}
    events: list[dict[str, object]] = [_meta("process_name", 0, name=f"{report.name}, rank 0 of {report.ranks}")]
    for lane, i in threads.items():
        events += [_meta("thread_name", i, name=LANES[lane]), _meta("thread_sort_index", i, sort_index=i)]
    for view in report.views:
        events += [_event(x, view.phase, threads[x.lane]) for x in view.lines if x.end > x.start]
    if report.optimizer > 0:
        begin = report.drawn - report.optimizer
        events.append({"ph": "X", "name": "optimizer", "cat": "optimizer", "pid": 0, "tid": 0, "ts": begin * 1e6,
                       "dur": report.optimizer * 1e6, "args": {}})  # fmt: skip
    for at, live in memory(report):
        events.append({"ph": "C", "name": "live bytes", "pid": 0, "ts": at * 1e6, "args": {"bytes": live}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))


def _meta(what: str, thread: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": 0, "tid": thread, "args": args}


def _event(x: Line, phase: str, thread: int) -> dict[str, object]:
    args: dict[str, object] = {"program": phase, "value": x.name, "live_bytes": x.live}
    more = {"unit": x.unit, "why": x.why, "exposed_us": x.exposed * 1e6, "flops": x.flops, "source": x.source}
    args |= {k: v for k, v in more.items() if v}
    return {"ph": "X", "name": x.text, "cat": x.kind, "pid": 0, "tid": thread, "ts": x.start * 1e6,
            "dur": (x.end - x.start) * 1e6, "args": args}  # fmt: skip


def memory(report: StepData) -> Iterator[tuple[float, int]]:
    """Yields times and the live bytes from then on, in order. A collective's memory counts from its launch, not from
    its start.
    """
    now, last = 0.0, -1
    for view in report.views:
        for x in view.lines:
            steps = [(now, x.live)]
            if x.lane == "C":
                steps, now = [(x.start, x.live), (x.end, x.after)], x.end
            else:
                steps.append((now, x.after))
            for at, live in steps:
                if live != last:
                    yield at, live
                    last = live
    if report.optimizer > 0:
        # The optimizer's memory is only known if it is the step's peak.
        begin = report.drawn - report.optimizer
        yield begin, report.peak if report.ledger.phase == "optimizer" else max(last, 0)
        yield report.drawn, max(last, 0)
