"""A step of Muon beside FSDP2's, where each rank makes all matrices whole: ``python examples/bench/muon.py``."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import mfsdp


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(self.norm(x)).chunk(3, -1)[0])
        return x + self.down(torch.relu(self.up(x)))


def ours(model: nn.Module) -> nn.Module:
    return mfsdp.fully_shard(model, units=[Block])


def fsdp2(model: nn.Module) -> nn.Module:
    for block in model.children():
        fully_shard(block)
    return fully_shard(model)


def flat(optimizer: torch.optim.Optimizer, **options: Any) -> Callable[[], Any]:
    return mfsdp.fully_shard_optimizer(optimizer, **options).step


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


CONTENDERS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], Callable[[], Any]]]] = {
    "AdamW, flat": (ours, lambda model: flat(torch.optim.AdamW(model.parameters()))),
    "Muon, owners": (ours, lambda model: flat(muon(model))),
    "Muon, owners, a wave per unit": (ours, lambda model: flat(muon(model), max_staging=1)),
    "FSDP2, Muon on DTensors": (fsdp2, lambda model: muon(model).step),
}


def worker(rank: int, world: int, layers: int, width: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29633")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    steps, times = {}, dict[str, list[float]]()
    for name, (shard, build) in CONTENDERS.items():
        torch.manual_seed(0)
        model = shard(nn.Sequential(*(Block(width) for _ in range(layers))))
        model(torch.randn(2, width)).sum().backward()
        steps[name] = build(model)
    for _ in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            dist.barrier()
            times.setdefault(name, []).append(time.perf_counter() - begun)
    if rank == 0:
        print(f"{layers} units of width {width}, {world} ranks on CPU, median of {rounds}")
        middle = {name: sorted(each[1:])[rounds // 2] for name, each in times.items()}
        for name, seconds in middle.items():
            print(f"{name:<32} {seconds * 1e3:8.1f} ms {middle['FSDP2, Muon on DTensors'] / seconds:6.2f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    mp.spawn(worker, args=(args.world, args.layers, args.width, args.rounds), nprocs=args.world)
