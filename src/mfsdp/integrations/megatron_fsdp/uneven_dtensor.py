"""Names of ``megatron_fsdp.uneven_dtensor``: DTensors of mfsdp report their chunks and gather themselves."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict as get_state_dict
from torch.distributed.tensor import DTensor, Replicate


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Returns the full tensor, on every rank."""
    return dtensor.full_tensor()


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Returns the full tensor as a DTensor that every rank has a copy of."""
    mesh = dtensor.device_mesh
    return DTensor.from_local(dtensor.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)


gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict as it is: ``torch.distributed.checkpoint`` takes it."""
    return state_dict


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Does nothing: the tensor knows its chunks."""


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        "gather_and_compute_chunk_metadata: a tensor of mfsdp may have several chunks on a rank; it reports them to "
        "torch.distributed.checkpoint by itself"
    )


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Does nothing: chunks follow from the layout, which covers every element once."""


def split_dtensor(dtensor: DTensor, split_size_or_sections: int | list[int], dim: int = 0, **more: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError("split_dtensor: use dtensor.full_tensor().split(...), or to_local() for this rank's rows")


def filter_unflattened_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError("filter_unflattened_state_dict: walk the dict")


def get_unflattened_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError("get_unflattened_state_dict: walk the dict")
