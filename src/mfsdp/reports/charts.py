"""The chart of a step as Bokeh JSON: timeline above memory."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..cost_model.step_data import WHY, Line, StepData, seconds
from ..ir.byte_costs import size
from .chrome import LANES, memory

KINDS = {
    "matrix": ("matrix products", "#3565a8", "#ffffff"),
    "other": ("other kernels", "#a9c6ea", "#1c2733"),
    "sharding": ("sharding", "#e8b84b", "#33270a"),
    "G": ("gathers", "#3d9970", "#ffffff"),
    "R": ("reductions", "#8a63b8", "#ffffff"),
    "O": ("outer axis", "#2f9fb0", "#ffffff"),
    "T": ("tensor and context parallel", "#b5651d", "#ffffff"),
    "A": ("all-to-alls", "#a23b72", "#ffffff"),
    "H": ("host copies", "#7a6a53", "#ffffff"),
    "wait": ("exposed waits", "#d93a33", "#ffffff"),
    "optimizer": ("optimizer", "#6f7a86", "#ffffff"),
}
"""Name, fill and text colour of the boxes."""

KERNEL = {
    "compute": "the arithmetic decides its time",
    "memory": "reading and writing memory decides its time",
    "launch": "too small: starting it decides its time",
    "measured": "measured",
}
"""What limits a kernel's time, as text; `mfsdp.cost_model.step_data.WHY` is the same for waits and collectives."""

BANDS = ("#5f6f81", "#7f8ea0", "#9fabb9", "#bcc5cf", "#d3d9e0", "#b8ad9a", "#cfc6b6", "#e2dccf")
"""Colours of memory held throughout the step, from the bottom up."""

LASTING = {
    "main weights", "optimizer state", "parameters that last", "gathered parameters", "gradient buckets", "not sharded",
    "inputs",
}  # fmt: skip
"""Ledger entries held throughout the step."""

NEAR = 0.5
"""Fraction of the hardware's memory from which on the plot shows the limit."""

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class _Bokeh:
    """Bokeh's modules, imported on first use. Untyped, as Bokeh's types lack some of its own arguments."""

    def __getattr__(self, module: str) -> Any:
        try:
            return importlib.import_module(f"bokeh.{module}")
        except ImportError as missing:
            raise ImportError("the page is drawn with Bokeh: pip install 'mfsdp[report]'") from missing


bokeh = _Bokeh()


def brief(x: float) -> str:
    return seconds(x).strip()


def amount(x: float, what: str) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= factor:
            return f"{x / factor:.3g} {prefix}{what}"
    return f"{x:.0f} {what}"


LABELS = """
const scale = plot.inner_width / (x.end - x.start), out = {x: [], y: [], text: [], color: []};
let visible = 0;
for (const {data} of sources)
  for (let i = 0; i < data.left.length; i++) {
    const l = Math.max(data.left[i], x.start), r = Math.min(data.right[i], x.end);
    if (r <= l) continue;
    visible++;
    const n = Math.floor(((r - l) * scale - 4) / 6.7), text = data.label[i];
    const fits = text.length <= n ? text : n > 9 || !data.short[i] ? text.slice(0, n - 1) + "\\u2026" : data.short[i];
    if (fits.length > n || n < 2 || (fits.endsWith("\\u2026") && n < 6)) continue;
    out.x.push((l + r) / 2); out.y.push((data.top[i] + data.bottom[i]) / 2);
    out.text.push(fits); out.color.push(data.ink[i]);
  }
labels.data = out;
const alpha = visible < plot.inner_width / 8 ? 1 : 0;
for (const g of glyphs) if (g.line_alpha !== alpha) g.line_alpha = alpha;
"""
"""Writes the label that fits into each box; outlines the boxes when few enough are visible."""

TAPPED = """
const i = cb_data.source.selected.indices[0];
if (i !== undefined) document.dispatchEvent(new CustomEvent("mfsdp-line", {detail: {
  program: cb_data.source.data.program[i], row: cb_data.source.data.row[i]}}));
"""

TIP = f"""<div style="font: 12px/1.45 {FONT}; color: #3d4852; max-width: 460px; background: #ffffff">
<div style="font-weight: 600; color: #10161c">@text</div><div>@detail</div></div>"""

STEP_TIP = f"""<div style="font: 12px/1.45 {FONT}; color: #3d4852; max-width: 460px; background: #ffffff">
<div style="font: 600 12px/1.5 {MONO}; color: #10161c; overflow-wrap: anywhere">@text</div>
<div>@unit</div><div>@when</div><div style="color: #b3261e; font-weight: 600">@exposed</div><div>@why</div>
<div>@work</div><div>@live</div>
<div style="font: 11px/1.5 {MONO}; color: #5a6673; overflow-wrap: anywhere">@source</div></div>"""

SCALES = ((10.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))


