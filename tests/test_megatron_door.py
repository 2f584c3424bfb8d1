"""`mfsdp.integrations.megatron_fsdp`: programs of megatron-fsdp with the import changed, against unsharded training."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from examples.parallel.model import Mixtral, MixtureLayer
from mfsdp.integrations import megatron_fsdp as door
from mfsdp.integrations.megatron_fsdp import experimental, uneven_dtensor, v2
from mfsdp.integrations.megatron_fsdp.arguments import Arguments
from mfsdp.integrations.megatron_fsdp.experimental import Flat, Partial, Placements, Replicate
from tests.helpers.experts import meshes, plain_experts
from tests.helpers.models import MLP
from tests.helpers.parallel import reset, tokens, trained_alike, twin
from tests.helpers.parity import averaged, error

EAGER = {"lowering": "eager"}
Transformer = nn.Transformer  # which a test replaces
F32, BF16 = torch.float32, torch.bfloat16


def batch(step: int, width: int = 24) -> torch.Tensor:
    """Another one on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * step + rank))


def pair(kind: type[nn.Module] = MLP) -> tuple[nn.Module, nn.Module]:
    """A model and a copy of it."""
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups."""
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.3}], lr=0.01)


def steps(model: nn.Module, reference: nn.Module, optimizer: Any, theirs: Any, count: int = 3) -> float:
    """Trains both; returns the largest difference of losses and weights."""
    worst = [0.0]
    for step in range(count):
        losses = [m(batch(step)).square().mean() for m in (model, reference)]
        for loss in losses:
            loss.backward()
        if dist.is_initialized():
            averaged(reference)
        for o in (optimizer, theirs):
            o.step()
            o.zero_grad()
        worst.append(error(*losses))
    return max(*worst, *differences(model, reference))


def differences(model: nn.Module, reference: nn.Module) -> list[float]:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [error(p.full_tensor(), q) for p, q in pairs]  # type: ignore[attr-defined]


# Its Quick Start


def quick_start() -> str:
    """The program of the installed package's page, with the import changed, on CPUs."""
    page = str(importlib.metadata.metadata("megatron-fsdp").get_payload())
    code = re.findall(r"```python\n(.*?)```", page.split("Quick Start")[1], re.DOTALL)[0]
    changed = code.replace("from megatron_fsdp import", "from mfsdp.integrations.megatron_fsdp import")
    assert changed != code and "fully_shard_optimizer" in code
    return changed.replace('"cuda"', '"cpu"').replace("1, 512, 512", "1, 8, 32")


def transformer(seed: int) -> nn.Transformer:
    torch.manual_seed(seed)
    model = Transformer(32, 2, 1, 1, 64, dropout=0.0)
    torch.manual_seed(dist.get_rank())
    return model


@contextmanager
def inside(folder: str, **environment: str) -> Iterator[None]:
    home = os.getcwd()
    os.chdir(folder)
    try:
        with patch.dict(os.environ, environment):
            yield
    finally:
        os.chdir(home)


def its_quick_start(folder: str) -> dict[str, float]:
    code, page = quick_start(), dict[str, Any]()
    with inside(folder, MFSDP_OPTIONS='{"lowering": "eager"}'):
        reference = transformer(0)
        with (
            patch.object(dist, "init_process_group"),
            patch.object(torch.cuda, "set_device"),
            patch.object(nn, "Transformer", lambda: transformer(0)),
        ):
            exec(compile(code, "README", "exec"), page)
        theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
        out = reference(page["inp"], page["inp"])
        nn.functional.mse_loss(out, page["tgt"]).backward()
        averaged(reference)
        theirs.step()
        worst = {"output": error(page["output"], out), "weights": max(differences(page["fsdp_model"], reference))}
        # another process: new values, no state
        trained, moments = page["fsdp_model"].state_dict(), page["optimizer"].state_dict()["state"]
        model = door.fully_shard_model(transformer(5), fsdp_unit_modules=["torch.nn.TransformerEncoder"])
        optimizer = door.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        page |= {"fsdp_model": model, "optimizer": optimizer}
        exec(compile(code[code.index("ckpt = {") :], "README", "exec"), page)
        now, state = model.state_dict(), optimizer.state_dict()["state"]
        assert list(now) == list(trained) and all(name.startswith("module.") for name in now)
        worst["loaded"] = max(error(now[n].full_tensor(), v.full_tensor()) for n, v in trained.items())
        for number, saved in moments.items():
            assert state[number]["step"] == saved["step"] == 1
            for key in ("exp_avg", "exp_avg_sq"):
                found = error(state[number][key].full_tensor(), saved[key].full_tensor())
                worst["loaded"] = max(worst["loaded"], found)
    return worst


