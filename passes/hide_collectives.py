"""hide_collectives: independent compute runs while another parallelism's collective is in flight.

Before, in the backward of experts, autograd computes a weight's gradient before the launch:

    *       mm                     = mm gelu_backward, u1_up_weight        f32[4,8]
    *       mm_1                   = mm gelu_backward.T, wait_tensor       f32[8,8]
    >---*   all_to_all             = all_to_all mm, ep                     f32[4,8]
    <---o                            wait all_to_all
    *       ...

After:

    *       mm                     = mm gelu_backward, u1_up_weight        f32[4,8]
    >---*   all_to_all             = all_to_all mm, ep                     f32[4,8]
    *   |   mm_1                   = mm gelu_backward.T, wait_tensor       f32[8,8]
    <---o                            wait all_to_all
    *       ...

Why: communication overlaps with compute. Values stay bitwise equal.
Needs: `collective`, which creates these launches and waits.
Costs: the inputs of the delayed compute live longer, at most ``most`` bytes of them at each launch.

A launch moves up to the last node that it needs, but not past the previous collective, wait or write. A wait moves down
past nodes that do not depend on it (shared experts), but not past the first read of a unit. Nothing moves past a second
launch, so a unit's reduction is delayed at most by the compute behind one collective. Random operators do not move.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.byte_costs import nbytes, size
from mfsdp.ir.fp8_patterns import random
from mfsdp.ir.program import Program, mutates, operator
from mfsdp.ir.roles import Kind, is_kind, role


def hide_collectives(p: Program, *, most: int | None = None) -> None:
    """Moves launches of other parallelisms' collectives up, and their waits down.

    Args:
        most: bytes that may live longer at each launch, for compute that moves behind it; ``None``: no limit.
    """
    launches = p.calls(ops.collective)
    if not launches:
        p.note("nothing is exchanged here")
        return
    markers = {unit.name: of for unit, of in p.by_unit(Kind.PARAM).items()}
    up = down = held = 0
    for launch in launches:
        passed, left = _passed(launch, most)
        p.move(passed, launch.next)
        wait = next(u for u in launch.users if u.target is ops.wait)
        ahead = _ahead(wait, set(p.aliases(launch)), markers)
        p.move(ahead, wait)
        up, down, held = up + bool(passed), down + bool(ahead), held + bool(left)
    if up or down:
        p.changed(f"{up} launches up, {down} waits down")
    else:
        p.note("nothing to fill them with")
    if held:
        p.note(f"{held} held back by the limit of {size(most or 0)}")


def _passed(launch: Node, most: int | None) -> tuple[list[Node], list[Node]]:
    """Returns the nodes before a launch that may run after it, and those that the limit keeps in place. Searches back
    to the previous collective, wait or write.
    """
    segment: list[Node] = []
    node = launch.prev
    while not _fixed(node):
        segment.append(node)
        node = node.prev
    needed = set(launch.all_input_nodes)
    free: list[Node] = []
    for node in segment:  # backwards
        if node in needed or _random(node):
            needed.update(node.all_input_nodes)
        else:
            free.append(node)
    if most is None:
        return free[::-1], []
    kept = _within(free, launch, most)
    return free[:kept][::-1], free[kept:]


def _within(free: list[Node], launch: Node, most: int) -> int:
    """Returns how many of these nodes, counted back from the launch, may run behind it. A value that only they still
    read lives longer; at most ``most`` bytes may.
    """
    behind, counted = set[Node](), set[Node]()
    longer = 0
    for i, node in enumerate(free):
        behind.add(node)
        for arg in node.all_input_nodes:
            value = arg.meta.get("val")
            ended = all(user in behind or user < launch for user in arg.users) and not is_kind(arg, *_LASTING)
            if ended and arg not in counted and isinstance(value, torch.Tensor):
                counted.add(arg)
                longer += nbytes(value)
        if longer > most:
            return i
    return len(free)


_LASTING = (Kind.PARAM, Kind.SHARD)


def _ahead(wait: Node, bound: set[Node], markers: dict[str, list[Node]]) -> list[Node]:
    """Returns the nodes after a wait, up to the next collective, wait or write, that do not depend on it.

    Args:
        wait: the wait.
        bound: the collective's result and its views; dependent nodes are added.
        markers: parameter markers by unit.
    """
    found: list[Node] = []
    node = wait.next
    while not _fixed(node):
        r = role(node)
        unread = r is not None and r.kind is Kind.PARAM and not any(m < wait for m in markers[r.unit])
        if unread or _random(node) or not bound.isdisjoint(node.all_input_nodes):
            bound.add(node)
        else:
            found.append(node)
        node = node.next
    return found


def _fixed(node: Node) -> bool:
    """Whether no node may move past this one: collectives and waits, torch's own too, and writes."""
    ours = node.target in (ops.collective, ops.wait) or getattr(node.target, "namespace", "") == "_c10d_functional"
    return node.op != "call_function" or ours or bool(mutates(node))


def _random(node: Node) -> bool:
    return random(node) or operator(node)[0] is not node.target
