"""Mixed precision policies of narrow communication."""

from __future__ import annotations

import torch

import mfsdp

BF16 = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


HALF = mfsdp.MixedPrecisionPolicy(main_params_dtype=torch.float32, param_comm_dtype=torch.bfloat16)
