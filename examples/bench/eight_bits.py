"""FP8 weights behind a slow link, in one and in two bytes per element: ``python examples/bench/eight_bits.py``.

Blocks of two linear layers, by torchao's recipes and in bf16, on mfsdp and on FSDP2, in one run, taking turns. What
travels is bf16 but for FP8 weights where those are cast before. A CPU has no instruction for either: all contenders
multiply in fp32, torchao's by ``emulate=True``. Needs root and Linux (slowlink.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

import mfsdp

sys.path.insert(0, str(Path(__file__).parent))
from slow_links import result_of


class Narrow(nn.Linear):
    """What bf16 would do where there are instructions for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = Narrow(width, 4 * width, bias=False), Narrow(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1gbit,500mbit,250mbit", help="of each rank's link")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def blocks(args: argparse.Namespace, config: Float8LinearConfig | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(args.width) for _ in range(args.layers)]).to(torch.bfloat16)
    if config is None:
        return model
    for block in model:
        for name in ("up", "down"):  # torchao takes exactly `nn.Linear`
            getattr(block, name).__class__ = nn.Linear
    return convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def recipe(name: str) -> Float8LinearConfig:
    config = Float8LinearConfig.from_recipe_name(name)
    return Float8LinearConfig(**{**vars(config), "emulate": True})


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    data = torch.randn(args.tokens, args.width, dtype=torch.bfloat16)

    def ours(config: Float8LinearConfig | None, **options: Any) -> tuple[nn.Module, Any]:
        model = blocks(args, config)
        for block in model:
            mfsdp.fully_shard(block, reshard_after_forward=block is not model[-1])
        mfsdp.fully_shard(model)
        return model, torch.compile(model, backend="mfsdp", dynamic=False, options=options)

    def theirs(config: Float8LinearConfig | None) -> tuple[nn.Module, Any]:
        model = blocks(args, config)
        for block in model:
            fully_shard(block, reshard_after_forward=block is not model[-1])
        fully_shard(model)
        units = [model, *model]
        for unit in units:
            unit._set_unshard_async_op(True)  # type: ignore[operator]
        for here, there in pairwise(units):
            here.set_modules_to_forward_prefetch([there])  # type: ignore[operator]
        for here, there in pairwise(units[::-1]):
            here.set_modules_to_backward_prefetch([there])  # type: ignore[operator]
        for block in model:
            block.compile(dynamic=False)
        return model, model

    gathered = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    contenders: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "mfsdp, bf16": lambda: ours(None),
        "mfsdp, tensorwise, `quantize=False`": lambda: ours(recipe("tensorwise"), quantize=False),
        "mfsdp, tensorwise": lambda: ours(recipe("tensorwise")),
        "mfsdp, rowwise, `quantize=False`": lambda: ours(recipe("rowwise"), quantize=False),
        "mfsdp, rowwise": lambda: ours(recipe("rowwise")),
        "FSDP2, bf16": lambda: theirs(None),
        "FSDP2, tensorwise": lambda: theirs(recipe("tensorwise")),
        "FSDP2, tensorwise, its FP8 gather": lambda: theirs(gathered),
        "FSDP2, rowwise": lambda: theirs(recipe("rowwise")),
    }

    def step(name: str, model: nn.Module, run: Any, optimizer: torch.optim.Optimizer) -> float:
        loss = run(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "its FP8" in name:
            precompute_float8_dynamic_scale_for_fsdp(model)
        return loss.item()

    running: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    for name, build in contenders.items():
        torch._dynamo.reset()
        model, run = build()
        running[name] = (model, run, torch.optim.SGD(model.parameters(), lr=0.1))
        losses[name] = [step(name, *running[name]) for _ in range(2)]
        if rank == 0:
            print(f"  {name}: {losses[name]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(args.rounds):
        for name, entry in running.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(2):
                step(name, *entry)
            times[name].append((time.perf_counter() - begun) / 2)
    if rank == 0:
        args.result.write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    os._exit(0)


def main() -> None:
    args = arguments()
    if args.result is not None:
        worker(args)
        return
    print(f"{args.layers} blocks of width {args.width}, {args.tokens} tokens a rank, 2 ranks")
    for rate in args.rates.split(","):
        found = result_of(__file__, 2, rate, OMP_NUM_THREADS="1", PIN="1")
        base = statistics.median(found["times"]["mfsdp, bf16"])
        print(f"\n## Link {rate}\n\n| | ms | best | bf16 on mfsdp / |\n|---|---|---|---|")
        for name, times in found["times"].items():
            median = statistics.median(times)
            print(f"| {name} | {1e3 * median:.0f} | {1e3 * min(times):.0f} | {base / median:.2f} |")


if __name__ == "__main__":
    main()
