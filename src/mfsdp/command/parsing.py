"""What the commands' arguments have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def command(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], None]) -> Any:
    """Adds a command; gives what adds an argument to it."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(run=run)
    return parser.add_argument


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name, ``bfloat16``.

    Raises:
        ValueError: weights cannot have it.
    """
    import torch

    from ..spec.config import SHORT

    found = getattr(torch, name, None)
    if found not in SHORT:
        raise ValueError(f"{name!r} is no dtype for weights; choose {', '.join(str(d)[6:] for d in SHORT)}")
    return found  # type: ignore[no-any-return]
