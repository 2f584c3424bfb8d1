"""Where a rank's tensors live, on machines with GPUs, of which torch is made to tell here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp.runtime import devices
from mfsdp.sharding.commit import device_of, move_buffers
from mfsdp.sharding.rollback import Rollback
from tests.conftest import TELLING

ROOT = Path(__file__).parent.parent


class Machine:
    """A process on a machine with GPUs: which one is current, and whether the process has chosen it."""

    def __init__(self, gpus: int = 4, current: int | None = None, uuids: str = "abcdefgh"):
        self.gpus, self.uuids = gpus, uuids
        self.current, self.used = current or 0, current is not None

    def choose(self, index: int) -> None:
        assert 0 <= index < self.gpus
        self.current, self.used = index, True

    def look(self) -> int:
        self.used = True
        return self.current

    def __enter__(self) -> Machine:
        module = SimpleNamespace(
            is_initialized=lambda: self.used,
            get_device_properties=lambda device: SimpleNamespace(uuid=self.uuids[device.index]),
        )
        self.patches = [
            mock.patch.object(torch.accelerator, "is_available", lambda: True),
            mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
            mock.patch.object(torch.accelerator, "device_count", lambda: self.gpus),
            mock.patch.object(torch.accelerator, "current_device_index", self.look),
            mock.patch.object(torch.accelerator, "set_device_index", self.choose),
            mock.patch.object(torch, "get_device_module", lambda device: module),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in self.patches:
            patch.stop()


@pytest.mark.parametrize(
    ("local_rank", "machine", "index"),
    [
        ("2", Machine(), 2),  # torchrun, and nobody has called set_device
        ("2", Machine(current=1), 1),  # somebody has
        (None, Machine(), 0),  # no launcher
        ("2", Machine(gpus=1), 0),  # every rank sees one GPU, its own
    ],
)
@pytest.mark.parametrize("asked", [None, "cuda"])
def test_the_device_is_that_of_the_rank(monkeypatch, local_rank, machine, index, asked):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    machine = Machine(machine.gpus, machine.current if machine.used else None)
    with machine:
        assert device_of([], asked) == torch.device("cuda", index)
        assert machine.current == index, "and the current one, for what the user makes on 'cuda'"


def test_a_device_that_was_asked_for_is_taken():
    with Machine() as machine:
        for asked in ("cuda:3", "cpu", "meta"):
            assert device_of([], asked) == torch.device(asked)
        assert not machine.used, "a plan on the meta device begins to use no GPU"
    assert device_of([], None) == torch.device("cpu"), "no accelerator here"


def bound() -> list[str]:
    """What a group that was made for a device says goes before `LOCAL_RANK`; a device that was chosen stays current."""
    group, out = dist.group.WORLD, []
    os.environ["LOCAL_RANK"] = "1"
    group.bound_device_id = torch.device("cuda", 3)
    try:
        for machine in (Machine(), Machine(current=2)):
            with machine:
                out.append(f"{devices.home()} {machine.current}")
    finally:
        group.bound_device_id = None
        del os.environ["LOCAL_RANK"]
    return out


@pytest.mark.dist
def test_the_device_that_the_group_is_bound_to(one_rank):
    assert one_rank.run(bound) == [["cuda:3 3", "cuda:3 2"]]


def crowded(uuids: list[str], backends: str, key: str) -> str:
    """Each rank's GPU 0 is the one of that number."""
    devices._claim.cache_clear()
    with Machine(gpus=1, current=0, uuids=uuids[dist.get_rank()]) as machine:
        machine.uuids = [key + machine.uuids]
        with mock.patch.object(dist, "get_backend_config", lambda group=None: backends):
            try:
                for _ in range(2):
                    mfsdp.fully_shard(nn.Linear(2, 2), device=None, mesh=4)
            except ValueError as error:
                return str(error)
    raise AssertionError


@pytest.mark.dist
def test_two_ranks_on_one_gpu_are_told_how_to_part(two_ranks):
    texts = sorted(two_ranks.run(crowded, ["a", "a"], "cuda:nccl", "x"))
    assert "mesh=4" in texts[1], "who came first goes on"
    assert "same device, cuda:0 here" in texts[0] and "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))" in texts[0]
    for uuids, backends in ((["a", "b"], "cuda:nccl"), (["a", "a"], "cpu:gloo,cuda:gloo")):
        assert all("mesh=4" in text for text in two_ranks.run(crowded, uuids, backends, backends))


