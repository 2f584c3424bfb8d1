"""``Checkpoints.save(blocking=False)``: beside training, in nobody's way, and told of. Values and full disks are in
``test_crash.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mfsdp import CheckpointError, Checkpoints
from mfsdp.runtime import watchdog
from tests.helpers.crashes import Run
from tests.helpers.logs import logged

ROOT = Path(__file__).parent.parent


def slowly(seconds: float) -> None:
    """From now on this process needs long for its files to reach the disk."""
    fsync = os.fsync
    os.fsync = lambda handle: (time.sleep(seconds), fsync(handle))[1]  # type: ignore[assignment]


def beside(folder: str) -> tuple[bool, bool, list[int], list[str]]:
    """Rank 1 takes long to write; both train meanwhile, more often than they save."""
    run, checkpoints, fsync = Run(0, "eager"), Checkpoints(folder), os.fsync
    run.train(1)
    if dist.get_rank() == 1:
        slowly(1)
    with logged() as texts:
        watchdog.settle(0.3, False, None)
        try:
            saving = checkpoints.save(1, **run.parts, blocking=False)
            run.train(3)
            trained_beside = not saving.done()
            second = checkpoints.save(2, **run.parts, blocking=False)
            waited = saving.done()
            run.train(3)
            checkpoints.wait()
        finally:
            os.fsync = fsync
    return trained_beside, waited and second.done(), checkpoints.steps(), texts


@pytest.mark.dist
def test_training_goes_on_while_a_rank_writes_and_nobody_calls_that_a_stall(two_ranks, tmp_path):
    assert two_ranks.run(beside, str(tmp_path)) == [(True, True, [1, 2], [])] * 2


def dies(folder: str) -> str:
    """Rank 1 is gone before it has written all."""
    run, checkpoints = Run(0), Checkpoints(folder)
    run.train(1)
    checkpoints.save(1, **run.parts)
    run.train(1)
    if dist.get_rank() == 1:
        os.fsync = lambda handle: os._exit(9)  # type: ignore[assignment]
    try:
        checkpoints.save(2, **run.parts, blocking=False).result(60)
    except CheckpointError as error:
        return f"{error} {checkpoints.steps()}"
    return "saved"


@pytest.mark.dist
def test_a_rank_that_dies_behind_training_is_told_and_nothing_is_published(two_fresh_ranks, tmp_path):
    answer = two_fresh_ranks.answers(dies, str(tmp_path), patience=60)[0]
    assert answer is not None and answer[0], answer
    assert answer[1].startswith("mfsdp: could not save step 2: ") and "by peer" in answer[1], answer
    assert answer[1].endswith(" [1]")


ENDS = """if True:
    import resource, sys, torch, mfsdp
    import torch.distributed as dist
    from tests.test_saving import slowly
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = mfsdp.fully_shard(torch.nn.Linear(64, 64))
    checkpoints = mfsdp.Checkpoints(sys.argv[1])
    if dist.get_rank() == 1 and sys.argv[2] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
    slowly(0.5)
    checkpoints.save(1, model, blocking=False)
    assert not checkpoints.steps()
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("disk", [pytest.param("", marks=pytest.mark.exhaustive), "full"])
def test_a_process_ends_when_what_it_saves_is_there_or_has_been_told_of(tmp_path, disk):
    script = tmp_path / "train.py"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    out = subprocess.run(
        [*command, str(tmp_path / "run"), disk], env=environment, capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert Checkpoints(tmp_path / "run").steps() == ([] if disk else [1])
    assert ("could not save step 1: rank 1: OSError" in out.stderr) == bool(disk), out.stderr[-3000:]
    assert not list((tmp_path / "run").glob(".*"))
