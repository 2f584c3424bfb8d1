"""Steps of one process, predicted and measured: ``python examples/bench/kernel_steps.py``.

Compute alone, on this machine: with every kernel measured by itself (`mfsdp.cost_model.kernel_timings`), and with
kernels estimated from what `mfsdp.measure` finds. Communication is for clock.py.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import mfsdp
from mfsdp import pipeline
from mfsdp.cost_model import kernel_timings

sys.path.insert(0, str(Path(__file__).parent))
from variants import fresh_gpt

ROUNDS = 12


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, use_cache=False,
        )
    )  # fmt: skip


def gpt(layers: int, width: int) -> Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]]:
    def make() -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]:
        return fresh_gpt(layers, width), (torch.zeros(2, 256, dtype=torch.long),), {}, ["blocks.*"]

    return make


def hugging_face() -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]:
    ids = torch.zeros(2, 256, dtype=torch.long)
    return llama(), (), {"input_ids": ids, "labels": ids}, ["model.layers.*"]


MODELS = {"GPT, 8 x 128": gpt(8, 128), "GPT, 4 x 384": gpt(4, 384), "Llama of transformers, 4 x 256": hugging_face}


def compared(make: Any, lowering: str, machine: mfsdp.Hardware) -> tuple[float, float, float]:
    """Seconds of forward and backward: predicted with kernels measured, without, and measured: of the processor, which
    nobody else on the core makes longer.
    """
    with torch.device("meta"):
        model, args, kwargs, units = make()
    args = tuple(torch.zeros(a.shape, dtype=a.dtype) for a in args)
    kwargs = {k: torch.zeros(a.shape, dtype=a.dtype) for k, a in kwargs.items()}
    programs = list(mfsdp.trace(model, args, kwargs, world=1, units=units, lowering=lowering))
    for program in programs:
        pipeline.run(program)
    found = kernel_timings.measure(programs, fused=lowering != "eager")
    given = {"world": 1, "units": units, "hardware": machine, "options": {"lowering": lowering}, "suggest": False}
    known, guessed = (
        sum(view.seconds for view in mfsdp.explain(model, args, kwargs, kernels=k, **given).views)
        for k in (found, None)
    )
    torch.manual_seed(0)
    model = make()[0]
    run = torch.compile(mfsdp.fully_shard(model, units=units), backend="mfsdp", options={"lowering": lowering})
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        times = [time.process_time()]
        out = run(*args, **kwargs)
        times.append(time.process_time())
        getattr(out, "loss", out).backward()
        times.append(time.process_time())
        model.zero_grad()
        best = [min(a, b) for a, b in zip(best, (y - x for x, y in pairwise(times)), strict=True)]
    return known, guessed, sum(best)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    machine = mfsdp.measure()
    print("| | lowering | kernels measured | | estimated | | measured ms |\n|---|---|---|---|---|---|---|")
    errors = []
    for name, make in MODELS.items():
        for lowering in sys.argv[1:] or ("eager", "inductor"):
            known, guessed, real = compared(make, lowering, machine)
            errors.append((abs(known / real - 1), abs(guessed / real - 1)))
            print(
                f"| {name} | {lowering} | {1e3 * known:.1f} | {known / real - 1:+.0%} | {1e3 * guessed:.1f} | "
                f"{guessed / real - 1:+.0%} | {1e3 * real:.1f} |", flush=True,
            )  # fmt: skip
    print("mean error", *(f"{mean(column):.1%}" for column in zip(*errors, strict=True)))


if __name__ == "__main__":
    main()
