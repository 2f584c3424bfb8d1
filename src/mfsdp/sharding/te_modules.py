"""Adapts TransformerEngine's modules when they are sharded (`dtensor.transformer_engine`)."""

from __future__ import annotations

import warnings

from torch import nn

from ..buffers.flat_buffer import refs
from ..dtensor import te_linear  # noqa: F401  (tells `ir.fp8_operators` what its operator does)
from ..dtensor import transformer_engine as te
from .rollback import Rollback


def adapt(root: nn.Module, rollback: Rollback) -> None:
    """Tells modules that they are sharded, and omits their extra state if empty.

    Warns:
        UserWarning: some were to write gradients to ``main_grad`` themselves, and cannot.
    """
    off: dict[str, str] = {}
    for fqn, module in root.named_modules():
        own = refs(module)
        if own:
            precisions = {ref.buffer.precision for ref in own.values()}
            whole = {name for name, ref in own.items() if ref.piece is None or ref.piece.plain}
            why = te.unfused(module, whole, {(p.compute, p.grad_comm) for p in precisions}) if te.fuses(module) else ""
            was, steps = te.adapt(module, {p.compute for p in precisions}, why)
            rollback.steps.extend(steps)
            if was:
                off[fqn or "(root)"] = why
        back = te.leave_out_empty(module)
        if back is not None:
            rollback.steps.append(back)
    if off:
        named = [f"{fqn} ({why})" for fqn, why in off.items()]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        warnings.warn(
            f"mfsdp: fuse_wgrad_accumulation is turned off in {', '.join(named[:4])}{more}. Their gradients come by "
            "autograd, in compute_dtype, and are added up in main_grads_dtype. Make the modules with "
            "fuse_wgrad_accumulation=False (Megatron-LM: gradient_accumulation_fusion=False)",
            stacklevel=3,
        )
