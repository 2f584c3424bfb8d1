"""megatron-fsdp's policy."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...config import options as ours
from ...config.options import Precision


class MixedPrecisionPolicy(ours.MixedPrecisionPolicy):
    """megatron-fsdp's policy: mfsdp's, except that ``main_grads_dtype=None`` is the parameter's own dtype, for 16 bits
    too. Its other fields may be given as well.
    """

    def __repr__(self) -> str:
        return f"megatron_fsdp.{super().__repr__()}"

    def resolve(self, dtype: torch.dtype, trains: bool = True) -> Precision:
        """Returns the dtypes of a parameter of dtype ``dtype``, trained or frozen."""
        given = replace(self, main_grads_dtype=self.main_grads_dtype or dtype)
        return ours.MixedPrecisionPolicy.resolve(given, dtype, trains)


def policy_of(given: object) -> MixedPrecisionPolicy:
    """Returns a policy of this module for megatron-fsdp's object, or its own.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, MixedPrecisionPolicy):
        return given
    names = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
    if isinstance(given, ours.MixedPrecisionPolicy) or not all(hasattr(given, name) for name in names):
        raise ValueError(
            f"mixed_precision_policy={given!r}: give mfsdp.integrations.megatron_fsdp.MixedPrecisionPolicy, which has "
            "the fields of megatron-fsdp's and of mfsdp's"
        )
    return MixedPrecisionPolicy(**{name: getattr(given, name) for name in names})
