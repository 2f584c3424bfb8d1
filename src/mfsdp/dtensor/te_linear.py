"""The operator of TransformerEngine's (TE) compiled ``te.Linear``: its weight as an FP8 payload that was cast outside.

Note [TE's FP8 weights]
``te.Linear`` compiles to ``transformer_engine_compile::linear`` and ``linear_backward``, which cast the weight inside.
Each has three arguments for it: a tensor, or tensors of a quantized weight and a description. Given the latter, it
multiplies by the payload as it is. So the cast of recipe ``Float8CurrentScaling`` is written in ATen's operators, and
`passes.quantize` moves it before the all-gather.

The ATen cast must give the bits of TE's kernels. While a program is compiled on a GPU, a quantizer like the operator's
casts small random weights, and payload and scale must be equal. All ranks take the verdict of the first. If it differs,
or without a GPU, the weight is gathered in 16 bits. A weight with a NaN has other bits: TE's largest magnitude skips
it. Tried on TE 2.20.2; not run on a GPU yet.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.fp8_operators import CASTS, InnerCast
from ..ir.program import Program
from ..ir.roles import Kind, Role, unit_of
from ..ir.symbolic_sizes import shape_of
from ..runtime import groups

log = logging.getLogger("mfsdp")
aten, prims = torch.ops.aten, torch.ops.prims

Call = Callable[..., Any]
"""Calls an operator with positional arguments, on tensors or on nodes."""


def version() -> str:
    """Returns the version of the TE in this process, ``""`` for none: code that was compared holds for this one."""
    return str(getattr(sys.modules.get("transformer_engine"), "__version__", ""))


def _cast(p: Program, node: Node, marker: Node) -> InnerCast | str:
    """Returns the cast of a node's weight, or why it is not known."""
    try:
        return _understood(p, node, marker)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        return f"TransformerEngine {version()} casts inside, otherwise than 2.20: {type(error).__name__}: {error}"


def _understood(p: Program, node: Node, marker: Node) -> InnerCast | str:
    """Returns the same, or raises for an operator of another TE."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=True))
    name = "saved_weight" if "saved_weight" in given else "weight"
    settings: Any = given["_simple_meta"]
    if not settings["fp8"] or given[name] is not marker or list(node.args).count(marker) != 1:
        return ""
    if settings["backward_override"] is not None:
        return f"backward_override={settings['backward_override']!r} needs the weight in 16 bits"
    quantizer = settings["weight_quantizer"].copy()
    if type(quantizer).__name__ != "Float8CurrentScalingQuantizer":
        return f"{type(quantizer).__name__} casts inside: only Float8CurrentScaling is cast before the gather"
    if quantizer.with_amax_reduction:
        return "the largest magnitude is taken over tensor-parallel ranks"
    quantizer.set_usage(rowwise=True, columnwise=False)
    weight = marker.meta["val"]
    description, at = _description(weight, quantizer), names.index(name)

    def insert(target: Any, *args: Any) -> Node:
        return p.insert(target, args, node, Role(Kind.CAST, unit_of(marker)), _NAMES.get(target))

    def write() -> None:
        payload = _current_scaling(insert, marker, quantizer)
        p.rewrite(node, node.target, (*node.args[:at], None, list(payload), description, *node.args[at + 3 :]))

    recipe = (quantizer.dtype.name, quantizer.force_pow_2_scales, quantizer.amax_epsilon, weight.dtype)
    return InnerCast(recipe, lambda: _refusal(recipe, weight, quantizer), write)


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

    shape = torch.Size(shape_of(weight))
    meta = Float8Tensor(
        shape=shape, dtype=weight.dtype, data=torch.empty(shape, dtype=torch.uint8, device="meta"),
        fp8_scale_inv=torch.empty(1, device="meta"), fp8_dtype=quantizer.dtype, quantizer=quantizer, device="meta",
    )  # fmt: skip
    kind = {custom_op._TQ_KIND_KEY: custom_op._TensorOrQuantizedKind.STORAGE}
    return custom_op._storage_flatten(meta, kind)[0]


SIZES, SHAPE = (1.0, 0.1, 0.02, 1e-3, 1e-5, 1e-7, 0.0), (256, 128)
"""Of a comparison's random weights: their standard deviations, and their shape."""


def _refusal(recipe: tuple[Any, ...], weight: torch.Tensor, quantizer: Any) -> str:
    """Returns why casts must stay inside of TE's operators, ``""`` if ATen's has the same bits."""
    if not _on_gpu(weight):
        return "TransformerEngine casts inside, and one before the gather can be compared with it on a GPU only"
    key = hashlib.sha256(repr((recipe, version())).encode()).hexdigest()[:16]
    if key not in _verdicts:
        try:
            why = _compared(weight, quantizer)
        except Exception as error:  # what only tells never ends a run
            why = f"TransformerEngine's cast was not compared: {type(error).__name__}: {error}"
        _verdicts[key] = groups.agreed(f"te_linear/{key}", why)
        if _verdicts[key]:
            log.warning("mfsdp: weights of te.Linear are gathered in 16 bits: %s", _verdicts[key])
    return _verdicts[key]


_verdicts: dict[str, str] = {}
"""Results of comparisons, by recipe and TE's version."""


def _on_gpu(weight: torch.Tensor) -> bool:
    return torch.cuda.is_available() and weight.device.type == "cuda"


def _compared(weight: torch.Tensor, quantizer: Any) -> str:
    """Returns what TE's kernels and ATen's operators cast otherwise, ``""`` for nothing. Private in torch
    (``_disable_current_modes``: the compiler's fake tensors); tried on 2.14, there in 2.11 to 2.15.
    """
    with torch.no_grad(), _disable_current_modes():
        generator = torch.Generator(weight.device).manual_seed(0)
        for size in SIZES:
            value = torch.randn(SHAPE, generator=generator, device=weight.device).mul(size).to(weight.dtype)
            theirs = quantizer(value)
            payload, inverse = _current_scaling(lambda target, *args: target(*args), value, quantizer)
            if not (torch.equal(theirs._data, payload) and torch.equal(theirs._scale_inv, inverse)):
                return "TransformerEngine's cast has other bits than one before the gather"
    return ""


for _name in ("linear", "linear_backward"):
    CASTS[f"transformer_engine_compile::{_name}"] = _cast
