"""``torch.compile(model, backend="mfsdp")``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from functorch.compile import config as functorch_config
from torch import fx, nn
from torch.distributed.tensor import DTensor

from .. import pipeline
from ..buffers.flat_buffer import owner_of
from ..config.best_effort import only_tells
from ..config.options import PLANNED, Options
from ..config.plans import DoesNotFit, Plan
from ..cost_model.auto_prefetch import AutoPrefetch
from ..cost_model.offload_schedule import OffloadTiming
from ..dtensor import unsupported
from ..ir import printer, saved_copies
from ..ir.byte_costs import nbytes
from ..ir.program import Phase, Program
from ..ir.roles import Kind
from ..ir.split_backward import split_backward
from ..reports import dump
from ..reports.dump import Dump
from ..runtime import groups, watchdog
from ..sharding import mutation_check
from ..sharding.eager_warnings import modules_with
from . import attention_masks, control_flow, lowering, optional_tangents, outlining, schedule_check
from .capture import Capture, path_of, sources, trains
from .compile_cache import CachedProgram, cache_key
from .lowering import CompiledFn, raising
from .program_info import program_info
from .stitched import RETURNED, Stitched

log = logging.getLogger("mfsdp")

_graphs = itertools.count()
_warned_unsharded = False


def mfsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> CompiledFn:
    """Compiles a graph for Dynamo, which finds this backend by name through the ``torch_dynamo_backends`` entry point.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its inputs, real tensors.
        options: see `mfsdp.config.options.Options`.
        mode: ``torch.compile``'s mode: the default, or ``"reduce-overhead"``, which is ``cuda_graph="programs"``.

    Raises:
        ValueError: bad options. The first call of the model raises this and the errors below.
        RuntimeError: forward writes to a sharded parameter.
        NotImplementedError: a trainable parameter is a DTensor that was not sharded.
    """
    try:
        settings = _Settings.of(_with_mode(options, mode), example_inputs)
        _refuse_memory_budget(gm)
        control_flow.hoist_parameters(gm)
        mutation_check.traced(gm, example_inputs)
        names = sources(gm)
        _refuse_plain_dtensors(example_inputs, names)
    except (ValueError, TypeError, RuntimeError) as error:
        return raising(error)
    chosen = settings.options
    watchdog.settle(chosen.patience, chosen.on_stall == "raise", chosen.folder)
    compilation = _Compilation(gm, example_inputs, names, settings)
    capture = compilation.capture
    compile = lowering.LOWERINGS[chosen.lowering]
    try:
        compiled = outlining.captured(
            gm, lambda: compile(gm, example_inputs, capture, compilation.transform), lambda: capture.cut
        )
        return optional_tangents.tell_absent(gm, compiled)  # type: ignore[no-any-return]
    except Exception as error:
        if isinstance(first := _cause(error), DoesNotFit):
            return raising(first)
        raise


@dataclass(frozen=True)
class _Settings:
    """The options of one compilation, and what follows from them."""

    options: Options
    decide: AutoPrefetch | None
    """Chooses the prefetch depth, under ``prefetch="auto"``."""
    pace: OffloadTiming | None
    """Gives the times that place host copies; ``None``: the hardware is not known."""
    passes: pipeline.Table

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, inputs: Sequence[torch.Tensor]) -> _Settings:
        """Returns the settings of a graph with these inputs.

        Raises:
            ValueError: bad options.
        """
        plan = _plan_of(inputs)
        options = _following(plan, Options.parse(given), given)
        decide = AutoPrefetch.of_run(options, inputs)
        fused = options.lowering != "eager"
        machine = plan.machine if plan is not None else None
        pace = OffloadTiming(machine, fused) if machine is not None else OffloadTiming.of_run(inputs, fused)
        return cls(options, decide, pace, pipeline.chosen(options, decide=decide, pace=pace))


class _Compilation:
    """Captures a graph that Dynamo traced, and runs the passes on its programs. It outlives the call of the backend:
    backward may be compiled later.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor], names: Sequence[str], settings: _Settings):
        self.options = options = settings.options
        self.decide, self.pace, self.passes = settings.decide, settings.pace, settings.passes
        self.capture = capture = Capture(inputs, names)
        capture.optional_tangents = not options.interleave  # which sorts what writes nothing
        capture.overwrites_results = lowering.overwrites_results(options.lowering, options.cuda_graph is not None)
        capture.notes = attention_masks.fold_masks(gm, capture.input_names)
        for text in capture.notes:
            log.info("mfsdp: %s: %s", capture.name, text)
        if options.memory is not None:
            from . import memory_option  # loaded only for this option

            machine = memory_option.planned_machine()
            self.pace = self.pace or OffloadTiming(machine, options.lowering != "eager")
            capture.decide = partial(memory_option.decide, options=options, inputs=inputs, machine=machine)
        if not capture.shards:
            only_tells("the note that the model is not sharded", None, _warn_unsharded, capture, inputs)
        self.number = next(_graphs)
        self.dumped: Dump | None = None
        if options.folder:
            self.dumped = only_tells("files in dump=", None, Dump, Path(options.folder), self.number, options, inputs)
        if not self.listings and options.memory is None and not options.split_backward:
            capture.key = cache_key(capture, options, self.passes, gm, (self.decide, self.pace))

    @property
    def listings(self) -> bool:
        """Whether somebody reads the listings after passes."""
        return self.dumped is not None or dump.traced()

    def transform(self, graph: fx.GraphModule, phase: Phase) -> lowering.Finish | lowering.Parts:
        """Runs the passes on a program, in place. Returns a function that checks and wraps the compiled program, or
        the parts of a backward that are compiled instead.
        """
        program = self.capture.program(graph, phase)
        if phase == "backward" and self.options.split_backward:
            split = split_backward(program)
            if split is not None:
                finishes = self._finish(split.input), self._finish(split.weight)
                return lowering.Parts(program, split, finishes)
            program.remarks = [*program.remarks, "split_backward: the weight part cannot be separate"]
        return self._finish(program)

    def _finish(self, program: Program) -> lowering.Finish:
        """Runs the passes on a program, in place. Returns a function that checks and wraps the compiled program."""
        stages = self._run_passes(program)
        operations, driven = schedule_check.listed(program), schedule_check.listed(program, driven=True)
        show = None
        if self.dumped is not None and groups.rank() == 0:
            show = only_tells("files in dump=", None, self.dumped.add, program, stages)
        info, about = program_info(program, self.options), f"{program.title} of {program.name}"
        if self.options.cuda_graph:
            self._capture(program)

        def finish(compiled: lowering.Run, code: str) -> lowering.Run:
            if show is not None:
                only_tells("code in dump=", None, show, code)
            if self.options.check and isinstance(compiled, Stitched):
                schedule_check.compare(driven, compiled.driver, driven=True)
            elif self.options.check and code:
                schedule_check.compare(operations, code)
            takes_none = isinstance(compiled, Stitched) or self.options.lowering == "eager"
            facts = optional_tangents.needed(program, info) if takes_none else info
            out = CachedProgram(compiled, facts, about, self.decide.found if self.decide is not None else {})
            if self.capture.key:
                out.keep()
            return out

        return finish

    def _capture(self, program: Program) -> None:
        """Lets CUDA graphs replay the compute of a program, unless it copies activations to the host: the copies read
        them beside compute, and a replay may overwrite them.
        """
        if program.find(Kind.OFFLOAD) or program.find(Kind.RELOAD):
            why = "activations are copied to the host"
            log.warning("mfsdp: option cuda_graph: %s of %s is not captured: %s", program.title, program.name, why)
        else:
            program.gm.meta[RETURNED] = program.returned

    def _run_passes(self, program: Program) -> pipeline.Stages:
        """Returns the results of the passes, with the schedule in the log."""
        options, passes = self.options, self.passes
        if options.memory is not None:
            passes = pipeline.chosen(options.following(self.capture.options), pace=self.pace)
        only_tells("the note on what forward saves of parameters", None, _warn_copies, program)
        stages = pipeline.run(program, upto=options.upto, passes=passes, checked=options.check, listings=self.listings)
        for stage in stages:
            log.debug("mfsdp: graph%d %s %s: %.1f ms", self.number, program.title, stage.name, 1e3 * stage.seconds)
        schedule = only_tells("the schedule in the log", None, printer.schedule, program)
        log.info("mfsdp: graph%d %s: %s, %s", self.number, program.title, program.name, schedule)
        only_tells("artifacts of tlparse", None, dump.artifacts, self.number, program.title, stages)
        return stages


