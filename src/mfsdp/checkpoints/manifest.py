"""The manifest of a checkpoint's folder: sizes and checksums of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from . import files

MANIFEST = "manifest.json"


def write(folder: Path, step: int, ranks: int, entries: dict[str, dict[str, Any]]) -> None:
    """Writes the manifest and flushes it and the folder to the disk. The other files are there already.

    Args:
        entries: by file name, ``{"bytes": size, "sha256": checksum}``.
    """
    (folder / MANIFEST).write_text(json.dumps({"step": step, "ranks": ranks, "files": entries}, indent=1))
    for path in (folder / MANIFEST, folder):
        files.sync(path)


def _summed(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def faults_of(path: Path, rank: int = 0, world: int = 1) -> list[str]:
    """Returns the faults of a checkpoint's files by its manifest: of every ``world``-th file, from ``rank`` on."""
    entries = {files.inside(name): entry for name, entry in json.loads((path / MANIFEST).read_text())["files"].items()}
    found = (_fault(path / name, entries[name]) for name in sorted(entries)[rank::world])
    return [fault for fault in found if fault]


def _fault(path: Path, entry: dict[str, Any]) -> str:
    """Returns the fault of a file, ``""`` for none."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    return "" if _summed(path) == entry else f"{path.name} has changed since it was written"
