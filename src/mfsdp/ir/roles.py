"""What a node is for. Every node that a pass inserts carries one; nothing is recognised by its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.fx


class Kind(Enum):
    """The closed vocabulary of values and events (docs/guides/listing.md, "Names")."""

    SHARD = "shard"  # placeholder: what programs read parameters from, as a rule this rank's flat shard
    REFRESH = "refresh"  # parameters that last are gathered again after an optimizer step
    CODES = "codes"  # parameters that last, in one byte per element
    CAST = "cast"  # the shard in the dtype that travels, and what it is quantised with
    MAXIMA = "maxima"  # the largest magnitudes in blocks of a unit's parameters, over all ranks
    FULL = "full"  # the gathered flat buffer
    PARAM = "param"  # a parameter: a view into the full buffer (or a marker, before `gather`)
    WAIT = "wait"  # compute waits for a collective
    FREE = "free"  # the full buffer is gone
    GRAD = "grad"  # a marker: the gradient of one parameter (before `reduce`)
    GFULL = "gfull"  # the flat buffer that gradients are packed into
    PACK = "pack"  # gradients come to their places in it
    HOLD = "hold"  # gradients stay here until the next synchronisation
    ALL_REDUCE = "all_reduce"  # gradients summed in place
    GSHARD = "gshard"  # this rank's part of the reduced gradients
    GOUTER = "gouter"  # the same, of gradients that were reduced over the outer axis too
    ACCUMULATE = "accumulate"  # gradients added to the accumulator
    PROBE = "probe"  # somebody looks at a value, in some steps
    COLLECTIVE = "collective"  # a collective of another parallelism, or of the model itself
    OFFLOAD = "offload"  # what forward saves, on the host: its copy there, in backward a placeholder
    RELOAD = "reload"  # the same, back on the device


class Lane(Enum):
    """A queue of work that runs beside the others: column of the listing."""

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
    """Name of the unit, ``u0``; of another parallelism's collectives and waits that of the axis, ``tp``; of copies to
    and from the host, the path of the layer."""
    lane: Lane = Lane.COMPUTE


_KEY = "mfsdp"


def role(node: torch.fx.Node) -> Role | None:
    """The node's role, or ``None`` for the model's own computation."""
    return node.meta.get(_KEY)


def mark(node: torch.fx.Node, role: Role) -> torch.fx.Node:
    """Give the node a role. AOTAutograd carries it from the joint graph to forward and backward."""
    node.meta[_KEY] = role
    return node


def is_kind(node: torch.fx.Node, *kinds: Kind) -> bool:
    """Whether the node has one of these kinds."""
    r = role(node)
    return r is not None and r.kind in kinds
