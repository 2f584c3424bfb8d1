"""Finds saved activations as large as a parameter, computed from one.

They undo the saving of sharding in every layer: a quantized copy that an operator keeps for backward, a weight divided
by a norm in a buffer. Backward recomputes what depends on parameters alone (`joint_graph.recompute_parameters`; checked
as invariant 47). The rest is reported.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Node

from .byte_costs import nbytes, size
from .program import GIVEN, Program, base_of, is_element, operator, operator_name, storage_of
from .roles import Kind, is_kind
from .symbolic_sizes import shape_of

ALONE = "from parameters"
"""How a copy that depends on parameters alone was computed."""

_TRANSPARENT = {"", "aten", "prims", "mfsdp", "_c10d_functional", "_c10d_functional_autograd"}
"""Namespaces of operators that save exactly what the graph shows."""


def copies(p: Program) -> list[tuple[Node, str]]:
    """Values that forward saves of parameters that backward gathers again, and how they were computed: ``"from
    parameters"`` alone; ``"from parameters and buffers or random numbers"``, as many elements as a parameter has; or
    ``"by my::operator"``, not torch's own, which reads a parameter and returns something of its shape.
    """
    if p.returned is None:
        return []
    behind: dict[Node, frozenset[Node]] = {}
    """Values that depend on no argument of the call, with the parameters that they depend on."""
    alone: set[Node] = set()
    opaque: dict[Node, frozenset[Node]] = {}
    for node in p.nodes:
        sources = node.all_input_nodes
        if _gathered(p, node):
            behind[node] = frozenset([node])
            alone.add(node)
        elif node.op == "get_attr" or node.meta.get(GIVEN) == "buffer":
            behind[node] = frozenset()
        elif node.op == "call_function":
            known = [behind[n] for n in sources if n in behind]
            if len(known) == len(sources):
                behind[node] = known[0].union(*known[1:]) if known else frozenset()
                if known and alone.issuperset(sources) and not _draws(node):
                    alone.add(node)
            elif any(known) and _opaque(node) and not is_element(node):
                opaque[node] = frozenset[Node]().union(*known)
    found = []
    for node in dict.fromkeys(p.results()[p.returned :]):
        if not isinstance(node, Node) or _gathered(p, base_of(node)):
            continue
        maker: Any = storage_of(node)
        maker = maker.args[0] if is_element(maker) else maker
        if node in alone:
            found.append((node, ALONE))
        elif any(_numel(node) == _numel(n) for n in behind.get(node, ())):
            found.append((node, f"{ALONE} and buffers or random numbers"))
        elif any(sorted(_shape(node)) == sorted(_shape(n)) for n in opaque.get(maker, ()) if len(_shape(n)) > 1):
            found.append((node, f"by {operator_name(operator(maker)[0])}"))
    return found


def _gathered(p: Program, node: Node) -> bool:
    """Whether it is a parameter or several, freed between forward and backward."""
    if not is_kind(node, Kind.PARAM, Kind.FULL):
        return False
    spec = p.spec_of(node)
    return spec.reshard and spec.gathers


def _opaque(node: Node) -> bool:
    """Whether the graph may not show all that an operator saves."""
    return operator_name(operator(node)[0]).partition("::")[0] not in _TRANSPARENT


def _draws(node: Node) -> bool:
    """Whether AOTAutograd's RNG wrapper calls it: without the saved RNG state a recomputation may differ."""
    return operator(node)[0] is not node.target


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(shape_of(value)) if isinstance(value, torch.Tensor) else ()


def _numel(node: Node) -> int:
    return prod(_shape(node))


def told(p: Program) -> str:
    """Describes the copies as text; ``""`` if there are none."""
    found = copies(p)
    whole, by = sum(nbytes(node.meta["val"]) for node, _ in found), dict.fromkeys(how for _, how in found)
    return f"forward saves {size(whole)} of parameters' shapes, computed {', '.join(by)}" if found else ""
