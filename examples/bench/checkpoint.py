"""Saving and loading against ``dcp.save`` and plain ``torch.save`` of the same bytes, in turns, and the memory that all
take: ``torchrun --nproc-per-node=2 checkpoint.py``. What is saved takes the place of what was saved before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
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

sys.path.insert(0, str(Path(__file__).parent))
from bench import peak_of


def in_turns(
    rows: dict[str, Callable[[], object]], end: Callable[[], object], rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of each, and medians of their ratios to ``dcp.save`` of the same round; the first does not count.
    ``end`` is called between two.
    """
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds + 1):
        for name, function in rows.items():
            dist.barrier()
            begun = time.perf_counter()
            function()
            dist.barrier()
            times[name].append(time.perf_counter() - begun)
            end()
    base = times["dcp.save"][1:]
    return {
        name: (statistics.median(t[1:]), statistics.median(a / b for a, b in zip(t[1:], base, strict=True)))
        for name, t in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
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
    where = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(where)
    root, step = Path(where[0]), 0

    def plain() -> None:
        with open(root / f"plain{rank}", "wb") as file:
            torch.save(mine, file)
            file.flush()
            os.fsync(file.fileno())

    def torchs(fsync: bool = True) -> None:
        weights, state = get_state_dict(model, optimizer)
        writer = dcp.FileSystemWriter(root / "dcp", sync_files=fsync)
        dcp.save({"model": weights, "optimizer": state}, storage_writer=writer)

    def torchs_afresh() -> None:
        torchs()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root / "dcp")

    checkpoints = mfsdp.Checkpoints(root / "run", keep=1)

    def ours(blocking: bool = True) -> None:
        nonlocal step
        step += 1
        checkpoints.save(step, model, optimizer, blocking=blocking)

    def load() -> None:
        checkpoints.load(model, optimizer)

    def init() -> None:
        with torch.device("meta"):
            blank = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
        mfsdp.fully_shard(blank, units=[nn.Linear], device="cpu")

    one_file = 8 * args.width**2
    rows = {
        "torch.save, each rank its part, fsync": plain,
        "dcp.save": torchs,
        "dcp.save to a new folder, the old one deleted": torchs_afresh,
        "dcp.save without fsync": lambda: torchs(fsync=False),
        "Checkpoints.save": ours,
        "Checkpoints.save, until the old one is deleted": lambda: (ours(), checkpoints.wait()),
        "Checkpoints.save(blocking=False)": lambda: ours(blocking=False),
        "Checkpoints.save(blocking=False), until it is there": lambda: (ours(blocking=False), checkpoints.wait()),
        "Checkpoints.load": load,
    }
    times = in_turns(rows, checkpoints.wait, args.rounds)
    memory = {
        "Checkpoints.save": peak_of(ours),
        "Checkpoints.save(blocking=False)": peak_of(lambda: ours(blocking=False)),
        "Checkpoints.load": peak_of(load),
        "save_safetensors": peak_of(lambda: mfsdp.save_safetensors(model, root / "hf", max_file_bytes=one_file)),
        "load_safetensors": peak_of(lambda: mfsdp.load_safetensors(model, root / "hf")),
        "fully_shard of a meta model": peak_of(init),
    }
    dist.barrier()
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {size / 2**20:.0f} MB of weights and moments, medians of {args.rounds}")
        for name, (seconds, ratio) in times.items():
            print(f"| {name} | {seconds:.2f} | {size / seconds / 1e6:.0f} | {ratio:.2f} |")
        newest = checkpoints.path(step)
        there = {"max_file_bytes": one_file}
        memory["convert to safetensors"] = peak_of(lambda: mfsdp.convert(newest, root / "a", **there))
        memory["convert to a checkpoint"] = peak_of(lambda: mfsdp.convert(root / "a", root / "b"))
        part = sum(p.to_local().nbytes for p in model.parameters()) / 2**20
        print(f"Most memory, MB; a rank's weights are {part:.0f}, a unit {args.width**2 / 2**18:.0f}, "
              f"a safetensors file {one_file / 2**20:.0f}")  # fmt: skip
        for name, peak in memory.items():
            print(f"| {name} | {peak / 2**20:.1f} |")
        shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
