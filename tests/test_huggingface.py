"""Safetensors in and out: what transformers writes is read, what we write transformers reads."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from examples.bench.bench import peak_of
from mfsdp.checkpoints.files import INDEX
from tests.helpers.largest import Largest
from tests.helpers.models import MLP, llama
from tests.helpers.parity import error, whole

MODELS = {"llama": llama, "tied": lambda: llama(tied=True)}


def differing(model: nn.Module, reference: nn.Module) -> list[str]:
    theirs = reference.state_dict()
    return [n for n, t in model.state_dict().items() if not torch.equal(whole(t) if hasattr(t, "full_tensor") else t,
            theirs[n])]  # fmt: skip


def there_and_back(name: str, folder: str, limit: int, strategy: int) -> dict[str, Any]:
    """transformers writes, we read; we write, transformers reads; logits are the same."""
    build = MODELS[name]
    torch.manual_seed(0)
    reference = build()
    ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
    if dist.get_rank() == 0:
        reference.save_pretrained(theirs, max_shard_size=limit)
    dist.barrier()
    torch.manual_seed(1)
    model = mfsdp.fully_shard(build(), units=["LlamaDecoderLayer"], strategy=strategy)
    ids = torch.randint(67, (1, 6))
    with torch.no_grad():
        model(ids)  # parameters that last have been gathered
    assert mfsdp.load_safetensors(model, theirs) == ([], [])
    read = differing(model, reference)
    with torch.no_grad():
        far = error(model(ids).logits, reference(ids).logits)
    mfsdp.save_safetensors(model, ours, max_file_bytes=limit)
    again = type(reference).from_pretrained(ours)
    assert isinstance(again, type(reference))
    files = {f.name for f in ours.iterdir()}
    return {"read": read, "logits": far, "written": differing(model, again), "files": files,
            "tied": again.lm_head.weight is again.get_input_embeddings().weight}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("limit", [10**9, 20_000])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_we_write_and_the_other_way_round(two_ranks, name, limit, tmp_path):
    for seen in two_ranks.run(there_and_back, name, str(tmp_path), limit, 1 if name == "llama" else 3):
        assert seen["read"] == seen["written"] == [] and seen["logits"] < 1e-6 and seen["tied"] == (name == "tied")
        names = {f for f in seen["files"] if f.endswith("safetensors")}
        assert (names == {"model.safetensors"}) == (limit == 10**9) and "config.json" in seen["files"]
        assert (INDEX in seen["files"]) == (limit != 10**9)


def peaks(folder: str) -> tuple[int, int, int, int]:
    """The most bytes that reading and writing have allocated; those of the model, and of the largest tensor."""
    model = mfsdp.fully_shard(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(32))), units=[nn.Linear])
    size = 128 * 128 * 4
    with Largest() as seen:  # gloo's threads free what a profiler does not see
        mfsdp.save_safetensors(model, folder, max_file_bytes=2 * size)
    written = seen.most
    read = peak_of(lambda: mfsdp.load_safetensors(model, folder))
    return written, read, 32 * size, size


@pytest.mark.dist
def test_nobody_holds_the_whole_model(two_ranks, tmp_path):
    for written, read, model, tensor in two_ranks.run(peaks, str(tmp_path)):
        assert written < model / 2 + 6 * tensor, "the shards, a file's two tensors, and what gathering one takes"
        assert read < 2 * tensor + 4096, "one file, mapped"


def saved(folder: Path, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    model = mfsdp.fully_shard(MLP(), units=["up"])
    mfsdp.save_safetensors(model, folder, **kwargs)
    return model


def test_one_file_other_names_and_dtypes(tmp_path):
    model = saved(tmp_path, dtype=torch.bfloat16)
    torch.manual_seed(1)
    other = MLP()
    mfsdp.load_safetensors(other, tmp_path / "model.safetensors")
    assert all(torch.equal(q, whole(p).bfloat16().float()) for p, q in zip(model.parameters(), other.parameters()))
    inner = nn.ModuleDict({"model": MLP()})
    missing, unexpected = mfsdp.load_safetensors(inner, tmp_path, rename=lambda n: f"model.{n}")
    assert missing == unexpected == [] and torch.equal(inner["model"].scale, other.scale)
    compiled = torch.compile(mfsdp.fully_shard(MLP()), backend="mfsdp")
    mfsdp.load_safetensors(compiled, tmp_path)
    assert torch.equal(whole(compiled.down.weight), other.down.weight)


def test_what_does_not_fit_is_named_and_nothing_is_read(tmp_path):
    saved(tmp_path)
    model = mfsdp.fully_shard(nn.ModuleDict({"up": nn.Linear(24, 37), "more": nn.Linear(2, 2)}))
    before = whole(model["up"].weight).clone()
    with pytest.raises(
        ValueError, match=r"missing in the files: more.weight, more.bias; not in the model: down.bias, down"
    ):
        mfsdp.load_safetensors(model, tmp_path)
    assert torch.equal(whole(model["up"].weight), before)
    missing, unexpected = mfsdp.load_safetensors(model, tmp_path, strict=False)
    assert missing == ["more.weight", "more.bias"] and "scale" in unexpected
    assert not torch.equal(whole(model["up"].weight), before)
    with pytest.raises(ValueError, match=r"shapes differ: scale is \[24\] in model.safetensors, \[10\] in the model"):
        mfsdp.load_safetensors(mfsdp.fully_shard(MLP(width=10)), tmp_path)


@pytest.mark.parametrize("harm", ["truncated", "missing", "index", "empty", "nowhere"])
def test_damaged_files_are_named(tmp_path, harm):
    saved(tmp_path, max_file_bytes=4000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    kind, match = ValueError, f"{files[1].name} is damaged"
    if harm == "truncated":
        files[1].write_bytes(files[1].read_bytes()[:-10])
    elif harm == "missing":
        files[1].unlink()
        kind, match = FileNotFoundError, f"{files[1].name} is missing"
    elif harm == "index":
        (tmp_path / INDEX).write_text("{")
        match = "index.json is damaged"
    elif harm == "empty":
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        kind, match = FileNotFoundError, "holds no .safetensors file"
    else:
        shutil.rmtree(tmp_path)
        kind, match = FileNotFoundError, "no file or folder"
    with pytest.raises(kind, match=match):
        mfsdp.load_safetensors(MLP(), tmp_path)


def test_writing_again_leaves_no_old_files(tmp_path):
    saved(tmp_path, max_file_bytes=4000)
    (tmp_path / "tokenizer.json").write_text("{}")
    saved(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {"model.safetensors", "tokenizer.json"}
    with open(tmp_path / "model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert header["__metadata__"] == {"format": "pt"}


def unwritable(folder: str) -> tuple[str, list[str]]:
    """Rank 0 cannot write: all ranks hear of it, and what was there still is."""
    model = mfsdp.fully_shard(MLP(), units=["up"])
    mfsdp.save_safetensors(model, folder)
    if dist.get_rank() == 0:
        import safetensors.torch

        original = safetensors.torch.save_file
        safetensors.torch.save_file = lambda *a, **k: (_ for _ in ()).throw(OSError("No space left on device"))
    try:
        mfsdp.save_safetensors(model, folder)
        text = "written"
    except OSError as refused:
        text = str(refused)
    finally:
        if dist.get_rank() == 0:
            safetensors.torch.save_file = original
    mfsdp.load_safetensors(model, folder)
    return text, sorted(f.name for f in Path(folder).iterdir())


@pytest.mark.dist
def test_a_full_disk_is_an_error_on_every_rank(two_ranks, tmp_path):
    (first, files), (second, _) = two_ranks.run(unwritable, str(tmp_path))
    assert "could not write" in first and "No space left" in first and "could not write" in second
    assert files == ["model.safetensors"]
