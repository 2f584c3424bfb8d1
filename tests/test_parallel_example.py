"""Examples with tensor, expert or pipeline parallelism beside sharding: on ranks of tests, and as their pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import Ranks
from tests.helpers.scripts import printed

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def command(script: str, *arguments: object) -> str:
    """What a script prints that starts its processes by itself."""
    line = [sys.executable, f"examples/{script}/train.py", *map(str, arguments)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def falls(text: str) -> None:
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", text)]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.5, text


def reported(out: Path) -> None:
    written = [p.name for p in out.rglob("*")]
    assert any(n.endswith(".html") for n in written) and sum(n.endswith(".txt") for n in written) > 10, written


def test_it_trains(ranks: Ranks, tmp_path: Path) -> None:
    falls("".join(ranks.run(printed, "examples.parallel.train.main", "--tp", 2, "--steps", 10, "--out", tmp_path)))
    reported(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("processes", "how"), [(2, "--tp"), (2, "--ep"), (4, "--ep")])
def test_it_starts_its_processes(tmp_path: Path, processes: int, how: str) -> None:
    falls(command("parallel", how, 2, "--processes", processes, "--steps", 10, "--out", tmp_path))
    reported(tmp_path)


def split(out: Path) -> bool:
    """Whether backwards were in two parts."""
    return any("backward_weight" in p.name for p in out.rglob("*.txt"))


def test_a_pipeline_trains(four_ranks: Ranks, tmp_path: Path) -> None:
    falls(
        "".join(four_ranks.run(printed, "examples.pipeline.train.main", "--steps", 10, "--out", tmp_path, timeout=300))
    )
    assert split(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "1F1B"])
def test_a_pipeline_starts_its_processes(tmp_path: Path, schedule: str) -> None:
    falls(command("pipeline", "--schedule", schedule, "--steps", 10, "--out", tmp_path))
    assert split(tmp_path) == (schedule != "1F1B")
