"""Operators of other libraries that cast a weight to FP8 inside: writes the cast into the graph, where `fp8_patterns`
finds it. What such an operator does is known to the package's adapter for its library, which registers it here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from .program import Program, operator_name


@dataclass(frozen=True)
class InnerCast:
    """The cast of a weight inside of an operator."""

    recipe: Hashable
    """Equal for casts that are computed alike."""
    refusal: Callable[[], str]
    """Returns why it must stay inside, ``""`` if it can be written; may compute, and all ranks get the same answer."""
    write: Callable[[], None]
    """Writes it into the graph, before the operator."""


CASTS: dict[str, Callable[[Program, Node, Node], InnerCast | str]] = {}
"""By an operator's name: returns the cast for one of its nodes and a parameter's marker that the node reads; or why it
is not known, ``""`` if the node does not cast.
"""


def write_casts(p: Program, markers: Sequence[Node]) -> str:
    """Writes the casts of a unit's parameters into the graph, if all of their readers cast inside, alike, and the casts
    can be written. Otherwise changes nothing.

    Returns:
        Why casts stay inside of operators; ``""`` if they do not, or no reader casts.
    """
    inside: list[tuple[Node, InnerCast]] = []
    others: list[Node] = []
    for marker in markers:
        for reader in p.readers(marker):
            look = CASTS.get(operator_name(reader.target))
            found = look(p, reader, marker) if look is not None else ""
            if isinstance(found, InnerCast):
                inside.append((marker, found))
            elif found:
                return found
            else:
                others.append(marker)
    if not inside:
        return ""
    cast = {marker.args[1]: marker for marker, _ in inside}  # by offset: a parameter may have several markers
    if both := [cast[other.args[1]] for other in others if other.args[1] in cast]:
        return f"{both[0].name} is read by operators that cast it inside, and by others"
    if others:
        return (
            f"an operator casts a weight inside, and {others[0].name} of its buffer is read otherwise: set "
            'quantized_parameters = ("weight",) on the weight\'s module'
        )
    casts = [each for _, each in inside]
    if len({each.recipe for each in casts}) > 1:
        return "operators cast weights of its buffer in different ways"
    why = casts[0].refusal()
    if not why:
        for each in casts:
            each.write()
    return why
