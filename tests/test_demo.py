"""The demo, small: it trains, stops, and leaves what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.demo.data import Batches, corpus
from examples.demo.model import VOCABULARY, Config, Llama

ROOT = Path(__file__).parent.parent


def test_the_text_is_there_and_the_held_out_files_are_others(tmp_path):
    train, held = corpus()
    assert len(train) > 5e6 and 0.01 < len(held) / len(train) < 0.2
    for i in range(40):
        (tmp_path / f"m{i}.py").write_text(f"x = {i}\n")
    train, held = (bytes(t.tolist()).decode().split() for t in corpus(tmp_path))
    assert not set(train[2::3]) & set(held[2::3]) and len(train) + len(held) == 40 * 3


def test_targets_are_inputs_moved_by_one():
    text = torch.arange(200, dtype=torch.uint8)
    inputs, targets = Batches(text, 3, 16, seed=0).next()
    assert inputs.shape == targets.shape == (3, 16) and inputs.dtype is torch.int64
    assert (targets == inputs + 1).all()
    assert not torch.equal(inputs, Batches(text, 3, 16, seed=1).next()[0]), "ranks draw their own"


def test_the_model_is_causal_and_of_the_promised_size():
    torch.manual_seed(0)
    model = Llama(Config(layers=2, width=32))
    ids = torch.randint(VOCABULARY, (1, 12))
    other = ids.clone()
    other[0, 8:] = 0
    assert torch.allclose(model(ids)[0, :8], model(other)[0, :8], atol=1e-6)
    with torch.device("meta"):
        assert 4e6 < sum(p.numel() for p in Llama(Config()).parameters()) < 8e6


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_it_trains_on_two_processes(tmp_path, lowering):
    command = [sys.executable, "examples/demo/train.py", "--layers", "1", "--width", "32", "--batch", "2"]
    command += ["--steps", "6", "--lowering", lowering, "--out", str(tmp_path)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["processes"] == 2 and summary["steps"] == 6 and summary["lowering"] == lowering
    first, last = summary["validation"][0][1], summary["validation"][-1][1]
    assert last < first < 6
    assert (tmp_path / "loss.png").stat().st_size > 5000 and len((tmp_path / "sample.txt").read_text()) >= 20
    assert {"forward", "backward", "inference"} == {p.name.split(".")[1] for p in (tmp_path / "listings").iterdir()}
    assert "Memory of one rank" in out.stdout and "optimizer state" in out.stdout
