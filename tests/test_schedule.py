"""The schedule: launches up, waits down, buffers in slots. Values stay bitwise equal, memory is as listed."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import config as functorch_config
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import mfsdp
from mfsdp import pipeline
from mfsdp.buffers.gradients import Gradients
from mfsdp.compiler import program_info
from mfsdp.config.hardware import hardware
from mfsdp.ir import byte_costs, ops, printer
from mfsdp.ir.program import Program, slot_of
from mfsdp.ir.roles import Kind
from mfsdp.passes.inplace_wgrad import inplace_wgrad
from mfsdp.runtime import devices, execution, groups, kernels, static_buffers
from mfsdp.runtime.compiled_program import CompiledProgram
from mfsdp.runtime.program_info import Outline, ProgramInfo
from tests.helpers.models import CASES, GPT, MLP, Block
from tests.helpers.parity import batches, compiled, whole
from tests.helpers.ranks import collectives_told
from tests.helpers.toys import toy2


@cache
def traced(layers: int, **kwargs: Any) -> list[Program]:
    with torch.device("meta"):
        model, ids = GPT(layers=layers, width=32), torch.empty(2, 8, dtype=torch.long)
    return list(mfsdp.trace(model, (ids,), world=4, units=[Block], **kwargs))


def gpt(layers: int = 4, **kwargs: Any) -> list[Program]:
    """Forward and backward of a GPT, before any pass."""
    return [p.copy() for p in traced(layers, **kwargs)]


def gathers(p: Program) -> list[torch.fx.Node]:
    return [n for n in p.nodes if n.target is ops.all_gather]


def unsharded_bytes(p: Program) -> int:
    """The most bytes in gathered buffers at any one time."""
    live = most = 0
    for n in p.nodes:
        if n.target is ops.all_gather:
            live += byte_costs.nbytes(n.meta["val"])
            most = max(most, live)
        elif n.target is ops.free:
            live -= byte_costs.nbytes(n.args[0].meta["val"])
    return most


# prefetch


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("phase", [0, 1])
def test_a_gather_is_launched_so_many_units_ahead(depth, phase):
    program = gpt()[phase]
    pipeline.run(program, passes=pipeline.table(prefetch=depth))
    launches = gathers(program)
    waits = {n.args[0]: n for n in program.find(Kind.WAIT)}
    for i, launch in enumerate(launches):
        if i < depth:
            assert launch < next(n for n in program.nodes if byte_costs.is_line(n) and "mfsdp" not in n.meta)
        else:
            assert waits[launches[i - depth]] < launch
            before = [n for n in program.nodes if waits[launches[i - depth]] < n < launch]
            assert all("mfsdp" in n.meta for n in before), "nothing is computed between that wait and the launch"
    assert printer.schedule(program).in_flight >= min(depth, len(launches) - 1)


@pytest.mark.slow
def test_prefetch_hides_what_it_can():
    alone = {}
    for depth in (0, 1):
        forward, backward = gpt()
        for p in (forward, backward):
            pipeline.run(p, passes=pipeline.table(prefetch=depth, reduce_lag=depth))
        alone[depth] = [printer.schedule(p).no_overlap for p in (forward, backward)]
    assert alone[0] == [5, 10], "without it every collective is alone"
    # Forward: the first gather. Backward: the last reduction; its first gather hides behind the loss.
    assert alone[1] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 1.5, pytest.param(2.5, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("phase", [0, 1])
def test_the_limit_on_unsharded_bytes_is_kept(share, phase):
    program = gpt()[phase]
    pipeline.run(program, passes=pipeline.table(prefetch=0))
    needed = unsharded_bytes(program)
    block = max(byte_costs.nbytes(n.meta["val"]) for n in gathers(program))
    limit = int(needed + (share - 1) * block)
    program = gpt()[phase]
    pipeline.run(program, passes=pipeline.table(prefetch=3, max_unsharded=limit))
    assert unsharded_bytes(program) <= limit
    names = [n.name for n in gathers(program)]
    assert names == sorted(names, reverse=phase == 1) or phase == 1, "launches stay in the order of use"


def test_units_of_different_sizes_repeated_and_skipped():
    """The second layer is used twice, the third never, and none is like another."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
            self.d = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.d(self.b(self.b(self.a(x))))

    for program in mfsdp.trace(Odd(), (torch.randn(2, 8),), world=4, units=[nn.Linear]):
        pipeline.run(program)
        assert [n.name for n in gathers(program)] in (["u0_full", "u1_full", "u2_full"], ["u2_full", "u1_full"])


