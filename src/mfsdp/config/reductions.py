"""How the gradients of a unit are reduced: the steps that compiled and uncompiled code both take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .units import GroupIndex, UnitSpec


@dataclass(frozen=True)
class Reduction:
    """A sum over the ranks of one axis: a reduce-scatter, or an all-reduce in place."""

    index: GroupIndex
    group: str
    """Name of the process group."""
    ranks: int
    hold: bool
    """Whether gradients stay unreduced before it, between synchronizations."""
    scatters: bool
    splits: tuple[int, ...]
    """Of a reduce-scatter: elements of each segment of the result."""
    numel: int
    """Of a reduce-scatter: elements of the result."""
    dtype: torch.dtype
    """Of a reduce-scatter: dtype of the result."""
    sum: torch.dtype
    """Sums in this dtype."""
    wire: str | None
    """Communication format."""


@cache
def reduction(spec: str, index: int) -> Reduction:
    """A unit's reduction over one of its groups. Where units may be unused, this is the axis' second group if there is
    one: another rank may run the reduction in uncompiled code (Note [Joining with zeros]).
    """
    s, index = UnitSpec.decode(spec), GroupIndex(index)
    splits = s.splits_on(index)
    return Reduction(
        index=index,
        group=(s.any_optional and s.groups[index.reduce]) or s.groups[index],
        ranks=s.ranks_on(index),
        hold=s.hold or index.outer,
        scatters=s.outer_optim or not index.outer,
        splits=splits,
        numel=sum(splits),
        dtype=s.scatter_dtype(index),
        sum=s.sum_dtype(index),
        wire=s.precision.grad_wire,
    )


@cache
def reduction_steps(spec: str) -> tuple[Reduction, ...]:
    """The reductions of a unit's full gradients, in order."""
    steps = reduction(spec, GroupIndex.SHARD_GATHER), reduction(spec, GroupIndex.OUTER_GATHER)
    return tuple(step for step in steps if step.ranks > 1)
