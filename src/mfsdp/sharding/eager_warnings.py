"""Warnings of code that is not compiled: each place, and each unsharded parameter, once."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..buffers.flat_buffer import UnitState
from ..config.own_source import ours
from ..dtensor import unsupported
from .parallel import hooked

warned: set[str] = set()


def warn_of_read(unit: UnitState, place: str) -> None:
    """Warns once per place that reads parameters outside of a compiled graph."""
    if place in warned:
        return
    warned.add(place)
    data = ""
    if not _scalars_are_captured():
        data = (
            " What depends on data (splits of an all-to-all) breaks graphs unless torch._dynamo.config."
            "capture_scalar_outputs is True."
        )
    warnings.warn(
        f"mfsdp: {place} reads parameters of unit {unit.fqn!r} outside of a compiled graph: the eager path gathers "
        "the unit there, without overlap. If it should be compiled, look for a graph break (TORCH_LOGS=graph_breaks) "
        f"or call the model through torch.compile(model, backend='mfsdp').{data}",
        stacklevel=2,
    )


def expect_unsharded() -> None:
    """Has the next backwards look for parameters whose gradients nobody averages; called when a model is sharded."""
    global _looks
    unsupported.before_backward["unsharded"] = warn_of_unsharded
    _looks = 8  # those of several models that train in turns


def warn_of_unsharded(leaves: Iterable[torch.Tensor]) -> None:
    """Warns of unsharded parameters of partly sharded models, once each: no program reduces their gradients.

    Args:
        leaves: what a backward will give gradients.
    """
    global _looks
    _looks -= 1
    if _looks < 0:
        del unsupported.before_backward["unsharded"]
        return
    plain = {p for p in leaves if type(p) is nn.Parameter and not (_known(p) or hooked(p) or p in _told)}
    modules = modules_with(plain)
    for module in modules:
        if isinstance(module, (nn.parallel.DistributedDataParallel, *unsupported.torch_fsdp())):
            plain.difference_update(module.parameters())
    found = [(names, m) for m in modules if (names := _unsharded_in(m, plain))]
    names, root = max(found, key=lambda pair: (len(pair[0]), sum(1 for _ in pair[1].modules())), default=([], None))
    if names:
        _told.update(dict.fromkeys(plain))
        warnings.warn(
            f"mfsdp: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} of {type(root).__name__} are not "
            "sharded, and read by code that is not compiled: nobody averages their gradients over ranks, each rank "
            "goes on with its own. Call mfsdp.fully_shard on the whole model, its blocks before it if you like, or "
            "compile the whole model; list what you average yourself in ignored_params",
            stacklevel=2,
        )


def modules_with(params: set[nn.Parameter]) -> list[nn.Module]:
    """Returns all modules of the process that have one of the parameters, their own or one below."""
    modules = [m for m in (gc.get_objects() if params else ()) if issubclass(type(m), nn.Module)]
    # not parameters(), by which a sharded model would gather while Dynamo traces another
    return [m for m in modules if any(p in params for sub in m.modules() for p in sub._parameters.values())]


def _unsharded_in(module: nn.Module, plain: set[nn.Parameter]) -> list[str]:
    """Returns the names of parameters of a module, if units below it are sharded over several ranks."""
    units = (m.__dict__.get("_mfsdp_unit") for m in module.modules())
    if hasattr(module, "_orig_mod") or not any(unit is not None and unit.ranks > 1 for unit in units):
        return []
    return [name for name, p in nn.Module.named_parameters(module) if p in plain]


def _known(p: torch.Tensor) -> bool:
    """Whether somebody averages its gradients, or the caller said that it is to be left alone."""
    return hasattr(p, "_mfsdp_ignored") or getattr(p, "_mfsdp_averaged", False)


_looks = 0
"""How many backwards are still looked at."""
_told: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters that were named; by identity."""


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
