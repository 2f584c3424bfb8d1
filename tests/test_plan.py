"""Plans: settings are scored whole, few layers say what many cost, and what is planned is what is compiled."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mfsdp
from examples.parallel.model import Layer, Mixtral
from mfsdp import pipeline
from mfsdp.compiler import capture, joint_graph
from mfsdp.compiler import memory_option as planned_by
from mfsdp.compiler.joint_graph import Treatment
from mfsdp.compiler.plan_score import Scorer, lengthened, simulated
from mfsdp.compiler.plan_search import Planner
from mfsdp.compiler.plan_space import ALLOWED, OVERLAPS, Setting, Space
from mfsdp.compiler.tracing import Programs
from mfsdp.config.hardware import Hardware, Link, Transfer
from mfsdp.config.layer_choices import Choice
from mfsdp.config.options import Options
from mfsdp.config.plans import nbytes_of
from mfsdp.cost_model import fusion, machine, op_cost
from mfsdp.cost_model.extrapolate import Event, drained, extrapolated, runs, segment
from mfsdp.cost_model.timeline import simulate
from mfsdp.ir.byte_costs import lines, peak
from mfsdp.planning.explain import buffers_of
from mfsdp.planning.plan import _prices
from mfsdp.planning.question import machine_of
from mfsdp.reports.page import render as page_of
from tests.helpers.explained import PLAIN, built, hastily, held
from tests.helpers.models import GPT, Block, Gated, Unlike
from tests.helpers.toys import BF16

SLOW = {
    "like": "h100", "inside": {"bandwidth": 5e9, "latency": 1e-6}, "host": {"bandwidth": 200e9, "latency": 1e-7},
}  # fmt: skip


def traced(
    model: nn.Module, ids: torch.Tensor, lowering: str = "eager", units: Any = (Block,), **sharding: Any
) -> Programs:
    with torch.device("meta"):
        return mfsdp.trace(model, (ids,), world=8, units=list(units), lowering=lowering, **sharding)


def scorer_of(programs: Programs, lowering: str = "eager", machine: Any = SLOW, **more: Any) -> Scorer:
    assert programs.capture is not None
    space = Space(programs.capture, Options(lowering=lowering), machine_of(machine))
    return Scorer(space, buffers_of(programs.model), **more)


def scorer(model: nn.Module, ids: torch.Tensor, lowering: str = "eager", units: Any = (Block,), **more: Any) -> Scorer:
    return scorer_of(traced(model, ids, lowering, units), lowering, **more)


class Light(GPT):
    """A GPT whose layers have no attention: they are traced, and cut, in a tenth of the time."""

    def __init__(self, layers: int = 2, width: int = 16):
        super().__init__(width=width, layers=0)
        self.blocks = nn.ModuleList(Gated(width, 4 * width) for _ in range(layers))


def light(layers: int, width: int = 64) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Light(layers, width), torch.zeros(64, 8, dtype=torch.long)


def gpt(layers: int, vocabulary: int = 64, **more: Any) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return GPT(width=64, layers=layers, vocabulary=vocabulary, length=32, **more), torch.zeros(
            2, 32, dtype=torch.long
        )


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "recompute"), [pytest.param(2, False, marks=pytest.mark.exhaustive), (5, True)])
def test_a_joint_graph_cut_again_gives_the_programs_that_compiling_gives(layers, recompute):
    programs = traced(*gpt(layers, recompute=recompute), "inductor")
    found = scorer_of(programs, "inductor", "h100")
    again = found.space.programs({}, frozenset())
    for a, b in zip(programs, again, strict=True):
        for p in (a, b):
            pipeline.run(p, checked=False, listings=False)
        assert [(n.name, str(n.target), str(n.args)) for n in a.nodes] == [
            (n.name, str(n.target), str(n.args)) for n in b.nodes
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "depth", "lag", "apart"),
    [
        ("OS" * 6, 1, 1, ()),
        pytest.param("R" * 4 + "G" * 4, 0, 0, (), marks=pytest.mark.exhaustive),
        pytest.param("S" * 8, 1, 1, ("tokens", "head"), marks=pytest.mark.exhaustive),
        pytest.param("R" * 10 + "S" * 3, 2, 2, (), marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_few_layers_say_what_many_take_to_the_printed_digits(states, depth, lag, apart):
    """Where large units of their own stand at both ends, it matters to which static buffer the last layer comes."""
    model, ids = gpt(len(states), 2000 if apart else 64, tied=not apart)
    ids = torch.zeros(16, 32, dtype=torch.long) if "O" in states else ids
    found = scorer(model, ids, "inductor", (Block, *apart))
    (kind,) = found.space.kinds
    away = (2, len(states)) if "O" in states else (1, 0)
    again = states.rindex("R") + 1 if "R" in states else 0
    chosen = replace(kind, recomputed=again, gathered=states.count("G"), offloaded=away)
    setting = Setting((chosen,), depth, lag)
    treated, repeats = found.shortened(setting)
    assert repeats and len(treated) < len(states)
    table = pipeline.table(depth, lag, wide=True, pace=found.timing)
    whole = []
    for program in found.space.programs(joint_graph.treatments(setting.choices), frozenset()):
        pipeline.run(program, passes=table, checked=False, listings=False)
        times = op_cost.op_times(program, found.space.machine)
        seconds = max(span.end for span in simulate(program, times))
        top = peak(lines(program, fusion.fused(program))) - sum(program.slots.values())
        whole.append((f"{1e6 * seconds:.6f}", top, program.slots))
        unfolded = extrapolated(program, times, True).play()
        assert (f"{1e6 * unfolded[0]:.6f}", unfolded[1]) == whole[-1][:2]
    parts = []
    for part in (lengthened(part, repeats) for part in found.events(treated, setting)):
        seconds, top = part.play()
        parts.append((f"{1e6 * seconds:.6f}", top, part.slots))
    assert parts == whole
    assert (found.score(setting).host > 0) is ("O" in states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "rate", "every"),
    [
        (9, 2e7, 1),
        *(pytest.param(*more, 200e9, every, marks=pytest.mark.exhaustive) for more, every in (((9,), 1), ((13,), 2))),
    ],
)
def test_copies_that_do_not_come_to_rest_within_few_layers_are_scored_in_all_of_them(layers, rate, every):
    """Of a host behind a slow link each layer leaves one copy more behind."""
    model, ids = light(layers)
    host = {"host": {"bandwidth": rate, "latency": 1e-7}}
    found = scorer(model, ids, "inductor", (Gated,), machine=SLOW | host)
    (kind,) = found.space.kinds
    setting = Setting((replace(kind, offloaded=(every, layers), recomputed=layers),), 0, 0)
    treated, repeats = found.shortened(setting, more=1)
    assert repeats and len(treated) < layers
    few = found.events(treated, setting)
    rest = all(part.rests(r.borders(part.backward, 1, 1)) for part in few for r in repeats)
    assert rest is (rate > 2e7)
    parts = found.events(joint_graph.treatments(setting.choices), setting)
    whole = found.total(setting, simulated(parts))
    score = found.score(setting)
    assert (score.peak, score.host) == (whole.peak, whole.host)
    assert score.seconds == pytest.approx(whole.seconds, rel=1e-9)


@pytest.mark.slow
def test_what_goes_to_the_host_fits_it():
    """Without a bound the same budget takes more of it; with one too small for anything, nothing goes there."""
    programs, found = traced(*light(9), units=(Gated,)), [0]
    for most in (lambda: 0, lambda: found[-1] // 3, lambda: 1):
        scores = scorer_of(programs, machine=SLOW | {"host_memory": most()})
        given = Planner(scores, ("offload",))
        free, floor = scores.score(given.top).peak, scores.score(given.floor)
        assert given.best(free) == given.top and floor.host <= (most() or floor.host)
        found.append(floor.host)
        told = any("offloaded" in price.text for price in _prices(given, given.top))
        assert told is (most() != 1), "what it does not fit has no price"
    _, every, some, none = found
    assert every > some > none == 0
    assert floor.peak == free and given.best(free - 1) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [pytest.param({"mp_policy": BF16}, marks=pytest.mark.exhaustive), {"mp_policy": BF16, "strategy": 1}]
)
def test_few_layers_account_for_all(more, monkeypatch):
    """What is there throughout a step, which the ledger reads from programs: casts that stay from step to step, too."""
    programs = traced(*light(8), units=(Gated,), **more)
    few = scorer_of(programs)
    assert few._programs.cache_info().currsize == 1 and len(few.space.treated_sample(few.space.kinds)) < 8
    monkeypatch.setattr(Space, "sample", lambda self, choice: choice.layers)
    every = scorer_of(programs)
    for a, b in ((few.ledger, every.ledger), (few.host_state_ledger, every.host_state_ledger)):
        changed = few._slots - every._slots
        assert (a.at_step - changed, a.lasting - changed, a.host) == (b.at_step, b.lasting, b.host)
        lasting = {"main weights", "optimizer state", "gradients", "shards in what travels"}
        assert [e for e in a.entries if e.name in lasting] == [e for e in b.entries if e.name in lasting]


CHOSEN: tuple[tuple[dict[str, Any], float], ...] = (
    ({"recomputed": 4}, 1e-3),
    ({"recomputed": 6, "gathered": 5}, 1e-3),
    ({"gathered": 9, "recomputed": 2}, 5e-3),
    ({"offloaded": (1, 9)}, 1e-3),
    ({"offloaded": (2, 7), "recomputed": 4, "gathered": 3}, 3e-2),
)
"""What layers are chosen for, and how far off the estimate of seconds may be."""

DEPTHS = ((0, 0), (1, 1), (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        ((4, 2),),
        pytest.param(tuple(product(range(len(CHOSEN)), range(len(DEPTHS)))), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_pieces_say_about_what_a_step_takes(cases):
    """Seconds closer than memory, whose peak depends on static buffers, and on when copies come back."""
    model, _ = gpt(9)
    found = scorer(model, torch.zeros(16, 32, dtype=torch.long), "inductor")
    (kind,) = found.space.kinds
    for chosen, off, (depth, lag) in ((*CHOSEN[i], DEPTHS[j]) for i, j in cases):
        setting = Setting((replace(kind, **chosen),), depth, lag)
        about, score = found.estimate(setting), found.score(setting)
        assert about is not score and about.host == pytest.approx(score.host, rel=0.02)
        assert about.seconds == pytest.approx(score.seconds, rel=off)
        assert about.peak == pytest.approx(score.peak, rel=0.03)


AGAIN = ((0, 9), (3, 0), (3, 9))
"""How many layers of each kind are recomputed."""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        tuple(zip(AGAIN, ((0, 0), (1, 1), (1, 1)), strict=True)),
        pytest.param(tuple(product(AGAIN, ((0, 0), (1, 1)))), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_pieces_of_layers_that_are_written_out_begin_where_they_do(cases):
    """Too few for calls: backward computes single lines of each again far ahead of the rest."""
    with torch.device("meta"):
        model = Unlike("AAA" + 9 * "B", 64)
    found = scorer(model, torch.zeros(16, 3, 64), "inductor", ["layers.*"])
    assert [len(found.space.removable.intersection(kind.layers)) for kind in found.space.kinds] == [0, 9]
    for again, (depth, lag) in cases:
        chosen = tuple(replace(kind, recomputed=n) for kind, n in zip(found.space.kinds, again, strict=True))
        about, score = (get(Setting(chosen, depth, lag)) for get in (found.estimate, found.score))
        assert about.seconds == pytest.approx(score.seconds, rel=0.06)
        assert about.peak == pytest.approx(score.peak, rel=0.06)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("gr"), st.floats(0.0, 3.0), st.floats(0.0, 2.0), st.integers(-9, 9)), max_size=6)
)
def test_stretches_one_behind_the_other_take_what_they_take_at_once(parts):
    """What follows depends on nothing but what is under way; a wait is for the launch before the last."""
    events = []
    for queue, takes, seconds, delta in parts:
        moves = Transfer(0.1, takes, link=queue) if takes > 0.5 else Transfer(0.0, 0.0)
        events.append(Event(seconds, max(0, delta), delta, queue, moves))
        events.append(Event(seconds, 3, -delta, queue, back=1))
    whole, seconds, live, top, left = segment(events * 5), 0.0, 0, 0, ()
    for part in (events[:1], *[events[1:] + events[:1]] * 4, events[1:]):
        took = segment(part, left)
        seconds, top, live, left = seconds + took.seconds, max(top, live + took.top), live + took.delta, took.left
    assert (live, top) == (whole.delta, whole.top)
    assert seconds + drained(left) == pytest.approx(whole.seconds + drained(whole.left), rel=1e-9)


def test_runs_of_equal_choices():
    assert runs("SSSSS", 2) == [(0, 1, 5)]
    assert runs("ORRORRORRSSS", 2, 3) == [(0, 3, 3), (9, 1, 3)]
    assert runs("AB", 2) == [(0, 1, 1), (1, 1, 1)]
    assert runs("OSSSS", 2, 5) == [(0, 1, 1), (1, 1, 4)]
    choice = Choice("Block", tuple("abcdefgh"), gathered=2, recomputed=6, offloaded=(2, 5))
    assert "".join("O" if choice.offloads(i) else "R" if choice.recomputes(i) else "-" for i in range(8)) == "OROROR--"
    assert [choice.gathers(i) for i in range(8)] == [False] * 6 + [True] * 2


SMALL = Hardware(
    "small", {"f32": 1e11}, 10**9, 1e11, Link(3e9, 1e-6), Link(3e9, 1e-6), host=Link(1e10, 1e-7), kernel=1e-6
)
"""A machine so slow that small models keep it busy."""

TOYS = {"gpt": [Block], "experts": ["layers.*"], "unlike": ["layers.*", "head"]}


def toy_model(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "gpt":
        return GPT(width=64, layers=3, vocabulary=64, length=32)
    if name == "unlike":
        return Unlike("ABA")
    model = Mixtral(width=32, hidden=48, layers=3)
    model.layers[0] = Layer(32, 2, 96)
    return model


def toy_input(name: str, seed: int = 0) -> torch.Tensor:
    told = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 32, generator=told) if name == "unlike" else torch.randint(31, (2, 32), generator=told)


def toy(name: str) -> Planner:
    """A planner of a model so small that all settings can be looked at; of what is saved where layers are computed
    again only one level, of the GPT two, as each is a cut of its own.
    """
    with torch.device("meta"):
        model = toy_model(name)
    x = torch.zeros_like(toy_input(name))
    chosen = tuple(what for what in ALLOWED if what != "offload")  # which would be many more settings
    found = scorer(model, x, units=TOYS[name], machine=SMALL)
    few = slice(0, 3, 2) if name == "gpt" else slice(1, 2)
    found.space.levels = [levels[few] for levels in found.space.levels]
    return Planner(found, chosen)


def every(found: Space, ends: bool) -> list[Setting]:
    """Settings of a model of few layers: none, one and all of each kind, also where the planner does not look.

    Args:
        ends: none and all only, and the least, some and the most overlap.
    """
    overlaps = [pair for pairs in OVERLAPS for pair in pairs]
    counts = {kind: sorted({0, 0 if ends else 1, len(kind.layers)}) for kind in found.kinds}
    treated = [
        [
            replace(kind, recomputed=r, gathered=k, saved=level)
            for r in counts[kind]
            for k in counts[kind]
            for level in (levels if r else [()])
        ]
        for kind, levels in zip(found.kinds, found.levels, strict=True)
    ]
    return [
        Setting(choices, depth, lag, streamed)
        for choices in product(*treated)
        for depth, lag in (overlaps[::3] if ends else overlaps)
        for streamed in (False, True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budgets", "ends"),
    [
        ("unlike", (4, 24), True),
        pytest.param("gpt", range(41), False, marks=pytest.mark.exhaustive),
        pytest.param("unlike", range(41), False, marks=pytest.mark.exhaustive),
    ],
)
def test_the_planner_is_within_two_percent_of_the_best_at_every_budget(name, budgets, ends):
    """Also where layers are of several kinds, and units of unlike sizes. Budgets are fortieths of the way from the
    least memory to the most.
    """
    found = toy(name)
    scores = [found.scorer.score(s) for s in every(found.space, ends)]
    low, high = found.scorer.score(found.floor).peak, max(s.peak for s in scores)
    assert low == min(s.peak for s in scores)
    for i in budgets:
        budget = low + (high - low) * i // 40
        best = found.best(budget)
        assert best is not None and found.scorer.score(best).peak <= budget
        oracle = min(s.seconds for s in scores if s.peak <= budget)
        assert found.scorer.score(best).seconds <= 1.02 * oracle, (budget, best)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.xfail(strict=True, reason="since accumulators exist from backward on, this plan is missed: 9.6% slower")
def test_the_one_budget_of_experts_whose_best_plan_is_missed():
    """Of the 41 budgets that every setting was scored for."""
    found = toy("experts")
    dense, sparse = found.space.kinds
    few = [levels[0] for levels in found.space.levels]
    chosen = replace(dense, recomputed=1, saved=few[0]), replace(sparse, gathered=1, recomputed=1, saved=few[1])
    better = found.scorer.score(Setting(chosen, 0, 0, True))
    best = found.best(better.peak)
    assert best is not None and found.scorer.score(best).seconds <= 1.02 * better.seconds


@pytest.fixture(scope="module")
def planned() -> mfsdp.Plan:
    model, ids = gpt(3)
    return mfsdp.plan(
        model, (ids,), memory=1_600_000, world=8, units=[Block], hardware=SLOW, curve=False,
        allow=("recompute", "prefetch"), options={"lowering": "eager"},
    )  # fmt: skip


@pytest.mark.slow
def test_layers_that_backward_does_not_come_to_are_left_as_they_are():
    """Frozen, with nothing that trains in front of them."""
    model, ids = light(4)
    for part in (model.tokens, model.places, *model.blocks[:2]):
        part.requires_grad_(False)
    given = {"world": 8, "units": [Gated], "hardware": SLOW, "options": {"lowering": "eager"}}
    how = {"allow": ("recompute",), "curve": False}
    top = mfsdp.plan(model, (ids,), memory=2**40, **how, **given)
    plan = mfsdp.plan(model, (ids,), memory=(top.floor + top.peak) // 2, **how, **given)
    assert {path for choice in plan.choices for path in choice.layers} == {f"blocks.{i}" for i in range(2, 4)}
    told = mfsdp.explain(model, (ids,), plan=plan, suggest=False, **given)
    assert plan.step > top.step and f"{told.step:.12f}" == f"{plan.step:.12f}" and told.peak == plan.peak


@pytest.mark.slow
def test_what_is_planned_is_what_is_explained(planned, tmp_path: Path):
    model, ids = gpt(3)
    assert planned.floor < planned.peak <= planned.memory < planned.top
    given = {"world": 8, "units": [Block], "options": {"lowering": "eager"}, "suggest": False}
    told = mfsdp.explain(model, (ids,), hardware=SLOW, plan=planned, **given)
    assert f"{told.step:.12f}" == f"{planned.step:.12f}" and told.peak == planned.peak
    assert str(planned) in told.summary()
    page = page_of(told)
    assert 'data-tab="plan"' in page and "recomputed" in page
    planned.save(tmp_path / "plan.json")
    assert mfsdp.Plan.load(tmp_path / "plan.json") == planned
    assert "chosen" in str(planned) and "ms/GiB" in str(planned)


@pytest.mark.exhaustive
def test_copies_to_the_host_are_explained_wherever_they_were_planned(planned):
    model, ids = gpt(3)
    given = {"world": 8, "units": [Block], "options": {"lowering": "eager"}, "suggest": False}
    (kind,) = planned.choices
    away = replace(planned, choices=(replace(kind, recomputed=0, saved=(), offloaded=(1, 3)),))
    given["plan"] = away
    lists = {name: value for name, value in given.items() if name != "suggest"}
    there, elsewhere = mfsdp.compare(model, (ids,), hardware=[SLOW, "a100"], **lists)
    score = scorer(model, ids, inputs=ids.nbytes).score(Setting(away.choices, **away.options))
    assert score.host and f"{there.step:.12f}" == f"{score.seconds:.12f}" and there.peak == score.peak
    assert elsewhere.peak == there.peak, "copies stand where they stood"
    given["options"] = {"lowering": "eager", "prefetch": "auto"}
    auto = mfsdp.explain(model, (ids,), hardware={**SLOW, "host": {"bandwidth": 1e9, "latency": 1e-6}}, **given)
    for view in auto.views:
        listing = next(stage.listing for stage in view.stages if stage.name == "prefetch")
        said = re.search(r"auto: depth \d of 0 to \d: ([\d.]+) ms on", listing)
        assert said is not None and said[1] == f"{1e3 * view.seconds:.2f}", "copies take their time there too"


@pytest.mark.slow
def test_what_does_not_fit_or_was_made_for_another_model_says_so(planned, tmp_path: Path):
    model, ids = light(2)
    with pytest.raises(
        ValueError, match=r'Cheapest that would make it fit: layers that are units \(units="auto"\), or '
    ):
        mfsdp.plan(model, (ids,), memory="1MB", world=8, hardware=SLOW, allow=())
    with pytest.raises(ValueError, match="does not fit 1.*least is .*Cheapest that would make it fit"):
        mfsdp.plan(model, (ids,), memory="1MiB", world=8, units=[Gated], allow=())
    less = ("layers computed again", "activations on the host", "prefetch and reduce_lag of 0")
    words = ", or ".join(rf"{what} \(\+\d+\.\d ms\)" for what in less)
    with pytest.raises(ValueError, match=f"Cheapest that would make it fit: {words}"):
        mfsdp.plan(model, (ids,), memory=5_200_000, world=8, units=[Gated], allow=())
    model, ids = gpt(2)
    with pytest.raises(
        ValueError, match=r"made for 3 x Block over 8 ranks, this GPT has 2 and 8 ranks: make a new plan"
    ):
        mfsdp.trace(model, (ids,), world=8, units=[Block], plan=planned)
    with pytest.raises(ValueError, match=r"this GPT has 3 and 4 ranks"):
        mfsdp.trace(gpt(3)[0], (ids,), world=4, units=[Block], plan=planned)
    with pytest.raises(ValueError, match="leave one out"):
        mfsdp.fully_shard(GPT(layers=2), units=[Block], plan=planned, reshard_after_forward=False)
    with pytest.raises(ValueError, match=r"give what mfsdp.plan has made, or mfsdp.Plan.load\(path\)"):
        mfsdp.fully_shard(GPT(layers=2), units=[Block], plan="plan.json")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give one of each"):
        mfsdp.plan(model, (ids,), memory=10**9, world=[8, 64])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory= and option prefetch= were both given"):
        mfsdp.plan(model, (ids,), memory=10**9, options={"prefetch": 2})
    for wrong in ("much", "70 parsecs", 0, True, None, "-3GB"):
        with pytest.raises(ValueError, match="give bytes, or a text"):
            nbytes_of(wrong)
    assert (nbytes_of("70GB"), nbytes_of("64 GiB"), nbytes_of(1e9)) == (70 * 10**9, 64 * 2**30, 10**9)
    (tmp_path / "none.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="make a new plan"):
        mfsdp.Plan.load(tmp_path / "none.json")


@pytest.mark.slow
def test_a_plan_for_a_model_that_is_sharded_otherwise_says_so(tmp_path: Path):
    model, ids = gpt(2)
    given: dict[str, Any] = {"memory": "1GB", "world": 1, "hardware": SLOW, "allow": (), "curve": False}
    mfsdp.plan(model, (ids,), units=[Block], **given).save(tmp_path / "plan.json")
    plan = mfsdp.Plan.load(tmp_path / "plan.json")
    narrow = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for more, words in (
        ({"strategy": 2}, "sharded with strategy optim_grads_params, this GPT has strategy optim_grads: give"),
        ({"units": None}, "sharded with units 3, this GPT has units 1: give"),
        ({"mp_policy": narrow}, "compute_dtype=None.*, this GPT has mp_policy.*compute_dtype=torch.bfloat16"),
    ):
        other = GPT(width=64, layers=2, vocabulary=64, length=32)
        before = dict(other.named_parameters())
        with pytest.raises(ValueError, match=words):
            mfsdp.fully_shard(other, **{"units": [Block], "plan": plan, **more})
        assert type(other) is GPT and dict(other.named_parameters()) == before, "nothing has been changed"
    other = GPT(width=64, layers=2, vocabulary=64, length=32)
    for block in other.blocks:
        mfsdp.fully_shard(block)
    assert mfsdp.fully_shard(other, plan=plan) is other, "in as many calls as anybody likes"


def steps(model: nn.Module, rounds: int = 2, rows: int = 2, **options: Any) -> list[torch.Tensor]:
    """Losses of some steps, and gradients of the last."""
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = []
    for i in range(rounds):
        torch.manual_seed(i)
        ids = torch.randint(31, (rows, 8), generator=torch.Generator().manual_seed(100 * i + mfsdp_rank()))
        loss = F.cross_entropy(run(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        out.append(loss.detach().clone())
        if i + 1 < rounds:
            optimizer.step()
            optimizer.zero_grad()
    return [*out, *(p.grad.full_tensor().clone() for p in model.parameters())]


def mfsdp_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Dropped(Light):
    """With dropout behind every block."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = F.dropout(block(x), 0.3, self.training)
        return self.head(self.norm(x))


