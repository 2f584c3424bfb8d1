"""Which weights a module casts to one byte per element, so that they travel so (`passes.quantize`), and what torchao and
others say of theirs.

A flat buffer travels in one dtype. So weights that are cast have one of their own beside that of the unit's norms and
biases. A module of yours may say it of itself: ``quantized_parameters = ("weight",)``.
"""

from __future__ import annotations

from torch import nn

_KNOWN = {("torchao.float8.float8_linear", "Float8Linear"): ("weight",)}
"""By where a class is defined, and its name; tried on torchao 0.18."""


def coded(module: nn.Module, name: str) -> bool:
    """Whether a module's forward reads its parameter only as codes of one byte per element."""
    known = (_KNOWN.get((kind.__module__, kind.__name__), ()) for kind in type(module).__mro__)
    said = getattr(module, "quantized_parameters", ())
    return name in said or any(name in names for names in known)
