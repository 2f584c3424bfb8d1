"""Experts on a mesh of their own, tokens sent to them by all-to-alls whose splits depend on data, in one graph."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mfsdp
from examples.parallel.model import Experts, Mixtral, MixtureLayer, expert_parallel, tensor_parallel
from mfsdp import pipeline
from mfsdp.ir.program import Program, is_functional_collective
from tests.helpers.experts import CutExperts, sharded
from tests.helpers.parallel import graphs, next_token, reset, tokens, trained_alike, twin
from tests.helpers.parity import compiled, error

pytestmark = pytest.mark.dist


def parity(lowering: str, ranks: int) -> Any:
    reference, model = sharded(ranks, layers=1)
    every = [tokens(r) for r in range(dist.get_world_size())]
    wrong: dict[str, float] = {}
    left: list[str] = []

    def look(p: Program) -> None:
        left.extend(n.name for n in p.nodes if is_functional_collective(n))

    more = {} if lowering == "none" else {"passes": (*pipeline.PIPELINE, ("look", look))}
    run = compiled(model, lowering, **more)
    for turn in range(3):  # the routing changes
        turned = [batch.roll(turn, 1) for batch in every]
        wrong |= trained_alike(model, run, reference, turned[dist.get_rank()], turned, steps=1)
    assert not left, f"not launched and waited for by us: {left}"
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize(
    ("lowering", "ranks"),
    [("eager", 2), ("none", 2), pytest.param("eager", 4, marks=pytest.mark.exhaustive), ("none", 4)],
)
def test_parity(four_ranks, lowering, ranks):
    for wrong, where, made in four_ranks.run(parity, lowering, ranks, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.inductor
def test_parity_of_inductors_code(two_ranks):
    for wrong, where, made in two_ranks.run(parity, "inductor", 2, timeout=400):
        assert wrong < 1e-9 and made == (1, 0), where


def microbatches(strategy: int, of_experts: int) -> float:
    reference, model = sharded(2, strategy, of_experts, layers=1)
    run = compiled(model, "eager")
    for micro in range(2):
        batches = [tokens(100 * micro + r) for r in range(dist.get_world_size())]
        with mfsdp.no_sync(model) if micro == 0 else nullcontext():
            next_token(run, batches[dist.get_rank()]).backward()
        (sum(next_token(reference, b) for b in batches) / len(batches)).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(p.grad.full_tensor(), q.grad) for p, q in pairs)


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        ("two_ranks", (1, 3)),
        *(pytest.param("four_ranks", s, marks=pytest.mark.exhaustive) for s in ((2, 0), (3, 3), (1, 3))),
    ],
)
def test_microbatches(request, ranks, strategies):
    """Dense parameters and experts under strategies of their own."""
    assert max(request.getfixturevalue(ranks).run(microbatches, *strategies, timeout=300)) < 1e-9


def both(lowering: str) -> Any:
    """(dp 2, tp 2): attention over `tp`, experts over the ranks of `dp`, the same on those of `tp`."""
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    sparse = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("efsdp", "ep", "tp"))
    reference, model = twin(lambda: Mixtral(layers=1))
    tensor_parallel(model, dense["tp"], sequence=False)
    expert_parallel(model, sparse["ep"])
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        mfsdp.fully_shard(experts, mesh=sparse["efsdp"])
    mfsdp.fully_shard(model, mesh=dense, units=[MixtureLayer])
    every = [tokens(r) for r in range(2)]
    run = compiled(model, lowering)
    wrong = trained_alike(model, run, reference, every[dense.get_local_rank("dp_shard")], every)
    mfsdp.check_replicas(model)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor, pytest.mark.exhaustive])


@pytest.mark.parametrize("lowering", ["eager", "none", INDUCTOR])
def test_beside_tensor_parallelism(four_ranks, lowering):
    for wrong, where, made in four_ranks.run(both, lowering, timeout=400):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


def expert_tensor_parallel(lowering: str) -> Any:
    """(dp 2, tp 2) for what is dense, (efsdp 1, ep 2, etp 2) for experts."""
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    sparse = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("efsdp", "ep", "etp"))
    reference, model = twin(lambda: Mixtral(layers=1))
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        for name, dim in (("w1", 1), ("w2", 2)):
            whole = getattr(experts, name).data
            cut = distribute_tensor(whole, sparse["ep", "etp"], [Shard(0), Shard(dim)])
            experts.register_parameter(name, nn.Parameter(cut))
        experts.__class__, experts.group, experts.etp = CutExperts, sparse["ep"].get_group(), sparse["etp"].get_group()
        mfsdp.fully_shard(experts, mesh=sparse["efsdp"])
    mfsdp.fully_shard(model, mesh=dense, units=[MixtureLayer])
    every = [tokens(r) for r in range(2)]
    run = compiled(model, lowering)
    wrong = trained_alike(model, run, reference, every[dense.get_local_rank("dp_shard")], every)
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, graphs()


@pytest.mark.parametrize("lowering", [pytest.param("eager", marks=pytest.mark.exhaustive), "none"])
def test_expert_tensor_parallel(four_ranks, lowering):
    for wrong, where, made in four_ranks.run(expert_tensor_parallel, lowering, timeout=300):
        assert wrong < 1e-9, where
        assert lowering == "none" or made == (1, 0)


def initialised(seed: int) -> list[str]:
    """From the meta device over (dp 2, tp 2) and (efsdp 2, ep 2), by an initialiser of one's own."""

    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)

    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    reference = Mixtral()
    torch.manual_seed(seed)
    for module in reference.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    reference.apply(init)
    with torch.device("meta"):
        model = Mixtral()
    tensor_parallel(model, dense["tp"], sequence=False)
    expert_parallel(model, sparse["ep"])
    torch.manual_seed(seed if dist.get_rank() == 0 else 99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody has written the experts yet
        for experts in (m for m in model.modules() if isinstance(m, Experts)):
            mfsdp.fully_shard(experts, mesh=sparse["efsdp"])
    torch.manual_seed(seed if dist.get_rank() == 0 else 99)
    mfsdp.fully_shard(model, mesh=dense, units=[MixtureLayer], param_init_fn=init)
    pairs = zip(reference.named_parameters(), model.parameters(), strict=True)
    return [n for (n, q), p in pairs if not torch.equal(p.full_tensor(), q)]


def test_models_from_the_meta_device_are_the_unsharded_init(four_ranks):
    assert four_ranks.run(initialised, 0) == [[]] * 4


def saved(folder: str) -> list[str]:
    """Experts over (efsdp 2, ep 2), saved; the sizes that the checkpoint names, and what one process reads from it."""
    reference, model = sharded(2, layers=1)
    dcp.save({"m": model.state_dict()}, checkpoint_id=folder)
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    whole = {n: torch.zeros_like(p.data) for n, p in reference.named_parameters()}
    dcp.load({"m": whole}, checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp.load({"m": model.state_dict()}, checkpoint_id=folder)
    back = dict(model.named_parameters())
    return [
        n
        for n, p in reference.named_parameters()
        if entries[f"m.{n}"].size != p.shape
        or not torch.equal(whole[n], p)
        or not torch.equal(back[n].full_tensor(), p)
    ]


def test_checkpoints_have_whole_experts(four_ranks, tmp_path):
    assert four_ranks.run(saved, str(tmp_path)) == [[]] * 4
