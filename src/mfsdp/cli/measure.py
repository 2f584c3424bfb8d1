"""``mfsdp measure``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import command


def measure(commands: Any) -> None:
    text = "what this machine can do, as a file for explain --hardware; or how long a model's kernels take on it"
    add = command(commands, "measure", text, _measure)
    add("file", help="file to write; with --kernels, new kernels are added to an existing file")
    add("--kernels", metavar="MODEL", help="package.module:factory, or a Hugging Face config.json: its kernels instead")
    add("--world", type=int, default=8, help="number of ranks, which decides the shapes of shards (default: 8)")
    add("--units", help="classes or name patterns, joined by +; auto (default for Hugging Face models: their layers)")
    add("--compute-dtype", default="bfloat16", help="(default: bfloat16; 'none': the model's own)")
    add("--batch", type=int, default=1, help="sequences per rank (default: 1)")
    add("--length", type=int, default=4096, help="tokens per sequence (default: 4096)")


def _measure(args: argparse.Namespace) -> None:
    from ..cost_model.kernel_timings import Kernels
    from ..cost_model.kernel_timings import measure as measure_kernels
    from ..cost_model.machine import measure

    if not args.kernels:
        machine = measure()
        machine.save(args.file)
        print(f"{machine.name}: {args.file}")
        return
    import torch

    from .. import pipeline
    from ..compiler.tracing import trace
    from ..config.options import MixedPrecisionPolicy, Options
    from ..ir import ops
    from .arguments import dtype_of
    from .explain import model_of

    model, inputs, named, layers = model_of(args.kernels, args.batch, args.length)
    units = args.units if args.units in (None, "auto") else args.units.split("+")
    sharding: dict[str, Any] = {"units": units or layers} if units or layers else {}
    if args.compute_dtype != "none":
        sharding["mp_policy"] = MixedPrecisionPolicy(compute_dtype=dtype_of(args.compute_dtype))
    programs = list(trace(model, inputs, named, world=args.world, **sharding))
    passes = pipeline.chosen(Options(), ops.widens(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    for program in programs:
        pipeline.run(program, passes=passes)
    known = Kernels.load(args.file) if Path(args.file).exists() else None
    found = measure_kernels(programs, known=known)
    found.save(args.file)
    print(f"{len(found.seconds) - (len(known.seconds) if known else 0)} new kernels on {found.hardware}: {args.file}")
