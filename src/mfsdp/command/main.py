"""The command line: ``python -m mfsdp``, or the script ``mfsdp``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.convert import convert
from ..planning.explain import explain
from ..reports.report import Comparison
from ..spec.config import SHORT, MixedPrecisionPolicy
from ..spec.hardware import KNOWN


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 if all went well, 1 for what the user can mend, with a line that says what."""
    parser = argparse.ArgumentParser(prog="mfsdp", description="Sharded training as a compiler: tools around it.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for add in (_explain_arguments, _show_arguments, _diff_arguments, _convert_arguments):
        add(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except BrokenPipeError:  # head, less
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, RuntimeError, ImportError, re.error) as error:
        print(f"mfsdp: {str(error).removeprefix('mfsdp: ')}", file=sys.stderr)
        return 1
    return 0


def _command(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], None]) -> Any:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(run=run)
    return parser.add_argument


# explain


def _explain_arguments(commands: Any) -> None:
    text = "what a training step will do, cost and hold; without process groups, GPUs or memory for the model"
    add = _command(commands, "explain", text, _explain)
    add("model", help="package.module:factory (gives a model, or (model, args, kwargs)), or a Hugging Face config.json")
    add("--world", help="ranks (default: 8); as all that follows, several with commas give a table: 8,64,512")
    add("--mesh-shape", help="outer x shard ranks instead: 128x8")
    add("--hardware", default="h100", help=f"{', '.join(KNOWN)}, or a JSON file (default: h100)")
    add("--units", help="classes or name patterns, joined by + (default for Hugging Face models: their layers)")
    add("--strategy", help="0 to 3 (default: 3)")
    add("--outer-strategy", help="no_shard or optim")
    add("--reshard-after-forward", help="true or false (default: true)")
    add("--compute-dtype", default="bfloat16", help="(default: bfloat16; 'none': the model's own)")
    add("--prefetch", help="units ahead (default: 1)")
    add("--reduce-lag", help="reductions in flight (default: 1)")
    add("--max-unsharded", help="bytes of gathered parameters")
    add("--optimizer", default="adamw", help="(default: adamw)")
    add("--batch", type=int, default=1, help="sequences per rank (default: 1)")
    add("--length", type=int, default=4096, help="tokens per sequence (default: 4096)")
    add("--listing", action="store_true", help="print the listings too")
    add("--html", help="write the report, one page")
    add("--trace", help="write the simulated step as a Chrome trace")
    add("--plot", help="of several: draw them")


def _explain(args: argparse.Namespace) -> None:
    model, inputs, named, layers = _model(args.model, args.batch, args.length)
    several: dict[str, Any] = {}
    for name, kind in (("strategy", _strategy), ("outer_strategy", str), ("reshard_after_forward", _truth)):
        if getattr(args, name) is not None:
            several[name] = _several(getattr(args, name), kind)
    units = _several(args.units, lambda text: text.split("+")) if args.units else layers
    if units:
        several["units"] = units
    if args.compute_dtype != "none":
        several["mp_policy"] = MixedPrecisionPolicy(compute_dtype=_dtype(args.compute_dtype))
    options = {
        n: _several(getattr(args, n), int) for n in ("prefetch", "reduce_lag", "max_unsharded") if getattr(args, n)
    }
    shape = _several(args.mesh_shape, _shape) if args.mesh_shape else None
    found = explain(
        model, inputs, named, world=_several(args.world or "8", int), mesh_shape=shape,
        hardware=_several(args.hardware, str), options=options, optimizer=args.optimizer, **several,
    )  # fmt: skip
    if isinstance(found, Comparison):
        if args.html or args.trace or args.listing:
            raise ValueError("--html, --trace and --listing are of one step: give one value of each")
        print(found)
        if args.plot:
            found.plot(args.plot)
        return
    if args.plot:
        raise ValueError("--plot draws several: give some values with commas, as --prefetch 0,1,2")
    print(found if args.listing else found.summary())
    for wanted, write in ((args.html, found.html), (args.trace, found.trace)):
        if wanted:
            write(wanted)


def _several(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        values = [kind(x) for x in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    return values if len(values) > 1 else values[0]


def _strategy(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return text.lower() == "true"


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split("x"))


def _model(target: str, batch: int, length: int) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str] | None]:
    """The model, its inputs, and the names of its layers, if it says them."""
    path = Path(target)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _hugging_face(path, batch, length)
    where, colon, name = target.partition(":")
    if not colon:
        raise ValueError(f"{target!r}: give package.module:factory, or the path of a Hugging Face config.json")
    sys.path.insert(0, os.getcwd())
    factory = getattr(importlib.import_module(where), name, None)
    if not callable(factory):
        raise ValueError(f"{target!r}: {where} has no function {name!r}")
    try:
        with torch.device("meta"):
            made = factory()
    except TypeError as error:
        raise ValueError(f"{target!r} cannot be called without arguments: {error}") from error
    if isinstance(made, torch.nn.Module):
        return made, (torch.zeros(batch, length, dtype=torch.long),), {}, None
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise ValueError(f"{target!r} gives a {type(made).__name__}: return a model, or (model, args, kwargs)")
    model, args, kwargs = (*made, {})[:3]
    return model, tuple(args), dict(kwargs), None


