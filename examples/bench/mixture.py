"""A mixture of experts behind a slow link, all-to-alls hidden in several ways: ``python examples/bench/mixture.py``.

Four microbatches a step, of which each is reduced; contenders take turns in one run. With emulated compute (an
operation that sleeps, so that communication takes no time from it) what hides is only what a schedule hides;
``--ratio`` is the time of all-to-alls over that of compute; the sleep is chosen once the link has been measured.
``--real`` computes instead. Beside what is measured stands what `mfsdp.explain` says, which knows the link
(`mfsdp.measure`) and what sleeps. Needs root and Linux (slowlink.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mfsdp
from mfsdp.ir.program import Program

sys.path.insert(0, str(Path(__file__).parent))
from slow_links import result_of

MICROBATCHES, LAYERS, WIDTH, HEAD = 4, 4, 256, 64

LIBRARY = torch.library.Library("bench", "DEF")
LIBRARY.define("work(Tensor x, float ms) -> Tensor")


def _work(x: torch.Tensor, ms: float) -> torch.Tensor:
    time.sleep(ms / 1e3)
    return x.clone()


LIBRARY.impl("work", _work, "CompositeExplicitAutograd")


@torch.library.register_fake("bench::work")
def _(x: torch.Tensor, ms: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.ms = inputs[1]


def _twice(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.bench.work(grad, 2 * ctx.ms), None


torch.library.register_autograd("bench::work", _twice, setup_context=_keep)


class Layer(nn.Module):
    """Attention's compute, tokens to experts, theirs, and back. ``ms``: of emulated compute, twice; 0: real."""

    def __init__(self, group: Any, ms: float):
        super().__init__()
        self.group, self.ms = group, ms
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEAD), nn.Linear(HEAD, WIDTH)
        self.router = nn.Linear(WIDTH, 1)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[:32] if self.ms else x
        q, k, v = self.qkv(y).view(1, 1, -1, 3 * HEAD).chunk(3, -1)
        y = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).view(-1, HEAD))
        x = self.computed(x, y)
        sent = fc.all_to_all_single_autograd(x * self.router(x).sigmoid(), None, None, self.group)
        came = self.computed(sent, self.experts(sent[:32] if self.ms else sent))
        return x + fc.all_to_all_single_autograd(came, None, None, self.group)  # type: ignore[no-any-return]

    def computed(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not self.ms:
            return x + y
        return torch.ops.bench.work(x, self.ms) + F.pad(y, (0, 0, 0, x.shape[0] - y.shape[0]))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """This rank's, of which each token of a rank goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, group: Any, ms: float):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(group, ms) for _ in range(LAYERS)), nn.Linear(WIDTH, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


class Slept:
    """What `mfsdp.explain` asks of a profile: seconds of the lines that sleep. It estimates the others."""

    def given(self, program: Program) -> dict[str, Any]:
        sleeping = program.graph.find_nodes(op="call_function", target=torch.ops.bench.work.default)
        return {"measured": {n.name: float(n.args[1]) / 1e3 for n in sleeping}}  # type: ignore[arg-type]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rate", default="200mbit", help="of each rank's link")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--real", action="store_true", help="compute, on two ranks as a rule")
    parser.add_argument("--lowering", default="eager")
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def exchange_seconds(group: Any, tokens: int) -> float:
    """Of one all-to-all, the slowest rank's median."""
    x, times = torch.randn(tokens, WIDTH), []
    for _ in range(12):
        dist.barrier()
        begun = time.perf_counter()
        fc.wait_tensor(fc.all_to_all_single(x, None, None, group))
        times.append(time.perf_counter() - begun)
    worst = torch.tensor(statistics.median(times[2:]))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dense = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    sparse = init_device_mesh("cpu", (1, world), mesh_dim_names=("efsdp", "ep"))
    group = sparse["ep"].get_group()
    machine = mfsdp.measure()
    seconds = exchange_seconds(group, args.tokens)
    ms = 0.0 if args.real else 1e3 * 4 * seconds / (6 * args.ratio)
    torch.manual_seed(100 + rank)
    data = [(torch.randn(args.tokens, WIDTH), torch.randint(64, (args.tokens,))) for _ in range(MICROBATCHES)]

    def ours(**options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Model(group, ms)
        for layer in model.layers:
            for param in layer.experts.parameters():
                param.allreduce = False  # ranks of ep hold other experts
            mfsdp.fully_shard(layer.experts, mesh=sparse["efsdp"])
        mfsdp.fully_shard(model, mesh=dense, units=[Layer])
        more = {"lowering": args.lowering, **options}
        return model, torch.compile(model, backend="mfsdp", dynamic=False, options=more)

    def theirs(compiled: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Model(group, ms)
        for layer in model.layers:
            fully_shard(layer, mesh=dense, ignored_params=set(layer.experts.parameters()))
            if compiled:
                layer.compile()
        fully_shard(model, mesh=dense, ignored_params={p for m in model.layers for p in m.experts.parameters()})
        return model, model

    def one_by_one(run: Any) -> None:
        for batch in data:
            run(*batch).backward()

    def beside(run: Any) -> None:
        with mfsdp.overlapped(run):
            one_by_one(run)

    def pairs(run: Any) -> None:
        for i in range(0, MICROBATCHES, 2):
            sum(mfsdp.together(run)(data[i : i + 2])).backward()  # type: ignore[union-attr]

    unfilled = tuple(row for row in mfsdp.pipeline.PIPELINE if row[0] != "hide_collectives")
    contenders: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "FSDP2, eager": (lambda: theirs(False), one_by_one, {}),
        "FSDP2, layers compiled": (lambda: theirs(True), one_by_one, {}),
        "accumulation": (lambda: ours(passes=unfilled), one_by_one, {"options": {"passes": unfilled}}),
        "fill": (ours, one_by_one, {}),
        "overlapped (1F1B)": (ours, beside, {"overlapped": True}),
        "together, in pairs": (ours, pairs, {"together": 2}),
    }
    simulated: dict[str, float] = {}
    explained, _ = ours()
    if rank == 0 and not args.real:
        for name, (_, _, schedule) in list(contenders.items())[2:]:
            torch._dynamo.reset()
            options = {"lowering": args.lowering, "check": False, **schedule.get("options", {})}
            report = mfsdp.explain(
                explained, data[0], hardware=machine, microbatches=MICROBATCHES, profile=Slept(), optimizer="none",
                suggest=False, **{**schedule, "options": options},
            )  # fmt: skip
            simulated[name] = report.step
    torch._dynamo.reset()
    dist.barrier()
    running = {name: (*build(), step) for name, (build, step, _) in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(args.rounds + 2):
        for name, (model, run, step) in running.items():
            dist.barrier()
            begun = time.perf_counter()
            step(run)
            if turn > 1:
                times[name].append(time.perf_counter() - begun)
            model.zero_grad()
    compute = MICROBATCHES * LAYERS * 6 * ms / 1e3
    if rank == 0:
        found = {"all_to_all": seconds, "compute": compute, "times": times, "simulated": simulated}
        args.result.write_text(json.dumps(found, indent=1))
    dist.barrier()
    os._exit(0)


def main() -> None:
    args = arguments()
    if args.result is not None:
        worker(args)
        return
    found = result_of(__file__, args.world, args.rate)
    exchanged = 4 * LAYERS * MICROBATCHES * found["all_to_all"]
    print(f"{args.world} ranks, {args.rate}: all-to-alls {exchanged:.2f} s a step, compute {found['compute']:.2f} s")
    base = statistics.median(found["times"]["accumulation"])
    print("| | s | simulated | times accumulation | exposed per microbatch, ms |\n|---|---|---|---|---|")
    for name, times in found["times"].items():
        median = statistics.median(times)
        exposed = f"{1e3 * (median - found['compute']) / MICROBATCHES:.0f}" if found["compute"] else ""
        said = found["simulated"].get(name)
        simulated = f"{said:.2f} ({said / median - 1:+.0%})" if said else ""
        print(f"| {name} | {median:.2f} | {simulated} | {base / median:.2f} | {exposed} |")


if __name__ == "__main__":
    main()
