"""Exact checksums of values, independent of summation order and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

PART = 2**20
"""Elements processed at a time."""


def checksum(values: torch.Tensor, offsets: Sequence[int] = (), shape: Sequence[int] = ()) -> torch.Tensor:
    """Mixes each element's bits with its position and adds modulo 2**64; returns int64 on the values' device.

    Args:
        values: a box of a tensor; 1, 2, 4 or 8 bytes per element.
        offsets: where the box starts in that tensor; default zeros.
        shape: that tensor's shape; default the box's own.
    """
    values = values.detach()
    if not values.dim():
        values = values.view(1)
        offsets, shape = (), ()
    offsets, shape = tuple(offsets) or (0,) * values.dim(), tuple(shape) or tuple(values.shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(PART // max(math.prod(values.shape[1:]), 1), 1)
    for i, part in enumerate(values.split(rows)):
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        for dim, (first, n, stride) in enumerate(zip(offsets, part.shape, strides, strict=True)):
            first += i * rows if dim == 0 else 0
            at = torch.arange(first, first + n, device=values.device) * stride
            index = index + at.view(-1, *[1] * (part.dim() - dim - 1))
        bits = part.contiguous().view(_INTEGER[part.element_size()]).long()
        total += _mixed(bits, index).sum()
    return total


def _mixed(bits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of both arguments' bits: two multiplications by odd numbers, with high bits folded onto low ones in
    between (constants of splitmix64).
    """
    mixed = (bits + index * _signed(0x9E3779B97F4A7C15)).mul_(_signed(0xBF58476D1CE4E5B9))
    return mixed.bitwise_xor_(mixed >> 31).mul_(_signed(0x94D049BB133111EB))


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
