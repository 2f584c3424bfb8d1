"""Finds layers in Dynamo's graph: their nodes, which are equal, and which can become calls (Note [Layer outlining])."""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ..cost_model.fusion import flops
from ..ir import ops
from ..ir.program import LAYER, is_element
from ..ir.program import operator as operator_in
from ..sharding.mutation_check import storage, written

CALL = torch.ops.higher_order.invoke_subgraph
"""torch's call of a nested graph. Private in torch, as are ``nn_module_stack`` and the partitioning of nested graphs;
tried on 2.11 and 2.13, there in 2.11 to 2.15.
"""

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


# Which nodes belong to a layer

_NUMBERED = re.compile(r"(?:\.|\[')\d+(?:'\])?$")


def _numbered(stack: Mapping[str, tuple[str, object]] | None) -> tuple[str, object]:
    """Returns path and class of the outermost numbered module in a node's ``nn_module_stack``."""
    return next((entry for entry in (stack or {}).values() if _NUMBERED.search(entry[0])), ("", ""))


def numbered_in(stack: Mapping[str, tuple[str, object]]) -> str:
    """Returns the path of the outermost numbered module in a stack of modules."""
    return _numbered(stack)[0]


def _path(gm: fx.GraphModule, node: fx.Node) -> str:
    """Returns the path of the outermost numbered module in which Dynamo traced a node; for a checkpoint, of a node
    inside. Private in torch (``nn_module_stack``).
    """
    if node.target is CHECKPOINT:
        body = _inside(gm, node)
        return next(filter(None, (_path(body, n) for n in body.graph.nodes)), "")
    return _numbered(node.meta.get("nn_module_stack"))[0]


def layer_of(node: fx.Node) -> str:
    """Returns the path of the layer of a joint graph's node, or of the layer that it differentiates; ``""`` for none.
    Private in torch (``fwd_nn_module_stack``).
    """
    return fqn(_numbered(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))[0])


def class_of(nodes: Iterable[fx.Node]) -> str:
    """Returns the name of the class of the layer that contains the nodes. Private in torch (``nn_module_stack``)."""
    kind = next(filter(None, (_numbered(node.meta.get("nn_module_stack"))[1] for node in nodes)), "")
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def operator_of(node: fx.Node) -> str:
    """Returns the name of a matrix product or attention in its layer: the path of its module there, plus ``attention``
    for attention; ``""`` for other nodes. Private in torch (``nn_module_stack``).
    """
    if node.op != "call_function" or not flops(node):
        return ""
    met = described_by(node)
    stack = met.meta.get("nn_module_stack") or {}
    inner = next(reversed([path for path, _ in stack.values()]), "")
    parts = [fqn(inner).removeprefix(layer_of(met)).strip(".")]
    parts += ["attention"] if "attention" in str(operator_in(node)[0]) else []
    return ".".join(filter(None, parts))


def described_by(node: fx.Node) -> fx.Node:
    """Returns the node whose ``meta`` has the module of `node`: one of its elements if the partitioner has wrapped it,
    as it does with recomputed random operators. Private in torch (``nn_module_stack``).
    """
    known = any(key in node.meta for key in ("nn_module_stack", "fwd_nn_module_stack"))
    return node if known else next(filter(is_element, node.users), node)


def fqn(path: str) -> str:
    """Returns ``blocks.0`` for ``L['self'].blocks[0]`` and ``L['self']._modules['blocks']._modules['0']``."""
    text = re.sub(r"^L\['\w+'\]|(?<=[.\]])_modules(?=\[)|\._modules(?=\[)", "", path)
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", text).strip(".")


