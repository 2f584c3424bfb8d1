"""Trains on after a rank has died, by itself, on as many ranks as are left:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \\
             --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/elastic/train.py --out run

torchrun starts all processes anew when one ends, on the nodes that are still there (one to two here); by itself with
the store of before, in which they find addresses of processes that are gone, and wait for those (torch 2.13): hence
the first line. All take up the newest complete checkpoint. Which samples a step sees depends on the step alone, not on
how many ranks share them, and so does what it makes of them, but for the order in which numbers are added up.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mfsdp

WIDTH, BATCH = 64, 12
"""Samples of a step, over all ranks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of what the step sees: inputs, and what a hidden linear map makes of them."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=numbers)
    hidden = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine], (inputs @ hidden)[mine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("elastic-out"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="inductor")
    args = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    mfsdp.fully_shard(model, units=[Block], device=device)
    model.set_gradient_divide_factor(1.0, recurse=True)  # losses are divided by BATCH already
    run = torch.compile(model, backend="mfsdp", options={"lowering": args.lowering})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpoints = mfsdp.Checkpoints(args.out, keep=2)
    begun = checkpoints.load(model, optimizer) or 0
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, from step {begun}", flush=True)
    for step in range(begun + 1, args.steps + 1):
        inputs, wanted = (t.to(device) for t in samples(step))
        loss = (run(inputs) - wanted).square().mean(-1).sum() / BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0 or step == args.steps:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(json.dumps({"step": step, "loss": total.item()}), flush=True)
            checkpoints.save(step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
