"""Gloo transport for CPU tensors: messages directly between buffers.

Gloo's own all-gather copies through internal memory; its reduce-scatter is an all-reduce, with twice the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .transport import End, Messages, Pairs, Transport

if TYPE_CHECKING:
    from .announcements import Announcements

WORD = 0x6D67
"""The tag of announcements."""

_messages: dict[int, list[Any]] = {}
"""In flight, or never waited for: gloo breaks a connection if a message's handle is dropped before it completes."""


class GlooTransport(Transport):
    """Messages on the CPU. All ranks of a pair send and receive in the same order."""

    prompt = True

    def gather(self, pairs: Pairs, run: Announcements) -> End:
        here, there = [], []
        for full, shard in pairs:
            parts = full.view(self.size, -1)
            parts[self.place].copy_(shard.detach())
            here += [(r, parts[r]) for r in self.others]
            there += [(r, shard) for r in self.others]
        return self.swap(here, there, run.tag(self.name))

    def scatter(self, pairs: Pairs, dtype: torch.dtype, run: Announcements) -> End:
        """Ranks exchange their parts; the wait sums them in rank order. Two ranks need no memory besides the result if
        all dtypes are equal.
        """
        here, there, sums = [], [], []
        for full, shard in pairs:
            parts = full.view(self.size, -1)
            in_place = shard.dtype is full.dtype is dtype
            buffers = [torch.empty_like(shard, dtype=full.dtype) for _ in self.others[in_place:]]
            received = dict(zip(self.others, [shard, *buffers] if in_place else buffers, strict=True))
            here += list(received.items())
            there += [(r, parts[r]) for r in self.others]
            received[self.place] = parts[self.place]
            sums.append((shard, [received[r] for r in range(self.size)]))
        arrived = self.swap(here, there, run.tag(self.name))

        def end() -> None:
            arrived()
            for shard, parts in sums:
                _add(parts, dtype, shard)

        return end

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], run: Announcements
    ) -> End:
        here, there = out.split(list(received)), sent.detach().split(list(splits))
        here[self.place].copy_(there[self.place])
        inward = [(r, here[r]) for r in self.others if received[r]]
        outward = [(r, there[r]) for r in self.others if splits[r]]
        return self.swap(inward, outward, run.tag(self.name))

    def trade(self, received: Messages, sent: Messages, run: Announcements) -> End:
        return self.swap(received, sent, run.tag(self.name))

    def swap(self, here: Messages, there: Messages, tag: int) -> End:
        """Launches messages, receives first."""
        assert all(t.is_contiguous() for _, t in [*here, *there]), "messages are contiguous"
        group = self.group
        with _unrecorded():
            works = [group.recv([t], r, tag) for r, t in here]
            works += [group.send([t], r, tag) for r, t in there]
        _messages[id(works)] = works

        def end() -> None:
            for work in works:
                work.wait()
            _messages.pop(id(works), None)

        return end

    # fingerprints

    def exchange(self, word: int) -> Answers:
        return Answers(self, word)

    def sever(self) -> None:
        """Breaks all connections of the group, on both sides: a receive that times out does that."""
        for over in self.lanes() if self._group() is not None else ():
            for peer in set(range(over.size())) - {over.rank()}:
                with suppress(RuntimeError):
                    over.recv([torch.empty(1)], peer, WORD + 1).wait(timedelta(milliseconds=1))


class Answers:
    """An exchange of fingerprints by messages."""

    def __init__(self, line: GlooTransport, word: int):
        self.words = torch.full((line.size,), word)
        mine = torch.tensor([word])
        here = [(r, self.words[r : r + 1]) for r in line.others]
        self.end = line.swap(here, [(r, mine) for r in line.others], WORD)

    def ready(self) -> bool:
        return False

    def wait(self) -> list[int]:
        self.end()
        return self.words.tolist()  # type: ignore[no-any-return]


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Hides the messages from torch's profiler. A message's entry stays open until its wait. If the profile ends first,
    as it may after an optimizer step, closing the entry corrupts memory (a crash in the next garbage collection).
    `mfsdp.ranges` shows launches and waits. Private in torch; tried on 2.13, not on the others of 2.11 to 2.15.
    """
    if not torch.autograd._profiler_enabled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def _add(parts: list[torch.Tensor], dtype: torch.dtype, out: torch.Tensor) -> None:
    """Sums parts in order into ``out``, which may be one of them."""
    first, second, *more = parts
    if out.dtype is first.dtype is dtype:
        total = torch.add(first, second, out=out)
    else:
        total = first.to(dtype, copy=True).add_(second)
    for another in more:
        total.add_(another)
    if total is not out:
        out.copy_(total)
