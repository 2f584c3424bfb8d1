"""Writes torch.distributed.checkpoint's folders in two halves: only the first reads the state.

``dcp.save`` runs the first half, which determines what each rank writes. Its writer defers the second half, which any
thread may run: it writes the files and computes their checksums. zip's CRC-32 of every tensor is disabled: it adds
nothing to a SHA-256 of the file, and takes longer than writing.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.utils.serialization
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .manifest import Entries


class _Summed:
    """A file that is written sequentially, with its checksum."""

    def __init__(self, raw: Any):
        self.raw, self.bytes, self.sum = raw, 0, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        count = int(self.raw.write(data))
        self.sum.update(data)
        self.bytes += count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class _Files(FileSystem):
    """The file system; computes a checksum of each written file."""

    def __init__(self) -> None:
        self.sums: Entries = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as raw:
            stream = _Summed(raw)
            yield stream
        self.sums[Path(path).name] = {"bytes": stream.bytes, "sha256": stream.sum.hexdigest()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Copies(DefaultSavePlanner):
    """Holds copies, in host memory, of the data that a plan writes."""

    @torch.no_grad()
    def __init__(self, plan: SavePlan, planner: SavePlanner):
        super().__init__()
        found = {item.index: planner.resolve_data(item) for item in plan.items}
        self.copies = {i: d if isinstance(d, io.BytesIO) else d.detach().to("cpu", copy=True) for i, d in found.items()}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.copies[write_item.index]


class Writer(dcp.FileSystemWriter):
    """The writer for ``dcp.save``, which then has written no data.

    Args:
        folder: the folder to write to.
        copies: whether the state may change between the halves.
    """

    def __init__(self, folder: Path, copies: bool):
        super().__init__(folder)
        self.copies, files = copies, _Files()
        self.fs, self.sums = files, files.sums
        self._metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self._plan, self._planner = plan, _Copies(plan, planner) if self.copies else planner
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._metadata = metadata

    # The second half

    def write(self, more: dict[str, bytes]) -> tuple[list[WriteResult], Entries]:
        """Writes this rank's part, and additional files, to the disk.

        Returns:
            The entries for ``.metadata``, and every file's size and checksum.

        Raises:
            OSError: a full disk, say.
        """
        config: Any = torch.utils.serialization.config
        with config.patch({"save.compute_crc32": False}):  # for this thread only
            results = super().write_data(self._plan, self._planner).wait()
        for name, content in more.items():
            with self.fs.create_stream(Path(self.path, name), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        return results, self.sums

    def write_metadata(self, results: list[list[WriteResult]]) -> Entries:
        """Writes ``.metadata``, on the rank that coordinated `dcp.save`, and returns files' sizes and checksums."""
        assert self._metadata is not None
        super().finish(self._metadata, results)
        return self.sums
