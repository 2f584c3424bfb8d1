"""All-gathers and reduce-scatters in a communication format (`config.comm_formats`), on top of transports of bytes. The
launch quantizes, the wait dequantizes.

Every rank dequantizes the whole message, its own part included, so all ranks see equal values. Programs and transports
do not change: full buffers and sums keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..config.comm_formats import BLOCK, int8_nbytes
from .execution import Execution
from .groups import process_group
from .inflight import InFlight
from .transport import End, Pairs

AT_ONCE = 2**23
"""Elements quantized at a time; each takes four bytes temporarily."""

LEAST = 127 * torch.finfo(torch.float32).tiny
"""A block with a smaller amax becomes zeros: its scale would be subnormal, which devices may flush to zero."""


def gather(run: Execution, pairs: Pairs, group: str, wire: str | None) -> End:
    """Launches all-gathers of shards, [n] of any floating dtype, into full buffers, [ranks * n] in their own. ``wire``
    is the format; ``None``: none.
    """
    if wire is None:
        return run.gather(pairs, group)
    ranks, sizes = process_group(group).size(), [shard.numel() for _, shard in pairs]
    row = sum(map(int8_nbytes, sizes))
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
    """Launches reduce-scatters of full buffers, [ranks * n], into shards, [n] in their own dtype. With a format, ranks
    exchange their parts, and each sums what it receives in ``dtype``, in rank order.
    """
    if wire is None:
        return run.scatter(pairs, dtype, group)
    ranks, shards = process_group(group).size(), [shard for _, shard in pairs]
    sizes = [shard.numel() for shard in shards]
    sent = torch.empty(ranks, sum(map(int8_nbytes, sizes)), dtype=torch.uint8, device=shards[0].device)
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
    """Splits messages, [ranks, bytes of all segments], by segment."""
    return rows.split([int8_nbytes(n) for n in sizes], 1)  # type: ignore[no-any-return]


def write(rows: torch.Tensor, messages: torch.Tensor) -> None:
    """Quantizes to int8: ``round(x / scale)``, where each block's scale is ``max(abs(x)) / 127`` in float32. The error
    is at most half a scale, or `LEAST` in a block whose amax is below it. A block with a NaN or an infinity has a
    non-finite scale and reads back as non-finite. Zeros stay zeros.

    Args:
        rows: [rows, n], floating point; each row starts a new block.
        messages: [rows, is_quantized(n)], uint8.
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
    messages[:, numel : int8_nbytes(numel) - 4 * scales.shape[1]].zero_()


def read(messages: torch.Tensor, rows: torch.Tensor) -> None:
    """Dequantizes messages of `write`: values times block scales, rounded once to the dtype of ``rows``."""
    values, scales = _parts(messages, rows.shape[1])
    for start, end, first, last in _stretches(*rows.shape):
        x, scale = values[:, start:end].unflatten(1, (last - first, -1)), scales[:, first:last].unsqueeze(2)
        torch.mul(x, scale, out=rows[:, start:end].unflatten(1, (last - first, -1)))


def _parts(messages: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, [rows, numel] in int8, and scales, [rows, blocks] in float32."""
    blocks = -(-numel // BLOCK)
    return messages[:, :numel].view(torch.int8), messages[:, int8_nbytes(numel) - 4 * blocks :].view(torch.float32)


def _stretches(rows: int, numel: int) -> Iterator[tuple[int, int, int, int]]:
    """Column ranges of equal blocks: (first element, end element, first block, end block)."""
    whole, step = numel // BLOCK, max(1, AT_ONCE // (rows * BLOCK))
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield first * BLOCK, last * BLOCK, first, last
    if numel % BLOCK:
        yield whole * BLOCK, numel, whole, whole + 1
