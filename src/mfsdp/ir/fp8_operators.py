"""Operators of other libraries that cast a weight to FP8 inside: writes the cast into the graph, where `fp8_patterns`
finds it. What such an operator does is known to the package's adapter for its library, which registers it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from .program import Program, operator_name

Rewrite = Callable[[], None]

CASTS: dict[str, Callable[[Program, Node, Node], Rewrite | str]] = {}
"""By an operator's name: returns, for one of its nodes and a parameter's marker that the node reads, what writes the
cast into the graph; or why that cannot be done, ``""`` if it does not cast."""


def write_casts(p: Program, markers: Sequence[Node]) -> str:
    """Writes the casts of all readers of a unit's parameters into the graph, if every reader casts inside and its cast
    can be written. Otherwise changes nothing.

    Returns:
        Why a reader that casts inside keeps its cast; ``""`` otherwise.
    """
    rewrites: list[Rewrite] = []
    for marker in markers:
        for reader in p.readers(marker):
            known = CASTS.get(operator_name(reader.target))
            if known is None:
                return ""
            found = known(p, reader, marker)
            if isinstance(found, str):
                return found
            rewrites.append(found)
    for rewrite in rewrites:
        rewrite()
    return ""
