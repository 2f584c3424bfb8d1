"""Unwraps weights that torchao has wrapped for FSDP2's FP8 all-gather.

Recognises torchao's class by name, without importing it. Its attributes are private there; tried on torchao 0.18.
"""

from __future__ import annotations

from typing import cast

import torch


def wrapped(tensor: torch.Tensor) -> bool:
    """Returns whether it is a ``WeightWithDynamicFloat8CastTensor``, made of weights by
    ``Float8LinearConfig(enable_fsdp_float8_all_gather=True)``.
    """
    kind = type(tensor)
    return kind.__name__ == "WeightWithDynamicFloat8CastTensor" and kind.__module__.startswith("torchao.")


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside such a wrapper; any other unchanged."""
    return cast(torch.Tensor, tensor._tensor) if wrapped(tensor) else tensor  # type: ignore[attr-defined]


def inner(tensor: torch.Tensor) -> frozenset[str]:
    """Returns the names of the attributes that implement such a wrapper; none for other tensors."""
    own = ("_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale")
    return frozenset(own) if wrapped(tensor) else frozenset()
