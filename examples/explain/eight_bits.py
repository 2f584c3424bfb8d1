"""Llama-3-8B on 8 H100 in bf16 and by recipes of FP8: ``python examples/explain/eight_bits.py``.

Tensorwise and rowwise are torchao's; MXFP8 (OCP Microscaling Formats 1.0: a scale of eight bits for 32 elements, along
the dimension that is summed over) is written out below in torch's operators, its scales in the order that cuBLAS reads
them in. An H100 has no instruction for it; the clock takes it for one of FP8. One sequence of 8,192 a rank, nothing
recomputed; a layer is the difference of models of two and of four, and the step is 32 of them and what is left over. No
process group, no GPU, no memory for the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import AutoConfig, AutoModelForCausalLM

import mfsdp

BLOCK, LARGEST, LAYERS, LENGTH = 32, 448.0, 32, 8192


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[n, k]``, and scales of 32 elements of a row each, powers of two, ``[n * k / 32]``."""
    n, k = x.shape
    parts = x.view(n, k // BLOCK, BLOCK)
    exponent = parts.abs().amax(-1, keepdim=True).float().clamp(min=2.0**-100).log2().floor() - 8
    codes = (parts.float() * torch.exp2(-exponent)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    tiles = torch.exp2(exponent).to(torch.float8_e8m0fnu).view(n // 128, 4, 32, k // BLOCK // 4, 4)
    return codes.view(n, k), tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.t()`` of [m, k] and [n, k] in MXFP8, in bf16."""
    (a, in_a), (b, in_b) = encode(a), encode(b)
    return torch._scaled_mm(a, b.t(), in_a, in_b, out_dtype=torch.bfloat16)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return product(grad, weight.t().contiguous()), product(grad.t().contiguous(), x.t().contiguous())


class MXLinear(nn.Linear):
    quantized_parameters = ("weight",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _Linear.apply(x.flatten(0, -2), self.weight)
        return out.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def llama(layers: int, recipe: str) -> nn.Module:
    """Layers in a recipe, the head in bf16."""
    config = AutoConfig.from_pretrained(Path(__file__).with_name("llama-3-8b.json"))
    config.num_hidden_layers, config.use_cache = layers, False
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if recipe in ("tensorwise", "rowwise"):
            convert_to_float8_training(model.model, config=Float8LinearConfig.from_recipe_name(recipe))
        elif recipe == "mxfp8":
            for parent in list(model.model.modules()):
                for name, m in list(parent.named_children()):
                    if isinstance(m, nn.Linear):
                        setattr(parent, name, MXLinear(m.in_features, m.out_features, bias=False, dtype=torch.bfloat16))
    return model  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default="bf16,tensorwise,rowwise,mxfp8")
    args = parser.parse_args()
    print(f"{'':12}{'ms a layer':>12}{'ms a step':>12}{'GiB':>8}{'as fast':>10}")
    first = 0.0
    for recipe in args.recipes.split(","):
        reports = []
        for layers in (2, 4):
            ids = torch.empty(1, LENGTH, dtype=torch.long, device="meta")
            reports.append(
                mfsdp.explain(
                    llama(layers, recipe), kwargs={"input_ids": ids, "labels": ids}, world=8, hardware="h100",
                    units=["LlamaDecoderLayer"], suggest=False,
                )
            )  # fmt: skip
        (step, layer), (peak, more) = (
            (a, (b - a) / 2) for a, b in zip(*((r.step, r.peak) for r in reports), strict=True)
        )
        step, peak = step + (LAYERS - 2) * layer, peak + (LAYERS - 2) * more
        first = first or step
        print(f"{recipe:12}{layer * 1e3:12.1f}{step * 1e3:12.0f}{peak / 2**30:8.1f}{first / step:10.2f}", flush=True)


if __name__ == "__main__":
    main()
