"""``mfsdp explain`` and ``mfsdp plan``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..config.hardware import KNOWN
from .arguments import Commands, add_model_options, command, sharding_of, units_of, writable

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


def plan(commands: Commands) -> None:
    text = (
        "the fastest training step that fits a budget of memory; without process groups, GPUs or memory for the model"
    )
    add = command(commands, "plan", text, _plan)
    add("model", help="package.module:factory (gives a model, or (model, args, kwargs)), or a Hugging Face config.json")
    add("--memory", required=True, help="bytes that a rank may take, or a text: 70GB, 64GiB")
    add("--world", type=int, help="ranks (default: 8)")
    add("--mesh-shape", help="outer x shard ranks instead: 128x8; several with commas: the best of them")
    add("--hardware", default="h100", help=f"{', '.join(KNOWN)}, or a JSON file (default: h100)")
    add("--microbatches", type=int, default=1, help="of one step (default: 1)")
    add_model_options(add)
    add("--strategy", help="0 to 3 (default: 3); several with commas: the best of them")
    add("--optimizer", default="adamw", help="(default: adamw)")
    add("--allow", help="what may be chosen, with commas: gathered,recompute,offload,optimizer,prefetch (default: all)")
    add("--save", help="write the plan, for fully_shard(model, plan=mfsdp.Plan.load(path))")


def _plan(args: argparse.Namespace) -> None:
    from ..planning.plan import plan

    memory = _budget(args.memory)
    writable("--save", args.save)
    model, inputs, named, layers = model_of(args.model, args.batch, args.length)
    more = sharding_of(units_of(args.units) if args.units else layers, args.compute_dtype)
    more |= _given(args, {"strategy": _strategy, "mesh_shape": _shape})
    if args.allow is not None:
        more["allow"] = tuple(args.allow.split(","))
    found = plan(
        model, inputs, named, memory=memory, world=args.world,
        hardware=args.hardware, microbatches=args.microbatches, optimizer=args.optimizer, **more,
    )  # fmt: skip
    print(found)
    if args.save:
        found.save(args.save)
        print(f"mfsdp: wrote {args.save}", file=sys.stderr)


def _budget(text: str) -> int:
    from ..config.plans import nbytes_of

    nbytes = nbytes_of(int(text) if text.isdigit() else text, "--memory ")
    if nbytes < 10**5:
        unit = f"; did you mean {text}GB?" if text.isdigit() else ""
        raise ValueError(f"--memory {text}: {nbytes} bytes hold no step of any model{unit}")
    return nbytes


def explain(commands: Commands) -> None:
    text = "what a training step will do, cost and hold; without process groups, GPUs or memory for the model"
    add = command(commands, "explain", text, _explain)
    add("model", help="package.module:factory (gives a model, or (model, args, kwargs); also a list of pipeline stages "
        "for model), or a Hugging Face config.json")  # fmt: skip
    add("--world", help="ranks (default: 8). Most settings take a comma-separated list, 8,64,512, and give a table")
    add("--mesh-shape", help="outer x shard ranks instead: 128x8")
    add("--hardware", default="h100", help=f"{', '.join(KNOWN)}, or a JSON file (default: h100)")
    add("--microbatches", help="microbatches per step (default: the value of --together)")
    add("--together", help="microbatches in one program, mfsdp.together (default: 1)")
    add("--overlapped", help="true or false: backwards run beside the next forward, mfsdp.overlapped (default: false)")
    add("--stages", help="number of pipeline stages; the model is one of them, or a list of all (default: 1)")
    add("--schedule", help="torch's schedule of the stages, simulated with sends: 1F1B, ZBVZeroBubble, ...")
    add("--stages-per-rank", help="of the schedule (default: 2 if it takes several, else 1)")
    add("--slowest", help="compute time of the slowest rank relative to the others (default: 1)")
    add("--prices", help='JSON file with the price of one rank per hour: {"h100": 2.5}')
    add_model_options(add)
    add("--strategy", help="0 to 3 (default: 3)")
    add("--outer-strategy", help="no_shard or optim")
    add("--reshard-after-forward", help="true or false (default: true)")
    add("--prefetch", help="units ahead, or auto (default: 1)")
    add("--reduce-lag", help="reductions in flight (default: 1)")
    add("--max-unsharded", help="bytes of gathered parameters")
    add("--optimizer", default="adamw", help="(default: adamw)")
    add("--kernels", help="a file of mfsdp measure --kernels: their times instead of estimates")
    add("--stepping", help="flat (fully_shard_optimizer), offloaded (its state on the host), or whole")
    add("--listing", action="store_true", help="print the listings too")
    add("--html", help="write the report, one page")
    add("--trace", help="write the simulated step as a Chrome trace")
    add("--plot", help="draw the table of several values into this file")


def _explain(args: argparse.Namespace) -> None:
    from ..planning.compare import compare
    from ..planning.explain import explain
    from ..reports import charts

    if args.html:
        charts.bokeh.resources  # noqa: B018  (raises early if Bokeh is missing)
    for flag in ("html", "trace", "plot"):
        writable(f"--{flag}", getattr(args, flag))
    model, inputs, named, layers = model_of(args.model, args.batch, args.length)
    kinds: dict[str, Callable[[str], Any]] = {
        "world": int, "mesh_shape": _shape, "hardware": str, "strategy": _strategy, "outer_strategy": str,
        "reshard_after_forward": _truth, "microbatches": int, "together": int, "overlapped": _truth, "stages": int,
        "schedule": str, "stages_per_rank": int, "slowest": float,
    }  # fmt: skip
    options: dict[str, Callable[[str], Any]] = {"prefetch": _depth, "reduce_lag": int, "max_unsharded": int}
    given = {
        **_given(args, kinds), "options": _given(args, options), "optimizer": args.optimizer,
        "kernels": args.kernels, "prices": args.prices, "stepping": args.stepping,
        **sharding_of(_several("units", args.units, units_of) if args.units else layers, args.compute_dtype),
    }  # fmt: skip
    if any("," in (getattr(args, name) or "") for name in ("units", *options, *kinds)):
        if args.html or args.trace or args.listing:
            raise ValueError("--html, --trace and --listing are of one step: give one value of each")
        table = compare(model, inputs, named, **given)
        print(table)
        if args.plot:
            table.plot(args.plot)
            print(f"mfsdp: wrote {args.plot}", file=sys.stderr)
        return
    if args.plot:
        raise ValueError("--plot draws several: give some values with commas, as --prefetch 0,1,2")
    found = explain(model, inputs, named, **given)
    print(found if args.listing else found.summary())
    for wanted, write in ((args.html, found.html), (args.trace, found.trace)):
        if wanted:
            write(wanted)
            print(f"mfsdp: wrote {wanted}", file=sys.stderr)


def _given(args: argparse.Namespace, kinds: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Returns the arguments that were given, each one value or a list."""
    return {n: _several(n, text, kind) for n, kind in kinds.items() if (text := getattr(args, n)) is not None}