def _inside(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    return getattr(gm, str(node.args[0].target))  # type: ignore[union-attr, no-any-return]


def layers(gm: fx.GraphModule) -> Iterator[Layer]:
    """Yields consecutive nodes of one layer."""
    run: list[fx.Node] = []
    path, context = "", Context()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        now = "" if node.op == "output" else _path(gm, node)
        if node.target is operator.getitem and run and node.args[0] is run[-1] and run[-1].target is CHECKPOINT:
            now = path
        if now != path and run:
            yield Layer(gm, run, context.text())
            run = []
        path = now
        context.enter(node)
        if path:
            run.append(node)


_HARMLESS = ("_log_api_usage_once",)


class Context:
    """State that a graph sets for later operators. A layer's backward is traced elsewhere, without that state."""

    def __init__(self) -> None:
        self.autocast = int(any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")))
        self.grad, self.other = True, ""

    def enter(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", str(node.target))
        if name in ("_enter_autocast", "_exit_autocast"):
            self.autocast += 1 if name == "_enter_autocast" else -1
        elif name == "_set_grad_enabled":
            self.grad = bool(node.args[0])
        elif "example_value" not in node.meta and not node.all_input_nodes and name not in _HARMLESS:
            self.other = f"after {name}, which neither reads nor gives a tensor"

    def text(self) -> str:
        return "under autocast" if self.autocast else "under no_grad" if not self.grad else self.other


class Layer:
    """One layer's nodes in Dynamo's graph."""

    def __init__(self, gm: fx.GraphModule, nodes: list[fx.Node], context: str):
        self.gm, self.nodes, self.context = gm, nodes, context
        self.path = _path(gm, nodes[0])
        """Path of the module, as Dynamo writes it."""
        self.inside = set(nodes)
        reads = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in self.inside)
        self.attributes = [node for node in reads if node.op == "get_attr"]
        self.inputs = [node for node in reads if node.op != "get_attr"]
        self.outputs = [node for node in nodes if any(user not in self.inside for user in node.users)]

    @property
    def again(self) -> bool:
        """Whether backward recomputes the layer or a part of it."""
        return any(node.target is CHECKPOINT for node in self.nodes)

    def text(self) -> Hashable:
        """Returns a key that equal layers share."""
        places = {node: f"%{i}" for i, node in enumerate([*self.inputs, *self.nodes])}
        attributes = {node: _shape(getattr(self.gm, str(node.target))) for node in self.attributes}
        inputs, outputs = (tuple(map(_value, nodes)) for nodes in (self.inputs, self.outputs))
        given_back = tuple(places[n] for n in self.outputs)
        return inputs, lines(self.nodes, {**places, **attributes}), given_back, outputs

    def body(self) -> fx.GraphModule:
        """Returns the layer as a graph of its own."""
        names = {node: f"arg{i}" for i, node in enumerate(self.inputs)}
        graph, copies = extracted([*self.attributes, *self.nodes], names, self.outputs)
        for old, new in copies.items():
            new.meta = dict(old.meta)
        own = {str(node.target): getattr(self.gm, str(node.target)) for node in self.attributes}
        return fx.GraphModule(own, graph)

    def call(self, name: str, moved: dict[fx.Node, fx.Node]) -> None:
        """Replaces the layer with a call of a graph. ``moved``: nodes' replacements so far; extended here."""
        graph = self.gm.graph
        with graph.inserting_before(self.nodes[-1].next):
            body = graph.get_attr(name)
            call = graph.call_function(CALL, (body, name, *(moved.get(n, n) for n in self.inputs)))
            call.meta["example_value"] = tuple(node.meta["example_value"] for node in self.outputs)
            call.meta["custom"] = {LAYER: fqn(self.path)}  # AOTAutograd copies it, to the call of backward too
            for i, node in enumerate(self.outputs):
                element = graph.call_function(operator.getitem, (call, i))
                element.meta = dict(node.meta)
                moved[node] = element
                node.replace_all_uses_with(element, delete_user_cb=lambda user: user not in self.inside)
        for node in (*reversed(self.nodes), *self.attributes):
            if not node.users:
                graph.erase_node(node)


def extracted(
    nodes: Iterable[fx.Node], inputs: Mapping[fx.Node, str], outputs: Iterable[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Returns nodes as a graph of their own, and the copies of nodes and inputs. ``inputs``: names of placeholders."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(name) for node, name in inputs.items()}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return graph, copies


def _shape(module: object) -> Hashable:
    """Returns a key that equal nested graphs share; other attributes are equal if they are identical."""
    if not isinstance(module, fx.GraphModule):
        return id(module)
    inner = {n: _shape(getattr(module, n.target)) for n in module.graph.find_nodes(op="get_attr")}
    places = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
    policy = module.meta.get("_checkpoint_context_fn")
    return policy, *lines([n for n in module.graph.nodes if n.op != "get_attr"], {**places, **inner})


def lines(nodes: Iterable[fx.Node], places: Mapping[fx.Node, Hashable]) -> tuple[Hashable, ...]:
    """Returns operators and arguments; nodes among the arguments are written as places."""

    def line(node: fx.Node) -> Hashable:
        arguments = map_aggregate(
            (node.args, node.kwargs),
            lambda x: places[x] if isinstance(x, fx.Node) else x,  # type: ignore[arg-type, return-value]
        )
        return (node.op, node.target if node.op != "placeholder" else "", repr(arguments))

    return tuple(map(line, nodes))


def _value(node: fx.Node) -> Hashable:
    """Returns the known properties of a value that a layer reads or returns."""
    value = node.meta.get("example_value")
    return (*described(value), value.requires_grad) if isinstance(value, torch.Tensor) else repr(value)


def described(value: torch.Tensor) -> tuple[Hashable, ...]:
    """Returns the properties that equal tensors of equal layers share, without ``requires_grad``."""
    sizes = (value.shape, value.stride(), (value.storage_offset(),))
    return type(value), value.dtype, value.device, value.layout, *(tuple(map(str, size)) for size in sizes)


# What cannot be a call


def unfit(alike: Sequence[Layer]) -> str:
    """Returns why equal layers cannot be calls of one graph; ``""`` if they can."""
    first = alike[0]
    if context := next(filter(None, (layer.context for layer in alike)), ""):
        return context
    values = [node.meta.get("example_value") for node in (*first.inputs, *first.outputs)]
    if not first.outputs or not all(isinstance(v, torch.Tensor) for v in values):
        return "values that are no tensors go in or out"
    if any(is_traceable_wrapper_subclass(v) for v in values):
        return "DTensors go in or out"
    sizes = (n for v in values for n in (*v.shape, *v.stride(), v.storage_offset()))  # type: ignore[union-attr]
    if any(isinstance(n, torch.SymInt) for n in sizes):
        return "sizes are not known beforehand"
    reached = _reached(first.gm)
    for layer in alike:
        if any(node not in reached and node.meta["example_value"].requires_grad for node in layer.outputs):
            return "what it gives is read, but not differentiated"
        reason = _shares(layer)
        if reason:
            return reason
    return _runs(first)


def _reached(gm: fx.GraphModule) -> set[fx.Node]:
    """Returns the values that get gradients from a result of the graph. For its other results a call computes zero
    gradients, where a graph without calls computes none.
    """
    found: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        for arg in node.all_input_nodes if node.op == "output" or node in found else ():
            values = pytree.tree_leaves(arg.meta.get("example_value"))
            if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
                found.add(arg)
    return found


def _shares(layer: Layer) -> str:
    """Returns why other users of a layer's inputs and outputs prevent a call; ``""`` if they do not."""
    storages = [_storage(node) for node in (*layer.inputs, *layer.outputs)]
    if len(set(storages)) < len(storages):
        return "what goes in or out shares storage"
    markers = {_storage(node) for node in layer.nodes if node.target is ops.param}
    if markers.intersection(storages):
        return "a parameter goes out"
    for node in layer.inputs:
        own = sum(_reads(layer.gm, user, node) for user in node.users if user in layer.inside)
        others = any(user not in layer.inside for user in node.users)
        if node.meta["example_value"].requires_grad and own > 1 and others:
            return "gradients of a value that others read too would be added up in another order"
    return "what it gives is written to" if any(map(written, layer.outputs)) else ""


def _reads(gm: fx.GraphModule, user: fx.Node, node: fx.Node) -> int:
    """Returns how many operators in a node read a value."""
    if user.target is not CHECKPOINT:
        return 1
    given = _inside(gm, user).graph.find_nodes(op="placeholder")
    return sum(len(own.users) for own, arg in zip(given, user.args[1:], strict=False) if arg is node)


def _storage(node: fx.Node) -> int:
    return storage(node.meta.get("example_value"))


_STATEFUL = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")


def _runs(layer: Layer) -> str:
    """Runs a layer on fake tensors; returns why its operators prevent a call, or ``""``."""
    body = layer.body()
    graphs = [body, *(m for m in body.modules() if isinstance(m, fx.GraphModule))]
    for node in (n for g in graphs for n in g.graph.nodes):
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not CHECKPOINT:
            return f"calls {node.target.name()}"
        if node.op == "call_module" or getattr(node.target, "__name__", "") in _STATEFUL:
            return f"calls {node.target}"
        owner = node.graph.owning_module
        if node.op == "get_attr" and not isinstance(getattr(owner, str(node.target)), fx.GraphModule):
            return f"reads {node.target}"
    calls = _Calls(any(n.target is CHECKPOINT for g in graphs for n in g.graph.nodes))
    with FakeTensorMode(), torch.no_grad():
        given = [_like(node.meta["example_value"]) for node in layer.inputs]
        try:
            with calls:
                calls.inputs = {storage(value) for value in given}
                fx.Interpreter(body).run(*given)
        except Exception as error:  # mostly data-dependent sizes
            return f"{type(error).__name__} on fake tensors: {error}"
    return calls.reason


def _like(value: torch.Tensor) -> torch.Tensor:
    """Returns a value like another; on the CPU for the meta device, for which `tracing` captures as on the CPU."""
    device = torch.device("cpu") if value.is_meta else value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


class _Calls(TorchDispatchMode):
    """Inspects every operator that is called."""

    def __init__(self, checkpointed: bool):
        super().__init__()
        self.checkpointed, self.reason = checkpointed, ""
        self.inputs: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [v for v, a in zip(args, func._schema.arguments, strict=False) if a.is_write]
        written += [kwargs[a.name] for a in func._schema.arguments if a.is_write and a.name in kwargs]
        tensors = [v for v in pytree.tree_leaves(written) if isinstance(v, torch.Tensor)]
        if self.inputs.intersection(map(storage, tensors)):
            self.reason = f"{func} writes to what it is given"
        on_gpu = any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in pytree.tree_leaves(args))
        if self.checkpointed and on_gpu and torch.Tag.nondeterministic_seeded in func.tags:
            self.reason = f"{func}, which may draw random numbers, is computed again on a GPU"
        return func(*args, **kwargs)
