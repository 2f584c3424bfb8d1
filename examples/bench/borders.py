"""A step whose optimizer launches the next forward's first gathers, over one whose does not:
``python examples/bench/borders.py``.

One process of a fake group of two ranks, lowering "stitched", one thread. Nothing travels: a collective takes a time
that is set, one after the other in each group, and whoever waits sleeps until it is over. How long a step stands still
so, wall time, and with collectives that take no time processor time: what the launches cost the host. Medians over
blocks of five steps in turns, of which the first two do not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

import mfsdp
from mfsdp.runtime.fake_transport import FakeTransport
from mfsdp.runtime.transport import End
from mfsdp.runtime.transport_registry import carried_by

SECONDS = 0.0
"""That a collective takes."""

waited = [0.0]
"""Seconds that the step has stood still."""


class Slow(FakeTransport):
    """As late as a link."""

    free = 0.0
    """When the link of this group is."""

    def gather(self, *args: Any) -> End:
        super().gather(*args)
        return self._late()

    def scatter(self, *args: Any) -> End:
        super().scatter(*args)
        return self._late()

    def _late(self) -> End:
        self.free = there = max(self.free, time.perf_counter()) + SECONDS

        def end() -> None:
            left = there - time.perf_counter()
            if left > 0:
                waited[0] += left
                time.sleep(left)

        return end


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(x).relu())


def built(ahead: bool, compile: bool, units: int, width: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(units)))
    mfsdp.fully_shard(model, units=[Block])
    run = torch.compile(model, backend="mfsdp", options={"prefetch": 2})
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()), compile, ahead=ahead)
    x = torch.randn(64, width)

    def step() -> None:
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    global SECONDS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for units, width, seconds in ((8, 512, 0.004), (8, 512, 0.0), (16, 64, 0.0)):
        for compile in (False, True):
            with mfsdp.fake_ranks(2), carried_by(lambda group, kind: Slow(group)):
                SECONDS = 0.0
                torch._dynamo.reset()
                steps = [built(ahead, compile, units, width) for ahead in (False, True)]
                clock = time.perf_counter if seconds else time.process_time
                took: list[list[tuple[float, float]]] = [[], []]
                for block in range(rounds):
                    SECONDS = seconds if block else 0.0
                    for which, step in enumerate(steps):
                        for i in range(5):
                            begun, waited[0] = clock(), 0.0
                            step()
                            if block and i > 1:
                                took[which].append((clock() - begun, waited[0]))
                (without, stood), (ahead, stands) = (
                    [1e3 * statistics.median(x) for x in zip(*t, strict=True)] for t in took
                )
            print(
                f"{units} units of 2 x {width} x {width}, {1e3 * seconds:g} ms a collective, optimizer "
                f"{'compiled' if compile else 'uncompiled'}: {without:.2f} ms without, {ahead:.2f} with "
                f"({'wall' if seconds else 'processor'} time); stands still {stood:.2f} ms, {stands:.2f}"
            )


if __name__ == "__main__":
    main()
