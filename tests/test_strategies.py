"""Every strategy against the unsharded model and against each other: values, collectives, memory."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from tests.helpers.models import CASES, GPT
from tests.helpers.parity import averaged, batches, build, clip_and_step, compiled, error, farthest, whole
from tests.helpers.ranks import collectives_told
from tests.helpers.strategies import TWO_LEVELS, sharding

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}
DOUBLE = {  # ten steps of AdamW make a different last bit of fp32 a difference that is seen
    name: replace(
        case,
        build=lambda build=case.build: build().double(),
        batch=lambda batch=case.batch: x.double() if (x := batch()).is_floating_point() else x,
    )
    for name, case in {**CASES, "gpt": replace(CASES["gpt"], build=lambda: GPT(layers=1))}.items()
}


def accumulated(model: Any, run: Any, case: Any, step: int, microbatches: int, place: str) -> None:
    """Forward and backward of a step's microbatches; the last one synchronises."""
    for m in range(microbatches):
        last = m == microbatches - 1
        hold = True if place == "held" else None
        with contextlib.nullcontext() if last else mfsdp.no_sync(model, hold=hold):
            loss = case.loss(run, batches(case, 10 * step + m)[dist.get_rank()])
            (loss / microbatches).backward()


def parity(place: str, name: str, microbatches: int, lowering: str, steps: int = 3) -> tuple[float, dict[str, int]]:
    """The largest relative error of any parameter after some steps of AdamW with clipping, against the unsharded
    model; collectives of the last step.
    """
    case = DOUBLE[name]
    reference, model = build(case, **sharding(place))
    run = compiled(model, lowering)
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference)]
    counts: Counter[str] = Counter()
    for step in range(steps):
        counts.clear()
        with collectives_told(lambda kind, group: counts.update([kind])):
            accumulated(model, run, case, step, microbatches, place)
            for m in range(microbatches):
                (case.loss(reference, batches(case, 10 * step + m)[dist.get_rank()]) / microbatches).backward()
            clip_and_step(model, reference, optimizers, 1e-9)
    return farthest(model, reference), dict(counts)


UNITS = 2  # a block and the root; each is gathered in forward and in backward; clipping reduces over each axis


@pytest.mark.dist
@pytest.mark.parametrize(
    ("place", "counts"),
    [
        ("no_shard", {"all_reduce": UNITS}),
        pytest.param("optim", {"gather": UNITS, "scatter": UNITS, "all_reduce": 1}, marks=pytest.mark.exhaustive),
        ("optim_grads", {"gather": UNITS, "scatter": 3 * UNITS, "all_reduce": 1}),
        ("optim_grads_params", {"gather": 6 * UNITS, "scatter": 3 * UNITS, "all_reduce": 1}),
        ("held", {"gather": 6 * UNITS, "scatter": UNITS, "all_reduce": 1}),
    ],
)
def test_two_ranks(two_ranks, place, counts):
    """Values, and the collectives of a step with three microbatches."""
    for worst, seen in two_ranks.run(parity, place, "gpt", 3, "eager", 5):
        assert worst < 1e-8 and seen == counts


@pytest.mark.dist
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("no_shard", "twice"),
        ("no_shard", "frozen"),
        ("optim", "twice"),
        ("optim", "lora"),
        ("optim_grads", "unused"),
        ("optim_grads", "lora"),
    ],
)
def test_two_ranks_of_other_models(two_ranks, place, name):
    assert max(two_ranks.run(parity, place, name, 2, "eager"))[0] < 1e-8


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "counts"),
    [
        ("hsdp", {"gather": 6 * UNITS, "scatter": 3 * UNITS, "all_reduce": UNITS + 1}),
        ("hfsdp of optim_grads", {"gather": 2 * UNITS, "scatter": 4 * UNITS, "all_reduce": 2}),
    ],
)
def test_four_ranks(four_ranks, place, counts):
    for worst, seen in four_ranks.run(parity, place, "gpt", 3, "eager", timeout=300):
        assert worst < 1e-8 and seen == counts


@pytest.mark.dist
@pytest.mark.parametrize("place", ["no_shard", "optim", "optim_grads"])
def test_uncompiled(two_ranks, place):
    assert max(two_ranks.run(parity, place, "gpt", 2, "none"))[0] < 1e-8


@pytest.mark.dist
@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["optim_grads_params", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in ("no_shard", "optim"))]
)
def test_inductor(two_ranks, place):
    assert max(two_ranks.run(parity, place, "mlp", 2, "inductor", timeout=300))[0] < 1e-8


