"""The compile-cache key of a small model's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import compile_cache
from mfsdp.compiler.capture import Capture, sources
from mfsdp.config.options import Options


def captured(options: Options, **sharding: Any) -> str:
    """The key of a small model's graph."""
    keys: list[str] = []
    model = mfsdp.fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), **{"units": ["0"], **sharding})

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        keys.append(compile_cache.cache_key(Capture(inputs, sources(gm)), options, pipeline.chosen(options), gm))
        return lambda *args: (torch.zeros(2, 6),)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.ones(2, 6))
    return keys[0]