def columns(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> dict[str, list[object]]:
    return {name: [row.get(name, "") for row in rows] for name in names}


STEP_COLUMNS = (
    "left", "right", "bottom", "top", "label", "short", "ink", "text", "unit", "when", "exposed", "why", "work", "live",
    "source", "program", "row",
)  # fmt: skip
BOX_COLUMNS = ("left", "right", "bottom", "top", "label", "short", "ink", "text", "detail", "color")


def rows(lines: Sequence[Line], listing: Sequence[str]) -> Iterator[int]:
    """Yields each line's row number in the listing; -1 if it has none."""
    at = 0
    for x in lines:
        found = next((i for i in range(at, len(listing)) if x.gutter and listing[i] == x.gutter), -1)
        at = found + 1 if found >= 0 else at
        yield found


def charts(report: StepData) -> Any:
    """Returns the timeline above memory, with a shared time axis."""

    factor, unit = next((f, name) for least, f, name in SCALES if report.drawn >= least)
    end = max(report.drawn * factor, 1e-9)
    axis = bokeh.models.Range1d(
        -0.01 * end, 1.01 * end, bounds=(-0.05 * end, 1.05 * end), min_interval=end * 1e-6, name="time"
    )
    axis.tags = [factor]
    above = _timeline(report, axis, factor)
    below = _memory_chart(report, axis, factor, unit)
    grid = bokeh.layouts.gridplot(
        [[above], [below]], sizing_mode="stretch_both", toolbar_location="right", merge_tools=True,
        toolbar_options={"logo": None},
    )  # fmt: skip
    grid.rows = {0: "3fr", 1: "2fr"}
    return bokeh.embed.json_item(grid)


def figure(axis: Any, **more: Any) -> Any:
    """Returns a plot that zooms and pans only horizontally."""

    pan, wheel = (
        bokeh.models.PanTool(dimensions="width"),
        bokeh.models.WheelZoomTool(dimensions="width", zoom_on_axis=False),
    )
    box = bokeh.models.BoxZoomTool(dimensions="width")
    plot = bokeh.plotting.figure(
        x_range=axis,
        tools=[pan, wheel, box, bokeh.models.ResetTool(), bokeh.models.SaveTool()],
        active_drag=pan, active_scroll=wheel, sizing_mode="stretch_both", lod_threshold=None, min_border=4,
        outline_line_color=None, background_fill_color="#ffffff", border_fill_color="#ffffff", **more,
    )  # fmt: skip
    for a in (*plot.xaxis, *plot.yaxis):
        a.axis_label_text_font = a.major_label_text_font = "sans-serif"
        a.axis_label_text_font_style = "normal"
        a.major_label_text_font_size = a.axis_label_text_font_size = "12px"
        a.major_label_text_color = a.axis_label_text_color = "#3d4852"
        a.axis_line_color = a.major_tick_line_color = "#b7c0c9"
        a.minor_tick_line_color = None
    plot.xgrid.grid_line_color = "#e6eaee"
    plot.ygrid.grid_line_color = None
    return plot


def _legend(plot: Any, items: Sequence[tuple[str, Any]]) -> None:
    plot.add_layout(
        bokeh.models.Legend(
            items=[bokeh.models.LegendItem(label={"value": name}, renderers=[r]) for name, r in items],
            location="top_left", click_policy="hide", label_text_font="sans-serif", label_text_font_size="12px",
            label_text_color="#3d4852", border_line_color=None, label_height=14, glyph_height=14, glyph_width=14,
            spacing=3, padding=4, margin=0, label_standoff=6,
        ),
        "right",
    )  # fmt: skip


def _timeline(report: StepData, axis: Any, factor: float) -> Any:
    used = [lane for lane in LANES if lane == "C" or any(x.lane == lane for v in report.views for x in v.lines)]
    plot = figure(axis, y_range=(-len(used) + 0.5, 1.1), name="timeline")
    plot.xaxis.visible = False
    heights = {lane: -i for i, lane in enumerate(used)}
    ticks(plot, {0.85: "Step", **{float(y): LANES[lane] for lane, y in heights.items()}})
    boxes = _step_boxes(report, factor, heights)
    named = []
    for kind, rows in boxes.items():
        name, color, _ = KINDS[kind]
        drawn = draw(plot, rows, STEP_COLUMNS, fill_color=color, line_color="#ffffff", line_alpha=0.0, name="boxes")
        drawn.nonselection_glyph = None
        drawn.selection_glyph = drawn.glyph.clone(line_color="#10161c", line_alpha=1.0, line_width=2)
        named.append((name, drawn))
    lines = [r for _, r in named]
    label(plot, [*lines, _phases(plot, report, factor)], [r.glyph for r in lines])
    plot.add_tools(
        bokeh.models.HoverTool(renderers=lines, tooltips=STEP_TIP, point_policy="follow_mouse"),
        bokeh.models.TapTool(renderers=lines, callback=bokeh.models.CustomJS(code=TAPPED)),
    )
    _legend(plot, named)
    return plot


def ticks(plot: Any, labels: Mapping[float, str]) -> None:
    plot.yaxis.ticker = bokeh.models.FixedTicker(ticks=list(labels))
    plot.yaxis.major_label_overrides = dict(labels)
    plot.yaxis.major_tick_line_color = plot.yaxis.axis_line_color = None


def draw(plot: Any, boxes: Sequence[Mapping[str, object]], names: Sequence[str], **look: Any) -> Any:
    """Draws boxes with the columns ``names``; returns what draws them, which holds their data."""
    source = bokeh.models.ColumnDataSource(columns(boxes, names))
    return plot.quad("left", "right", "top", "bottom", source=source, **look)


def label(plot: Any, boxes: Sequence[Any], glyphs: Sequence[Any]) -> None:
    """Adds text to drawn boxes, updated whenever the view changes; outlines ``glyphs`` when few are visible."""
    sources = [drawn.data_source for drawn in boxes]
    labels = bokeh.models.ColumnDataSource({"x": [], "y": [], "text": [], "color": []})
    plot.text(
        "x", "y", "text", source=labels, text_color="color", text_font_size="11px", text_font={"value": "monospace"},
        text_align="center", text_baseline="middle", name="labels",
    )  # fmt: skip
    write = bokeh.models.CustomJS(
        args={"plot": plot, "x": plot.x_range, "sources": sources, "labels": labels, "glyphs": list(glyphs)},
        code=LABELS,
    )
    for name in ("start", "end"):
        plot.x_range.js_on_change(name, write)
    plot.js_on_change("inner_width", write)


def _phases(plot: Any, report: StepData, factor: float) -> Any:
    """Draws the row above the lanes, which shows the running program."""

    spans = [
        (f"{v.runs} x {v.phase}" if v.runs > 1 else v.phase, v.lines[0].start, max(x.end for x in v.lines))
        for v in report.views
        if v.lines
    ]
    if report.optimizer > 0:
        spans.append(("optimizer", report.drawn - report.optimizer, report.drawn))
    rows = [
        {"left": a * factor, "right": b * factor, "bottom": 0.65, "top": 1.05, "label": f"{name} {brief(b - a)}",
         "ink": "#3d4852", "color": "#e9edf1" if i % 2 else "#dde3e9"}
        for i, (name, a, b) in enumerate(spans)
    ]  # fmt: skip
    return draw(plot, rows, BOX_COLUMNS, fill_color="color", line_color=None)


def _step_boxes(report: StepData, factor: float, heights: Mapping[str, int]) -> dict[str, list[dict[str, object]]]:
    """Returns the boxes by kind; lines that take no time have none."""
    out: dict[str, list[dict[str, object]]] = {kind: [] for kind in KINDS}
    for program, view in enumerate(report.views):
        final = view.stages[-1].listing.split("\n") if view.stages else []
        for x, row in zip(view.lines, rows(view.lines, final), strict=True):
            if x.end > x.start:
                kind = x.lane if x.lane in KINDS else x.kind
                out[kind].append(
                    _step_box(x, factor, heights[x.lane], KINDS[kind][2]) | {"program": program, "row": row}
                )
    if report.optimizer > 0:
        out["optimizer"].append(
            {"left": (report.drawn - report.optimizer) * factor, "right": report.drawn * factor, "bottom": -0.42,
             "top": 0.42, "label": "optimizer", "ink": KINDS["optimizer"][2], "text": "optimizer",
             "when": brief(report.optimizer), "why": KERNEL["memory"], "program": -1, "row": -1}
        )  # fmt: skip
    return {kind: rows for kind, rows in out.items() if rows}


_UNIT = re.compile(r"\bu\d+[a-z]?(?=_)")
"""Matches the unit in a line's text, the label of narrow boxes."""


def _step_box(x: Line, factor: float, height: int, ink: str) -> dict[str, object]:
    seconds = x.end - x.start
    rate = f", {amount(x.flops / seconds, 'FLOP/s')}" if x.flops else ""
    words = WHY if x.kind in ("collective", "wait") else KERNEL
    return {
        "left": x.start * factor,
        "right": x.end * factor,
        "bottom": height - 0.42,
        "top": height + 0.42,
        "label": x.name if x.kind == "collective" else x.text,
        "short": unit.group() if x.kind in ("collective", "wait") and (unit := _UNIT.search(x.text)) else "",
        "ink": ink,
        "text": x.text,
        "unit": f"unit {x.unit}" if x.unit else "",
        "when": f"{brief(seconds)}, from {brief(x.start)}",
        "exposed": "compute stands still here" if x.exposed > 0 else "",
        "why": words.get(x.why, x.why),
        "work": f"{amount(x.flops, 'FLOP')}{rate}" if x.flops else "",
        "live": f"{size(x.live)} live",
        "source": x.source,
    }


def _memory_chart(report: StepData, axis: Any, factor: float, unit: str) -> Any:
    scale, bytes_ = (2**30, "GiB") if report.peak >= 2**30 else (2**20, "MiB")
    limit = report.machine.memory
    top = max(report.peak, limit if report.peak > NEAR * limit else 0) / scale
    plot = figure(axis, y_range=(0, 1.3 * top), x_axis_label=unit, y_axis_label=bytes_, name="memory")
    plot.ygrid.grid_line_color = "#e6eaee"
    end = report.drawn * factor
    named, base = [], 0
    for i, e in enumerate(e for e in report.ledger.entries if e.name in LASTING):
        name = f"{e.name} {size(e.nbytes)}"
        box = {"left": 0, "right": end, "bottom": base / scale, "top": (base + e.nbytes) / scale, "text": name}
        named.append((name, _band(plot, [box | {"detail": f"{e.what}; there all the time"}], BANDS[i % len(BANDS)])))
        base += e.nbytes
    named.insert(0, ("gradients, activations, ...", _curve(plot, report, factor, scale, base)))
    hidden = _under_mouse(plot, report, factor, scale, base)
    plot.add_tools(
        bokeh.models.HoverTool(
            renderers=[*(r for _, r in named[1:]), hidden], tooltips=TIP, point_policy="follow_mouse"
        )
    )
    late = _peak(plot, report, factor, scale)
    if report.peak > NEAR * limit:
        _limit(plot, report, 0.0 if late else end, scale)
    _legend(plot, named)
    return plot


def _band(plot: Any, boxes: Sequence[Mapping[str, object]], color: str) -> Any:
    return draw(plot, boxes, ("left", "right", "bottom", "top", "text", "detail"), fill_color=color, line_color=None)


def _curve(plot: Any, report: StepData, factor: float, scale: int, base: int) -> Any:
    """Draws transient memory on top of the memory held throughout."""
    points = list(memory(report)) or [(0.0, base)]
    x = [at * factor for at, _ in points]
    y = [live / scale for _, live in points]
    x, y = [*x, report.drawn * factor], [*y, y[-1]]
    area = plot.varea_step(
        x=x, y1=[base / scale] * len(x), y2=y, step_mode="after", fill_color="#a9c6ea", fill_alpha=0.75
    )
    plot.step(x=x, y=y, mode="after", line_color="#3565a8", line_width=1.3)
    return area


def _under_mouse(plot: Any, report: StepData, factor: float, scale: int, base: int) -> Any:
    """Draws invisible boxes below the curve, for hovering."""
    boxes = [
        {
            "left": x.start * factor,
            "right": x.end * factor,
            "bottom": base / scale,
            "top": max(x.live, base) / scale,
            "text": f"{size(x.live)} live",
            "detail": f"{size(max(0, x.live - base))} of them come and go; {view.phase}: {x.text}",
        }
        for view in report.views
        for x in view.lines
        if x.lane == "C" and x.end > x.start
    ]
    drawn = _band(plot, boxes, "#ffffff")
    drawn.glyph.fill_alpha = 0.0
    return drawn


def _peak(plot: Any, report: StepData, factor: float, scale: int) -> bool:
    """Marks the peak. Returns whether it is in the second half of the step."""
    where = next(
        (x for v in report.views if v.phase == report.ledger.phase for x in v.lines if x.name == report.ledger.line),
        None,
    )
    at = (where.start if where is not None else report.drawn - report.optimizer) * factor
    y = report.peak / scale
    line = f": {where.name}" if where is not None else ""
    text = f"peak {size(report.peak)} in {report.ledger.phase}{line}"
    late = at > 0.5 * report.drawn * factor
    plot.scatter([at], [y], size=8, fill_color="#d93a33", line_color="#ffffff")
    plot.text(
        [at], [y], [text], x_offset=-8 if late else 8, y_offset=-4, text_align="right" if late else "left",
        text_font_size="12px", text_font={"value": "sans-serif"}, text_color="#b3261e",
    )  # fmt: skip
    return late


def _limit(plot: Any, report: StepData, at: float, scale: int) -> None:
    y, text = report.machine.memory / scale, f"memory of {report.machine.name} {size(report.machine.memory)}"
    line = bokeh.models.Span(location=y, dimension="width", line_color="#b3261e", line_dash="dashed", line_width=1.5)
    plot.add_layout(line)
    plot.text(
        [at], [y], [text], y_offset=-3, text_align="right" if at else "left", text_font_size="12px",
        text_font={"value": "sans-serif"}, text_color="#b3261e",
    )  # fmt: skip
