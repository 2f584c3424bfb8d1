"""Chooses units if the user names none: ``units="auto"``.

Note [Units of a model]
Blocks become units: modules that the model's own plan names (``_no_split_modules``, else the patterns of
``_fsdp_plan``), if it has at least two of a class, and every list of modules of one class with at least a hundredth of
the parameters. Only outermost ones count; what they contain, such as experts, belongs to them.

The modules before the blocks (embeddings) and after them (a norm, the head) are needed at opposite ends of a program.
In one unit, the root's, both would be gathered before the first block, in forward and in backward. So one end becomes
its own unit: the front, if it is one module (backward does not read its parameters), else the largest module after the
blocks. Not both: the root would keep a norm or two, whose gather still costs its hops and delays the next launch; by
the cost model that is mostly slower than one end, sometimes than none (figures: docs/internals/measurements.md). And
only if communicating what is after the blocks takes longer than one collective's hops: `APART` bytes per rank. A
parameter tied to another place stays in the root: one parameter, one unit.

The order of registration tells front from end. If a model calls modules in another order, units are correct but may be
slower.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from torch import nn

from ..buffers.sharding_plan import ShardingPlan
from ..config.options import MixedPrecisionPolicy
from .module import FSDPModule, own_class, unwrapped
from .unit_assignment import PlannedUnit, matches

log = logging.getLogger("mfsdp")

APART = 2**20
"""Least bytes per rank after the blocks. Each hop of a ring receives that many: on H100 2.7 us inside a node, 3.1 us
between nodes, at an assumed hop latency of 2 and 6 us."""

SMALL = 100
"""Lists that hold less than 1/`SMALL` of the parameters are no blocks."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


Large = Callable[[Iterable[nn.Parameter]], bool]


def auto(whole: PlannedUnit, policy: MixedPrecisionPolicy, placement: ShardingPlan) -> list[str]:
    """Returns the names of the modules that become units (Note [Units of a model]); the rest is the root's.

    Args:
        whole: all parameters to shard, as one unit.
        policy: gives the communication dtype.
        placement: gives the number of ranks.
    """
    model = _Model(whole)
    blocks = model.planned()
    blocks += model.repeated(blocks)
    if not blocks:
        log.warning(
            "mfsdp: units='auto' finds nothing in %s that is there several times: it is one unit, gathered as a whole, "
            "and nothing overlaps. To cut it, name classes or modules, units=[YourBlock] or units=['layers.*'].",
            type(whole.module).__name__,
        )
        return []
    ranks = placement.world if placement.world > 1 else placement.outer

    def travels(params: Iterable[nn.Parameter]) -> float:
        return sum(p.numel() * policy.resolve(p.dtype).comm.itemsize for p in params) / ranks

    end = model.end(blocks, lambda params: travels(params) >= APART)
    chosen = [m for m in blocks if not isinstance(m, FSDPModule)] + ([end] if end is not None else [])
    log.info(
        "mfsdp: units='auto': %s of %s%s",
        ", ".join(f"{n} {kind}" for kind, n in Counter(type(m).__name__ for m in blocks).items()),
        type(whole.module).__name__,
        f", and {model.names[end]}" if end is not None else "",
    )
    return [model.names[m] for m in chosen]


class _Model:
    """A model's modules in order, and which modules own each parameter."""

    def __init__(self, whole: PlannedUnit):
        self.root = whole.module
        self.names: dict[nn.Module, str] = {m: name for name, m in self.root.named_modules()}
        self.order = {m: i for i, m in enumerate(self.names)}
        self.owners = {p: [m for m, _ in places] for p, places in whole.owners.items()}
        self.inside = {m: set(m.modules()) for m in self.names}

    def own(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters that only the module and its submodules use."""
        return [p for p, owners in self.owners.items() if self.inside[module].issuperset(owners)]

    def planned(self) -> list[nn.Module]:
        """Blocks by the model's own plan."""
        kinds = {kind for m in self.names for kind in _texts(getattr(m, "_no_split_modules", None))}
        found = [m for m in self.names if m is not self.root and type(m).__name__ in kinds]
        found = self.alike(self.outermost(found))
        return found or self.alike(self.outermost([m for top in self.names for m in self._patterns(top)]))

    def _patterns(self, top: nn.Module) -> list[nn.Module]:
        """Modules below ``top`` that match the wildcard patterns of its sharding plan."""
        plan = getattr(top, "_fsdp_plan", None)
        wild = [x.split(".") for x in _texts(plan if isinstance(plan, dict) else None) if "*" in x]
        below = top.named_modules() if wild else ()
        return [m for name, m in below if m is not top and any(matches(name.split("."), x) for x in wild)]

    def repeated(self, blocks: Collection[nn.Module]) -> list[nn.Module]:
        """Blocks in lists, outside of the known blocks."""
        least = sum(p.numel() for p in self.owners) / SMALL
        taken = {m for block in blocks for m in self.inside[block]}
        out: list[nn.Module] = []
        for m in self.names:  # outer ones first
            if not isinstance(m, LISTS) or m in taken:
                continue
            children = [c for c in dict.fromkeys(unwrapped(c) for c in m.children()) if c not in taken]
            found = [c for c in self.alike(children) if not self.inside[c] & taken]
            if found and sum(p.numel() for c in found for p in self.own(c)) >= least:
                out += found
                taken |= {below for c in found for below in self.inside[c]}
        return out

    def alike(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Modules with parameters whose class occurs several times, in the model's order."""
        full = [m for m in modules if isinstance(m, FSDPModule) or self.own(m)]
        count = Counter(own_class(m) for m in full)
        return sorted((m for m in full if count[own_class(m)] > 1), key=lambda m: self.order[m])

    def outermost(self, modules: Collection[nn.Module]) -> list[nn.Module]:
        """Modules that no other of the given modules contains."""
        return [m for m in dict.fromkeys(modules) if not any(m in self.inside[o] for o in modules if o is not m)]

    def end(self, blocks: Collection[nn.Module], large: Large) -> nn.Module | None:
        """The end of the model that becomes its own unit."""
        covered = {m for block in blocks for m in self.inside[block]}
        above = {m for m in self.names if not covered.isdisjoint(self.inside[m])} - covered
        first, last = (pick(self.order[m] for m in covered) for pick in (min, max))
        outside = {p: owners for p, owners in self.owners.items() if covered.isdisjoint(owners)}
        front = [p for p, owners in outside.items() if min(self.order[m] for m in owners) < first]
        behind = [p for p, owners in outside.items() if min(self.order[m] for m in owners) > last]
        if not large(behind):
            return None
        free = [m for m in self.names if m not in above and m not in covered]
        whole = [m for m in free if front and set(front) <= set(self.own(m))]
        if whole:
            return whole[-1]  # the smallest
        heads = [m for m in free if self.order[m] > last and m._parameters and large(self.own(m))]
        return max(heads, key=lambda m: sum(p.numel() for p in self.own(m)), default=None)


def _texts(plan: object) -> list[str]:
    """The strings in a model's plan, of any type."""
    return [x for x in plan if isinstance(x, str)] if isinstance(plan, (list, tuple, set, frozenset, dict)) else []
