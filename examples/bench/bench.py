"""Steps side by side, on links of chosen speed: ``python examples/bench/bench.py`` (as root, on Linux).

Every rank runs in a network namespace behind a token bucket (slowlink.sh), so that waiting for the link costs no CPU
and overlap is real. All contenders live in one run and take turns, round by round. Written to ``--out``: results.md (a
table per rate), results.json, bench.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mfsdp
import mfsdp.runtime
from mfsdp.cost_model.machine import lost

sys.path.insert(0, str(Path(__file__).parent))
from variants import Contender, contenders, fresh_gpt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    rates = "4gbit,2gbit,1300mbit,500mbit"
    parser.add_argument("--rates", default=rates, help="of each rank's link; 'none' is not limited")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="only contenders whose names contain one of these (comma separated), and one process"
    )
    parser.add_argument("--torchtitan", type=Path, default=None, help="a checkout, to run SimpleFSDP too")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--worker", choices=["real", "stubbed"], default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# one rank

STEPS = 3
"""One after the other, of which a round takes the mean."""


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.worker == "stubbed":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    meet = Meeting(rank, world)
    limits = communication(args) if args.worker == "real" else {}
    if limits:
        os.environ["BENCH_LINK"] = str(limits["bytes"] / limits["link_seconds"])
    torch.manual_seed(1 + rank)
    data = [torch.randint(1024, (args.batch, args.length)) for _ in range(2)]
    rows: dict[str, dict[str, Any]] = {}
    running: dict[str, tuple[Contender, torch.optim.Optimizer]] = {}
    wanted = [w for w in args.only.split(",") if w]
    for name, make in contenders(args.torchtitan).items():
        if wanted and name != "one process" and not any(w in name for w in wanted):
            continue
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(args.out.resolve() / "cache" / name.replace(" ", "_") / str(rank))
        torch.compile(torch.sin, dynamic=False)(torch.ones(7))  # the compiler's own precompiled headers
        torch.manual_seed(0)
        model = fresh_gpt(args.layers, args.width)
        meet()
        try:
            entry = make(model)
            optimizer = torch.optim.AdamW(entry.parameters, lr=1e-4)
            optimizer = mfsdp.fully_shard_optimizer(optimizer) if entry.ahead else optimizer
            begun = time.perf_counter()
            first = step(entry, optimizer, data[0])
            compiled = time.perf_counter() - begun
            second = step(entry, optimizer, data[1])
        except Exception as error:  # a contender that cannot run here is reported, the others go on
            rows[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            continue
        running[name] = (entry, optimizer)
        rows[name] = {
            "first_step": compiled,
            "losses": [first, second],
            "times": [],
            "phases": [],
            "cpu": [],
            "idle": [],
            "averaged": entry.averaged,
        }
        if rank == 0:
            print(f"  {name}: first step {compiled:.1f} s", flush=True)
    for name, (entry, optimizer) in running.items():
        mfsdp.runtime.static_buffers.reset()  # those of others; its own count as they are made
        rows[name]["peak"] = peak_of(lambda e=entry, o=optimizer: step(e, o, data[0]))
    for _ in range(args.rounds):
        for name, (entry, optimizer) in running.items():
            meet()
            step(entry, optimizer, data[0])  # what a step launches for the next one is under way when time begins
            begun = time.perf_counter(), time.process_time(), idle()
            rows[name]["phases"] += [timed_step(entry, optimizer, data[0]) for _ in range(STEPS)]
            ended = time.perf_counter(), time.process_time(), idle()
            for key, a, b in zip(("times", "cpu", "idle"), begun, ended, strict=True):
                rows[name][key].append((b - a) / STEPS)
    if rank == 0:
        args.result.write_text(json.dumps({"rows": rows, **limits}, indent=1))
    meet.leave()


class Meeting:
    """A barrier that also works where communication is stubbed out."""

    def __init__(self, rank: int, world: int):
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500")) + 1
        self.store = dist.TCPStore(host, port, world, is_master=rank == 0)
        self.rank, self.world, self.met = rank, world, 0

    def __call__(self) -> None:
        self.met += 1
        self.store.add(f"meeting{self.met}", 1)
        while self.store.add(f"meeting{self.met}", 0) < self.world:
            time.sleep(0.0005)

    def leave(self) -> None:
        """The rank that keeps the store goes last."""
        self.store.add("left", 1)
        while self.rank == 0 and self.store.add("left", 0) < self.world:
            time.sleep(0.01)


def step(entry: Contender, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = entry.model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def timed_step(entry: Contender, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> list[float]:
    """Seconds of forward, backward and optimizer."""
    times = [time.perf_counter()]
    loss = entry.model(ids)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    return [b - a for a, b in pairwise(times)]


def idle() -> float:
    """Seconds for which this rank's core has had nothing to do, since the machine started; in hundredths."""
    (core, *others) = os.sched_getaffinity(0)
    if others:
        return math.nan
    line = next(x for x in Path("/proc/stat").read_text().splitlines() if x.startswith(f"cpu{core} "))
    return sum(int(x) for x in line.split()[4:6]) / os.sysconf("SC_CLK_TCK")


