"""Megatron-Core: reads its checkpoints onto shards.

Its "torch_dist" format stores whole tensors, whichever rank wrote which part. Each rank reads the boxes of its own
rows; no tensor is whole anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from ..buffers.flat_buffer import half_loaded, shared_over
from ..checkpoints import files, megatron
from ..checkpoints.convert import Part, checkpoint_in, read_parts
from ..checkpoints.errors import checkpoint_errors
from ..checkpoints.reading import Reader
from ..checkpoints.tensors import boxes, tensors_of
from ..dtensor.parameter_names import original
from ..runtime.transport_registry import count_load

_MAIN = "fp32_param"
"""The kind of optimizer state that holds main weights."""

Rename = Callable[[str], str] | None


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rename: Rename = None,
    step: int | None = None,
) -> list[str]:
    """Reads a "torch_dist" checkpoint of Megatron-Core into a model and its optimizer; every rank reads only its own
    rows. It does not communicate; all ranks must call it, and the next program raises if some have not. Weights come
    from the optimizer's fp32 copies where there are any.

    Args:
        model: sharded or not; values are cast to its dtypes.
        path: the checkpoint's folder, or a run's with ``latest_checkpointed_iteration.txt``.
        optimizer: of the model's parameters. Its state (``exp_avg``, ...) is read; a new one gets its state by a step
            without gradients, as in `get_optimizer_state_dict`. Learning rates and other settings stay its own:
            Megatron-Core pickles them, and pickles are not opened.
        rename: maps the name of a tensor in the checkpoint to the model's name. Tensors that stack all layers are
            called ``decoder.layers.0...`` and so on.
        step: number of steps that the optimizer has done. Default: the iteration in the folder's name.

    Returns:
        Names of the checkpoint's weights, renamed, that the model lacks.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it has another format, the model or the optimizer has a tensor that it lacks, shapes differ, or the
            step is unknown. Nothing has changed.
        CheckpointError: it is damaged. Some weights may be read: the model refuses to compute until it is loaded.
    """
    model, path = getattr(model, "_orig_mod", model), Path(path)
    folder = checkpoint_in(path) if path.exists() else None
    if folder is None or not megatron.is_torch_dist(folder):
        kind = FileNotFoundError if folder is None else ValueError
        raise kind(
            f"load_checkpoint: there is no checkpoint of Megatron-Core in the format torch_dist at {path}; for others: "
            "torch.distributed.checkpoint.load, mfsdp.load_safetensors, mfsdp convert"
        )
    everything = Reader(folder).read_metadata().state_dict_metadata
    there = {name: entry for name, entry in everything.items() if isinstance(entry, TensorStorageMetadata)}
    weights = megatron.layer_by_layer(
        {name: megatron.as_it_is(name, entry) for name, entry in megatron.without_optimizer(there).items()}
    )
    states = {kind: _renamed(found, rename) for kind, found in megatron.optimizer_states(there).items()}
    weights = _renamed(weights, rename)
    wanted = tensors_of(model)
    names = {id(t): [n for n, other in wanted.items() if other is t] for t in wanted.values()}
    steps = _steps(folder, step) if optimizer is not None else 0
    targets = _fitting({**weights, **states.pop(_MAIN, {})}, {id(t): t for t in wanted.values()}, names, "the model")
    if optimizer is not None:
        targets += _of_optimizer(model, optimizer, states, names)
    count_load(shared_over(model), f"{len(targets)} tensors of Megatron-Core", "".join(wanted).encode())
    with half_loaded(model, f"loading {path}"):
        with checkpoint_errors(f"read {folder}"):
            read_parts(folder, [part for stored, tensor in targets for part in _parts(stored, tensor)])
        if optimizer is not None:
            _count_steps(optimizer, steps)
    return [name for name in weights if name not in wanted]


_Target = tuple[megatron.Stored, torch.Tensor]


def _renamed(stored: Mapping[str, megatron.Stored], rename: Rename) -> dict[str, megatron.Stored]:
    out = {original(rename(name) if rename else name): found for name, found in stored.items()}
    if len(out) < len(stored):
        raise ValueError("load_checkpoint: rename gives two tensors one name")
    return out


def _fitting(
    stored: Mapping[str, megatron.Stored], tensors: Mapping[int, torch.Tensor], names: Mapping[int, list[str]], of: str
) -> list[_Target]:
    """Pairs stored tensors with those to fill, given by the id of the parameter or buffer whose ``names`` count."""
    found = {key: next((stored[n] for n in names[key] if n in stored), None) for key in tensors}
    missing = [names[key][0] for key, entry in found.items() if entry is None]
    if missing:
        raise ValueError(
            f"load_checkpoint: {of} has {files.some(missing)}, which the checkpoint lacks; the checkpoint has "
            f"{files.some(stored)}. Give rename= if names differ"
        )
    pairs = [(entry, tensors[key], names[key][0]) for key, entry in found.items() if entry is not None]
    wrong = [f"{n} is {list(e.shape)} there, {list(t.shape)} here" for e, t, n in pairs if e.shape != t.shape]
    if wrong:
        raise ValueError(f"load_checkpoint: shapes of {of} differ: {files.some(wrong)}")
    return [(entry, tensor) for entry, tensor, _ in pairs]


def _steps(folder: Path, step: int | None) -> int:
    if step is not None:
        return step
    found = re.fullmatch(r"iter_(\d+)", folder.name)
    if found is None:
        raise ValueError(f"load_checkpoint: {folder.name} does not tell the iteration: give step=")
    return int(found[1])


def _of_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: Mapping[str, Mapping[str, megatron.Stored]],
    names: Mapping[int, list[str]],
) -> list[_Target]:
    """Pairs stored optimizer state with the optimizer's, which a new one gets by a step without gradients, and loses if
    they do not fit.
    """
    if not states:
        raise ValueError(
            "load_checkpoint: the checkpoint has no optimizer state by parameter: save it with "
            "--dist-ckpt-optim-fully-reshardable, or leave optimizer out"
        )
    params: list[Any] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(id(p) not in names for p in params):
        raise ValueError(
            "load_checkpoint: the optimizer has parameters that are not the model's: load its state yourself"
        )
    fresh = not optimizer.state
    if fresh and any(p.grad is not None for p in params):
        raise ValueError("load_checkpoint: the optimizer has no state, and gradients are there: call zero_grad() first")
    any_kind = {name: entry for stored in states.values() for name, entry in stored.items()}
    _fitting(any_kind, {id(p): p for p in params}, names, "the optimizer")
    get_optimizer_state_dict(model, optimizer)
    kept: dict[str, dict[int, torch.Tensor]] = {}
    for p in params:
        for kind, value in optimizer.state[p].items():
            if kind != "step" and isinstance(value, torch.Tensor) and value.shape == p.shape:
                kept.setdefault(kind, {})[id(p)] = value
    try:
        if not kept:
            raise ValueError(f"load_checkpoint: {type(optimizer).__name__} keeps no state: leave optimizer out")
        return [
            t
            for k, tensors in kept.items()
            for t in _fitting(states.get(k, {}), tensors, names, f"{k} of the optimizer")
        ]
    except ValueError:
        if fresh:
            optimizer.state.clear()
        raise


def _count_steps(optimizer: torch.optim.Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(step)
        elif "step" in state:  # optimizers of others count in numbers
            state["step"] = step


def _parts(stored: megatron.Stored, tensor: torch.Tensor) -> Iterator[Part]:
    """This rank's part of a tensor, box by box."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        yield stored, tensor, ()
        return
    for place, box in boxes(tensor):
        yield stored, box, tuple(at.start for at in place)
