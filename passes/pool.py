"""pool: gathered buffers and gradient buffers get static slots.

Before, every buffer is allocated when it is launched and freed after its last reader. After, with two units:

    ; peak   ...    slots p0 p1 g0 = 6.05M
    >-* .  u1_full              p0 = all_gather u1_shard                  bf16[1056768]        .
    <-o .                            wait u1_full
    . * .  u0_full              p1 = all_gather u0_shard                  bf16[1056768]        .

Why: the same storage serves forward, backward and every step: nothing is allocated or freed on the way, and what is
needed is known before the first step.
Needs: the final order of launches and frees (`prefetch`, `defer`, `bucket`).
Costs: slots stay allocated between steps. A slot is as large as the largest buffer in it.

Slots are coloured as intervals are: buffers by size, largest first, each into the first slot where it overlaps nobody
(first fit decreasing). Identical layers need ``depth + 1`` slots, however many there are.
"""

from __future__ import annotations

from torch.fx import Node

from mfsdp.graph import ops
from mfsdp.graph.cost import lines, nbytes, peak, size
from mfsdp.graph.program import Program, slot_of
from mfsdp.graph.roles import Kind

Interval = tuple[Node, Node]


def pool(p: Program, *, on: bool = True) -> None:
    """Gives slots to all buffers that begin and end inside of the program.

    Args:
        on: ``False`` leaves them to the caching allocator.
    """
    if not on:
        p.note("off")
        return
    p.slots.clear()
    dynamic = peak(lines(p)) if p.told else 0
    for family, kind in (("p", Kind.FULL), ("g", Kind.GFULL)):
        intervals = [x for n in p.find(kind) if (x := _interval(p, n)) is not None]
        slots: list[list[Interval]] = []
        for interval in sorted(intervals, key=lambda x: (-nbytes(x[0].meta["val"]), x[0])):
            number = next((i for i, held in enumerate(slots) if _apart(interval, held)), len(slots))
            if number == len(slots):
                slots.append([])
                p.slots[f"{family}{number}"] = nbytes(interval[0].meta["val"])
            slots[number].append(interval)
            node = interval[0]
            node.args = (*node.args[: ops.SLOT[node.target]], number)  # type: ignore[index]
    if not p.slots:
        p.note("no buffer begins and ends here")
        return
    if not p.told:
        return
    filled = [n for n in p.nodes if slot_of(n)]
    p.changed(f"{len(filled)} buffers in {len(p.slots)} slots")
    p.note(f"a caching allocator's peak would be {size(dynamic)}")


def _interval(p: Program, node: Node) -> Interval | None:
    """From the line that fills a buffer to the one that lets go of it, if both are here."""
    if node.target is ops.all_gather:
        ends = [u for u in node.users if u.target is ops.free]
    elif node.target is ops.bucket:
        ends = p.readers(node)
        if p.output in ends:
            return None
        ends += [u for x in ends if x.target is ops.reduce_scatter for u in x.users if u.target is ops.wait]
    else:
        return None
    return (node, max(ends)) if ends else None


def _apart(interval: Interval, held: list[Interval]) -> bool:
    start, end = interval
    return all(end < a or b < start for a, b in held)
