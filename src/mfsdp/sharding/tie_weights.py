"""`tie_weights`: declares parameters of several pipeline stages copies of one weight (Note [Tied weights])."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..buffers.flat_buffer import FlatBuffer, buffers_in, refs
from ..buffers.norms import pipeline_axis
from ..buffers.tied_copies import TiedCopy, TiedWeight
from ..dtensor.parameter_names import original
from ..dtensor.tp_shards import here
from ..runtime import devices, execution, groups, sync_collectives
from ..runtime.checksums import checksum


def tie_weights(modules: nn.Module | Sequence[nn.Module], names: Sequence[str], *, mesh: DeviceMesh) -> None:
    """Declares parameters of several pipeline stages copies of one weight, such as tied embeddings. All ranks call it,
    after `mfsdp.fully_shard` and before the first step, once per weight.

    In every step of a schedule of `mfsdp.PipelineStage`, the copies' gradients are summed over the pipeline after their
    reduction over data-parallel ranks; `mfsdp.clip_grad_norm_` counts the weight once. The copies stay equal if the
    optimizer treats them alike. A deep copy of a stage is not tied.

    Args:
        modules: this rank's stages; modules, not `PipelineStage` objects.
        names: the parameters' names in the stages that have them (``["embed.weight", "head.weight"]``; one name if all
            copies have it).
        mesh: has the axis of the pipeline, as for `mfsdp.clip_grad_norm_`.

    Raises:
        ValueError: on all ranks: a name is in no stage, or there are fewer than two copies; copies differ in value,
            shape, dtypes, the rows that a rank holds, or whether they train; one is tied already, has a gradient,
            hooks, or may be unused. Nothing has been changed.
        NotImplementedError: another weight is tied already, on a device.
    """
    axis = pipeline_axis(mesh, "tie_weights")
    pipeline = groups.ranks(str(axis.get_group().group_name))
    stages = [modules] if isinstance(modules, nn.Module) else list(modules)
    names = [names] if isinstance(names, str) else list(names)
    mine = list(_found(stages, names))
    tied = any(buffer.gradients.accumulator.tied for stage in stages for buffer in buffers_in(stage))
    every = groups.all_objects((pipeline, [_described(*each) for each in mine], tied))
    if axis.device_type != "cpu" and any(before for _, _, before in every):
        raise NotImplementedError(
            "tie_weights: a second tied weight: over a device's collectives, which have no tags, ranks could exchange "
            "the two in different orders"
        )
    for members in sorted({tuple(members) for members, _, _ in every}):
        if fault := _fault(names, [(rank, copy) for rank in members for copy in every[rank][1]]):
            raise ValueError(f"tie_weights: {fault}")
    group = groups.lanes_of(str(axis.get_group().group_name), axis.device_type)[1]
    # NCCL makes a communicator in a group's first operation, and expects all of its ranks there
    with execution.announced("tie_weights", group):
        sync_collectives.reduced(torch.zeros(1, device=devices.collective_device(group)), "sum", group)
    place = pipeline.index(groups.rank())
    holders = [at for at, rank in enumerate(pipeline) if every[rank][1]]
    if mine:
        weight = TiedWeight(" = ".join(names), group, place, [at for at in holders if at != place])
        weight.copies += [TiedCopy(weight, buffer, slot, False) for _, buffer, slot in mine]
        weight.copies[0].counts = place == holders[0]
        for copy in weight.copies:
            copy.buffer.gradients.accumulator.tied[copy.slot] = copy


@dataclass(frozen=True)
class _Described:
    """What ranks compare of a copy."""

    name: str
    facts: dict[str, Any]
    """What must be equal, by name."""
    value: int
    """Of this rank's rows."""
    fault: str
    """Why it cannot be tied; ``""`` if it can."""


def _found(stages: Sequence[nn.Module], names: Sequence[str]) -> Iterator[tuple[str, FlatBuffer, int]]:
    """Yields this rank's copies in order, each once: the name, the buffer and the slot."""
    seen = set()
    for stage in stages:
        for path, module in stage.named_modules():
            for own, ref in refs(module).items():
                name = original(f"{path}.{own}".lstrip("."))
                if name in names and (ref.buffer, ref.slot) not in seen:
                    seen.add((ref.buffer, ref.slot))
                    yield name, ref.buffer, ref.slot


def _described(name: str, buffer: FlatBuffer, slot: int) -> _Described:
    sharding, gradients, spec = buffer.params[slot].sharding, buffer.gradients, buffer.spec
    facts = {
        "shape": tuple(sharding.shape),
        "dtypes of weights and gradients": (str(buffer.precision.main), str(buffer.precision.grad)),
        "rows on this rank": tuple(sharding.boxes()),
        "whether it trains": buffer.trains[slot],
        "data-parallel ranks and divisor of gradients": (buffer.unit.ranks, spec.divide),
    }
    hooks = gradients.hooks
    fault = ""
    if slot in gradients.accumulator.tied:
        fault = "is tied already: name all copies in one call"
    elif gradients.flat is not None or gradients.waits:
        fault = "is in a unit with gradients: tie weights before the first backward, or after zero_grad()"
    elif hooks.grad_hooks.get(slot) or hooks.post_hooks.get(slot):
        fault = "has gradient hooks, which would see only its own copy's gradient: remove them"
    elif spec.any_optional:
        fault = "is in a model with may_be_unused, which is not supported"
    return _Described(name, facts, int(checksum(here(buffer.params[slot]))), fault)


def _fault(names: Sequence[str], copies: Sequence[tuple[int, _Described]]) -> str:
    """Returns why a pipeline's copies cannot be tied, ``""`` if they can."""
    missing = [name for name in names if name not in {copy.name for _, copy in copies}]
    if missing or len(copies) < 2:
        there = ", ".join(f"{copy.name} on rank {rank}" for rank, copy in copies) or "none"
        return (
            f"names={list(names)}: copies found are {there}. Give the names that two or more parameters of "
            "sharded stages have (stage.named_parameters()), and all stages of each rank; call fully_shard first"
        )
    for rank, copy in copies:
        if copy.fault:
            return f"{copy.name} of rank {rank} {copy.fault}"
    first_rank, first = copies[0]
    for rank, copy in copies[1:]:
        both = f"{first.name} of rank {first_rank} and {copy.name} of rank {rank}"
        for what, value in first.facts.items():
            if copy.facts[what] != value:
                more = ""
                if what.startswith("rows"):
                    more = ": make each a unit of its own (units=[..., module of that parameter]) under one strategy"
                return f"{both} differ in {what}: {value} and {copy.facts[what]}{more}"
        if copy.value != first.value:
            return f"{both} have different values: initialize both with one seed, or load a checkpoint first"
    return ""
