"""Lets Dynamo trace one of equal layers: for `trace`, after which nothing runs.

Note [Layer regions]
Dynamo traces the Python code of every layer, most of the time that tracing takes. `marked` makes ``forward`` of alike
layers a region (``torch.compiler.nested_compile_region``): Dynamo traces the first layer, and for the others calls the
same graph if all guards of that trace hold with their paths moved to the other layer. So a layer that reads another
number, flag, class, function or shape is traced by itself. `expand` then replaces the calls by their operators, each
layer with its own inputs and path: the graph equals that of a trace without regions (`tests/test_layer_regions.py`).

Guards do not cover everything. `_described` compares before what they leave out: hooks, replaced forwards, places of
parameters in flat buffers, and tensors that a layer shares with the rest of the model. `_refuse` looks afterwards for
what could have changed between layers. Where it finds something, or Dynamo raises because it cannot trace a region,
`trace` starts again without regions. A compiled model is traced without: its guards must cover all layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from ..buffers.flat_buffer import refs
from ..sharding.module import own_code
from .layer_match import CALL, CHECKPOINT, Context, described, numbered_in

MIN_LAYERS = 4
"""The fewest alike layers that become regions."""

KINDS = 4
"""The most graphs of alike layers (layers with sliding and with full attention: two); with more, all are traced."""

_COLLECTOR = "transformers_dot_utils_dot_output_capturing"
"""What transformers' models change once, before their first layer: a variable that their hooks read."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def marked(model: nn.Module) -> Iterator[bool]:
    """Makes layers that are alike regions of Dynamo; yields whether there are any. Private in torch (that regions are
    reused: ``InvokeSubgraphReuseCondition``); tried on 2.13. Versions of 2.11 to 2.15
    without it trace every layer.
    """
    kinds: dict[Hashable, list[nn.Module]] = {}
    if hasattr(torch._guards, "InvokeSubgraphReuseCondition"):
        for layer, key in _layers(model):
            kinds.setdefault(key, []).append(layer)
    found = [alike for alike in kinds.values() if len(alike) >= MIN_LAYERS]
    before = [(layer, type(layer)) for alike in found for layer in alike]
    for number, alike in enumerate(found):
        kind = type(alike[0])
        forward = own_code(kind.forward, f"{kind.__name__}_{number}")  # regions are told apart by their code
        space = {
            "forward": torch.compiler.nested_compile_region(forward, max_reuse_entries=KINDS),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        }
        region = type(kind.__name__, (kind,), space)
        for layer in alike:
            layer.__class__ = region
    try:
        yield bool(found)
    finally:
        for layer, kind in before:
            layer.__class__ = kind


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, Hashable]]:
    """Yields the outermost numbered modules, each with a key that alike layers share."""
    found = {path: m for path, m in model.named_modules() if re.fullmatch(r"(?:[^.\d][^.]*\.)*\d+", path)}
    owners: Counter[int] = Counter()
    inside = {id(m) for layer in found.values() for m in layer.modules()}
    for layer in found.values():
        owners.update(set(map(id, _held(layer))))
    for m in model.modules():
        if id(m) not in inside:
            owners.update(id(x) for x in _own(m))
    for path, layer in found.items():
        yield layer, (path.rpartition(".")[0], *_described(layer, owners))


def _own(module: nn.Module) -> Iterator[object]:
    """Yields a module, and its tensors and flat buffers."""
    yield module
    for ref in refs(module).values():
        yield ref.buffer
    for values in (module._parameters, module._buffers, module.__dict__):
        yield from (v for n, v in values.items() if isinstance(v, torch.Tensor) and n not in refs(module))


def _held(layer: nn.Module) -> Iterator[object]:
    for m in layer.modules():
        yield from _own(m)


