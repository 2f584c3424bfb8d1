"""Allocates buffers, copies values into them, and gives modules their new parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..buffers.flat_buffer import FlatBuffer, Ref, UnitState
from ..buffers.sharding_plan import ShardingPlan
from ..dtensor import torchao
from ..dtensor import transformer_engine as te
from ..dtensor.sharded_dtensor import carry_attributes
from ..dtensor.tp_shards import here
from ..runtime import devices
from . import cross_rank_check
from .module import hand_over
from .rollback import Rollback
from .stale_optimizers import ORIGINALS, forget_originals, no_stale_optimizer
from .unit_assignment import PlannedUnit


def device_of(units: list[PlannedUnit], device: torch.device | str | None) -> torch.device:
    there = {p.device: name for unit in units for p, name in unit.names.items() if p.device.type != "meta"}
    if len(there) > 1:
        where = ", ".join(f"{name} on {d}" for d, name in there.items())
        raise ValueError(
            f"fully_shard: parameters are on different devices ({where}); move the model to one device first"
        )
    asked = None if device is None else torch.device(device)
    chosen = devices.home() if asked is None or asked == devices.accelerator() else asked
    blank = (n for u in units for p, n in u.names.items() if p.is_meta and not p.is_floating_point())
    if chosen.type != "meta" and (name := next(blank, "")):
        raise NotImplementedError(
            f"fully_shard: quantized weight {name} is on the meta device, and has no initializer that would give it "
            "values: build the model where it will run, with the values of its checkpoint"
        )
    devices.alone_on(chosen)
    devices.told_of_environment(chosen.type)
    return chosen


def ignore(param: nn.Parameter, rollback: Rollback) -> None:
    if not hasattr(param, "_mfsdp_ignored"):
        param._mfsdp_ignored = True  # type: ignore[attr-defined]
        rollback.steps.append(lambda: delattr(param, "_mfsdp_ignored"))


def move_buffers(module: nn.Module, device: torch.device, rollback: Rollback) -> None:
    """Moves buffers to the parameters' device, tied ones once; those on meta get memory with their values."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is None or buffer.is_meta or buffer.device == device:
                continue
            if buffer not in moved:
                moved[buffer] = buffer.to(device)
            m._buffers[name] = moved[buffer]
            rollback.steps.append(partial(m._buffers.__setitem__, name, buffer))


def fill(
    planned: PlannedUnit,
    unit: UnitState,
    placement: ShardingPlan,
    device: torch.device,
    reshard: bool,
    synced: Sequence[str],
    rollback: Rollback,
) -> None:
    """Allocates the unit's buffers, copies values parameter by parameter, and frees originals."""
    rollback.steps.append(lambda: forget_originals(unit))
    for index, plan in enumerate(planned.buffers):
        buffer = FlatBuffer(
            unit, plan.layout, placement, plan.precision,
            trainable=plan.trainable, reshard=reshard, device=device, pieces=plan.pieces,
        )  # fmt: skip
        buffer.gradients.before_first = no_stale_optimizer
        unit.buffers.append(buffer)
        for slot, entry in enumerate(plan.layout.slots):
            ref = Ref(buffer, slot, entry.offset, entry.shape, unit, index, plan.pieces[slot])
            _take_over(planned, plan.params.pop(0), ref, synced, rollback)


def _take_over(planned: PlannedUnit, param: nn.Parameter, ref: Ref, synced: Sequence[str], rollback: Rollback) -> None:
    buffer, weights, slot = ref.buffer, ref.buffer.weights, ref.slot
    carry_attributes(param, buffer.params[slot])
    with torch.no_grad():
        if param.is_meta:
            weights.born_on_meta[slot] = param.dtype
            if param.is_floating_point():
                weights.view(weights.main, slot).fill_(torch.nan)
        else:
            mine = te.precise(torchao.bare(here(param)))
            over = [*synced, *(ref.piece.copied_by if ref.piece else buffer.placement.beside)] if synced else ()
            weights.keep(slot, cross_rank_check.of_first_rank(mine, over, weights.main.device) if synced else mine)
    original = rollback.original(param, ref)
    for owner, name in planned.owners.pop(param):
        hand_over(owner, name, ref, original, rollback)
    del planned.names[param]
    ORIGINALS[param] = ref
