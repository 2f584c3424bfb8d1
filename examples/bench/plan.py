"""Plans for five budgets beside settings made by hand: ``python examples/bench/plan.py`` (as root, on Linux).

Two ranks, each in a network namespace behind a token bucket (slowlink.sh). What the clock is told is measured first, in
the same run: the link (`mfsdp.measure`), kernels one by one, and how much longer or shorter than their sum forward and
backward take of the whole model on one rank, which communicates nothing. Then plans and settings made by hand take
turns, round by round: whole steps, the optimizer's included, predicted and measured. All of them step a fused AdamW by
`fully_shard_optimizer`, which launches nothing ahead of forward here: the clock knows programs one by one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp import pipeline
from mfsdp.cost_model import kernel_timings
from mfsdp.ir.program import Program
from mfsdp.runtime import host_memory, static_buffers

sys.path.insert(0, str(Path(__file__).parent))
from bench import peak_of, step, timed_step
from variants import Contender, fresh_gpt

UNITS = ["blocks.*"]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Budgets, from the least that a step takes to where more memory is worth nothing."""

STEPS = 2
"""One after the other, of which a round takes the mean."""

BY_HAND = {
    "as it is": {},
    "first half recomputed": {"recomputed": 0.5},
    "all recomputed": {"recomputed": 1.0},
    "all gathered": {"gathered": 1.0},
}
"""What the options and arguments there are without a plan can say of layers, each with several ``prefetch`` and
``reduce_lag``."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="2gbit", help="of each rank's link")
    parser.add_argument("--host", type=float, default=1e9, help="bytes per second of the link to the host, each way")
    parser.add_argument("--lowering", default="inductor")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", default="0,1,2", help="prefetch and reduce_lag of settings made by hand")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# what the clock is told


@dataclass
class Measured:
    """Kernels, each measured alone, and what a phase of the model takes for a second of their sum; to be asked like a
    profile.
    """

    kernels: kernel_timings.Kernels
    fused: bool
    factors: dict[str, float] = field(default_factory=dict)

    def given(self, program: Program) -> dict[str, Any]:
        """What :func:`mfsdp.cost_model.op_cost.op_times` takes."""
        factor = self.factors.get(program.phase, 1.0)
        return {"measured": {name: factor * s for name, s in self.kernels.of(program, self.fused).items()}}


class Bench:
    """What all of it is about: a model, a batch, and how they run."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        with torch.device("meta"):
            self.meta = fresh_gpt(args.layers, args.width)
        self.ids = torch.zeros(args.batch, args.length, dtype=torch.long)
        self.options = {"lowering": args.lowering}

    def explain(self, world: int, machine: mfsdp.Hardware, profile: Any, **more: Any) -> Any:
        options = {**self.options, "check": False}
        return mfsdp.explain(
            self.meta, (self.ids,), world=world, hardware=machine, profile=profile, suggest=False, options=options,
            units=UNITS, **more,
        )  # fmt: skip

    def programs(self, world: int, plan: mfsdp.Plan | None = None) -> list[Program]:
        """After all passes."""
        more = {} if plan is None else {"plan": plan}
        found = mfsdp.trace(self.meta, (self.ids,), world=world, units=UNITS, lowering=self.args.lowering, **more)
        for program in found:
            pipeline.run(program, checked=False, listings=False)
        return list(found)

    def contender(self, **more: Any) -> tuple[Contender, torch.optim.Optimizer]:
        """The model, sharded and compiled, and its optimizer."""
        torch.manual_seed(0)
        model: Any = mfsdp.fully_shard(fresh_gpt(self.args.layers, self.args.width), units=UNITS, **more)
        run = torch.compile(model, backend="mfsdp", dynamic=False, options=self.options)
        entry = Contender(run, list(model.parameters()))
        return entry, mfsdp.fully_shard_optimizer(torch.optim.AdamW(entry.parameters, lr=1e-4, fused=True), ahead=False)


