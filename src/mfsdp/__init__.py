"""Megatron-FSDP as a compiler: ``torch.compile(model, backend="mfsdp")``.

mfsdp.fully_shard(model, units=[Block])              parameters become shards of flat buffers
model = torch.compile(model, backend="mfsdp")        collectives become nodes of the compiled graph

Names are imported on first access: the command line and version queries need no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import passes as passes
    from . import pipeline as pipeline
    from .buffers.checksum import checksum as checksum
    from .buffers.norms import check_finite as check_finite
    from .buffers.norms import clip_grad_norm_ as clip_grad_norm_
    from .buffers.norms import norms as norms
    from .buffers.replica_check import check_replicas as check_replicas
    from .checkpoints.checkpoint import Checkpoints as Checkpoints
    from .checkpoints.convert import convert as convert
    from .checkpoints.errors import CheckpointError as CheckpointError
    from .checkpoints.safetensors import load_safetensors as load_safetensors
    from .checkpoints.safetensors import save_safetensors as save_safetensors
    from .checkpoints.stream_loading import load_stream as load_stream
    from .checkpoints.streams import stream_weights as stream_weights
    from .compiler.microbatches import together as together
    from .compiler.tracing import trace as trace
    from .config.hardware import Hardware as Hardware
    from .config.options import MixedPrecisionPolicy as MixedPrecisionPolicy
    from .config.plans import Plan as Plan
    from .cost_model.machine import measure as measure
    from .ir.verifier import InvariantError as InvariantError
    from .optim.captured_step import capture_step as capture_step
    from .optim.flat_optimizer import fully_shard_optimizer as fully_shard_optimizer
    from .planning.compare import compare as compare
    from .planning.explain import explain as explain
    from .planning.plan import plan as plan
    from .reports.profile import profile as profile
    from .reports.profile import ranges as ranges
    from .runtime.groups import fake_ranks as fake_ranks
    from .sharding.contexts import keep_gradients as keep_gradients
    from .sharding.contexts import no_sync as no_sync
    from .sharding.contexts import overlapped as overlapped
    from .sharding.contexts import summon_full_params as summon_full_params
    from .sharding.contexts import synchronize as synchronize
    from .sharding.contexts import unsharded as unsharded
    from .sharding.module import FSDPModule as FSDPModule
    from .sharding.pipelining import PipelineStage as PipelineStage
    from .sharding.shard import fully_shard as fully_shard
    from .sharding.tie_weights import tie_weights as tie_weights

__version__ = "0.1.0"

_WHERE = {
    "CheckpointError": "checkpoints.errors",
    "Checkpoints": "checkpoints.checkpoint",
    "FSDPModule": "sharding.module",
    "Hardware": "config.hardware",
    "InvariantError": "ir.verifier",
    "MixedPrecisionPolicy": "config.options",
    "PipelineStage": "sharding.pipelining",
    "Plan": "config.plans",
    "capture_step": "optim.captured_step",
    "check_finite": "buffers.norms",
    "check_replicas": "buffers.replica_check",
    "checksum": "buffers.checksum",
    "clip_grad_norm_": "buffers.norms",
    "compare": "planning.compare",
    "convert": "checkpoints.convert",
    "explain": "planning.explain",
    "fake_ranks": "runtime.groups",
    "keep_gradients": "sharding.contexts",
    "fully_shard": "sharding.shard",
    "fully_shard_optimizer": "optim.flat_optimizer",
    "load_safetensors": "checkpoints.safetensors",
    "load_stream": "checkpoints.stream_loading",
    "measure": "cost_model.machine",
    "no_sync": "sharding.contexts",
    "norms": "buffers.norms",
    "overlapped": "sharding.contexts",
    "passes": "passes",
    "pipeline": "pipeline",
    "plan": "planning.plan",
    "profile": "reports.profile",
    "ranges": "reports.profile",
    "save_safetensors": "checkpoints.safetensors",
    "stream_weights": "checkpoints.streams",
    "summon_full_params": "sharding.contexts",
    "synchronize": "sharding.contexts",
    "tie_weights": "sharding.tie_weights",
    "together": "compiler.microbatches",
    "trace": "compiler.tracing",
    "unsharded": "sharding.contexts",
}
"""Modules of the public names."""

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mfsdp' has no attribute {name!r}")
    module = import_module(f"mfsdp.{_WHERE[name]}")
    found = globals()[name] = module if name == _WHERE[name] else getattr(module, name)
    return found


import_module("mfsdp.registration").register(__version__)
if "torch" in sys.modules:
    import_module("mfsdp.dtensor")  # registers its tensors with torch.load and optimizers


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
