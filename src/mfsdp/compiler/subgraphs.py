"""Where a program falls into stretches of compute between the operations of its schedule.

Note [Subgraphs]
A schedule is a list of a few operations, and what lies between them repeats from layer to layer. So a program is cut
into *steps*: an operation of the schedule, a view that such an operation reads, or a *stretch*, all compute up to the
next operation. Stretches that do the same to tensors of the same shapes are of one *kind*, and compiled once: their
number does not grow with depth.

* What a stretch reads of others, and gives to them, are values that own their storage. Views it takes of them itself:
  no compiled body returns a view of its input, and equal layers cut equal views.
* An input that nobody reads afterwards dies there. If its storage is its own, the body may write over it, as a graph
  that was compiled whole would.
* A compiler fuses inside of a stretch only. At the border of two layers that would cost: the sum of the residual stream
  at the end of one is the first thing that the norm of the next reads. So a stretch does not end with such a run of
  pointwise compute, of values that are in memory anyway, whose reader could take it in: that run is the next one's. Nor
  does one begin with pointwise compute of what a run at the end of the one before has computed, without anything that
  the operations between them bring: gradients of two branches, say, whose sum follows the launch of a reduction.
* For the same reason a stretch computes again what follows pointwise from its other inputs (the inside of a GELU from
  its argument), instead of having it kept in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.fx.node import map_arg

from ..cost_model.fusion import fuses
from ..ir import ops
from ..ir.fp8_patterns import SCALE
from ..ir.program import is_element, mutates, operator, view_of
from ..ir.roles import Kind, is_kind


@dataclass(eq=False)
class Subgraph:
    """Compute between two operations of a schedule."""

    nodes: list[Node]
    """In order, with the views that it takes of what others have computed."""
    inputs: list[Node]
    """What it reads of others, in order of first use."""
    outputs: list[Node]
    """What others read of it."""
    dying: list[Node] = field(default_factory=list)
    """Inputs that nobody reads afterwards, and whose storage nobody else has."""

    def kind(self) -> tuple[Any, ...]:
        """What two stretches have alike if one compiled body will do for both."""
        number = {n: i for i, n in enumerate([*self.inputs, *self.nodes])}
        lines = tuple(
            (str(n.target), repr(map_arg((n.args, n.kwargs), lambda a: _Number(number[a])))) for n in self.nodes
        )
        given = tuple((repr(_described(n)), n in self.dying) for n in self.inputs)
        return given, lines, tuple(number[n] for n in self.outputs), tuple(_described(n) for n in self.outputs)

    def body(self) -> fx.GraphModule:
        """Its compute as a graph of its own. Placeholders of dying inputs are called ``dying``: what a compiler may
        write over is part of what its caches look at.
        """
        graph, copies = fx.Graph(), {}
        for i, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"dying_{i}" if node in self.dying else f"in_{i}")
            copies[node].meta = {"val": node.meta["val"]}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        output = graph.output(tuple(copies[n] for n in self.outputs))
        # every stride is as the other stretches expect it: no padding
        output.meta["user_visible_output_idxs"] = list(range(len(self.outputs)))
        return fx.GraphModule(torch.nn.Module(), graph)


Step = Subgraph | Node


def split(gm: fx.GraphModule, donated: Collection[Node] = ()) -> list[Step]:
    """The steps of a program, in order, after all passes, without `free`.

    Args:
        gm: its graph.
        donated: placeholders whose storage nobody else will read, so that a compiled body may write over them.

    Raises:
        Uncut: why it cannot be cut.
    """
    found = _subgraphs(gm)
    _hand_over(found)
    return _steps(gm, found, donated)


class CannotSplit(Exception):
    """A program has what stretches cannot hold."""


def scheduled(node: Node) -> bool:
    """Whether it is an operation of the schedule; what packs gradients into a bucket is compute. So that a generator's
    state, whose size is not known, goes through no stretch, what draws random numbers again is one too.
    """
    if node.op != "call_function" or node.target in _CALLED:
        return False
    if is_element(node):
        return scheduled(node.args[0])  # type: ignore[arg-type]
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name.startswith(("mfsdp::", "_c10d_functional::")) or operator(node)[0] is not node.target


def is_view(node: Node) -> bool:
    """Whether it computes nothing: a view of a value, or one of several views."""
    if node.op != "call_function" or mutates(node) or scheduled(node):
        return False
    if is_element(node):
        return is_view(node.args[0])  # type: ignore[arg-type]
    return view_of(node) is not None


def base(node: Node) -> Node:
    """The value that owns the storage; of several results each is one."""
    while is_view(node):
        node = view_of(node)  # type: ignore[assignment]
    return node


_Found = dict[Node, int]
"""Which stretch each node of compute is in; views are in none."""


def _subgraphs(gm: fx.GraphModule) -> _Found:
    found: _Found = {}
    number = 0
    for node in gm.graph.nodes:
        _admit(gm, node)
        if scheduled(node):
            number += 1
        elif node.op == "call_function" and not is_view(node):
            found[node] = found[node.args[0]] if is_element(node) else number
    return found


def _admit(gm: fx.GraphModule, node: Node) -> None:
    if node.op == "get_attr" and not isinstance(node.meta.get("val"), torch.Tensor):
        raise CannotSplit(f"{node.name} is no tensor")
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        raise CannotSplit(f"{node.name} is a {node.op}")
    if mutates(node) and not scheduled(node):
        if any(user.op != "output" for user in node.users):
            raise CannotSplit(f"{node.name} writes in place, and is read")
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(map(_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _readers(node: Node) -> Iterator[Node]:
    """Who reads a value, itself or through views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _hand_over(found: _Found) -> None:
    """Moves pointwise compute over the operations between two stretches, where a compiler would have fused it with
    what is on the other side (Note [Subgraphs]).
    """
    members: dict[int, list[Node]] = {}
    for node, number in found.items():
        # what compilers only call reads what is there, whenever that was computed; what a shard is quantised with
        # does not come between layers
        if node.target not in _CALLED and not (is_kind(node, Kind.CAST) or SCALE in node.meta):
            members.setdefault(number, []).append(node)
    for number, later in pairwise(members):
        tail = set(takewhile(fuses, reversed(members[number])))
        back = dict[Node, None]()
        for node in takewhile(_pointwise, members[later]):
            if _may_go_back(node, number, found, {*tail, *back}):
                back[node] = None
        found.update(dict.fromkeys(back, number))
        if not back and tail and all(_may_go_on(node, later, found, tail) for node in tail):
            found.update(dict.fromkeys(tail, later))
            members[later] = [*(n for n in members[number] if n in tail), *members[later]]


