"""Programs of a Llama layer under tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mfsdp
from examples.parallel.model import Layer, Llama, tensor_parallel
from mfsdp import pipeline
from mfsdp.ir.program import Program
from tests.helpers.parallel import next_token, tokens


def programs(model: nn.Module, run: Any, *extra: tuple[str, Any]) -> list[Program]:
    """The programs of a training step."""
    seen: list[Program] = []
    passes = (*pipeline.PIPELINE, ("look", lambda p: seen.append(p.copy())), *extra)
    run(torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager", "passes": passes}))
    return seen


def parallel(mesh: Any) -> list[Program]:
    model = Llama(layers=1)
    tensor_parallel(model, mesh["tp"])
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
    return programs(model, lambda run: next_token(run, tokens(0)).backward())
