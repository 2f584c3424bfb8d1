"""The toy of README and docs/guides/listing.md: two linear layers with ReLU, 1024, bf16, two units, eight ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

import mfsdp
from mfsdp.compiler import activation_offload
from mfsdp.compiler.capture import Capture
from mfsdp.compiler.joint_graph import Treatment
from mfsdp.compiler.tracing import Programs
from mfsdp.ir.program import Program

FIRST_STAGES = "capture, collective, hide_collectives, quantize, gather"
"""As errors list them."""

BF16 = mfsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.bfloat16)


class Toy2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@contextmanager
def offloaded(*layers: str, least: int = activation_offload.MIN_BYTES) -> Iterator[None]:
    """Has what forward saves of layers go to the host, in what is captured meanwhile."""
    before, size = Capture.__init__, activation_offload.MIN_BYTES

    def begin(self: Capture, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.treated |= dict.fromkeys(layers, Treatment(offloaded=True))

    Capture.__init__, activation_offload.MIN_BYTES = begin, least  # type: ignore[method-assign]
    try:
        yield
    finally:
        Capture.__init__, activation_offload.MIN_BYTES = before, size  # type: ignore[method-assign]


@cache
def _traced(train: bool, away: tuple[str, ...] = (), **kwargs: object) -> Programs:
    with torch.device("meta"):
        model = Toy2().to(torch.bfloat16)
        x = torch.empty(256, 1024, dtype=torch.bfloat16)
    sharding = {"units": ["layers.0", "layers.2"], "mp_policy": BF16, **kwargs}
    with offloaded(*away):
        return mfsdp.trace(model, (x,), world=8, name="toy2", train=train, **sharding)


def toy2(phase: str = "forward", **kwargs: object) -> Program:
    """A program of the toy, before any pass."""
    program = getattr(_traced(phase != "inference", **kwargs), phase)
    assert program is not None
    return program.copy()
