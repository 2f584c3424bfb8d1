"""``torch.compile(model, backend="mfsdp")``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from .. import pipeline
from ..config.best_effort import only_tells
from ..config.options import PLANNED, Options
from ..config.plans import DoesNotFit, Plan
from ..cost_model.auto_prefetch import AutoPrefetch
from ..cost_model.offload_schedule import OffloadTiming
from ..ir import printer, saved_copies
from ..ir.byte_costs import nbytes
from ..ir.program import Phase, Program
from ..reports import dump
from ..reports.dump import Dump
from ..runtime import buffer_registry, groups, watchdog
from ..sharding import mutation_check
from . import attention_masks, control_flow, lowering, outlining, schedule_check
from .capture import Capture, path_of, sources
from .compile_cache import CachedProgram, cache_key
from .program_info import program_info
from .stitched import Stitched

log = logging.getLogger("mfsdp")

_graphs = itertools.count()
_told = False


def mfsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph for Dynamo, which finds this backend by name through the ``torch_dynamo_backends`` entry point.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its inputs, real tensors.
        options: see `mfsdp.config.options.Options`.
        mode: ``torch.compile``'s mode; only the default is supported.

    Raises:
        ValueError: bad options. The first call of the model raises this and the errors below.
        RuntimeError: forward writes to a sharded parameter.
        NotImplementedError: a trainable parameter is a DTensor that was not sharded.
    """
    try:
        if mode not in (None, "default"):
            graphs = (
                ": what a step touches stays where it is, so that a whole step could be one CUDA graph, but replaying "
                "one that communicates has not run on a GPU yet, and is not built"
            )
            why = graphs if mode == "reduce-overhead" else ""
            raise ValueError(f"backend 'mfsdp' does not support mode={mode!r}{why}; use options={{...}}")
        chosen = following(Options.parse(options), options, example_inputs)
        decide = AutoPrefetch.of_run(chosen, example_inputs)
        plan, fused = _plan_of(example_inputs), chosen.lowering != "eager"
        pace = (
            OffloadTiming(plan.machine, fused) if plan and plan.machine else OffloadTiming.of_run(example_inputs, fused)
        )
        passes = pipeline.chosen(chosen, decide=decide, pace=pace)
        _whole_budget(gm)
        control_flow.hoist_parameters(gm)
        mutation_check.traced(gm, example_inputs)
        names = sources(gm)
        _no_pieces(example_inputs, names)
    except (ValueError, TypeError, RuntimeError) as error:
        return _raise(error)
    watchdog.settle(chosen.patience, chosen.on_stall == "raise", chosen.folder)
    capture = Capture(example_inputs, names)
    capture.notes = attention_masks.fold_masks(gm, capture.input_names)
    for text in capture.notes:
        log.info("mfsdp: %s: %s", capture.name, text)
    if chosen.memory is not None:
        from . import memory_option  # loaded only for this option

        machine = memory_option.planned_machine()
        pace = pace or OffloadTiming(machine, fused)
        capture.decide = partial(memory_option.decide, options=chosen, inputs=example_inputs, machine=machine)
    if not capture.shards:
        _tell_unsharded(capture, example_inputs)
    number = next(_graphs)
    dumped = None
    if chosen.folder:
        dumped = only_tells("files in dump=", None, Dump, Path(chosen.folder), number, chosen, example_inputs)

    def transform(graph: fx.GraphModule, phase: Phase) -> Callable[[lowering.Run, str], lowering.Run]:
        program = capture.program(graph, phase)
        rows = passes if chosen.memory is None else pipeline.chosen(chosen.following(capture.options), pace=pace)
        only_tells("the note on what forward saves of parameters", None, _tell_copies, program)
        stages = pipeline.run(
            program,
            upto=chosen.upto,
            passes=rows,
            checked=chosen.check,
            listings=dumped is not None or dump.traced(),
        )
        for stage in stages:
            log.debug("mfsdp: graph%d %s %s: %.1f ms", number, phase, stage.name, 1e3 * stage.seconds)
        schedule = only_tells("the schedule in the log", None, printer.schedule, program)
        log.info("mfsdp: graph%d %s: %s, %s", number, phase, program.name, schedule)
        only_tells("artifacts of tlparse", None, dump.artifacts, number, phase, stages)
        operations, driven = schedule_check.listed(program), schedule_check.listed(program, driven=True)
        show = None
        if dumped is not None and groups.rank() == 0:
            show = only_tells("files in dump=", None, dumped.add, program, stages)
        info = program_info(program, chosen)

        def finish(compiled: lowering.Run, code: str) -> lowering.Run:
            if show is not None:
                only_tells("code in dump=", None, show, code)
            if chosen.check and isinstance(compiled, Stitched):
                schedule_check.compare(driven, compiled.driver, driven=True)
            elif chosen.check and code:
                schedule_check.compare(operations, code)
            out = CachedProgram(
                compiled, info, f"{phase} of {program.name}", decide.found if decide is not None else {}
            )
            if key:
                out.keep()
            return out

        return finish

    shown = dumped is not None or dump.traced()
    key = "" if shown or chosen.memory is not None else cache_key(capture, chosen, passes, gm, (decide, pace))
    compile = lowering.LOWERINGS[chosen.lowering]
    try:
        return outlining.captured(  # type: ignore[no-any-return]
            gm, lambda: compile(gm, example_inputs, capture, transform, key), lambda: capture.cut
        )
    except Exception as error:
        if isinstance(first := _cause(error), DoesNotFit):
            return _raise(first)
        raise