def _with_mode(options: Mapping[str, Any] | None, mode: str | None) -> Mapping[str, Any] | None:
    """Returns the options, with what a mode of ``torch.compile`` means.

    Raises:
        ValueError: the mode is not supported.
    """
    if mode in (None, "default"):
        return options
    if mode == "reduce-overhead":
        return {"cuda_graph": "programs", **(options or {})}
    raise ValueError(
        f"backend 'mfsdp' does not support mode={mode!r}; use options={{...}}, or mode='reduce-overhead' for CUDA "
        "graphs"
    )


def _following(plan: Plan | None, chosen: Options, given: Mapping[str, Any] | None) -> Options:
    """Returns the options, with the choices of the model's plan if it has one.

    Raises:
        ValueError: an option was given that the plan chooses.
    """
    if plan is None:
        return chosen
    both = next((name for name in (*PLANNED, "memory") if name in (given or {})), None)
    if both is not None:
        raise ValueError(f"the model follows a plan, and option {both}= was given: the plan chooses it; leave one out")
    return chosen.following(plan.options)


def _plan_of(inputs: Sequence[torch.Tensor]) -> Plan | None:
    """Returns the plan of the model whose parameters are among a graph's inputs, if it has one."""
    return next((b.unit.outermost.plan for t in inputs if (b := owner_of(t)) is not None), None)


