"""Converts checkpoints of torch.distributed.checkpoint to safetensors files and back: one process, no model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..dtensor.parameter_names import original
from . import files, megatron
from .checkpoint import Checkpoints
from .errors import CheckpointError, checkpoint_errors, quiet
from .manifest import MANIFEST, faults_of
from .reading import Planner, Reader


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    key: str | None = None,
    rename: Callable[[str], str] | None = None,
    tied: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    config: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[str]:
    """Converts a checkpoint of `torch.distributed.checkpoint` to safetensors files, or the other way; ``source``
    decides. Optimizer state is not converted: safetensors files cannot hold it.

    Memory holds one file's tensors on the way to safetensors, one tensor on the way back.

    Args:
        source: a folder of `torch.distributed.checkpoint`, of `Checkpoints` (its newest), or with ``.safetensors``
            files; or one such file. Checkpoints with a manifest are checked first. Megatron-Core's ("torch_dist" and
            "fsdp_dtensor") are read too, also the newest of a run's folder; tensors that stack all layers are split by
            layer, the halves of a gated ``linear_fc1`` joined.
        target: a folder that does not exist or is empty; it appears once it is complete.
        key: the model's place in the checkpoint: ``{"model": model.state_dict()}``. ``""``: the checkpoint is the
            model. ``None``: "model", and in "torch_dist" all but the optimizer's.
        rename: maps a tensor's name in the source to that in the target; torch.compile's ``_orig_mod`` is removed
            anyway.
        tied: maps names (the source's) to the tensors that they alias: left out of safetensors files, written twice to
            checkpoints.
        dtype: of floating-point tensors in the target; ``None``: unchanged.
        max_file_bytes: a new safetensors file starts before one would exceed it (a single tensor may).
        config: a ``config.json`` to copy beside safetensors files, so that ``from_pretrained`` reads them.
        progress: called with bytes done and total bytes.

    Returns:
        The names that were written.

    Raises:
        FileNotFoundError: ``source`` or ``config`` does not exist.
        FileExistsError: ``target`` exists and is not an empty folder.
        ValueError: there is nothing under ``key``, ``rename`` gives two tensors one name, a safetensors file or a name
            in ``tied`` is wrong, or the checkpoint is Megatron-Core's in another format.
        CheckpointError: the source is damaged, or the target could not be written; nothing of it remains.
    """
    source, target = Path(source), Path(target)
    if not source.exists():
        raise FileNotFoundError(f"convert: there is no file or folder {source}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"convert: dtype={dtype!r}: give a torch.dtype")
    if config is not None and not Path(config).is_file():
        raise FileNotFoundError(f"convert: there is no file {config}")
    there = target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))
    if there or target.absolute() == Path.cwd():
        raise FileExistsError(f"convert: there is something at {target}; give a folder that is not there yet")
    checkpoint = checkpoint_in(source)
    partial = target.absolute().parent / f".{target.absolute().name}.partial"
    conversion, own = _Conversion(rename, tied or {}, dtype, progress), None
    try:
        with checkpoint_errors(f"convert {source} to {target}"):
            own = files.make_own(partial)
            if checkpoint is not None:
                names = conversion.to_safetensors(checkpoint, partial, key, max_file_bytes)
                if config is not None:
                    shutil.copyfile(config, partial / "config.json")
            else:
                names = conversion.to_checkpoint(source, partial, "model" if key is None else key)
            for file in (*partial.iterdir(), partial):
                files.sync(file)
            if target.exists():
                target.rmdir()
            os.rename(partial, target)
            files.sync(target.absolute().parent)
    finally:
        if own is not None:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(own)
    return names


def checkpoint_in(source: Path) -> Path | None:
    """Returns the folder of torch.distributed.checkpoint in ``source``, ``None`` if there is none."""
    steps = Checkpoints(source).steps()
    folder = Checkpoints(source).path(steps[-1]) if steps else megatron.newest(source) or source
    if not folder.exists():
        raise FileNotFoundError(f"mfsdp: {source / megatron.NEWEST} names {folder.name}, which is not there")
    if (folder / MANIFEST).is_file():
        faults = faults_of(folder)
        if faults:
            raise CheckpointError(f"mfsdp: {folder} is damaged: {'; '.join(faults)}. Nothing was converted.")
    return folder if (folder / ".metadata").is_file() else None


def _stored(source: Path, key: str | None) -> dict[str, megatron.Stored]:
    """Returns the model's tensors in the checkpoint ``source``, by their names without ``key``."""
    everything = Reader(source).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in everything.items() if isinstance(entry, TensorStorageMetadata)}
    stacked = megatron.is_torch_dist(source)
    if stacked and key is None:
        tensors, key = megatron.without_optimizer(tensors), ""
    key = "model" if key is None else key
    prefix = f"{key}." if key else ""
    there = {
        name.removeprefix(prefix): megatron.as_it_is(name, entry)
        for name, entry in tensors.items()
        if name.startswith(prefix)
    }
    if not there:
        keys = sorted({name.split(".")[0] for name in everything})
        raise ValueError(f"convert: no tensors under {key!r} in {source}; there are {files.some(keys)}")
    return megatron.layer_by_layer(there) if stacked else megatron.joined(there)


