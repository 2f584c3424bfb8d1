"""Which modules become units where nobody has said: ``units="auto"``.

Note [Units of a model]
Blocks: what the model's own plan names (``_no_split_modules``, else the patterns of ``_fsdp_plan``), if there are two
of a class, and beside that every list of modules of one class that holds a hundredth of the parameters or more.
Outermost ones: what is inside of a block, experts among it, belongs to it.

Ends: what stands in front of the blocks (embeddings) and what stands behind them (a norm, the head) are needed at two
ends of a program. In one unit, the root's, both are gathered before the first block can begin, and again before
backward can. So one of them becomes a unit of its own: that in front, if it is all in one module, whose parameters
backward does not read; else the largest module behind. Never both: what is left in the root would be a norm or two,
whose gather takes its hops all the same, and holds up the next one's launch: on the clock that is mostly slower than
one, and sometimes than none (docs/guides/explain_and_plan.md has figures). And only if there is enough behind that
moving it takes longer than one more collective's hops: `APART` bytes for each rank. What is tied to something elsewhere
stays in the root: one parameter, one unit.

In front and behind are told from the order in which modules are registered. Where a model calls them in another, the
units are as right, and may be slower.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from ..config.options import MixedPrecisionPolicy
from ..state.sharding_plan import ShardingPlan
from .module import FSDPModule, own_class
from .unit_assignment import Claim, matches

log = logging.getLogger("mfsdp")

APART = 2**20
"""Bytes for each rank that there have to be behind the blocks. A rank receives as much in every hop of a ring; of H100
that takes 2.7 us inside of a node, 3.1 us between nodes, and the hop's latency is taken to be 2 and 6 us."""

SMALL = 100
"""Lists of modules with less than this part of the parameters are no blocks."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


Large = Callable[[Iterable[nn.Parameter]], bool]


def auto(whole: Claim, policy: MixedPrecisionPolicy, placement: ShardingPlan) -> list[str]:
    """Names of the modules that become units (Note [Units of a model]); what they do not have is the root's.

    Args:
        whole: all parameters that are to be sharded, as one unit.
        policy: says in which dtype they travel.
        placement: says over how many ranks.
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
    """A model, as far as it matters here: its modules in order, and which of them parameters are in."""

    def __init__(self, whole: Claim):
        self.root = whole.module
        self.names: dict[nn.Module, str] = {m: name for name, m in self.root.named_modules()}
        self.order = {m: i for i, m in enumerate(self.names)}
        self.owners = {p: [m for m, _ in places] for p, places in whole.owners.items()}
        self.inside = {m: set(m.modules()) for m in self.names}

    def own(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters that a module has to itself, with what is in it."""
        return [p for p, owners in self.owners.items() if self.inside[module].issuperset(owners)]

    def planned(self) -> list[nn.Module]:
        """Blocks by the model's own plan."""
        kinds = {kind for m in self.names for kind in _texts(getattr(m, "_no_split_modules", None))}
        found = [m for m in self.names if m is not self.root and type(m).__name__ in kinds]
        found = self.alike(self.outermost(found))
        return found or self.alike(self.outermost([m for top in self.names for m in self._patterns(top)]))

    def _patterns(self, top: nn.Module) -> list[nn.Module]:
        """What the plan for sharding of a module names with wildcards, below it."""
        plan = getattr(top, "_fsdp_plan", None)
        wild = [x.split(".") for x in _texts(plan if isinstance(plan, dict) else None) if "*" in x]
        below = top.named_modules() if wild else ()
        return [m for name, m in below if m is not top and any(matches(name.split("."), x) for x in wild)]

    def repeated(self, blocks: Collection[nn.Module]) -> list[nn.Module]:
        """Blocks in lists outside of those that are known."""
        least = sum(p.numel() for p in self.owners) / SMALL
        taken = {m for block in blocks for m in self.inside[block]}
        out: list[nn.Module] = []
        for m in self.names:  # outer ones first
            if not isinstance(m, LISTS) or m in taken:
                continue
            children = [c for c in dict.fromkeys(_unwrapped(c) for c in m.children()) if c not in taken]
            found = [c for c in self.alike(children) if not self.inside[c] & taken]
            if found and sum(p.numel() for c in found for p in self.own(c)) >= least:
                out += found
                taken |= {below for c in found for below in self.inside[c]}
        return out

    def alike(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Those of a class of which there are several, with parameters; in the model's order."""
        full = [m for m in modules if isinstance(m, FSDPModule) or self.own(m)]
        count = Counter(own_class(m) for m in full)
        return sorted((m for m in full if count[own_class(m)] > 1), key=lambda m: self.order[m])

    def outermost(self, modules: Collection[nn.Module]) -> list[nn.Module]:
        """Those that are in no other of them."""
        return [m for m in dict.fromkeys(modules) if not any(m in self.inside[o] for o in modules if o is not m)]

    def end(self, blocks: Collection[nn.Module], large: Large) -> nn.Module | None:
        """The module at an end of the model that becomes a unit of its own."""
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


def _unwrapped(module: nn.Module) -> nn.Module:
    """What ``torch.compile(module)`` was called on."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def _texts(plan: Any) -> list[str]:
    """The texts among what a model says of itself, whatever it is."""
    return [x for x in plan if isinstance(x, str)] if isinstance(plan, (list, tuple, set, frozenset, dict)) else []
