"""Which lines of a program are one kernel, and how many operations it does.

Under ATen lowering each line is a kernel of its own. Inductor fuses neighbours: a run of lines, up to the next product,
attention, collective or wait, counts as one kernel, which reads what comes from outside of it and writes what is read
outside of it; what is read only inside never has memory. That is coarser than Inductor, which fuses by shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
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

_ALONE = (ops.wait, ops.pack, ops.mm, ops.bucket, ops.hold, ops.accumulate, ops.probe, *ops.LAUNCHED)


def together(program: Program, fusing: bool, memo: dict[Any, Any] | None = None) -> Iterator[list[Node]]:
    """Lines that are one kernel together, in order; `free` is none.

    Args:
        program: after any pass.
        fusing: whether neighbours fuse (Inductor) or not (ATen).
        memo: what is known of lines already, by node.
    """
    run: list[Node] = []
    known: dict[Any, Any] = {} if memo is None else memo
    for node in program.nodes:
        if node not in known:
            known[node] = None if not is_line(node) or node.target is ops.free else fusing and fuses(node)
        if known[node] is None:
            continue
        if known[node]:
            run.append(node)
            continue
        if run:
            yield run
            run = []
        yield [node]
    if run:
        yield run


def fused(program: Program, memo: dict[Any, Any] | None = None) -> list[list[Node]]:
    """The kernels that Inductor writes, each as its lines; calls left out. `memo` is as for `together`."""
    known: dict[Any, Any] = {} if memo is None else memo
    return [run for run in together(program, True, known) if known[run[0]]]


def fuses(node: Node) -> bool:
    """Whether Inductor writes the kernel, and may write it together with its neighbours: what it has no lowering for
    (custom operators, sorting, grouped products) is a call of its own. Private in torch (``lowerings``,
    ``fallbacks``); tried on 2.11 to 2.15.
    """
    from torch._inductor import lowering as inductor  # takes a second, which a warm start does without

    target: Any = node.target
    known = target in inductor.lowerings and target not in inductor.fallbacks and operator(node)[0] is target
    return known and node.target not in _ALONE and _formula(target) is None


def total_flops(program: Program) -> int:
    """Operations of all matrix products and attentions."""
    return sum(flops(node) for node in program.nodes if is_line(node))


def flops(node: Node) -> int:
    """Operations of a matrix product, a convolution or an attention, by torch.utils.flop_counter's formulas or those of
    `_FORMULAS`; else 0, and where a formula fails, with a warning.
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
def _formula(target: Any) -> Callable[..., Any] | None:
    """What counts an operator's operations, if it is a product, a convolution or an attention."""
    packet = getattr(target, "overloadpacket", None)
    found: Any = _FORMULAS.get(packet) or flop_registry.get(packet)  # type: ignore[arg-type]
    return _grouped if found is None and "grouped_mm" in str(packet) else found  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """A tensor as its shape; hints for what is symbolic."""
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    return hint(value)


def _attention(q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """q [batch, heads, rows, width]; k, v [batch, kv heads, keys, width], of v its own. Each head of q has a product
    with a k and one with a v, also where several share those.
    """
    batch, heads, rows, width = q
    return int(2 * batch * heads * rows * k[2] * (width + v[3]))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Scores once more, and gradients of scores, v, q and k."""
    batch, heads, rows, width = q
    return int(2 * batch * heads * rows * k[2] * (3 * width + 2 * v[3]))


def _rows_first(count: Callable[..., int], tensors: int, longest: int) -> Callable[..., int]:
    """Of the kernels below: their tensors are [batch, rows, heads, width]. Sequences of many lengths lie behind one
    another, [rows, heads, width]; each is counted with as many keys as the longest, the argument of that number.
    """

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        rows = [torch.Size((*([1] * (4 - len(x))), *x)) for x in args[:tensors]]
        *before, k, v = (torch.Size((x[0], x[2], x[1], x[3])) for x in rows)
        if len(args) > longest and args[longest - 2] is not None:
            k = torch.Size((k[0], k[1], args[longest], k[3]))
        return count(*before, k, v)

    return formula


def _grouped(a: Any, b: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Rows of a, [rows, k], are dealt out to the products of b, [groups, k, n], or to those of their transposes; a
    backward in one operator (that of transformers) gives two such products.
    """
    products = len(out_val) if isinstance(out_val[0], torch.Size) else 1
    return int(2 * a.numel() * b[-1] * products)


def _formulas() -> dict[Any, Callable[..., int]]:
    sdpa = "_scaled_dot_product"
    named: dict[str, Callable[..., int]] = {
        "scaled_dot_product_attention": _attention,
        f"{sdpa}_attention_math": _attention,
        f"{sdpa}_attention_math_for_mps": _attention,
        f"{sdpa}_flash_attention": _attention,
        f"{sdpa}_flash_attention_for_cpu": _attention,
        f"{sdpa}_efficient_attention": _attention,
        f"{sdpa}_cudnn_attention": _attention,
        f"{sdpa}_fused_attention_overrideable": _attention,
        f"{sdpa}_flash_attention_backward": _attention_backward,
        f"{sdpa}_flash_attention_for_cpu_backward": _attention_backward,
        f"{sdpa}_efficient_attention_backward": _attention_backward,
        f"{sdpa}_cudnn_attention_backward": _attention_backward,
        f"{sdpa}_fused_attention_overrideable_backward": _attention_backward,
        "_flash_attention_forward": _rows_first(_attention, 3, 6),
        "_efficient_attention_forward": _rows_first(_attention, 3, 7),
        "_flash_attention_backward": _rows_first(_attention_backward, 4, 9),
        "_efficient_attention_backward": _rows_first(_attention_backward, 4, 9),
    }
    return {getattr(aten, name): count for name, count in named.items() if hasattr(aten, name)}


_FORMULAS = _formulas()
"""Attention. torch's table leaves out that of CPUs, for which programs are traced, and in 2.11 it refuses k and v of
fewer heads than q (``enable_gqa``)."""
