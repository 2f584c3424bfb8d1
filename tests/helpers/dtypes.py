"""Shared by tests of what `test_kept_casts` is about: BF16, HALF."""

from __future__ import annotations

import torch

import mfsdp

BF16 = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


HALF = mfsdp.MixedPrecisionPolicy(main_params_dtype=torch.float32, param_comm_dtype=torch.bfloat16)
