"""Takes the weights of bitsandbytes' 4-bit and 8-bit linear layers apart into tensors of bytes.

Recognises bitsandbytes' classes by name, without importing it (peft has classes of the same names around them). Their
attributes are private there; tried on bitsandbytes 0.50.

A 4-bit weight is codes, two to a byte, a scale (``absmax``) per block of codes, 64 by default, and a table of the 16
values (``quant_map``). Nested ("double") quantization keeps the scales as bytes too, with a table of 256 values, a
scale per 256 scales and an offset. An 8-bit weight is one byte per element and a scale (``SCB``) per row.
"""

from __future__ import annotations

import copy
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .quantized_form import Apart, Form, NoState, Stored

_PACKAGE = "bitsandbytes."


def _named(kind: type, *names: str) -> str:
    """Returns the name of the first base class that is one of bitsandbytes' with these names; ``""`` for others."""
    found = (b.__name__ for b in kind.__mro__ if b.__module__.startswith(_PACKAGE) and b.__name__ in names)
    return next(found, "")


def quantized(tensor: object) -> bool:
    """Returns whether it is one of bitsandbytes' parameters, quantized or yet to be."""
    return bool(_named(type(tensor), "Params4bit", "Int8Params"))


def linear(module: nn.Module) -> bool:
    """Returns whether it is a linear layer with a weight in 4 bits, or in 8 bits that does not train."""
    kind = _named(type(module), "Linear4bit", "Linear8bitLt")
    return kind == "Linear4bit" or (kind == "Linear8bitLt" and not cast(Any, module).state.has_fp16_weights)


_of_packed = WeakIdKeyDictionary()
"""Layers by the packed tensors of their state dicts, as weak references."""


def note_packed(module: nn.Module, packed: Iterable[torch.Tensor]) -> None:
    """Records whose state dict has these packed tensors, which `torch.distributed.checkpoint` loads in place."""
    for tensor in packed:
        _of_packed[tensor] = weakref.ref(module)


def was_read(tensor: object) -> None:
    """Lets a layer take over what was read into a packed tensor of its state dict, if it is one."""
    found = _of_packed.get(tensor) if isinstance(tensor, torch.Tensor) else None
    module: Any = found() if found is not None else None
    if module is not None:
        module._mfsdp_loaded()


def shared(module: Any) -> dict[int, object]:
    """Returns what a copy of the layer on the meta device shares with it, for the memo of ``deepcopy``."""
    state = getattr(module, "quant_state", None) or getattr(module, "state", None)
    return {} if state is None else {id(state): state}


