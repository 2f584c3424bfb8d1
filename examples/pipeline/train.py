"""Trains a small language model as a pipeline: two stages on two ranks each, under one of torch's schedules.

    python examples/pipeline/train.py                              InterleavedZeroBubble, backward in two parts
    python examples/pipeline/train.py --schedule 1F1B              one stage per rank, whole backwards

Without RANK in the environment it starts itself once per process through torchrun. Listings are in --out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import mfsdp

sys.path.insert(0, str(Path(__file__).parent.parent))
from demo.data import Batches, corpus
from demo.model import Block, Config, Llama, rotary


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="InterleavedZeroBubble", help="of torch.distributed.pipelining")
    parser.add_argument("--processes", type=int, default=4, help="two pipeline ranks with this many shards together")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="eager")
    parser.add_argument("--out", type=Path, default=Path("pipeline-out"))
    return parser.parse_args()


def launch(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
    return subprocess.call([*command, __file__, *sys.argv[1:]], env={"OMP_NUM_THREADS": "1", **os.environ})


class Stage(nn.Module):
    """Some blocks of a model, with the embedding in the first stage and the head in the last. Paths stay."""

    def __init__(self, model: Llama, number: int, count: int):
        super().__init__()
        self.config, self.tokens, self.head = model.config, None, None
        size = len(model.blocks) // count
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(number * size, (number + 1) * size)})
        if number == 0:
            self.tokens = model.tokens
        if number == count - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tokens is None else self.tokens(x)
        cos, sin = rotary(x.shape[1], self.config.width // self.config.heads, x.device)
        for block in self.blocks.values():
            x = block(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp_shard"))
    rank, several = mesh["pp"].get_local_rank(), issubclass(get_schedule_class(args.schedule), PipelineScheduleMulti)
    count = 4 if several else 2
    mine = ([rank, 3 - rank] if args.schedule in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + 2])[: count // 2]
    torch.manual_seed(0)
    model = Llama(Config(layers=4, width=64, length=128))
    parts = [Stage(model, number, count) for number in mine]
    stages = []
    for number, part in zip(mine, parts, strict=True):
        mfsdp.fully_shard(part, mesh=mesh, units=[Block], strategy="optim_grads")
        options = {"lowering": args.lowering, "split_backward": several, "dump": str(args.out / f"stage{number}")}
        run: Any = torch.compile(part, backend="mfsdp", dynamic=False, options=options)
        stages.append(mfsdp.PipelineStage(run, number, count, torch.device("cpu"), group=mesh["pp"].get_group()))
    schedule: Any = get_schedule_class(args.schedule)
    schedule = schedule(stages if several else stages[0], args.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=args.lr)
    batches = Batches(corpus()[0], 2 * args.microbatches, 128, seed=mesh.get_local_rank("dp_shard"))
    begun = time.perf_counter()
    for step in range(1, args.steps + 1):
        x, y = batches.next()
        losses: list[torch.Tensor] = []
        ends = {"target": y, "losses": losses} if count - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **ends, return_outputs=False)
        mfsdp.clip_grad_norm_(parts, 1.0, mesh=mesh)
        optimizer.step()
        optimizer.zero_grad()
        if losses and mesh.get_local_rank("dp_shard") == 0 and (step == 1 or step % 10 == 0):
            seconds = time.perf_counter() - begun
            print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}, {seconds:.0f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = arguments()
    sys.exit(launch(given) if "RANK" not in os.environ else main(given))