def _may_go_back(node: Node, number: int, found: _Found, run: Collection[Node]) -> bool:
    """Whether a node can be computed in the stretch before its own, and is better computed behind a run there."""
    sources = [base(source) for source in node.all_input_nodes]
    there = (s.op == "placeholder" or found.get(s, number + 1) <= number for s in sources)
    return any(s in run for s in sources) and all(there) and not any(map(_touched, sources))


def _may_go_on(node: Node, later: int, found: _Found, run: Collection[Node]) -> bool:
    """Whether a node of a run can be computed one stretch later, and is better computed there."""
    if not _pointwise(node) or any(_touched(base(source)) for source in node.all_input_nodes):
        return False  # what has been gathered goes before the next stretch
    readers = list(_readers(node))
    outside = [r for r in readers if r not in run]
    if any(r.op != "output" and found.get(r, -1) < later for r in outside):
        return False
    return len(outside) < len(readers) or any(found.get(r) == later and fuses(r) for r in outside)


def _touched(node: Node) -> bool:
    """Whether an operation of the schedule gives it, or is given it to wait for or to refresh in place, or a buffer is
    written: what reads it stays where it is.
    """
    users = (user for user in node.users if user.target is not ops.probe)  # which writes nothing
    return scheduled(node) or any(scheduled(user) or node in mutates(user) for user in users)


def _pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False  # random numbers are drawn in the order of the listing
    return torch.Tag.pointwise in tags or node.target is torch.ops.prims.convert_element_type.default


