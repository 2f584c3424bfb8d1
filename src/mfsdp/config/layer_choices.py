"""What becomes of the layers of a model, kind by kind: kept gathered, computed again, on the host. Plain values, no
torch.

A kind is a run of equal layers, in the order in which forward runs them. Each choice says of how many, so that a model
of any depth has a few numbers:

    layer      0   1   2   3   4   5   6   7
    offloaded  x       x       x                 every 2nd of the first 5
    recomputed     x       x       x             first 6, but for those
    gathered                           x   x     last 2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """What becomes of the layers of one kind."""

    name: str
    """Of their class."""
    layers: tuple[str, ...]
    """Their paths, in the order in which forward runs them."""
    gathered: int = 0
    """The last so many stay gathered from forward to backward."""
    recomputed: int = 0
    """The first so many are computed again in backward."""
    saved: tuple[str, ...] = ()
    """What those save all the same: operators, by the path of their module in the layer (``attn.q_proj``)."""
    offloaded: tuple[int, int] = (1, 0)
    """Of every so many among the first so many, what forward saves goes to the host; those are not recomputed."""

    def __str__(self) -> str:
        """In words; ``""`` if nothing is chosen."""
        n, (every, first) = len(self.layers), self.offloaded
        parts = [f"last {self.gathered} gathered"] if self.gathered else []
        if first:
            parts.append(f"every {every}. of the first {first} offloaded" if every > 1 else f"first {first} offloaded")
        parts += [f"first {self.recomputed} recomputed"] if self.recomputed else []
        parts += [f"saving {' '.join(self.saved)}"] if self.recomputed and self.saved else []
        return f"{n} x {self.name}: {', '.join(parts)}" if parts else ""

    def gathers(self, number: int) -> bool:
        """Whether the layer of that number stays gathered."""
        return number >= len(self.layers) - self.gathered

    def offloads(self, number: int) -> bool:
        """Whether what forward saves of the layer goes to the host."""
        every, first = self.offloaded
        return number < first and number % every == 0

    def recomputes(self, number: int) -> bool:
        """Whether the layer is computed again in backward."""
        return number < self.recomputed and not self.offloads(number)


Choices = tuple[Choice, ...]


def numbered(choices: Choices) -> Iterator[tuple[str, Choice, int]]:
    """Every layer's path, what is chosen for its kind, and its number in it."""
    for choice in choices:
        for number, path in enumerate(choice.layers):
            yield path, choice, number
