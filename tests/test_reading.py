"""What is read is data: nothing that a checkpoint or a folder of tensors says is run, no file elsewhere is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import mfsdp
from mfsdp.checkpoints import manifest as manifests
from mfsdp.checkpoints.reading import Planner, Reader

RUN: list[str] = []


def ran(what: str) -> str:
    RUN.append(what)
    return what


class Attack:
    """What a pickle of it does when it is read."""

    def __reduce__(self) -> Any:
        return ran, ("code of a checkpoint",)


def saved(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, mfsdp.Checkpoints, Path]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    checkpoints = mfsdp.Checkpoints(folder)
    return model, optimizer, checkpoints, checkpoints.save(1, model, optimizer)


def believed(path: Path) -> None:
    """Makes a manifest right again, as somebody would who has changed the files on purpose."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: manifests._summed(path / name) for name in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest))


def refused(checkpoints: mfsdp.Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why it is not loaded; the model is then as it was, and nothing has run."""
    RUN.clear()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((ValueError, mfsdp.CheckpointError)) as error:
        checkpoints.load(model, optimizer)
    assert not RUN and all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(error.value)


def test_metadata_that_asks_for_code(tmp_path):
    model, optimizer, checkpoints, path = saved(tmp_path)
    found = pickle.loads((path / ".metadata").read_bytes())
    found.planner_data = Attack()
    (path / ".metadata").write_bytes(pickle.dumps(found))
    believed(path)
    assert "asks for tests.test_reading.ran" in refused(checkpoints, model, optimizer)
    with pytest.raises((ValueError, mfsdp.CheckpointError), match="asks for"):
        mfsdp.convert(path, tmp_path / "out")
    assert not RUN and not (tmp_path / "out").exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert RUN, "torch's own reader would have run it"


@pytest.mark.parametrize("name", ["dataclass", "Sequence.__class__", "field"])
def test_what_the_modules_of_its_classes_import_is_not_theirs(tmp_path, name):
    content = b"\x80\x04" + b"\x8c" + bytes([len(b"torch.distributed.checkpoint.metadata")])
    content += b"torch.distributed.checkpoint.metadata" + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"asks for torch.distributed.checkpoint.metadata\."):
        Reader(tmp_path).read_metadata()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"text", pickle.dumps({"a": 1})])
def test_metadata_that_is_none(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        Reader(tmp_path).read_metadata()


def test_a_value_that_asks_for_code(tmp_path):
    *_, path = saved(tmp_path)
    state = {"model": {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, "lr": Attack()}
    for file in path.glob("*"):
        if file.name not in ("rank0.pt", "manifest.json"):
            file.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    state["lr"] = 1.0
    RUN.clear()
    with pytest.raises(dcp.CheckpointException, match="tests.test_reading.ran was not an allowed global"):
        dcp.load(state, storage_reader=Reader(path), planner=Planner(), no_dist=True)
    assert not RUN
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert RUN, "torch's own planner would have run it"


def test_values_that_are_data_arrive(tmp_path):
    kept = {"lr": 0.1, "betas": (0.9, 0.99), "names": ["a", None, True], "dtype": torch.bfloat16, "n": {"x": 3}}
    state = {"t": torch.arange(3.0), "k": kept}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    read: dict[str, Any] = {"t": torch.zeros(3), "k": {**dict.fromkeys(kept), "betas": (0, 0), "names": [0, 0, 0],
                                                      "n": {"x": 0}}}  # fmt: skip
    dcp.load(read, storage_reader=Reader(tmp_path), planner=Planner(), no_dist=True)
    assert read["k"] == kept and torch.equal(read["t"], state["t"])


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "C:\\x", "..\\x"])
def test_files_elsewhere(tmp_path, name):
    model, optimizer, checkpoints, path = saved(tmp_path / "run")
    found = pickle.loads((path / ".metadata").read_bytes())
    next(iter(found.storage_data.values())).relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(found))
    believed(path)
    assert "is not a file in the checkpoint's folder" in refused(checkpoints, model, optimizer)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "is not a file in the checkpoint's folder" in refused(checkpoints, model, optimizer)
    index = {"weight_map": {"w": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not a file in the checkpoint's folder"):
        mfsdp.load_safetensors(model, tmp_path)


def test_what_belongs_to_a_rank_is_data(tmp_path):
    model, optimizer, checkpoints, path = saved(tmp_path)
    with open(path / "rank0.pt", "wb") as file:
        torch.save({"more": {"x": Attack()}, "random": {}}, file)
    believed(path)
    RUN.clear()
    with pytest.raises(pickle.UnpicklingError, match="ran"):
        checkpoints.load(model, optimizer)
    assert not RUN


@pytest.mark.slow
def test_a_damaged_page_of_a_dump_is_text(tmp_path):
    """A name in a listing is shown, not run, by the report in a browser."""
    pytest.importorskip("bokeh")

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<img src=x onerror=alert(1)>", nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(self.children())(x)

    report = mfsdp.explain(Named(), (torch.ones(2, 4),), world=2, units=["*"])
    report.html(tmp_path / "page.html")
    assert "<img src=x" not in (tmp_path / "page.html").read_text()
