"""The seam between operations and whoever carries their bytes: gloo's messages, or a device's own collectives.

What is launched gives an *end*, to be called before the result may be read: on the CPU it returns when the bytes are
there; on a device when the current stream is behind them, and the host goes on. Until then nobody may write what is
sent, nor touch what is received.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import groups

End = Callable[[], Any]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""What travels at once: the parts of whole flat buffers, [ranks * n], and of shards of them, [n]; contiguous."""


class Turn(Protocol):
    """Who communicates: a program that is running, or an operation outside of programs (`runs.Run`)."""

    def tag(self, group: str) -> int:
        """Of its messages over a group: those of two programs never meet."""

    def agree(self) -> None:
        """Makes sure that all ranks run the same. For whatever has no tag: before it is launched.

        Raises:
            RuntimeError: they do not.
        """


class Transport(Protocol):
    """What carries bytes between the ranks of a process group. Everything is launched and not waited for."""

    def gather(self, pairs: Pairs, turn: Turn) -> End:
        """All-gathers every rank's shards into whole buffers."""

    def scatter(self, pairs: Pairs, dtype: torch.dtype, turn: Turn) -> End:
        """Sums whole buffers over ranks, in ``dtype``, and leaves each rank its shard, in the shard's own dtype."""

    def all_reduce(self, tensor: torch.Tensor, op: str, turn: Turn) -> End:
        """Reduces a tensor in place; ``op`` is ``"sum"``, ``"min"`` or ``"max"``."""

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], turn: Turn
    ) -> End:
        """Sends every rank its rows of ``sent``, ``splits[rank]`` of them in the order of ranks, and receives
        ``received[rank]`` from each into ``out``.
        """


OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Member:
    """A rank's place in a process group, the words that it leaves for others there, and torch's own all-reduce."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.name = str(group.group_name)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.me = dist.get_rank()
        self.place = group.rank()
        self.size = group.size()
        self.others = [r for r in range(self.size) if r != self.place]

    @property
    def group(self) -> dist.ProcessGroup:
        found = self._group()
        assert found is not None, "the registry holds no transport longer than its group"
        return found

    def all_reduce(self, tensor: torch.Tensor, op: str, turn: Turn) -> End:
        turn.agree()
        work: Any = dist.all_reduce(tensor, OPS[op], group=self.group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def tell(self, key: str, text: str) -> None:
        groups.tell(key, text)

    def ask(self, key: str, seconds: float) -> str | None:
        return groups.ask(key, seconds)


def segments(
    splits: Sequence[int], ranks: int, full: torch.Tensor, shard: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a full buffer and of a shard that travel together."""
    if len(splits) == 1:
        return [(full, shard)]
    return list(zip(parts(full, splits, ranks), parts(shard, splits, 1), strict=True))


def parts(flat: torch.Tensor, splits: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """The segments of a full buffer, or of one rank's shard."""
    out = []
    start = 0
    for chunk in splits:
        out.append(flat[start : start + ranks * chunk])
        start += ranks * chunk
    return out
