"""reduce: one reduce-scatter per unit consumes its gradients; its result is added to the accumulator.

Before, every gradient is a marker, and AOTAutograd adds them shard by shard:

    * . .  param_grad             = param_grad mm_1, u1_shard, 0          bf16[132096]
    * . .  param_grad_1           = param_grad sum_1, u1_shard, 1048576   bf16[132096]
    * . .  add                    = add param_grad, param_grad_1          bf16[132096]

After, the unit's gradients are packed after the last one is computed:

    * . .  u1_gfull               = bucket u1                             bf16[1056768]
    * . .                           pack u1_gfull, mm_1, sum_1
    >---*  u1_gshard              = reduce_scatter u1_gfull, sum          bf16[132096]
    <---o                           wait u1_gshard
    * . .                           accumulate u1_grad, u1_gshard, 1/8

Why: one collective per unit. The gradients of a tied parameter's uses are summed before it, once (invariant 8).
Needs: nothing of other passes; it is meant for the programs that `gather` ran in.
Costs: one copy of the unit's gradients into the flat buffer. Parameters without a gradient are packed as zeros
    (invariant 15).

On a two-level mesh a second reduction follows. Between synchronizations a runtime switch skips it, and `hold` keeps the
unreduced gradients. Where gradients stay full between synchronizations (``no_shard``, ``optim``), `hold` precedes the
first reduction.

    >---*                           hold u1_gshard
    >-----*                         all_reduce u1_gshard, sum
    <-----o                         wait u1_gshard

The sum over ranks is divided where it is added to the accumulator: on the shard, in the accumulator's dtype (invariant
17). Where a sum comes back in float16, packing applies a part of the division (`UnitSpec.predivide`). Parameters that
are not sharded have full gradients: one all-reduce per unit in a flat buffer, divided while packing, and returned to
autograd as views of it.
"""

from __future__ import annotations

from functools import reduce as fold

import torch
from torch.fx import Node

from mfsdp.config.reductions import reduction_steps
from mfsdp.config.units import GroupIndex, Unit
from mfsdp.ir import ops
from mfsdp.ir.program import Program, base_of
from mfsdp.ir.roles import Kind, Lane, Role, is_kind

aten = torch.ops.aten


def reduce(p: Program) -> None:
    """Replaces the gradient markers of each unit by pack, reduce-scatter and accumulate."""
    if p.phase != "backward":
        p.note(f"no gradients in {p.phase}")
        return
    reduced = 0
    markers = p.by_unit(Kind.GRAD)
    for unit in p.units:
        if unit in markers:
            _reduce_sharded(p, unit, markers[unit])
            reduced += 1
        elif not unit.sharded and unit.spec.world > 1:
            reduced += _reduce_plain(p, unit)
    p.reduced = True
    if not reduced:
        p.note("no gradient to reduce")


def _reduce_sharded(p: Program, unit: Unit, markers: list[Node]) -> None:
    shard = markers[0].args[1]
    assert isinstance(shard, Node)
    uses, sums = _sum_of_markers(p, unit, set(markers))
    by_offset: dict[int, list[Node]] = {}
    for marker, count in uses.items():
        grad, offset = marker.args[0], marker.args[2]
        assert isinstance(grad, Node) and isinstance(offset, int)
        by_offset.setdefault(offset, []).extend([grad] * count)
    ready = _after(p, [g for grads in by_offset.values() for g in grads])
    offsets = sorted(by_offset)
    role = Role(Kind.GFULL, unit.name)
    grads = [fold(lambda a, b: p.insert(aten.add.Tensor, (a, b), ready, role), by_offset[o]) for o in offsets]
    spec, text = unit.spec, unit.spec.encode()
    total = _bucket(p, unit, shard, grads, offsets, spec.predivide, ready)
    for step, lane in zip(reduction_steps(text), (Lane.REDUCE, Lane.OUTER), strict=False):
        if step.hold:
            p.insert(ops.hold, (shard, total, offsets), ready, Role(Kind.HOLD, unit.name))
        args = (total, text, int(step.index))
        if step.scatters:
            kind = Kind.GOUTER if step.index.outer else Kind.GSHARD
            made = Role(kind, unit.name, lane)
            total = p.launch(ops.reduce_scatter, args, ready, made, f"{unit.name}_{kind.value}")
        else:
            p.launch(ops.all_reduce, args, ready, Role(Kind.ALL_REDUCE, unit.name, lane))
    after = 1 / (spec.divide * spec.predivide)
    p.insert(ops.accumulate, (shard, total, offsets, after), ready, Role(Kind.ACCUMULATE, unit.name))
    p.set_results([None if r in sums else r for r in p.results()])
    for node in sorted(sums, reverse=True):
        p.erase(node)


