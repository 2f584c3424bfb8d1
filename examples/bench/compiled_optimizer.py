"""A flat optimizer's step, compiled and not, in one process: ``python examples/bench/compiled_optimizer.py``.

Beside it ``torch.compile(optimizer.step)`` over plain tensors of the same sizes. Processor time of the process, one
thread, medians of interleaved rounds. "first" is the time to compile, "new lr" that of the first step with another
learning rate.
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


def torchs(name: str, units: int, width: int) -> Any:
    """torch's optimizer over as many plain tensors, with gradients."""
    tensors = [nn.Parameter(torch.randn(width * width)) for _ in range(units)]
    for t in tensors:
        t.grad = torch.randn_like(t)
    return OPTIMIZERS[name](tensors)


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
    torch._dynamo.reset()
    optimizer = torchs(name, units, width)
    whole = torch.compile(optimizer.step)
    compiling, theirs = seconds(compiled.step, 2) * 2, seconds(whole, 2) * 2
    optimizer.param_groups[0]["lr"] *= 0.5
    again = seconds(whole, 1)
    seconds(plain.step, 2)
    pairs = list(zip(*(m.parameters() for m in models), strict=True))
    apart = max((p.to_local() - q.to_local()).abs().max().item() for p, q in pairs)
    repeat = max(1, 10_000_000 // (units * width * width))
    steps = (plain.step, compiled.step, whole)
    times = [[seconds(step, repeat) for step in steps] for _ in range(rounds)]
    before, after, torch_ms = (statistics.median(t) * 1e3 for t in zip(*times, strict=True))
    ratio, other = (statistics.median(t[i] / t[0] for t in times) for i in (1, 2))
    return (
        f"{name:<15} {units:>3} x {width * width:>9,} {before:>10.3f} {after:>10.3f} {ratio:>6.2f} {compiling:>9.2f} "
        f"{apart:>9.1e} {torch_ms:>10.3f} {other:>6.2f} {theirs:>9.2f} {again:>9.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours = "plain, ms   compiled  ratio  first, s     apart"
    print(f"{'units x elements':>31}  {ours}   torch, ms  ratio  first, s    new lr")
    for name in OPTIMIZERS:
        for units, width in ((32, 64), (32, 256), (32, 1024), (8, 2048)):
            print(measure(name, units, width, rounds), flush=True)