def peak_of(function: Any) -> int:
    """The most bytes that a call has allocated and not freed, on top of what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(live, default=0)


def communication(args: argparse.Namespace) -> dict[str, float]:
    """Seconds on the link for the bytes of one step, nothing else running; CPU seconds that gloo takes for them;
    seconds if every collective is waited for before the next begins; and seconds that computation loses beside them.
    """
    with torch.device("meta"):
        model = fresh_gpt(args.layers, args.width)
    world = dist.get_world_size()
    units = [sum(p.numel() for p in b.parameters()) for b in model.blocks]
    units.append(sum(p.numel() for p in model.parameters()) - sum(units))
    shards = [torch.zeros(-(-n // world)) for n in units]
    fulls = [torch.zeros(s.numel() * world) for s in shards]
    here, everybody = mfsdp.runtime.execution.current(), mfsdp.runtime.groups.default_group()
    best = cpu = float("inf")
    for _ in range(3):
        dist.barrier()
        begun, burnt = time.perf_counter(), time.process_time()
        # Gathers three times: a reduction sends as many bytes.
        for end in [here.gather([(f, s)], everybody) for f, s in zip(fulls * 3, shards * 3, strict=True)]:
            end()
        best = min(best, time.perf_counter() - begun)
        cpu = min(cpu, time.process_time() - burnt)
    alone = 0.0
    for full, shard in zip(fulls * 3, shards * 3, strict=True):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(2):
            here.gather([(full, shard)], everybody)()
        alone += (time.perf_counter() - begun) / 2
    pairs = [[(f, s)] for f, s in zip(fulls * 3, shards * 3, strict=True)]
    longest = best * max(units) / (3 * sum(units))
    taken = lost([partial(here.gather, p, everybody) for p in pairs], mixture(args), longest)
    received = 4 * 3 * sum(s.numel() for s in shards) * (world - 1)
    return {"link_seconds": best, "link_cpu": cpu, "link_alone": alone, "lost": taken, "bytes": received}


def mixture(args: argparse.Namespace) -> Callable[[], object]:
    """A piece of computation, of the kinds and sizes of a block's: a product, and kernels that memory bounds."""
    tokens = torch.randn(args.batch * args.length, args.width)
    weight, wide = torch.randn(args.width, 4 * args.width), torch.randn(tokens.shape[0], 4 * args.width)

    def work() -> None:
        torch.mm(tokens, weight, out=wide)
        for _ in range(4):
            wide.mul_(0.5)

    return work


# all of them


def launch(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(args.out.resolve() / "cache"), **os.environ}
    again = [a for a in sys.argv[1:] if not a.startswith(("--worker", "--result"))]
    results: dict[str, Any] = {"machine": machine(), "arguments": {k: str(v) for k, v in vars(args).items()}}
    print("communication stubbed out", flush=True)
    stub = args.out / "stubbed.json"
    procs = []
    for rank in range(args.world):
        mine = {**env, "RANK": str(rank), "WORLD_SIZE": str(args.world), "LOCAL_RANK": str(rank)}
        core = ["taskset", "-c", str(rank % (os.cpu_count() or 1))]
        command = [*core, sys.executable, __file__, *again, "--worker", "stubbed", "--result", str(stub)]
        procs.append(subprocess.Popen(command, env=mine))
    if any(p.wait() for p in procs):
        return 1
    results["stubbed"] = json.loads(stub.read_text())
    for rate in args.rates.split(","):
        print(f"link {rate}", flush=True)
        out = args.out / f"{rate}.json"
        command = [str(Path(__file__).parent / "slowlink.sh"), str(args.world), rate, "--", sys.executable, __file__]
        code = subprocess.call([*command, *again, "--worker", "real", "--result", str(out)], env={**env, "PIN": "1"})
        if code:
            return code
        results[rate] = json.loads(out.read_text())
        agree(results[rate]["rows"])
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    text = report(results, args)
    (args.out / "results.md").write_text(text)
    plot(results, args)
    print(text)
    return 0


