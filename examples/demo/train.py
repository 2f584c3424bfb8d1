"""Trains a small language model on two processes: ``python examples/demo/train.py`` (or ``make demo``).

Without RANK in the environment it starts itself once per process through torchrun; with RANK it is one of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from tqdm import tqdm

import mfsdp

sys.path.insert(0, str(Path(__file__).parent))
from data import Batches, corpus
from export import export
from memory import Ledger
from model import Block, Config, Llama

matplotlib.use("Agg")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=0, help="processes (default: the GPUs, or two on the CPU)")
    parser.add_argument("--minutes", type=float, default=4.0, help="training time after the first step")
    parser.add_argument("--steps", type=int, default=0, help="exactly so many steps instead")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="windows of 256 tokens (bytes) per process and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lowering", choices=["inductor", "eager"], default=None)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    return parser.parse_args()


def launch(args: argparse.Namespace) -> int:
    """Runs this file under torchrun, one process per GPU, or two on the CPU that share its cores."""
    nproc = args.processes or torch.cuda.device_count() or 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // nproc)), **os.environ}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return subprocess.call([*command, __file__, *sys.argv[1:]], env=environment)


def has_compiler() -> bool:
    return any(shutil.which(c) for c in (os.environ.get("CXX", ""), "g++", "clang++") if c)


@dataclass
class Progress:
    """How far training is; part of a checkpoint."""

    step: int = 0
    done: float = 0.0
    train: list[tuple[int, float]] = field(default_factory=list)
    held: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def rate(args: argparse.Namespace, done: float) -> float:
    """Learning rate: a short warm-up, then a cosine to a tenth. ``done`` is the part of the run that is over."""
    warm = min(1.0, done / 0.02)
    return args.lr * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def mean_over_ranks(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def validate(model: Any, text: torch.Tensor, args: argparse.Namespace, device: torch.device, batches: int = 4) -> float:
    """Loss on held-out files, in nats per byte; the same windows every time, other ones on every rank."""
    held = Batches(text, args.batch, model.config.length, seed=10_000 + dist.get_rank())
    total = torch.zeros((), device=device)
    for _ in range(batches):
        inputs, targets = (t.to(device) for t in held.next())
        total += model(inputs, targets)
    return mean_over_ranks(total / batches)


@torch.no_grad()
def sample(model: Any, prompt: str, length: int, device: torch.device, temperature: float = 0.7) -> str:
    """Continues a prompt byte by byte. All ranks call the model together, and draw the same numbers.

    The window has one length, with the text at its left, so that nothing is compiled anew on the way.
    """
    random = torch.Generator().manual_seed(0)
    window = model.config.length
    text = list(prompt.encode())
    for _ in range(length):
        seen = text[-window:]
        ids = torch.zeros(1, window, dtype=torch.long)
        ids[0, : len(seen)] = torch.tensor(seen)
        logits = model(ids.to(device))[0, len(seen) - 1].cpu()
        text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)))
    return bytes(text).decode(errors="replace")


def smooth(losses: list[tuple[int, float]], around: int = 20) -> list[tuple[int, float]]:
    """Means over as many steps before as after each one, so that the curve does not lag; fewer at both ends."""
    means = []
    for i, (step, _) in enumerate(losses):
        reach = min(around, i, len(losses) - 1 - i)
        near = [loss for _, loss in losses[i - reach : i + reach + 1]]
        means.append((step, sum(near) / len(near)))
    return means


def page(folder: Path) -> Path | None:
    """The newest report on a training step among the listings, if Bokeh is there to draw one."""
    steps = {path.name.split(".")[0] for path in folder.glob("graph*.backward*.txt")}
    reports = [path for path in folder.glob("graph*.report.html") if path.name.split(".")[0] in steps]
    return max(reports, key=lambda path: path.stat().st_mtime, default=None)


def plot(path: Path, train: list[tuple[int, float]], held: list[tuple[int, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*train, strict=True), color="0.7", linewidth=0.8)
    axes.plot(*zip(*smooth(train), strict=True), label="training (smoothed)")
    axes.plot(*zip(*held, strict=True), "o-", label="validation, held-out files")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Byte-level Llama on Python's standard library")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(args: argparse.Namespace) -> None:
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    rank, world = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_: None
    lowering = args.lowering or ("inductor" if gpu or has_compiler() else "eager")
    if not args.lowering and lowering == "eager":
        say("No C++ compiler found (g++ or clang++), so Inductor cannot compile: running with lowering='eager'.")

    # The model is never whole on any rank: built without storage, materialised shard by shard.
    config = Config(layers=args.layers, width=args.width)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(config)
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if gpu else None)
    mfsdp.fully_shard(model, units=[Block], mp_policy=policy, device=device)
    listings = args.out / "listings"
    compiled: Any = torch.compile(model, backend="mfsdp", options={"lowering": lowering, "dump": str(listings)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    text, held_out = corpus()
    batches = Batches(text, args.batch, config.length, seed=rank)
    size = sum(p.numel() for p in model.parameters())
    say(f"{size / 1e6:.2f} M parameters, {world} processes, {device.type}, lowering {lowering}")
    say(f"{len(text) / 1e6:.1f} MB of text to train on, {len(held_out) / 1e6:.2f} MB held out")

    checkpoints, at = mfsdp.Checkpoints(args.out / "checkpoints", keep=2), Progress()
    if args.resume:
        found = checkpoints.load(model, optimizer, batches=batches, progress=at)
        say(f"going on from step {found}" if found is not None else f"no checkpoint in {args.out}: starting anew")
    elif rank == 0:
        shutil.rmtree(checkpoints.folder, ignore_errors=True)

    start = time.monotonic()
    if not at.held:
        at.held.append((0, validate(compiled, held_out, args, device)))
    begun, first, before, ledger = 0.0, at.step, at.done, Ledger()
    bar = tqdm(total=100, disable=rank != 0, bar_format="{l_bar}{bar}| {elapsed} {postfix}", mininterval=1)
    checks = [c for c in (0.04, 0.1, 0.2, 0.35, 0.5, 0.75) if c > at.done]
    while at.done < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = rate(args, at.done)
        inputs, targets = (t.to(device) for t in batches.next())
        if at.step == first + 1:
            ledger.before_forward()
        loss = compiled(inputs, targets)
        if at.step == first + 1:
            ledger.after_forward()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if at.step == first:
            begun = time.monotonic()
            say(f"first step, compilation included: {begun - start:.0f} s")
        if at.step == first + 1:
            ledger.after_step(model, optimizer, Block)
        optimizer.zero_grad()
        at.step += 1
        # What is averaged besides the loss lets all ranks stop in the same step.
        spent = before + (time.monotonic() - begun) / (60 * args.minutes)
        progress = torch.tensor([loss.item(), at.step / args.steps if args.steps else spent], device=device)
        dist.all_reduce(progress)
        value, at.done = (progress / world).tolist()
        at.train.append((at.step, value))
        if checks and at.done >= checks[0]:
            checks.pop(0)
            at.held.append((at.step, validate(compiled, held_out, args, device)))
            checkpoints.save(at.step, model, optimizer, batches=batches, progress=at)
        speed = (at.step - first - 1) * world * inputs.numel() / max(1e-9, time.monotonic() - begun)
        shown = f"step {at.step}  loss {value:.3f}  held out {at.held[-1][1]:.3f}  {speed:,.0f} tokens/s"
        bar.set_postfix_str(shown, False)
        bar.update(min(100.0, 100 * at.done) - bar.n)
    bar.close()
    step, train, held = at.step, at.train, at.held
    held.append((step, validate(compiled, held_out, args, device, batches=16)))
    written = sample(compiled, "def ", 200 if not args.steps else 20, device)
    export(model, config, args.out / "huggingface", rank)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        plot(args.out / "loss.png", train, held)
        (args.out / "sample.txt").write_text(written)
        summary = {
            "parameters": size, "processes": world, "lowering": lowering, "steps": step,
            "tokens_per_second": round(speed), "train_loss": train[-1][1], "validation": held,
        }  # fmt: skip
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
        say(
            f"\nMeasured here, on {world} {device.type} processes: {step} steps, {speed:,.0f} tokens/s; "
            f"validation loss {held[0][1]:.2f} -> {held[-1][1]:.2f} nats per byte"
        )
        if ledger.rows:
            say("\nMemory of one rank\n" + str(ledger))
        say(f"\nA sample:\n{written}\n\nIn {args.out}: loss.png, sample.txt, summary.json, listings/, checkpoints/,")
        say("and huggingface/, for transformers' AutoModelForCausalLM.from_pretrained")
        if found := page(listings):
            which = "this GPU" if gpu else "an H100, not for this machine"
            say(f"\nThe schedule of a training step, with times estimated for {which}: {found}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(arguments()) if "RANK" in os.environ else sys.exit(launch(arguments()))
