"""Linear layers with frozen quantized weights (bitsandbytes, torchao), which are sharded and gathered as bytes.

`fully_shard` makes a layer's weight, scales and tables parameters of bytes (`dtensor.quantized`), which get a flat
buffer of their own, in uint8. Forward makes the matrix of them, and backward makes it again from bytes that it gathers
again: in compiled code `joint_graph.recompute_parameters` sees to that, as the matrix depends on parameters alone (the
tables are parameters for that reason); uncompiled code saves the bytes. bitsandbytes' 8-bit layers compute with the
weights' dequantized values too: activations are not quantized.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ..buffers.flat_buffer import refs
from ..dtensor import bitsandbytes as bnb
from ..dtensor import quantized
from ..dtensor.quantized_form import Apart, Form, Stored
from ..dtensor.shard_spec import ShardSpec
from ..dtensor.sharded_dtensor import ShardedDTensor
from ..runtime.transport_registry import record_load


class QuantizedLinear(nn.Module):
    """Base class of layers whose quantized weight is parameters of bytes, beside their own class."""

    _mfsdp_form: Form
    _mfsdp_packed: dict[str, torch.Tensor]
    """Other entries of the state dict, by key."""
    weight: torch.Tensor
    bias: torch.Tensor | None

    SCB = weight_format = _weight_qdata = _weight_scale = _weight_zero_point = None
    """Entries of state dicts, which `torch.distributed.checkpoint` looks for as attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args and result as of ``nn.Linear``; computes in ``compute_dtype`` of the layer, if it has one."""
        given, form = x.dtype, self._mfsdp_form
        if getattr(self, "compute_type_is_set", False) and self.compute_dtype is not None:
            x = x.to(cast(torch.dtype, self.compute_dtype))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        raw = tuple(getattr(self, name) for name, _ in form.tensors)
        if torch.compiler.is_compiling():
            out = form.linear(x, raw, bias)
        else:
            out = _Linear.apply(x, bias, form, *raw)  # type: ignore[no-untyped-call]
        return out if x.dtype is given else out.to(given)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``nn.Module``: an 8-bit layer's own looks for its whole weight."""
        return nn.Module.to(self, *args, **kwargs)

    # State dicts, with the library's names, dtypes and shapes

    def _mfsdp_seen(self, name: str, stored: Stored) -> torch.Tensor:
        """One parameter of bytes as the tensor that it is, sharing memory."""
        param: Any = self._parameters[name]
        if not isinstance(param, ShardedDTensor):
            return stored.seen(param.detach())
        spec = param.sharding
        layout = spec.layout.as_elements(spec.slot, stored.key, stored.shape, stored.dtype.itemsize)
        out = ShardedDTensor(
            param._local_tensor.view(stored.dtype).view(layout.local(0, spec.rank).shape),
            ShardSpec(layout, 0, spec.mesh, spec.copies),
        )
        out._mfsdp_written = param._mfsdp_written
        out._mfsdp_bytes = param, stored
        out._mfsdp_part = name, self._mfsdp_form
        return out

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        form = self._mfsdp_form
        bnb.note_packed(self, self._mfsdp_packed.values())
        parts = {name: self._mfsdp_seen(name, s) for name, s in form.tensors if s.key}
        summoned = not isinstance(parts["weight"], ShardedDTensor)
        whole = form.whole(parts) if summoned else None
        if whole is None:
            destination |= {prefix + s.key: parts[name] for name, s in form.tensors if s.key}
        else:
            destination[f"{prefix}weight"] = whole
        destination |= {prefix + key: value for key, value in self._mfsdp_packed.items()}
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        state_dict, apart = self._mfsdp_form.taken_apart(state_dict, prefix)
        keys = {name: prefix + stored.key for name, stored in self._mfsdp_form.tensors if stored.key}
        ours = {*keys.values(), *(prefix + key for key in self._mfsdp_packed)}
        ours_alone = {prefix + name for name in keys} - ours  # names of parameters, which are no entries
        others = {key: value for key, value in state_dict.items() if key not in ours | ours_alone}
        unexpected += [key for key in state_dict if strict and key in ours_alone]
        before = len(missing)
        nn.Module._load_from_state_dict(self, others, prefix, metadata, strict, missing, unexpected, errors)
        missing[before:] = [key for key in missing[before:] if key.removeprefix(prefix) not in self._mfsdp_keys]
        optional = f"{prefix}weight_format"  # bitsandbytes takes a state dict without it
        missing += [key for key in ours if strict and key not in state_dict and key != optional]
        if wrong := apart or self._mfsdp_wrong(state_dict, prefix):
            errors += wrong
            return
        with torch.no_grad():
            for name, stored in self._mfsdp_form.tensors:
                if (value := state_dict.get(keys.get(name, ""))) is None:
                    continue
                if name != "weight" and name in refs(self):
                    groups = refs(self)[name].buffer.spec.peer_groups
                    record_load(groups, keys[name], value, value.dtype)
                self._mfsdp_seen(name, stored).copy_(value)
        for key, packed in self._mfsdp_packed.items():
            if (value := state_dict.get(prefix + key)) is not None and value is not packed:
                packed.resize_(value.shape).copy_(value)
        self._mfsdp_loaded()

    @property
    def _mfsdp_keys(self) -> dict[str, str]:
        """Keys in the state dict of parameters of bytes, by name; that of nested scales' offset is packed."""
        packed = next(iter(self._mfsdp_packed), "weight")
        return {name: stored.key or packed for name, stored in self._mfsdp_form.tensors}

    def _mfsdp_wrong(self, state_dict: Any, prefix: str) -> list[str]:
        """Why values of a state dict cannot be loaded."""
        wrong = []
        for name, stored in self._mfsdp_form.tensors:
            value, mine = state_dict.get(prefix + stored.key), self._mfsdp_seen(name, stored)
            if stored.key and value is not None and (value.shape, value.dtype) != (mine.shape, mine.dtype):
                wrong.append(
                    f"{prefix}{stored.key} is {value.dtype}{list(value.shape)} in the state dict and {mine.dtype}"
                    f"{list(mine.shape)} here: its weight is not quantized, or otherwise"
                )
        if int(state_dict.get(f"{prefix}weight_format", 0)) != 0:
            wrong.append(
                f"{prefix}weight is not stored by rows (weight_format): load it with bitsandbytes, and save it"
            )
        for key in (key for key in state_dict if key.startswith(f"{prefix}weight.quant_state.")):
            try:
                bnb.read_packed(cast(bnb.Blocks, self._mfsdp_form), state_dict[key])
            except ValueError as error:
                wrong.append(f"{prefix}weight: {error}")
        return wrong

    def _mfsdp_loaded(self) -> None:
        """Takes over what was loaded into the packed entries of the state dict: the offset of nested scales."""
        for key, packed in self._mfsdp_packed.items():
            if key.startswith("weight.quant_state."):
                form, name = cast(bnb.Blocks, self._mfsdp_form), "weight_nested_offset"
                offset = bnb.read_packed(form, packed)
                if form.nested:
                    with torch.no_grad():
                        param: Any = self._parameters[name]
                        param.copy_(torch.tensor([[offset]], device=param.device).view(torch.uint8))


