"""Transport over a device's own collectives, mainly NCCL: launched after the current stream, on the group's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from . import devices
from .inflight import InFlight, beside
from .transport import End, Messages, Pairs, Transport

if TYPE_CHECKING:
    from .announcements import Announcements

# torch 2.13 renamed these to *_single and warns on the old names; tried on 2.11 to 2.15.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _launched(options: Any) -> Any:
    """Makes a collective's options asynchronous. Private in torch (``asyncOp``); tried on 2.13, not on the others of
    2.11 to 2.15.
    """
    options.asyncOp = True
    return options


_GATHER, _SCATTER = _launched(AllgatherOptions()), _launched(ReduceScatterOptions())
"""Options of a collective over one tensor."""


class C10dTransport(Transport):
    """The group's backend for one device type. Collectives have no tags, so ranks compare fingerprints before they
    launch.
    """

    prompt = False

    def gather(self, pairs: Pairs, run: Announcements) -> End:
        run.agree()
        if len(pairs) == 1:
            return gather_one(self.group, *pairs[0])
        return self._at_once(_all_gather, pairs)

    def scatter(self, pairs: Pairs, dtype: torch.dtype, run: Announcements) -> End:
        """Reduce-scatter. NCCL sums in the communication dtype; a sum in another dtype is an all-to-all and a local
        sum, with a receive buffer as large as the input.
        """
        run.agree()
        if all(full.dtype is shard.dtype is dtype for full, shard in pairs):
            if len(pairs) == 1:
                return scatter_one(self.group, *pairs[0])
            return self._at_once(_reduce_scatter, [(shard, full) for full, shard in pairs])
        received = [torch.empty_like(full) for full, _ in pairs]
        sent = [(buffer, full) for buffer, (full, _) in zip(received, pairs, strict=True)]
        works: list[Any] = [dist.all_to_all_single(*pair, group=self.group, async_op=True) for pair in sent]

        def end() -> None:
            for work in works:
                work.wait()
            for (_, shard), buffer in zip(pairs, received, strict=True):
                parts = buffer.view(self.size, -1)
                if shard.dtype is dtype:
                    torch.sum(parts, 0, dtype=dtype, out=shard)
                else:
                    shard.copy_(torch.sum(parts, 0, dtype=dtype))

        return end

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], run: Announcements
    ) -> End:
        run.agree()
        work: Any = dist.all_to_all_single(out, sent, list(received), list(splits), group=self.group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def trade(self, received: Messages, sent: Messages, run: Announcements) -> End:
        run.agree()
        ops = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=rank) for rank, t in received]
        ops += [dist.P2POp(dist.isend, t, group=self.group, group_peer=rank) for rank, t in sent]
        works: list[Any] = dist.batch_isend_irecv(ops)

        def end() -> None:
            for work in works:
                work.wait()

        return end

    def _at_once(self, collective: Callable[..., object], tensors: Pairs) -> End:
        """Launches a collective for each (output, input) pair as one NCCL call with one latency. Private in torch
        (``_coalescing_manager``); tried on 2.13, over gloo.
        """
        with dist.distributed_c10d._coalescing_manager(self.group, async_ops=True) as works:
            for out, read in tensors:
                collective(out, read, group=self.group, async_op=True)
        return works.wait  # type: ignore[no-any-return]

    # fingerprints

    def exchange(self, word: int) -> Answers:
        return Answers(self, word)

    # `sever` does nothing: aborting a communicator may kill the process. Other ranks wait for its timeout.

    def abort(self) -> None:
        """Aborts the communicators, if the user asks for it (``on_stall="raise"``). Has not run on a GPU yet."""
        for group in self.lanes():
            with suppress(RuntimeError):
                group.abort()


def gather_one(group: dist.ProcessGroup, full: torch.Tensor, shard: torch.Tensor) -> End:
    """An all-gather on the process group itself, without torch's wrapper. Private in torch (``_allgather_base`` before
    2.13); tried on 2.13, not on the others of 2.11 to 2.15.
    """
    return _gather_of(group, full, shard, _GATHER).wait  # type: ignore[no-any-return]


def scatter_one(group: dist.ProcessGroup, full: torch.Tensor, shard: torch.Tensor) -> End:
    """A reduce-scatter (sum), likewise. Private in torch (``_reduce_scatter_base`` before 2.13); tried on 2.13, not on
    the others of 2.11 to 2.15.
    """
    return _scatter_of(group, shard, full, _SCATTER).wait  # type: ignore[no-any-return]


_gather_of: Any = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_scatter_of: Any = getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base


class Answers:
    """Gathers fingerprints on the group's stream and copies them to the host; neither host nor current stream waits."""

    def __init__(self, line: C10dTransport, word: int):
        device = devices.collective_device(line.name)
        mine = torch.full((1,), word, device=device)
        words = mine.new_empty(line.size)
        work: Any = _all_gather(words, mine, group=line.group, async_op=True)
        side = devices.side(device, f"words over {line.name}")
        if side is None:
            self._words, self._flight = words, InFlight(device, work.wait, mine, words)
            self.ready: Callable[[], bool] = work.is_completed
            self._there: End = self._flight
            return
        told = torch.empty(words.shape, dtype=words.dtype, pin_memory=device.type != "cpu")

        def bring() -> None:
            work.wait()
            told.copy_(words, non_blocking=True)

        self._words, self._flight = told, beside(side, device, bring, mine, words)
        self.ready, self._there = self._flight.ready, self._flight.landed

    def wait(self) -> list[int]:
        self._there()
        return self._words.tolist()  # type: ignore[no-any-return]
