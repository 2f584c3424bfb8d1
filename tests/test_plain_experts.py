"""Experts in plain tensors, marked ``allreduce=False`` as in Megatron-LM: other ranks have others of the same name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from examples.parallel.model import Mixtral, MixtureLayer
from tests.helpers.experts import CutExperts, laid_out, meshes, plain_experts
from tests.helpers.parallel import graphs, next_token, reset, tokens, trained_alike, twin
from tests.helpers.parity import compiled
from tests.helpers.snapshots import snapshot

pytestmark = pytest.mark.dist


def sharded(kind: str, ranks: int = 2, strategy: int = 3, said: str = "mesh") -> tuple[Any, Any]:
    """The unsharded model, and the sharded one; its experts over an axis of the mesh, or over groups alone."""
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    dense, sparse = meshes(ranks)
    reference, model = twin(lambda: Mixtral(layers=1))
    for m in (reference, model):
        laid_out(m, kind, ranks)
    of_experts = sparse["efsdp"] if said == "mesh" else DeviceMesh.from_group(sparse["efsdp"].get_group(), "cpu")
    for experts in plain_experts(model, sparse["ep"]):
        if said == "group":
            for module in experts.modules():
                module.ep_group = sparse["ep"].get_group()
        mfsdp.fully_shard(experts, mesh=of_experts, strategy=strategy)
    mfsdp.fully_shard(model, mesh=dense, units=[MixtureLayer], strategy=strategy)
    return reference, model


def parity(kind: str, lowering: str, ranks: int, strategy: int, said: str) -> Any:
    reference, model = sharded(kind, ranks, strategy, said)
    every = [tokens(r) for r in range(dist.get_world_size())]
    wrong = trained_alike(model, compiled(model, lowering), reference, every[dist.get_rank()], every)
    ours = {n: p.shape for n, p in model.named_parameters()}
    assert ours == {n: p.shape for n, p in reference.named_parameters()}
    mfsdp.check_replicas(model)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize(
    ("kind", "lowering", "ranks", "strategy", "said"),
    [
        ("stacked", "none", 2, 2, "mesh"),
        ("listed", "eager", 2, 3, "mesh"),
        ("listed", "none", 4, 3, "group"),
        ("grouped", "none", 2, 1, "group"),
    ],
)
def test_parity(four_ranks, kind, lowering, ranks, strategy, said):
    for wrong, where, made in four_ranks.run(parity, kind, lowering, ranks, strategy, said, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


def resumed(kind: str, said: str, folder: str) -> None:
    """A step, saved; weights and optimizer state are loaded bit for bit, into a model of other values too."""
    reference, model = sharded(kind, said=said)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = tokens(dist.get_rank())

    def step() -> None:
        next_token(model, ids).backward()
        optim.step()
        optim.zero_grad()

    step()
    state = get_state_dict(model, optim)
    dcp.save({"model": state[0], "optim": state[1]}, checkpoint_id=folder)
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    moment = "exp_avg"
    wholes = {n: (p.full_tensor().clone(), optim.state[p][moment].full_tensor().clone()) for n, p in weights(model)}
    mine = [(p.to_local().clone(), optim.state[p][moment].to_local().clone()) for _, p in weights(model)]
    step()
    state = get_state_dict(model, optim)
    dcp.load({"model": state[0], "optim": state[1]}, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=state[0], optim_state_dict=state[1])
    for (_, p), (value, average) in zip(weights(model), mine, strict=True):
        assert torch.equal(p.to_local(), value) and torch.equal(optim.state[p][moment].to_local(), average)
    read = {n: torch.zeros_like(p.data) for n, p in reference.named_parameters()}
    dcp.load({"model": read}, checkpoint_id=folder)  # by one process, into the unsharded model
    for n, p in reference.named_parameters():
        assert entries[f"model.{n}"].size == p.shape == wholes[n][1].shape
        assert torch.equal(read[n], wholes[n][0]) and not torch.equal(read[n], p)


def weights(model: Any) -> list[tuple[str, Any]]:
    return list(model.named_parameters())


@pytest.mark.parametrize(("kind", "said"), [("listed", "group"), ("grouped", "mesh")])
def test_checkpoints(four_ranks, tmp_path, kind, said):
    four_ranks.run(resumed, kind, said, str(tmp_path))


def moved(kind: str, folder: str) -> None:
    """Saved over two expert ranks, loaded over four."""
    _, model = sharded(kind)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    was = {n: p.full_tensor() for n, p in weights(model)}
    _, other = sharded(kind, ranks=4)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    if kind == "stacked":
        dcp.load({"model": other.state_dict()}, checkpoint_id=folder)
        assert all(torch.equal(p.full_tensor(), was[n]) for n, p in weights(other))
    else:  # the n-th of a rank's experts is another one
        with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
            dcp.load({"model": other.state_dict()}, checkpoint_id=folder)


@pytest.mark.parametrize("kind", ["stacked", "listed"])
def test_checkpoints_on_another_number_of_expert_ranks(four_ranks, tmp_path, kind):
    four_ranks.run(moved, kind, str(tmp_path))


def norms() -> tuple[float, float]:
    """Of weights: the whole model's, on every rank."""
    reference, model = sharded("listed")
    one = torch.nn.utils.get_total_norm(list(reference.parameters()))
    ours = torch.nn.utils.get_total_norm(list(model.parameters()))
    named = mfsdp.norms(model)
    assert all(torch.allclose(named[n], p.norm(), rtol=1e-12) for n, p in reference.named_parameters())
    return one.item(), ours.item()


