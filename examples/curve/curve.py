"""The same training, sharded and not: ``python examples/curve/curve.py``.

The demo's model on the demo's text, on two processes, once per contender: same weights at first, same batches, same
optimizer. Written to ``--out``: one file per contender as it ends (those that are there are not run again), then
table.md, results.json and curve.png. docs/internals/measurements.md says what is compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mfsdp

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
from data import Batches, corpus
from model import Block, Config, Llama

UNSHARDED = "unsharded"
INDUCTOR = "unsharded, Inductor"
JOINED = "unsharded, one batch"
MUON = "unsharded, Muon"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="windows per process and step")
    parser.add_argument("--length", type=int, default=64, help="of a window, in tokens (bytes)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon-lr", type=float, default=0.02, help="of the blocks' matrices, where Muon steps them")
    parser.add_argument(
        "--only", default="", help="only contenders whose names contain one of these (semicolons between)"
    )
    parser.add_argument("--again", action="store_true", help="run what has been run before, too")
    parser.add_argument("--out", type=Path, default=Path("curve-out"))
    return parser.parse_args()


# Contenders


@dataclass
class Entry:
    """A model that trains. ``losses`` gives this rank's loss as a tensor to call ``backward`` of, one per batch."""

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    after_backward: Callable[[], None] = lambda: None
    joined: bool = False
    """Whether it is given the batches of all ranks at once."""


def unsharded(model: Any, narrow: bool = False, joined: bool = False, backend: str = "") -> Entry:
    """Every process holds the whole model, and gradients are averaged: what sharding must be equal to."""
    working = copy.deepcopy(model).bfloat16() if narrow else model
    run = torch.compile(working, backend=backend, dynamic=False) if backend else working
    pairs = list(zip(model.parameters(), working.parameters(), strict=True))

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if narrow:
            with torch.no_grad():
                for main, mine in pairs:
                    mine.copy_(main)
        return run(inputs, targets)

    def average() -> None:
        grads = torch.cat([mine.grad.float().flatten() for _, mine in pairs])
        if not joined:
            dist.all_reduce(grads)
            grads /= dist.get_world_size()
        for (main, mine), grad in zip(pairs, grads.split([p.numel() for p, _ in pairs]), strict=True):
            mine.grad = None
            main.grad = grad.view_as(main)

    return Entry(loss, average, joined)


def fsdp2(model: Any, narrow: bool = False) -> Entry:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if narrow else None
    given = {"mp_policy": policy} if policy else {}
    for block in model.blocks:
        fully_shard(block, **given)
    fully_shard(model, **given)
    return Entry(model)


def ours(model: Any, strategy: int, narrow: bool = False, lowering: str = "eager") -> Entry:
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if narrow else None)
    mfsdp.fully_shard(model, units=[Block], strategy=strategy, mp_policy=policy)
    run: Any = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
    return Entry(run)


@dataclass(frozen=True)
class Contender:
    """How to make an entry of the model, and which contender it is compared with."""

    make: Callable[[Any], Entry]
    against: str | None = UNSHARDED
    muon: bool = False
    """Whether Muon steps the blocks' matrices, beside AdamW."""


def contenders() -> dict[str, Contender]:
    """By name, references first."""
    out = {
        UNSHARDED: Contender(unsharded, None),
        JOINED: Contender(lambda m: unsharded(m, joined=True)),
        INDUCTOR: Contender(lambda m: unsharded(m, backend="inductor")),
        "FSDP2": Contender(fsdp2),
        **{f"mfsdp, strategy {n}": Contender(lambda m, n=n: ours(m, n)) for n in range(4)},
        "mfsdp, strategy 3, Inductor": Contender(lambda m: ours(m, 3, lowering="inductor"), INDUCTOR),
        MUON: Contender(unsharded, None, muon=True),
        "mfsdp, strategy 3, Muon": Contender(lambda m: ours(m, 3), MUON, muon=True),
    }
    narrow = f"{UNSHARDED}, bf16"
    return {
        **out,
        narrow: Contender(lambda m: unsharded(m, narrow=True), None),
        f"{JOINED}, bf16": Contender(lambda m: unsharded(m, narrow=True, joined=True), narrow),
        "FSDP2, bf16": Contender(lambda m: fsdp2(m, narrow=True), narrow),
        **{f"mfsdp, strategy {n}, bf16": Contender(lambda m, n=n: ours(m, n, narrow=True), narrow) for n in range(4)},
    }


# One rank