def _hugging_face(path: Path, batch: int, length: int) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str] | None]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        kind = json.loads(path.read_text()).get("model_type")
        from transformers import AutoConfig, AutoModelForCausalLM
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    except ImportError as error:
        raise ImportError(f"{path} is a Hugging Face configuration (pip install transformers): {error}") from error
    if not kind:
        raise ValueError(f"{path} is no Hugging Face configuration: it has no model_type")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(batch, length, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}, sorted(model._no_split_modules or []) or None


# show, diff


def _show_arguments(commands: Any) -> None:
    add = _command(commands, "show", "the listings in a folder that MFSDP_DUMP has filled", _show)
    add("folder")
    add("--phase", choices=["forward", "backward", "inference"], help="only this one")
    add("--stage", help="after this pass (default: the last); 'all' for every one")


def _diff_arguments(commands: Any) -> None:
    add = _command(
        commands, "diff", "what differs between two listings, or between the last ones of two folders", _diff
    )
    add("a")
    add("b")


_FILE = re.compile(r"graph(\d+)\.(forward|backward|inference)\.(\d+)\.(\w+)\.txt")


def _dumped(folder: Path) -> dict[tuple[int, str], list[tuple[str, Path]]]:
    """Files of a dump by graph and phase, in the order of the passes."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; MFSDP_DUMP={folder} during a run makes it")
    found: dict[tuple[int, str], list[tuple[int, str, Path]]] = {}
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match:
            found.setdefault((int(match[1]), match[2]), []).append((int(match[3]), match[4], path))
    if not found:
        raise FileNotFoundError(f"{folder} holds no listings; MFSDP_DUMP={folder} during a run makes them")
    order = {"forward": 0, "backward": 1, "inference": 2}
    keys = sorted(found, key=lambda k: (k[0], order[k[1]]))
    return {key: [(stage, path) for _, stage, path in sorted(found[key])] for key in keys}


def _show(args: argparse.Namespace) -> None:
    shown = False
    for (_, phase), stages in _dumped(Path(args.folder)).items():
        if args.phase not in (None, phase):
            continue
        for stage, path in stages if args.stage else stages[-1:]:
            if args.stage in (None, "all", stage):
                shown = True
                print("\n".join(_coloured(path.read_text().splitlines())))
    if not shown:
        raise ValueError(f"no listing of phase {args.phase!r} after {args.stage!r} in {args.folder}")


def _diff(args: argparse.Namespace) -> None:
    a, b = Path(args.a), Path(args.b)
    if a.is_dir() != b.is_dir():
        raise ValueError(f"{a} and {b}: give two files or two folders")
    pairs = [(a, b)]
    if a.is_dir():
        first, second = _dumped(a), _dumped(b)
        pairs = [(first[k][-1][1], second[k][-1][1]) for k in first if k in second]
        for key in first.keys() ^ second.keys():
            print(f"only in {a if key in first else b}: graph {key[0]}, {key[1]}")
    for one, other in pairs:
        for file in (one, other):
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {file}")
        lines = difflib.unified_diff(
            one.read_text().splitlines(), other.read_text().splitlines(), str(one), str(other), lineterm=""
        )
        print("\n".join(_coloured(lines, diff=True)), end="\n" if one.read_text() != other.read_text() else "")


def _coloured(lines: Sequence[str] | Iterator[str], diff: bool = False) -> Iterator[str]:
    """With colours if this is a terminal that wants them (no-color.org)."""
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    for line in lines:
        code = "" if plain else _colour(line, diff)
        yield f"\x1b[{code}m{line}\x1b[0m" if code else line


def _colour(line: str, diff: bool) -> str:
    if diff and line.startswith(("+", "-", "@@")):
        return {"+": "32", "-": "31", "@": "36"}[line[0]]
    line = line[1:] if diff else line
    if line.startswith(";"):
        return "2"
    gutter = line[:9]
    if line.rstrip().endswith("<peak"):
        return "1;31"
    if "<" in gutter:
        return "33"
    if "= all_gather" in line or "= reduce_scatter" in line or " all_reduce" in line or " refresh" in line:
        return "36"
    return ""


# convert


def _convert_arguments(commands: Any) -> None:
    text = "a checkpoint of torch.distributed.checkpoint to safetensors files, or back"
    add = _command(commands, "convert", text, _convert)
    add("source", help="a checkpoint, a run's folder of checkpoints, a .safetensors file or a folder of them")
    add("target", help="a folder that is not there yet")
    add("--key", default="model", help="where in the checkpoint the model is (default: model; '' for the whole)")
    add("--rename", action="append", default=[], metavar="PATTERN=TEXT", help="regular expression, applied to names")
    add("--tied", action="append", default=[], metavar="NAME=OTHER", help="NAME is another name of the tensor OTHER")
    add("--dtype", help="of floating-point tensors in the target, as bfloat16")
    add("--max-file-bytes", type=int, default=5_000_000_000, help="of a safetensors file (default: 5000000000)")
    add("--config", help="a config.json to copy beside safetensors files, for from_pretrained")


def _convert(args: argparse.Namespace) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]

    rules = [(re.compile(pattern), text) for pattern, text in map(_pair, args.rename)]
    dtype = _dtype(args.dtype) if args.dtype else None

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


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if found not in SHORT:
        raise ValueError(f"{name!r} is no dtype for weights; choose {', '.join(str(d)[6:] for d in SHORT)}")
    return found  # type: ignore[no-any-return]
