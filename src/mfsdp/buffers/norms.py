"""Norms of single parameters, and checks for non-finite gradients: by name, over all ranks, with one collective."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn


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
