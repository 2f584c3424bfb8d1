"""What guards cost: whole steps with probes, and of a model whose units may be unused, beside steps
without: ``torchrun --nproc-per-node=2 examples/bench/guards.py``. Medians of ratios in interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import mfsdp

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT, Block

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without": ({}, {}),
    "check_finite=1": ({"check_finite": 1}, {}),
    "check_finite=100": ({"check_finite": 100}, {}),
    "check_replicas=1 (no_shard)": ({"check_replicas": 1}, {"strategy": 0}),
    "no_shard": ({}, {"strategy": 0}),
    "may_be_unused": ({}, {"may_be_unused": [Block]}),
}
"""Options of the backend, and arguments of `mfsdp.fully_shard`."""


def trainer(
    layers: int, width: int, options: dict[str, Any], sharding: dict[str, Any]
) -> Callable[[torch.Tensor], float]:
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("dp_shard",))  # nobody waits for another's
    model = mfsdp.fully_shard(GPT(layers, width), units=[Block], mesh=mesh, **sharding)
    run = torch.compile(model, backend="mfsdp", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> float:
        dist.barrier()
        begun = time.perf_counter()
        run(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begun

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    steps = {name: trainer(args.layers, args.width, *kind) for name, kind in KINDS.items()}
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(1024, (2, 256))
    rounds = [{name: step(ids) for name, step in steps.items()} for _ in range(args.rounds + 3)][3:]
    for name in KINDS if dist.get_rank() == 0 else ():
        other = "no_shard" if "no_shard" in name else "without"
        ratio = statistics.median(each[name] / each[other] for each in rounds)
        print(f"{name:<28} {1e3 * statistics.median(each[name] for each in rounds):8.1f} ms   {ratio:.3f} of {other}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
