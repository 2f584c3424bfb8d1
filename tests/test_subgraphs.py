"""Programs in stretches: kinds do not grow with depth, nothing is read behind its death, the driver is the listing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.codecache import compiled_fx_graph_hash

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import lowering, schedule_check, stitched
from mfsdp.compiler.subgraphs import CannotSplit, Step, Subgraph, base, scheduled, split
from mfsdp.compiler.tracing import Programs
from mfsdp.ir import ops
from mfsdp.ir.program import LAYER, Program
from mfsdp.ir.verifier import InvariantError
from mfsdp.runtime.instrumentation import observed
from tests.helpers.models import CASES, GPT, Block
from tests.helpers.parity import batches, build, compiled, whole
from tests.helpers.without_inductor import without_inductor

GATHERED = {"one by one": {}, "one rank": {"world": 1}, "kept": {"strategy": 0}}
"""How layers get their weights: each before it runs, or without an operation between layers."""


@cache
def traced(layers: int, train: bool = True, gathered: str = "one by one") -> Programs:
    with torch.device("meta"):
        model, ids = GPT(layers=layers), torch.empty(2, 8, dtype=torch.long)
    more: dict[str, Any] = {"world": 2, "units": [Block], **GATHERED[gathered]}
    programs = mfsdp.trace(model, (ids,), lowering="stitched", train=train, **more)
    for program in programs:
        pipeline.run(program, listings=False)
    return programs


def program(layers: int, phase: str, gathered: str = "one by one") -> Program:
    found = getattr(traced(layers, phase != "inference", gathered), phase).copy()
    lowering.strip(found.gm)
    return found


def steps(found: Program) -> tuple[list[Step], list[Subgraph]]:
    out = split(found.gm)
    return out, [s for s in out if isinstance(s, Subgraph)]


PHASES = ["forward", "backward", "inference"]


@pytest.mark.slow
@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("phase", PHASES)
def test_kinds_do_not_grow_with_depth(phase, gathered):
    """Neither in number nor in size; all layers of backward, and all of forward but the first, are of one."""
    few, many = ([s.kind for s in steps(program(n, phase, gathered))[1]] for n in (5, 7))
    assert len(many) > len(few) and set(many) == set(few) and len(set(few)) < 8
    layers = [kind for kind in few if "scaled_dot_product" in str(kind)]
    assert len(layers) == 5 and len(set(layers)) == (1 if phase == "backward" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_what_dies_is_of_a_kind(phase):
    """The first subgraph of a kind is compiled for all: what it may overwrite, the others must not read later."""
    dying: dict[Any, set[Any]] = {}
    for s in steps(program(4, phase))[1]:
        dying.setdefault(s.kind, set()).add(tuple(s.inputs.index(n) for n in s.dying))
    assert all(len(places) == 1 for places in dying.values()) and any(map(any, dying.values()))


aten = torch.ops.aten


class Graph:
    """A graph of values [4, 8], written by hand."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()

    def value(self, name: str, *shape: int) -> torch.fx.Node:
        return self._with(self.graph.placeholder(name), torch.empty(shape or (4, 8), device="meta"))

    def call(self, target: Any, *args: Any, layer: str = "") -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update({LAYER: layer} if layer else {})
        real = torch.fx.map_arg(args, lambda n: n.meta["val"])
        return self._with(node, target(*real))

    def operation(self) -> None:
        """Something that is scheduled, and touches a value of its own."""
        self.call(ops.wait, self.value(f"own{len(self.graph.nodes)}"), [])

    def _with(self, node: torch.fx.Node, value: Any) -> torch.fx.Node:
        node.meta["val"] = value
        return node

    def subgraphs(self, *results: torch.fx.Node) -> list[str]:
        """The operators that each subgraph calls."""
        self.graph.output(results)
        self.steps = split(torch.fx.GraphModule(nn.Module(), self.graph))
        found = [[n for n in s.nodes if n.op == "call_function"] for s in self.steps if isinstance(s, Subgraph)]
        return [" ".join(n.target._schema.name.removeprefix("aten::") for n in nodes) for nodes in found]


