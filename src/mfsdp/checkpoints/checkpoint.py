"""Atomic checkpoints: torch.distributed.checkpoint writes a hidden folder, which is checksummed and then renamed.

folder/
  step-00000400/              published by a rename, when everything in it has reached the disk
    .metadata  __0_0.distcp   torch.distributed.checkpoint's own: any world, strategy or framework loads it
    rank0.pt                  what belongs to a rank: its random numbers, its place in the data
    manifest.json             every file's size and checksum
  .step-00000500.partial/     being written or deleted, or left by somebody who was killed; cleared by the next save
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..buffers.flat_buffer import half_loaded, shared_over
from ..runtime import execution, groups
from . import files
from .errors import CheckpointError, cause_of, quiet, together
from .manifest import MANIFEST, faults_of
from .reading import Planner, Reader
from .saving import Save, Saving

log = logging.getLogger("mfsdp")


class Stateful(Protocol):
    """Other state in a checkpoint: schedulers, loaders. State is tensors, numbers, strings and containers of them."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
"""One or several of one model, as `torch.distributed.checkpoint.state_dict` takes them."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: created by the first save; on a file system that all ranks share.
        keep: number of newest checkpoints to keep; ``None`` for all.

    Raises:
        ValueError: ``keep`` is not positive.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = None):
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpoints: keep={keep} must be at least 1, or None")
        self.folder, self.keep = Path(folder), keep
        self._thread: threading.Thread | None = None
        self._saving: Saving | None = None
        self._channel: groups.SideChannel | None = None

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted(int(m[1]) for m in matches if m and (self.folder / m[0] / MANIFEST).is_file())

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint, which `torch.distributed.checkpoint.load` accepts."""
        return self.folder / f"step-{step:08d}"

    @overload
    def save(
        self, step: int, model: nn.Module, optimizer: Optimizers | None = ..., *,
        blocking: Literal[True] = ..., **more: Stateful,
    ) -> Path: ...  # fmt: skip

    @overload
    def save(
        self, step: int, model: nn.Module, optimizer: Optimizers | None = ..., *,
        blocking: Literal[False], **more: Stateful,
    ) -> Future[Path]: ...  # fmt: skip

    @overload
    def save(
        self, step: int, model: nn.Module, optimizer: Optimizers | None = ..., *,
        blocking: bool, **more: Stateful,
    ) -> Path | Future[Path]: ...  # fmt: skip

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        blocking: bool = True,
        **more: Stateful,
    ) -> Path | Future[Path]:
        """Writes a checkpoint; all ranks call it. Each rank saves its own ``more``, and RNG states of torch and Python.
        First waits for an earlier save.

        Args:
            optimizer: one, or several, such as Muon and AdamW, each with other parameters of the model; one folder then
                holds the state of all, as ``get_state_dict(model, [muon, adamw])`` gives it, to load in the same order.
            blocking: ``False``: returns once this rank's data is copied to host memory. A thread writes it beside
                training, without training's process groups; the process does not exit before the thread ends.

        Returns:
            The checkpoint's folder; if not ``blocking``, a future of it, like
            `torch.distributed.checkpoint.async_save`.

        Raises:
            CheckpointError: a rank could not write: a full disk, say, or another run saves to this folder now. Nothing
                of the checkpoint remains, and training may go on. If not ``blocking``, the future, `wait` or the next
                save, which then does not start, raises it, once and on every rank.
            ValueError: that step has a checkpoint.
            RuntimeError: other ranks call something else; raised there too.
        """
        optimizers = _listed(optimizer)
        execution.all_call(f"Checkpoints.save of step {step}", shared_over(model))
        self._join()
        if self.path(step).exists():
            raise ValueError(f"Checkpoints: there is a checkpoint of step {step} in {self.folder}")
        channel = groups.Everybody() if blocking else self._thread_channel()
        save = Save(step, self.path(step), copies=not blocking)
        failed = self._unreported()
        save.begin(
            lambda: (
                _state_to_save(model, optimizers),
                {"more": {name: thing.state_dict() for name, thing in more.items()}, "random": _random_state()},
            ),
            failed and f"{failed}. That was behind training, and step {step} has not been begun",
        )
        if blocking:
            expired = save.end(channel, self._expire)
            if expired:
                self._start_thread(lambda: _delete(expired))
            return self.path(step)
        saving = self._saving = Saving()
        self._start_thread(lambda: self._end_in_thread(save, channel, saving))
        return saving

    def wait(self) -> None:
        """Waits until nothing is being written or deleted.

        Raises:
            CheckpointError: a save with ``blocking=False`` failed; on every rank.
        """
        self._join()
        failed = self._unreported()
        if failed:
            raise CheckpointError(failed)

    def _unreported(self) -> str:
        """Returns why the last background save failed, if nothing has raised it yet, and resets this."""
        saving, self._saving = self._saving, None
        return "" if saving is None else saving.unreported()

    def _thread_channel(self) -> groups.Everybody:
        """Returns the channel over which ranks communicate in the thread; all ranks call it."""
        if groups.world() == 1:
            return groups.Everybody()
        if self._channel is None or not self._channel.lasts():
            self._channel = groups.SideChannel(f"checkpoints/{groups.all_objects(uuid.uuid4().hex)[0]}")
        return self._channel

    def _start_thread(self, function: Callable[[], None]) -> None:
        """Starts a thread that the process waits for at exit."""
        self._thread = threading.Thread(target=function, name="mfsdp checkpoints")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _end_in_thread(self, save: Save, channel: groups.Everybody, saving: Saving) -> None:
        try:
            expired = save.end(channel, self._expire)
        except BaseException as error:
            if not isinstance(error, CheckpointError):  # usually, other ranks have exited
                error = CheckpointError(f"mfsdp: could not save step {save.step}: {cause_of(error)}")
            log.error("%s. It was saved behind training, which goes on; the next save raises this.", error)
            saving.set_exception(error)
            return
        saving.set_result(save.target)
        _delete(expired)

    def _expire(self) -> list[Path]:
        """Renames checkpoints beyond ``keep`` and returns their new paths."""
        old = self.steps()[: -self.keep] if self.keep else ()
        return [self.path(step).rename(self.folder / f".step-{step:08d}.partial") for step in old]

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        step: int | None = None,
        **more: Stateful,
    ) -> int | None:
        """Reads a checkpoint after checking all its files; all ranks call it. If the number of ranks has changed, a
        rank reads the ``more`` of its number, or of rank 0 if there is none, and keeps its RNG states. First waits for
        a save.

        Args:
            model, optimizer, more: as in `save`.
            step: ``None`` for the newest complete one.

        Returns:
            The step, or ``None`` if there is no checkpoint.

        Raises:
            CheckpointError: files are missing, truncated, changed, or contain more than data, or they are of another
                model; the message names the files, or the tensors that are missing or of other sizes. Nothing has been
                loaded. Or reading failed after these checks: a part has been loaded, and the model does not compute
                until a load completes.
            ValueError: that step has no complete checkpoint, or was saved without an item of ``more``.
            RuntimeError: other ranks call something else; raised there too.
        """
        optimizers = _listed(optimizer)
        execution.all_call("Checkpoints.load", shared_over(model))
        self._join()
        there = self.steps()
        if step is None and not there:
            return None
        if step is not None and step not in there:
            raise ValueError(f"Checkpoints: no complete checkpoint of step {step} in {self.folder}; there are {there}")
        step = there[-1] if step is None else step
        path, rank, world = self.path(step), groups.rank(), groups.world()
        manifest = json.loads((path / MANIFEST).read_text())
        self._check_files(step, there)
        own = torch.load(path / f"rank{rank if rank < manifest['ranks'] else 0}.pt", weights_only=True)
        for name in more:
            if name not in own["more"]:
                raise ValueError(f"Checkpoints: step {step} was saved without {name!r}; it has {sorted(own['more'])}")
        self._load_state(step, model, optimizers)
        for name, thing in more.items():
            thing.load_state_dict(own["more"][name])
        if manifest["ranks"] == world:
            _set_random_state(own["random"])
        return step

    def _check_files(self, step: int, there: list[int]) -> None:
        """Raises `CheckpointError` on every rank if a file is damaged; each rank checks some. ``there``: all steps."""
        path, rank = self.path(step), groups.rank()

        def check() -> list[str]:
            found = faults_of(path, rank, groups.world())
            if rank == 0 and not found:
                Reader(path).read_metadata()
            return found

        faults = [fault for part in together(f"load step {step}", check) for fault in part]
        if faults:
            raise CheckpointError(
                f"mfsdp: the checkpoint of step {step} in {self.folder} is damaged: {'; '.join(faults)}. "
                f"Nothing was loaded; the complete ones are of steps {there}, load(..., step=...) takes another."
            )

    def _load_state(self, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Loads model and optimizer, after checking on every rank that the checkpoint fits them."""
        path, state = self.path(step), _state(model, optimizers)

        def fit() -> None:
            planner = Planner()
            planner.set_up_planner(state, Reader(path).read_metadata(), is_coordinator=groups.rank() == 0)
            planner.create_local_plan()

        def read() -> None:
            with quiet():
                dcp.load(state, storage_reader=Reader(path), planner=Planner())

        together(f"load step {step}, which does not fit; nothing was loaded", fit)
        with half_loaded(model, f"loading step {step} of {self.folder}"):
            together(f"load step {step}, and has loaded a part of it", read)
            set_state_dict(
                model,
                optimizers,
                model_state_dict=state["model"],
                optim_state_dict=state.get("optimizer", {}),
            )


_NAME = re.compile(r"step-(\d{8,})")


def _listed(given: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that a caller gives, each with parameters of its own."""
    several: Any = [] if given is None else given if isinstance(given, Iterable) else [given]
    found = list(several)
    seen: dict[torch.Tensor, torch.optim.Optimizer] = {}
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"Checkpoints: {each!r} is no torch.optim.Optimizer; give one, or a list of several")
        for param in (p for group in each.param_groups for p in group["params"]):
            if seen.setdefault(param, each) is not each:
                raise ValueError(
                    f"Checkpoints: {type(seen[param]).__name__} and {type(each).__name__} hold the same parameter, "
                    f"of shape {list(param.shape)}: a checkpoint has one state of it. Save each in a folder of its own"
                )
    return found