@pytest.mark.dist
@pytest.mark.slow
def test_its_quick_start(two_ranks, tmp_path):
    pytest.importorskip("megatron_fsdp")
    for worst in two_ranks.run(its_quick_start, str(tmp_path)):
        assert worst["output"] < 1e-6 and worst["loaded"] == 0, worst
        assert worst["weights"] < 1e-4, worst  # biases of attention's keys have gradients of rounding alone


# Training


def both_calls(strategy: int | str, together: bool, meta: bool) -> float:
    """The two orders of its pages, with parameter groups."""
    model, reference = pair()
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_outer", "dp_shard", "cp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    given = {
        "device_mesh": mesh, "dp_shard_dim": "dp_shard_cp", "fsdp_unit_modules": [nn.Linear],
        "zero_dp_strategy": strategy, "init_model_with_meta_device": meta, "options": EAGER,
    }  # fmt: skip
    if meta:
        with torch.device("meta"):
            model = MLP()
        for m in (model, reference):
            m.reset_parameters = lambda m=m: nn.init.ones_(m.scale)
        torch.manual_seed(0)
    if together:
        model, optimizer = door.fully_shard(model, grouped(model), **given)
    else:
        model = door.fully_shard_model(model, **given)
        optimizer = door.fully_shard_optimizer(grouped(model))
    assert not optimizer.state and optimizer.state_dict()["state"] and not optimizer.state
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 4] and optimizer.param_groups[0]["lr"] == 0.1
    assert isinstance(model, door.MegatronFSDP) and isinstance(model.module, MLP)
    return steps(model, reference, optimizer, grouped(reference))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "together", "meta"),
    [(0, True, False), (1, False, False), ("optim_grads", True, False), (3, False, False), (3, True, True)],
)
def test_both_calls_train_as_the_unsharded_model(two_ranks, strategy, together, meta):
    assert two_ranks.run(both_calls, strategy, together, meta) == [0, 0]


def microbatches(strategy: int) -> float:
    """Gradient accumulation in its four spellings; the optimizer steps on the sum."""
    model, reference = pair()
    model = door.fully_shard_model(
        model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy, sync_model_each_microbatch=False, options=EAGER
    )
    optimizer = door.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def backward(number: int) -> None:
        for m in (model, reference):
            m(batch(number)).square().mean().backward()

    for step, spelling in enumerate(("no_sync", "is_last_microbatch", "auto", "sync")):
        if spelling == "no_sync":
            with model.no_sync():
                assert not model.is_last_microbatch
                backward(step)
        elif spelling == "is_last_microbatch":
            model.is_last_microbatch = False
            backward(step)
            model.is_last_microbatch = True
        elif spelling == "auto":
            model.set_model_auto_sync(True)
            with model.no_sync():  # no effect, as there
                backward(step)
        else:
            with model.sync():
                backward(step)
            assert not model.model_auto_sync
        backward(10 + step)
        model.finish_grad_sync()
        model.scale_gradients(0.5)
        averaged(reference)
        for q in reference.parameters():
            q.grad.mul_(0.5)
        optimizer.step(sync_grad_before_optimizer_step=True, install_optimized_model_weights=False)
        theirs.step()
        optimizer.zero_grad(zero_grad_buffer=True)
        theirs.zero_grad()
    worst = max(differences(model, reference))
    with model.no_sync():
        model.set_model_auto_sync(False)
        model(batch(0)).sum().backward()
    if strategy < 2:  # others have reduced
        for call in (optimizer.step, model.finish_grad_sync, lambda: optimizer.step(lambda: torch.zeros(()))):
            with pytest.raises(RuntimeError, match="are not reduced: every backward since the last step"):
                call()
    model.zero_grad_buffer()
    optimizer.step()
    return worst


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [1, 3])
def test_microbatches(two_ranks, strategy):
    """Ranks and microbatches are added in another order than in the reference."""
    assert max(two_ranks.run(microbatches, strategy)) < 1e-6