def test_a_norm_moves_to_what_reads_it():
    """With the residual sum that it reads: one kernel with the product by the norm's weight, which is waited for."""
    g = Graph()
    x, w = g.value("x"), g.value("w", 8, 8)
    added = g.call(aten.add.Tensor, g.call(aten.mm.default, x, w), x)
    mean = g.call(aten.mean.dim, g.call(aten.mul.Tensor, added, added), [-1], True)
    normed = g.call(aten.div.Tensor, added, mean)
    scale = g.value("scale")
    g.call(ops.wait, scale, [])
    out = g.call(aten.mm.default, g.call(aten.mul.Tensor, normed, scale), w)
    assert g.subgraphs(out, added) == ["mm", "add mul mean div mul mm"]


def test_a_reduction_stays_that_would_keep_what_it_reduces():
    g = Graph()
    x = g.value("x", 4, 2)
    wide = g.call(aten.mm.default, x, g.value("w", 2, 8))
    mean = g.call(aten.mean.dim, wide, [-1], True)
    y = g.value("y")
    g.call(ops.wait, y, [])
    out = g.call(aten.mul.Tensor, y, mean)
    assert g.subgraphs(out) == ["mm mean", "mul"]


@pytest.mark.parametrize("layer", ["layers.1", "layers.0"])
def test_what_follows_a_launch_moves_back_in_its_layer(layer):
    """The second gradient of a norm, with what it reads besides: one kernel with the first, which is reduced."""
    g = Graph()
    x, rstd, scale = g.value("x"), g.value("rstd", 4, 1), g.value("scale")
    product = g.call(aten.mm.default, x, g.value("w", 8, 8), layer="layers.1")
    weighted = g.call(aten.mul.Tensor, product, scale, layer="layers.1")
    bias = g.call(aten.sum.dim_IntList, weighted, [0], layer="layers.1")
    g.call(ops.wait, bias, [])
    cubed = g.call(aten.pow.Tensor_Scalar, rstd, 3, layer=layer)
    inner = g.call(aten.sum.dim_IntList, g.call(aten.mul.Tensor, weighted, cubed, layer=layer), [1], True, layer=layer)
    out = g.call(aten.sub.Tensor, weighted, inner, layer=layer)
    together = ["mm mul sum pow mul sum sub"]
    assert g.subgraphs(out) == (together if layer == "layers.1" else ["mm mul sum", "pow mul sum sub"])


def test_what_moves_back_keeps_no_more_in_memory():
    """The residual sum is read again: a norm of it that moved back would be written besides."""
    g = Graph()
    x, scale, gathered = g.value("x"), g.value("scale"), g.value("gathered")
    g.call(ops.wait, scale, [])  # so that the sum does not move on
    product = g.call(aten.mm.default, x, g.value("w", 8, 8))
    added = g.call(aten.add.Tensor, g.call(aten.mul.Tensor, product, scale), x)
    g.operation()
    normed = g.call(aten.div.Tensor, added, g.call(aten.mean.dim, added, [-1], True))
    g.call(ops.wait, gathered, [])
    out = g.call(aten.mul.Tensor, normed, gathered)
    assert g.subgraphs(out, added) == ["mm mul add", "mean div mul"]


def test_what_dies_in_one_only_is_overwritten_in_none():
    g = Graph()
    x = shared = g.call(aten.mm.default, g.value("x"), g.value("w", 8, 8))
    for _ in range(3):
        g.operation()
        x = g.call(aten.mm.default, g.call(aten.add.Tensor, x, shared), g.value(f"w{len(g.graph.nodes)}", 8, 8))
    g.subgraphs(x)
    *_, one, other = (s for s in g.steps if isinstance(s, Subgraph))
    assert one.kind == other.kind and shared not in one.dying
    assert [s.inputs.index(n) for s in (one, other) for n in s.dying] == [0, 0] and shared in other.inputs


@pytest.mark.parametrize("apart", [0, 64])
def test_layers_are_cut_if_they_are_equal(apart):
    """Views of one buffer at other offsets make them different: a cut would only cost."""
    g = Graph()
    x, flat = g.value("x"), g.value("flat", 8 * 64)
    for i in range(5):
        weight = g.call(aten.as_strided.default, flat, [8, 8], [8, 1], i * apart)
        path = f"layers.{i}"
        x = g.call(aten.add.Tensor, g.call(aten.mm.default, x, weight, layer=path), x, layer=path)
    assert len(g.subgraphs(x)) == (1 if apart else 5)


