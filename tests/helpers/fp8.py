"""Linear layers whose weight is quantised in each of the ways that recipes have, written in plain operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Block = tuple[int, int]
"""Rows and columns that share a scale; 0: all of them."""

RECIPES: dict[str, tuple[Block, Block]] = {
    "tensorwise": ((0, 0), (0, 0)),
    "rowwise": ((1, 0), (0, 1)),
    "rowwise, tensorwise": ((1, 0), (0, 0)),
    "128x128": ((128, 128), (128, 128)),
    "1x128": ((1, 128), (128, 1)),
    "mxfp8": ((1, 32), (32, 1)),
}
"""The blocks of a weight in forward, and in backward."""


def encode(weight: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[n, k]`` and what they are multiplied with, ``[n / rows, 1, k / columns, 1]``."""
    n, k = weight.shape
    rows, columns = block[0] or n, block[1] or k
    parts = weight.reshape(n // rows, rows, k // columns, columns)
    largest = parts.abs().amax((1, 3), keepdim=True)
    scale = torch.finfo(torch.float8_e4m3fn).max / largest.float().clamp(min=1e-12)
    codes = (parts.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.reshape(n, k), scale.reciprocal()


def decode(codes: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    n, k = codes.shape
    parts = codes.reshape(inverse.shape[0], -1, inverse.shape[2], k // inverse.shape[2])
    return (parts.float() * inverse).to(dtype).reshape(n, k)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, there: Block, back: Block) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.back = back
        return x @ decode(*encode(weight, there), x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return grad @ decode(*encode(weight, ctx.back), grad.dtype), grad.t() @ x, None, None


class Coded(nn.Linear):
    """A linear layer that multiplies with a quantised weight."""

    quantized_parameters = ("weight",)

    def __init__(self, inputs: int, outputs: int, recipe: str = "rowwise", bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.blocks = RECIPES[recipe]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _Linear.apply(x, self.weight, *self.blocks)
        return out if self.bias is None else out + self.bias


class Pair(nn.Module):
    """A norm and two of these layers: a unit with weights of both kinds."""

    def __init__(self, width: int, recipe: str, hidden: int | None = None):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = Coded(width, hidden or 2 * width, recipe)
        self.down = Coded(hidden or 2 * width, width, recipe, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(recipe: str, width: int = 128, layers: int = 2, hidden: int | None = None) -> nn.Sequential:
    return nn.Sequential(*(Pair(width, recipe, hidden) for _ in range(layers)))
