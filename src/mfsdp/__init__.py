"""Megatron-FSDP as a compiler: ``torch.compile(model, backend="mfsdp")``.

mfsdp.fully_shard(model, units=[Block])              parameters become shards of flat buffers
model = torch.compile(model, backend="mfsdp")        collectives become nodes of the compiled graph
"""

from . import passes, pipeline
from .checkpoints.checkpoint import CheckpointError, Checkpoints
from .checkpoints.convert import convert
from .checkpoints.safetensors import load_safetensors, save_safetensors
from .compiler.tracing import trace
from .costs.measure import measure
from .graph.check import LawError
from .planning.explain import explain
from .reports.profile import profile, ranges
from .sharding.contexts import no_sync, summon_full_params, unsharded
from .sharding.module import FSDPModule
from .sharding.shard import fully_shard
from .spec.config import MixedPrecisionPolicy
from .spec.hardware import Hardware
from .state.norms import check_finite, norms
from .state.optimizer import fully_shard_optimizer

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "FSDPModule",
    "Hardware",
    "LawError",
    "MixedPrecisionPolicy",
    "check_finite",
    "convert",
    "explain",
    "fully_shard",
    "fully_shard_optimizer",
    "load_safetensors",
    "measure",
    "no_sync",
    "norms",
    "passes",
    "pipeline",
    "profile",
    "ranges",
    "save_safetensors",
    "summon_full_params",
    "trace",
    "unsharded",
]
