"""What the graph has to know of a unit, and nothing else: plain values, no tensors, no process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .comm_formats import is_quantized
from .layout import Layout
from .options import SHORT, Precision

_LONG = {short: dtype for dtype, short in SHORT.items()}


@dataclass(frozen=True)
class UnitSpec:
    """How one flat buffer is communicated. Travels through the graph as text, inside the marker operations.

    As text and not as an object, because the text is part of what Dynamo guards on and of what compile caches
    hash; without names or ids, because two equal layers should give two equal graphs.
    """

    world: int
    group: str
    """Name of the process group (``""``: none needed, one process)."""
    reduce_group: str
    """Name of another group over the same ranks, for reductions that run beside gathers; ``""``: there is none."""
    splits: tuple[int, ...]
    """Elements per rank of each segment (see `mfsdp.config.layout.Segment`)."""
    precision: Precision
    divide: float
    """What a sum over ranks is divided by."""
    reshard: bool
    """Whether forward frees what it gathered (``reshard_after_forward``)."""
    outer: int = 1
    """Ranks that hold the same shard (HSDP) or cut it further (``outer_optim``)."""
    outer_group: str = ""
    outer_reduce_group: str = ""
    outer_optim: bool = False
    """Whether main weights and optimizer state are cut over the outer axis too; parameters are not."""
    replica: bool = False
    """Whether every rank keeps the parameters whole, and gathers them once per optimizer step."""
    hold: bool = False
    """Whether, between synchronisations, gradients stay where they are before the first reduction."""
    stride: int = 1
    """From one rank of the shard axis to the next: more than 1 beside tensor parallelism."""
    outer_stride: int = 0
    """The same of the outer axis; 0: ``world``."""
    optional: bool = False
    """Whether ranks may leave the unit out of a step (``may_be_unused``)."""
    any_optional: bool = False
    """Whether they may leave out any unit of its model: then each collective is announced by itself."""

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard of the parameters."""
        return sum(self.splits)

    @property
    def full_numel(self) -> int:
        return self.world * self.shard_numel

    @property
    def persistent(self) -> bool:
        """Whether programs read parameters from a copy that lasts, not from the main weights."""
        return self.replica or self.outer_optim

    @property
    def source_numel(self) -> int:
        """Elements of what programs read."""
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
        """Elements of the gradients that a rank keeps between synchronisations, besides the accumulator."""
        if self.world > 1 and self.hold:
            return self.full_numel
        return self.shard_numel if self.outer > 1 else 0

    @property
    def groups(self) -> tuple[str, str, str, str]:
        """Names of process groups by lane number: gathers and reductions of the shard axis, of the outer axis."""
        return self.group, self.reduce_group, self.outer_group, self.outer_reduce_group

    def reduce_group_on(self, lane: int) -> str:
        """Name of the group of a reduction on that lane; the second one of its axis, if there is one, wherever it comes
        from, where another rank may do it in uncompiled code (Note [Joining with zeros]).
        """
        return self.groups[lane | 1 if self.any_optional and self.groups[lane | 1] else lane]

    @property
    def sizes(self) -> str:
        """Its sizes, for people: elements per rank of each segment, and ranks."""
        return f"{'+'.join(map(str, self.splits))} x {self.world}"

    @property
    def gather_groups(self) -> tuple[str, ...]:
        """Names of the groups that parameters are gathered over."""
        return tuple(filter(None, (self.group, self.outer_group if self.outer_optim else "")))

    @property
    def peer_groups(self) -> tuple[str, ...]:
        """Names of the groups of all ranks that the unit is shared with; those of gathers, where ranks compare."""
        return tuple(filter(None, (self.group, self.outer_group)))

    def splits_on(self, lane: int) -> tuple[int, ...]:
        """Elements per rank of each segment, once a collective on that lane has cut it."""
        return tuple(n // self.outer for n in self.splits) if lane >= 2 else self.splits

    def int8_bytes(self, lane: int) -> int:
        """Bytes of one rank's part in int8, as it travels on that lane."""
        return sum(map(is_quantized, self.splits_on(lane)))

    def sum_dtype(self, lane: int) -> torch.dtype:
        """The dtype that a reduction on that lane adds up in."""
        return self.precision.sum(self.outer if lane >= 2 else self.world)

    def scatter_dtype(self, lane: int) -> torch.dtype:
        """The dtype of what a reduce-scatter on that lane gives: what travels, if another reduction follows."""
        last = lane >= 2 or self.outer == 1
        return self.sum_dtype(lane) if last else self.precision.grad_comm

    @property
    def predivide(self) -> float:
        """What gradients are multiplied with before they travel; the rest of ``divide`` follows after. Below 1 where a
        sum over ranks comes back in float16, which it may not fit: a power of two, as FSDP2 chooses it
        (``_get_gradient_divide_factors``).
        """
        lanes = [lane for lane, ranks in ((0, self.world), (2, self.outer)) if ranks > 1]
        native = any(self.sum_dtype(lane).itemsize < self.precision.grad.itemsize for lane in lanes)
        comes_back = native or (self.outer > 1 and (self.world > 1 or not self.outer_optim))
        factor = 1
        if comes_back and self.precision.grad_comm is torch.float16:
            while self.ranks % factor == 0 and self.ranks / factor > factor:
                factor *= 2
        return 1 / factor

    def encode(self) -> str:
        p = self.precision
        dtypes = (SHORT[d] for d in (p.main, p.comm, p.compute, p.grad_comm, p.grad))
        precision = ",".join([*dtypes, *(word or "-" for word in (p.grad_sum, p.wire, p.grad_wire))])
        splits = "+".join(map(str, self.splits))
        flags = "".join(str(int(getattr(self, name))) for name in _FLAGS)
        groups = " ".join(g or "-" for g in self.groups)
        strides = f"{self.stride},{self.outer_stride}"
        return f"{self.world} {self.outer} {groups} {splits} {precision} {self.divide!r} {flags} {strides}"

    @staticmethod
    @cache
    def decode(text: str) -> UnitSpec:
        """The inverse of `encode`."""
        world, outer, *groups, splits, precision, divide, flags, strides = text.split(" ")
        stride, outer_stride = map(int, strides.split(","))
        *dtypes, grad_sum, wire, grad_wire = precision.split(",")
        names = ("group", "reduce_group", "outer_group", "outer_reduce_group")
        more: dict[str, Any] = {name: "" if g == "-" else g for name, g in zip(names, groups, strict=True)}
        more |= {name: flag == "1" for name, flag in zip(_FLAGS, flags, strict=True)}
        return UnitSpec(
            world=int(world),
            outer=int(outer),
            splits=tuple(map(int, splits.split("+"))),
            precision=Precision(
                *(_LONG[d] for d in dtypes), grad_sum=_word(grad_sum), wire=_word(wire), grad_wire=_word(grad_wire)
            ),
            divide=float(divide),
            stride=stride,
            outer_stride=outer_stride,
            **more,
        )


def _word(text: str) -> str | None:
    return None if text == "-" else text


_FLAGS = ("reshard", "outer_optim", "replica", "hold", "optional", "any_optional")


@dataclass(frozen=True)
class Axis:
    """Ranks among which another parallelism communicates. Travels through the graph as text, like `UnitSpec`."""

    name: str
    """For people: ``tp``."""
    group: str
    """Name of the process group."""
    ranks: int
    stride: int = 1
    """From one rank to the next: what tells whether they are neighbours on a node."""

    def encode(self) -> str:
        return f"{self.name} {self.group} {self.ranks} {self.stride}"

    @staticmethod
    @cache
    def decode(text: str) -> Axis:
        """The inverse of `encode`."""
        name, group, ranks, stride = text.split(" ")
        return Axis(name, group, int(ranks), int(stride))


@dataclass(frozen=True)
class Unit:
    """One flat buffer as a program sees it: names for people, a spec for the passes.

    A module's unit has one flat buffer, unless its parameters differ in dtype or some are frozen; then it has one
    for each kind, ``u3``, ``u3b``, ``u3c``.
    """

    name: str
    """``u0``, ``u1``, ... in order of first use."""
    fqn: str
    """Path of the module, ``"(root)"`` for the root."""
    spec: UnitSpec
    layout: Layout
    trainable: bool = True
    sharded: bool = True
    """``False``: parameters are plain tensors on every rank (``no_shard``), only gradients are reduced."""

    def offset_name(self, offset: int) -> str:
        """The parameter that starts at ``offset`` of the full buffer, as an identifier: ``attn_q_weight``."""
        for slot in self.layout.slots:
            if slot.offset == offset:
                return slot.name.replace(".", "_")
        raise KeyError(offset)
