"""What the graph has to know of a unit, and nothing else: plain values, no tensors, no process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .config import SHORT, Precision
from .layout import Layout

_LONG = {short: dtype for dtype, short in SHORT.items()}


@dataclass(frozen=True)
class Spec:
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
    """Elements per rank of each segment (see :class:`mfsdp.layout.Segment`)."""
    precision: Precision
    divide: float
    """What a sum over ranks is divided by."""
    reshard: bool
    """Whether forward frees what it gathered (``reshard_after_forward``)."""

    @property
    def shard_numel(self) -> int:
        return sum(self.splits)

    @property
    def full_numel(self) -> int:
        return self.world * self.shard_numel

    def encode(self) -> str:
        p = self.precision
        dtypes = ",".join(SHORT[d] for d in (p.main, p.comm, p.compute, p.grad_comm, p.grad))
        splits = "+".join(map(str, self.splits))
        after = "reshard" if self.reshard else "keep"
        groups = f"{self.group or '-'} {self.reduce_group or '-'}"
        return f"{self.world} {groups} {splits} {dtypes} {self.divide!r} {after}"

    @staticmethod
    @cache
    def decode(text: str) -> Spec:
        """The inverse of :meth:`encode`."""
        world, group, reduce_group, splits, dtypes, divide, after = text.split(" ")
        return Spec(
            world=int(world),
            group="" if group == "-" else group,
            reduce_group="" if reduce_group == "-" else reduce_group,
            splits=tuple(map(int, splits.split("+"))),
            precision=Precision(*(_LONG[d] for d in dtypes.split(","))),
            divide=float(divide),
            reshard=after == "reshard",
        )


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
    spec: Spec
    layout: Layout
    trainable: bool = True
    sharded: bool = True
    """``False``: parameters are plain tensors on every rank (``no_shard``), only gradients are reduced."""

    def offset_name(self, offset: int) -> str:
        """The parameter that starts at ``offset`` of the full buffer, as an identifier: ``attn_q_weight``."""
        for slot in self.layout.slots:
            if slot.offset == offset and slot.numel:
                return slot.name.replace(".", "_")
        raise KeyError(offset)
