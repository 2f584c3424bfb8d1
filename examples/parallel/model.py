"""A Llama and a mixture of experts, small, as torchtitan writes them; and how they are cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.size = width // heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.wo = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.attend(q, k, v).transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, checkpointed: bool = False):
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width, hidden)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)  # type: ignore[no-any-return]

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """As torchtitan writes it, small."""

    def __init__(
        self, width: int = 24, heads: int = 4, hidden: int = 36, vocab: int = 34, layers: int = 2, **more: Any
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, **more) for _ in range(layers))
        self.norm = Norm(width)
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, sequence: bool = True, loss: bool = False, norms: bool = True
) -> None:
    """torchtitan's plan for a Llama; of a mixture, whose experts stay whole, without sequence parallel.

    Args:
        mesh: over tp.
        sequence: sequence parallel: norms see a part of the tokens.
        loss: loss parallel: logits stay cut over the vocabulary.
        norms: whether norms have a place in the plan.
    """
    act = Shard(1) if sequence else Replicate()
    top: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=act),
        "output": ColwiseParallel(
            input_layouts=act, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
        ),
    }
    if sequence and norms:
        top["norm"] = SequenceParallel()
    parallelize_module(model, mesh, top)
    for layer in (m for m in model.modules() if hasattr(m, "attention")):
        plan: dict[str, Any] = {
            **{f"attention.w{x}": ColwiseParallel() for x in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=act),
        }
        if hasattr(layer, "feed_forward"):
            plan |= {f"feed_forward.w{x}": ColwiseParallel() for x in (1, 3)}
            plan["feed_forward.w2"] = RowwiseParallel(output_layouts=act)
        if sequence:
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            if norms:
                plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
            plan |= {"attention": whole, "feed_forward": whole}
        parallelize_module(layer, mesh, plan)


# Experts


class Experts(nn.Module):
    """Stacked experts. With a group, tokens go to the rank that has their expert, and back."""

    def __init__(self, experts: int, width: int, hidden: int):
        super().__init__()
        self.number = experts
        self.w1 = nn.Parameter(torch.randn(experts, hidden, width) * 0.2)
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden) * 0.2)
        self.group: Any = None

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens, sorted by expert, and how many each of all experts gets."""
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        if self.group is None:
            every = torch.arange(self.number, device=x.device)
            experts = torch.repeat_interleave(every, counts, output_size=x.shape[0])
            return chosen(x, experts, w1, w2)
        ranks = self.group.size()
        here = self.number // ranks
        arriving = fc.all_to_all_single(counts, None, None, self.group)
        send = counts.view(ranks, here).sum(1).tolist()
        receive = arriving.view(ranks, here).sum(1).tolist()
        for n in (*send, *receive):
            torch._check(n >= 0)
        there = fc.all_to_all_single_autograd(x, receive, send, self.group)
        experts = torch.arange(here, device=x.device).repeat(ranks)
        experts = torch.repeat_interleave(experts, arriving, output_size=there.shape[0])
        return fc.all_to_all_single_autograd(chosen(there, experts, w1, w2), send, receive, self.group)


def chosen(x: torch.Tensor, experts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """What its expert makes of each token: all products, one kept. No grouped one compiles on the CPU."""
    number, hidden, width = w1.shape

    def kept(every: torch.Tensor, size: int) -> torch.Tensor:
        index = experts.view(-1, 1, 1).expand(-1, 1, size)
        return every.view(-1, number, size).gather(1, index).squeeze(1)

    h = F.silu(kept(x @ w1.reshape(-1, width).t(), hidden))
    return kept(h @ w2.reshape(-1, hidden).t(), width)


class MixtureLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, experts: int, top: int = 2):
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.attention = Attention(width, heads)
        self.router, self.experts, self.top = (
            nn.Linear(width, experts, bias=False),
            Experts(experts, width, hidden),
            top,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.ffn_norm(x))

    def mixture(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, experts = self.router(flat).softmax(-1).topk(self.top, -1)
        weights, experts = (weights / weights.sum(-1, keepdim=True)).reshape(-1), experts.reshape(-1)
        none = torch.zeros(self.experts.number, dtype=torch.int64, device=x.device)
        counts = none.scatter_add(0, experts, torch.ones_like(experts))
        order = torch.argsort(experts, stable=True)
        out = self.experts(flat[order // self.top], counts) * weights[order].unsqueeze(1)
        return torch.zeros_like(flat).index_add(0, order // self.top, out).view_as(x)


class Mixtral(nn.Module):
    """A mixture of experts, small."""

    def __init__(
        self, width: int = 16, heads: int = 2, hidden: int = 20, vocab: int = 34, layers: int = 2, experts: int = 4
    ):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(MixtureLayer(width, heads, hidden, experts) for _ in range(layers))
        self.norm, self.output = Norm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the experts of every layer over ``ep``, as torchtitan does."""
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        for name in ("w1", "w2"):
            whole = getattr(experts, name).data
            experts.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        experts.group = mesh.get_group()
