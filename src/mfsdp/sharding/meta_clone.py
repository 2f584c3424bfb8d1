"""Copies a model, as before sharding, to the meta device for tracing."""

from __future__ import annotations

import copy
import functools
import types
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..buffers.flat_buffer import UnitState, refs
from ..dtensor import bitsandbytes, quantized, torchao
from ..dtensor import transformer_engine as te
from ..dtensor.sharded_dtensor import carry_attributes
from ..runtime import groups
from .module import FSDPModule, own_class
from .parallel import piece_of

ShardCall = tuple[nn.Module | list[nn.Module], dict[str, Any], list[Any]]
"""A call of `fully_shard`: module or modules, arguments, ranks ([shard] or [outer, shard])."""


@dataclass
class MetaClone:
    """An unsharded copy on the meta device, and how the model was sharded."""

    model: nn.Module
    calls: list[ShardCall]
    """In the order in which they were made."""
    twins: dict[int, Any]
    """Copies of tensors, by the original's ``id``."""


def clone_on_meta(model: nn.Module) -> MetaClone:
    """Copies a model, which is not changed; parameters require gradients as when they were sharded.

    Raises:
        ValueError: it holds something that cannot be copied, or is part of a unit of several modules.
    """
    members = _members(model)
    memo: dict[int, Any] = {}
    for m in model.modules():
        _copy_sharded(m, memo)
        _copy_others(m, memo)
    twins = dict(memo)
    try:
        with groups.shared_by_copies():
            out = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"mfsdp: {type(model).__name__} cannot be copied to be traced: {error}") from error
    modules = list(out.modules())
    for m in modules:
        if "forward" in m.__dict__:
            m.__dict__["forward"] = _rebound(m.__dict__["forward"], memo)
    calls = _taken_calls([[modules[number] for number in numbers] for numbers in members])
    for m in modules:
        if "_mfsdp_unit" in m.__dict__:
            m.__class__ = own_class(m)
            for name in ("_mfsdp_unit", "_mfsdp_refs"):
                m.__dict__.pop(name, None)
    return MetaClone(out, calls, twins)


def _members(model: nn.Module) -> list[list[int]]:
    """Returns each unit's modules, by their numbers in ``model.modules()``."""
    inside = {id(m._parameters) for m in model.modules()}
    members: dict[UnitState, list[int]] = {}
    for number, m in enumerate(model.modules()):
        if isinstance(m, FSDPModule):
            unit = m._mfsdp_unit
            members.setdefault(unit, []).append(number)
            if any(id(params) not in inside for b in unit.buffers for params, _ in b.places.values()):
                raise ValueError(
                    f"mfsdp: {type(m).__name__} is one unit with other modules ({unit.fqn!r}), and cannot be traced "
                    "without them: trace a module around all of them"
                )
    return list(members.values())


def _copy_sharded(module: nn.Module, memo: dict[int, object]) -> None:
    """Gives the memo of ``deepcopy`` a module's sharded parameters, full on meta as they were, and leaves units out."""
    if "_mfsdp_unit" in module.__dict__:
        memo[id(module.__dict__["_mfsdp_unit"])] = None
    if refs(module):
        memo[id(refs(module))] = {}
    for ref in refs(module).values():
        param = ref.buffer.params[ref.slot]
        if id(param) not in memo:
            own = ref.unit.policy.compute_dtype is None
            kind = ref.buffer.precision.compute if own else ref.buffer.precision.main
            value = torch.empty(ref.shape, dtype=kind, device="meta")
            twin = nn.Parameter(ref.piece.found(value) if ref.piece else value, ref.buffer.born_trainable)
            carry_attributes(param, twin)
            if ref.piece is not None and ref.piece.plain:
                twin._mfsdp_piece = ref.piece  # type: ignore[attr-defined]
            memo[id(param)] = twin


def _copy_others(module: nn.Module, memo: dict[int, object]) -> None:
    """Gives the memo of ``deepcopy`` a module's other tensors, on meta."""
    pieces = {
        id(p): piece_of(name, p, module, None)
        for name, p in module._parameters.items()
        if p is not None and not p.is_meta and name not in refs(module)
    }
    kept = [t for t in module.__dict__.values() if isinstance(t, torch.Tensor)]
    if quantized.linear(module):
        memo.update(bitsandbytes.shared(module))
    for tensor in [*module._parameters.values(), *module._buffers.values(), *kept]:
        if tensor is None or id(tensor) in memo:
            continue
        plain: torch.Tensor = (
            torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if te.quantised(tensor) or torchao.wrapped(tensor) or bitsandbytes.quantized(tensor)
            else tensor.detach().to("meta")
        )
        if isinstance(tensor, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
        made_of = te.inner(tensor) | torchao.inner(tensor)
        plain.__dict__.update({k: v for k, v in tensor.__dict__.items() if k not in made_of})
        piece = pieces.get(id(tensor))
        if piece is not None and piece.plain:
            plain._mfsdp_piece = piece  # type: ignore[attr-defined]
        memo[id(tensor)] = plain


def _taken_calls(units: list[list[nn.Module]]) -> list[ShardCall]:
    """Takes the calls of `fully_shard` off the modules of each unit, and returns them in order."""
    found = [(call, given) for given in units for m in given if (call := m.__dict__.pop("_mfsdp_call", None))]
    found.sort(key=lambda made: made[0][0])
    return [(given if len(given) > 1 else given[0], arguments, ranks) for (_, arguments, ranks), given in found]


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Copies a replaced forward, with copies of the modules that it references."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _rebound(value.__self__, memo))
    if isinstance(value, functools.partial):
        words = {k: _rebound(v, memo) for k, v in value.keywords.items()}
        return functools.partial(_rebound(value.func, memo), *(_rebound(a, memo) for a in value.args), **words)
    if isinstance(value, types.FunctionType) and value.__closure__:
        cells = tuple(types.CellType() for _ in value.__closure__)
        out = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        out.__kwdefaults__, out.__module__ = value.__kwdefaults__, value.__module__
        out.__qualname__ = value.__qualname__
        out.__dict__.update(value.__dict__)
        memo[id(value)] = out
        for cell, theirs in zip(cells, value.__closure__, strict=True):
            with suppress(ValueError):  # an empty cell
                cell.cell_contents = _rebound(theirs.cell_contents, memo)
        return out
    if callable(value) and not isinstance(value, (type, nn.Module)) and hasattr(value, "__dict__"):
        memo[id(value)] = value
        changed = {k: _rebound(v, memo) for k, v in vars(value).items()}
        if any(changed[k] is not v for k, v in vars(value).items()):
            memo[id(value)] = out = copy.copy(value)
            vars(out).update(changed)
    return memo.get(id(value), value)
