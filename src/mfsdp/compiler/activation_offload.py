"""Saves layers' activations on the host, by rewriting forward and backward right after the joint graph is partitioned.

Note [Activation offload]
Forward's results after those for its caller become backward's arguments. To save a value on the host, forward returns a
host copy in its place, and backward takes the copy and reloads it:

    addmm_host = offload addmm              ->      addmm_back = reload addmm_host
    wait addmm_host                                 wait addmm_back

This must happen while both graphs are available: right after partitioning, AOTAutograd builds backward's example
inputs, whose device cannot change later. Copies are launched at the end of forward and reloaded before their first
reader; the pass `mfsdp.passes.schedule_offload` moves launches and waits.

A storage is copied in full and once: if q, k and v are views of one product, that product is copied and backward takes
the views again. The caller's inputs and results stay on the device, as do parameters and values computed from
parameters alone (invariant 47), a generator's state, and storages below `MIN_BYTES`.

torch's operators (``ao::offload``, ``ao::reload``; 2.13) have the same shape and are not used: they raise without an
accelerator, share one stream for both directions, and free the host copy after its first reload, which a second
backward (``retain_graph``) needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from ..ir import ops
from ..ir.byte_costs import nbytes
from ..ir.program import GIVEN, INPUT, LAYER, STORAGE, Storage, is_element, mutates, operator, storage_of, view_of
from ..ir.roles import Kind, Lane, Role, mark, role
from .joint_graph import computed_from

MIN_BYTES = 2**16
"""Smallest storage that is worth a copy, in bytes: an eighth of what a link transfers in a copy's start-up time."""


def offload_activations(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, offloads: Callable[[Node], bool]
) -> None:
    """Saves values on the host between forward and backward, in place. Does not recompile the graphs: passes follow.

    Args:
        forward, backward: the graphs of a joint graph, with layers inlined.
        outputs: how many of forward's first results are for its caller.
        offloads: returns whether to offload the storage that a node owns.
    """
    output = forward.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    arguments = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    returned = {storage_of(r) for r in results[:outputs] if isinstance(r, Node)}
    parameters = forward.graph.find_nodes(op="call_function", target=ops.param)
    on_device = returned | computed_from(forward.graph, parameters)
    found: dict[Node, list[Node]] = {}
    for result in results[outputs:]:
        if isinstance(result, Node) and result.name in arguments:
            found.setdefault(storage_of(result), []).append(result)
    inputs = [n.meta.get("val") for n in forward.graph.find_nodes(op="placeholder")]
    cpu = {v.device.type for v in inputs if isinstance(v, torch.Tensor)} == {"cpu"}
    unread: list[Node] = []
    for owner, views in found.items():
        if owner in on_device or not offloads(owner) or not _movable(owner, views, cpu):
            continue
        readers = sorted({user for view in views for user in arguments[view.name].users})
        if not readers:
            continue
        copied = Role(Kind.OFFLOAD, owner.meta.get(LAYER) or "host", Lane.HOST)
        with forward.graph.inserting_before(output):
            host = _copy(forward.graph, ops.offload, (owner,), f"{owner.name}_host", copied)
        _fetch(backward, owner, host, {view: arguments[view.name] for view in views}, readers[0])
        first = results.index(views[0])
        host.meta |= {key: True for key in _UNCHECKED if key in views[0].meta}
        results[first] = host
        _drop(output, results, {i for i, r in enumerate(results) if i >= outputs and r in views})
        unread += (n for view in views for n in _chain(owner, view))
    output.args = (tuple(results),)
    for view in sorted(set(unread), reverse=True):  # otherwise it keeps its storage alive up to its position
        if not view.users:
            forward.graph.erase_node(view)


_UNCHECKED = ("saved_tensor_with_no_vc_check",)
"""``meta`` keys of results that autograd saves in another way and that come last. Private in torch; tried on 2.13."""


def _movable(owner: Node, views: Sequence[Node], cpu: bool) -> bool:
    """Returns whether a storage can be offloaded, and backward can take its views again. ``cpu``: whether the whole
    graph runs there.
    """
    value = owner.meta.get("val")
    if owner.op != "call_function" or role(owner) is not None or not isinstance(value, torch.Tensor):
        return False
    maker = owner.args[0] if is_element(owner) else owner
    if operator(maker)[0] is not maker.target:  # type: ignore[arg-type, union-attr]
        return False  # backward draws its random numbers again: it also returns the generator's state
    on_cpu = value.device.type == "cpu" and not cpu
    known = all(len(n.all_input_nodes) == 1 and not mutates(n) for view in views for n in _chain(owner, view))
    return (
        known and not on_cpu and value.layout is torch.strided and not value.is_complex() and nbytes(value) >= MIN_BYTES
    )


def _chain(owner: Node, view: Node) -> list[Node]:
    """Returns the views that lead from the owner of a storage to `view`."""
    out: list[Node] = []
    while view is not owner:
        out.append(view)
        view = view_of(view)  # type: ignore[assignment]
    return out[::-1]


def _copy(graph: fx.Graph, target: Callable[..., torch.Tensor], args: tuple[Any, ...], name: str, r: Role) -> Node:
    """Adds a copy of the first argument and a wait for it."""
    node = graph.call_function(target, args, name=name)
    wait = graph.call_function(ops.wait, (node, [args[0]]))
    value = args[0].meta["val"]
    with value.fake_mode, torch.no_grad():
        node.meta["val"] = target(value, *args[1:])
    mark(wait, Role(Kind.WAIT, r.unit, Lane.HOST))
    return mark(node, r)


def _fetch(backward: fx.GraphModule, owner: Node, host: Node, by_view: Mapping[Node, Node], before: Node) -> None:
    """Makes backward take the host copy instead of the saved views.

    Args:
        by_view: backward's arguments, by the view in forward that each one holds.
        before: the first reader of one of them.
    """
    graph, saved_view = backward.graph, next(iter(by_view.values()))
    with graph.inserting_before(saved_view):
        argument = graph.placeholder(host.name)
    argument.meta = {k: v for k, v in saved_view.meta.items() if k not in (INPUT, GIVEN)}
    argument.meta |= {"val": host.meta["val"], STORAGE: Storage(saved_view.meta[STORAGE].number, None, "no")}
    mark(argument, role(host))  # type: ignore[arg-type]
    reloaded = Role(Kind.RELOAD, role(host).unit, Lane.HOST)  # type: ignore[union-attr]
    with graph.inserting_before(before):
        value = _copy(graph, ops.reload, (argument, owner.meta["val"].device), f"{owner.name}_back", reloaded)
        copies = {owner: value}
        for view, saved_view in by_view.items():
            for node in _chain(owner, view):
                if node not in copies:
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                    copies[node].meta = dict(node.meta)
            saved_view.replace_all_uses_with(copies[view])
    for saved_view in by_view.values():
        graph.erase_node(saved_view)


def _drop(output: Node, results: list[Any], numbers: Collection[int]) -> None:
    """Removes results and AOTAutograd's description of each. Private in torch (``desc``); tried on 2.13."""
    descriptions = output.meta.get("desc")
    if isinstance(descriptions, (list, tuple)) and len(descriptions) == len(results):
        output.meta["desc"] = [x for i, x in enumerate(descriptions) if i not in numbers]
    results[:] = [r for i, r in enumerate(results) if i not in numbers]
