"""defer: compute waits for a reduction later, behind the compute that follows its launch.

Before, compute waits for each unit's reduction at once:

    >---*  u1_gshard              = reduce_scatter u1_gfull, sum          bf16[132096]
    <---o                           wait u1_gshard
    * . .                           accumulate u1_grad, u1_gshard, 1/8
    * . .  mm_2                   = mm threshold_backward_1.T, x          bf16[1024,1024]
    * . .  u0_gfull               = bucket u0                             bf16[1056768]
    * . .                           pack u0_gfull, mm_2, sum_2

After, with lag 1:

    >---*  u1_gshard              = reduce_scatter u1_gfull, sum          bf16[132096]
    * . |  mm_2                   = mm threshold_backward_1.T, x          bf16[1024,1024]
    <---o                           wait u1_gshard
    * . .                           accumulate u1_grad, u1_gshard, 1/8
    * . .  u0_gfull               = bucket u0                             bf16[1056768]
    * . .                           pack u0_gfull, mm_2, sum_2

Why: communication overlaps with compute. Waits only move down, and sums keep their order.
Needs: `reduce`.
Costs: ``lag`` packed gradient buffers are in flight. A wait precedes the buffer that would be one too many; the last
    waits precede the program's outputs (invariant 14).
"""

from __future__ import annotations

from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.program import Program, base_of, by_module
from mfsdp.ir.roles import Kind, Lane, role


def defer(p: Program, *, lag: int = 1) -> None:
    """Moves waits for reductions, and the nodes that use their results, down.

    Args:
        lag: number of modules whose reductions may be in flight behind compute; 0 moves nothing.
    """
    waits = [n for n in p.find(Kind.WAIT) if (r := role(n)) is not None and r.lane in (Lane.REDUCE, Lane.OUTER)]
    if not waits:
        p.note("nothing is reduced here")
        return
    if lag == 0:
        p.note("lag 0")
        return
    chains: dict[Node, list[Node]] = {}  # by gradient buffer: wait of its first reduction, of its second
    for wait in waits:
        chains.setdefault(_bucket(wait), []).append(wait)
    modules = by_module(p, chains)
    for step in range(max(map(len, chains.values()))):
        for i, chain in ((i, chains[bucket]) for i, run in enumerate(modules) for bucket in run):
            if step < len(chain):
                after = i + (step + 1) * lag
                target = modules[after][0] if after < len(modules) else p.output
                p.move([chain[step], *_followers(chain[step])], target)
    p.changed(f"{len(waits)} wait down")
    p.note(f"lag {lag}")


def _bucket(wait: Node) -> Node:
    """Returns the gradient buffer of the reduction that ``wait`` waits for."""
    product = base_of(wait.args[0])  # type: ignore[arg-type]
    while product.target is ops.reduce_scatter:
        product = base_of(product.args[0])  # type: ignore[arg-type]
    return product


def _followers(wait: Node) -> list[Node]:
    """Returns the nodes after a wait that use its result: the next reduction, the accumulate, or views of a buffer that
    was reduced in place.
    """
    product = wait.args[0]
    assert isinstance(product, Node)
    behind = sorted(u for u in product.users if wait < u)
    end = next((i for i, u in enumerate(behind) if u.target is ops.wait), len(behind))
    return behind[:end]
