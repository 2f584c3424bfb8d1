"""What Inductor makes of a whole program: parameters are views of the gathered buffer, `del` is the reshard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code

import mfsdp
from mfsdp.runtime import groups
from tests.helpers.generated_code import launches, of_code, of_listing, uncommented
from tests.helpers.models import GPT, Block
from tests.helpers.ranks import Ranks
from tests.helpers.without_inductor import without_kernels

pytestmark = [pytest.mark.dist, pytest.mark.inductor]


def generated() -> list[str]:
    """The code of forward and backward of a GPT with two blocks."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(tied=False), units=[Block])
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "whole"})
    ids = torch.randint(31, (2, 8))
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, code = run_fw_bw_and_get_code(lambda: run(ids).square().mean())
    return [uncommented(text) for text in code]


@pytest.fixture(scope="module")
def code() -> list[str]:
    with mfsdp.fake_ranks(2), without_kernels():
        return generated()


def test_parameters_are_views_into_the_gathered_buffer(code):
    for phase in code:
        fulls = launches(phase)
        assert len(fulls) == 3, "one launch for each unit"
        for full in fulls:
            assert f"torch.ops.mfsdp.wait.default({full}, " in phase
            assert f"del {full}\n" in phase, "let go after the last reader"
        views = re.findall(r"reinterpret_tensor\((buf\d+), \(\d+, \d+\), \(\d+, \d+\), \d+\)", phase)
        assert sum(v in fulls for v in views) == 9, "four matrices in each of two blocks, and the head"
        copies = re.findall(r"\b(?:aten|mfsdp)\.(?:copy_|clone|as_strided|slice|param)\b.*", phase)
        assert not copies, f"a parameter is copied out: {copies}"


def test_products_are_written_into_the_bucket(code):
    """Matrix products write to their places in the gradient buffers; only the head, of the last unit, is copied."""
    forward, backward = code
    assert "mfsdp.mm" not in forward
    products = re.findall(r"torch\.ops\.mfsdp\.mm\.default\((\w+), ", backward)
    assert len(products) == 8 and len(set(products)) == 2, "four matrices into the buffer of each block"
    packed = re.findall(r"torch\.ops\.mfsdp\.pack\.default\(\w+, \[(.*?)\], \[", backward)
    assert len(packed) == 3


def test_gradients_leave_through_one_reduce_scatter_per_unit(code):
    forward, backward = code
    assert "reduce_scatter" not in forward
    for op in ("bucket", "pack", "reduce_scatter", "accumulate"):
        assert len(re.findall(rf"torch\.ops\.mfsdp\.{op}\.default\(", backward)) == 3, op


def orders(tokens: int, folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """By phase: the order of the listing, and that of the code that Inductor made of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))
    mfsdp.fully_shard(model, units=["*"])
    mine = Path(folder) / f"rank{dist.get_rank()}"
    with patched_rank():
        run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "whole", "dump": str(mine)})
        x = torch.randn(tokens, 16)
        _, (forward, backward) = run_fw_bw_and_get_code(lambda: run(x).square().mean())
        with torch.no_grad():
            _, (inference,) = run_and_get_code(lambda: run(x))
    code = {"forward": forward, "backward": backward, "inference": inference}
    stages = {phase: max(mine.glob(f"*.{phase}.*.assign_groups.txt")).read_text() for phase in code}
    return {phase: (of_listing(stages[phase]), of_code(uncommented(text))) for phase, text in code.items()}


@contextmanager
def patched_rank() -> Iterator[None]:
    """Every rank writes its listings."""
    rank = groups.rank
    groups.rank = lambda: 0
    try:
        yield
    finally:
        groups.rank = rank


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [pytest.param(n, marks=pytest.mark.exhaustive) for n in (64, 16384)])
def test_the_order_in_the_code_is_that_of_the_listing(two_ranks, tmp_path, tokens):
    for phases in two_ranks.run(orders, tokens, str(tmp_path), timeout=300):
        in_order(phases)


def in_order(phases: dict[str, tuple[list[str], list[str]]]) -> None:
    for phase, (listed, made) in phases.items():
        assert listed == made, phase
        assert made.count("all_gather") == (4 if phase != "backward" else 3)
        assert made.count("reduce_scatter") == (4 if phase == "backward" else 0)
        assert made.count("mm") >= 4
    forward = phases["forward"][1]
    assert forward[:5] == ["all_gather", "wait", "all_gather", "mm", "wait"], "the second hides behind compute"


def hits(tokens: int, folder: str) -> tuple[dict[str, tuple[list[str], list[str]]], int]:
    from torch._dynamo.utils import counters

    counters.clear()
    with torch._inductor.config.patch(fx_graph_cache=True):
        found = orders(tokens, folder)
    return found, counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_order_survives_the_cache(tmp_path, monkeypatch):
    """Compiled twice in fresh processes: the second run takes everything from the cache, in the same order."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    for attempt in ("first", "second"):
        ranks = Ranks(2, start="forkserver")
        try:
            answers = ranks.run(hits, 256, str(tmp_path / attempt), timeout=300)
        finally:
            ranks.stop()
        for phases, hit in answers:
            in_order(phases)
            if attempt == "second":
                assert hit == 3, "forward, backward and inference come from the cache"
