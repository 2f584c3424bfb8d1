"""explain: the clock by hand and against measured steps, the ledger against live memory, tables, errors."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import mfsdp
from examples.bench import clock as bench_clock
from mfsdp import pipeline
from mfsdp.config import hardware
from mfsdp.config.hardware import Group, Hardware, Link, host_copy, transfer
from mfsdp.cost_model import fusion, op_cost
from mfsdp.cost_model.memory_model import STEPPING
from mfsdp.cost_model.timeline import simulate
from mfsdp.ir import byte_costs, printer
from mfsdp.ir.program import Program, operator
from mfsdp.ir.roles import role
from mfsdp.planning import explain as explaining
from mfsdp.planning import question
from tests.helpers.explained import PLAIN, built, hastily, held, sharding_of, toy, toys
from tests.helpers.models import GPT, Block, llama
from tests.helpers.toys import FIRST_STAGES, Toy2, toy2

aten = torch.ops.aten

ROOT = Path(__file__).parent.parent


FULL = 1056768 * 2
"""Bytes of a toy unit."""


GATHER = 7 / 8 * FULL / 1e9


def spec_of(world: int, outer: int = 1, outer_stride: int = 0) -> Any:
    """As much of a `Spec` as says who its groups are."""
    return SimpleNamespace(world=world, stride=1, outer=outer, outer_stride=outer_stride)


def spans(program: Any, times: dict[str, float], machine: Hardware = PLAIN) -> dict[str, tuple[float, float, float]]:
    """Start, end and exposed, by line."""
    estimates = op_cost.op_times(program, machine, measured=times)
    assert set(times) <= {n.name for n in estimates}
    return {s.node.name: (s.start, s.end, s.exposed) for s in simulate(program, estimates)}


def test_the_clock_by_hand():
    program = toy2()
    pipeline.run(program)
    names = [n.name for n in program.nodes if n.op == "call_function" and n.name.startswith("wait")]
    compute = {"addmm": 1e-3, "relu": 0.5e-3, "addmm_1": 1e-3, "relu_1": 0.5e-3}
    seen = spans(program, compute)
    want = {
        "u0_full": (0, GATHER, 0),
        names[0]: (0, GATHER, GATHER),
        "u1_full": (GATHER, 2 * GATHER, 0),
        "addmm": (GATHER, GATHER + 1e-3, 0),
        "relu": (GATHER + 1e-3, GATHER + 1.5e-3, 0),
        names[1]: (GATHER + 1.5e-3, 2 * GATHER, GATHER - 1.5e-3),
        "addmm_1": (2 * GATHER, 2 * GATHER + 1e-3, 0),
        "relu_1": (2 * GATHER + 1e-3, 2 * GATHER + 1.5e-3, 0),
    }
    for name, times in want.items():
        assert seen[name] == pytest.approx(times, abs=1e-12), name


class Attention(nn.Module):
    """Of a layer of Llama-3.2-1B, between its products."""

    def __init__(self, masked: bool, causal: bool):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.masked, self.causal = masked, causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        more = {"attn_mask": mask} if self.masked else {"is_causal": self.causal}
        return F.scaled_dot_product_attention(q * self.scale, k * self.scale, v * self.scale, **more)


def attention_seconds(machine: Hardware, masked: bool = False, causal: bool = False) -> float:
    """Forward and backward of attention alone, of 16 layers."""
    with torch.device("meta"):
        model = Attention(masked, causal)
        q, k, v = (torch.empty(2, 32, 4096, 64, dtype=torch.bfloat16) for _ in range(3))
        mask = torch.empty(2, 1, 4096, 4096, dtype=torch.bfloat16)
    found = 0.0
    for program in mfsdp.trace(model, (q, k, v, mask), world=1):
        lines = [x for x in op_cost.op_times(program, machine).items() if "attention" in str(x[0].target)]
        assert len(lines) == 1, "one line each way"
        found += 16 * lines[0][1].seconds
    return found


@pytest.mark.slow
def test_a_gpus_attention_costs_what_it_was_measured_to_cost():
    """clock.CAUSAL says where: 20.1 and 63.6 ms. Other machines' attention is a product."""
    h100 = hardware.KNOWN["h100"]
    causal, masked = attention_seconds(h100, causal=True), attention_seconds(h100, masked=True)
    assert causal == pytest.approx(20.1e-3, rel=0.01) and masked == pytest.approx(63.6e-3, rel=0.01)
    assert attention_seconds(h100) == pytest.approx(2 * causal), "an assumption: twice as many pairs"
    cpu = replace(h100, cuda=False)
    alike = attention_seconds(cpu, causal=True), attention_seconds(cpu, masked=True)
    assert alike[0] == alike[1] == pytest.approx(22.2e-3, rel=0.01)


