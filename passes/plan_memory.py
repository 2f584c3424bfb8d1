"""plan_memory: gathered buffers and gradient buffers get static buffers.

Before, every buffer is allocated at its launch and freed after its last reader. After, with two units:

    ; peak   ...    slots p0 p1 g0 = 6.05M
    >-* .  u1_full              p0 = all_gather u1_shard                  bf16[1056768]        .
    <-o .                            wait u1_full
    . * .  u0_full              p1 = all_gather u0_shard                  bf16[1056768]        .

Why: forward, backward and every step reuse the same storage. A step allocates and frees none of it, and its size is
    known before the first step.
Needs: the final order of launches and frees (`prefetch`, `defer`, `inplace_wgrad`).
Costs: static buffers stay allocated between steps. Each is as large as the largest buffer assigned to it.

A gradient buffer that is accumulated without a reduce-scatter gets no static buffer: it becomes the accumulator.

The assignment is interval coloring, first fit decreasing: buffers by size, largest first, each into the first static
buffer where it overlaps no other. Equal layers need ``depth + 1`` static buffers, however many layers there are.
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
"""First letters of static buffers' names: of gathered parameters, of gradients."""


class Interval(NamedTuple):
    """A buffer: its bytes, and the nodes that fill and release it, or other values in the same order."""

    nbytes: int
    start: Any
    end: Any


def plan_memory(p: Program, *, on: bool = True) -> None:
    """Assigns static buffers to all buffers whose life begins and ends inside the program.

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
    """Returns the buffers of a family (`FAMILIES`) that get static buffers."""
    return [x for n in p.find(FAMILIES[family]) if (x := _interval(p, n)) is not None]


def coloured(buffers: Iterable[Interval]) -> list[list[Interval]]:
    """Returns the buffers in each static buffer, the largest first."""
    slots: list[list[Interval]] = []
    for buffer in sorted(buffers, key=lambda x: (-x.nbytes, x.start)):
        held = next((held for held in slots if _apart(buffer, held)), None)
        if held is None:
            slots.append([buffer])
        else:
            held.append(buffer)
    return slots


def _interval(p: Program, node: Node) -> Interval | None:
    """Returns the interval from a buffer's first write to its release; ``None`` if one is outside the program."""
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
