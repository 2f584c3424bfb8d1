"""The tensors of a model, sharded or not, by their original names, and this rank's boxes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..dtensor import parameter_names, quantized
from ..dtensor.sharded_dtensor import ShardedDTensor


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers under all of their original names."""
    state = model.state_dict(keep_vars=True)
    parameter_names.restore(state)
    out = {n: t for n, t in state.items() if isinstance(t, torch.Tensor)}
    layers = {parameter_names.original(path) for path, m in model.named_modules() if quantized.linear(m)}
    for name, tensor in out.items() if layers else ():
        parts = name.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts)))
        if any(path in layers and name != f"{path}.bias".removeprefix(".") for path in above):
            tensor._mfsdp_exact = True  # type: ignore[attr-defined]
    return out


def refuse_unsharded_quantized(model: nn.Module, caller: str) -> None:
    """Refuses to write into quantized weights that are not sharded: their state dict is made anew, with copies.

    Raises:
        NotImplementedError: names the layer.
    """
    for path, module in model.named_modules():
        if quantized.linear(module) and not hasattr(module, "_mfsdp_form"):
            raise NotImplementedError(
                f"{caller}: {path or type(module).__name__} has a quantized weight that is not sharded. Load with "
                "model.load_state_dict(), or shard the model first"
            )


def boxes(tensor: DTensor) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Yields this rank's part of a tensor, box by box: its place, and a view, which the caller writes to."""
    for chunk in tensor.__create_chunk_list__():  # type: ignore[attr-defined]
        if chunk.sizes.numel():
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            ours = isinstance(tensor, ShardedDTensor)
            yield place, tensor.chunk_at(tuple(chunk.offsets)) if ours else tensor.to_local()  # type: ignore[attr-defined]


def keep(tensor: torch.Tensor, whole: Any) -> None:
    """Copies this rank's part of a whole tensor, or, into a DTensor, of a safetensors slice, read when indexed."""
    if isinstance(tensor, DTensor):
        for place, box in boxes(tensor):
            box.copy_(whole[place or ...])
    else:
        (tensor.resize_(whole.shape) if hasattr(tensor, "_mfsdp_resizes") else tensor).copy_(whole)


def kept_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a tensor leaves the model: ``dtype`` for floating-point ones, if it is given, except
    codes, scales and tables of quantized weights.
    """
    exact = hasattr(tensor, "_mfsdp_exact")
    return dtype if dtype is not None and tensor.is_floating_point() and not exact else tensor.dtype
