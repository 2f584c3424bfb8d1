"""Reports, listings and dumps never end a run: each of their functions raises, and a training step is still right."""

from __future__ import annotations

import ast
import copy
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mfsdp
from mfsdp import pipeline
from mfsdp.config import best_effort
from mfsdp.config.hardware import KNOWN
from mfsdp.config.options import Options
from mfsdp.cost_model import fusion
from mfsdp.cost_model.auto_prefetch import AutoPrefetch
from mfsdp.ir import ops
from mfsdp.ir.program import Program
from mfsdp.ir.verifier import InvariantError
from mfsdp.runtime import instrumentation
from tests.helpers.models import GPT, MLP, Block
from tests.helpers.toys import toy2

SPOILED = {
    "outline": "mfsdp.compiler.program_info.outline",
    "clock": "mfsdp.cost_model.op_cost.op_times",
    "one line's time": "mfsdp.cost_model.op_cost._time",
    "formulas": "mfsdp.cost_model.fusion._attention",
    "notes on copies": "mfsdp.compiler.backend._warn_copies",
    "schedule": "mfsdp.ir.printer.schedule",
    "listing": "mfsdp.ir.printer.render",
    "summary": "mfsdp.ir.printer.summary",
    "lines": "mfsdp.ir.printer.text",
    "operands": "mfsdp.ir.printer.operand",
    "bytes": "mfsdp.ir.byte_costs.lines",
    "ledger": "mfsdp.cost_model.estimate.ledger",
    "estimate": "mfsdp.reports.dump.estimate",
    "page": "mfsdp.reports.page.render",
    "artifacts": "mfsdp.compiler.backend.dump.artifacts",
    "folder": "mfsdp.compiler.backend.Dump",
    "files": "mfsdp.reports.dump.Dump.add",
    "report": "mfsdp.reports.dump.Dump._report",
    "ranges": "mfsdp.reports.profile._enter",
}


class Spoiled(Exception):
    pass


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings of mfsdp, with the error behind them."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda r: found.append(f"{r.getMessage()}{r.exc_info or ''}")  # type: ignore[method-assign]
    best_effort._said.clear()
    best_effort.log.addHandler(handler)
    yield found
    best_effort.log.removeHandler(handler)


def raises(*args: Any, **kwargs: Any) -> Any:
    raise Spoiled


