"""A pipeline behind a slow link, 1F1B beside zero bubble: ``python examples/bench/pipeline.py``.

Each rank has one or two stages. Compute is emulated: an operation sleeps in forward, and twice in backward, once for
the gradient of its input and once for that of its weight, which the split separates. Beside the measured bubble, the
share of a step in which none of a rank's forwards and backwards runs, stands what `mfsdp.explain` says, which knows how
long a message takes and what sleeps. Needs root and Linux (slowlink.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class

import mfsdp
from mfsdp.config.hardware import Link
from mfsdp.ir.program import Program

sys.path.insert(0, str(Path(__file__).parent))
from slow_links import result_of

WIDTH, LAYERS = 256, 2
BUSY = [0.0]
"""Seconds of this rank's forwards and backwards."""

LIBRARY = torch.library.Library("bench", "DEF")
for _name in ("work", "work_input"):
    LIBRARY.define(f"{_name}(Tensor x, Tensor w, float ms) -> Tensor")
LIBRARY.define("work_weight(Tensor x, Tensor w, float ms) -> Tensor")


def _work(x: torch.Tensor, w: torch.Tensor, ms: float) -> torch.Tensor:
    time.sleep(ms / 1e3)
    return x * w


def _work_weight(x: torch.Tensor, grad: torch.Tensor, ms: float) -> torch.Tensor:
    time.sleep(ms / 1e3)
    return (x * grad).sum(0)


LIBRARY.impl("work", _work, "CompositeExplicitAutograd")
LIBRARY.impl("work_input", _work, "CompositeExplicitAutograd")
LIBRARY.impl("work_weight", _work_weight, "CompositeExplicitAutograd")
torch.library.register_fake("bench::work", lambda x, w, ms: torch.empty_like(x))
torch.library.register_fake("bench::work_input", lambda x, w, ms: torch.empty_like(x))
torch.library.register_fake("bench::work_weight", lambda x, w, ms: x.new_empty(x.shape[1:]))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.ms = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, w = ctx.saved_tensors
    return torch.ops.bench.work_input(grad, w, ctx.ms), torch.ops.bench.work_weight(x, grad, ctx.ms), None


torch.library.register_autograd("bench::work", _backward, setup_context=_keep)
OPERATORS = tuple(getattr(torch.ops.bench, name).default for name in ("work", "work_input", "work_weight"))


class Layer(nn.Module):
    """``ms``: of emulated compute."""

    def __init__(self, ms: float):
        super().__init__()
        self.weight, self.ms = nn.Parameter(torch.ones(WIDTH)), ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.bench.work(x, self.weight, self.ms)  # type: ignore[no-any-return]


