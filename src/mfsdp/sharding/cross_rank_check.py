"""Checks that all ranks shard the same model, and copies the first rank's values.

Each rank keeps its rows of the model that it has built. With different models, collectives do not match; with different
values (no common seed), parameters mix rows of several models, or replicas differ permanently. So each `fully_shard`
compares ranks once, through the process group's store: the structure must be equal; sampled values may differ if a
checkpoint is loaded next.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..runtime import groups
from ..runtime.checksums import checksum
from ..runtime.desync import difference

SAMPLE = 2**10
"""Number of compared elements per parameter, evenly spaced."""

_VALUES = "value of "


def check_same_model(over: Sequence[str], structure: Sequence[str], values: Mapping[str, torch.Tensor]) -> None:
    """Compares this rank's model with those of the other ranks in process groups; all call it together.

    Args:
        over: names of the groups.
        structure: what must be equal, one item per line.
        values: tensors that should be equal, by name.

    Warns:
        UserWarning: values differ; names the first.

    Raises:
        RuntimeError: the structure differs, with the first difference; or a rank does not arrive.
    """
    lines = [*structure, *(f"{_VALUES}{name} {mark}" for name, mark in _marks(values).items())]
    for group in over:
        for other, theirs in groups.others_that_differ(group, lines).items():
            ours = [line for line in lines if not line.startswith(_VALUES)]
            if ours != [line for line in theirs if not line.startswith(_VALUES)]:
                raise RuntimeError(
                    f"fully_shard: rank {groups.rank()} and rank {other} have built different models, or shard them "
                    f"differently\n{difference(groups.rank(), lines, other, theirs)}"
                )
            names = [a[len(_VALUES) :].rsplit(" ", 1)[0] for a, b in zip(lines, theirs, strict=True) if a != b]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            warnings.warn(
                f"mfsdp: rank {groups.rank()} and rank {other} have different values of {', '.join(names[:4])}{more}. "
                "Each rank keeps its own rows of them: seed all ranks alike, pass sync_module_states=True for those of "
                "the first rank, or load a checkpoint next.",
                stacklevel=3,
            )
            return


def _marks(values: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number per tensor from the bits of a sample: exact on every kind of processor."""
    marks = [checksum(sample(tensor)) for tensor in values.values()]
    devices = {m.device for m in marks}
    known = {d: iter(torch.stack([m for m in marks if m.device == d]).tolist()) for d in devices}
    return {name: next(known[m.device]) for name, m in zip(values, marks, strict=True)}


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that are compared; of a sample all."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].contiguous()


def of_first_rank(tensor: torch.Tensor, over: Iterable[str], device: torch.device) -> torch.Tensor:
    """Returns the first rank's tensor, on a device that the groups use; this rank's is not changed."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor.detach())
    for group in over:
        groups.broadcast(out.view(-1).view(torch.uint8), group)
    return out