class TwoDtypes(nn.Module):
    """Layers with two flat buffers each."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(x).bfloat16()).float()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[self.Layer() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_flat_buffers_of_one_module_count_as_one():
    x = torch.randn(2, 16, requires_grad=True)
    forward, backward = mfsdp.trace(TwoDtypes(), (x,), world=4, units=[TwoDtypes.Layer])
    for p in (forward, backward):
        pipeline.run(p)

    def told(p: Program, kind: Kind) -> list[str]:
        """Launches and waits of a kind, in order."""
        marked = {n: n.name.removesuffix(f"_{kind.value}") for n in p.find(kind)}
        waits = {n: f"wait {marked[n.args[0]]}" for n in p.find(Kind.WAIT) if n.args[0] in marked}
        return [(marked | waits)[n] for n in p.nodes if n in marked or n in waits]

    assert " ".join(told(forward, Kind.FULL)) == (
        "u0 u0b wait u0 u1 u1b wait u0b wait u1 u2 u2b wait u1b wait u2 u3 u3b wait u2b wait u3 wait u3b"
    )
    assert " ".join(told(backward, Kind.FULL)) == (
        "u3b u3 wait u3b u2b u2 wait u3 wait u2b u1b u1 wait u2 wait u1b u0b u0 wait u1 wait u0b wait u0"
    )
    assert " ".join(told(backward, Kind.GSHARD)) == (
        "u3b u3 wait u3b wait u3 u2b u2 wait u2b wait u2 u1b u1 wait u1b wait u1 u0b u0 wait u0b wait u0"
    )


# defer and bucket


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_so_many_reductions_are_in_flight(lag):
    _, backward = gpt()
    pipeline.run(backward, passes=pipeline.table(reduce_lag=lag))
    flying = buffers = most = most_buffers = 0
    for n in backward.nodes:
        buffers += n.target is ops.bucket
        flying += n.target is ops.reduce_scatter
        if n.target is ops.wait and n.args[0].target is ops.reduce_scatter:
            flying, buffers = flying - 1, buffers - 1
        most, most_buffers = max(most, flying), max(most_buffers, buffers)
    assert most == max(lag, 1) and flying == 0
    assert most_buffers <= lag + 1


def test_products_are_written_in_place():
    _, backward = gpt()
    stages = {s.name: s for s in pipeline.run(backward)}
    products = [n for n in backward.nodes if n.target is ops.mm]
    assert len(products) == 4 * 4, "four matrices in each of four blocks; embeddings are scattered, and copied"
    assert "written in place" in stages["inplace_wgrad"].listing


def elsewhere(p: Program, device: str) -> Program:
    """The program as if it had been traced for a device."""

    def there(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) if torch.is_tensor(x) else x

    with p._fake_mode:
        for node in p.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(there, node.meta["val"])
    return p


BF16_COMPUTE = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
"""Gradients travel and add up in fp32."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wide", [None, True, False])
def test_narrow_products_are_written_wide_in_place(device, wide):
    p = toy2("backward", mp_policy=BF16_COMPUTE)
    pipeline.run(p, upto="defer")
    (stage,) = pipeline.run(elsewhere(p, device), passes=(("inplace_wgrad", partial(inplace_wgrad, wide=wide)),))[1:]
    written = wide if wide is not None else device == "cuda"
    assert ("mm u1_gfull@0, threshold_backward.T, relu" in stage.listing) == written
    assert ("mm_1" in stage.listing) != written, "a temporary of 16 bits"
    assert "reduce f32" in stage.listing


