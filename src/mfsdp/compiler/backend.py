"""``torch.compile(model, backend="mfsdp")``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from .. import pipeline
from ..buffers.flat_buffer import owner_of
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
from ..runtime import groups, watchdog
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
        _default_mode(mode)
        settings = _Settings.of(options, example_inputs)
        _whole_budget(gm)
        control_flow.hoist_parameters(gm)
        mutation_check.traced(gm, example_inputs)
        names = sources(gm)
        _no_pieces(example_inputs, names)
    except (ValueError, TypeError, RuntimeError) as error:
        return _raise(error)
    chosen = settings.options
    watchdog.settle(chosen.patience, chosen.on_stall == "raise", chosen.folder)
    compilation = _Compilation(gm, example_inputs, names, settings)
    capture, key = compilation.capture, compilation.key
    compile = lowering.LOWERINGS[chosen.lowering]
    try:
        return outlining.captured(  # type: ignore[no-any-return]
            gm, lambda: compile(gm, example_inputs, capture, compilation.transform, key), lambda: capture.cut
        )
    except Exception as error:
        if isinstance(first := _cause(error), DoesNotFit):
            return _raise(first)
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
    def of(cls, given: Mapping[str, Any] | None, inputs: Sequence[Any]) -> _Settings:
        """Returns the settings of a graph with these inputs.

        Raises:
            ValueError: bad options.
        """
        options = following(Options.parse(given), given, inputs)
        decide = AutoPrefetch.of_run(options, inputs)
        plan, fused = _plan_of(inputs), options.lowering != "eager"
        machine = plan.machine if plan is not None else None
        pace = OffloadTiming(machine, fused) if machine is not None else OffloadTiming.of_run(inputs, fused)
        return cls(options, decide, pace, pipeline.chosen(options, decide=decide, pace=pace))


class _Compilation:
    """Captures a graph that Dynamo traced, and runs the passes on its programs. It outlives the call of the backend:
    backward may be compiled later.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], names: Sequence[str], settings: _Settings):
        self.options = options = settings.options
        self.decide, self.pace, self.passes = settings.decide, settings.pace, settings.passes
        self.capture = capture = Capture(inputs, names)
        capture.notes = attention_masks.fold_masks(gm, capture.input_names)
        for text in capture.notes:
            log.info("mfsdp: %s: %s", capture.name, text)
        if options.memory is not None:
            from . import memory_option  # loaded only for this option

            machine = memory_option.planned_machine()
            self.pace = self.pace or OffloadTiming(machine, options.lowering != "eager")
            capture.decide = partial(memory_option.decide, options=options, inputs=inputs, machine=machine)
        if not capture.shards:
            _tell_unsharded(capture, inputs)
        self.number = next(_graphs)
        self.dumped: Dump | None = None
        if options.folder:
            self.dumped = only_tells("files in dump=", None, Dump, Path(options.folder), self.number, options, inputs)
        self.key = ""  # the cache keeps nothing
        if not self.listings and options.memory is None:
            self.key = cache_key(capture, options, self.passes, gm, (self.decide, self.pace))

    @property
    def listings(self) -> bool:
        """Whether somebody reads the listings after passes."""
        return self.dumped is not None or dump.traced()

    def transform(self, graph: fx.GraphModule, phase: Phase) -> Callable[[lowering.Run, str], lowering.Run]:
        """Runs the passes on a program, in place. Returns a function that checks and wraps the compiled program."""
        program = self.capture.program(graph, phase)
        stages = self._run_passes(program)
        operations, driven = schedule_check.listed(program), schedule_check.listed(program, driven=True)
        show = None
        if self.dumped is not None and groups.rank() == 0:
            show = only_tells("files in dump=", None, self.dumped.add, program, stages)
        info, about = program_info(program, self.options), f"{phase} of {program.name}"

        def finish(compiled: lowering.Run, code: str) -> lowering.Run:
            if show is not None:
                only_tells("code in dump=", None, show, code)
            if self.options.check and isinstance(compiled, Stitched):
                schedule_check.compare(driven, compiled.driver, driven=True)
            elif self.options.check and code:
                schedule_check.compare(operations, code)
            out = CachedProgram(compiled, info, about, self.decide.found if self.decide is not None else {})
            if self.key:
                out.keep()
            return out

        return finish

    def _run_passes(self, program: Program) -> pipeline.Stages:
        """Returns the results of the passes, with the schedule in the log."""
        options, passes = self.options, self.passes
        if options.memory is not None:
            passes = pipeline.chosen(options.following(self.capture.options), pace=self.pace)
        only_tells("the note on what forward saves of parameters", None, _tell_copies, program)
        stages = pipeline.run(program, upto=options.upto, passes=passes, checked=options.check, listings=self.listings)
        for stage in stages:
            log.debug("mfsdp: graph%d %s %s: %.1f ms", self.number, program.phase, stage.name, 1e3 * stage.seconds)
        schedule = only_tells("the schedule in the log", None, printer.schedule, program)
        log.info("mfsdp: graph%d %s: %s, %s", self.number, program.phase, program.name, schedule)
        only_tells("artifacts of tlparse", None, dump.artifacts, self.number, program.phase, stages)
        return stages


def _default_mode(mode: str | None) -> None:
    """Refuses modes of ``torch.compile``.

    Raises:
        ValueError: the mode is not the default.
    """
    if mode in (None, "default"):
        return
    graphs = (
        ": what a step touches stays where it is, so that a whole step could be one CUDA graph, but replaying "
        "one that communicates has not run on a GPU yet, and is not built"
    )
    why = graphs if mode == "reduce-overhead" else ""
    raise ValueError(f"backend 'mfsdp' does not support mode={mode!r}{why}; use options={{...}}")


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
    return next((b.unit.outermost.plan for t in inputs if (b := owner_of(t)) is not None), None)


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
