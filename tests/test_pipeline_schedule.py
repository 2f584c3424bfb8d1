"""Pipelines in `explain`: torch's schedules, simulated on all ranks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class

import mfsdp
from mfsdp.config.hardware import Link
from mfsdp.cost_model.pipeline_schedule import SCHEDULES, SINGLE, V_SHAPED, Action, Order, Span, orders, simulate
from mfsdp.reports import page
from tests.helpers.explained import PLAIN
from tests.helpers.parity import compiled

FREE = replace(PLAIN, inside=Link(1e18, 0.0), between=Link(1e18, 0.0))
"""A machine that sends in no time."""


def run(order: list[Order], send: float = 0.0, **seconds: float) -> list[Span]:
    given = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0} | seconds
    actions = {a: given[a.kind] for mine in order for verb, a in mine if verb == "run"}
    stages = 1 + max(a.stage for a in actions)
    return simulate(order, actions, {(kind, s): send for kind in "FB" for s in range(stages)})


def end(spans: list[Span]) -> float:
    return max(s.end for s in spans)


def idle(spans: list[Span], rank: int) -> float:
    """The share of the schedule in which a rank does not compute."""
    return 1 - sum(s.end - s.start for s in spans if s.rank == rank and not s.is_message) / end(spans)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 4), (1, 3)])
def test_bubbles_of_equal_stages(name, ranks, microbatches):
    spans = run(orders(name, ranks, 1, microbatches))
    for rank in range(ranks):
        assert idle(spans, rank) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_bubbles_of_virtual_stages_and_of_zero_bubble():
    """By hand, for p ranks, v stages on each, m microbatches, F = I = W: 1F1B waits for p - 1 forwards and backwards,
    with virtual stages for a v-th of that; with the split the weight parts fill two thirds of it.
    """
    p, m = 4, 8
    bubble = {
        "1F1B": (1, 3 * (p - 1)), "InterleavedZeroBubble": (1, p - 1), "Interleaved1F1B": (2, 3 * (p - 1)),
        "LoopedBFS": (2, 3 * (p - 1)), "ZBVZeroBubble": (2, p - 1),
    }  # fmt: skip
    for name, (per_rank, waited) in bubble.items():
        spans = run(orders(name, p * per_rank, per_rank, m))
        assert end(spans) == 3 * m * per_rank + waited, name
        assert [idle(spans, r) for r in range(p)] == pytest.approx([waited / end(spans)] * p)


def test_what_a_send_costs_1f1b():
    """Two ranks, by hand: 1F1B waits for each message beside the receive, so that none hides."""
    order = orders("1F1B", 2, 1, 2)
    assert end(run(order)) == 3 * 3
    spans = run(order, send=0.25)
    # rank 1: F0 (from 1.25) B0, F1 (sent at 2) B1; rank 0: B0 from 4.5, B1 from 7.5
    starts = {str(s.action.kind) + str(s.action.microbatch): s.start for s in spans if s.rank == 1 and not s.is_message}
    assert starts == {"F0": 1.25, "B0": 2.25, "F1": 4.5, "B1": 5.5}
    assert end(spans) == 7.5 + 0.25 + 2


def cases() -> list[tuple[str, int, int, int]]:
    out = []
    for name in SCHEDULES:
        v = 1 if name in SINGLE else 2
        out += [(name, ranks * v, v, m) for ranks, m in ((2, 4), (4, 8))]
    return [*out, ("Interleaved1F1B", 12, 3, 8), ("InterleavedZeroBubble", 4, 1, 8)]


@pytest.mark.parametrize(("name", "stages", "per_rank", "microbatches"), cases())
def test_nothing_runs_before_what_it_reads(name, stages, per_rank, microbatches):
    """With stages and links of random speeds."""
    order, chance = orders(name, stages, per_rank, microbatches), random.Random(0)
    actions = {a: chance.uniform(0.5, 2) for mine in order for verb, a in mine if verb == "run"}
    moving = {(kind, s): chance.uniform(0, 1) for kind in "FB" for s in range(stages)}
    spans = simulate(order, actions, moving)
    computed = {s.action: s for s in spans if not s.is_message}
    moved = {s.action: s for s in spans if s.is_message}
    assert sum(s.action.kind == "F" for s in computed.values()) == stages * microbatches
    for action, span in computed.items():
        kind, stage, m = action
        assert span.end - span.start == pytest.approx(actions[action])
        before = []
        if kind == "F" and stage:
            before = [Action("F", stage - 1, m)]
        elif kind in "BI":
            before = [Action("F", stage, m)]
            if stage < stages - 1:
                before.append(next(a for k in "BI" if (a := Action(k, stage + 1, m)) in computed))
        elif kind == "W":
            before = [Action("I", stage, m)]
        for other in before:
            source = computed[other]
            assert span.start >= source.end - 1e-9
            if source.rank != span.rank:
                message = moved["F" if kind == "F" else "B", other.stage, m]
                assert (message.rank, message.to) == (source.rank, span.rank)
                assert source.end - 1e-9 <= message.start and message.end <= span.start + 1e-9
    for rank in range(len(order)):
        for busy in (
            [s for s in spans if s.rank == rank and not s.is_message],
            [s for s in spans if s.rank == rank and s.is_message],
            [s for s in spans if s.to == rank and s.is_message],
        ):
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(busy)), "one at a time"


class Block(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def part(blocks: int) -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(blocks)])


GIVEN: dict[str, Any] = {"units": [Block], "optimizer": "none", "options": {"lowering": "eager", "check": False}}
X = torch.zeros(512, 64, requires_grad=True)


@pytest.mark.slow
def test_1f1b_of_equal_stages_is_what_it_was():
    """A schedule by name gives what the formula of equal stages gives, if messages take no time."""
    table = mfsdp.compare(
        part(2), (X,), world=1, hardware=FREE, microbatches=6, stages=3, schedule=[None, "1F1B"], **GIVEN
    )
    formula, simulated = table
    assert simulated.step == pytest.approx(formula.step) and simulated.bubble == pytest.approx(formula.bubble)
    assert "without sends" not in str(simulated) and "a stage of 3 (1F1B without sends; " in str(formula)
    assert formula.pipeline is None and simulated.grid == formula.grid == "[1] x 3 stages"
    assert simulated.compute == pytest.approx(formula.compute) and simulated.flops == formula.flops
    held = [r.in_flight for r in simulated.pipeline.ranks]
    assert held == [3, 2, 1] and simulated.stages == sorted(simulated.stages, reverse=True)
    one = formula.stages[0] - formula.stages[1]
    first, second, _ = simulated.stages
    assert first - second == one > 0, "what forward saves, with the output that torch's stage keeps for its gradient"


@pytest.mark.slow
def test_schedules_of_one_stage():
    """Shared traces: what each schedule holds, reduces and splits."""
    names = ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
    table = mfsdp.compare(part(2), (X,), world=2, hardware=PLAIN, microbatches=4, stages=4, schedule=names, **GIVEN)
    found = dict(zip(names, table, strict=True))
    for name, report in found.items():
        pipeline = report.pipeline
        assert sum(e.nbytes for e in report.ledger.entries) == report.peak == max(report.stages)
        assert max(x.live for v in report.views for x in v.lines) == report.peak or report.ledger.phase == "optimizer"
        assert len(pipeline.ranks) == len(report.stages) == (4 if name in SINGLE else 2)
        assert report.ranks == 2 * len(pipeline.ranks) and report.slowed < 1e-9
        phases = [v.phase for v in report.views]
        split = name not in (*SINGLE, "Interleaved1F1B")
        parts = ["backward input", "backward weight", "last backward weight"]
        assert phases == ["forward", *(parts if split else ["backward", "last backward"])]
        reduced = {v.phase for v in report.views if any(x.lane == "R" and x.end > x.start for x in v.lines)}
        assert reduced == {phases[-1]}, "once per unit and step"
        runs = {v.phase: v.runs for v in report.views}
        each = len(pipeline.ranks[0].stages)
        assert runs["forward"] == 4 * each and runs[phases[-1]] == each
        kept = next(e for e in report.ledger.entries if e.name == "unreduced gradients")
        assert kept.nbytes == pytest.approx(each * 2 * (64 * 128 * 2 + 192) * 4, rel=0.01)
    assert [r.in_flight for r in found["1F1B"].pipeline.ranks] == [4, 3, 2, 1]
    assert [r.in_flight for r in found["GPipe"].pipeline.ranks] == [4, 4, 4, 4]
    assert max(r.waiting for r in found["ZBVZeroBubble"].pipeline.ranks) > 1
    assert found["Interleaved1F1B"].pipeline.ranks[0].stages == (0, 2)
    assert found["ZBVZeroBubble"].pipeline.ranks[0].stages == (0, 3)
    assert "rank  stages" in found["1F1B"].summary() and "4 stages on 2" in found["ZBVZeroBubble"].summary()
    whole = next(v for v in found["1F1B"].views if v.phase == "backward").seconds
    halves = {v.phase: v.seconds for v in found["ZBVZeroBubble"].views}
    assert halves["backward input"] + halves["backward weight"] == pytest.approx(whole, rel=0.25)


@pytest.mark.slow
def test_persistent_parameters_are_gathered_once():
    report = mfsdp.explain(
        part(2), (X,), world=2, hardware=PLAIN, microbatches=4, stages=2, schedule="GPipe", strategy=2, suggest=False,
        **GIVEN,
    )  # fmt: skip
    gathers = {v.phase: sum(x.end > x.start for x in v.lines if x.lane == "G") for v in report.views}
    assert gathers.pop("first forward") == 2 and not any(gathers.values())
    assert {v.phase: v.runs for v in report.views} == {
        "first forward": 1, "forward": 3, "backward": 3, "last backward": 1,
    }  # fmt: skip


def held(name: str) -> int:
    """The most bytes that a rank of two has held in its third step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    rank, single = mesh["pp"].get_local_rank(), name in SINGLE
    numbers = [rank] if single else [rank, 3 - rank] if name in V_SHAPED else [rank, rank + 2]
    mfsdp.runtime.static_buffers.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.manual_seed(0)
        modules = [mfsdp.fully_shard(part(2), mesh=mesh, units=[Block]) for _ in numbers]
        runs = [compiled(module, "eager", check=False, split_backward=not single) for module in modules]
        make = partial(mfsdp.PipelineStage, device=torch.device("cpu"), group=mesh["pp"].get_group())
        count = 2 if single else 4
        stages = [make(run, number, count) for run, number in zip(runs, numbers, strict=True)]
        schedule = get_schedule_class(name)(stages[0] if single else stages, 4, loss_fn=lambda out, y: (out * y).sum())
        optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()])
        x, y = torch.randn(4 * 512, 64) if 0 in numbers else None, torch.ones(()).expand(4 * 512, 64)
        for step in range(3):
            with torch.profiler.record_function(f"step {step}"):
                schedule.step(*(() if x is None else (x,)), target=y if count - 1 in numbers else None)
                optimizer.step()
                optimizer.zero_grad()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    begin = next(e.start_ns() for e in events if e.name() == "step 2")
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = itertools.accumulate(n for _, n in moves)
    return max(bytes_now for (now, _), bytes_now in zip(moves, live, strict=True) if now >= begin)