@pytest.mark.slow
def test_a_stretch_begins_with_the_sum_that_its_norm_reads():
    """Inductor fuses the two, and does not see beyond a stretch."""
    found = program(4, "forward")
    _, stretches = steps(found)
    norm = next(n for n in stretches[2].nodes if n.target is torch.ops.aten.var_mean.correction)
    assert base(norm.args[0]) in stretches[2].nodes and base(norm.args[0]).target is torch.ops.aten.add.Tensor


@pytest.mark.slow
def test_a_sum_of_two_branches_is_computed_where_they_are():
    """What follows the launch of a reduction and reads nothing of it goes before it, into a kernel that is there."""
    _, stretches = steps(program(6, "backward"))
    assert min(sum(n.op == "call_function" for n in s.nodes) for s in stretches) > 2


@pytest.mark.slow
def test_what_follows_pointwise_is_computed_again():
    """Of a GELU that is computed in one stretch and differentiated in another only the argument is kept."""
    with torch.device("meta"):
        model, ids = GPT(layers=2, recompute=True), torch.empty(2, 8, dtype=torch.long)
    found = mfsdp.trace(model, (ids,), world=2, units=[Block], lowering="stitched").backward
    pipeline.run(found, listings=False)
    lowering.strip(found.gm)
    _, stretches = steps(found)
    erfs = [n for n in found.nodes if n.target is torch.ops.aten.erf.default]
    assert sum(s.nodes.count(n) for n in erfs for s in stretches) > len(erfs) == 2
    kept = {n for s in stretches for n in s.outputs}
    assert not kept.intersection(erfs) and not kept.intersection(u for n in erfs for u in n.users)


@pytest.mark.slow
@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("phase", PHASES)
def test_every_value_is_there_when_it_is_read_and_nothing_is_read_once_dead(phase, gathered):
    found = program(5, phase, gathered)
    out, _ = steps(found)
    there = set(found.gm.graph.find_nodes(op="placeholder"))
    dead: set[Any] = set()
    for step in out:
        reads = step.inputs if isinstance(step, Subgraph) else step.all_input_nodes
        assert there.issuperset(reads) and dead.isdisjoint(map(base, reads))
        if isinstance(step, Subgraph):
            assert not any(base(n) is not n for n in [*step.inputs, *step.outputs]), "no views go in or out"
            dead.update(step.dying)
            there.update(step.outputs)
        else:
            there.add(step)
    results = found.gm.graph.output_node().all_input_nodes
    assert there.issuperset(results) and dead.isdisjoint(map(base, results))
    assert dead


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_the_driver_is_the_listing(phase):
    """Law 16, which cannot be broken by a compiler here; a driver that is written wrongly is noticed."""
    found = program(4, phase)
    expected, (out, _) = schedule_check.listed(found, driven=True), steps(found)
    text = stitched.driver(found.gm.graph, out, {s: "Body0" for s in out if isinstance(s, Subgraph)})
    schedule_check.compare(expected, text, driven=True)
    lines = text.splitlines()
    a, b = [i for i, line in enumerate(lines) if "Kernels.all_gather" in line or "Kernels.reduce_scatter" in line][:2]
    lines[a], lines[b] = lines[b], lines[a]
    with pytest.raises(InvariantError, match="invariant 16"):
        schedule_check.compare(expected, "\n".join(lines), driven=True)
    del lines[a]
    with pytest.raises(InvariantError, match="invariant 16"):
        schedule_check.compare(expected, "\n".join(lines), driven=True)


class Opaque:
    """A constant that is no tensor, as TransformerEngine's quantizers among a program's results."""

    def __init__(self, number: int):
        self.number = number

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return f"Opaque({self.number})", {"Opaque": Opaque}


def test_opaque_constants_are_results():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"), Opaque(3)))
    drives = stitched.Stitched(stitched.driver(graph, [], {}), {}, {}, stitched._opaque(graph), {})
    x, made = drives([torch.ones(1)])
    assert x.item() == 1 and made.number == 3


