"""`explain`: predicts a training step's programs, time and memory before anything runs."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import pipeline
from ..checkpoints.saving import copied
from ..compiler.tracing import Programs, trace
from ..config.best_effort import doing
from ..config.hardware import KNOWN, Hardware, undisturbed
from ..config.hardware import hardware as find_hardware
from ..config.options import PLANNED, Options
from ..cost_model.auto_prefetch import AutoPrefetch, always
from ..cost_model.estimate import Schedule, estimate
from ..cost_model.kernel_timings import Kernels
from ..cost_model.machine import measure
from ..cost_model.memory_model import OPTIMIZER_STATES, STEPPING, Entry, check_names
from ..cost_model.offload_schedule import OffloadTiming
from ..cost_model.step_data import StepData, Suggestion
from ..ir.program import Program
from ..ir.roles import Kind
from ..reports.report import Comparison, Report
from ..sharding import materialize
from ..sharding.module import FSDPModule
from ..state.flat_buffer import FlatBuffer, refs
from ..state.mesh import TENSOR
from ..state.tp_shards import sizes_along

GAIN = 0.01
"""Fraction of the step that a suggestion must save."""


@dataclass(frozen=True)
class Calibration:
    """Measured seconds of a step's kernels, without communication. They are split over lines in proportion to
    estimates. `mfsdp.profile` measures single lines.
    """

    forward: float
    backward: float
    optimizer: float

    def given(self, program: Program) -> dict[str, Any]:
        """Returns arguments of `mfsdp.cost_model.op_cost.op_times`."""
        return {"compute": self.backward if program.phase == "backward" else self.forward}


@dataclass(frozen=True)
class _Measured:
    """Measured kernels with the interface of a profile."""

    kernels: Kernels
    fused: bool = True

    def given(self, program: Program) -> dict[str, Any]:
        """Returns arguments of `mfsdp.cost_model.op_cost.op_times`."""
        return {"measured": self.kernels.of(program, self.fused)}


@dataclass(frozen=True, eq=False)
class _Question:
    """One combination of the values to compare."""

    world: int | None
    mesh_shape: tuple[int, int] | None
    hardware: Hardware
    schedule: Schedule
    options: Options
    sharding: dict[str, Any]

    @property
    def traced(self) -> tuple[Any, ...]:
        """Key of the trace: combinations with equal keys share one. Values that do not vary are the same objects."""
        shared = tuple((k, id(v)) for k, v in self.sharding.items())
        return self.world, self.mesh_shape, self.schedule.together, self.options.lowering, shared


def explain(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world: int | Sequence[int] | None = None,
    mesh_shape: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
    hardware: Any = "h100",
    microbatches: int | Sequence[int] | None = None,
    together: int | Sequence[int] = 1,
    overlapped: bool | Sequence[bool] = False,
    stages: int | Sequence[int] = 1,
    slowest: float | Sequence[float] = 1.0,
    prices: Any = None,
    options: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    stepping: str | None = None,
    profile: Any = None,
    kernels: Any = None,
    suggest: bool = True,
    **sharding: Any,
) -> Any:
    """Returns the predicted programs, time and memory of a training step on ``world`` ranks. Needs no process group,
    GPU or memory for the model.

    Args:
        model: any module, on any device, sharded or not; it is not changed.
        args, kwargs: example inputs of one rank for one microbatch (values do not matter).
        world: ranks, by default 8; for a model sharded beside another parallelism, by default the ranks that it is
            sharded over (`trace`).
        mesh_shape: (outer, shard) ranks of a two-level mesh, instead of ``world``.
        hardware: a name in `mfsdp.config.hardware.KNOWN`, a JSON file, ``"this"`` (`mfsdp.measure`), or a
            `mfsdp.config.hardware.Hardware`.
        microbatches: microbatches in a step, by default ``together``; each backward reduces gradients.
        together: microbatches in one program (`mfsdp.together`).
        overlapped: whether the step runs inside of `mfsdp.overlapped`.
        stages: pipeline stages, of which the model is one. All are assumed equal, on ``world`` ranks each, with the
            schedule 1F1B. Communication between stages is not counted.
        slowest: compute time of the slowest rank relative to the others, which wait for it in every collective.
        prices: price of a rank per hour by hardware name: a mapping, or a JSON file with one.
        options: backend options.
        optimizer: a name in `mfsdp.cost_model.memory_model.OPTIMIZER_STATES`.
        stepping: how the optimizer steps: ``"whole"``, all parameters at once; ``"flat"``, with
            `fully_shard_optimizer`; ``"offloaded"``, with its ``offload="state"``. By default as in the model's plan,
            or ``"whole"``.
        profile: result of `mfsdp.profile` for the same programs; its measured times replace estimates.
        kernels: kernels measured on the hardware, a `mfsdp.cost_model.kernel_timings.Kernels` or its file
            (`mfsdp measure --kernels`); they replace the estimates of the lines that they contain.
        suggest: whether to search for changes that make the step faster.
        **sharding: arguments of `mfsdp.fully_shard`; none if the model is already sharded.

    Lists of values (``world=[8, 64]``, ``hardware=["h100", "h200"]``, ``strategy=[2, 3]``,
    ``options={"prefetch": [0, 1, 2]}``, ``units=[[Block], ["layers.*"]]``) give a `Comparison` of all combinations.

    Returns:
        A `Report`, or a `Comparison`.

    Raises:
        ValueError: arguments are invalid.
        RuntimeError: Dynamo finds a graph break in the model (Dynamo's own error, which names the place).
    """
    check_names(optimizer, stepping or "whole")
    steps = {"optimizer": optimizer, "stepping": stepping or "whole"}
    if profile is not None and kernels is not None:
        raise ValueError("explain: profile= and kernels= were both given: a profile has measured the kernels already")
    if kernels is not None:
        profile = _Measured(kernels if isinstance(kernels, Kernels) else Kernels.load(kernels))
    ways = {
        "microbatches": microbatches, "together": together, "overlapped": overlapped, "stages": stages,
        "slowest": slowest,
    }  # fmt: skip
    listed = _prices(prices)
    questions, varied = _questions(world, mesh_shape, hardware, ways, options, sharding)
    costs = [_price(q.hardware, listed) for q in questions]
    traces: dict[tuple[Any, ...], Programs] = {}
    known: _Known = {}
    reports = []
    for number, (q, price) in enumerate(zip(questions, costs, strict=True), 1):
        if q.traced not in traces:
            doing(f"tracing {type(model).__name__}")
            traces[q.traced] = trace(
                model, args, kwargs, world=q.world, mesh_shape=q.mesh_shape, lowering=q.options.lowering,
                together=q.schedule.together, **q.sharding,
            )  # fmt: skip
        capture = traces[q.traced].capture
        if capture is not None and capture.plan is not None and not set(PLANNED) & set(options or {}):
            q = replace(q, options=q.options.following(capture.plan.options))
        if capture is not None and capture.plan is not None and capture.plan.optimizer == "host" and stepping is None:
            steps["stepping"] = "offloaded"
        doing(f"simulating step {number} of {len(questions)}")
        reports.append(_report(traces[q.traced], q, (args, dict(kwargs or {})), steps, profile, known=known))
        reports[-1].price = price
    if varied:
        return Comparison(varied, [_values(q, varied) for q in questions], reports)
    report = reports[0]
    if suggest:
        programs = traces[questions[0].traced]
        for text, changed in _ideas(questions[0], report):
            doing(f"trying {text}")
            other = _report(programs, changed, (args, dict(kwargs or {})), steps, profile, listings=False)
            if other.fits and (not report.fits or other.step < report.step * (1 - GAIN)):
                report.suggestions.append(Suggestion(text, other.step, other.peak))
        for stepping in () if report.fits else STEPPING[STEPPING.index(steps["stepping"]) + 1 :]:
            how = steps | {"stepping": stepping}
            other = _report(programs, q, (args, dict(kwargs or {})), how, profile, listings=False, known=known)
            if other.fits:
                report.suggestions.append(Suggestion(_STEPPING[stepping], other.step, other.peak))
        report.suggestions = _worthwhile(report.suggestions)
    return report


_STEPPING = {
    "flat": "fully_shard_optimizer(optimizer)",
    "offloaded": 'fully_shard_optimizer(optimizer, offload="state")',
}
"""Code that makes the optimizer step with less memory, by ``stepping``."""


def _worthwhile(found: list[Suggestion]) -> list[Suggestion]:
    """Returns the suggestions, the best first, without those that save no more than one that changes less."""
    kept: list[Suggestion] = []
    for s in sorted(found, key=lambda s: (len(s.text), s.step)):
        if all(s.step < k.step * (1 - GAIN / 2) for k in kept):
            kept.append(s)
    return sorted(kept, key=lambda s: s.step)


def _ideas(q: _Question, report: Report) -> Iterator[tuple[str, _Question]]:
    """Yields changes that may help and need no new trace."""
    o = q.options

    def option(text: str, **changes: Any) -> Iterator[tuple[str, _Question]]:
        if changes.keys() <= pipeline.obeyed(o):
            yield text, replace(q, options=replace(o, **changes))

    ahead = o.prefetch if isinstance(o.prefetch, int) else None  # "auto" is not changed
    if not report.fits:
        for depth in range(o.reduce_lag if ahead is None else min(ahead, o.reduce_lag)):
            if ahead is None:
                yield from option(f"reduce_lag={depth}", reduce_lag=depth)
            else:
                yield from option(f"prefetch={depth}, reduce_lag={depth}", prefetch=depth, reduce_lag=depth)
        if o.pool:
            yield from option("pool=False", pool=False)
        return
    if any(x.why == "memory limit" for x in report.exposed):
        yield from option("no max_unsharded", max_unsharded=None)
    for depth in () if ahead is None else (ahead + 1, ahead + 2):
        yield from option(f"prefetch={depth}", prefetch=depth)
        yield from option(
            f"prefetch={depth}, reduce_lag={o.reduce_lag + 1}", prefetch=depth, reduce_lag=o.reduce_lag + 1
        )
    yield from option(f"reduce_lag={o.reduce_lag + 1}", reduce_lag=o.reduce_lag + 1)


def _lists(value: list[Any]) -> bool:
    """Returns whether it is a list of values that are lists or ``"auto"``."""
    return any(isinstance(v, list) for v in value) and all(isinstance(v, list) or v == "auto" for v in value)


def _is_table(value: Any) -> bool:
    """Returns whether it is one table of passes, not a list of tables."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(r, tuple) and len(r) == 2 and isinstance(r[0], str) for r in value
    )


