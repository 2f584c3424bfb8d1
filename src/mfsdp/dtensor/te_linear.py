"""The operator of TransformerEngine's (TE) compiled ``te.Linear``: its weight as an FP8 payload that was cast outside.

Note [TE's FP8 weights]
``te.Linear`` compiles to ``transformer_engine_compile::linear`` and ``linear_backward``, which cast the weight inside.
Each has three arguments for it: a tensor, or tensors of a quantized weight and a description. Given the latter, it
multiplies by the payload as it is. So the cast of recipe ``Float8CurrentScaling`` is written in ATen's operators, and
`passes.quantize` moves it before the all-gather.

The ATen cast must give the bits of TE's kernels. That is compared on the GPU while a program is compiled: the node's
operator runs with random values, once with the weight and once with the payload, and all results must be equal. Where
they differ, or without a GPU, the weight is gathered in 16 bits. Tried on TE 2.20.2; not run on a GPU yet.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node, map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.fp8_operators import CASTS, Rewrite
from ..ir.program import Program
from ..ir.roles import Kind, Role, unit_of
from ..ir.symbolic_sizes import shape_of

log = logging.getLogger("mfsdp")
aten, prims = torch.ops.aten, torch.ops.prims

Call = Callable[..., Any]
"""Calls an operator with positional arguments, on tensors or on nodes."""


def version() -> str:
    """Returns the version of the TE in this process, ``""`` for none: code that was compared holds for this one."""
    return str(getattr(sys.modules.get("transformer_engine"), "__version__", ""))


def _cast(p: Program, node: Node, marker: Node) -> Rewrite | str:
    """Returns what writes the cast of a node's weight into the graph, or why that cannot be done."""
    try:
        return _understood(p, node, marker)
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        return f"TransformerEngine {version()} casts inside, otherwise than 2.20: {type(error).__name__}: {error}"


def _understood(p: Program, node: Node, marker: Node) -> Rewrite | str:
    """Returns the same, or raises for an operator of another TE."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=True))
    name = "saved_weight" if "saved_weight" in given else "weight"
    said: Any = given["_simple_meta"]
    if not said["fp8"] or given[name] is not marker or list(node.args).count(marker) != 1:
        return ""
    quantizer = said["weight_quantizer"]
    if type(quantizer).__name__ != "Float8CurrentScalingQuantizer":
        return f"{type(quantizer).__name__} casts inside: only Float8CurrentScaling is cast before the gather"
    if said["backward_override"] is not None or quantizer.with_amax_reduction:
        return "its recipe needs more than the payload"
    at = names.index(name)

    def arguments(call: Call, values: list[Any]) -> list[Any]:
        """Returns the node's arguments with a payload in place of its weight, given all as nodes or as tensors."""
        payload = _current_scaling(call, values[at], quantizer)
        values = list(values)
        values[at : at + 3] = None, list(payload), _description(marker.meta["val"], quantizer)
        return values

    different = _compared(node, arguments)
    if different:
        return different

    def insert(target: Any, *args: Any) -> Node:
        return p.insert(target, args, node, Role(Kind.CAST, unit_of(marker)), _NAMES.get(target))

    def rewrite() -> None:
        p.rewrite(node, node.target, tuple(arguments(insert, list(node.args))))

    return rewrite


_TO = prims.convert_element_type.default
_NAMES = {_TO: "to"}
"""What listings call operators with long names."""


def _current_scaling(call: Call, weight: Any, quantizer: Any) -> tuple[Any, Any]:
    """Returns the payload, uint8 of the weight's shape, and the inverse of its scale, float32 [1].

    Source: TE's ``compute_scale_from_amax`` (``transformer_engine/common/recipe/recipe_common.cuh``) and cast kernels.
    Its float32 quotients are rounded correctly. So are these: float64 has bits to spare, and Triton's float32 ones are
    not. All operators are ones that Inductor compiles after its decompositions.
    """
    fp8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[quantizer.dtype.name[-4:]]
    most, top = torch.finfo(fp8).max, torch.finfo(torch.float32).max
    amax = call(_TO, call(aten.amax.default, call(aten.abs.default, weight)), torch.float32)
    if quantizer.amax_epsilon:
        amax = call(aten.clamp_min.default, amax, quantizer.amax_epsilon)
    inverse = call(aten.reciprocal.default, call(_TO, amax, torch.float64))
    scale = call(_TO, call(aten.clamp_max.default, call(aten.mul.Tensor, inverse, most), top), torch.float32)
    if quantizer.force_pow_2_scales:
        bits = call(aten.bitwise_and.Scalar, call(aten.view.dtype, scale, torch.int32), -(2**23))
        scale = call(aten.view.dtype, bits, torch.float32)
    known = call(aten.logical_and.default, call(aten.gt.Scalar, amax, 0), call(aten.lt.Scalar, amax, float("inf")))
    scale = call(aten.where.self, known, scale, call(aten.logical_not.default, known))  # true is 1
    inverse = call(_TO, call(aten.reciprocal.default, call(_TO, scale, torch.float64)), torch.float32)
    scaled = call(aten.mul.Tensor, call(_TO, weight, torch.float32), scale)
    scaled = call(aten.clamp_max.default, call(aten.clamp_min.default, scaled, -most), most)
    return call(aten.view.dtype, call(_TO, scaled, fp8), torch.uint8), call(aten.view.default, inverse, [1])


