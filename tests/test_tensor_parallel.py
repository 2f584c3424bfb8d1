"""Tensor parallelism beside sharding, in one graph: what an unsharded model gives on the joined batch."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import mfsdp
from examples.parallel.model import Layer, Llama, tensor_parallel
from tests.helpers.parallel import graphs, next_token, reset, tokens, trained_alike, twin
from tests.helpers.parity import compiled, error
from tests.helpers.ranks import here

pytestmark = pytest.mark.dist


def two_by_two(shape: tuple[int, ...] = (2, 2)) -> Any:
    return init_device_mesh(here().type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp")[-len(shape) :])


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())


def parity(
    lowering: str,
    shape: tuple[int, ...] = (2, 2),
    plan: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    flat: bool = False,
    inside: bool = False,
    **sharding: Any,
) -> Any:
    """The largest error, of what, and how many graphs there were. ``inside``: the loss is in the model."""
    reset()
    mesh, plan, config = two_by_two(shape), plan or {}, {"layers": 1} | (config or {})
    reference, model = twin(lambda: Llama(**config))
    assert isinstance(model, Llama)
    tensor_parallel(model, mesh["tp"], **plan)
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer], **sharding)
    every = [tokens(r, config.get("vocab", 34)) for r in range(dist.get_world_size() // shape[-1])]
    mine = every[dist.get_rank() // shape[-1]]
    run = compiled(WithLoss(model) if inside else model, lowering)

    def loss(m: Any, ids: torch.Tensor) -> torch.Tensor:
        ours = m is run
        if ours and inside:
            return m(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())  # type: ignore[no-any-return]
        return next_token(m, ids)

    wrap = mfsdp.fully_shard_optimizer if flat else lambda o: o
    with loss_parallel() if plan.get("loss") else nullcontext():
        wrong = trained_alike(model, run, reference, mine, every, loss, wrap=wrap)
    mfsdp.check_replicas(model)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


CASES: dict[str, dict[str, Any]] = {
    "sequence": {},
    "plain": {"plan": {"sequence": False}},
    "plain, one data-parallel rank each": {"shape": (1, 2), "plan": {"sequence": False}},
    "tp of one": {"shape": (2, 1)},
    "loss parallel": {"plan": {"loss": True}},
    "loss parallel inside, no_shard": {"plan": {"loss": True}, "inside": True, "strategy": 0},
    "checkpointed, uneven rows, optim, flat optimizer": {
        "config": {"checkpointed": True, "vocab": 33},
        "strategy": 1,
        "flat": True,
    },
    "optim_grads": {"strategy": 2},
    "kept": {"reshard_after_forward": False},
}


QUICK = ("sequence", "plain, one data-parallel rank each", "loss parallel inside, no_shard")
UNCOMPILED = ("tp of one", "loss parallel", "optim_grads", "kept")
"""What others of the cases compile."""
LESS = ("sequence", "plain")
"""Compiled by `used_otherwise`, and by "plain, one data-parallel rank each"."""


@pytest.mark.parametrize(
    ("case", "lowering"),
    [
        pytest.param(
            case,
            lowering,
            marks=[
                *([] if case in QUICK else [pytest.mark.slow]),
                *([pytest.mark.exhaustive] if case in LESS and lowering == "eager" else []),
            ],
        )
        for case in CASES
        for lowering in ("eager", "none")
        if lowering == "none" or case not in UNCOMPILED
    ],
)
def test_parity(request, lowering, case):
    ranks = request.getfixturevalue("two_ranks" if "shape" in CASES[case] else "four_ranks")
    for wrong, where, made in ranks.run(partial(parity, lowering, **CASES[case]), timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [pytest.param("no_shard", marks=pytest.mark.exhaustive), "optim"])
def test_two_levels_beside(eight_ranks, outer):
    for wrong, where, _ in eight_ranks.run(parity, "none", (2, 2, 2), outer_strategy=outer, timeout=300):
        assert wrong < 1e-9, where


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=pytest.mark.exhaustive)])
def test_parity_of_inductors_code(request, shape):
    ranks = request.getfixturevalue("two_ranks" if shape == (1, 2) else "four_ranks")
    for wrong, where, made in ranks.run(parity, "inductor", shape, timeout=400):
        assert wrong < 1e-9 and made == (1, 0), where


def hole() -> str:
    """Sequence parallel, and norms left out of the plan."""
    reset()
    mesh = two_by_two()
    _, model = twin(lambda: Llama(layers=1))
    assert isinstance(model, Llama)
    tensor_parallel(model.bfloat16(), mesh["tp"], norms=False)
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
    mfsdp.check_replicas(model)
    next_token(model, tokens(mesh.get_local_rank("dp_shard"))).backward()
    try:
        mfsdp.check_replicas(model)
    except RuntimeError as error:
        return str(error)
    return ""


def test_norms_that_the_plan_leaves_out_are_named(four_ranks):
    for said in four_ranks.run(hole):
        assert said.count("gradients of") == 3
        for name in ("layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "norm.weight"):
            assert f"gradients of {name} over tp" in said


def apart_or_refused() -> tuple[str, str, str]:
    """Weights that differ over tp, and their cure; ranks of tensor parallelism taken for ranks with other data."""
    mesh = two_by_two()

    def build() -> Llama:
        torch.manual_seed(dist.get_rank())
        model = Llama(layers=1)
        tensor_parallel(model, mesh["tp"], norms=False)
        return model

    def said(function: Any) -> str:
        try:
            function()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drifting = mfsdp.fully_shard(build(), mesh=mesh, units=[Layer])
        with torch.no_grad():
            drifting.norm.weight.add_(dist.get_rank() % 2 * 1e-6)
        found = said(lambda: mfsdp.check_replicas(drifting))
        cured = mfsdp.fully_shard(build(), mesh=mesh["dp_shard"], units=[Layer], sync_module_states=True)
        still = said(lambda: mfsdp.check_replicas(cured))
    return found, still, said(lambda: mfsdp.fully_shard(build()))


def test_what_differs_over_tp_is_found_cured_or_refused(four_ranks):
    for found, still, refused in four_ranks.run(apart_or_refused):
        assert "weights of norm.weight over tp" in found and "attention.wq" not in found
        assert not still
        assert "axis 'tp'" in refused and "ranks in common" in refused


def from_meta() -> float:
    mesh = two_by_two()
    torch.manual_seed(0)
    reference = Llama(hidden=37, vocab=33)
    with torch.device("meta"):
        model = Llama(hidden=37, vocab=33)
    tensor_parallel(model, mesh["tp"])
    torch.manual_seed(0 if dist.get_rank() == 0 else 99)
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(p.full_tensor().detach(), q.detach()) for p, q in pairs)  # type: ignore[attr-defined]


def test_models_from_the_meta_device_are_the_unsharded_init(four_ranks):
    assert four_ranks.run(from_meta) == [0.0] * 4


def used_otherwise(folder: str) -> dict[str, bool]:
    """Copies, whole parameters, parameters outside of forward, gradients that wait, files."""
    reset()
    mesh = two_by_two()
    reference, model = twin(lambda: Llama(layers=1))
    assert isinstance(model, Llama)
    tensor_parallel(model, mesh["tp"])
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
    out: dict[str, bool] = {}

    def same(m: nn.Module) -> bool:
        pairs = zip(m.parameters(), reference.parameters(), strict=True)
        return all(torch.equal(p.full_tensor(), q) for p, q in pairs)  # type: ignore[attr-defined]

    out["full_tensor"] = same(model)
    out["deepcopy"] = same(copy.deepcopy(model))
    ids = tokens(mesh.get_local_rank("dp_shard"), length=8)  # sequence parallelism wants even parts
    with torch.no_grad():
        want = reference(ids)
        with mfsdp.summon_full_params(model, writeback=False):
            out["summoned"] = error(model(ids), want) < 1e-12
        with mfsdp.unsharded(model):
            out["unsharded"] = error(model(ids), want) < 1e-12
    penalty = sum(p.square().sum() + p.full_tensor().sum() for p in model.parameters())  # type: ignore[attr-defined]
    penalty.backward()
    sum(p.square().sum() + p.sum() for p in reference.parameters()).backward()  # type: ignore[union-attr]
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    out["penalty"] = max(error(p.grad.full_tensor(), q.grad) for p, q in pairs) < 1e-12  # type: ignore[union-attr]
    for m in (model, reference):
        m.zero_grad()
    run = compiled(model, "eager")
    every = [[tokens(10 * micro + r) for r in range(2)] for micro in range(2)]
    for micro, batches in enumerate(every):
        with mfsdp.no_sync(model) if micro == 0 else nullcontext():
            next_token(run, batches[mesh.get_local_rank("dp_shard")]).backward()
        (sum(next_token(reference, b) for b in batches) / 2).backward()
    out["no_sync"] = max(error(p.grad.full_tensor(), q.grad) for p, q in pairs) < 1e-9  # type: ignore[union-attr]
    mfsdp.save_safetensors(model, folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dist.barrier()
    mfsdp.load_safetensors(model, folder)
    out["safetensors"] = same(model)
    norms = mfsdp.norms(model)
    out["norms"] = all(error(norms[n], q.norm()) < 1e-12 for n, q in reference.named_parameters())
    return out


def test_other_uses(four_ranks, tmp_path):
    for out in four_ranks.run(used_otherwise, str(tmp_path), timeout=300):
        assert all(out.values()), out


# Checkpoints


def placed(kind: str, config: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``plain``, or ``mfsdp 2x2`` or ``fsdp2 2x2``, (dp_shard, tp)."""
    torch.manual_seed(0)
    model = Llama(layers=1, **config)
    if kind != "plain":
        library, _, shape = kind.partition(" ")
        mesh = two_by_two(tuple(map(int, shape.split("x"))))  # type: ignore[arg-type]
        if mesh["tp"].size() > 1:
            tensor_parallel(model, mesh["tp"])
        if library == "mfsdp":
            mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
        else:
            for m in (*model.layers, model):
                torch.distributed.fsdp.fully_shard(m, mesh=mesh["dp_shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients that are the same whoever shards."""
    for i, p in enumerate(model.parameters()):
        torch.manual_seed(i)
        p.grad = torch.zeros_like(p)
        with torch.no_grad():
            p.grad.add_(p.detach() * 0.5)
    optimizer.step()
    optimizer.zero_grad()


def full(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def matrix(folder: str, kinds: list[str], config: dict[str, Any]) -> list[str]:
    """Every kind's checkpoint, loaded into every other."""
    reference, optimizer = placed("plain", config)
    stepped(reference, optimizer)
    wanted = [p.detach() for p in reference.parameters()]
    moments = [optimizer.state[p]["exp_avg"] for p in reference.parameters()]
    for kind in kinds:
        made = placed(kind, config)
        stepped(*made)
        model_state, state = get_state_dict(*made)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=f"{folder}/{kind}")
    wrong = []
    for source in kinds:
        for target in kinds:
            if not (source + target).count("mfsdp"):
                continue  # torch's own
            model, other = placed(target, config)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model_state, state = get_state_dict(model, other)
            dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=f"{folder}/{source}")
            set_state_dict(model, other, model_state_dict=model_state, optim_state_dict=state)
            got = [full(p.detach()) for p in model.parameters()]
            kept = [full(other.state[p]["exp_avg"]) for p in model.parameters()]
            if not all(map(torch.equal, got, wanted)) or not all(map(torch.equal, kept, moments)):
                wrong.append(f"{source} -> {target}")
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            if not all(map(torch.equal, whole.values(), wanted)):
                wrong.append(f"{source} -> {target}, whole")
    return wrong


@pytest.mark.slow
def test_checkpoints_of_any_are_loaded_by_any(four_ranks, tmp_path):
    kinds = ["mfsdp 2x2", "plain", "fsdp2 2x2"]
    assert four_ranks.run(matrix, str(tmp_path), kinds, {}, timeout=300) == [[]] * 4


def test_uneven_checkpoints(four_ranks, tmp_path):
    kinds, config = ["mfsdp 2x2", "mfsdp 4x1"], {"hidden": 37, "vocab": 33}
    assert four_ranks.run(matrix, str(tmp_path), kinds, config, timeout=300) == [[]] * 4


def resumed(folder: str) -> list[str]:
    """A checkpoint with optimizer state, of another mesh; and the weights in it, converted."""
    wrong = []
    reference, plain = placed("plain", {})
    stepped(reference, plain)
    made, others = placed("mfsdp 2x2", {}), ("mfsdp 4x1", "mfsdp 1x4", "mfsdp 2x2")
    stepped(*made)
    checkpoints = mfsdp.Checkpoints(f"{folder}/run")
    checkpoints.save(3, *made)
    for kind in others:
        model, optimizer = placed(kind, {})
        checkpoints.load(model, optimizer)
        pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
        if not all(torch.equal(full(p.detach()), q) for p, q in pairs):
            wrong.append(kind)
        if not all(torch.equal(full(optimizer.state[p]["exp_avg"]), plain.state[q]["exp_avg"]) for p, q in pairs):
            wrong.append(f"{kind}, moments")
    if dist.get_rank() == 0:
        from safetensors.torch import load_file  # not on every machine that runs `make gpu`

        mfsdp.convert(f"{folder}/run", f"{folder}/files")
        found = load_file(f"{folder}/files/model.safetensors")
        wrong += [n for n, q in reference.named_parameters() if not torch.equal(found[n], q)]
    dist.barrier()
    return wrong


@pytest.mark.slow
def test_runs_resume_on_other_meshes(four_ranks, tmp_path):
    assert four_ranks.run(resumed, str(tmp_path), timeout=300) == [[]] * 4


class Packed(nn.Module):
    """Gate and up in one: the first half of the rows are gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(12, 5)), nn.Parameter(torch.randn(5, 6))


def packed(folder: str) -> dict[str, bool]:
    mesh = two_by_two()
    torch.manual_seed(0)
    reference = Packed()

    def build() -> nn.Module:
        model = copy.deepcopy(reference)
        for name, placement in (("gate_up", _StridedShard(0, split_factor=2)), ("down", Shard(1))):
            whole = getattr(model, name).data
            model.register_parameter(
                name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None))
            )
        return mfsdp.fully_shard(model, mesh=mesh)

    def same(m: nn.Module, factor: float = 1.0) -> bool:
        pairs = zip(m.parameters(), reference.parameters(), strict=True)
        return all(torch.equal(p.full_tensor(), factor * q) for p, q in pairs)  # type: ignore[attr-defined]

    model = build()
    out = {"full_tensor": same(model)}
    dcp.save({"m": model.state_dict()}, checkpoint_id=folder)
    plain = {n: torch.zeros_like(q.data) for n, q in reference.named_parameters()}
    dcp.load({"m": plain}, checkpoint_id=folder)
    out["into plain"] = all(torch.equal(plain[n], q) for n, q in reference.named_parameters())
    other = build()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    dcp.load({"m": other.state_dict()}, checkpoint_id=folder)
    out["into itself"] = same(other)
    with torch.no_grad():
        for p, q in zip(other.parameters(), reference.parameters(), strict=True):
            p.copy_(2 * q)
    out["copy_ of whole tensors"] = same(other, 2.0)
    return out


def test_packed_weights(four_ranks, tmp_path):
    for out in four_ranks.run(packed, str(tmp_path)):
        assert all(out.values()), out


def shown() -> list[str]:
    mesh = two_by_two()
    _, model = twin(lambda: Llama(layers=1))
    assert isinstance(model, Llama)
    tensor_parallel(model, mesh["tp"])
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
    layer: Any = model.layers[0]
    params = layer.attention.wq.weight, layer.attention.wo.weight, layer.ffn_norm.weight
    assert all(p.device_mesh.mesh_dim_names == ("dp_shard", "tp") for p in params)
    told = [p.placements for p in params]
    alike = told[0][1:] == (Shard(0),) and told[1] == (Shard(0), Shard(1)) and told[2] == (Shard(0), Replicate())
    return ["" if alike else str(told), type(told[0][0]).__mro__[1].__name__]


def test_parameters_show_the_mesh_of_both(four_ranks):
    assert four_ranks.run(shown) == [["", "_StridedShard"]] * 4


# Cases of others


class Stack(nn.Module):
    """Of pytorch's test_2d_composability: three layers in and out, of any width."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"in_proj": nn.Linear(width, 4 * width), "out_proj": nn.Linear(4 * width, width)})
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer["out_proj"](F.relu(layer["in_proj"](x))))
        return x


