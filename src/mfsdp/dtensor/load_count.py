"""Counts of loaded state, which ranks compare (invariant 69)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..runtime.transport_registry import count_load

FEW = 64
"""About how many values of a tensor are compared."""


def record_load(groups: Iterable[str], name: str, value: Any, dtype: torch.dtype) -> None:
    """Counts a load for the ranks of some groups to compare: the name, and for a full tensor, which every rank must
    pass with equal values, some of its values, cast to ``dtype``.
    """
    digest = zlib.crc32(name.encode())
    if type(value) in (torch.Tensor, nn.Parameter) and value.numel() and value.device.type != "meta":
        few = value.detach().reshape(-1)[:: max(value.numel() // FEW, 1)].to("cpu", dtype)
        digest = zlib.crc32(few.contiguous().view(torch.uint8).numpy().tobytes(), digest)
    count_load(groups, name, digest)
