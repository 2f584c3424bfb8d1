"""Splits a program into subgraphs of compute between the operations of its schedule.

Note [Subgraphs]
A schedule has few operations, and the compute between them repeats from layer to layer. So a program is split into
*steps*: an operation of the schedule, a view that such an operation reads, or a *subgraph*, all compute up to the next
operation. Subgraphs that do the same to tensors of the same shapes are of one *kind* and are compiled once: the number
of kinds does not grow with depth.

* Inputs and outputs of a subgraph own their storage. It takes views of inputs itself: no compiled body returns a view
  of its input, and equal layers take equal views.
* An input without later readers dies in the subgraph. If nothing shares its storage, the body may overwrite it, as a
  graph compiled in full would.
* A compiler fuses only inside a subgraph. That would cost between layers: a layer's norm first reads the residual sum
  at the end of the layer before. So a run of pointwise compute at the end of a subgraph, on values that are in memory
  anyway, moves to the next subgraph if its reader there can fuse with it. Pointwise compute at the beginning of a
  subgraph moves back if it reads the result of such a run and nothing that the operations between them return: for
  example, the sum of two branches' gradients after the launch of a reduction.
* For the same reason a subgraph recomputes values that follow pointwise from its other inputs (the inside of a GELU
  from its argument) instead of keeping them in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import torch
from torch import fx
from torch.fx import Node

from ..cost_model.fusion import fuses
from ..ir import ops
from ..ir.fp8_patterns import SCALE
from ..ir.program import is_element, mutates, operator, view_of
from ..ir.roles import Kind, is_kind
from .layer_match import described, extracted, lines


@dataclass(eq=False)
class Subgraph:
    """Compute between two operations of a schedule."""

    nodes: list[Node]
    """In order, with the views that it takes of other subgraphs' values."""
    inputs: list[Node]
    """Values that it reads of others, in order of first use."""
    outputs: list[Node]
    """Values that others read."""
    dying: list[Node] = field(default_factory=list)
    """Inputs without later readers, whose storage nothing else shares."""

    def kind(self) -> Hashable:
        """Returns a key that subgraphs share if one compiled body serves them."""
        places = {n: f"%{i}" for i, n in enumerate([*self.inputs, *self.nodes])}
        inputs = tuple((_described(n), n in self.dying) for n in self.inputs)
        outputs = tuple((places[n], _described(n)) for n in self.outputs)
        return inputs, lines(self.nodes, places), outputs

    def body(self) -> fx.GraphModule:
        """Returns its compute as a graph of its own. Names of dying inputs' placeholders begin with ``dying``, so that
        a compiler's caches distinguish which inputs may be overwritten.
        """
        names = {n: f"{'dying' if n in self.dying else 'in'}_{i}" for i, n in enumerate(self.inputs)}
        graph, copies = extracted(self.nodes, names, self.outputs)
        for node in self.inputs:
            copies[node].meta = {"val": node.meta["val"]}
        # other subgraphs expect these strides: no padding
        graph.output_node().meta["user_visible_output_idxs"] = list(range(len(self.outputs)))
        return fx.GraphModule(torch.nn.Module(), graph)


Step = Subgraph | Node


def reads(step: Step) -> list[Node]:
    """Returns the values that a step reads."""
    return step.inputs if isinstance(step, Subgraph) else step.all_input_nodes


def split(gm: fx.GraphModule, donated: Collection[Node] = ()) -> list[Step]:
    """Returns the steps of a program, in order, after all passes, without `free`.

    Args:
        gm: the program's graph.
        donated: placeholders whose storage has no other reader, so that a compiled body may overwrite them.

    Raises:
        CannotSplit: says why the program cannot be split.
    """
    found = _subgraphs(gm)
    _move_pointwise(found)
    return _steps(gm, found, donated)


class CannotSplit(Exception):
    """A program contains something that subgraphs cannot hold."""


