"""Small models, one for each thing that can go wrong, with units to shard and data that differs by rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    """Two linear units and a root with a parameter of its own; rows of odd sizes, so that shards are uneven."""

    def __init__(self, width: int = 24, hidden: int = 37, bias: bool = True):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x * self.scale)))


class Several(MLP):
    """Parameters in fp32 and in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.up.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up((x * self.scale).to(self.up.weight.dtype))
        return self.down(F.gelu(x).to(self.down.weight.dtype))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2, break_graph: bool = False):
        super().__init__()
        self.heads, self.break_graph = heads, break_graph
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        if self.break_graph:
            torch._dynamo.graph_break()
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Lumpy(nn.Module):
    """Rows of very different sizes: one unit of several segments, which travel at once."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.randn(6, 2100)), nn.Linear(33, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x) * (1 + self.large.tanh().mean())


class GPT(nn.Module):
    """A GPT with tied embeddings: the head's weight is the embedding's."""

    def __init__(
        self,
        width: int = 16,
        layers: int = 2,
        vocabulary: int = 31,
        length: int = 8,
        *,
        recompute: bool = False,
        break_graph: bool = False,
        tied: bool = True,
    ):
        super().__init__()
        self.recompute = recompute
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, break_graph=break_graph) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class Twice(nn.Module):
    """One module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(18, 18), nn.Linear(18, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class Unused(nn.Module):
    """A parameter, and a whole layer, that forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(12, 12), nn.Linear(12, 12)
        self.spare = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Frozen(nn.Module):
    """A frozen block between two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(14, 14) for _ in range(3))
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class LoRA(nn.Module):
    """A frozen linear with a low-rank adapter that trains, in the same unit."""

    def __init__(self, width: int = 20, rank: int = 3):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width) / 4)
        self.b = nn.Parameter(torch.randn(width, rank) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(LoRA(), nn.ReLU(), LoRA())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Conv(nn.Module):
    """Convolutions and batch norm: buffers that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10)
        self.conv2, self.last = nn.Conv2d(10, 7, 3, bias=False), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        return self.last(self.conv2(x).mean((2, 3)))


class Experts(nn.Module):
    """Tokens go to one of six experts; those that no token reaches are not called, which differs by rank."""

    def __init__(self, width: int = 10, experts: int = 6):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = F.softmax(self.router(x), -1)
        best = scores.argmax(-1)
        out = x
        for number, expert in enumerate(self.experts):
            mine = (best == number).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * scores[mine, number, None])
        return out


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(10, 10), nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Normed(nn.Module):
    """Weights that are computed: weight norm, spectral norm (whose buffers forward writes), a symmetric one."""

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.utils import parametrizations, parametrize

        self.a = parametrizations.weight_norm(nn.Linear(12, 15))
        self.b = parametrizations.spectral_norm(nn.Linear(15, 12))
        self.c = nn.Linear(12, 12)
        parametrize.register_parametrization(self.c, "weight", _Symmetric())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def llama(layers: int = 2, tied: bool = False, width: int = 32) -> nn.Module:
    """Hugging Face's Llama from a small config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67, hidden_size=width, intermediate_size=13 * width // 8, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        attn_implementation="sdpa", tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    """Hugging Face's Mixtral from a small config, experts stacked; some get no token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=1, max_position_embeddings=32, use_cache=False,
        attn_implementation="sdpa", experts_implementation="batched_mm",
    )  # fmt: skip
    return MixtralForCausalLM(config)


class Gated(nn.Module):
    """A block without attention."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Unlike(nn.Module):
    """A convolution, blocks of two kinds (A: attention, B: without, and wide), a head wider than all."""

    def __init__(self, kinds: str, width: int = 32):
        super().__init__()
        self.conv = nn.Conv1d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(Block(width) if kind == "A" else Gated(width, 12 * width) for kind in kinds)
        self.head = nn.Linear(width, 30 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def peft() -> nn.Module:
    """The same with peft's adapters on a frozen base."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.float()


def floats(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape)


def tokens(vocabulary: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(vocabulary, shape)


@dataclass
class Case:
    """A model with its units, its data and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    units: list[Any] = field(default_factory=list)
    joined: bool = True
    """Whether the loss of the joined batch is the mean of the ranks' (not so with batch norm)."""
    traced: bool = False
    """Whether the reference for bitwise equality is traced too: tracing alone changes the order of some sums."""

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out = getattr(out, "logits", out)
        return (out.float() - 0.5).square().mean()


CASES: dict[str, Case] = {
    "mlp": Case(MLP, floats(4, 24), ["up", "down"]),
    "gpt": Case(GPT, tokens(31, 2, 8), [Block]),
    "gpt_checkpointed": Case(lambda: GPT(recompute=True), tokens(31, 2, 8), [Block]),
    "gpt_nested": Case(lambda: GPT(layers=2), tokens(31, 2, 8), [Block, "blocks.*.qkv", "blocks.0.up"]),
    "twice": Case(Twice, floats(4, 18), ["shared"]),
    "unused": Case(Unused, floats(4, 12), ["idle"]),
    "frozen": Case(Frozen, floats(4, 14), ["layers.*"]),
    "lora": Case(Adapted, floats(4, 20), [LoRA]),
    "conv": Case(Conv, floats(2, 3, 8, 8), ["conv*"], joined=False),
    "normed": Case(Normed, floats(4, 12), ["a", "b"], joined=False),
    "llama": Case(llama, tokens(67, 2, 9), ["LlamaDecoderLayer"], traced=True),
    "mixtral": Case(mixtral, tokens(67, 1, 5), ["MixtralDecoderLayer"], joined=False, traced=True),
    "peft": Case(peft, tokens(67, 2, 9), ["LlamaDecoderLayer"], traced=True),
}
