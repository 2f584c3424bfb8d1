"""The fuzzer: a few fixed seeds, what it found before, and its own parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import words
from tests.fuzz.cases import (
    APART,
    ASKED_BETWEEN,
    EDGES,
    TRAINED_ON,
    WRITTEN_BETWEEN,
    Case,
    draw,
    each,
    features,
    minimised,
    smaller,
)
from tests.fuzz.program import program
from tests.fuzz.trial import Court, judged

FOUND: list[Case] = json.loads(Path(__file__).with_name("fuzz").joinpath("found.json").read_text())
"""Each finding once: its name, the seed that showed it, and the case that was left when it was made small."""

TESTED = {
    "test_desync.py": (
        "layers differ, compiled",
        "order differs, compiled",
        "a step of the optimizer left out by one rank",
        "ranks take different ones of equal layers behind a graph break",
    ),
    "test_abandoned_steps.py": ("given up",),
    "test_eager_autograd.py": ("penalty",),
    "test_reads.py": (
        "functional_call",
        "functional_call compiled",
        "functional_call behind a graph break",
        "own parameters",
        "own parameters, uncompiled",
        "returned",
    ),
    "test_writes.py": ("codebook", "clamped", "max_norm"),
}
"""Findings that have tests of their own, by file: they are not tried again here, where a refusal costs other ranks."""

TRIED = [f for f in FOUND if not any(f["finding"] in findings for findings in TESTED.values())]


@pytest.fixture(scope="module")
def court() -> Iterator[Court]:
    with Court() as found:
        yield found


@pytest.mark.dist
@pytest.mark.parametrize("seed", (6, 7))
def test_fixed_seeds_are_right(court, seed):
    verdict = court.try_(draw(seed))
    assert verdict.outcome == "right", f"{verdict.text}\n{verdict.trace}"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("found", TRIED, ids=lambda f: f["finding"])
def test_what_was_found_is_right_or_refused(court, found):
    verdict = court.try_(found["case"])
    assert verdict.outcome in ("right", "refused"), f"{verdict.text}\n{verdict.trace}"


def test_a_seed_gives_one_case_and_every_edge_comes_often_enough():
    drawn = [draw(seed) for seed in range(400)]
    assert drawn[:20] == [draw(seed) for seed in range(20)] and len({repr(c) for c in drawn}) == 400
    for edge in EDGES:
        assert sum(any(f.split(":")[0] == edge for f in features(c)) for c in drawn) >= 3, edge


@pytest.mark.slow
def test_what_is_done_between_steps_comes_often_enough():
    drawn = [draw(seed) for seed in range(700)]
    assert {c["written"] for c in drawn if "written" in c} == set(WRITTEN_BETWEEN)
    assert {c["asked"] for c in drawn if "asked" in c} == set(ASKED_BETWEEN)
    for key in ("written", "asked", "mixed"):
        assert sum(key in c for c in drawn) >= 30 and not any("fault" in c for c in drawn if key in c), key
    assert sum(b["kind"] == "views" for c in drawn for b in c["blocks"]) >= 20
    for case in drawn[:100]:
        compile(program(case), "between", "exec")


@pytest.mark.slow
def test_one_case_in_ten_has_a_fault_and_nothing_at_the_edge():
    drawn = [draw(seed) for seed in range(600)]
    faulty = [c for c in drawn if "fault" in c]
    assert 40 <= len(faulty) <= 80
    assert {c["fault"]["what"] for c in faulty} == {*TRAINED_ON, *APART}
    for case in faulty:
        assert case["world"] == 2 and not set(EDGES) & {*case, *(b["kind"] for b in each(case["blocks"]))}
        compile(program(case), "faulty", "exec")


def test_four_ranks():
    case = next(c for c in (draw(seed, 4) for seed in range(100)) if c.get("mesh"))
    assert case["world"] == 4 and case["mesh"]["shape"] == (2, 2)
    assert {draw(seed, 4)["world"] for seed in range(40)} == {1, 4}


@pytest.mark.parametrize("found", FOUND, ids=lambda f: f["finding"])
def test_programs_are_python_and_need_nothing_of_ours_but_mfsdp(found):
    text = program(found["case"])
    compile(text, found["finding"], "exec")
    assert "tests" not in text and "import mfsdp\n" in text


@pytest.mark.slow
def test_every_smaller_case_is_a_program_and_refers_to_nothing_that_is_gone():
    for seed in range(2):
        for case in smaller(draw(seed)):
            compile(program(case), "smaller", "exec")
            names = {b["name"] for b in each(case["blocks"])}
            assert all(b[key] in names for b in each(case["blocks"]) for key in ("from", "tie", "of") if key in b)


def test_the_minimiser_keeps_what_it_takes_to_fail_and_nothing_else():
    case = next(c for c in map(draw, range(1000)) if _fails(c) and len(c["blocks"]) > 2)
    asked: list[Case] = []
    small = minimised(case, lambda c: asked.append(c) or _fails(c), budget=300)
    assert _fails(small) and not any(_fails(c) for c in smaller(small))
    assert [b["kind"] for b in each(small["blocks"])] == ["attention"] and small["micro"] == 2
    assert len({repr(c) for c in asked}) == len(asked), "a case is tried once"


def _fails(case: Case) -> bool:
    return case.get("micro", 1) > 1 and any(b["kind"] == "attention" for b in each(case["blocks"]))


def test_the_minimiser_stops_when_its_budget_is_spent():
    asked: list[Case] = []
    case = draw(5)
    assert minimised(case, lambda c: bool(asked.append(c)), budget=7) == case and len(asked) == 7


def test_a_refusal_needs_words_that_a_feature_explains():
    text = "fully_shard: parameter b0.table.weight has sparse gradients"
    assert words.explained(["sparse"], "NotImplementedError", text)
    assert not words.explained(["linear"], "NotImplementedError", text), "nothing of the kind is in the model"
    assert not words.explained(["sparse"], "KeyError", text)
    assert not words.explained(["sparse"], "RuntimeError", "copy_() between dense and sparse Tensors"), "not our words"


def test_verdicts():
    right, words_ = ("right", "", "", 0.1), ("ValueError", "mfsdp: unit 'a' and 'b' differ by rank", "", 0.1)
    assert judged([], [right, right]).outcome == "right"
    assert judged([], [right, ("wrong", "step 0: loss: off", "", 0.1)]).kind == "wrong"
    assert judged(["differs"], [words_, words_]).outcome == "refused"
    assert judged([], [words_, words_]).outcome == "failed", "a refusal that nothing explains"
    assert judged(["differs"], [words_, right]).outcome == "failed", "on one rank only"
    assert judged(["differs"], [words_, None]).kind == "ValueError and no answer"
    lost = ("RuntimeError", "Connection closed by peer [127.0.0.1]", "", 0.1)
    assert judged(["differs"], [words_, lost]).outcome == "refused"
    assert judged([], [lost, lost]).outcome == "failed"
    assert judged([], [right, "the process died"]).kind == "died"


def test_verdicts_on_faults():
    ends, late = ["fault", "fault:ends", "fault:loader"], ["fault", "fault:late"]
    own, lost = ("Fault", "in loader", "", 0.1), ("RuntimeError", "Connection closed by peer [127.0.0.1]", "", 0.1)
    lost_at = "mfsdp: rank 0 has lost the other ranks at b0: rank 1 has ended with Fault: in loader"
    told = ("PeerLostError", lost_at, "", 0.1)
    right, wrong = ("right", "", "", 0.1), ("wrong", "step 1: loss: off", "", 0.1)
    assert judged(ends, [told, own]).outcome == judged(ends, [lost, own]).outcome == "refused"
    assert judged(ends, [right, own]).outcome == "refused", "it was done before it missed anything"
    assert judged(ends, [None, own]).kind == "Fault and no answer"
    assert judged(ends, [wrong, own]).outcome == judged(ends, [lost, lost]).outcome == "failed"
    assert judged(late, [told, told]).outcome == judged(late, [right, lost]).outcome == "failed", "it was to be right"
    assert judged([], [told, own]).outcome == "failed", "it has no fault"
