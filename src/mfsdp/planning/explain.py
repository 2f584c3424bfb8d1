"""`explain`: predicts what a training step does, costs and holds, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import pipeline
from ..buffers.flat_buffer import FlatBuffer, refs
from ..checkpoints.saving import copied
from ..compiler.plan_score import uncollected
from ..compiler.tracing import Programs, trace
from ..config.best_effort import doing
from ..config.hardware import undisturbed
from ..cost_model import whole_matrices
from ..cost_model.auto_prefetch import AutoPrefetch, always
from ..cost_model.estimate import Part, estimate, parts_of, spans_of, step_times
from ..cost_model.kernel_timings import Kernels
from ..cost_model.memory_model import OPTIMIZER_STATES, STEPPING, Entry
from ..cost_model.offload_schedule import OffloadTiming
from ..cost_model.op_cost import Measurements
from ..cost_model.pipeline_schedule import SPLITTING
from ..cost_model.pipeline_step import Boundary, Stage, pipelined, stage_of
from ..cost_model.step_data import StepData, Suggestion
from ..dtensor.mesh import TENSOR
from ..dtensor.tp_shards import sizes_along
from ..ir.program import Program
from ..ir.roles import Kind
from ..ir.split_backward import split_backward
from ..reports.report import Report
from ..sharding import materialize
from ..sharding.module import FSDPModule
from .question import File, HardwareLike, Prices, Question, question

GAIN = 0.01
"""The smallest share of the step that a suggestion must save."""


def explain(
    model: nn.Module | Sequence[nn.Module],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    world: int | None = None,
    mesh_shape: tuple[int, int] | None = None,
    hardware: HardwareLike = "h100",
    microbatches: int | None = None,
    together: int = 1,
    overlapped: bool = False,
    stages: int | None = None,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
    slowest: float = 1.0,
    prices: Prices | None = None,
    options: Mapping[str, object] | None = None,
    optimizer: str = "adamw",
    stepping: str | None = None,
    profile: Measurements | None = None,
    kernels: Kernels | File | None = None,
    suggest: bool = True,
    **sharding: Any,
) -> Report:
    """Predicts what a training step on ``world`` ranks does, costs and holds. Needs no process group, no GPU and no
    memory for the model.

    Args:
        model: any module, on the meta device or not, sharded or not; it is not changed. For a pipeline, one of its
            equal stages or a list of all stages, in order.
        args, kwargs: example inputs of one rank, one microbatch. Values do not matter. Of a list of stages, ``args``
            are the first one's; the others get what the one before returns. All get ``kwargs``.
        world: number of ranks. Default: those of a model that is sharded over several, else 8.
        mesh_shape: (outer, shard) ranks of a two-level mesh instead.
        hardware: a name in `mfsdp.config.hardware.KNOWN`, a JSON file, ``"this"`` (`mfsdp.measure`), or a
            `mfsdp.config.hardware.Hardware`.
        microbatches: of one step; gradients are reduced in the backward of each. Default: ``together``.
        together: how many of them `mfsdp.together` puts into one program.
        overlapped: whether the step runs under `mfsdp.overlapped`.
        stages: number of stages of a pipeline, with ``world`` ranks for each stage of a rank. Default: as many as
            there are in the list, else 1. Without ``schedule``: of a 1F1B pipeline of equal stages, in which what they
            send takes no time.
        schedule: simulates the pipeline as `mfsdp.PipelineStage` runs it under one of torch's schedules, by name
            (`mfsdp.cost_model.pipeline_schedule.SCHEDULES`): sends, receives, and memory of each rank. A schedule that
            splits backwards sets the option ``split_backward`` unless it is given. Default for a list: ``"1F1B"``.
        stages_per_rank: of the schedule. Default: 2 if the schedule takes several, else 1.
        slowest: how many times as long the slowest rank computes; the others wait for it in every collective.
        prices: of a rank and an hour by name of the hardware, a mapping or a JSON file.
        options: options of the backend.
        optimizer: a name in `mfsdp.cost_model.memory_model.OPTIMIZER_STATES`.
        stepping: ``"whole"``: all parameters at once; ``"flat"``: `fully_shard_optimizer`; ``"offloaded"``: that with
            ``offload="state"``. Default: as the model's plan says, else ``"whole"``.
        profile: of `mfsdp.profile`, of the same programs: measured times instead of estimates.
        kernels: measured on the hardware, `mfsdp.cost_model.kernel_timings.Kernels` or their file (``mfsdp measure
            --kernels``): measured times for the lines it contains.
        suggest: whether to look for changes that make the step faster, or make it fit.
        **sharding: arguments of `mfsdp.fully_shard`; none if the model is sharded already.

    Raises:
        TypeError: ``model`` is neither a module nor a list of modules.
        ValueError: bad arguments, also numbers of stages and microbatches that torch's schedule refuses; several
            values of one (`mfsdp.compare` takes lists).
        RuntimeError: Dynamo finds a graph break in the model (its own error, which names the place).
    """
    stages, schedule = stages_of(model, stages, schedule)
    asked = question(
        world=world, mesh_shape=mesh_shape, hardware=hardware, microbatches=microbatches, together=together,
        overlapped=overlapped, stages=stages, schedule=schedule, stages_per_rank=stages_per_rank, slowest=slowest,
        prices=prices, options=options, optimizer=optimizer, stepping=stepping, profile=profile, kernels=kernels,
        sharding=sharding,
    )  # fmt: skip
    explainer = Explainer(model, args, kwargs)
    report = explainer.report(asked)
    if suggest:
        report.suggestions = explainer.suggestions(asked, report)
    return report


def stages_of(
    model: nn.Module | Sequence[nn.Module], stages: int | None, schedule: str | None
) -> tuple[int, str | None]:
    """Returns the number of stages and their schedule.

    Raises:
        TypeError: neither a module nor a sequence of modules.
        ValueError: a list of stages is empty or has another length.
    """
    if not _are_stages(model):
        return 1 if stages is None else stages, schedule
    if not isinstance(model, Sequence | nn.ModuleList) or not all(isinstance(m, nn.Module) for m in model):
        raise TypeError(f"explain: model is a {type(model).__name__}: give a module, or a list of a pipeline's stages")
    number = len(model)
    if not number or stages not in (None, number):
        raise ValueError(f"explain: stages={stages!r} and a list of {number}: give all stages of the pipeline")
    return number, schedule or "1F1B"


def _are_stages(model: object) -> bool:
    """Whether a model is given as its pipeline stages."""
    return not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList)


@dataclass
class Explainer:
    """Answers questions about one model, each from what the ones before have in common with it."""

    model: nn.Module | Sequence[nn.Module]
    """A module, or all stages of a pipeline."""
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] | None = None
    _traces: dict[tuple[object, ...], Programs] = field(default_factory=dict)
    _programs: dict[tuple[object, ...], tuple[list[Program], list[pipeline.Stages]]] = field(default_factory=dict)
    """Programs after the passes, and what the passes did."""
    _begun: dict[tuple[object, ...], list[Program]] = field(default_factory=dict)
    """Programs after the passes that no suggested option changes."""
    _stages: list[Explainer] = field(default_factory=list)
    """Those of a pipeline's stages."""

    @uncollected()
    def report(self, asked: Question) -> Report:
        """The prediction of one step."""
        data = self._data(asked)
        assert data is not None
        data.price = asked.price
        return Report(**{f.name: getattr(data, f.name) for f in fields(StepData)})

    def _data(self, asked: Question, listings: bool = True, within: float = math.inf) -> StepData | None:
        """The prediction of one step. Arguments as for `_alone`."""
        if asked.schedule.schedule is None:
            alone = self._alone(asked, listings, within)
            return None if alone is None else alone[0]
        explainers = self._explainers(asked)
        known = {id(e): e._stage(asked, listings) for e in explainers}
        stages = [known[id(e)] for e in explainers]
        data = pipelined(stages, asked.schedule, stages[0].alone.name)
        data.notes = list(dict.fromkeys(text for stage in stages for text in stage.alone.notes))
        return data

    def _alone(
        self, asked: Question, listings: bool, within: float = math.inf
    ) -> tuple[StepData, list[Part], list[FlatBuffer]] | None:
        """The prediction of a step without other stages, its timed programs and its buffers.

        Args:
            asked: the question.
            listings: whether to render the programs and to check them.
            within: seconds; ``None`` is returned for a slower step, whose memory is not computed.
        """
        traced = self._trace(asked)
        asked = _planned(asked, traced)
        o, hardware, measured = asked.options, asked.hardware, asked.measured
        steps = {"optimizer": asked.optimizer, "stepping": asked.stepping or "whole"}
        other, plain = unsharded(traced.model)
        buffers = buffers_of(traced.model)
        batch = self._batch()
        machine = undisturbed(hardware) if getattr(measured, "contended", False) else hardware
        plan = traced.capture.plan if traced.capture is not None else None
        timing = None
        if any(program.find(Kind.OFFLOAD) for program in traced):
            timing = OffloadTiming((plan and plan.machine) or hardware, o.lowering != "eager")
        decide = None
        if o.prefetch == "auto":
            size = sum(x.nbytes for x in batch)
            held = always(buffers, inputs=size, other=other, plain=plain, **steps)
            decide = AutoPrefetch(machine, o, hardware.cuda, held, measured, timing)
        programs, listed = self._run_passes(asked, traced, decide, timing, listings)
        schedule = asked.schedule if asked.schedule.schedule is None else replace(asked.schedule, stages=1)
        parts = parts_of(programs, listed, machine, o.lowering != "eager", measured, schedule)
        timed: dict[str, Any] = {"machine": machine, "plain": plain, "profile": measured, "schedule": schedule, **steps}
        if within < math.inf and step_times(parts, spans_of(parts), buffers, **timed).step > within * (1 + 1e-9):
            return None
        data = estimate(
            programs, listed, buffers, batch,
            options=o, other=other, **timed, mesh_shape=asked.mesh_shape, axes=_tensor_axes(traced.model), parts=parts,
        )  # fmt: skip
        data.plan, data.notes = plan, list(dict.fromkeys(text for p in programs for text in p.remarks))
        if traced.model is not None:
            again = asked.sharding.get("param_init_fn") is not None
            occasions = _occasions(traced.model, buffers, asked.optimizer, again)
            data.ledger = replace(data.ledger, occasions=occasions)
        return data, parts, buffers

    def _batch(self) -> list[torch.Tensor]:
        return [x for x in pytree.tree_leaves((self.args, dict(self.kwargs or {}))) if isinstance(x, torch.Tensor)]

    def _explainers(self, asked: Question) -> list[Explainer]:
        """Those of all stages; equal ones share one.

        Raises:
            ValueError: a single stage stands for all, and gets nothing that has a gradient.
        """
        if not _are_stages(self.model):
            if not self._stages:
                args = pytree.tree_map(_with_gradient, tuple(self.args))
                self._stages.append(Explainer(self.model, args, self.kwargs))
            leaves = [x for x in pytree.tree_leaves(self.args) if isinstance(x, torch.Tensor)]
            floating = any(x.is_floating_point() for x in leaves)
            if asked.schedule.schedule in SPLITTING and not floating:
                raise ValueError(
                    f"explain: schedule={asked.schedule.schedule!r}: one stage stands for all, and its inputs have no "
                    "gradient; give activations to a stage from the middle, or a list of all stages"
                )
            return self._stages * asked.schedule.stages
        args, before = self.args, None
        for module in cast(Sequence[nn.Module], self.model) if not self._stages else ():
            if before is None or module is not before.model or _meta(args) != _meta(before.args):
                before = Explainer(module, args, self.kwargs)
            self._stages.append(before)
            args = _outputs(before._trace(asked))
        return self._stages

    def _stage(self, asked: Question, listings: bool) -> Stage:
        """What this model costs as a stage of a pipeline."""
        alone = self._alone(asked, listings)
        assert alone is not None
        data, parts, buffers = alone
        traced = self._trace(asked)
        boundary = Boundary.of(_trained(traced), sum(x.nbytes for x in self._batch()))
        return stage_of(data, parts, buffers, boundary, asked.schedule.rounds)

    @uncollected()
    def suggestions(self, asked: Question, report: Report) -> list[Suggestion]:
        """Changes that make the step faster, or make it fit, the best first."""
        first = self if asked.schedule.schedule is None else self._explainers(asked)[0]
        asked = _planned(asked, first._trace(asked))
        found = []
        for text, changed in _ideas(asked, report):
            doing(f"trying {text}")
            within = report.step * (1 - GAIN) if report.fits else math.inf
            other = self._data(changed, False, within)
            if other is not None and other.fits and (not report.fits or other.step < within):
                found.append(Suggestion(text, other.step, other.peak))
        for stepping in () if report.fits else STEPPING[STEPPING.index(asked.stepping or "whole") + 1 :]:
            other = self._data(replace(asked, stepping=stepping), False)
            if other is not None and other.fits:
                found.append(Suggestion(_STEPPING[stepping], other.step, other.peak))
        return _worthwhile(found)

    def _trace(self, asked: Question) -> Programs:
        if asked.trace_key not in self._traces:
            assert isinstance(self.model, nn.Module)
            doing(f"tracing {type(self.model).__name__}")
            self._traces[asked.trace_key] = trace(
                self.model, self.args, self.kwargs, world=asked.world, mesh_shape=asked.mesh_shape,
                lowering=asked.options.lowering, together=asked.schedule.together,
                hold=asked.schedule.schedule is not None, cuda_graph=asked.options.cuda_graph is not None,
                **asked.sharding,
            )  # fmt: skip
        return self._traces[asked.trace_key]

    def _run_passes(
        self,
        asked: Question,
        traced: Programs,
        decide: AutoPrefetch | None,
        timing: OffloadTiming | None,
        listings: bool,
    ) -> tuple[list[Program], list[pipeline.Stages]]:
        o, cuda = asked.options, asked.hardware.cuda
        splits = o.split_backward and asked.schedule.schedule in SPLITTING
        key = (*asked.trace_key, str(o), cuda, splits, asked if decide or timing else None)
        if key not in self._programs:
            doing("running the passes")
            table = pipeline.chosen(o, cuda, decide, timing)
            if listings or o.upto is not None:
                programs = [part for original in traced for part in _copies(original, splits)]
            else:
                common, table = pipeline.common(table)
                alike = (*asked.trace_key, str(replace(o, **_TRIED)), cuda, splits)
                if alike not in self._begun:
                    self._begun[alike] = [part for original in traced for part in _copies(original, splits)]
                    for program in self._begun[alike]:
                        pipeline.rewrite(program, common)
                programs = [program.copy() for program in self._begun[alike]]
            checked = o.check and listings  # a suggestion is checked when somebody asks for it
            stages = [pipeline.run(p, upto=o.upto, passes=table, checked=checked, listings=listings) for p in programs]
            if not listings:
                return programs, stages
            self._programs[key] = programs, stages
        return self._programs[key]


