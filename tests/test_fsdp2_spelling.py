"""FSDP2's arguments and methods: they mean the same here, or raise with what to say instead."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.sharding import fsdp2_api
from mfsdp.sharding.fsdp2_api import cast_floats, with_casts
from tests.helpers.models import GPT, MLP, Block, llama
from tests.helpers.parity import averaged, compiled, error, whole

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


# policies


def test_policies_of_torch():
    given = fsdp.MixedPrecisionPolicy(BF16, F32, F64, cast_forward_inputs=False)
    model = mfsdp.fully_shard(MLP().double(), mp_policy=given)
    p = model._mfsdp_unit.buffers[0].precision
    assert (p.main, p.compute, p.comm, p.grad_comm) == (F64, BF16, BF16, F32)
    policy = model._mfsdp_unit.policy
    assert policy.output_dtype is F64 and policy.cast_forward_inputs is False
    pure = mfsdp.fully_shard(MLP().bfloat16(), mp_policy=fsdp.MixedPrecisionPolicy())
    assert pure._mfsdp_unit.buffers[0].precision.main is BF16


@pytest.mark.parametrize("newer", [False, True])
def test_without_reduce_dtype_gradients_are_sent_as_this_version_of_fsdp2_sends_them(newer, monkeypatch):
    """Up to 2.14 in ``param_dtype``, from 2.15 on in the parameter's own dtype."""
    assert fsdp2_api._reduces_in_own_dtype() == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15))
    monkeypatch.setattr(fsdp2_api, "_reduces_in_own_dtype", lambda: newer)
    given = fsdp.MixedPrecisionPolicy(BF16)
    for model, wire in (
        (MLP(), F32 if newer else BF16),
        (MLP().bfloat16(), BF16),
        (MLP().double(), F64 if newer else BF16),
    ):
        own = model.up.weight.dtype
        p = mfsdp.fully_shard(model, mp_policy=given)._mfsdp_unit.buffers[0].precision
        assert (p.main, p.compute, p.grad_comm) == (own, BF16, wire)
    said = fsdp2_api.policy_of(fsdp.MixedPrecisionPolicy(BF16, F32))
    assert said.resolve(F64).grad_comm is F32


def test_dtypes_of_single_parameters_are_refused():
    given = fsdp.MixedPrecisionPolicy(BF16)
    object.__setattr__(given, "param_dtype_override_fn", lambda p: F32)  # a field from torch 2.15 on
    with pytest.raises(NotImplementedError, match="param_dtype_override_fn.*an mp_policy of its own"):
        mfsdp.fully_shard(MLP(), mp_policy=given)


def test_names_of_fsdp2_in_our_policy():
    ours = mfsdp.MixedPrecisionPolicy(compute_dtype=BF16, grad_comm_dtype=F32)
    assert mfsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32) == ours
    with pytest.raises(ValueError, match="param_dtype=torch.bfloat16 is FSDP2's name of compute_dtype=torch.float32"):
        mfsdp.MixedPrecisionPolicy(compute_dtype=F32, param_dtype=BF16)
    with pytest.raises(ValueError, match="output_dtype=torch.int8 is not supported"):
        mfsdp.MixedPrecisionPolicy(output_dtype=torch.int8)


# casts


