"""What Inductor makes of a program: parameters are views of the gathered buffer, `del` is the reshard."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_fw_bw_and_get_code

import mfsdp
from tests.models import GPT, Block

pytestmark = [pytest.mark.dist, pytest.mark.inductor]


def generated() -> list[str]:
    """The code of forward and backward of a GPT with two blocks."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(tied=False), units=[Block])
    run = torch.compile(model, backend="mfsdp", dynamic=False)
    ids = torch.randint(31, (2, 8))
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, code = run_fw_bw_and_get_code(lambda: run(ids).square().mean())
    return [re.sub(r"(?m)^ *#.*\n", "", text) for text in code]


def launches(code: str) -> list[str]:
    """The variables that hold what all-gathers write; Inductor binds the result once and then again."""
    return re.findall(r"(?m)^ *\w+ = torch\.ops\.mfsdp\.all_gather\.default\(.*\n *(\w+) = \w+$", code)


def test_parameters_are_views_into_the_gathered_buffer(two_ranks):
    for forward, backward in two_ranks.run(generated, timeout=300):
        for phase, matrices in ((forward, 9), (backward, 9)):
            fulls = launches(phase)
            assert len(fulls) == 3, "one launch for each unit"
            for full in fulls:
                assert f"torch.ops.mfsdp.wait.default({full}, " in phase
                assert f"del {full}\n" in phase, "let go after the last reader"
            views = re.findall(r"reinterpret_tensor\((buf\d+), \(\d+, \d+\), \(\d+, \d+\), \d+\)", phase)
            assert sum(v in fulls for v in views) == matrices, "four matrices in each of two blocks, and the head"
            copies = re.findall(r"\b(?:aten|mfsdp)\.(?:copy_|clone|as_strided|slice|param)\b.*", phase)
            assert not copies, f"a parameter is copied out: {copies}"


def test_gradients_leave_through_one_reduce_scatter_per_unit(two_ranks):
    for forward, backward in two_ranks.run(generated, timeout=300):
        assert "reduce_scatter" not in forward
        for op in ("pack", "reduce_scatter", "accumulate"):
            assert len(re.findall(rf"torch\.ops\.mfsdp\.{op}\.default\(", backward)) == 3, op


def test_the_order_is_that_of_the_program(two_ranks):
    """Without prefetch every launch is followed by its wait, every reduction by its accumulate."""
    for code in two_ranks.run(generated, timeout=300):
        for phase in code:
            events = re.findall(r"ops\.mfsdp\.(all_gather|wait|reduce_scatter|accumulate)\.default\(", phase)
            for i, event in enumerate(events):
                if event in ("all_gather", "reduce_scatter"):
                    assert events[i + 1] == "wait"
                if event == "reduce_scatter":
                    assert events[i + 2] == "accumulate"