def _copies(program: Program, splits: bool) -> list[Program]:
    """A copy of the program, or of the parts of a backward that the schedule splits."""
    split = split_backward(program) if splits and program.phase == "backward" else None
    if split is not None:
        return [split.input, split.weight]
    copy = program.copy()
    if splits and program.phase == "backward":
        copy.remarks = [*copy.remarks, "split_backward: the weight part cannot be separate"]
    return [copy]


def _with_gradient(x: Any) -> Any:
    """What a stage receives: activations have gradients."""
    return x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _trained(traced: Programs) -> Program:
    """Returns the forward of a stage.

    Raises:
        ValueError: it has no backward.
    """
    if traced.forward is None or traced.backward is None:
        name = next((p.name for p in traced), "")
        raise ValueError(f"explain: the stage {name} is not trained: nothing requires gradients")
    return traced.forward


def _outputs(traced: Programs) -> tuple[torch.Tensor, ...]:
    """What the next stage gets: outputs as they are traced, on the meta device."""
    forward = _trained(traced)
    values = [node.meta["val"] for node in forward.results()[: forward.returned]]
    return tuple(_with_gradient(torch.empty(tuple(v.shape), dtype=v.dtype, device="meta")) for v in values)


def _meta(args: tuple[object, ...]) -> list[object]:
    leaves = pytree.tree_leaves(args)
    return [(x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]


def _planned(asked: Question, traced: Programs) -> Question:
    """The question with what the model's plan says: its options, and where the optimizer's state is."""
    plan = traced.capture.plan if traced.capture is not None else None
    if plan is None:
        return asked
    if asked.planned:
        asked = replace(asked, options=asked.options.following(plan.options), planned=False)
    if plan.optimizer == "host" and asked.stepping is None:
        asked = replace(asked, stepping="offloaded")
    return asked


_STEPPING = {
    "flat": "fully_shard_optimizer(optimizer)",
    "offloaded": 'fully_shard_optimizer(optimizer, offload="state")',
}
"""How to get an optimizer step that takes less memory."""


def _worthwhile(found: list[Suggestion]) -> list[Suggestion]:
    """The best first, without those that gain no more than one with fewer changes."""
    kept: list[Suggestion] = []
    for s in sorted(found, key=lambda s: (len(s.text), s.step)):
        if all(s.step < k.step * (1 - GAIN / 2) for k in kept):
            kept.append(s)
    return sorted(kept, key=lambda s: s.step)


_TRIED: dict[str, Any] = {"prefetch": 1, "reduce_lag": 1, "max_unsharded": None, "pool": True}
"""Options that suggestions change, and any value of each."""


def _ideas(asked: Question, report: Report) -> Iterator[tuple[str, Question]]:
    """Options that might help and need no new trace."""
    o = asked.options

    def option(text: str, **changes: Any) -> Iterator[tuple[str, Question]]:
        if changes.keys() <= pipeline.obeyed(o):
            yield text, replace(asked, options=replace(o, **changes), planned=False)

    depth_now = o.prefetch if isinstance(o.prefetch, int) else None  # "auto" leaves nothing to change
    if not report.fits:
        for depth in range(o.reduce_lag if depth_now is None else min(depth_now, o.reduce_lag)):
            if depth_now is None:
                yield from option(f"reduce_lag={depth}", reduce_lag=depth)
            else:
                yield from option(f"prefetch={depth}, reduce_lag={depth}", prefetch=depth, reduce_lag=depth)
        if o.pool:
            yield from option("pool=False", pool=False)
        return
    if any(x.why == "memory limit" for x in report.exposed):
        yield from option("no max_unsharded", max_unsharded=None)
    lag = o.reduce_lag + 1
    for depth in () if depth_now is None else (depth_now + 1, depth_now + 2):
        yield from option(f"prefetch={depth}", prefetch=depth)
        yield from option(f"prefetch={depth}, reduce_lag={lag}", prefetch=depth, reduce_lag=lag)
    yield from option(f"reduce_lag={lag}", reduce_lag=lag)


def buffers_of(model: nn.Module | None) -> list[FlatBuffer]:
    """All flat buffers of a model."""
    modules = [] if model is None else list(model.modules())
    units = dict.fromkeys(m._mfsdp_unit for m in modules if isinstance(m, FSDPModule))
    return [b for unit in units for b in unit.buffers]


def _tensor_axes(model: nn.Module | None) -> dict[str, int]:
    """Axes of tensor parallelism, and their sizes."""
    modules = [] if model is None else list(model.modules())
    return sizes_along([ref.piece.mesh for m in modules for ref in refs(m).values() if ref.piece is not None], TENSOR)


def unsharded(model: nn.Module | None) -> tuple[int, int]:
    """Bytes of a model's buffers and ignored parameters, and of those among them that train."""
    if model is None:
        return 0, 0
    plain = {id(p): p for p in model.parameters() if type(p) is nn.Parameter}
    every = plain | {id(b): b for b in model.buffers()}  # type: ignore[operator]
    trained = sum(p.numel() * p.element_size() for p in plain.values() if p.requires_grad)
    return sum(t.numel() * t.element_size() for t in every.values()), trained


def _occasions(model: nn.Module, buffers: Sequence[FlatBuffer], optimizer: str, again: bool) -> tuple[Entry, ...]:
    """What initialising and saving hold, beside the steps."""
    main = sum(b.weights.main.nbytes for b in buffers)
    given = materialize.most(model, again)
    made = Entry(
        "initialising from meta", main + given, "main weights, and what one module's own parameters take whole"
    )
    copies = copied(model, OPTIMIZER_STATES[optimizer])
    copies += sum(whole_matrices.rest(buffers)) if optimizer == "muon" else 0
    saved = Entry("saving, blocking=False", copies, "of the host: copies of weights and optimizer state")
    return tuple(e for e in (made, saved) if e.nbytes and (e is saved or given))
