"""Groups a program's lines into kernels and counts their floating-point operations.

With ATen lowering each line is one kernel. With Inductor, consecutive lines up to the next matrix product, attention,
collective or wait count as one fused kernel. It reads values from outside and writes values that are read outside;
values read only inside take no memory. This is coarser than Inductor, which fuses by shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ..config.best_effort import only_tells
from ..ir import ops
from ..ir.byte_costs import is_line
from ..ir.program import Program, operator
from ..ir.symbolic_sizes import hint, shape_of

aten = torch.ops.aten

_ALONE = (ops.wait, ops.pack, ops.mm, ops.bucket, ops.hold, ops.add_tangent, ops.accumulate, ops.probe, *ops.LAUNCHED)


def together(program: Program, fusing: bool, memo: dict[Any, Any] | None = None) -> Iterator[list[Node]]:
    """Yields the lines of each kernel, in order; `free` is no kernel.

    Args:
        program: after any pass.
        fusing: whether neighbours fuse (Inductor) or not (ATen).
        memo: cache of fusion decisions, by node.
    """
    known: dict[Any, Any] = {} if memo is None else memo
    for node in program.nodes:
        if node not in known:
            known[node] = None if not is_line(node) or node.target is ops.free else fusing and fuses(node)
    for fuse, run in groupby((n for n in program.nodes if known[n] is not None), key=known.__getitem__):
        if fuse:
            yield list(run)
        else:
            yield from ([node] for node in run)


def fused(program: Program, memo: dict[Any, Any] | None = None) -> list[list[Node]]:
    """Returns the lines of each kernel that Inductor generates, without calls. ``memo`` is as for `together`."""
    known: dict[Any, Any] = {} if memo is None else memo
    return [run for run in together(program, True, known) if known[run[0]]]


def fuses(node: Node) -> bool:
    """Returns whether Inductor generates the kernel and may fuse it with its neighbours. Operators without a lowering
    (custom operators, sorting, grouped products) are separate calls. Private in torch (``lowerings``, ``fallbacks``);
    tried on 2.11 to 2.15.
    """
    from torch._inductor import lowering as inductor  # the import takes a second; a warm start avoids it

    target: Any = node.target
    known = target in inductor.lowerings and target not in inductor.fallbacks and operator(node)[0] is target
    return known and node.target not in _ALONE and _formula(target) is None


def total_flops(program: Program) -> int:
    """Returns the floating-point operations of all matrix products, convolutions and attentions."""
    return sum(flops(node) for node in program.nodes if is_line(node))


def flops(node: Node) -> int:
    """Returns the floating-point operations of a matrix product, a convolution or an attention. Returns 0 for other
    lines, and, with a warning, if a formula fails.
    """
    if node.target is ops.mm:
        a, b = (_plain(x.meta["val"]) for x in node.args[4:6])  # type: ignore[union-attr]
        return int(2 * a.numel() * b[-1])
    target, args, kwargs = operator(node)
    formula = _formula(target)
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: n.meta.get("val"))
    args, kwargs, out = pytree.tree_map(_plain, (args, kwargs, node.meta.get("val")))
    return int(only_tells(f"operations of {target}", 0, formula, *args, **kwargs, out_val=out))


@cache
def _formula(target: object) -> Callable[..., int] | None:
    """Returns the formula for an operator's operations; ``None`` unless it is a product, convolution or attention.

    torch's table has no attention of CPUs, with which programs are traced, and in 2.11 rejects k and v with fewer heads
    than q (``enable_gqa``).
    """
    packet = getattr(target, "overloadpacket", None)
    name = str(packet).removeprefix("aten.")
    attention = _attention_backward if name.endswith("_backward") else _attention
    if name.startswith(("scaled_dot_product_", "_scaled_dot_product_")):
        return attention
    if name in _ROWS_FIRST:
        return _rows_first(attention, *_ROWS_FIRST[name])
    found: Callable[..., int] | None = flop_registry.get(packet)
    return _grouped if found is None and "grouped_mm" in name else found


_ROWS_FIRST = {
    "_flash_attention_forward": (3, 6),
    "_efficient_attention_forward": (3, 7),
    "_flash_attention_backward": (4, 9),
    "_efficient_attention_backward": (4, 9),
}
"""Arguments of `_rows_first` by operator."""


def _plain(value: Any) -> Any:
    """Returns a tensor's shape, or a value's hint if it is symbolic."""
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    return hint(value)


def _attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Counts attention with q [batch, heads, rows, width] and k, v [batch, kv heads, keys, width]; v may have another
    width. Each head of q has one product with k and one with v, also if heads share k and v.
    """
    batch, heads, rows, width = q
    return int(2 * batch * heads * rows * k[2] * (width + v[3]))


def _attention_backward(grad: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Counts the backward: recomputed scores, and gradients of scores, v, q and k."""
    batch, heads, rows, width = q
    return int(2 * batch * heads * rows * k[2] * (3 * width + 2 * v[3]))


def _rows_first(count: Callable[..., int], tensors: int, longest: int) -> Callable[..., int]:
    """Returns a formula for kernels whose tensors are [batch, rows, heads, width]. Packed sequences of different
    lengths are [rows, heads, width]; each counts with as many keys as the longest.

    Args:
        count: formula for tensors with heads before rows.
        tensors: number of leading tensor arguments.
        longest: index of the argument with the longest sequence's length.
    """

    def formula(*args: Any, **_: object) -> int:
        rows = [torch.Size((*([1] * (4 - len(x))), *x)) for x in args[:tensors]]
        *before, k, v = (torch.Size((x[0], x[2], x[1], x[3])) for x in rows)
        if len(args) > longest and args[longest - 2] is not None:
            k = torch.Size((k[0], k[1], args[longest], k[3]))
        return count(*before, k, v)

    return formula


def _grouped(a: torch.Size, b: torch.Size, *_: object, out_val: Sequence[object], **__: object) -> int:
    """Counts a grouped product: rows of a [rows, k] are distributed over the matrices of b [groups, k, n] or their
    transposes. A backward in one operator (in transformers) returns two such products.
    """
    products = len(out_val) if isinstance(out_val[0], torch.Size) else 1
    return int(2 * a.numel() * b[-1] * products)
