"""profile: every line of the programs that ran has its time, and nothing is counted twice."""

from __future__ import annotations

import pickle
import time
import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp.buffers.gradients import Gradients
from mfsdp.reports.profile import _Ran
from mfsdp.runtime.program_info import Outline, Outlined
from tests.helpers.models import GPT, MLP, Block
from tests.helpers.parity import compiled
from tests.helpers.ranks import collectives_told
from tests.helpers.without_inductor import without_kernels


@without_kernels()
def profiled(lowering: str, folder: str = "") -> dict[str, Any]:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model = mfsdp.fully_shard(GPT(width=64, layers=1), units=[Block])
    run = compiled(model, lowering, **({"dump": folder} if folder else {}))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(31, (4, 8))

    def step() -> None:
        run(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with mfsdp.profile(run, steps=1) as seen:
        step()
        assert not seen.step()
        step()  # unseen
    with mfsdp.profile(model, steps=1) as slow:
        time.sleep(0.3)  # data that is late
        step()
        slow.step()
    again = mfsdp.profile(model)
    with again:
        for _ in range(5):
            step()
            if not again.step():
                break
    plan = mfsdp.explain(model, (ids,), world=dist.get_world_size(), suggest=False, options={"lowering": lowering})
    known = mfsdp.explain(
        model, (ids,), world=dist.get_world_size(), suggest=False, options={"lowering": lowering}, profile=seen
    )
    return {
        "sum": sum(x.seconds for x in seen.lines) + seen.optimizer + seen.outside, "total": seen.total,
        "text": str(seen), "slow": slow.outside, "lines": sum(x.seconds for x in slow.lines),
        "against": seen.against(plan), "names": [(x.phase, x.line.name) for x in seen.lines],
        "planned": [(v.phase, x.name) for v in plan.views for x in v.lines if not x.text.startswith("free")],
        "compute": sum(x.seconds for x in seen.lines if not x.line.operation) + seen.optimizer,
        "known": known.compute, "measured": known.measured, "steps": len(again._logs),
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    "lowering",
    [pytest.param("eager", marks=pytest.mark.exhaustive), pytest.param("inductor", marks=pytest.mark.inductor)],
)
def test_every_line_of_a_step(two_ranks, tmp_path, lowering):
    for seen in two_ranks.run(profiled, lowering, str(tmp_path), timeout=300):
        assert seen["slow"] > 0.3 and seen["lines"] < seen["slow"], "what is outside of programs is no line's"
        assert seen["sum"] == pytest.approx(seen["total"], rel=0.1), (
            "every moment belongs to one line, or the optimizer"
        )
        assert "exposed" in seen["text"] and "wait u1_full" in seen["text"] and "planned measured ms" in seen["against"]
        assert seen["measured"] and seen["known"] >= seen["compute"] * 0.999 and seen["steps"] == 3
        assert seen["names"] == seen["planned"], "what was explained is what ran"
    files = {p.name for p in tmp_path.iterdir()}
    assert {"graph0.forward.0.capture.txt", f"graph0.backward.{len(mfsdp.pipeline.PIPELINE)}.assign_groups.txt"} <= {
        n.replace(n[5 : n.index(".")], "0", 1) for n in files
    }
    code = [p for p in tmp_path.iterdir() if p.name.endswith(".code.py")]
    assert len(code) == (2 if lowering == "inductor" else 0)
    for path in code:
        assert "Kernels.all_gather" in path.read_text()


def ranged() -> set[str]:
    model = mfsdp.fully_shard(MLP(), units=["up"])
    run = compiled(model, "eager")
    run(torch.ones(2, 24)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, mfsdp.ranges():
        run(torch.ones(2, 24)).sum().backward()
    run(torch.ones(2, 24))
    return {e.name for e in profile.events()}


@pytest.mark.dist
def test_other_profilers_see_units(two_ranks):
    for names in two_ranks.run(ranged):
        assert {"MLP forward", "MLP backward", "all_gather up", "all_gather (root)", "reduce_scatter up"} <= names


def in_stacks(lowering: str) -> list[tuple[str, ...]]:
    """Our frames above every exchange of messages in a step, innermost first."""
    model = mfsdp.fully_shard(GPT(width=64, layers=1), units=[Block])
    run = compiled(model, lowering)
    run(torch.randint(31, (4, 8))).float().square().mean().backward()
    found = []

    def looked(kind: str, group: str) -> None:
        names = (f.name for f in reversed(traceback.extract_stack()))
        found.append(tuple(x for x in names if x.split()[0] in ("all_gather", "reduce_scatter", "GPT") and " " in x))

    with collectives_told(looked):
        run(torch.randint(31, (4, 8))).float().square().mean().backward()
    return found


def recorded(lowering: str) -> list[tuple[str, str, str]]:
    """Of every all-reduce of a step that torch's FlightRecorder kept: its own name for it, and our two frames."""
    model = mfsdp.fully_shard(GPT(width=64, layers=1), units=[Block], strategy="no_shard")
    run = compiled(model, lowering)
    for _ in range(2):
        before = torch._C._distributed_c10d._dump_fr_trace()
        run(torch.randint(31, (4, 8))).float().square().mean().backward()
    known = {e["record_id"] for e in pickle.loads(before)["entries"]}
    found = []
    for entry in pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]:
        names = [f["name"] for f in entry["frames"]]
        if "GPT backward" in names and entry["record_id"] not in known:
            ours = next(x for x in names if x.startswith("all_reduce "))
            found.append((entry["profiling_name"], ours, "GPT backward"))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "lowering", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
)
def test_stacks_and_the_flight_recorder_see_units(monkeypatch, two_fresh_ranks, lowering):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000")
    units = ["(root)", "blocks.0"]
    for seen in two_fresh_ranks.run(in_stacks, lowering):
        forward, backward = ([x[0] for x in seen if x[1] == f"GPT {phase}"] for phase in ("forward", "backward"))
        assert forward == [f"all_gather {u}" for u in units]
        assert sorted(backward) == sorted(f"{x} {u}" for x in ("all_gather", "reduce_scatter") for u in units)
    for kept in two_fresh_ranks.run(recorded, lowering):
        assert kept == [("gloo:all_reduce", f"all_reduce {u}", "GPT backward") for u in reversed(units)]


