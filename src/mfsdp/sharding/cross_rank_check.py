"""Whether all ranks are about to shard the same model; and making its values the same.

Each rank keeps its own rows of what it has built. Where ranks have built different models, collectives would not fit;
where they have the same model with different values (no common seed), rows of several models are mixed, or replicas
differ for ever. So they compare, through the process group's store, once per call of `fully_shard`: what a model is
made of, which has to be the same, and a sample of its values, which need not be if a checkpoint is loaded next.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..runtime import groups
from ..runtime.desync import difference

SAMPLE = 2**10
"""Elements of a parameter that are compared, evenly spread."""

_VALUES = "value of "


def check_same_model(over: Sequence[str], structure: Sequence[str], values: Mapping[str, torch.Tensor]) -> None:
    """Compares this rank's model with those of the other ranks of some process groups; all call it together.

    Args:
        over: their names.
        structure: what has to be the same, one line for each thing.
        values: tensors that should be, by name.

    Warns:
        UserWarning: values differ; names the first of them.

    Raises:
        RuntimeError: the structure differs, with the first difference; or a rank does not come.
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
    """A number for each tensor, from the bits of a sample: exact, and the same on every kind of processor."""
    marks = []
    for tensor in values.values():
        some = sample(tensor)
        bits = some.view(_INTEGER[some.element_size()]).long()
        marks.append((bits * torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)).sum())
    devices = {m.device for m in marks}
    known = {d: iter(torch.stack([m for m in marks if m.device == d]).tolist()) for d in devices}
    return {name: next(known[m.device]) for name, m in zip(values, marks, strict=True)}


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor that are compared; of a sample they are all."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].contiguous()


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_first_rank(tensor: torch.Tensor, over: Iterable[str], device: torch.device) -> torch.Tensor:
    """The tensor of the first rank of all groups, on a device that they communicate on; this rank's is not changed."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor.detach())
    for group in over:
        groups.broadcast(out.view(-1).view(torch.uint8), group)
    return out
