"""Compares ranks that should hold equal values, for example to find norms that a tensor-parallel plan leaves out.

Under sequence parallelism each rank has a part of the tokens. On every rank, a norm missing from the plan gets the
gradient of local tokens only. It is too small and differs between ranks, and training continues without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..dtensor.tp_shards import here
from ..dtensor.unsupported import not_sharded
from ..runtime import execution, groups, sync_collectives
from ..runtime.checksums import PART, checksum
from .flat_buffer import Ref, refs

SLACK = 64
"""Rounding errors by which two gradients of equal values may differ."""

MOST = 2**-5
"""Largest tolerated difference relative to a gradient's norm, in narrow dtypes."""

NONE = 1e300
"""Marks a missing gradient."""


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Raises if ranks that hold the same part of a parameter have different values (in any bit) or different gradients
    (by more than another order of summation explains).

    Compares over the outer axis of HSDP, under ``no_shard``, and over tensor-parallel axes that do not cut a parameter,
    whether the plan names it (``Replicate()``) or not. All ranks must call it, after a backward; all raise.

    Costs a pass over weights and gradients, two small collectives per axis, and waits for the device.

    Args:
        model: a sharded model, or any of its modules.

    Raises:
        ValueError: nothing of the model is sharded.
        RuntimeError: names parameters that differ (up to eight), the axis, and whether weights or gradients differ.
    """
    found = {ref.buffer.params[ref.slot]: (f"{path}.{name}".lstrip("."), ref)
             for path, m in model.named_modules() for name, ref in reversed(refs(m).items())}  # fmt: skip
    if not found:
        raise not_sharded("check_replicas", model)
    over: dict[str, list[tuple[str, Ref]]] = {}
    for name, ref in found.values():
        for group in ref.buffer.copies(ref.slot):
            over.setdefault(group, []).append((name, ref))
    wrong = _named([fault for group, members in over.items() for fault in _faults(group, members)])
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise RuntimeError(
            f"mfsdp: ranks that should hold the same do not: {'; '.join(wrong[:8])}{more}. Gradients that differ over "
            "an axis of tensor parallelism are sums over a part of the tokens: give these modules a place in the plan "
            "(SequenceParallel() for norms between sequence-parallel layers). Weights that differ were built or loaded "
            "differently: pass sync_module_states=True, or load a checkpoint."
        )


@dataclass
class _Fault:
    """The comparison of one parameter's weights or gradients over one axis."""

    name: str
    ref: Ref
    found: int
    """0: equal; 1: they differ; 2: only some ranks have any."""


def _faults(group: str, members: list[tuple[str, Ref]]) -> list[_Fault]:
    """Compares what the ranks of a group hold, each its own rows."""
    marks: list[torch.Tensor] = []
    slack: list[torch.Tensor] = []
    for _, ref in members:
        param, device = ref.buffer.params[ref.slot], ref.buffer.weights.main.device
        marks.append((checksum(here(param)) & (2**50 - 1)).double())  # exact in float64; replicas match bit for bit
        slack.append(torch.zeros((), dtype=torch.float64, device=device))
        mark, tolerated = _sum(None if param.grad is None else here(param.grad), device)
        marks.append(mark)
        slack.append(tolerated)
    mine = torch.stack(marks)
    with execution.announced(f"replicas of {len(members)} parameters", group):
        reduced = sync_collectives.reduced(torch.cat([mine, -mine, torch.stack(slack)]), "max", group)
    high, low, most = (x.tolist() for x in reduced.chunk(3))
    axis = groups.axis_of(group).name
    out = []
    for i, (name, ref) in enumerate(members):
        for j, what in ((2 * i, "weights"), (2 * i + 1, "gradients")):
            spread = high[j] + low[j]
            found = 0 if spread <= most[j] else 2 if spread > NONE / 2 else 1
            out.append(_Fault(f"{what} of {name} over {axis}", ref, found))
    return out


def _named(faults: list[_Fault]) -> list[str]:
    """Merges the faults of ranks that shard a parameter, each of which has compared only its rows."""
    alike: dict[tuple[str, ...], list[_Fault]] = {}
    for fault in faults:
        alike.setdefault(tuple(fault.ref.buffer.params[fault.ref.slot].sharding.groups), []).append(fault)
    for over, some in alike.items():
        found = torch.tensor([f.found for f in some], device=some[0].ref.buffer.weights.main.device)
        with execution.announced(f"what is apart of {len(some)}", *over):
            for group in over:
                found = sync_collectives.reduced(found, "max", group)
        for fault, worst in zip(some, found.tolist(), strict=True):
            fault.found = worst
    return [f"{f.name}{' (only some ranks have any)' if f.found == 2 else ''}" for f in faults if f.found]


def _sum(local: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weighted sum of a gradient, and the difference that another order of summation may cause."""
    if local is None:
        none, nothing = torch.tensor([NONE, 0.0], dtype=torch.float64, device=device)
        return none, nothing
    total, square = torch.zeros((2,), dtype=torch.float64, device=device).unbind()
    for part in local.detach().reshape(-1).split(PART):
        weighted = part.double() * torch.linspace(0.5, 1.5, part.numel(), dtype=torch.float64, device=device)
        total, square = total + weighted.sum(), square + weighted.square().sum()
    return total, square.sqrt() * min(SLACK * torch.finfo(local.dtype).eps, MOST)
