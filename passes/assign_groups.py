"""assign_groups: reductions run in a process group of their own.

    . * .  u0_full                = all_gather u0_shard                   bf16[1056768]    on group 0
    >-+-*  u1_gshard              = reduce_scatter u1_gfull, sum          bf16[132096]     on group 1, beside it

Why: the collectives of one process group run in launch order, whatever the streams. A gather that is needed soon would
    wait behind a reduction whose result nothing reads yet.
Needs: a second group over the same ranks, which `fully_shard` creates.
Costs: the buffers of one more communicator.

On CUDA each group has its own stream, and the backend handles events: a launch waits for the work already on the
compute stream; a `wait` makes the compute stream wait for the collective; the collective's inputs and outputs stay
alive until then (invariants 10 and 11).
"""

from __future__ import annotations

from mfsdp.config.units import GroupIndex
from mfsdp.ir import ops
from mfsdp.ir.program import Program, lane_of


def assign_groups(p: Program) -> None:
    """Moves reductions to the second process group of their unit."""
    moved = 0
    for node in p.calls(ops.reduce_scatter, ops.all_reduce):
        second = GroupIndex(lane_of(node)).reduce
        assert lane_of(node) != second, f"{node.name} has been through this pass before"
        if p.spec_of(node).groups[second]:
            node.args = (*node.args[:2], int(second))
            moved += 1
    if moved:
        p.changed(f"{moved} reductions to a group of their own")
    else:
        p.note("no reduction here has a second group")
