"""What the first call costs, cold, and from caches in a new process: ``python examples/bench/compile_time.py``.

Each case is a process of its own, on one rank of a fake group; its processor time, the C++ compiler's not counted (its
results are there before). ``--threads 1 2`` has all caches empty, and one or two workers that compile C++: wall time.
``--capture N`` captures N layers of Llama-3-405B instead, on the meta device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import outlining

WIDTH, BATCH, TOKENS = 384, 2, 256


def first_call(kind: str, layers: int) -> dict[str, float]:
    """Seconds of the first forward and backward, and of another. ``kind``: ``plain`` (torch.compile alone), ``mfsdp``,
    ``whole`` (one graph), ``flat`` (no layer captured for others), ``fsdp2`` (FSDP2, each block compiled).
    """
    from gpt import GPT, Block, fsdp2

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    if kind == "flat":
        outlining.MIN_LAYERS = sys.maxsize
    torch.manual_seed(0)
    model: Any = GPT(layers, WIDTH)
    options = {"lowering": "whole"} if kind == "whole" else {}
    run: Any = model
    if kind == "fsdp2":
        fsdp2(model, compiled=True)
    elif kind == "plain":
        run = torch.compile(model, dynamic=False)
    else:
        mfsdp.fully_shard(model, units=[Block], device="cpu")
        run = torch.compile(model, dynamic=False, backend="mfsdp", options=options)
    ids = torch.randint(0, 1024, (BATCH, TOKENS))
    times = []
    for _ in range(2):
        begun = time.process_time(), time.perf_counter()
        run(ids).backward()
        times.append((time.process_time() - begun[0], time.perf_counter() - begun[1]))
    return {"first": times[0][0], "wall": times[0][1], "step": times[1][0]}


def captured(layers: int) -> dict[str, float]:
    """Seconds to capture Llama-3-405B's shapes, and for the passes; none of its weights are there."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    shape = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
    config = LlamaConfig(**shape, num_hidden_layers=layers, vocab_size=128256, max_position_embeddings=131072)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.empty(1, 8192, dtype=torch.long, device="meta")
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    begun = time.process_time()
    programs = mfsdp.trace(model, (), given, world=1024, units=[LlamaDecoderLayer], lowering="inductor")
    between = time.process_time()
    for program in programs:
        pipeline.run(program, listings=False)
    return {"capture": between - begun, "passes": time.process_time() - between}


def apart(cache: str, *arguments: object, cold: bool = False) -> dict[str, float]:
    """A case in a process of its own."""
    space = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    if cold:
        space |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    command = [sys.executable, __file__, "--case", *map(str, arguments)]
    done = subprocess.run(command, env=space, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def table(kinds: list[str], layers: list[int], rounds: int) -> None:
    """Prints the first calls, cold and from caches, of kinds in turn; the least of several."""
    with tempfile.TemporaryDirectory() as cache:
        for kind in kinds:
            for n in layers:
                apart(cache, kind, n)  # compiles C++, and fills the caches
        for name, cold in (("cold", True), ("from caches", False)):
            for n in layers:
                rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
                for _ in range(rounds):
                    for kind in kinds:
                        rows[kind].append(apart(cache, kind, n, cold=cold))
                for kind, found in rows.items():
                    best = {key: min(row[key] for row in found) for key in found[0]}
                    print(
                        f"{name}, {n} layers, {kind}: first call {best['first']:.2f} s (wall {best['wall']:.2f}), "
                        f"a step of it {best['step']:.2f}",
                        flush=True,
                    )


def empty_caches(kinds: list[str], layers: list[int], rounds: int, threads: list[int]) -> None:
    """Prints the first calls with empty caches, C++ included, the least of several."""
    for n in layers:
        for kind, workers in itertools.product(kinds, threads):
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(workers)
            walls = []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as cache:
                    walls.append(apart(cache, kind, n)["wall"])
            print(f"empty caches, {n} layers, {kind}, {workers} workers: first call {min(walls):.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["plain", "mfsdp", "flat"])
    parser.add_argument("--layers", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--capture", type=int)
    parser.add_argument("--threads", nargs="+", type=int)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.case:
        print(json.dumps(first_call(chosen.case[0], int(chosen.case[1]))))
    elif chosen.capture:
        print(json.dumps(captured(chosen.capture)))
    elif chosen.threads:
        empty_caches(chosen.kinds, chosen.layers, chosen.rounds, chosen.threads)
    else:
        table(chosen.kinds, chosen.layers, chosen.rounds)
