"""`trace` and `explain` of models that other parallelisms have cut, on ranks that are not there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from examples.parallel.model import Experts, Layer, Llama, Mixtral, MixtureLayer, expert_parallel, tensor_parallel
from mfsdp import pipeline
from mfsdp.config.hardware import hardware
from mfsdp.cost_model import op_cost
from mfsdp.ir import ops, printer
from mfsdp.ir.program import Program
from mfsdp.ir.roles import Lane
from tests.helpers.parallel import reset, tokens
from tests.helpers.transformers_parallel import build, parallelized

IDS = tokens(0, length=8)


@pytest.fixture
def eight() -> Iterator[None]:
    torch._dynamo.config.capture_scalar_outputs = True
    with mfsdp.fake_ranks(8):
        reset()
        yield


def cut(kind: str, device: str = "meta") -> Any:
    """A model over eight ranks: (dp_shard 4, tp 2), (dp_replicate 2, dp_shard 2, tp 2), or both of
    (dp_shard 8) and (efsdp 4, ep 2).
    """
    with torch.device(device):
        model: Any = Mixtral(layers=1) if kind == "experts" else Llama(layers=1)
    if kind == "experts":
        sparse = init_device_mesh("cpu", (4, 2), mesh_dim_names=("efsdp", "ep"))
        expert_parallel(model, sparse["ep"])
        for experts in (m for m in model.modules() if isinstance(m, Experts)):
            mfsdp.fully_shard(experts, mesh=sparse["efsdp"], device=device)
        mesh, units = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",)), [MixtureLayer]
    elif kind == "tensor":
        mesh, units = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp")), [Layer]
    else:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        units = [Layer]
    if kind != "experts":
        tensor_parallel(model, mesh["tp"])
    outer = {"outer_strategy": "optim"} if kind == "hfsdp" else {}
    return mfsdp.fully_shard(model, mesh=mesh, units=units, device=device, **outer)


def ran(model: nn.Module) -> list[Program]:
    """The programs of a step, before any pass."""
    seen: list[Program] = []
    passes = (("look", lambda p: seen.append(p.copy())), *pipeline.PIPELINE)
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager", "passes": passes})
    run(IDS).sum().backward()
    return seen


def text(program: Program) -> list[str]:
    """Its lines, but not the names of values, which the outermost frame gives."""
    return [line for line in printer.render(program, "capture").split("\n") if line and not line.startswith("; mfsdp")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["tensor", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("hsdp", "hfsdp"))]
)
def test_a_trace_is_what_runs(eight, kind):
    model = cut(kind, "cpu")
    traced = mfsdp.trace(copy.deepcopy(model), (IDS,))
    for a, b in zip(traced, ran(model), strict=True):
        assert [n.target for n in a.nodes] == [n.target for n in b.nodes]
        units = [
            (u.fqn, u.spec.world, u.spec.outer, u.spec.stride, u.spec.outer_stride, u.spec.divide) for u in a.units
        ]
        assert units == [
            (u.fqn, u.spec.world, u.spec.outer, u.spec.stride, u.spec.outer_stride, u.spec.divide) for u in b.units
        ]


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other versions of torch number views otherwise")
@pytest.mark.parametrize("kind", ["tensor", "experts"])
def test_goldens(eight, golden, kind):
    for program in mfsdp.trace(cut(kind), (IDS.to("meta"),), name=kind):
        golden(f"{kind}.{program.phase}", pipeline.run(program)[-1].listing)


@pytest.mark.slow
@pytest.mark.parametrize("kind, lanes, header", [
    pytest.param("tensor", {Lane.GATHER, Lane.REDUCE, Lane.TENSOR}, "on 8 ranks [4] x tp 2",
                 marks=pytest.mark.exhaustive),
    ("hsdp", {Lane.GATHER, Lane.REDUCE, Lane.OUTER, Lane.TENSOR}, "on 8 ranks [2, 2] x tp 2"),
    ("experts", {Lane.GATHER, Lane.REDUCE, Lane.ALL_TO_ALL}, "on 8 ranks [8]"),
])  # fmt: skip
def test_all_axes_are_on_the_clock(eight, tmp_path, kind, lanes, header):
    report = mfsdp.explain(cut(kind), (IDS.to("meta"),), hardware="h100", suggest=False)
    assert header in report.summary().split("\n")[0]
    found = {x.queue for view in report.views for x in view.lines if x.kind == "collective"}
    assert found == {lane.value for lane in lanes}
    report.html(tmp_path / "page.html")
    report.trace(tmp_path / "step.json")
    assert "tp 2" in (tmp_path / "page.html").read_text() or kind == "experts"


@pytest.mark.slow
def test_ranks_beside_tensor_parallelism_are_no_neighbours(eight):
    """Of (dp_shard 4, tp 2) on nodes of four: gathers go between nodes, all-reduces of tp do not."""
    forward, _ = mfsdp.trace(cut("tensor"), (IDS.to("meta"),))
    pipeline.run(forward)
    machine = hardware({"like": "h100", "name": "fours", "ranks_per_node": 4})
    times = op_cost.op_times(forward, machine)
    links = {n.target: times[n].transfer.link for n in forward.nodes if n.target in (ops.all_gather, ops.collective)}
    assert links == {ops.all_gather: "between", ops.collective: "inside"}
    assert {u.spec.stride for u in forward.units} == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("mixture", "qwen3"))]
)
def test_models_that_transformers_has_cut(eight, kind):
    """Functions that it has put on modules are copied with them: a trace reads the copy's parameters only."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    model: Any = build(kind)
    sparse = init_device_mesh("cpu", (4, 2), mesh_dim_names=("efsdp", "ep")) if kind == "mixture" else None
    parallelized(model, mesh["tp"], None if sparse is None else sparse["ep"])
    if sparse is not None:
        mfsdp.fully_shard(model.model.layers[0].mlp.experts, mesh=sparse["efsdp"], device="cpu")
    mfsdp.fully_shard(model, mesh=mesh, units=["model.layers.*"], device="cpu")
    forward, backward = mfsdp.trace(model, (IDS,), {"use_cache": False})
    assert len(forward.units) == (3 if sparse is not None else 2)
    summed = [n for n in backward.nodes if "all_reduce" in n.name]
    assert summed and not any(p.grad is not None for p in model.parameters())
    if kind == "mixture":  # again: the model is as it was
        forward, _ = mfsdp.trace(model, (IDS,), {"use_cache": False})
        assert len(forward.units) == 3


def test_ranks_are_not_said_twice(eight):
    with pytest.raises(ValueError, match="sharded beside another parallelism"):
        mfsdp.trace(cut("tensor"), (IDS,), world=4)
    with pytest.raises(RuntimeError, match="torch.distributed is initialised"), mfsdp.fake_ranks(4):
        pass


@pytest.mark.slow
def test_a_model_that_is_cut_and_not_sharded(eight):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    with torch.device("meta"):
        model = Llama(layers=1)
    tensor_parallel(model, mesh["tp"])
    forward, _ = mfsdp.trace(model, (IDS.to("meta"),), world=4, units=[Layer])
    assert {(u.spec.world, u.spec.stride) for u in forward.units} == {(4, 2)}


def test_fake_ranks_are_gone_behind():
    with pytest.raises(KeyError), mfsdp.fake_ranks(2):
        raise KeyError
    assert not dist.is_initialized()
    with mfsdp.fake_ranks(4, rank=2):
        assert (dist.get_rank(), dist.get_world_size()) == (2, 4)
    assert not dist.is_initialized()
