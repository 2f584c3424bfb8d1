"""Trains a small mixture of experts on four processes, with tensor or expert parallelism beside sharding:

    python examples/parallel/train.py --ep 2        experts of each layer on two ranks each, tokens sent to them
    python examples/parallel/train.py --tp 2        attention, embedding and head cut over two ranks

Without RANK in the environment it starts itself once per process through torchrun. Listings after every pass and a
report of the step are in --out.
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
from torch.distributed.device_mesh import init_device_mesh

import mfsdp

sys.path.insert(0, str(Path(__file__).parent.parent))
from demo.data import Batches, corpus
from parallel.model import Experts, Mixtral, MixtureLayer, expert_parallel, tensor_parallel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="how many")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts of a layer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="windows of 128 bytes per data-parallel rank and step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="eager")
    parser.add_argument("--out", type=Path, default=Path("parallel-out"))
    return parser.parse_args()


def launch(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
    return subprocess.call([*command, __file__, *sys.argv[1:]], env={"OMP_NUM_THREADS": "1", **os.environ})


def build(args: argparse.Namespace) -> tuple[Mixtral, int]:
    """The model, parallelised and sharded; and which of the data this rank trains on."""
    if args.tp > 1 and args.ep > 1:
        raise SystemExit("--tp or --ep: this example cuts experts over ranks that have other data")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = Mixtral(width=64, heads=4, hidden=128, vocab=256, layers=2, experts=8)
    mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp_shard", "tp"))
    if args.tp > 1:
        tensor_parallel(model, mesh["tp"], sequence=False)
    if args.ep > 1:
        sparse = init_device_mesh("cpu", (world // args.ep, args.ep), mesh_dim_names=("efsdp", "ep"))
        expert_parallel(model, sparse["ep"])
        for experts in (m for m in model.modules() if isinstance(m, Experts)):
            mfsdp.fully_shard(experts, mesh=sparse["efsdp"])
    return mfsdp.fully_shard(model, mesh=mesh, units=[MixtureLayer]), mesh.get_local_rank("dp_shard")


def main(args: argparse.Namespace) -> None:
    torch._dynamo.config.capture_scalar_outputs = True  # how many tokens go to an expert depends on data
    dist.init_process_group("gloo")
    model, part = build(args)
    run: Any = torch.compile(
        model, backend="mfsdp", dynamic=False, options={"lowering": args.lowering, "dump": str(args.out)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = Batches(corpus()[0], args.batch, 128, seed=part)
    begun = time.perf_counter()
    for step in range(1, args.steps + 1):
        inputs, targets = batches.next()
        loss = F.cross_entropy(run(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            seconds = time.perf_counter() - begun
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.3f}, {seconds:.0f} s", flush=True)
    mfsdp.check_replicas(model)
    if dist.get_rank() == 0:
        print(f"listings and the report of the step: {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    given = arguments()
    sys.exit(launch(given) if "RANK" not in os.environ else main(given))