def test_norms_count_every_expert_once(four_ranks):
    found = four_ranks.run(norms)
    assert len(set(found)) == 1 and found[0][0] == pytest.approx(found[0][1], rel=1e-12)


def cut_twice(lowering: str) -> Any:
    """(dp 2, tp 2) for what is dense, (efsdp 1, ep 2, etp 2) for experts, as groups alone or by the mesh's axes."""
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    sparse = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("efsdp", "ep", "etp"))
    reference, model = twin(lambda: Mixtral(layers=1))
    ep, etp = sparse["ep"].get_group(), sparse["etp"].get_group()
    for experts in plain_experts(model, sparse["ep"]):
        for name, dim in (("w1", 1), ("w2", 2)):
            part = nn.Parameter(getattr(experts, name).detach().chunk(2, dim)[etp.rank()].clone())
            part.allreduce, part.tensor_model_parallel, part.partition_dim = False, True, dim  # type: ignore[attr-defined]
            experts.register_parameter(name, part)
        experts.__class__, experts.etp = CutExperts, etp
        of_experts = sparse["efsdp"]
        if lowering == "none":
            experts.ep_group, experts.tp_group = ep, etp
            of_experts = DeviceMesh.from_group(of_experts.get_group(), "cpu")
        mfsdp.fully_shard(experts, mesh=of_experts)
    mfsdp.fully_shard(model, mesh=dense, units=[MixtureLayer])
    every = [tokens(r) for r in range(2)]
    run = compiled(model, lowering)
    wrong = trained_alike(model, run, reference, every[dense.get_local_rank("dp_shard")], every)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_expert_tensor_parallel(four_ranks, lowering):
    for wrong, where, made in four_ranks.run(cut_twice, lowering, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


def refused(how: str) -> str:
    dense, sparse = meshes(2)
    model = Mixtral(layers=1)
    (experts,) = plain_experts(model, sparse["ep"])
    given: tuple[nn.Module, DeviceMesh] = experts, sparse["efsdp"]
    if how == "undescribed":
        del experts.w2.allreduce  # type: ignore[union-attr]
    elif how == "held whole":
        experts.w2.allreduce = True  # type: ignore[union-attr, assignment]
    elif how == "dense over a part":
        given = model.output, sparse["efsdp"]
    elif how == "with the rest":
        experts.ep_group = sparse["ep"].get_group()
        given = model, dense
    elif how == "another number":
        experts.ep_group = dense.get_group()
    elif how == "averaged":
        experts.w1.average_gradients_across_tp_domain = True  # type: ignore[union-attr, assignment]
        experts.tp_group = dense.get_group()
    elif how == "a scalar":
        experts.scale = nn.Parameter(torch.ones(()))
        experts.scale.allreduce = False  # type: ignore[assignment, union-attr]
    elif how == "meta":
        meta = nn.Parameter(experts.w1.to("meta"))
        meta.allreduce = False  # type: ignore[attr-defined]
        experts.w1 = meta
    before = snapshot(model)
    with pytest.raises((NotImplementedError, ValueError)) as raised:
        mfsdp.fully_shard(given[0], mesh=given[1], device="cpu")
    assert snapshot(model) == before
    return str(raised.value)


REFUSED = {
    "undescribed": "parameter w2 is sharded beside the axis 'ep' of .* param.allreduce = False, .*over all its ranks",
    "held whole": "parameter w2 is sharded beside the axis 'ep'",
    "dense over a part": "parameter weight is sharded beside the axis 'ep'",
    "with the rest": "axis 'ep' .* has ranks in common with those to shard over.*experts are sharded first",
    "another number": "w1 has allreduce=False, .*nothing has 4 ranks, as its module says",
    "averaged": "w1 has average_gradients_across_tp_domain=True, and ranks hold different parts",
    "a scalar": "scale has allreduce=False and has no dimension",
    "meta": "w1 is a local shard in a plain tensor and on the meta device",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(four_ranks, how):
    for text in four_ranks.run(refused, how):
        assert re.search(REFUSED[how], text), text
