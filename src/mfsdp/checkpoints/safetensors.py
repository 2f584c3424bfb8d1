"""Loads and saves weights as Hugging Face safetensors files. No rank holds the full model."""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..buffers.flat_buffer import half_loaded, shared_over
from ..dtensor import parameter_names, torchao
from ..runtime import devices, groups, sync_collectives
from ..runtime.transport_registry import count_load
from . import files
from .streams import stream_weights
from .tensors import keep, refuse_unsharded_quantized, tensors_of

P = ParamSpec("P")
T = TypeVar("T")


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, rename: Callable[[str], str] | None = None, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Reads weights into a model; every rank reads only its own rows. It does not communicate; all ranks must call it,
    and the next program raises if some have not.

    Args:
        model: sharded (also by FSDP2), unsharded, or sharded in parts; values are cast to its dtypes.
        path: one ``.safetensors`` file, or a folder with one or with several and their index.
        rename: maps the name of a tensor in the files to the model's name.
        strict: whether a tensor that only one side has is an error. One name of tied parameters is enough.

    Returns:
        The names that the files lack, and the names (the model's) that the model lacks.

    Raises:
        FileNotFoundError: there is no such file or folder, or a file of the index is missing.
        ValueError: a file is damaged, two tensors have one name, a shape or a quantized weight's dtype differs, or, if
            ``strict``, names differ. The model is unchanged.
        NotImplementedError: a quantized weight is not sharded.
    """
    model = getattr(model, "_orig_mod", model)
    refuse_unsharded_quantized(model, "load_safetensors")
    there = files.entries(Path(path), lambda name: parameter_names.original(rename(name) if rename else name))
    wanted = tensors_of(model)
    aliases = {id(t): [n for n, other in wanted.items() if other is t] for t in wanted.values()}
    missing = [n for n, t in wanted.items() if not any(alias in there for alias in aliases[id(t)])]
    unexpected = [n for n in there if n not in wanted]
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_safetensors: {path} and {type(model).__name__} do not fit: "
            f"missing in the files: {files.some(missing)}; not in the model: {files.some(unexpected)}. "
            "Give rename= if names differ, strict=False to read what fits."
        )
    found = {n: (there[n], t) for n, t in wanted.items() if n in there}
    wrong = [
        f"{n} is {list(entry.shape)} in {entry.file.name}, {list(t.shape)} in the model"
        for n, (entry, t) in found.items()
        if entry.shape != tuple(t.shape) and not hasattr(t, "_mfsdp_resizes")
    ]
    if wrong:
        raise ValueError(f"load_safetensors: shapes differ: {files.some(wrong)}")
    cast = [n for n, (entry, t) in found.items() if hasattr(t, "_mfsdp_exact") and entry.dtype is not t.dtype]
    if cast:
        raise ValueError(f"load_safetensors: quantized weights have other dtypes in the files: {files.some(cast)}")
    count_load(shared_over(model), f"{len(found)} tensors of safetensors files", "".join(found).encode())
    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
    for entry, tensor in found.values():
        by_file.setdefault(entry.file, []).append((entry.name, tensor))
    with half_loaded(model, f"loading {path}"):
        for file, tensors in by_file.items():
            with files.opened(file) as opened, torch.no_grad():
                for name, tensor in tensors:
                    read = opened.get_slice if isinstance(tensor, DTensor) else opened.get_tensor
                    keep(tensor, read(name))
    return missing, unexpected


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes weights as ``transformers`` does: ``model.safetensors``, or several files and an index, and the model's
    configuration if it has one; ``from_pretrained`` reads them. All ranks must call it. Rank 0 writes, and holds one
    file's tensors and one unit at a time. Older files of these names are replaced atomically, once all new ones are
    written; other files stay.

    Args:
        model: sharded (also by FSDP2), unsharded, or sharded in parts. The first name of tied parameters is written.
        folder: created if it does not exist.
        rename: maps the model's name of a tensor to its name in the files.
        dtype: of floating-point weights in the files; ``None``: that of the main weights.
        max_file_bytes: a new file starts before one would exceed it (a single tensor may).

    Raises:
        ValueError: ``max_file_bytes`` is not positive, or ``rename`` gives two tensors one name.
        OSError: rank 0 could not write (on every rank); the folder's earlier files are still there.
    """
    model = getattr(model, "_orig_mod", model)
    named = None if rename is None else lambda unit: [(rename(name), tensor) for name, tensor in unit.items()]
    stream = stream_weights(model, dtype, to=0, prefetch=0, convert=named)
    sizes = {name: math.prod(shape) * kept.itemsize for name, kept, shape in stream.metadata()}
    about = _of_quantized(model, {name: shape for name, _, shape in stream.metadata()}, rename)
    plan = files.split(sizes, max_file_bytes)
    folder, first = Path(folder), _FirstRank()
    partial = folder / ".partial"
    own = first.tries(files.make_own, partial)
    plan = first.tries(files.not_in, folder, plan) or plan
    last = {inside[-1]: file for file, inside in plan.items() if inside}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in stream:  # on the first rank; in the order of the plan
        first.tries(_keep, whole, name, tensor)
        if name in last:
            first.tries(files.write, partial, last[name], whole, about)
            whole.clear()
    if not sizes:
        first.tries(files.write, partial, next(iter(plan)), whole, about)
    first.tries(files.write_index, partial, sizes, plan)
    first.tries(_save_config, model, partial, dtype)
    first.tries(files.publish, partial, folder)
    if own is not None:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(own)
    first.raise_everywhere(folder)


def _of_quantized(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], rename: Callable[[str], str] | None
) -> dict[str, str]:
    """Returns what a file says of torchao's weights in it."""
    forms = {}
    for path, module in model.named_modules():
        if (form := getattr(module, "_mfsdp_form", None)) is not None:
            key = f"{parameter_names.original(path)}.{form.tensors[0][1].key}".removeprefix(".")
            forms[(rename(key) if rename else key).rpartition(".")[0]] = form
    return torchao.file_metadata(shapes, forms)


def _keep(whole: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Copies a tensor to the host: a view would keep all of its unit."""
    whole[name] = tensor.to("cpu", copy=True).contiguous()


class _FirstRank:
    """What the first rank alone does while all gather: an error of it is kept until the others have gathered too."""

    def __init__(self) -> None:
        self.writes, self.failure = groups.rank() == 0, ""

    def tries(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Calls a function on the first rank, unless one has failed."""
        try:
            return function(*args, **kwargs) if self.writes else None
        except Exception as error:
            self.writes, self.failure = False, str(error) or type(error).__name__
            return None

    def raise_everywhere(self, folder: Path) -> None:
        failed = torch.tensor(int(bool(self.failure)))
        if groups.initialized() and groups.world() > 1:
            group = groups.default_group()
            failed = sync_collectives.reduced(failed.to(devices.collective_device(group)), "max", group)
        if failed.item():
            why = self.failure or "see the error of rank 0"
            raise OSError(f"save_safetensors: rank 0 could not write to {folder}: {why}")


def _save_config(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes the configuration of a transformers model."""
    for what in ("config", "generation_config"):
        config: Any = copy.deepcopy(getattr(model, what, None))
        if callable(getattr(config, "save_pretrained", None)):
            if what == "config":
                config.architectures = [type(model).__name__]
                config.dtype = dtype or next(model.parameters()).dtype
            config.save_pretrained(folder)
