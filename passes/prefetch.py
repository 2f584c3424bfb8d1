"""prefetch: a unit's all-gather is launched while the unit before it computes.

Before, compute waits at every unit for its parameters:

    . * .  u0_full                = all_gather u0_shard                   bf16[1056768]
    <-o .                           wait u0_full
    * . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]
    . * .  u1_full                = all_gather u1_shard                   bf16[1056768]
    <-o .                           wait u1_full

After, with depth 1:

    . * .  u0_full                = all_gather u0_shard                   bf16[1056768]
    <-o .                           wait u0_full
    . * .  u1_full                = all_gather u1_shard                   bf16[1056768]
    * | .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]
    <-o .                           wait u1_full

Why: communication overlaps with compute. Only launches move; every value stays bitwise equal.
Needs: `reshard`, so that a limit on gathered bytes accounts for frees.
Costs: ``depth`` more units are gathered at a time.

Gathers that run once per optimizer step (`refresh`, and `refresh_codes` with its inputs) take no extra memory when
launched early: all of them start at the beginning of the program.

Units are in each program's own order of first use; the first ``depth`` gathers move to the program's start. Flat
buffers of one module (other dtypes, or frozen parameters) count as one. A launch that would exceed ``limit`` waits for
the next `free` that makes room, or stays in place, where the unit is needed regardless of the limit.

``depth`` may be a function of the program (``prefetch="auto"``), which also returns the reason for the listing.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.byte_costs import nbytes, size
from mfsdp.ir.program import Program, by_module
from mfsdp.ir.roles import Kind

LIMITED = "mfsdp_limited"
"""``meta`` key of launches that a limit delays."""


def prefetch(p: Program, *, depth: int | Callable[[Program], tuple[int, str]] = 1, limit: int | None = None) -> None:
    """Moves launches of all-gathers up.

    Args:
        depth: how many units ahead; 0 moves nothing. Or a function that returns this number for a program, and the
            reason.
        limit: bytes of gathered buffers that may be live at once; ``None`` for no limit.
    """
    launches = p.calls(ops.all_gather)
    refreshes, codes = p.find(Kind.REFRESH), p.find(Kind.CODES)
    if not launches and not refreshes and not codes:
        p.note("nothing is gathered here")
        return
    depth, words = (depth, f"depth {depth}") if isinstance(depth, int) else depth(p)
    if depth == 0:
        p.note(words)
        return
    if refreshes:
        start = p.start()
        p.move([n for n in refreshes if n is not start], start.next if start is refreshes[0] else start)
        p.changed(f"{len(refreshes)} refresh up")
    for node in codes:
        p.launch_before(node, refreshes[-1].next if refreshes else p.start())
        refreshes.append(node)
    if codes:
        p.changed(f"{len(codes)} refresh_codes up")
    if not launches:
        return
    waits = {n.args[0]: n for n in p.find(Kind.WAIT)}
    moved = yielded = 0
    modules = by_module(p, launches)
    heads = {run[0]: i for i, run in enumerate(modules)}
    for i, launch in enumerate(launches):
        before = heads.get(launch, 0) - depth
        if before >= 0:
            target = waits[modules[before][0]].next
        else:
            target = launches[i - 1].next if i else refreshes[-1].next if refreshes else p.start()
        if limit is not None:
            earliest = target
            target = _room(launches, i, earliest, limit)
            if target is not earliest:
                launch.meta[LIMITED] = True
                yielded += 1
        moved += p.launch_before(launch, target)
    if moved:
        p.changed(f"{moved} all_gather up")
    p.note(words if moved else f"{words}: every launch is there already")
    if yielded:
        p.note(f"{yielded} held back by the limit of {size(limit or 0)}")


def _room(launches: list[Node], i: int, target: Node, limit: int) -> Node:
    """Returns the earliest node from ``target`` on, after the previous launch, before which this launch respects the
    limit.
    """
    launch = launches[i]
    if i and not launches[i - 1] < target:
        target = launches[i - 1].next
    room = limit - nbytes(launch.meta["val"])
    events: list[tuple[Node, int]] = []  # node, change of gathered bytes
    for full in launches:
        if full is not launch:
            taken = nbytes(full.meta["val"])
            events.append((full, taken))
            events += [(u, -taken) for u in full.users if u.target is ops.free]
    live = sum(change for node, change in events if node < target)
    earliest = target if live <= room else None
    for node, change in sorted(events):
        if node < target or launch < node:
            continue
        live += change
        if live > room:
            earliest = None
        elif earliest is None:
            earliest = node.next
    return earliest if earliest is not None else launch