def hybrid(outer: int) -> float:
    """Two levels, and a group of other ranks than theirs."""
    model, reference = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
    given = {
        "device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer", "fsdp_unit_modules": [nn.Linear],
        "outer_dp_sharding_strategy": outer, "sync_model_each_microbatch": False, "options": EAGER,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"hybrid_fsdp_group has ranks \[\d, \d\], and \('dp_outer', 'dp_shard'\) of"):
        door.fully_shard_model(model, **given, hybrid_fsdp_group=mesh["dp_shard"].get_group())
    for name in ("dp_shard_dim", "dp_outer_dim"):
        with pytest.raises(ValueError, match=f"{name}='polo' is no axis of device_mesh, which has"):
            door.fully_shard_model(model, **{**given, name: "polo"})
    with pytest.raises(ValueError, match="dp_outer_dim='dp_outer' without dp_shard_dim"):
        door.fully_shard_model(model, **{**given, "dp_shard_dim": None})
    group = mesh[("dp_outer", "dp_shard")]._flatten("both").get_group()
    model = door.fully_shard_model(model, **given, hybrid_fsdp_group=group)
    assert model.get_distributed_index().get_dp_group() is group
    optimizer, theirs = door.fully_shard_optimizer(grouped(model)), grouped(reference)
    for step in range(2):
        with model.no_sync():
            model(batch(step)).square().mean().backward()
        model(batch(10 + step)).square().mean().backward()
        for number in (step, 10 + step):
            reference(batch(number)).square().mean().backward()
        averaged(reference)
        for o in (optimizer, theirs):
            o.step()
            o.zero_grad()
    return max(differences(model, reference))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("outer", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_two_levels(four_ranks, outer):
    """The order of additions differs; AdamW divides by small numbers."""
    assert max(four_ranks.run(hybrid, outer)) < 1e-4


def sums(folder: str) -> list[float]:
    """Sums of gradients, checks of them, its constructor, and a checkpoint with its names that plain torch wrote."""
    model, reference = pair()
    index = door.FSDPDistributedIndex(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dp_shard_dim="dp")
    config = door.DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    with patch.dict(os.environ, MFSDP_OPTIONS='{"lowering": "eager"}'):
        model = door.MegatronFSDP(
            model, index, config, fsdp_unit_modules=[nn.Linear], calculate_per_token_loss=True,
            report_nan_in_param_grad=True,
        )  # fmt: skip
    assert model.get_distributed_index().get_fsdp_group() is index.get_dp_group() and not model.model_auto_sync
    optimizer = door.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for m in (model, reference):
        m(batch(0)).square().mean().backward()
    averaged(reference)
    worst = [error(p.grad.full_tensor(), 2 * q.grad) for p, q in zip(model.parameters(), reference.parameters())]
    model.broadcast_params()
    before = [p.full_tensor() for p in model.parameters()]
    next(model.parameters()).grad.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"module\.scale|scale \(NaN\)"):
        optimizer.step()
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before))
    wrapped = nn.ModuleDict({"module": MLP()})
    if dist.get_rank() == 0:
        dcp.save({"model": wrapped.state_dict()}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    saved = {"model": {name: torch.zeros_like(t) for name, t in wrapped.state_dict().items()}}
    dcp.load(saved, checkpoint_id=folder, no_dist=True)
    worst += [error(t.full_tensor(), saved["model"][name]) for name, t in model.state_dict().items()]
    weights, _ = get_state_dict(model, optimizer)
    assert list(weights) == list(saved["model"])
    return worst


@pytest.mark.dist
def test_sums_checks_and_checkpoints(two_ranks, tmp_path):
    for worst in two_ranks.run(sums, str(tmp_path)):
        assert set(worst) == {0}


def per_module(kind: str) -> float:
    """v2 of the package, and of Megatron-LM: inner modules first, with two microbatches."""
    model, reference = pair()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    for m in (model.up, model.down, model):
        if kind == "experimental":
            placements = Placements([0, 1], [Replicate(), Flat()], [Partial(), Flat()], [Replicate(), Flat()])
            assert experimental.fully_shard(m, mesh, placements, options=EAGER) is None
        else:
            given = {"enable_unshard_prefetch": False, "enable_async_reduce_grad": False, "options": EAGER}
            assert v2.fully_shard(m, mesh=mesh["inner"], sharding_strategy="optim", **given) is m
            assert isinstance(m, v2.FSDPModule)
            m._log_parameter_groups()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert experimental.fully_shard_optimizer(optimizer) is None
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for last in (False, True):
            with experimental.microbatch(model, is_last=last):
                model(batch(2 * step + last)).square().mean().backward()
            reference(batch(2 * step + last)).square().mean().backward()
        averaged(reference)
        for o in (optimizer, theirs):
            o.step()
            o.zero_grad()
    full = uneven_dtensor.uneven_dtensor_to_full_tensor(model.up.weight)
    assert torch.equal(uneven_dtensor.gather_uneven_dtensor_to_full_tensor(model.up.weight).to_local(), full)
    assert uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(weights := model.state_dict()) is weights
    return max(differences(model, reference))


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["experimental", "v2"])
def test_both_second_versions_train_as_the_unsharded_model(two_ranks, kind):
    """As above, ranks and microbatches are added in another order."""
    assert max(two_ranks.run(per_module, kind)) < 1e-6


# One process, without a process group


@pytest.mark.parametrize("wrap", [None, "eager", "aot_eager"])
def test_one_process(wrap):
    """Also under ``torch.compile`` of the wrapper, which leaves the compiled module as it is."""
    model, reference = pair()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mfsdp")
        model, optimizer = door.fully_shard(model, grouped(model), fsdp_unit_modules=[nn.Linear], options=EAGER)
        run = torch.compile(model, backend=wrap) if wrap else model
        assert steps(run, reference, optimizer, grouped(reference)) == 0


