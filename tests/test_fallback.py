"""Code outside of the graph takes the eager path: right numbers, one gather per unit and pass, one warning."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp import fallback, runtime
from tests.models import GPT, Block
from tests.parity import averaged, error, whole

pytestmark = pytest.mark.dist

LAYERS = 3


class Disabled(Block):
    """A block that Dynamo is told to leave alone."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(layers=LAYERS, break_graph=kind == "graph break", recompute=kind == "checkpointed", tied=False)
    if kind == "disabled":
        for i in range(LAYERS):
            model.blocks[i].__class__ = Disabled
    return model


def outside(kind: str, lowering: str) -> dict[str, Any]:
    """One training step; what was gathered and reduced, and how far loss and gradients are off."""
    reference = build(kind)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])
    fallback._warned.clear()
    run = model
    if kind not in ("plain call", "checkpointed"):
        run = torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(31, (2, 8))
    calls = {"gather": 0, "reduce": 0}
    gather, scatter = runtime.gather_flat, runtime._exchange

    def count(name: str, function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return wrapper

    runtime.gather_flat, runtime._exchange = count("gather", gather), count("reduce", scatter)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = run(ids).square().mean()
            forward = dict(calls)
            loss.backward()
    finally:
        runtime.gather_flat, runtime._exchange = gather, scatter
    want = reference(ids).square().mean()
    want.backward()
    averaged(reference)
    grads = [error(whole(p.grad), q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    ours = [str(w.message) for w in caught if "mfsdp" in str(w.message)]
    return {
        "forward": forward["gather"], "backward": calls["gather"] - forward["gather"], "reduce": calls["reduce"],
        "loss": error(loss.detach(), want.detach()), "grads": max(grads), "warnings": ours,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["plain call", "graph break", "disabled", "checkpointed"])
def test_numbers_gathers_and_warnings(two_ranks, kind):
    for got in two_ranks.run(outside, kind, "eager"):
        units = LAYERS + 1
        assert got["loss"] < 1e-6 and got["grads"] < 1e-5, got
        assert got["warnings"] and len(got["warnings"]) == len(set(got["warnings"])), got
        assert any("Block.forward" in w or "Disabled.forward" in w for w in got["warnings"]), got
        assert all("tests/models.py:" in w or "test_fallback.py:" in w for w in got["warnings"]), got
        assert got["forward"] == got["reduce"] == units, got
        assert got["backward"] <= units + (LAYERS if kind == "checkpointed" else 0), got


def shown() -> tuple[bool, bool, bool, int]:
    model = mfsdp.fully_shard(GPT(layers=1), units=[Block])
    outside = isinstance(model.tokens.weight, mfsdp.dtensor.ShardedParameter)
    seen = []
    model.blocks[0].register_forward_hook(lambda m, _, out: seen.append(type(m.qkv.weight) is torch.Tensor))
    with torch.no_grad():
        model(torch.randint(31, (1, 4)))
    return outside, all(seen), isinstance(model.tokens.weight, mfsdp.dtensor.ShardedParameter), len(seen)


def test_parameters_are_whole_inside_of_forward_only(two_ranks):
    assert two_ranks.run(shown) == [(True, True, True, 1)] * 2


def unsharded_by_hand() -> tuple[int, int]:
    model = mfsdp.fully_shard(GPT(layers=1), units=[Block])
    calls = []
    gather = runtime.gather_flat
    runtime.gather_flat = lambda *a, **k: (calls.append(1), gather(*a, **k))[1]
    try:
        model.unshard()
        model.blocks[0].unshard()
        with torch.no_grad():
            for _ in range(3):
                model(torch.randint(31, (1, 4)))
        during = len(calls)
        model.blocks[0].reshard()
        model.reshard()
        with torch.no_grad():
            model(torch.randint(31, (1, 4)))
        return during, len(calls)
    finally:
        runtime.gather_flat = gather


def test_unshard_keeps_until_reshard(two_ranks):
    assert two_ranks.run(unsharded_by_hand) == [(2, 4)] * 2


def hooks_of_others() -> int:
    """Saved-tensor hooks of somebody else see every tensor that is not of a gathered buffer."""
    model = mfsdp.fully_shard(GPT(layers=1, tied=False), units=[Block])
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t)[1], lambda t: t):
        loss = model(torch.randint(31, (1, 4))).sum()
    loss.backward()
    return len(packed)


def test_other_hooks_keep_working(two_ranks):
    assert all(n > 5 for n in two_ranks.run(hooks_of_others))


def checkpointed_by_hand() -> float:
    reference = build("plain call")
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])
    ids = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(0))
    for m in (model, reference):
        checkpoint(m, ids, use_reentrant=False).square().mean().backward()
    averaged(reference)
    return max(error(whole(p.grad), q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_checkpoint_around_the_whole_model(two_ranks):
    assert max(two_ranks.run(checkpointed_by_hand)) < 1e-6


def offloaded() -> str:
    model = mfsdp.fully_shard(GPT(layers=1, tied=False), units=[Block])
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    try:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            loss = run(torch.randint(31, (1, 4))).sum()
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_hooks_that_copy_shards_are_refused_not_wrong(two_ranks):
    assert all("copy of a shard" in text or text == "no error" for text in two_ranks.run(offloaded))


def test_the_backend_is_found_by_name_without_importing_the_package():
    code = (
        "import sys, torch\n"
        "model = torch.nn.Linear(3, 3)\n"
        "assert 'mfsdp' not in sys.modules\n"
        "run = torch.compile(model, backend='mfsdp', options={'lowering': 'eager'})\n"
        "run(torch.ones(2, 3)).sum().backward()\n"
        "assert model.weight.grad is not None and 'mfsdp' in sys.modules\n"
        "print('found', 'mfsdp' in torch._dynamo.list_backends())\n"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "found True", out.stderr
    assert "mfsdp: the model is not sharded" in out.stderr and "fully_shard" in out.stderr
