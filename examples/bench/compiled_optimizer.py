"""A flat optimizer's step, compiled and not, in one process: ``python examples/bench/compiled_optimizer.py``.

Processor time of the process, one thread, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn

import mfsdp

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=True),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.01, foreach=True),
}


def trained(units: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(units)))
    mfsdp.fully_shard(model, units=[nn.Linear])
    model(torch.randn(2, width)).sum().backward()
    return model


def seconds(step: Any, repeat: int) -> float:
    begun = time.process_time()
    for _ in range(repeat):
        step()
    return (time.process_time() - begun) / repeat


def measure(name: str, units: int, width: int, rounds: int) -> str:
    models = [trained(units, width) for _ in range(2)]
    plain, compiled = (
        mfsdp.fully_shard_optimizer(OPTIMIZERS[name](m.parameters()), compile=c)
        for m, c in zip(models, (False, True), strict=True)
    )
    compiling = seconds(compiled.step, 2) * 2
    seconds(plain.step, 2)
    pairs = list(zip(*(m.parameters() for m in models), strict=True))
    apart = max((p.to_local() - q.to_local()).abs().max().item() for p, q in pairs)
    repeat = max(1, 10_000_000 // (units * width * width))
    times = [(seconds(plain.step, repeat), seconds(compiled.step, repeat)) for _ in range(rounds)]
    before, after = (statistics.median(t) for t in zip(*times, strict=True))
    ratio = statistics.median(c / p for p, c in times)
    return (
        f"{name:<15} {units:>3} x {width * width:>9,} {before * 1e3:>10.3f} {after * 1e3:>10.3f} {ratio:>6.2f} "
        f"{compiling:>9.2f} {apart:>9.1e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'units x elements':>31}  plain, ms   compiled  ratio  first, s     apart")
    for name in OPTIMIZERS:
        for units, width in ((32, 64), (32, 256), (32, 1024), (8, 2048)):
            print(measure(name, units, width, rounds), flush=True)
