"""Saves a Megatron-Core model on two ranks as Megatron-Core does: ``torchrun tests/helpers/megatron_core.py FOLDER``.

It believes that it is on a GPU: two functions of torch.cuda, which it calls unasked, are replaced.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(dist.get_rank())
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, gated_linear_unit=True,
        use_cpu_initialization=True, tensor_model_parallel_size=2, pipeline_dtype=torch.float32,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=16,
        max_sequence_length=4,
        share_embeddings_and_output_weights=False,
    )
    for parameter in model.parameters():
        parameter.detach().uniform_()
        if not getattr(parameter, "tensor_model_parallel", False):
            dist.broadcast(parameter.detach(), 0)
    folder = sys.argv[1]
    for kind in ("stacked", "single"):
        weights = model.sharded_state_dict(metadata={"non_homogeneous_layers": kind == "single"})
        target = os.path.join(folder, kind, "iter_0000007")
        if dist.get_rank() == 0:
            os.makedirs(target)
            with open(os.path.join(folder, kind, "latest_checkpointed_iteration.txt"), "w") as file:
                file.write("7")
        dist.barrier()
        dist_checkpointing.save({"model": weights, "optimizer": moments(weights), "iteration": 7}, target)
    torch.save(model.state_dict(), os.path.join(folder, f"rank{dist.get_rank()}.pt"))
    dist.destroy_process_group()


def moments(weights: Any) -> dict[str, Any]:
    """Optimizer state where its optimizers put it: at the top, by its own prefix in front of the weight's name. Main
    weights are the model's plus 1, the moments 2 and 3 times them."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    return {
        f"{kind} {name}": dataclasses.replace(
            tensor, key=f"optimizer.state.{kind}.{tensor.key}", data=make(tensor.data)
        )
        for kind, make in STATE.items()
        for name, tensor in weights.items()
        if isinstance(tensor, (ShardedTensor, ShardedTensorFactory))
    }


STATE: dict[str, Any] = {
    "fp32_param": lambda weight: weight + 1,
    "exp_avg": lambda weight: 2 * weight,
    "exp_avg_sq": lambda weight: 3 * weight,
}


if __name__ == "__main__":
    main()
