"""Saved activations on the host: the same bits, and less memory by what has moved."""

from __future__ import annotations

import gc
import itertools
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import config as functorch_config
from torch import nn
from torch.fx import Node

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import lowering
from mfsdp.compiler.capture import Capture
from mfsdp.compiler.tracing import Programs
from mfsdp.config import best_effort
from mfsdp.config.hardware import hardware
from mfsdp.config.layer_choices import Choice
from mfsdp.cost_model import op_cost
from mfsdp.cost_model.offload_schedule import OffloadTiming
from mfsdp.cost_model.timeline import simulate
from mfsdp.ir import byte_costs, ops
from mfsdp.ir.program import LAYER, Program, storage_of
from mfsdp.ir.roles import Kind, Lane, is_kind, role
from mfsdp.runtime import activation_host, execution, host_memory, kernels
from tests.helpers.loopback import Stream, Streams
from tests.helpers.models import GPT, Block
from tests.helpers.parity import compiled
from tests.helpers.ranks import here
from tests.helpers.toys import offloaded
from tests.helpers.without_inductor import without_kernels

LAYERS, LENGTH, BATCH = 3, 32, 4
FIRST = ("blocks.0", "blocks.1")


def split(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The same block, with q, k and v split along the last dimension of their product."""
    b, t, c = x.shape
    parts = block.qkv(block.norm1(x)).split(c, dim=-1)
    q, k, v = (part.view(b, t, block.heads, c // block.heads).transpose(1, 2) for part in parts)
    x = x + block.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
    return x + block.down(F.gelu(block.up(block.norm2(x))))


def build(kind: str = "gpt", layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(width=32, layers=layers, vocabulary=512, length=LENGTH)
    if kind == "dropout":
        for block in model.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.3))
    if kind == "split":
        for block in model.blocks:
            block.forward = split.__get__(block)
    return model.to(here())


def batch(seed: int = 0) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(10 * seed + rank)).to(here())


def plain(run: nn.Module, model: nn.Module) -> Iterator[torch.Tensor]:
    for step in range(2):
        loss = run(batch(step)).float().square().mean()
        loss.backward()
        yield loss


def accumulated(run: nn.Module, model: nn.Module) -> Iterator[torch.Tensor]:
    """Two microbatches without communication, then one with."""
    for step in range(3):
        with mfsdp.no_sync(model) if step < 2 else nullcontext():
            loss = run(batch(step)).float().square().mean()
            loss.backward()
        yield loss


def two_forwards(run: nn.Module, model: nn.Module) -> Iterator[torch.Tensor]:
    """Two forwards before a backward, whose rooms they need both; then in the other order."""
    for order in (1, -1):
        losses = [run(batch(step)).float().square().mean() for step in range(2)]
        for loss in losses[::order]:
            loss.backward()
        yield from losses


def twice(run: nn.Module, model: nn.Module) -> Iterator[torch.Tensor]:
    """A graph that is kept, another forward meanwhile, and backward once more."""
    first = run(batch()).float().square().mean()
    first.backward(retain_graph=True)
    yield run(batch(1)).float().square().mean()
    first.backward()
    yield first


def interrupted(run: nn.Module, model: nn.Module) -> Iterator[torch.Tensor]:
    """Exceptions before a backward, in a third copy each way, and a forward that nobody needs."""
    out = run(batch())
    out.register_hook(_fails)
    with pytest.raises(ZeroDivisionError):
        out.float().square().mean().backward()
    del out
    for way in ("offload", "reload"):
        real, calls = getattr(activation_host, way), itertools.count()
        third = lambda *args: _fails() if next(calls) == 2 else real(*args)  # noqa: B023, E731
        with mock.patch.object(activation_host, way, third), suppress(ZeroDivisionError):
            run(batch(2)).float().square().mean().backward()
        assert next(calls) in (0, 3), "one was launched behind those two, where any was"
    run(batch(3))
    model.zero_grad()
    yield from plain(run, model)


def _fails(*args: Any) -> Any:
    raise ZeroDivisionError


How = Callable[..., Iterator[torch.Tensor]]


def bits(
    kind: str, lowering: str, hows: tuple[How, ...], *paths: str, layers: int = LAYERS
) -> tuple[list[Any], list[int]]:
    """Losses, and all gradients of this rank's rows; and the bytes of rooms on the host, each time."""
    torch._dynamo.reset()
    model = mfsdp.fully_shard(build(kind, layers), units=[Block])
    found, sizes = [], []
    with offloaded(*paths, least=1):
        run = compiled(model, lowering)
        torch.manual_seed(1)
        for how in hows:
            activation_host._rooms.clear()
            found += [loss.detach().clone() for loss in how(run, model)]
            found += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            model.zero_grad()
            assert gc.collect() >= 0 and activation_host.taken() == 0
            sizes.append(sum(activation_host.sizes()))
    return found, sizes


def moved(kind: str, lowering: str, *hows: How, layers: int = LAYERS) -> list[int]:
    """Bytes of host buffers, if the saved values of all layers but the last go there; not a bit changes."""
    want, nothing = bits(kind, lowering, hows, layers=layers)
    got, there = bits(kind, lowering, hows, *FIRST[: layers - 1], layers=layers)
    assert not any(nothing) and len(want) == len(got) > 4 * len(hows)
    assert all(map(torch.equal, want, got))
    return there


def several(lowering: str, *kinds: str) -> list[int]:
    return [there for kind in kinds for there in moved(kind, lowering, plain)]


BLOCK = 265_216
"""Bytes that forward saves of a block."""


@pytest.mark.dist
def test_two_ranks_keep_their_bits(two_ranks):
    for there in two_ranks.run(several, "eager", "dropout", timeout=300):
        assert there == [2 * (BLOCK + BATCH * LENGTH * 32)], "with a mask of bools"


@pytest.mark.slow
def test_whatever_comes_between():
    """Rooms are taken until backward, and by nobody afterwards; a second forward has its own."""
    there = moved("gpt", "eager", interrupted, accumulated, two_forwards, twice)
    assert there == [2 * BLOCK, 2 * BLOCK, 2 * 2 * BLOCK, 2 * 2 * BLOCK]


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_compiled_pieces_keep_their_bits():
    (there,) = moved("gpt", "inductor", plain, layers=2)
    assert there > BLOCK / 2


@pytest.mark.inductor
def test_a_compiler_does_not_write_over_the_host():
    """Compiled whole, what lies on the host is not among the arguments that backward may write over."""
    real, seen = lowering.compile_fx_inner, []

    def spy(graph: torch.fx.GraphModule, example: Any, **kwargs: Any) -> Any:
        donated = torch._guards.TracingContext.get().fw_metadata.bw_donated_idxs  # type: ignore[union-attr]
        there = [is_kind(n, Kind.OFFLOAD) for n in graph.graph.find_nodes(op="placeholder")]
        if any(there):
            seen.append((len(donated), sum(there[i] for i in donated)))  # type: ignore[arg-type, union-attr]
        return real(graph, example, **kwargs)

    spied = mock.patch.object(lowering, "compile_fx_inner", spy)
    with spied, functorch_config.patch(enable_autograd_cache=False), without_kernels():
        _, (there,) = bits("gpt", "whole", (plain,), *FIRST[:1], layers=1)
    assert there > BLOCK / 2
    ((donated, host_too),) = seen
    assert donated > 0 and host_too == 0


# What it is worth


def peak(step: Callable[[], None]) -> int:
    """The most bytes that torch's allocator has given out at once during a step, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


def held(kind: str, *paths: str) -> tuple[int, int]:
    """The peak of a step, and what lies on the host between forward and backward."""
    torch._dynamo.reset()
    activation_host._rooms.clear()
    model = mfsdp.fully_shard(build(kind), units=[Block])
    there = []

    def step() -> None:
        loss = run(batch()).float().square().mean()
        there.append(activation_host.taken())
        loss.backward()

    with offloaded(*paths, least=1):
        run = compiled(model, "eager")
        step()
        step()
    return peak(step), there[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["split", pytest.param("dropout", marks=pytest.mark.exhaustive)])
def test_the_peak_falls_by_what_has_moved(kind):
    """To the byte: of q, k and v, which share a storage, nothing stays and nothing goes twice."""
    before, nothing = held(kind)
    after, there = held(kind, *FIRST)
    assert nothing == 0 and there >= 2 * BLOCK
    assert before - after == there


# Rooms, and copies


def shipped(x: torch.Tensor) -> torch.Tensor:
    """A tensor's copy on the host, complete."""
    out, end = activation_host.offload(x)
    end()
    return out


def test_a_copy_lies_as_what_it_is_of():
    activation_host._rooms.clear()
    x = torch.arange(240.0).view(4, 5, 12).transpose(0, 2)[2:9, :, 1:]
    there = shipped(x)
    back, end = activation_host.reload(there, x.device)
    end()
    assert torch.equal(there, x) and torch.equal(back, x) and there.stride() == back.stride() == x.stride()
    version = there._version
    del x, back
    assert not there._is_view() and there._version == version


def test_rooms_are_taken_as_long_as_somebody_has_them():
    activation_host._rooms.clear()
    first, second = shipped(torch.ones(1000)), shipped(torch.zeros(1000))
    assert activation_host.sizes() == [4000, 4000] and activation_host.taken() == 8000 and first.sum() == 1000
    view = first[5:]
    del first, second
    assert activation_host.taken() == 4000
    third = shipped(torch.zeros(990))
    assert activation_host.sizes() == [4000, 4000] and view.sum() == 995 and third.sum() == 0, "in what the second had"
    del view, third
    assert activation_host.taken() == 0


def test_rooms_that_are_not_needed_again_go():
    """Of lengths that never come back; those of every step stay."""
    activation_host._rooms.clear()
    for length in range(1000, 9000, 500):
        kept = [shipped(torch.ones(n)) for n in (10, length)]
        del kept
    assert len(activation_host.sizes()) < 8 and activation_host.sizes()[0] == 40


def test_copies_are_waited_for():
    """On a slow link: what is waited for is complete, and a run that is left by an exception has waited, too."""
    x = torch.ones(2**16)
    run = execution.Execution("a program")
    with host_memory.at_rate(1e6):
        begun = time.perf_counter()
        out = kernels.offload(run, x)
        assert time.perf_counter() - begun < 0.1
        run.wait(out)
        assert time.perf_counter() - begun > 0.25 and torch.equal(out, x) and not run.copying
        back = kernels.reload(run, out, x.device)
        run.leave(ZeroDivisionError())
        assert time.perf_counter() - begun > 0.5 and torch.equal(back, x) and not run.copying


@pytest.mark.slow
def test_streams_of_a_device_do_not_race(monkeypatch):
    """What a GPU would be told, on streams with vector clocks; every other forward, and its backward, on another."""
    want, _ = bits("gpt", "eager", (interrupted,))
    streams = Streams()
    sides = itertools.cycle([Stream(7, "a side"), Stream(8, "another side")])

    def on_sides(run: nn.Module, model: nn.Module) -> Iterator[torch.Tensor]:
        def on_the_next(ids: torch.Tensor) -> torch.Tensor:
            with streams.on(next(sides)):
                return run(ids)  # type: ignore[no-any-return]

        yield from interrupted(on_the_next, model)  # type: ignore[arg-type]

    with streams.watched(monkeypatch):
        got, (there,) = bits("gpt", "eager", (on_sides,), *FIRST)
    assert there >= 2 * BLOCK and {"in", "out"} <= set(streams.sides)
    assert all(map(torch.equal, want, got))


def test_a_room_that_is_still_read_is_not_written(monkeypatch):
    """Only the stream that has read it has waited for the copy back when another stream gets its room."""
    activation_host._rooms.clear()
    streams = Streams()
    with streams.watched(monkeypatch):
        for number, fetched in ((7, True), (8, False)):
            with streams.on(Stream(number, f"stream {number}")), streams:
                there, end = activation_host.offload(torch.ones(100))
                end()
                if fetched:
                    _, end = activation_host.reload(there, torch.device("cpu"))
                    end()
            del there, end
    assert activation_host.sizes() == [400]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to pinned memory need a GPU")
def test_copies_of_a_device():
    x = torch.arange(2.0**20, device="cuda").view(1024, 1024).t()
    out, end = activation_host.offload(x)
    end()
    torch.cuda.synchronize()
    assert out.is_pinned() and torch.equal(out, x.cpu())
    back, end = activation_host.reload(out, x.device)
    end()
    assert torch.equal(back, x) and back.stride() == x.stride()


# Where copies stand


@cache
def programs_of(*paths: str, **kwargs: Any) -> Programs:
    with torch.device("meta"):
        model, ids = GPT(width=128, layers=3, length=64), torch.zeros(8, 64, dtype=torch.long)
    with offloaded(*paths):
        return mfsdp.trace(model, (ids,), world=4, units=[Block], name="gpt_host", **kwargs)


def traced(*paths: str, **kwargs: Any) -> list[Program]:
    """Forward and backward, before any pass."""
    return [program.copy() for program in programs_of(*paths, **kwargs)]


@pytest.mark.slow
def test_gpt_with_its_first_block_on_the_host(golden):
    """Small norms' statistics stay; q, k and v go as one product; lanes, and the bytes on the host."""
    lasts = []
    for program, without in zip(traced("blocks.0"), traced(), strict=True):
        golden(f"gpt_host.{program.phase}", pipeline.run(program)["schedule_offload"].listing)
        pipeline.run(without, listings=False)
        lasts.append([byte_costs.lines(p)[-1 if p.phase == "forward" else 0].live for p in (without, program)])
        assert byte_costs.on_host(program) == 2**22 and byte_costs.on_host(without) == 0
    for before, after in lasts:
        assert before - after == 2**22, "less in memory when forward ends, and when backward begins"


def order(program: Program) -> list[str]:
    """Copies, their waits, and products, in order."""
    return [
        f"wait {node.args[0].name}" if node.target is ops.wait else node.name  # type: ignore[union-attr]
        for node in program.nodes
        if node.target in (*ops.HOST, torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        or (node.target is ops.wait and role(node).lane is Lane.HOST)  # type: ignore[union-attr]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("copying, waited", [(0.0, 0), (1.0, 1), (2.5, 3), (100.0, 9)])
def test_forward_waits_where_a_copy_is_complete(copying, waited):
    """Products take a second each. A value stays at least until it has been read."""
    program, _ = traced("blocks.0")

    def pace(p: Program) -> dict[Node, float]:
        seconds = {n: 1.0 for n in p.nodes if n.target is torch.ops.aten.addmm.default}
        return seconds | {n: copying * (n.name == "addmm_2_host") for n in p.nodes if n.target is ops.offload}

    pipeline.run(program, passes=pipeline.table(pace=pace), listings=False)
    names = order(program)
    at = names.index("addmm_2_host")
    before, between = names[:at], names[at : names.index("wait addmm_2_host")]
    products = [[n for n in part if n.startswith("addmm") and "host" not in n] for part in (before, between)]
    assert products[0][-1] == "addmm_2" and len(products[1]) == waited, names


@pytest.mark.slow
def test_without_times_copies_are_placed_by_the_lag():
    def pace(p: Program) -> dict[Node, float]:
        raise ValueError("no times")

    programs = traced("blocks.0")[0], traced("blocks.0")[0]
    best_effort._said.clear()
    with mock.patch.object(best_effort.log, "warning") as said:
        for program, how in zip(programs, ({}, {"pace": pace}), strict=True):
            pipeline.run(program, passes=pipeline.table(**how), listings=False)
    assert order(programs[0]) == order(programs[1]) and "times by which copies" in said.call_args[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("copying", [0.0, 1.0, 3.5, 100.0])
def test_backward_fetches_as_late_as_it_arrives(copying):
    """One after the other, in the order in which they are needed: none is late, unless all are launched at once."""
    _, program = traced("blocks.0")
    seconds: dict[Node, float] = {}

    def pace(p: Program) -> dict[Node, float]:
        products = (torch.ops.aten.mm.default, ops.mm)
        seconds.update({n: 1.0 for n in p.nodes if n.target in products})
        return seconds | {n: copying for n in p.nodes if n.target is ops.reload}

    pipeline.run(program, passes=pipeline.table(pace=pace), listings=False)
    now, free, complete, spare, start = 0.0, 0.0, dict[Node, float](), dict[Node, float](), None
    for node in program.nodes:
        if node.target is ops.reload:
            start = now if start is None else start
            free = complete[node] = max(now, free) + copying
        elif node.target is ops.wait and node.args[0] in complete:
            spare[node.args[0]] = now - complete[node.args[0]]  # type: ignore[index]
        now += seconds.get(node, 0.0)
    assert list(complete) == list(spare) and len(spare) > 5, "in the order in which they are needed"
    if copying > 1:
        assert start == 0.0 and min(spare.values()) < 0.0, "more than there is time for"
    else:
        assert start > 0.0 and min(spare.values()) >= 0.0 and list(spare.values())[-1] <= 1.0  # type: ignore[operator]


def test_clock_of_copies():
    """Each way has a link of its own; compute stands still where it waits."""
    forward, _ = traced("blocks.0")
    machine = hardware({"like": "h100", "host": {"bandwidth": 1e9, "latency": 1e-3}})
    pipeline.run(forward, listings=False)
    times = op_cost.op_times(forward, machine)
    launches = [n for n in forward.nodes if n.target is ops.offload]
    assert {times[n].transfer.link for n in launches} == {"host"}  # type: ignore[union-attr]
    spans = {span.node: span for span in simulate(forward, times)}
    last = -1.0
    for n in launches:
        assert spans[n].lane is Lane.HOST and spans[n].start >= last - 1e-12
        assert spans[n].end - spans[n].start == pytest.approx(1e-3 + byte_costs.nbytes(n.meta["val"]) / 1e9)
        last = spans[n].end
    exposed = sum(span.exposed for n, span in spans.items() if n.target is ops.wait)
    assert exposed > 0.5 * last
    fast = OffloadTiming(machine)(forward.copy())
    assert sum(fast.values()) < last * 1.5, "as if copies took no time"


@pytest.mark.slow
def test_microbatches_that_take_turns():
    programs = traced("blocks.0", together=2)
    for program in programs:
        pipeline.run(program, passes=pipeline.table(interleave=True), listings=False)
        assert byte_costs.on_host(program) == 2**23


@pytest.mark.slow
def test_layers_that_a_plan_offloads():
    """Every second of the first three, as its choices say."""
    with torch.device("meta"):
        model, ids = GPT(width=128, layers=4, length=64), torch.zeros(8, 64, dtype=torch.long)
    choice = Choice("Block", tuple(f"blocks.{i}" for i in range(4)), offloaded=(2, 3))
    ahead = {"prefetch": 1, "reduce_lag": 1}
    plan = mfsdp.Plan("GPT", 4, "", 0, 0.0, 0, 0, 0, 0, (choice,), ahead, {})
    forward, backward = mfsdp.trace(model, (ids,), world=4, units=[Block], plan=plan)
    for program, target in ((forward, ops.offload), (backward, ops.reload)):
        layers = {role(n).unit for n in program.nodes if n.target is target}  # type: ignore[union-attr]
        assert layers == {"blocks.0", "blocks.2"} and byte_costs.on_host(program) == 2 * 2**22


class Layers(nn.Module):
    """Two layers, of which the last one's result is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).cumsum(0).tanh()
        return x


@pytest.mark.parametrize("least, gone", [(1, ["tanh"]), (8 * 16 * 4 + 1, [])])
def test_what_goes(least, gone):
    """Not the caller's argument, what is returned, parameters that stay gathered, or what is small."""
    with torch.device("meta"):
        model, x = Layers(), torch.empty(8, 16)
    real = Capture.divide

    def all_layers(self: Capture, joint: torch.fx.GraphModule, *args: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta[LAYER] = "layers.0"
        return real(self, joint, *args)

    with offloaded("layers.0", least=least), mock.patch.object(Capture, "divide", all_layers):
        forward, backward = mfsdp.trace(model, (x,), world=2, units=["layers.*"], reshard_after_forward=False)
    assert len(forward.results()) > 3
    assert [n.args[0].name for n in forward.nodes if n.target is ops.offload] == gone
    assert [n.name for n in backward.nodes if n.target is ops.reload] == [f"{name}_back" for name in gone]


def test_parts_of_a_split_share_a_storage():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    whole = graph.call_function(torch.ops.aten.relu.default, (x,))
    parts = graph.call_function(torch.ops.aten.split.Tensor, (whole, 2, -1))
    norms = graph.call_function(torch.ops.aten.native_layer_norm.default, (whole, [4], None, None, 1e-5))
    of = [graph.call_function(operator.getitem, (many, 1)) for many in (parts, norms)]
    assert storage_of(of[0]) is whole and storage_of(of[1]) is of[1]