def _reduce_plain(p: Program, unit: Unit) -> bool:
    results = p.results()
    mine = {
        i: offset for i, (name, offset) in p.gradients.items() if name == unit.name and isinstance(results[i], Node)
    }
    if not mine:
        return False
    ready = _after(p, [results[i] for i in mine])
    role = Role(Kind.GFULL, unit.name)
    order = sorted(mine, key=mine.__getitem__)
    grads = [results[i] for i in order]
    gfull = _bucket(p, unit, grads[0], grads, [mine[i] for i in order], 1 / unit.spec.divide, ready)
    args = (gfull, unit.spec.encode(), int(GroupIndex.SHARD_GATHER))
    p.launch(ops.all_reduce, args, ready, Role(Kind.ALL_REDUCE, unit.name, Lane.REDUCE))
    for i in order:
        value = results[i].meta["val"]
        where = (gfull, list(value.shape), list(torch.empty(value.shape, device="meta").stride()), mine[i])
        results[i] = p.insert(aten.as_strided.default, where, ready, role)
    p.set_results(results)
    return True


def _bucket(
    p: Program, unit: Unit, like: Node, grads: list[Node], offsets: list[int], scale: float, before: Node
) -> Node:
    """Inserts the unit's gradient buffer and the copies of gradients into it."""
    holes, end = [], 0
    for grad, offset in sorted(zip(grads, offsets, strict=True), key=lambda pair: pair[1]):
        if offset > end:
            holes += [end, offset]
        end = offset + grad.meta["val"].numel()
    if end < unit.spec.full_numel:
        holes += [end, unit.spec.full_numel]
    role = Role(Kind.GFULL, unit.name)
    gfull = p.insert(ops.bucket, (like, holes, unit.spec.encode()), before, role, f"{unit.name}_gfull")
    p.insert(ops.pack, (gfull, grads, offsets, scale), before, Role(Kind.PACK, unit.name))
    return gfull


def _after(p: Program, grads: list[Node]) -> Node:
    """Returns the node before which all gradients are computed. Waits for gradients that `collective` reduces move
    there, unless another node reads them earlier.
    """
    waits = sorted({u for g in grads for u in base_of(g).users if u.target is ops.wait})
    ready = max(grads).next
    while ready.op == "placeholder" or ready in waits:
        ready = ready.next
    for wait in waits:
        if _may_move(p, wait, ready):
            p.move([wait], ready)
        elif not wait < ready:
            ready = wait.next
    return ready


def _may_move(p: Program, wait: Node, down: Node) -> bool:
    """Whether, before ``down``, nothing reads the collective's result and nothing frees its inputs."""
    product, sources = wait.args
    assert isinstance(product, Node)
    readers = [r for r in p.readers(product) if r is not wait and not is_kind(r, Kind.GRAD)]
    frees = [u for s in sources for u in base_of(s).users if u.target is ops.free]  # type: ignore[union-attr, arg-type]
    return not any(n < down for n in (*readers, *frees))


def _sum_of_markers(p: Program, unit: Unit, markers: set[Node]) -> tuple[dict[Node, int], set[Node]]:
    """Returns how often each marker counts in the unit's gradient, and the additions between markers and output.

    AOTAutograd adds the gradients of one input with ``aten.add``; no other operator may use them.
    """
    downstream, new = set(markers), list(markers)
    while new:
        users = {u for u in new.pop().users if u.op == "call_function"} - downstream
        downstream |= users
        new.extend(users)
    uses: dict[Node, int] = {}
    sums: set[Node] = set()
    stack = [r for r in p.results() if isinstance(r, Node) and r in downstream]
    while stack:
        node = stack.pop()
        sums.add(node)
        if node in markers:
            uses[node] = uses.get(node, 0) + 1
            continue
        assert node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs, (
            f"{unit.name}: {node.format_node()} stands between a gradient and the output"
        )
        stack.extend(arg for arg in node.args if isinstance(arg, Node))
    assert set(uses) == markers, f"{unit.name}: a gradient does not reach the output"
    return uses, sums
