"""Merges a backward and a concurrent forward into one program: what `mfsdp.overlapped` runs
(Note [Interleaved programs]).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from torch import fx
from torch.fx import Node

from . import ops
from .program import Program, slot_of
from .roles import Kind, is_kind, role


def merge(backward: Program, forward: Program) -> tuple[Program, dict[Node, Node]]:
    """Merges two programs that take turns: the backward up to its first wait for another parallelism's collective, the
    forward up to its first, and so on. Each keeps its order. The backward's values get the prefix ``b_``; its static
    buffers are numbered after the forward's.

    Args:
        backward, forward: of one frame, after all passes.

    Returns:
        a program of phase ``"overlapped"``: arguments and results of the backward, then of the forward; one argument
        per unit's shard; and each new node's original.
    """
    graph = fx.Graph()
    moved: dict[Node, Node] = {}
    sources: dict[str, Node] = {}
    for p in (backward, forward):
        for node in p.graph.find_nodes(op="placeholder"):
            r = role(node)
            if r is None or r.kind is not Kind.SHARD:
                moved[node] = _copied(graph, node, moved, node.name if p is forward else f"b_{node.name}")
                continue
            if r.unit not in sources:
                sources[r.unit] = _copied(graph, node, moved, node.name)
            moved[node] = sources[r.unit]
    behind = {letter: sum(slot.startswith(letter) for slot in forward.slots) for letter in "pg"}
    for theirs, ours in zip_longest(_segments(backward), _segments(forward), fillvalue=()):
        for node in theirs:
            moved[node] = _copied(graph, node, moved, f"b_{node.name}")
            if slot := slot_of(node):
                place = ops.SLOT[node.target]  # type: ignore[index]
                moved[node].update_arg(place, int(slot[1:]) + behind[slot[0]])
        for node in ours:
            moved[node] = _copied(graph, node, moved, node.name)
    results = [*backward.results(), *forward.results()]
    graph.output(tuple(moved[r] if isinstance(r, Node) else r for r in results))
    read = [(p.gm, node) for p in (backward, forward) for node in p.graph.find_nodes(op="get_attr")]
    constants: dict[str, Any] = {str(moved[node].target): getattr(gm, str(node.target)) for gm, node in read}
    gm = fx.GraphModule(constants, graph)
    units = [*forward.units, *(u for u in backward.units if u.name not in {v.name for v in forward.units})]
    out = Program(gm, "overlapped", units, forward.name)
    out.gradients, out.trained, out.reduced = dict(backward.gradients), dict(backward.trained), backward.reduced
    out.slots = dict(forward.slots)
    for slot, size in backward.slots.items():
        out.slots[f"{slot[0]}{int(slot[1:]) + behind[slot[0]]}"] = size
    return out, {copy: node for node, copy in moved.items()}


def _segments(p: Program) -> Iterator[list[Node]]:
    """A program's lines, split before waits for other parallelisms' collectives."""
    segment: list[Node] = []
    for node in p.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is ops.wait and is_kind(node.args[0], Kind.COLLECTIVE):  # type: ignore[arg-type]
            yield segment
            segment = []
        segment.append(node)
    yield segment


def _copied(graph: fx.Graph, node: Node, moved: dict[Node, Node], name: str) -> Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), moved.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    if node.op in ("placeholder", "get_attr"):
        copy.target = copy.name
    copy.meta = dict(node.meta)
    return copy
