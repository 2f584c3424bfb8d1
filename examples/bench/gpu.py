"""Speed and memory on one GPU, against others: ``make bench-gpu`` or ``python examples/bench/gpu.py``.

    make bench-gpu                # Llama-3.2-1B, one rank: some 7 minutes on an H100, by estimate
    make bench-gpu SYSTEM=1       # with the machine's own Python and torch
    make bench-gpu ARGS="--models llama-1b,gpt2 --world 1,1of8,2 --minutes 30"
    make bench-gpu ARGS="--contenders plain,fsdp2-layers,mfsdp --rounds 3 --kernels 40"

Every contender trains in processes of its own (gpu_row.py), one contender at a time: what crashes, runs out of memory
or takes too long is a row that says so. ``--world`` lists settings: ``1``; ``1of8``, one rank whose others are not
there (torch's fake group: real kernels, garbage for values, nothing travels); ``2``, two ranks over NCCL, which share
the GPU if there is but one, and talk over loopback sockets. Without a GPU everything runs on the CPU, over gloo:
``--tiny`` makes that bearable, and it only tests that everything runs.

How to read the table: step times are medians; tokens, MFU and memory are of one rank. MFU is the same count of
operations for all, over the peak that the GPU's maker states. ``loss`` is that of the last step: close to plain's, or
the contender trains something else. Written to ``--out`` after every row: record.json, table.md, and a log per row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mfsdp.config.hardware import KNOWN, hardware
from mfsdp.cost_model.machine import this_machine

sys.path.insert(0, str(Path(__file__).parent))
from gpu_row import CONTENDERS, MODELS

ROW = Path(__file__).parent / "gpu_row.py"
GIB = 2**30


def listed(known: Sequence[str]) -> Any:
    """A parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        names = [n for n in text.split(",") if n]
        wrong = [n for n in names if n not in known]
        if wrong or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong) or 'nothing'}: choose from {', '.join(known)}")
        return names

    return parse


def worlds(text: str) -> list[tuple[int, bool]]:
    """Settings as (ranks, whether all but one are not there): ``1,1of8,2``."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(1of)?([1-9]\d*)", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r}: give numbers of ranks, as in 1,1of8,2")
        found.append((int(match[2]), bool(match[1])))
    return found


EVERYTHING = list(CONTENDERS)
EVERYTHING.insert(EVERYTHING.index("mfsdp-optimizer") + 1, "explain")
"""Rows as they run: the most telling first, in case the time is up."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=listed(list(MODELS)), default=["llama-1b"], help=", ".join(MODELS))
    parser.add_argument(
        "--contenders", type=listed(EVERYTHING), default=EVERYTHING,
        help=", ".join(EVERYTHING) + "; explain: what mfsdp.explain tells",
    )  # fmt: skip
    parser.add_argument("--world", type=worlds, default=[(1, False)], help="1, 1of8 (one rank of eight), 2")
    parser.add_argument("--steps", type=int, default=8, help="that are measured")
    parser.add_argument("--warmup", type=int, default=3, help="steps between the first and those")
    parser.add_argument("--batch", type=int, default=0, help="sequences a rank; by default the model's")
    parser.add_argument("--seq", type=int, default=0, help="tokens of a sequence; by default the model's")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's (llama-8b: 4 of its 32)")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each contender, in turns")
    parser.add_argument("--minutes", type=float, default=6, help="after which no row starts")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a row")
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="inductor", help="eager: none compiles")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of the backend mfsdp, as JSON")
    parser.add_argument("--hardware", default="", choices=["", *KNOWN], help="whose peak and clock, if not this GPU's")
    parser.add_argument("--kernels", type=int, default=0, help="keeps that many kernels of each contender's step")
    parser.add_argument("--tiny", action="store_true", help="models of two narrow layers")
    parser.add_argument("--out", type=Path, default=Path("bench-gpu-out"))
    return parser.parse_args(given)


# One row