def _described(layer: nn.Module, owners: Mapping[int, int]) -> Iterator[Hashable]:
    """Yields what Dynamo's guards do not cover, or cover for one layer only."""
    numbers: dict[int, int] = {}

    def number(x: object) -> Hashable:
        """What is shared with the rest of the model must be the same in all layers."""
        return ("shared", id(x)) if owners[id(x)] > 1 else numbers.setdefault(id(x), len(numbers))

    for path, m in layer.named_modules(remove_duplicate=False):
        yield path, type(m), m.training, number(m)
        hooks = [getattr(m, kind) for kind in _HOOKS]
        yield tuple(tuple(map(id, hook.values())) for hook in hooks), id(m.__dict__.get("forward"))
        for name, ref in refs(m).items():
            buffer = ref.buffer
            place = (ref.index, ref.slot, ref.offset, ref.shape, buffer.text, buffer.trainable, tuple(buffer.trains))
            yield name, number(buffer), place, id(ref.piece), id(ref.style)
        for values in (m._parameters, m._buffers, m.__dict__):
            for name, v in values.items():
                if isinstance(v, torch.Tensor) and name not in refs(m):
                    yield name, number(v), described(v), v.requires_grad


def expand(gm: fx.GraphModule) -> None:
    """Replaces calls of regions by the regions' operators, in Dynamo's graph, in place.

    Raises:
        NotImplementedError: guards do not tell whether all layers would be traced alike.
    """
    graphs = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    calls = [(owner, call) for owner in graphs for call in owner.graph.find_nodes(op="call_function", target=CALL)]
    if not calls:
        return
    _refuse(graphs)
    for owner, call in calls:
        _expand(owner, call)
    for owner in graphs:
        for node in owner.graph.find_nodes(op="get_attr"):
            if not node.users:
                owner.graph.erase_node(node)
        owner.delete_all_unused_submodules()
        owner.recompile()


def _refuse(graphs: Sequence[fx.GraphModule]) -> None:
    """Refuses what layers might read and guards do not cover: what the model's Python code has changed, and states set
    in the graph, such as autocast and no_grad. Private in torch (``side_effects``); tried on 2.13.

    Raises:
        NotImplementedError: the model does one of these.
    """
    effects = InstructionTranslator.current_tx().output.side_effects
    for x in effects.id_to_variable.values():
        source = str(getattr(x, "source", None) or x)
        if type(x.mutation_type).__name__.endswith("Existing") and effects.is_modified(x) and _COLLECTOR not in source:
            raise NotImplementedError(f"forward changes {source}")
    for graph in graphs:
        context = Context()
        before = context.text()
        for node in graph.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                context.enter(node)
            if node.target in (CALL, CHECKPOINT) and context.text() != before:
                raise NotImplementedError(f"a layer runs {context.text()}")


def _expand(owner: fx.GraphModule, call: fx.Node) -> None:
    """Replaces one call."""
    body = getattr(owner, str(call.args[0].target))  # type: ignore[union-attr]
    graph = owner.graph
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    results: Any = body.graph.output_node().args[0]
    for node in body.graph.nodes:
        if node.op in ("get_attr", "call_module") or "unbacked_bindings" in node.meta or node.target is CALL:
            raise NotImplementedError(f"a region has {node.op} {node.target}")
        if node.op in ("placeholder", "output"):
            continue
        with graph.inserting_before(call):
            new = copies[node] = graph.node_copy(node, copies.__getitem__)
        new.meta = dict(node.meta)
        new.meta["nn_module_stack"] = _moved(node, call)
    for element in list(call.users):
        new = copies[results[element.args[1]]]  # type: ignore[index]
        new.meta["example_value"] = element.meta["example_value"]
        element.replace_all_uses_with(new)
        graph.erase_node(element)
    graph.erase_node(call)


def _moved(node: fx.Node, call: fx.Node) -> dict[str, tuple[str, Any]]:
    """Returns a node's stack of modules, with the layer in which it was traced replaced by that of a call. Private in
    torch (``nn_module_stack``).
    """
    stack, here = node.meta["nn_module_stack"], call.meta["nn_module_stack"]
    there, path = numbered_in(stack), numbered_in(here)
    inner = {k: (path + v[0].removeprefix(there), v[1]) for k, v in stack.items() if v[0].startswith(f"{there}.")}
    return {**here, **inner}
