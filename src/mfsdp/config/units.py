"""Describes units to the graph by plain values: no tensors, no process groups."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from .comm_formats import int8_nbytes
from .layout import Layout
from .options import SHORT_ALL, Precision

_LONG = {short: dtype for dtype, short in SHORT_ALL.items()}


class GroupIndex(IntEnum):
    """A process group of a unit, by index in `UnitSpec.groups`: an argument of the collectives in programs."""

    SHARD_GATHER = 0
    SHARD_REDUCE = 1
    OUTER_GATHER = 2
    OUTER_REDUCE = 3

    @property
    def outer(self) -> bool:
        """Whether it communicates over the outer axis."""
        return self >= GroupIndex.OUTER_GATHER

    @property
    def reduce(self) -> GroupIndex:
        """The group of the same axis for reductions that run beside gathers."""
        return GroupIndex.OUTER_REDUCE if self.outer else GroupIndex.SHARD_REDUCE


@dataclass(frozen=True)
class UnitSpec:
    """How one flat buffer is communicated. Marker operations in the graph hold it as text.

    Dynamo guards on the text, and compile caches hash it. It has no names or ids, so that equal layers give equal
    graphs. All that a collective needs is here, as its operation gets nothing else.
    """

    world: int
    group: str
    """Name of the process group (``""``: one process, none needed)."""
    reduce_group: str
    """Name of a second group over the same ranks, for reductions beside gathers; ``""``: none."""
    splits: tuple[int, ...]
    """Elements per rank of each segment (see `mfsdp.config.layout.Segment`)."""
    precision: Precision
    divide: float
    """Divisor of a sum over ranks."""
    reshard: bool
    """Whether forward frees gathered parameters (``reshard_after_forward``)."""
    outer: int = 1
    """Ranks that hold the same shard (HSDP) or split it further (``outer_optim``)."""
    outer_group: str = ""
    outer_reduce_group: str = ""
    outer_optim: bool = False
    """Whether the outer axis shards main weights and optimizer state too, but not parameters."""
    replica: bool = False
    """Whether every rank keeps full parameters, gathered once per optimizer step."""
    hold: bool = False
    """Whether gradients stay unreduced before the first reduction, between synchronizations."""
    stride: int = 1
    """Distance between neighbouring ranks of the shard axis: more than 1 beside tensor parallelism."""
    outer_stride: int = 0
    """The same for the outer axis; 0: ``world``."""
    optional: bool = False
    """Whether ranks may leave the unit unused in a step (``may_be_unused``)."""
    any_optional: bool = False
    """Whether any unit of its model may be unused: ranks then compare a fingerprint for each collective."""

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard of the parameters."""
        return sum(self.splits)

    @property
    def full_numel(self) -> int:
        return self.world * self.shard_numel

    @property
    def persistent(self) -> bool:
        """Whether programs read persistent parameters, not the main weights."""
        return self.replica or self.outer_optim

    @property
    def source_numel(self) -> int:
        """Elements of the buffer that programs read."""
        return self.full_numel if self.replica else self.shard_numel

    @property
    def main_numel(self) -> int:
        """Elements of one rank's main weights."""
        return sum(self.splits_on(2 if self.outer_optim else 0))

    @property
    def ranks(self) -> int:
        """All ranks that train together."""
        return self.world * self.outer

    @property
    def gathers(self) -> bool:
        """Whether every program gathers the parameters that it reads."""
        return self.world > 1 and not self.replica

    @property
    def unreduced_numel(self) -> int:
        """Elements of the unreduced gradients that a rank keeps between synchronizations, besides the accumulator."""
        if self.world > 1 and self.hold:
            return self.full_numel
        return self.shard_numel if self.outer > 1 else 0

    @property
    def groups(self) -> tuple[str, str, str, str]:
        """Names of its process groups, by `GroupIndex`; ``""`` where there is none."""
        return self.group, self.reduce_group, self.outer_group, self.outer_reduce_group

    def ranks_on(self, index: int) -> int:
        """Returns the number of ranks of an axis."""
        return self.outer if index >= GroupIndex.OUTER_GATHER else self.world

    @property
    def sizes(self) -> str:
        """Elements per rank of each segment, and ranks, for messages."""
        return f"{'+'.join(map(str, self.splits))} x {self.world}"

    @property
    def gather_groups(self) -> tuple[str, ...]:
        """Names of the groups over which parameters are gathered."""
        return tuple(filter(None, (self.group, self.outer_group if self.outer_optim else "")))

    @property
    def peer_groups(self) -> tuple[str, ...]:
        """Names of the gather groups of all ranks that share the unit, in which ranks compare fingerprints."""
        return tuple(filter(None, (self.group, self.outer_group)))

    def splits_on(self, index: int) -> tuple[int, ...]:
        """Returns the elements per rank of each segment after a collective over that axis has split it."""
        return tuple(n // self.outer for n in self.splits) if index >= GroupIndex.OUTER_GATHER else self.splits

    def int8_bytes(self, index: int) -> int:
        """Returns the bytes of one rank's part in int8 over that axis."""
        return sum(map(int8_nbytes, self.splits_on(index)))

    def sum_dtype(self, index: int) -> torch.dtype:
        """Returns the dtype in which a reduction over that axis sums."""
        return self.precision.sum(self.ranks_on(index))

    def scatter_dtype(self, index: int) -> torch.dtype:
        """Returns the dtype of a reduce-scatter's result over that axis; ``grad_comm`` if another reduction follows."""
        last = index >= GroupIndex.OUTER_GATHER or self.outer == 1
        return self.sum_dtype(index) if last else self.precision.grad_comm

    @property
    def predivide(self) -> float:
        """Factor of gradients before communication; the rest of ``divide`` is applied after. It is below 1 where a sum
        over ranks comes back in float16 and might overflow: a power of two, chosen as FSDP2 does
        (``_get_gradient_divide_factors``).
        """
        axes = [i for i in (GroupIndex.SHARD_GATHER, GroupIndex.OUTER_GATHER) if self.ranks_on(i) > 1]
        native = any(self.sum_dtype(i).itemsize < self.precision.grad.itemsize for i in axes)
        comes_back = native or (self.outer > 1 and (self.world > 1 or not self.outer_optim))
        factor = 1
        if comes_back and self.precision.grad_comm is torch.float16:
            while self.ranks % factor == 0 and self.ranks / factor > factor:
                factor *= 2
        return 1 / factor

    def encode(self) -> str:
        precision = tuple(SHORT_ALL.get(x, x) for x in vars(self.precision).values())
        return repr(tuple((vars(self) | {"precision": precision}).values()))

    @staticmethod
    @cache
    def decode(text: str) -> UnitSpec:
        """The inverse of `encode`."""
        values = _named(UnitSpec, literal_eval(text))
        roles = _named(Precision, values.pop("precision"))
        return UnitSpec(precision=Precision(**{name: _LONG.get(x, x) for name, x in roles.items()}), **values)


def _named(kind: type[UnitSpec] | type[Precision], values: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the values of a dataclass by field."""
    return {f.name: x for f, x in zip(fields(kind), values, strict=True)}


@dataclass(frozen=True)
class Axis:
    """Ranks among which another parallelism communicates. The graph holds it as text, like `UnitSpec`."""

    name: str
    """For messages: ``tp``."""
    group: str
    """Name of the process group."""
    ranks: int
    stride: int = 1
    """Distance between neighbouring ranks, which shows whether they share a node."""

    def encode(self) -> str:
        return repr((self.name, self.group, self.ranks, self.stride))

    @staticmethod
    @cache
    def decode(text: str) -> Axis:
        """The inverse of `encode`."""
        return Axis(*literal_eval(text))


@dataclass(frozen=True)
class Unit:
    """One flat buffer of a program: names for messages, a spec for the passes.

    A module's unit has one flat buffer, or, if its parameters differ in dtype or some are frozen, one for each kind,
    ``u3``, ``u3b``, ``u3c``.
    """

    name: str
    """``u0``, ``u1``, ... in order of first use."""
    fqn: str
    """Path of the module, ``"(root)"`` for the root."""
    spec: UnitSpec
    layout: Layout
    trainable: bool = True
    sharded: bool = True
    """``False``: parameters are plain tensors on every rank (``no_shard``); only gradients are reduced."""

    def offset_name(self, offset: int) -> str:
        """Returns the name of the parameter at ``offset`` of the full buffer, as an identifier: ``attn_q_weight``."""
        for slot in self.layout.slots:
            if slot.offset == offset:
                return slot.name.replace(".", "_")
        raise KeyError(offset)