def environment(rank: int, ranks: int, fake: bool, port: int, gpus: int, cache: Path) -> dict[str, str]:
    """Of a process. Ranks that share a GPU claim to be hosts of their own: NCCL refuses two ranks on the same device
    of a host. Compiler caches are empty, so that first steps compare.
    """
    gone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID")
    env = {k: v for k, v in os.environ.items() if k not in gone}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    if fake:
        return env
    env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank if ranks <= gpus else 0),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    if ranks > gpus > 0:
        env |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                "NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # fmt: skip
    return env


def reason(log: str, code: int | None, limit: float) -> str:
    """Why a row failed, in a line."""
    if "OutOfMemoryError" in log or "out of memory" in log:
        return "out of memory"
    errors = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Unsupported|Timeout)\b.*)$", log, re.M)
    if errors:
        return str(errors[-1])[:200]
    if code is None:
        return f"took more than {limit:.0f} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def launch(spec: dict[str, Any], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a row's processes; what it measured, or ``{"failed": why}``."""
    ranks = 1 if spec["fake"] or spec["contender"] in ("plain", "explain") else spec["world"]
    folder, cache = args.out / "rows", args.out / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    shutil.rmtree(cache, ignore_errors=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"world": 1} if spec["contender"] == "plain" else {}
    text = json.dumps({**spec, **alone, "result": str(result.resolve())})
    logs = [folder / f"{name}.{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        env = environment(rank, ranks, spec["fake"], port, torch.cuda.device_count(), cache.resolve())
        with log.open("w") as out:
            processes.append(subprocess.Popen([sys.executable, str(ROW), text], env=env, stdout=out, stderr=out,
                                              start_new_session=True))  # fmt: skip
    deadline = time.monotonic() + args.limit
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.returncode for p in processes):
            deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it in vain
        time.sleep(0.05)
    codes = [p.poll() for p in processes]
    for process in processes:  # and whatever their compilers have started
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()
    shutil.rmtree(cache, ignore_errors=True)
    if result.exists() and not any(codes):
        return dict(json.loads(result.read_text()))
    at = next((r for r, c in enumerate(codes) if c), next((r for r, c in enumerate(codes) if c is None), 0))
    return {"failed": reason(logs[at].read_text(errors="replace"), codes[at], args.limit)}


# All of them


def about() -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    git = ["git", "-C", str(ROW.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    told = subprocess.run(git, capture_output=True, text=True, check=False) if shutil.which("git") else None
    gpu = torch.cuda.is_available()
    return {
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} cores ({platform.machine()})",
        "gpus": torch.cuda.device_count(),
        "commit": told.stdout.strip() if told is not None and told.returncode == 0 else None,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        **{p: version(p) for p in ("torch", "triton", "transformers", "megatron-fsdp")},
    }


def race(args: argparse.Namespace) -> dict[str, Any]:
    begun, seen = time.monotonic(), about()
    machine = hardware(args.hardware) if args.hardware else this_machine()
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    record = {"about": seen, "options": options, "peak_flops": machine and machine.peak("bf16"), "rows": [],
              "left_out": []}  # fmt: skip
    for index, (world, fake) in enumerate(args.world):
        for model in args.models:
            size = MODELS[model]
            shared = {
                "model": model, "world": world, "fake": fake, "layers": args.layers, "tiny": args.tiny,
                "batch": args.batch or size.batch, "seq": args.seq or (64 if args.tiny else size.seq),
                "steps": args.steps, "warmup": args.warmup, "lowering": args.lowering, "options": args.options,
                "hardware": args.hardware, "kernels": args.kernels,
            }  # fmt: skip
            for number in range(args.rounds):
                for contender in args.contenders:
                    if (contender == "plain" and index) or (contender == "explain" and number):
                        continue  # it has no other ranks; it tells the same again
                    name = f"{model}-{'1of' if fake else ''}{world}-{contender}-{number}"
                    if time.monotonic() - begun > 60 * args.minutes:
                        record["left_out"].append(name)
                        continue
                    row = launch({**shared, "contender": contender}, name, args)
                    record["rows"].append({"contender": contender, **shared, "round": number, **row})
                    told = row.get("failed") or (f"{row['ms']:.1f} ms" if "ms" in row else "told")
                    print(f"{name}: {told} ({(time.monotonic() - begun) / 60:.1f} min)", flush=True)
                    write(record, args.out)
    write(record, args.out)
    return record


def write(record: dict[str, Any], out: Path) -> None:
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "table.md").write_text(table(record))


