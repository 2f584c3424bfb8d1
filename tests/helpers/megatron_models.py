"""Megatron-Core's models on the CPU. They believe that they are on a GPU: functions of torch.cuda are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

STREAM = SimpleNamespace(wait_stream=print, record_event=lambda: SimpleNamespace(synchronize=lambda: None))
REPLACED = {
    "current_device": lambda: "cpu",
    "synchronize": lambda device=None: None,
    "Stream": lambda: STREAM,
    "current_stream": lambda: STREAM,
    "stream": lambda stream: nullcontext(),
}


def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextmanager
def megatron(**sizes: int) -> Iterator[Any]:
    """Megatron-Core's state, with these sizes of parallelisms."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> nn.Module:
        out = nn.LayerNorm(hidden_size, eps)
        for p in out.parameters():
            p.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return out

    with ExitStack() as stack:
        stack.enter_context(patch.object(CudaRNGStatesTracker, "fork", lambda self, *name: nullcontext()))
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))  # it reads what it lacks
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", moved))
        stack.enter_context(patch.object(WrappedTorchNorm, "__new__", norm))  # theirs needs Apex for this attribute
        for name, function in REPLACED.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        parallel_state.initialize_model_parallel(**sizes)
        stack.callback(parallel_state.destroy_model_parallel)
        yield parallel_state


def gpt(experts: int | None = None, **more: Any) -> nn.Module:
    """Two layers; dense, or with experts one by one (``SequentialMLP``). Every rank has values of its own but where
    ranks of a parallelism hold the same.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    of_experts = {"num_moe_experts": experts, "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 12}
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, gated_linear_unit=True,
        use_cpu_initialization=True, add_bias_linear=experts is None, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        **({} if experts is None else of_experts), **more,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="LayerNorm")
    model = GPTModel(config, spec, vocab_size=16, max_sequence_length=8, share_embeddings_and_output_weights=False)
    torch.manual_seed(dist.get_rank())
    for p in model.parameters():
        p.detach().normal_(0, 0.3)
        for group in copies(p):
            dist.broadcast(p.detach(), dist.get_process_group_ranks(group)[0], group)
    return model


def copies(p: nn.Parameter) -> list[Any]:
    """The groups whose ranks hold the same of a parameter."""
    from megatron.core import parallel_state

    if not getattr(p, "allreduce", True):
        return [parallel_state.get_expert_data_parallel_group()]
    tensor = [] if getattr(p, "tensor_model_parallel", False) else [parallel_state.get_tensor_model_parallel_group()]
    return [parallel_state.get_data_parallel_group(), *tensor]


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1] - 1
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(ids[:, :-1], torch.arange(length)[None], mask, labels=ids[:, 1:]).mean()  # type: ignore[no-any-return]
