"""How long the passes and the checks after them take, and how that grows: ``python examples/bench/passes.py``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import mfsdp

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="8,32,126")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    print("| layers | nodes | capture s | passes s | passes and checks s |\n|---|---|---|---|---|")
    for layers in map(int, args.layers.split(",")):
        with torch.device("meta"):
            model, ids = GPT(layers, 384), torch.empty(2, 256, dtype=torch.long)
        begun = time.perf_counter()
        programs = list(mfsdp.trace(model, (ids,), world=8, units=["blocks.*"]))
        captured = time.perf_counter() - begun
        best = {}
        for checked in (False, True):
            times = []
            for _ in range(args.repeat):
                copies = [p.copy() for p in programs]
                begun = time.perf_counter()
                for program in copies:
                    mfsdp.pipeline.run(program, checked=checked, listings=False)
                times.append(time.perf_counter() - begun)
            best[checked] = min(times)
        nodes = sum(len(p.nodes) for p in programs)
        print(f"| {layers} | {nodes} | {captured:.1f} | {best[False]:.2f} | {best[True]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
