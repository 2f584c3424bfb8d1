"""Option ``keep_cast`` (Note [Kept casts]): a cast is made once per step, and whatever writes weights makes it anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp.buffers import kept_cast
from tests.helpers.dtypes import BF16, HALF
from tests.helpers.writes import COUNTED, PAST


@torch.no_grad()
def _hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    """In every fourth step: what comes behind the compiled part of a step counts."""
    optimizer._hooked = getattr(optimizer, "_hooked", 0) + 1
    if optimizer._hooked % 4 == 0:
        optimizer.param_groups[0]["params"][0].data.mul_(0.5)


class Own(torch.optim.Optimizer):
    """Steps on the rows behind DTensors, past versions."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p._local_tensor.data.sub_(p.grad._local_tensor, alpha=group["lr"])


STEPS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "own": lambda p: Own(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "flat": lambda p: mfsdp.fully_shard_optimizer(torch.optim.AdamW(p, lr=0.1), ahead=False),
    "compiled": lambda p: mfsdp.fully_shard_optimizer(
        torch.optim.SGD(p, lr=0.01, momentum=0.9), compile=True, ahead=False
    ),
}


def compared(policy: Any, lowering: str, how: str) -> tuple[list[str], list[int]]:
    """Every write after which outputs are not the bits of the same model without kept casts; casts by step."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.Linear(5, 7))
    models = [mfsdp.fully_shard(m, units=[nn.Linear], mp_policy=policy) for m in (first, copy.deepcopy(first))]
    runs = [
        torch.compile(m, backend="mfsdp", options={"lowering": lowering, "keep_cast": keep})
        for m, keep in zip(models, (True, False), strict=True)
    ]
    optimizers = [STEPS[how](m.parameters()) for m in models]
    torch.manual_seed(1 + dist.get_rank())
    wrong: list[str] = []
    made, casts = kept_cast._cast_again, []

    def counted(due: Any) -> None:
        casts[-1] += 1
        made(due)

    kept_cast._cast_again = counted

    def step(name: str) -> None:
        casts.append(0)
        for _ in range(2):
            x = torch.randn(3, 6)
            outs = [run(x.to(torch.bfloat16) if policy is BF16 else x) for run in runs]
            assert bool(outs[0].isfinite().all()) and bool(outs[0].any()), name
            if not torch.equal(*outs):
                wrong.append(name)
            for out in outs:
                out.float().square().mean().backward()
        for o in optimizers:
            o.step()
            o.zero_grad()

    try:
        for name in ("first", "second", "third"):
            step(name)
        for o in optimizers if how == "compiled" else ():
            o.register_step_post_hook(_hook)
        for write in (*COUNTED, *PAST[:3]):
            for m in models:
                write(m)
            step(write.__name__)
    finally:
        kept_cast._cast_again = made
    return wrong, casts


@pytest.mark.dist
@pytest.mark.parametrize(
    "how",
    [
        "fused", "flat", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("own", "sgd")),
        pytest.param("compiled", marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
    ],
)  # fmt: skip
def test_whatever_writes_weights_counts(two_ranks, how):
    policy = HALF if how == "flat" else BF16
    for wrong, casts in two_ranks.run(compared, policy, "eager", how):
        assert not wrong
        if how == "compiled":
            assert casts[:3] == [3, 1, 0], "from its second step on the optimizer writes casts along"
        else:
            assert casts[:3] == [3, 1, 1], "each unit's first, then all at once, once in a step of two microbatches"
        assert max(casts[3:11]) == 1
        assert min(casts[11:]) > 4, "rows that are out as plain tensors: for every gather"


@pytest.mark.slow
def test_the_ledger_and_the_listing():
    x, model = torch.empty(8, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    kept, plain = (
        mfsdp.explain(
            model, (x,), world=4, units=["0", "2"], mp_policy=BF16, options={"keep_cast": keep}, suggest=False
        )
        for keep in (True, False)
    )
    name = "shards in what travels"
    assert {e.name: e.nbytes for e in kept.ledger.entries}[name] == 2 * 2 * 1088
    assert name not in {e.name for e in plain.ledger.entries}
    assert "u0_cast" in str(plain) and "u0_cast" not in str(kept)
    with pytest.raises(ValueError, match="keep_cast=1: choose True or False"):
        mfsdp.explain(model, (x,), options={"keep_cast": 1})
