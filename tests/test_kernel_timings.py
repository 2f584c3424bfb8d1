"""Kernels, measured one by one: which are the same, which are run, what a plan makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import mfsdp
from mfsdp import pipeline
from mfsdp.config.hardware import KNOWN
from mfsdp.cost_model import fusion, kernel_timings, op_cost
from mfsdp.cost_model.kernel_timings import Kernels
from mfsdp.ir import ops
from tests.helpers.machines import quick
from tests.helpers.models import GPT, Block
from tests.helpers.toys import toy2
from tests.helpers.without_inductor import without_kernels

IDS = torch.zeros(2, 8, dtype=torch.long)


def traced(lowering: str = "eager", layers: int = 4) -> tuple[nn.Module, list[Any]]:
    with torch.device("meta"):
        model = GPT(width=64, layers=layers)
    programs = list(mfsdp.trace(model, (IDS,), world=2, units=[Block], lowering=lowering))
    for program in programs:
        pipeline.run(program)
    return model, programs


@pytest.mark.slow
@pytest.mark.parametrize("lowering", [pytest.param("eager", marks=pytest.mark.exhaustive), "inductor"])
def test_all_of_the_models_kernels_are_measured_and_equal_layers_once(monkeypatch, tmp_path, lowering):
    quick(monkeypatch)
    fused = lowering != "eager"
    model, programs = traced(lowering)
    with without_kernels():
        found = kernel_timings.measure(programs, fused=fused)
        again = kernel_timings.measure(traced(lowering, layers=5)[1], fused=fused, known=found)
    assert again.seconds == found.seconds, "more layers have no other kernels"
    for program in programs:
        known = found.of(program, fused)
        estimates = op_cost.op_times(program, KNOWN["h100"], fused=fused)
        unknown = {n for n, t in estimates.items() if n.name not in known and t.transfer is None and t.seconds}
        sharding = (ops.wait, ops.bucket, ops.pack, ops.accumulate)
        assert all(n.target in sharding for n in unknown), unknown
        products = [n for n in program.nodes if n.target is ops.mm]
        assert all(n.name in known for n in products) and bool(products) == (program.phase == "backward")
        distinct = {kernel_timings.key([n]) for n in products}
        assert len(distinct) <= len(products) / 3, "wherever in a bucket they are written"
        times = op_cost.op_times(program, replace(KNOWN["h100"], launch=0.0, dispatch=0.0), fused=fused, measured=known)
        for run in fusion.together(program, fused):
            if run[0].name in known:
                whole = sum(times[n].seconds for n in run)
                assert whole == pytest.approx(found.seconds[kernel_timings.key(run)]), (
                    "lines share what their kernel takes"
                )
    found.save(tmp_path / "a.json")
    assert Kernels.load(tmp_path / "a.json") == found
    slow = Kernels(found.hardware, dict.fromkeys(found.seconds, 1.0))
    options = {"options": {"lowering": lowering}, "world": 2, "units": [Block], "suggest": False}
    count = sum(1 for p in programs for run in fusion.together(p, fused) if run[0].name in slow.of(p, fused))
    plan = mfsdp.explain(model, (IDS,), kernels=slow, **options)
    assert count <= sum(v.seconds for v in plan.views) < 1.5 * count, "a second for each kernel"


@pytest.mark.slow
def test_a_gpu_runs_its_own_attention():
    """What stands for the CPU's operators gives what they give, forward and backward."""
    device, seen = torch.device("cpu"), set()
    for program in traced(layers=2)[1]:
        for node in program.nodes:
            found = kernel_timings.attention(node, device)
            if found is None:
                assert "attention" not in str(node.target)
                continue
            call, inputs = found
            out = pytree.tree_leaves(call(*inputs))
            want = [v for v in pytree.tree_leaves(node.meta["val"]) if v.dim() == 4]
            assert [tuple(x.shape) for x in out] == [tuple(v.shape) for v in want]
            seen.add(program.phase)
    assert seen == {"forward", "backward"}


def test_a_kernel_is_what_it_reads():
    forward = toy2()
    pipeline.run(forward)
    keys = [kernel_timings.key(run) for run in fusion.together(forward, True)]
    assert "aten.addmm.default(bf16[1024], bf16[256,1024], bf16[1024,1024]/1,1024)" in keys, keys
    assert len(set(keys)) < len(keys), "two layers are alike"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no file that"),
        ('{"seconds": {}}', "is no file that"),
        ('{"hardware": "x", "seconds": {"a": -1.0}}', "positive"),
    ],
)
def test_what_is_refused(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Kernels.load(tmp_path / "a.json")
    with pytest.raises(ValueError, match="measured on abacus, this is .*: give another file"):
        kernel_timings.measure([], known=Kernels("abacus"))
    with pytest.raises(ValueError, match="profile= and kernels= were both given"):
        mfsdp.explain(nn.Linear(2, 2), (torch.zeros(1, 2),), profile=object(), kernels=Kernels("abacus"))
