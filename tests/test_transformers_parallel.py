"""transformers' own tensor and expert parallel plans, unpatched, in the same graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from tests.parallel import graphs, reset, tokens, trained_alike
from tests.parity import compiled

pytestmark = pytest.mark.dist


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


def next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


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


def parity(kind: str, lowering: str, shape: tuple[int, int]) -> Any:
    reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    reference = build(kind)
    model = copy.deepcopy(reference)
    parallelized(model, mesh["tp"])
    mfsdp.fully_shard(model, mesh=mesh, units=["model.layers.*"])
    every = [tokens(r) for r in range(shape[0])]
    mine = every[mesh.get_local_rank("dp_shard")]
    wrong = trained_alike(model, compiled(model, lowering), reference, mine, every, next_token)
    with torch.no_grad():
        wrong["logits"] = float((model(mine).logits - reference(mine).logits).abs().max())
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize("lowering", ["eager", "none"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tensor_parallel(four_ranks, kind, lowering):
    for wrong, where, made in four_ranks.run(parity, kind, lowering, (2, 2), timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


def from_checkpoint(folder: str) -> Any:
    """An unmodified checkpoint, cut by `from_pretrained`; the embedding is the head."""
    import transformers
    from transformers.distributed import DistributedConfig

    reset()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2), dtype=torch.float64
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    mfsdp.fully_shard(model, mesh=mesh, units=["model.layers.*"])
    wrong = trained_alike(model, compiled(model, "eager"), reference, tokens(0), [tokens(0)], next_token)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


def test_from_pretrained(two_ranks, tmp_path):
    import transformers

    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for wrong, where, made in two_ranks.run(from_checkpoint, str(tmp_path), timeout=300):
        assert wrong < 1e-9 and made == (1, 0), where


def experts(kind: str, lowering: str, ep: int, tp: int) -> Any:
    """Attention over `tp`, experts over `ep` of the same ranks: with `tp` they send each other parts of one batch.
    Batches are of unlike length.
    """
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    world = dist.get_world_size()
    dense = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    sparse = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    reference = build(kind)
    model: Any = copy.deepcopy(reference)
    parallelized(model, dense["tp"], sparse["ep"])
    for layer in model.model.layers:
        mfsdp.fully_shard(layer.mlp.experts, mesh=sparse["efsdp"])
    mfsdp.fully_shard(model, mesh=dense, units=["model.layers.*"])
    every = [tokens(r, length=9 + 3 * r) for r in range(world // tp)]
    mine = every[dense.get_local_rank("dp_shard")]
    wrong = trained_alike(model, compiled(model, lowering), reference, mine, every, next_token)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize("kind, lowering, ep, tp", [
    ("mixture", "eager", 2, 1), ("mixture", "none", 4, 1), ("mixture", "eager", 2, 2), ("mixture", "none", 2, 2),
    ("mixture", "eager", 4, 2), ("mixtral", "eager", 4, 1),
])  # fmt: skip
def test_expert_parallel(four_ranks, kind, lowering, ep, tp):
    for wrong, where, made in four_ranks.run(experts, kind, lowering, ep, tp, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)