def _description(weight: torch.Tensor, quantizer: Any) -> Any:
    """Returns the description of a ``Float8Tensor`` with only the payload of the weight's rows. Private in TE
    (``_storage_flatten``, ``_TensorOrQuantizedKind``).
    """
    from transformer_engine.pytorch.dynamo import custom_op
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    alone = quantizer.copy()
    alone.set_usage(rowwise=True, columnwise=False)
    shape = torch.Size(shape_of(weight))
    meta = Float8Tensor(
        shape=shape, dtype=weight.dtype, data=torch.empty(shape, dtype=torch.uint8, device="meta"),
        fp8_scale_inv=torch.empty(1, device="meta"), fp8_dtype=quantizer.dtype, quantizer=alone, device="meta",
    )  # fmt: skip
    kind = {custom_op._TQ_KIND_KEY: custom_op._TensorOrQuantizedKind.STORAGE}
    return custom_op._storage_flatten(meta, kind)[0]


_known: dict[object, str] = {}
"""Results of `_compared`, by operator, description and shapes."""


def _compared(node: Node, arguments: Callable[[Call, list[Any]], list[Any]]) -> str:
    """Returns why a node must keep its cast: what was found by running its operator both ways, ``""`` if it is equal.

    Args:
        arguments: replaces the weight among the operator's arguments by its payload.
    """
    values = [n.meta["val"] for n in node.all_input_nodes]
    if not _on_gpu(values):
        return "TransformerEngine casts inside, and without a GPU the cast before the gather cannot be compared with it"
    key = node.target, *(a for a in node.args if not isinstance(a, Node | list)), *map(shape_of, values)
    if key not in _known:
        try:
            why = _run_both(node, arguments)
        except Exception as error:  # what only tells never ends a run
            why = f"the cast before the gather was not compared: {type(error).__name__}: {error}"
        if why:
            log.warning("mfsdp: %s: %s; its weight travels in 16 bits", node.name, why)
        _known[key] = why
    return _known[key]


_ALONE = {
    "tp_group": None, "tp_size": 1, "parallel_mode": None,
    **dict.fromkeys(("tensor_parallel", "sequence_parallel", "backward_input_needs_gather"), False),
}  # fmt: skip
"""Settings of an operator without tensor parallelism's collectives."""


def _on_gpu(values: list[torch.Tensor]) -> bool:
    return torch.cuda.is_available() and all(value.device.type == "cuda" for value in values)


TRIES = 4
"""How many random values a comparison takes, each a tenth of the ones before."""


def _run_both(node: Node, arguments: Callable[[Call, list[Any]], list[Any]]) -> str:
    """Runs a node's operator on random values, with its weight and with the payload. Ranks compile at different times,
    so it runs without tensor parallelism's collectives.
    """

    def run(values: dict[Node, torch.Tensor], payload: bool) -> list[Any]:
        args: list[Any] = list(map_arg(node.args, lambda x: values[x].clone()))  # the operator frees some
        args[-1] = type(args[-1])({**args[-1].as_dict(), **_ALONE})
        args = arguments(lambda op, *given: op(*given), args) if payload else args
        return pytree.tree_leaves(node.target(*args))  # type: ignore[operator]

    with torch.no_grad(), _not_compiling():
        for n in range(TRIES):
            values = {x: _random(x.meta["val"], i, 10.0**-n) for i, x in enumerate(node.all_input_nodes, n)}
            one, other = run(values, False), run(values, True)
            if len(one) != len(other) or not all(map(_equal, one, other)):
                return "the cast before the gather has other bits than TransformerEngine's"
    return ""


@contextmanager
def _not_compiling() -> Iterator[None]:
    """Inside of the ``with``, operators run as in a program: without modes, and ``torch.compiler.is_compiling()`` is
    false. Private in torch (``_disable_current_modes``, ``_is_compiling_flag``); there in 2.11 to 2.15, tried on 2.14.
    """
    was = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with _disable_current_modes():
            yield
    finally:
        torch.compiler._is_compiling_flag = was


def _random(like: torch.Tensor, seed: int, size: float) -> torch.Tensor:
    """Returns random values of a fake tensor's shape and dtype: normal ones of a size; FP8 payloads below 2; positive
    scales.
    """
    shape, device = shape_of(like), like.device
    generator = torch.Generator(device).manual_seed(seed)
    if like.dtype is torch.uint8:
        return torch.randint(0, 64, shape, generator=generator, device=device, dtype=torch.uint8)
    out: torch.Tensor = torch.randn(shape, generator=generator, device=device) * size
    return (out.abs() + 0.5 if like.numel() == 1 else out).to(like.dtype)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.numel():
        return a.shape == b.shape and a.dtype == b.dtype
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


for _name in ("linear", "linear_backward"):
    CASTS[f"transformer_engine_compile::{_name}"] = _cast
