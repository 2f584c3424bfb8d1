"""transformers' ``from_pretrained(distributed_config=...)``: what is read, trained, saved, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from tests.helpers.models import llama, mixtral
from tests.helpers.parity import averaged, error, whole
from tests.helpers.ranks import Ranks
from tests.helpers.trainers import environment, fresh_logits, logged, trainer

EAGER = {"lowering": "eager"}

MODELS = {"llama": llama, "tied": lambda: llama(tied=True), "mixtral": mixtral}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    found = Ranks(4, start="forkserver")
    yield found
    found.stop()


def saved(folder: Path, kind: str) -> str:
    """A model's files, in the layout that the Hub has, and their folder."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder / kind)  # type: ignore[operator]
    return str(folder / kind)


def sharded(folder: str, config: Any = None, kind: str = "AutoModelForCausalLM", **more: Any) -> Any:
    """What ``from_pretrained`` gives, and whether others than transformers' own configuration are needed for it."""
    import transformers

    from mfsdp.integrations.transformers import ShardingConfig

    config = {"fsdp_size": dist.get_world_size(), "options": EAGER, **(config or {})}
    with environment():
        found = getattr(transformers, kind).from_pretrained(folder, distributed_config=ShardingConfig(**config), **more)
    assert isinstance(found, mfsdp.FSDPModule)
    return found


def unsharded(folder: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **more)


def differ(model: nn.Module, reference: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not the reference's, bit by bit."""
    theirs = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    return [n for n, t in ours.items() if not torch.equal(getattr(t, "full_tensor", lambda t=t: t)(), theirs[n])]


def loaded_and_trained(folder: str, config: dict[str, Any], tp: int = 1) -> dict[str, Any]:
    """What was read and what is other than in the unsharded model, before and after training; saved by its method."""
    import mfsdp.integrations.transformers as ours

    read, own = [0], ours._read

    def counted(*args: Any) -> torch.Tensor:
        found = own(*args)
        read[0] += found.numel()
        return found

    ours._read = counted
    try:
        model = sharded(folder, config)
    finally:
        ours._read = own
    torch._dynamo.utils.counters.clear()
    reference = unsharded(folder)
    out: dict[str, Any] = {"differ": differ(model, reference), "units": units(model), "read": read[0]}
    out["numel"] = sum(p.numel() for p in reference.parameters())
    assert not model.training
    ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank() // tp))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for _ in range(2):
        losses = [m.train()(input_ids=ids, labels=ids, use_cache=False).loss for m in (model, reference)]
        torch.stack(losses).sum().backward()
        averaged(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        out["loss"] = error(*losses)
    out["breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
    theirs = dict(reference.named_parameters())
    out["trained"] = max(error(whole(p.detach()), theirs[n].detach()) for n, p in model.named_parameters())
    model.save_pretrained(folder + "-trained")
    with torch.no_grad():
        out["logits"] = reference.eval()(torch.arange(12)[None]).logits
    return out


def units(model: nn.Module) -> list[str]:
    return sorted({m._mfsdp_unit.fqn for m in model.modules() if isinstance(m, mfsdp.FSDPModule)})


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["tied", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("mixtral", "llama"))]
)
def test_every_rank_reads_its_rows_and_trains_them(ranks, tmp_path, kind):
    folder = saved(tmp_path, kind)
    found = ranks.run(loaded_and_trained, folder, {}, timeout=200)
    for seen in found:
        assert not seen["differ"] and seen["loss"] < 1e-5 and seen["trained"] < 1e-4, seen
        assert seen["breaks"] == {}
        assert "model.layers.0" in seen["units"] and "model.layers.1" in seen["units"]
    read, numel = sum(seen["read"] for seen in found), found[0]["numel"]
    assert read == numel if kind != "mixtral" else numel <= read < 1.3 * numel  # an expert may be cut in two
    assert all(seen["read"] < 0.7 * numel for seen in found)
    assert (fresh_logits(folder + "-trained") - found[0]["logits"]).abs().max() < 1e-3


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "tp"),
    [
        pytest.param("mixtral", {"fsdp_size": 2, "dp_replicate_size": 2}, 1, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", {"fsdp_size": 2, "ep_size": 2}, 1, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", {"fsdp_size": 4, "ep_size": 2}, 1, marks=pytest.mark.exhaustive),
        ("llama", {"fsdp_size": 2, "tp_size": 2}, 2),
        pytest.param("llama", {"sharding": {"strategy": "optim_grads"}}, 1, marks=pytest.mark.exhaustive),
    ],
    ids=["replicas", "experts", "experts on four", "tensor", "strategy 2"],
)
def test_other_meshes(request, tmp_path, kind, config, tp):
    ranks = request.getfixturevalue("ranks" if config == {"fsdp_size": 2, "ep_size": 2} else "four")
    for seen in ranks.run(loaded_and_trained, saved(tmp_path, kind), config, tp, timeout=300):
        assert not seen["differ"] and seen["loss"] < 1e-5 and seen["trained"] < 1e-3, seen


