"""Safetensors files: finds them, reads their headers, splits tensors into files, and replaces older files."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from safetensors import safe_open as Opened

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OF_SEVERAL = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Entry:
    """One tensor in a file, by its name there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def entries(path: Path, rename: Callable[[str], str] | None = None) -> dict[str, Entry]:
    """Returns the tensors of a file, or of a folder with one file or several and an index, by name. Reads only headers.

    Raises:
        FileNotFoundError: there is no such file or folder, or a file of the index is missing.
        ValueError: a file is damaged, or two tensors have one name.
    """
    out: dict[str, Entry] = {}
    for file in _find(path):
        for entry in _header(file):
            name = rename(entry.name) if rename else entry.name
            if name in out:
                raise ValueError(f"mfsdp: two tensors in {path} are called {name!r}: {out[name].name} and {entry.name}")
            out[name] = entry
    return out


def opened(file: Path) -> Opened:
    """Opens a safetensors file, memory-mapped.

    Raises:
        ValueError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"mfsdp: {file} is damaged: {error}") from error


def split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Returns the names of files to write, and of the tensors in each, in order; sizes in bytes.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if limit <= 0:
        raise ValueError(f"mfsdp: max_file_bytes={limit} must be positive")
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def write(folder: Path, file: str, tensors: dict[str, torch.Tensor], more: Mapping[str, str] | None = None) -> None:
    """Writes one file as ``transformers`` expects it, with ``more`` metadata.

    Raises:
        OSError: it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, folder / file, metadata={"format": "pt", **(more or {})})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_index(folder: Path, sizes: Mapping[str, int], files: Mapping[str, list[str]]) -> None:
    """Writes the index if there are several files."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def not_in(folder: Path, plan: dict[str, list[str]]) -> dict[str, list[str]]:
    """Returns the plan with file names that the folder does not have, if it has several files: existing files are valid
    until the index is replaced.
    """
    for tries in itertools.count(1):
        stem = "model-" if tries == 1 else f"model-{tries}-"
        names = {file.replace("model-", stem, 1): inside for file, inside in plan.items()}
        if len(plan) == 1 or not any((folder / name).exists() for name in names):
            return names
    raise AssertionError


def publish(partial: Path, folder: Path) -> None:
    """Moves the written files into the folder. A reader finds all old weights or all new ones, whenever this is
    interrupted: the single file, or the index of several, is replaced last.
    """
    last = INDEX if (partial / INDEX).exists() else SINGLE
    written = sorted((file.name for file in partial.iterdir()), key=lambda name: (name == last, name))
    for name in written:
        sync(partial / name)
    for name in written:
        os.replace(partial / name, folder / name)
    sync(folder)
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):
        if old.name not in written:
            old.unlink(missing_ok=True)


def make_own(folder: Path) -> int:
    """Creates a folder that no other process clears until the returned handle is closed. Removes what a process that
    has ended left there.

    Raises:
        BlockingIOError: another process is writing to it.
    """
    clear(folder)
    folder.mkdir(parents=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
    except OSError:
        os.close(handle)
        raise
    return handle


def clear(folder: Path) -> None:
    """Removes a folder that a process has left, if it exists.

    Raises:
        BlockingIOError: a process is writing to it.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        _lock(handle, folder)
        shutil.rmtree(folder)
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    """Locks a folder for this process. Does nothing where the system has no such locks (Windows, NFS for folders)."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno, f"another process is writing to {folder} now; give each a folder of its own"
        ) from None
    except OSError:
        return


def inside(name: str) -> str:
    """Returns the name of a file if it is in the checkpoint's folder.

    Raises:
        ValueError: it is not.
    """
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute() or ".." in path.parts or path.drive:
            raise ValueError(f"mfsdp: {name!r} is not a file in the checkpoint's folder. Nothing was read")
    return name


def sync(path: Path) -> None:
    """Flushes a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def some(names: Iterable[str]) -> str:
    """Returns a list of names for an error, eight at most."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


def _find(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"mfsdp: there is no file or folder {path}")
    index = path / INDEX
    if index.is_file():
        try:
            files = [
                path / inside(name) for name in dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"mfsdp: {index} is damaged: {error}") from error
    else:
        files = sorted(path.glob("*.safetensors"))
        if path / SINGLE in files:  # the others belong to a `publish` in progress
            files = [file for file in files if not _OF_SEVERAL.fullmatch(file.name)]
    if not files:
        raise FileNotFoundError(f"mfsdp: {path} holds no .safetensors file")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"mfsdp: {file} is missing; {INDEX} names it")
    return files


def _header(file: Path) -> list[Entry]:
    with opened(file) as held:
        parts = {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118
        return [Entry(file, name, tuple(p.get_shape()), _dtype(p.get_dtype(), file)) for name, p in parts.items()]


def _dtype(name: str, file: Path) -> torch.dtype:
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"mfsdp: {file} holds tensors of type {name}, which torch does not know") from None


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
"""Safetensors' names of dtypes (huggingface.co/docs/safetensors)."""
