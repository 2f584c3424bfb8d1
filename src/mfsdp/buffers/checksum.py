"""A checksum of a model's weights, to compare runs, replicas and checkpoints."""

from __future__ import annotations

import hashlib
from typing import Literal, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..dtensor.parameter_names import original
from ..dtensor.shard_spec import ShardSpec
from ..dtensor.sharded_dtensor import ShardedDTensor
from ..dtensor.tp_shards import TPShard, here
from ..runtime import execution, sync_collectives
from ..runtime.checksums import checksum as of_box


@overload
def checksum(model: nn.Module, *, each: Literal[False] = False) -> int: ...


@overload
def checksum(model: nn.Module, *, each: Literal[True]) -> dict[str, int]: ...


@torch.no_grad()
def checksum(model: nn.Module, *, each: bool = False) -> int | dict[str, int]:
    """Returns a checksum of all weights of a model. It changes if any bit of any weight changes or moves. It is the
    same for any number of ranks, strategy and layout, sharded or not, compiled or not: an integer sum over elements,
    each hashed with its position. All ranks must call it.

    Each replica sums the values that it holds (HSDP, ``no_shard``, copies under tensor parallelism), so a replica that
    has drifted returns another number. It covers main weights in their own dtype; weights of another dtype have another
    checksum. Buffers are not included.

    It costs one pass over the weights, one small collective per group of ranks that share a sharding, and one device
    synchronization.

    Args:
        model: sharded, partly sharded, or not sharded.
        each: whether to return the checksum of every parameter.

    Returns:
        an unsigned 64-bit integer over all weights and their names; or one per parameter, by name.
    """
    found = {original(name): param for name, param in model.named_parameters()}
    totals: dict[str, torch.Tensor] = {}
    over: dict[tuple[str, ...], list[str]] = {}
    for name, param in found.items():
        totals[name], groups = _here(param)
        over.setdefault(groups, []).append(name)
    for groups, names in over.items():
        if groups:
            with execution.announced(f"checksum of {len(names)} parameters", *groups):
                together = torch.stack([totals[name] for name in names])
                for group in groups:
                    together = sync_collectives.reduced(together, "sum", group)
            totals |= zip(names, together.unbind(), strict=True)
    numbers = {name: int(total) % 2**64 for name, total in totals.items()}
    return numbers if each else sum(_named(name, number) for name, number in numbers.items()) % 2**64


def _here(param: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Returns what this rank's part of a parameter adds to its checksum, and the groups that hold the rest."""
    local = here(param)
    if isinstance(param, ShardedDTensor):
        sharding: ShardSpec = param.sharding
        parts = [(param.chunk_at(there), there) for there, _, _ in sharding.boxes()]
        groups, shape = sharding.over, sharding.shape
    elif isinstance(param, DTensor):
        piece = TPShard.of(param)
        boxes = piece.boxes((0,) * len(piece.local), piece.local)
        parts = [(_cut(local, at, sizes), there) for there, at, sizes in boxes]
        groups, shape = piece.cut_by, piece.shape
    else:
        parts, groups, shape = [(local, (0,) * local.dim())], (), tuple(local.shape)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for part, there in parts:
        total += of_box(part, there, shape)
    return total, groups


def _cut(local: torch.Tensor, at: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dim, (start, n) in enumerate(zip(at, sizes, strict=True)):
        local = local.narrow(dim, start, n)
    return local


def _named(name: str, number: int) -> int:
    """Hashes a parameter's checksum with its name."""
    return int.from_bytes(hashlib.sha256(f"{name} {number}".encode()).digest()[:8])
