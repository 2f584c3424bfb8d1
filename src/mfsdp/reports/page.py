"""Renders a report as one HTML page that needs no network.

The page embeds its data (charts as Bokeh JSON, listings as text) as one deflated, base64-encoded JSON. This keeps ten
listings of thousands of lines small, and no name in a model can be parsed as HTML or script. The browser builds a
listing or a unit's plot when the user opens it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from ..config.units import Unit
from ..cost_model.step_data import WHY, StepData, View
from ..ir.byte_costs import size
from .charts import amount, bokeh, brief, charts, rows
from .layouts import layout_chart
from .pipeline_chart import pipeline_chart


def render(report: StepData) -> str:
    """Returns the page: timeline, memory, listings after every pass, layouts, ledger, waits.

    Raises:
        ImportError: Bokeh is not installed.
    """
    resources = bokeh.resources.Resources(mode="inline", components=["bokeh"])
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    )
    kinds = list(_alike(report.views))
    data = {
        "charts": charts(report),
        "programs": [_listings(view) for view in report.views],
        "layouts": [layout_chart(alike[0]) for alike in kinds],
        "pipeline": None if report.pipeline is None else pipeline_chart(report.pipeline),
    }
    return page.render(
        r=report,
        bokeh=resources.render_js(),
        data=base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode(),
        tiles=_tiles(report),
        units=[_unit_row(alike) for alike in kinds],
        why=WHY,
        size=size,
        time=brief,
    )


def _tiles(report: StepData) -> list[tuple[str, str, str, str]]:
    """Returns the header's tiles: name, value, remark, CSS class."""
    exposed = sum(x.seconds for x in report.exposed)
    share = exposed / report.step if report.step else 0.0
    out = [
        (
            "step",
            brief(report.step),
            "measured compute" if report.measured else f"estimated for {report.machine.name}",
            "",
        ),
        ("compute", brief(report.compute), f"{brief(report.optimizer)} of it optimizer", ""),
        ("exposed communication", brief(exposed), f"{share:.1%} of the step", "bad" if share > 0.1 else ""),
    ]
    if report.tokens:
        each = f"{report.tokens_per_second / report.ranks:,.0f} per rank"
        out.append(("tokens/s", f"{report.tokens_per_second:,.0f}", each, ""))
    if report.flops:
        out.append(("MFU", f"{report.utilization:.1%}", f"of {amount(report.machine.peak('bf16'), 'FLOP/s')}", ""))
    if report.pipeline is not None:
        rank = report.pipeline.ranks[report.pipeline.shown]
        out.append(("bubble", f"{rank.bubble:.1%}", f"of rank {report.pipeline.shown}'s schedule", ""))
    room = f"{report.peak / report.machine.memory:.1%} of {size(report.machine.memory)}"
    fits = (f"fits: {room}", "good") if report.fits else (f"does not fit: {room}", "bad")
    return [*out, ("peak memory per rank", size(report.peak), *fits)]


def _listings(view: View) -> dict[str, object]:
    """Returns a program's listings, and the times of the final one's lines: ``[row, start, end, exposed, source]``."""
    final = view.stages[-1].listing.split("\n") if view.stages else []
    marks = [
        [row, x.start, x.end, int(x.exposed > 0), x.source]
        for x, row in zip(view.lines, rows(view.lines, final), strict=True)
        if row >= 0
    ]
    return {
        "phase": view.phase,
        "stages": [{"name": s.name, "text": s.listing} for s in view.stages],
        "marks": marks,
    }


def _alike(views: Sequence[View]) -> Iterator[list[Unit]]:
    """Yields groups of units that differ only in name."""
    units = {u.name: u for view in views for u in view.units}
    groups: dict[Any, list[Unit]] = {}
    for u in units.values():
        groups.setdefault((u.spec, u.layout, u.trainable, u.sharded), []).append(u)
    yield from groups.values()


def _unit_row(alike: Sequence[Unit]) -> dict[str, str]:
    """Returns a row of the table of units."""
    u, last = alike[0], alike[-1]
    p, layout = u.spec.precision, u.layout
    several = len(alike) > 1
    notes = [] if u.trainable else ["frozen"]
    notes += [] if u.sharded else ["not sharded"]
    return {
        "name": f"{u.name} .. {last.name}" if several else u.name,
        "fqn": f"{u.fqn} .. {last.fqn}" if several else u.fqn,
        "count": str(len(alike)),
        "params": str(len(layout.slots)),
        "elements": f"{sum(s.numel for s in layout.slots):,}",
        "shard": size(layout.shard_numel * p.main.itemsize),
        "full": size(layout.full_numel * p.comm.itemsize),
        "pad": f"{layout.pad / max(1, layout.full_numel):.2%}",
        "segments": str(len(layout.segments)),
        "notes": ", ".join(notes),
    }
