"""DeepSeek-V3's shape on 2,048 ranks, exchanges hidden or not: ``python examples/explain/deepseek_v3.py``.

671 billion parameters (arXiv:2412.19437, section 4.2): 61 layers, the first three dense, then 256 experts of which each
token goes to 8, and one that all share; multi-head latent attention. Experts are cut over 64 ranks
(``ep``) and sharded over the 32 sets of those (``efsdp``); everything else is sharded over all ranks. Every layer is
computed again in backward. Routing is taken to be even, and unlike the paper's is not limited to four nodes. No process
group, no GPU, no memory for the model; ``--layers 8`` for a quick look, ``--together 1`` for one microbatch a program.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import mfsdp

WIDTH, HEADS, VOCAB = 7168, 128, 129280
EXPERTS, CHOSEN, HIDDEN, DENSE = 256, 8, 2048, 18432
QUERIES, KEYS, PLAIN, ROTARY, VALUE = 1536, 512, 128, 64, 128
"""Ranks of the latent projections, and sizes of a head."""


class Attention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm = nn.Linear(WIDTH, QUERIES, bias=False), nn.RMSNorm(QUERIES)
        self.q_b = nn.Linear(QUERIES, HEADS * (PLAIN + ROTARY), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, KEYS + ROTARY, bias=False), nn.RMSNorm(KEYS)
        self.kv_b = nn.Linear(KEYS, HEADS * (PLAIN + VALUE), bias=False)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(b, t, HEADS, PLAIN + ROTARY).transpose(1, 2)
        latent, rotary = self.kv_a(x).split([KEYS, ROTARY], -1)
        kv = self.kv_b(self.kv_norm(latent)).view(b, t, HEADS, PLAIN + VALUE).transpose(1, 2)
        plain, v = kv.split([PLAIN, VALUE], -1)
        turned = torch.cat([q[..., :PLAIN], rotated(q[..., PLAIN:], turns)], -1)
        k = torch.cat([plain, rotated(rotary.unsqueeze(1), turns).expand(b, HEADS, t, ROTARY)], -1)
        padded = F.pad(v, (0, PLAIN + ROTARY - VALUE))  # flash attention wants heads of one size
        y = F.scaled_dot_product_attention(turned, k, padded, is_causal=True)[..., :VALUE]
        return self.out(y.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """This rank's experts."""

    def __init__(self, here: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(here, WIDTH, 2 * HIDDEN))
        self.down = nn.Parameter(torch.empty(here, HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(x, self.gate_up).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down)


class Mixture(nn.Module):
    def __init__(self, group: Any):
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.shared = Experts(EXPERTS // self.ranks), FeedForward(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).sigmoid().topk(CHOSEN, -1)
        order = chosen.reshape(-1).argsort(stable=True)
        there = fc.all_to_all_single_autograd(flat[order // CHOSEN], None, None, self.group)
        here = there.view(self.ranks, EXPERTS // self.ranks, -1, WIDTH).transpose(0, 1)
        done = self.experts(here.flatten(1, 2)).view_as(here).transpose(0, 1).reshape(there.shape)
        back = fc.all_to_all_single_autograd(done, None, None, self.group)
        weights = (weights / weights.sum(-1, keepdim=True)).reshape(-1)[order].unsqueeze(1)
        out = torch.zeros_like(flat).index_add(0, order // CHOSEN, back * weights)
        return (out + self.shared(flat)).view_as(x)


class Layer(nn.Module):
    def __init__(self, number: int, group: Any, again: bool):
        super().__init__()
        self.again = again
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), FeedForward(DENSE) if number < 3 else Mixture(group)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        if not self.again:
            return self.layer(x, turns)
        return checkpoint(self.layer, x, turns, use_reentrant=False)  # type: ignore[no-any-return]

    def layer(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class DeepSeekV3(nn.Module):
    """Without multi-token prediction."""

    def __init__(self, layers: int, group: Any, again: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(i, group, again) for i in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        turns = places[:, None] * 1e4 ** -(torch.arange(0, ROTARY, 2, device=ids.device) / ROTARY)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, turns)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def sharded(layers: int, world: int, ep: int, again: bool = True) -> nn.Module:
    """The model on the meta device, of one of so many ranks; ``again``: whether every layer is computed again."""
    dense = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    sparse = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    with torch.device("meta"):
        model = DeepSeekV3(layers, sparse["ep"].get_group(), again)
    more: Any = {"mp_policy": mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16), "device": "meta"}
    for module in model.modules():
        if isinstance(module, Experts):
            for param in module.parameters():
                param.allreduce = False  # type: ignore[attr-defined]  # ranks of ep hold other experts
            mfsdp.fully_shard(module, mesh=sparse["efsdp"], **more)
    return mfsdp.fully_shard(model, mesh=dense, units=[Layer, "embedding", "head"], **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--world", type=int, default=2048)
    parser.add_argument("--ep", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--together", type=int, nargs="+", default=[1, 2], help="microbatches in one program")
    parser.add_argument("--html", type=Path, help="a folder for the reports")
    parser.add_argument("--plot", type=Path, help="a picture of the table")
    args = parser.parse_args()
    begun = time.process_time()
    with mfsdp.fake_ranks(args.world):
        model = sharded(args.layers, args.world, args.ep)
        ids = torch.zeros(1, args.length, dtype=torch.long)
        found = mfsdp.compare(
            model, (ids, ids), hardware=args.hardware, microbatches=args.microbatches, together=args.together,
            overlapped=[False, True],
        )  # fmt: skip
    print(found)
    print(f"{time.process_time() - begun:.0f} s of the processor's time")
    if args.plot:
        found.plot(args.plot)
    if args.html:
        args.html.mkdir(parents=True, exist_ok=True)
        for values, report in zip(found.values, found, strict=True):
            report.html(args.html / f"{'-'.join(f'{k}-{v}' for k, v in values.items())}.html")


if __name__ == "__main__":
    main()
