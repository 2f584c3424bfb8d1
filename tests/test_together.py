"""Microbatches that take turns: in one program (`together`), and a backward beside a forward (`overlapped`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import microbatches as together_
from mfsdp.config.hardware import Hardware, Link
from mfsdp.ir import ops, printer
from mfsdp.ir.merge import merge
from mfsdp.ir.program import Program, view_of
from mfsdp.ir.roles import Kind, role
from mfsdp.ir.verifier import InvariantError, check
from mfsdp.passes import hide_collectives
from mfsdp.runtime import instrumentation, sync_collectives
from tests.helpers.collectives import parallel, programs
from tests.helpers.experts import sharded
from tests.helpers.models import GPT, Block
from tests.helpers.parallel import graphs, next_token, reset, tokens
from tests.helpers.parity import compiled, error


class Mixture(nn.Module):
    """A layer that sends all tokens to other ranks and back."""

    def __init__(self, group: Any, width: int = 8):
        super().__init__()
        self.group, self.router, self.up = group, nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).softmax(-1)[:, :1]
        there = fc.all_to_all_single_autograd(x * chosen, None, None, self.group)
        return x + fc.all_to_all_single_autograd(self.up(there).relu(), None, None, self.group)  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with mfsdp.fake_ranks(4, rank=1):
        reset()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ep"))["ep"].get_group()
        model = nn.Sequential(*(Mixture(group) for _ in range(2)))
        yield mfsdp.fully_shard(model, mesh=mesh["dp_shard"], units=[Mixture])


def step(run: Any) -> None:
    run(torch.randn(4, 8)).sum().backward()


def both(run: Any) -> None:
    a, b = mfsdp.together(run)([torch.randn(4, 8), (torch.randn(4, 8),)])
    (a.sum() + b.sum()).backward()


def computes(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and role(node) is None and view_of(node) is None


def exposed(p: Program) -> list[str]:
    """All-to-alls with no compute between launch and wait."""
    found, flying = [], {}
    for node in p.nodes:
        if node.target is ops.collective:
            flying[node] = False
        elif node.target is ops.wait and node.args[0] in flying:
            found += [] if flying.pop(node.args[0]) else [node.args[0].name]
        elif node.op == "call_function" and (computes(node) or node.target is ops.mm):
            flying = dict.fromkeys(flying, True)
    return found


@pytest.mark.slow
def test_one_program_for_both(model, golden):
    one = programs(model, step)
    reset()
    two = programs(model, both)
    assert [p.phase for p in two] == ["forward", "backward"]
    for alone, p in zip(one, two, strict=True):
        golden(f"mixture.together.{p.phase}", printer.render(p, "assign_groups"))
        for kind in (Kind.FULL, Kind.GSHARD):
            assert len(p.find(kind)) == len(alone.find(kind)), "one gather and one reduction for both"
        assert len(exposed(p)) <= 1
        assert sum(n.target is ops.collective for n in p.nodes) == 8


@pytest.mark.slow
def test_a_backward_beside_a_forward(model, golden):
    forward, backward = programs(model, step)
    merged = merge(backward, forward)[0]
    check(merged)
    golden("mixture.overlapped", printer.render(merged, "overlapped"))
    assert len(exposed(merged)) <= 2
    for part, prefix in ((backward, "b_"), (forward, "")):
        names = [prefix + n.name for n in part.nodes if n.op == "call_function"]
        assert [n.name for n in merged.nodes if n.name in set(names)] == names, "each keeps its own order"


@pytest.mark.slow
def test_constants_of_both_are_merged():
    """Under tensor parallelism an embedding has some, of the same names in forward and backward."""
    with mfsdp.fake_ranks(8, rank=3):
        reset()
        forward, backward = parallel(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp")))
    merged = merge(backward, forward)[0]
    check(merged)
    for program, prefix in ((forward, ""), (backward, "b_")):
        for node in program.graph.find_nodes(op="get_attr"):
            assert getattr(merged.gm, prefix + node.name) is getattr(program.gm, node.target)
    assert forward.graph.find_nodes(op="get_attr")


class Shared(Mixture):
    """Beside an expert that sees all tokens: computed when the others have been waited for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = super().forward(x)
        return routed.relu() + (x @ self.up.weight).sin()


