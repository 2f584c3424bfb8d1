"""An optimizer's step with many small parameters, beside FSDP2's: ``python examples/bench/optimizer.py``. And what it
takes in parts, and with state on the host behind a link of some rate: ``--width 512 --layers 8 --streamed 0 4e9``.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import mfsdp
from mfsdp.optim import parameter_ranges as ranges
from mfsdp.runtime import host_memory


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(self.norm1(x)).chunk(3, -1)[0])
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def model(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def ours(layers: int, width: int) -> tuple[nn.Module, Any]:
    return mfsdp.fully_shard(model(layers, width), units=[Block]), torch.optim.AdamW


def flat(layers: int, width: int) -> tuple[nn.Module, Any]:
    made, _ = ours(layers, width)
    return made, lambda p, **kwargs: mfsdp.fully_shard_optimizer(torch.optim.AdamW(p, **kwargs))


def fsdp2(layers: int, width: int) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    made = model(layers, width)
    for block in made:
        fully_shard(block)
    return fully_shard(made), torch.optim.AdamW


def offloaded(layers: int, width: int) -> tuple[nn.Module, Any]:
    made, _ = ours(layers, width)
    return made, lambda p, **kwargs: mfsdp.fully_shard_optimizer(torch.optim.AdamW(p, **kwargs), offload="state")


def streamed(rank: int, world: int, layers: int, width: int, rounds: int, rates: list[float]) -> None:
    """One call for all parameters, the default, unit by unit, and state on the host; taking turns."""
    begin(rank, world)
    found: dict[str, tuple[Any, int, float]] = {}
    ways = [("one call", flat, 1 << 60, 0.0), ("default", flat, ranges.TOGETHER, 0.0), ("unit by unit", flat, 0, 0.0)]
    ways += [(f"on the host, {rate:.0e} bytes/s" if rate else "on the host", offloaded, 0, rate) for rate in rates]
    for name, make, together, rate in ways:
        made, build = make(layers, width)
        made(torch.randn(2, width)).sum().backward()
        found[name] = build(made.parameters(), foreach=True), together, rate
    steps: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds + 1):
        for name, (optimizer, together, rate) in found.items():
            ranges.TOGETHER = together
            with host_memory.at_rate(rate or float("inf")):
                begun = time.perf_counter()
                optimizer.step()
                steps[name].append(time.perf_counter() - begun)
    if rank == 0:
        numel = sum(p.numel() for p in made.parameters())
        print(f"{numel / 1e6:.1f}M parameters in {layers} units, {world} ranks, AdamW, foreach, median of {rounds}")
        for name, times in steps.items():
            middle, one = (sorted(t[1:])[rounds // 2] for t in (times, steps["one call"]))
            print(f"{name:<32} {middle * 1e3:8.2f} ms {middle / one:6.2f}")
    dist.barrier()
    dist.destroy_process_group()


def begin(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29631")
    dist.init_process_group("gloo", rank=rank, world_size=world)


def worker(rank: int, world: int, layers: int, width: int, rounds: int) -> None:
    begin(rank, world)
    contenders: dict[str, tuple[Any, float]] = {}
    steps: dict[str, list[float]] = {}
    for foreach in (False, True):
        for name, make in (("mfsdp, flat", flat), ("mfsdp", ours), ("FSDP2", fsdp2)):
            made, build = make(layers, width)
            made(torch.randn(2, width)).sum().backward()
            contenders[f"{name}{', foreach' if foreach else ''}"] = build(made.parameters(), foreach=foreach)
            count = sum(1 for _ in made.parameters())
    for _ in range(rounds):
        for name, optimizer in contenders.items():
            begun = time.perf_counter()
            optimizer.step()
            steps.setdefault(name, []).append(time.perf_counter() - begun)
    if rank == 0:
        print(f"{count} parameters of width {width} in {layers} units, {world} ranks, AdamW on CPU, best of {rounds}")
        for name, times in steps.items():
            print(f"{name:<22} {min(times) * 1e3:8.2f} ms")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streamed", type=float, nargs="+", metavar="RATE", help="bytes/s of the link; 0: no limit")
    args = parser.parse_args()
    import warnings

    warnings.simplefilter("ignore")
    sizes = (args.world, args.layers, args.width, args.rounds)
    if args.streamed:
        mp.spawn(streamed, args=(*sizes, args.streamed), nprocs=args.world)
    else:
        mp.spawn(worker, args=sizes, nprocs=args.world)
