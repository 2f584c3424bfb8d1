"""Tensor parallelism in plain tensors, said by Megatron-LM's attributes: pieces of larger parameters, and copies whose
gradients are summands.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from tests.helpers.parallel import graphs, next_token, reset, tokens, trained_alike
from tests.helpers.parity import compiled
from tests.helpers.plain_shards import Enter, Leave

pytestmark = pytest.mark.dist

WIDTH, HIDDEN, VOCAB = 8, 12, 34


class Layer(nn.Module):
    """A gated layer as Megatron-LM cuts it: gate and up in one weight, columns, then rows; and a weight that only the
    part of the tokens has seen that is this rank's (sequence parallelism).
    """

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.randn(WIDTH))
        self.up = nn.Parameter(torch.randn(2 * HIDDEN // ranks, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(2 * HIDDEN // ranks) / 3)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN // ranks) / 3)
        self.tp_group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.tp_group
        if group is None:
            gate, up = F.linear(x * self.norm, self.up, self.bias).chunk(2, -1)
            return x + F.linear(F.silu(gate) * up, self.down)
        ranks, rank = group.size(), group.rank()
        mine = Enter.apply(x, group).chunk(ranks, 1)[rank] * self.norm  # of this rank's part of the tokens
        n = mine.shape[1]
        whole = Leave.apply(F.pad(mine, (0, 0, n * rank, n * (ranks - 1 - rank))), group)
        gate, up = F.linear(Enter.apply(whole, group), self.up, self.bias).chunk(2, -1)
        return x + Leave.apply(F.linear(F.silu(gate) * up, self.down), group)


class Model(nn.Module):
    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(ranks) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cut(reference: Model, mesh: DeviceMesh) -> Model:
    """The same model, cut by hand as Megatron-LM does, and marked so."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    model = Model(ranks).double()
    whole = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        value, kind = whole[name].detach(), name.rpartition(".")[2]
        if name.startswith("layers.") and kind == "norm":
            param.sequence_parallel = True  # type: ignore[attr-defined]
        elif name.startswith("layers."):
            dim, stride = {"up": (0, 2), "bias": (0, 2), "down": (1, 1)}[kind]
            value = torch.cat(value.chunk(ranks * stride, dim)[rank::ranks], dim)
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride  # type: ignore[attr-defined]
        with torch.no_grad():
            param.copy_(value)
    for layer in model.layers:
        layer.tp_group = mesh.get_group()
    return model


def parity(lowering: str, said: str, strategy: int) -> Any:
    reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    reference = Model().double()
    model = cut(reference, mesh["tp"])
    given = mesh if said == "mesh" else mesh["dp_shard"]
    mfsdp.fully_shard(model, mesh=given, units=["layers.*"], strategy=strategy)
    every = [tokens(r) for r in range(2)]
    wrong = trained_alike(model, compiled(model, lowering), reference, every[mesh.get_local_rank("dp_shard")], every)
    with mfsdp.summon_full_params(model):
        assert model.layers[0].down.shape == (WIDTH, HIDDEN // 2)
    assert model.layers[0].down.shape == (WIDTH, HIDDEN) and model.layers[0].down.partition_dim == 1
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize(
    "lowering, said, strategy",
    [pytest.param("eager", "mesh", 3, marks=pytest.mark.exhaustive), ("eager", "group", 1), ("none", "mesh", 2)],
)
def test_parity(four_ranks, lowering, said, strategy):
    for wrong, where, made in four_ranks.run(parity, lowering, said, strategy, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


def averaged(lowering: str) -> bool:
    """What each rank sees of its part of the tokens, added and averaged over them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    reference, found = Model().double(), []
    for name in ("sequence_parallel", "average_gradients_across_tp_domain"):
        reset()
        model = cut(reference, mesh["tp"])
        for layer in model.layers:
            layer.norm.sequence_parallel = True  # the average counts where both are said
            setattr(layer.norm, name, True)
        mfsdp.fully_shard(model, mesh=mesh, units=["layers.*"])
        run = compiled(model, lowering)
        next_token(run, tokens(mesh.get_local_rank("dp_shard"))).backward()
        mfsdp.check_replicas(model)
        assert lowering == "none" or graphs() == (1, 0)
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    added, mean = found
    halves = [n for n in added if n.endswith(".norm")]
    return len(halves) == 2 and all(torch.equal(mean[n] * (2 if n in halves else 1), added[n]) for n in added)


@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_gradients_averaged_over_tensor_ranks(four_ranks, lowering):
    assert four_ranks.run(averaged, lowering, timeout=300) == [True] * 4


def saved(folder: str) -> None:
    """Whole parameters, which the unsharded model loads, and which another number of ranks cuts anew."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    reference = Model().double()
    model = mfsdp.fully_shard(cut(reference, mesh["tp"]), mesh=mesh, units=["layers.*"])
    mfsdp.save_safetensors(model, folder)
    from safetensors.torch import load_file

    found = load_file(f"{folder}/model.safetensors")
    assert all(torch.equal(found[n], p) for n, p in reference.named_parameters())
    for p in model.parameters():
        with torch.no_grad():
            p.zero_()
    mfsdp.load_safetensors(model, folder)
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_whole_weights_come_and_go(four_ranks, tmp_path):
    four_ranks.run(saved, str(tmp_path))


def no_values() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = cut(Model().double(), mesh["tp"])
    meta = copy.copy(model)
    attributes = {n: dict(p.__dict__) for n, p in model.named_parameters()}
    meta.to("meta")
    for n, p in meta.named_parameters():
        p.__dict__.update(attributes[n])
    with pytest.raises(NotImplementedError) as said:
        mfsdp.fully_shard(meta, mesh=mesh, device="cpu")
    return str(said.value)


def not_even() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = cut(Model().double(), mesh["tp"])
    model.layers[1].up.partition_stride = 5
    with pytest.raises(ValueError) as said:
        mfsdp.fully_shard(model, mesh=mesh)
    return str(said.value)


def test_attributes_that_do_not_fit_are_refused(four_ranks):
    for text in four_ranks.run(not_even):
        assert "layers.1.up is [12, 8], and partition_dim=0, partition_stride=5 over 2 ranks make" in text


def test_pieces_without_values_are_refused(four_ranks):
    for text in four_ranks.run(no_values):
        assert "layers.0.up is a local shard in a plain tensor and on the meta device" in text