def worker(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text, _ = corpus()
    for name in wanted(args):
        path = file_of(args, name)
        if done(args, name) and not args.again:
            continue
        torch._dynamo.reset()
        losses, ms, weights = train(contenders()[name], args, text)
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"losses": losses, "ms": ms, "weights": weights, "setting": setting(args)}, path)
            print(
                f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {ms[0]:.1f} ms a step ({ms[1]:.1f} of a core)",
                flush=True,
            )
        dist.barrier()
    dist.destroy_process_group()


def train(
    contender: Contender, args: argparse.Namespace, text: torch.Tensor
) -> tuple[list[float], tuple[float, float], dict[str, torch.Tensor]]:
    """Losses by step (mean over ranks); milliseconds of a step, the median, and of this process's processor time on
    average after the third; the whole weights in the end.
    """
    torch.manual_seed(0)
    model = Llama(Config(layers=args.layers, width=args.width, length=args.length))
    for module in model.modules():
        model._init_weights(module)
    entry = contender.make(model)
    steppers = optimizers(model, args, contender.muon)
    world, rank = dist.get_world_size(), dist.get_rank()
    feeds = [Batches(text, args.batch, args.length, seed=r) for r in range(world)]
    losses, times, processor = [], [], 0.0
    for step in range(args.steps):
        if step == min(3, args.steps - 1):
            processor = time.process_time()
        for group in (group for each in steppers for group in each.param_groups):
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * min(1.0, (step + 1) / 50)
        batches = [feed.next() for feed in feeds]
        begun = time.perf_counter()
        inputs, targets = map(torch.cat, zip(*batches, strict=True)) if entry.joined else batches[rank]
        loss = entry.loss(inputs, targets)
        loss.backward()
        entry.after_backward()
        for each in steppers:
            each.step()
            each.zero_grad()
        times.append(1e3 * (time.perf_counter() - begun))
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    processor = 1e3 * (time.process_time() - processor) / max(1, args.steps - 3)
    weights = {n: whole(p).detach().clone() for n, p in model.named_parameters()}
    return losses, (sorted(times)[len(times) // 2], processor), weights


def optimizers(model: Any, args: argparse.Namespace, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the blocks' matrices if asked for."""
    matrices = {p for p in model.blocks.parameters() if muon and p.dim() == 2}
    rest = [p for p in model.parameters() if p not in matrices]
    out: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)]
    if muon:
        out.append(torch.optim.Muon([p for p in model.parameters() if p in matrices], lr=args.muon_lr))
        out[1:] = map(mfsdp.fully_shard_optimizer, out[1:]) if isinstance(model, mfsdp.FSDPModule) else out[1:]
    return out


def whole(p: Any) -> torch.Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def wanted(args: argparse.Namespace) -> list[str]:
    """Names of the contenders that were asked for, and of those they are compared with."""
    words = [w.strip() for w in args.only.split(";") if w.strip()]
    every = contenders()
    chosen = {n for n in every if not words or any(w == n or (w in n and w != UNSHARDED) for w in words)}
    return [n for n in every if n in chosen | {every[c].against for c in chosen}]


def file_of(args: argparse.Namespace, name: str) -> Path:
    return args.out / "runs" / (name.replace(", ", "_").replace(" ", "_") + ".pt")


def done(args: argparse.Namespace, name: str) -> dict[str, Any] | None:
    """What a contender left, if it ran with these settings."""
    path = file_of(args, name)
    found = torch.load(path) if path.exists() else None
    return found if found is not None and found["setting"] == setting(args) else None


def setting(args: argparse.Namespace) -> dict[str, Any]:
    return {k: getattr(args, k) for k in ("steps", "layers", "width", "batch", "length", "lr", "muon_lr")}


# What comes of it


@dataclass
class Row:
    """A contender beside the one that it is compared with."""

    name: str
    ms: float
    first: float
    last: float
    losses: list[float] = field(repr=False)
    against: str | None = None
    loss: float | None = None
    """The largest difference of the loss over all steps, in nats."""
    step: int | None = None
    """The first step at which the losses are different bits; ``None``: at none."""
    weights: float | None = None
    """The largest difference of any weight in the end."""
    relative: float | None = None
    """The norm of all differences of weights, by the norm of the weights."""


def rows(args: argparse.Namespace) -> list[Row]:
    """All contenders that have been run with these settings."""
    runs = {}
    for name in contenders():
        found = done(args, name)
        if found is not None:
            runs[name] = found
    out = []
    for name, run in runs.items():
        row = Row(name, run["ms"][0], run["losses"][0], run["losses"][-1], run["losses"])
        other = contenders()[name].against
        if other in runs:
            _compare(row, run, other, runs[other])
        out.append(row)
    return out


def _compare(row: Row, run: dict[str, Any], against: str, other: dict[str, Any]) -> None:
    differences = [abs(a - b) for a, b in zip(run["losses"], other["losses"], strict=True)]
    row.against, row.loss = against, max(differences)
    row.step = next((i for i, d in enumerate(differences) if d > 0), None)
    gaps = [(run["weights"][n] - w).double() for n, w in other["weights"].items()]
    row.weights = max(g.abs().max().item() for g in gaps)
    size = sum(w.double().square().sum() for w in other["weights"].values()).sqrt()
    row.relative = (sum(g.square().sum() for g in gaps).sqrt() / size).item()


def table(found: Sequence[Row]) -> str:
    """Markdown, one line per contender."""
    lines = ["| | loss at first and last | largest difference of the loss | first at step | largest difference of a "
             "weight | of all weights, relative | ms a step |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in found:
        ends = f"{r.first:.4f}, {r.last:.4f}"
        if r.against is None:
            lines.append(f"| **{r.name}** | {ends} | reference | | | | {r.ms:.1f} |")
            continue
        step = "never" if r.step is None else r.step
        gaps = f"{r.loss:.2g} | {step} | {r.weights:.2g} | {r.relative:.2g}"
        lines.append(f"| {r.name} | {ends} | {gaps} | {r.ms:.1f} |")
    return "\n".join(lines) + "\n"


def plot(path: Path, found: Sequence[Row]) -> None:
    """Losses above, differences from the reference below, in fp32 and bf16."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, sharey="row", layout="constrained")
    by_name = {r.name: r for r in found}
    for column, title in enumerate(("fp32", "bf16 compute")):
        axes[0, column].set(title=title)
        axes[1, column].set(yscale="log", xlabel="step")
        for r in found:
            if r.name.endswith("bf16") == bool(column):
                _draw(r, by_name.get(r.against or ""), *axes[:, column])
        for panel in axes[:, column]:
            panel.grid(alpha=0.3)
            if panel.get_legend_handles_labels()[0]:
                place = "upper right" if panel is axes[0, column] else ("upper left", "center")[column]
                panel.legend(fontsize="x-small", loc=place)
    axes[0, 0].set(ylabel="loss, nats per byte")
    axes[1, 0].set(ylabel="difference of the loss\n(largest of 20 steps; 1e-9: none)")
    figure.savefig(path, dpi=100)


def _draw(row: Row, reference: Row | None, above: Any, below: Any) -> None:
    if reference is None:
        above.plot(row.losses, color="0.75", linewidth=3, label=row.name)
        return
    above.plot(row.losses, linewidth=0.5, alpha=0.7)
    gaps = [max(abs(a - b), 1e-9) for a, b in zip(row.losses, reference.losses, strict=True)]
    largest = [max(gaps[max(0, i - 10) : i + 10]) for i in range(len(gaps))]
    style = (
        {"color": "black", "linestyle": "--" if row.name == INDUCTOR else ":"}
        if row.name.startswith("unsharded")
        else {}
    )
    name = row.name.removesuffix(", bf16") + (" (from that of Inductor)" if row.against == INDUCTOR else "")
    below.plot(largest, label=name + (": the same bits" if row.step is None else ""), linewidth=1, **style)


def report(args: argparse.Namespace) -> None:
    found = rows(args)
    (args.out / "table.md").write_text(table(found))
    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    thinned = [{**vars(r), "losses": [round(x, 5) for x in r.losses[:: max(1, args.steps // 100)]]} for r in found]
    (args.out / "results.json").write_text(json.dumps({"machine": machine, **setting(args), "rows": thinned}, indent=1))
    plot(args.out / "curve.png", found)
    print(table(found))


def launch(args: argparse.Namespace) -> int:
    """Runs this file under torchrun on two processes that share the cores, then writes what came of it."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)), **os.environ}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    missing = args.again or any(done(args, name) is None for name in wanted(args))
    code = subprocess.call([*command, __file__, *sys.argv[1:]], env=environment) if missing else 0
    if code == 0:
        report(args)
    return code


if __name__ == "__main__":
    worker(arguments()) if "RANK" in os.environ else sys.exit(launch(arguments()))
