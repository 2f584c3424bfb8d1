"""The example with tensor or expert parallelism beside sharding, as its page says to run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "processes, how",
    [
        (2, "--tp"),
        pytest.param(2, "--ep", marks=pytest.mark.exhaustive),
        pytest.param(4, "--ep", marks=pytest.mark.exhaustive),
    ],
)
def test_it_trains(tmp_path, processes, how):
    command = [sys.executable, "examples/parallel/train.py", how, "2", "--steps", "10", "--out", str(tmp_path / "out")]
    command += ["--processes", str(processes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.5, done.stdout
    written = [p.name for p in (tmp_path / "out").rglob("*")]
    assert any(n.endswith(".html") for n in written) and sum(n.endswith(".txt") for n in written) > 10, written


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", pytest.param("1F1B", marks=pytest.mark.exhaustive)])
def test_a_pipeline_trains(tmp_path: Path, schedule: str) -> None:
    command = [sys.executable, "examples/pipeline/train.py", "--schedule", schedule, "--steps", "10"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.5, done.stdout
    written = [p.name for p in tmp_path.rglob("*.txt")]
    assert any("backward_weight" in name for name in written) == (schedule != "1F1B"), written