# The table

HEAD = ("", "ms", "tokens/s", "/ FSDP2", "MFU", "host ms", "first s", "peak GiB", "reserved", "loss", "explain ms",
        "explain GiB")  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """The record in Markdown: a table for each setting and model, one row a contender, medians over rounds."""
    seen = record["about"]
    versions = ", ".join(f"{k} {seen[k]}" for k in ("torch", "transformers", "megatron-fsdp", "nccl") if seen.get(k))
    lines = [f"{seen['device']}, {versions}, Python {seen['python']}, commit {seen['commit']}, {seen['day']}.", ""]
    parts: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in record["rows"]:
        parts.setdefault((row["model"], row["world"], row["fake"]), {}).setdefault(row["contender"], []).append(row)
    for (model, world, fake), rows in parts.items():
        one = next(iter(rows.values()))[0]
        where = "one process" if world == 1 else f"one rank of {world}, others fake" if fake else f"{world} ranks"
        lines += [f"## {model}, {where}, {one['batch']} x {one['seq']} tokens", ""]
        lines += ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
        plain = next((r["losses"] for r in record["rows"] if r["model"] == model and r["contender"] == "plain"
                      and "losses" in r), None)  # fmt: skip
        speed = {name: _median(its, "ms") for name, its in rows.items()}
        told = next((r["explained"] for r in rows.get("explain", []) if "explained" in r), {})
        for name, its in rows.items():
            fine = [r for r in its if "failed" not in r]
            if not fine:
                lines.append(f"| {name} | {its[0]['failed'].replace('|', '/')} |" + " |" * (len(HEAD) - 2))
            elif name != "explain":
                lines.append(_line(name, fine, speed.get("fsdp2-layers"), plain, told.get(name), record, fake))
        lines += ["", *_notes(rows), ""]
    if record["left_out"]:
        lines += [f"Left out, the time was up: {', '.join(record['left_out'])}.", ""]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in rows if key in r]
    return statistics.median(values) if values else None


def _line(
    name: str, rows: list[dict[str, Any]], fsdp2: float | None, plain: list[float] | None,
    told: dict[str, float] | None, record: dict[str, Any], fake: bool,
) -> str:  # fmt: skip
    ms, peak = _median(rows, "ms"), record["peak_flops"]
    assert ms is not None
    loss, memory, reserved = rows[0]["losses"][-1], _median(rows, "peak"), _median(rows, "reserved")
    against = f" ({loss / plain[-1] - 1:+.2%})" if plain and name != "plain" else ""
    cells = [
        name,
        f"{ms:.1f}",
        f"{1e3 * rows[0]['tokens'] / ms:,.0f}",
        f"{fsdp2 / ms:.2f}" if fsdp2 else "-",
        f"{rows[0]['flop'] / ms * 1e3 / peak:.3f}" if peak else "-",
        f"{_median(rows, 'host_ms'):.1f}",
        f"{_median(rows, 'first_s'):.0f}",
        f"{memory / GIB:.2f}" if memory else "-",
        f"{reserved / GIB:.2f}" if reserved else "-",
        "-" if fake and name != "plain" else f"{loss:.4f}{against}",
        f"{told['ms']:.1f} ({told['ms'] / ms - 1:+.0%})" if told else "-",
        f"{told['peak'] / GIB:.2f}" + (f" ({told['peak'] / memory - 1:+.0%})" if memory else "") if told else "-",
    ]
    return "| " + " | ".join(cells) + " |"


def _notes(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What a reader must not overlook."""
    broken = {n: r["breaks"] for n, its in rows.items() for r in its[:1] if n.startswith("mfsdp") and r.get("breaks")}
    return [f"{n}: the graph is broken, the rest ran uncompiled: {'; '.join(why)}" for n, why in broken.items()]


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    record = race(args)
    record["minutes"] = round((time.monotonic() - begun) / 60, 1)
    write(record, args.out)
    print(f"\n{table(record)}\n{args.out}/record.json, {record['minutes']} minutes")
    sys.exit(all("failed" in row for row in record["rows"]))


if __name__ == "__main__":
    main()
