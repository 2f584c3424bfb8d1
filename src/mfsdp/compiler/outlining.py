"""Captures equal layers once: AOTAutograd traces and partitions one of them, and the program contains all.

Note [Layer outlining]
AOTAutograd's work on a graph (functionalize, differentiate, partition) costs Python time for each operator. So before
it runs, equal layers become calls of one graph (`outline`), which it traces and partitions once (torch's
``invoke_subgraph``). After it has partitioned the graph around the calls, `inline` expands them: passes, invariants,
listings and costs see one flat program with every layer's own parameters.

A layer is everything that runs under one numbered module (``layers.3``), which Dynamo records on every node. Layers are
equal if they do the same to tensors of the same shapes, in the same order. Layers that write to their inputs, return
them, or have unknown sizes stay as they are (`layer_match.unfit`).

Outlining may change numbers in names of values, and what is saved for backward, which is decided for one layer and not
for all at once. It does not change values.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy

from ..ir.program import LAYER, base_of
from ..ir.roles import role
from ..sharding.mutation_check import storage
from .layer_match import CALL, Layer, layers, unfit

T = TypeVar("T")

log = logging.getLogger("mfsdp")

MIN_LAYERS = 4
"""The fewest equal layers that are outlined, and separated in `subgraphs`: fewer are as fast one by one."""

NAME, AGAIN = "mfsdp_region", "_again"


def outline(gm: fx.GraphModule) -> list[str]:
    """Replaces equal layers with calls of one graph, in place, in a graph that Dynamo traced.

    Returns:
        For each kind of equal layers that stay as they are, a text that says why.
    """
    bodies: list[tuple[list[Layer], fx.GraphModule]] = []
    refused: list[str] = []
    try:
        kinds: dict[Any, list[Layer]] = {}
        for layer in layers(gm):
            kinds.setdefault(layer.text(), []).append(layer)
        for alike in (alike for alike in kinds.values() if len(alike) >= MIN_LAYERS):
            if reason := unfit(alike):
                refused.append(f"{len(alike)} equal layers, {alike[0].path} the first of them: {reason}")
            else:
                bodies.append((alike, alike[0].body()))
    except Exception as error:  # while inspecting; nothing has been changed yet
        return [f"{type(error).__name__}: {error}"]
    moved: dict[fx.Node, fx.Node] = {}
    for number, (alike, body) in enumerate(bodies):
        name = f"{NAME}_{number}{AGAIN if alike[0].again else ''}"
        gm.add_submodule(name, body)
        for layer in alike:
            layer.call(name, moved)
    if bodies:
        gm.recompile()
    return refused


def captured(gm: fx.GraphModule, compile: Callable[[], T], cut: Callable[[], bool]) -> T:
    """Compiles Dynamo's graph with equal layers as calls; without calls if torch cannot partition that graph.

    Args:
        compile: compiles the graph.
        cut: returns whether the graph has been partitioned or is for inference: later errors are not about outlining.
    """
    for refused in outline(gm):
        log.info("mfsdp: layers are captured one by one: %s", refused)
    if next(_calls(gm), None) is None:
        return compile()
    try:
        with _trusted():
            return compile()
    except Exception as error:
        if cut():
            raise
        log.warning("mfsdp: layers are captured one by one: %s: %s", type(error).__name__, error)
        log.debug("mfsdp: layers as calls of one graph", exc_info=True)
    inline(gm)
    gm.recompile()
    return compile()


@contextmanager
def _trusted() -> Iterator[None]:
    """Skips torch's check at each call whether the graph writes to its inputs, which would trace it: it does not
    (`layer_match.unfit`). Silences torch's advice on backwards that are traced more than once. Private in torch
    (``_supports_training_input_mutation``); tried on 2.13. Versions of 2.11 to 2.15 without this attribute trace calls
    more slowly.
    """
    before = getattr(CALL, "_supports_training_input_mutation", False)
    CALL._supports_training_input_mutation = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="invoke_subgraph traced multiple backward graphs")
            yield
    finally:
        CALL._supports_training_input_mutation = before


def inline(gm: fx.GraphModule, other: fx.GraphModule | None = None) -> dict[str, fx.Node]:
    """Expands the calls, in place. Does not recompile the graph: passes follow.

    Args:
        gm: a graph of Dynamo or AOTAutograd.
        other: another graph, whose names are not reused.

    Returns:
        Replacements for results of calls, by the results' earlier names.
    """
    graph = gm.graph
    for node in other.graph.nodes if other is not None else ():
        graph._graph_namespace.create_name(node.name, None)
    found: dict[str, fx.Node] = {}
    for call in list(_calls(gm)):
        name, body = _called(gm, call)
        inputs = body.graph.find_nodes(op="placeholder")
        copies: dict[fx.Node, Any] = dict(zip(inputs, call.args[2:], strict=True))
        with graph.inserting_before(call):
            graph.graph_copy(body.graph, copies)
        for inner, outer in copies.items():
            if inner.op == "get_attr":
                outer.target = f"{name}_{inner.target}"
                if not hasattr(gm, outer.target):
                    setattr(gm, outer.target, getattr(body, str(inner.target)))
            elif inner.op != "placeholder":
                outer.meta[LAYER] = call.meta.get(LAYER, "")
        results: Any = body.graph.output_node().args[0]
        _own_values(results, copies, call)
        for element in list(call.users):
            result = results[element.args[1]]
            if isinstance(result, fx.Node):
                found[element.name] = copies[result]
            element.replace_all_uses_with(copies.get(result, result))
            graph.erase_node(element)
        graph.erase_node(call)
    for node in graph.find_nodes(op="get_attr") if found else ():
        if not node.users:
            graph.erase_node(node)
    if found:
        gm.delete_all_unused_submodules()  # caches could not pickle their graphs and nodes
    return found


def _own_values(results: Sequence[fx.Node | None], copies: Mapping[fx.Node, fx.Node], call: fx.Node) -> None:
    """Gives the results of a call their own fake values. Results of different calls share no storage, although torch
    records the same values for what backward reads of them. Results that share storage inside a call still do.
    """
    storages: dict[int, torch.Tensor] = {}
    values: dict[fx.Node, torch.Tensor] = {}

    def note(inner: object, outer: object) -> None:
        if isinstance(inner, FakeTensor) and isinstance(outer, FakeTensor):
            storages.setdefault(storage(inner), outer)

    for inner, outer in copies.items():
        if inner.op == "placeholder" and isinstance(outer, fx.Node):
            note(inner.meta.get("val"), outer.meta.get("val"))
    for element in call.users:
        result, value = results[element.args[1]], element.meta.get("val")  # type: ignore[index]
        if isinstance(result, fx.Node) and value is not result.meta.get("val"):
            note(result.meta.get("val"), value)
            values[result] = value  # type: ignore[assignment]
    for result in results:
        if not isinstance(result, fx.Node) or result.op == "placeholder":
            continue
        if not isinstance(value := result.meta.get("val"), FakeTensor):
            continue
        if result not in values:
            with value.fake_mode, torch.no_grad():
                base = storages.get(storage(value))
                if base is None or base.dtype != value.dtype:
                    items = value.untyped_storage().nbytes() // value.itemsize
                    base = storages[storage(value)] = torch.empty(items, dtype=value.dtype, device=value.device)
                values[result] = base.as_strided(value.shape, value.stride(), value.storage_offset())
        copies[result].meta["val"] = values[result]


def layer_boundaries(gm: fx.GraphModule) -> None:
    """Makes the boundaries of calls, in the joint graph around them, like those between operators.

    An argument that a call returns (for backward) is read from its source: several calls that save the same tensor save
    it once. What a checkpoint gives to the next one is saved, as the partitioner does when it sees both.
    """
    for call in _calls(gm):
        _, body = _called(gm, call)
        given = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
        results: Any = body.graph.output_node().args[0]
        for element in list(call.users):
            if element.target is operator.getitem and results[element.args[1]] in given:
                element.replace_all_uses_with(given[results[element.args[1]]])
                gm.graph.erase_node(element)
        for node in call.all_input_nodes if AGAIN in str(call.args[1]) else ():
            if node.meta.get("recompute") in _RECOMPUTED and role(base_of(node)) is None:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def check_functional(joint: fx.GraphModule) -> None:
    """Checks the joint graph of a call: torch does not make it functional, but passes expect it to be.

    Raises:
        NotImplementedError: it writes to a value.
    """
    for node in joint.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise NotImplementedError(f"{node.target} writes to a value")


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for node in gm.graph.find_nodes(op="call_function", target=CALL):
        if isinstance(node.args[1], str) and NAME in node.args[1]:
            yield node


def _called(gm: fx.GraphModule, call: fx.Node) -> tuple[str, fx.GraphModule]:
    name: Any = call.args[0].target  # type: ignore[union-attr]
    return name, getattr(gm, name)
