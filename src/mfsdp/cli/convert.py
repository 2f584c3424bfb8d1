"""``mfsdp convert``."""

from __future__ import annotations

import argparse
import re

from .arguments import Commands, command, dtype_of


def convert(commands: Commands) -> None:
    text = "a checkpoint of torch.distributed.checkpoint to safetensors files, or back"
    add = command(commands, "convert", text, _convert)
    add("source", help="a checkpoint (Megatron-Core's too), a run's folder of them, a .safetensors file or its folder")
    add("target", help="folder to create; it must not exist")
    add("--key", help="where in the checkpoint the model is ('' for the whole); default: model, in torch_dist its top")
    add("--rename", action="append", default=[], metavar="PATTERN=TEXT", help="regular expression, applied to names")
    add("--tied", action="append", default=[], metavar="NAME=OTHER", help="NAME is another name of the tensor OTHER")
    add("--dtype", help="of floating-point tensors in the target, as bfloat16")
    add("--max-file-bytes", type=int, default=5_000_000_000, help="of a safetensors file (default: 5000000000)")
    add("--config", help="a config.json to copy beside safetensors files, for from_pretrained")


def _convert(args: argparse.Namespace) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    from ..checkpoints.convert import convert

    rules = [(re.compile(pattern), text) for pattern, text in map(_pair, args.rename)]
    dtype = dtype_of(args.dtype) if args.dtype else None

    def rename(name: str) -> str:
        for pattern, text in rules:
            name = pattern.sub(text, name)
        return name

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="convert") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        names = convert(
            args.source, args.target, key=args.key, rename=rename, tied=dict(map(_pair, args.tied)), dtype=dtype,
            max_file_bytes=args.max_file_bytes, config=args.config, progress=progress,
        )  # fmt: skip
    print(f"{len(names)} tensors in {args.target}")


def _pair(text: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not left or not equals:
        raise ValueError(f"{text!r}: write it as OLD=NEW")
    return left, right
