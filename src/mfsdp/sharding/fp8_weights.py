"""Tells which weights a module reads as FP8 payloads, which are communicated in one byte per element
(`passes.quantize`).

A flat buffer has one communication dtype, so these weights get one apart from the unit's norms and biases. Your own
module class declares them: ``quantized_parameters = ("weight",)``.
"""

from __future__ import annotations

import warnings

from torch import nn

_KNOWN = {("torchao.float8.float8_linear", "Float8Linear"): ("weight",)}
"""By module and name of the class; tried on torchao 0.18."""


def fp8_weights_of(module: nn.Module, name: str) -> bool:
    """Whether the module's forward reads the parameter only as an FP8 payload."""
    known = (_KNOWN.get((kind.__module__, kind.__name__), ()) for kind in type(module).__mro__)
    said = getattr(module, "quantized_parameters", ())
    return name in said or any(name in names for names in known)


def tell(root: nn.Module) -> None:
    """Warns about settings for FSDP2's FP8 all-gather, which are not needed.

    Warns:
        UserWarning: torchao was told to prepare weights for it.
    """
    found = [m for m in root.modules() if getattr(getattr(m, "config", None), "enable_fsdp_float8_all_gather", False)]
    if any(fp8_weights_of(m, "weight") for m in found):
        warnings.warn(
            "mfsdp: enable_fsdp_float8_all_gather=True is not needed and has no effect: weights are gathered in FP8 by "
            "themselves in compiled code, cast from the dtype that the module casts from, so that numbers are those of "
            "a gather in 16 bits. precompute_float8_dynamic_scale_for_fsdp(model) does nothing: leave out both",
            stacklevel=3,
        )