def machine() -> str:
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), {platform.system()}, {python}"


def best(row: dict[str, Any]) -> float:
    return min(row["times"])


def agree(rows: dict[str, dict[str, Any]]) -> None:
    """Makes sure that contenders train alike: two steps' losses of all that average gradients over ranks.

    Raises:
        ValueError: they do not.
    """
    losses = {name: row["losses"] for name, row in rows.items() if row.get("averaged")}
    want = next(iter(losses.values()), [])
    for name, got in losses.items():
        if any(abs(a - b) > 1e-4 * abs(a) for a, b in zip(want, got, strict=True)):
            raise ValueError(f"{name} has the losses {got}, {next(iter(losses))} has {want}")


def bounds(result: dict[str, Any]) -> tuple[float, float]:
    """Seconds of compute alone, and of the step that nobody can beat at this rate."""
    compute = best(result["rows"]["one process"])
    return compute, max(compute + result["link_cpu"], result["link_seconds"])


def report(results: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [
        f"{args.world} ranks, one thread and one core each; GPT of {args.layers} blocks of width {args.width}, batch "
        f"{args.batch} x {args.length} a rank, fp32, whole steps with AdamW. {results['machine']}. Times are the best "
        f"of {args.rounds} interleaved rounds.",
        "",
    ]
    stub = results["stubbed"]["rows"]
    for rate in args.rates.split(","):
        got = results[rate]
        rows = got["rows"]
        compute, limit = bounds(got)
        lines += [
            f"## Link {rate}",
            "",
            f"Compute alone {compute * 1e3:.0f} ms; the bytes of a step alone {got['link_seconds'] * 1e3:.0f} ms on "
            f"the link ({got['bytes'] / 2**20:.0f} MB received), {got['link_cpu'] * 1e3:.0f} ms of CPU. "
            f"Limit max(compute + CPU, link) = {limit * 1e3:.0f} ms.",
            "",
            "| | step ms | median | / limit | exposed ms | idle ms | CPU ms | kernel ms | peak MB | compile s |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name, row in rows.items():
            if "error" in row:
                lines.append(f"| {name} | {row['error']} |")
                continue
            quiet = best(stub[name]) if "times" in stub.get(name, {}) else None
            compiled = f"{stub[name]['first_step']:.0f}" if quiet is not None else "-"
            exposed = f"{(best(row) - quiet) * 1e3:.0f}" if quiet is not None else "-"
            mean, rest, cpu = (1e3 * statistics.mean(row[key]) for key in ("times", "idle", "cpu"))
            lines.append(
                f"| {name} | {best(row) * 1e3:.0f} | {statistics.median(row['times']) * 1e3:.0f} | "
                f"{best(row) / limit:.2f} | {exposed} | {rest:.0f} | {cpu:.0f} | {mean - rest - cpu:.0f} | "
                f"{row['peak'] / 2**20:.0f} | {compiled} |"
            )
        lines.append("")
    lines.append(
        "exposed: step minus the same step with communication stubbed out. idle: of the mean step, when its core "
        "had nothing to do; CPU: of the process, all its threads; kernel: the rest, what carries the bytes. peak: most "
        "bytes allocated during a step on top of parameters and optimizer state: activations, gathered parameters, "
        "gradients, buckets. compile: the first step, communication stubbed out, cold cache but for the compiler's "
        "headers; SimpleFSDP's includes Inductor's scheduler. DDP does not shard: it sends two thirds of the bytes and "
        "keeps everything on every rank."
    )
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = args.rates.split(",")
    figure, axes = plt.subplots(1, len(rates), figsize=(4.2 * len(rates), 4), layout="constrained", squeeze=False)
    for axis, rate in zip(axes[0], rates, strict=True):
        rows = {n: r for n, r in results[rate]["rows"].items() if "times" in r}
        colours = ["C0" if "mfsdp" in name else "0.7" for name in rows]
        axis.barh(list(rows), [best(r) * 1e3 for r in rows.values()], color=colours)
        _, limit = bounds(results[rate])
        axis.axvline(limit * 1e3, color="C3", linestyle="--", label="limit")
        axis.set(title=f"link {rate}", xlabel="ms per step")
        axis.invert_yaxis()
        axis.legend()
        if axis is not axes[0][0]:
            axis.set_yticklabels([])
    figure.savefig(args.out / "bench.png", dpi=120)


if __name__ == "__main__":
    arguments_ = arguments()
    worker(arguments_) if arguments_.worker else sys.exit(launch(arguments_))