def scheduled(node: Node) -> bool:
    """Returns whether a node is an operation of the schedule. Packing gradients into a bucket is compute. Recomputed
    random operators are scheduled, so that no subgraph reads a generator's state, whose size is not known.
    """
    if node.op != "call_function" or node.target in _CALLED:
        return False
    if is_element(node):
        return scheduled(node.args[0])  # type: ignore[arg-type]
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name.startswith(("mfsdp::", "_c10d_functional::")) or operator(node)[0] is not node.target


def is_view(node: Node) -> bool:
    """Returns whether a node computes nothing: a view of a value, or one of several views."""
    if node.op != "call_function" or mutates(node) or scheduled(node):
        return False
    if is_element(node):
        return is_view(node.args[0])  # type: ignore[arg-type]
    return view_of(node) is not None


def base(node: Node) -> Node:
    """Returns the value that owns the storage; each of several results is one."""
    while is_view(node):
        node = view_of(node)  # type: ignore[assignment]
    return node


_Found = dict[Node, int]
"""The subgraph that each compute node is in, by number; views are in none."""


def _subgraphs(gm: fx.GraphModule) -> _Found:
    found: _Found = {}
    number = 0
    for node in gm.graph.nodes:
        _validate(gm, node)
        if scheduled(node):
            number += 1
        elif node.op == "call_function" and not is_view(node):
            found[node] = found[node.args[0]] if is_element(node) else number
    return found