def made(kind: Any = GPT, layers: int = 3, **more: Any) -> nn.Module:
    torch.manual_seed(3)
    model = kind(layers=layers)
    return mfsdp.fully_shard(model, units=["blocks.*"], **more)


def hand_made(world: int, layers: int, **chosen: Any) -> mfsdp.Plan:
    """Of a `Light`."""
    sizes: dict[str, int] = {}
    choice = Choice("Gated", tuple(f"blocks.{i}" for i in range(layers)), **chosen)
    return mfsdp.Plan("Light", world, "", 0, 0.0, 0, 0, 0, 0, (choice,), {"prefetch": 2, "reduce_lag": 2}, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plans",
    [
        ({"recomputed": 2, "saved": ("up",), "gathered": 3},),
        pytest.param(({"recomputed": 4}, {"gathered": 4}), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_a_plan_is_followed_bit_for_bit(plans):
    """Of layers that are enough to be one graph, called several times (`outlining.MIN_LAYERS`)."""
    want = steps(made(Light, 4))
    for chosen in plans:
        torch._dynamo.reset()
        got = steps(made(Light, 4, plan=hand_made(1, 4, **chosen)))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), chosen


SEVERAL = {
    "experts": (
        Choice("Layer", ("layers.0",), recomputed=1, saved=("attention.attention",)),
        Choice("MixtureLayer", ("layers.1", "layers.2"), gathered=1, recomputed=1, saved=("router",)),
    ),
    "unlike": (
        Choice("Block", ("layers.0", "layers.2"), gathered=1, recomputed=2, saved=("attention", "down")),
        Choice("Gated", ("layers.1",), offloaded=(1, 1)),
    ),
}  # fmt: skip
"""What the planner chooses for a third of the memory between the least and the most, and a gathered layer."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("experts", marks=pytest.mark.exhaustive), "unlike"])
def test_a_plan_of_several_kinds_is_followed_bit_for_bit(name):
    given = {"prefetch": 1, "reduce_lag": 1}
    plan = mfsdp.Plan("", 1, "", 0, 0.0, 0, 0, 0, 0, SEVERAL[name], given, {}, optimizer="host", machine=SMALL)

    def steps(**more: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        sharded = mfsdp.fully_shard(toy_model(name), units=TOYS[name], **more)
        run = torch.compile(sharded, backend="mfsdp", options={"lowering": "eager"})
        optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=1e-2))
        out = []
        for seed in range(3):
            found = run(toy_input(name, seed))
            loss = getattr(found, "logits", found).square().mean()
            loss.backward()
            out.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        return [*out, *(p.full_tensor().clone() for p in sharded.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(steps(), steps(plan=plan), strict=True)), plan


@pytest.mark.slow
def test_a_profile_knows_what_the_optimizer_takes():
    programs = traced(*light(2), units=(Gated,))

    class Told:
        optimizer = 0.25

        def given(self, program: Any) -> dict[str, Any]:
            return {}

    found, known = (scorer_of(programs, machine=SMALL, profile=profile) for profile in (None, Told()))
    more = known.score(known.space.plain).seconds - found.score(found.space.plain).seconds
    assert more == pytest.approx(0.25 - found.optimizer_seconds(None))
    assert known.optimizer_seconds(1.0) >= 0.25 > found.optimizer_seconds(1.0), "streamed state is stepped as long"


@pytest.mark.slow
def test_a_plan_that_is_not_followed_says_so(monkeypatch):
    """Blocks that are compiled one by one have other paths in their graphs."""
    model = made(Light, 2, plan=hand_made(1, 2, recomputed=2))
    for block in model.blocks:
        block.compile(backend="mfsdp", options={"lowering": "eager"})
    told: list[str] = []
    monkeypatch.setattr(capture.log, "warning", lambda text, *words: told.append(text % words))
    model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    told[:] = [text for text in told if "the plan is not followed for blocks." in text]
    assert told and all("Compile that one" in text for text in told)
    torch._dynamo.reset()
    told.clear()
    steps(made(Light, 2, plan=hand_made(1, 2, recomputed=2)), 1)
    assert not [text for text in told if "not followed" in text]


@pytest.mark.slow
def test_several_microbatches_in_one_program_follow_it_too():
    def both(**more):
        torch._dynamo.reset()
        model = made(Light, **more)
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
        ids = [torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
        outs = mfsdp.together(run)([(x,) for x in ids])
        sum(out.square().mean() for out in outs).backward()
        return [*outs, *(p.grad.full_tensor() for p in model.parameters())]

    plan = hand_made(1, 2, recomputed=1, gathered=1)
    assert all(map(torch.equal, both(layers=2), both(layers=2, plan=plan)))


def test_what_buys_nothing_is_not_chosen():
    plan = mfsdp.plan(nn.Linear(4, 4), (torch.zeros(2, 4),), memory="1MB", curve=False)
    assert plan.optimizer == "device" and not plan.host and "KiB" in str(plan)


@pytest.mark.slow
def test_dropout_that_is_computed_again_is_the_same_dropout():
    """Law 54: of a plan, as of torch's own checkpoint."""
    want = steps(made(Dropped, 2))
    got = steps(made(Dropped, 2, plan=hand_made(1, 2, recomputed=2)))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_treatments_name_every_layer():
    choice = Choice("Block", ("a", "b", "c"), gathered=1, recomputed=2, saved=("up",))
    assert joint_graph.treatments((choice,)) == {
        "a": Treatment(True, ("up",), False), "b": Treatment(True, ("up",), False), "c": Treatment(False, (), True),
    }  # fmt: skip


ROWS = 24
"""So few that nothing is large enough to go to the host."""


def planned_on_ranks(memory: int) -> Any:
    """Without a plan and with the option ``memory``, on one rank of several."""
    want = steps(made(Light, 2), rows=ROWS)
    torch._dynamo.reset()
    listed: list[str] = []
    log = logging.getLogger("mfsdp")
    handler = logging.Handler()
    handler.emit = lambda record: listed.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    planned_by.measure = hastily  # type: ignore[assignment]
    try:
        budget = steps(made(Light, 2), rows=ROWS, memory=memory)
    finally:
        planned_by.measure = machine.measure  # type: ignore[assignment]
        log.removeHandler(handler)
        log.setLevel(before)
    torch._dynamo.reset()
    try:
        steps(made(Light, 2), rows=ROWS, memory=1000)
        refused = ""
    except ValueError as error:
        refused = str(error)
    same = all(torch.equal(a, b) for a, b in zip(want, budget, strict=True))
    return same, [text for text in listed if " ms, " in text and "reduce_lag" in text], refused


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_follow_one_plan_and_compute_the_same_bits(two_ranks):
    found = two_ranks.run(planned_on_ranks, 460_000, timeout=300)
    assert [same for same, _, _ in found] == [True, True]
    assert found[0][1] == found[1][1] and "recomputed" in str(found[0][1]), found
    assert all("does not fit 1000B: the least is" in refused for _, _, refused in found)


@pytest.mark.dist
@pytest.mark.slow
def test_a_step_holds_what_its_plan_says(two_ranks):
    """Live bytes are within 3% of the plan, and no more. Copies to the host, too, stand where the plan's hardware has
    put them, whatever this is.
    """
    model, ids, unit = built("gpt")
    with torch.device("meta"):
        programs = mfsdp.trace(model, (ids,), world=2, units=[unit], lowering="eager")
    found = scorer_of(programs, machine=PLAIN, inputs=ids.nbytes)
    (kind,) = found.space.kinds
    chosen = (replace(kind, recomputed=2, gathered=1, offloaded=(3, 1)),)
    score, options = found.score(Setting(chosen, 1, 1)), {"prefetch": 1, "reduce_lag": 1}
    assert score.host and score.peak < 0.9 * found.score(found.space.plain).peak
    plan = mfsdp.Plan("GPT", 2, "", score.peak, 0.0, score.peak, 0, 0, 0, chosen, options, {}, machine=PLAIN)
    for most in two_ranks.run(held, "gpt", "eager", 3, plan):
        assert abs(plan.peak / most - 1) < 0.03, f"{plan.peak} planned, {most} held\n{chosen}"
        assert most <= plan.peak + 64, f"{most} held, of {plan.peak}: more than the loss, its gradient, scalars"
