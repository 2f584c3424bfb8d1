"""Saved activations on the host: the same bits, and less memory by what has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mfsdp
from mfsdp.runtime import host
from tests.models import GPT, Block
from tests.parity import compiled
from tests.toys import offloaded

LAYERS, LENGTH, BATCH = 4, 32, 4
FIRST = ("blocks.0", "blocks.1")


def split(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The same block, with q, k and v split along the last dimension of their product."""
    b, t, c = x.shape
    parts = block.qkv(block.norm1(x)).split(c, dim=-1)
    q, k, v = (part.view(b, t, block.heads, c // block.heads).transpose(1, 2) for part in parts)
    x = x + block.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
    return x + block.down(F.gelu(block.up(block.norm2(x))))


def build(kind: str = "gpt") -> nn.Module:
    torch.manual_seed(0)
    model = GPT(width=32, layers=LAYERS, vocabulary=512, length=LENGTH)
    if kind == "dropout":
        for block in model.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.3))
    if kind == "split":
        for block in model.blocks:
            block.forward = split.__get__(block)
    return model


def batch(seed: int = 0) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(10 * seed + rank))


def plain(run: nn.Module, model: nn.Module) -> Iterator[torch.Tensor]:
    for step in range(2):
        loss = run(batch(step)).float().square().mean()
        loss.backward()
        yield loss


def bits(kind: str, lowering: str, how: Callable[..., Iterator[torch.Tensor]], *paths: str) -> tuple[list[Any], int]:
    """Losses, and all gradients of this rank's rows; and the bytes of rooms on the host."""
    torch._dynamo.reset()
    host._rooms.clear()
    model = mfsdp.fully_shard(build(kind), units=[Block])
    with offloaded(*paths, least=1):
        run = compiled(model, lowering)
        torch.manual_seed(1)
        losses = [loss.detach().clone() for loss in how(run, model)]
    grads = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
    return [*losses, *grads], sum(host.sizes())


def differs(kind: str, lowering: str, how: Callable[..., Iterator[torch.Tensor]] = plain) -> tuple[bool, int]:
    """Whether offloading the first layers changes a bit, and bytes on the host."""
    want, nothing = bits(kind, lowering, how)
    got, moved = bits(kind, lowering, how, *FIRST)
    assert nothing == 0 and len(want) == len(got) > 4
    return not all(map(torch.equal, want, got)), moved


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_losses_and_gradients_keep_their_bits(two_ranks, lowering):
    for changed, moved in two_ranks.run(differs, "gpt", lowering, timeout=300):
        assert not changed and moved > 2**19