DEEP = ("formulas", "one line's time", "operands", "files", "ranges")
"""What others call, which `test_a_step_goes_on_without_any_of_it` does not come to."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in DEEP else pytest.param(n, marks=pytest.mark.exhaustive) for n in SPOILED])
def test_a_step_goes_on_without(name, monkeypatch, tmp_path, said):
    torch._dynamo.reset()
    fusion._formula.cache_clear()
    torch.manual_seed(0)
    attention = name == "formulas"
    reference = GPT(layers=1) if attention else MLP()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block if attention else nn.Linear])
    x = torch.randint(31, (2, 8)) if attention else torch.randn(2, 24)
    reference(x).square().mean().backward()
    monkeypatch.setattr(SPOILED[name], raises)
    if attention:
        monkeypatch.setattr(fusion, "_attention_backward", raises)
    options = {"lowering": "eager", "dump": str(tmp_path)}
    with mfsdp.ranges():
        run = torch.compile(model, backend="mfsdp", fullgraph=True, options=options)
        run(x).square().mean().backward()
    fusion._formula.cache_clear()
    assert any("Spoiled" in line for line in said), "nothing says what is missing"
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert q.grad is None or torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7)


ELSEWHERE = {
    "auto_prefetch.py": "test_what_decides_by_an_estimate_takes_the_default",
    "schedule_offload.py": "test_without_times_copies_are_placed_by_the_lag",
    "pipeline.py, around": "test_a_fault_of_a_pass_is_told_without_the_listing",
}


def places() -> set[tuple[str, int]]:
    """Returns the file and line of each call of ``only_tells``, and imports these files: a later import would keep what
    a test has put in its place.
    """
    found, package = set(), Path(mfsdp.__file__).parent
    for path in (*package.rglob("*.py"), *(package / "passes").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "only_tells":
                importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
                around = ", around" if "the fault" in ast.unparse(node.args[0]) else ""
                if path.name + around not in ELSEWHERE:
                    found.add((path.name, node.lineno))
    return found


@pytest.mark.slow
def test_a_step_goes_on_without_any_of_it(monkeypatch, tmp_path):
    """All that only tells raises at once; then all but what begins dumps and outlines, to come to what is in them."""
    torch.manual_seed(0)
    reference = GPT(layers=1)
    x, reached, spared = torch.randint(31, (2, 8)), set[tuple[str, int]](), list[str]()
    reference(x).square().mean().backward()
    wanted, real = places(), best_effort.only_tells

    def spoiled(missing: str, otherwise: Any, tell: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        reached.add((Path(caller.f_code.co_filename).name, caller.f_lineno))
        return real(missing, otherwise, tell if missing in spared else raises, *args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "only_tells", None) is real:
            monkeypatch.setattr(module, "only_tells", spoiled)
    for again in (False, True):
        spared += ["files in dump=", "names of operations in errors, stacks and profiles"] if again else []
        torch._dynamo.reset()
        fusion._formula.cache_clear()
        instrumentation.frame.cache_clear()
        options = {"lowering": "eager", "dump": str(tmp_path), "frames": True}
        model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])
        with mfsdp.ranges(), best_effort.listening(print):
            best_effort.doing("what a planner does")
            torch.compile(nn.Linear(3, 3), backend="mfsdp")(torch.ones(1, 3))  # not sharded
            run = torch.compile(model, backend="mfsdp", fullgraph=True, options=options)
            run(x).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7)
    fusion._formula.cache_clear()
    instrumentation.frame.cache_clear()  # frames that were not renamed
    assert wanted <= reached, "these were not reached: make them raise here, or in a test that ELSEWHERE names"


def test_a_fault_of_a_pass_is_told_without_the_listing(monkeypatch, said):
    def early(p: Program) -> None:
        p.move([p.results()[0]], p.start())

    def lost(p: Program) -> None:
        p.erase(next(n for n in p.nodes if n.target is ops.accumulate))

    monkeypatch.setattr("mfsdp.ir.printer.around", raises)
    with pytest.raises(pipeline.PassError, match="after early: .* move both"):
        pipeline.run(toy2("forward"), passes=(*pipeline.PIPELINE, ("early", early)))
    with pytest.raises(InvariantError, match="after lost: "):
        pipeline.run(toy2("backward"), passes=(*pipeline.PIPELINE, ("lost", lost)))
    assert len(said) == 1 and "without the listing around the fault" in said[0]


def test_what_decides_by_an_estimate_takes_the_default(monkeypatch, said):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with torch.device("meta"):
        program = mfsdp.trace(model, (torch.empty(64, 64),), world=4, units=[nn.Linear]).forward
    monkeypatch.setattr("mfsdp.cost_model.auto_prefetch.simulate", raises)
    assert AutoPrefetch(KNOWN["h100"])(program)[0] == Options.prefetch == 1
    assert len(said) == 1 and "prefetch='auto', depth 1 is taken" in said[0]


def test_the_same_error_is_said_once(said):
    assert [best_effort.only_tells("colours", 3, raises) for _ in range(2)] == [3, 3]
    assert said == ["mfsdp: without colours: Spoiled: . The run goes on; please report this."]


# grouped-query attention

SDPA = torch.ops.aten
Q, K = (2, 8, 16, 4), (2, 2, 24, 4)


def counted(name: str, *shapes: Any) -> int:
    graph = torch.fx.Graph()
    args = []
    for shape in shapes:
        node = graph.placeholder("x") if isinstance(shape, tuple) else shape
        if isinstance(shape, tuple):
            node.meta["val"] = torch.empty(shape, device="meta")
        args.append(node)
    call = graph.call_function(getattr(SDPA, name).default, tuple(args))
    call.meta["val"] = torch.empty(shapes[0], device="meta")
    return fusion.flops(call)


FORWARD, BACKWARD = 2 * 2 * 8 * 16 * 24 * (4 + 4), 2 * 2 * 8 * 16 * 24 * (3 * 4 + 2 * 4)


@pytest.mark.parametrize(
    "kernel", ["flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
               "fused_attention_overrideable"]
)  # fmt: skip
def test_grouped_queries_count_as_many_heads_as_q_has(kernel):
    assert counted(f"_scaled_dot_product_{kernel}", Q, K, K) == FORWARD
    assert counted(f"_scaled_dot_product_{kernel}_backward", Q, Q, K, K) == BACKWARD


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_kernels_with_rows_first(kernel):
    q, k = ((x[0], x[2], x[1], x[3]) for x in (Q, K))
    more = [None] * (4 + (kernel == "efficient"))
    assert counted(f"_{kernel}_attention_forward", q, k, k, *more) == FORWARD
    assert counted(f"_{kernel}_attention_backward", q, q, k, k, *[None] * 6) == BACKWARD


def test_sequences_of_many_lengths():
    """Of 24 and 8 rows: each row meets at most the 24 keys of the longest."""
    q, k, lengths = (32, 8, 4), (32, 2, 4), (3,)
    assert counted("_flash_attention_forward", q, k, k, lengths, lengths, 24, 24) == 2 * 8 * 32 * 24 * 8


@pytest.mark.slow
def test_grouped_queries_count_alike_however_they_are_computed():
    """Math repeats k and v and has products; the kernel of CPUs has neither."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k))
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    def step(backend: Any) -> dict[str, int]:
        torch._dynamo.reset()
        model = mfsdp.fully_shard(Attention())
        found = {}

        def count(program: Any) -> None:
            found[program.phase] = fusion.total_flops(program)

        from mfsdp import pipeline

        options = {"lowering": "eager", "passes": (*pipeline.PIPELINE, ("count", count))}
        with nn.attention.sdpa_kernel(backend):
            torch.compile(model, backend="mfsdp", options=options)(torch.ones(2, 16, 32)).sum().backward()
        return found

    kernels = nn.attention.SDPBackend
    flash, math = step(kernels.FLASH_ATTENTION), step(kernels.MATH)
    assert flash["forward"] == math["forward"] > 0
    scores = 2 * 2 * 8 * 16 * 16 * 4  # computed again by the kernel, saved by math
    assert flash["backward"] == math["backward"] + scores
