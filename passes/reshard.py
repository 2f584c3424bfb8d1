"""reshard: a gathered buffer is freed right after its last reader.

    * . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]
    * . .                           free u0_full
    * . .  relu                   = relu addmm                            bf16[256,1024]

Why: sharding saves memory this way: only the units that compute stay gathered.
Needs: `gather`, and that no view of a parameter leaves the graph (invariant 6). Capture ensures this: it recomputes
    every chain of views and casts that depends on parameters alone.
Costs: backward gathers again.

A unit with ``reshard_after_forward=False`` stays gathered between forward and backward: forward outputs the views that
backward reads, and they are freed when autograd releases them.
"""

from __future__ import annotations

from mfsdp.ir import ops
from mfsdp.ir.program import Program
from mfsdp.ir.roles import Kind, Role, unit_of


def reshard(p: Program) -> None:
    """Inserts a `free` after the last reader of every gathered buffer."""
    freed = kept = 0
    for full in p.find(Kind.FULL):
        readers = p.readers(full)
        if p.output in readers:
            kept += 1
        else:
            p.insert(ops.free, (full,), readers[-1].next, Role(Kind.FREE, unit_of(full)))
            freed += 1
    if kept:
        p.note(f"{kept} kept for backward")
    elif not freed:
        p.note("nothing is gathered here")