@pytest.mark.parametrize("frames", [False, True])
def test_operations_have_frames_where_somebody_wants_them(monkeypatch, frames):
    """Whoever raises is told where, frames or not."""
    model = mfsdp.fully_shard(MLP(), units=["up"])
    run = compiled(model, "eager", frames=frames)
    found: list[set[str]] = []

    def looked(self: Gradients, *args: Any) -> None:
        found.append({f.name for f in traceback.extract_stack()})
        if len(found) == 4:
            raise ValueError("full")

    monkeypatch.setattr(Gradients, "accumulate", looked)
    run(torch.ones(2, 24)).sum().backward()
    with mfsdp.ranges(), pytest.raises(ValueError, match="full") as caught:
        run(torch.ones(2, 24)).sum().backward()
    assert caught.value.__notes__ == ["mfsdp: in accumulate (root) of MLP backward, or after it"]
    names = ["accumulate up", "accumulate (root)"]
    assert [(name in seen, "MLP backward" in seen) for seen, name in zip(found, names * 2, strict=True)] == [
        *[(frames, True)] * 2, *[(True, True)] * 2,
    ]  # fmt: skip


def test_gaps_between_operations_are_shared_by_weight():
    """``"+x"`` is an operation, ``"y3"`` a kernel of weight 3."""
    texts = ("a1", "+all_gather", "b1", "c3", "+wait", "+pack", "d1")
    lines = [Outlined(x, x, "", x[1:] if x[0] == "+" else "", float(x[-1]) if x[-1].isdigit() else 0.0) for x in texts]
    ran = _Ran(Outline("Toy", "forward", tuple(lines)), 1.0, [(3.0, 3.5), (5.5, 6.0), (6.25, 7.0)], 9.0)
    assert [s for _, s in ran.shared()] == [2.0, 0.5, 0.5, 1.5, 0.5, 1.0, 2.0]


def test_profiles_do_not_nest_and_begin_anew():
    model = mfsdp.fully_shard(MLP())
    run = compiled(model, "eager")
    run(torch.ones(2, 24)).sum().backward()
    seen = mfsdp.profile(run, steps=1)
    for _ in range(2):
        with seen:
            with pytest.raises(RuntimeError, match="another profile is running"), mfsdp.profile(model):
                pass
            run(torch.ones(2, 24)).sum().backward()
            time.sleep(0.05)
            assert not seen.step()
        assert {x.phase for x in seen.lines} == {"forward", "backward"} and 0.05 < seen.optimizer < seen.total


def test_nothing_to_see():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        mfsdp.profile(model, steps=0)
    with pytest.raises(RuntimeError, match="no step was seen; call step"), mfsdp.profile(model):
        model(torch.ones(2))
    with (
        pytest.raises(RuntimeError, match="is it compiled with backend='mfsdp'"),
        mfsdp.profile(model, steps=1) as seen,
    ):
        model(torch.ones(2))
        seen.step()