def stacked(width: int) -> tuple[dict[str, float], list[Any]]:
    """pytorch's ``test_train_parity_2d_mlp``, and of Megatron-FSDP's test_tensor_parallel: whole shapes and strides,
    optimizer state on the mesh of both.
    """
    reset()
    mesh = two_by_two()
    reference, model = twin(lambda: Stack(width))
    plan = {"in_proj": ColwiseParallel(use_local_output=False), "out_proj": RowwiseParallel()}
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh["tp"], plan)
    mfsdp.fully_shard(model, mesh=mesh, units=["layers.*"], reshard_after_forward=False)
    made: list[torch.optim.Optimizer] = []

    def adam(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(params, lr=1e-2))
        return made[-1]

    def batch(rank: int) -> torch.Tensor:
        return torch.randn(4, width, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    every = [batch(r) for r in range(2)]
    mine = every[mesh.get_local_rank("dp_shard")]
    run = compiled(model, "eager")
    wrong = trained_alike(model, run, reference, mine, every, lambda m, x: m(x).sum(), 5, adam)
    weight, like = model.layers[0]["in_proj"].weight, reference.layers[0]["in_proj"].weight  # type: ignore[index, union-attr]
    moment = made[0].state[weight]["exp_avg"]
    seen = [
        (t.device_mesh.mesh_dim_names, t.shape == like.shape, t.stride() == like.stride()) for t in (weight, moment)
    ]
    return wrong, seen


def test_as_others_test_it(four_ranks):
    for wrong, seen in four_ranks.run(stacked, 3, timeout=300):
        assert max(wrong.values()) < 1e-9, max(wrong, key=wrong.__getitem__)
        assert seen == [(("dp_shard", "tp"), True, True)] * 2