def test_a_mask_is_read():
    """Where memory decides: q, k, v and what comes out, and 67 MB of mask, forward and backward."""
    slow = replace(hardware.KNOWN["h100"], bandwidth=1e10, reached_bandwidth=1.0)
    mask = 2 * 4096 * 4096 * 2
    more = attention_seconds(slow, masked=True) - attention_seconds(slow, causal=True)
    assert more == pytest.approx(16 * 2 * mask / 1e10)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_known_by_its_arguments(kind, backward):
    """Whichever kernel a program names, forward or backward."""
    name = f"_scaled_dot_product_{kind}_attention" + ("_backward" if backward else "")
    target = getattr(aten, name).default
    graph = torch.fx.Graph()
    some = graph.placeholder("some")

    def factor(mask: Any, causal: bool) -> float:
        values = {"is_causal": causal, "attn_bias": mask, "dropout_p": 0.0}
        args = [values.get(a.name, some) for a in target._schema.arguments if not a.kwarg_only]
        return op_cost._attention(graph.call_function(target, tuple(args)))

    assert factor(None, True) == op_cost.CAUSAL and factor(None, False) == op_cost.UNMASKED
    if kind != "flash":
        assert factor(some, False) == op_cost.MASKED
    assert op_cost._attention(graph.call_function(aten.mm.default, (some, some))) == 1


def test_without_prefetch_all_of_it_is_exposed_and_with_enough_compute_only_the_first():
    for depth, slow, exposed in ((0, 1.0, 2), (1, 1.0, 1), (1, 0.0, 2)):
        program = toy2()
        pipeline.run(program, passes=pipeline.table(depth))
        seen = spans(program, dict.fromkeys(("addmm", "relu", "addmm_1", "relu_1"), slow))
        assert sum(e for _, _, e in seen.values()) == pytest.approx(exposed * GATHER)


def test_two_groups_share_the_link_and_moving_bytes_takes_the_processor():
    program = toy2("backward")
    pipeline.run(program)
    busy = {n.name: 1e-3 for n in op_cost.op_times(program, PLAIN) if n.name.startswith(("mm", "sum", "threshold"))}
    link = Link(1e9, 0.0, cpu=0.5e-9)
    slowed = spans(program, busy, Hardware("", {"bf16": 1e12}, 1, 1e12, link, link, reached=1, reached_bandwidth=1))
    alone = spans(program, busy)
    # While u1 is gathered at full rate half of the processor is gone.
    first = next(n for n in alone if n.startswith("threshold"))
    assert alone[first][1] - alone[first][0] == pytest.approx(1e-3)
    at = slowed[first]
    assert at[1] - at[0] == pytest.approx(min(2e-3, GATHER + (1e-3 - GATHER / 2)), rel=1e-6)


def test_short_kernels_wait_for_their_launches_unless_the_host_is_ahead():
    program = toy2()
    pipeline.run(program)

    def seconds(machine: Hardware, fused: bool = True) -> list[float]:
        """Of addmm, relu, addmm, relu."""
        return [t.seconds for t in op_cost.op_times(program, machine, fused=fused).values() if t.seconds]

    quick = replace(PLAIN, flops={"bf16": 1e20}, bandwidth=1e20, kernel=1e-6)
    assert seconds(quick) == [1e-6] * 4
    late = [1e-6, 5e-6, 5e-6, 5e-6]
    assert seconds(replace(quick, launch=5e-6)) == pytest.approx(late) == seconds(replace(quick, dispatch=5e-6), False)
    assert seconds(replace(quick, dispatch=5e-6)) == [1e-6] * 4, "nothing is called from Python"
    assert seconds(replace(PLAIN, launch=5e-6)) == seconds(PLAIN), "behind a product of 500 us the host is ahead"


def test_a_restart_is_paid_by_whoever_finds_the_group_idle():
    program = toy2()
    pipeline.run(program, passes=pipeline.table(0))
    link = Link(1e9, 0.0, restart=0.5)
    machine = Hardware("", {"bf16": 1e12}, 1, 1e12, link, link, reached=1, reached_bandwidth=1)
    seen = spans(program, dict.fromkeys(("addmm", "relu", "addmm_1", "relu_1"), 1e-3), machine)
    assert sum(e for _, _, e in seen.values()) == pytest.approx(2 * 1.5 * GATHER)


def test_collectives_by_formula():
    h100 = mfsdp.config.hardware.KNOWN["h100"]
    n = 1e9
    inside = transfer("all_gather", n, Group.of(range(8), 8), h100)
    assert inside.moving == pytest.approx(7 / 8 * n / (450e9 * 0.85)) and inside.fixed == pytest.approx(7 * 2e-6)
    across = transfer("reduce_scatter", n, Group.of(range(64), 8), h100)
    assert across.moving == pytest.approx(63 / 64 * n / (8 * 50e9 * 0.85)), "eight cards a node"
    assert across.fixed == pytest.approx(55 * 2e-6 + 8 * 6e-6)
    odd = transfer("all_gather", n, Group.of(range(9), 8), h100)
    assert odd.fixed == pytest.approx(6 * 2e-6 + 2 * 6e-6) and odd.moving == pytest.approx(8 / 9 * n / (50e9 * 0.85))
    assert Group.of(range(6, 12), 8) == Group(6, 2, 2), "a group of neighbours that straddles two nodes"
    lonely = transfer("all_gather", n, Group.of(range(0, 64, 8), 8), h100)
    assert lonely.moving == pytest.approx(7 / 8 * n / (50e9 * 0.85)), "one card a node"
    big, small = (transfer("all_reduce", x, Group.of(range(64), 8), h100) for x in (100 * n, 1e3))
    assert big.moving == pytest.approx(200 * across.moving) and small.fixed < 2 * across.fixed
    assert transfer("all_gather", n, Group.of(range(1), 8), h100).seconds == 0
    copy = host_copy(n, h100)
    assert copy.moving == pytest.approx(n / 55e9) and copy.link == "host"
    assert host_copy(n, h100, back=True) == replace(copy, link="host back"), "both directions at once"


