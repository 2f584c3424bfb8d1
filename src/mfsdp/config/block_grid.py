"""Maps elements of a parameter to elements of a smaller tensor: blocks and their scales.

An index into a flattened parameter is written in digits, ``index // stride % size``. A view splits digits, a
permutation moves them, a maximum over a dimension drops some. Scales for blocks of 128 rows and 128 columns of a
``[512, 256]`` matrix have two of four digits:

    stride     32768   256   128     1
    size           4   128     2   128
    place          2     0     1     0        element [i // 128, j // 128] of a contiguous [4, 2]
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod


@dataclass(frozen=True, order=True)
class Digit:
    """One digit of an index into a flattened parameter."""

    stride: int
    size: int
    place: int = 0
    """Its stride in the smaller tensor's flat index; 0: all its values share one element."""


@dataclass(frozen=True)
class Grid:
    """Which elements of one parameter share an element of a smaller tensor. The graph holds it as text."""

    offset: int
    """Start of the parameter in its unit's full buffer."""
    digits: tuple[Digit, ...]
    """All digits, by decreasing stride."""

    @cached_property
    def numel(self) -> int:
        """Elements of the smaller tensor."""
        return prod(d.size for d in self.digits if d.place)


def encode(grids: tuple[Grid, ...]) -> str:
    """Returns several grids as text."""
    return repr([(g.offset, [(d.stride, d.size, d.place) for d in g.digits]) for g in grids])


@cache
def decode(text: str) -> tuple[Grid, ...]:
    """The inverse of `encode`; no grids for ``""``."""
    return tuple(
        Grid(offset, tuple(Digit(*digit) for digit in digits)) for offset, digits in literal_eval(text or "()")
    )
