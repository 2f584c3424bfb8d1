"""Names of ``megatron_fsdp.uneven_dtensor``: DTensors of mfsdp report their chunks and gather themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict as get_state_dict
from torch.distributed.tensor import DTensor, Replicate

from ...sharding.fsdp2_api import refusal


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


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Does nothing: chunks follow from the layout, which covers every element once."""


gather_and_compute_chunk_metadata = refusal(
    "gather_and_compute_chunk_metadata",
    "a tensor of mfsdp may have several chunks on a rank; it reports them to torch.distributed.checkpoint by itself",
)
split_dtensor = refusal("split_dtensor", "use dtensor.full_tensor().split(...), or to_local() for this rank's rows")
filter_unflattened_state_dict = refusal("filter_unflattened_state_dict", "walk the dict")
get_unflattened_state_dict = refusal("get_unflattened_state_dict", "walk the dict")
