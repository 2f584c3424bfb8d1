"""The tensors of a model, sharded or not, by their original names, and this rank's boxes of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..dtensor import parameter_names
from ..dtensor.sharded_dtensor import ShardedDTensor


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers under all of their original names."""
    state = model.state_dict(keep_vars=True)
    parameter_names.restore(state)
    return {n: t for n, t in state.items() if isinstance(t, torch.Tensor)}


def boxes(tensor: DTensor) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Yields this rank's part of a tensor, box by box: its place, and a view, which the caller writes to."""
    for chunk in tensor.__create_chunk_list__():  # type: ignore[attr-defined]
        if chunk.sizes.numel():
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            ours = isinstance(tensor, ShardedDTensor)
            yield place, tensor.chunk_at(tuple(chunk.offsets)) if ours else tensor.to_local()  # type: ignore[attr-defined]


def kept_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a tensor leaves the model: ``dtype`` for floating-point ones, if it is given."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
