"""Shapes of one layer of well-known models, as their Hugging Face implementations register them."""

from __future__ import annotations

Shapes = list[tuple[str, tuple[int, ...]]]


def dense(hidden: int, inter: int, kv: int) -> Shapes:
    """A Llama layer; ``kv`` is heads times head size of keys and values."""
    return [
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("self_attn.k_proj.weight", (kv, hidden)),
        ("self_attn.v_proj.weight", (kv, hidden)),
        ("self_attn.o_proj.weight", (hidden, hidden)),
        ("mlp.gate_proj.weight", (inter, hidden)),
        ("mlp.up_proj.weight", (inter, hidden)),
        ("mlp.down_proj.weight", (hidden, inter)),
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
    ]


def mixtral() -> Shapes:
    attention = [s for s in dense(4096, 14336, 1024) if "mlp" not in s[0]]
    return [
        *attention[:4],
        ("mlp.gate.weight", (8, 4096)),
        ("mlp.experts.gate_up_proj", (8, 28672, 4096)),
        ("mlp.experts.down_proj", (8, 4096, 14336)),
        *attention[4:],
    ]


def qwen3_moe() -> Shapes:
    return [
        ("self_attn.q_proj.weight", (4096, 2048)),
        ("self_attn.k_proj.weight", (512, 2048)),
        ("self_attn.v_proj.weight", (512, 2048)),
        ("self_attn.o_proj.weight", (2048, 4096)),
        ("self_attn.q_norm.weight", (128,)),
        ("self_attn.k_norm.weight", (128,)),
        ("mlp.gate.weight", (128, 2048)),
        ("mlp.experts.gate_up_proj", (128, 1536, 2048)),
        ("mlp.experts.down_proj", (128, 2048, 768)),
        ("input_layernorm.weight", (2048,)),
        ("post_attention_layernorm.weight", (2048,)),
    ]


def _mla() -> Shapes:
    return [
        ("self_attn.q_a_proj.weight", (1536, 7168)),
        ("self_attn.q_a_layernorm.weight", (1536,)),
        ("self_attn.q_b_proj.weight", (24576, 1536)),
        ("self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("self_attn.kv_a_layernorm.weight", (512,)),
        ("self_attn.kv_b_proj.weight", (32768, 512)),
        ("self_attn.o_proj.weight", (7168, 16384)),
    ]


_NORMS: Shapes = [("input_layernorm.weight", (7168,)), ("post_attention_layernorm.weight", (7168,))]


def deepseek_dense() -> Shapes:
    mlp: Shapes = [
        ("mlp.gate_proj.weight", (18432, 7168)),
        ("mlp.up_proj.weight", (18432, 7168)),
        ("mlp.down_proj.weight", (7168, 18432)),
    ]
    return [*_mla(), *mlp, *_NORMS]


_SHARED: Shapes = [
    ("mlp.shared_experts.gate_proj.weight", (2048, 7168)),
    ("mlp.shared_experts.up_proj.weight", (2048, 7168)),
    ("mlp.shared_experts.down_proj.weight", (7168, 2048)),
]


def deepseek_moe() -> Shapes:
    """Experts stacked, as transformers 5 keeps them."""
    mlp: Shapes = [
        ("mlp.experts.gate_up_proj", (256, 4096, 7168)),
        ("mlp.experts.down_proj", (256, 7168, 2048)),
        ("mlp.gate.weight", (256, 7168)),
        *_SHARED,
    ]
    return [*_mla(), *mlp, *_NORMS]


def deepseek_experts() -> Shapes:
    """Every expert a module of its own."""
    mlp: Shapes = []
    for e in range(256):
        mlp.append((f"mlp.experts.{e}.gate_proj.weight", (2048, 7168)))
        mlp.append((f"mlp.experts.{e}.up_proj.weight", (2048, 7168)))
        mlp.append((f"mlp.experts.{e}.down_proj.weight", (7168, 2048)))
    return [*_mla(), *mlp, ("mlp.gate.weight", (256, 7168)), *_SHARED, *_NORMS]


LAYERS: dict[str, Shapes] = {
    "Llama-3-8B": dense(4096, 14336, 1024),
    "Llama-3-70B": dense(8192, 28672, 1024),
    "Llama-3-405B": dense(16384, 53248, 1024),
    "Mixtral-8x7B": mixtral(),
    "Qwen3-MoE-30B-A3B": qwen3_moe(),
    "DeepSeek-V3 dense": deepseek_dense(),
    "DeepSeek-V3 MoE": deepseek_moe(),
    "DeepSeek-V3 MoE, 256 modules": deepseek_experts(),
}

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
