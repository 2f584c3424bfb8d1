"""What `fully_shard` refuses by name, before anything has changed."""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.two_tensor import TwoTensor

import mfsdp
from mfsdp.dtensor.shard_spec import local_mesh
from tests.helpers.models import GPT, MLP, Block
from tests.helpers.snapshots import snapshot


def with_weight(weight: torch.Tensor, **attributes: Any) -> nn.Module:
    model = MLP()
    model.up.weight = nn.Parameter(weight)
    for name, value in attributes.items():
        setattr(model.up.weight, name, value)
    return model


def cut(**attributes: Any) -> nn.Module:
    return with_weight(torch.randn(37, 24), **attributes)


def with_a_gradient() -> nn.Module:
    model = MLP()
    model(torch.ones(2, 24)).sum().backward()
    return model


def hooked(how: str) -> nn.Module:
    model = MLP()
    getattr(model.down.bias, how)(lambda *args: None)
    return model


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(4))


def hung() -> nn.Module:
    model = MLP()
    mfsdp.fully_shard(model.down)
    model.up.bias = model.down.bias
    return model


def two_tensor() -> nn.Module:
    return with_weight(TwoTensor(torch.ones(37, 24), torch.full((37, 24), 2.0)))


def summand() -> nn.Module:
    mesh = local_mesh("cpu", (1,))
    return with_weight(DTensor.from_local(torch.ones(37, 24), mesh, [Partial()], run_check=False))


class Checked(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def checked() -> nn.Module:
    model = MLP()
    model.up.weight = Checked(torch.ones(37, 24))
    return model


REFUSED = {
    "a tensor subclass": (two_tensor, NotImplementedError, "up.weight is a TwoTensor, a .*ignored_params"),
    "a parameter class of its own": (checked, NotImplementedError, "up.weight is a Checked, a tensor subclass"),
    "a summand": (summand, ValueError, r"up.weight is a DTensor .*P\(sum\) is neither Shard nor Replicate"),
    "a lazy module": (lazy, ValueError, "1.weight has no shape yet.*run one forward"),
    "a shard in another module": (hung, ValueError, "up.bias is a shard of unit '.root.'.*one call"),
    "a sparse layout": (
        lambda: with_weight(torch.eye(4).to_sparse()), ValueError, "up.weight has layout torch.sparse_coo.*to_dense"
    ),
    "a gradient": (with_a_gradient, ValueError, "scale has a gradient, which would be lost"),
    "a hook": (lambda: hooked("register_hook"), ValueError, "down.bias has hooks, which would be lost"),
    "a later hook": (lambda: hooked("register_post_accumulate_grad_hook"), ValueError, "down.bias has hooks"),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)), NotImplementedError, r"0.weight.*sparse=True\)"
    ),
    "sparse gradients of a bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True)), NotImplementedError, "0.weight.*sparse=False"
    ),
    "a piece of tensor parallelism": (
        lambda: cut(tensor_model_parallel=True, partition_dim=1, partition_stride=1),
        NotImplementedError,
        "up.weight has tensor_model_parallel=True.* nothing says over which ranks. Give the mesh of both.*"
        "param.tensor_model_parallel = False",
    ),
    "sequence parallelism": (lambda: cut(sequence_parallel=True), NotImplementedError, "has sequence_parallel=True"),
    "an average over tensor parallelism": (
        lambda: cut(average_gradients_across_tp_domain=True), NotImplementedError, "nothing says over which ranks"
    ),
    "an expert": (
        lambda: cut(allreduce=False),
        NotImplementedError,
        "up.weight has allreduce=False, an expert in a plain tensor, and nothing says over which ranks. "
        "Give mesh=sparse.'efsdp'.*param.allreduce = True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(what):
    build, kind, message = REFUSED[what]
    model = build()
    before = snapshot(model)
    with pytest.raises(kind, match=message):
        mfsdp.fully_shard(model)
    assert snapshot(model) == before


class Parameter(nn.Parameter):
    """As many a library has."""


def trivial() -> nn.Module:
    model = MLP()
    model.up.weight = Parameter(model.up.weight.detach())
    return model


def of_one_rank(**attributes: Any) -> nn.Module:
    """As TransformerEngine makes them without tensor parallelism."""
    model = cut(tensor_model_parallel=True, partition_dim=0, partition_stride=1, sequence_parallel=False)
    for name, value in attributes.items():
        setattr(model.up, name, value)
    return model


TAKEN = {
    "a trivial subclass": trivial,
    "Megatron's defaults": lambda: cut(
        tensor_model_parallel=False, partition_dim=-1, partition_stride=1, sequence_parallel=False, allreduce=True
    ),
    "one rank by the module": lambda: of_one_rank(tp_size=1),
    "one rank by the group": lambda: of_one_rank(tp_group=types.SimpleNamespace(size=lambda: 1)),
    "one rank by the configuration": lambda: of_one_rank(config=types.SimpleNamespace(tensor_model_parallel_size=1)),
    "a frozen sparse embedding": lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True).requires_grad_(False)),
}


@pytest.mark.parametrize("what", TAKEN)
def test_what_is_taken(what):
    model = TAKEN[what]()
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    mfsdp.fully_shard(model)
    assert all(torch.equal(p.full_tensor(), want[n]) for n, p in model.named_parameters())


def test_what_is_refused_may_be_ignored():
    model = two_tensor()
    mfsdp.fully_shard(model, ignored_params=[model.up.weight])
    assert type(model.up.weight) is TwoTensor and isinstance(model.up.bias, DTensor)


# modules that were sharded before


@contextlib.contextmanager
def kept(block: Any) -> Any:
    block.unshard()
    yield
    block.reshard()


def with_gradients(block: Any, x: torch.Tensor) -> Any:
    @contextlib.contextmanager
    def context() -> Any:
        block(x).sum().backward()
        yield
        block.zero_grad()

    return context()


def held(block: Any, x: torch.Tensor) -> Any:
    @contextlib.contextmanager
    def context() -> Any:
        block._mfsdp_unit.buffers[0].gradients.unreduced.kept[8] = torch.zeros(8)  # as no_sync on several ranks
        yield
        block.zero_grad()

    return context()


BUSY = {
    "unshard": (lambda m, x: kept(m), "unit 'blocks.0' is gathered; call reshard"),
    "unsharded": (lambda m, x: mfsdp.unsharded(m), "unit 'blocks.0' is gathered.*leave mfsdp.unsharded"),
    "summoned": (lambda m, x: mfsdp.summon_full_params(m), "unit 'blocks.0' is summoned; leave"),
    "gradients": (with_gradients, r"unit 'blocks.0' has gradients;.*zero_grad\(\)"),
    "gradients under no_sync": (held, "unit 'blocks.0' has gradients"),
}


@pytest.mark.filterwarnings("ignore:mfsdp. .* outside of a compiled graph")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("how", BUSY)
def test_wrapping_while_a_unit_below_is_not_at_rest(how, alone):
    """It is named by its path in what is wrapped, also where it was sharded ``alone``, as its call's root."""
    context, message = BUSY[how]
    model = GPT()
    mfsdp.fully_shard(model.blocks[0]) if alone else mfsdp.fully_shard(model.blocks, units=["0"])
    block = model.blocks[0]
    assert isinstance(block, Block)
    with context(block, torch.randn(2, 8, block.norm1.weight.shape[0])):
        before = snapshot(model)
        with pytest.raises(ValueError, match=message):
            mfsdp.fully_shard(model, units=[])
        assert snapshot(model) == before
    mfsdp.fully_shard(model)
    assert "_mfsdp_unit" in model.__dict__
