"""What only a GPU shows: ``make gpu``, with test_nccl.py. One is enough for all but overlap, which needs two."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import mfsdp
from mfsdp import pipeline
from mfsdp.ir import byte_costs, ops
from mfsdp.ir.program import Program
from mfsdp.runtime import program_graphs, static_buffers, user_buffers
from tests.helpers.models import GPT, Block, Lumpy
from tests.helpers.parity import averaged, error
from tests.helpers.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="over loopback sockets NCCL does not overlap: two GPUs"
)


def pair(width: int = 256, layers: int = 4) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model, its sharded copy, and tokens, on the current GPU."""
    torch.manual_seed(0)
    reference = GPT(tied=False, layers=layers, width=width).cuda()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])
    return reference, model, torch.randint(31, (4, 8), device="cuda")


def step(run: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = run(ids).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_values_are_those_of_the_plain_model(lowering):
    reference, model, ids = pair()
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
    for _ in range(2):
        assert error(step(run, ids), step(reference, ids)) < 1e-5
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(p.grad.full_tensor(), q.grad) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 512, 128), (37, 1000, 61), (8, 0, 16)])
def test_wide_products(dtype, shape):
    """Written in float32 to a place in a buffer: what a product in 16 bits and a copy give, but for its rounding."""
    m, k, n = shape
    for transposed in (False, True):
        a = torch.randn((k, m) if transposed else (m, k), dtype=dtype, device="cuda")
        a = a.T if transposed else a
        b = torch.randn(k, n, dtype=dtype, device="cuda")
        for stride in ((n, 1), (1, m)):
            gfull = torch.full((m * n + 96,), 7.0, device="cuda")
            ops.mm(gfull, 32, [m, n], list(stride), a, b)
            place = gfull.as_strided((m, n), stride, 32)
            assert error(place, a.double() @ b.double()) < 1e-5, "not rounded to 16 bits"
            assert error(place, (a @ b).float()) < 2 * torch.finfo(dtype).eps
            assert (gfull[:32] == 7).all() and (gfull[32 + m * n :] == 7).all(), "nothing beside it is written"


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_products_of_bf16_compute_are_written_in_place(lowering, tmp_path):
    torch.manual_seed(0)
    reference = GPT(tied=False, layers=4, width=256).cuda()
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block], mp_policy=policy)
    ids = torch.randint(31, (4, 8), device="cuda")
    options = {"lowering": lowering, "dump": str(tmp_path)}
    step(torch.compile(model, backend="mfsdp", dynamic=False, options=options), ids)
    step(reference, ids)
    text = max(tmp_path.glob("*.backward.*.assign_groups.txt")).read_text()
    assert text.count(" mm u") == 4 * 4, "four matrices in each of four blocks"
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(p.grad.full_tensor(), q.grad) < 5e-2


def test_a_step_does_not_synchronise():
    _, model, ids = pair()
    run = torch.compile(model, backend="mfsdp", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        step(run, ids)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(run, ids)
        optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_captured_steps_have_the_bits_of_others(lowering):
    """A learning rate on the device changes without another capture; the host is free within two milliseconds."""
    losses, host = [], 0.0
    for captured in (False, True):
        _, model, ids = pair()
        run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
        lr = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)
        optimizer = mfsdp.fully_shard_optimizer(optimizer)

        def train(ids: torch.Tensor, run: Any = run, optimizer: Any = optimizer) -> torch.Tensor:
            loss = step(run, ids)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call: Any = mfsdp.capture_step(train, run, optimizer) if captured else train
        found = []
        for number in range(20):
            lr.fill_(1e-3 / (1 + number))
            begun = time.perf_counter()
            found.append(call((ids + number) % 31))
            host = time.perf_counter() - begun
        losses.append([loss.item() for loss in found])
    assert losses[0] == losses[1] and "17 replays" in call.describe(), call.describe()
    assert host < 2e-3
    call.reset()