def measured(bench: Bench, machine: mfsdp.Hardware, plans: Iterable[mfsdp.Plan]) -> Measured:
    """Kernels of the programs that plans give, on all ranks at once: cores share what is between them and memory."""
    profile = Measured(kernel_timings.Kernels(kernel_timings.here(torch.device("cpu"))), bench.args.lowering != "eager")
    for programs in (bench.programs(1), *(bench.programs(2, plan) for plan in plans)):
        profile.kernels = kernel_timings.measure(programs, fused=profile.fused, known=profile.kernels)
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ranks", "dp_shard"))["dp_shard"]
    entry, optimizer = bench.contender(mesh=alone)
    step(entry, optimizer, bench.ids)
    dist.barrier()
    took = [median(column) for column in zip(*(computed(entry, bench.ids) for _ in range(7)), strict=True)]
    views = bench.explain(1, machine, profile).views
    profile.factors = {view.phase: seconds / view.seconds for view, seconds in zip(views, took, strict=True)}
    if dist.get_rank() == 0:
        print(f"{len(profile.kernels.seconds)} kernels; of their sum {profile.factors}", flush=True)
    return profile


def computed(entry: Contender, ids: torch.Tensor) -> list[float]:
    """Seconds of the processor for forward and backward: nobody else on the core makes them longer."""
    begun = time.process_time()
    loss = entry.model(ids)
    between = time.process_time()
    loss.backward()
    ended = time.process_time()
    for parameter in entry.parameters:
        parameter.grad = None
    return [between - begun, ended - between]


# what runs


@dataclass
class Row:
    """A plan, or what is set by hand."""

    name: str
    planned: bool
    plan: mfsdp.Plan
    peak: int
    """Bytes, as the ledger says."""
    predicted: list[float]
    """Seconds of forward, backward and optimizer, as the clock says."""
    held: int = 0
    """The most bytes that this rank has held in a step."""
    losses: list[float] = field(default_factory=list)
    phases: list[list[float]] = field(default_factory=list)
    """Seconds of forward, backward and optimizer, of every step."""


def by_hand(plan: mfsdp.Plan, depths: list[int]) -> dict[str, mfsdp.Plan]:
    """Plans for the same model that say what a setting made by hand says."""
    (kind,) = plan.choices
    out = {}
    for name, shares in BY_HAND.items():
        counts = {what: int(share * len(kind.layers)) for what, share in shares.items()}
        bare = replace(kind, **{"gathered": 0, "recomputed": 0, "saved": (), "offloaded": (1, 0), **counts})
        for depth in depths:
            options = {"prefetch": depth, "reduce_lag": depth}
            out[f"{name}, {depth}"] = replace(plan, choices=(bare,), options=options, optimizer="device")
    return out


def words(plan: mfsdp.Plan) -> str:
    """What it has chosen, in one line."""
    parts = [str(choice) for choice in plan.choices if str(choice)]
    parts += [f"prefetch {plan.options['prefetch']}, reduce_lag {plan.options['reduce_lag']}"]
    return "; ".join(parts + ["optimizer state on the host"] * (plan.optimizer == "host"))


def resident() -> dict[int, int]:
    """Bytes of every storage that some tensor has, by address. Rooms on the host were not made by torch."""
    plain = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and x.device.type == "cpu"]
    storages = [x.untyped_storage() for x in plain if x.layout is torch.strided]
    return {s.data_ptr(): s.nbytes() for s in storages if s.resizable()}


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(args.out.resolve() / "cache" / os.environ["RANK"])
    dist.init_process_group("gloo")
    bench, rank = Bench(args), dist.get_rank()
    machine = mfsdp.measure()
    machine = replace(machine, host=replace(machine.host, bandwidth=args.host))
    if rank == 0:
        print(machine, flush=True)
    with host_memory.at_rate(args.host):
        found = settings(bench, machine)
        run(bench, found)
    if rank == 0:
        rows = [{**vars(row), "plan": words(row.plan), "memory": row.plan.memory} for row in found]
        told = {"machine": asdict(machine), "arguments": {k: str(v) for k, v in vars(args).items()}}
        args.result.write_text(json.dumps({**told, "rows": rows}, indent=1))
    dist.barrier()
    os._exit(0)


