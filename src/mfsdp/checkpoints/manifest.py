"""The manifest of a checkpoint's folder: sizes and checksums of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypedDict

from . import files

MANIFEST = "manifest.json"


class Entry(TypedDict):
    """A file's size and checksum."""

    bytes: int
    sha256: str


Entries = dict[str, Entry]
"""By file name."""


def write(folder: Path, step: int, ranks: int, entries: Entries) -> None:
    """Writes the manifest and flushes it and the folder to the disk. The other files are there already."""
    (folder / MANIFEST).write_text(json.dumps({"step": step, "ranks": ranks, "files": entries}, indent=1))
    for path in (folder / MANIFEST, folder):
        files.sync(path)


def _summed(path: Path) -> Entry:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def faults_of(path: Path, rank: int = 0, world: int = 1) -> list[str]:
    """Returns the faults of a checkpoint's files by its manifest: of every ``world``-th file, from ``rank`` on."""
    entries = {files.inside(name): entry for name, entry in json.loads((path / MANIFEST).read_text())["files"].items()}
    found = (_fault(path / name, entries[name]) for name in sorted(entries)[rank::world])
    return [fault for fault in found if fault]


def _fault(path: Path, entry: Entry) -> str:
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    return "" if _summed(path) == entry else f"{path.name} has changed since it was written"
