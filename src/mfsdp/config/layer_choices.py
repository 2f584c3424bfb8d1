"""What a plan chooses for a model's layers, by kind: gathered, recomputed, offloaded. Plain values, no torch.

A kind is a sequence of equal layers in forward order. Each choice gives a number of layers, so a few numbers suffice
for a model of any depth:

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
    """The choices for the layers of one kind."""

    name: str
    """Name of their class."""
    layers: tuple[str, ...]
    """Their paths, in forward order."""
    gathered: int = 0
    """The last ``gathered`` layers stay gathered from forward to backward."""
    recomputed: int = 0
    """The first ``recomputed`` layers are recomputed in backward."""
    saved: tuple[str, ...] = ()
    """Operators whose results recomputed layers save all the same, by module path in the layer (``attn.q_proj``)."""
    offloaded: tuple[int, int] = (1, 0)
    """``(n, first)``: every n-th of the first ``first`` layers saves activations on the host and is not recomputed."""

    def __str__(self) -> str:
        """Returns a description; ``""`` if nothing is chosen."""
        n, (every, first) = len(self.layers), self.offloaded
        parts = [f"last {self.gathered} gathered"] if self.gathered else []
        if first:
            parts.append(f"1 in {every} of the first {first} offloaded" if every > 1 else f"first {first} offloaded")
        parts += [f"first {self.recomputed} recomputed"] if self.recomputed else []
        parts += [f"saving {' '.join(self.saved)}"] if self.recomputed and self.saved else []
        return f"{n} x {self.name}: {', '.join(parts)}" if parts else ""

    def gathers(self, number: int) -> bool:
        """Whether layer ``number`` stays gathered."""
        return number >= len(self.layers) - self.gathered

    def offloads(self, number: int) -> bool:
        """Whether layer ``number`` saves activations on the host."""
        every, first = self.offloaded
        return number < first and number % every == 0

    def recomputes(self, number: int) -> bool:
        """Whether layer ``number`` is recomputed in backward."""
        return number < self.recomputed and not self.offloads(number)


Choices = tuple[Choice, ...]


def numbered(choices: Choices) -> Iterator[tuple[str, Choice, int]]:
    """Yields every layer's path, the choice for its kind, and its number in the kind."""
    for choice in choices:
        for number, path in enumerate(choice.layers):
            yield path, choice, number
