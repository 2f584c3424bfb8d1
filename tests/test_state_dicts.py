"""Loading and saving whole models through torch's own functions: names, parts, moments, pickles."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import mfsdp
from tests.helpers.models import GPT, MLP, Block
from tests.helpers.ranks import here
from tests.helpers.strategies import ONE_LEVEL, TWO_LEVELS, sharding

pytestmark = pytest.mark.dist


class Stacked(nn.Module):
    """Experts in one tensor, so large that they are cut between the rows of one, beside a scalar and few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 40, 32))
        self.scale, self.few = nn.Parameter(torch.tensor(0.5)), nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x).sum() * self.scale + torch.einsum("eij,ej->e", self.experts, self.experts[:, 0]).sum()


def layers(*sizes: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


MODELS: dict[str, Any] = {
    "24-32-7": (lambda: layers(24, 32, 7), lambda: torch.randn(4, 24), None),
    "7-5-3": (lambda: layers(7, 5, 3), lambda: torch.randn(4, 7), ["0"]),
    "gpt": (lambda: GPT(layers=1), lambda: torch.randint(31, (2, 8)), [Block]),
    "stacked": (Stacked, lambda: torch.randn(4, 5), None),
    "mlp": (MLP, lambda: torch.randn(4, 24), ["up"]),
}


def unsharded(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]().to(here())


def pair(name: str, place: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer; weights depend on the seed."""
    model = mfsdp.fully_shard(unsharded(name, seed), units=MODELS[name][2], **sharding(place))
    groups = [{"params": list(model.parameters())[::2], "lr": 1e-2}, {"params": list(model.parameters())[1::2]}]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(100 * number + dist.get_rank())
    loss = model(MODELS[name][1]().to(here())).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def reference(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Whole states of an unsharded model after a step, the same on every rank."""
    model = unsharded(name, 1)
    groups = [{"params": list(model.parameters())[::2], "lr": 1e-2}, {"params": list(model.parameters())[1::2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    torch.manual_seed(5)
    model(MODELS[name][1]().to(here())).float().square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    return copy.deepcopy(weights), copy.deepcopy(state)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def full_states(name: str, place: str, broadcast: bool, compiled: bool) -> None:
    """Whole states set through torch's functions are what the same functions give back, on every rank."""
    want, moments = reference(name)
    model, optimizer = pair(name, place)
    if compiled:
        model = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    gives = dist.get_rank() == 0 or not broadcast
    set_model_state_dict(model, copy.deepcopy(want) if gives else {}, options=full)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(moments) if gives else {}, options=full)
    full = StateDictOptions(full_state_dict=True)
    assert alike(get_model_state_dict(model, options=full), want)
    assert alike(get_optimizer_state_dict(model, optimizer, options=full), moments)
    offloaded = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert alike(offloaded, (want, moments) if dist.get_rank() == 0 else ({}, {}))
    cut = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert alike({n: whole(t) for n, t in cut[0].items()}, want)
    step(name, model, optimizer, 0)


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


@pytest.mark.parametrize("place", [place for place in ONE_LEVEL if place != "held"])
@pytest.mark.parametrize("name", MODELS)
def test_full_state_dicts(two_ranks, name, place):
    broadcast = ([*MODELS].index(name) + [*ONE_LEVEL].index(place)) % 2 == 0
    two_ranks.run(full_states, name, place, broadcast, False)


@pytest.mark.parametrize("place", TWO_LEVELS)
def test_full_state_dicts_on_two_levels(four_ranks, place):
    for name, broadcast in (("7-5-3", True), ("stacked", False)):
        four_ranks.run(full_states, name, place, broadcast, False)


def test_full_state_dicts_of_compiled_models(two_ranks):
    two_ranks.run(full_states, "gpt", "optim_grads_params", True, True)


def one_rank_alone() -> str:
    """The whole state dict on rank 0 only, without a broadcast: an error where it was given, not half a model."""
    want, _ = reference("mlp")
    model, _ = pair("mlp", "optim_grads_params")
    other = dict(want) if dist.get_rank() == 0 else {n: t for n, t in want.items() if n != "scale"}
    try:
        set_model_state_dict(model, other, options=StateDictOptions(full_state_dict=True, strict=False))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_give_different_names(two_ranks):
    for told in two_ranks.run(one_rank_alone):
        assert "broadcast_from_rank0=True" in told


# Names


def named(how: str) -> list[Any]:
    """State dict, parameters and buffers of a model compiled in some way: their names, against the model's own."""
    plain = unsharded("gpt", 0)
    want = list(plain.state_dict())
    if how == "blocks first":
        plain.blocks[0] = torch.compile(plain.blocks[0], backend="mfsdp")
    model = mfsdp.fully_shard(plain, units=[Block])
    run: Any = model
    if how == "wrapped":
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    elif how == "in place":
        model.compile(backend="mfsdp", options={"lowering": "eager"})
    elif how == "blocks":
        model.blocks[-1] = torch.compile(model.blocks[-1], backend="mfsdp", options={"lowering": "eager"})
    elif how == "twice":
        model.blocks[-1] = torch.compile(model.blocks[-1], backend="mfsdp", options={"lowering": "eager"})
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    state = run.state_dict()
    assert list(state) == want and not any("_orig_mod" in n for n in state._metadata)
    assert list(get_model_state_dict(run)) == want
    if how in ("wrapped", "in place"):
        assert [n for n, _ in run.named_parameters()] == [n for n in want if n != "head.weight"]
    new = {n: t + 1 for n, t in unsharded("gpt", 3).state_dict().items()}
    for spelling in (lambda n: n, lambda n: "_orig_mod." + n):
        if spelling("") and how != "wrapped":
            continue
        given = {spelling(n): t.clone() for n, t in new.items()}
        assert list(run.load_state_dict(given)) == [[], []]
        assert all(torch.equal(whole(t), new[n]) for n, t in run.state_dict().items())
    left = run.load_state_dict(
        {n: t for n, t in new.items() if n != "norm.bias"} | {"more": torch.ones(1)}, strict=False
    )
    assert left.missing_keys == ["norm.bias"] and left.unexpected_keys == ["more"]
    with pytest.raises(RuntimeError, match='"norm.bias"'):
        run.load_state_dict({n: t for n, t in new.items() if n != "norm.bias"})
    set_model_state_dict(run, run.state_dict())
    return [whole(p).sum() for p in run.parameters()]


@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks", "blocks first", "twice"])
def test_original_names_whichever_way_it_was_compiled(two_ranks, how):
    two_ranks.run(named, how)


def test_wrappers_of_unsharded_models_are_torchs_own():
    model = torch.compile(MLP(), backend="eager")
    assert list(model.state_dict()) == [f"_orig_mod.{n}" for n in MLP().state_dict()]
    assert [n for n, _ in model.named_parameters()] == list(model.state_dict())
    model.load_state_dict(model.state_dict())


def written_with_a_prefix(folder: str) -> None:
    """Checkpoints from before names were kept."""
    model, optimizer = pair("mlp", "optim_grads_params", seed=1)
    step("mlp", model, optimizer, 0)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": {f"_orig_mod.{n}": t for n, t in weights.items()}, "optim": moments}, checkpoint_id=folder)
    run = torch.compile(pair("mlp", "optim_grads_params")[0], backend="mfsdp")
    state = {"model": run.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    assert list(state["model"]) == list(weights)
    run.load_state_dict(state["model"])
    assert all(torch.equal(whole(t), whole(weights[n])) for n, t in run.state_dict().items())
    if dist.get_rank() == 0:
        assert sorted(mfsdp.convert(folder, f"{folder}/files")) == sorted(weights)
    dist.barrier()
    other = pair("mlp", "optim_grads_params")[0]
    mfsdp.load_safetensors(other, f"{folder}/files")
    assert all(torch.equal(whole(t), whole(weights[n])) for n, t in other.state_dict().items())


def test_checkpoints_with_the_wrappers_names_are_read(two_ranks, tmp_path):
    two_ranks.run(written_with_a_prefix, str(tmp_path / "ckpt"))


# Moments


def loop(steps: range, model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    return [step("mlp", model, optimizer, number) for number in steps]


def built(seed: int, flat: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = mfsdp.fully_shard(MLP(), units=["up"])
    model = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    return model, mfsdp.fully_shard_optimizer(optimizer) if flat else optimizer


def resumed(folder: str, way: str) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that was saved in the middle and goes on in a new model."""
    model, optim = built(0)
    loop(range(3), model, optim)
    if way == "raw":
        dcp.save({"model": model.state_dict(), "optim": optim.state_dict()}, checkpoint_id=folder)
    elif way == "checkpoints":
        mfsdp.Checkpoints(folder).save(3, model, optim)
    else:
        weights, moments = get_state_dict(model, optim)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)
    want = loop(range(3, 6), model, optim)
    model, optim = built(7, flat=way == "flat")
    if way == "raw":
        with pytest.raises(dcp.CheckpointException, match="get_optimizer_state_dict"):
            dcp.load({"model": model.state_dict(), "optim": optim.state_dict()}, checkpoint_id=folder)
        with pytest.raises(dcp.CheckpointException, match="would be read"):
            dcp.load({"optim": optim}, checkpoint_id=folder)
        get_optimizer_state_dict(model, optim)
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
    elif way == "checkpoints":
        assert mfsdp.Checkpoints(folder).load(model, optim) == 3
    else:
        weights, moments = get_state_dict(model, optim)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder)
        set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=moments)
    return want, loop(range(3, 6), model, optim)


@pytest.mark.parametrize("way", ["readme", "raw", "checkpoints", "flat"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(two_ranks, way, tmp_path):
    for want, got in two_ranks.run(resumed, str(tmp_path / "ckpt"), way):
        assert got == want, "the losses, bitwise"


def saved_before_the_first_step(folder: str) -> list[list[float]]:
    model, optim = built(0)
    want = loop(range(3), model, optim)
    model, optim = built(0)
    mfsdp.Checkpoints(folder).save(0, model, optim)
    assert not optim.state
    went_on = loop(range(3), model, optim)
    model, optim = built(5)
    mfsdp.Checkpoints(folder).load(model, optim)
    return [want, went_on, loop(range(3), model, optim)]


def test_saving_before_the_first_step_leaves_no_trace(two_ranks, tmp_path):
    for want, went_on, again in two_ranks.run(saved_before_the_first_step, str(tmp_path)):
        assert went_on == want and again == want


# Pickles


def pickled(folder: str, place: str) -> None:
    """Each rank's file, read by that rank into a model of other weights; only by that rank."""
    file = f"{folder}/{dist.get_rank()}.pt"
    model, optimizer = pair("gpt", place, seed=1)
    step("gpt", model, optimizer, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mfsdp.dtensor.sharded_dtensor._told_of_pickles = False
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, file)
        torch.save(model.state_dict(keep_vars=True), file + ".vars")
    assert sum("Every rank" in str(w.message) for w in told) == (place != "no_shard")
    other, its = pair("gpt", place, seed=2)
    state = torch.load(file, weights_only=True)
    other.load_state_dict(state["model"])
    its.load_state_dict(state["optim"])
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert [step("gpt", model, optimizer, n) for n in (1, 2)] == [step("gpt", other, its, n) for n in (1, 2)]
    other.load_state_dict(torch.load(file + ".vars", weights_only=True))
    twin = copy.deepcopy(model.state_dict())
    step("gpt", model, optimizer, 3)
    model.load_state_dict(twin)
    assert all(torch.equal(whole(t), whole(twin[n])) for n, t in model.state_dict().items())
    again = pickle.loads(pickle.dumps(model.state_dict()))
    assert all(torch.equal(whole(t), whole(twin[n])) for n, t in again.items())
    dist.barrier()
    if place != "no_shard":
        with pytest.raises(RuntimeError, match="Every rank loads the file that it wrote"):
            torch.load(f"{folder}/{1 - dist.get_rank()}.pt", weights_only=True)


@pytest.mark.parametrize("place", ["no_shard", "optim_grads_params"])
def test_torch_save_keeps_a_ranks_rows(two_ranks, place, tmp_path):
    two_ranks.run(pickled, str(tmp_path), place)


# Values


def values() -> None:
    """``p.data = value``, ``load_state_dict(assign=True)``, whole tensors and DTensors of every kind."""
    model, optimizer = pair("mlp", "optim_grads_params")
    plain = unsharded("mlp", 3).state_dict()
    step("mlp", model, optimizer, 0)
    before = dict(model.named_parameters())
    for name, p in before.items():
        p.data = plain[name]
        assert torch.equal(whole(p), plain[name])
        p.data = p.detach() * 2
        p.data.mul_(2)
        assert torch.equal(whole(p), plain[name] * 4)
    torch.manual_seed(1)
    x = torch.randn(4, 24)
    with torch.no_grad():
        assert torch.equal(model(x), torch.func.functional_call(MLP(), {n: t * 4 for n, t in plain.items()}, x))
    for wrong in (torch.ones(3), p.detach().to_local(), whole(p).bfloat16()):
        if wrong.shape != p.shape or wrong.dtype != p.dtype:
            with pytest.raises(ValueError, match="only its values may change"):
                p.data = wrong
    model.load_state_dict(plain, assign=True)
    assert all(torch.equal(whole(p), plain[n]) for n, p in model.named_parameters())
    assert all(p is before[n] for n, p in model.named_parameters()), "the optimizer's parameters are still the model's"
    mesh = next(iter(before.values())).device_mesh
    for assign in (False, True):  # the recipe of FSDP2's tutorial: torch's even rows
        new = {n: t + 1 + assign for n, t in plain.items()}
        even = {n: nn.Parameter(distribute_tensor(new[n], mesh, before[n].placements)) for n in new}
        model.load_state_dict(even, assign=assign)
        assert all(torch.equal(whole(p), new[n]) for n, p in model.named_parameters())
    other = mfsdp.fully_shard(unsharded("mlp", 5), strategy=2)  # other rows
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    local = {n: DTensor.from_local(p.to_local() + 1, mesh, p.placements, shape=p.shape, stride=p.stride())
             for n, p in before.items()}  # fmt: skip
    want = {n: whole(p) + 1 for n, p in before.items()}
    model.load_state_dict(local)
    assert all(torch.equal(whole(p), want[n]) for n, p in model.named_parameters())
    step("mlp", model, optimizer, 1)


def test_values_arrive_whatever_they_come_in(two_ranks):
    two_ranks.run(values)


def rows_of(name: str, place: str) -> None:
    """What torch computes from our placements are the rows that are here; from whole tensors it cuts the same."""
    for p in pair(name, place)[0].parameters():
        mine = p.detach().to_local()
        size, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        assert tuple(size) == tuple(mine.shape)
        assert torch.equal(whole(p)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))], mine)
        replicated = p.detach().redistribute(placements=[Replicate()])
        assert torch.equal(replicated.redistribute(placements=p.placements).to_local(), mine)
        shards = [Shard(0)] * p.device_mesh.ndim
        even = replicated.redistribute(placements=shards)
        assert torch.equal(even.full_tensor(), whole(p)), "torch's own rows, although ours were cut before"
        assert p.placements == tuple(shards) and copy.deepcopy(p.placements) == p.placements
        with pytest.raises(NotImplementedError, match="full_tensor"):
            DTensor.from_local(mine, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
    experts = pair("stacked", place)[0].experts
    with pytest.raises(NotImplementedError, match="full_tensor"):
        compute_local_shape_and_global_offset(experts.shape, experts.device_mesh, experts.placements)


@pytest.mark.parametrize("name", ["24-32-7", "7-5-3", "mlp"])
def test_placements_tell_the_rows(two_ranks, name):
    two_ranks.run(rows_of, name, "optim_grads_params")


def test_placements_tell_the_rows_of_two_levels(four_ranks):
    four_ranks.run(rows_of, "mlp", "hfsdp")


# Frameworks


def in_ddp() -> None:
    model, _ = pair("mlp", "optim_grads_params")
    with pytest.raises(NotImplementedError, match="DistributedDataParallel has no place around a sharded model"):
        nn.parallel.DistributedDataParallel(model)


def test_no_ddp_around_a_sharded_model(two_ranks):
    two_ranks.run(in_ddp)


def transformed(folder: str) -> None:
    from tests.helpers.models import llama

    torch.manual_seed(0)
    reference = llama()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["LlamaDecoderLayer"])
    with pytest.raises(NotImplementedError, match=r"mfsdp.save_safetensors\(model, folder\) on every rank"):
        model.save_pretrained(f"{folder}/refused")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/given", state_dict=full)
    whole_here = mfsdp.fully_shard(copy.deepcopy(reference), strategy=0)
    if dist.get_rank() == 0:
        torch.compile(whole_here).save_pretrained(f"{folder}/whole")
    dist.barrier()
    for where in ("given", "whole"):
        again = type(reference).from_pretrained(f"{folder}/{where}")
        assert alike(dict(again.state_dict()), dict(reference.state_dict()))
    with pytest.raises(NotImplementedError, match="resize before fully_shard"):
        model.resize_token_embeddings(99)
    assert model.resize_token_embeddings() is model.get_input_embeddings()


def test_transformers_saves_what_it_can(two_ranks, tmp_path):
    pytest.importorskip("transformers")
    two_ranks.run(transformed, str(tmp_path))


def adapted() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["up"])
    inputs = torch.randn(4, 24) + dist.get_rank()
    model = get_peft_model(mfsdp.fully_shard(MLP(), units=["up"]), config)
    shapes = [tuple(p.shape) for n, p in model.named_parameters() if "lora" in n]
    assert shapes == [(2, 24), (37, 2)], "of whole layers, on every rank"
    model(inputs).sum().backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    with pytest.raises(ValueError, match="Call get_peft_model before fully_shard"):
        get_peft_model(mfsdp.fully_shard(MLP(), units=["up"], mesh=mesh), config)


def test_adapters_added_after_sharding(two_ranks):
    pytest.importorskip("peft")
    two_ranks.run(adapted)
