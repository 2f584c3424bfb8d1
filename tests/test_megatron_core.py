"""Megatron-Core's GPTModel, dense and with experts, beside itself unsharded; bit for bit where sums have one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from tests.helpers.megatron_models import copies, gpt, loss, megatron
from tests.helpers.parallel import reset, tokens
from tests.helpers.parity import compiled, error

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.dist


def reduced(plain: nn.Module, state: Any) -> float:
    """Sums gradients as Megatron-LM's does, and returns the norm of all."""
    squares = torch.zeros(())
    for p in plain.parameters():
        assert p.grad is not None
        group = copies(p)[0]
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=state.get_tensor_model_parallel_group())
        dist.all_reduce(p.grad, group=group)
        p.grad /= state.get_data_parallel_world_size()
        alike = 1
        for held in copies(p):
            alike *= held.size()
        squares += p.grad.square().sum() / alike
    dist.all_reduce(squares)
    return squares.sqrt().item()


def whole(p: nn.Parameter, part: torch.Tensor, state: Any) -> torch.Tensor:
    """The tensor of all ranks of which each has a part, by what Megatron-LM's attributes say."""
    expert = not getattr(p, "allreduce", True)
    tensor = state.get_expert_tensor_parallel_group() if expert else state.get_tensor_model_parallel_group()
    if getattr(p, "tensor_model_parallel", False):
        stride, dim = p.partition_stride, p.partition_dim  # type: ignore[attr-defined]
        parts = [every.chunk(stride, dim) for every in gathered(part, tensor)]
        part = torch.cat([every[i] for i in range(stride) for every in parts], dim)
    return torch.cat(gathered(part, state.get_expert_model_parallel_group())) if expert else part


def gathered(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    every = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(every, part.contiguous(), group)
    return every


def sharded(state: Any, **of_model: Any) -> nn.Module:
    model = gpt(**of_model)
    if of_model.get("experts"):
        of_experts = DeviceMesh.from_group(state.get_expert_data_parallel_group(), "cpu")
        for layer in model.decoder.layers:  # type: ignore[union-attr, operator]
            mfsdp.fully_shard(layer.mlp.experts, mesh=of_experts)
    dense = DeviceMesh.from_group(state.get_data_parallel_group(), "cpu")
    return mfsdp.fully_shard(model, mesh=dense, units=["decoder.layers.*"])


def trained(sizes: dict[str, int], of_model: dict[str, Any], lowering: str, folder: str) -> list[str]:
    """What differs: losses, gradients, norms and weights of two steps, and what a checkpoint brings back."""
    reset()
    wrong: list[str] = []
    with megatron(**sizes) as state:
        plain, model = gpt(**of_model), sharded(state, **of_model)
        run = compiled(model, lowering)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
        exact = state.get_data_parallel_world_size() <= 2  # the order of a sum does not matter

        def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
            return torch.equal(found, expected) if exact else error(found, expected) < 1e-5

        for step in range(2):
            ids = tokens(10 * step + state.get_data_parallel_rank(), vocab=16)
            losses = [loss(m, ids) for m in (run, plain)]
            for value in losses:
                value.backward()
            norm, found = reduced(plain, state), {"loss": same(*losses)}
            for n, p, q in both(model, plain):
                found[f"gradient of {n}"] = same(p.grad.full_tensor(), whole(q, q.grad, state))
            ours_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)  # which changes none
            found["norm"] = abs(ours_norm.item() / norm - 1) < 1e-5
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
            for n, p, q in both(model, plain):
                found[n] = same(p.full_tensor().detach(), whole(q, q.detach(), state))
            wrong += [f"step {step}: {what}" for what, right in found.items() if not right]
        mfsdp.check_replicas(model)
        return wrong + reloaded(model, ours, folder)


def reloaded(model: nn.Module, optim: torch.optim.Optimizer, folder: str) -> list[str]:
    """What a checkpoint does not bring back."""
    moments = ("exp_avg", "exp_avg_sq")
    held: dict[Any, list[Any]] = {p: [p, *(optim.state[p][m] for m in moments)] for p in model.parameters()}
    before = {p: [t.to_local().clone() for t in tensors] for p, tensors in held.items()}
    parts = get_state_dict(model, optim)
    dcp.save({"model": parts[0], "optim": parts[1]}, checkpoint_id=folder)
    with torch.no_grad():
        for t in (t for tensors in held.values() for t in tensors):
            t.zero_()
    parts = get_state_dict(model, optim)
    dcp.load({"model": parts[0], "optim": parts[1]}, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=parts[0], optim_state_dict=parts[1])
    after = {n: (p, [p, *(optim.state[p][m] for m in moments)]) for n, p in model.named_parameters()}
    return [
        f"loaded {n}"
        for n, (p, tensors) in after.items()
        if not all(torch.equal(t.to_local(), was) for t, was in zip(tensors, before[p], strict=True))
    ]


def both(model: nn.Module, plain: nn.Module) -> list[tuple[str, Any, Any]]:
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    return [(n, p, q) for (n, p), (other, q) in pairs if n == other or pytest.fail(f"{n} is {other}")]


DENSE = {"tensor_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
BOTH = DENSE | EXPERTS | {"expert_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("ranks", "sizes", "of_model", "lowering"),
    [
        ("two_ranks", DENSE, {}, "none"),
        ("four_ranks", DENSE, {"sequence_parallel": True}, "none"),
        ("two_ranks", EXPERTS, {"experts": 4}, "none"),
        pytest.param("two_ranks", EXPERTS, {"experts": 4}, "eager", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("four_ranks", EXPERTS, {"experts": 4}, "none", marks=pytest.mark.exhaustive),
        (
            "four_ranks",
            DENSE | EXPERTS | {"expert_tensor_parallel_size": 1},
            {"experts": 4, "sequence_parallel": True},
            "none",
        ),
    ],
)
def test_as_plain(request, tmp_path, ranks, sizes, of_model, lowering):
    found = request.getfixturevalue(ranks).run(trained, sizes, of_model, lowering, str(tmp_path), timeout=300)
    assert found == [[]] * len(found)
