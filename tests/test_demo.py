"""The demo, small: it trains, stops, and leaves what it promises."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.run
import torch.nn.functional as F
import transformers

import mfsdp
from examples.demo.data import Batches, corpus
from examples.demo.model import VOCABULARY, Config, Llama
from tests.helpers.scripts import printed

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
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


def test_a_smoothed_curve_does_not_lag(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    train = importlib.import_module("examples.demo.train")
    line = [(step, 3.0 - 0.01 * step) for step in range(1, 101)]
    assert train.smooth(line) == [(step, pytest.approx(loss)) for step, loss in line]
    noisy = [(step, loss + 0.5 * (-1) ** step) for step, loss in line]
    assert max(abs(a - b) for (_, a), (_, b) in zip(train.smooth(noisy)[20:80], line[20:80], strict=True)) < 0.02


def command(out: Path, lowering: str, steps: int, *more: str) -> list[str]:
    line = [sys.executable, "examples/demo/train.py", "--layers", "1", "--width", "32", "--batch", "2"]
    return [*line, "--steps", str(steps), "--lowering", lowering, "--out", str(out), *more]


ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}


def run(out: Path, *args: Any) -> str:
    done = subprocess.run(command(out, *args), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def on_ranks(out: Path) -> str:
    sys.path.insert(0, str(ROOT / "examples" / "demo"))  # as where its command is given
    try:
        return printed("examples.demo.train.main", *command(out, "eager", 6)[2:])
    finally:
        sys.path.pop(0)


def test_its_command_starts_two_processes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    train = importlib.import_module("examples.demo.train")
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "6", "--processes", "2"])
    with mock.patch.object(subprocess, "call", return_value=3) as call:
        assert train.launch(train.arguments()) == 3
    (line,) = call.call_args.args
    given = torch.distributed.run.parse_args(line[3:])
    assert line[:3] == [sys.executable, "-m", "torch.distributed.run"] and given.nproc_per_node == "2"
    assert Path(given.training_script).samefile(ROOT / "examples" / "demo" / "train.py")
    assert given.training_script_args == sys.argv[1:]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "lowering", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
)
def test_it_trains_on_two_processes(tmp_path, two_fresh_ranks, lowering):
    """Those of tests, or by its command."""
    eager = lowering == "eager"
    out = two_fresh_ranks.run(on_ranks, tmp_path)[0] if eager else run(tmp_path, lowering, 6, "--processes", "2")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["processes"] == 2 and summary["steps"] == 6 and summary["lowering"] == lowering
    first, last = summary["validation"][0][1], summary["validation"][-1][1]
    assert last < first < 6
    assert (tmp_path / "loss.png").stat().st_size > 5000 and len((tmp_path / "sample.txt").read_text()) >= 20
    phases = {"forward", "backward", "inference"}
    assert phases == {p.name.split(".")[1] for p in (tmp_path / "listings").glob("*.txt")}
    assert list((tmp_path / "listings").glob("*.report.html"))
    assert "Memory of one rank" in out and "optimizer state" in out
    assert "Measured here, on 2 cpu processes: 6 steps" in out, "what was measured and what was estimated are apart"
    path = Path(out.split("with times estimated for an H100, not for this machine: ")[1].split("\n")[0])
    assert path.is_file() and list(path.parent.glob(f"{path.name.split('.')[0]}.backward*"))
    assert "are estimates for another machine, H100 SXM" in path.read_text()
    assert abs(loss_in_transformers(tmp_path / "huggingface") - last) < 1e-4


def loss_in_transformers(folder: Path) -> float:
    """Of what was exported, on what the demo validates with last."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    loss = 0.0
    for rank in range(2):
        held = Batches(corpus()[1], 2, model.config.max_position_embeddings, seed=10_000 + rank)
        for _ in range(16):
            ids, targets = held.next()
            with torch.no_grad():
                loss += F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten()).item() / 32
    return loss


@pytest.mark.dist
@pytest.mark.exhaustive
def test_killed_and_resumed_it_ends_with_the_same_bits_and_transformers_reads_them(tmp_path):
    run(tmp_path / "unstopped", "eager", 40)
    stopped = tmp_path / "stopped"
    kept = mfsdp.Checkpoints(stopped / "checkpoints")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    # Not by torchrun, whose processes would survive it.
    victims = [subprocess.Popen(command(stopped, "eager", 40), cwd=ROOT, stderr=subprocess.DEVNULL,
                                env={**ENVIRONMENT, **place, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"})
               for rank in "01"]  # fmt: skip
    while all(v.poll() is None for v in victims) and not [step for step in kept.steps() if step >= 8]:
        time.sleep(0.01)
    for victim in victims:
        victim.kill()
        victim.wait()
    assert kept.steps() and not (stopped / "summary.json").exists(), "killed too early, or too late"
    newest = kept.steps()[-1]
    assert f"going on from step {newest}" in run(stopped, "eager", 40, "--resume")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("unstopped", "stopped")]
    assert summaries[0]["validation"] == summaries[1]["validation"] and summaries[1]["steps"] == 40
    files = [(tmp_path / name / "huggingface" / "model.safetensors").read_bytes() for name in ("unstopped", "stopped")]
    assert files[0] == files[1]
    assert abs(loss_in_transformers(stopped / "huggingface") - summaries[1]["validation"][-1][1]) < 1e-4