def behind(p: Program, fills: Any) -> dict[str, list[str]]:
    """What runs between launch and wait of each all-to-all."""
    pipeline.run(p, upto="collective", listings=False)
    fills(p)
    check(p)
    found: dict[str, list[str]] = {}
    flying: list[str] = []
    for node in p.nodes:
        if node.target is ops.collective:
            flying.append(node.name)
        elif node.target is ops.wait and node.args[0].name in flying:
            flying.remove(node.args[0].name)
        elif computes(node):
            for name in flying:
                found.setdefault(name, []).append(node.name)
    return found


@pytest.mark.slow
def test_what_an_exchange_does_not_need_fills_it():
    with mfsdp.fake_ranks(4, rank=1):
        reset()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ep"))["ep"].get_group()
        model = nn.Sequential(*(Shared(group) for _ in range(2)))
        mfsdp.fully_shard(model, mesh=mesh["dp_shard"], units=[Shared])
        seen: list[Program] = []
        passes = (("look", lambda p: seen.append(p.copy())), *pipeline.PIPELINE)
        step(torch.compile(model, backend="mfsdp", options={"lowering": "eager", "passes": passes}))
        forward, backward = seen
        before, after = (behind(backward.copy(), fills) for fills in (lambda p: None, hide_collectives))
        assert not before and len(after) == 4
        assert all(any(name.startswith("mm") for name in names) for names in after.values()), "weights' gradients"
        none = behind(backward.copy(), partial(hide_collectives, most=0))
        assert not any("mm" in name for names in none.values() for name in names), "nothing lives longer"
        some = behind(backward.copy(), partial(hide_collectives, most=128))
        assert 0 < sum(map(len, some.values())) < sum(map(len, after.values()))
        shared = behind(forward.copy(), hide_collectives)
        assert [any("mm" in name for name in names) for names in shared.values()] == [True, True], shared


