"""Shared helpers for the commands' arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def command(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], None]) -> Any:
    """Adds a command. Returns the function that adds arguments to it."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(run=run)
    return parser.add_argument


def writable(flag: str, path: str | None) -> None:
    """Checks an output path before minutes of work.

    Raises:
        ValueError: the path is a folder, or its folder does not exist.
    """
    if path is None:
        return
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{flag} {path}: is a folder; give a file in it")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {file.parent}")


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name such as ``bfloat16``.

    Raises:
        ValueError: it is no dtype for weights.
    """
    import torch

    from ..config.options import SHORT

    found = getattr(torch, name, None)
    if found not in SHORT:
        raise ValueError(f"{name!r} is no dtype for weights; choose {', '.join(str(d)[6:] for d in SHORT)}")
    return found  # type: ignore[no-any-return]