def test_seventy_two_ranks_that_are_linked():
    """An NVL72 rack: its nodes have four ranks, its links do not end there, and some groups straddle racks."""
    rack = mfsdp.config.hardware.KNOWN["gb200"]
    assert (rack.ranks_per_node, rack.linked) == (4, 72)
    n = 1e9
    inside, _ = op_cost.groups(spec_of(8), rack)
    assert inside == Group(8, 1, 8) and transfer("all_gather", n, inside, rack).link == "inside"
    whole, _ = op_cost.groups(spec_of(72), rack)
    assert transfer("all_gather", n, whole, rack).moving == pytest.approx(71 / 72 * n / (900e9 * 0.85))
    straddling, outer = op_cost.groups(spec_of(8, 5, 8), replace(rack, domain=36))
    assert straddling == Group(8, 2, 4), "the fifth: ranks 32 to 39"
    assert outer == Group(5, 2, 1), "ranks 0, 8, 16, 24 and 32"
    late, _ = op_cost.groups(spec_of(3, 512, 3), replace(rack, domain=512))
    assert late == Group(3, 2, 1), "the 171st: ranks 510 to 512"
    two, _ = op_cost.groups(spec_of(144), rack)
    assert two == Group(144, 2, 72)
    assert transfer("all_gather", n, two, rack).moving == pytest.approx(143 / 144 * n / (900e9 * 0.85))


