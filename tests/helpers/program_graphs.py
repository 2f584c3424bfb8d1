"""CUDA graphs of compiled subgraphs on the CPU.

As on a GPU, recording changes no memory, advances no generator and gives no values; a graph knows its inputs by their
addresses alone, and writes its results to memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mfsdp.runtime import capturing


class SubgraphGraph:
    """A graph of one compiled subgraph."""

    made: list[SubgraphGraph] = []  # noqa: RUF012

    def __init__(self, device: torch.device, pool: capturing.Pool):
        self.nbytes = self.replays = 0
        self.pool = pool
        self.made.append(self)

    def record(self, work: Callable[[], Any], stream: torch.Stream | None) -> Any:
        assert isinstance(work, partial)
        self.work = work
        inputs: list[torch.Tensor] = work.args[1]
        random, before = torch.get_rng_state(), [x.clone() for x in inputs]
        out = work()
        torch.set_rng_state(random)
        for x, former in zip(inputs, before, strict=True):
            x.copy_(former)
        mine = {x.untyped_storage().data_ptr() for x in inputs}
        self.out = [x for x in out if x.untyped_storage().data_ptr() not in mine]
        self.at = [i for i, x in enumerate(out) if x.untyped_storage().data_ptr() not in mine]
        for x in self.out:  # the device has run nothing
            x.view(-1).view(torch.uint8).fill_(0x7F) if x.is_contiguous() else x.zero_()
        self.nbytes = sum(x.nbytes for x in self.out)
        return out

    def replay(self) -> None:
        self.replays += 1
        out = self.work()
        for mine, at in zip(self.out, self.at, strict=True):
            mine.copy_(out[at])


@contextmanager
def program_graphs() -> Iterator[list[SubgraphGraph]]:
    """Programs on the CPU are captured inside of the ``with``, under ``cuda_graph="programs"``."""
    SubgraphGraph.made = []
    capturing.GRAPHS["cpu"] = SubgraphGraph
    try:
        yield SubgraphGraph.made
    finally:
        del capturing.GRAPHS["cpu"]
