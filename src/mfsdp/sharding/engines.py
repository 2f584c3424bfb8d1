"""What modules of TransformerEngine are told, and told of, when they are sharded (`state.transformer_engine`)."""

from __future__ import annotations

import warnings

from torch import nn

from ..state import transformer_engine as te
from ..state.buffer import refs
from .undo import Undo


def adapt(root: nn.Module, undo: Undo) -> None:
    """Tells modules that they are sharded; what they save beside parameters is left out where it is empty.

    Warns:
        UserWarning: some were to add gradients to ``main_grad`` themselves, and no longer do.
    """
    fused = []
    for fqn, module in root.named_modules():
        computes = {ref.buffer.precision.compute for ref in refs(module).values()}
        if computes:
            was, steps = te.adapt(module, computes)
            undo.steps.extend(steps)
            fused += [fqn or "(root)"] * was
        back = te.leave_out_empty(module)
        if back is not None:
            undo.steps.append(back)
    if fused:
        more = f" and {len(fused) - 4} more" if len(fused) > 4 else ""
        warnings.warn(
            f"mfsdp: fuse_wgrad_accumulation is turned off in {', '.join(fused[:4])}{more}: sharded parameters have no "
            "main_grad. Their gradients come by autograd, in compute_dtype, and are added up in main_grads_dtype. Make "
            "the modules with fuse_wgrad_accumulation=False (Megatron-LM: gradient_accumulation_fusion=False)",
            stacklevel=3,
        )