def settings(bench: Bench, machine: mfsdp.Hardware) -> list[Row]:
    """What is compared, the same on all ranks."""
    given = {"world": 2, "units": UNITS, "hardware": machine, "options": bench.options, "curve": False}
    bare = mfsdp.plan(bench.meta, (bench.ids,), memory=2**40, allow=(), **given)
    hand = by_hand(bare, [int(x) for x in bench.args.depths.split(",")])
    profile = measured(bench, machine, by_hand(bare, [1]).values())
    rows: list[Any] = [None] * (len(SHARES) + len(hand))
    if dist.get_rank() == 0:
        plans = {}
        free = mfsdp.plan(bench.meta, (bench.ids,), memory=2**40, profile=profile, **given)
        for share in SHARES:
            memory = int(free.floor + share * (free.top - free.floor))
            plan = mfsdp.plan(bench.meta, (bench.ids,), memory=memory, profile=profile, **given)
            print(plan, flush=True)
            plans[f"plan for {memory / 1e6:.0f} MB"] = plan
        for i, (name, plan) in enumerate({**plans, **hand}.items()):
            report = bench.explain(2, machine, profile, plan=plan)
            parts = [*(view.seconds for view in report.views), report.optimizer]
            rows[i] = Row(name, name in plans, plan, report.peak, parts)
    dist.broadcast_object_list(rows)
    return rows


def run(bench: Bench, rows: list[Row]) -> None:
    """Builds all of them, one after the other, and lets them take turns."""
    torch.manual_seed(1 + dist.get_rank())
    data = [torch.randint(1024, bench.ids.shape) for _ in range(2)]
    running = []
    for row in rows:
        static_buffers.reset()
        gc.collect()
        before = resident()
        entry, optimizer = bench.contender(plan=row.plan)
        row.losses = [step(entry, optimizer, ids) for ids in data]
        assert row.losses == rows[0].losses, f"{row.name}: {row.losses}, not {rows[0].losses}"
        gc.collect()
        lasting = sum(n for at, n in resident().items() if at not in before) + bench.ids.nbytes
        row.held = lasting + peak_of(lambda e=entry, o=optimizer: step(e, o, data[0]))  # type: ignore[misc]
        running.append((entry, optimizer))
        if dist.get_rank() == 0:
            print(f"  {row.name}: {row.peak} bytes planned, {row.held} held", flush=True)
    for _ in range(bench.args.rounds):
        for row, (entry, optimizer) in zip(rows, running, strict=True):
            dist.barrier()
            step(entry, optimizer, data[0])
            row.phases += [timed_step(entry, optimizer, data[0]) for _ in range(STEPS)]


# all of them


def taken(row: dict[str, Any]) -> float:
    """Seconds of a step, the median."""
    return median(map(sum, row["phases"]))


def table(rows: list[dict[str, Any]]) -> str:
    """Plans beside the best of those made by hand that fit, by the ledger; and all of them."""
    lines = [
        "| budget MB | plan | step ms, predicted | measured | error | bytes MB, planned | held | error | best by hand "
        "that fits | measured ms | plan / it |", "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    hand = [row for row in rows if not row["planned"]]
    for row in (row for row in rows if row["planned"]):
        fits = [other for other in hand if other["peak"] <= row["memory"]]
        best = min(fits, key=taken, default=None)
        beside = (
            f"{best['name']} | {1e3 * taken(best):.0f} | {taken(row) / taken(best):.2f} |" if best else "none | | |"
        )
        lines.append(f"| {row['memory'] / 1e6:.1f} | {row['plan']} {figures(row)} {beside}")
    lines += ["", "| by hand | step ms, predicted | measured | error | bytes MB, planned | held | error |"]
    lines += ["|---|---|---|---|---|---|---|", *(f"| {row['name']} {figures(row)}" for row in hand)]
    return "\n".join(lines)


def figures(row: dict[str, Any]) -> str:
    said, took = sum(row["predicted"]), taken(row)
    return (
        f"| {1e3 * said:.0f} | {1e3 * took:.0f} | {said / took - 1:+.1%} | {row['peak'] / 1e6:.1f} | "
        f"{row['held'] / 1e6:.1f} | {row['peak'] / row['held'] - 1:+.1%} |"
    )


def main() -> int:
    args = arguments()
    if args.result is not None:
        worker(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    result = args.out / f"plan.{args.lowering}.json"
    command = [str(Path(__file__).with_name("slowlink.sh")), "2", args.rate, "--", sys.executable, __file__]
    code = subprocess.call([*command, *sys.argv[1:], "--result", str(result)], env={**os.environ, "PIN": "1"})
    if code == 0:
        print(table(json.loads(result.read_text())["rows"]))
    return code


if __name__ == "__main__":
    sys.exit(main())
