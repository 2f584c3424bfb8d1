"""Gathers and sums of what travels in a format of its own (`config.comm_formats`): written when it is launched, and
read when somebody waits, behind what carries bytes.

Every rank reads all that a gather has brought, its own part too: nobody sees values that others do not have. Between
programs and transports nothing changes: full buffers, and sums, have the dtypes that they have without a format.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..config.comm_formats import BLOCK, is_quantized
from .execution import Execution
from .groups import process_group
from .inflight import InFlight
from .transport import End, Pairs

AT_ONCE = 2**23
"""Elements that are written at once: it takes four bytes for each, for a moment."""

LEAST = 127 * torch.finfo(torch.float32).tiny
"""A block with nothing larger becomes zeros: its scale would be subnormal, which devices may take for zero."""


def gather(run: Execution, pairs: Pairs, group: str, wire: str | None) -> End:
    """Launches all-gathers of shards, [n] of any floating dtype, into whole buffers, [ranks * n] in their own, in the
    format ``wire``; ``None``: as they are.
    """
    if wire is None:
        return run.gather(pairs, group)
    ranks, sizes = process_group(group).size(), [shard.numel() for _, shard in pairs]
    row = sum(map(is_quantized, sizes))
    sent = torch.empty(1, row, dtype=torch.uint8, device=pairs[0][0].device)
    came = sent.new_empty(ranks, row)
    for (_, shard), message in zip(pairs, _messages(sent, sizes), strict=True):
        write(shard.detach().view(1, -1), message)
    arrived = run.gather([(came.view(-1), sent.view(-1))], group)

    def end() -> None:
        arrived()
        for (full, _), messages in zip(pairs, _messages(came, sizes), strict=True):
            read(messages, full.view(ranks, -1))

    return InFlight(sent.device, end, sent)


def scatter(run: Execution, pairs: Pairs, dtype: torch.dtype, group: str, wire: str | None) -> End:
    """Launches sums of whole buffers, [ranks * n], over ranks, into shards, [n] in their own dtype. With a format every
    rank sends every other one its part, and adds up in ``dtype``, in the order of ranks, what it gets.
    """
    if wire is None:
        return run.scatter(pairs, dtype, group)
    ranks, shards = process_group(group).size(), [shard for _, shard in pairs]
    sizes = [shard.numel() for shard in shards]
    sent = torch.empty(ranks, sum(map(is_quantized, sizes)), dtype=torch.uint8, device=shards[0].device)
    came = torch.empty_like(sent)
    for (full, _), messages in zip(pairs, _messages(sent, sizes), strict=True):
        write(full.detach().view(ranks, -1), messages)
    arrived = run.all_to_all(came, sent, [1] * ranks, [1] * ranks, group)

    def end() -> None:
        arrived()
        for shard, messages in zip(shards, _messages(came, sizes), strict=True):
            total = shard if shard.dtype is dtype else torch.empty_like(shard, dtype=dtype)
            part = torch.empty_like(total)
            read(messages[:1], total.view(1, -1))
            for message in messages[1:].split(1):
                read(message, part.view(1, -1))
                total.add_(part)
            if total is not shard:
                shard.copy_(total)

    return InFlight(sent.device, end, sent)


def _messages(rows: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """The part of each segment in messages, [ranks, bytes of all]."""
    return rows.split([is_quantized(n) for n in sizes], 1)  # type: ignore[no-any-return]


def write(rows: torch.Tensor, messages: torch.Tensor) -> None:
    """Quantises to int8: ``round(x / scale)``, with the scale ``max(abs(x)) / 127`` of each block, in float32. A value
    is off by half a scale at most, and in a block of nothing larger than `LEAST` by that. Where there is a NaN or an
    infinity the block's scale is one, and nothing finite is read from it. Zeros stay zeros.

    Args:
        rows: [rows, n], floating point; blocks begin anew in every row.
        messages: [rows, coded(n)], uint8.
    """
    numel = rows.shape[1]
    values, scales = _parts(messages, numel)
    for start, end, first, last in _stretches(*rows.shape):
        x = rows[:, start:end].unflatten(1, (last - first, -1))
        low, high = torch.aminmax(x, dim=2)
        largest = torch.maximum(low.neg(), high).float()
        scale = scales[:, first:last].copy_(largest.div(127).masked_fill_(largest < LEAST, 0.0))
        step = scale.masked_fill(scale == 0, torch.inf).unsqueeze(2)
        values[:, start:end].unflatten(1, (last - first, -1)).copy_(torch.div(x, step).round_())
    messages[:, numel : is_quantized(numel) - 4 * scales.shape[1]].zero_()


def read(messages: torch.Tensor, rows: torch.Tensor) -> None:
    """What `write` has written: values times the scales of their blocks, rounded once, to the dtype of ``rows``."""
    values, scales = _parts(messages, rows.shape[1])
    for start, end, first, last in _stretches(*rows.shape):
        x, scale = values[:, start:end].unflatten(1, (last - first, -1)), scales[:, first:last].unsqueeze(2)
        torch.mul(x, scale, out=rows[:, start:end].unflatten(1, (last - first, -1)))


def _parts(messages: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, [rows, numel] in int8, and scales, [rows, blocks] in float32."""
    blocks = -(-numel // BLOCK)
    return messages[:, :numel].view(torch.int8), messages[:, is_quantized(numel) - 4 * blocks :].view(torch.float32)


def _stretches(rows: int, numel: int) -> Iterator[tuple[int, int, int, int]]:
    """Columns of equal blocks, with the numbers of those: first and last elements, first and last blocks."""
    whole, step = numel // BLOCK, max(1, AT_ONCE // (rows * BLOCK))
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield first * BLOCK, last * BLOCK, first, last
    if numel % BLOCK:
        yield whole * BLOCK, numel, whole, whole + 1
