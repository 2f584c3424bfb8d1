"""What ranks compare of the state that they load (law 69)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..runtime.transport_registry import count_load

FEW = 64
"""About so many values of a tensor are compared."""


def record_load(groups: Iterable[str], name: str, value: Any, dtype: torch.dtype) -> None:
    """Counts what is loaded, for the ranks of some groups to compare: its name, and of a whole tensor, which every rank
    has to give alike, some values, read in a dtype.
    """
    digest = zlib.crc32(name.encode())
    if type(value) in (torch.Tensor, nn.Parameter) and value.numel() and value.device.type != "meta":
        few = value.detach().reshape(-1)[:: max(value.numel() // FEW, 1)].to("cpu", dtype)
        digest = zlib.crc32(few.contiguous().view(torch.uint8).numpy().tobytes(), digest)
    count_load(groups, name, digest)
