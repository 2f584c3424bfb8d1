"""``mfsdp measure``."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import Commands, add_model_options, command, sharding_of, units_of


def measure(commands: Commands) -> None:
    text = "what this machine can do, as a file for explain --hardware; or how long a model's kernels take on it"
    add = command(commands, "measure", text, _measure)
    add("file", help="file to write; with --kernels, new kernels are added to an existing file")
    add("--kernels", metavar="MODEL", help="package.module:factory, or a Hugging Face config.json: its kernels instead")
    add("--world", type=int, default=8, help="number of ranks, which decides the shapes of shards (default: 8)")
    add_model_options(add)


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
    from ..config.options import Options
    from ..ir import ops
    from .explain import model_of

    model, inputs, named, layers = model_of(args.kernels, args.batch, args.length)
    sharding = sharding_of(units_of(args.units) if args.units else layers, args.compute_dtype)
    programs = list(trace(model, inputs, named, world=args.world, **sharding))
    passes = pipeline.chosen(Options(), ops.widens(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    for program in programs:
        pipeline.run(program, passes=passes)
    known = Kernels.load(args.file) if Path(args.file).exists() else None
    found = measure_kernels(programs, known=known)
    found.save(args.file)
    print(f"{len(found.seconds) - (len(known.seconds) if known else 0)} new kernels on {found.hardware}: {args.file}")
