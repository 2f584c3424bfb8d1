"""Reinforcement learning on two processes: a sharded model trains, and a whole copy of it on each process generates.

    python examples/stream/train.py

Every round streams the weights into the copies, unit by unit in bfloat16; each copy samples texts for its own prompts;
a text is rewarded for its share of one token; the sharded model learns from all of them (REINFORCE, the mean reward as
baseline). Without RANK in the environment the script starts itself through torchrun.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mfsdp

WIDTH, VOCABULARY, LENGTH, WANTED = 32, 16, 12, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Policy(nn.Module):
    """The next token, of all tokens so far: their mean goes through the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.blocks(x.cumsum(1) / torch.arange(1, ids.size(1) + 1, device=ids.device)[:, None]))


@torch.no_grad()
def generate(policy: nn.Module, prompts: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    ids = prompts
    while ids.size(1) < LENGTH:
        odds = policy(ids)[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(odds, 1, generator=draws)], 1)
    return ids


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = Policy()
    copies = copy.deepcopy(model).bfloat16()  # generates: whole on each process
    mfsdp.fully_shard(model, units=[Block])
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    weights = mfsdp.stream_weights(model, torch.bfloat16)
    draws = torch.Generator().manual_seed(dist.get_rank())

    for number in range(args.rounds):
        begun = time.perf_counter()
        mfsdp.load_stream(copies, weights)
        streamed = time.perf_counter() - begun
        prompts = torch.randint(VOCABULARY, (args.batch, 2), generator=draws)
        ids = generate(copies, prompts, draws)
        rewards = (ids[:, 2:] == WANTED).float().mean(1)
        mean = rewards.mean()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        chosen = -F.cross_entropy(run(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        gains = (rewards - mean)[:, None] * chosen.view(args.batch, -1)[:, 1:]
        (-gains.sum(1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (number % 10 == 0 or number == args.rounds - 1):
            print(f"round {number}: reward {mean.item():.3f}, streamed in {streamed * 1e3:.1f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batch", type=int, default=32, help="texts per process and round")
    parser.add_argument("--lr", type=float, default=1e-2)
    given = parser.parse_args()
    if "RANK" in os.environ:
        main(given)
    else:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.processes}"]
        sys.exit(subprocess.call([*start, __file__, *sys.argv[1:]], env={"OMP_NUM_THREADS": "1", **os.environ}))