class Two(nn.Module):
    """Blocks of other dtypes, with arguments of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.own = Inner(), Inner()
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(x, {"more": (x, 3)}, mask=torch.ones(len(x), dtype=torch.bool))
        return self.own(y.float(), {"more": (x, 3)}, mask=None)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, rest: dict[str, Any], mask: torch.Tensor | None) -> torch.Tensor:
        assert rest["more"][0].dtype == x.dtype == self.linear.weight.dtype
        return self.linear(x) + rest["more"][0] * rest["more"][1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mfsdp. .* outside of a compiled graph")
@pytest.mark.parametrize(
    "lowering", ["none", "eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
)
def test_inputs_and_outputs_are_cast(lowering):
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 6, requires_grad=True)
    want = Two()
    want.load_state_dict(model.state_dict())
    mfsdp.fully_shard(model.narrow, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F64))
    assert model.narrow(x, {"more": (x, 3)}, mask=None).dtype is F64
    mfsdp.fully_shard(model, mp_policy=mfsdp.MixedPrecisionPolicy(output_dtype=BF16))
    run = compiled(model, lowering)
    got = run(x)
    assert got.dtype is BF16
    got.float().square().mean().backward()
    mine, x.grad = x.grad, None
    want(x).square().mean().backward()
    assert error(mine, x.grad) < 0.05
    assert all(error(whole(p.grad), q.grad) < 0.05 for p, q in zip(model.parameters(), want.parameters(), strict=True))


def test_inputs_are_left_alone_when_told_so():
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=BF16, cast_forward_inputs=False)
    model = mfsdp.fully_shard(nn.Linear(3, 3), mp_policy=policy)
    with pytest.raises(RuntimeError, match="same dtype"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.randn(2, 3))


def test_casts_add_nothing_where_dtypes_are_right():
    """Also: nothing is made anew."""

    @dataclass
    class Record:
        x: torch.Tensor
        n: int = 3

    Pair = namedtuple("Pair", "a b")
    x, wide, index = torch.ones(2, dtype=BF16), torch.ones(2), torch.ones(2, dtype=torch.int64)
    for value in ({"a": [x, (index, None)]}, Record(x), Pair(x, 1), OrderedDict(a=x), torch.Size([2]), "text", {x}):
        assert cast_floats(value, BF16) is value
    assert cast_floats(Pair(wide, index), BF16).a.dtype is BF16 and type(cast_floats(Pair(wide, 1), BF16)) is Pair
    assert (
        cast_floats(Record(wide), BF16).x.dtype is BF16 and type(cast_floats(OrderedDict(a=wide), BF16)) is OrderedDict
    )
    narrow = [mfsdp.trace(MLP(), (torch.ones(4, 24),), units=["up"], mp_policy=mfsdp.MixedPrecisionPolicy(**policy))
              for policy in ({"compute_dtype": F32}, {"compute_dtype": F32, "cast_forward_inputs": False})]  # fmt: skip
    calls = [[n.target for p in programs for n in p.gm.graph.nodes if n.op == "call_function"] for programs in narrow]
    assert calls[0] == calls[1]


# arguments


def kept(model: nn.Module) -> dict[str, bool]:
    return {m._mfsdp_unit.fqn: not m._mfsdp_unit.buffers[0].spec.reshard
            for m in model.modules() if isinstance(m, mfsdp.FSDPModule)}  # fmt: skip


def test_the_outermost_keeps_its_parameters_where_fsdp2_does():
    model = mfsdp.fully_shard(GPT(), units=[Block], reshard_after_forward=None)
    assert kept(model) == {"(root)": True, "blocks.0": False, "blocks.1": False}
    model = GPT()
    for block in model.blocks:
        assert kept(mfsdp.fully_shard(block, reshard_after_forward=None)) == {"(root)": True}
    mfsdp.fully_shard(model, reshard_after_forward=None)
    assert kept(model) == {"(root)": True, "blocks.0": False, "blocks.1": False}
    model = GPT()
    mfsdp.fully_shard(model.blocks[0], reshard_after_forward=False)
    mfsdp.fully_shard(model)
    assert kept(model) == {"(root)": False, "blocks.0": True}


class Elsewhere(fsdp.CPUOffloadPolicy):
    pass


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"reshard_after_forward": 2}, NotImplementedError, "reshard_after_forward=2: resharding to a smaller group"),
        ({"reshard_after_forward": "yes"}, ValueError, "choose True, False or None"),
        ({"offload_policy": fsdp.CPUOffloadPolicy()}, NotImplementedError, "CPUOffloadPolicy: offloading is not"),
        ({"offload_policy": Elsewhere()}, NotImplementedError, "offloading is not supported"),
        ({"shard_placement_fn": lambda p: None}, NotImplementedError, "shard_placement_fn: which rows"),
    ],
)
def test_arguments_that_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        mfsdp.fully_shard(MLP(), **arguments)
    assert mfsdp.fully_shard(MLP(), offload_policy=fsdp.OffloadPolicy())


def test_what_is_no_module():
    for given in (3, [], [nn.Linear(2, 2), 3], [[nn.Linear(2, 2)]]):
        with pytest.raises(ValueError, match="is no module"):
            mfsdp.fully_shard(given)
    with pytest.raises(ValueError, match="several modules are one unit; leave out units="):
        mfsdp.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], units=["0"])


def together(lowering: str, strategy: int) -> list[float]:
    """torchtitan's way: a norm and the head behind it are one unit. Errors of gradients, checkpointed and again."""
    torch.manual_seed(0)
    reference = GPT(tied=False)
    model = GPT(tied=False)
    model.load_state_dict(reference.state_dict())
    for part in (*model.blocks, [model.norm, model.head]):
        assert mfsdp.fully_shard(part, strategy=strategy) is part
    mfsdp.fully_shard(model, strategy=strategy)
    assert model.norm._mfsdp_unit is model.head._mfsdp_unit and model.norm._mfsdp_unit.fqn == "norm+head"
    torch.manual_seed(dist.get_rank())
    worst = []
    for m in (model, copy.deepcopy(model)):
        run = compiled(m, lowering)
        reference.zero_grad()
        for microbatch in range(2):
            with mfsdp.no_sync(m) if microbatch == 0 else nullcontext():
                ids = torch.randint(31, (2, 8))
                run(ids).square().mean().backward()
                reference(ids).square().mean().backward()
        averaged(reference)
        pairs = zip(m.parameters(), reference.parameters(), strict=True)
        worst.append(max(error(whole(p.grad), q.grad) for p, q in pairs))
    return worst


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lowering", "strategy"),
    [
        ("none", 1),
        ("eager", 3),
        *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in (("none", 3), ("eager", 1))),
    ],
)
def test_several_modules_as_one_unit(two_ranks, lowering, strategy):
    assert max(max(worst) for worst in two_ranks.run(together, lowering, strategy)) < 1e-6


