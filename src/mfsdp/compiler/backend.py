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
from ..ir import ops, printer, saved_copies
from ..ir.byte_costs import nbytes
from ..ir.program import GIVEN, READ, Phase, Program, first_launches, group_of, lane_of, slot_of
from ..ir.roles import Kind, role
from ..reports import dump
from ..reports.dump import Dump
from ..reports.profile import Outline, outline
from ..runtime import buffer_registry, compiled_program, groups, watchdog
from ..runtime.step_prefetch import First
from ..sharding import mutation_check
from . import attention_masks, control_flow, lowering, outlining, schedule_check
from .capture import Capture, path_of, sources
from .compile_cache import CachedProgram, cache_key
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
    """The backend, as Dynamo calls it: found by name through the ``torch_dynamo_backends`` entry point.

    Args:
        gm: what Dynamo traced.
        example_inputs: its inputs, real tensors.
        options: see `mfsdp.config.options.Options`.
        mode: ``torch.compile``'s mode; only the default is supported.

    Raises:
        ValueError: bad options (raised by the first call of the model).
        RuntimeError: forward writes to a sharded parameter (so is this).
        NotImplementedError: a trainable parameter is a DTensor that was not sharded (so is this).
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
        from . import memory_option  # the only reason to load it

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
        sequences = collectives(program)
        operations, driven = schedule_check.listed(program), schedule_check.listed(program, driven=True)
        show = None
        if dumped is not None and groups.rank() == 0:
            show = only_tells("files in dump=", None, dumped.add, program, stages)
        marks = {
            "outline": only_tells(
                "names of operations in errors, stacks and profiles", Outline(program.name, phase, ()), outline, program
            ),
            "sequences": sequences, "sources": sharded(program),
            "keeping": holding(program), "reads": [] if phase == "backward" else reading(program),
            "meets": list(dict.fromkeys([*(g for unit in program.units for g in unit.spec.meets), *sequences])),
            "probed": (chosen.check_finite, chosen.check_replicas) if program.find(Kind.PROBE) else (0, 0),
            "measured": measuring(program), "rooms": static(program), "frames": chosen.frames, **beside(program),
            "first": [] if phase == "backward" or chosen.prefetch == 0 or loose(program) else leading(program),
        }  # fmt: skip

        def finish(compiled: lowering.Run, code: str) -> lowering.Run:
            if show is not None:
                only_tells("code in dump=", None, show, code)
            if chosen.check and isinstance(compiled, Stitched):
                schedule_check.compare(driven, compiled.driver, driven=True)
            elif chosen.check and code:
                schedule_check.compare(operations, code)
            out = CachedProgram(
                compiled, marks, f"{phase} of {program.name}", decide.found if decide is not None else {}
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
    """The options, with what the model's plan says of them, if it has one.

    Raises:
        ValueError: the plan says what was given too.
    """
    plan = _plan_of(inputs)
    if plan is None:
        return chosen
    both = next((name for name in (*PLANNED, "memory") if name in (given or {})), None)
    if both is not None:
        raise ValueError(f"the model follows a plan, and option {both}= was given: the plan chooses it; leave one out")
    return chosen.following(plan.options)


def _plan_of(inputs: Sequence[Any]) -> Plan | None:
    """That of the model whose parameters are among a graph's inputs, if it has one."""
    return next((b.unit.outermost.plan for t in inputs if (b := buffer_registry.owner(t)) is not None), None)


def collectives(program: Program) -> dict[str, list[str]]:
    """The collectives of a program by group (that of the gathers), in order, and which gradients they bring: what all
    of its ranks must have alike. Units have their paths in it, or where those come: equal layers are not the same layer
    (law 39), and may share a program.
    """
    out: dict[str, list[str]] = {}
    told = {unit for unit, _ in sharded(program).values()}
    for node in program.nodes:
        r = role(node)
        if node.target is ops.collective:  # shapes may depend on data, and under tensor parallelism on the rank
            verb, dtype = node.args[1], node.meta["val"].dtype
            out.setdefault(group_of(program, node), []).append(f"{verb} {dtype} over {r.unit} of {program.name}")  # type: ignore[union-attr]
            continue
        if r is None or node.target not in (*ops.OURS, ops.accumulate):
            continue
        unit = program.unit(r.unit)
        path = compiled_program.PATH.format(unit.name) if unit.name in told else unit.fqn
        line = only_tells("lines of the listing", str(node.target), printer.text, node)
        spec, text = unit.spec, f"{line}  unit '{path}' of {program.name}"
        if node.target is ops.accumulate:
            for group in spec.meets:
                gradient = only_tells("lines of the listing", "", printer.operand, node.args[2])
                out.setdefault(group, []).append(f"{text}  of {gradient}")
        else:
            once = node.target in (ops.refresh, ops.refresh_codes, ops.maxima)
            groups: tuple[str, ...] = (spec.outer_group if lane_of(node) >= 2 else spec.group,)
            if once and spec.kept:
                further = node.target is ops.maxima or spec.replica
                groups = spec.gathering if further else spec.gathering[-1:]
            for group in groups:
                out.setdefault(group, []).append(f"{text}  {r.lane.value}  {spec.cutting}")
    return out


