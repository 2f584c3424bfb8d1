"""insert_checks: runtime checks test each unit's weights, results and gradients in some steps.

Before, a NaN spreads from unit to unit, and through gradients to all ranks:

    * . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]
    * . .  relu                   = relu addmm                            bf16[256,1024]
    <-o .                           wait u1_full

After, under ``check_finite``, in forward

    * . .                           probe u0_shard, weights
    * . .                           probe x
    * . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]
    * . .  relu                   = relu addmm                            bf16[256,1024]
    * . .                           probe addmm
    <-o .                           wait u1_full

and in backward, on this rank's gradients and on their sum over ranks:

    * . .                           probe u1_gfull
    >---*  u1_gshard              = reduce_scatter u1_gfull, sum          bf16[132096]
    <---o                           wait u1_gshard
    * . .                           probe u1_gshard
    * . .                           accumulate u1_grad, u1_gshard, 1/8

Why: the first check of a program that fails names the unit, and the rank where it fails holds the bad data
    (`mfsdp.runtime.runtime_checks`). Under ``check_replicas`` the check of weights compares replicas.
Needs: `inplace_wgrad` and `defer`: gradients are complete where they are checked.
Costs: one call per check, which returns at once in all but one of N steps. Checked values live until their check.

Each unit's compute is checked once, at its last result outside of fused kernels (usually a matrix product); earlier
errors show up there. Checks precede other scheduled operations, so that they split no subgraph of compute.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mfsdp.config.units import Unit
from mfsdp.ir import ops
from mfsdp.ir.fp8_patterns import pointwise
from mfsdp.ir.program import GIVEN, INPUT, Program, is_element, mutates
from mfsdp.ir.roles import Kind, Role, role, unit_of


def insert_checks(p: Program, *, finite: bool = False, replicas: bool = False) -> None:
    """Inserts runtime checks, unit by unit.

    Args:
        finite: whether to check for Inf and NaN.
        replicas: whether forward compares weights that several ranks should hold equal.
    """
    if not (finite or replicas):
        p.note("off")
        return
    if replicas and any(unit.spec.any_optional for unit in p.units):
        p.note("replicas are not compared: units may be unused, and ranks may run other programs")
        if not finite:
            return
    sources = {unit_of(n): n for n in p.find(Kind.SHARD)}
    if p.phase != "backward":
        start = p.start()
        for unit in p.units:
            if unit.name in sources:
                _look(p, unit, sources[unit.name], start, sources, "weights")
        for given in _arguments(p) if finite and p.units else ():
            _look(p, p.units[0], given, start, sources, f"argument {given.meta[INPUT]}")
    params, buckets, sums = p.by_unit(Kind.PARAM), p.by_unit(Kind.GFULL), p.by_unit(Kind.ACCUMULATE)
    for unit in p.units if finite else ():
        result = _result(p, params.get(unit, []))
        if result is not None:
            _look(p, unit, result, _next_operation(p, result), sources, "result")
        for gfull in buckets.get(unit, []):
            _look_at_gradients(p, unit, gfull, sources)
        for node in sums.get(unit, []):
            if unit.spec.ranks > 1:
                _look(p, unit, node.args[1], node, sources, "sum")  # type: ignore[arg-type]
    if not p.find(Kind.PROBE):
        p.note("nothing to look at")


def _look(
    p: Program, unit: Unit, value: Node, before: Node, sources: dict[str, Node], what: str, whole: bool = False
) -> None:
    """Inserts a check of ``value``. ``whole``: it is a flat buffer of all the unit's parameters, not of this rank's
    rows.
    """
    slots = [s for s in unit.layout.slots if s.numel] if whole else []
    starts, sizes = [s.offset for s in slots], [s.numel for s in slots]
    names = ",".join(s.name for s in slots)
    args = (value, sources.get(unit.name), starts, sizes, names, what)
    p.insert(ops.probe, args, before, Role(Kind.PROBE, unit.name))


def _arguments(p: Program) -> list[Node]:
    """Returns the floating-point arguments of the model's call."""
    return [n for n in p.graph.find_nodes(op="placeholder") if n.meta.get(GIVEN) == "argument" and _floats(n)]


def _floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1


def _result(p: Program, params: list[Node]) -> Node | None:
    """Returns the last value computed from a unit's parameters, by a kernel of its own if there is one."""
    readers = sorted({u for param in params for u in p.readers(param) if role(u) is None and not mutates(u)})
    computed = [r for reader in readers if (r := _first_of(reader)) is not None]
    return next((r for r in reversed(computed) if not pointwise(r)), computed[-1] if computed else None)


def _first_of(reader: Node) -> Node | None:
    """Returns a node's floating-point result, the first one of several; ``None`` if it is not floating-point."""
    if reader.op == "call_function" and isinstance(reader.meta.get("val"), (tuple, list)):
        firsts = [u for u in reader.users if is_element(u) and u.args[1] == 0]
        return firsts[0] if firsts and _floats(firsts[0]) else None
    return reader if reader.op == "call_function" and _floats(reader) else None


def _next_operation(p: Program, node: Node) -> Node:
    """Returns the first node after ``node`` that splits compute anyway."""
    while node is not p.output:
        node = node.next
        if node.target in ops.SHOWN and node.target not in (ops.pack, ops.mm):
            break
    return node


def _look_at_gradients(p: Program, unit: Unit, gfull: Node, sources: dict[str, Node]) -> None:
    if gfull.target is not ops.bucket:
        return
    readers = p.readers(gfull)
    complete = next(r for r in readers if r.target not in (ops.pack, ops.mm))
    _look(p, unit, gfull, complete, sources, "gradient", whole=True)
    if not unit.sharded:
        wait = next(r for r in readers if r.target is ops.wait)
        _look(p, unit, gfull, wait.next, sources, "sum", whole=True)
