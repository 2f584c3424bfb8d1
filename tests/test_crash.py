"""A checkpoint is complete or it is not there: kills at every point, damaged files, full disks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp import CheckpointError, Checkpoints
from mfsdp.checkpoints import safetensors
from mfsdp.checkpoints.reading import Planner
from tests.parity import compiled, whole

ROOT = Path(__file__).parent.parent


class Loader:
    """Random data; its place is its state."""

    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        return torch.randn(4, 8, generator=self.random)

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])


class Run:
    """A training run with dropout, a scheduler and a loader."""

    def __init__(self, seed: int, lowering: str = "none"):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 33), nn.Dropout(0.3), nn.Linear(33, 8))
        self.model = mfsdp.fully_shard(model, units=["0"])
        self.call = compiled(self.model, lowering)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.loader = Loader(seed + rank)
        torch.manual_seed(seed + 100 + rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.call(self.loader.next()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}

    def values(self) -> list[torch.Tensor]:
        return [whole(p).detach().clone() for p in self.model.parameters()]


def resumed(folder: str, lowering: str) -> bool:
    """Six steps are six steps, stopped or not: weights, moments, learning rate, data and dropout."""
    unstopped = Run(0, lowering)
    unstopped.train(6)
    first = Run(0, lowering)
    first.train(3)
    Checkpoints(folder).save(3, **first.parts)
    second = Run(1, lowering)
    second.train(2)
    assert Checkpoints(folder).load(**second.parts) == 3
    second.train(3)
    return all(torch.equal(a, b) for a, b in zip(unstopped.values(), second.values(), strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_training_goes_on_as_if_never_stopped(two_ranks, tmp_path, lowering):
    assert two_ranks.run(resumed, str(tmp_path), lowering) == [True, True]


def test_in_one_process(tmp_path):
    assert resumed(str(tmp_path), "none")


def elsewhere(folder: str) -> bool:
    """Loaded on another number of ranks: everything but random numbers."""
    run = Run(1)
    assert Checkpoints(folder).load(**run.parts) == 3
    return run.scheduler.last_epoch == 3 and run.optimizer.param_groups[0]["lr"] == 5e-3


@pytest.mark.dist
def test_on_another_number_of_ranks(two_ranks, four_ranks, tmp_path):
    two_ranks.run(resumed, str(tmp_path), "none")
    assert four_ranks.run(elsewhere, str(tmp_path)) == [True] * 4
    assert elsewhere(str(tmp_path))


EVENTS = ("open", "os.", "shutil.")


def driver(folder: str) -> None:
    """Kills a save at its first file operation, at its second, and so on, until one survives. Prints counts."""
    torch.set_num_threads(1)
    run = Run(0)
    run.train(1)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, **run.parts)
    before = run.values()
    run.train(1)
    after = run.values()
    kills = published = 0
    while True:
        child = os.fork()
        if child == 0:
            seen = 0

            def count(event: str, args: Any, last: int = kills) -> None:
                nonlocal seen
                if event.startswith(EVENTS):
                    seen += 1
                    if seen > last:
                        os._exit(9)

            sys.addaudithook(count)
            checkpoints.save(2, **run.parts)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        kills += 1
        other = Run(3)
        step = checkpoints.load(**other.parts)
        want = {1: before, 2: after}[step]
        assert all(torch.equal(a, b) for a, b in zip(other.values(), want, strict=True)), f"kill {kills}, step {step}"
        if step == 2:  # killed behind the rename
            published += 1
            os.rename(checkpoints.path(2), Path(folder, "aside"))
            if not checkpoints.steps():
                run_again = Run(0)
                run_again.train(1)
                checkpoints.save(1, **run_again.parts)
            subprocess.run(["rm", "-r", str(Path(folder, "aside"))], check=True)
    print(json.dumps({"kills": kills, "published": published, "steps": checkpoints.steps(),
                      "left": sorted(p.name for p in Path(folder).iterdir())}))  # fmt: skip


@pytest.mark.slow
def test_killed_at_every_file_operation(tmp_path):
    command = [sys.executable, "-c", f"from tests.test_crash import driver; driver({str(tmp_path)!r})"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert out.returncode == 0, out.stderr[-3000:]
    seen = json.loads(out.stdout.splitlines()[-1])
    assert seen["kills"] > 20 and seen["published"] >= 1, seen
    assert seen["steps"] == [2] and seen["left"] == ["step-00000002"], seen


def saving(folder: str, seconds: float) -> None:
    """Trains and saves, over and over."""
    run, checkpoints = Run(0), Checkpoints(folder, keep=3)
    step = checkpoints.load(**run.parts) or 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run.train(1)
        step += 1
        checkpoints.save(step, **run.parts)


def counted(folder: str) -> tuple[int, bool]:
    """The newest step, and whether it is what so many steps give."""
    run = Run(5)
    step = Checkpoints(folder).load(**run.parts)
    unstopped = Run(0)
    unstopped.train(step)
    return step, all(torch.equal(a, b) for a, b in zip(run.values(), unstopped.values(), strict=True))


def killed_and_resumed(folder: Path, kills: int) -> dict[str, int]:
    """Kills one of two ranks, or both, at a random moment of a run that saves all the time, and starts it again."""
    from tests.ranks import Ranks

    chance, checkpoints = random.Random(0), Checkpoints(folder)
    counts = {"kills": 0, "resumes": 0, "losses": 0, "step": 0}
    for kill in range(kills + 1):
        ranks = Ranks(2)  # starts with what the last ones have left
        thread = threading.Thread(target=lambda r=ranks: _ignored(lambda: r.run(saving, str(folder), 60)))
        try:
            if kill:
                (step, right), other = ranks.run(counted, str(folder))
                counts["resumes"] += 1
                counts["losses"] += not (right and other == (step, right) and step >= counts["step"])
                counts["step"] = step
            if kill == kills:
                break
            thread.start()
            while thread.is_alive() and checkpoints.steps()[-1:] <= [counts["step"] + 1]:
                time.sleep(0.01)
            time.sleep(0.3 * chance.random())
            for worker in ranks._workers if kill % 2 else [chance.choice(ranks._workers)]:
                os.kill(worker.pid, signal.SIGKILL)
            counts["kills"] += 1
            time.sleep(0.2)
        finally:
            ranks.stop()
            if thread.is_alive():
                thread.join()
    return counts


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_that_are_killed_at_random_resume_and_lose_nothing(tmp_path):
    counts = killed_and_resumed(tmp_path, 3)
    assert counts.pop("step") > 6 and counts == {"kills": 3, "resumes": 3, "losses": 0}


def _ignored(function: Any) -> None:
    with contextlib.suppress(Exception):
        function()


@pytest.mark.parametrize("harm", ["truncated", "missing", "flipped"])
@pytest.mark.parametrize("which", ["__0_0.distcp", "rank0.pt", ".metadata"])
def test_damaged_files_are_named_and_nothing_is_loaded(tmp_path, harm, which):
    run, checkpoints = Run(0), Checkpoints(tmp_path)
    for step in (1, 2):
        run.train(1)
        checkpoints.save(step, **run.parts)
    file = checkpoints.path(2) / which
    content = bytearray(file.read_bytes())
    if harm == "truncated":
        file.write_bytes(content[:-1])
    elif harm == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    other = Run(1)
    before = other.values()
    what = {"truncated": "bytes instead of", "missing": "is missing", "flipped": "has changed since it was written"}
    with pytest.raises(CheckpointError, match=rf"step 2 .* is damaged: {which} .*{what[harm]}|{which} {what[harm]}"):
        checkpoints.load(**other.parts)
    assert all(torch.equal(a, b) for a, b in zip(before, other.values(), strict=True))
    assert checkpoints.load(**other.parts, step=1) == 1


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_a_load_that_dies_half_way_leaves_a_model_that_refuses_to_compute(tmp_path, monkeypatch, kind):
    run = Run(0, "eager")
    run.train(1)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, **run.parts)
    mfsdp.save_safetensors(run.model, tmp_path / "files")
    before = run.values()
    load = (
        (lambda: checkpoints.load(**run.parts)) if kind == "checkpoint"
        else lambda: mfsdp.load_safetensors(run.model, tmp_path / "files")
    )  # fmt: skip
    run.train(1)
    calls = []

    def breaks(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise OSError("Input/output error")
        return was(*args)

    where, name = (safetensors, "_read") if kind == "safetensors" else (Planner, "commit_tensor")
    was = getattr(where, name)
    monkeypatch.setattr(where, name, breaks)
    with pytest.raises((CheckpointError, OSError), match="Input/output error"):
        load()
    monkeypatch.undo()
    for compute in (lambda: run.train(1), lambda: run.model(torch.ones(2, 8))):
        with pytest.raises(RuntimeError, match="Sequential is half loaded: loading .* has not ended"):
            compute()
    load()
    assert all(torch.equal(a, b) for a, b in zip(before, run.values(), strict=True))
    run.train(1)
    run.model(torch.ones(2, 8))


def other_process(code: str) -> subprocess.Popen[str]:
    """It says ``in`` once it is where it should be, and stays there until something is written to it."""
    head = "import sys, torch, mfsdp\nfrom torch import nn\nfrom mfsdp.checkpoints import files\n"
    head += "def stay(*args):\n    print('in', flush=True)\n    sys.stdin.readline()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + code], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    return process


def test_two_that_save_to_one_folder(tmp_path):
    """The second is told, takes nothing away from the first, and may save once that is done, or has died."""
    run, checkpoints = Run(0), Checkpoints(tmp_path)
    code = f"real = files.sync\nfiles.sync = lambda path: (stay(), setattr(files, 'sync', real))\n" \
           f"mfsdp.Checkpoints({str(tmp_path)!r}).save(1, nn.Linear(2, 2))"  # fmt: skip
    first = other_process(code)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="another process is writing to .*step-00000001.partial now"):
            checkpoints.save(step, **run.parts)
    assert first.communicate("go on\n", timeout=60) and first.returncode == 0
    assert checkpoints.steps() == [1] and mfsdp.Checkpoints(tmp_path).load(nn.Linear(2, 2)) == 1
    killed = other_process(code.replace("save(1", "save(3"))
    killed.kill()
    killed.wait()
    checkpoints.save(2, **run.parts)
    assert checkpoints.steps() == [1, 2] and not list(tmp_path.glob(".*"))


def test_two_conversions_to_one_target(tmp_path):
    run = Run(0)
    saved = Checkpoints(tmp_path / "run").save(1, **run.parts)
    target = tmp_path / "out"
    code = f"mfsdp.convert({str(saved)!r}, {str(target)!r}, progress=stay)"
    first = other_process(code)
    with pytest.raises(CheckpointError, match="another process is writing to .*out.partial now"):
        mfsdp.convert(saved, target)
    assert first.communicate("\n" * 99, timeout=60) and first.returncode == 0
    assert {p.name for p in target.iterdir()} == {"model.safetensors"}
    mfsdp.load_safetensors(run.model, target)
    killed = other_process(code.replace("/out", "/other"))
    killed.kill()
    killed.wait()
    mfsdp.convert(saved, tmp_path / "other")
    assert not list(tmp_path.glob(".*"))


def full_disk(folder: str, limit: int) -> tuple[str, list[int], list[int], bool]:
    """Rank 1 cannot write more than a few bytes to a file, then it can again."""
    run, checkpoints = Run(0), Checkpoints(folder)
    run.train(1)
    checkpoints.save(1, **run.parts)
    run.train(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        checkpoints.save(2, **run.parts)
        text = "saved"
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    between = checkpoints.steps()
    left = [p.name for p in Path(folder).iterdir() if p.name.startswith(".")]
    run.train(1)
    checkpoints.save(3, **run.parts)
    return text, between, checkpoints.steps(), not left


@pytest.mark.dist
@pytest.mark.parametrize("limit", [1, 700, 2000])
def test_a_full_disk_is_an_error_on_every_rank_and_the_run_goes_on(two_ranks, tmp_path, limit):
    for text, between, steps, clean in two_ranks.run(full_disk, str(tmp_path), limit):
        assert (
            "could not save step 2: rank 1: OSError" in text
            and "too large" in text
            and between == [1]
            and steps == [1, 3]
            and clean
        )


def test_the_newest_are_kept(tmp_path):
    run, checkpoints = Run(0), Checkpoints(tmp_path, keep=2)
    assert checkpoints.load(**run.parts) is None and checkpoints.steps() == []
    for step in (5, 10, 200_000_000):
        checkpoints.save(step, **run.parts)
    assert checkpoints.steps() == [10, 200_000_000] and checkpoints.load(**run.parts) == 200_000_000
    with pytest.raises(ValueError, match=r"there is a checkpoint of step 10"):
        checkpoints.save(10, **run.parts)
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 5 .* there are \[10, 200000000\]"):
        checkpoints.load(**run.parts, step=5)
    with pytest.raises(ValueError, match="saved without 'more'"):
        checkpoints.load(run.model, run.optimizer, more=run.loader)
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)


if __name__ == "__main__":  # python -m tests.test_crash FOLDER KILLS
    print(killed_and_resumed(Path(sys.argv[1]), int(sys.argv[2])))
