"""profile: every line of the programs that ran has its time, and nothing is counted twice."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp.profile import Outline, Outlined, _joined, _programs
from tests.models import GPT, Block
from tests.parity import compiled


def profiled(lowering: str, folder: str = "") -> dict[str, Any]:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model = mfsdp.fully_shard(GPT(width=64, layers=3), units=[Block])
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
        "sum": sum(x.seconds for x in seen.lines) + seen.optimizer, "total": seen.total, "text": str(seen),
        "against": seen.against(plan), "names": [(x.phase, x.line.name) for x in seen.lines],
        "planned": [(v.phase, x.name) for v in plan.views for x in v.lines if not x.text.startswith("free")],
        "compute": sum(x.seconds for x in seen.lines if not x.line.operation) + seen.optimizer,
        "known": known.compute, "measured": known.measured, "steps": len(again._logs),
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_every_line_of_a_step(two_ranks, tmp_path, lowering):
    for seen in two_ranks.run(profiled, lowering, str(tmp_path)):
        assert seen["sum"] == pytest.approx(seen["total"], rel=1e-6), (
            "every moment belongs to one line, or the optimizer"
        )
        assert "exposed" in seen["text"] and "wait u1_full" in seen["text"] and "planned measured ms" in seen["against"]
        assert seen["measured"] and seen["known"] >= seen["compute"] * 0.999 and seen["steps"] == 3
        if lowering == "eager":
            assert seen["names"] == seen["planned"], "what was explained is what ran"
    files = {p.name for p in tmp_path.iterdir()}
    assert {"graph0.forward.0.capture.txt", "graph0.backward.8.stream.txt"} <= {
        n.replace(n[5 : n.index(".")], "0", 1) for n in files
    }
    code = [p for p in tmp_path.iterdir() if p.name.endswith(".code.py")]
    assert len(code) == (2 if lowering == "inductor" else 0)
    for path in code:
        assert "torch.ops.mfsdp.all_gather.default" in path.read_text()


def outline(phase: str, *lines: str) -> Outline:
    """``"+x"`` is an operation, ``"y3"`` a kernel of weight 3."""
    made = [Outlined(x.strip("+"), x, "", x[1:] if x[0] == "+" else "", float(x[-1]) if x[-1].isdigit() else 0.0)
            for x in lines]  # fmt: skip
    return Outline("Toy", phase, tuple(made))


def test_gaps_between_operations_are_shared_by_weight():
    forward = outline("forward", "a1", "+all_gather", "b1", "c3", "+wait", "d1")
    backward = outline("backward", "e1", "+all_gather", "+wait", "+accumulate")
    log = [
        ("all_gather", 2.0, 2.5),
        ("wait", 4.5, 5.0),
        ("all_gather", 7.0, 7.5),
        ("wait", 7.5, 8.0),
        ("accumulate", 8, 9),
    ]
    found, rest = _joined(log, [backward, forward, outline("inference", "+wait")], 10.0)
    want = [("a1", 2), ("all_gather", 0.5), ("b1", 0.5), ("c3", 1.5), ("wait", 0.5), ("d1", 1), ("e1", 1),
            ("all_gather", 0.5), ("wait", 0.5), ("accumulate", 1)]  # fmt: skip
    assert [(x.name, s) for _, x, s in found] == want and rest == 1.0
    assert [p for p, _, _ in found] == ["forward"] * 6 + ["backward"] * 4


def test_programs_are_those_that_explain_all_of_it():
    """An older model whose forward is longer also fits the beginning; and somebody else's operation is skipped."""
    older = outline("forward", *["+all_gather", "+wait"] * 3)
    forward = outline("forward", *["+all_gather", "+wait"] * 2)
    backward = outline("backward", "+all_gather", "+wait", "+pack")
    names = ["all_gather", "wait"] * 2 + ["bucket", "all_gather", "wait", "pack"]
    found = _programs(names, [older, forward, backward])
    assert [(at, o.phase, len(o.lines)) for at, o in found] == [(0, "forward", 4), (5, "backward", 3)]
    found = _programs(names[:4] + names[5:], [older, forward, backward])
    assert [(at, len(o.lines)) for at, o in found] == [(0, 4), (4, 3)]
    assert _programs(["wait"], [older]) == []


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
