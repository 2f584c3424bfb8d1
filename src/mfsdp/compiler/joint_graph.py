"""Partitions a joint graph as planned: layers are recomputed in backward, kept gathered, or left out.

Note [Partition tags]
torch's partitioner splits the joint graph into forward and backward, and does not save nodes that are tagged for
recomputation. So a plan's choices for layers (`mfsdp.config.layer_choices`) become tags, and nothing else. A layer that
AOTAutograd traced once for many (Note [Layer outlining]) is already partitioned by then. Its joint graph is kept and
partitioned again, once for each treatment of that kind of layers, and `apply_treatments` replaces the calls.

A recomputed layer saves its inputs, and the results of operators named in ``saved``: matrix products, attention. A
layer's own checkpoints stay as they are.

For planning, the whole joint graph is kept (`JointGraph`) and partitioned as often as needed: the result equals that of
compiling with those choices, node for node. Layers can also be left out (`without`): of consecutive equal layers, a few
determine the cost of many (`mfsdp.cost_model.extrapolate`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.node import Argument
from torch.utils.checkpoint import CheckpointPolicy

from ..config.layer_choices import Choice, Choices, numbered
from ..config.units import UnitSpec
from ..ir import ops
from ..ir.program import LAYER, is_element
from ..ir.roles import Kind, role
from .layer_match import CALL, class_of, layer_of, operator_of

BODY = "mfsdp_body"
"""``meta`` key of a layer's forward graph: the `Body` that it was partitioned from."""