EXHAUSTIVE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("1F1B", "InterleavedZeroBubble")]


@pytest.mark.dist
@pytest.mark.parametrize("name", [*EXHAUSTIVE, "ZBVZeroBubble"])
def test_each_rank_holds_what_explain_says(four_ranks, name):
    real = four_ranks.run(held, name)[::2]
    count = 2 if name in SINGLE else 4
    report = mfsdp.explain(
        [part(2) for _ in range(count)], (torch.zeros(512, 64),), world=2, hardware=PLAIN, microbatches=4,
        schedule=name, suggest=False, **{**GIVEN, "optimizer": "adamw"},
    )  # fmt: skip
    assert report.stages == pytest.approx(real, rel=0.04)


@pytest.mark.slow
def test_without_the_split_zero_bubble_has_bubbles():
    options = GIVEN | {"options": {**GIVEN["options"], "split_backward": False}}
    given = {"world": 1, "hardware": FREE, "microbatches": 4, "stages": 2, "schedule": "InterleavedZeroBubble",
             "stages_per_rank": 1, "suggest": False}  # fmt: skip
    split, whole = (mfsdp.explain(part(2), (X,), **given, **more) for more in (GIVEN, options))
    assert split.options["split_backward"] and not whole.options["split_backward"]
    assert [v.phase for v in whole.views] == ["forward", "backward", "last backward"]
    assert split.pipeline.ranks[0].bubble < whole.pipeline.ranks[0].bubble