def _whole_budget(gm: fx.GraphModule) -> None:
    """Refuses what makes torch compute random operations again with other numbers (pytorch#190758).

    Raises:
        ValueError: the budget for activations is not all of them.
    """
    budget = lowering.memory_budget(gm)
    if budget < 1:
        raise ValueError(
            f"backend 'mfsdp' does not support an activation memory budget of {budget}: gradients behind dropout would "
            "be wrong (pytorch#190758). Leave torch._functorch.config.activation_memory_budget at 1.0; to save memory, "
            "checkpoint layers (torch.utils.checkpoint)"
        )


def sharded(program: Program) -> dict[int, tuple[str, str]]:
    """Which of a program's arguments are sources of units, and the units' names and paths."""
    places = enumerate(program.gm.graph.find_nodes(op="placeholder"))
    found = {i: r.unit for i, n in places if (r := role(n)) is not None and r.kind is Kind.SHARD}
    return {i: (name, program.unit(name).fqn) for i, name in found.items()}


def holding(program: Program) -> set[int]:
    """Which of them belong to units whose gradients it may keep back."""
    sources = {node.args[0] for node in program.nodes if node.target is ops.hold}
    return {i for i, n in enumerate(program.gm.graph.find_nodes(op="placeholder")) if n in sources}


def measuring(program: Program) -> list[int]:
    """Which of them belong to units whose maxima it reads (Note [Maxima])."""
    units = {n.args[0] for n in program.nodes if n.target is ops.maxima}
    return [i for i, n in enumerate(program.gm.graph.find_nodes(op="placeholder")) if n in units]


def beside(program: Program) -> dict[str, Any]:
    """What of a program decides whether it may run beside another (Note [Turns])."""
    exchanges = any(n.target is ops.collective for n in program.nodes)
    results = program.results() if program.phase == "backward" else ()
    silent = 0 if any(isinstance(result, fx.Node) for result in results) else len(results)
    places = enumerate(program.gm.graph.find_nodes(op="placeholder"))
    given = [i for i, n in places if n.meta.get(GIVEN)] if silent else []
    return {"exchanges": exchanges, "silent": silent, "given": given}


def static(program: Program) -> dict[tuple[torch.device, str], int]:
    """Bytes of the static buffers of a program, by device and name."""
    slots = ((node.meta["val"].device, slot) for node in program.nodes if (slot := slot_of(node)))
    return {(device, slot): program.slots[slot] for device, slot in slots}


def loose(program: Program) -> bool:
    """Whether ranks may leave out units of its model (Note [Standing in])."""
    return any(unit.spec.loose for unit in program.units)


def leading(program: Program) -> list[First]:
    """What a program launches before it waits for anything, of units."""
    sources = {unit: i for i, (unit, _) in sharded(program).items()}
    found = []
    for node in first_launches(program):
        shard, *rest = node.args
        text, slot = (*rest, -1)[:2] if rest else ("", -1)
        found.append(First(sources[role(node).unit], text, slot, casts=shard.op != "placeholder"))  # type: ignore[arg-type, union-attr]
    return found


def reading(program: Program) -> list[int]:
    """Which of a program's arguments parameters are read through."""
    return [i for i, n in enumerate(program.gm.graph.find_nodes(op="placeholder")) if n.meta.get(READ)]


def _no_pieces(inputs: Sequence[Any], names: Sequence[str]) -> None:
    """Refuses what tensor or expert parallelism has cut and nobody has sharded: whose gradients are to be averaged with
    whose, only a mesh says.

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
    """What was raised first, which compilers wrap in their own."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def _raise(error: BaseException) -> Callable[..., Any]:
    """A compiled function that raises: from inside of a backend Dynamo would wrap the error in its own."""

    def compiled(*args: Any) -> Any:
        raise error

    return compiled


def _tell_unsharded(capture: Capture, inputs: Sequence[Any]) -> None:
    """Says once how to shard the model; not of what reads no parameter of it, a piece behind a graph break."""
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
"""What forward saves of parameters is told where it is more than one part in so many of them."""


def _tell_copies(program: Program) -> None:
    """Says once of every operator that forward saves what it has made of parameters, if it is much beside them."""
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
