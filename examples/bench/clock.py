"""The clock of `mfsdp.explain` against measured steps: ``python examples/bench/clock.py RESULTS.json`` of bench.py.

What the clock is told was measured apart from the steps that it predicts: the link's rate, what gloo takes of the
processor for a byte and what a collective costs that finds its group idle, with nothing else running (and what other
kernels lose beside it, if that was measured); and how long forward, backward and optimizer compute, with communication
stubbed out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

import mfsdp
from mfsdp.config.hardware import Hardware, Link

sys.path.insert(0, str(Path(__file__).parent))
from variants import fresh_gpt, shard


@dataclass(frozen=True)
class Step:
    """One configuration, in seconds."""

    rate: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def machine(results: dict[str, Any], rate: str) -> Hardware:
    """One rank of the benchmark, behind a link. Peaks do not matter: compute is calibrated.

    What a byte takes of the processor does not depend on the link, but what of it is charged to the process does: on
    slow links the kernel does its part from timers. So it is taken from the link where most is.
    """
    result = results[rate]
    rates = results["arguments"]["rates"].split(",")
    cpu = max(results[r]["link_cpu"] / results[r]["bytes"] for r in rates)
    if "lost" in result:
        cpu = max(cpu, median(results[r]["lost"] / results[r]["bytes"] for r in rates))
    restart = max(0.0, result["link_alone"] / result["link_seconds"] - 1)
    link = Link(result["bytes"] / result["link_seconds"], 1e-4, cpu=cpu, restart=restart)
    return Hardware("one core", {"f32": 6e10}, 12 << 30, 8e9, link, link, reached=1.0, reached_bandwidth=1.0)


def compare(results: dict[str, Any]) -> list[Step]:
    """Every step of ours that was measured, and what the clock says."""
    a = results["arguments"]
    with torch.device("meta"):
        model: Any = fresh_gpt(int(a["layers"]), int(a["width"]))
    shard(model, device="meta")
    ids = torch.zeros(int(a["batch"]), int(a["length"]), dtype=torch.long)
    rates = a["rates"].split(",")
    rows = results[rates[0]]["rows"]
    names = [name for name in rows if name.startswith("mfsdp, prefetch") and rows[name].get("times")]
    depths = [int(name.rpartition(" ")[2]) for name in names]
    quiet = [min(column) for column in zip(*results["stubbed"]["rows"][names[-1]]["phases"], strict=True)]
    profile = SimpleNamespace(given=lambda program: {"compute": quiet[program.phase == "backward"]}, optimizer=quiet[2])
    steps = []
    for name, depth in zip(names, depths, strict=True):  # as in variants.py
        found = mfsdp.compare(
            model, (ids,), world=int(a["world"]), hardware=[machine(results, rate) for rate in rates],
            options={"prefetch": depth, "reduce_lag": depth, "check": False}, profile=profile,
        )  # fmt: skip
        for rate, report in zip(rates, found, strict=True):
            steps.append(Step(rate, name, report.step, min(results[rate]["rows"][name]["times"])))
    return sorted(steps, key=lambda s: rates.index(s.rate))


def table(steps: list[Step]) -> str:
    lines = ["| link | | predicted ms | measured ms | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {s.rate} | {s.name} | {1e3 * s.predicted:.0f} | {1e3 * s.measured:.0f} | {s.error:+.0%} |" for s in steps
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(compare(json.loads(Path(sys.argv[1]).read_text()))))
