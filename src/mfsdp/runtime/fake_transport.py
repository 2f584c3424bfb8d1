"""Transport for torch's fake process groups, for plans and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .transport import End, Messages, Pairs, Transport

if TYPE_CHECKING:
    from .announcements import Announcements


class FakeTransport(Transport):
    """All ranks hold this rank's values; nothing is communicated, and everything completes at launch."""

    def gather(self, pairs: Pairs, run: Announcements) -> End:
        for full, shard in pairs:
            full.view(self.size, -1).copy_(shard.detach().expand(self.size, -1))
        return _done

    def scatter(self, pairs: Pairs, dtype: torch.dtype, run: Announcements) -> End:
        for full, shard in pairs:
            shard.copy_(full.view(self.size, -1)[self.place].to(dtype).mul_(self.size))
        return _done

    def all_reduce(self, tensor: torch.Tensor, op: str, run: Announcements) -> End:
        if op == "sum":
            tensor.mul_(self.size)
        return _done

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], run: Announcements
    ) -> End:
        mine = sent.detach().split(list(splits))[self.place]
        for part in out.split(list(received)):
            rows = min(len(part), len(mine))
            part[:rows].copy_(mine[:rows])
            part[rows:].zero_()
        return _done

    def trade(self, received: Messages, sent: Messages, run: Announcements) -> End:
        for (_, out), (_, mine) in zip(received, sent, strict=True):
            out.copy_(mine)
        return _done


def _done() -> None:
    pass