def test_without_compilation():
    model = door.fully_shard_model(MLP(), compile=False)
    assert model.module._compiled_call_impl is None
    with pytest.raises(ValueError, match="compile=False, and these are options of the compiled model"):
        door.fully_shard_model(MLP(), compile=False, overlap_param_gather=False)
    part = MLP()
    part.up.compile()
    for shard in (door.fully_shard_model, v2.fully_shard):
        with pytest.raises(ValueError, match="compiles the module itself, and up is compiled already"):
            shard(part)
    assert type(part) is MLP


def test_methods_and_attributes():
    model = door.fully_shard_model(MLP(), options=EAGER)
    for name in ("start_param_sync", "start_grad_sync", "attach_grad_to_optimizer_state"):
        assert getattr(model, name)() is None
    model.synchronize_param_gather()
    model.install_optimized_model_weights()
    for name in ("param_and_grad_buffer", "raw_param", "microbatch_count"):
        assert not hasattr(model, name)
    with pytest.raises(AttributeError, match="MegatronFSDP.ddp_config does not exist in mfsdp: its settings are"):
        _ = model.ddp_config
    for call in (model.all_gather_and_wait_parameters_ready, lambda: model.mixed_precision_context(None)):
        with pytest.raises(NotImplementedError, match="is not supported"):
            call()
    with pytest.raises(ValueError, match=r"load them by model\.module\.load_state_dict"):
        model.load_state_dict(MLP().state_dict(), strict=False)
    with pytest.raises(ValueError, match="no device_mesh was given"):
        model.get_distributed_index()


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "AdamW": {"lr": torch.tensor(0.1)}, "NAdam": {}, "Rprop": {},
    "Adagrad": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_dicts_before_the_first_step_change_nothing(kind):
    """Neither asking for them nor loading one makes the training another."""
    (model, reference), make = pair(), lambda m: getattr(torch.optim, kind)(m.parameters(), **OPTIMIZERS[kind])
    model = door.fully_shard_model(model, fsdp_unit_modules=[nn.Linear], options=EAGER)
    optimizer, other = (door.fully_shard_optimizer(make(model)) for _ in range(2))
    weights = [p.full_tensor().clone() for p in model.parameters()]
    there = optimizer.state_dict()
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), weights, strict=True))
    assert all(state for state in there["state"].values()) and len(there["state"]) == 5
    if kind != "SGD":  # without a count of steps, and with dampening, its zeros are no fresh state
        other.load_state_dict(there)
        optimizer = other
    assert steps(model, reference, optimizer, make(reference)) == 0
    other.load_state_dict(optimizer.state_dict())
    assert {name for state in other.state.values() for name in state} >= {
        name for s in there["state"].values() for name in s
    }


# Arguments by name

INTO = [
    ({"zero_dp_strategy": 0}, {"strategy": "no_shard"}),
    ({"zero_dp_strategy": door.ShardingStrategy.OPTIM_GRADS}, {"strategy": "optim_grads"}),
    ({"device": torch.device("cpu")}, {"device": torch.device("cpu")}),
    ({"device": torch.device("cpu"), "init_model_with_meta_device": True}, {"device": None}),
    ({"fsdp_unit_modules": ["torch.nn.modules.linear.Linear", MLP]}, {"units": [nn.Linear]}),
    ({"fsdp_unit_modules": [nn.Linear], "enable_fine_grained_param_gather": True}, {"units": ["up", "down"]}),
    ({"sharding": {"may_be_unused": True, "strategy": 2}}, {"may_be_unused": True, "strategy": 2}),
    ({"overlap_grad_reduce": False}, {"reduce_lag": 0}),
    ({"overlap_param_gather": False}, {"prefetch": 0}),
    ({"overlap_param_gather": False, "options": {"prefetch": 2}}, {"prefetch": 2}),
    ({"nccl_ub": True}, {"nccl_ub": True}),
    ({"disable_symmetric_registration": True}, {"disable_symmetric_registration": True}),
    ({"preserve_fp32_weights": False}, {"mp_policy": door.MixedPrecisionPolicy(main_params_dtype=None)}),
    ({"grad_reduce_in_fp32": True}, {"mp_policy": door.MixedPrecisionPolicy(main_grads_dtype=F32)}),
    (
        {"mixed_precision_policy": door.MixedPrecisionPolicy(BF16, F32, BF16)},
        {"mp_policy": door.MixedPrecisionPolicy(BF16, F32, BF16)},
    ),
]
"""Arguments, and what they become."""

AUTOMATIC = {
    "hybrid_fsdp_expt_group": object(), "fsdp_group_ag": object(), "expt_fsdp_group_ag": object(), "tp_dim": "tp",
    "preproc_state_dict_for_dcp_ckpt": False, "average_in_collective": True, "disable_bucketing": True,
    "keep_fp8_transpose_cache": True, "fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True,
    "maxpool_double_buffer": True, "init_model_with_meta_device": True,
}  # fmt: skip
"""Arguments that change nothing here."""