@pytest.mark.slow
def test_unequal_stages_and_the_page():
    first, second = part(1), part(3)
    report = mfsdp.explain(
        [first, second], (X,), world=2, hardware=PLAIN, microbatches=4, schedule="1F1B", **GIVEN
    )  # with suggestions
    quick, slow = report.pipeline.ranks
    assert slow.computing > 2 * quick.computing and quick.bubble > slow.bubble
    computed = {s.action: s.end - s.start for s in report.pipeline.spans if not s.is_message}
    assert computed["F", 1, 0] == pytest.approx(3 * computed["F", 0, 0], rel=0.3)
    assert computed["B", 0, 1] < computed["B", 1, 1]
    sent = {s.action.kind: s.end - s.start for s in report.pipeline.spans if s.is_message}
    rate = PLAIN.inside.bandwidth * PLAIN.reached_bandwidth
    assert [sent["F"], sent["B"]] == pytest.approx([512 * 64 * 4 / rate + PLAIN.inside.latency] * 2)
    assert report.pipeline.shown == 1, "three blocks' weights and gradients"
    pytest.importorskip("bokeh", reason="the page needs Bokeh: pip install 'mfsdp[report]'")
    chart = str(page.pipeline_chart(report.pipeline))
    for rank in range(2):
        assert f"rank {rank}: stage {rank}" in chart and f"rank {rank}: bubble" in chart
    assert "forward: stage 1, microbatch 3" in chart and "gradients: stage 1 to 0, microbatch 3" in chart
    html = page.render(report)
    assert html.count('data-of="pipeline"') == 1 and 'id="pipeline"' in html