def _steps(gm: fx.GraphModule, found: _Found, donated: Collection[Node]) -> list[Step]:
    members: dict[int, list[Node]] = {}
    for node in gm.graph.nodes:
        if node in found:
            members.setdefault(found[node], []).append(node)
    steps: list[Step] = []
    there: set[Node] = set()

    def directly(node: Node) -> None:
        """A step of its own, behind the views that it reads, which all of these steps share."""
        for source in node.all_input_nodes:
            views = []
            while is_view(source) and source not in there:
                there.add(source)
                views.append(source)
                source = view_of(source)  # type: ignore[assignment]
            steps.extend(reversed(views))
        if node.op != "output":
            steps.append(node)

    number = 0
    for node in gm.graph.nodes:
        if scheduled(node) or node.op == "output":
            compute = members.get(number, [])
            if all(n.target in _CALLED for n in compute):
                for each in compute:
                    directly(each)
            else:
                steps.append(_subgraph(compute))
            directly(node)
            number += 1
    output = gm.graph.output_node()
    read = set(map(base, output.all_input_nodes))
    for step in steps:
        read.update(step.inputs if isinstance(step, Subgraph) else map(base, step.all_input_nodes))
    for step in steps:
        if isinstance(step, Subgraph):
            step.outputs = [n for n in step.outputs if n in read]
    _last(steps, output, donated)
    return steps


_CALLED = (ops.pack, ops.mm, ops.returned)
"""Compute that compilers only call."""

CALLED = frozenset(op._schema.name.removeprefix("mfsdp::") for op in _CALLED)
"""Their verbs."""


def _subgraph(compute: Sequence[Node]) -> Subgraph:
    again = dict.fromkeys(_again(_gathered(compute, ())[1]))
    nodes, inputs = _gathered(compute, again)
    for node in (*inputs, *nodes):
        value = node.meta.get("val")
        if any(map(_symbolic, value if isinstance(value, (tuple, list)) else [value])):
            raise CannotSplit(f"the size of {node.name} is not known before it runs")
    return Subgraph(nodes, inputs, [n for n in compute if isinstance(n.meta.get("val"), torch.Tensor)])


def _gathered(compute: Sequence[Node], again: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """Compute behind the views that it reads, and behind what is computed again; and what it reads of others."""
    own, nodes, inputs = set(compute), dict[Node, None](), dict[Node, None]()

    def take(node: Node) -> None:
        for source in node.all_input_nodes:
            if is_view(source) or source in again:
                if source not in nodes:
                    take(source)
            elif source not in own:
                inputs[source] = None
        nodes[node] = None

    for node in compute:
        take(node)
    return list(nodes), list(inputs)


def _again(inputs: Sequence[Node]) -> list[Node]:
    """Pointwise compute of other stretches that a stretch does itself, from what it reads anyway: a compiler that saw
    both would not have put the result into memory either.
    """
    out: list[Node] = []
    left = set(inputs)
    for node in reversed(inputs):
        chain: list[Node] = []
        if _follows(node, left - {node}, chain):
            left.remove(node)
            out += chain
    return out


def _follows(node: Node, known: Collection[Node], chain: list[Node]) -> bool:
    """Whether a value follows by a short chain of pointwise compute from others that are known."""
    if node.op != "call_function" or len(chain) == _LONGEST or not _pointwise(node) or mutates(node) or _touched(node):
        return False
    chain.append(node)
    sources = list(map(base, node.all_input_nodes))
    return bool(sources) and all(not _touched(s) and (s in known or _follows(s, known, chain)) for s in sources)


_LONGEST = 12
"""Operations that are done again rather than to keep their result."""


def _last(steps: Sequence[Step], output: Node, donated: Collection[Node]) -> None:
    """Finds out which inputs of stretches nobody reads afterwards."""
    done = set(map(base, output.all_input_nodes))
    for step in reversed(steps):
        if isinstance(step, Subgraph):
            written = {base(m) for n in step.nodes for m in mutates(n)}
            own = (n for n in step.inputs if n in donated or (n.op == "call_function" and not scheduled(n)))
            step.dying = [n for n in own if n not in done and n not in written]
            done.update(step.inputs)
        else:
            done.update(map(base, step.all_input_nodes))


class _Number(int):
    """A node, in the text of a kind."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _described(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.layout
    return type(value)
