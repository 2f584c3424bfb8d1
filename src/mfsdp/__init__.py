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

_PUBLIC = {
    "buffers.checksum": ("checksum",),
    "buffers.norms": ("check_finite", "clip_grad_norm_", "norms"),
    "buffers.replica_check": ("check_replicas",),
    "checkpoints.checkpoint": ("Checkpoints",),
    "checkpoints.convert": ("convert",),
    "checkpoints.errors": ("CheckpointError",),
    "checkpoints.safetensors": ("load_safetensors", "save_safetensors"),
    "checkpoints.stream_loading": ("load_stream",),
    "checkpoints.streams": ("stream_weights",),
    "compiler.microbatches": ("together",),
    "compiler.tracing": ("trace",),
    "config.hardware": ("Hardware",),
    "config.options": ("MixedPrecisionPolicy",),
    "config.plans": ("Plan",),
    "cost_model.machine": ("measure",),
    "ir.verifier": ("InvariantError",),
    "optim.captured_step": ("capture_step",),
    "optim.flat_optimizer": ("fully_shard_optimizer",),
    "passes": ("passes",),
    "pipeline": ("pipeline",),
    "planning.compare": ("compare",),
    "planning.explain": ("explain",),
    "planning.plan": ("plan",),
    "reports.profile": ("profile", "ranges"),
    "runtime.groups": ("fake_ranks",),
    "sharding.contexts": ("keep_gradients", "no_sync", "overlapped", "summon_full_params", "synchronize", "unsharded"),
    "sharding.module": ("FSDPModule",),
    "sharding.pipelining": ("PipelineStage",),
    "sharding.shard": ("fully_shard",),
    "sharding.tie_weights": ("tie_weights",),
}
"""Public names by module."""

_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

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
