"""`mfsdp.convert` and its command line: checkpoints to safetensors and back, without a model."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import mfsdp
from examples.bench.bench import peak_of
from mfsdp.checkpoints import files
from mfsdp.checkpoints.files import INDEX
from mfsdp.cli import main as command
from tests.helpers.crashes import Run
from tests.helpers.models import MLP, llama
from tests.helpers.parity import whole


def saved(folder: str, seed: int, tied: bool = False) -> dict[str, torch.Tensor]:
    """A Llama in two ranks' checkpoint; its weights, whole."""
    torch.manual_seed(seed)
    model = mfsdp.fully_shard(llama(tied=tied), units=["LlamaDecoderLayer"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(67, (1, 6))).logits.sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    return {n: whole(t) for n, t in model.state_dict().items()}


def loaded(folder: str, tied: bool = False) -> dict[str, torch.Tensor]:
    model = mfsdp.fully_shard(llama(tied=tied), units=["LlamaDecoderLayer"], strategy=2)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return {n: whole(t) for n, t in state["model"].items()}


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.dist
@pytest.mark.parametrize("limit", [10**9, 20_000])
@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(two_ranks, tmp_path, capsys, tied, limit):
    weights = two_ranks.run(saved, str(tmp_path / "first"), 0, tied)[0]
    config = tmp_path / "config.json"
    config.write_text(llama(tied=tied).config.to_json_string())
    tie = ["--tied", "lm_head.weight=model.embed_tokens.weight"] if tied else []
    out = [str(tmp_path / "first"), str(tmp_path / "hf"), "--max-file-bytes", str(limit), "--config", str(config)]
    assert command.main(["convert", *out, *tie]) == 0
    there = {f.name for f in (tmp_path / "hf").iterdir()}
    assert (INDEX in there) == (limit == 20_000) and "config.json" in there
    shown = capsys.readouterr()
    assert f"{len(weights) - tied} tensors in" in shown.out and "100%" in shown.err
    model, found = type(llama()).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert same(model.state_dict(), weights) and not any(found.values()), found
    assert command.main(["convert", str(tmp_path / "hf"), str(tmp_path / "second"), *tie]) == 0
    for got in two_ranks.run(loaded, str(tmp_path / "second"), tied):
        assert same(got, weights)
    assert {p.name for p in tmp_path.iterdir()} == {"first", "second", "hf", "config.json"}


def test_names_and_dtypes(tmp_path):
    torch.manual_seed(0)
    model = MLP()
    model.register_buffer("count", torch.tensor(7))
    dcp.save({"net": model.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    args = ["--key", "net", "--rename", r"^=inner.", "--rename", "down=lower", "--dtype", "bfloat16"]
    assert command.main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), *args]) == 0
    other = nn.ModuleDict({"inner": MLP()})
    other["inner"].register_buffer("count", torch.tensor(0))
    mfsdp.load_safetensors(other, tmp_path / "b", rename=lambda n: n.replace("lower", "down"))
    got = other["inner"].state_dict()
    assert got["count"] == 7
    assert all(torch.equal(got[n], t.bfloat16().float()) for n, t in model.state_dict().items() if n != "count")
    seen: list[tuple[int, int]] = []
    args = {"key": "", "progress": lambda done, total: seen.append((done, total))}
    names = mfsdp.convert(tmp_path / "b" / "model.safetensors", tmp_path / "c", **args)
    assert "inner.lower.weight" in names and seen[-1][0] == seen[-1][1] > 0
    state = {n: torch.zeros_like(t) for n, t in other.state_dict().items() if "lower" not in n and "down" not in n}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert state["inner.up.weight"].dtype is torch.float32 and torch.equal(state["inner.up.weight"], got["up.weight"])


def test_the_newest_of_a_run_and_not_if_it_is_damaged(tmp_path):
    run, checkpoints = Run(0), mfsdp.Checkpoints(tmp_path / "run")
    for step in (3, 20):
        run.train(1)
        checkpoints.save(step, **run.parts)
    mfsdp.convert(tmp_path / "run", tmp_path / "a")
    other = Run(1)
    mfsdp.load_safetensors(other.model, tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(run.values(), other.values(), strict=True))
    file = checkpoints.path(20) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(mfsdp.CheckpointError, match=r"step-00000020 is damaged: __0_0.distcp has .* Nothing was"):
        mfsdp.convert(tmp_path / "run", tmp_path / "b")
    mfsdp.convert(checkpoints.path(3), tmp_path / "b")