REFUSED = [
    ({"cuda_graph_mode": True}, NotImplementedError, "cuda_graph_mode=True: .* mfsdp.capture_step"),
    ({"zero_dp_strategy": 4}, ValueError, "zero_dp_strategy=4: choose one of"),
    ({"zero_dp_strategy": True}, ValueError, "zero_dp_strategy=True: choose one of"),
    ({"outer_dp_sharding_strategy": 2}, ValueError, "outer_dp_sharding_strategy=2: choose one of"),
    ({"outer_dp_sharding_strategy": 1}, ValueError, "outer_dp_sharding_strategy need a device_mesh"),
    ({"dp_outer_dim": "dp_outer"}, ValueError, "need a device_mesh with that axis"),
    ({"hybrid_fsdp_group": object()}, ValueError, "hybrid_fsdp_group without dp_outer_dim"),
    ({"fsdp_unit_modules": nn.Linear}, ValueError, r"give a list, \[<class"),
    ({"fsdp_unit_modules": ["no.such.Class"]}, ValueError, "'no.such.Class' is no class of modules, nor the import"),
    ({"overlap_grad_reduce": "no"}, ValueError, "overlap_grad_reduce='no': choose True or False"),
    (
        {"mixed_precision_policy": mfsdp.MixedPrecisionPolicy()},
        ValueError,
        "give mfsdp.integrations.megatron_fsdp.Mixed",
    ),
    (
        {"mixed_precision_policy": door.MixedPrecisionPolicy(None), "preserve_fp32_weights": True},
        ValueError,
        "preserve_fp32_weights= and mixed_precision_policy= both say main_params_dtype",
    ),
    ({"options": {"polo": 1}}, ValueError, "does not know the option 'polo'"),
    ({"polo": 1}, TypeError, "unexpected keyword argument 'polo'"),
]

ELSEWHERE = {
    "device_mesh", "dp_shard_dim", "sync_model_each_microbatch", "calculate_per_token_loss", "report_nan_in_param_grad",
    "check_for_nan_in_grad", "use_decoupled_grad", "compile", "expt_device_mesh",
}  # fmt: skip
"""Arguments with a test of their own."""


@pytest.mark.parametrize(("given", "found"), INTO)
def test_arguments_are_translated(given, found):
    arguments = Arguments(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_of_them = arguments.for_module(MLP()) | arguments.backend_options()
    assert {name: all_of_them[name] for name in found} == found


def test_flattened_axes():
    with mfsdp.fake_ranks(8), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "dp_shard", "cp"))
        mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
        given = Arguments(mesh, "dp_shard_cp", "dp_outer").for_module(MLP())
        assert given["mesh"] is mesh
        assert given["dp_mesh_dims"] == {"shard": ("dp_shard", "cp"), "replicate": ("dp_outer",)}
        with pytest.raises(ValueError, match="outer_dp_sharding_strategy without dp_outer_dim"):
            Arguments(mesh, "dp_shard_cp", outer_dp_sharding_strategy=1).for_module(MLP())


@pytest.mark.parametrize("name", AUTOMATIC)
def test_arguments_without_effect(name):
    given = Arguments(**{name: AUTOMATIC[name]})
    assert given.for_module(MLP()) == Arguments().for_module(MLP()) and given.backend_options() == {}


@pytest.mark.parametrize(("given", "kind", "words"), REFUSED)
@pytest.mark.parametrize("call", ["fully_shard_model", "fully_shard"])
def test_refusals_change_nothing(given, kind, words, call):
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if call == "fully_shard" else None
    before = list(model.parameters())
    with pytest.raises(kind, match=words):
        getattr(door, call)(model, *([optimizer] if optimizer else []), **given)
    assert type(model) is MLP and all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer is None or all(p is q for p, q in zip(optimizer.param_groups[0]["params"], before, strict=True))


HOOKS = (
    "enable_fine_grained_param_gather_hook", "enable_fine_grained_param_gather_backward_hook",
    "fine_grained_recurse_module_types",
)  # fmt: skip
"""Arguments of the constructor alone."""


def test_every_argument_has_a_test():
    tested = {name for given, *_ in (*INTO, *REFUSED) for name in given} | AUTOMATIC.keys() | ELSEWHERE
    assert tested - {"polo"} == inspect.signature(Arguments).parameters.keys()