def _refuse_memory_budget(gm: fx.GraphModule) -> None:
    """Refuses a memory budget: torch would recompute random operations with other numbers (pytorch#190758). Private in
    torch (``activation_memory_budget``, and the mark that ``region_activation_memory_budget`` leaves on nodes); tried
    on 2.13, there in 2.11 to 2.15.

    Raises:
        ValueError: the budget is less than 1.
    """
    marks = [n.meta.get("custom", {}).get("_region_activation_memory_budget", 1.0) for n in gm.graph.nodes]
    budget = float(min([functorch_config.activation_memory_budget, *marks]))
    if budget < 1:
        raise ValueError(
            f"backend 'mfsdp' does not support an activation memory budget of {budget}: gradients behind dropout would "
            "be wrong (pytorch#190758). Leave torch._functorch.config.activation_memory_budget at 1.0; to save memory, "
            "checkpoint layers (torch.utils.checkpoint)"
        )


def _refuse_plain_dtensors(inputs: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Refuses unsharded DTensors of tensor or expert parallelism: only a mesh says which ranks average gradients.

    Raises:
        NotImplementedError: names the parameter.
    """
    for tensor, name in zip(inputs, names, strict=True) if torch.is_grad_enabled() else ():
        if isinstance(tensor, DTensor) and trains(tensor):
            raise NotImplementedError(
                f"mfsdp: parameter {path_of(name)} is a DTensor over {tensor.device_mesh.mesh_dim_names} and is not "
                "sharded: which ranks have other data, and average gradients, is not known. Call mfsdp.fully_shard("
                "model, mesh=mesh, units=[YourBlock]) after parallelize_module, before building the optimizer; a mesh "
                "with the axes dp_shard and tp will do"
            )


def _cause(error: BaseException) -> BaseException:
    """Returns the original error, which compilers wrap in their own."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def _warn_unsharded(capture: Capture, inputs: Sequence[torch.Tensor]) -> None:
    """Logs once how to shard the model. Skips graphs that read no parameter, such as one after a graph break."""
    global _warned_unsharded
    plain = {t for t in inputs if isinstance(t, nn.Parameter) and not getattr(t, "_mfsdp_ignored", False)}
    if _warned_unsharded or not torch.is_grad_enabled() or not plain:
        return
    _warned_unsharded = True
    if instead := unsupported.sharded_by_torch(*modules_with(plain)):
        log.warning(
            "mfsdp: the model is not sharded by mfsdp, which averages its gradients over all ranks once more: %s",
            instead,
        )
        return
    how = "gradients are averaged over all ranks" if capture.plain else "one process, nothing to communicate"
    log.warning(
        "mfsdp: the model is not sharded (%s). To shard it, call mfsdp.fully_shard(model, units=[YourBlock]) before "
        "building the optimizer.",
        how,
    )


_warned_copies: set[str] = set()

NEGLIGIBLE = 100
"""`_warn_copies` warns if forward saves more than 1/100 of the parameters' bytes."""


def _warn_copies(program: Program) -> None:
    """Warns once per operator if forward saves much that it computes from parameters."""
    found = [(node, how) for node, how in saved_copies.copies(program) if how != saved_copies.ALONE]
    operators = {how for _, how in found}
    whole = sum(u.layout.full_numel * u.spec.precision.compute.itemsize for u in program.units)
    if not operators <= _warned_copies and NEGLIGIBLE * sum(nbytes(node.meta["val"]) for node, _ in found) > whole:
        _warned_copies.update(operators)
        log.warning(
            "mfsdp: %s: %s (the first is %s). They stay until backward, of every layer and on every rank: checkpoint "
            "such layers, or let the operator's backward make them again.",
            program.name,
            saved_copies.told(program),
            found[0][0].name,
        )
