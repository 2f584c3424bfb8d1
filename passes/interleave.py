"""interleave: the microbatches of one program alternate at units and at collectives.

Before, as traced from a function that calls the model twice, one microbatch runs after the other:

    *       mm                     = mm a, u0_weight.T                     f32[4,8]
    *       all_to_all_single      = all_to_all mm, ep                     f32[4,8]
    *       wait_tensor            = wait_tensor all_to_all_single         f32[4,8]
    *       mm_1                   = mm wait_tensor, u1_weight.T           f32[4,8]
    *       mm_2                   = mm b, u0_weight.T                     f32[4,8]
    *       all_to_all_single_1    = all_to_all mm_2, ep                   f32[4,8]
    *       ...

After, and after `collective`, each collective has the other microbatch's compute between its launch and its wait:

    *       mm                     = mm a, u0_weight.T                     f32[4,8]
    >---*   all_to_all_single      = all_to_all mm, ep                     f32[4,8]
    *   |   mm_2                   = mm b, u0_weight.T                     f32[4,8]
    >---*   all_to_all_single_1    = all_to_all mm_2, ep                   f32[4,8]
    <---o                            wait all_to_all_single
    *   |   mm_1                   = mm wait_tensor, u1_weight.T           f32[4,8]

Why: communication of one microbatch overlaps with compute of the other. All microbatches read a unit at the same time,
    so each unit has one gather and one reduction.
Needs: nothing; it runs before `collective`, which puts waits before readers, and `gather`, which merges a unit's
    markers.
Costs: the activations of all microbatches live at once.

A stable sort orders nodes by (the last unit, the number of waits for other parallelisms) on any path to them. Neither
number decreases along a path, so the result is a topological order; microbatches need not be identified. A node that no
path leads to (masks, recomputed activations) takes the turn of its first reader. So does the last value of a unit that
the next unit reads without a wait in between: a residual sum, the output of experts, a weight's gradient.
"""

from __future__ import annotations

from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.program import Program, is_functional_collective, mutates, view_of
from mfsdp.ir.roles import Kind, is_kind, unit_of

Level = tuple[int, int]
"""Index of the last unit, and number of waits, on any path to a node."""


def interleave(p: Program) -> None:
    """Sorts a program's nodes so that independent chains alternate."""
    levels = _levels(p)
    body = [n for n in p.nodes if n in levels]
    order = sorted(body, key=levels.__getitem__)
    if order == body:
        p.note("nothing to take turns")
        return
    p.move(order, next((n for n in p.nodes if n.op == "call_function" and n not in levels), p.output))
    for node in p.find(Kind.RELOAD):
        wait = next(u for u in node.users if u.target is ops.wait)
        p.move([wait], min(r for r in p.readers(node) if r is not wait))
    p.changed(f"{len(set(levels.values()))} turns")


def _levels(p: Program) -> dict[Node, Level]:
    """Returns the level of every node that may move: all except placeholders, writes and the output."""
    place = {unit: i for i, unit in enumerate(_units(p), 1)}
    levels: dict[Node, Level] = {}
    loose: set[Node] = set()
    """Nodes that depend only on the program's arguments."""
    weights: set[Node] = set()
    """Parameters, and nodes that depend only on them."""
    for node in p.nodes:
        if node.op != "call_function" or mutates(node):
            continue
        computed = [arg for arg in node.all_input_nodes if arg in levels]
        unit, waits = (max((levels[arg][i] for arg in computed), default=0) for i in (0, 1))
        if is_kind(node, Kind.PARAM, Kind.GRAD):
            unit = max(unit, place.get(unit_of(node), 0))
        if node.target is ops.param or (computed and weights.issuperset(node.all_input_nodes)):
            weights.add(node)
        elif loose.issuperset(computed) and not is_functional_collective(node):
            loose.add(node)
        levels[node] = unit, waits + any(map(is_functional_collective, computed))
    kept: dict[Node, None] = {}
    """Views that are outputs of the program."""
    for node in reversed(levels):
        readers = [levels[user] for user in node.users if user in levels and user not in kept]
        if not readers and view_of(node) in levels:
            kept[node] = None
        first = min(readers, default=levels[node])
        bound = is_functional_collective(node) or not weights.isdisjoint(node.all_input_nodes)
        if node in loose or (first[1] == levels[node][1] and not bound):
            levels[node] = first
    for node in reversed(kept):
        levels[node] = max(levels[arg] for arg in node.all_input_nodes if arg in levels)
    return levels


def _units(p: Program) -> list[str]:
    """Returns the names of units in the order in which they are read."""
    return list(dict.fromkeys(map(unit_of, p.find(Kind.PARAM))))
