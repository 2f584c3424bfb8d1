"""Splits a program into subgraphs of compute between the operations of its schedule.

Note [Subgraphs]
A schedule has few operations, and the compute between them repeats from layer to layer. So a program is split into
*steps*: an operation of the schedule, a view that such an operation reads, or a *subgraph* of compute. Subgraphs that
do the same to tensors of the same shapes are of one *kind* and are compiled once: neither the number of kinds nor their
size grows with depth, if layers are numbered modules (``layers.3``) and each is a unit.

* A subgraph ends at an operation. Where equal layers have none between them (one rank, weights that stay gathered, the
  head behind the last layer), it also ends behind a layer's last product.
* Inputs and outputs of a subgraph own their storage. It takes views of inputs itself: no compiled body returns a view
  of its input, and equal layers take equal views.
* An input without later readers dies in the subgraph. If nothing shares its storage, and it dies in all subgraphs of
  the kind, the body may overwrite it, as a graph compiled in full would.
* A compiler fuses only inside a subgraph. That would cost between layers: a layer's norm first reads the residual sum
  at the end of the layer before, and a reduction is launched between the two gradients of a norm. So what follows the
  last product of a subgraph moves to the next one, if its reader there can fuse with it. Otherwise, what the next
  subgraph begins with moves back, if it belongs to the same layer, reads what follows the last product, and reads
  nothing that the operations between them return. What is not only pointwise moves only if no more is in memory at the
  operations between them.
* For the same reason a subgraph recomputes values that follow pointwise from its other inputs (the inside of a GELU
  from its argument) instead of keeping them in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise, takewhile

import torch
from torch import fx
from torch.fx import Node
from torch.fx.node import map_aggregate

from ..cost_model.fusion import flops, fuses
from ..ir import ops
from ..ir.byte_costs import nbytes
from ..ir.fp8_patterns import SCALE
from ..ir.program import LAYER, is_element, mutates, operator, view_of
from ..ir.roles import Kind, is_kind
from ..ir.symbolic_sizes import symbolic
from .layer_match import described, extracted, lines
from .outlining import MIN_LAYERS


@dataclass(eq=False)
class Subgraph:
    """Compute without operations of the schedule."""

    nodes: list[Node]
    """In order, with the views that it takes of other subgraphs' values."""
    inputs: list[Node]
    """Values that it reads of others, in order of first use."""
    outputs: list[Node]
    """Values that others read."""
    dying: list[Node] = field(default_factory=list)
    """Inputs without later readers, whose storage nothing else shares, here and in the others of its kind."""
    returned: list[Node] = field(default_factory=list)
    """Inputs of the same kind that are results of forward, so that the caller may hold them (Note [Overwritten
    results]).
    """

    @cached_property
    def kind(self) -> Hashable:
        """A key that subgraphs share if one compiled body serves them."""
        places = {n: f"%{i}" for i, n in enumerate([*self.inputs, *self.nodes])}
        outputs = tuple((places[n], _described(n)) for n in self.outputs)
        return tuple(map(_described, self.inputs)), lines(self.nodes, places), outputs

    def body(self, dying: Collection[int]) -> fx.GraphModule:
        """Returns its compute as a graph of its own. Names of dying inputs' placeholders begin with ``dying``, so that
        a compiler's caches distinguish which inputs may be overwritten.
        """
        names = {n: f"{'dying' if i in dying else 'in'}_{i}" for i, n in enumerate(self.inputs)}
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


def split(gm: fx.GraphModule, donated: Collection[Node] = (), returned: Collection[Node] = ()) -> list[Step]:
    """Returns the steps of a program, in order, after all passes, without `free`.

    Args:
        gm: the program's graph.
        donated: placeholders whose storage has no other reader, so that a compiled body may overwrite them.
        returned: placeholders of which this holds if the caller of forward has given them up.

    Raises:
        CannotSplit: says why the program cannot be split.
    """
    for node in gm.graph.nodes:
        _validate(gm, node)
    borders = _borders(gm.graph)
    found = _subgraphs(gm.graph, borders)
    _move(found)
    steps = _steps(gm.graph, found, borders)
    _find_dying(steps, gm.graph.output_node(), donated, returned)
    return steps


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


def _is_compute(node: Node) -> bool:
    return node.op == "call_function" and not scheduled(node) and not is_view(node)


def _borders(graph: fx.Graph) -> set[Node]:
    """Returns the nodes before which a subgraph ends: operations of the schedule, the output, and in equal layers what
    follows the last product, if products of another layer follow before the next operation.
    """
    ordered = [n for n in graph.nodes if n.op == "output" or scheduled(n) or _is_compute(n)]
    runs = [(is_compute, list(nodes)) for is_compute, nodes in groupby(ordered, _is_compute)]
    borders = {node for is_compute, nodes in runs if not is_compute for node in nodes}
    between = [_layers(nodes) for is_compute, nodes in runs if is_compute]
    count = Counter(_text_of(layer) for layers in between for layer in layers)
    following = dict(pairwise(ordered))
    for layers in between:
        last = [(product, layer) for layer in layers if (product := _last_product(layer)) is not None]
        borders.update(following[product] for product, layer in last[:-1] if count[_text_of(layer)] >= MIN_LAYERS)
    return borders


