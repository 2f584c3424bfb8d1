"""One save of a checkpoint: training begins it; training, or a thread beside it, ends it.

begin   all ranks   the state is read, or copied, and a folder is created that is not a checkpoint yet
end     all ranks   files are written, checksummed, and flushed to the disk
        rank 0      .metadata and the manifest; then the folder is renamed
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.storage import WriteResult

from ..buffers.flat_buffer import Ref, refs
from ..runtime import groups
from . import files, manifest
from .errors import CheckpointError, first_completes, in_words, quiet, together
from .writing import Writer


class Save:
    """One save of one step.

    Args:
        target: the checkpoint's folder.
        copies: whether the state may change between `begin` and `end`.
    """

    def __init__(self, step: int, target: Path, copies: bool):
        self.step, self.target = step, target
        self.partial = target.parent / f".{target.name}.partial"
        self.rank = groups.rank()
        self.writer = Writer(self.partial, copies)
        self._own_state = io.BytesIO()
        self._lock: int | None = None

    def begin(self, state_of: Callable[[], tuple[dict[str, Any], Any]], refusal: str = "") -> None:
        """Runs the first half, on all ranks together.

        Args:
            state_of: returns the state that all ranks write together, and this rank's own.
            refusal: why this rank does not begin; ``""`` if it does.

        Raises:
            CheckpointError: a rank refuses, or could not do its part.
        """
        state: dict[str, Any] = {}

        def take() -> str:
            shared, own = state_of()
            state.update(shared)
            torch.save(own, self._own_state)
            if self.rank == 0:
                self._make_folder()
            return refusal

        try:
            refused = next((reason for reason in together(f"save step {self.step}", take) if reason), "")
            if refused:
                raise CheckpointError(refused)
            self._plan(state)
        except BaseException as error:
            self._remove()
            if isinstance(error, CheckpointError):
                groups.all_objects(None)  # a barrier: the folder is removed before any rank goes on
            raise

    def _make_folder(self) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        for left in self.partial.parent.glob(".step-*.partial"):
            files.clear(left)
        self._lock = files.make_own(self.partial)

    def _plan(self, state: dict[str, Any]) -> None:
        try:
            with quiet():
                dcp.save(state, storage_writer=self.writer)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"mfsdp: could not save step {self.step}: {in_words(error)}") from error

    def end(self, channel: groups.Everybody, expire: Callable[[], list[Path]]) -> list[Path]:
        """Runs the second half.

        Args:
            channel: communicates between ranks.
            expire: renames older checkpoints on rank 0, and returns their new paths.

        Returns:
            The result of ``expire``, on rank 0.

        Raises:
            CheckpointError: a rank could not write.
        """
        expired: list[Path] = []

        def write() -> tuple[list[WriteResult], manifest.Entries]:
            return self.writer.write({f"rank{self.rank}.pt": self._own_state.getvalue()})

        def publish(parts: list[tuple[list[WriteResult], manifest.Entries]]) -> None:
            sums = [*(part for _, part in parts), self.writer.write_metadata([results for results, _ in parts])]
            entries = {name: entry for part in sums for name, entry in part.items()}
            manifest.write(self.partial, self.step, len(parts), entries)
            os.rename(self.partial, self.target)
            files.sync(self.target.parent)
            expired.extend(expire())

        try:
            first_completes(f"save step {self.step}", channel, write, publish, self._remove)
        finally:
            self._unlock()
        return expired

    def _remove(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def copied(model: nn.Module, states: int) -> int:
    """Returns the bytes of host memory in which `Save` copies one rank's data: its rows of weights, once per name, and
    of optimizer state.

    Args:
        model: sharded.
        states: tensors of optimizer state per parameter.
    """
    named = [ref for m in model.modules() for ref in refs(m).values()]
    weights = sum(_rows(ref) for ref in named)
    state = sum(_rows(ref) for ref in {(ref.buffer, ref.slot): ref for ref in named if ref.buffer.trainable}.values())
    return weights + states * state


def _rows(ref: Ref) -> int:
    return ref.buffer.weights.locals[ref.slot].numel * ref.buffer.precision.main.itemsize


class Saving(Future[Path]):
    """The future of a background save; records whether its error has been raised."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path:
        try:
            return super().result(timeout)
        except CheckpointError:
            self.reported = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported |= error is not None
        return error

    def unreported(self) -> str:
        """Returns why the save failed, if it did and nothing has raised it yet."""
        error = None if self.reported or not self.done() else super().exception()
        return str(error or "")
