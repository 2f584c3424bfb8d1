"""transformers' own tensor and expert parallel plans, unpatched, in the same graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import mfsdp
from tests.helpers.parallel import graphs, reset, tokens, trained_alike
from tests.helpers.parity import compiled
from tests.helpers.transformers_parallel import SMALL, build, parallelized


@pytest.fixture
def tp() -> Iterator[Any]:
    with mfsdp.fake_ranks(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))


def next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def parity(kind: str, lowering: str, shape: tuple[int, int]) -> Any:
    reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    reference = build(kind)
    model = copy.deepcopy(reference)
    parallelized(model, mesh["tp"])
    mfsdp.fully_shard(model, mesh=mesh, units=["model.layers.*"])
    every = [tokens(r) for r in range(shape[0])]
    mine = every[mesh.get_local_rank("dp_shard")]
    run = compiled(model, lowering)
    wrong = trained_alike(model, run, reference, mine, every, next_token)
    made = graphs()
    with torch.no_grad():  # styles compute on local tensors there
        want = reference(mine).logits
        for name, m in (("compiled", run), ("uncompiled", model)):
            wrong[f"logits, {name}"] = float((m(mine).logits - want).abs().max())
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, made


@pytest.mark.dist
@pytest.mark.parametrize("kind, lowering, shape", [
    ("qwen3", "eager", (1, 2)), ("qwen3", "none", (2, 2)),
    pytest.param("qwen3", "eager", (2, 2), marks=pytest.mark.exhaustive),
    pytest.param("llama", "none", (2, 2), marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_tensor_parallel(request, kind, lowering, shape):
    ranks = request.getfixturevalue("two_ranks" if shape == (1, 2) else "four_ranks")
    for wrong, where, made in ranks.run(parity, kind, lowering, shape, timeout=300):
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


@pytest.mark.dist
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


@pytest.mark.dist
@pytest.mark.parametrize("kind, lowering, ep, tp", [
    ("mixture", "none", 4, 1), ("mixture", "none", 2, 2), ("mixture", "eager", 2, 1),
    *(pytest.param("mixture", "eager", *m, marks=pytest.mark.exhaustive) for m in ((2, 2), (4, 2))),
    pytest.param("mixtral", "eager", 4, 1, marks=pytest.mark.exhaustive),  # `test_transformers_native.py` trains it
])  # fmt: skip
def test_expert_parallel(request, kind, lowering, ep, tp):
    ranks = request.getfixturevalue("two_ranks" if (lowering, ep, tp) == ("eager", 2, 1) else "four_ranks")
    for wrong, where, made in ranks.run(experts, kind, lowering, ep, tp, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


class Read(nn.Module):
    """Reads a weight whose style shows local tensors, from outside of that style's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(6, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        norm = self.gate_up.weight.norm()
        return (gate * up).sum() * 0 + (norm.full_tensor() if isinstance(norm, DTensor) else norm)


def read(lowering: str) -> float:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    reset()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    model = Read().double()
    want = model.gate_up.weight.detach().norm()
    plan = {"gate_up": "packed_colwise", "gate_up.weight": "packed_colwise"}
    apply_tensor_parallelism(model, mesh["tp"], plan)
    mfsdp.fully_shard(model, mesh=mesh)
    return float((compiled(model, lowering)(torch.ones(2, 6, dtype=torch.float64)) - want).abs())


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_local_is_what_the_style_runs_only(two_ranks, lowering):
    assert all(wrong < 1e-12 for wrong in two_ranks.run(read, lowering))


def dtypes() -> tuple[torch.dtype, torch.dtype]:
    """A unit that is a module with a style: what enters and leaves it is cast."""
    reset()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model: Any = build("llama").float()
    parallelized(model, mesh["tp"])
    unit = model.model.layers[0].mlp.gate_proj
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16, output_dtype=torch.float32)
    mfsdp.fully_shard(unit, mesh=mesh, mp_policy=policy)
    entered = []
    unit.register_forward_pre_hook(lambda m, args: entered.append(args[0].dtype))
    return unit(torch.ones(2, 16)).dtype, unit.weight.dtype


@pytest.mark.dist
def test_units_that_have_a_style(two_ranks):
    assert two_ranks.run(dtypes) == [(torch.float32, torch.float32)] * 2


def snapshot(model: nn.Module) -> list[Any]:
    return [(type(m), dict(m._parameters), m.__dict__.get("forward")) for m in model.modules()]


def test_gradients_that_transformers_sums_are_all_ours_or_none(tp):
    model: Any = build("qwen3")
    parallelized(model, tp["tp"])
    norm = model.model.layers[0].self_attn.q_norm
    norm.bias = nn.Parameter(torch.zeros(4))
    before = snapshot(model)
    with pytest.raises(NotImplementedError, match="sums gradients of Qwen3RMSNorm.*all or none"):
        mfsdp.fully_shard(model, mesh=tp, ignored_params=[norm.bias], device="meta")
    assert [row[0] for row in snapshot(model)] == [row[0] for row in before]
    assert norm.__dict__["forward"] is before[list(model.modules()).index(norm)][2]


def test_styles_of_others_are_refused(tp, monkeypatch):
    from transformers.distributed import tensor_parallel

    class Mine(tensor_parallel.ColwiseParallel):
        def context_around_forward(self, module, mesh):
            return super().context_around_forward(module, mesh)

    model: Any = build("llama")
    monkeypatch.setitem(tensor_parallel.ALL_PARALLEL_STYLES._global_mapping, "colwise", Mine())
    parallelized(model, tp["tp"])
    with pytest.raises(NotImplementedError, match="the style Mine of Linear has a context_around_forward of its own"):
        mfsdp.fully_shard(model, mesh=tp, device="meta")


def test_a_model_that_has_run_before(tp):
    model: Any = build("qwen3")
    parallelized(model, tp["tp"])
    model(input_ids=tokens(0), use_cache=False).logits.sum()
    assert model.model.layers[0].self_attn.q_norm.weight._post_accumulate_grad_hooks
    mfsdp.fully_shard(model, mesh=tp, device="meta")
