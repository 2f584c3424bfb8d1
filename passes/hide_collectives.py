"""hide_collectives: what an exchange does not need, and what does not need it, runs while it travels.

Before, in the backward of experts, a weight's gradient is computed in front of the launch, as autograd wrote it:

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

Why: the link works while compute does. Values stay bitwise equal.
Needs: `collective`, whose launches and waits these are.
Costs: what weights' gradients are computed from lives a little longer, at most ``most`` bytes of it at each launch.

A launch goes up to behind the last thing that it needs since the wait before it: what it passes fills it. A wait goes
down over what does not hang on it (experts that all tokens share) and reads no unit that has not been read by then.
Nothing passes a second launch, so a unit's reduction is later by what fills one exchange, at most. Operators that draw
random numbers stay.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.byte_costs import nbytes, size
from mfsdp.ir.program import Program, mutates, operator
from mfsdp.ir.roles import Kind, is_kind, role


def hide_collectives(p: Program, *, most: int | None = None) -> None:
    """Moves launches of other parallelisms' collectives up, and their waits down.

    Args:
        most: bytes that may live longer at each launch, for what is computed behind it.
    """
    launches = [n for n in p.nodes if n.target is ops.collective]
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
    """What a launch need not wait for, since what is exchanged or waited for before it; and what the limit keeps."""
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
    """How many of these, from the last one back, may run behind a launch: what they read, and nobody reads later, lives
    longer.
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
    """What comes behind a wait, up to the next thing that is exchanged or waited for, and does not hang on it.

    Args:
        wait: the wait.
        bound: what is waited for, and views of it; what hangs on that joins it.
        markers: of each unit.
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
    """What nothing passes: what is exchanged or waited for, also by torch itself, and what is written."""
    ours = node.target in (ops.collective, ops.wait) or getattr(node.target, "namespace", "") == "_c10d_functional"
    return node.op != "call_function" or ours or bool(mutates(node))


def _random(node: Node) -> bool:
    target = operator(node)[0]
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or target is not node.target
