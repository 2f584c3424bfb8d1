"""Gradients that TransformerEngine's modules write themselves (``fuse_wgrad_accumulation``), on doubles of them, and
what those keep of weights. Numbers are small integers, so that every order of sums gives the same bits.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp.runtime import sync_collectives
from mfsdp.sharding.te_eager import MainGrads
from tests.helpers.engine_doubles import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from tests.helpers.parity import whole

N = 4


class Block(nn.Module):
    """Each weight in its own way: twice, also by another module, experts of which one sees nothing, a frozen one."""

    def __init__(self, fuse: bool, dtype: torch.dtype):
        super().__init__()
        how: Any = {"fuse_wgrad_accumulation": fuse, "dtype": dtype}
        self.norm = nn.LayerNorm(N, dtype=dtype)
        self.twice, self.once = LayerNormLinear(N, **how), LayerNormLinear(N, **how)
        self.experts, self.mlp = GroupedLinear(3, N, **how), LayerNormMLP(N, **how)
        self.mlp.fc2_weight.requires_grad_(False)
        self.recomputes = False

    def forward(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        x = checkpoint(self._forward, x, first, use_reentrant=False) if self.recomputes else self._forward(x, first)
        return x.remainder(5) + self.norm.weight * x + self.norm.bias

    def _forward(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        x = self.twice(x, None, first)
        x = self.twice(x, None, first) + F.linear(x, self.twice.weight)
        x = self.experts(x, [2, 0, len(x) - 2], first) + self.once(x, None, first)
        return self.mlp(x, None, first)


class Model(nn.Module):
    def __init__(self, fuse: bool, dtype: torch.dtype = torch.float32, blocks: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList([Block(fuse, dtype) for _ in range(blocks)])

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, first).remainder(3) + x
        return x.float().sum()


def batch(number: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randint(-1, 2, (5, N), generator=generator).float()


def pair(**how: Any) -> tuple[Model, Any]:
    """A plain model, and a sharded one whose modules write gradients themselves; nothing is turned off."""
    torch.manual_seed(0)
    plain, model = Model(False), Model(True)
    model.load_state_dict(plain.state_dict(), strict=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "mfsdp: fuse_wgrad")
        mfsdp.fully_shard(model, units=["blocks.*"], **how)
    assert all(block.twice.fuse_wgrad_accumulation for block in model.blocks)
    return plain, model


def alike(plain: nn.Module, model: nn.Module) -> None:
    """Gradients of the plain one, summed over ranks, are those of the sharded one."""
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            total = p.grad.clone()
            dist.all_reduce(total)
            assert torch.equal(whole(q.grad), total / dist.get_world_size()), name


def microbatches(strategy: str, syncs: bool, hold: bool | None) -> None:
    plain, model = pair(strategy=strategy)
    for step in range(2):
        for number in range(3):
            first = number == 0 if step else None
            model.set_requires_gradient_sync(syncs or number == 2, hold=hold)
            for m in (plain, model):
                m(batch(3 * step + number), first).backward()
        alike(plain, model)
        for m in (plain, model):
            m.zero_grad()


WAYS = [
    ("optim_grads_params", True, None),
    ("optim_grads_params", False, None),
    ("optim_grads_params", False, True),
    ("optim", False, None),
    ("no_shard", True, None),
]


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:mfsdp.* reads parameters")
@pytest.mark.parametrize(("strategy", "syncs", "hold"), WAYS)
def test_gradients_are_those_of_autograd(two_ranks, strategy, syncs, hold):
    two_ranks.run(microbatches, strategy, syncs, hold)


def oddly() -> None:
    """Recomputed; in a backward that is not for parameters; after one that an exception has ended; narrow."""
    plain, model = pair()
    for block in (*plain.blocks, *model.blocks):
        block.recomputes = True
    for m in (plain, model):
        x = batch(0).requires_grad_()
        torch.autograd.grad(m(x), x)
        loss = m(x)
        with pytest.raises(RuntimeError, match="enough"):
            (loss + _Fails.apply(x).sum()).backward()
        m.zero_grad()
        m(batch(1)).backward()
    alike(plain, model)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("enough")


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:mfsdp.* reads parameters")
def test_so_are_they_in_odd_backwards(two_ranks):
    two_ranks.run(oddly)


def kept(keeps: bool) -> None:
    """Between forward and backward nobody has a gathered buffer, nor a bucket once backward has ended."""
    torch.manual_seed(0)
    plain, model = Model(False, torch.bfloat16), Model(True, torch.bfloat16)
    model.load_state_dict(plain.state_dict(), strict=False)
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)
    mfsdp.fully_shard(model, units=["blocks.*"], mp_policy=policy, reshard_after_forward=not keeps)
    gathered: list[Any] = []
    buckets: list[Any] = []
    lent: list[Any] = []
    kind = type(model.blocks[0].once)
    weights = kind._get_weight_tensors

    def watched(function: Any, seen: list[Any]) -> Any:
        def call(*args: Any) -> Any:
            out = function(*args)
            seen.append(StorageWeakRef(out.untyped_storage()))
            return out

        return call

    def lends(self: Any) -> Any:
        out = weights(self)
        lent.extend(out)
        return out

    with (
        patch.object(sync_collectives, "gather_now", watched(sync_collectives.gather_now, gathered)),
        patch.object(MainGrads, "_zeros", watched(MainGrads._zeros, buckets)),
        patch.object(kind, "_get_weight_tensors", lends),
    ):
        loss = model(batch(0).bfloat16())
        assert gathered and all(ref.expired() is not keeps for ref in gathered)
        # Who has kept a weight has its shape, and nothing that looks like a value.
        assert len(lent) == 6 and all(w.shape == (N, N) and bool(w.isnan().all()) is not keeps for w in lent)
        loss.backward()
        assert all(ref.expired() for ref in buckets)
        assert len(buckets) == 2 * 2  # of each unit one, and one more for `twice`
        x = batch(0).bfloat16().requires_grad_()
        loss = model(x)
        torch.autograd.grad(loss, x)
        assert len(buckets) > 4 and all(ref.expired() for ref in buckets)
    plain(batch(0).bfloat16()).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.requires_grad:
            total = p.grad.float()
            dist.all_reduce(total)
            torch.testing.assert_close(whole(q.grad), total / 2, rtol=3e-2, atol=1.0, msg=name)


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:mfsdp.* reads parameters")
@pytest.mark.parametrize("keeps", [False, True])
def test_modules_keep_neither_weights_nor_buckets(two_ranks, keeps):
    """Their ``ctx`` has the weights, and what weights have; the loss has their ``ctx``."""
    two_ranks.run(kept, keeps)


OFF: dict[str, tuple[Any, dict[str, Any], str]] = {
    "Linear": (lambda: Linear(N, N, True), {}, "compiled without it only"),
    "recomputes": (lambda: LayerNormMLP(N, True, checkpoint=True), {}, "with checkpoint=True"),
    "parts": (lambda: LayerNormLinear(N, True, parts=2), {}, "is concatenated"),
    "travels": (
        lambda: LayerNormLinear(N, True),
        {"mp_policy": mfsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)},
        "writes no gradients in torch.bfloat16",
    ),
}


@pytest.mark.parametrize("what", OFF)
def test_it_is_turned_off_in_words(what):
    make, how, words = OFF[what]
    model = nn.Sequential(make())
    with pytest.warns(UserWarning, match=rf"turned off in 0 \(.*{words}"):
        mfsdp.fully_shard(model, **how)
    assert not model[0].fuse_wgrad_accumulation


def test_it_is_turned_off_where_a_weight_is_left_alone():
    model = nn.Sequential(GroupedLinear(2, N, True))
    with pytest.warns(UserWarning, match="not all of its weights"):
        mfsdp.fully_shard(model, ignored_params=[model[0].weight1])