def test_nobody_holds_the_model(tmp_path):
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(32)))
    size = 128 * 128 * 4
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert peak_of(lambda: mfsdp.convert(tmp_path / "a", tmp_path / "b", max_file_bytes=2 * size)) < 5 * size
    mfsdp.convert(tmp_path / "a", tmp_path / "one")
    # Whole files are mapped, and count as allocated; of a tensor there is a copy.
    assert peak_of(lambda: mfsdp.convert(tmp_path / "b", tmp_path / "c")) < 5 * size
    assert peak_of(lambda: mfsdp.convert(tmp_path / "one", tmp_path / "d")) < 34 * size


@pytest.mark.parametrize("to", ["safetensors", "checkpoint"])
def test_a_full_disk_leaves_nothing(tmp_path, to):
    dcp.save({"model": nn.Linear(64, 64).state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    mfsdp.convert(tmp_path / "a", tmp_path / "b")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(mfsdp.CheckpointError, match=r"could not convert .*(File too large|I/O error)"):
            mfsdp.convert(tmp_path / ("a" if to == "safetensors" else "b"), tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}
    mfsdp.convert(tmp_path / ("a" if to == "safetensors" else "b"), tmp_path / "c")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "c"], "there is no file or folder"),
        (["a", "b"], "there is something at"),
        (["a", "c", "--key", "net"], "no tensors under 'net' in .*there are model, optimizer"),
        (["a", "c", "--tied", "head=tokens"], "no tensor is called tokens; there are weight, bias"),
        (["a", "c", "--tied", "weight=weight"], "weight: tied to something, and to it"),
        (["a", ".", "--config", "a/.metadata"], "there is something at"),
        (["a", "link"], "there is something at link"),
        (["a", "c", "--rename", "(=x"], "unterminated subpattern"),
        (["a", "c", "--tied", "head"], "'head': write it as OLD=NEW"),
        (["a", "c", "--rename", ".*=same"], "rename gives two tensors one name"),
        (["a", "c", "--config", "nowhere.json"], "there is no file nowhere.json"),
        (["a", "c", "--max-file-bytes", "0"], "max_file_bytes=0 must be positive"),
    ],
)
def test_what_cannot_be_is_a_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 4)
    state = {"model": model.state_dict(), "optimizer": {"lr": 1.0}}
    dcp.save(state, checkpoint_id="a", no_dist=True)
    Path("b").mkdir()
    Path("b", "kept").write_text("")
    Path("link").symlink_to("nothing")
    assert command.main(["convert", *args]) == 1
    assert re.search(f"^mfsdp: .*{message}", capsys.readouterr().err, re.M)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "link"} and Path("b", "kept").exists()


