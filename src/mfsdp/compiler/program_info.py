"""Collects what the execution of a program has to know of it (`mfsdp.runtime.program_info.ProgramInfo`)."""

from __future__ import annotations

import torch
from torch import fx

from ..config.best_effort import only_tells
from ..config.options import Options
from ..config.units import GroupIndex
from ..ir import ops, printer
from ..ir.program import GIVEN, READ, Program, base_of, first_launches, group_of, lane_of, slot_of
from ..ir.roles import Kind, role
from ..reports.profile import outline
from ..runtime.program_info import PATH, Outline, ProgramInfo
from ..runtime.step_prefetch import First
from ..runtime.user_buffers import UserBuffers
from . import optional_tangents


def program_info(program: Program, options: Options) -> ProgramInfo:
    """The facts about a program after its last pass."""
    backward = program.phase == "backward"
    launches_first = not backward and options.prefetch != 0 and not any(u.spec.any_optional for u in program.units)
    results = program.results() if backward else ()
    silent = 0 if any(isinstance(result, fx.Node) for result in results) else len(results)
    inputs = list(program.gm.graph.find_nodes(op="placeholder"))
    held = {node.args[0] for node in program.nodes if node.target is ops.hold}
    measured = {node.args[0] for node in program.nodes if node.target is ops.maxima}
    sequences = collectives(program)
    return ProgramInfo(
        outline=only_tells(
            "names of operations in errors, stacks and profiles", Outline(program.name, program.phase, ()), outline,
            program,
        ),
        collectives=sequences,
        sources=sources(program),
        holds={i for i, n in enumerate(inputs) if n in held},
        reads=[] if backward else [i for i, n in enumerate(inputs) if n.meta.get(READ)],
        peer_groups=list(dict.fromkeys([*(g for unit in program.units for g in unit.spec.peer_groups), *sequences])),
        static_buffers=_static_buffers(program),
        user_buffers=_user_buffers(program, options),
        frames=options.frames,
        exchanges=any(node.target is ops.collective for node in program.nodes),
        silent_results=silent,
        caller_inputs=[i for i, n in enumerate(inputs) if n.meta.get(GIVEN)] if silent else [],
        first_launches=_first_launches(program) if launches_first else [],
        amax_inputs=[i for i, n in enumerate(inputs) if n in measured],
        tangents=optional_tangents.zeros(program),
        check_every=(options.check_finite, options.check_replicas) if program.find(Kind.PROBE) else (0, 0),
    )  # fmt: skip


def collectives(program: Program) -> dict[str, list[str]]:
    """The collectives of a program in order, and the gradients they bring, by the group of the unit's gathers: every
    rank of the group must run the same. Units appear with their paths, or with `PATH` where equal layers may share the
    program: they are not the same layer (invariant 39).
    """
    out: dict[str, list[str]] = {}
    from_arguments = {unit for unit, _ in sources(program).values()}
    for node in program.nodes:
        r = role(node)
        if node.target is ops.collective:  # shapes may depend on data, and under tensor parallelism on the rank
            verb, dtype = node.args[1], node.meta["val"].dtype
            out.setdefault(group_of(program, node), []).append(f"{verb} {dtype} over {r.unit} of {program.name}")  # type: ignore[union-attr]
            continue
        if r is None or node.target not in (*ops.OURS, ops.accumulate):
            continue
        unit = program.unit(r.unit)
        path = PATH.format(unit.name) if unit.name in from_arguments else unit.fqn
        line = only_tells("lines of the listing", str(node.target), printer.text, node)
        spec, text = unit.spec, f"{line}  unit '{path}' of {program.name}"
        if node.target is ops.accumulate:
            gradient = only_tells("lines of the listing", "", printer.operand, node.args[2])
            for group in spec.peer_groups:
                out.setdefault(group, []).append(f"{text}  of {gradient}")
            continue
        groups: tuple[str, ...] = (spec.outer_group if GroupIndex(lane_of(node)).outer else spec.group,)
        if node.target in (ops.refresh, ops.refresh_codes, ops.maxima) and spec.persistent:
            everywhere = node.target is ops.maxima or spec.replica
            groups = spec.gather_groups if everywhere else spec.gather_groups[-1:]
        for group in groups:
            out.setdefault(group, []).append(f"{text}  {r.lane.value}  {spec.sizes}")
    return out


def sources(program: Program) -> dict[int, tuple[str, str]]:
    """The arguments that units are gathered from, with the units' names and paths."""
    places = enumerate(program.gm.graph.find_nodes(op="placeholder"))
    found = {i: r.unit for i, n in places if (r := role(n)) is not None and r.kind is Kind.SHARD}
    return {i: (name, program.unit(name).fqn) for i, name in found.items()}


def _static_buffers(program: Program) -> dict[tuple[torch.device, str], int]:
    """Bytes of a program's static buffers, by device and name."""
    slots = ((node.meta["val"].device, slot) for node in program.nodes if (slot := slot_of(node)))
    return {(device, slot): program.slots[slot] for device, slot in slots}


def _user_buffers(program: Program, options: Options) -> UserBuffers:
    """The static buffers that NCCL registers.

    Raises:
        RuntimeError: the option is on, and the model is not on a GPU.
    """
    found = communicated(program) if options.nccl_ub else {}
    for device, _ in found:
        if device.type != "cuda":
            raise RuntimeError(
                f"option nccl_ub=True: the model is on {device}, and NCCL registers memory of GPUs; leave it out"
            )
    return UserBuffers(found, symmetric=not options.disable_symmetric_registration)


def communicated(program: Program) -> dict[tuple[torch.device, str], list[str]]:
    """The groups that static buffers are communicated over, by device and name; none of one rank."""
    found: dict[tuple[torch.device, str], dict[str, None]] = {}
    for node in program.nodes:
        if node.target in (ops.all_gather, ops.reduce_scatter, ops.all_reduce):
            filled = node if node.target is ops.all_gather else base_of(node.args[0])  # type: ignore[arg-type]
            if (slot := slot_of(filled)) and program.spec_of(node).ranks_on(lane_of(node)) > 1:
                found.setdefault((filled.meta["val"].device, slot), {})[group_of(program, node)] = None
    return {key: list(names) for key, names in found.items()}


def _first_launches(program: Program) -> list[First]:
    """What a program launches, of units, before it waits for anything."""
    arguments = {unit: i for i, (unit, _) in sources(program).items()}
    found = []
    for node in first_launches(program):
        shard, *rest = node.args
        text, slot = (*rest, -1)[:2] if rest else ("", -1)
        casts = shard.op != "placeholder"  # type: ignore[union-attr]
        found.append(First(arguments[role(node).unit], text, slot, casts))  # type: ignore[arg-type, union-attr]
    return found
