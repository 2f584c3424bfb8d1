"""The toy of LISTING and README: two linear layers with ReLU, 1024 wide, bf16, two units, eight ranks."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import mfsdp
from mfsdp.compiler.tracing import Programs
from mfsdp.graph.program import Program

BF16 = mfsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.bfloat16)


class Toy2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@cache
def _traced(train: bool, **kwargs: object) -> Programs:
    with torch.device("meta"):
        model = Toy2().to(torch.bfloat16)
        x = torch.empty(256, 1024, dtype=torch.bfloat16)
    sharding = {"units": ["layers.0", "layers.2"], "mp_policy": BF16, **kwargs}
    return mfsdp.trace(model, (x,), world=8, name="toy2", train=train, **sharding)


def toy2(phase: str = "forward", **kwargs: object) -> Program:
    """A program of the toy, before any pass."""
    program = getattr(_traced(phase != "inference", **kwargs), phase)
    assert program is not None
    return program.copy()
