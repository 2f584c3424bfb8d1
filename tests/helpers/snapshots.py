"""The state of a model that a refused call must leave as it was."""

from __future__ import annotations

from torch import nn


def snapshot(model: nn.Module) -> list[tuple[str, type, dict[str, int]]]:
    """Classes, and who every parameter is: what must be as it was after an error."""
    return [
        (fqn, type(m), {n: id(p) for n, p in m._parameters.items()}, sorted(m.__dict__))  # type: ignore[misc]
        for fqn, m in model.named_modules()
    ]
