"""Small models of linear layers that bitsandbytes or torchao has quantized, with LoRA's matrices beside them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nested": {"quant_type": "nf4"},
    "fp4 with a bias": {"quant_type": "fp4", "bias": True},
    "bf16 storage": {"quant_type": "nf4", "quant_storage": torch.bfloat16},
    "int8": {},
    "torchao int8": {},
    "torchao groups with a bias": {"bias": True},
    "torchao int4": {},
}


def config(kind: str) -> Any:
    """How torchao quantizes: symmetric per row, symmetric per group, or asymmetric codes of 4 bits."""
    from torchao import quantization as ao

    if kind == "torchao int4":
        return ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(4), ao.MappingType.ASYMMETRIC)
    size = ao.PerGroup(4) if "groups" in kind else ao.PerRow()
    return ao.Int8WeightOnlyConfig(granularity=size, set_inductor_config=False)


def parts(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A state dict with torchao's weights as their tensors, under the names that torchao gives them in files."""
    out = {}
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        inside = [n for n in ("qdata", "scale", "zero_point") if getattr(value, n, None) is not None]
        out |= {f"{path}._{last}_{n}".removeprefix("."): getattr(value, n) for n in inside} if inside else {name: value}
    return out


def linear(kind: str, inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    given = {"bias": False, **KINDS[kind]}
    if "torchao" in kind:
        from torchao.quantization import quantize_

        layer = nn.Linear(inputs, outputs, dtype=dtype, **given)
        quantize_(layer, config(kind))
        return layer
    from bitsandbytes import nn as bnb

    if kind == "int8":
        layer = bnb.Linear8bitLt(inputs, outputs, has_fp16_weights=False, **given)
    else:
        layer = bnb.Linear4bit(inputs, outputs, compute_dtype=dtype, **given)
    return layer.to(dtype).to(layer.weight.device)


class Block(nn.Module):
    def __init__(self, kind: str, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.base = linear(kind, inputs, outputs, dtype)
        self.down = nn.Linear(inputs, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, outputs, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def blocks(
    kind: str, dtype: torch.dtype = torch.float32, widths: tuple[int, ...] = (128, 192, 100, 72), device: str = "cpu"
) -> nn.Sequential:
    """The last block of the last weight is shorter than 64 elements. Of rows of 96 or 160 elements, for example,
    bitsandbytes 0.50.2 on a CPU makes other values than its own reference.
    """
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(Block(kind, i, o, dtype) for i, o in pairwise(widths))).train()


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name, value in a.items():
        assert value.dtype is b[name].dtype and value.shape == b[name].shape, name
        assert torch.equal(value.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name
