"""assign_groups: lanes become process groups.

    . * .  u0_full                = all_gather u0_shard                   bf16[1056768]    on group 0
    >-+-*  u1_gshard              = reduce_scatter u1_gfull, sum          bf16[132096]     on group 1, beside it

Why: collectives of one group run one after the other, in the order of their launches, whatever the streams: a gather
that is needed soon would stand behind a reduction that nobody waits for.
Needs: a second group over the same ranks (`fully_shard` makes it).
Costs: the buffers of another communicator.

On CUDA each group brings a stream of its own, and the events are the backend's: a launch waits for what the compute
stream has been given so far, a `wait` makes the compute stream wait for the collective, and what a collective reads and
writes is kept until then (invariants 10 and 11).
"""

from __future__ import annotations

from mfsdp.ir import ops
from mfsdp.ir.program import Program, lane_of
from mfsdp.ir.roles import role


def assign_groups(p: Program) -> None:
    """Sends reductions through the second group of their unit."""
    moved = 0
    for node in p.nodes:
        if node.target in (ops.reduce_scatter, ops.all_reduce):
            r = role(node)
            assert r is not None
            lane = lane_of(node)
            assert lane % 2 == 0, f"{node.name} has been through stream before"
            if p.unit(r.unit).spec.groups[lane + 1]:
                node.args = (*node.args[:2], lane + 1)
                moved += 1
    if moved:
        p.changed(f"{moved} reductions to a group of their own")
    else:
        p.note("no reduction here has a second group")