def gradients(x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = mfsdp.fully_shard(MLP(), units=["up", "down"], mp_policy=BF16_COMPUTE)
    compiled(model, "eager")(x).float().square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.slow
def test_products_that_are_written_wide_are_not_rounded(monkeypatch):
    x = torch.randn(16, 24, dtype=torch.bfloat16)
    rounded, calls = gradients(x), []

    def multiply_wide(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        assert a.dtype is b.dtype is torch.bfloat16 and out.dtype is torch.float32
        calls.append(torch.mm(a.float(), b.float(), out=out).shape)

    monkeypatch.setattr(ops, "widens", lambda device: True)
    monkeypatch.setattr(kernels, "multiply_wide", multiply_wide)
    exact = gradients(x)
    assert len(calls) == 2, "the matrices of two layers"
    for old, new in zip(rounded, exact, strict=True):
        assert torch.equal(new, old) or torch.equal(new.bfloat16(), old.bfloat16())
    assert sum(not torch.equal(new, old) for old, new in zip(rounded, exact, strict=True)) == 2


@pytest.mark.slow
def test_explain_shows_what_the_hardware_does():
    policy, x = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16), torch.randn(4, 24, dtype=torch.bfloat16)
    for machine, written in (("h100", True), (replace(hardware("h100"), cuda=False), False)):
        report = mfsdp.explain(MLP(), (x,), units=["up", "down"], mp_policy=policy, hardware=machine, suggest=False)
        assert ("mm u1_gfull@0" in report.listing("backward")) == written


# pool


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_identical_layers_need_one_slot_more_than_the_depth(depth):
    for program in gpt():
        pipeline.run(program, passes=pipeline.table(prefetch=depth))
        largest = max(byte_costs.nbytes(n.meta["val"]) for n in gathers(program) if "u0" not in n.name)
        of_blocks = [s for s, b in program.slots.items() if s.startswith("p") and b == largest]
        assert len(of_blocks) <= depth + 1


def test_the_root_has_a_slot_of_its_own_size():
    forward, _ = gpt()
    pipeline.run(forward)
    sizes = {n.name: byte_costs.nbytes(n.meta["val"]) for n in gathers(forward)}
    for n in gathers(forward):
        assert forward.slots[slot_of(n)] >= sizes[n.name]
    assert sum(forward.slots.values()) == unsharded_bytes(forward)


def test_a_free_gives_back_what_is_in_no_slot():
    """Static buffers are live on every line; without them a `free` gives its buffer back."""
    for on in (True, False):
        for program in gpt():
            pipeline.run(program, passes=pipeline.table(pool=on))
            static = sum(program.slots.values())
            for row in byte_costs.lines(program):
                assert row.live >= static
                if row.node.target is ops.free:
                    full = row.node.args[0]
                    assert row.delta == (0 if slot_of(full) else -byte_costs.nbytes(full.meta["val"]))


@pytest.mark.slow
def test_kept_parameters_have_no_slot():
    forward, _ = gpt(1, reshard_after_forward=False)
    pipeline.run(forward)
    assert not forward.slots and all(not slot_of(n) for n in gathers(forward))


def test_static_buffers_are_reused_unless_somebody_holds_them():
    cpu = torch.device("cpu")
    first = static_buffers.room("t0", 100, torch.float32, cpu)
    address = first.data_ptr()
    second = static_buffers.room("t0", 100, torch.float32, cpu)
    assert second.data_ptr() != address and static_buffers.misses["t0"] == 1, (
        "the first is still in use, and that is counted"
    )
    del first, second
    third = static_buffers.room("t0", 50, torch.bfloat16, cpu)
    assert third.data_ptr() == address and third.shape == (50,) and third.dtype is torch.bfloat16
    del third
    assert static_buffers.sizes()["t0"] == 400
    larger = static_buffers.room("t0", 200, torch.float32, cpu)
    assert static_buffers.sizes()["t0"] == 800 and larger.numel() == 200
    del static_buffers._slots[cpu, "t0"]


def test_a_static_buffer_that_grows_is_freed_first(monkeypatch):
    empty, there = torch.empty, []
    static_buffers.room("t0", 100, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(
        torch, "empty", lambda *args, **more: (there.append(static_buffers.sizes()), empty(*args, **more))[1]
    )
    assert static_buffers.room("t0", 200, torch.float32, torch.device("cpu")).numel() == 200
    assert "t0" not in there[0] and static_buffers._slots.pop((torch.device("cpu"), "t0")).storage.nbytes() == 800


def test_views_that_stay_do_not_keep_a_static_buffer_taken():
    """They are made once for each dtype, and go with the buffer."""
    cpu, halves = torch.device("cpu"), lambda flat, at: [flat[:at], flat[at:]]
    first = static_buffers.room("t2", 100, torch.float32, cpu)
    views = static_buffers.views(first, halves, 60)
    assert static_buffers.views(first, halves, 60) is views and static_buffers.views(first, halves, 50) is not views
    views[1].fill_(7)
    assert first[60:].eq(7).all() and not static_buffers._slots[cpu, "t2"].vacant()
    address = first.data_ptr()
    del first
    with torch.inference_mode():
        second = static_buffers.room("t2", 50, torch.bfloat16, cpu)
    assert second.data_ptr() == address and not second.is_inference()
    assert [v.dtype for v in static_buffers.views(second, halves, 60)] == [torch.bfloat16] * 2
    own = torch.empty(100)
    assert static_buffers.views(own, halves, 60)[0].data_ptr() == own.data_ptr(), "memory of its own is cut anew"
    del second
    assert (
        static_buffers._slots[cpu, "t2"].vacant()
        and static_buffers.room("t2", 100, torch.float32, cpu).data_ptr() == address
    )
    gone = StorageWeakRef(static_buffers._slots[cpu, "t2"].storage)
    del views
    static_buffers.reset()
    assert gone.expired()


def test_static_buffers_of_a_device_have_pools(monkeypatch):
    """Nothing else is asked for one, and a buffer only when it is made, or made anew because it grows."""
    asked: list[tuple[str, str]] = []

    def pool(slot: str, device: torch.device, allocator: object) -> Any:
        asked.append((slot, device.type))
        return nullcontext()

    monkeypatch.setattr(static_buffers, "_pool", pool)
    monkeypatch.setattr(static_buffers, "_slots", {})
    monkeypatch.setattr(devices, "current_stream", lambda device: None)
    cpu, meta = torch.device("cpu"), torch.device("meta")  # which stands for a GPU
    static_buffers.reserve({(meta, "p0"): 400, (meta, "g0"): 800, (cpu, "p0"): 400})
    assert asked == [("p0", "meta"), ("g0", "meta")], "on the CPU they are made as they are used"
    for slot, numel in (("p0", 100), ("p0", 50), ("g0", 200), ("", 1000)):
        assert static_buffers.room(slot, numel, torch.float32, meta).shape == (numel,)
    static_buffers.reserve({(meta, "p0"): 200})
    assert len(asked) == 2 and static_buffers.sizes() == {"p0": 400, "g0": 800}
    static_buffers.reserve({(meta, "p0"): 1200})
    assert asked[2:] == [("p0", "meta")] and static_buffers.sizes() == {"p0": 1200, "g0": 800}
    monkeypatch.setattr(devices, "current_stream", lambda device: Stream(7))
    static_buffers.reserve({(meta, "p0"): 400})
    assert asked[3:] == [("p0@7", "meta")], "another stream has its own"


def test_pools_are_made_once_for_a_buffer(monkeypatch):
    """The calls to torch, which need a GPU."""
    made: list[Any] = []
    used: list[tuple[Any, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: made.append((len(made), allocator)) or made[-1])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: used.append((pool, device)) or nullcontext())
    monkeypatch.setattr(static_buffers, "_pools", {})
    gpu = torch.device("cuda", 1)
    for slot, device, allocator in (
        ("p0", gpu, None), ("p0", gpu, None), ("g0", gpu, "NCCL's on {}".format), ("p0", torch.device("cpu"), None),
    ):  # fmt: skip
        with static_buffers._pool(slot, device, allocator):
            pass
    first, second = made
    assert first == (0, None) and second == (1, "NCCL's on cuda:1")
    assert used == [(first, gpu), (first, gpu), (second, gpu)]


class Stream:
    """Stands for one of a GPU's."""

    def __init__(self, number: int, log: list[str] | None = None):
        self.stream_id, self.log = number, [] if log is None else log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.stream_id} waits for {other.stream_id}")


def test_a_static_buffer_belongs_to_a_stream(monkeypatch):
    """Nobody orders two streams: what one still reads, the other's gather would write."""
    cpu = torch.device("cpu")
    addresses: dict[int, set[int]] = {0: set(), 7: set(), 8: set()}
    for number in (0, 7, 8, 7, 0, 8):
        monkeypatch.setattr(devices, "current_stream", lambda device, number=number: Stream(number))
        buffer = static_buffers.room("t1", 100, torch.float32, cpu)
        addresses[number].add(buffer.data_ptr())
        del buffer
    assert all(len(own) == 1 for own in addresses.values()), "each has its own, and keeps it"
    assert len(set.union(*addresses.values())) == 3
    assert {"t1", "t1@7", "t1@8"} <= set(static_buffers.sizes())
    for name in ("t1", "t1@7", "t1@8"):
        del static_buffers._slots[cpu, name]


def test_whoever_called_backward_waits_for_the_stream_of_its_gradients(monkeypatch):
    """Autograd joins the stream of the shard with that of the caller, but gradients come by another way."""
    log: list[str] = []
    streams = {"now": Stream(0, log)}
    model = mfsdp.fully_shard(MLP(), units=["up"])
    run = compiled(model, "eager")
    loss = run(torch.randn(2, 24)).sum()
    monkeypatch.setattr(devices, "current_stream", lambda device: streams["now"])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: log.append(f"kept for {s.stream_id}"))
    accumulate = Gradients.accumulate

    def on_a_side_stream(self: Gradients, *args: Any) -> None:
        streams["now"] = Stream(7, log)
        accumulate(self, *args)
        streams["now"] = Stream(0, log)

    monkeypatch.setattr(Gradients, "accumulate", on_a_side_stream)
    loss.backward()
    assert log == ["0 waits for 7", "kept for 0"] * 2, "one for each unit"