def _layers(compute: Iterable[Node]) -> list[list[Node]]:
    """Splits compute where the layer changes. What belongs to no layer, but stands between nodes of one, is a part of
    it.
    """
    found: list[tuple[str, list[Node]]] = []
    for path, nodes in groupby(compute, lambda node: node.meta.get(LAYER, "")):
        if len(found) > 1 and not found[-1][0] and found[-2][0] == path:
            _, gap = found.pop()
            found[-1][1].extend([*gap, *nodes])
        else:
            found.append((path, list(nodes)))
    return [nodes for _, nodes in found]


def _text_of(layer: Iterable[Node]) -> Hashable:
    """Returns operators and arguments, also of views that are read; equal layers have the same."""

    def argument(x: object) -> object:
        if not isinstance(x, Node):
            return x
        return (x.target, map_aggregate(x.args, argument)) if is_view(x) else None  # type: ignore[arg-type]

    return tuple((n.target, repr(map_aggregate((n.args, n.kwargs), argument))) for n in layer)  # type: ignore[arg-type]


def _last_product(nodes: Sequence[Node]) -> Node | None:
    """Returns the last matrix product, convolution or attention, or the last element of its result."""
    return next((n for n in reversed(nodes) if flops(_maker(n))), None)


def _maker(value: Node) -> Node:
    """Returns the node that computes a value."""
    return value.args[0] if is_element(value) else value  # type: ignore[return-value]


def _subgraphs(graph: fx.Graph, borders: Collection[Node]) -> _Found:
    found: _Found = {}
    number = 0
    for node in graph.nodes:
        number += node in borders
        if _is_compute(node):
            found[node] = found.get(_maker(node), number)
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


def _readers(node: Node) -> Iterator[Node]:
    """Yields the readers of a value, direct or through views and elements."""
    for user in node.users:
        if is_view(user) or is_element(user):
            yield from _readers(user)
        else:
            yield user


def _move(found: _Found) -> None:
    """Moves compute past the operations between two subgraphs, to the side where a compiler would fuse it
    (Note [Subgraphs]).
    """
    members: dict[int, list[Node]] = {}
    for node, number in found.items():
        # operators that compilers only call read from memory, regardless of when it was written; the computation of
        # a shard's quantization scale does not lie between layers
        if node.target not in _CALLED and not (is_element(node) or is_kind(node, Kind.CAST) or SCALE in node.meta):
            members.setdefault(number, []).append(node)
    for number, later in pairwise(members):
        end = set(takewhile(fuses, reversed(members[number])))
        if _may_move_on(end, later, found):
            found.update(dict.fromkeys(end, later))
            members[later] = [*(n for n in members[number] if n in end), *members[later]]
        else:
            back = _moving_back(list(takewhile(_movable, members[later])), number, found, end)
            found.update(dict.fromkeys(back, number))
            members[later] = [n for n in members[later] if n not in back]
    for node in found:
        found[node] = found[_maker(node)]


def _may_move_on(end: Set[Node], later: int, found: _Found) -> bool:
    """Returns whether the end of a subgraph can move to the next one, and is better computed there."""
    values = {base(source) for node in end for source in node.all_input_nodes}
    if not all(map(_movable, end)) or any(map(_pinned, values)):
        return False  # gathered buffers are freed before the next subgraph
    readers = {r for node in end for r in _readers(node) if r not in end and r.op != "output"}
    if any(found.get(r, -1) < later for r in readers) or not any(found[r] == later and fuses(r) for r in readers):
        return False

    def lives(value: Node) -> bool:
        others = (r for r in _readers(value) if r not in end)
        return any(r.op == "output" or found.get(r, later) >= later for r in others)

    kept = sum(nbytes(v.meta["val"]) for v in values if _maker(v) not in end and not lives(v))
    return all(map(_pointwise, end)) or kept <= sum(nbytes(n.meta["val"]) for n in end if not end >= {*_readers(n)})


def _moving_back(first: Sequence[Node], number: int, found: _Found, end: Set[Node]) -> Set[Node]:
    """Returns which of the first nodes of a subgraph can move to the one before, and are better computed behind its
    end: what reads the end, also through others, and what these read.
    """
    makers = {node: set(map(_maker, map(base, node.all_input_nodes))) for node in first}
    layers = {node.meta.get(LAYER) for node in end}
    can, move = set[Node](), set[Node]()
    for node in first:
        computed = (m in can or m.op == "placeholder" or found.get(m, number + 1) <= number for m in makers[node])
        if all(computed) and not any(_pinned(base(source)) for source in node.all_input_nodes):
            can.add(node)
            if node.meta.get(LAYER) in layers and not makers[node].isdisjoint({*end, *move}):
                move.add(node)
    for node in reversed(first):
        if node in move:
            move |= makers[node] & can

    def lives(value: Node) -> bool:
        return any(r.op == "output" or found.get(r, number + 1) > number for r in _readers(value) if r not in move)

    spared = sum(nbytes(n.meta["val"]) for n in end if not move.isdisjoint(_readers(n)) and not lives(n))
    given = sum(nbytes(n.meta["val"]) for n in move if lives(n))
    return move if all(map(_pointwise, move)) or given <= spared else set()


