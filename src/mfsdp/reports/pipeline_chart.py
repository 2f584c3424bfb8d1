"""The chart of a pipeline's schedule as Bokeh JSON: for each rank its programs, and a lane of sends and receives."""

from __future__ import annotations

from typing import Any

from ..cost_model.pipeline_schedule import Span
from ..cost_model.step_data import Pipeline
from ..ir.byte_costs import size
from .charts import BOX_COLUMNS, SCALES, TIP, bokeh, brief, draw, figure, label, ticks

KINDS = {
    "F": ("forward", "#3565a8", "#ffffff"),
    "B": ("backward", "#3d9970", "#ffffff"),
    "I": ("backward, input part", "#3d9970", "#ffffff"),
    "W": ("backward, weight part", "#e8b84b", "#33270a"),
}
"""Name, fill and text colour of the boxes."""

MESSAGES = {"F": ("activations", "#9db9de"), "B": ("gradients", "#a5d1bd")}
"""What is sent, and its colour: sends in the upper half of the lane, receives in the lower one."""


def pipeline_chart(pipeline: Pipeline) -> Any:
    """Returns the chart."""
    factor, unit = next((f, name) for least, f, name in SCALES if pipeline.seconds >= least)
    end = max(pipeline.seconds * factor, 1e-9)
    axis = bokeh.models.Range1d(-0.01 * end, 1.01 * end, bounds=(-0.05 * end, 1.05 * end), name="pipeline time")
    rows = 2 * len(pipeline.ranks)
    plot = figure(axis, y_range=(-rows + 0.4, 0.6), x_axis_label=unit, height=70 + 28 * rows, name="pipeline")
    plot.sizing_mode, plot.toolbar.logo = "stretch_width", None
    named = {}
    for r, rank in enumerate(pipeline.ranks):
        stages = ", ".join(map(str, rank.stages))
        named[-2.0 * r] = f"rank {r}: stage{'s' * (len(rank.stages) > 1)} {stages}"
        named[-2.0 * r - 1] = "sends, receives"
    ticks(plot, named)
    spans = [s for s in pipeline.spans if s.end > s.start]
    computed = [_computed(s, factor, pipeline) for s in spans if not s.is_message]
    moved = [box for s in spans if s.is_message for box in _moved(s, factor)]
    kinds = (computed, moved)
    drawn = [draw(plot, boxes, BOX_COLUMNS, fill_color="color", line_color="#ffffff") for boxes in kinds]
    plot.add_tools(bokeh.models.HoverTool(renderers=drawn, tooltips=TIP, point_policy="follow_mouse"))
    label(plot, drawn, [])
    return bokeh.embed.json_item(plot)


def _computed(span: Span, factor: float, pipeline: Pipeline) -> dict[str, object]:
    kind, stage, microbatch = span.action
    name, color, ink = KINDS[kind]
    rank = pipeline.ranks[span.rank]
    return {
        "left": span.start * factor, "right": span.end * factor, "bottom": -2 * span.rank - 0.45,
        "top": -2 * span.rank + 0.45, "label": f"{kind}{microbatch}" + (f" s{stage}" if len(rank.stages) > 1 else ""),
        "short": str(microbatch), "ink": ink, "color": color,
        "text": f"{name}: stage {stage}, microbatch {microbatch}",
        "detail": f"{brief(span.end - span.start)}, from {brief(span.start)}; rank {span.rank}: bubble "
        f"{rank.bubble:.1%}, peak {size(rank.peak)}",
    }  # fmt: skip


def _moved(span: Span, factor: float) -> list[dict[str, object]]:
    kind, stage, microbatch = span.action
    name, color = MESSAGES[kind]
    to = stage + 1 if kind == "F" else stage - 1
    both = {
        "left": span.start * factor, "right": span.end * factor, "label": str(microbatch), "short": str(microbatch),
        "ink": "#10161c", "color": color, "text": f"{name}: stage {stage} to {to}, microbatch {microbatch}",
        "detail": f"{brief(span.end - span.start)}, from {brief(span.start)}; rank {span.rank} to {span.to}",
    }  # fmt: skip
    sent, received = -2 * span.rank - 1, -2 * span.to - 1
    return [
        {**both, "bottom": sent + 0.02, "top": sent + 0.4},
        {**both, "bottom": received - 0.4, "top": received - 0.02},
    ]