class Stage(mfsdp.PipelineStage):
    """Measures how long its programs run."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return _timed(super().forward_one_chunk, args, kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return _timed(super().backward_one_chunk, args, kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return _timed(super().backward_weight_one_chunk, args, kwargs)


def _timed(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    begun = time.perf_counter()
    try:
        return run(*args, **kwargs)
    finally:
        BUSY[0] += time.perf_counter() - begun


class Slept:
    """What `mfsdp.explain` asks of a profile: seconds of the lines that sleep. It estimates the others."""

    def given(self, program: Program) -> dict[str, Any]:
        return {"measured": {n.name: float(n.args[2]) / 1e3 for n in program.calls(*OPERATORS)}}  # type: ignore[arg-type]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rate", default="400mbit", help="of each rank's link")
    parser.add_argument("--tokens", type=int, default=2048, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ms", type=float, default=240, help="of a rank's forward of a microbatch")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--schedules", default="1F1B,InterleavedZeroBubble,ZBVZeroBubble")
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp_shard"))
    machine, seconds = mfsdp.measure(), message_seconds(args, rank)
    found: dict[str, Any] = {"messages": [machine.inside.bandwidth, seconds]}
    link = Link(args.tokens * WIDTH * 4 / seconds, 0.0)
    machine = replace(machine, inside=link, between=link)
    options = {"lowering": "eager", "split_backward": True}
    running: dict[str, Any] = {}
    for name in args.schedules.split(","):
        each = 2 if name.startswith(("ZBV", "DualPipeV")) else 1
        number = world * each
        indices = [rank, number - 1 - rank][:each]

        def part(each: int = each) -> nn.Module:
            return nn.Sequential(*[Layer(args.ms / LAYERS / each) for _ in range(LAYERS)])

        report = mfsdp.explain(
            [part()] * number, (torch.zeros(args.tokens, WIDTH),), world=1, units=[Layer], hardware=machine,
            schedule=name, stages_per_rank=each, microbatches=args.microbatches, profile=Slept(), optimizer="none",
            suggest=False, options={"lowering": "eager", "check": False},
        )  # fmt: skip
        found[name] = {"said": report.pipeline.seconds, "bubbles": [r.bubble for r in report.pipeline.ranks]}
        torch._dynamo.reset()
        stages = []
        for index in indices:
            module = part()
            mfsdp.fully_shard(module, mesh=mesh, units=[Layer])
            run = torch.compile(module, backend="mfsdp", dynamic=False, options=options)
            stages.append(Stage(run, index, number, torch.device("cpu"), group=mesh["pp"].get_group()))
        schedule = get_schedule_class(name)(stages if name != "1F1B" else stages[0], args.microbatches, loss_fn=loss)
        running[name] = schedule, stages
    whole = torch.randn(args.tokens * args.microbatches, WIDTH)
    for turn in range(args.rounds + 2):
        for name, (schedule, stages) in running.items():
            dist.barrier()
            BUSY[0], begun = 0.0, time.perf_counter()
            has = [s.stage_index for s in stages]
            schedule.step(
                *([whole] if 0 in has else []), **({"target": whole} if stages[0].num_stages - 1 in has else {})
            )
            took = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            busy = torch.zeros(world)
            busy[rank] = BUSY[0]
            dist.all_reduce(busy)
            if turn > 1:
                found[name].setdefault("steps", []).append(float(took))
                found[name].setdefault("busy", []).append(busy.tolist())
            for stage in stages:
                stage.submod.zero_grad()
    if rank == 0:
        args.result.write_text(json.dumps(found, indent=1))
    dist.barrier()
    os._exit(0)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def message_seconds(args: argparse.Namespace, rank: int) -> float:
    """Of a microbatch's activations from rank 0 to rank 1 and back, halved: the median."""
    x, times = torch.randn(args.tokens, WIDTH), []
    for _ in range(10):
        dist.barrier()
        begun = time.perf_counter()
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
            (dist.recv if rank == 0 else dist.send)(x, 1 - rank)
        times.append((time.perf_counter() - begun) / 2)
    found = torch.tensor(statistics.median(times[2:]) if rank < 2 else 0.0)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def main() -> None:
    args = arguments()
    if args.result is not None:
        worker(args)
        return
    found = result_of(__file__, args.world, args.rate)
    bandwidth, seconds = found.pop("messages")
    gathered = args.tokens * WIDTH * 4 / bandwidth
    print(
        f"{args.world} ranks, {args.rate}, {args.microbatches} microbatches, forward {args.ms:g} ms; a message takes "
        f"{1e3 * seconds:.1f} ms, as part of a gather {1e3 * gathered:.1f}"
    )
    print("fastest steps:\n")
    print("| schedule | step, s | explain | bubble, mean of ranks | explain | by rank | explain |")
    print("|---|---|---|---|---|---|---|")
    for name, x in found.items():
        step, said = min(x["steps"]), x["bubbles"]
        bubbles = [1 - busy / step for busy in x["busy"][x["steps"].index(step)]]
        mean, expected = statistics.mean(bubbles), statistics.mean(said)
        print(
            f"| {name} | {step:.3f} | {x['said']:.3f} ({x['said'] / step - 1:+.1%}) "
            f"| {mean:.1%} | {expected:.1%} ({expected / mean - 1:+.1%}) "
            f"| {', '.join(f'{b:.1%}' for b in bubbles)} | {', '.join(f'{b:.1%}' for b in said)} |"
        )


if __name__ == "__main__":
    main()
