"""Interface between operations and transports, which communicate their bytes: gloo's messages, or a device's own
collectives.

A launch returns an *end*, to be called before the result is read: on the CPU it returns when the bytes are there; on a
device it makes the current stream wait, and the host goes on. Until then, nothing may write the input or touch the
output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from . import groups, static_buffers

if TYPE_CHECKING:
    from .announcements import Announcements

End = Callable[[], Any]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that are communicated together: parts of full buffers, [ranks * n], and of their shards, [n]; contiguous."""


Messages = Sequence[tuple[int, torch.Tensor]]
"""(rank of the group, tensor to send or receive) pairs."""


class Answers(Protocol):
    """An exchange of fingerprints in flight (Note [Desync detection])."""

    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> list[int]:
        """Every rank's fingerprint, by rank of the group."""


OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Transport:
    """Communicates between the ranks of a process group; launches and does not wait."""

    prompt: bool | None = None
    """Whether the host may wait for answers to fingerprints where it waits anyway; ``None``: it exchanges none."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.name = str(group.group_name)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        """Ranks of the default group, in group order."""
        self.me = dist.get_rank()
        self.place = group.rank()
        self.size = group.size()
        self.others = [r for r in range(self.size) if r != self.place]

    @property
    def group(self) -> dist.ProcessGroup:
        found = self._group()
        assert found is not None, "the registry holds no transport longer than its group"
        return found

    def gather(self, pairs: Pairs, run: Announcements) -> End:
        """All-gathers every rank's shards into full buffers."""
        raise NotImplementedError

    def scatter(self, pairs: Pairs, dtype: torch.dtype, run: Announcements) -> End:
        """Sums full buffers over ranks, in ``dtype``, into each rank's shard, in the shard's dtype."""
        raise NotImplementedError

    def all_reduce(self, tensor: torch.Tensor, op: str, run: Announcements) -> End:
        """Reduces a tensor in place; ``op`` is ``"sum"``, ``"min"`` or ``"max"``."""
        run.agree()
        work: Any = dist.all_reduce(tensor, OPS[op], group=self.group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], run: Announcements
    ) -> End:
        """Sends each rank ``splits[rank]`` rows of ``sent``, in rank order, and receives ``received[rank]`` from each
        into ``out``.
        """
        raise NotImplementedError

    def trade(self, received: Messages, sent: Messages, run: Announcements) -> End:
        """Exchanges messages with some of the ranks; the others need not call."""
        raise NotImplementedError

    # between ranks that compare what they run

    def exchange(self, word: int) -> Answers:
        """Exchanges fingerprints."""
        raise NotImplementedError

    def tell(self, key: str, text: str) -> None:
        groups.tell(key, text)

    def ask(self, key: str, seconds: float) -> str | None:
        """The text stored under ``key``, or ``None`` after ``seconds``."""
        return groups.ask(key, seconds)

    def sever(self) -> None:
        """Makes waits of the group's other ranks fail, where that is possible."""

    def abort(self) -> None:
        """Makes this rank's waits fail too, in all threads."""
        self.sever()

    def lanes(self) -> list[dist.ProcessGroup]:
        """The group, if it still exists, and the one beside it for reductions."""
        group, other = self._group(), groups.other_of(self.name)
        found = [] if group is None else [group]
        with suppress(RuntimeError):  # the other may be gone
            found += [] if other is None else [groups.process_group(other)]
        return found


def segments(splits: tuple[int, ...], ranks: int, full: torch.Tensor, shard: torch.Tensor) -> Pairs:
    """Parts of a full buffer and of a shard that are communicated together; those of a static buffer are cut once."""
    if len(splits) == 1:
        return [(full, shard)]
    return list(zip(static_buffers.views(full, parts, splits, ranks), parts(shard, splits, 1), strict=True))


def parts(flat: torch.Tensor, splits: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """The segments of a full buffer, or of one rank's shard."""
    out = []
    start = 0
    for chunk in splits:
        out.append(flat[start : start + ranks * chunk])
        start += ranks * chunk
    return out