def test_captured_programs_have_the_bits_of_others():
    """Each replayed subgraph, dropout included; the loop is the user's."""
    losses: list[list[float]] = []
    for mode in (None, "reduce-overhead"):
        _, model, ids = pair()
        run = torch.compile(model, backend="mfsdp", dynamic=False, mode=mode)
        optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses.append([])
        for number in range(12):
            torch.manual_seed(number)
            losses[-1].append(step(run, (ids + number) % 31).item())
            optimizer.step()
            optimizer.zero_grad()
    found = [graphs for graphs in program_graphs._all if graphs._captured]
    assert losses[0] == losses[1] and len(found) == 2
    assert all(2 * len(graphs._captured) > len(graphs.sites) for graphs in found)


def test_memory_stops_growing():
    _, model, ids = pair()
    run = torch.compile(model, backend="mfsdp", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reserved = []
    for _ in range(6):
        step(run, ids)
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[2:])) == 1, reserved


def test_streamed_state_has_the_same_bits_in_less_memory():
    """Optimizer state in pinned memory, copied on streams of its own."""
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        _, model, ids = pair(layers=6)
        optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()), offload=offload)
        run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager"})
        for _ in range(4):
            step(run, ids)
            optimizer.step()
            optimizer.zero_grad()
        state = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
        assert all(s.to_local().is_pinned() for s in state) or not offload
        whole = [t.full_tensor().cpu() for t in (*model.parameters(), *state)]
        found.append((whole, torch.cuda.memory_allocated(), sum(s.to_local().nbytes for s in state)))
        del model, optimizer, run, state
        torch._dynamo.reset()
        gc.collect()  # the first model is gone when the second one is measured
    (plain, before, nbytes), (streamed, after, _) = found
    assert all(map(torch.equal, plain, streamed))
    assert before - after > nbytes / 2, "all but two rooms"


def test_static_buffers_lie_in_pools_of_their_own():
    """A world of one gathers nothing, so the other ranks are torch's fakes."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    static_buffers.reset()
    static_buffers.misses.clear()
    try:
        _, model, ids = pair()
        run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager"})
        for _ in range(3):
            step(run, ids)
        assert {name[0] for name in static_buffers.sizes()} == {"p", "g"} and not static_buffers.misses
        for key, static in static_buffers._slots.items():
            segments, storage = static_buffers._pools[*key, None].snapshot(), static.storage
            inside = [s for s in segments if s["address"] <= storage.data_ptr() < s["address"] + s["total_size"]]
            assert len(inside) == 1, f"{key} is not in its pool: {segments}"
            assert inside[0]["allocated_size"] < storage.nbytes() + 512, "and nothing else is"
    finally:
        dist.destroy_process_group()
        static_buffers.reset()


def test_a_static_buffer_that_grows_gives_its_memory_back():
    gpu = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for size in (2**26, 2**27):
        static_buffers.reserve({(gpu, "t9"): size})
        assert torch.cuda.memory_reserved() - before == size
    static_buffers.reset()
    del static_buffers._pools[gpu, "t9", None]
    assert torch.cuda.memory_reserved() == before


def test_the_peak_is_the_listings(monkeypatch):
    """Most bytes during a step: what is there before it, and what the listings plan on top, within 5%."""
    planned: list[int] = []
    run_pipeline = pipeline.run

    def noted(program: Program, **kwargs: Any) -> Any:
        stages = run_pipeline(program, **kwargs)
        planned.append(byte_costs.peak(byte_costs.lines(program)))
        return stages

    monkeypatch.setattr(pipeline, "run", noted)
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(tied=False, layers=8, width=512).cuda(), units=[Block])
    ids = torch.randint(31, (64, 8), device="cuda")
    run = torch.compile(model, backend="mfsdp", dynamic=False)
    for _ in range(2):
        step(run, ids)  # the accumulators are there from now on
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(run, ids)
    rise = torch.cuda.max_memory_allocated() - before
    assert rise <= 1.05 * max(planned), f"{rise} bytes on top, planned {planned}"


# two GPUs


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    ranks = Ranks(2, "nccl")
    yield ranks
    ranks.stop()


def parity_on_gpus(wires: torch.dtype, segments: bool, options: dict[str, Any] | None = None) -> float:
    torch.manual_seed(0)
    reference = (Lumpy() if segments else GPT(tied=False, layers=4, width=256)).cuda()
    policy = mfsdp.MixedPrecisionPolicy(grad_comm_dtype=wires)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=None if segments else [Block], mp_policy=policy)
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randn(4, 33, device="cuda") if segments else torch.randint(31, (4, 8), device="cuda")
    run = torch.compile(model, backend="mfsdp", dynamic=False, options=options)
    worst = 0.0
    for _ in range(2):
        worst = max(worst, error(step(run, ids), step(reference, ids)))
    averaged(reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        worst = max(worst, error(p.grad.full_tensor(), q.grad))
    return worst


def overlapped() -> float:
    """Share of the time of NCCL's kernels during which another kernel runs."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(tied=False, layers=8, width=1024).cuda(), units=[Block])
    ids = torch.randint(31, (512, 8), device="cuda")
    run = torch.compile(model, backend="mfsdp", dynamic=False)
    for _ in range(3):
        step(run, ids)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(run, ids)
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name) for e in profile.events() if e.device_index >= 0]
    compute = [(a, b) for a, b, nccl in spans if not nccl]
    total = hidden = 0.0
    for start, end, nccl in spans:
        if nccl:
            total += end - start
            hidden += sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
    return hidden / total


