"""Whole weights with peft's LoRA merged into them, for `mfsdp.stream_weights`; also of quantized layers (QLoRA).

mfsdp.stream_weights(model, convert=merged(model, torch.bfloat16))
"""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ..checkpoints.streams import Convert, stream_weights
from ..dtensor import parameter_names, quantized
from ..dtensor.quantized_form import Form

Tensors = dict[str, torch.Tensor]


def merged(model: nn.Module, dtype: torch.dtype) -> Convert:
    """Returns a ``convert`` of `mfsdp.stream_weights` that gives the base model's names and shapes, without adapters:
    quantized weights dequantized to ``dtype``, the active LoRA adapters merged into them as peft merges, other
    floating-point tensors cast. Bitwise ``merge_and_unload()`` of the unsharded model with weights dequantized to
    ``dtype``. It needs a layer's weight and adapters in one unit. Leave out ``dtype`` of the stream, which would round
    the adapters first. Importing this changes nothing in peft; tried with 0.21 (``lora.Linear.get_delta_weight``).

    Args:
        model: with LoRA on linear layers, or with quantized linear layers only; sharded or not.
        dtype: of what leaves the stream.

    Raises:
        NotImplementedError: another adapter than plain LoRA on linear layers; the message names it.
        ValueError: an adapter is merged already; a unit lacks a part of a layer.
    """
    root = getattr(model, "_orig_mod", model)
    if isinstance(root, PeftModel) and not isinstance(root.base_model, LoraModel):
        raise _refused("the model", type(root.base_model).__name__)
    layers: dict[str, Any] = {}
    for path, module in root.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            _check(path, module)
        elif not quantized.linear(module):
            continue
        layers[parameter_names.original(path)] = module

    def convert(weights: Tensors) -> Tensors:
        out: Tensors = {}
        parts: dict[str, Tensors] = {}
        for name, tensor in weights.items():
            above = accumulate(name.split("."), "{}.{}".format)
            path = next((at for at in above if at in layers), None)  # the outermost: a base layer is its adapter's
            if path is None:
                out[name] = tensor
            else:
                parts.setdefault(path, {})[name.removeprefix(f"{path}.")] = tensor
        for path, tensors in parts.items():
            try:
                out |= {f"{path}.{name}": tensor for name, tensor in _dense(layers[path], tensors, dtype).items()}
            except KeyError as lacks:
                raise ValueError(
                    f"merged: a unit has a part of {path}, without {lacks}: choose units (and only=) that hold a "
                    "layer's weight and its adapters"
                ) from None
        return {
            n.removeprefix("base_model.model."): t.to(dtype) if t.is_floating_point() else t for n, t in out.items()
        }

    stream_weights(model, convert=convert).metadata()  # raises for units that do not fit
    return convert


def _refused(path: str, kind: str) -> NotImplementedError:
    return NotImplementedError(
        f"merged: {path} has an adapter ({kind}) that is not plain LoRA on a linear layer. Save the adapters, load "
        "them with an unsharded model, and merge there"
    )


def _check(path: str, module: Any) -> None:
    """Refuses an adapter that `_dense` would not merge as peft does."""
    if isinstance(module, ModulesToSaveWrapper):
        return
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__ == "peft.tuners.lora.bnb"}
    if not isinstance(module, Linear) and not kinds & {"Linear4bit", "Linear8bitLt"}:
        raise _refused(path, type(module).__name__)
    if variants := sorted({type(v).__name__ for v in module.lora_variant.values()}):
        raise _refused(path, ", ".join(variants))
    if any(module.lora_bias.values()):
        raise _refused(path, "lora_bias=True")
    if module.merged:
        raise ValueError(f"merged: {path} has merged its adapter already: call unmerge_adapter() first")


def _dense(module: Any, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Returns a layer's tensors without adapters and quantization, from its state dict. KeyError: one is missing."""
    if isinstance(module, ModulesToSaveWrapper):
        kept = next(iter(module.active_adapters), "")
        trained = kept in module.modules_to_save
        inner = module.modules_to_save[kept] if trained else module.original_module
        return _dense(inner, _below(f"modules_to_save.{kept}" if trained else "original_module", tensors), dtype)
    if isinstance(module, BaseTunerLayer):
        layer: Any = module
        out = _dense(layer.base_layer, _below("base_layer", tensors), dtype)
        weight = out["weight"].to(dtype)
        for adapter in (each for each in layer.active_adapters if each in layer.lora_A):
            whole = SimpleNamespace(
                lora_A={adapter: SimpleNamespace(weight=tensors[f"lora_A.{adapter}.weight"])},
                lora_B={adapter: SimpleNamespace(weight=tensors[f"lora_B.{adapter}.weight"])},
                scaling=layer.scaling, fan_in_fan_out=getattr(layer, "fan_in_fan_out", False),
            )  # fmt: skip
            weight += Linear.get_delta_weight(whole, adapter)  # type: ignore[arg-type]
        return {**out, "weight": weight}
    return _dequantized(module, tensors, dtype) if quantized.linear(module) else tensors


def _below(path: str, tensors: Tensors) -> Tensors:
    return {n.removeprefix(f"{path}."): t for n, t in tensors.items() if n.startswith(f"{path}.")}


def _dequantized(module: Any, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    form: Form = getattr(module, "_mfsdp_form", None) or quantized.take_apart("merged", module).form
    out = {"bias": tensors["bias"]} if "bias" in tensors else {}
    if form.from_state(tensors, "weight").is_meta:
        return {"weight": torch.empty(form.shape, dtype=dtype, device="meta"), **out}
    raw = form.raw({name: form.from_state(tensors, name) for name, _ in form.tensors})
    return {"weight": form.matrix(tuple(raw.values()), dtype), **out}