def _validate(gm: fx.GraphModule, node: Node) -> None:
    if node.op == "get_attr" and not isinstance(node.meta.get("val"), torch.Tensor):
        raise CannotSplit(f"{node.name} is no tensor")
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        raise CannotSplit(f"{node.name} is a {node.op}")
    if mutates(node) and not scheduled(node):
        if any(user.op != "output" for user in node.users):
            raise CannotSplit(f"{node.name} writes in place, and is read")
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _symbolic(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return any(map(_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _readers(node: Node) -> Iterator[Node]:
    """Yields the readers of a value, direct or through views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _move_pointwise(found: _Found) -> None:
    """Moves pointwise compute past the operations between two subgraphs, to the side where a compiler would fuse it
    (Note [Subgraphs]).
    """
    members: dict[int, list[Node]] = {}
    for node, number in found.items():
        # operators that compilers only call read from memory, regardless of when it was written; the computation of
        # a shard's quantization scale does not lie between layers
        if node.target not in _CALLED and not (is_kind(node, Kind.CAST) or SCALE in node.meta):
            members.setdefault(number, []).append(node)
    for number, later in pairwise(members):
        tail = set(takewhile(fuses, reversed(members[number])))
        back = dict[Node, None]()
        for node in takewhile(_pointwise, members[later]):
            if _may_move_back(node, number, found, {*tail, *back}):
                back[node] = None
        found.update(dict.fromkeys(back, number))
        if not back and tail and all(_may_move_on(node, later, found, tail) for node in tail):
            found.update(dict.fromkeys(tail, later))
            members[later] = [*(n for n in members[number] if n in tail), *members[later]]


def _may_move_back(node: Node, number: int, found: _Found, run: Collection[Node]) -> bool:
    """Returns whether a node can move to the subgraph before its own, and is better computed after a run there."""
    sources = [base(source) for source in node.all_input_nodes]
    computed = (s.op == "placeholder" or found.get(s, number + 1) <= number for s in sources)
    return any(s in run for s in sources) and all(computed) and not any(map(_pinned, sources))


def _may_move_on(node: Node, later: int, found: _Found, run: Collection[Node]) -> bool:
    """Returns whether a node of a run can move to the next subgraph, and is better computed there."""
    if not _pointwise(node) or any(_pinned(base(source)) for source in node.all_input_nodes):
        return False  # gathered buffers are freed before the next subgraph
    readers = list(_readers(node))
    outside = [r for r in readers if r not in run]
    if any(r.op != "output" and found.get(r, -1) < later for r in outside):
        return False
    return len(outside) < len(readers) or any(found.get(r) == later and fuses(r) for r in outside)


def _pinned(node: Node) -> bool:
    """Returns whether a value must keep its readers in place: an operation of the schedule returns it, waits for it or
    refreshes it in place, or a buffer is written.
    """
    users = (user for user in node.users if user.target is not ops.probe)  # it writes nothing
    return scheduled(node) or any(scheduled(user) or node in mutates(user) for user in users)


def _pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False  # random numbers are drawn in the listing's order
    return torch.Tag.pointwise in tags or node.target is torch.ops.prims.convert_element_type.default


def _steps(gm: fx.GraphModule, found: _Found, donated: Collection[Node]) -> list[Step]:
    members: dict[int, list[Node]] = {}
    for node in gm.graph.nodes:
        if node in found:
            members.setdefault(found[node], []).append(node)
    steps: list[Step] = []
    emitted: set[Node] = set()

    def directly(node: Node) -> None:
        """Adds a node as a step of its own, after the views that it reads, which all such steps share."""
        for source in node.all_input_nodes:
            views = []
            while is_view(source) and source not in emitted:
                emitted.add(source)
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
        read.update(map(base, reads(step)))
    for step in steps:
        if isinstance(step, Subgraph):
            step.outputs = [n for n in step.outputs if n in read]
    _find_dying(steps, output, donated)
    return steps


_CALLED = (ops.pack, ops.mm, ops.returned)
"""Compute that compilers only call."""

CALLED = frozenset(op._schema.name.removeprefix("mfsdp::") for op in _CALLED)
"""Their verbs."""


def _subgraph(compute: Sequence[Node]) -> Subgraph:
    again = dict.fromkeys(_recomputed(_gathered(compute, ())[1]))
    nodes, inputs = _gathered(compute, again)
    for node in (*inputs, *nodes):
        value = node.meta.get("val")
        if any(map(_symbolic, value if isinstance(value, (tuple, list)) else [value])):
            raise CannotSplit(f"the size of {node.name} is not known before it runs")
    return Subgraph(nodes, inputs, [n for n in compute if isinstance(n.meta.get("val"), torch.Tensor)])


def _gathered(compute: Sequence[Node], again: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """Returns compute behind the views and recomputed values that it reads, and its inputs."""
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


def _recomputed(inputs: Sequence[Node]) -> list[Node]:
    """Returns pointwise compute of other subgraphs that a subgraph repeats, from inputs that it reads anyway: a
    compiler that saw both would not store the result either.
    """
    out: list[Node] = []
    left = set(inputs)
    for node in reversed(inputs):
        chain: list[Node] = []
        if _recomputable(node, left - {node}, chain):
            left.remove(node)
            out += chain
    return out


def _recomputable(node: Node, known: Collection[Node], chain: list[Node]) -> bool:
    """Returns whether a value follows from known values by a short chain of pointwise compute."""
    if node.op != "call_function" or len(chain) == _LONGEST or not _pointwise(node) or mutates(node) or _pinned(node):
        return False
    chain.append(node)
    sources = list(map(base, node.all_input_nodes))
    return bool(sources) and all(not _pinned(s) and (s in known or _recomputable(s, known, chain)) for s in sources)


_LONGEST = 12
"""The most operators that are repeated to avoid storing their result."""


def _find_dying(steps: Sequence[Step], output: Node, donated: Collection[Node]) -> None:
    """Finds which inputs of subgraphs have no later reader."""
    done = set(map(base, output.all_input_nodes))
    for step in reversed(steps):
        if isinstance(step, Subgraph):
            written = {base(m) for n in step.nodes for m in mutates(n)}
            own = (n for n in step.inputs if n in donated or (n.op == "call_function" and not scheduled(n)))
            step.dying = [n for n in own if n not in done and n not in written]
        done.update(map(base, reads(step)))


def _described(node: Node) -> tuple[object, ...]:
    value = node.meta.get("val")
    return described(value) if isinstance(value, torch.Tensor) else (type(value),)