def test_names_and_signatures_are_those_of_the_package():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("megatron_fsdp")
        from megatron_fsdp import experimental as their_v2
        from megatron_fsdp import uneven_dtensor as their_uneven
    for name in theirs.__all__:
        assert name.startswith("__") or hasattr(door, name), name
    for path, name in (("fully_shard", "fully_shard_model"), ("megatron_fsdp", "MegatronFSDP")):
        assert getattr(importlib.import_module(f"{door.__name__}.{path}"), name) is getattr(door, name)
    own = {
        "preserve_fp32_weights",
        "grad_reduce_in_fp32",
        "check_for_nan_in_grad",
        "options",
        "sharding",
        "compile",
        "offload",
    }
    policy = "mixed_precision_policy"  # of another class
    for function in (theirs.fully_shard_model, theirs.fully_shard, theirs.fully_shard_optimizer):
        mine = inspect.signature(getattr(door, function.__name__)).parameters.values()
        found = [(p.name, p.default) for p in mine if p.name not in own and p.name != policy]
        wanted = [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name != policy]
        assert found == wanted
    for kind in ("FSDPDistributedIndex", "DistributedDataParallelConfig"):
        assert (
            inspect.signature(getattr(door, kind)).parameters.keys()
            == inspect.signature(getattr(theirs, kind)).parameters.keys()
        ), kind
    config, mine = theirs.DistributedDataParallelConfig(), door.DistributedDataParallelConfig()
    assert vars(config) == vars(mine)
    methods = {n for n, value in vars(theirs.MegatronFSDP).items() if inspect.isfunction(value) and n[0] != "_"}
    assert methods <= vars(door.MegatronFSDP).keys()
    index = {n for n, value in vars(theirs.FSDPDistributedIndex).items() if inspect.isfunction(value) and n[0] != "_"}
    assert index <= vars(door.FSDPDistributedIndex).keys()
    for name in their_v2.__all__:
        assert hasattr(experimental, name), name
    for name in ("fully_shard", "fully_shard_optimizer", "microbatch"):
        wanted = inspect.signature(getattr(their_v2, name)).parameters
        assert list(inspect.signature(getattr(experimental, name)).parameters)[: len(wanted)] == list(wanted)
    there = {n for n, value in vars(their_uneven).items() if inspect.isfunction(value) and n[0] != "_"}
    assert {n for n in there if getattr(their_uneven, n).__module__ == their_uneven.__name__} <= set(
        dir(uneven_dtensor)
    )
    taken = [inspect.signature(takes).parameters.keys() for takes in (door.MegatronFSDP, Arguments)]
    assert not inspect.signature(theirs.MegatronFSDP).parameters.keys() - set().union(*taken) - set(HOOKS)


def test_policies():
    """``None`` is the parameter's own dtype, as there; mfsdp's own policy widens it."""
    theirs = door.MixedPrecisionPolicy()
    assert (theirs.main_params_dtype, theirs.main_grads_dtype, theirs.grad_comm_dtype) == (F32, None, None)
    found = theirs.resolve(BF16)
    assert (found.main, found.grad, found.grad_comm, found.compute, found.sum(8)) == (F32, BF16, BF16, BF16, BF16)
    found = door.MixedPrecisionPolicy(main_grads_dtype=F32, grad_comm_dtype=BF16).resolve(BF16)
    assert (found.grad, found.grad_comm) == (F32, BF16)
    assert mfsdp.MixedPrecisionPolicy().resolve(BF16).grad is F32

    class Theirs:
        main_params_dtype, main_grads_dtype, grad_comm_dtype = None, F32, BF16

    model = door.fully_shard_model(MLP().bfloat16(), mixed_precision_policy=Theirs(), compile=False)
    assert model.mp_policy == door.MixedPrecisionPolicy(None, F32, BF16)
    assert model.module._mfsdp_unit.buffers[0].precision.main is BF16


def test_units_that_match_nothing_are_named():
    with pytest.warns(UserWarning, match="no module of this MLP is a Conv2d, Bilinear"):
        model = door.fully_shard_model(MLP(), fsdp_unit_modules=[nn.Conv2d, nn.Linear, nn.Bilinear])
    assert isinstance(model.module.up, mfsdp.FSDPModule)


@pytest.mark.parametrize("how", ["configuration", "hook"])
def test_settings_of_its_constructor_that_are_refused(how):
    if how == "configuration":
        with pytest.raises(NotImplementedError, match="bucket_size=5: units define what is communicated"):
            door.DistributedDataParallelConfig(bucket_size=5)
        config = door.DistributedDataParallelConfig(megatron_fsdp_main_grads_dtype=F32)
        with pytest.raises(ValueError, match="megatron_fsdp_main_grads_dtype: MegatronFSDP"):
            config.arguments()
        return
    with pytest.raises(NotImplementedError, match="backward_hook: compiled backward gathers"):
        door.MegatronFSDP(MLP(), None, enable_fine_grained_param_gather_backward_hook=True)