def _several(name: str, text: str, kind: Callable[[str], T]) -> T | list[T]:
    try:
        values = [kind(x) for x in text.split(",")]
    except ValueError as error:
        wanted: dict[Any, str] = {int: "give whole numbers", float: "give numbers", _shape: "give outer x shard: 128x8"}
        why = wanted.get(kind, str(error))
        raise ValueError(f"--{name.replace('_', '-')} {text}: {why}") from error
    return values if len(values) > 1 else values[0]


def _depth(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _strategy(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return text.lower() == "true"


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split("x"))


class Example(NamedTuple):
    """A model, its inputs, and the class names of its layers if they are known."""

    model: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    layers: list[str] | None


def model_of(target: str, batch: int, length: int) -> Example:
    path = Path(target)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _hugging_face(path, batch, length)
    where, colon, name = target.partition(":")
    if not colon:
        raise ValueError(f"{target!r}: give package.module:factory, or the path of a Hugging Face config.json")
    import torch

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
        return Example(made, (torch.zeros(batch, length, dtype=torch.long),), {}, None)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], (torch.nn.Module, list)):
        raise ValueError(f"{target!r} gives a {type(made).__name__}: return a model, or (model, args, kwargs)")
    model, args, kwargs = (*made, {})[:3]
    model = torch.nn.ModuleList(model) if isinstance(model, list) else model
    return Example(model, tuple(args), dict(kwargs), None)


def _hugging_face(path: Path, batch: int, length: int) -> Example:
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        kind = json.loads(path.read_text()).get("model_type")
        import transformers
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    except ImportError as error:
        raise ImportError(f"{path} is a Hugging Face configuration (pip install transformers): {error}") from error
    if not kind:
        raise ValueError(f"{path} is no Hugging Face configuration: it has no model_type")
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    config.use_cache = False
    named = (config.architectures or [""])[0]
    try:
        make = getattr(transformers, named, None) or transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):
            model = make(config)
        inputs = _inputs_of(model, batch, length)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not say enough of a {named or kind} to make it and its inputs: {error}. Give "
            "package.module:factory instead, a function that returns (model, args, kwargs)"
        ) from error
    return Example(model, (), inputs, sorted(model._no_split_modules or []) or None)


def _inputs_of(model: Any, batch: int, length: int) -> dict[str, object]:
    """Returns a batch for a transformers model: tokens or images, and labels if it takes them."""
    import torch

    name, config = model.main_input_name, model.config
    if name == "pixel_values":
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        inputs: dict[str, object] = {name: torch.zeros(batch, config.num_channels, side, side)}
    elif name == "input_ids":
        inputs = {name: torch.zeros(batch, length, dtype=torch.long)}
    else:
        raise ValueError(f"its input is called {name}")
    if "labels" in inspect.signature(model.forward).parameters:
        one = type(model).__name__.endswith(("ForSequenceClassification", "ForImageClassification"))
        inputs["labels"] = torch.zeros((batch,) if one else (batch, length), dtype=torch.long)
    return inputs
