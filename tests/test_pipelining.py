"""`mfsdp.PipelineStage` under torch's schedules, against the model in one piece on the data of all ranks."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mfsdp
from mfsdp.runtime import sync_collectives
from mfsdp.runtime.c10d_transport import C10dTransport
from mfsdp.runtime.transport_registry import carried_by
from tests.helpers.models import llama
from tests.helpers.parallel import reset
from tests.helpers.parity import error
from tests.helpers.pipelines import (
    LOOP,
    MICROBATCHES,
    SINGLE,
    Block,
    Model,
    Pipeline,
    V,
    batch,
    in_one_piece,
    loss_of,
    stage_of,
)

pytestmark = pytest.mark.dist

ALL = (*zip(itertools.repeat("single"), SINGLE), *zip(itertools.repeat("loop"), LOOP), *zip(itertools.repeat("v"), V))


def mesh_of(**sizes: int) -> Any:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def compiled(module: nn.Module, **options: Any) -> Any:
    given = {"lowering": "eager", "split_backward": True, **options}
    return torch.compile(module, backend="mfsdp", dynamic=False, options=given)


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="mfsdp", dynamic=False, options={"lowering": "eager", "split_backward": True})
    return module


def every_schedule(
    strategy: int, names: tuple[str, ...], tied: bool = False, shards: int = 2, **options: Any
) -> dict[str, dict[str, Any]]:
    found, pipelines = {}, dict[str, Pipeline]()
    for placement, name in ALL:
        if name in names:
            if placement not in pipelines:
                reset()
                how, mesh = partial(compiled, **options), mesh_of(pp=2, dp_shard=shards)
                pipelines[placement] = Pipeline(mesh, placement, {"strategy": strategy}, how, tied=tied)
            found[name] = pipelines[placement].trained(name)
    return found


@pytest.mark.parametrize(
    ("strategy", "tied", "names"),
    [
        pytest.param(2, False, LOOP, marks=pytest.mark.exhaustive),
        (2, False, V[:1]),
        pytest.param(2, False, (*SINGLE, *V[1:]), marks=pytest.mark.exhaustive),
        (3, True, (*SINGLE, *LOOP, *V)),
    ],
)
def test_every_schedule(four_ranks: Any, strategy: int, tied: bool, names: tuple[str, ...]) -> None:
    for found in four_ranks.run(every_schedule, strategy, names, tied, timeout=300):
        for name, seen in found.items():
            assert seen["worst"] < 1e-12, (name, seen)
            assert seen["scatter"] == seen["units"], (
                name,
                seen,
            )  # one reduction of each unit, whatever the microbatches
            if strategy == 2:
                assert seen["gather"] == seen["units"], (name, seen)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("ranks", "shards"), [("two_ranks", 1), pytest.param("four_ranks", 2, marks=pytest.mark.exhaustive)]
)
def test_inductor(request: pytest.FixtureRequest, ranks: str, shards: int) -> None:
    """Buffers of weight parts, which run late, are not written over."""
    run = request.getfixturevalue(ranks).run
    for found in run(every_schedule, 3, ("InterleavedZeroBubble",), shards=shards, lowering="inductor", timeout=300):
        assert found["InterleavedZeroBubble"]["worst"] < 1e-11, found


def with_tensor_parallelism(mesh: Any, model: Model) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tp"], plan)


def checkpointed(model: Model) -> None:
    model.checkpointed = True


def every_way(whole: bool) -> dict[str, dict[str, Any]]:
    """A zero-bubble schedule with stages of all kinds, also with backwards that are one program if so told."""
    mesh = mesh_of(pp=2, dp_shard=2)
    outer, tensor = mesh_of(pp=2, dp_outer=2, dp_shard=1), mesh_of(pp=2, dp_shard=1, tp=2)
    ways = {
        "uncompiled": Pipeline(mesh, "loop", tied=True),
        "one program": Pipeline(mesh, "loop", {}, partial(compiled, split_backward=False)),
        "checkpointed, in place, flat optimizer": Pipeline(
            mesh, "loop", {}, in_place, prepare=checkpointed, flat=True, tied=True
        ),
        "two axes, strategy 1": Pipeline(outer, "loop", {"strategy": 1}, compiled, tied=True),
        "tensor parallelism": Pipeline(tensor, "loop", {}, compiled, prepare=partial(with_tensor_parallelism, tensor)),
    }
    if not whole:  # as those of `test_how_a_model_is_cut`
        del ways["one program"]
    out = {}
    for name, way in ways.items():
        reset()
        out[name] = way.trained("InterleavedZeroBubble")
    reset()
    bounded = Pipeline(mesh, "v", {}, compiled)
    out["bounded"] = bounded.trained("ZBVZeroBubble", max_weight_parts=1)
    out["each microbatch"] = bounded.trained("ZBVZeroBubble", hold=False)
    return out


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_way(four_ranks: Any, whole: bool) -> None:
    for found in four_ranks.run(every_way, whole, timeout=300):
        for name, seen in found.items():
            assert seen["worst"] < 1e-12, (name, seen)
            if name not in ("each microbatch", "two axes, strategy 1", "tensor parallelism"):
                assert seen["scatter"] == seen["units"], (name, seen)
        assert found["each microbatch"]["scatter"] > found["bounded"]["scatter"], found


def given_up() -> None:
    """A step that leaves a weight part: gradients are refused, and the next step is right."""
    pipeline = Pipeline(mesh_of(pp=2, dp_shard=2), "loop", {}, compiled)
    schedule = pipeline.scheduled("InterleavedZeroBubble", scale=False)  # torch would read gradients at the end
    pipeline.step(schedule, 0)
    number = itertools.count()
    whole = mfsdp.PipelineStage.backward_weight_one_chunk

    def last_is_left_out(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(number) < 7:  # of two stages and four microbatches
            whole(self, *args, **kwargs)

    for p in pipeline.parameters().values():
        p.grad = None
    mfsdp.PipelineStage.backward_weight_one_chunk = last_is_left_out  # type: ignore[method-assign]
    try:
        pipeline.step(schedule, 1)
    finally:
        mfsdp.PipelineStage.backward_weight_one_chunk = whole  # type: ignore[method-assign]
    waiting = [p for p in pipeline.parameters().values() if p._mfsdp_owner.gradients.waits]
    with pytest.raises(RuntimeError, match="weight parts of 1 microbatches of its pipeline stage have not run"):
        torch.optim.SGD(waiting).step()
    optimizer = torch.optim.SGD(waiting)
    with pytest.raises(RuntimeError, match="have not run"):
        waiting[0].grad = waiting[0].detach()
    optimizer.zero_grad()
    assert all(p.grad is None for p in waiting)
    left = [stage.dw_runner for stage in schedule._stages if stage.dw_runner]
    with pytest.raises(RuntimeError, match="was dropped, by zero_grad"):
        next(iter(left[0].values()))()
    assert all(p.grad is None for p in waiting), "it does not wait again"
    assert pipeline.trained("InterleavedZeroBubble")["worst"] < 1e-12


def hooked() -> dict[str, Any]:
    """Hooks see whole gradients, once per step: their units' weight parts do not wait."""
    pipeline = Pipeline(mesh_of(pp=2, dp_shard=2), "loop", {}, compiled)
    seen = []
    for name, p in pipeline.parameters().items():
        if name.endswith("up.weight"):
            p.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.full_tensor().norm())))
    out = pipeline.trained("InterleavedZeroBubble")
    return {**out, "hooks": len(seen), "layers": sum(n.endswith("up.weight") for n in pipeline.parameters())}


