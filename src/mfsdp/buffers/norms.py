"""Norms of single parameters, clipping over pipeline stages, and checks for non-finite gradients, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..dtensor.mesh import PIPELINE
from .tied_copies import tied_copy


@torch.no_grad()
def norms(
    model: nn.Module, of: Literal["weights", "gradients"] = "weights", *, norm_type: float = 2.0
) -> dict[str, torch.Tensor]:
    """Returns the norm of every parameter of a model, or of its gradient. All ranks must call it.

    Args:
        model: sharded, partly sharded, or not sharded.
        of: ``"weights"`` (main weights), or ``"gradients"`` (``.grad``; parameters without one are left out).
        norm_type: order of the norm, ``math.inf`` for the largest absolute value.

    Returns:
        scalar tensors by name, in the dtype and on the device of the measured tensor: norms of full tensors, equal on
        every rank. There is no device synchronization.

    Raises:
        ValueError: ``of`` is another value.
    """
    if of not in ("weights", "gradients"):
        raise ValueError(f"norms: of={of!r}: choose 'weights' or 'gradients'")
    found = {name: p if of == "weights" else p.grad for name, p in model.named_parameters() if p.is_floating_point()}
    there = {name: t for name, t in found.items() if t is not None}
    alike: dict[torch.device, list[str]] = {}
    for name, t in there.items():
        alike.setdefault(t.device, []).append(name)
    out: dict[str, torch.Tensor] = {}
    for names in alike.values():
        # If nothing is sharded, parameters and plain tensors take no common path.
        out |= zip(names, torch._foreach_norm([there[n].detach() for n in names], norm_type), strict=True)
    return {name: out[name] for name in there}


@torch.no_grad()
def clip_grad_norm_(
    modules: nn.Module | Sequence[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clips gradients by their norm over all stages of a pipeline, as ``torch.nn.utils.clip_grad_norm_`` clips those of
    one model. All ranks must call it. A weight that several stages hold copies of counts once if `mfsdp.tie_weights`
    has named it, else several times.

    Args:
        modules: this rank's stages; modules, not `PipelineStage` objects.
        max_norm, norm_type, error_if_nonfinite, foreach: as in torch.
        mesh: has the axis of the pipeline, ``pp``, ``pipe`` or ``pipeline``, or no other axis. ``None``: ``modules``
            are the whole model.

    Returns:
        the norm, a scalar, equal on every rank: float64 if any gradient of any stage is, else float32.

    Raises:
        ValueError: ``mesh`` has several axes, none of them of a pipeline; ``norm_type`` is not positive, with ``mesh``;
            or ``modules`` holds something else.
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``, on every rank.
    """
    pipeline = None if mesh is None else pipeline_axis(mesh, "clip_grad_norm_")
    if pipeline is not None and not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type={norm_type!r} over stages: give a positive order, or math.inf")
    stages = [modules] if isinstance(modules, nn.Module) else list(modules)
    for stage in stages:
        if not isinstance(stage, nn.Module):
            raise ValueError(f"clip_grad_norm_: {type(stage).__name__} is no module; give stage.submod")
    parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
    grads = [g for p in parameters if ((copy := tied_copy(p)) is None or copy.counts) and (g := p.grad) is not None]
    norm = get_total_norm(grads, norm_type, foreach=foreach)
    total = (norm.full_tensor() if isinstance(norm, DTensor) else norm).double()
    wide = any(g.dtype is torch.float64 for g in grads)
    if pipeline is not None:
        total = total.to(pipeline.device_type)
        wide = bool(_over(pipeline, total.new_full((), float(wide)), "max"))
        if math.isinf(norm_type):
            total = _over(pipeline, total, "max")
        else:
            total = _over(pipeline, total**norm_type, "sum") ** (1 / norm_type)
    total = total if wide else total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"mfsdp: the gradients' norm of order {norm_type} is {total.item()}: they were not clipped")
    clip_grads_with_norm_(parameters, max_norm, total, foreach)
    return total


def _over(axis: DeviceMesh, value: torch.Tensor, reduction: str) -> torch.Tensor:
    """Returns a scalar reduced over the ranks of a mesh."""
    return DTensor.from_local(value, axis, [Partial(reduction)], run_check=False).full_tensor()


def pipeline_axis(mesh: DeviceMesh, caller: str) -> DeviceMesh:
    """Returns the axis of a pipeline.

    Raises:
        ValueError: the mesh has several axes, none of them of a pipeline.
    """
    names = [name for name in mesh.mesh_dim_names or () if name in PIPELINE]
    if len(names) != 1 and mesh.ndim != 1:
        raise ValueError(
            f"{caller}: mesh has the axes {mesh.mesh_dim_names}: name the pipeline's {' or '.join(PIPELINE)}, "
            "or give that axis alone (mesh['pp'])"
        )
    return mesh[names[0]] if names and mesh.ndim > 1 else mesh


def check_finite(model: nn.Module, of: Literal["weights", "gradients"] = "gradients") -> None:
    """Raises if any gradient (or weight) contains an Inf or NaN. All ranks must call it, and all raise.

    It costs one pass over the tensors, one collective and one device synchronization. Call it after backward.

    Raises:
        FloatingPointError: names every such parameter, and whether it has a NaN.
        ValueError: ``of`` is another value.
    """
    largest = norms(model, of, norm_type=math.inf)
    if not largest:
        return
    device = next(iter(largest.values())).device
    values = torch.stack([v.double().to(device) for v in largest.values()]).tolist()
    bad = {name: "NaN" if math.isnan(v) else "Inf" for name, v in zip(largest, values, strict=True)
           if not math.isfinite(v)}  # fmt: skip
    if bad:
        named = ", ".join(f"{name} ({what})" for name, what in bad.items())
        raise FloatingPointError(f"mfsdp: {len(bad)} of {len(values)} {of} are not finite: {named}")