def what_files_lack(folder: str) -> dict[str, Any]:
    """A classifier's head, which a language model's files have not; a vocabulary of another size; bf16."""
    torch.manual_seed(dist.get_rank())
    out: dict[str, Any] = {}
    model = sharded(folder, kind="AutoModelForSequenceClassification", num_labels=3)
    reference = dict(unsharded(folder).named_parameters())
    ours = dict(model.named_parameters())
    out["differ"] = [n for n in ours.keys() & reference.keys() if not torch.equal(whole(ours[n]), reference[n])]
    head = whole(ours["score.weight"].detach())
    out["alike"] = averaged_equals(head)
    out["deviation"] = float(head.std()) / model.config.initializer_range
    out["buffers"] = all(bool(b.isfinite().all()) and not b.is_meta for b in model.buffers())
    resized = sharded(folder, vocab_size=70, ignore_mismatched_sizes=True)
    out["resized"] = [n for n, p in resized.named_parameters() if tuple(p.shape)[:1] == (70,)]
    out["resized values"] = all(bool(whole(p.detach()).isfinite().all()) for p in resized.parameters())
    try:
        sharded(folder, vocab_size=70)
    except RuntimeError as refused:
        out["refused"] = str(refused)
    narrow = sharded(folder, dtype=torch.bfloat16)
    out["bf16"] = differ(narrow, unsharded(folder, dtype=torch.bfloat16))
    mixed = sharded(folder, {"fsdp_mixed_precision": True})
    ids = torch.arange(8)[None]
    out["mixed"] = next(mixed.parameters()).dtype, mixed(input_ids=ids, use_cache=False).logits.dtype
    return out


def averaged_equals(tensor: torch.Tensor) -> bool:
    mean = tensor.clone()
    dist.all_reduce(mean)
    return torch.equal(mean / dist.get_world_size(), tensor)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_files_lack_is_initialised(ranks, tmp_path):
    for seen in ranks.run(what_files_lack, saved(tmp_path, "llama"), timeout=200):
        assert seen["differ"] == [] and seen["alike"] and 0.5 < seen["deviation"] < 2 and seen["buffers"]
        assert seen["resized"] == ["model.embed_tokens.weight", "lm_head.weight"] and seen["resized values"]
        assert "size" in seen["refused"]
        assert seen["bf16"] == [] and seen["mixed"] == (torch.float32, torch.bfloat16)


def refusals(folder: str) -> list[str]:
    from transformers.distributed import DistributedConfig

    from mfsdp.integrations.transformers import ShardingConfig

    said = []

    def tried(call: Any, *kinds: type[Exception]) -> None:
        with pytest.raises(kinds) as refused:
            call()
        said.append(f"{type(refused.value).__name__}: {refused.value}")

    tried(lambda: ShardingConfig(fsdp_size=2, options={"prefech": 2}), ValueError)
    tried(lambda: ShardingConfig(fsdp_size=2, sharding={"units": ["*"]}), ValueError)
    tried(lambda: sharded(folder, {"fsdp_cpu_offload": True}), NotImplementedError)
    tried(lambda: sharded(folder, {"sharding": {"strategy": 7}}), ValueError)
    tried(lambda: sharded(folder), ValueError)  # files have both of what is tied
    with environment(MFSDP_SHARDING='{"mesh": 1}'):
        tried(lambda: DistributedConfig(fsdp_size=2) and sharded(folder), ValueError)
    return said


@pytest.mark.dist
@pytest.mark.slow
def test_refusals(ranks, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "tied")
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    wanted = ["prefech", "fsdp_plan", "offload", "strategy", "tie_word_embeddings=False", "mesh"]
    for said in ranks.run(refusals, folder):
        assert len(said) == len(wanted) and all(w in s for w, s in zip(wanted, said)), said


def by_trainer(folder: str) -> dict[str, Any]:
    """By Trainer, under DDP and on shards, where Accelerate's configuration is told of us too."""
    import mfsdp.integrations.accelerate  # noqa: F401

    with environment():
        ddp = trainer(folder + "-ddp", unsharded(folder), save_strategy="no")
        ddp.train()
    model = sharded(folder)
    with environment(MFSDP_OPTIONS=json.dumps(EAGER)):
        ours = trainer(folder + "-ours", model, save_only_model=True)
        ours.train()
        ours.save_model(folder + "-saved")
    assert ours.model is model
    names = ("loss", "grad_norm")
    with torch.no_grad():
        logits = ddp.model.eval()(torch.arange(12)[None]).logits
    return {"ours": logged(ours, *names), "ddp": logged(ddp, *names), "logits": logits}


@pytest.mark.dist
@pytest.mark.exhaustive  # Trainer on shards: test_accelerate
def test_trainer(ranks, tmp_path):
    folder = saved(tmp_path, "llama")
    seen = ranks.run(by_trainer, folder, timeout=200)[0]
    assert len(seen["ours"]) == 6 and seen["ours"] == pytest.approx(seen["ddp"], rel=1e-4)
    assert (fresh_logits(folder + "-saved") - seen["logits"]).abs().max() < 1e-3
