"""plan_memory: gathered buffers and gradient buffers get static slots.

Before, every buffer is allocated when it is launched and freed after its last reader. After, with two units:

    ; peak   ...    slots p0 p1 g0 = 6.05M
    >-* .  u1_full              p0 = all_gather u1_shard                  bf16[1056768]        .
    <-o .                            wait u1_full
    . * .  u0_full              p1 = all_gather u0_shard                  bf16[1056768]        .

Why: the same storage serves forward, backward and every step: nothing is allocated or freed on the way, and what is
needed is known before the first step.
Needs: the final order of launches and frees (`prefetch`, `defer`, `inplace_wgrad`).
Costs: slots stay allocated between steps. A slot is as large as the largest buffer in it.

A gradient buffer that is accumulated as it is, without a reduce-scatter, gets none: it becomes the accumulator.

Slots are coloured as intervals are: buffers by size, largest first, each into the first slot where it overlaps nobody
(first fit decreasing). Identical layers need ``depth + 1`` slots, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.byte_costs import becomes, lines, nbytes, peak, size
from mfsdp.ir.program import Program, slot_of
from mfsdp.ir.roles import Kind

FAMILIES = {"p": Kind.FULL, "g": Kind.GFULL}
"""What the names of slots begin with: of gathered parameters, of gradients."""


class Interval(NamedTuple):
    """A buffer: its bytes, the line that fills it and the one that lets go of it, or what else is in their order."""

    nbytes: int
    start: Any
    end: Any


def plan_memory(p: Program, *, on: bool = True) -> None:
    """Gives slots to all buffers that begin and end inside of the program.

    Args:
        on: ``False`` leaves them to the caching allocator.
    """
    if not on:
        p.note("off")
        return
    p.slots.clear()
    dynamic = peak(lines(p)) if p.told else 0
    for family in FAMILIES:
        for number, held in enumerate(coloured(intervals(p, family))):
            p.slots[f"{family}{number}"] = held[0].nbytes
            for node in (x.start for x in held):
                node.args = (*node.args[: ops.SLOT[node.target]], number)
    if not p.slots:
        p.note("no buffer begins and ends here")
        return
    if not p.told:
        return
    filled = [n for n in p.nodes if slot_of(n)]
    p.changed(f"{len(filled)} buffers in {len(p.slots)} slots")
    p.note(f"a caching allocator's peak would be {size(dynamic)}")


def intervals(p: Program, family: str) -> list[Interval]:
    """Buffers that get a slot of a family (`FAMILIES`)."""
    return [x for n in p.find(FAMILIES[family]) if (x := _interval(p, n)) is not None]


def coloured(buffers: Iterable[Interval]) -> list[list[Interval]]:
    """What each slot holds, the largest first."""
    slots: list[list[Interval]] = []
    for buffer in sorted(buffers, key=lambda x: (-x.nbytes, x.start)):
        held = next((held for held in slots if _apart(buffer, held)), None)
        if held is None:
            slots.append([buffer])
        else:
            held.append(buffer)
    return slots


def _interval(p: Program, node: Node) -> Interval | None:
    """From the line that fills a buffer to the one that lets go of it, if both are here."""
    if node.target is ops.all_gather:
        ends = [u for u in node.users if u.target is ops.free]
    elif node.target is ops.bucket:
        ends = p.readers(node)
        if p.output in ends or any(x.target is ops.accumulate and becomes(p, x) for x in ends):
            return None
        ends += [u for x in ends if x.target is ops.reduce_scatter for u in x.users if u.target is ops.wait]
    else:
        return None
    return Interval(nbytes(node.meta["val"]), node, max(ends)) if ends else None


def _apart(buffer: Interval, held: list[Interval]) -> bool:
    return all(buffer.end < other.start or other.end < buffer.start for other in held)
