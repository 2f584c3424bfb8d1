"""torchao's tensors: unwraps weights for FSDP2's FP8 all-gather, and takes frozen quantized ones apart into bytes.

Recognises torchao's classes by name, without importing it. Their attributes are private there; tried on torchao 0.18.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from .quantized_form import Apart, Form, Stored, not_whole


def wrapped(tensor: torch.Tensor) -> bool:
    """Returns whether it is a ``WeightWithDynamicFloat8CastTensor``, made of weights by
    ``Float8LinearConfig(enable_fsdp_float8_all_gather=True)``.
    """
    kind = type(tensor)
    return kind.__name__ == "WeightWithDynamicFloat8CastTensor" and kind.__module__.startswith("torchao.")


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside such a wrapper; any other unchanged."""
    return cast(torch.Tensor, tensor._tensor) if wrapped(tensor) else tensor  # type: ignore[attr-defined]


def inner(tensor: torch.Tensor) -> frozenset[str]:
    """Returns the names of the attributes that implement a tensor of torchao; none for other tensors."""
    if wrapped(tensor):
        return frozenset({"_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale"})
    kinds = [f"{optional}tensor_{what}_names" for optional in ("", "optional_") for what in ("data", "attribute")]
    return frozenset(n for names in kinds if _torchaos(tensor) for n in getattr(tensor, names, ()))


# Frozen quantized weights

_PLAIN = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor")
"""Classes of weights with codes by rows, made by ``Int8WeightOnlyConfig``, ``IntxWeightOnlyConfig`` and
``Int4WeightOnlyConfig``.
"""

_PARTS = {"weight": "qdata", "weight_scale": "scale", "weight_zero_point": "zero_point"}
"""torchao's names, by those of the parameters of bytes."""

KEYS = tuple(f"_weight_{part}" for part in _PARTS.values())
"""Entries of a state dict: what torchao calls them in safetensors files (``flatten_tensor_state_dict``)."""


def _torchaos(tensor: object) -> bool:
    return type(tensor).__module__.startswith("torchao.")


def weight_only(tensor: Any) -> bool:
    """Returns whether it is a weight with codes by rows, of a layer whose activations are not quantized."""
    others = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization")
    return (
        _torchaos(tensor)
        and type(tensor).__name__ in _PLAIN
        and all(getattr(tensor, name, None) is None for name in others)
        and getattr(tensor, "activation_dtype", torch.bfloat16) is torch.bfloat16
    )


def linear(module: nn.Module) -> bool:
    """Returns whether it is a linear layer with such a weight."""
    return isinstance(module, nn.Linear) and weight_only(module._parameters.get("weight"))