def following(chosen: Options, given: Mapping[str, Any] | None, inputs: Sequence[Any]) -> Options:
    """Returns the options, with the choices of the model's plan if it has one.

    Raises:
        ValueError: an option was given that the plan chooses.
    """
    plan = _plan_of(inputs)
    if plan is None:
        return chosen
    both = next((name for name in (*PLANNED, "memory") if name in (given or {})), None)
    if both is not None:
        raise ValueError(f"the model follows a plan, and option {both}= was given: the plan chooses it; leave one out")
    return chosen.following(plan.options)


def _plan_of(inputs: Sequence[Any]) -> Plan | None:
    """Returns the plan of the model whose parameters are among a graph's inputs, if it has one."""
    return next((b.unit.outermost.plan for t in inputs if (b := buffer_registry.owner(t)) is not None), None)


def _whole_budget(gm: fx.GraphModule) -> None:
    """Refuses a memory budget: torch would recompute random operations with other numbers (pytorch#190758).

    Raises:
        ValueError: the budget is less than 1.
    """
    budget = lowering.memory_budget(gm)
    if budget < 1:
        raise ValueError(
            f"backend 'mfsdp' does not support an activation memory budget of {budget}: gradients behind dropout would "
            "be wrong (pytorch#190758). Leave torch._functorch.config.activation_memory_budget at 1.0; to save memory, "
            "checkpoint layers (torch.utils.checkpoint)"
        )


def _no_pieces(inputs: Sequence[Any], names: Sequence[str]) -> None:
    """Refuses unsharded DTensors of tensor or expert parallelism: only a mesh says which ranks average gradients.

    Raises:
        NotImplementedError: names the parameter.
    """
    for tensor, name in zip(inputs, names, strict=True) if torch.is_grad_enabled() else ():
        cut = isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if cut and not getattr(tensor, "_mfsdp_ignored", False):
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


def _raise(error: BaseException) -> Callable[..., Any]:
    """Returns a compiled function that raises: Dynamo would wrap an error raised inside a backend."""

    def compiled(*args: Any) -> Any:
        raise error

    return compiled


def _tell_unsharded(capture: Capture, inputs: Sequence[Any]) -> None:
    """Logs once how to shard the model. Skips graphs that read no parameter, such as one after a graph break."""
    global _told
    plain = (isinstance(t, nn.Parameter) and not getattr(t, "_mfsdp_ignored", False) for t in inputs)
    if _told or not torch.is_grad_enabled() or not any(plain):
        return
    _told = True
    how = "gradients are averaged over all ranks" if capture.plain else "one process, nothing to communicate"
    log.warning(
        "mfsdp: the model is not sharded (%s). To shard it, call mfsdp.fully_shard(model, units=[YourBlock]) before "
        "building the optimizer.",
        how,
    )


_copied: set[str] = set()

NEGLIGIBLE = 100
"""`_tell_copies` warns if forward saves more than 1/100 of the parameters' bytes."""


def _tell_copies(program: Program) -> None:
    """Warns once per operator if forward saves much that it computes from parameters."""
    found = [(node, how) for node, how in saved_copies.copies(program) if how != saved_copies.ALONE]
    made = {how for _, how in found}
    whole = sum(u.layout.full_numel * u.spec.precision.compute.itemsize for u in program.units)
    if not made <= _copied and NEGLIGIBLE * sum(nbytes(node.meta["val"]) for node, _ in found) > whole:
        _copied.update(made)
        log.warning(
            "mfsdp: %s: %s (the first is %s). They stay until backward, of every layer and on every rank: checkpoint "
            "such layers, or let the operator's backward make them again.",
            program.name,
            saved_copies.told(program),
            found[0][0].name,
        )
