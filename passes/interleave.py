"""interleave: microbatches that are in one program take turns at their units, and at what they exchange.

Before, as a function that calls a model twice has been traced, one microbatch runs behind the other:

    *       mm                     = mm a, u0_weight.T                     f32[4,8]
    *       all_to_all_single      = all_to_all mm, ep                     f32[4,8]
    *       wait_tensor            = wait_tensor all_to_all_single         f32[4,8]
    *       mm_1                   = mm wait_tensor, u1_weight.T           f32[4,8]
    *       mm_2                   = mm b, u0_weight.T                     f32[4,8]
    *       all_to_all_single_1    = all_to_all mm_2, ep                   f32[4,8]
    *       ...

After, each exchange has the other microbatch's compute between its launch and its wait, which `collective` makes of it:

    *       mm                     = mm a, u0_weight.T                     f32[4,8]
    >---*   all_to_all_single      = all_to_all mm, ep                     f32[4,8]
    *   |   mm_2                   = mm b, u0_weight.T                     f32[4,8]
    >---*   all_to_all_single_1    = all_to_all mm_2, ep                   f32[4,8]
    <---o                            wait all_to_all_single
    *   |   mm_1                   = mm wait_tensor, u1_weight.T           f32[4,8]

Why: the link works for one microbatch while the other computes; and since all of them read a unit where one does, there
    is one gather and one reduction per unit for all.
Needs: nothing; before `collective`, which puts waits in front of readers, and `gather`, which merges a unit's markers.
Costs: the activations of all microbatches live at once.

Nodes are sorted by (the last unit, the number of waits for other parallelisms) on any way to them, and stay in their
order otherwise. Both numbers grow along every way, so the result is an order of the same graph; which microbatch a node
is of, nobody has to know. A node that no way leads to (masks, what backward computes again from what forward saved)
goes to its first reader's turn, and so does the end of a unit that is read in the next one without a wait in between:
the sum that a residual stream goes on with, what comes back from experts, a weight's gradient.
"""

from __future__ import annotations

from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.program import Program, is_functional_collective, mutates, view_of
from mfsdp.ir.roles import Kind, is_kind, role

Level = tuple[int, int]
"""Units and waits on the longest ways to a node."""


def interleave(p: Program) -> None:
    """Sorts a program's nodes, so that independent chains of it take turns."""
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
    """The level of every node that may move: all but arguments, and writes to them behind everything else."""
    place = {unit: i for i, unit in enumerate(_units(p), 1)}
    levels: dict[Node, Level] = {}
    loose: set[Node] = set()
    """What depends on the program's arguments alone."""
    weights: set[Node] = set()
    """Parameters, and what depends on them alone."""
    for node in p.nodes:
        if node.op != "call_function" or mutates(node):
            continue
        computed = [arg for arg in node.all_input_nodes if arg in levels]
        unit, waits = (max((levels[arg][i] for arg in computed), default=0) for i in (0, 1))
        if is_kind(node, Kind.PARAM, Kind.GRAD):
            unit = max(unit, place.get(role(node).unit, 0))  # type: ignore[union-attr]
        if node.target is ops.param or (computed and weights.issuperset(node.all_input_nodes)):
            weights.add(node)
        elif loose.issuperset(computed) and not is_functional_collective(node):
            loose.add(node)
        levels[node] = unit, waits + any(map(is_functional_collective, computed))
    kept: dict[Node, None] = {}
    """Views that are results."""
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
    """Units in the order in which they are read."""
    return list(dict.fromkeys(role(n).unit for n in p.find(Kind.PARAM)))  # type: ignore[union-attr]
