"""``torchrun --max-restarts``: a rank that is killed costs the steps since the last checkpoint, and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mfsdp
from tests.helpers.ranks import Ranks
from tests.helpers.scripts import printed

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def torchrun(out: Path, port: int, ranks: int, nodes: str = "1", steps: int = 40) -> subprocess.Popen[str]:
    """An agent, and its processes."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "elastic"]
    patience = ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"]
    script = ["examples/elastic/train.py", "--out", out, "--steps", f"{steps}", "--every", "2", "--lowering", "eager"]
    numbers = ["--nnodes", nodes, "--nproc-per-node", f"{ranks}", "--max-restarts", "3", "--monitor-interval", "0.1"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *place, *patience, *numbers, *script], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
             "PYTHONPATH": f"{ROOT / 'src'}"},
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def workers(agent: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def until(out: Path, step: int, agent: subprocess.Popen[str]) -> None:
    """Waits for a checkpoint of that step, or a later one."""
    limit = time.monotonic() + 90
    while [s for s in mfsdp.Checkpoints(out).steps() if s >= step] == []:
        assert agent.poll() is None and time.monotonic() < limit, agent.communicate()[0]
        time.sleep(0.01)


def losses_of(text: str) -> dict[int, float]:
    """By step: the last said of each."""
    lines: Any = (json.loads(line) for line in re.findall(r'{"step[^}]*}', text))
    return {line["step"]: line["loss"] for line in lines}


def ended(agent: subprocess.Popen[str]) -> tuple[str, dict[int, float]]:
    """What it printed, and losses by step."""
    text = agent.communicate(timeout=150)[0]
    assert agent.returncode == 0, text
    return text, losses_of(text)


@pytest.fixture
def unstopped(two_fresh_ranks: Ranks, tmp_path: Path) -> dict[int, float]:
    arguments = ("--out", tmp_path / "unstopped", "--steps", 40, "--every", 2, "--lowering", "eager")
    found = losses_of(two_fresh_ranks.run(printed, "examples.elastic.train.main", *arguments)[0])
    two_fresh_ranks.stop()
    assert len(found) == 20
    return found


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_is_started_anew_with_the_others(tmp_path, unstopped, victim):
    out = tmp_path / "out"
    agent = torchrun(out, free_port(), 2)
    until(out, 6, agent)
    os.kill(workers(agent)[victim], signal.SIGKILL)
    text, losses = ended(agent)
    begun = [int(step) for step in re.findall(r"2 ranks, from step (\d+)", text)]
    assert len(begun) == 2 and begun[0] == 0 and begun[1] >= 6, text
    assert losses == unstopped, "the same bits"


@pytest.mark.exhaustive
def test_a_node_that_is_killed_is_done_without(tmp_path, unstopped):
    port = free_port()
    out = tmp_path / "out"
    agent = torchrun(out, port, 1, "1:2")
    time.sleep(1)
    other = torchrun(out, port, 1, "1:2")
    until(out, 6, agent)
    for pid in [other.pid, *workers(other)]:
        os.kill(pid, signal.SIGKILL)
    text, losses = ended(agent)
    assert "2 ranks, from step 0" in text + (other.stdout.read() if other.stdout else "")
    begun = re.findall(r"1 ranks, from step (\d+)", text)
    assert len(begun) == 1 and int(begun[0]) >= 6, text
    assert losses == pytest.approx(unstopped, rel=1e-4)
