"""Weights from and to safetensors files, as Hugging Face keeps them, without the whole model in anybody's memory."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import runtime
from .dtensor import ShardedDTensor

INDEX = "model.safetensors.index.json"


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, rename: Callable[[str], str] | None = None, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Reads weights into a model: every rank the rows that it holds, straight from the files. No communication.

    Args:
        model: sharded or not, or sharded in parts; values are cast to the dtypes that it has.
        path: one ``.safetensors`` file, or a folder with one or with several and their index.
        rename: gives the model's name of a tensor for its name in the files.
        strict: whether a tensor that one side lacks is an error. Of tied parameters one name is enough.

    Returns:
        Names that the files lack, and names (the model's) that the model lacks.

    Raises:
        FileNotFoundError: there is no such file or folder, or a file of the index is missing.
        ValueError: a file is damaged, a shape differs, or, if ``strict``, names do. The model is left as it was.
    """
    model = getattr(model, "_orig_mod", model)
    there = {}
    for file in _files(Path(path)):
        for name, shape in _header(file).items():
            there[rename(name) if rename else name] = (file, name, shape)
    wanted = _tensors(model)
    names = {id(t): [n for n, other in wanted.items() if other is t] for t in wanted.values()}
    missing = [n for n, t in wanted.items() if not any(alias in there for alias in names[id(t)])]
    unexpected = [n for n in there if n not in wanted]
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_safetensors: {path} and {type(model).__name__} do not fit: "
            f"missing in the files: {_some(missing)}; not in the model: {_some(unexpected)}. "
            "Give rename= if names differ, strict=False to read what fits."
        )
    wrong = [
        f"{n} is {list(there[n][2])} in {there[n][0].name}, {list(t.shape)} in the model"
        for n, t in wanted.items()
        if n in there and tuple(there[n][2]) != tuple(t.shape)
    ]
    if wrong:
        raise ValueError(f"load_safetensors: shapes differ: {_some(wrong)}")
    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in wanted.items():
        if name in there:
            by_file.setdefault(there[name][0], []).append((there[name][1], tensor))
    for file, tensors in by_file.items():
        with _opened(file) as opened, torch.no_grad():
            for name, tensor in tensors:
                _read(opened, name, tensor)
    return missing, unexpected


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes weights as ``transformers`` does: ``model.safetensors``, or several files and an index, and the model's
    configuration if it has one; ``from_pretrained`` reads it. All ranks must call it; rank 0 writes, and holds one
    file's tensors. What the folder has of these files is replaced when all is written; others stay.

    Args:
        model: sharded or not, or sharded in parts.
        folder: made if it is not there.
        dtype: of floating-point weights in the files; ``None``: that of the main weights.
        max_file_bytes: a new file is begun before one would get larger (a single tensor may be).

    Raises:
        ValueError: ``max_file_bytes`` is not positive.
        OSError: rank 0 could not write (on every rank); what was in the folder is still there.
    """
    from safetensors.torch import save_file

    if max_file_bytes <= 0:
        raise ValueError(f"save_safetensors: max_file_bytes={max_file_bytes} must be positive")
    model = getattr(model, "_orig_mod", model)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(model).items():
        if not any(tensor is other for other in tensors.values()):
            tensors[name] = tensor
    files = _split({n: t.numel() * _kept_dtype(t, dtype).itemsize for n, t in tensors.items()}, max_file_bytes)
    folder, writes, failure = Path(folder), runtime.rank() == 0, ""
    aside: Path | None = None
    try:
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    except OSError as error:
        failure = str(error)
    for file, names in files.items():
        whole: dict[str, torch.Tensor] = {}
        for name in names:
            full = tensors[name].detach()
            if isinstance(full, ShardedDTensor):
                full = full.full_tensor()
            if writes and not failure:
                whole[name] = full.to("cpu", _kept_dtype(full, dtype)).contiguous()
        try:
            if writes and not failure:
                assert aside is not None
                save_file(whole, aside / file, metadata={"format": "pt"})
        except Exception as error:  # whatever it is, the other ranks are still gathering
            failure = str(error)
    try:
        if writes and not failure:
            assert aside is not None
            if len(files) > 1:
                (aside / INDEX).write_text(json.dumps(_index(tensors, files, dtype), indent=2) + "\n")
            _save_config(model, aside, dtype)
            _publish(aside, folder)
    except Exception as error:
        failure = str(error)
    if aside is not None:
        for left in aside.glob("*"):
            left.unlink()
        aside.rmdir()
    _raise_everywhere(failure, folder)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under all of their names."""
    return {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"load_safetensors: there is no file or folder {path}")
    index = path / INDEX
    if index.is_file():
        try:
            files = [path / name for name in dict.fromkeys(json.loads(index.read_text())["weight_map"].values())]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"load_safetensors: {index} is damaged: {error}") from error
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"load_safetensors: {path} holds no .safetensors file")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"load_safetensors: {file} is missing; {INDEX} names it")
    return files


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"load_safetensors: {file} is damaged: {error}") from error


def _header(file: Path) -> Mapping[str, list[int]]:
    """Shapes by name."""
    with _opened(file) as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118


def _read(opened: Any, name: str, tensor: torch.Tensor) -> None:
    """Copies one tensor, or this rank's rows of it."""
    if not isinstance(tensor, ShardedDTensor):
        tensor.copy_(opened.get_tensor(name))
        return
    part = opened.get_slice(name)
    for place, box in _boxes(tensor):
        box.copy_(part[place] if place else opened.get_tensor(name))


def _boxes(tensor: ShardedDTensor) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """This rank's part of a tensor, box by box: where it lies, and a view of it. Whoever asks is about to write."""
    for chunk in tensor.__create_chunk_list__():
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        yield place, tensor.chunk_at(tuple(chunk.offsets))


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


def _kept_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Names of files, and of the tensors in each, in order."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _index(
    tensors: Mapping[str, torch.Tensor], files: Mapping[str, list[str]], dtype: torch.dtype | None
) -> dict[str, Any]:
    total = sum(t.numel() * _kept_dtype(t, dtype).itemsize for t in tensors.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _save_config(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Those of a model of transformers."""
    for what in ("config", "generation_config"):
        config: Any = copy.deepcopy(getattr(model, what, None))
        if callable(getattr(config, "save_pretrained", None)):
            if what == "config":
                config.architectures = [type(model).__name__]
                config.dtype = dtype or next(model.parameters()).dtype
            config.save_pretrained(folder)


def _publish(aside: Path, folder: Path) -> None:
    """Moves what was written to its place. An index left from before would name files that are no longer meant."""
    for file in aside.iterdir():
        with open(file, "rb+") as written:
            os.fsync(written.fileno())
    names = {file.name for file in aside.iterdir()}
    for file in sorted(aside.iterdir()):
        os.replace(file, folder / file.name)
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):
        if old.name not in names:
            old.unlink(missing_ok=True)


def _raise_everywhere(failure: str, folder: Path) -> None:
    failed = torch.tensor(int(bool(failure)))
    if runtime.initialized() and runtime.world() > 1:
        group = runtime.process_group(runtime.default_group())
        device = runtime.collective_device(group)
        failed = runtime.reduced(failed.to(device), "max", group)
    if failed.item():
        raise OSError(f"save_safetensors: rank 0 could not write to {folder}: {failure or 'see the error of rank 0'}")
