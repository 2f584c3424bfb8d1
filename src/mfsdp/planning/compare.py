"""`compare`: predicts a training step for all combinations of several values."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import pipeline
from ..config.best_effort import doing
from ..reports.report import Comparison
from .explain import Explainer, explain, stages_of
from .question import LISTS, Question, kernels_of, machine_of, prices_of, question

_SCHEDULE = ("microbatches", "together", "overlapped", "stages", "schedule", "stages_per_rank", "slowest")
_STEP = ("world", "mesh_shape", "hardware", *_SCHEDULE)
"""Arguments of `explain` that may vary, in the order of a table's columns; options and `fully_shard`'s come behind."""
_SINGLE = ("prices", "optimizer", "stepping", "profile", "kernels")
"""Arguments of `explain` that do not vary."""
_DEFAULTS = {n: p.default for n, p in inspect.signature(explain).parameters.items() if n in (*_STEP, *_SINGLE)}


def compare(
    model: nn.Module | Sequence[nn.Module],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    options: Mapping[str, object] | None = None,
    **given: Any,
) -> Comparison:
    """Predicts a training step for all combinations of several values: `explain` for each, with traces shared.

    Args:
        model, args, kwargs: as for `mfsdp.explain`.
        options: options of the backend, each one value or a list: ``{"prefetch": [0, 1, 2]}``. ``passes`` takes a list
            of tables.
        **given: arguments of `mfsdp.explain` and of `mfsdp.fully_shard`, each one value or a list: ``world=[8, 64]``,
            ``hardware=["h100", "h200"]``, ``strategy=[2, 3]``, ``units=[[Block], ["layers.*"], "auto"]``.
            ``prices``, ``optimizer``, ``stepping``, ``profile`` and ``kernels`` take one value.

    Raises:
        ValueError: bad arguments, or an empty list.
        RuntimeError: Dynamo finds a graph break in the model (its own error, which names the place).
    """
    if "suggest" in given:
        raise ValueError("compare: suggest= is for mfsdp.explain, which looks at one step")
    single = {name: given.pop(name, _DEFAULTS[name]) for name in _SINGLE}
    for name, read in (("prices", prices_of), ("kernels", kernels_of)):  # once, not for each combination
        if single[name] is not None:
            single[name] = read(single[name])
    groups = {name: given.pop(name, _DEFAULTS[name]) for name in _STEP}, dict(options or {}), given
    axes = [{name: _values_of(name, value) for name, value in group.items()} for group in groups]
    machines, several = axes[0]["hardware"]
    axes[0]["hardware"] = [machine_of(machine) for machine in machines], several
    varied = [name for axis in axes for name, (_, several) in axis.items() if several]
    questions = []
    for chosen in itertools.product(*(values for axis in axes for values, _ in axis.values())):
        rest = iter(chosen)
        step, their, sharding = ({name: next(rest) for name in axis} for axis in axes)
        step["stages"], step["schedule"] = stages_of(model, step["stages"], step["schedule"])
        questions.append(question(**step, **single, options=their, sharding=sharding))
    explainer = Explainer(model, args, kwargs)
    reports = []
    for number, asked in enumerate(questions, 1):
        doing(f"simulating step {number} of {len(questions)}")
        reports.append(explainer.report(asked))
    return Comparison(varied, [_texts(asked, varied) for asked in questions], reports)


def _values_of(name: str, value: object) -> tuple[list[Any], bool]:
    """The values of an argument, and whether there were several."""
    if not isinstance(value, (list, range)):
        return [value], False
    values, several = list(value), True
    if name in LISTS:
        several = any(isinstance(v, list) for v in values) and all(isinstance(v, list) or v == "auto" for v in values)
    elif name == "passes":
        several = not all(isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) for row in values)
    elif name == "mesh_shape":
        several = not all(isinstance(n, int) for n in values)
    if several and not values:
        raise ValueError(f"compare: {name}=[]: give at least one value")
    return (values, True) if several else ([value], False)


def _texts(asked: Question, varied: Sequence[str]) -> dict[str, str]:
    """The values of a question as a table shows them."""
    out = {}
    for name in varied:
        if name == "hardware":
            value: Any = asked.hardware.name
        elif name in _SCHEDULE:
            value = getattr(asked.schedule, name)
        elif name == "passes":
            value = ", ".join(row[0] for row in asked.options.passes or pipeline.PIPELINE)
        elif name in asked.sharding:
            value = asked.sharding[name]
        else:
            value = getattr(asked, name) if name in ("world", "mesh_shape") else getattr(asked.options, name)
        out[name] = getattr(value, "__name__", None) or re.sub(r"<class '(?:.*\.)?(\w+)'>", r"\1", str(value))
    return out