def _questions(
    world: Any,
    mesh_shape: Any,
    machines: Any,
    ways: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    sharding: Mapping[str, Any],
) -> tuple[list[_Question], list[str]]:
    """Returns all combinations, and the names of the arguments that vary."""
    axes: dict[str, list[Any]] = {}
    several: list[str] = []

    def axis(name: str, value: Any, many: bool) -> None:
        axes[name] = list(value) if many else [value]
        if many:
            if not axes[name]:
                raise ValueError(f"explain: {name}=[]: give at least one value")
            several.append(name)

    if mesh_shape is not None and world is not None:
        raise ValueError(f"explain: world={world!r} and mesh_shape={mesh_shape!r}: give one of them")
    if isinstance(mesh_shape, list) and all(isinstance(n, int) for n in mesh_shape):
        mesh_shape = tuple(mesh_shape)
    axis("world", world, isinstance(world, (list, range)))
    axis("mesh_shape", mesh_shape, isinstance(mesh_shape, list))
    axis("hardware", machines, isinstance(machines, list))
    for name, value in ways.items():
        axis(name, value, isinstance(value, (list, range)))
    given = dict(options or {})
    firsts = {k: v[0] if isinstance(v, list) and v and not _is_table(v) else v for k, v in given.items()}
    pipeline.chosen(Options.parse(firsts))
    for name, value in given.items():
        axis(name, value, isinstance(value, (list, range)) and not (name == "passes" and _is_table(value)))
    for name, value in sharding.items():
        nested = name in ("units", "ignored_params")
        many = isinstance(value, list) and (not nested or _lists(value))
        axis(name, value, many)
    out = []
    for values in itertools.product(*axes.values()):
        q = dict(zip(axes, values, strict=True))
        shape = q["mesh_shape"]
        if shape is not None and (len(shape) != 2 or any(n < 1 for n in shape)):
            raise ValueError(f"explain: mesh_shape={shape!r}: give (outer, shard) numbers of ranks")
        ranks = q["world"]
        if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
            raise ValueError(f"explain: world={ranks!r}: give a positive number of ranks")
        parsed = Options.parse({k: q[k] for k in given})
        out.append(
            _Question(
                q["world"],
                tuple(shape) if shape is not None else None,
                machine_of(q["hardware"]),
                schedule := _schedule(*(q[name] for name in ways)),
                replace(parsed, interleave=True) if schedule.together > 1 else parsed,
                {k: q[k] for k in sharding},
            )
        )
    return out, several