def test_an_interrupt_is_an_interrupt(tmp_path):
    dcp.save({"model": nn.Linear(4, 4).state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    mfsdp.convert(tmp_path / "a", tmp_path / "b")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for source in ("a", "b"):
        with pytest.raises(KeyboardInterrupt):
            mfsdp.convert(tmp_path / source, tmp_path / "c", progress=interrupt)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}
    with pytest.raises(ValueError, match="dtype='bfloat16': give a torch.dtype"):
        mfsdp.convert(tmp_path / "a", tmp_path / "c", dtype="bfloat16")
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        mfsdp.convert(tmp_path / "nowhere", tmp_path / "c")


@pytest.mark.slow
def test_as_a_module_and_a_script(tmp_path):
    dcp.save({"model": nn.Linear(4, 4).state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    run = [sys.executable, "-m", "mfsdp", "convert", str(tmp_path / "a"), str(tmp_path / "b")]
    assert "2 tensors in" in subprocess.run(run, capture_output=True, text=True, check=True).stdout
    script = Path(sys.executable).with_name("mfsdp")
    help = subprocess.run([script, "convert", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--max-file-bytes" in help


def test_no_dtype(capsys):
    assert command.main(["convert", "x", "y", "--dtype", "blue"]) == 1
    assert "'blue' is no dtype for weights; choose float64" in capsys.readouterr().err


def of_fsdp2(folder: str) -> list[str]:
    """FSDP2 writes and reads safetensors through the same two functions; ours reads what it wrote."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return llama()

    def theirs(seed: int) -> nn.Module:
        model, mesh = build(seed), init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    reference, out = build(0).state_dict(), []
    mfsdp.save_safetensors(theirs(0), f"{folder}/fsdp2")
    ours = mfsdp.fully_shard(build(1), units=["LlamaDecoderLayer"])
    mfsdp.load_safetensors(ours, f"{folder}/fsdp2")
    out += [f"ours {n}" for n, t in ours.state_dict().items() if not torch.equal(whole(t), reference[n])]
    mfsdp.save_safetensors(ours, f"{folder}/ours")
    again = theirs(2)
    mfsdp.load_safetensors(again, f"{folder}/ours")
    out += [f"fsdp2 {n}" for n, t in again.state_dict().items() if not torch.equal(t.full_tensor(), reference[n])]
    plain = type(llama()).from_pretrained(f"{folder}/fsdp2")
    return out + [f"plain {n}" for n, t in plain.state_dict().items() if not torch.equal(t, reference[n])]


@pytest.mark.dist
def test_fsdp2_and_hugging_face(four_ranks, tmp_path):
    assert not any(four_ranks.run(of_fsdp2, str(tmp_path)))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "llama"


@pytest.fixture(scope="module")
def of_megatron_core(tmp_path_factory) -> Path:
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).parent / "helpers" / "megatron_core.py"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{free.getsockname()[1]}", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, folder], env={**os.environ, **address, "RANK": f"{rank}", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return folder


def gated(name: str) -> bool:
    return name.endswith(("linear_fc1.weight", "linear_fc1.bias"))


def on_one_rank(name: str, of_ranks: list[torch.Tensor]) -> torch.Tensor:
    """Megatron-Core's split of a weight over tensor parallel ranks, undone."""
    if gated(name):  # each rank has a part of both halves
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in of_ranks])
    if "linear_qkv" in name or "word_embeddings" in name or "output_layer" in name:
        return torch.cat(of_ranks)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat(of_ranks, dim=1)
    return of_ranks[0]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["stacked", "single"])
def test_megatron_core_torch_dist(of_megatron_core, tmp_path, capsys, kind):
    """Names and values are those of its model, however many layers share a tensor, whoever held which part."""
    states = [torch.load(of_megatron_core / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    weights = {n: on_one_rank(n, [s[n] for s in states]) for n, t in states[0].items() if isinstance(t, torch.Tensor)}
    source = of_megatron_core / kind
    norms = ["--rename", "self_attention.linear_qkv.layer_norm_=input_layernorm.",
             "--rename", "mlp.linear_fc1.layer_norm_=pre_mlp_layernorm."]  # fmt: skip
    assert command.main(["convert", str(source), str(tmp_path / "a"), "--max-file-bytes", "2000", *norms]) == 0
    assert f"{len(weights)} tensors in" in capsys.readouterr().out and len(weights) == 29
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
    assert same(read(tmp_path / "a"), weights)
    mfsdp.convert(source, tmp_path / "all")
    mfsdp.convert(source / "iter_0000007", tmp_path / "b", key="optimizer.state.exp_avg")
    moments = read(tmp_path / "b")
    assert same(moments, {n: 2 * t for n, t in read(tmp_path / "all").items()})
    (source / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(FileNotFoundError, match="iteration.txt names iter_0000008, which is not there"):
        mfsdp.convert(source, tmp_path / "c")
    (source / "latest_checkpointed_iteration.txt").write_text("../8")
    with pytest.raises(ValueError, match="holds '../8', not the number of an iteration"):
        mfsdp.convert(source, tmp_path / "c")
    (source / "latest_checkpointed_iteration.txt").write_text("7")


class Named(nn.Module):
    """A module with parameters of given names, zero."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at._modules[part]
            at.register_parameter(last, nn.Parameter(torch.zeros(shape)))


def renamed(name: str) -> str:
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def onto_shards(source: str, shapes: dict[str, torch.Size], flat: bool) -> dict[str, Any]:
    """What is in a model and its optimizer; what it says of those that do not fit, and that these are as they were."""
    from mfsdp.integrations.megatron_core import load_checkpoint

    model = mfsdp.fully_shard(Named(shapes), units=["decoder.layers.*"])
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if flat:
        optimizer = mfsdp.fully_shard_optimizer(optimizer)
    said = []
    odd = mfsdp.fully_shard(Named({**shapes, "odd.weight": torch.Size([3])}))
    wide = mfsdp.fully_shard(Named({**shapes, "output_layer.weight": torch.Size([17, 8])}))
    few = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for wrong, told in (
        (odd, {}),
        (wide, {"rename": renamed}),
        (odd, {"rename": renamed}),
        (model, {"optimizer": few, "rename": renamed}),
    ):
        with pytest.raises(ValueError) as caught:
            load_checkpoint(wrong, source, **told)
        said.append(str(caught.value))
        assert not few.state
        assert not any(p.full_tensor().any() for p in wrong.parameters())
    apart = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))])
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    for wrong in (optimizer, apart, torch.optim.SGD(model.parameters())):
        with pytest.raises(ValueError) as caught:
            load_checkpoint(model, source, wrong, rename=renamed)
        said.append(str(caught.value))
        model.zero_grad()
    extra = load_checkpoint(model, source, optimizer, rename=renamed)
    found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    state = {name: optimizer.state[p] for name, p in model.named_parameters()}
    kinds = {kind: {n: s[kind].full_tensor() for n, s in state.items()} for kind in ("exp_avg", "exp_avg_sq")}
    steps = {float(s["step"]) for s in state.values()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # state is where it steps
    moved = {n: s["exp_avg"].full_tensor() for n, s in state.items()}
    return {"found": found, **kinds, "steps": steps, "moved": moved, "extra": extra, "said": said}


class Counts(torch.optim.SGD):
    """Has state, and counts steps in numbers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state["step"], state["exp_avg"] = state.get("step", 0) + 1, torch.zeros_like(p)


@pytest.mark.dist
def test_megatron_core_into_one_process(of_megatron_core):
    """Unsharded; an optimizer that counts steps in numbers."""
    from mfsdp.integrations.megatron_core import load_checkpoint

    states = [torch.load(of_megatron_core / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    weights = {n: on_one_rank(n, [s[n] for s in states]) for n, t in states[0].items() if isinstance(t, torch.Tensor)}
    model = Named({name: t.shape for name, t in weights.items()})
    optimizer = Counts(model.parameters(), lr=0.1)
    load_checkpoint(model, of_megatron_core / "single" / "iter_0000007", optimizer, rename=renamed, step=5)
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name] + 1) and torch.equal(optimizer.state[p]["exp_avg"], 2 * weights[name])
        assert optimizer.state[p]["step"] == 5


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind, flat", [("stacked", False), ("single", True)])
def test_megatron_core_onto_shards(two_ranks, of_megatron_core, kind, flat):
    """Weights and moments, box by box, from checkpoints of two tensor parallel ranks; every rank has the same."""
    states = [torch.load(of_megatron_core / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    weights = {n: on_one_rank(n, [s[n] for s in states]) for n, t in states[0].items() if isinstance(t, torch.Tensor)}
    shapes = {name: t.shape for name, t in weights.items()}
    for got in two_ranks.run(onto_shards, str(of_megatron_core / kind), shapes, flat, timeout=200):
        assert same(got["found"], {n: t + 1 for n, t in weights.items()})
        assert same(got["exp_avg"], {n: 2 * t for n, t in weights.items()})
        assert same(got["exp_avg_sq"], {n: 3 * t for n, t in weights.items()})
        assert got["steps"] == {7.0} and got["extra"] == []
        assert all(torch.allclose(t, 1.8 * weights[n]) for n, t in got["moved"].items())
        assert "Give rename= if names differ" in got["said"][0]
        assert "output_layer.weight is [16, 8] there, [17, 8] here" in got["said"][1]
        assert "the model has odd.weight, which the checkpoint lacks" in got["said"][2]
        assert "max_exp_avg_sq of the optimizer has" in got["said"][3]
        assert "call zero_grad() first" in got["said"][4] and "are not the model's" in got["said"][5]
        assert "SGD keeps no state: leave optimizer out" in got["said"][6]


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {n: files.opened(e.file).get_tensor(e.name) for n, e in files.entries(folder).items()}


def test_megatron_core_fsdp_dtensor(tmp_path):
    """It writes a gated first layer in two, next to weights that may be called so for other reasons."""
    w, v, other = torch.rand(6, 4), torch.rand(6, 4), torch.rand(3, 4)
    layer = "module.decoder.layers.0.mlp."
    model = {
        f"{layer}experts.linear_fc1.weight3_w": w,
        f"{layer}experts.linear_fc1.weight3_v": v,
        f"{layer}linear_fc1.bias_w": w[:, 0].clone(),
        f"{layer}linear_fc1.bias_v": v[:, 0].clone(),
        f"{layer}linear_fc1.weight_w": w,  # half of nothing
        f"{layer}gate_w": other,
    }
    dcp.save({"model": model}, checkpoint_id=tmp_path / "a", no_dist=True)
    mfsdp.convert(tmp_path / "a", tmp_path / "b", rename=lambda name: name.removeprefix("module.decoder.layers.0.mlp."))
    bias = torch.cat([w[:, 0], v[:, 0]])
    expected = {"experts.linear_fc1.weight3": torch.cat([w, v]), "linear_fc1.bias": bias, "gate_w": other}
    assert same(read(tmp_path / "b"), expected | {"linear_fc1.weight_w": w})


def test_megatron_core_refusals(tmp_path):
    weights = {"decoder.layers.a": torch.rand(2, 3), "decoder.layers.b": torch.rand(3)}
    dcp.save(weights, checkpoint_id=tmp_path / "a", no_dist=True)
    config = tmp_path / "a" / "metadata.json"
    config.write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ValueError, match=r"decoder.layers.b of shape \[3\] is not one part for each of 2 layers"):
        mfsdp.convert(tmp_path / "a", tmp_path / "b")
    config.write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ValueError, match="in its format 'zarr', which is not read here; load it"):
        mfsdp.convert(tmp_path / "a", tmp_path / "b")
    config.write_text('["some other file"]')
    mfsdp.convert(tmp_path / "a", tmp_path / "b", key="")
    assert same(read(tmp_path / "b"), weights)