def taken(backends: str) -> str:
    with Machine(current=1), mock.patch.object(dist, "get_backend_config", lambda group=None: backends):
        return str(devices.collective_device(dist.group.WORLD.group_name))


@pytest.mark.dist
def test_collectives_get_tensors_that_their_group_takes(one_rank):
    """A group made by a bare `init_process_group()` on a machine with a GPU: its backend is called "undefined"."""
    places = {"cuda:nccl": "cuda:1", "cpu:gloo,cuda:nccl": "cpu", "cpu:gloo": "cpu"}
    assert [one_rank.run(taken, backends) for backends in places] == [[place] for place in places.values()]


@pytest.mark.parametrize(
    ("torch_says", "failing", "status"),
    [("echo True", 0, 0), ("echo True", 1, 2), ("echo False", 1, 0), ("exit 1", 0, 2)],
)
def test_make_gpu_fails_when_a_test_does(tmp_path, torch_says, failing, status):
    """`make gpu` with a Python whose torch has a GPU, has none, or cannot be imported; tests fail or not."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *pytest*) echo tested; exit {failing};; *) {torch_says};; esac\n')
    fake.chmod(0o755)
    command = ["make", "--no-print-directory", "--assume-old", ".venv/.test", "gpu", f"BIN={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("tested" in done.stdout) == ("True" in torch_says)
    assert ("nothing was run" in done.stdout) == ("False" in torch_says)


BARE = """
import builtins, importlib.util, sys
absent = "accelerate hypothesis lightning matplotlib megatron peft safetensors torchao transformers trl xdist".split()
imports, finds = builtins.__import__, importlib.util.find_spec
def imported(name, *args, **kwargs):
    if name.partition(".")[0] in absent and name not in sys.modules:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return imports(name, *args, **kwargs)
def found(name, *args, **kwargs):
    return None if name.partition(".")[0] in absent else finds(name, *args, **kwargs)
builtins.__import__, importlib.util.find_spec = imported, found
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only"]))
"""


@pytest.mark.slow
def test_make_gpu_needs_torch_and_pytest_only():
    """It finds its tests on a machine as it is (SYSTEM=1), the most telling first."""
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, env=bare, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    files = list(dict.fromkeys(re.findall(r"^tests/(\w+)\.py::", done.stdout, re.MULTILINE)))
    assert files == [name for name in TELLING if name in files] and {"test_gpu", "test_nccl"} <= {*files}


def test_variables_that_keep_communication_from_overlapping_are_named(monkeypatch):
    devices.told_of_environment.cache_clear()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    with pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1 is set: kernels of several streams"):
        assert devices.told_of_environment("cuda") == ["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert not devices.told_of_environment("cpu")


@pytest.mark.slow
def test_a_run_leaves_a_record(tmp_path):
    """What `make gpu` keeps: every outcome, and why a test was skipped."""
    chosen = [
        "tests/test_layout.py::test_the_check_catches_broken_layouts",
        "tests/test_gpu.py::test_memory_stops_growing",
    ]
    command = [sys.executable, "-m", "pytest", "-q", *chosen, "--record", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    record = json.loads((tmp_path / "record.json").read_text())
    outcomes = {name.split("::")[1].split("[")[0]: test["outcome"] for name, test in record["tests"].items()}
    assert outcomes["test_memory_stops_growing"] == ("passed" if torch.cuda.is_available() else "skipped")
    assert record["torch"] == torch.__version__ and "test_memory_stops_growing" in (tmp_path / "record.txt").read_text()


def test_buffers_go_where_parameters_go():
    """Tied ones once, and back if something fails."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Module())
    table = torch.arange(3.0)
    for module in model:
        module.register_buffer("table", table)
    before = [dict(m._buffers) for m in model]
    undo = Rollback(True, False)
    move_buffers(model, torch.device("meta"), undo)
    assert all(b.is_meta for b in model.buffers()) and model[0].table is model[1].table
    for step in reversed(undo.steps):
        step()
    assert all(m._buffers[n] is b for m, kept in zip(model, before, strict=True) for n, b in kept.items())
    move_buffers(model, torch.device("cpu"), undo := Rollback(True, False))
    assert not undo.steps, "what is there already stays"
