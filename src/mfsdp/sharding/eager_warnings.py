"""Warnings of the eager fallback: each place, and each unsharded parameter, once."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn

from ..buffers.flat_buffer import UnitState
from ..config.own_source import ours

warned: set[str] = set()


def warn_of_read(unit: UnitState, place: str) -> None:
    """Warns once per place that reads parameters outside of a compiled graph."""
    if place in warned:
        return
    warned.add(place)
    data = (
        ""
        if _scalars_are_captured()
        else (
            " What depends on data (splits of an all-to-all) breaks graphs unless torch._dynamo.config."
            "capture_scalar_outputs is True."
        )
    )
    warnings.warn(
        f"mfsdp: {place} reads parameters of unit {unit.fqn!r} outside of a compiled graph: the eager path gathers "
        "the unit there, without overlap. If it should be compiled, look for a graph break (TORCH_LOGS=graph_breaks) "
        f"or call the model through torch.compile(model, backend='mfsdp').{data}",
        stacklevel=2,
    )


def warn_of_unsharded(root: nn.Module) -> None:
    """Warns once about each parameter whose gradients are not averaged."""
    unit: UnitState = root.__dict__["_mfsdp_unit"]
    if unit.fqn != "(root)" or unit.ranks == 1 or not torch.is_grad_enabled():
        return
    plain = [
        name
        for name, p in nn.Module.named_parameters(root)
        if type(p) is nn.Parameter and p.requires_grad and not hasattr(p, "_mfsdp_ignored")
    ]
    if plain and plain[0] not in warned:
        warned.add(plain[0])
        warnings.warn(
            f"mfsdp: {', '.join(plain[:3])}{', ...' if len(plain) > 3 else ''} of {unit.outermost.name} came behind "
            "fully_shard and are not sharded. Compiled code averages their gradients over ranks; this forward is not "
            "compiled, and each rank goes on with its own. Make them before fully_shard, or compile the model",
            stacklevel=2,
        )


def _scalars_are_captured() -> bool:
    """Private in torch (``torch._dynamo.config``); tried on 2.11 to 2.15."""
    return bool(torch._dynamo.config.capture_scalar_outputs)


def caller() -> str:
    """The innermost line of code outside of torch and mfsdp."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _internal(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _internal(file: str) -> bool:
    parts = file.replace("\\", "/").split("/")
    return "torch" in parts or ours(file) or file.startswith("<")
