"""Whether ranks that should hold the same do: a hole of tensor parallelism that nobody else sees.

Sequence parallelism gives each rank a part of the tokens. A norm that is left out of the plan then has on every rank
the gradient of its own tokens only: smaller than it should be, and different, and training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..runtime import groups, immediate, runs
from .buffer import FlatBuffer, Ref, refs
from .pieces import has_groups, here

SLACK = 64
"""How many roundings apart two sums of the same numbers may be."""

NONE = 1e300
"""Stands for a gradient that is not there."""


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Raises if ranks that hold the same part of a parameter have different values or gradients of it: over the outer
    axis of HSDP, under ``no_shard``, over axes of tensor parallelism that a parameter is not cut over, whether the plan
    names it (``Replicate()``) or not. All ranks must call it, after a backward; all ranks of an axis raise.

    Costs a pass over weights and gradients, one collective per axis and one wait for the device.

    Args:
        model: a sharded model, or any of its modules.

    Raises:
        ValueError: nothing of the model is sharded.
        RuntimeError: names every parameter that differs, over which axis, and whether its weights or gradients do.
    """
    found = {ref.buffer.params[ref.slot]: (f"{path}.{name}".lstrip("."), ref)
             for path, m in model.named_modules() for name, ref in reversed(refs(m).items())}  # fmt: skip
    if not found:
        raise ValueError("check_replicas: the model is not sharded; call mfsdp.fully_shard first")
    meshes = list(dict.fromkeys(ref.piece.mesh for _, ref in found.values() if ref.piece is not None))
    over: dict[str, list[tuple[str, Ref]]] = {}
    for name, ref in found.values():
        for group in dict.fromkeys(_copies(ref, meshes)):
            over.setdefault(group, []).append((name, ref))
    wrong = [text for group, members in over.items() for text in _apart(group, members)]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise RuntimeError(
            f"mfsdp: ranks that should hold the same do not: {'; '.join(wrong[:8])}{more}. Gradients that differ over "
            "an axis of tensor parallelism are sums over a part of the tokens: give these modules a place in the plan "
            "(SequenceParallel() for norms between sequence-parallel layers). Weights that differ were built or loaded "
            "differently: pass sync_module_states=True, or load a checkpoint."
        )


def _copies(ref: Ref, meshes: list[DeviceMesh]) -> Iterator[str]:
    """Names of the process groups whose ranks hold the same part of a parameter as this one."""
    buffer = ref.buffer
    if buffer.spec.outer > 1 and not buffer.spec.outer_optim:
        yield buffer.spec.outer_group
    if ref.piece is not None:
        yield from ref.piece.copied_by
        return
    trains = _ranks(buffer)
    for mesh in meshes if has_groups(buffer.placement.mesh) or buffer.placement.copies else []:
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            ranks = torch.distributed.get_process_group_ranks(group)
            if len(ranks) > 1 and len(trains.intersection(ranks)) == 1:  # not one of its own data-parallel axes
                yield str(group.group_name)
    yield from (name for name in buffer.placement.beside if name)


def _ranks(buffer: FlatBuffer) -> set[int]:
    """Those that train its parameters together."""
    names = [name for name in buffer.spec.meets if name]
    found = {r for name in names for r in torch.distributed.get_process_group_ranks(groups.process_group(name))}
    return found | {groups.rank()}


def _apart(group: str, members: list[tuple[str, Ref]]) -> list[str]:
    """What differs over the ranks of a group."""
    marks, slack = [], []
    for _, ref in members:
        param = ref.buffer.params[ref.slot]
        for tensor in (param, param.grad):
            local = None if tensor is None else here(tensor)
            eps = torch.finfo(param.dtype if local is None else local.dtype).eps
            mark, scale = _mark(local, ref.buffer.weights.main.device)
            marks += [mark, -mark]
            slack.append(scale * eps * SLACK)
    told = torch.cat([torch.stack(marks), torch.stack(slack)])
    with runs.announced(f"replicas of {len(members)} parameters", group):
        largest = immediate.reduced(told, "max", group).tolist()
    apart = []
    for i, (name, _) in enumerate(members):
        for j, what in enumerate(("weights", "gradients")):
            at = 2 * i + j
            spread = largest[2 * at] + largest[2 * at + 1]
            if not spread <= largest[len(marks) + at]:
                far = "only some ranks have one" if spread > NONE / 2 else f"sums {spread:.2g} apart"
                apart.append(f"{what} of {name} over {groups.axis_of(group).name} ({far})")
    return apart


def _mark(local: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A number that depends on every element and its place, and how large it could be."""
    if local is None:
        none, nothing = torch.tensor([NONE, 0.0], dtype=torch.float64, device=device)
        return none, nothing
    flat = local.detach().reshape(-1).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=flat.device)
    return flat @ weights, flat.abs() @ weights