def test_optimizers_that_cannot_be_moved():
    model, other = MLP(), MLP()
    used = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ValueError, match="the Adagrad has state of unsharded parameters, which would be lost"):
        door.fully_shard(model, used)
    strange = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(ValueError, match=r"holds a parameter of shape \(24,\) that is not in the module"):
        door.fully_shard(model, strange)
    with pytest.raises(ValueError, match="torch's AdamW reads .grad, and use_decoupled_grad=True"):
        door.fully_shard(model, grouped(model), use_decoupled_grad=True)
    with pytest.raises(NotImplementedError, match="does not support LBFGS"):
        door.fully_shard(model, torch.optim.LBFGS(model.parameters()))
    assert type(model) is MLP
    del used, strange
    model = door.fully_shard_model(model, use_decoupled_grad=True, compile=False)
    with pytest.raises(ValueError, match="torch's AdamW reads .grad, and use_decoupled_grad=True"):
        door.fully_shard_optimizer(grouped(model))


def test_schedulers_and_copies():
    model = door.fully_shard_model(MLP(), options=EAGER)
    optimizer = door.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(batch(0)).sum().backward()
    before = model.module.scale.full_tensor().clone()
    optimizer.step(sync_grad_before_optimizer_step=True)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 and not torch.equal(model.module.scale.full_tensor(), before)
    again = copy.deepcopy(optimizer)
    assert (
        type(again) is type(optimizer) and again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    )


def test_older_spellings():
    model = door.fully_shard_model(MLP(), check_for_nan_in_grad=True, options=EAGER)
    with pytest.warns(DeprecationWarning, match="leave out model"):
        optimizer = door.fully_shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model(batch(0)).sum().backward()
    next(model.parameters()).grad.fill_(torch.inf)
    with pytest.raises(FloatingPointError, match="Inf"):
        optimizer.step()
    with pytest.raises(NotImplementedError, match="zero_grad_buffer=False"):
        optimizer.zero_grad(zero_grad_buffer=False)


def test_late_gradients_are_refused():
    """mfsdp ignored them silently once."""
    model = MLP()
    model.up.weight.skip_backward_post_hook = True
    with pytest.raises(NotImplementedError, match="up.weight has skip_backward_post_hook=True"):
        door.fully_shard_model(model)
    assert type(model) is MLP


@pytest.mark.parametrize(("given", "told"), [
    ({}, "expt_device_mesh without dp_shard_dim"),
    ({"dp_shard_dim": "dp_shard"}, "expt_device_mesh: up.weight is an expert's, and its module has parameters of"),
])  # fmt: skip
def test_experts_that_do_not_fit_their_mesh_are_refused(given, told):
    with mfsdp.fake_ranks(4):
        dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep"))
        model = MLP()
        model.up.weight.allreduce = False
        with pytest.raises(ValueError, match=told):
            door.fully_shard_model(model, device_mesh=dense, expt_device_mesh=sparse, **given)
        assert type(model) is MLP


def experts_apart() -> dict[str, float]:
    """Experts in plain tensors over a mesh of their own, sharded and compiled by one call."""
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    dense, sparse = meshes(2)
    sparse = DeviceMesh("cpu", sparse.mesh, mesh_dim_names=("dp_shard", "ep"))
    reference, model = twin(lambda: Mixtral(layers=1))
    plain_experts(model, sparse["ep"])
    policy = door.MixedPrecisionPolicy(main_params_dtype=None)
    whole = door.fully_shard_model(
        model, dense, dp_shard_dim="dp_shard", expt_device_mesh=sparse, fsdp_unit_modules=[MixtureLayer],
        mixed_precision_policy=policy, options={"lowering": "eager"},
    )  # fmt: skip
    every = [tokens(r) for r in range(dist.get_world_size())]
    return trained_alike(model, whole, reference, every[dist.get_rank()], every)


@pytest.mark.dist
@pytest.mark.slow
def test_experts_with_a_mesh_of_their_own(four_ranks):
    for wrong in four_ranks.run(experts_apart, timeout=200):
        assert max(wrong.values()) < 1e-9, wrong


FLAT, WHOLE, PART = Flat(), Replicate(), Partial()


@pytest.mark.parametrize(("axes", "found"), [
    ([(FLAT, FLAT, FLAT)], {"strategy": 3}),
    ([(WHOLE, FLAT, FLAT)], {"strategy": 2}),
    ([(WHOLE, PART, FLAT)], {"strategy": 1}),
    ([(WHOLE, PART, WHOLE)], {"strategy": 0}),
    ([(WHOLE, PART, WHOLE), (FLAT, FLAT, FLAT)], {"strategy": 3, "outer_strategy": "no_shard"}),
    ([(WHOLE, PART, FLAT), (FLAT, FLAT, FLAT)], {"strategy": 3, "outer_strategy": "optim"}),
    ([(FLAT, FLAT, FLAT), (FLAT, FLAT, FLAT)], {"dp_mesh_dims": {"shard": ("a", "b")}}),
    ([(FLAT, PART, FLAT)], None),
    ([(FLAT, FLAT, FLAT), (WHOLE, PART, WHOLE)], None),
])  # fmt: skip
def test_placements(axes, found):
    class Mesh:
        ndim, mesh_dim_names = len(axes), ("a", "b")[: len(axes)]

    placements = Placements(list(Mesh.mesh_dim_names), *map(list, zip(*axes)))
    if found is None:
        with pytest.raises(NotImplementedError, match="mfsdp places buffers by strategy"):
            placements.arguments(Mesh)  # type: ignore[arg-type]
        return
    there = placements.arguments(Mesh)  # type: ignore[arg-type]
    assert {name: there[name] for name in found} == found


