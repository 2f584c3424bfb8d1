"""A training step with kept casts and without, in one process of a fake group: ``python examples/bench/keep_cast.py``.

Processor time, one thread, medians of interleaved pairs. Values are not real: what other ranks would send is not there.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import mfsdp


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def trainer(width: int, units: int, keep: bool) -> Any:
    torch.manual_seed(0)
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)
    model = nn.Sequential(*(Block(width) for _ in range(units)))
    mfsdp.fully_shard(model, units=[Block], mp_policy=policy)
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), compile=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mfsdp", options={"keep_cast": keep})

    def step(x: torch.Tensor, microbatches: int) -> float:
        begun = time.process_time()
        for _ in range(microbatches):
            compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for width, units, batch in ((512, 16, 64), (1024, 8, 16), (64, 32, 8)):
        steps = [trainer(width, units, keep) for keep in (False, True)]
        x = torch.randn(batch, width, dtype=torch.bfloat16)
        for microbatches in (1, 4):
            pairs = [[step(x, microbatches) for step in steps] for _ in range(rounds + 3)][3:]
            without, kept = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(
                f"{units} units of 2 x {width} x {width}, batch {batch}, {microbatches} microbatches: "
                f"{without:.1f} ms, kept {kept:.1f} ms, ratio {ratio:.3f}",
                flush=True,
            )
