"""Backwards whose caller differentiates only some results of forward.

Note [Optional tangents]
Models of transformers return their loss beside their logits. AOTAutograd's backward takes a tangent for each, and
autograd fills in zeros for one that does not exist: with 8,192 tokens and 128,256 words in bfloat16, 2.1 GB where
memory peaks, written, read, and added to a gradient. So:

- `tell_absent` makes autograd hand over ``None`` instead.
- `make_optional` replaces the addition of a tangent by `add_tangent`, which adds in place what exists. The driver calls
  it, so one compiled backward serves all callers. Compilers still fuse additions inside layers, which would be split.
  Nothing but the driver's order says that readers of the gradient come later. So it takes the value that owns the
  memory, by which subgraphs know that its readers stay, and no gradient that a pass packs where it is computed.
- `CompiledProgram` makes the zeros that a program still needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # private; tried on 2.11 to 2.15

from ..ir import ops
from ..ir.program import INPUT, LAYER, OPTIONAL, Program, view_of
from ..ir.roles import role
from ..ir.symbolic_sizes import symbolic
from ..runtime.program_info import ProgramInfo, Zeros

aten = torch.ops.aten


def tangents(program: Program) -> dict[int, fx.Node]:
    """Returns the tangents of a backward, by argument."""
    inputs = enumerate(program.graph.find_nodes(op="placeholder"))
    return {i: node for i, node in inputs if node.name.startswith("tangents") and INPUT not in node.meta}


def make_optional(program: Program) -> None:
    """Adds tangents in place that are read by nothing but the addition to a gradient."""
    for tangent in tangents(program).values() if zeros(program) else ():
        total = next(iter(tangent.users), tangent)
        if len(tangent.users) > 1 or total.target is not aten.add.Tensor or total.kwargs:
            continue
        gradient = next((n for n in total.all_input_nodes if n is not tangent), tangent)
        owner = _owner(gradient)
        if owner is None or not _alike(gradient, tangent, total) or _in_layer(gradient, total) or _leaves(total):
            continue
        with program.graph.inserting_before(total):
            program.graph.call_function(ops.add_tangent, (owner, tangent)).meta["val"] = None
        total.replace_all_uses_with(gradient)
        program.graph.erase_node(total)
        tangent.meta[OPTIONAL] = True


def _owner(gradient: fx.Node) -> fx.Node | None:
    """Returns the operator's result that a gradient is all of; ``None`` if something else reads it or shares it."""
    node = gradient
    while len(node.users) == 1 and node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    value = node.meta.get("val")
    owns = _computes(node) and view_of(node) is None and role(node) is None and len(node.users) == 1
    return node if owns and isinstance(value, torch.Tensor) and not symbolic(value) and value.is_contiguous() else None


_RESHAPES = (aten.view.default, aten._unsafe_view.default)


def _computes(node: fx.Node) -> bool:
    """Returns whether a node is an operator of torch whose result has memory of its own also in compiled code, which
    leaves out operators that do nothing.
    """
    space, _, name = str(getattr(getattr(node.target, "_schema", None), "name", "")).partition("::")
    return space in ("aten", "prims") and name not in _LEFT_OUT


_LEFT_OUT = ("clone", "copy", "cat", "pow", "slice_scatter", "repeat", "constant_pad_nd", "device_put")
"""Of ``noop_registry`` in Inductor's post-grad passes, with 2.11 to 2.15."""


def _alike(gradient: fx.Node, tangent: fx.Node, total: fx.Node) -> bool:
    """Returns whether the gradient can stand for the sum, and the tangent has its shape."""
    a, b, c = (n.meta["val"] for n in (gradient, tangent, total))
    same = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return bool(same and (a.shape, a.dtype, a.stride()) == (c.shape, c.dtype, c.stride()))


def _in_layer(gradient: fx.Node, total: fx.Node) -> bool:
    """Returns whether the layer that computes the gradient also reads the sum. Autograd's additions name no layer."""
    layer = gradient.meta.get(LAYER)
    return layer is not None and any(user.meta.get(LAYER) == layer for user in total.users)


def _leaves(total: fx.Node) -> bool:
    """Returns whether the sum is a result or a parameter's gradient, which `passes.reduce` packs as soon as it is
    computed.
    """
    return any(
        user.op == "output" or user.target is ops.param_grad or (view_of(user) is total and _leaves(user))
        for user in total.users
    )


def zeros(program: Program) -> dict[int, Zeros]:
    """Returns the zeros that stand for a backward's tangents, by argument; none if all tangents exist because shapes
    are dynamic or results are subclasses (`tell_absent`), of which a backward takes the components.
    """
    values = {i: node.meta["val"] for i, node in tangents(program).items()}
    if not all(isinstance(value, torch.Tensor) and not symbolic(value) for value in values.values()):
        return {}
    return {i: Zeros(tuple(v.shape), v.stride(), v.dtype, v.device) for i, v in values.items()}


def needed(program: Program, info: ProgramInfo) -> ProgramInfo:
    """Returns the facts about a program whose code takes ``None`` for optional tangents."""
    optional = {i for i, node in tangents(program).items() if node.meta.get(OPTIONAL)}
    return replace(info, tangents={i: like for i, like in info.tangents.items() if i not in optional})


def tell_absent(gm: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the backward of a compiled graph get ``None`` for tangents that do not exist, if it takes more than one.

    Not for dynamic shapes, whose zeros only autograd can make, nor for results that are subclasses, whose tangents
    AOTAutograd takes apart.

    Args:
        gm: the graph that Dynamo traced.
        compiled: its compiled function, which returns a sequence.
    """
    values = [v for n in gm.graph.nodes if n.op in ("placeholder", "output") for v in _values(n)]
    results = [v for v in _values(gm.graph.output_node()) if isinstance(v, torch.Tensor) and v.requires_grad]
    needs_zeros = any(map(symbolic, values)) or any(map(is_traceable_wrapper_subclass, results))
    if len(results) < 2 or needs_zeros or torch._dynamo.config.compiled_autograd:
        return compiled
    own: list[type] = []  # the class of the graph's node in autograd: results may be arguments, which have others

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        out = compiled(*args)
        for value in out:
            node = value.grad_fn if isinstance(value, torch.Tensor) else None
            if isinstance(node, BackwardCFunction) and (own or not any(value is arg for arg in args)):
                own[:] = own or [type(node)]
                if type(node) is own[0]:
                    node.set_materialize_grads(False)
                    break
        return out

    return run


def _values(node: fx.Node) -> list[object]:
    """Returns the values of a placeholder, or of the results of an output."""
    return [n.meta.get("example_value") for n in (node.all_input_nodes if node.op == "output" else [node])]
