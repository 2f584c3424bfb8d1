"""What users do with parameters, gradients and optimizer state: DTensors over uneven shards, on two ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import mfsdp
from mfsdp.config.layout import plan
from mfsdp.dtensor.shard_spec import ShardSpec, local_mesh
from mfsdp.dtensor.sharded_dtensor import ShardedDTensor
from tests.helpers.models import MLP
from tests.helpers.parity import averaged, error, whole

pytestmark = pytest.mark.dist


def pair(build: Any = MLP, **sharding: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = build()
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, **{"units": ["up"], **sharding})
    return reference, model


def steps(build: Any, foreach: dict[str, Any], count: int = 4) -> float:
    """The largest error of parameters and optimizer state after some steps, on uneven and empty shards."""
    reference, model = pair()
    assert any(not p.to_local().numel() for p in model.parameters()), "some shard should be empty on some rank"
    optimizers = [build(m.parameters(), lr=1e-2, **foreach) for m in (model, reference)]
    for step in range(count):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 24)
        for m in (model, reference):
            m(x).square().mean().backward()
        averaged(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    worst = 0.0
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        worst = max(worst, error(whole(p).detach(), q.detach()))
        mine, theirs = optimizers[0].state[p], optimizers[1].state[q]
        assert set(mine) == set(theirs), "state keys are the same on every rank, also where a shard is empty"
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor) and value.shape == q.shape:
                assert isinstance(mine[key], DTensor), key
                worst = max(worst, error(whole(mine[key]), value))
    return worst


def on_some_rank_empty(build: Any, flags: dict[str, Any]) -> float:
    return steps(build, flags)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}
FUSED = ("sgd", "adam", "adamw", "adagrad")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(two_ranks, name):
    build, arguments = OPTIMIZERS[name]
    for flags in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        if "fused" in flags and name not in FUSED:
            continue
        assert max(two_ranks.run(steps, build, {**arguments, **flags})) < 1e-6, flags


def clipped(order: float) -> tuple[float, float]:
    reference, model = pair()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 24)
    for m in (model, reference):
        m(x).square().mean().backward()
    averaged(reference)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=order) for m in (model, reference)]
    grads = [error(whole(p.grad), q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    return error(norms[0], norms[1]), max(grads)


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf])
def test_clipping(two_ranks, order):
    for norm, grads in two_ranks.run(clipped, order):
        assert norm < 1e-6 and grads < 1e-6


def accumulation() -> None:
    reference, model = pair()
    for m in (model, reference):
        m.zero_grad()
    for step in range(3):
        torch.manual_seed(7 * step + dist.get_rank())
        x = torch.randn(4, 24)
        for m in (model, reference):
            m(x).square().mean().backward()
    averaged(reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(whole(p.grad), q.grad) < 1e-6
    flat = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters() if p.grad.to_local().numel()}
    assert len(flat) <= 2, "one gradient buffer for each of two units"
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not whole(p.grad).any() for p in model.parameters())
    buffers = {r.buffer for m in model.modules() for r in m.__dict__.get("_mfsdp_refs", {}).values()}
    kept = [StorageWeakRef(b.gradients.flat.untyped_storage()) for b in buffers]
    model.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    assert all(k.expired() for k in kept), "the memory is given back"
    some = model.up.weight
    some.grad = torch.ones_like(some)
    assert (whole(some.grad) == 1).all() and model.up.bias.grad is None
    some.grad *= 2
    assert (whole(some.grad) == 2).all()


def test_gradients_are_views_that_accumulate(two_ranks):
    two_ranks.run(accumulation)


def initialised() -> None:
    for name, arguments in (
        ("normal_", (0.0, 0.5)), ("uniform_", (-1, 1)), ("ones_", ()), ("zeros_", ()), ("constant_", (3.0,)),
        ("kaiming_uniform_", ()), ("xavier_normal_", ()), ("trunc_normal_", ()),
    ):  # fmt: skip
        reference, model = pair()
        for m in (model, reference):
            torch.manual_seed(5)
            getattr(nn.init, name)(m.up.weight, *arguments)
            after = torch.randn(3)
            m.after = after
        assert torch.equal(whole(model.up.weight), reference.up.weight), name
        assert torch.equal(model.after, reference.after), f"{name} leaves the generator where it would have been"


def test_init_functions_give_the_values_of_an_unsharded_init(two_ranks):
    two_ranks.run(initialised)


def operations() -> None:
    reference, model = pair()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        p, q = p.detach(), q.detach()
        for function in (
            torch.sum, torch.mean, torch.max, torch.min, torch.amax, torch.norm, torch.linalg.vector_norm,
            torch.count_nonzero, lambda t: t.abs().max(), lambda t: torch.isnan(t).any(),
            lambda t: torch.isfinite(t).all(), lambda t: t.float().pow(2).sum().sqrt(), lambda t: t.numel(),
        ):  # fmt: skip
            got, want = function(p), function(q)
            assert not isinstance(got, DTensor)
            assert torch.allclose(torch.as_tensor(got), torch.as_tensor(want), rtol=1e-5), (function, got, want)
        for function in (
            lambda t: t * 2 + 1, torch.sign, lambda t: t.to(torch.bfloat16), torch.zeros_like, torch.clone,
            lambda t: t > 0, lambda t: torch.where(t > 0, t, -t), lambda t: t.new_zeros(t.shape), lambda t: t / t.max(),
        ):  # fmt: skip
            got = function(p)
            assert isinstance(got, ShardedDTensor) and torch.equal(whole(got), function(q)), function
    assert model.scale.detach().equal(model.scale.detach())
    replicated = model.up.weight.redistribute(placements=[torch.distributed.tensor.Replicate()])
    assert torch.equal(replicated.to_local(), reference.up.weight)
    for function in (
        lambda w: w @ torch.ones(24), lambda w: w.view(-1), lambda w: w.sum(0), lambda w: w + torch.ones(37, 1),
        lambda w: w[0],
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="full_tensor"):
            function(model.up.weight.detach())
        assert torch.equal(function(model.up.weight), function(reference.up.weight)), "a parameter is gathered"
    with torch.no_grad():
        assert torch.equal(torch.ones(24) @ model.down.weight, torch.ones(24) @ reference.down.weight)
        with pytest.raises(NotImplementedError, match="full_tensor"):
            model.up.weight[0].zero_()


def test_operations(two_ranks):
    two_ranks.run(operations)


def saved_and_loaded(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    _, model = pair()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 24)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder)
    torch.manual_seed(9)
    other = mfsdp.fully_shard(MLP(), units=["down"])  # cut in another way
    again = torch.optim.AdamW(other.parameters())
    other(torch.randn(2, 24)).sum().backward()
    again.step()
    state = {"model": other.state_dict(), "optim": again.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optim"])
    for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q)), n
        for key, value in optimizer.state[p].items():
            mine = again.state[q][key]
            assert torch.equal(getattr(mine, "full_tensor", lambda m=mine: m)(), whole_or_same(value)), (n, key)


def whole_or_same(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def test_distributed_checkpoint(two_ranks, tmp_path):
    two_ranks.run(saved_and_loaded, str(tmp_path))


def loaded(folder: str) -> bool:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(1)
    model = mfsdp.fully_shard(MLP())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    reference, _ = pair()
    return all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def saved(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": pair()[1].state_dict()}, checkpoint_id=folder)


def test_a_checkpoint_of_two_ranks_loads_on_four_and_on_one(two_ranks, four_ranks, tmp_path):
    two_ranks.run(saved, str(tmp_path))
    assert all(four_ranks.run(loaded, str(tmp_path)))
    import torch.distributed.checkpoint as dcp

    model = mfsdp.fully_shard(MLP())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    torch.manual_seed(0)
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), MLP().parameters(), strict=True))


def plain_state_loads() -> None:
    """`load_state_dict` of whole tensors, as from a file, keeps each rank's rows."""
    reference, model = pair()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(1)
    model.load_state_dict(reference.state_dict())
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_whole_state_dicts_load(two_ranks):
    two_ranks.run(plain_state_loads)


def larger_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))
    torch.manual_seed(0)
    reference = MLP()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["up"], mesh=mesh)
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    torch.manual_seed(mesh["dp_shard"].get_local_rank())
    x = torch.randn(4, 24)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    for p in reference.parameters():
        dist.all_reduce(p.grad, group=mesh["dp_shard"].get_group())
        p.grad /= 2
    assert all(error(whole(p.grad), q.grad) < 1e-6 for p, q in zip(model.parameters(), reference.parameters()))


def test_an_axis_of_a_larger_mesh(four_ranks):
    four_ranks.run(larger_mesh)


def test_a_planning_mesh_says_that_it_cannot_communicate():
    layout = plan([("w", (5, 4))], 2)
    at = layout.local(0, 0)
    tensor = ShardedDTensor(torch.zeros(at.shape), ShardSpec(layout, 0, local_mesh("cpu", (2,))))
    with pytest.raises(RuntimeError, match="sharded for planning"):
        tensor.full_tensor()
