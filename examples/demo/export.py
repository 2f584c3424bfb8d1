"""The demo's model as a Llama of transformers: names of weights, and the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model import VOCABULARY, Config
from torch import nn

import mfsdp

NAMES = {
    "tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "blocks": "model.layers",
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attention": "self_attn", "q": "q_proj",
    "k": "k_proj", "v": "v_proj", "out": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
}  # fmt: skip


def rename(name: str) -> str:
    """transformers' name of a weight."""
    return ".".join(NAMES.get(part, part) for part in name.split("."))


def configuration(config: Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "dtype": "float32",
        "hidden_size": config.width, "intermediate_size": config.hidden, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.heads, "rms_norm_eps": config.eps,
        "max_position_embeddings": config.length, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def export(model: nn.Module, config: Config, folder: Path, rank: int) -> None:
    """Writes what ``AutoModelForCausalLM.from_pretrained(folder)`` reads. All ranks call it."""
    mfsdp.save_safetensors(model, folder, rename=rename)
    if rank == 0:
        (folder / "config.json").write_text(json.dumps(configuration(config), indent=1))
