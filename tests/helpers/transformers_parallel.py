"""Small transformers models under their own tensor and expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SMALL: dict[str, Any] = {
    "vocab_size": 34, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "attn_implementation": "sdpa",
}  # fmt: skip


def build(kind: str) -> nn.Module:
    """A small model, as `from_pretrained` would have made it."""
    import transformers

    torch.manual_seed(0)
    if kind == "qwen3":
        config: Any = transformers.Qwen3Config(**SMALL, head_dim=4)
        model: nn.Module = transformers.Qwen3ForCausalLM(config)
    elif kind == "mixture":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
        config = transformers.Qwen3MoeConfig(**SMALL, **more)
        config._experts_implementation = "batched_mm"
        model = transformers.Qwen3MoeForCausalLM(config)
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = "batched_mm"
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms, too
            p.add_(0.05 * torch.randn_like(p))
    return model.double()


def parallelized(model: Any, tp: Any, ep: Any = None) -> None:
    """As `from_pretrained(distributed_config=...)` does, which insists on sharding by FSDP2 where there is a mesh of
    both.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = DistributedConfig(
        tp_size=tp.size(), fsdp_size=dist.get_world_size() // tp.size(), ep_size=1 if ep is None else ep.size()
    )
    tp_plan, ep_plan, _ = model._resolve_parallel_plans(sizes)
    if tp.size() > 1:
        apply_tensor_parallelism(model, tp, tp_plan)
    if ep is not None:
        apply_expert_parallelism(model, ep, tp, ep_plan)