def test_what_stretches_cannot_hold_is_compiled_as_one_graph(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(stitched.log, "info", lambda text, *words: told.append(text % words))
    found = program(4, "inference")
    node = next(n for n in found.nodes if n.target is torch.ops.aten.embedding.default)
    monkeypatch.setattr("mfsdp.compiler.subgraphs.symbolic", lambda value: value is node.meta["val"])
    with pytest.raises(CannotSplit, match=f"the size of {node.name} is not known"):
        split(found.gm)
    one = stitched.stitched(lambda *_, **__: "whole", lambda *_, **__: "each")
    assert one(found.gm, []) == "whole" and node.name in told[0]
    assert one(program(4, "inference").gm, [], cpp_wrapper=True) == "whole" and "cpp_wrapper" in told[1]


class Odd(nn.Module):
    """What stretches have to carry: a constant, several results, a written buffer, views that are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.register_buffer("seen", torch.ones(6))
        self.register_buffer("before", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        before = self.seen * 2
        x = x + before
        for layer in self.layers:
            values, places = layer(x).sort(dim=-1)
            x = x + values * weights + places.detach() % 3
            self.seen += x.detach().mean(0)
        self.before.copy_(before)
        return x.t(), x[1:], x.sum(), values.chunk(2, dim=1)[1], self.layers[0].weight


def differences(names: list[str]) -> list[str]:
    """What differs between a model in stretches and as one graph, after two steps."""
    out = []
    for name in names:
        torch._dynamo.reset()
        _, model = build(CASES[name])
        twin = copy.deepcopy(model)
        with without_inductor():
            runs = [compiled(model, "stitched"), compiled(twin, "whole")]
            for step in range(2):
                batch = batches(CASES[name], step)[torch.distributed.get_rank()]
                losses = []
                for run in runs:
                    torch.manual_seed(step)
                    losses.append(CASES[name].loss(run, batch))
                    losses[-1].backward()
                out += [f"{name}: loss"] if not torch.equal(*losses) else []
                with torch.no_grad():
                    out += [f"{name}: eval"] if not torch.equal(*(CASES[name].loss(run, batch) for run in runs)) else []
        for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            a, b = whole(p.grad), whole(q.grad)
            out += [f"{name}: {n}"] if (a is None) != (b is None) or not (a is None or torch.equal(a, b)) else []
        out += [
            f"{name}: buffer {n}" for (n, p), q in zip(model.named_buffers(), twin.buffers()) if not torch.equal(p, q)
        ]
    return out


@pytest.mark.dist
@pytest.mark.parametrize(
    "names", [["gpt_checkpointed"], pytest.param(["conv", "twice", "frozen"], marks=pytest.mark.exhaustive)]
)
def test_stretches_compute_what_one_graph_computes(two_ranks, names):
    assert two_ranks.run(differences, names, timeout=300) == [[], []]


class Names:
    """What programs run, and what their listings say."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.listed: list[str] = []

    def program(self, outline: Any, run: Callable[..., Any], args: list[Any]) -> Any:
        self.listed += outline.operations
        return run(args)

    def operation(self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.ran.append(name)
        return kernel(*args)


def odd(strategy: int) -> bool:
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Odd(), units=["layers.*"], strategy=strategy)
    twin = copy.deepcopy(model)
    results = []
    with without_inductor():
        for run in (compiled(model, "stitched"), compiled(twin, "whole")):
            torch.manual_seed(torch.distributed.get_rank())
            names = Names()
            with observed(names):
                outs = run(torch.randn(4, 6))
                sum(o.square().sum() for o in outs).backward()
            assert names.ran == names.listed and names.ran
            results.append([*outs])
    grads = [[whole(p.grad) for p in m.parameters()] for m in (model, twin)]
    same = [torch.equal(a, b) for pair in (results, grads) for a, b in zip(*pair, strict=True)]
    same += [torch.equal(model.seen, twin.seen), torch.equal(model.before, twin.before)]
    return all(same) and torch.equal(model.before, torch.full((6,), 2.0)) and not torch.equal(model.seen, torch.ones(6))


@pytest.mark.dist
def test_constants_buffers_and_views_go_through_stretches(two_ranks):
    assert two_ranks.run(odd, 3) == two_ranks.run(odd, 0) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_what_is_waited_for_is_read_behind_the_wait_as_in_the_listing(phase, strategy):
    """Compute that is moved over operations of the schedule reads nothing that they touch."""
    with torch.device("meta"):
        model = nn.Sequential(*(Biased() for _ in range(4)))
        x = torch.empty(4, 6)
    programs = mfsdp.trace(
        model, (x,), world=2, units=[Biased], lowering="stitched", strategy=strategy, train=phase != "inference"
    )
    found = getattr(programs, phase)
    pipeline.run(found, listings=False)
    lowering.strip(found.gm)
    listed = {node: i for i, node in enumerate(found.nodes)}
    where: dict[Any, int] = {}
    out, _ = steps(found)
    for i, step in enumerate(out):
        own = [n for n in step.nodes if base(n) is n] if isinstance(step, Subgraph) else [step]
        where.update(dict.fromkeys(own, i))
    touching = [n for n in where if scheduled(n)]
    pairs = [(a, n) for a in touching for n in where if n is not a and shared(a, n)]
    assert pairs and all((where[a] < where[n]) == (listed[a] < listed[n]) for a, n in pairs)


def shared(operation: Any, node: Any) -> bool:
    """Whether a node reads what an operation of the schedule gives or is given."""
    touched = {operation, *map(base, operation.all_input_nodes)}
    return not touched.isdisjoint(map(base, node.all_input_nodes))


class Biased(nn.Module):
    """Ends and begins with pointwise compute that reads parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.scale) @ self.weight).relu() * 2


def test_results_that_share_a_storage_are_taken_apart():
    """What a compiler has computed in a part of another result, or given twice, another body may write over."""
    calls = []

    def body(given: list[Any]) -> list[Any]:
        calls.append(given)
        whole_ = torch.cat([given[0], given[1]])
        return [whole_, whole_[:2], whole_, given[0], given[1], torch.empty(0), torch.empty(0)]

    text = "def call(Args):\n    return Body0(Args)\n"
    run = stitched.Stitched(text, {"Body0": body}, {"Body0": [1]}, {})
    for _ in range(3):
        a, b = torch.ones(2), torch.zeros(2)
        out = run([a, b])
        addresses = [x.untyped_storage().data_ptr() for x in out[:5]]
        assert len({*addresses, a.untyped_storage().data_ptr()}) == 6, "nobody may write over a, which lives on"
        assert addresses[4] == b.untyped_storage().data_ptr(), "b was given away"
        assert out[1].equal(a) and out[3].equal(a)
    assert len(calls) == 3


def test_what_inductor_may_write_over_is_part_of_its_key():
    """Two bodies that differ in nothing else are two entries of its cache."""
    _, (first, *_) = steps(program(4, "backward"))
    keys = set()
    for dying in ([], [0]):
        keys.add(compiled_fx_graph_hash(first.body(dying), [n.meta["val"] for n in first.inputs], {}, [])[0])
    assert len(keys) == 2


def under_inductor() -> bool:
    """Whether layers in stretches give the losses and gradients of one graph, to rounding."""

    class Layer(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + F.dropout(x.sin(), 0.3, self.training)

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(16) for _ in range(3)))
    mfsdp.fully_shard(model, units=[Layer])
    twin = copy.deepcopy(model)
    losses = []
    for name, m in (("stitched", model), ("whole", twin)):
        run = compiled(m, name)
        torch.manual_seed(torch.distributed.get_rank())
        x = torch.randn(2, 8, 16, requires_grad=True)
        for _ in range(2):
            loss = run(x).square().mean()
            loss.backward()
        losses.append([loss.detach(), x.grad])
    grads = ([whole(p.grad) for p in m.parameters()] for m in (model, twin))
    pairs = [*zip(*losses), *zip(*grads)]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.inductor
def test_inductor_computes_the_same_in_stretches(two_ranks):
    assert two_ranks.run(under_inductor, timeout=300) == [True, True]