MUTATIONS = {
    11: lambda p: p.move([w for w in p.find(Kind.WAIT) if role(w.args[0]).kind is Kind.COLLECTIVE][:1], p.output),
    9: lambda p: [n.update_arg(2, 0) for n in p.nodes if n.target is ops.all_gather],
    14: lambda p: p.erase(p.find(Kind.ACCUMULATE)[0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("invariant", MUTATIONS)
def test_the_merged_program_is_checked(model, invariant):
    forward, backward = programs(model, step)
    merged = merge(backward, forward)[0]
    MUTATIONS[invariant](merged)
    with pytest.raises(InvariantError) as caught:
        check(merged)
    assert caught.value.invariant == invariant


class Order:
    """The operations of programs, as they run."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def program(self, outline: Any, run: Any, args: list[Any]) -> Any:
        return run(args)

    def operation(self, name: str, kernel: Any, args: tuple[Any, ...]) -> Any:
        out = kernel(*args)
        self.seen.append(name.partition(" ")[0])
        return out


@pytest.mark.slow
def test_it_runs_as_it_is_written(model):
    forward, backward = programs(model, step)
    merged = merge(backward, forward)[0]
    names = [n.target._schema.name.partition("::")[2] for n in merged.nodes if n.target in ops.SHOWN]
    reset()
    run, order = compiled(model, "eager"), Order()
    step(run)
    with mfsdp.overlapped(model):
        step(run)
        with instrumentation.observed(order):
            run(torch.randn(4, 8))
    assert order.seen == names


@pytest.mark.slow
def test_dense_models_share_gathers():
    """Half the gathers of accumulation, and at most one more unit whole at a time."""
    with mfsdp.fake_ranks(2):
        reset()
        model = mfsdp.fully_shard(GPT(layers=3), units=[Block])

        def train(run: Any) -> None:
            sum(out.sum() for out in mfsdp.together(run)([torch.randint(31, (2, 8)) for _ in range(2)])).backward()

        forward, backward = programs(model, train)
    for p in (forward, backward):
        assert len(p.find(Kind.FULL)) == 4
        live, most = 0, 0
        for node in p.nodes:
            live += (node.target is ops.all_gather) - (node.target is ops.free)
            most = max(most, live)
        assert most <= 3
    assert len(backward.find(Kind.GSHARD)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_equal_layers_of_all_microbatches(recompute):
    """Four of them, of which `regions` could make calls, give what two give, which are captured one by one."""
    reset()
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(layers=2, recompute=recompute), units=[Block])
    run = compiled(model, "eager")
    batches = [torch.randint(31, (2, 8)) for _ in range(2)]
    alone = [run(ids).square().mean() for ids in batches]
    sum(alone).backward()  # type: ignore[union-attr]
    want = [p.grad.full_tensor().clone() for p in model.parameters()]
    model.zero_grad()
    both = [out.square().mean() for out in mfsdp.together(run)(batches)]
    sum(both).backward()  # type: ignore[union-attr]
    assert all(map(torch.equal, alone, both))
    assert max(error(p.grad.full_tensor(), g) for p, g in zip(model.parameters(), want, strict=True)) < 1e-6


@pytest.mark.slow
def test_one_chain_is_left_alone():
    with mfsdp.fake_ranks(2):
        reset()
        model = mfsdp.fully_shard(GPT(layers=1), units=[Block])
        seen: list[Program] = []
        for interleave in (False, True):
            reset()
            passes = (("look", lambda p: seen.append(p.copy())),)
            options = {"lowering": "eager", "passes": passes, "interleave": interleave}
            torch.compile(model, backend="mfsdp", options=options)(torch.randint(31, (2, 8))).sum().backward()
    plain, turned = seen[:2], seen[2:]
    for a, b in zip(plain, turned, strict=True):
        assert sorted(n.name for n in a.nodes) == sorted(n.name for n in b.nodes)


def test_what_is_refused(monkeypatch):
    with pytest.raises(TypeError, match="give it the compiled model"):
        mfsdp.together(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="compiled by 'eager'"):
        mfsdp.together(torch.compile(nn.Linear(2, 2), backend="eager"))
    run = torch.compile(nn.Linear(2, 2), backend="mfsdp", options={"lowering": "eager"})
    both = mfsdp.together(run)
    assert mfsdp.together(run) is both, "made once"
    with pytest.raises(TypeError, match="give a list of microbatches, not Tensor"):
        both(torch.ones(2, 2))
    with pytest.raises(ValueError, match="no microbatch"):
        both([])
    with pytest.raises(TypeError, match="a microbatch is a tuple .* not list"):
        both([[torch.ones(2, 2)]])
    one, two = both([{"input": torch.ones(2, 2)}, torch.zeros(2, 2)])
    assert torch.equal(one, run(torch.ones(2, 2))) and torch.equal(two, run(torch.zeros(2, 2)))


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.attention(x).relu())  # type: ignore[no-any-return]


def plan(layers: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A schedule of one's own, which calls what is in the units and never the units."""
    for layer in layers:
        a, b = layer.attention(a).relu(), layer.attention(b).relu()
        a, b = layer.experts(a), layer.experts(b)
    return (a + b).sum()


@pytest.mark.slow
def test_schedules_that_call_what_is_in_a_unit(monkeypatch):
    """One gather for forward, one for backward, one reduction; uncompiled, where the schedule itself brackets them."""
    counts: list[str] = []
    with mfsdp.fake_ranks(2):
        reset()
        model = mfsdp.fully_shard(nn.Sequential(Pieces(), Pieces()), units=[Pieces])
        seen: list[Program] = []
        options = {"lowering": "eager", "passes": (*pipeline.PIPELINE, ("look", lambda p: seen.append(p.copy())))}
        torch.compile(plan, backend="mfsdp", options=options)(model, torch.ones(2, 8), torch.ones(2, 8)).backward()
        assert [[len(p.find(kind)) for kind in (Kind.FULL, Kind.GSHARD)] for p in seen] == [[2, 0], [2, 2]]
        for name in ("gather_now", "reduce_now"):
            real = getattr(sync_collectives, name)
            monkeypatch.setattr(sync_collectives, name, lambda *args, r=real, n=name: (counts.append(n), r(*args))[1])
        with pytest.warns(UserWarning, match="outside of a compiled graph"):
            for layer in model:
                layer.unshard()
            plan(model, torch.ones(2, 8), torch.ones(2, 8)).backward()
            for layer in model:
                layer.reshard()
            assert sorted(counts) == ["gather_now"] * 2 + ["reduce_now"] * 2
            counts.clear()
            plan(model, torch.ones(2, 8), torch.ones(2, 8)).backward()
        assert counts.count("gather_now") > 2, "each call gathers for itself"


class Late(nn.Linear):
    """A weight's gradient comes when it is asked for, as in TransformerEngine."""

    later = True

    def need_backward_dw(self) -> bool:
        return self.later


def test_late_gradients_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), Late(4, 4))
    with pytest.raises(NotImplementedError, match=r"gradient of 1.weight comes by Late.backward_dw\(\)"):
        mfsdp.fully_shard(model)
    model[1].later = False
    mfsdp.fully_shard(model)


SLOW = Hardware("slow", {"f32": 1e12}, 10**12, 1e12, Link(1e10, 1e-6), Link(1e10, 1e-6), reached=1, kernel=1e-7)


def explained(ask: Any, **more: Any) -> Any:
    """What `mfsdp.explain` or `mfsdp.compare` says of a mixture over (efsdp 4, ep 2)."""
    with mfsdp.fake_ranks(8, rank=3):
        reset()
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",))
        sparse = init_device_mesh("cpu", (4, 2), mesh_dim_names=("efsdp", "ep"))
        with torch.device("meta"):
            model = nn.Sequential(*(Mixture(sparse["ep"].get_group(), 256) for _ in range(3)))
        for layer in model:
            layer.up.weight.allreduce = layer.up.bias.allreduce = False
            mfsdp.fully_shard(layer.up, mesh=sparse["efsdp"], device="meta")
        mfsdp.fully_shard(model, mesh=mesh, units=[Mixture], device="meta")
        x = torch.empty(4096, 256)
        return ask(model, (x,), hardware=SLOW, options={"lowering": "eager"}, **more)


@pytest.mark.slow
def test_microbatches_are_explained(tmp_path):
    table = explained(mfsdp.compare, microbatches=4, together=[1, 2], overlapped=[False, True])
    plain, turns, pairs, both = table
    assert [r.world for r in table] == [8] * 4 and [r.schedule for r in table] == [
        "4 microbatches", "4 microbatches, overlapped",
        "4 microbatches, 2 together", "4 microbatches, 2 together, overlapped",
    ]  # fmt: skip
    assert [[(v.phase, v.runs) for v in r.views] for r in table] == [
        [("forward", 4), ("backward", 4)],
        [("forward", 1), ("overlapped", 3), ("backward", 1)],
        [("forward", 2), ("backward", 2)],
        [("forward", 1), ("overlapped", 1), ("backward", 1)],
    ]
    for r in table:
        assert r.step == pytest.approx(sum(v.runs * v.seconds for v in r.views) + r.optimizer)
        assert r.drawn == pytest.approx(sum(v.seconds for v in r.views) + r.optimizer)
        waits = sum(x.seconds for x in r.exposed)
        assert r.step == pytest.approx(r.compute + waits, rel=1e-6), "compute works or stands still"
    forward, backward = (v.seconds for v in plain.views)
    beside = turns.views[1]
    assert max(forward, backward) < beside.seconds < forward + backward
    assert turns.compute == pytest.approx(plain.compute) and turns.peak > plain.peak
    assert pairs.step < turns.step < plain.step and pairs.flops == plain.flops == both.flops
    assert "overlapped" in turns.listing("overlapped") and "b_all_to_all" in turns.listing("overlapped")
    text = turns.summary()
    assert "4 microbatches, overlapped" in text and re.search(r"overlapped +[\d.]+ [mu]s   3 times", text)
    turns.html(tmp_path / "report.html")
    assert "slow; 4 microbatches, overlapped" in (tmp_path / "report.html").read_text()
    turns.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if "dur" in e) == pytest.approx(1e6 * turns.drawn)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_dense_models_together_are_explained():
    """Where links are the bottleneck two microbatches take half the gathers; side by side they have nothing to hide."""
    given: dict[str, Any] = {"world": 8, "units": [Block], "hardware": SLOW}
    given["options"] = {"lowering": "eager"}
    model, ids = GPT(width=64, layers=1), torch.zeros(2, 8, dtype=torch.long)
    alone, pairs = mfsdp.compare(model, (ids,), microbatches=2, together=[1, 2], **given)
    assert pairs.step < 0.7 * alone.step and pairs.tokens == alone.tokens == 32 and pairs.peak > alone.peak
    report = mfsdp.explain(model, (ids,), microbatches=2, overlapped=True, **given)
    assert report.step == alone.step and "exchanges nothing" in report.warnings[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"microbatches": 3, "together": 2}, "microbatches=3, together=2: give a multiple"),
        ({"together": 0}, "together=0: give a positive number"),
        ({"microbatches": True}, "microbatches=True: give a positive number"),
        ({"overlapped": 1}, "overlapped=1: choose True or False"),
    ],
)
def test_what_explain_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        mfsdp.explain(nn.Linear(4, 4), (torch.ones(2, 4),), **given)