def mixed(blocks: list[int | None], root: int, synced: list[list[bool]], hold: bool, kept: bool) -> float:
    """Blocks with strategies of their own (``None``: of the root), and steps of microbatches, synchronised or not."""
    torch.manual_seed(0)
    reference = GPT(layers=len(blocks)).double()
    model = copy.deepcopy(reference)
    for strategy, block in zip(blocks, model.blocks, strict=True):
        if strategy is not None:
            mfsdp.fully_shard(block, strategy=strategy, reshard_after_forward=not kept)
    mfsdp.fully_shard(model, strategy=root)
    run = compiled(model, "eager")
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (model, reference)]
    for step, microbatches in enumerate(synced):
        for m, sync in enumerate([*microbatches, True]):
            mine = batches(CASES["gpt"], 10 * step + m)[dist.get_rank()]
            with contextlib.nullcontext() if sync else mfsdp.no_sync(model, hold=hold):
                run(mine).square().mean().backward()
            reference(mine).square().mean().backward()
        averaged(reference)
        for o in optimizers:
            o.step()
            o.zero_grad()
    return farthest(model, reference)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "root", "synced", "hold", "kept"),
    [
        ([0, 2], 3, [[False, True], [False]], True, False),
        pytest.param([1, None], 2, [[False], []], False, True, marks=pytest.mark.exhaustive),
    ],
)
def test_strategies_mix(two_ranks, blocks, root, synced, hold, kept):
    assert max(two_ranks.run(mixed, blocks, root, synced, hold, kept)) < 1e-8


def values(place: str) -> list[torch.Tensor]:
    case = CASES["mlp"]
    _, model = build(case, **sharding(place))
    run = compiled(model, "eager")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(3):
        accumulated(model, run, case, step, 1, place)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p).detach() for p in model.parameters()]


def differing() -> list[str]:
    """Strategies whose trained parameters are not bitwise those of strategy 3."""
    want = values("optim_grads_params")
    out = []
    for place in ("no_shard", "optim", "optim_grads"):
        torch._dynamo.reset()
        if not all(torch.equal(a, b) for a, b in zip(want, values(place), strict=True)):
            out.append(place)
    return out


@pytest.mark.dist
def test_all_strategies_give_bitwise_the_same(two_ranks):
    assert two_ranks.run(differing, timeout=300) == [[], []]


def graphs(place: str) -> list[int]:
    """How many graphs have been compiled after each of six backward calls, of which every third synchronises."""
    case = CASES["mlp"]
    _, model = build(case, **sharding(place))
    run = compiled(model, "eager")
    counts, before = [], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for m in range(6):
        with contextlib.nullcontext() if m % 3 == 2 else mfsdp.no_sync(model):
            case.loss(run, batches(case, m)[dist.get_rank()]).backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    return counts