@pytest.mark.slow
def test_what_no_schedule_can_be():
    def refused(model: Any = None, **given: Any) -> str:
        with pytest.raises(ValueError) as error:
            mfsdp.explain(part(1) if model is None else model, (X,), **{"microbatches": 4, "stages": 4, **given})
        return str(error.value)

    said = refused(schedule="ZB")
    assert "schedule='ZB': choose one of" in said and all(name in said for name in SCHEDULES)
    assert "DualPipeV takes 2 on each rank" in refused(schedule="DualPipeV", stages_per_rank=1)
    assert "give a multiple of the 2 stages" in refused(schedule="LoopedBFS", stages=3)
    assert "choose one of" in refused(stages_per_rank=2)
    assert "a pipeline takes one microbatch" in refused(schedule="GPipe", together=2)
    assert "schedule='1F1B', microbatches=2: " in refused(schedule="1F1B", microbatches=2)
    assert "stages=4 and a list of 2" in refused([part(1), part(1)])
    with pytest.raises(ValueError, match="its inputs have no gradient"):
        tokens = nn.Sequential(nn.Embedding(8, 64), Block())
        mfsdp.explain(tokens, (torch.zeros(4, dtype=torch.long),), microbatches=4, stages=4, schedule="ZBVZeroBubble")
    for model in ((m for m in [nn.Linear(4, 4)]), "model", [nn.Linear(4, 4), None]):
        with pytest.raises(TypeError, match="give a module, or a list of a pipeline's stages"):
            mfsdp.explain(model, (torch.zeros(2, 4),))
    with pytest.raises(TypeError, match="give one module; explain takes a pipeline's stages"):
        mfsdp.plan([nn.Linear(4, 4)], (torch.zeros(2, 4),), memory=10**9)
    frozen = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]
    with pytest.raises(ValueError, match="the stage Linear is not trained"):
        mfsdp.explain(frozen, (torch.zeros(2, 4),), microbatches=2, world=2)
