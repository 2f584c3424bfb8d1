"""Weights that torchao has quantized: what is sharded as bytes, bit for bit, and what is refused.

`test_quantized.py` trains, saves and streams them, as it does bitsandbytes'.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp
from mfsdp.dtensor import quantized
from tests.helpers.parity import compiled
from tests.helpers.quantized import Block, alike, blocks, config, linear, numbers, parts

ao = pytest.importorskip("torchao.quantization")

F32, BF16 = torch.float32, torch.bfloat16


def refused_by_torchao() -> dict[str, tuple[str, Any]]:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    def made(layer: nn.Module, how: Any = None) -> nn.Module:
        ao.quantize_(layer, how or config("torchao int8"), lambda m, _: True)
        return layer

    dynamic = ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    trains = made(nn.Linear(64, 64))
    trains.weight.requires_grad_(True)
    tiled = nn.Linear(64, 64)
    codes = torch.zeros(8, 1, 32, 4, dtype=torch.int32)
    tiled.weight = nn.Parameter(
        ao.Int4TilePackedTo4dTensor(codes, torch.ones(2, 64, 2, dtype=BF16), [1, 32], torch.Size([64, 64])),
        requires_grad=False,
    )
    turned = made(nn.Linear(64, 64))
    turned.weight = made(nn.Linear(32, 64)).weight
    attention = nn.MultiheadAttention(64, 4)
    made(attention.out_proj)
    return {
        "activations too": ("Int8Tensor of torchao, quantized together with activations.*Int8WeightOnlyConfig",
            made(nn.Linear(64, 64), dynamic)),
        "tiles": ("Int4TilePackedTo4dTensor of torchao, not kept as rows.*int4_packing_format='plain'", tiled),
        "an embedding": ("the weight of another module than nn.Linear", made(nn.Embedding(8, 64))),
        "own forward": ("is a Own, whose weight is not read by the forward of nn.Linear alone", made(Own(64, 64))),
        "attention": ("out_proj is a NonDynamicallyQuantizableLinear, whose weight is not read", attention),
        "trains": ("cannot train", trains),
        "turned": (r"quantized as a matrix \[64, 32\]", turned),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["activations too", "tiles", "an embedding", "own forward", "attention", "trains", "turned"]
)
def test_refused_of_torchao(name):
    words, layer = refused_by_torchao()[name]
    model = nn.Sequential(linear("torchao int8", 64, 64, F32), layer)
    weights, kinds = list(model.parameters()), [type(m) for m in model.modules()]
    with pytest.raises((ValueError, NotImplementedError), match=words):
        mfsdp.fully_shard(model, units=["*"])
    now = list(model.parameters())
    assert all(p is w for p, w in zip(now, weights, strict=True)), "nothing has changed"
    assert [type(m) for m in model.modules()] == kinds
    mfsdp.fully_shard(
        model, units=["*"], ignored_params=[p for p in weights if type(p).__module__ == "torchao.quantization"]
    )
    assert model[0].weight is weights[0], "whole on each rank"


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_matrices_are_torchaos(dtype):
    """Of every block size, and products as torchao's own ``F.linear``."""
    for how in (
        config("torchao int8"), config("torchao groups"), config("torchao int4"),
        ao.Int8WeightOnlyConfig(granularity=ao.PerTensor(), set_inductor_config=False),
        ao.Int8WeightOnlyConfig(granularity=ao.PerRow(dim=0), set_inductor_config=False),
        ao.IntxWeightOnlyConfig(torch.int3, scale_dtype=BF16),
        ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(4), ao.MappingType.ASYMMETRIC, F32),
    ):  # fmt: skip
        layer = nn.Linear(12, 7, dtype=dtype)
        ao.quantize_(layer, how)
        weight, form = layer.weight, (apart := quantized.take_apart("x", layer)).form
        raw = tuple(apart.values.values())
        assert torch.equal(form.matrix(raw, dtype), weight.dequantize()), how
        x = torch.randn(2, 3, 12, dtype=dtype, requires_grad=True)
        mine, theirs = form.linear(x, raw, layer.bias), layer(x)
        assert torch.equal(mine, theirs), how
        grad = torch.randn_like(theirs)
        assert torch.equal(form.input_grad(grad, raw), *torch.autograd.grad(theirs, x, grad)), how


def test_plain_codes_of_four_bits():
    """``Int4WeightOnlyConfig``'s class in the packing format ``plain``, which torchao makes and multiplies by on GPUs
    alone: signed codes, the even column's in the low half of a byte; code * scale + zero point.
    """
    torch.manual_seed(0)
    codes, scale, zero = torch.randint(-8, 8, (48, 64)), torch.rand(2, 48).to(BF16), torch.randn(2, 48).to(BF16)
    packed = torch.tensor([[(a & 15) | ((b & 15) << 4) for a, b in zip(row[::2], row[1::2], strict=True)]
        for row in codes.tolist()], dtype=torch.uint8).view(torch.int8)  # fmt: skip
    wide = [part.float().t().repeat_interleave(32, dim=1) for part in (scale, zero)]
    dense = nn.Linear(64, 48, dtype=BF16)
    four = copy.deepcopy(dense)
    dense.weight = nn.Parameter((codes * wide[0] + wide[1]).to(BF16), requires_grad=False)
    weight = ao.Int4Tensor(packed, scale, zero, [1, 32], torch.Size([48, 64]))
    four.weight = nn.Parameter(weight, requires_grad=False)
    model = mfsdp.fully_shard(four)
    for lowering in ("none", "eager"):
        x = torch.randn(3, 64, dtype=BF16)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, want = compiled(model, lowering)(a), dense(b)
        assert torch.equal(got, want)
        got.square().mean().backward()
        want.square().mean().backward()
        assert torch.equal(a.grad, b.grad)
    alike(numbers(model), parts({"weight": weight, "bias": dense.bias.detach().float()}))


def test_what_does_not_fit_torchaos_weights():
    model = mfsdp.fully_shard(blocks("torchao int8"), units=[Block])
    before = numbers(model)
    plain = {
        k: v.dequantize() if k.endswith("base.weight") else v for k, v in blocks("torchao int8").state_dict().items()
    }
    groups, key = blocks("torchao groups with a bias").state_dict(), "0.base._weight_scale"
    for state, words in (
        (plain, r"0\.base\.weight is not quantized in the state dict"),
        (groups, r"was quantized as Int8Tensor\(.*blocks of \[1, 4\].*, the model's as .* \[1, 128\]"),
        ({**before, key: before[key].bfloat16()}, "bfloat16.* in the state dict and torch.float32"),
    ):
        with pytest.raises(RuntimeError, match=words):
            model.load_state_dict(state, strict=False)
        alike({k: v for k, v in numbers(model).items() if k.startswith("0.base")},
            {k: v for k, v in before.items() if k.startswith("0.base")})  # fmt: skip
    other_names = {k.replace("_weight_zero", "weight_zero"): v for k, v in before.items()}
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*_weight_zero_point.*Unexpected key.*base\.weight_zero_point"
    ):
        model.load_state_dict(other_names)
