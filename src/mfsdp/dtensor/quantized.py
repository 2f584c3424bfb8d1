"""Linear layers whose frozen weights bitsandbytes or torchao has quantized."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import bitsandbytes, torchao
from .quantized_form import Apart


def linear(module: nn.Module) -> bool:
    """Returns whether it is a linear layer with a quantized weight that can be taken apart, or that has been."""
    return hasattr(module, "_mfsdp_form") or bitsandbytes.linear(module) or torchao.linear(module)


def take_apart(fqn: str, module: Any) -> Apart:
    """Takes a linear layer's weight apart. Changes nothing.

    Raises:
        ValueError: the weight has values and is not quantized yet, trains, or is transposed.
        NotImplementedError: the module's class replaces the layer's forward; nested blocks of an unknown size.
    """
    theirs = bitsandbytes.linear(module)
    if module.weight.requires_grad:
        raise ValueError(f"fully_shard: {fqn}.weight is quantized and cannot train: call requires_grad_(False) on it")
    if bitsandbytes.replaced(module) if theirs else torchao.replaced(module):
        raise NotImplementedError(
            f"fully_shard: {fqn} is a {type(module).__name__}, whose weight is not read by "
            f"the forward of {'bitsandbytes' if theirs else 'nn.Linear'} alone, and a quantized one is sharded as "
            "bytes. Pass it in ignored_params"
        )
    found = bitsandbytes.take_apart(fqn, module) if theirs else torchao.take_apart(module)
    if found.form.shape != (module.out_features, module.in_features):
        raise ValueError(
            f"fully_shard: {fqn}.weight was quantized as a matrix {list(found.form.shape)}, and the layer is "
            f"[{module.out_features}, {module.in_features}]: quantize it again, from [out_features, in_features]"
        )
    return found