def in_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with the tensors that such weights consist of in their places, scales first."""
    out: dict[str, Any] = {}
    for name, value in state.items():
        parts = {n: part for n in ("scale", "qdata", "zero_point") if (part := getattr(value, n, None)) is not None}
        path = name.removesuffix("weight")
        out |= {f"{path}_weight_{n}": part for n, part in parts.items()} if weight_only(value) else {name: value}
    return out


def refusal(tensor: torch.Tensor) -> str:
    """Returns why a tensor of torchao cannot be sharded, and what can be instead; ``""`` for other tensors."""
    if not _torchaos(tensor) or wrapped(tensor):
        return ""
    if weight_only(tensor):
        why = "the weight of another module than nn.Linear"
    elif type(tensor).__name__ in _PLAIN:
        why = "quantized together with activations"
    else:
        why = "not kept as rows of codes with scales"
    return (
        f"is a {type(tensor).__name__} of torchao, {why}. Weights of nn.Linear quantized by Int8WeightOnlyConfig, "
        "IntxWeightOnlyConfig or Int4WeightOnlyConfig(int4_packing_format='plain'), and bitsandbytes' Linear4bit and "
        "Linear8bitLt, are sharded as bytes. Use one of these, or pass the parameter in ignored_params: every rank "
        "keeps it whole"
    )


@dataclass(frozen=True)
class Affine(Form):
    """A weight of torchao: codes, and a scale and perhaps a zero point for each block.

    An ``Int8Tensor`` with a scale per row, or one, multiplies the product by it and ignores zero points, as torchao's
    own ``F.linear`` does; so do its gradients. Others multiply by the dequantized matrix. All are bitwise torchao's,
    except that torchao's kernel for ``Int4Tensor`` (``bf16i4bf16_rowwise``, GPUs only, without a derivative) rounds
    in its own way: here its matrix is computed in float32 and rounded once.
    """

    block: tuple[int, int]
    """Rows and columns that share a scale."""
    dtype: torch.dtype
    """Of the dequantized matrix."""
    made_by: type = field(repr=False)
    attributes: dict[str, Any] = field(repr=False, hash=False)
    """What torchao keeps beside tensors."""

    @property
    def _after(self) -> bool:
        """Whether the product is scaled, not the matrix."""
        return self.kind == "Int8Tensor" and self.block[1] >= self.shape[1]

    def matrix(self, raw: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns torchao's ``dequantize()`` in ``dtype``; of an ``Int4Tensor``, which has none, code * scale + zero
        point in float32, rounded once. Codes are signed there, the even column's in the low half of a byte.
        """
        codes, scales, *zeros = self.seen(raw)
        (n, k), (rows, columns) = self.shape, self.block
        grid, per_block = (n // rows, rows, k // columns, columns), (n // rows, 1, k // columns, 1)
        if self.kind == "Int4Tensor":
            halves = torch.stack([((codes & 15) ^ 8) - 8, codes >> 4], dim=-1).view(grid).float()
            scale, zero = (part.t().float().reshape(per_block) for part in (scales, *zeros))
            return (halves * scale + zero).view(self.shape).to(dtype)
        values = codes.view(grid).to(self.dtype)
        for zero in zeros:
            values = values - zero.view(per_block).to(self.dtype)
        return (values * scales.view(per_block)).view(self.shape).to(self.dtype).to(dtype)

    def linear(self, x: torch.Tensor, raw: tuple[torch.Tensor, ...], bias: torch.Tensor | None) -> torch.Tensor:
        if self.kind != "Int8Tensor":
            return F.linear(x, self.matrix(raw, x.dtype), bias)
        codes, scales, *_ = self.seen(raw)
        matrix = codes.to(x.dtype) if self._after else self.matrix(raw, x.dtype)
        out = torch.mm(x.reshape(-1, self.shape[1]), matrix.t())
        if self._after:
            out = out * scales.to(out.dtype).flatten()
        out = out.reshape(*x.shape[:-1], self.shape[0])
        return (out if bias is None else (out + bias).to(out.dtype)).to(x.dtype)

    def input_grad(self, grad: torch.Tensor, raw: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if not self._after:
            return super().input_grad(grad, raw)
        codes, scales, *_ = self.seen(raw)
        return (grad * scales.to(grad.dtype).flatten()) @ codes.to(grad.dtype)

    def from_state(self, state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        if weight_only(state.get("weight")):
            return cast(torch.Tensor, getattr(state["weight"], _PARTS[name]))
        return super().from_state(state, name)

    def whole(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns torchao's tensor, sharing the parts' memory."""
        parts = {_PARTS[name]: value for name, value in values.items()}
        made: Any = self.made_by
        return cast(torch.Tensor, made.__tensor_unflatten__(parts, self.attributes, None, None))

    def taken_apart(self, state: dict[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
        if (weight := state.get(f"{prefix}weight")) is None:
            return state, []
        others = {key: value for key, value in state.items() if key != f"{prefix}weight"}
        if not weight_only(weight):
            return others, [f"{prefix}weight is not quantized in the state dict, or otherwise than here ({self.kind})"]
        theirs = _form(weight)
        if _said(theirs) != _said(self):
            return others, [
                f"{prefix}weight was quantized as {_said(theirs)}, the model's as {_said(self)}: quantize the model as "
                "that one was"
            ]
        return {**others, **in_parts({f"{prefix}weight": weight})}, []


def _said(form: Affine) -> str:
    bits = form.attributes.get("target_dtype", "")
    parts = [_PARTS[name] for name, _ in form.tensors]
    return f"{form.kind}({list(form.shape)}, {form.dtype}, {bits} blocks of {list(form.block)}, {', '.join(parts)})"


def _form(weight: Any) -> Affine:
    values = {name: value for name, part in _PARTS.items() if (value := getattr(weight, part)) is not None}
    stored = tuple((n, Stored(f"_weight_{_PARTS[n]}", v.dtype, tuple(v.shape))) for n, v in values.items())
    _, attributes = weight.__tensor_flatten__()
    (n, k), (rows, columns) = weight.shape, weight.block_size
    block = int(rows), int(columns)
    return Affine(type(weight).__name__, (int(n), int(k)), stored, block, weight.dtype, type(weight), attributes)


def replaced(module: nn.Module) -> bool:
    """Returns whether the layer's weight is read by other code than ``nn.Linear.forward``."""
    apart = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)  # of nn.MultiheadAttention
    return apart or type(module).forward is not nn.Linear.forward


def take_apart(module: Any) -> Apart:
    """`mfsdp.dtensor.quantized.take_apart`, of an ``nn.Linear``."""
    weight = module.weight
    form = _form(weight)
    values = {name: getattr(weight, _PARTS[name]) for name, _ in form.tensors}
    made_of, alive = inner(weight), weakref.ref(weight)
    own = {name: value for name, value in weight.__dict__.items() if name not in made_of and name != "_is_param"}

    def back(raw: dict[str, torch.Tensor]) -> None:
        original: Any = alive()
        if original is None:
            parts = {name: stored.seen(raw[name].detach()) for name, stored in form.tensors}
            original = nn.Parameter(form.whole(parts), requires_grad=False)
            original.__dict__.update(own)
        module._parameters["weight"] = original

    return Apart(form, form.raw(values), back, attributes={**own, "dequantize": not_whole})


def file_metadata(shapes: Mapping[str, tuple[int, ...]], forms: Mapping[str, Form]) -> dict[str, str]:
    """Returns the metadata of a safetensors file that torchao and ``transformers`` make weights from.

    Private in torchao (``prototype.safetensors``); tried on 0.18.

    Args:
        shapes: of the file's tensors, by name.
        forms: of quantized layers, by path.
    """
    ours = {path: form for path, form in forms.items() if isinstance(form, Affine) and f"{path}.{KEYS[0]}" in shapes}
    if not ours:
        return {}
    flatten: Any = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    whole = {}
    for name, shape in shapes.items():
        path, _, key = name.rpartition(".")
        if path not in ours or key not in KEYS:
            whole[name] = torch.empty(shape, device="meta")
        elif key == KEYS[0]:
            parts = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in ours[path].tensors}
            whole[f"{path}.weight"] = ours[path].whole(parts)
    return cast(dict[str, str], flatten.flatten_tensor_state_dict(whole)[1])
