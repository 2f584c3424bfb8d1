"""The command line: ``python -m mfsdp``, or the script ``mfsdp``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .convert import convert


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 if all went well, 1 for what the user can mend, with a line that says what."""
    parser = argparse.ArgumentParser(prog="mfsdp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    _convert_arguments(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"mfsdp: {str(error).removeprefix('mfsdp: ')}", file=sys.stderr)
        return 1
    return 0


def _convert_arguments(commands: Any) -> None:
    text = "a checkpoint of torch.distributed.checkpoint to safetensors files, or back"
    parser = commands.add_parser("convert", help=text, description=f"Converts {text}.")
    add = parser.add_argument
    add("source", help="a checkpoint, a run's folder of checkpoints, a .safetensors file or a folder of them")
    add("target", help="a folder that is not there yet")
    add("--key", default="model", help="where in the checkpoint the model is (default: model; '' for the whole)")
    add("--rename", action="append", default=[], metavar="PATTERN=TEXT", help="regular expression, applied to names")
    add("--tied", action="append", default=[], metavar="NAME=OTHER", help="NAME is another name of the tensor OTHER")
    add("--dtype", type=_dtype, help="of floating-point tensors in the target, as bfloat16")
    add("--max-file-bytes", type=int, default=5_000_000_000, help="of a safetensors file (default: 5000000000)")
    add("--config", help="a config.json to copy beside safetensors files, for from_pretrained")
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    rules = [(re.compile(pattern), text) for pattern, text in map(_pair, args.rename)]

    def rename(name: str) -> str:
        for pattern, text in rules:
            name = pattern.sub(text, name)
        return name

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="convert") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        names = convert(
            args.source, args.target, key=args.key, rename=rename, tied=dict(map(_pair, args.tied)), dtype=args.dtype,
            max_file_bytes=args.max_file_bytes, config=args.config, progress=progress,
        )  # fmt: skip
    print(f"{len(names)} tensors in {args.target}")


def _pair(text: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not left or not equals:
        raise ValueError(f"{text!r}: write it as OLD=NEW")
    return left, right


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name!r} is no dtype of torch; choose float32, bfloat16, float16, ...")
    return found


if __name__ == "__main__":
    sys.exit(main())
