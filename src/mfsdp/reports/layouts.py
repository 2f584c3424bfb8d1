"""Charts of a unit's layout as Bokeh JSON: where its parameters lie and which ranks hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config.layout import Layout
from ..config.units import Unit
from .charts import BOX_COLUMNS, TIP, bokeh, draw, figure, label, ticks

PARAMETERS = ("#8fb4dd", "#f0c98a", "#9fd0b4", "#cdb2e2", "#eeb0a8", "#a8d5dc", "#d9cf9a", "#c3c9d1")

RANKS_SHOWN = 8
CUTS_SHOWN = 600


def layout_chart(unit: Unit) -> Any:
    """Returns a chart of a unit's flat buffer: gathered, and a row per rank with the contents of its shard."""
    return bokeh.embed.json_item(
        bokeh.layouts.column(_full(unit.layout), _shards(unit.layout), sizing_mode="stretch_width")
    )


def _full(layout: Layout) -> Any:
    """Draws the gathered buffer, with marks at the boundaries between ranks."""
    plot = _bars(layout.full_numel, 1, "element of the gathered buffer")
    ticks(plot, {0.0: "gathered"})
    boxes = [
        _parameter(layout, i, s.offset, s.numel, f"{s.numel:,} elements at {s.offset:,}")
        for i, s in enumerate(layout.slots)
        if s.numel
    ]
    boxes += [_hole(start, start + n) for start, n in layout.gaps() if n]
    _draw(plot, [b | {"bottom": -0.4, "top": 0.4} for b in boxes])
    cuts = [s.full_start + r * s.chunk for s in layout.segments for r in range(layout.world + 1)]
    if len(cuts) <= CUTS_SHOWN:
        plot.segment(cuts, [-0.5] * len(cuts), cuts, [-0.22] * len(cuts), line_color="#10161c", line_width=1)
    return plot


def _shards(layout: Layout) -> Any:
    shown = _shown(layout.world)
    plot = _bars(layout.shard_numel, len(shown), "element of a rank's shard")
    ticks(plot, {float(-i): "..." if r is None else f"rank {r}" for i, r in enumerate(shown)})
    _draw(plot, [box for i, r in enumerate(shown) if r is not None for box in _pieces(layout, r, -i)])
    for segment in layout.segments[1:]:
        plot.add_layout(
            bokeh.models.Span(
                location=segment.shard_start, dimension="height", line_color="#10161c", line_dash="dashed"
            )
        )
    return plot


def _bars(elements: int, rows: int, label: str) -> Any:
    end = max(elements, 1)
    axis = bokeh.models.Range1d(-0.005 * end, 1.005 * end, bounds=(-0.02 * end, 1.02 * end))
    plot = figure(axis, y_range=(-rows + 0.5, 0.5), x_axis_label=label, height=60 + 30 * rows, min_border_left=80)
    plot.sizing_mode, plot.toolbar.logo, plot.toolbar.active_scroll = "stretch_width", None, None
    plot.toolbar_location = None if rows == 1 else "right"
    plot.xaxis.formatter = bokeh.models.NumeralTickFormatter(format="0,0")
    plot.xgrid.grid_line_color = None
    return plot


def _draw(plot: Any, boxes: Sequence[Mapping[str, object]]) -> None:
    parts, holes = [b for b in boxes if b["color"]], [b for b in boxes if not b["color"]]
    drawn = draw(plot, parts, BOX_COLUMNS, fill_color="color", line_color="#ffffff")
    empty = draw(
        plot, holes, BOX_COLUMNS, fill_color="#f4f5f7", line_color="#9aa5b1", hatch_pattern="/",
        hatch_color="#9aa5b1", hatch_scale=7,
    )  # fmt: skip
    plot.add_tools(bokeh.models.HoverTool(renderers=[drawn, empty], tooltips=TIP, point_policy="follow_mouse"))
    label(plot, [drawn], [])


def _shown(world: int) -> list[int | None]:
    """Returns the first ranks and the last one; ``None`` stands for omitted ranks."""
    if world <= RANKS_SHOWN:
        return list(range(world))
    return [*range(RANKS_SHOWN - 2), None, world - 1]


def _pieces(layout: Layout, rank: int, height: int) -> Iterator[dict[str, object]]:
    """Yields the boxes of a rank's shard; padding has no colour."""
    place: dict[str, object] = {"bottom": height - 0.4, "top": height + 0.4}
    end = 0
    held = [(layout.local(i, rank), i) for i in range(len(layout.slots))]
    for at, i in sorted((h for h in held if h[0].numel), key=lambda h: h[0].shard_offset):
        if at.shard_offset > end:
            yield place | _hole(end, at.shard_offset)
        row = layout.slots[i].row
        first, n = at.param_offset // row, at.numel // row
        detail = f"rank {rank} holds rows {first}:{first + n} of {layout.slots[i].numel // row}, {at.numel:,} elements"
        yield place | _parameter(layout, i, at.shard_offset, at.numel, detail)
        end = at.shard_offset + at.numel
    if layout.shard_numel > end:
        yield place | _hole(end, layout.shard_numel)


def _parameter(layout: Layout, i: int, start: int, numel: int, detail: str) -> dict[str, object]:
    s = layout.slots[i]
    return {
        "left": start,
        "right": start + numel,
        "label": s.name,
        "ink": "#10161c",
        "text": f"{s.name}{list(s.shape)}",
        "detail": detail,
        "color": PARAMETERS[i % len(PARAMETERS)],
    }


def _hole(start: int, end: int) -> dict[str, object]:
    return {
        "left": start,
        "right": end,
        "label": "",
        "text": "padding",
        "detail": f"{end - start:,} elements",
        "color": "",
    }
