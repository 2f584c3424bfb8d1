"""Checkpoints that are complete or not there: torch.distributed.checkpoint, written aside, summed up, then published.

folder/
  step-00000400/              published by a rename, when everything in it has reached the disk
    .metadata  __0_0.distcp   torch.distributed.checkpoint's own: any world, strategy or framework loads it
    rank0.pt                  what belongs to a rank: its random numbers, its place in the data
    manifest.json             every file's size and checksum
  .step-00000500.partial/     being written or deleted, or left by somebody who was killed; cleared by the next save
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..runtime import groups
from ..state.buffer import half_loaded
from . import files
from .reading import Planner, Reader

T = TypeVar("T")


class Stateful(Protocol):
    """Whatever a checkpoint takes besides the model: schedulers, loaders. State is tensors, numbers, strings and
    containers of them.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged. Raised on every rank; what was there before still is."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: made by the first save; on a file system that all ranks see.
        keep: how many of the newest stay; ``None`` for all.

    Raises:
        ValueError: ``keep`` is not positive.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = None):
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpoints: keep={keep} must be at least 1, or None")
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """Steps of which there is a complete checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted(int(m[1]) for m in matches if m and (self.folder / m[0] / MANIFEST).is_file())

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is; `torch.distributed.checkpoint.load` takes it."""
        return self.folder / f"step-{step:08d}"

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Stateful
    ) -> Path:
        """Writes a checkpoint; all ranks call it. What is kept per rank: ``more``, and the states of the random number
        generators of torch and Python.

        Raises:
            CheckpointError: some rank could not write: a full disk, say, or another run that saves to this folder now.
                Nothing is left of it; training may go on.
            ValueError: there is one of that step.
        """
        if self.path(step).exists():
            raise ValueError(f"Checkpoints: there is a checkpoint of step {step} in {self.folder}")
        aside, rank = self.folder / f".step-{step:08d}.partial", groups.rank()
        own: list[int] = []

        def prepare() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".step-*.partial"):
                files.clear(left)
            own.append(files.make_own(aside))

        def write() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(_state_to_save(model, optimizer), storage_writer=dcp.FileSystemWriter(aside))
            beside = {name: thing.state_dict() for name, thing in more.items()}
            with open(aside / f"rank{rank}.pt", "wb") as file:
                torch.save({"more": beside, "random": _random_state()}, file)
                os.fsync(file.fileno())

        def publish() -> None:
            (aside / MANIFEST).write_text(
                json.dumps({"step": step, "ranks": groups.world(), "files": written}, indent=1)
            )
            for path in (aside / MANIFEST, aside):
                files.sync(path)
            os.rename(aside, self.path(step))
            files.sync(self.folder)
            for old in self.steps()[: -self.keep] if self.keep else ():
                shutil.rmtree(self.path(old).rename(self.folder / f".step-{old:08d}.partial"))

        try:
            _together(f"save step {step}", prepare if rank == 0 else _nothing)
            _together(f"save step {step}", write)
            sums = _together(f"save step {step}", lambda: {p.name: _summed(p) for p in _written_by(rank, aside)})
            written = {name: entry for part in sums for name, entry in part.items()}
            _together(f"save step {step}", publish if rank == 0 else _nothing)
        except CheckpointError:
            if own:
                shutil.rmtree(aside, ignore_errors=True)
            groups.all_objects(None)  # it is gone, on every rank
            raise
        finally:
            for handle in own:
                os.close(handle)
        return self.path(step)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        **more: Stateful,
    ) -> int | None:
        """Reads a checkpoint, after all of its files have been checked; all ranks call it. Written on another number of
        ranks, a rank gets the ``more`` of its number, or of rank 0 if there was none, and keeps its random numbers.

        Args:
            model, optimizer, more: as in :meth:`save`.
            step: ``None`` for the newest that is complete.

        Returns:
            The step, or ``None`` if there is no checkpoint.

        Raises:
            CheckpointError: files are missing, truncated or changed, or ask for more than data; names them. Nothing has
                been loaded. Or they could not be read all the same: a part has been loaded, and the model refuses to
                compute until it is loaded whole.
            ValueError: there is no complete checkpoint of that step.
        """
        there = self.steps()
        if step is None and not there:
            return None
        if step is not None and step not in there:
            raise ValueError(f"Checkpoints: no complete checkpoint of step {step} in {self.folder}; there are {there}")
        step = there[-1] if step is None else step
        path, rank, world = self.path(step), groups.rank(), groups.world()
        manifest = json.loads((path / MANIFEST).read_text())

        def check() -> list[str]:
            found = faults_of(path, rank, world)
            if rank == 0 and not found:
                Reader(path).read_metadata()
            return found

        found = _together(f"load step {step}", check)
        faults = [fault for part in found for fault in part]
        if faults:
            raise CheckpointError(
                f"mfsdp: the checkpoint of step {step} in {self.folder} is damaged: {'; '.join(faults)}. "
                f"Nothing was loaded; the complete ones are of steps {there}, load(..., step=...) takes another."
            )
        state = _state(model, optimizer)

        def read() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(state, storage_reader=Reader(path), planner=Planner())

        with half_loaded(model, f"loading step {step} of {self.folder}"):
            _together(f"load step {step}, and has loaded a part of it", read)
            set_state_dict(
                model,
                optimizer if optimizer is not None else [],
                model_state_dict=state["model"],
                optim_state_dict=state.get("optimizer", {}),
            )
        own = torch.load(path / f"rank{rank if rank < manifest['ranks'] else 0}.pt", weights_only=True)
        for name, thing in more.items():
            if name not in own["more"]:
                raise ValueError(f"Checkpoints: step {step} was saved without {name!r}; it has {sorted(own['more'])}")
            thing.load_state_dict(own["more"][name])
        if manifest["ranks"] == world:
            _set_random_state(own["random"])
        return step


MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


def _state_to_save(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """As `_state`. An optimizer that has not stepped has no state afterwards either (law 23): torch makes it by a step
    without gradients, which counts.
    """
    fresh = optimizer is not None and not optimizer.state
    counts = [g.get("step") for g in optimizer.param_groups] if fresh and optimizer is not None else []
    out = _state(model, optimizer)
    if fresh:
        assert optimizer is not None
        optimizer.state.clear()
        for state in out["optimizer"]["state"].values():
            if "step" in state:
                state["step"] = state["step"] * 0
        for group, saved, count in zip(optimizer.param_groups, out["optimizer"]["param_groups"], counts, strict=True):
            if "step" in group:  # TransformerEngine's count by groups
                saved["step"] = saved["step"] * 0
                group.pop("step") if count is None else group.update(step=count)
    return out


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer if optimizer is not None else [])
    return {"model": weights, "optimizer": state} if optimizer is not None else {"model": weights}


def _nothing() -> None: ...


def _together(what: str, function: Callable[[], T]) -> list[T]:
    """Every rank's result, by rank.

    Raises:
        CheckpointError: on every rank, if any has failed.
    """
    result, failure = None, ""
    try:
        result = function()
    except dcp.CheckpointException as error:  # of all ranks already, and no Exception
        if not isinstance(inner(error), Exception):
            raise inner(error) from error  # Ctrl-C
        failure = f"rank {next(iter(error.failures))}: {cause_of(error)}"
    except Exception as error:
        failure = f"rank {groups.rank()}: {cause_of(error)}"
    answers = groups.all_objects((failure, result))
    for failed, _ in answers:
        if failed:
            raise CheckpointError(f"mfsdp: could not {what}: {failed}")
    return [answer for _, answer in answers]


def inner(error: BaseException) -> BaseException:
    """What torch.distributed.checkpoint has wrapped."""
    return next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error


def cause_of(error: BaseException) -> str:
    """An error in words; a full disk as such, whatever torch's writers have wrapped it in."""
    error = inner(error)
    chain, link = [error], error.__context__
    while link is not None:
        chain.append(link)
        link = link.__context__
    shown = next((e for e in chain if isinstance(e, OSError)), error)
    return f"{type(shown).__name__}: {shown}"


def _written_by(rank: int, folder: Path) -> list[Path]:
    """A rank's files: torch.distributed.checkpoint names them after it."""
    own = [*folder.glob(f"__{rank}_*"), folder / f"rank{rank}.pt"]
    return [*own, folder / ".metadata"] if rank == 0 else own


def _summed(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def faults_of(path: Path, rank: int = 0, world: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint that has a manifest: with every ``world``-th of them."""
    entries = {files.inside(name): entry for name, entry in json.loads((path / MANIFEST).read_text())["files"].items()}
    found = (_fault(path / name, entries[name]) for name in sorted(entries)[rank::world])
    return [fault for fault in found if fault]


def _fault(path: Path, entry: dict[str, Any]) -> str:
    """What is wrong with a file, ``""`` for nothing."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    return "" if _summed(path) == entry else f"{path.name} has changed since it was written"


def _random_state() -> dict[str, Any]:
    out = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        out["device"] = torch.get_device_module().get_rng_state()
    return out


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "device" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["device"])
