"""What a quantized weight is made of: tensors that are sharded and gathered as bytes, and how they make a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Stored:
    """One tensor of a quantized weight: its name in the state dict (``""``: it has none), dtype and shape.

    As a parameter of bytes it has the same rows: one more dimension, unless its elements are bytes.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        size = self.dtype.itemsize
        return self.shape if size == 1 else (*(self.shape or (1,)), size)

    def as_bytes(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of a value, uint8 [*byte_shape], sharing its memory if it is contiguous."""
        return value.detach().reshape(-1).view(torch.uint8).view(self.byte_shape)

    def seen(self, raw: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that bytes are, sharing their memory."""
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Form:
    """How a weight is quantized. Bytes (``raw``) are given in the order of ``tensors``."""

    kind: str
    """bitsandbytes' ``"nf4"``, ``"fp4"`` or ``"int8"``, or the name of torchao's class."""
    shape: tuple[int, int]
    """[outputs, inputs]."""
    tensors: tuple[tuple[str, Stored], ...]
    """By the names of the parameters of bytes that the module has instead of ``weight``, which is the first of them."""

    def raw(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the bytes of values by name, not copied."""
        return {name: stored.as_bytes(values[name]) for name, stored in self.tensors}

    def seen(self, raw: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Returns the tensors that the bytes are, sharing their memory."""
        return [stored.seen(part) for (_, stored), part in zip(self.tensors, raw, strict=True)]

    def matrix(self, raw: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the dequantized matrix, [outputs, inputs] in ``dtype``."""
        raise NotImplementedError

    def linear(self, x: torch.Tensor, raw: tuple[torch.Tensor, ...], bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the layer's output, [..., outputs] in the dtype of ``x`` [..., inputs], also under autocast."""
        return F.linear(x, self.matrix(raw, x.dtype), bias).to(x.dtype)

    def input_grad(self, grad: torch.Tensor, raw: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns the input's gradient, [..., inputs], from the output's."""
        return grad @ self.matrix(raw, grad.dtype)

    def from_state(self, state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Returns a tensor of the weight, by its parameter's name, from the state dict of its layer, sharded or not.

        Raises:
            KeyError: it is not there.
        """
        return state[dict(self.tensors)[name].key]

    def whole(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Returns the tensor that other libraries have in place of its parts, by their parameters' names; ``None``:
        they have the parts.
        """
        return None

    def taken_apart(self, state: dict[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
        """Returns a state dict that is loaded, with a weight in one piece as parts, and why it cannot be loaded."""
        return state, []


@dataclass
class Apart:
    """A weight that has been taken apart."""

    form: Form
    values: dict[str, torch.Tensor]
    """Its bytes, by name. Not copied."""
    back: Callable[[dict[str, torch.Tensor]], None]
    """Gives the module a weight again, from bytes by name."""
    packed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Other entries of the module's state dict, by key."""
    attributes: dict[str, object] = field(default_factory=dict)
    """Attributes of the weight that others look for."""
    state: dict[str, object] = field(default_factory=dict)
    """Attributes that the module gets."""


class NoState:
    """In the place of what peft and others dequantize a weight with: whole weights only."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("bitsandbytes__"):
            return  # a key of the state dict, which torch.distributed.checkpoint looks for
        if name.startswith("_"):
            raise AttributeError(name)
        not_whole()


def not_whole() -> None:
    """Raises:
    NotImplementedError: always.
    """
    raise NotImplementedError(
        "mfsdp: this quantized weight is sharded, and cannot be dequantized, or merged with adapters, by one rank. "
        "Save the adapters, load them with an unsharded model, and merge there"
    )