def test_fused_neighbours_read_and_write_once():
    """relu(x + y) * 2: three kernels under ATen, one under Inductor, with two reads and a write instead of seven."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + y) * 2

    x = torch.empty(1000, 1000, device="meta")
    with torch.no_grad():
        program = mfsdp.trace(Chain(), (x, x.clone()), train=False).inference
    moved = {}
    for fused in (True, False):
        times = op_cost.op_times(program, PLAIN, fused=fused)
        moved[fused] = sum(t.seconds for t in times.values()) * 1e12 / 4e6
    assert moved[True] == pytest.approx(3) and moved[False] == pytest.approx(7)


def test_a_fused_kernel_holds_what_is_read_outside():
    """x @ a, then relu(h) * 2 + 1, then @ b, and again relu(h): under Inductor the second takes no memory."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            h = torch.relu(x @ a)
            return (h * 2 + 1) @ b + h

    x, n = torch.empty(256, 256, device="meta"), 4 * 256 * 256
    with torch.no_grad():
        program = mfsdp.trace(Chain(), (x, x.clone(), x.clone()), train=False).inference
    runs = fusion.fused(program)
    assert [[r.name for r in run] for run in runs] == [["relu", "mul", "add"], ["add_1"]]
    # mm, relu, mul, add, mm_1, add_1: mm is kept, from which both kernels compute relu
    assert [row.top // n for row in byte_costs.lines(program)] == [1, 2, 2, 3, 3, 3]
    assert [row.top // n for row in byte_costs.lines(program, runs)] == [1, 1, 1, 2, 3, 2]


def test_each_result_of_one_operator_goes_by_itself():
    """Sorted values are n bytes, their places 2 n. The first stay while a kernel computes relu anew of them; none of
    what is left takes the place of both.
    """

    class Anew(nn.Module):
        def forward(self, x: torch.Tensor, _: torch.Tensor) -> Any:
            values, places = x.sort(1)
            h = torch.relu(values)
            return (h * 2 + 1) @ x + h, places

    class Both(nn.Module):
        def forward(self, x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
            values, places = x.sort(1)
            return wide * values + places.float() @ x

    x, n = torch.empty(256, 256, device="meta"), 4 * 256 * 256
    for module, tops, left in ((Anew(), [3, 3, 3, 4, 5, 4], 3), (Both(), [3, 3, 4, 3, 5], 3)):
        program = mfsdp.trace(module, (x, torch.empty(3, 256, 256, device="meta")), train=False).inference
        rows = byte_costs.lines(program, fusion.fused(program))
        assert [row.top // n for row in rows] == tops, [row.node.name for row in rows]
        assert rows[-1].live // n == left


def test_what_inductor_only_calls_has_memory():
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).cumsum(1) * 2

    x, n = torch.empty(256, 256, device="meta"), 4 * 256 * 256
    program = mfsdp.trace(Chain(), (x,), train=False).inference
    runs = fusion.fused(program)
    assert [[r.name for r in run] for run in runs] == [["relu"], ["mul"]]
    assert [row.top // n for row in byte_costs.lines(program, runs)] == [1, 2, 1]


@pytest.mark.slow
def test_what_shares_storage_is_held_once():
    """Attention's backward reads three slices of one product, and its result, of which the next product read a view."""
    program = mfsdp.trace(GPT(), (torch.zeros(2, 8, dtype=torch.long),), units=[Block]).backward
    held, shared = byte_costs.saved(program)
    slices = [n for n in program.nodes if n.name.startswith("select") and n.op == "placeholder"]
    assert len(slices) == 3 * len({shared.get(n, n) for n in slices}) > 0
    product = next(held[n] for n in slices if n in held)
    assert product == 3 * byte_costs.nbytes(slices[0].meta["val"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("comm", "compute"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_backward_begins_with_what_forward_leaves_of_gathered_layers(world, comm, compute):
    """Whole buffers, a shard's cast on one rank, nothing where that is main weights; each parameter apart if it is cast
    for the model.
    """
    dtypes = {"param_comm_dtype": getattr(torch, comm), "compute_dtype": getattr(torch, compute)}
    policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=torch.float32, **dtypes)
    with torch.device("meta"):
        model, x = Toy2(), torch.empty(256, 1024)
    given = {"units": ["layers.0", "layers.2"], "mp_policy": policy, "reshard_after_forward": False}
    programs = mfsdp.trace(model, (x,), world=world, lowering="eager", **given)
    forward, backward = programs.forward, programs.backward
    for program in programs:
        pipeline.run(program, listings=False)
    left = byte_costs.lines(forward)[-1].live - sum(forward.slots.values())
    tangent = byte_costs.nbytes(forward.results()[0].meta["val"])  # what is returned is saved too, for relu's backward
    assert left == sum(byte_costs.saved(backward)[0].values()) - tangent > 0


def test_what_forward_returned_is_not_written_over():
    """The square's gradient takes the place of what forward saved, unless the caller has that too."""

    class Square(nn.Module):
        def __init__(self, both: bool):
            super().__init__()
            self.both = both

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            y = x @ w
            return (y.square().sum(), y.detach()) if self.both else y.square().sum()

    x, n = torch.empty(256, 256), 4 * 256 * 256
    for both in (False, True):
        program = mfsdp.trace(Square(both), (x, x.clone().requires_grad_()), lowering="inductor").backward
        runs = fusion.fused(program)
        before_the_product = [row for row in byte_costs.lines(program, runs) if not fusion.flops(row.node)]
        assert max(row.top for row in before_the_product) // n == 1 + both


def test_views_of_the_batch_are_the_callers():
    class Product(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x @ w

    x = torch.empty(256, 256)
    program = mfsdp.trace(Product(), (x, x.clone().requires_grad_())).backward
    assert {n.name: size for n, size in byte_costs.saved(program)[0].items()} == {"t": 0, "tangents_1": 4 * 256 * 256}


def test_narrow_products_are_priced_at_their_operands():
    class Scaled(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    a, one = torch.empty(512, 512, device="meta", dtype=torch.float8_e4m3fn), torch.ones((), device="meta")
    program = mfsdp.trace(Scaled(), (a, a.clone(), one), train=False).inference
    machine = replace(PLAIN, flops={"f32": 1.0, "bf16": 2.0, "f8": 4.0})
    assert sum(t.seconds for t in op_cost.op_times(program, machine).values()) == 2 * 512**3 / 4


def test_operations_are_counted():
    program = toy2()
    assert fusion.total_flops(program) == 2 * 2 * 256 * 1024 * 1024
    backward = toy2("backward")
    pipeline.run(backward)
    assert fusion.total_flops(backward) == 3 * 2 * 256 * 1024 * 1024, "the first layer's input needs no gradient"


CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, **kw: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *a, **kw: sdpa_backward_flop_count(*a[:4]),
}
"""What torch's own table leaves out."""


def counted(program: Program) -> int:
    """What torch counts while all operators of a program are called, one by one, on fake tensors."""
    with program._fake_mode, FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        for node in program.nodes:
            if node.op == "call_function" and "val" in node.meta and role(node) is None:
                target, args, kwargs = torch.fx.map_arg(operator(node), lambda n: n.meta["val"])
                target(*args, **kwargs)
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_operations_are_those_that_torch_counts(recompute):
    """Recomputed attention comes in a wrapper without a schema; the listing shows it as a line (invariant 55)."""
    model, ids = GPT(recompute=recompute, tied=False), torch.randint(31, (2, 8))
    programs = mfsdp.trace(model, (ids,), world=4, units=[Block])
    for program in programs:
        want = counted(program)
        pipeline.run(program)
        assert fusion.total_flops(program) == want > 0
    again = [x for x in byte_costs.lines(programs.backward) if printer.text(x.node).startswith("flash_attention")]
    assert len(again) == (4 if recompute else 2) and all("_backward" in printer.text(x.node) for x in again[1::2])
    assert all(op_cost.op_times(programs.backward, PLAIN)[x.node].flops > 0 for x in again)
    assert all(x.top - x.live + x.delta >= 0 and byte_costs.allocation(x.node) > 0 for x in again), "it fills memory"


def test_dropout_that_is_computed_again_is_a_line():
    class Dropping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: F.dropout(super(Dropping, self).forward(x), 0.5).sin(), x, use_reentrant=False)

    model = nn.Sequential(Dropping(8, 8), Dropping(8, 8))
    for program in list(mfsdp.trace(model, (torch.ones(4, 8),), world=4)):
        texts = [printer.text(x.node) for x in byte_costs.lines(program)]
        assert sum("native_dropout" in text for text in texts) >= 1, texts
        assert "run_" not in " ".join(texts)
        pipeline.run(program)
        printer.render(program, "end")


@pytest.fixture(scope="module", params=[(2,), pytest.param(range(3), marks=pytest.mark.exhaustive)], ids=str)
def steps(request: pytest.FixtureRequest) -> list[bench_clock.Step]:
    """Of some of the recorded depths, on all links. One trace serves all depths."""
    results = json.loads((ROOT / "examples/bench/results/results.json").read_text())
    rates = results["arguments"]["rates"].split(",")
    ours = [name for name in results[rates[0]]["rows"] if name.startswith("mfsdp, prefetch")]
    for rate in rates:
        rows = results[rate]["rows"]
        results[rate]["rows"] = {name: rows[name] for name in (ours[i] for i in request.param)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explaining, "trace", cache(explaining.trace))
        found = bench_clock.compare(results)
    assert len(found) == len(rates) * len(request.param)
    return found


@pytest.mark.slow
def test_measured_steps_are_predicted(steps):
    """Configurations on slow links, recorded; the clock was told only what was measured apart from them."""
    assert max(abs(s.error) for s in steps) < 0.15, bench_clock.table(steps)


@pytest.mark.slow
def test_and_so_is_their_order(steps):
    for a, b in combinations(steps, 2):
        if abs(a.measured / b.measured - 1) > 0.02:  # closer ones change places from run to run
            assert (a.measured < b.measured) == (a.predicted < b.predicted), (a, b)


def told(name: str, lowering: str, strategy: int) -> Any:
    """What explain says of two ranks' steps."""
    model, ids, _ = built(name)
    given = {"world": 2, "options": {"lowering": lowering, "check": False}, "hardware": PLAIN, "suggest": False}
    return mfsdp.explain(model, (ids,), **given, **sharding_of(name, strategy))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lowering", "strategy", "model", "off"),
    [
        pytest.param("eager", 2, "gpt", 0.002, marks=pytest.mark.exhaustive),
        pytest.param("eager", 3, "llama", 0.002, marks=pytest.mark.exhaustive),
        ("eager", 3, "gathered", 0.002),
        pytest.param("inductor", 3, "llama", 0.02, marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
        pytest.param("inductor", 3, "checkpointed", 0.05, marks=pytest.mark.inductor),
    ],
)
def test_the_ledger_is_what_a_rank_holds(two_ranks, lowering, strategy, model, off):
    report = told(model, lowering, strategy)
    for most in two_ranks.run(held, model, lowering, strategy, timeout=300):
        assert abs(report.peak / most - 1) < off, f"{report.peak} told, {most} held\n{report.ledger}"
        if model == "gathered":
            assert most <= report.peak + 64, (
                f"{report.peak} told, {most} held: more than the loss, its gradient, scalars\n{report.ledger}"
            )


def test_a_report_says_it_in_words():
    report = toy(world=8)
    text = str(report)
    for piece in ("Toy2 on 8 ranks", "main weights", "optimizer state", "peak", "fits in", "exposed communication",
                  "u0_full                p0 = all_gather", "suggestion: reduce_lag=2"):  # fmt: skip
        assert piece in text, piece
    assert report.listing("forward", "gather").startswith("; mfsdp  Toy2  gather  forward")
    assert sum(e.nbytes for e in report.ledger.entries) == report.peak
    assert report.step == pytest.approx(report.views[-1].lines[-1].end + report.optimizer)
    line = next(x for v in report.views for x in v.lines if x.name == "addmm")
    assert line.source.startswith("helpers/toys.py:") and line.source.endswith("return self.layers(x)")
    with pytest.raises(ValueError, match="phase='sideways': choose one of forward, backward"):
        report.listing("sideways")
    with pytest.raises(ValueError, match=f"stage='x': choose one of {FIRST_STAGES}"):
        report.listing("forward", "x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "communicators"),
    [({"world": 1}, 0), ({"world": 8}, 2), ({"mesh_shape": (2, 4)}, 4), ({"world": 8, "strategy": 0}, 2)],
)
def test_what_no_ledger_counts_is_named_on_cuda(arguments, communicators):
    report, elsewhere = toys(**arguments, hardware=["h100", PLAIN])
    line = next(x for x in report.summary().splitlines() if x.startswith("not counted: the CUDA context, "))
    assert report.communicators == communicators and "cuBLAS's workspaces" in line
    assert (f"NCCL's buffers for {communicators} communicators" in line) == (communicators > 0)
    assert not elsewhere.uncounted and "not counted" not in elsewhere.summary()


def one_forward_one_backward(stages: int, microbatches: int, f: float, b: float) -> tuple[float, list[int]]:
    """When the last backward ends, and how many microbatches' activations each stage has had at most: 1F1B, by hand."""
    order = []
    for s in range(stages):
        warm = min(stages - s - 1, microbatches)
        turns = [("f", i) for i in range(warm)]
        for i in range(microbatches):
            turns += [("f", warm + i)] if warm + i < microbatches else []
            turns += [("b", i)]
        order.append(turns)
    ended: dict[tuple[int, str, int], float] = {}
    at, done = [0.0] * stages, [0] * stages
    while any(n < len(turns) for n, turns in zip(done, order, strict=True)):
        for s in range(stages):
            while done[s] < len(order[s]):
                kind, i = order[s][done[s]]
                before = (s - 1, "f", i) if kind == "f" and s else (s + 1, "b", i) if kind == "b" else None
                if before is not None and before[0] < stages and before not in ended:
                    break
                at[s] = max(at[s], ended.get(before, 0.0) if before else 0.0) + (f if kind == "f" else b)
                ended[s, kind, i] = at[s]
                done[s] += 1
    held = []
    for turns in order:
        now, most = 0, 0
        for kind, _ in turns:
            now += 1 if kind == "f" else -1
            most = max(most, now)
        held.append(most)
    return max(ended.values()), held


@pytest.mark.slow
def test_a_pipeline_of_equal_stages():
    given = {"options": {"lowering": "eager"}, "units": [Block], "world": 2, "hardware": PLAIN, "optimizer": "none"}
    model = GPT(width=64, layers=2, tied=False)
    many, deep = [1, 2, 3, 8], [1, 2, 4]
    table = mfsdp.compare(model, (torch.zeros(64, 8, dtype=torch.long),), microbatches=many, stages=deep, **given)
    reports = dict(zip(product(many, deep), table, strict=True))
    for microbatches, stages in ((8, 4), (2, 4), (1, 2), (3, 1)):
        found, alone = reports[microbatches, stages], reports[microbatches, 1]
        forward, backward = (view.seconds for view in found.views)
        step, held = one_forward_one_backward(stages, microbatches, forward, backward)
        assert found.step == pytest.approx(step)
        assert found.bubble == pytest.approx(step * (stages - 1) / (microbatches + stages - 1))
        one = (found.stages[0] - alone.peak) / max(1, held[0] - 1)
        assert found.stages == pytest.approx([alone.peak + (n - 1) * one for n in held])
        there = next(e.nbytes for e in alone.ledger.entries if e.name == "activations saved by forward")
        assert there <= one < 1.5 * there or held[0] == 1, "some of them have gone at the peak"
        assert sum(e.nbytes for e in found.ledger.entries) == found.peak == found.stages[0]
        assert found.ranks == 2 * stages and found.slowed < 1e-9


def test_what_no_pipeline_can_be():
    with pytest.raises(ValueError, match="stages=0: give a positive number"):
        toy(stages=0)
    with pytest.raises(ValueError, match="a pipeline overlaps by itself"):
        toy(stages=2, microbatches=2, overlapped=True)


@pytest.mark.slow
def test_a_straggler_and_what_a_token_costs(tmp_path):
    alone = toys(world=1, slowest=[1.0, 1.5])
    assert alone.reports[1].step == pytest.approx(1.5 * alone.reports[0].step)
    full = toys(hardware=PLAIN, slowest=[1.0, 1.5])
    first, second = (report.step for report in full)
    assert first < second < 1.5 * first, "where the link is full nobody waits for him"
    with pytest.raises(ValueError, match=r"slowest=0.5: give how many times"):
        toy(slowest=0.5)
    model = GPT(width=64, layers=2)
    prices = tmp_path / "prices.json"
    prices.write_text('{"H100": 2.5, "a100": 1}')
    options = {"options": {"lowering": "eager"}, "units": [Block], "world": 4}
    ids = torch.zeros(8, 8, dtype=torch.long)
    table = mfsdp.compare(model, (ids,), prices=prices, hardware=["h100", "a100"], **options)
    report, _ = table
    assert report.cost == pytest.approx(2.5 * 4 * report.step / 3600 / (64 * 4) * 1e6)
    assert "per million tokens, at 2.5 for a rank and hour" in report.summary()
    assert "per million" in str(table)
    for wrong, message in (({"h100": 0}, "prices of h100: give positive"), ({"a100": 1}, "not of H100 SXM: add it")):
        with pytest.raises(ValueError, match=message):
            mfsdp.explain(model, (ids,), prices=wrong, **options)


def test_what_else_it_would_fit_on():
    report = toy(world=8, suggest=False)
    large = replace(report, ledger=replace(report.ledger, peak=int(100e9)))
    assert [name for name, fits in large.fits_on().items() if fits] == ["H200 SXM", "HGX B200", "GB200 NVL72"]
    assert (
        "on as many ranks fits in H200 SXM, HGX B200, GB200 NVL72; not in A100 SXM 80 GB, H100 SXM" in large.summary()
    )
    assert large.fits_on(PLAIN) == {"plain": False}
    measured = toy(world=8, hardware=replace(hardware.KNOWN["h100"], fixed=3 << 30), suggest=False)
    assert measured.peak == report.peak + (3 << 30) and "fixed" in measured.summary()
    assert "context" not in measured.uncounted and "context" in report.uncounted


@pytest.mark.slow
def test_suggestions_are_what_the_simulation_confirms():
    report = toy(world=8)
    assert report.suggestions
    for s in report.suggestions:
        changes = dict(part.split("=") for part in s.text.split(", "))
        again = toy(world=8, options={k: int(v) for k, v in changes.items()}, suggest=False)
        assert again.step == pytest.approx(s.step) and again.step < 0.99 * report.step and not again.suggestions


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_would():
    """The optimizer's temporaries are what is too much, then its state; then nothing helps but a plan."""
    small = replace(PLAIN, cuda=True)
    given = {"world": 2, "optimizer": "adamw", "options": {"prefetch": 0, "reduce_lag": 0, "pool": False}}
    peaks = [toy(hardware=small, stepping=s, suggest=False, **given).peak for s in STEPPING]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[2]
    for memory, text in ((peaks[2], 'fully_shard_optimizer(optimizer, offload="state")'), (peaks[2] - 1, None)):
        report = toy(hardware=replace(small, memory=memory), **given)
        assert [(s.text, s.peak) for s in report.suggestions] == ([(text, peaks[2])] if text else [])
        assert "mfsdp.plan(memory=...) looks for the fastest step that fits" in str(report)
    assert not [w for w in toy(hardware=small, **given).warnings if "plan" in w]


@pytest.mark.slow
def test_a_limit_on_memory_is_named():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    x = torch.empty(16, 1024)
    slow = Hardware("slow", {"f32": 1e10}, 10**9, 1e12, PLAIN.inside, PLAIN.between)
    report = mfsdp.explain(model, (x,), units=[nn.Linear], options={"max_unsharded": 5 << 20}, hardware=slow)
    assert "memory limit" in {x.why for x in report.exposed}
    assert "no max_unsharded" in {s.text for s in report.suggestions}
    assert "max_unsharded holds its launch back" in str(report)


@pytest.mark.slow
def test_a_table_of_combinations(tmp_path):
    found = toys(world=[8], options={"prefetch": [0, 1]}, strategy=[2, 3], hardware=["h100", PLAIN])
    assert len(list(found)) == 8
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["world", "hardware", "prefetch", "strategy"] and len(lines) == 9
    assert sum("best that fits" in line for line in lines) == 1
    best = found.reports[found.best]
    assert best.fits and best.step == min(r.step for r in found)
    small = Hardware("small", {"bf16": 1e12}, 1000, 1e12, Link(1e9, 0.0), Link(1e9, 0.0))
    none = toys(world=[2, 4], hardware=small)
    assert none.best is None and str(none).count("does not fit") == 2
    found.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_sharded_model_is_explained_as_it_is():
    """Per block, with arguments of their own, and what was set since."""
    with torch.device("meta"):
        model, plain = GPT(layers=1), GPT(layers=1)
    ids = torch.zeros(2, 8, dtype=torch.long)
    mfsdp.fully_shard(model.blocks[0], device="meta", reshard_after_forward=False, strategy=3)
    mfsdp.fully_shard(model, device="meta", mp_policy=mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
    given = {"world": 4, "options": {"lowering": "eager", "check": False}, "suggest": False}
    first = mfsdp.explain(model, (ids,), **given)
    model.blocks[0].set_reshard_after_forward(True)
    second = mfsdp.explain(model, (ids,), **given)
    assert first.listing("backward").count("all_gather") + 1 == second.listing("backward").count("all_gather")
    whole = mfsdp.fully_shard(GPT(layers=1), units=[Block])
    named = mfsdp.explain(plain, (ids,), units=[Block], **given)
    assert mfsdp.explain(whole, (ids,), **given).listing("forward") == named.listing("forward")
    with pytest.raises(ValueError, match="sharded already; leave out units"):
        mfsdp.explain(whole, (ids,), units=[Block])


@pytest.mark.slow
def test_what_has_changed_since_sharding():
    model = mfsdp.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), units=["0"])
    x = torch.empty(4, 8)
    assert mfsdp.explain(model, (x,), world=8, suggest=False).listing("backward").count("1/8") == 2
    model.set_gradient_divide_factor(3.0, recurse=True)
    assert mfsdp.explain(model, (x,), world=8, suggest=False).listing("backward").count("1/3") == 2
    model[0].weight.requires_grad_(False)
    part = mfsdp.explain(model, (x,), world=8, suggest=False)
    assert "u0_gfull" in part.listing("backward")
    model[0].requires_grad_(False)
    assert "u0_gfull" not in mfsdp.explain(model, (x,), world=8, suggest=False).listing("backward")
    frozen = mfsdp.fully_shard(nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)))
    frozen.requires_grad_(True)
    thawed = mfsdp.explain(frozen, (x,), world=8, suggest=False)
    assert len(thawed.views) == 2 and not model[0].weight.requires_grad


@pytest.mark.slow
def test_ignored_parameters_are_in_the_ledger():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1024, bias=False))
    ignored = list(model[1].parameters())
    report = mfsdp.explain(model, (torch.empty(2, 64),), ignored_params=ignored, suggest=False, world=4)
    entries = {e.name: e.nbytes for e in report.ledger.entries}
    assert entries["not sharded"] == 64 * 1024 * 4 and entries["main weights"] < 64 * 70 * 4
    assert entries["optimizer state"] > 2 * 64 * 1024 * 4 and not hasattr(ignored[0], "_mfsdp_ignored")
    sharded = mfsdp.fully_shard(model, ignored_params=ignored)
    again = mfsdp.explain(sharded, (torch.empty(2, 64),), suggest=False, world=4)
    assert {e.name: e.nbytes for e in again.ledger.entries} == entries
    none = mfsdp.explain(sharded, (torch.empty(2, 64),), suggest=False, world=4, optimizer="none")
    assert none.optimizer == 0 and "optimizer state" not in {e.name for e in none.ledger.entries}


def test_nothing_is_kept_and_nothing_is_changed():
    model = mfsdp.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), units=["0"])
    model.cache = torch.ones(3, requires_grad=True) * 2  # a tensor that is no buffer, and no leaf
    before = {n: (id(p), p.to_local().clone()) for n, p in model.named_parameters()}
    report = mfsdp.explain(torch.compile(model, backend="mfsdp"), (torch.empty(4, 8),), world=4)
    traced = weakref.ref(mfsdp.trace(model, (torch.empty(4, 8),), world=4).model)
    gc.collect()
    assert traced() is None and report.step > 0
    assert all(id(p) == before[n][0] and torch.equal(p.to_local(), before[n][1]) for n, p in model.named_parameters())
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match="Sequential cannot be copied to be traced"):
        mfsdp.explain(model, (torch.empty(4, 8),))