Cut = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, eq=False)
class Body:
    """A layer's joint graph before partitioning, and the arguments for the partitioner."""

    joint: fx.GraphModule
    options: Mapping[str, Any]
    cuts: dict[Treatment, Cut] = field(default_factory=dict, repr=False)

    @property
    def outputs(self) -> int:
        """How many of forward's first results are for its caller."""
        return self.options["num_fwd_outputs"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Treatment:
    """What is done to a layer when it is partitioned."""

    again: bool = False
    saved: tuple[str, ...] = ()
    gathered: bool | None = None
    """``None``: as its units specify."""
    offloaded: bool = False
    """Whether forward's saved values go to the host (`activation_offload`); the partition does not depend on it."""

    @property
    def cut(self) -> Treatment:
        """The treatment, as far as the layer's partition depends on it."""
        return replace(self, offloaded=False)


def treatments(choices: Choices) -> dict[str, Treatment]:
    out = {}
    for path, choice, number in numbered(choices):
        again = choice.recomputes(number)
        saved = choice.saved if again else ()
        out[path] = Treatment(again, saved, choice.gathers(number), choice.offloads(number))
    return out


class JointGraph:
    """A joint graph that can be partitioned more than once. Private in torch (``TracingContext``, the partitioner and
    its configuration); tried on 2.13, there in 2.11 to 2.15.

    Args:
        joint: the graph with roles, before tagging; it is copied.
        inputs, options: the partitioner's arguments.
    """

    def __init__(self, joint: fx.GraphModule, inputs: Sequence[object], options: Mapping[str, Any]):
        self.graph, self.inputs, self.options = copied(joint), inputs, dict(options)
        self.context, self.config = TracingContext.try_get(), functorch_config.get_config_copy()

    def kinds(self) -> list[Choice]:
        """Returns kinds of equal layers that are not recomputed already, in forward's order, with nothing chosen. Skips
        layers that backward does not reach: nothing of them is saved or gathered again.
        """
        found = {pair.path: (class_of(pair.body.joint.graph.nodes), pair.body) for pair in pairs(self.graph)}
        in_backward, nodes = differentiated(self.graph), dict[str, list[fx.Node]]()
        for node in self.graph.graph.nodes:
            path = node.meta.get(LAYER, "")
            if path and path not in found and node.op == "call_function" and node not in in_backward:
                nodes.setdefault(path, []).append(node)
        reached = {node.meta.get(LAYER, "") for node in in_backward}
        keys: dict[str, tuple[str, object]] = dict(found)
        for path, own in nodes.items():
            if path in reached and not any("recompute" in n.meta for n in own):
                keys[path] = class_of(own), tuple((str(n.target), _shape(n)) for n in own)
        alike: dict[tuple[str, object], list[str]] = {}
        for path in ordered(self.graph):
            if path in keys:
                alike.setdefault(keys[path], []).append(path)
        return [Choice(name, tuple(paths)) for (name, _), paths in alike.items()]

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Restores the settings with which the graph was traced."""
        with tracing(self.context), functorch_config.patch(**self.config), _use_lazy_graph_module(True):
            yield


def ordered(joint: fx.GraphModule) -> list[str]:
    """Returns paths of layers, in the order in which forward begins them."""
    return list(dict.fromkeys(path for n in joint.graph.nodes if (path := n.meta.get(LAYER))))


def _shape(node: fx.Node) -> tuple[tuple[str, ...], torch.dtype] | None:
    value = node.meta.get("val")
    return (tuple(map(str, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else None


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph; nested graphs are shared, and its code generator is not copied (pytrees of some tensor
    subclasses have no copies).
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    twin = _LazyGraphModule(gm, graph)  # generates code only when called
    twin.meta = dict(gm.meta)
    return twin


def owners(joint: fx.GraphModule) -> dict[str, str]:
    """Returns the layer that reads a unit's parameters, by the unit's name."""
    out = {n: p.path for p in pairs(joint) for x in p.inputs if (n := _shard_of(x))}
    for node in joint.graph.find_nodes(op="call_function", target=ops.param):
        if (r := role(node)) is not None and (path := layer_of(node)):
            out[r.unit] = path
    return out


def _shard_of(node: object) -> str:
    """Returns the unit of a shard; ``""`` if the node is no shard."""
    r = role(node) if isinstance(node, fx.Node) else None
    return r.unit if r is not None and r.kind is Kind.SHARD else ""


def name_layers(gm: fx.GraphModule) -> None:
    """Records the layer of every node of a graph of AOTAutograd, which passes it on in several ways."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is not ops.param:
            path = node.meta.get("custom", {}).get(LAYER) if node.target is CALL else layer_of(node)
            if path:
                node.meta[LAYER] = path


def apply_treatments(joint: fx.GraphModule, treated: Mapping[str, Treatment]) -> dict[str, bool]:
    """Makes layers recomputed, and kept gathered or not, in place, before the graph is partitioned.

    Args:
        joint: its nodes have layers.
        treated: treatments by path of a layer; other layers stay as they are.

    Returns:
        Whether a unit stays gathered, by name, for the units that are set here.
    """
    gathered: dict[str, bool] = {}
    suffixes: dict[tuple[Body, Treatment], str] = {}
    for pair in list(pairs(joint)):
        treatment = treated.get(pair.path, Treatment()).cut
        if treatment != Treatment():
            if treatment.gathered is not None:
                gathered |= dict.fromkeys(filter(None, map(_shard_of, pair.inputs)), treatment.gathered)
            pair.swap(treatment, suffixes)
    in_backward = differentiated(joint)
    marked: dict[str, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        path = layer_of(node) if node.target is ops.param else node.meta.get(LAYER, "")
        if path in treated and node.op == "call_function" and node.target is not CALL and node not in in_backward:
            marked.setdefault(path, []).append(node)
    for number, (path, nodes) in enumerate(marked.items(), 1):
        if treated[path].again:
            tag(nodes, number, treated[path].saved)
        if (whole := treated[path].gathered) is not None:
            gathered |= {r.unit: whole for n in nodes if n.target is ops.param and (r := role(n)) is not None}
    for node in joint.graph.nodes:
        if node.target in (ops.param, ops.param_grad) and (r := role(node)) is not None and r.unit in gathered:
            _respecify(node, gathered[r.unit])
    joint.graph.lint()
    return gathered


def _respecify(marker: fx.Node, gathered: bool) -> None:
    *rest, text = marker.args
    marker.args = (*rest, replace(UnitSpec.decode(text), reshard=not gathered).encode())  # type: ignore[arg-type]


def differentiated(joint: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes that run in backward: those that depend on tangents."""
    out: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            if "tangents" in node.name:
                out.add(node)
        elif not out.isdisjoint(node.all_input_nodes):
            out.add(node)
    return out


def tag(nodes: Collection[fx.Node], number: int, saved: Sequence[str]) -> None:
    """Tags a layer's forward operators for recomputation, except saved ones. An operator and all its elements are saved
    together, or the partitioner recomputes it anyway.
    """
    kept = {node for node in nodes if operator_of(node) in saved}
    for node in nodes:
        if node.target is ops.param or "recompute" in node.meta:
            continue
        keep = node in kept or (is_element(node) and node.args[0] in kept)
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = number


_LAST_REGION = 1 << 30
"""Above every checkpoint region's number: a tagged node that such a region reads is not its boundary."""


def recompute_parameters(joint: fx.GraphModule) -> None:
    """Tags markers, and every node all of whose inputs are tagged (views, casts), for recomputation in backward.

    Otherwise the partitioner would save a marker's result: the full parameter. Markers of a unit that stays gathered
    (``reshard_after_forward=False``) are tagged to be saved.
    """
    markers = joint.graph.find_nodes(op="call_function", target=ops.param)
    freed = [marker for marker in markers if UnitSpec.decode(marker.args[3]).reshard]
    for marker in markers:
        marker.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in computed_from(joint.graph, freed):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _LAST_REGION


def computed_from(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """Returns the sources, and the operators that depend on them alone."""
    found = set(sources)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and found.issuperset(inputs):
            found.add(node)
    return found


@dataclass(eq=False)
class Pair:
    """The call of a layer's forward, and the call of its backward."""

    gm: fx.GraphModule
    forward: fx.Node
    backward: fx.Node
    body: Body
    saved: list[fx.Node | None]
    """Elements of forward's results that are backward's inputs, in order."""

    @property
    def path(self) -> str:
        return self.forward.meta.get(LAYER, "")  # type: ignore[no-any-return]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return self.forward.args[2:]  # type: ignore[return-value]

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        return self.backward.args[2 + len(self.saved) :]  # type: ignore[return-value]

    def results(self) -> dict[int, fx.Node]:
        """Returns the elements of forward's results that are not saved for backward, by index."""
        found: dict[Any, fx.Node] = {e.args[1]: e for e in self.forward.users if is_element(e)}
        return {i: element for i, element in found.items() if i < self.body.outputs}

    def swap(self, treatment: Treatment, suffixes: dict[tuple[Body, Treatment], str]) -> None:
        """Makes the two calls run graphs that are partitioned for a treatment.

        Args:
            suffixes: name suffixes of graphs that exist already.
        """
        forward, backward = cut(self.body, treatment)
        suffix = suffixes.setdefault((self.body, treatment), f"_way_{len(suffixes)}")
        values = _values(forward)
        saved: list[fx.Node] = []
        with self.gm.graph.inserting_after(self.forward):
            for i in reversed(range(self.body.outputs, len(values))):
                element = self.gm.graph.call_function(operator.getitem, (self.forward, i))
                element.meta = {k: v for k, v in self.forward.meta.items() if k != LAYER} | {"val": values[i]}
                saved.insert(0, element)
        self._retarget(self.forward, suffix, forward, self.inputs)
        self._retarget(self.backward, suffix, backward, (*saved, *self.tangents))
        for node in self.saved:
            if node is not None:
                self.gm.graph.erase_node(node)

    def _retarget(self, call: fx.Node, suffix: str, body: fx.GraphModule, operands: Sequence[Argument]) -> None:
        before: Any = call.args[0]
        name = f"{before.target}{suffix}"
        if not hasattr(self.gm, name):
            self.gm.add_submodule(name, body)
        with self.gm.graph.inserting_before(call):
            attribute = self.gm.graph.get_attr(name)
        attribute.meta = dict(before.meta)
        call.args = (attribute, name, *operands)
        call.meta["val"] = tuple(_values(body))


def _values(gm: fx.GraphModule) -> list[object]:
    results: Any = gm.graph.output_node().args[0]
    return [r.meta.get("val") if isinstance(r, fx.Node) else None for r in results]


def pairs(gm: fx.GraphModule) -> Iterator[Pair]:
    """Yields the calls of layers in a joint graph, each forward with its backward, in forward's order."""
    for call in gm.graph.find_nodes(op="call_function", target=CALL):
        graph = getattr(gm, str(call.args[0].target))
        body = graph.meta.get(BODY)
        if body is None:
            continue
        elements = {e.args[1]: e for e in call.users if is_element(e)}
        saved = [elements.get(i) for i in range(body.outputs, len(_values(graph)))]
        back = {u for e in saved if e is not None for u in e.users if u.target is CALL}
        if len(back) == 1:
            yield Pair(gm, call, back.pop(), body, saved)


def cut(body: Body, treatment: Treatment) -> Cut:
    """Returns a layer's joint graph, partitioned as it is treated; calls of one body share the result."""
    if treatment not in body.cuts:
        joint = copied(body.joint)
        if treatment.gathered is not None:
            for node in joint.graph.nodes:
                if node.target in (ops.param, ops.param_grad):
                    _respecify(node, treatment.gathered)
        if treatment.again:
            in_backward = differentiated(joint)
            nodes = [n for n in joint.graph.nodes if n.op == "call_function" and n not in in_backward]
            tag(nodes, 1, treatment.saved)
        recompute_parameters(joint)
        forward, backward = min_cut_rematerialization_partition(joint, (), **body.options)
        forward.meta[BODY] = body
        body.cuts[treatment] = forward, backward
    return body.cuts[treatment]


def removable(joint: fx.GraphModule) -> set[str]:
    """Returns layers that can be left out (`without`) so that a few determine the cost of many: equal layers, each
    called once and directly after the one before, without anything in between (another kind of layers, a dropout). Only
    the next layer may read a layer's results.
    """
    order = ordered(joint)
    found: set[str] = set()
    for calls in _by_body(joint).values():
        paths = [pair.path for pair in calls]
        start = order.index(paths[0])
        if order[start : start + len(paths)] == paths and without(copied(joint), paths[1:]):
            found.update(paths)
    return found


def without(joint: fx.GraphModule, paths: Collection[str]) -> bool:
    """Leaves layers out, in place. A layer's inputs go to its successor, and its tangents to its predecessor's
    backward. Each must stand between two equal layers, and give all its results to the next one.

    Returns:
        Whether it could be done; if not, the graph is unusable.
    """
    for calls in _by_body(joint).values():
        chain = _chain(calls)
        for pair in calls:
            if pair.path in paths and not _leave_out(joint, pair, chain):
                return False
    joint.graph.lint()
    return True


def _by_body(joint: fx.GraphModule) -> dict[Body, list[Pair]]:
    """Returns the calls of each layer's graph, in forward's order."""
    found: dict[Body, list[Pair]] = {}
    for pair in pairs(joint):
        found.setdefault(pair.body, []).append(pair)
    return found


def _chain(calls: Sequence[Pair]) -> dict[int, int]:
    """Maps arguments of a call to results of the call before it; empty if the calls differ in this."""
    mappings: list[dict[int, int]] = []
    for a, b in itertools.pairwise(calls):
        given = {e: j for j, e in a.results().items()}
        mappings.append({q: given[x] for q, x in enumerate(b.inputs) if x in given})
    return mappings[0] if mappings and all(mapping == mappings[0] for mapping in mappings) else {}


def _leave_out(joint: fx.GraphModule, pair: Pair, chain: Mapping[int, int]) -> bool:
    results, tangents = pair.results(), pair.tangents
    if not chain or len(tangents) != pair.body.outputs or not set(results) <= set(chain.values()):
        return False
    for place, j in chain.items():
        if j in results:
            results[j].replace_all_uses_with(pair.inputs[place], delete_user_cb=lambda u: u is not pair.backward)
    output = joint.graph.output_node()
    for element in list(pair.backward.users):
        if not is_element(element):
            return False
        q: Any = element.args[1]
        if q in chain:
            element.replace_all_uses_with(tangents[chain[q]])
            continue
        for user in list(element.users):
            if user is output:
                output.args = (tuple(None if r is element else r for r in output.args[0]),)  # type: ignore[union-attr]
            elif user.target is torch.ops.aten.add.Tensor and len(user.all_input_nodes) == 2:
                user.replace_all_uses_with(next(n for n in user.all_input_nodes if n is not element))
            else:
                return False
    for node in (*pair.backward.users, pair.backward, *pair.forward.users, pair.forward):
        joint.graph.erase_node(node)
    return True
