"""Block amax and block scales for one rank's rows of a parameter (`config.block_grid` defines the blocks).

Amax values are int32 bit patterns. Those of non-negative floats sort like the floats, with NaN above infinity, so a
maximum over ranks keeps NaN.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from ..config.block_grid import Digit, Grid


def largest(rows: torch.Tensor, first: int, grid: Grid) -> torch.Tensor:
    """The amax of each block among some rows of a parameter.

    Args:
        rows: [rows, elements of a row], of any floating dtype.
        first: index of the first row in the parameter.
        grid: blocks.

    Returns:
        int32[grid.numel], the bits of float32 values; 0 for a block without an element here.
    """
    out = torch.zeros(grid.numel, dtype=torch.int32, device=rows.device)
    if not rows.numel():
        return out
    upper, lower = _halves(grid, rows.shape[1])
    values = rows.abs().view(-1, *(d.size for d in lower))
    shared = [1 + i for i, d in enumerate(lower) if not d.place]
    values = (values.amax(shared) if shared else values).reshape(len(rows), -1)
    block = _run(upper)
    if block > 1:  # rows of a block are adjacent: only the first and last block can be incomplete here
        start, stop = -(-first // block) * block - first, (first + len(rows)) // block * block - first
        if start >= stop:
            start = stop = min(max(start, 0), len(rows))
        parts = [values[:start], values[start:stop].view(-1, block, values.shape[1]), values[stop:]]
        found = [p.amax(p.ndim - 2, keepdim=p.ndim == 2) for p in parts if p.numel()]
        values = torch.cat(found) if len(found) > 1 else found[0]
        keys = _keys(upper, block, first // block, len(values), rows.device)
    else:
        keys = _keys(upper, 1, first, len(values), rows.device)
    bits = values.float().contiguous().view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign bit
    placed = [d for d in (*upper, *lower) if d.place]
    if keys is None:
        natural = bits.amax(0)
    else:
        natural = bits.new_zeros(prod(d.size for d in upper if d.place), bits.shape[1])
        natural.scatter_reduce_(0, keys[:, None].expand_as(bits), bits, "amax")
    sizes = [d.size for d in placed]
    out.as_strided(sizes, [d.place for d in placed]).copy_(natural.view(sizes))
    return out


def spread(values: torch.Tensor, rows: torch.Tensor, first: int, grid: Grid) -> None:
    """Writes each block's value to its elements among some rows of a parameter.

    Args:
        values: flat, [grid.numel].
        rows: [rows, elements of a row], written.
        first: index of the first row in the parameter.
        grid: blocks.
    """
    if not rows.numel():
        return
    upper, lower = _halves(grid, rows.shape[1])
    placed = [d for d in (*upper, *lower) if d.place]
    table = values.as_strided([d.size for d in placed], [d.place for d in placed])
    kept = [d.size if d.place else 1 for d in lower]
    keys = _keys(upper, 1, first, len(rows), rows.device)
    if keys is None:
        table = table.view(1, *kept)
    else:
        table = table.reshape(-1, prod(kept))[keys].view(-1, *kept)
    rows.view(-1, *(d.size for d in lower)).copy_(table)


def _halves(grid: Grid, row: int) -> tuple[list[Digit], list[Digit]]:
    """The digits that count rows, and those that count elements within a row."""
    upper = [d for d in grid.digits if d.stride >= row]
    lower = [d for d in grid.digits if d.stride < row]
    assert prod(d.size for d in lower) == row, f"{grid} does not end with rows of {row} elements"
    return [Digit(d.stride // row, d.size, d.place) for d in upper], lower


def _run(upper: list[Digit]) -> int:
    """How many consecutive rows share a block; 1 if all rows do, or if a block's rows are not adjacent."""
    block = 1
    for digit in reversed(upper):
        if digit.place:
            return block
        block *= digit.size
    return 1


def _keys(upper: list[Digit], block: int, first: int, count: int, device: torch.device) -> torch.Tensor | None:
    """The placed digits of each run of ``block`` rows, as one number; ``None`` without placed digits."""
    placed = tuple(d for d in upper if d.place)
    return _numbers(placed, block, first, count, device) if placed else None


@lru_cache(maxsize=1024)
def _numbers(placed: tuple[Digit, ...], block: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    rows = torch.arange(first, first + count, device=device) * block
    out = torch.zeros_like(rows)
    for digit in placed:
        out = out * digit.size + rows // digit.stride % digit.size
    return out
