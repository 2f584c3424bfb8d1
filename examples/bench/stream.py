"""Whole weights in bfloat16, one way beside the other, in turns: ``torchrun --nproc-per-node=2 stream.py``. Prints
medians in milliseconds, and the most bytes that the first rank allocates on top of its shards.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import mfsdp

sys.path.insert(0, str(Path(__file__).parent))
from bench import peak_of


def used(pairs: object) -> None:
    """Takes each tensor and drops it."""
    for _, tensor in pairs:  # type: ignore[attr-defined]
        del tensor


def ways(model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    def stream(**how: object) -> Callable[[], object]:
        return lambda: used(mfsdp.stream_weights(model, torch.bfloat16, **how))  # type: ignore[arg-type]

    def each() -> None:
        used((name, p.full_tensor().bfloat16()) for name, p in model.named_parameters())

    def torchs() -> None:
        options = StateDictOptions(full_state_dict=True)
        used((name, t.bfloat16()) for name, t in get_model_state_dict(model, options=options).items())

    return {
        "stream to all, prefetch 1": stream(),
        "stream to all, prefetch 0": stream(prefetch=0),
        "stream to rank 0, prefetch 1": stream(to=0),
        "stream to rank 0, prefetch 0": stream(to=0, prefetch=0),
        "one layer to rank 0": stream(to=0, only=lambda name: ".layers.3." in name),
        "full_tensor() of each": each,
        "get_model_state_dict, full": torchs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=args.width, intermediate_size=4 * args.width, num_hidden_layers=args.layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False)
    mfsdp.fully_shard(model, units="auto")
    found = ways(model)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(args.rounds + 1):
        for name, way in found.items():
            dist.barrier()
            begun = time.perf_counter()
            way()
            dist.barrier()
            times[name].append((time.perf_counter() - begun) * 1e3)
    whole = 2 * sum(p.numel() for p in model.parameters())
    for name, way in found.items():
        peak = peak_of(way)
        dist.barrier()
        if dist.get_rank() == 0:
            ms = statistics.median(times[name][1:])
            print(f"{name:30s} {ms:7.1f} ms {peak / 1e6:7.1f} MB of {whole / 1e6:.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