@dataclass(frozen=True)
class Blocks(Form):
    """A weight of bitsandbytes."""

    blocksize: int
    """Elements per scale; 0: a row."""
    nested: int
    """Scales per scale of scales; 0: scales are float32."""

    def matrix(self, raw: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix, [outputs, inputs] in ``dtype``, as bitsandbytes computes it: in float32, rounded once."""
        first, scales, *rest = self.seen(raw)
        if self.kind == "int8":
            return (first.float() * (scales * (1.0 / 127.0)).unsqueeze(1)).to(dtype)
        table, *nested = rest
        if nested:
            absmax, values, offset = nested
            scales = _by_block(values[scales.int()], absmax, self.nested) + offset
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # of the high and the low half
        whole = pairs[first.reshape(-1).view(torch.uint8).int()].view(-1)[: prod(self.shape)]
        return _by_block(whole, scales, self.blocksize).to(dtype).view(self.shape)

    def from_state(self, state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        if name != "weight_nested_offset":
            return super().from_state(state, name)
        offset = read_packed(self, state[f"weight.quant_state.bitsandbytes__{self.kind}"])
        return torch.tensor(offset, device=state["weight"].device)


def _by_block(values: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Multiplies blocks of ``size`` values by their scales; the last block may be shorter."""
    if values.numel() % size == 0:
        return (values.view(-1, size) * scales.unsqueeze(1)).view(-1)
    return values * scales.repeat_interleave(size)[: values.numel()]


def replaced(module: Any) -> bool:
    """Returns whether a class has replaced the forward of bitsandbytes' layer."""
    kind: Any = next(b for b in type(module).__mro__ if b.__module__.startswith(_PACKAGE))
    return type(module).forward is not kind.forward


def take_apart(fqn: str, module: Any) -> Apart:
    """`mfsdp.dtensor.quantized.take_apart`, of a layer of bitsandbytes.

    Raises:
        ValueError: the weight has values and is not quantized yet.
    """
    eight = _named(type(module), "Linear8bitLt")
    found = _int8(fqn, module) if eight else _four_bits(fqn, module)
    keys = [stored.key.removeprefix("weight.") for _, stored in found.form.tensors if stored.key.startswith("weight.")]
    known = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")
    found.attributes |= {name: getattr(module.weight, name) for name in known if hasattr(module.weight, name)}
    found.attributes |= {**dict.fromkeys(keys), "quant_state": NoState()}
    found.state |= {"state": NoState()} if eight else {"quant_state": None}
    return found


def _not_yet(fqn: str) -> ValueError:
    return ValueError(
        f"fully_shard: {fqn}.weight is not quantized yet; bitsandbytes does so when the model is moved: call "
        "model.to(device) first"
    )


def _form(kind: str, shape: Any, blocksize: int, nested: int, values: dict[str, torch.Tensor]) -> Blocks:
    stored = tuple((n, Stored(_KEYS.get(n, n), v.dtype, tuple(v.shape))) for n, v in values.items())
    return Blocks(kind, (int(shape[0]), int(shape[1])), stored, blocksize, nested)


_KEYS = {
    "weight_absmax": "weight.absmax",
    "weight_quant_map": "weight.quant_map",
    "weight_nested_absmax": "weight.nested_absmax",
    "weight_nested_quant_map": "weight.nested_quant_map",
    "weight_nested_offset": "",  # in `packed`, as a number
    "weight_SCB": "SCB",
}
"""Keys in the state dict, where they are not the names of the parameters of bytes."""


def read_packed(form: Blocks, packed: torch.Tensor) -> float:
    """Returns the offset of nested scales, which the packed entry of a 4-bit weight's state dict holds; 0 without one.

    Raises:
        ValueError: it is of a weight that was quantized otherwise.
    """
    said = json.loads(bytes(packed.tolist()))
    theirs = said["quant_type"], tuple(said["shape"]), said["blocksize"], said.get("nested_blocksize", 0)
    ours = form.kind, form.shape, form.blocksize, form.nested
    if theirs != ours:
        raise ValueError(
            f"the weight that is loaded was quantized as {theirs}, the model's as {ours} (type, shape, elements per "
            "scale, scales per scale of scales): quantize the model as that one was"
        )
    return float(said.get("nested_offset", 0.0))


def _four_bits(fqn: str, module: Any) -> Apart:
    weight = module.weight
    state = getattr(weight, "quant_state", None) or module.quant_state
    if state is None and not weight.is_meta:
        raise _not_yet(fqn)
    if state is None:
        values, (shape, blocksize, nested) = _planned(weight)
        form = _form(weight.quant_type, shape, blocksize, nested, values)
        return Apart(form, form.raw(values), _restore(module, weight, None, form))
    codes, state = _unpacked(weight.data, state)
    values = {"weight": codes, "weight_absmax": state.absmax, "weight_quant_map": state.code}
    if state.nested:
        values |= {
            "weight_nested_absmax": state.state2.absmax,
            "weight_nested_quant_map": state.state2.code,
            "weight_nested_offset": state.offset,
        }
    nested = state.state2.blocksize if state.nested else 0
    form = _form(state.quant_type, state.shape, state.blocksize, nested, values)
    packed = {}
    if not state.absmax.is_meta:
        packed = {f"weight.{k}": v for k, v in state.as_dict(packed=True).items() if k.startswith("quant_state.")}
    if weight.is_meta:
        values = {name: value.to("meta") for name, value in values.items()}
    return Apart(form, form.raw(values), _restore(module, weight, state, form), packed)


def _planned(weight: Any) -> tuple[dict[str, torch.Tensor], tuple[Any, int, int]]:
    """The tensors that a weight on the meta device will be quantized to."""
    numel, size, nested = weight.numel(), weight.blocksize, 256 if weight.compress_statistics else 0
    blocks = -(-numel // size)

    def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    f32 = torch.float32
    values = {
        "weight": made(weight.quant_storage, -(-numel // (2 * weight.quant_storage.itemsize)), 1),
        "weight_absmax": made(torch.uint8 if nested else f32, blocks),
        "weight_quant_map": made(f32, 16),
    }
    if nested:
        values |= {
            "weight_nested_absmax": made(f32, -(-blocks // nested)),
            "weight_nested_quant_map": made(f32, 256),
            "weight_nested_offset": made(f32),
        }
    return values, (weight.shape, size, nested)


def _unpacked(codes: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Codes and state in the common order, if an evaluation on a CPU with AVX512 has reordered them. That has also
    rounded the scales to bfloat16, and un-nested them, for good.
    """
    if not getattr(state, "packing_format_for_cpu", False):
        return codes, state
    state = copy.copy(state)
    scales = state.absmax.T.reshape(-1).float()
    state.original_nested = False  # it would quantize the scales again
    inverse: Any = sys.modules["bitsandbytes.functional"]._convert_weight_packed_for_cpu_inverse
    codes, state = inverse(codes, state)
    state.absmax, state.nested, state.state2, state.offset = scales, False, None, None
    return codes, state


def _restore(module: Any, weight: Any, state: Any, form: Form) -> Callable[[dict[str, torch.Tensor]], None]:
    """`Apart.back` of a 4-bit weight: the original if it is alive, else a new one, made as bitsandbytes makes them.
    Private in torch (``_make_subclass``); tried on 2.13, not on the others of 2.11 to 2.15.
    """
    kind, attributes, alive = type(weight), dict(weight.__dict__), weakref.ref(weight)
    attributes.pop("quant_state", None)
    shell = copy.copy(state)  # without tensors, which are to be freed
    if shell is not None:
        shell.absmax = shell.code = shell.offset = None
        shell.state2 = copy.copy(shell.state2) if shell.nested else None
        if shell.nested:
            shell.state2.absmax = shell.state2.code = None
    owner_state = module.quant_state is not None

    def back(raw: dict[str, torch.Tensor]) -> None:
        original: Any = alive()
        if original is None and shell is None:
            original = kind(torch.empty(form.shape, device="meta"), **attributes)
        elif original is None:
            value = {name: stored.seen(raw[name].detach()) for name, stored in form.tensors}
            shell.absmax, shell.code = value["weight_absmax"], value["weight_quant_map"]
            if shell.nested:
                shell.state2.absmax, shell.state2.code = value["weight_nested_absmax"], value["weight_nested_quant_map"]
                shell.offset = value["weight_nested_offset"]
            original = torch.Tensor._make_subclass(kind, value["weight"], False)
            original.__dict__.update(attributes, quant_state=shell)
        module._parameters["weight"] = original
        module.quant_state = original.quant_state if owner_state else None

    return back


def _int8(fqn: str, module: Any) -> Apart:
    weight, state = module.weight, module.state
    scales = state.SCB if getattr(weight, "SCB", None) is None else weight.SCB
    if weight.is_meta:
        codes = torch.empty(weight.shape, dtype=torch.int8, device="meta")
        scales = torch.empty(weight.shape[0], device="meta")
    elif weight.dtype is not torch.int8 or scales is None:
        raise _not_yet(fqn)
    else:
        codes = weight.data
    values = {"weight": codes, "weight_SCB": scales.reshape(-1)}
    form = _form("int8", codes.shape, 0, 0, values)
    kind, attributes, alive, whole = type(weight), dict(weight.__dict__), weakref.ref(weight), state.CB is not None
    attributes |= {"CB": None, "SCB": None}
    shell = copy.copy(state)
    shell.CB = shell.SCB = None

    def back(raw: dict[str, torch.Tensor]) -> None:
        original: Any = alive()
        value = {name: stored.seen(raw[name].detach()) for name, stored in form.tensors}
        if original is None:
            original = torch.Tensor._make_subclass(kind, value["weight"], False)
            original.__dict__.update(attributes)
        tensors = {"CB": original.data, "SCB": value["weight_SCB"]}
        vars(shell if whole else original).update(tensors)
        module._parameters["weight"], module.state = original, shell

    return Apart(form, form.raw(values), back, {"weight_format": torch.tensor(0, dtype=torch.uint8)})
