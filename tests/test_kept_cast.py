"""Over one rank programs read a cast that lasts: one cast per optimizer step (Note [Kept casts])."""

from __future__ import annotations

import pytest
import torch

import mfsdp
from mfsdp.buffers import kept_cast
from mfsdp.ir import ops
from tests.helpers.buffers import buffers_of
from tests.helpers.models import MLP
from tests.helpers.parity import compiled

POLICY = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def trained(lowering: str, flat: bool, **options: object) -> tuple[list[torch.Tensor], torch.nn.Module]:
    torch.manual_seed(0)
    model = mfsdp.fully_shard(MLP(), units=["up"], mp_policy=POLICY, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if flat:
        mfsdp.fully_shard_optimizer(optimizer)
    run = compiled(model, lowering, **options)
    for _ in range(3):
        for _ in range(2):
            run(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().clone() for p in model.parameters()], model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "flat"),
    [
        ("eager", False),
        ("eager", True),
        pytest.param("whole", True, marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
        pytest.param("inductor", False, marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
        pytest.param("whole", False, marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
        pytest.param("inductor", True, marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
    ],
)
def test_one_cast_per_step_and_the_same_bits(lowering, flat, monkeypatch):
    made: list[int] = []
    again = kept_cast._cast_again
    monkeypatch.setattr(kept_cast, "_cast_again", lambda ws: (made.append(len(ws)), again(ws))[1])
    kept, model = trained(lowering, flat)
    assert sum(made) == 3 * len(buffers_of(model)), "two microbatches, forward and backward: once for all of them"
    plain, _ = trained(lowering, flat, keep_cast=False)
    assert sum(made) == 3 * len(buffers_of(model)) and all(map(torch.equal, kept, plain))


@pytest.mark.slow
def test_it_stands_in_both_programs_and_not_where_a_unit_stays_whole():
    torch.manual_seed(0)
    given = {"world": 1, "units": ["up"], "mp_policy": POLICY}
    for reshard, count in ((True, 1), (False, 0)):
        programs = mfsdp.trace(MLP(), (torch.ones(2, 24),), **given, reshard_after_forward=reshard)
        for p in programs:
            mfsdp.pipeline.run(p)
            assert (sum(n.target is ops.kept_cast for n in p.nodes) > 0) is bool(count)