def test_what_the_second_versions_refuse():
    with pytest.raises(ValueError, match="1 axes, and 2 placements in gradient="):
        Placements([0], [FLAT], [FLAT, FLAT], [FLAT])
    with pytest.raises(NotImplementedError, match="use_symm_mem=True: .* leave compile=False out"):
        experimental.fully_shard(MLP(), None, Placements([0], [FLAT], [FLAT], [FLAT]), use_symm_mem=True, compile=False)
    with pytest.raises(NotImplementedError, match="DBuffer: buffers of mfsdp are internal"):
        experimental.DBuffer.distribute_tensors([])
    with pytest.raises(NotImplementedError, match="enable_cuda_graph=True: .* mfsdp.capture_step"):
        v2.fully_shard(MLP(), enable_cuda_graph=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'polo'"):
        v2.fully_shard(MLP(), polo=1)
    model = v2.fully_shard(MLP(), gradient_scaling_factor=0.25, enable_trace_pool=True, compile=False)
    assert model._mfsdp_unit.buffers[0].spec.divide == 4
    with pytest.raises(ValueError, match="nothing of this MLP is sharded"), experimental.microbatch(MLP(), True):
        pass


# Settings, copies, and state before the first step


class Counts(torch.optim.Adam):
    """Counts steps in its groups, as fused optimizers of others do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["step"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
        super().step(closure)


@pytest.mark.parametrize("kind", [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), Counts,
])  # fmt: skip
def test_a_state_dict_before_the_first_step_changes_nothing(kind):
    model = door.fully_shard_model(MLP(), compile=False)
    optimizer = door.fully_shard_optimizer(kind(model.parameters()))
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    values = [v for state in optimizer.state_dict()["state"].values() for v in state.values()]
    assert values and not any(v.any() for v in values if isinstance(v, torch.Tensor))
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert not optimizer.state and not calls and all(p.grad is None for p in model.parameters())


def specs(model: nn.Module) -> list[Any]:
    return [b.spec for m in model.modules() if isinstance(m, mfsdp.FSDPModule) for b in m._mfsdp_unit.buffers]


def test_settings_reach_every_unit():
    with mfsdp.fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        scaled = v2.fully_shard(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh, gradient_scaling_factor=0.5, units=[nn.Linear],
            compile=False,
        )  # fmt: skip
        assert [spec.divide for spec in specs(scaled)] == [2.0, 2.0]
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
        index = door.FSDPDistributedIndex(both, "dp_shard", "dp_outer")
        config = door.DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params",
            outer_dp_sharding_strategy="optim",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        assert all(spec.outer_optim for spec in specs(door.MegatronFSDP(MLP(), index, config, compile=False)))
        with pytest.raises(ValueError, match="no group of both: give hybrid_fsdp_group"):
            index.get_dp_group()
        sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep"))
        model = nn.ModuleDict({"dense": nn.Linear(4, 4), "experts": nn.Sequential(nn.Linear(4, 4))})
        for param in model["experts"].parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        door.fully_shard_model(
            model, mesh, dp_shard_dim="dp_shard", expt_device_mesh=sparse, compile=False,
            fsdp_unit_modules=[nn.Linear], sharding={"may_be_unused": True},
        )  # fmt: skip
        assert len(specs(model)) == 2 and all(spec.optional for spec in specs(model))


def test_a_copy_is_compiled_and_checks_as_its_original():
    model = door.fully_shard_model(MLP(), report_nan_in_param_grad=True, options={"lowering": "eager"})
    other = copy.deepcopy(model)
    assert other.module is not model.module and other.module._compiled_call_impl is not None
    for param in other.parameters():
        param.grad = torch.full_like(param, torch.nan)
    with pytest.raises(FloatingPointError, match="are not finite"):
        other.finish_grad_sync()
    with pytest.raises(FloatingPointError, match="are not finite"):
        door.fully_shard_optimizer(torch.optim.SGD(other.parameters(), lr=1.0)).step()


def test_a_state_dict_beside_gradients_says_that_it_has_no_state():
    model = door.fully_shard_model(MLP(), compile=False)
    optimizer = door.fully_shard_optimizer(torch.optim.Adam(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match=r"call zero_grad\(\) first"):
        assert not optimizer.state_dict()["state"]
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimizer.state_dict()["state"]