def _state_to_save(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Returns `_state` and leaves optimizers that have not stepped without state (invariant 23): torch creates the
    state by a step without gradients, which increments step counts.
    """
    fresh = [not each.state for each in optimizers]
    counts = [[g.get("step") for g in each.param_groups] for each in optimizers]
    out = _state(model, optimizers)
    groups_saved = iter(out["optimizer"]["param_groups"] if optimizers else ())
    for each, is_fresh, before in zip(optimizers, fresh, counts, strict=True):
        for group, count, saved in zip(each.param_groups, before, groups_saved, strict=False):
            if is_fresh:
                _unstepped(group, count, saved, out["optimizer"]["state"])
        if is_fresh:
            each.state.clear()
    return out


def _unstepped(group: dict[str, Any], count: Any, saved: dict[str, Any], state: dict[str, Any]) -> None:
    """Sets the step counts of a parameter group, saved and its own, to those from before a step without gradients."""
    for name in saved["params"]:
        if "step" in state.get(name, ()):
            state[name]["step"] = state[name]["step"] * 0
    if "step" in group:  # TransformerEngine counts steps per group
        saved["step"] = saved["step"] * 0
        group.pop("step") if count is None else group.update(step=count)


def _state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizers)
    return {"model": weights, "optimizer": state} if optimizers else {"model": weights}


def _delete(folders: Iterable[Path]) -> None:
    """Deletes folders. The next save retries those that cannot be deleted, and reports why."""
    for folder in folders:
        with suppress(OSError):
            files.clear(folder)


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