@pytest.mark.slow
def test_several_modules_are_one_unit_of_the_listing():
    model = GPT(tied=False)
    mfsdp.fully_shard([model.norm, model.head])
    mfsdp.fully_shard(model)
    for m in (model.norm, model.head):
        assert isinstance(m, mfsdp.FSDPModule)
    assert type(model.head(torch.ones(1, 16))) is torch.Tensor
    forward = mfsdp.trace(model, (torch.zeros(1, 8, dtype=torch.int64),), world=2).forward
    assert [u.fqn for u in forward.units] == ["(root)", "norm+head"]
    for part in (model.norm, model.head):
        with pytest.raises(ValueError, match=r"is one unit with other modules \('norm\+head'\), and cannot be traced"):
            mfsdp.trace(part, (torch.ones(1, 16),))
    model.head.unshard()
    model.norm.reshard()
    assert list(model.state_dict()) == list(GPT(tied=False).state_dict())


@pytest.mark.slow
def test_several_modules_are_explained_as_what_they_hold():
    """Also where an inner call was made first, and the first module of the unit comes later in the model."""
    ids = torch.zeros(1, 8, dtype=torch.int64)
    reports = []
    for joint in (True, False):
        model = GPT(tied=False)
        mfsdp.fully_shard(model.blocks[0].up)
        for part in [[model.head, model.blocks[0]]] if joint else [model.head, model.blocks[0]]:
            mfsdp.fully_shard(part)
        mfsdp.fully_shard(model)
        reports.append(mfsdp.explain(model, (ids,), world=2, suggest=False))
    sizes = [{e.name: e.nbytes for e in r.ledger.entries} for r in reports]
    shared = sum(p.numel() for p in GPT(tied=False).parameters()) * 4 / 2
    for found in sizes:
        assert shared <= found["main weights"] <= 1.1 * shared, found


# methods


def test_every_method_of_fsdp2_is_there():
    theirs = {n for n, f in inspect.getmembers(fsdp.FSDPModule, inspect.isfunction) if not n.startswith("_")}
    assert not {n for n in theirs if not hasattr(mfsdp.FSDPModule, n)}
    assert not isinstance(mfsdp.fully_shard(MLP()), fsdp.FSDPModule), "its docstring says why"


