"""Roles: the purpose of each node. Every inserted node has one; passes never guess it from neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.fx


class Kind(Enum):
    """The kinds of values and events (docs/guides/listing.md, "Names")."""

    SHARD = "shard"  # placeholder that parameters are read from, usually this rank's flat shard
    REFRESH = "refresh"  # re-gathers persistent parameters after an optimizer step
    CODES = "codes"  # FP8 payload: persistent parameters in one byte per element
    CAST = "cast"  # the shard in the communication dtype, and what quantizes it
    MAXIMA = "maxima"  # amax of blocks of a unit's parameters, over all ranks
    FULL = "full"  # the gathered flat buffer
    PARAM = "param"  # a parameter: a view of the full buffer (before `gather`: a marker)
    WAIT = "wait"  # compute waits for a collective
    FREE = "free"  # frees the full buffer
    GRAD = "grad"  # marker: the gradient of one parameter (before `reduce`)
    GFULL = "gfull"  # the flat buffer that gradients are packed into
    PACK = "pack"  # copies gradients into the flat buffer
    HOLD = "hold"  # keeps gradients unreduced until the next synchronization
    ALL_REDUCE = "all_reduce"  # gradients summed in place
    GSHARD = "gshard"  # this rank's part of the reduced gradients
    GOUTER = "gouter"  # the same after the reduction over the outer axis
    ACCUMULATE = "accumulate"  # adds gradients to the accumulator
    PROBE = "probe"  # runtime check of a value, in some steps
    COLLECTIVE = "collective"  # a collective of another parallelism, or of the model itself
    OFFLOAD = "offload"  # host copy of a saved activation; a placeholder in backward
    RELOAD = "reload"  # the same, back on the device


class Lane(Enum):
    """A queue of work that runs concurrently with the others: a column of the listing."""

    COMPUTE = "C"
    GATHER = "G"
    REDUCE = "R"
    OUTER = "O"
    TENSOR = "T"
    ALL_TO_ALL = "A"
    HOST = "H"


@dataclass(frozen=True)
class Role:
    kind: Kind
    unit: str
    """Name of the unit, ``u0``; for other parallelisms the axis, ``tp``; for host copies the layer's path."""
    lane: Lane = Lane.COMPUTE


_KEY = "mfsdp"


def role(node: torch.fx.Node) -> Role | None:
    """The node's role, or ``None`` for the model's own computation."""
    return node.meta.get(_KEY)


def unit_of(node: torch.fx.Node) -> str:
    """The unit of a node that carries a role."""
    r = role(node)
    assert r is not None, f"{node.name} carries no role"
    return r.unit


def mark(node: torch.fx.Node, role: Role) -> torch.fx.Node:
    """Gives the node a role. AOTAutograd copies it from the joint graph to forward and backward."""
    node.meta[_KEY] = role
    return node


def is_kind(node: torch.fx.Node, *kinds: Kind) -> bool:
    """Whether the node has one of these kinds."""
    r = role(node)
    return r is not None and r.kind in kinds
