"""Transports: messages over gloo against torch's collectives, and the dtype in which gradients are summed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp
from mfsdp.buffers.sharding_plan import ShardingPlan
from mfsdp.config.layout import plan
from mfsdp.config.options import Precision
from mfsdp.config.reductions import reduction
from mfsdp.dtensor.mesh import axes
from mfsdp.runtime import c10d_transport, execution, groups
from mfsdp.runtime.c10d_transport import C10dTransport
from mfsdp.runtime.fake_transport import FakeTransport
from mfsdp.runtime.sync_collectives import summed
from mfsdp.runtime.transport_registry import carried_by, transport_of
from tests.helpers.models import GPT, Block, Lumpy

pytestmark = pytest.mark.dist


def uneven_exchange() -> tuple[bool, bool, bool]:
    """Every rank sends rank r ``1 + own rank + 2 * r`` rows: as messages, by the backend, and mirrored."""
    me, world = dist.get_rank(), dist.get_world_size()
    counts = [[1 + sender + 2 * r for r in range(world)] for sender in range(world)]
    sent = torch.randn(sum(counts[me]), 3)
    received = [counts[sender][me] for sender in range(world)]
    want = torch.empty(sum(received), 3)
    dist.all_to_all_single(want, sent, received, counts[me])
    group = dist.group.WORLD
    lines = transport_of(groups.default_group(), torch.device("cpu")), C10dTransport(group)
    same = []
    for line in lines:
        out = torch.empty_like(want)
        line.all_to_all(out, sent, received, counts[me], execution.current())()
        same.append(torch.equal(out, want))
    even, mine = torch.empty(world * counts[me][me], 3), sent.split(counts[me])[me]
    FakeTransport(group).all_to_all(even, sent, [counts[me][me]] * world, counts[me], execution.current())()
    return *same, torch.equal(even, mine.repeat(world, 1))


def test_uneven_exchanges(four_ranks):
    assert four_ranks.run(uneven_exchange) == [(True, True, True)] * 4


def segments_at_once() -> tuple[bool, bool]:
    """Gathers and reduce-scatters of several segments."""
    group, me, world = groups.default_group(), dist.get_rank(), dist.get_world_size()
    shards = [torch.randn(n) for n in (5, 1, 8)]
    fulls = [torch.empty(world * s.numel()) for s in shards]
    execution.current().gather(list(zip(fulls, shards, strict=True)), group)()
    wanted = [torch.empty_like(f) for f in fulls]
    for want, shard in zip(wanted, shards, strict=True):
        dist.all_gather_into_tensor(want, shard)
    parts = [torch.empty_like(s) for s in shards]
    mine = [f * (me + 1) for f in fulls]
    execution.current().scatter(list(zip(mine, parts, strict=True)), torch.float32, group)()
    sums = [m.clone() for m in mine]
    for total in sums:
        dist.all_reduce(total)
    rows = [t.view(world, -1)[me] for t in sums]
    close = all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(parts, rows, strict=True))
    return all(map(torch.equal, fulls, wanted)), close


def test_segments_travel_at_once(four_ranks):
    assert four_ranks.run(segments_at_once) == [(True, True)] * 4


def narrow(numel: int) -> bool:
    """An all-reduce of bfloat16 is the sum in float32, rounded once."""
    torch.manual_seed(dist.get_rank())
    mine = torch.randn(numel).to(torch.bfloat16)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    first, *rest = [t.float() for t in every]
    for t in rest:
        first += t
    f32, bf16 = torch.float32, torch.bfloat16
    place = ShardingPlan.of("no_shard", "no_shard", axes(None, None, torch.device("cpu")), "cpu")
    spec = place.spec(plan([("w", (numel,))], 1), Precision(f32, bf16, bf16, bf16, f32), True)
    assert spec.sum_dtype(2) is f32
    with execution.announced("a sum", *spec.peer_groups):
        summed(mine, reduction(spec.encode(), 2))()
    return torch.equal(mine, first.to(torch.bfloat16))


@pytest.mark.parametrize("numel", [64, 37])
def test_narrow_all_reduces_are_summed_wide(four_ranks, numel):
    assert four_ranks.run(narrow, numel) == [True] * 4


def by_hand(grad_sum: str | None, compiled: bool, native: bool) -> tuple[bool, bool]:
    """Four ranks' gradients in bfloat16, added up in float32, and as they travel, in the order of ranks; whether ours
    are the former, the latter.
    """
    torch._dynamo.reset()
    rank, world, bf16 = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    inputs = torch.randn(world, 8, generator=torch.Generator().manual_seed(1))
    with carried_by(lambda group, kind: C10dTransport(group)) if native else nullcontext():
        model = torch.nn.Linear(8, 4, bias=False)
        policy = mfsdp.MixedPrecisionPolicy(grad_comm_dtype=bf16, grad_sum=grad_sum)
        mfsdp.fully_shard(model, mp_policy=policy)
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}) if compiled else model
        run(inputs[rank : rank + 1]).sum().backward()
        grad = model.weight.grad.full_tensor()
    parts = [x.to(bf16) for x in inputs]
    sums = sum(parts[1:], parts[0].float()), sum(parts[1:], parts[0]).float()
    assert not torch.equal(*sums)
    wide, narrow = (torch.equal(grad, (s / world).expand(4, 8)) for s in sums)
    return wide, narrow


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("grad_sum", [None, "wide", "native"])
def test_sums_are_taken_as_the_policy_says(four_ranks, grad_sum, compiled):
    native = grad_sum == "native"
    assert four_ranks.run(by_hand, grad_sum, compiled, False) == [(not native, native)] * 4


def reductions(grad_sum: str) -> list[str]:
    """Which of the backend's collectives bring narrow gradients together."""
    called: list[str] = []

    def told(name: str, call: Any) -> Any:
        return lambda *args, **more: (called.append(name), call(*args, **more))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", told("all to all", dist.all_to_all_single))
        patch.setattr(c10d_transport, "scatter_one", told("reduce-scatter", c10d_transport.scatter_one))
        by_hand(grad_sum, True, True)
    return called


