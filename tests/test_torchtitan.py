"""torchtitan's llama through `mfsdp.integrations.torchtitan.parallelize`, in its Trainer's steps, on 2 ranks and 4.

Its Trainer wants an accelerator. On a CPU torchtitan cannot be in the `test` extra: ``torchtitan.models.common``
imports ``distributed/minimal_async_ep/kernels.py``, and that triton, which CPU wheels of torch come without and
torchtitan does not ask for. ``pip install torchtitan==0.3.0 triton`` makes these tests run.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from mfsdp.integrations.torchtitan import parallelize

pytestmark = pytest.mark.dist
WORDS, LENGTH, WIDTH = 61, 8, 32


def llama(tied: bool) -> Any:
    """The config of a small one, with an attention that runs on a CPU."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = llama3.llama3_configs["debugmodel"]("flex")
    small = {"dim": WIDTH, "hidden_dim": 48, "n_heads": 4, "n_layers": 3}
    rope = llama3.ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=64, theta=500000, scaling="llama")
    layers = llama3._build_llama3_layers(**small, rope=rope, attn_backend="flex")
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    embedding = dataclasses.replace(config.tok_embeddings, num_embeddings=WORDS, embedding_dim=WIDTH)
    if tied:
        embedding = dataclasses.replace(embedding, param_init=llama3._EMBEDDING_SKIP_INIT)
    return dataclasses.replace(
        config,
        dim=WIDTH,
        vocab_size=WORDS,
        enable_weight_tying=tied,
        layers=layers,
        tok_embeddings=embedding,
        norm=dataclasses.replace(config.norm, normalized_shape=WIDTH),
        lm_head=dataclasses.replace(config.lm_head, in_features=WIDTH, out_features=WORDS),
    )


def mixture() -> Any:
    """The config of a small Qwen3 with experts, which compute in bf16."""
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = qwen3.qwen3_configs["debugmodel_moe"]("flex")
    small = {"dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "moe_hidden_dim": 24, "num_experts": 4}
    rope = qwen3.CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e6)
    how = {"top_k": 2, "attn_backend": "flex", "moe_comm_backend": "standard", "rope": rope}
    layers = qwen3._build_qwen3_moe_layers(**small, n_layers=2, **how)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return dataclasses.replace(
        config,
        dim=WIDTH,
        vocab_size=WORDS,
        layers=layers,
        tok_embeddings=dataclasses.replace(config.tok_embeddings, num_embeddings=WORDS, embedding_dim=WIDTH),
        norm=dataclasses.replace(config.norm, normalized_shape=WIDTH),
        lm_head=dataclasses.replace(config.lm_head, in_features=WIDTH, out_features=WORDS),
    )


