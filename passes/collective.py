"""collective: collectives of other parallelisms become launches and waits of mfsdp.

Before, as DTensor (tensor parallelism) or the model wrote them:

    *       sum_3                  = sum mul_7, [0, 1]                     f32[256]
    *       all_reduce             = all_reduce sum_3, 'sum', '7'          f32[256]
    *       wait_tensor            = wait_tensor all_reduce                f32[256]
    *       ...

After:

    *       sum_3                  = sum mul_7, [0, 1]                     f32[256]
    >---*   all_reduce             = all_reduce sum_3, tp                  f32[256]
    *   |   ...
    <---o                            wait all_reduce

Why: the listing and the cost model show their bytes and exposed time. Their inputs stay alive until the wait. Desync
    detection covers them. The wait moves from behind the launch to the first reader.
Needs: nothing; it runs before `reshard`, which frees a gathered buffer after its last reader, and that may be a wait.
Costs: the input of a collective lives until its wait.

All-to-alls (expert parallelism) have a lane of their own; tensor and context parallelism share the other lane.
Collectives that only torch implements (``shard_dim_alltoall``, other reduce operations) stay unchanged: they launch and
wait at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from mfsdp.config.units import Axis
from mfsdp.ir import ops
from mfsdp.ir.program import AXIS, SHAPES, Program, base_of, is_functional_collective, mutates, operator_name
from mfsdp.ir.roles import Kind, Lane, Role

functional = torch.ops._c10d_functional
REDUCTIONS = ("sum", "avg", "max", "min")


def collective(p: Program) -> None:
    """Replaces functional collectives and their waits by launches and waits of mfsdp."""
    found = left = 0
    for node in p.nodes:
        if AXIS not in node.meta:
            left += is_functional_collective(node)
            continue
        waits = [u for u in node.users if u.target is functional.wait_tensor.default]
        words, known = _verb(node), all(u in waits or u.target in SHAPES for u in node.users)
        if words is None or not known or not waits:
            left += 1
            continue
        axis: Axis = node.meta[AXIS]
        lane = Lane.ALL_TO_ALL if words == "all_to_all" else Lane.TENSOR
        received, splits = _splits(node) if lane is Lane.ALL_TO_ALL else ([], [])
        source = node.args[0]
        role = Role(Kind.COLLECTIVE, axis.name, lane)
        args = (source, words, axis.encode(), received, splits)
        launch = p.insert(ops.collective, args, node, role, name=words.partition(" ")[0])
        for wait in waits:
            wait.replace_all_uses_with(launch)
            p.erase(wait)
        node.replace_all_uses_with(launch)
        p.erase(node)
        owner = base_of(source)  # type: ignore[arg-type]
        writers = [w for w in p.readers(owner) if launch < w and owner in map(base_of, mutates(w))]
        first = min([*p.readers(launch), *writers], default=p.output)
        p.insert(ops.wait, (launch, [source]), first, Role(Kind.WAIT, axis.name, lane))
        found += 1
    if left:
        p.note(f"{left} left to torch")
    if not found and not left:
        p.note("none but ours")


def _verb(node: Node) -> str | None:
    """Returns the collective's name, with its reduce operation if it has one; ``None`` if mfsdp does not support it."""
    name = operator_name(node.target).partition("::")[2]
    if name in ("all_reduce", "reduce_scatter_tensor"):
        op = str(node.args[1]).lower()
        verb = name.removesuffix("_tensor")
        known = op in REDUCTIONS if verb == "all_reduce" else op in ("sum", "avg")
        averages = node.meta["val"].dtype in (torch.float32, torch.float64, torch.bfloat16)  # a sum, then a division
        return f"{verb} {op}" if known and (op != "avg" or averages) else None
    return {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}.get(name)


def _splits(node: Node) -> tuple[list[Any], list[Any]]:
    """Returns the rows received from each rank, and the rows sent to each rank."""
    return list(node.args[1]), list(node.args[2])  # type: ignore[arg-type]