def torchs_own() -> float:
    """torch's stage is right where each backward is whole."""
    return float(Pipeline(mesh_of(pp=2, dp_shard=2), "single", {}, compiled, stage=TorchStage).trained("1F1B")["worst"])


def test_other_ends(four_ranks: Any) -> None:
    four_ranks.run(given_up, timeout=300)
    for seen in four_ranks.run(hooked, timeout=300):
        assert seen["worst"] < 1e-12 and seen["hooks"] == 2 * seen["layers"], seen
    assert max(four_ranks.run(torchs_own)) < 1e-12


def test_torchs_stage_refuses_to_split() -> None:
    model = mfsdp.fully_shard(stage_of(1, 2), units=["layers.*"])
    x = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError) as raised:
        stage_backward_input([model(x).sum()], None, [x], model.parameters())
    assert "mfsdp.PipelineStage" in str(raised.value.__cause__ or raised.value)


def accumulated_and_frozen() -> None:
    """Two schedule steps add up; a frozen stage has no gradients, and the norm is that of the others."""
    mesh = mesh_of(pp=2, dp_shard=2)
    pipeline = Pipeline(mesh, "single", {}, compiled)
    schedule = pipeline.scheduled("1F1B")
    model = next(iter(pipeline.modules.values()))
    model.set_requires_gradient_sync(False)
    pipeline.step(schedule, 0)
    model.set_requires_gradient_sync(True)
    pipeline.step(schedule, 0)
    doubled = float(mfsdp.clip_grad_norm_(model, 1e9, mesh=mesh))
    assert abs(doubled / (2 * in_one_piece(2)[1][0]) - 1) < 1e-12
    model.zero_grad()
    if pipeline.pp.get_local_rank() == 0:
        model.requires_grad_(False)
    pipeline.step(schedule, 0)
    for kind in (2.0, 1.0, float("inf")):
        norm = mfsdp.clip_grad_norm_([model], 1e9, kind, mesh=mesh)
        mine = torch.zeros((), dtype=torch.float64)
        if pipeline.pp.get_local_rank() == 1:
            mine = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], kind)  # type: ignore
        everywhere = [torch.zeros_like(mine) for _ in range(4)]
        torch.distributed.all_gather(everywhere, mine)
        assert norm.dtype is torch.float64 and float(norm) == pytest.approx(float(max(everywhere)), rel=1e-13)
    with pytest.raises(ValueError, match="give stage.submod"):
        mfsdp.clip_grad_norm_([schedule._stage], 1.0, mesh=mesh)
    with pytest.raises(ValueError, match="name the pipeline's"):
        mfsdp.clip_grad_norm_(model, 1.0, mesh=mesh_of(dp_replicate=2, dp_shard=2))


