"""Assigns parameters to units: matches modules, finds the unit of each parameter, plans buffers. Changes nothing."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..buffers.sharding_plan import ShardingPlan
from ..config.layout import Layout, plan
from ..config.options import MixedPrecisionPolicy, Precision
from ..dtensor import torchao
from ..dtensor import transformer_engine as te
from ..dtensor.tp_shards import TPShard, here
from . import cross_rank_check, validate
from .fp8_weights import fp8_weights_of
from .module import FSDPModule
from .parallel import piece_of
from .stale_optimizers import ORIGINALS

UnitLike = type[nn.Module] | str


def match(root: nn.Module, units: Iterable[UnitLike] | None) -> list[nn.Module]:
    """Returns the modules that become units, in the order of ``root.modules()`` (a set's differs between ranks), the
    root last.
    """
    if isinstance(units, (str, type)):
        raise ValueError(f"units={units!r}: give a list, units=[{units!r}], or 'auto' for the model's own blocks")
    chosen: set[nn.Module] = set()
    for unit in units or ():
        found = [m for fqn, m in root.named_modules() if m is not root and _is(unit, fqn, m)]
        if not found:
            kinds = sorted({type(m).__name__ for m in root.modules()} - {type(root).__name__})
            names = [fqn for fqn, _ in root.named_modules() if fqn]
            raise ValueError(
                f"units: {unit!r} matches no module of {type(root).__name__}. Classes in it: {', '.join(kinds[:20])}; "
                f"names: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
                + ("; units='auto', no list, is for the model's own blocks" if unit == "auto" else "")
            )
        chosen.update(found)
    ordered = [m for m in root.modules() if m in chosen]
    for m in ordered:
        if isinstance(m, FSDPModule):
            raise ValueError(f"units: {type(m).__name__} is sharded already; leave it out of `units`")
    return [*ordered, root]


def _is(unit: UnitLike, fqn: str, module: nn.Module) -> bool:
    if isinstance(unit, type):
        return isinstance(module, unit)
    if not isinstance(unit, str) or not unit:
        raise ValueError(f"units: {unit!r} is no class, import path, class name or name pattern")
    if not set("*?[") & set(unit):
        found = _import(unit)
        if found is not None:
            return isinstance(module, found)
        return unit in (fqn, type(module).__name__)
    return matches(fqn.split("."), unit.split("."))


@functools.cache
def _import(path: str) -> type | None:
    where, _, name = path.rpartition(".")
    if not where or where.split(".")[0] not in sys.modules:
        return None
    try:
        found = getattr(importlib.import_module(where), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Matches component by component as in shells; ``**`` is any number."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(matches(name[i:], pattern[1:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and matches(name[1:], pattern[1:])


@dataclass
class PlannedBuffer:
    """A planned flat buffer. Parameters leave the list once their values are copied."""

    layout: Layout
    precision: Precision
    trainable: bool
    params: list[nn.Parameter]
    pieces: list[TPShard | None]


@dataclass
class PlannedUnit:
    """A planned unit: its module, the modules whose forward it covers, its parameters and their places."""

    module: nn.Module
    fqn: str
    modules: list[nn.Module] = field(default_factory=list)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    buffers: list[PlannedBuffer] = field(default_factory=list)

    def plan_buffers(self, policy: MixedPrecisionPolicy, placement: ShardingPlan, mesh: DeviceMesh | None) -> None:
        """Plans the unit's buffers, one per kind of parameter."""
        kinds: dict[tuple[Precision, bool, bool], list[nn.Parameter]] = {}
        for param, places in self.owners.items():
            validate.wide_enough(self.fqn_of(param), param, policy)
            code = all(fp8_weights_of(module, name) for module, name in places)
            precision = policy.resolve(param.dtype, param.requires_grad or te.quantised(param))
            kinds.setdefault((precision, param.requires_grad, code), []).append(param)
        for (precision, trainable, _), params in kinds.items():
            pieces = [piece_of(self.fqn_of(p), p, self.owners[p][0][0], mesh) for p in params]
            shapes = [piece.local if piece else tuple(p.shape) for p, piece in zip(params, pieces, strict=True)]
            layout = plan([(self.names[p], s) for p, s in zip(params, shapes, strict=True)], placement.cut)
            self.buffers.append(PlannedBuffer(layout, precision, trainable, params, pieces))

    def fqn_of(self, param: nn.Parameter) -> str:
        """The parameter's name in the whole model."""
        return self.names[param] if self.fqn == "(root)" else f"{self.fqn}.{self.names[param]}"


def assign_parameters(root: nn.Module, roots: list[nn.Module], ignored: set[nn.Parameter]) -> list[PlannedUnit]:
    """Assigns every parameter to the innermost unit that holds all its uses. Changes nothing."""
    fqns = {m: fqn for fqn, m in root.named_modules()}
    units = {f"{fqns[m]}." if fqns[m] else "": PlannedUnit(m, fqns[m] or "(root)") for m in roots}

    def innermost(names: list[str]) -> str:
        """The longest prefix of a unit that all names have."""
        prefix = names[0]
        while prefix and not (prefix in units and all(name.startswith(prefix) for name in names)):
            prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        return prefix

    uses: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for fqn, m in root.named_modules():
        if m.__dict__.get("_mfsdp_unit") is not None:
            continue  # of an earlier call
        unit = units[innermost([f"{fqn}."])]
        if m._parameters or m is unit.module:
            unit.modules.append(m)
        for name, param in m._parameters.items():
            if param is None or param in ignored:
                continue
            full = f"{fqn}.{name}" if fqn else name
            _not_taken(full, param)
            validate.validate(full, param, m)
            uses.setdefault(param, []).append((m, name, full))
    for param, places in uses.items():
        prefix = innermost([full for _, _, full in places])
        units[prefix].owners[param] = [(m, name) for m, name, _ in places]
        units[prefix].names[param] = places[0][2].removeprefix(prefix)
    return list(units.values())


def _not_taken(fqn: str, param: nn.Parameter) -> None:
    if param in ORIGINALS:
        raise ValueError(
            f"fully_shard: parameter {fqn} belongs to the unit {ORIGINALS[param].unit.fqn!r} already; tie weights "
            "before sharding and shard both modules in one call, fully_shard(root, units=[...])"
        )


def described(units: Sequence[PlannedUnit], options: str, values: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What ranks must agree on, line by line, and values that should be equal."""
    lines, real = [options], dict[str, torch.Tensor]()
    for unit in units:
        for buffer in unit.buffers:
            kind = type(unit.module).__name__
            lines.append(f"unit {unit.fqn}, a {kind} of {len(buffer.params)} parameters, cut {buffer.layout.splits}")
            for param in buffer.params:
                name = unit.fqn_of(param)
                where = "on the meta device" if param.is_meta else "with values"
                cut = f" {tuple(param.placements)}" if isinstance(param, DTensor) else ""
                lines.append(f"{name} {list(param.shape)}{cut} {param.dtype}, trains {param.requires_grad}, {where}")
                if values and not param.is_meta:
                    mine = torchao.bare(here(param))
                    real[name] = cross_rank_check.sample(te.precise(mine)) if te.quantised(mine) else mine
    return lines, real
