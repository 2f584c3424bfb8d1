"""inplace_wgrad: matrix products write weight gradients directly into the gradient buffer.

Before, a gradient is computed, then copied:

    * . .  mm_1                   = mm threshold_backward.T, relu         bf16[1024,1024]
    * . .  sum_1                  = sum threshold_backward, [0], True     bf16[1,1024]
    * . .  u1_gfull               = bucket u1                             bf16[1056768]
    * . .                           pack u1_gfull, mm_1, sum_1

After, the matrix product writes in place, and only the small sum is copied:

    * . .  u1_gfull               = bucket u1                             bf16[1056768]
    * . .                           mm u1_gfull@0, threshold_backward.T, relu
    * . .  sum_1                  = sum threshold_backward, [0], True     bf16[1,1024]
    * . .                           pack u1_gfull, sum_1

Why: most gradient bytes belong to matrices; a second copy of them costs memory and time.
Needs: `reduce`. It runs after `defer`, so that waits already precede the buffer that they free memory for.
Costs: the buffer is allocated at the unit's first product, but not before the previous pack: a root unit whose head
    comes first in backward and whose embedding comes last would hold its buffer through all of backward.

A product qualifies if nothing else reads it, the views between it and the gradient keep its elements in place, and it
has the communication dtype. On CUDA a 16-bit product into float32 qualifies too, without rounding in between
(`ops.multiplies`). Kernels of other gradients (sums, embeddings, convolutions, sums over uses) allocate their own
output, which is copied.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mfsdp.ir import ops
from mfsdp.ir.byte_costs import nbytes, size
from mfsdp.ir.program import Program, base_of
from mfsdp.ir.roles import Kind, Role, unit_of

aten = torch.ops.aten


def inplace_wgrad(p: Program, *, wide: bool | None = None) -> None:
    """Turns matrix products that end in a gradient buffer into writes to that buffer.

    Args:
        wide: whether 16-bit products can be written in float32; ``None``: as the tensors' device can.
    """
    copied = written = 0
    packs = p.calls(ops.pack)
    if not packs:
        p.note("no gradients are packed here")
        return
    last: Node | None = None
    for pack in packs:
        gfull, grads, offsets, scale = pack.args
        products = [_product(p, g, pack, wide) if scale == 1.0 else None for g in grads]  # type: ignore[union-attr, arg-type]
        if last is not None:
            products = [x if x is not None and last < x else None for x in products]
        last = pack.next
        first = min((x for x in products if x is not None), default=None)
        if first is not None:
            p.move([gfull], first)  # type: ignore[list-item]
        rest: list[tuple[Node, int]] = []
        for grad, offset, product in zip(grads, offsets, products, strict=True):  # type: ignore[arg-type]
            if product is None:
                rest.append((grad, offset))
                copied += nbytes(grad.meta["val"])
            else:
                written += nbytes(grad.meta["val"])
                _write(p, gfull, offset, product)  # type: ignore[arg-type]
        pack.args = (gfull, [g for g, _ in rest], [o for _, o in rest], scale)
        _erase_unread(p, [g for g in grads if g not in pack.args[1]])  # type: ignore
        if not rest:
            p.erase(pack)
    p.note(f"{size(written)} written in place, {size(copied)} copied")


def _product(p: Program, grad: Node, pack: Node, wide: bool | None) -> Node | None:
    """Returns the matrix product that computes a gradient; ``None`` if there is none that may write to the gradient's
    place.
    """
    product, value = base_of(grad), grad.meta["val"]
    gfull = pack.args[0]
    if product.target is not aten.mm.default or p.readers(product) != [pack]:
        return None
    assert isinstance(gfull, Node)
    alike = value.is_contiguous() and value.numel() == product.meta["val"].numel()
    return product if alike and ops.multiplies(value, gfull.meta["val"].dtype, wide) else None


def _write(p: Program, gfull: Node, offset: int, product: Node) -> None:
    value = product.meta["val"]
    place = (gfull, offset, list(value.shape), list(value.stride()))
    p.insert(ops.mm, (*place, *product.args), product, Role(Kind.PACK, unit_of(gfull)))


def _erase_unread(p: Program, nodes: list[Node]) -> None:
    """Erases values that nothing reads, and the nodes that only they were views of."""
    for node in nodes:
        while node.op == "call_function" and not node.users:
            parent = node.args[0]
            p.erase(node)
            if not isinstance(parent, Node) or base_of(parent).target is not aten.mm.default:
                break
            node = parent
