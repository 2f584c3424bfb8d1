"""Context parallelism: ranks of ``cp`` have the same weights and parts of the same sequences; both axes are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from examples.parallel.model import Attention, Layer, Llama
from tests.helpers.parallel import graphs, next_token, reset, tokens, trained_alike, twin
from tests.helpers.parity import compiled
from tests.helpers.ranks import here

pytestmark = pytest.mark.dist


class Gathered(Attention):
    """Keys and values of all ranks, and a mask of one's own."""

    group: dist.ProcessGroup

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (fc.all_gather_tensor_autograd(x.contiguous(), 2, self.group) for x in (k, v))
        mine, every = q.shape[2], k.shape[2]
        rows, columns = (torch.arange(n, device=q.device) for n in (mine, every))
        mask = rows.unsqueeze(1) + self.group.rank() * mine >= columns
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Ulysses(Attention):
    """All-to-alls give each rank some heads of the whole sequence (DeepSpeed-Ulysses, 2023)."""

    group: dist.ProcessGroup

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.swap(x, 1, 2) for x in (q, k, v))
        return self.swap(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)

    def swap(self, x: torch.Tensor, cut: int, join: int) -> torch.Tensor:
        n = self.group.size()
        x = torch.cat(x.chunk(n, cut), 0).contiguous()
        return torch.cat(fc.all_to_all_single_autograd(x, None, None, self.group).chunk(n, 0), join)


def parity(kind: type[Any], lowering: str) -> Any:
    reset()
    mesh = init_device_mesh(here().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp_shard", "cp"))
    reference, model = twin(lambda: Llama(layers=1))
    for layer in model.layers:  # type: ignore[union-attr]
        layer.attention.__class__ = kind
        layer.attention.group = mesh["cp"].get_group()
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
    every, part = [tokens(r) for r in range(mesh["dp_shard"].size())], mesh.get_local_rank("cp")
    mine = every[mesh.get_local_rank("dp_shard")]
    run = compiled(model, lowering)

    def loss(m: Any, ids: torch.Tensor) -> torch.Tensor:
        if m is not run:
            return next_token(m, ids)
        given, wanted = (x.chunk(2, 1)[part].contiguous() for x in (ids[:, :-1], ids[:, 1:]))
        return F.cross_entropy(m(given).flatten(0, 1), wanted.flatten())

    wrong = trained_alike(model, run, reference, mine, every, loss)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize("kind, lowering, ranks", [
    (Gathered, "eager", "two_ranks"), (Gathered, "none", "four_ranks"), (Ulysses, "none", "four_ranks"),
    (Ulysses, "eager", "two_ranks"),
    pytest.param(Ulysses, "inductor", "two_ranks", marks=[pytest.mark.exhaustive, pytest.mark.inductor]),
    pytest.param(Gathered, "eager", "four_ranks", marks=pytest.mark.exhaustive),
    pytest.param(Ulysses, "eager", "four_ranks", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_parity(request, kind, lowering, ranks):
    """On two ranks there is one data-parallel rank, and parameters are sharded over ``cp`` alone."""
    for wrong, where, made in request.getfixturevalue(ranks).run(parity, kind, lowering, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)