def initialised(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


@functools.cache
def dims(tp: int, ep: int = 1) -> Any:
    """One for all tests: DTensor's cached layouts mix up meshes that are equal, and then AOTAutograd fails."""
    from torchtitan.distributed import ParallelDims, parallel_dims

    parallel_dims.device_type = "cpu"
    world = dist.get_world_size()
    degrees = {"dp_replicate": 1, "dp_shard": world // tp, "cp": 1, "tp": tp, "pp": 1, "ep": ep}
    return ParallelDims(**degrees, world_size=world, spmd_backend="partial_dtensor")


def sharded(parallel_dims: Any, tied: bool, recompute: str | None, sp: bool = False, **training: Any) -> Any:
    """As torchtitan's Trainer does it."""
    import torchtitan.distributed.activation_checkpoint as recomputation
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    config = mixture() if parallel_dims.ep_enabled else llama(tied)
    if parallel_dims.ep_enabled:
        set_qwen3_sharding_config(config, enable_sp=sp, enable_ep=True)
    elif parallel_dims.tp_enabled:
        set_llama3_sharding_config(config, enable_sp=sp)
    with torch.device("meta"):
        model = config.build()
    model = parallelize(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(**{"mixed_precision_param": "float32"} | training),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(),
        ac_config=getattr(recomputation, recompute).Config() if recompute else None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    return initialised(model)


def loss_of(model: Any, ids: torch.Tensor, tokens: int, chunks: int) -> torch.Tensor:
    """A sum over this rank's tokens, divided by all ranks'. In chunks the head is called after the model, as often."""
    model._skip_lm_head = chunks > 1
    out = model(ids[:, :-1], torch.arange(LENGTH).expand(len(ids), -1))
    parts = [model.lm_head(h) for h in out.chunk(chunks, 1)] if chunks > 1 else [out]
    logits = torch.cat(parts, 1).float()
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / tokens


def values(model: Any) -> dict[str, torch.Tensor]:
    """Whole parameters, and buffers."""
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


def trains(tied: bool, recompute: str | None, chunks: int = 1, tp: int = 1, ep: int = 1, **how: Any) -> dict[str, int]:
    """Beside an unsharded one: initial weights are equal, then losses, norms and weights of three steps.

    Returns:
        Graph breaks.
    """
    from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend

    set_spmd_backend("partial_dtensor")
    counters.clear()
    parallel_dims = dims(tp, ep)
    model = sharded(parallel_dims, tied, recompute, **how)
    reference = initialised((mixture() if ep > 1 else llama(tied)).build())
    for name, value in values(model).items():
        assert torch.equal(value, reference.state_dict()[name]), name
    near = {"rtol": 3e-2, "atol": 3e-2} if "mixed_precision_param" in how else {"rtol": 1e-5, "atol": 1e-5}
    batch = torch.randint(WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    data = parallel_dims.get_mesh("fsdp")
    mine, tokens = batch[data.get_local_rank() :: data.size()], 4 * LENGTH
    both = [(m, torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-2)) for m in (model, reference)]
    for _ in range(3):
        losses, norms = [], []
        for (m, optimizer), ids in zip(both, (mine, batch), strict=True):
            loss = loss_of(m, ids, tokens, chunks)
            loss.backward()
            norms.append(clip_grad_norm_(list(m.parameters()), 0.5, foreach=True))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        dist.all_reduce(losses[0], group=data.get_group())
        torch.testing.assert_close(losses[0], losses[1], **near)
        torch.testing.assert_close(norms[0], norms[1], **near)
    torch.testing.assert_close(values(model), reference.state_dict(), **near)
    for (name, seen), want in zip(model.named_buffers(), reference.buffers(), strict=True):
        if name.endswith("tokens_per_expert_E"):  # what its hook balances loads by, after a sum over ranks
            seen = seen.full_tensor() if isinstance(seen, DTensor) else seen.clone()
            dist.all_reduce(seen, group=data.get_group())
            assert torch.equal(seen, want) and seen.sum() > 0, name
    return dict(counters["graph_break"])


@pytest.mark.parametrize("tied, recompute", [(False, None), (True, None), (False, "FullAC"), (False, "SelectiveAC")])
def test_llama(two_ranks, tied, recompute):
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    two_ranks.run(trains, tied, recompute)


@pytest.mark.parametrize(
    "tied, recompute, how",
    [
        (False, None, {"sp": False}),
        (False, "SelectiveAC", {"sp": True}),
        (True, None, {"sp": True}),
        (False, "FullAC", {"sp": True, "mixed_precision_param": "bfloat16"}),
    ],
)
def test_tensor_parallel(four_ranks, tied, recompute, how):
    """Two by two; ``sp``: the sequence is split too, between the products."""
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    four_ranks.run(trains, tied, recompute, tp=2, **how)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_expert_parallel(four_ranks, tp):
    """Two by two: each expert is on two ranks, each token goes where its experts are; all in one graph."""
    pytest.importorskip("torchtitan.models.qwen3", exc_type=ImportError)
    assert four_ranks.run(trains, False, None, tp=tp, ep=2, sp=tp > 1, timeout=300) == [{}] * 4


def test_mixed_precision(two_ranks):
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    two_ranks.run(trains, False, None, mixed_precision_param="bfloat16")


def test_the_head_called_in_chunks(two_ranks):
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    two_ranks.run(trains, False, None, chunks=2)


def heads() -> None:
    model = sharded(dims(1), False, None)
    model.lm_head.set_requires_gradient_sync(False, recurse=False)
    model.lm_head.set_requires_gradient_sync(True, recurse=False)


def test_the_head_has_the_methods(two_ranks):
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    two_ranks.run(heads)


PLAIN = dict.fromkeys(("tp_enabled", "cp_enabled", "pp_enabled", "ep_enabled", "dp_replicate_enabled"), False)
CONFIGS = {
    "training": {"enable_cpu_offload": False},
    "parallelism": {"spmd_backend": "partial_dtensor", "enable_fsdp_symm_mem": False,
                    "enable_sequence_parallel": False, "fsdp_reshard_after_forward": "default"},
    "compile_config": {"enable": True, "components": ["model"], "backend": "inductor",
                       "enable_async_tensor_parallel": True},  # which does nothing without tensor parallelism
}  # fmt: skip


@pytest.mark.parametrize(
    "where, change, error, match",
    [
        ("dims", {"cp_enabled": True, "pp_enabled": True}, NotImplementedError, "context.*and pipeline parallelism"),
        ("dims", {"ep_enabled": True, "dp_replicate_enabled": True}, NotImplementedError, "beside replicas"),
        ("dims", {"ep_enabled": True, "tp_enabled": True}, NotImplementedError, "without enable_sequence_parallel"),
        ("dims", {"tp_enabled": True}, NotImplementedError, "with enable_async_tensor_parallel has not been tried"),
        ("parallelism", {"spmd_backend": "spmd_types"}, NotImplementedError, "use spmd_backend='partial_dtensor'"),
        ("training", {"enable_cpu_offload": True}, NotImplementedError, "enable_cpu_offload has not been tried"),
        ("parallelism", {"fsdp_reshard_after_forward": "often"}, ValueError, "default, always or never"),
        ("compile_config", {"backend": "tvm"}, ValueError, "choose one of inductor"),
    ],
)
def test_what_is_refused(where, change, error, match):
    dims = SimpleNamespace(**PLAIN | (change if where == "dims" else {}))
    configs = {name: SimpleNamespace(**values | (change if where == name else {})) for name, values in CONFIGS.items()}
    refused = functools.partial(parallelize, nn.Linear(2, 2), parallel_dims=dims, ac_config=None, dump_folder="")
    with pytest.raises(error, match=match):
        refused(**configs)