def test_graph_breaks_are_told(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(together_.log, "warning", lambda text, *words: told.append(text % words))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *args: torch._dynamo.graph_break())
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    for _ in range(2):
        out = mfsdp.together(run)([torch.ones(2, 2), torch.zeros(2, 2)])
    assert torch.equal(out[0], model(torch.ones(2, 2)))
    told = [line for line in told if "together" in line]
    assert len(told) == 1 and "the graph of Sequential breaks" in told[0]


def losses_and_gradients(lowering: str) -> tuple[list[bool], float, tuple[int, int]]:
    """Whether losses are bitwise those of each microbatch alone, how far gradients are from accumulation's. Inductor's
    are compared with those of the uncompiled model.
    """
    _, model = sharded(2, layers=1)
    run, rank = compiled(model, lowering), dist.get_rank()
    batches = [tokens(100 * m + rank) for m in range(2)]
    outs = mfsdp.together(run)([b[:, :-1] for b in batches])
    losses = [F.cross_entropy(o.flatten(0, 1), b[:, 1:].flatten()) for o, b in zip(outs, batches, strict=True)]
    sum(losses).backward()  # type: ignore[union-attr]
    made = graphs()
    mine = [p.grad.full_tensor().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    same = []
    for batch, loss in zip(batches, losses, strict=True):
        alone = next_token(run if lowering == "eager" else model, batch)
        same.append(torch.equal(alone, loss) if lowering == "eager" else error(alone, loss) < 1e-12)
        alone.backward()
    return same, max(error(a, p.grad.full_tensor()) for a, p in zip(mine, model.parameters(), strict=True)), made


@pytest.mark.dist
@pytest.mark.parametrize(
    "lowering", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
)
def test_experts_whose_splits_depend_on_data(two_ranks, lowering):
    for same, wrong, made in two_ranks.run(losses_and_gradients, lowering, timeout=500):
        assert all(same) and wrong < 1e-12 and made == (1, 0)