@pytest.mark.slow
def test_what_does_not_fit_gets_suggestions_that_do():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    machine = replace(PLAIN, memory=2_100_000, flops={"f32": 1e12})
    given = {"units": [nn.Linear], "world": 8}
    options = {p: {"prefetch": p, "reduce_lag": p} for p in (0, 2)}
    x = torch.empty(4, 256)
    peaks = [
        mfsdp.explain(model, (x,), hardware=machine, options=o, suggest=False, **given).peak for o in options.values()
    ]
    report = mfsdp.explain(model, (x,), hardware=replace(machine, memory=sum(peaks) // 2), options=options[2], **given)
    assert not report.fits and report.suggestions
    assert all(s.peak <= sum(peaks) // 2 for s in report.suggestions)


@pytest.mark.slow
def test_many_small_kernels_cost_no_more_than_they_are():
    """A run of neighbours is looked at once."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(150):
                x = torch.sin(x) + 1
            return x

    program = mfsdp.trace(Chain(), (torch.ones(4, requires_grad=True),)).backward
    looked = []
    original = op_cost.base_of
    try:
        op_cost.base_of = lambda node: looked.append(node) or original(node)
        op_cost.op_times(program, PLAIN)
    finally:
        op_cost.base_of = original
    assert len(looked) < 10 * len(program.nodes)


@pytest.mark.slow
def test_sixteen_thousand_ranks_and_two_levels():
    many = toy(world=16_384, suggest=False)
    assert many.world == 16_384 and {x.why for x in many.exposed} == {"latency"}
    two = toy(mesh_shape=(2048, 8), suggest=False)
    assert two.world == 16_384 and two.step < many.step, "gathers stay inside of a node"
    assert any(x.lane == "O" for v in two.views for x in v.lines)


@pytest.mark.slow
def test_experts_of_hugging_face():
    """Their products are grouped, and they are counted with an operator that CPUs have for floats alone."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    ids = torch.zeros(2, 16, dtype=torch.long)
    report = mfsdp.explain(model, (), {"input_ids": ids, "labels": ids}, units=["MixtralDecoderLayer"], suggest=False)
    experts = (32 * 2 * 48 + 48 * 32) * 2  # two experts for a token
    grouped = sum(x.flops for x in report.views[0].lines if "grouped_mm" in x.name)
    assert grouped == 2 * 32 * experts


@pytest.mark.slow
def test_hugging_face_and_tokens():
    with torch.device("meta"):
        model = llama()
    ids = torch.zeros(2, 16, dtype=torch.long)
    given = {"input_ids": ids, "labels": ids}
    report = mfsdp.explain(model, (), given, world=8, units=["LlamaDecoderLayer"], suggest=False)
    assert report.tokens == 32 and report.tokens_per_second == pytest.approx(32 * 8 / report.step)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    assert 1 < report.flops / (6 * 32 * matrices) < 1.2, "six operations per weight and token, and attention"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"world": 0}, "world=0: give a positive number"),
        ({"world": []}, r"world=\[\]: give one value, or call mfsdp.compare"),
        ({"mesh_shape": (2,)}, r"mesh_shape=\(2,\): give \(outer, shard\)"),
        ({"world": True}, "world=True: give a positive number"),
        ({"world": 4, "mesh_shape": (2, 4)}, "give one of them"),
        ({"mesh": None}, "mesh= is not needed: give world= or mesh_shape="),
        ({"hardware": "abacus"}, "hardware='abacus': neither a file nor one of a100, h100, h200, b200, gb200"),
        ({"options": {"prefetsh": 1}}, "does not know the option 'prefetsh'"),
        ({"optimizer": "magic"}, "optimizer='magic': choose one of adamw"),
        ({"strategy": 7}, "strategy=7: choose one of"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        toy(**kwargs)


@pytest.mark.dist
def test_this_machine(two_ranks, monkeypatch):
    alone, (first, second) = hastily(), two_ranks.run(hastily)
    assert alone.name == "this machine, one process: links as fast as memory"
    assert first.name == second.name == "this machine, 2 ranks"
    assert first.inside.bandwidth == second.inside.bandwidth, "ranks agree on their link"
    assert all(1e7 < x.inside.bandwidth < 1e12 and x.flops["f32"] > 1e8 for x in (alone, first, second))
    monkeypatch.setattr(question, "measure", lambda: alone)
    assert toy(hardware="this", suggest=False).machine == alone


def test_hardware_from_files(tmp_path):
    h100 = hardware.KNOWN["h100"]
    h100.save(tmp_path / "a.json")
    assert hardware.hardware(tmp_path / "a.json") == h100 == hardware.hardware("H100") == hardware.hardware(h100)
    (tmp_path / "b.json").write_text('{"like": "h100", "name": "slow", "between": {"bandwidth": 1e9, "latency": 1e-5}}')
    slow = hardware.hardware(str(tmp_path / "b.json"))
    assert slow.between == Link(1e9, 1e-5) and slow.inside == h100.inside and slow.name == "slow"
    for text, message in (
        ("{", "is no JSON"),
        ('{"like": "x"}', "is like 'x', which is none of"),
        ('{"like": "h100", "colour": 1}', "unknown fields colour"),
        ('{"name": "half"}', "missing"),
        ('{"like": "h100", "memory": 0}', "memory=0 must be positive"),
        ('{"like": "h100", "cuda": 1}', "cuda=1: choose true or false"),
        ('{"like": "h100", "domain": -8}', "domain=-8: give a number of ranks"),
        ('{"like": "h100", "host": {"bandwidth": 0, "latency": 0}}', "Link: bandwidth=0: give a positive number"),
    ):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            hardware.hardware(tmp_path / "c.json")