def _schedule(microbatches: Any, together: Any, overlapped: Any, stages: Any, slowest: Any) -> Schedule:
    many = together if microbatches is None else microbatches
    for name, value in (("together", together), ("microbatches", many), ("stages", stages)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"explain: {name}={value!r}: give a positive number")
    if not isinstance(overlapped, bool):
        raise ValueError(f"explain: overlapped={overlapped!r}: choose True or False")
    if (microbatches or together) % together:
        raise ValueError(
            f"explain: microbatches={microbatches}, together={together}: give a multiple of together: programs of a "
            "step are all alike here"
        )
    if isinstance(slowest, bool) or not isinstance(slowest, (int, float)) or not 1 <= slowest < math.inf:
        raise ValueError(f"explain: slowest={slowest!r}: give how many times as long the slowest rank computes, 1.1")
    if stages > 1 and overlapped:
        raise ValueError(f"explain: stages={stages}, overlapped=True: a pipeline overlaps by itself; leave one out")
    return Schedule(microbatches or together, together, overlapped, stages, slowest)


def _prices(given: Any) -> dict[str, float]:
    """Returns prices of a rank per hour by hardware name, from a mapping or a JSON file."""
    if given is None:
        return {}
    try:
        found = dict(given if isinstance(given, Mapping) else json.loads(Path(given).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"explain: prices={str(given)!r} is no JSON: {error}") from error
    wrong = [name for name, x in found.items() if isinstance(x, bool) or not isinstance(x, (int, float)) or not x > 0]
    if wrong or not found:
        raise ValueError(f"explain: prices of {', '.join(wrong) or 'nothing'}: give positive numbers, by hardware")
    return found


def _price(machine: Hardware, prices: Mapping[str, float]) -> float:
    names = [name for name in prices if name == machine.name or KNOWN.get(name.lower()) == machine]
    if prices and not names:
        raise ValueError(f"explain: prices are of {', '.join(prices)}, and not of {machine.name}: add it by that name")
    return prices[names[0]] if names else 0.0


def machine_of(what: Any) -> Hardware:
    """Returns hardware by name, from a file, measured (``"this"``), or as given."""
    return measure() if what == "this" else find_hardware(what)


def _values(q: _Question, varied: Sequence[str]) -> dict[str, str]:
    out = {}
    for name in varied:
        value = (
            q.hardware.name if name == "hardware"
            else getattr(q, name) if name in ("world", "mesh_shape")
            else getattr(q.schedule, name) if name in ("microbatches", "together", "overlapped", "stages", "slowest")
            else q.sharding[name] if name in q.sharding
            else getattr(q.options, name)
        )  # fmt: skip
        if name == "passes":
            value = ", ".join(row[0] for row in q.options.passes or pipeline.PIPELINE)
        out[name] = getattr(value, "__name__", None) or re.sub(r"<class '(?:.*\.)?(\w+)'>", r"\1", str(value))
    return out


def buffers_of(model: nn.Module | None) -> list[FlatBuffer]:
    """Returns every flat buffer of a model."""
    modules = [] if model is None else list(model.modules())
    units = dict.fromkeys(m._mfsdp_unit for m in modules if isinstance(m, FSDPModule))
    return [b for unit in units for b in unit.buffers]


def _beside(model: nn.Module | None) -> dict[str, int]:
    """Returns the tensor-parallel axes and their sizes."""
    modules = [] if model is None else list(model.modules())
    return sizes_along([ref.piece.mesh for m in modules for ref in refs(m).values() if ref.piece is not None], TENSOR)


def unsharded(model: nn.Module | None) -> tuple[int, int]:
    """Returns the bytes of buffers and ignored parameters, and of the trainable parameters among them."""
    if model is None:
        return 0, 0
    plain = {id(p): p for p in model.parameters() if type(p) is nn.Parameter}
    every = plain | {id(b): b for b in model.buffers()}  # type: ignore[operator]
    trained = sum(p.numel() * p.element_size() for p in plain.values() if p.requires_grad)
    return sum(t.numel() * t.element_size() for t in every.values()), trained


def _occasions(model: nn.Module, buffers: Sequence[FlatBuffer], optimizer: str, again: bool) -> tuple[Entry, ...]:
    """Returns ledger entries for memory outside of steps: initialising and saving."""
    main = sum(b.weights.main.nbytes for b in buffers)
    given = materialize.most(model, again)
    made = Entry(
        "initialising from meta", main + given, "main weights, and what one module's own parameters take whole"
    )
    states = OPTIMIZER_STATES[optimizer]
    saved = Entry("saving, blocking=False", copied(model, states), "of the host: copies of weights and optimizer state")
    return tuple(e for e in (made, saved) if e.nbytes and (e is saved or given))


_Known = dict[tuple[Any, ...], tuple[list[Program], list[pipeline.Stages]]]
"""Programs and listings after the passes, by combination."""


def _report(
    traced: Programs,
    q: _Question,
    inputs: Any,
    steps: Mapping[str, str],
    profile: Any,
    listings: bool = True,
    known: _Known | None = None,
) -> Report:
    """Returns the report of one combination.

    Args:
        steps: ``optimizer`` and ``stepping``.
        listings: whether to render listings.
        known: programs of other combinations; reused if only values differ that passes do not read.
    """
    o = q.options
    if isinstance(profile, _Measured):
        profile = replace(profile, fused=o.lowering != "eager")
    other, plain = unsharded(traced.model)
    buffers = buffers_of(traced.model)
    batch = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    machine = undisturbed(q.hardware) if getattr(profile, "contended", False) else q.hardware
    away = any(program.find(Kind.OFFLOAD) for program in traced)
    plan = traced.capture.plan if traced.capture is not None else None
    placing = (plan and plan.machine) or q.hardware
    pace = OffloadTiming(placing, o.lowering != "eager") if away else None
    decide = None
    if o.prefetch == "auto":
        size = sum(x.nbytes for x in batch)
        held = always(buffers, inputs=size, other=other, plain=plain, **steps)
        decide = AutoPrefetch(machine, o, q.hardware.cuda, held, profile, pace)
    known = {} if known is None else known
    key = (*q.traced, str(o), q.hardware.cuda, q if decide or pace else None)
    if key not in known:
        table = pipeline.chosen(o, q.hardware.cuda, decide, pace)
        programs = [original.copy() for original in traced]
        checked = o.check and listings  # suggestions are not verified
        stages = [pipeline.run(p, upto=o.upto, passes=table, checked=checked, listings=listings) for p in programs]
        known[key] = programs, stages
    programs, stages = known[key]
    facts = estimate(
        programs, stages, buffers, batch,
        machine=machine, options=o, other=other, plain=plain, profile=profile, **steps,
        mesh_shape=q.mesh_shape, axes=_beside(traced.model), schedule=q.schedule,
    )  # fmt: skip
    facts.plan, facts.notes = plan, list(dict.fromkeys(text for p in programs for text in p.remarks))
    if traced.model is not None:
        again = q.sharding.get("param_init_fn") is not None
        occasions = _occasions(traced.model, buffers, steps["optimizer"], again)
        facts.ledger = replace(facts.ledger, occasions=occasions)
    return Report(**{f.name: getattr(facts, f.name) for f in fields(StepData)})