def test_gradients_of_several_steps_and_norms(four_ranks: Any) -> None:
    four_ranks.run(accumulated_and_frozen)


def ends(pipeline: Pipeline) -> list[Any]:
    return [p for n, p in pipeline.parameters().items() if n in ("embed.weight", "head.weight")]


def tied_otherwise() -> None:
    """Gradients of several schedule steps and microbatches; dropped unread, or from outside of a schedule."""
    mesh = mesh_of(pp=2, dp_shard=2)
    pipeline = Pipeline(mesh, "single", tied=True)
    (model,), (mine,) = pipeline.modules.values(), ends(pipeline)
    for hold in (True, False):
        schedule = pipeline.scheduled("1F1B", scale=False, hold=hold)
        pipeline.step(schedule, 0)
        pipeline.step(schedule, 0)
        norm = float(mfsdp.clip_grad_norm_(model, 1e9, mesh=mesh))
        assert abs(norm / (2 * MICROBATCHES * in_one_piece(2, True)[1][0]) - 1) < 1e-12
        pipeline.step(schedule, 0)
        model.zero_grad()
        assert mine.grad is None
    x = batch(0, 0)[0] if model.embed is not None else torch.randn(2, 4, 16, dtype=torch.float64)
    model(x).sum().backward()
    for read in (lambda: mine.grad, torch.optim.SGD([mine]).step):
        with pytest.raises(RuntimeError, match=r"embed.weight = head.weight is incomplete: .* outside of a step"):
            read()
    model.zero_grad()
    with pytest.raises(NotImplementedError, match="outside of its stage's forward"):
        mine.square().sum().backward()
    for register in (mine.register_hook, mine.register_post_accumulate_grad_hook):
        with pytest.raises(NotImplementedError, match="a gradient hook would see the gradient of one copy"):
            register(lambda x: None)
    with carried_by(lambda group, kind: C10dTransport(group)):  # as on a device: no tags
        assert pipeline.trained("1F1B")["worst"] < 1e-12
    if pipeline.pp.get_local_rank():
        mine.requires_grad_(False)
    pipeline.step(pipeline.scheduled("1F1B"), 0)
    with pytest.raises(RuntimeError, match="trains on only one of ranks"):
        mine.grad  # noqa: B018