def registered(symmetric: bool) -> tuple[float, bool]:
    options = {"nccl_ub": True, "disable_symmetric_registration": not symmetric}
    return parity_on_gpus(torch.float32, False, options), any(user_buffers._registered.values())


@two_gpus
@pytest.mark.parametrize("symmetric", [True, False])
def test_buffers_that_nccl_registers(gpus, symmetric):
    assert all(found < 1e-4 and done for found, done in gpus.run(registered, symmetric, timeout=300))


@two_gpus
def test_collectives_run_beside_compute(gpus):
    assert min(gpus.run(overlapped, timeout=300)) > 0.3


def held() -> int:
    """Allocated bytes, without cuBLAS's workspaces, which stay (32 MiB per thread and stream on Hopper). Private in
    torch; tried on 2.11.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_the_ledger_is_what_the_allocator_says(record_property):
    before = held()  # of other tests
    torch.manual_seed(0)
    model = GPT(tied=False, layers=4, width=512).cuda()
    ids = torch.randint(31, (1024, 8), device="cuda")
    options = {"lowering": "eager"}
    told = mfsdp.explain(model, (ids,), world=1, units=[Block], options=options, suggest=False)
    mfsdp.fully_shard(model, units=[Block])
    run = torch.compile(model, backend="mfsdp", dynamic=False, options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step(run, ids)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    gc.collect()
    workspaces = torch.cuda.memory_allocated() - held()
    most = torch.cuda.max_memory_allocated() - before - workspaces
    record_property("ledger", f"{told.peak} bytes planned, {most} held, {workspaces} in cuBLAS's workspaces")
    assert abs(told.peak / most - 1) < 0.05, f"{told.peak} told, {most} held\n{told.ledger}"


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_model_that_is_gone_leaves_nothing(lowering):
    """Of one of eight ranks, which has static buffers; the first time fills caches of torch's."""

    def trained() -> None:
        _, model, ids = pair()
        run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step(run, ids)
            optimizer.step()
            optimizer.zero_grad()
        assert static_buffers.sizes()

    left = []
    with mfsdp.fake_ranks(8):
        for _ in range(3):
            trained()
            torch._dynamo.reset()
            left.append(held())
    assert left[1] == left[2]


def test_this_gpu_is_measured_and_its_clock_compared(record_property):
    """How far off the clock is goes into the record: what it may be is not known yet."""
    machine = mfsdp.measure()
    assert machine.flops["bf16"] > 10e12 and machine.memory > 2**30 and machine.bandwidth > 1e11
    model = GPT(tied=False, layers=8, width=1024).cuda()
    ids = torch.randint(31, (2048, 8), device="cuda")
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    plan = mfsdp.explain(model, (ids,), world=1, units=[Block], mp_policy=policy, hardware=machine, suggest=False)
    mfsdp.fully_shard(model, units=[Block], mp_policy=policy)
    run = torch.compile(model, backend="mfsdp", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train() -> None:
        step(run, ids)
        optimizer.step()
        optimizer.zero_grad()

    train()
    train()
    with mfsdp.profile(run, steps=3) as seen:
        for _ in range(3):
            train()
            seen.step()
    record_property("clock", f"{plan.step * 1e3:.2f} ms planned, {seen.total * 1e3:.2f} ms measured")
    assert seen.total > 0 and seen.lines