@pytest.mark.parametrize(("grad_sum", "call"), [("wide", "all to all"), ("native", "reduce-scatter")])
def test_the_backend_adds_up_what_travels(four_ranks, grad_sum, call):
    assert four_ranks.run(reductions, grad_sum) == [[call]] * 4


def trained(strategy: int, segments: bool) -> list[torch.Tensor]:
    """Two steps of a model with gradients that travel in bfloat16; with a unit of one segment, or of several."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Lumpy() if segments else GPT(tied=False, width=32, layers=1)
    policy = mfsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    mfsdp.fully_shard(model, units=None if segments else [Block], strategy=strategy, mp_policy=policy)
    assert (len(model._mfsdp_unit.buffers[0].spec.splits) > 1) == segments or not strategy
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(4, 33) if segments else torch.randint(31, (2, 8))
        run(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]


def natively(strategy: int, segments: bool) -> tuple[bool, set[str]]:
    """The same over gloo's own collectives, as over NCCL's: with words that are gathered and looked at later."""
    want = trained(strategy, segments)
    used: set[str] = set()

    class Told(C10dTransport):
        def __getattribute__(self, name: str) -> Any:
            used.update({name} & {"gather", "scatter", "all_reduce", "exchange"})
            return super().__getattribute__(name)

    with carried_by(lambda group, kind: Told(group)):
        got = trained(strategy, segments)
    return all(map(torch.equal, got, want)), used


@pytest.mark.parametrize(
    ("strategy", "segments"),
    [
        (0, False), (2, True), (3, True),
        *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in ((0, True), (2, False), (3, False))),
    ],
)  # fmt: skip
def test_collectives_of_the_backend_bring_the_same(ranks, strategy, segments):
    wanted = {"gather", "scatter", "exchange"} | ({"all_reduce"} if strategy else set())  # of norms, where cut
    for equal, used in ranks.run(natively, strategy, segments, timeout=120):
        assert equal and used == wanted, used


def large(lowering: str) -> tuple[float, bool]:
    """Gradients of 40,000 in float16 on each of two ranks, whose sum float16 does not hold."""
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4, bias=False)
    policy = mfsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.float16)
    mfsdp.fully_shard(model, strategy="no_shard", mp_policy=policy)
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    for held in (True, False):
        with mfsdp.no_sync(model) if held else nullcontext():
            (run(torch.ones(1, 4)).sum() * 20_000).backward()
    grad = model.weight.grad.full_tensor()
    return grad.max().item(), bool((grad == 40_000).all())


@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_sums_in_float16_do_not_overflow(two_ranks, lowering):
    assert two_ranks.run(large, lowering) == [(40_000.0, True)] * 2