def tied_badly() -> None:
    """What `tie_weights` refuses, on all ranks."""
    mesh = mesh_of(pp=2, dp_shard=2)
    last = mesh["pp"].get_local_rank() == 1
    names = ["embed.weight", "head.weight"]

    def stage(units: tuple[str, ...] = ("embed", "head")) -> Any:
        model = stage_of(int(last), 2, tied=True)
        there = [name for name in units if getattr(model, name) is not None]
        return mfsdp.fully_shard(model, mesh=mesh, units=["layers.*", *there])

    def refused(words: str, model: Any, names: list[str] = names) -> None:
        with pytest.raises(ValueError, match=words):
            mfsdp.tie_weights(model, names, mesh=mesh)

    refused("differ in rows on this rank: .* make each a unit of its own", stage(()))
    model = stage()
    refused("copies found are embed.weight on rank 0. Give the names", model, names[:1])
    refused("copies found are embed.weight on rank 0, ", model, [*names, "lm_head.weight"])
    own = dict(model.named_parameters())[names[last]]
    own.requires_grad_(not last)
    refused("differ in whether it trains", model)
    own.requires_grad_()
    with torch.no_grad():
        own.to_local()[:1].add_(1 if last and own.to_local().shape[0] and mesh["dp_shard"].get_local_rank() else 0)
    refused("have different values", model)
    model = stage()
    model.zero_grad()
    model(batch(0, 0)[0] if not last else torch.randn(2, 4, 16, dtype=torch.float64)).sum().backward()
    refused("is in a unit with gradients", model)
    model.zero_grad()
    mfsdp.tie_weights(model, names, mesh=mesh)
    refused("is tied already", model)
    with pytest.raises(ValueError, match="tie_weights: mesh has the axes"):
        mfsdp.tie_weights(model, names, mesh=mesh_of(dp_replicate=2, dp_shard=2))
    both = nn.ModuleList([stage_of(0, 2, tied=True), stage_of(1, 2, tied=True)])
    mfsdp.fully_shard(both, mesh=mesh, units=[Block])
    make = partial(mfsdp.PipelineStage, num_stages=2, device=torch.device("cpu"), group=mesh["pp"].get_group())
    make(both[0], 0)
    with pytest.raises(ValueError, match=r"another stage has unit '\(root\)' of ModuleList .* mfsdp.tie_weights"):
        make(both[1], 1)


def test_tied_weights(four_ranks: Any) -> None:
    four_ranks.run(tied_otherwise)
    four_ranks.run(tied_badly)


def tied_ends() -> list[str]:
    """Which groups the ranks of four stages reduce over to tie the first with the last."""
    reset()
    mesh, over = mesh_of(pp=4, dp_shard=1), []
    model = stage_of(mesh["pp"].get_local_rank(), 4, tied=True)
    units = [name for name in ("embed", "head") if getattr(model, name) is not None]
    mfsdp.fully_shard(model, mesh=mesh, units=["layers.*", *units])
    reduced = sync_collectives.reduced
    sync_collectives.reduced = lambda *args: (over.append(args[-1]), reduced(*args))[1]
    try:
        mfsdp.tie_weights(model, ["embed.weight", "head.weight"], mesh=mesh)
    finally:
        sync_collectives.reduced = reduced
    return over[-1:]


def test_all_stages_begin_the_group_of_copies(four_ranks: Any) -> None:
    """NCCL makes a communicator in a group's first operation, in which all its ranks have to be."""
    first, *others = four_ranks.run(tied_ends)
    assert len(first) == 1 and all(other == first for other in others)


def saved_by_stages(folder: str) -> None:
    pipeline = Pipeline(mesh_of(pp=2, dp_shard=2), "v", {}, compiled)
    pipeline.trained("ZBVZeroBubble")
    dcp.save(pipeline.parameters(), checkpoint_id=f"{folder}/stages")
    whole = mfsdp.fully_shard(Model(), mesh=mesh_of(dp_shard=4), units=["layers.*"])
    dcp.load(dict(whole.named_parameters()), checkpoint_id=f"{folder}/stages")
    mine = pipeline.parameters()
    for name, p in whole.named_parameters():
        value = p.full_tensor()  # type: ignore[attr-defined]
        if name in mine:
            there: DTensor = mine[name]
            assert torch.equal(there.full_tensor(), value), name
    with torch.no_grad():
        for p in whole.parameters():
            p.mul_(2)
    dcp.save(dict(whole.named_parameters()), checkpoint_id=f"{folder}/whole")
    before = {name: p.full_tensor() for name, p in mine.items()}
    dcp.load(mine, checkpoint_id=f"{folder}/whole")
    for name, p in mine.items():
        assert torch.equal(p.full_tensor(), 2 * before[name]), name


