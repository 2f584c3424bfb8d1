"""megatron-fsdp 0.6.1's names: its programs run with the import changed.

    from mfsdp.integrations.megatron_fsdp import fully_shard_model, fully_shard_optimizer

    model = fully_shard_model(model, fsdp_unit_modules=[Block])  # sharded, and compiled in place
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

Arguments have its names, order and defaults. Each is translated to mfsdp's own, has no effect because it is automatic
here, or is refused by name (docs/from_megatron_fsdp.md). The environment variables ``MFSDP_OPTIONS`` and
``MFSDP_SHARDING`` take settings without an argument. Submodules: `experimental` (its v2), `v2` (Megatron-LM's), and
`uneven_dtensor`.
"""

from __future__ import annotations

from .arguments import ShardingStrategy
from .configuration import DistributedDataParallelConfig, FSDPDistributedIndex
from .fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from .megatron_fsdp import MegatronFSDP
from .mixed_precision import MixedPrecisionPolicy

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