@pytest.mark.filterwarnings("ignore:mfsdp. .* outside of a compiled graph")
def test_methods_that_mean_something():
    model = mfsdp.fully_shard(MLP(), units=["up"])
    model.set_is_last_backward(True)
    model.set_unshard_in_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reshard_after_backward(True)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_unused_params(False)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_keep_unsharded_storage(True)  # torch 2.15
    model.set_manual_backward_finalization(False)  # torch 2.15
    model.set_reduce_scatter_divide_factor(3.0)
    assert model._mfsdp_unit.buffers[0].spec.divide == 3.0
    assert model.unshard() is None
    model.unshard(async_op=True).wait()
    model.reshard()
    model.reset_iter_state()
    with pytest.raises(ValueError, match="reshard_after_forward=2: choose True or False"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="requires_all_reduce=1: choose"):
        model.set_requires_all_reduce(1)


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("set_modules_to_forward_prefetch", [], "options={'prefetch': n}"),
        ("set_modules_to_backward_prefetch", [], "options={'prefetch': n}"),
        ("set_reduce_scatter_max_input_buffers", 2, "options={'reduce_lag': n}"),
        ("set_all_reduce_hook", print, r"param.register_hook\(hook\)"),
        ("set_post_optim_event", None, "what the current stream was given"),
        ("set_custom_all_gather", None, "mfsdp.passes"),
        ("set_custom_reduce_scatter", None, "mfsdp.passes"),
        ("set_symm_mem_for_comm", "NCCL", "options={'nccl_ub': True}"),
        ("set_reshard_after_backward", False, "strategy='optim_grads'"),
        ("set_separate_reduce_scatter_group", False, "a process group of their own"),
        ("set_reduce_scatter_unused_params", True, "for units that a rank does not use: fully_shard"),
        ("set_allocate_memory_from_process_group_for_comm", True, "allocated as tensors"),
        ("set_manual_backward_finalization", True, "finishes its reductions by itself"),  # torch 2.15
        ("finalize_backward", None, "mfsdp.no_sync holds them back"),  # torch 2.15
    ],
)
def test_methods_that_raise(name, argument, message):
    model = mfsdp.fully_shard(MLP())
    with pytest.raises(NotImplementedError, match=f"{name}.* is not supported: .*{message}"):
        getattr(model, name)(argument)


def all_reduces_of_hsdp() -> list[float]:
    """Errors of gradients: two microbatches, all-reduced at the second."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_outer", "dp_shard"))
    torch.manual_seed(0)
    reference = MLP()
    model = MLP()
    model.load_state_dict(reference.state_dict())
    mfsdp.fully_shard(model, mesh=mesh)
    run = compiled(model, "eager")
    torch.manual_seed(dist.get_rank())
    for last in (False, True):
        x = torch.randn(3, 24)
        model.set_requires_all_reduce(last)
        run(x).square().sum().backward()
        reference(x).square().sum().backward()
    out = []
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(q.grad)
        out.append(error(whole(p.grad), q.grad / 2))
    return out


@pytest.mark.dist
def test_all_reduce_at_the_last_microbatch(two_ranks):
    assert max(max(errors) for errors in two_ranks.run(all_reduces_of_hsdp)) < 1e-5


def test_casts_of_any_arguments_are_traced():
    """On every version: 2.11 broke the graph at ``None``, which transformers hands on everywhere."""
    others = (None, 3, True, 0.5, "sdpa", BF16, slice(1, 2), range(3), torch.Size([2]), nn.Linear, len, {1, 2})

    def forward(self: object, x: torch.Tensor, *others: object, **more: object) -> torch.Tensor:
        return x + len(others) + len(more)

    torch._dynamo.reset()
    run = torch.compile(with_casts(forward, BF16, F32), backend="eager", fullgraph=True)
    assert run(None, torch.ones(2), *others, nothing=None, several=[*others]).dtype is F32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mfsdp. .* outside of a compiled graph")
@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_results_in_containers_of_others(lowering):
    policy = fsdp.MixedPrecisionPolicy(BF16, F32, output_dtype=F32)
    model = mfsdp.fully_shard(llama(), units=["LlamaDecoderLayer"], mp_policy=policy)
    out = compiled(model, lowering)(torch.zeros(2, 5, dtype=torch.int64))
    assert type(out).__name__ == "CausalLMOutputWithPast" and out.logits.dtype is F32