def checkpoints_by_stages(folder: str) -> None:
    """`mfsdp.Checkpoints` with weights and AdamW's state: stages to the whole model, and back."""
    stages = Pipeline(mesh_of(pp=2, dp_shard=2), "single", {}, compiled)
    (mine,) = stages.modules.values()
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    stages.step(stages.scheduled("GPipe"), 0)
    optimizer.step()
    mfsdp.Checkpoints(folder).save(1, mine, optimizer)
    whole = mfsdp.fully_shard(
        Model(), mesh=mesh_of(dp_shard=4), units=["layers.*"],
        mp_policy=mfsdp.MixedPrecisionPolicy(main_params_dtype=None),
    )  # fmt: skip
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    assert mfsdp.Checkpoints(folder).load(whole, theirs) == 1
    of_mine, of_whole = dict(mine.named_parameters()), dict(whole.named_parameters())
    for name, p in of_whole.items():
        found = [p.full_tensor(), theirs.state[p]["exp_avg"].full_tensor()]  # type: ignore[attr-defined]
        if name in of_mine:
            here = of_mine[name]
            mean = optimizer.state[here]["exp_avg"].full_tensor()
            assert torch.equal(here.full_tensor(), found[0]) and torch.equal(mean, found[1]), name  # type: ignore[attr-defined]


def test_checkpoints(four_ranks: Any, tmp_path: Path) -> None:
    four_ranks.run(saved_by_stages, str(tmp_path / "dcp"))
    four_ranks.run(checkpoints_by_stages, str(tmp_path / "own"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"dw_builder": lambda: lambda: None}, "leave out dw_builder"),
        ({"max_weight_parts": 0}, "max_weight_parts=0: give an integer of at least 1, or None"),
        ({"hold": 1}, "hold=1: choose True or False"),
        ({}, "nothing in Model is sharded"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mfsdp.PipelineStage(stage_of(0, 2), 0, 2, torch.device("cpu"), **arguments)


class LlamaStage(nn.Module):
    """A range of the layers of a Hugging Face Llama; paths stay."""

    def __init__(self, llama: Any, number: int):
        super().__init__()
        half = len(llama.model.layers) // 2
        mine = range(half) if number == 0 else range(half, 2 * half)
        llama.model.layers = nn.ModuleDict({str(i): llama.model.layers[i] for i in mine})
        if number == 0:
            llama.model.norm = llama.lm_head = None
        else:
            llama.model.embed_tokens = None
        self.model, self.lm_head = llama.model, llama.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.model.embed_tokens is None else self.model.embed_tokens(x)
        places = torch.arange(x.shape[1])[None]
        angles = self.model.rotary_emb(x, places)
        for layer in self.model.layers.values():
            x = layer(x, attention_mask=None, position_ids=places, position_embeddings=angles)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))


def cut(how: str) -> float:
    """The largest relative error of gradients of a model in two stages: a Hugging Face Llama cut by hand, with tied
    embeddings or without, or our own cut by torch's tracer, which does not take transformers' 5.23.
    """
    reset()
    mesh = mesh_of(pp=2, dp_shard=2)
    rank, part = mesh["pp"].get_local_rank(), mesh["dp_shard"].get_local_rank()
    torch.manual_seed(0)
    whole: Any = Model() if how == "traced" else llama(layers=2, tied=how == "tied").double()
    stage: Any = copy.deepcopy(whole)
    if how == "traced":
        spec = {"layers.2": SplitPoint.BEGINNING}
        stage = pipeline(stage, mb_args=(batch(0, 0)[0][:2],), split_spec=spec).get_stage_module(rank)
    else:
        stage = LlamaStage(stage, rank)
    units = ["layers.*" if how == "traced" else "model.layers.*"]
    policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=None)
    if how == "tied":
        units.append("lm_head" if rank else "model.embed_tokens")
    mfsdp.fully_shard(stage, mesh=mesh, units=units, mp_policy=policy)
    if how == "tied":
        mfsdp.tie_weights(stage, ["model.embed_tokens.weight", "lm_head.weight"], mesh=mesh)
    group = mesh["pp"].get_group()
    one = mfsdp.PipelineStage(compiled(stage, split_backward=False), rank, 2, torch.device("cpu"), group=group)
    x, y = batch(0, part)
    Schedule1F1B(one, 4, loss_fn=loss_of).step(*((x,) if rank == 0 else ()), target=y if rank == 1 else None, losses=[])
    for x, y in (batch(0, 0), batch(0, 1)):
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            out = whole(a)
            (loss_of(out if how == "traced" else out.logits, b) / 8).backward()
    want = dict(whole.named_parameters())
    wrong = [0.0]
    for name, p in stage.named_parameters():
        mine = p.grad.full_tensor()
        there = want[name if name in want else "model.embed_tokens.weight"]
        wrong.append(error(mine, there.grad))
    return max(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("untied", marks=pytest.mark.exhaustive), "tied", "traced"])
def test_how_a_model_is_cut(four_ranks: Any, how: str) -> None:
    assert max(four_ranks.run(cut, how)) < 1e-12
