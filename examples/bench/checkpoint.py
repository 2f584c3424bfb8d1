"""Saving and loading against plain ``torch.save`` of the same bytes: ``torchrun --nproc-per-node=2 checkpoint.py``."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import mfsdp


def timed(function: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        function()
        dist.barrier()
        best = min(best, time.perf_counter() - begun)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    mfsdp.fully_shard(model, units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, args.width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    size = 3 * 4 * sum(p.numel() for p in model.parameters())
    mine = [t.to_local().clone() for t in model.parameters()] + [
        v.to_local().clone() for s in optimizer.state.values() for v in s.values() if v.dim()
    ]
    with tempfile.TemporaryDirectory() as folder:
        where = [folder]
        dist.broadcast_object_list(where)
        root, step = Path(where[0]), 0

        def plain() -> None:
            with open(root / f"plain{rank}", "wb") as file:
                torch.save(mine, file)
                file.flush()
                os.fsync(file.fileno())

        def torchs() -> None:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=root / "dcp")

        checkpoints = mfsdp.Checkpoints(root / "run", keep=1)

        def ours() -> None:
            nonlocal step
            step += 1
            checkpoints.save(step, model, optimizer)

        rows = {"torch.save, each rank its part": timed(plain, args.rounds), "dcp.save": timed(torchs, args.rounds),
                "Checkpoints.save": timed(ours, args.rounds),
                "Checkpoints.load": timed(lambda: checkpoints.load(model, optimizer), args.rounds)}  # fmt: skip
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {size / 2**20:.0f} MB of weights and moments, best of {args.rounds}")
        for name, seconds in rows.items():
            print(f"| {name} | {seconds:.2f} s | {size / seconds / 1e6:.0f} MB/s |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
