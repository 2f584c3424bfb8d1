"""What torchao wraps weights in for an FP8 all-gather of FSDP2's: here they are taken out of it.

It is never imported: its class is known by its name. What it has inside is private there; tried on torchao 0.18.
"""

from __future__ import annotations

from typing import cast

import torch


def wrapped(tensor: torch.Tensor) -> bool:
    """Whether it is a ``WeightWithDynamicFloat8CastTensor``: ``Float8LinearConfig(enable_fsdp_float8_all_gather=True)``
    makes weights such.
    """
    kind = type(tensor)
    return kind.__name__ == "WeightWithDynamicFloat8CastTensor" and kind.__module__.startswith("torchao.")


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """What is inside of such a tensor; any other as it is."""
    return cast(torch.Tensor, tensor._tensor) if wrapped(tensor) else tensor  # type: ignore[attr-defined]


def inner(tensor: torch.Tensor) -> frozenset[str]:
    """Names of attributes by which a tensor is one; of any other none."""
    own = ("_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale")
    return frozenset(own) if wrapped(tensor) else frozenset()
