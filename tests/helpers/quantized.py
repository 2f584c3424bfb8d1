"""Small models of bitsandbytes' quantized linear layers, with LoRA's matrices beside them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nested": {"quant_type": "nf4"},
    "fp4 with a bias": {"quant_type": "fp4", "bias": True},
    "bf16 storage": {"quant_type": "nf4", "quant_storage": torch.bfloat16},
    "int8": {},
}


def linear(kind: str, inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    from bitsandbytes import nn as bnb

    given = {"bias": False, **KINDS[kind]}
    if kind == "int8":
        layer = bnb.Linear8bitLt(inputs, outputs, has_fp16_weights=False, **given)
    else:
        layer = bnb.Linear4bit(inputs, outputs, compute_dtype=dtype, **given)
    return layer.to(dtype).to(layer.weight.device)


class Block(nn.Module):
    def __init__(self, kind: str, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.base = linear(kind, inputs, outputs, dtype)
        self.down = nn.Linear(inputs, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, outputs, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def blocks(
    kind: str, dtype: torch.dtype = torch.float32, widths: tuple[int, ...] = (128, 192, 100, 72), device: str = "cpu"
) -> nn.Sequential:
    """The last block of the last weight is shorter than 64 elements. Of rows of 96 or 160 elements, for example,
    bitsandbytes 0.50.2 on a CPU makes other values than its own reference.
    """
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(Block(kind, i, o, dtype) for i, o in pairwise(widths))).train()
