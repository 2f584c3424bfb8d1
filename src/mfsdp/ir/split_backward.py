"""Splits a backward in two programs: gradients of its inputs, then gradients of weights.

Zero-bubble pipeline schedules (Qi et al. 2023, arXiv:2401.10241) send the gradient of a stage's input as early as
possible, and compute gradients of weights where the stage would wait otherwise. Of the backward of one linear layer,

    mm     = mm tangent, weight          the input part: a gradient that another stage waits for
    mm_1   = mm tangent_t, input         the weight part, and its reduction

Each part is an ordinary program: the pipeline of passes runs on both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from . import ops
from .byte_costs import owned
from .program import KEPT, STORAGE, Program, Storage, is_element, mutates, storage_of
from .roles import Kind, is_kind, role


@dataclass(frozen=True)
class SplitBackward:
    """The two parts of a backward.

    Together they compute what the whole does, each value once, except views and values of parameters alone.
    """

    input: Program
    """Computes the results that are no gradients of sharded parameters, and what the weight part needs of the way
    there. It reduces nothing. Results: those of the whole (``None`` for others), then ``saved`` values."""
    weight: Program
    """Computes and reduces gradients of sharded parameters. Arguments: some of the whole's, then all saved values."""
    saved: int
    """How many values the input part hands over."""


def split_backward(p: Program) -> SplitBackward | None:
    """Splits a backward program, before any pass; the program does not change.

    Returns:
        its parts; ``None`` if one would be empty or may not be late: the program trains no sharded parameter, its
        caller waits for gradients of unsharded ones (`Program.gradients`), or units are optional, whose ends all ranks
        announce.
    """
    weight_results = _behind(p, p.find(Kind.GRAD))
    if p.gradients or not weight_results or any(unit.spec.any_optional for unit in p.units):
        return None
    results = p.results()
    late = {r for r in results if isinstance(r, Node) and r in weight_results}
    ends = {r for r in results if isinstance(r, Node)} | {n for n in p.nodes if n.op != "output" and _acts(n)}
    early = _needed(ends - weight_results)
    early |= {user for node in early if _several(node) for user in node.users if is_element(user)}
    weight = _needed(late | {n for n in ends if n in weight_results})
    saved = _handed_over(p, early, weight)
    weight = _needed(late | {n for n in ends if n in weight_results}, stop=saved)
    early |= {n for n in weight if n.op == "placeholder" and owned(n)}  # they stay alive meanwhile
    sizes = {n for n in p.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.SymInt)}
    early, weight = early | sizes, weight | sizes
    first = _part(p, early, [], [None if r in late else r for r in results], saved)
    second = _part(p, weight, saved, [r if r in late else None for r in results], [])
    first.part, second.part = "input", "weight"
    first.trained = {}
    _keep_arguments(first, second)
    return SplitBackward(first, second, len(saved))


def _keep_arguments(first: Program, second: Program) -> None:
    """Records in the input part which arguments it must not overwrite, and which live on: the weight part's."""
    later = second.graph.find_nodes(op="placeholder")
    names, numbers = {n.name for n in later}, {n.meta[STORAGE].number for n in later if STORAGE in n.meta}
    for node in first.graph.find_nodes(op="placeholder"):
        storage = node.meta.get(STORAGE)
        if node.name in names if storage is None else storage.number in numbers:
            node.meta[KEPT] = True
            if storage is not None:
                node.meta[STORAGE] = storage._replace(overwrite="no")


def _behind(p: Program, markers: Iterable[Node]) -> set[Node]:
    """Returns the markers, and the nodes that depend on them."""
    found = set(markers)
    for node in p.nodes:
        if node.op != "output" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _acts(node: Node) -> bool:
    """Whether a node has an effect beyond its results."""
    return node.op == "call_function" and not is_kind(node, Kind.GRAD) and (bool(mutates(node)) or node.is_impure())


def _needed(ends: Iterable[Node], stop: Collection[Node] = ()) -> set[Node]:
    """Returns nodes and all that they are computed from, up to ``stop``."""
    seen: set[Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += () if node in stop else node.all_input_nodes
    return seen


def _handed_over(p: Program, early: Collection[Node], weight: Collection[Node]) -> list[Node]:
    """Returns the values that the weight part takes from the input part: computed by both, and read by the weight part
    alone. Views are taken again, and what is computed from parameters alone is computed again, behind another gather.
    """
    only_weights: set[Node] = set()
    found = []
    for node in p.nodes:
        if node.op != "call_function" or node not in early or node not in weight:
            continue
        sources = node.all_input_nodes
        if node.target is ops.param or (sources and all(s in only_weights for s in sources)):
            only_weights.add(node)
        elif storage_of(node) is node and not _several(node) and any(u not in early for u in _readers(node, weight)):
            found.append(node)
    return found


def _readers(node: Node, among: Collection[Node]) -> Iterable[Node]:
    """Yields the nodes among some that read a value or a view of it."""
    for user in node.users:
        if user in among:
            if storage_of(user) is storage_of(node):
                yield from _readers(user, among)
            yield user


def _several(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _part(p: Program, nodes: Collection[Node], given: Sequence[Node], results: list[Any], saved: list[Node]) -> Program:
    """Returns a program of some nodes of another one, with more arguments, ``given``, and more results, ``saved``."""
    graph = fx.Graph()
    moved: dict[Node, Node] = {}
    for node in (n for n in p.graph.find_nodes(op="placeholder") if n in nodes):
        moved[node] = graph.node_copy(node)
    storages = {storage_of(r) for r in p.results() if isinstance(r, Node)}
    last = max((n.meta[STORAGE].number for n in p.nodes if STORAGE in n.meta), default=-1)
    for number, node in enumerate(given, last + 1):
        moved[node] = graph.placeholder(node.name)
        ours = isinstance(node.meta["val"], torch.Tensor) and node not in storages
        storage = Storage(number, node.meta["val"], "yes") if ours else Storage(number, None, "no")
        moved[node].meta = {"val": node.meta["val"], STORAGE: storage}
    for node in p.nodes:
        if node in nodes and node not in moved and node.op != "output":
            moved[node] = graph.node_copy(node, moved.__getitem__)
    graph.output(tuple(moved[r] if isinstance(r, Node) else r for r in [*results, *saved]))
    graph.output_node().meta = dict(p.output.meta)
    units = {r.unit for node in graph.nodes if (r := role(node)) is not None}
    out = Program(fx.GraphModule(p.gm, graph), p.phase, [u for u in p.units if u.name in units], p.name)
    out.trained = dict(p.trained)
    return out