def _pinned(node: Node) -> bool:
    """Returns whether a value must keep its readers in place: an operation of the schedule returns it, waits for it or
    refreshes it in place, or a buffer is written.
    """
    users = (user for user in node.users if user.target is not ops.probe)  # it writes nothing
    return scheduled(node) or any(scheduled(user) or node in mutates(user) for user in users)


def _movable(node: Node) -> bool:
    """Returns whether a node may be computed elsewhere, in a kernel with others."""
    return not _seeded(node) and not mutates(node) and fuses(node)


def _pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    convert = node.target is torch.ops.prims.convert_element_type.default
    return (torch.Tag.pointwise in tags or convert) and not _seeded(node)


def _seeded(node: Node) -> bool:
    """Returns whether a node draws from a generator, as it must in the listing's order."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _steps(graph: fx.Graph, found: _Found, borders: Collection[Node]) -> list[Step]:
    members: dict[int, list[Node]] = {}
    for node in graph.nodes:
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
    for node in graph.nodes:
        if node in borders:
            called = members.get(number, [])
            if any(n.target not in _CALLED for n in called):
                compute, called = _without_packs(called)
                steps.append(_subgraph(compute))
            for each in called:
                directly(each)
            number += 1
        if scheduled(node) or node.op == "output":
            directly(node)
    output = graph.output_node()
    read = set(map(base, output.all_input_nodes))
    for step in steps:
        read.update(map(base, reads(step)))
    for step in steps:
        if isinstance(step, Subgraph):
            step.outputs = [n for n in step.outputs if n in read]
    return steps


def _without_packs(compute: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Returns compute without the packs at its end, what has moved behind them aside, and these packs."""
    end = takewhile(lambda n: n.target is ops.pack or _movable(n), reversed(compute))
    packs = [n for n in end if n.target is ops.pack][::-1]
    return [n for n in compute if n not in packs], packs


_CALLED = (ops.pack, ops.mm, ops.returned)
"""Compute that compilers only call."""

CALLED = frozenset(op._schema.name.removeprefix("mfsdp::") for op in _CALLED)
"""Their verbs."""


def _subgraph(compute: Sequence[Node]) -> Subgraph:
    again = dict.fromkeys(_recomputed(_gathered(compute, ())[1]))
    nodes, inputs = _gathered(compute, again)
    for node in (*inputs, *nodes):
        value = node.meta.get("val")
        if any(map(symbolic, value if isinstance(value, (tuple, list)) else [value])):
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


def _find_dying(steps: Sequence[Step], output: Node, donated: Collection[Node], returned: Collection[Node]) -> None:
    """Finds which inputs of subgraphs have no later reader, in all subgraphs of a kind."""
    done = set(map(base, output.all_input_nodes))
    for step in reversed(steps):
        if isinstance(step, Subgraph):
            gone = done | {base(m) for n in step.nodes for m in mutates(n)}
            own = (n for n in step.inputs if n in donated or (n.op == "call_function" and not scheduled(n)))
            step.dying = [n for n in own if n not in gone]
            step.returned = [n for n in step.inputs if n in returned and n not in gone and _reusable(n, step.nodes)]
        done.update(map(base, reads(step)))
    kinds: dict[Hashable, list[Subgraph]] = {}
    for step in steps:
        if isinstance(step, Subgraph):
            kinds.setdefault(step.kind, []).append(step)
    for alike in kinds.values():
        dying = set.intersection(*({s.inputs.index(n) for n in s.dying} for s in alike))
        results = set.intersection(*({s.inputs.index(n) for n in s.returned} for s in alike))
        for subgraph in alike:
            subgraph.dying = [subgraph.inputs[i] for i in sorted(dying)]
            subgraph.returned = [subgraph.inputs[i] for i in sorted(results)]


def _reusable(value: Node, nodes: Sequence[Node]) -> bool:
    """Returns whether kernels alone read a value, and compute one as large, which a compiler may put in its place."""
    readers = [n for n in _readers(value) if n in nodes]
    alike = (n for n in nodes if nbytes(n.meta["val"]) == nbytes(value.meta["val"]))
    return all(map(fuses, readers)) and any(map(fuses, alike))


def _described(node: Node) -> tuple[object, ...]:
    value = node.meta.get("val")
    return described(value) if isinstance(value, torch.Tensor) else (type(value),)