# on ranks


def trained(options: dict[str, Any], name: str = "gpt", steps: int = 2) -> list[torch.Tensor]:
    case = CASES[name]
    torch.manual_seed(0)
    model = mfsdp.fully_shard(case.build(), units=case.units)
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        case.loss(run, batches(case, step)[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p).detach() for p in model.parameters()]


SCHEDULES: list[dict[str, Any]] = [
    {"prefetch": 2, "reduce_lag": 2, "pool": True},
    {"prefetch": 3, "reduce_lag": 1, "pool": True, "max_unsharded": 20_000},
]
"""The defaults, bitwise, are in `test_parity.py`."""


def all_schedules(name: str) -> list[str]:
    """Options under which the trained parameters are not bitwise those of the plain schedule."""
    plain = trained({"prefetch": 0, "reduce_lag": 0, "pool": False}, name)
    out = []
    for options in SCHEDULES:
        torch._dynamo.reset()
        got = trained(options, name)
        if not all(torch.equal(a, b) for a, b in zip(plain, got, strict=True)):
            out.append(str(options))
    return out


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.exhaustive), "lora"])
def test_every_schedule_gives_bitwise_the_same(two_ranks, name):
    assert two_ranks.run(all_schedules, name, timeout=300) == [[], []]


def slots_over_time() -> tuple[list[dict[str, int]], dict[str, int], int]:
    """Bytes of static buffers after each of five steps, evaluation in between; the largest that a listing plans; how
    many buffers were not in the slot that they have.
    """
    static_buffers.reset()
    planned: dict[str, int] = {}
    run_pipeline = pipeline.run

    def noted(program: Program, **kwargs: Any) -> Any:
        stages = run_pipeline(program, **kwargs)
        for slot, size in program.slots.items():
            planned[slot] = max(size, planned.get(slot, 0))
        return stages

    spilt = 0
    room, patience, cached = static_buffers.room, static_buffers.PATIENCE, functorch_config.enable_autograd_cache

    def watched(slot: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal spilt
        out = room(slot, numel, dtype, device)
        if slot:
            spilt += out.untyped_storage().data_ptr() != static_buffers._slots[device, slot].storage.data_ptr()
        return out

    pipeline.run, static_buffers.room, static_buffers.PATIENCE = noted, watched, 1.0
    functorch_config.enable_autograd_cache = False  # programs from a cache are not planned
    try:
        torch.manual_seed(0)
        model = mfsdp.fully_shard(GPT(), units=[Block])
        run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager"})
        ids = torch.randint(31, (2, 8))
        seen, addresses = [], []
        for step in range(5):
            loss = run(ids).square().mean()
            if step % 2:
                with torch.no_grad():
                    run(ids)
            loss.backward()
            seen.append(static_buffers.sizes())
            addresses.append(sorted(s.storage.data_ptr() for s in static_buffers._slots.values()))
    finally:
        pipeline.run, static_buffers.room, static_buffers.PATIENCE = run_pipeline, room, patience
        functorch_config.enable_autograd_cache = cached
    assert all(a == addresses[1] for a in addresses[1:]), "the same storage from the second step on"
    return seen, planned, spilt


@pytest.mark.dist
def test_static_buffers_stop_growing_and_are_as_planned(two_ranks):
    """Under Inductor too they stay where they are: `test_stable_addresses.py`."""
    for seen, planned, spilt in two_ranks.run(slots_over_time):
        assert all(s == seen[1] for s in seen[1:]) and seen[1] == planned and not spilt


def groups_used() -> tuple[int, int]:
    """Process groups that gathers and reductions went through."""
    used: dict[str, set[str]] = {"gather": set(), "scatter": set()}
    with collectives_told(lambda kind, group: used[kind].add(group)):
        trained({}, "mlp")
    return len(used["gather"]), len(used["gather"] | used["scatter"])


@pytest.mark.dist
def test_gathers_and_reductions_have_groups_of_their_own(two_ranks):
    assert two_ranks.run(groups_used) == [(1, 2)] * 2


class Forked(nn.Module):
    """Two branches; which one is taken depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.a(x) if left else self.b(self.c(x))


def test_outer_replicas_compare_which_gradients_they_bring():
    program = toy2("backward", mesh_shape=(2, 4))
    pipeline.run(program)
    sequences = program_info.collectives(program)
    assert len(sequences) == 2
    for sequence in sequences.values():
        assert sum(text.startswith("accumulate u") and text.endswith("of [0,1048576]") for text in sequence) == 2


def diverging() -> str:
    model = mfsdp.fully_shard(Forked(), units=[nn.Linear])
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    try:
        run(torch.randn(2, 8), dist.get_rank() == 0)
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_ranks_that_would_run_different_collectives_say_so_and_do_not_hang(two_fresh_ranks):
    for rank, text in enumerate(two_fresh_ranks.run(diverging, timeout=60)):
        assert "would run different collectives (invariant 13)" in text, text
        assert f" -> 0  rank {rank}: all_gather u0_shard" in text, text
        assert "unit 'a' of Forked" in text and "unit 'c' of Forked" in text, text


def uneven_shapes() -> bool:
    """Ranks with different sequence lengths compile different programs with the same collectives: that is fine."""
    torch.manual_seed(0)
    reference = MLP()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["up"])
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    for rows in (4, 4 + dist.get_rank(), 9):
        run(torch.randn(rows, 24)).sum().backward()
    return True


@pytest.mark.dist
def test_ranks_may_compile_different_shapes(two_ranks):
    assert two_ranks.run(uneven_shapes) == [True, True]


def abandoned() -> float:
    group = groups.default_group()
    mine, whole = torch.full((1 << 16,), float(dist.get_rank())), torch.empty(2 << 16)
    for _ in range(3):
        execution.current().gather([(whole, mine)], group)  # an exception kept whoever launched it from waiting
        gc.collect()
    execution.current().gather([(whole, mine)], group)()
    return whole.sum().item()


def interrupted() -> tuple[int, list[int]]:
    model = mfsdp.fully_shard(MLP())
    run = compiled(model, "eager")
    x = torch.ones(2, 24)
    run(x).sum().backward()
    buffer = model._mfsdp_unit.buffers[0]

    def fails(args: list[Any]) -> None:
        kernels.all_gather(execution.current(), buffer.weights.source.detach(), buffer.spec.encode(), 0)
        raise ValueError("out of memory")

    for _ in range(3):
        with pytest.raises(ValueError, match="out of memory"):
            CompiledProgram(ProgramInfo(Outline("MLP", "forward", ())), fails)([])
    run(x).sum().backward()
    return len(execution.current().pending), [
        s.vacant() for (_, name), s in static_buffers._slots.items() if name == "p0"
    ]


@pytest.mark.dist
def test_an_exception_in_a_program_leaves_static_buffers_free(two_fresh_ranks):
    """And gathers that nobody waits for break nothing."""
    assert two_fresh_ranks.run(interrupted, timeout=60) == [(0, [True])] * 2
    assert two_fresh_ranks.run(abandoned, timeout=30) == [1 << 16] * 2
