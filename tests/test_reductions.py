"""The steps that gradients go through, by strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mfsdp.config.options import Precision
from mfsdp.config.reductions import reduction, reduction_steps
from mfsdp.config.units import UnitSpec

F32, BF16 = torch.float32, torch.bfloat16
SPEC = UnitSpec(
    4, "shard", "shard2", (8, 16), Precision(F32, BF16, BF16, BF16, F32), 8.0, True,
    outer_group="outer", outer_reduce_group="outer2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"world": 1}, []),
        ({}, [(0, False, True)]),
        ({"hold": True}, [(0, True, True)]),
        ({"outer": 2}, [(0, False, True), (2, True, False)]),
        ({"outer": 2, "outer_optim": True}, [(0, False, True), (2, True, True)]),
        ({"world": 1, "outer": 2}, [(2, True, False)]),
        ({"outer": 2, "hold": True}, [(0, True, True), (2, True, False)]),
    ],
)
def test_steps(changes, steps):
    found = reduction_steps(replace(SPEC, **changes).encode())
    assert [(step.index, step.hold, step.scatters) for step in found] == steps


def test_groups_and_sizes():
    text = replace(SPEC, outer=2, outer_optim=True).encode()
    shard, outer = reduction(text, 0), reduction(text, 2)
    assert (shard.group, shard.ranks, shard.splits, shard.numel, shard.dtype) == ("shard", 4, (8, 16), 24, BF16)
    assert (outer.group, outer.ranks, outer.splits, outer.numel, outer.dtype) == ("outer", 2, (4, 8), 12, F32)
    assert reduction(text, 1).group == "shard2" and reduction(text, 3).group == "outer2"
    skipped = replace(SPEC, any_optional=True).encode()
    assert reduction(skipped, 0).group == "shard2", "where another rank may run it in uncompiled code"
