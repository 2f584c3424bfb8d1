"""Frozen parameters keep their dtype; when they are thawed they get main weights in the dtype of all others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp

BF16, F32 = torch.bfloat16, torch.float32


class Packed(nn.Module):
    """Bytes in a frozen parameter that says it is bf16, as 4-bit weights are kept: many are NaN."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.arange(64 * 64).view(64, 64).mul(37).to(torch.uint8).view(BF16)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.ones((), dtype=BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.packed.view(torch.uint8).float() - 128) * self.scale


@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_bits_of_packed_weights(strategy, lowering):
    reference = Packed()
    model = mfsdp.fully_shard(copy.deepcopy(reference), strategy=strategy)
    assert model.packed.isnan().to_local().sum() > 9
    assert (model.packed.dtype, model.scale.dtype) == (BF16, F32)
    assert model.packed.to_local().untyped_storage().nbytes() == reference.packed.nbytes
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    x = torch.randn(3, 64)
    out = run(x)
    assert torch.equal(out, reference(x))
    out.sum().backward()
    kept = model.state_dict()["packed"]
    assert kept.dtype is BF16
    assert torch.equal(kept.full_tensor().view(torch.int16), reference.packed.view(torch.int16))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)]).to(BF16)


@pytest.mark.parametrize("strategy", [1, 3])
def test_what_was_taken_before_a_thaw(strategy):
    """Writes to it do not reach the weights any more: they are refused, or told of where they cannot be seen."""
    model = layers()
    model[0].requires_grad_(False)
    mfsdp.fully_shard(model, units=[nn.Linear], strategy=strategy)
    taken = [model[0].weight.detach(), model.state_dict()["0.weight"]]
    rows = model[0].weight.to_local()
    taken[0].mul_(2)
    with pytest.warns(UserWarning, match="was taken of .* while it was frozen") as seen:
        model[0].requires_grad_(True)
        model(torch.ones(2, 12, dtype=BF16)).sum().backward()
    assert sum("while it was frozen" in str(w.message) for w in seen) == 1
    before = model[0].weight.full_tensor()
    for tensor in taken:
        with pytest.raises(RuntimeError, match="take it again"), torch.no_grad():
            tensor.mul_(2)
    with pytest.warns(UserWarning, match="was taken of .* while it was frozen"):
        late = taken[0].to_local()
    for plain in (rows.detach(), late):
        plain.mul_(2)
    assert torch.equal(model[0].weight.full_tensor(), before) and not model[0]._mfsdp_unit.buffers[0].weights.exposed
    for tensor in (model[0].weight.detach(), model.state_dict()["0.weight"]):
        tensor.mul_(2)
    assert torch.equal(model[0].weight.full_tensor(), 4 * before)


WHEN = ("between", "before backward", "summoned")


def trained(early: bool, strategy: int, lowering: str, flat: bool, when: str) -> dict[str, Any]:
    """Six steps; two layers are frozen, before the model is sharded or behind that, and train after the third."""
    model = layers()
    late = model[1:3]
    if early:
        late.requires_grad_(False)
    mfsdp.fully_shard(model, units=[nn.Linear], strategy=strategy)
    late.requires_grad_(False)
    narrow = late[0].weight.dtype
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if flat:
        optimizer = mfsdp.fully_shard_optimizer(optimizer, ahead=lowering != "none")
    same = {n: id(p) for n, p in model.named_parameters()}
    for step in range(6):
        x = torch.randn(3, 12, generator=torch.Generator().manual_seed(9 * step + dist.get_rank())).to(BF16)
        if step == 3 and when == "between":
            late.requires_grad_(True)
        if step == 3 and when == "summoned":
            with mfsdp.summon_full_params(model):
                late.requires_grad_(True)
        loss = run(x).float().square().mean()
        if step == 3 and when == "before backward":
            late.requires_grad_(True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(model)
    late.requires_grad_(False)
    late.requires_grad_(True)
    assert same == {n: id(p) for n, p in model.named_parameters()}
    assert {p.dtype for p in [*model.parameters(), *twin.parameters()]} == {F32}
    assert optimizer.state[late[0].weight]["exp_avg"].dtype is F32
    out = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    assert all(torch.equal(out[n], p.full_tensor()) for n, p in twin.named_parameters())
    return {"narrow": narrow, "weights": out}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "lowering", "flat", "when"),
    [
        (3, "none", False, "between"), (3, "eager", True, "between"),
        pytest.param(1, "eager", False, "before backward", marks=pytest.mark.exhaustive),
        (2, "none", True, "summoned"), (3, "none", False, "before backward"),
        pytest.param(3, "eager", False, "before backward", marks=pytest.mark.exhaustive),
        pytest.param(0, "eager", True, "between", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_trained_later_as_if_never_frozen(two_ranks, strategy, lowering, flat, when):
    """Bit for bit what a model does whose layers were frozen behind `fully_shard`, where all main weights are wide."""
    early, after = (two_ranks.run(trained, before, strategy, lowering, flat, when) for before in (True, False))
    for mine, its in zip(early, after, strict=True):
        assert (mine["narrow"], its["narrow"]) == (BF16, F32)
        start = dict(layers().named_parameters())
        for name, value in mine["weights"].items():
            assert torch.equal(value, its["weights"][name]), name
            assert not torch.equal(value.to(BF16), start[name]), f"{name} trains"


def test_a_policy_of_its_own():
    """Wider models keep theirs; where main weights are the model's nothing is widened."""
    for dtype, policy, want in (
        (torch.float64, {}, torch.float64),
        (BF16, {"main_params_dtype": None}, BF16),
        (torch.float16, {"compute_dtype": BF16}, F32),
    ):
        layer = nn.Linear(4, 4).to(dtype).requires_grad_(False)
        model = mfsdp.fully_shard(layer, mp_policy=mfsdp.MixedPrecisionPolicy(**policy))
        assert model.weight.dtype is dtype
        rows = model.weight.to_local()
        model.bias.requires_grad_(True)
        assert model.weight.dtype is want, "one of its buffer trains"
        assert (rows.data_ptr() == model.weight.to_local().data_ptr()) == (want is dtype)
        plain = nn.Parameter(torch.zeros(4, 4, dtype=want))
        with torch.no_grad():
            model.weight.copy_(plain)
        assert not model.weight.full_tensor().any()


def test_what_is_not_done_is_not_half_done(monkeypatch):
    model = mfsdp.fully_shard(nn.Linear(4, 4).to(BF16).requires_grad_(False))
    buffer = model.weight._mfsdp_owner
    former = buffer.weights.source.untyped_storage()._cdata

    def full(dtype: torch.dtype) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(RuntimeError, match="must be a bool"):
        model.weight.requires_grad = 1
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(buffer.weights, "widen", full)
        model.weight.requires_grad_(True)
    assert not model.weight.requires_grad and buffer.trains == [False, False] and model.weight.dtype is BF16
    model.weight.requires_grad_(True)
    others = [torch.empty(buffer.layout.shard_numel) for _ in range(2000)]
    assert all(t.untyped_storage()._cdata != former for t in others), "or another tensor would be taken for a shard"


@pytest.mark.slow
def test_what_it_takes_is_estimated():
    x = torch.randn(2, 12, dtype=BF16)
    sizes = []
    for train in (True, False):
        model = layers()
        model[1:3].requires_grad_(train)
        sizes.append(mfsdp.explain(model, (x,), units=[nn.Linear], world=2, suggest=False).peak)
    assert sizes[1] < sizes[0]