class _Linear(torch.autograd.Function):
    """A linear layer that saves bytes for backward, and makes the matrix of them again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, form: Form, *raw: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*raw)
        ctx.form = form
        return form.linear(x, raw, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, bias, *_ = ctx.needs_input_grad
        raw = ctx.saved_tensors
        of_x = ctx.form.input_grad(grad, raw) if x else None
        of_bias = grad.reshape(-1, grad.size(-1)).sum(0) if bias else None
        return of_x, of_bias, None, *(None for _ in raw)


@functools.cache
def _subclass(base: Any) -> type[nn.Module]:
    space = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return cast(type[nn.Module], type(base.__name__, (QuantizedLinear, base), space))


@contextmanager
def taken_apart(root: nn.Module, ignored: set[nn.Parameter]) -> Iterator[None]:
    """Gives quantized linear layers below ``root`` parameters of bytes; undone if what follows raises.

    Raises:
        ValueError, NotImplementedError: a layer cannot be sharded (`quantized.take_apart`); nothing has changed then.
    """
    layers = [
        (fqn or "(root)", m)
        for fqn, m in root.named_modules()
        if not isinstance(m, QuantizedLinear) and quantized.linear(m) and m.weight not in ignored
    ]
    _read_by_adapters(root, {m for _, m in layers})
    found = [(m, quantized.take_apart(fqn, m)) for fqn, m in layers]
    params: dict[torch.Tensor, dict[str, nn.Parameter]] = {}  # tied layers share them
    for m, apart in found:
        weight: Any = m._parameters["weight"]
        if weight not in params:
            params[weight] = {n: nn.Parameter(v, requires_grad=False) for n, v in apart.values.items()}
            params[weight]["weight"].__dict__.update(apart.attributes)
        _change(m, apart, params[weight])
        apart.values.clear()
        del weight  # no variable may hold originals: they are freed one by one
    layers.clear()
    params.clear()
    try:
        yield
    except BaseException:
        for m, apart in found:
            m.__class__ = type(m).__bases__[-1]
            raw = {name: m._parameters.pop(name) for name, _ in apart.form.tensors}
            apart.back(cast(dict[str, torch.Tensor], raw))
            del m._mfsdp_form, m._mfsdp_packed
        raise


def _change(module: nn.Module, apart: Apart, params: dict[str, nn.Parameter]) -> None:
    bias = {"bias": module._parameters.pop("bias")} if "bias" in module._parameters else {}
    module._parameters.clear()
    module._parameters.update({**params, **bias})
    kind: Any = type(module)
    module.__class__ = _subclass(kind)
    own: Any = module
    own._mfsdp_form = apart.form
    own._mfsdp_packed = {key: value.clone() for key, value in apart.packed.items()}
    for value in own._mfsdp_packed.values():
        value._mfsdp_resizes = True  # the text of a number is as long as its digits (`load_safetensors`)
    own.__dict__.update(apart.state)


def _read_by_adapters(root: nn.Module, layers: set[nn.Module]) -> None:
    """Refuses adapters that read the matrix of a quantized layer in forward."""
    for fqn, m in root.named_modules():
        if getattr(m, "lora_variant", None) and getattr(m, "base_layer", None) in layers:
            kinds = sorted({type(v).__name__ for v in m.lora_variant.values()})  # type: ignore[operator, union-attr]
            raise NotImplementedError(
                f"fully_shard: {fqn} is an adapter ({', '.join(kinds)}) that reads the quantized weight as a matrix, "
                "which exists only inside the layer. Use plain LoRA, or pass the weight in ignored_params"
            )