@pytest.mark.dist
@pytest.mark.parametrize("place", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_switching_synchronisation_compiles_nothing(two_ranks, place):
    assert two_ranks.run(graphs, place) == [[1] * 6] * 2


def memory(place: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that last from step to step, by what they are for; what the strategy says they are."""
    case = CASES["mlp"]
    _, model = build(case, **sharding(place))
    run = compiled(model, "eager")
    accumulated(model, run, case, 0, 1, place)
    buffers = {r.buffer for m in model.modules() for r in mfsdp.buffers.flat_buffer.refs(m).values()}
    sizes: Counter[str] = Counter()
    want: Counter[str] = Counter()
    for b in buffers:
        sizes["main"] += b.weights.main.untyped_storage().nbytes()
        sizes["grads"] += b.gradients.flat.untyped_storage().nbytes()
        sizes["copy"] += b.weights.source.untyped_storage().nbytes() if b.weights.source is not b.weights.main else 0
        full = b.layout.full_numel * 4
        world, levels = dist.get_world_size(), 2 if place in TWO_LEVELS else 1
        shard = world if levels == 1 else world // 2
        cut = 1 if place == "no_shard" else world if "hfsdp" in place or levels == 1 else shard
        want["main"] += full // cut
        want["grads"] += full // cut
        whole_copy = place in ("optim", "optim_grads") or "of optim_grads" in place
        want["copy"] += full if whole_copy else full // shard if place == "hfsdp" else 0
    return dict(sizes), dict(want)


@pytest.mark.dist
@pytest.mark.parametrize("place", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_memory(two_ranks, place):
    for sizes, want in two_ranks.run(memory, place):
        assert sizes == want


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["hfsdp", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in ("hsdp", "hfsdp of optim_grads"))]
)
def test_memory_on_two_levels(four_ranks, place):
    for sizes, want in four_ranks.run(memory, place, timeout=300):
        assert sizes == want


def written() -> list[float]:
    """Whoever writes main weights, the next forward reads them: copy_, load_state_dict, summoned or local tensors."""
    case = CASES["mlp"]
    reference, model = build(case, strategy=1)
    run = compiled(model, "eager")
    x = batches(case)[0]
    errors = []

    def compare() -> None:
        with torch.no_grad():
            errors.append(error(run(x), reference(x)))

    compare()
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.mul_(2)
            p.copy_(q)
    compare()
    torch.manual_seed(5)
    other = case.build()
    reference.load_state_dict(other.state_dict())
    model.load_state_dict(other.state_dict())
    compare()
    with mfsdp.summon_full_params(model), torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.add_(0.1)
            p.add_(0.1)
    compare()
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.mul_(0.5)
            p.to_local().mul_(0.5)
    compare()
    ways = [
        lambda p: p.data.mul_(2),
        lambda p: p.detach().mul_(2),
        lambda p: torch._foreach_mul_([p.detach()], 2),
        lambda p: torch.mul(p, 2, out=p),
    ]
    for way in ways:
        with torch.no_grad():
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                q.mul_(2)
                way(p)
        compare()
    with torch.no_grad():
        for p, q in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
            q.mul_(0.1)
            p.copy_(q)
    compare()
    return errors


@pytest.mark.dist
def test_written_values_are_read_by_the_next_forward(two_ranks):
    for errors in two_ranks.run(written):
        assert len(errors) == 10 and max(errors) < 1e-6


def forgotten() -> tuple[int, float]:
    """What no_sync has left unreduced goes when the model's gradients are set to zero."""
    case = CASES["mlp"]
    reference, model = build(case, strategy=1)
    run = compiled(model, "eager")
    mine = batches(case)[dist.get_rank()]
    with mfsdp.no_sync(model):
        case.loss(run, mine).backward()
    there = sum(p.grad is not None for p in model.parameters())
    model.zero_grad()
    case.loss(run, mine).backward()
    case.loss(reference, mine).backward()
    averaged(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return there, max(error(p.grad.full_tensor(), q.grad) for p, q in pairs)


@pytest.mark.dist
def test_zero_grad_forgets_what_is_held(two_ranks):
    for there, worst in two_ranks.run(forgotten):
        assert there == 0 and worst < 1e-5


def left_waiting() -> str:
    """One unit takes part in a microbatch that does not synchronise, another in the one that does."""
    model = mfsdp.fully_shard(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), units=["*"], strategy=1)
    with mfsdp.no_sync(model):
        model["a"](torch.randn(2, 4)).sum().backward()
    model["b"](torch.randn(2, 4)).sum().backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as refused:
        return str(refused)
    return "accepted"


@pytest.mark.dist
def test_gradients_that_nobody_synchronises_are_not_lost_silently(two_ranks):
    for text in two_ranks.run(left_waiting):
        assert "unit 'a' has gradients from backward calls under no_sync" in text


def refused() -> list[str]:
    ranks = dist.get_world_size()
    build = CASES["mlp"].build
    texts = []
    for arguments in (
        sharding("hsdp", strategy=0, outer_strategy="optim"),
        {"mesh": init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp_shard", "dp_outer"))},
        {"mesh": init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))},
    ):
        try:
            mfsdp.fully_shard(build(), **arguments)
        except (ValueError, NotImplementedError) as error:
            texts.append(str(error))
    return texts


@pytest.mark.dist
def test_what_is_not_supported_is_refused(two_ranks):
    for level, order, other in two_ranks.run(refused):
        assert "outer_strategy='optim' cuts optimizer state, and strategy='no_shard' keeps it whole" in level
        assert "'dp_outer' has to come before 'dp_shard'" in order
        assert "Name the one to shard over 'dp_shard'" in other


@pytest.mark.parametrize("strategy", [4, -1, True, "zero3"])
def test_unknown_strategies_are_refused(strategy):
    with pytest.raises(ValueError, match=r"strategy=.*choose one of \[0, 1, 2, 3\] or \('no_shard', 'optim'"):
        mfsdp.fully_shard(CASES["mlp"].build(), strategy=strategy)
