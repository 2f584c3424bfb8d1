"""Checkpoints are atomic: processes killed while they save, damaged files, full disks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
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
from tests.helpers.crashes import WAYS, Run, killed_and_resumed

ROOT = Path(__file__).parent.parent


def resumed(folder: str, lowering: str, blocking: bool = True) -> bool:
    """Six steps are six steps, stopped or not: weights, moments, learning rate, data and dropout; also where the first
    run trains on while they are written.
    """
    unstopped = Run(0, lowering)
    unstopped.train(6)
    first = Run(0, lowering)
    first.train(3)
    checkpoints = Checkpoints(folder)
    saved = checkpoints.save(3, **first.parts, blocking=blocking)
    first.train(2)
    second = Run(1, lowering)
    second.train(2)
    assert checkpoints.load(**second.parts) == 3
    assert (saved if blocking else saved.result()) == checkpoints.path(3)
    second.train(3)
    return all(torch.equal(a, b) for a, b in zip(unstopped.values(), second.values(), strict=True))


@pytest.mark.dist
@pytest.mark.parametrize(("lowering", "blocking"), [("eager", True), ("eager", False), ("none", True)])
def test_training_goes_on_as_if_never_stopped(two_ranks, tmp_path, lowering, blocking):
    assert two_ranks.run(resumed, str(tmp_path), lowering, blocking) == [True, True]


@pytest.mark.parametrize("blocking", [True, False])
def test_in_one_process(tmp_path, blocking):
    assert resumed(str(tmp_path), "none", blocking)


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


def injected(folder: Path, ways: list[str], points: int, stride: int) -> dict[str, dict[str, int]]:
    """What is lost, by way of saving. In a process of its own: it forks, and there should be no threads. What a
    process has written outlives it, synced or not.
    """
    code = """if True:
        import json, os, sys, torch
        from pathlib import Path
        from tests.helpers.crashes import WAYS, injected
        torch.set_num_threads(1)
        os.fsync = os.sync = lambda *file: None
        folder, ways, points, stride = json.loads(sys.argv[1])
        print(json.dumps({way: injected(WAYS[way](Path(folder) / way), points, stride) for way in ways}))
    """
    command = [sys.executable, "-c", code, json.dumps([str(folder), ways, points, stride])]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_at_some_file_operations_and_in_the_middle_of_files(tmp_path):
    for way, seen in injected(tmp_path, [*WAYS], 5, 12).items():
        assert seen["operations"] > 1 and seen["bytes"] >= 1 and seen["losses"] == 0, (way, seen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_every_file_operation_and_in_the_middle_of_files(tmp_path, way):
    seen = injected(tmp_path, [way], 60, 1)[way]
    assert seen["operations"] > 20 and seen["bytes"] > 5 and seen["published"] >= 1, seen
    assert seen["losses"] == 0, seen


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_that_are_killed_at_random_resume_and_lose_nothing(tmp_path):
    counts = killed_and_resumed(tmp_path, 2, blocking=False)
    assert counts.pop("step") >= 4 and counts == {"kills": 2, "resumes": 2, "losses": 0}


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


@pytest.mark.slow
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

    where, name = (safetensors, "keep") if kind == "safetensors" else (Planner, "commit_tensor")
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


def of_another_model(folder: Path) -> list[tuple[str, bool]]:
    """What is said of checkpoints that do not fit, and whether values are what they were."""
    out = []
    mine = mfsdp.fully_shard(nn.Linear(4, 8))
    mfsdp.Checkpoints(folder).save(1, mine)
    for other in (nn.Linear(4, 9), nn.Sequential(nn.Linear(4, 8))):
        model = mfsdp.fully_shard(other)
        before = mfsdp.checksum(model)
        with pytest.raises(mfsdp.CheckpointError) as error:
            mfsdp.Checkpoints(folder).load(model)
        model(torch.ones(2, 4))  # not half loaded
        out.append((str(error.value), mfsdp.checksum(model) == before))
    return out


@pytest.mark.dist
def test_a_checkpoint_of_another_model(two_ranks, tmp_path):
    for sizes, names in two_ranks.run(of_another_model, tmp_path):
        assert "does not fit; nothing was loaded" in sizes[0] and "model.weight" in sizes[0] and sizes[1], sizes
        assert "does not fit; nothing was loaded" in names[0] and "model.0.weight" in names[0] and names[1], names


@pytest.mark.slow
def test_two_that_save_to_one_folder(tmp_path):
    """The second is told, takes nothing away from the first, and may save once that is done, or has died; likewise of
    conversions to one target.
    """
    run, folder, target, other = Run(0), tmp_path / "run", tmp_path / "out", tmp_path / "other"
    checkpoints, saved = Checkpoints(folder), Checkpoints(tmp_path / "source").save(1, **run.parts)
    first = other_process(
        "real = files.sync\nfiles.sync = lambda path: (stay(), setattr(files, 'sync', real))\n"
        f"mfsdp.Checkpoints({str(folder)!r}).save(1, nn.Linear(2, 2))\n"
        f"mfsdp.convert({str(saved)!r}, {str(target)!r}, progress=stay)"
    )
    assert first.stdin is not None and first.stdout is not None
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="another process is writing to .*step-00000001.partial now"):
            checkpoints.save(step, **run.parts)
    first.stdin.write("go on\n")
    first.stdin.flush()
    assert first.stdout.readline() == "in\n"
    with pytest.raises(CheckpointError, match="another process is writing to .*out.partial now"):
        mfsdp.convert(saved, target)
    assert first.communicate("\n" * 99, timeout=60) and first.returncode == 0
    assert checkpoints.steps() == [1] and mfsdp.Checkpoints(folder).load(nn.Linear(2, 2)) == 1
    assert {p.name for p in target.iterdir()} == {"model.safetensors"}
    mfsdp.load_safetensors(run.model, target)
    killed = other_process(
        "def saves(*args):\n"
        f"    files.sync = stay\n    mfsdp.Checkpoints({str(folder)!r}).save(3, nn.Linear(2, 2))\n"
        f"mfsdp.convert({str(saved)!r}, {str(other)!r}, progress=saves)"
    )
    killed.kill()
    killed.wait()
    checkpoints.save(2, **run.parts)
    mfsdp.convert(saved, other)
    assert checkpoints.steps() == [1, 2] and not [*folder.glob(".*"), *tmp_path.glob(".*")]


def full_disk(folder: str, limit: int, told_by: str) -> tuple[str, list[int], list[int], bool]:
    """Rank 1 cannot write more than a few bytes to a file, then it can again."""
    run, checkpoints = Run(0), Checkpoints(folder)
    run.train(1)
    checkpoints.save(1, **run.parts, blocking=told_by == "save")
    checkpoints.wait()
    run.train(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    saving = None if told_by == "save" else checkpoints.save(2, **run.parts, blocking=False)
    try:
        if saving is None:
            checkpoints.save(2, **run.parts)
        elif told_by == "the next save":
            checkpoints.save(5, **run.parts)
        elif told_by == "wait":
            checkpoints.wait()
        else:
            saving.result()
        text = "saved"
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    between = checkpoints.steps()
    left = [p.name for p in Path(folder).iterdir() if p.name.startswith(".")]
    run.train(1)
    checkpoints.save(3, **run.parts)
    checkpoints.wait()
    return text, between, checkpoints.steps(), not left


@pytest.mark.dist
@pytest.mark.parametrize(
    ("limit", "told_by"),
    [(1, "save"), (700, "save"), (2000, "save"), (700, "the next save"), (2000, "wait"), (1, "future")],
)
def test_a_full_disk_is_an_error_on_every_rank_and_the_run_goes_on(two_ranks, tmp_path, limit, told_by):
    for text, between, steps, clean in two_ranks.run(full_disk, str(tmp_path), limit, told_by):
        assert (
            "could not save step 2: rank 1: OSError" in text
            and "too large" in text
            and ("step 5 has not been begun" in text) == (told_by == "the next save")
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
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match=r"there is a checkpoint of step 10"):
        checkpoints.save(10, **run.parts)
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 5 .* there are \[10, 200000000\]"):
        checkpoints.load(**run.parts, step=5)
    with pytest.raises(ValueError, match="saved without 'more'"):
        checkpoints.load(run.model, run.optimizer, more=run.loader)
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)