@dataclass
class _Conversion:
    """What both directions of `convert` share: names, dtypes and progress."""

    rename: Callable[[str], str] | None
    tied: Mapping[str, str]
    dtype: torch.dtype | None
    progress: Callable[[int, int], object] | None
    done: int = 0
    """Bytes that have been read, of ``total``."""
    total: int = 0

    def count(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def cast(self, old: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and old.is_floating_point else old

    def names(self, there: Iterable[str], both: bool) -> dict[str, str]:
        """Returns the source's names by the target's; ``both``: tied names too."""
        there, tied, rename = list(there), self.tied, self.rename
        wrong = [n for n in tied.values() if n not in there]
        if wrong:
            raise ValueError(f"convert: tied: no tensor is called {files.some(wrong)}; there are {files.some(there)}")
        if both_ways := set(tied) & set(tied.values()):
            raise ValueError(f"convert: tied: {files.some(both_ways)}: tied to something, and to it")
        pairs = [(n, n) for n in there if n not in tied] + [(n, whose) for n, whose in tied.items() if both]
        names = {original(rename(n) if rename else n): whose for n, whose in pairs}
        if len(names) < len(pairs):
            raise ValueError("convert: rename gives two tensors one name")
        return names

    def to_safetensors(self, source: Path, folder: Path, key: str | None, limit: int) -> list[str]:
        stored = _stored(source, key)
        there = {name: stored[old] for name, old in self.names(stored, both=False).items()}
        sizes = {name: entry.shape.numel() * self.cast(entry.dtype).itemsize for name, entry in there.items()}
        plan = files.split(sizes, limit)
        self.total = sum(entry.nbytes for entry in there.values())
        for file, inside in plan.items():
            tensors = {name: torch.empty(there[name].shape, dtype=there[name].dtype) for name in inside}
            read_parts(source, [(there[name], tensor, ()) for name, tensor in tensors.items()], self.count)
            for name in inside:
                tensors[name] = tensors[name].to(self.cast(tensors[name].dtype))
            files.write(folder, file, tensors)
        files.write_index(folder, sizes, plan)
        return list(there)

    def to_checkpoint(self, source: Path, folder: Path, key: str) -> list[str]:
        stored = files.entries(source)
        there = {name: stored[old] for name, old in self.names(stored, both=True).items()}
        blank = {n: torch.empty(e.shape, dtype=self.cast(e.dtype), device="meta") for n, e in there.items()}
        self.total = sum(entry.nbytes for entry in there.values())
        planner = _Saving({f"{key}.{name}" if key else name: entry for name, entry in there.items()}, self.count)
        # One file per tensor: the writer frees a file's tensors when it closes the file.
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
        with quiet():
            dcp.save({key: blank} if key else blank, storage_writer=writer, planner=planner, no_dist=True)
        return list(there)


Part = tuple[megatron.Stored, torch.Tensor, Sequence[int]]
"""A stored tensor, the part of it to fill, and where the part starts (``()``: at the beginning)."""


def read_parts(folder: Path, parts: Sequence[Part], count: Callable[[int], object] = lambda nbytes: None) -> None:
    """Reads parts of a checkpoint's tensors; ``count`` is called with the bytes of each box."""
    with quiet(), torch.no_grad():
        dcp.load({}, storage_reader=Reader(folder), planner=_Loading(parts, count), no_dist=True)


class _Loading(Planner):
    """Reads parts of stored tensors, regardless of the state to load."""

    def __init__(self, wanted: Sequence[Part], count: Callable[[int], object]):
        super().__init__()
        self.wanted, self.count = wanted, count
        self.targets: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for stored, tensor, offsets in self.wanted:
            for name, box, view in stored.views(tensor, offsets):
                entry: Any = self.metadata.state_dict_metadata[name]
                items += create_read_items_for_chunk_list(name, entry, [box])
                self.targets[MetadataIndex(name, box.offsets)] = view
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.targets[index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.count(tensor.nbytes)


class _Saving(DefaultSavePlanner):
    """Plans with meta tensors, and reads each tensor when it is written."""

    def __init__(self, entries: Mapping[str, files.Entry], count: Callable[[int], None]):
        super().__init__()
        self.entries, self.count = entries, count
        self.file: Path | None = None
        self.opened: files.Opened | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self.entries[index.fqn]
        if entry.file != self.file or self.opened is None:
            self.file, self.opened = entry.file, None  # never map two files at once
            self.opened = files.opened(entry.file)
        tensor = self.opened.get_tensor(entry.name)
        self.count(entry.nbytes)
        return tensor.to(self.state_dict[index.fqn].dtype)
