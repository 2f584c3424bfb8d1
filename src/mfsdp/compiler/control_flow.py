"""Moves parameter reads out of the branches of ``torch.cond`` and the bodies of ``while_loop``.

Ranks may take different branches or iterate a different number of times, but must run the same collectives. So the
markers of parameters (`ir.ops.param`) leave the subgraphs that Dynamo has traced, and return as operands: all ranks
gather what any branch reads, and autograd supplies zeros for a branch that was not taken.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ir import ops

_CONTROL = (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop)
"""Operators whose last argument is a tuple of operands, which are the last inputs of their subgraphs, in order. Private
in torch (how Dynamo writes them); tried on 2.13.
"""


def hoist_parameters(gm: fx.GraphModule) -> None:
    """Moves markers out of the subgraphs of Dynamo's graph, in place."""
    for node in list(gm.graph.nodes):
        if node.target in _CONTROL:
            _hoist_from(gm, node)


def _hoist_from(gm: fx.GraphModule, node: fx.Node) -> None:
    bodies = [getattr(gm, str(a.target)) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    operands: list[fx.Node] = list(node.args[-1])  # type: ignore[arg-type]
    inputs: list[list[fx.Node]] = []
    """By body: its placeholders for the operands."""
    for body in bodies:
        hoist_parameters(body)
        placeholders = body.graph.find_nodes(op="placeholder")
        inputs.append(placeholders[len(placeholders) - len(operands) :])
    sources = [i for i in range(len(operands)) if any(_markers(own[i]) for own in inputs)]
    for i in sources:
        for marker in [m for own in inputs for m in _markers(own[i])]:
            with gm.graph.inserting_before(node):
                read = gm.graph.call_function(ops.param, (operands[i], *marker.args[1:]), marker.kwargs)
            read.meta = dict(marker.meta)
            operands.append(read)
            for body, own in zip(bodies, inputs, strict=True):
                with body.graph.inserting_after(own[-1]):
                    own.append(body.graph.placeholder(f"read_{len(operands)}"))
                own[-1].meta = dict(marker.meta)
                if marker.graph is body.graph:
                    marker.replace_all_uses_with(own[-1])
                    body.graph.erase_node(marker)
    for i in reversed(sources):
        if not any(own[i].users for own in inputs):  # otherwise autograd would produce a gradient for the source itself
            operands.pop(i)
            for body, own in zip(bodies, inputs, strict=True):
                body.graph.erase_node(own.pop(i))
    if sources:
        node.args = (*node.args[:-1], tuple(operands))
        for graph in (gm, *bodies):
            graph.recompile()


def _markers(source: fx.Node) -> list[fx.Node]:
    return [n for n in source.users if n.target in (ops.param, torch.ops.mfsdp.param)]
