"""Shared helpers for the commands' arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

Add = Callable[..., argparse.Action]
"""Adds an argument to a command."""


def command(commands: Commands, name: str, text: str, run: Callable[[argparse.Namespace], None]) -> Add:
    """Adds a command. Returns the function that adds arguments to it."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(run=run)
    return parser.add_argument


def add_model_options(add: Add) -> None:
    """Adds the arguments for a model's inputs and for how it is sharded."""
    add("--units", help="classes or name patterns, joined by +; auto (default for Hugging Face models: their layers)")
    add("--compute-dtype", default="bfloat16", help="(default: bfloat16; 'none': the model's own)")
    add("--batch", type=int, default=1, help="sequences per rank (default: 1)")
    add("--length", type=int, default=4096, help="tokens per sequence (default: 4096)")


def units_of(text: str) -> str | list[str]:
    """Returns the argument ``units`` of `mfsdp.fully_shard`."""
    return text if text == "auto" else text.split("+")


def sharding_of(units: object, compute_dtype: str) -> dict[str, Any]:
    """Returns arguments of `mfsdp.fully_shard`."""
    from ..config.options import MixedPrecisionPolicy

    out: dict[str, Any] = {"units": units} if units else {}
    if compute_dtype != "none":
        out["mp_policy"] = MixedPrecisionPolicy(compute_dtype=dtype_of(compute_dtype))
    return out


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
