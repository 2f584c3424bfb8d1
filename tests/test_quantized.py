"""Frozen quantized weights are sharded and gathered as bytes, with the numbers of unsharded ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp
from mfsdp.runtime import sync_collectives
from tests.helpers.parity import averaged, compiled, whole
from tests.helpers.quantized import KINDS, Block, blocks

pytest.importorskip("bitsandbytes")

F32, BF16 = torch.float32, torch.bfloat16


def trained(kind: str, lowering: str, dtype: torch.dtype, **sharding: Any) -> dict[str, float]:
    """Three steps of AdamW over all parameters, with weight decay, beside the unsharded model with all ranks' data."""
    torch._dynamo.reset()
    reference = blocks(kind, dtype)
    model = copy.deepcopy(reference)
    policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=None, param_dtype=dtype)
    mfsdp.fully_shard(model, units=[Block], mp_policy=policy, **sharding)
    run = compiled(model, lowering)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5) for m in (reference, model)]
    before = {k: whole(v) if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    out = {"forward": 0.0, "grad": 0.0}
    for step in range(3):
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()), dtype=dtype)
        want, got = reference(x), run(x)
        if step == 0:
            out["forward"] = (want - got).abs().max().item()
        want.square().mean().backward()
        got.square().mean().backward()
        averaged(reference)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (reference, model)]
        out["norm"] = abs(1 - (norms[1] / norms[0]).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mine, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    trains = [n for n, p in theirs.items() if p.requires_grad]
    assert len(trains) >= 6
    out["weights"] = max((whole(mine[n].detach()) - theirs[n]).abs().max().item() for n in trains)
    after = {k: whole(v) if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    frozen = [k for k in after if ".base." in k and "bias" not in k]
    for k in frozen:
        assert torch.equal(after[k].reshape(-1).view(torch.uint8), before[k].reshape(-1).view(torch.uint8)), k
    assert len(frozen) >= 6
    return out


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "lowering", "dtype", "sharding"),
    [
        ("nested", "none", F32, {}), ("nested", "eager", F32, {}), ("nf4", "eager", BF16, {"strategy": 2}),
        ("int8", "none", F32, {"strategy": 1}), ("int8", "eager", F32, {}),
        ("nested", "inductor", BF16, {}), ("fp4 with a bias", "eager", F32, {"reshard_after_forward": False}), ("bf16 storage", "none", BF16, {"strategy": 0}),
    ],
)  # fmt: skip
def test_trains_as_unsharded(two_ranks, kind, lowering, dtype, sharding):
    for seen in two_ranks.run(trained, kind, lowering, dtype, **sharding):
        print(kind, lowering, dtype, sharding, seen)
