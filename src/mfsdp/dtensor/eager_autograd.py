"""Differentiates functions of parameters outside of ``forward``: penalties, temperatures, a head applied by the loss.

Inside of ``forward`` a parameter is unsharded. Outside it is a `ShardedDTensor`, and the loss may depend on it there
too. ``__torch_function__`` passes every torch function with such an argument through this module. A function to be
differentiated takes one of two paths:

sharded   elementwise functions of equally sharded tensors, and reductions to one value: they run on each rank's rows,
          and autograd differentiates them as usual.
full      all other functions: parameters are gathered first, and the result is a plain tensor on every rank.

Note [Eager autograd]
Data parallelism minimises the sum of all ranks' losses, divided by the number of ranks (or by the divide factor, if
set). A value that leaves the sharded tensors (a full parameter or a reduction of one) is the same on every rank, but
each rank may use it differently. Its derivative is the sum of all ranks' derivatives, divided like every gradient. Both
exits (`_WayOut`, ``full_tensor()``) take that sum in backward, so the backward on the rows continues with equal numbers
on all ranks. ``to_local()`` takes no sum: a rank's computation on its own rows stays local, and so does its gradient.

Python numbers passed to an elementwise function must be equal on all ranks; otherwise each rank would scale its rows
differently. They are recorded, and ranks compare them when a value leaves.

Gradients that arrive at a parameter are added to its ``.grad``, with those of programs (`Gradients.bring`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from . import unsupported

if TYPE_CHECKING:
    from .shard_spec import ShardSpec
    from .sharded_dtensor import ShardedDTensor

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""Arguments of a torch function or operator."""

Function = Callable[..., Any]
"""A torch function, as ``__torch_function__`` gets it."""


class Way(Enum):
    """How a torch function treats a tensor."""

    NATIVE = "attributes, casts, copies, writing in place"
    ELEMENTWISE = "each element by itself"
    REDUCTION = "one value of all elements, or of those along a dimension"
    OTHER = "anything else"


_CASTS = frozenset(["bfloat16", "clone", "contiguous", "copy", "cpu", "cuda", "double", "float", "half", "to", "type"])
_QUESTIONS = frozenset(["allclose", "dim", "equal", "is_same_size", "isclose", "item", "size", "stride"])
_NATIVE = _CASTS | _QUESTIONS | frozenset(["alias", "backward", "detach"])
_NORMS = frozenset(["_foreach_norm", "linalg_vector_norm", "norm"])
_REDUCTIONS = _NORMS | frozenset(["all", "amax", "amin", "any", "count_nonzero", "max", "mean", "min", "sum"])
_OTHER = frozenset(
    ["__contains__", "__getitem__", "__iter__", "__reversed__", "expand_as", "reshape_as", "view_as"]
    + ["mvlgamma", "special_multigammaln"]  # elementwise, but their derivatives are not
)
_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_ATTRIBUTES = frozenset(["__get__", "__set__", "__delete__", "__setitem__"])
_SYNONYMS = {"truediv": "div", "rtruediv": "div", "rdiv": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}
_FACTORIES = ("new_", "empty_", "full_", "ones_", "zeros_", "rand_", "randn_", "randint_")


@cache
def way_of(function: Function) -> Way:
    """Classifies a function as ``__torch_function__`` gets it, by its name and its operator's schema. Private in torch
    (names, ``_schema``, ``torch.utils._pytree``); tried on 2.11 to 2.15.
    """
    name = getattr(function, "__name__", "")
    if function in _VIEWS or name in _OTHER or function is torch.autograd.grad:
        return Way.OTHER
    if name in _REDUCTIONS:
        return Way.REDUCTION
    dunder = name.startswith("__")
    plain = name.strip("_") if dunder else name
    plain = _SYNONYMS.get(plain, plain)
    in_place = name.endswith("_") and not dunder
    if name in _ATTRIBUTES or in_place or plain in _NATIVE or plain.startswith((*_FACTORIES, "_foreach_", "_fused_")):
        return Way.NATIVE
    packet = getattr(aten, plain, None) or (getattr(aten, plain.removeprefix("r"), None) if dunder else None)
    if packet is None:  # a method without an operator, or a Python function
        return Way.NATIVE if hasattr(torch.Tensor, name) else Way.OTHER
    overloads = [getattr(packet, o) for o in packet.overloads()]
    if any(torch.Tag.pointwise in o.tags and len(o._schema.returns) == 1 for o in overloads):
        return Way.ELEMENTWISE
    gives_tensors = any("Tensor" in str(r.type) for o in overloads for r in o._schema.returns)
    return Way.OTHER if gives_tensors else Way.NATIVE


def plainly_native(function: Function, args: Args, kwargs: Kwargs | None, sharded: type[torch.Tensor]) -> bool:
    """Fast check for whether `call`, without gradients, would run the function on the sharded tensors directly.
    Optimizers ask a dozen times per parameter and step.
    """
    way = way_of(function)
    if way is Way.ELEMENTWISE and not kwargs:
        return all(type(a) is sharded or type(a) is float for a in args)
    return way is Way.NATIVE


def call(
    function: Function,
    args: Args,
    kwargs: Kwargs,
    sharded: type[torch.Tensor],
    native: Callable[[Function, Args, Kwargs], Any],
    differentiates: bool,
) -> Any:
    """Calls a torch function that has sharded arguments.

    Args:
        sharded: the class of sharded tensors.
        native: ``native(function, args, kwargs)`` calls it on the sharded tensors directly.
        differentiates: whether autograd can differentiate ``native``.
    """
    way = way_of(function)
    if function is torch.autograd.grad:
        unsupported.derivatives(*args, **kwargs)
        return native(function, args, kwargs)
    unsupported.node_of(getattr(function, "__name__", ""), args)
    if way is Way.NATIVE and not (torch.is_grad_enabled() and _into_plain(function, args, sharded)):
        return native(function, args, kwargs)
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    ours: list[Any] = [t for t in tensors if isinstance(t, sharded)]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        plain = [t for t in tensors if not isinstance(t, sharded) and t.dim()]
        if not _fits_whole_only(function, way, plain, ours):
            return native(function, args, kwargs)
    elif differentiates and len(ours) == len(tensors):
        first = ours[0]._sharding
        if way is Way.ELEMENTWISE and all(first.same(t._sharding) for t in ours):
            out = native(function, args, kwargs)
            out._mfsdp_numbers = _numbers(function, args, kwargs, ours)
            return out
        if way is Way.REDUCTION and _of_all(function, args, kwargs):
            out = native(function, args, kwargs)
            for t in ours:
                compare_numbers(t)
            shardings = [t._sharding for t in ours]
            values = [out] if isinstance(out, torch.Tensor) else out
            if values[0].is_floating_point():
                values = _WayOut.apply(shardings, *values)  # type: ignore[no-untyped-call]
            return values[0] if isinstance(out, torch.Tensor) else list(values)

    def whole(x: Any) -> Any:
        return x.full_tensor() if isinstance(x, sharded) else x  # type: ignore[attr-defined]

    return function(*tree_map(whole, args), **tree_map(whole, kwargs))


def _into_plain(function: Function, args: Args, sharded: type[torch.Tensor]) -> bool:
    """Whether it writes into a plain tensor in place: the result then needs autograd like any other."""
    name = getattr(function, "__name__", "")
    return name.endswith("_") and bool(args) and isinstance(args[0], torch.Tensor) and not isinstance(args[0], sharded)


def _fits_whole_only(function: Function, way: Way, plain: list[torch.Tensor], ours: list[torch.Tensor]) -> bool:
    """Whether a parameter meets plain tensors that its rows do not fit (a product, a broadcast). Optimizers do not do
    this, so what they cannot compute on rows is refused, not gathered.
    """
    if function in _VIEWS or getattr(function, "__name__", "") in _OTHER or way is Way.NATIVE:
        return False
    if not plain or not any(isinstance(t, torch.nn.Parameter) for t in ours):
        return False
    return way is not Way.ELEMENTWISE or any(t.shape != ours[0].shape for t in plain)


def _numbers(function: Function, args: Args, kwargs: Kwargs, ours: Sequence[ShardedDTensor]) -> str:
    """Returns a text of the numbers that a sharded tensor was computed with, ``""`` for none."""
    mine = [repr(x) for x in tree_leaves((args, kwargs)) if _number(x)]
    before = [t._mfsdp_numbers for t in ours if t._mfsdp_numbers]
    return f"{function.__name__}({', '.join([*before, *mine])})" if mine or before else ""


def compare_numbers(t: ShardedDTensor) -> None:
    """Checks that all ranks computed a tensor's rows with the same numbers.

    Raises:
        RuntimeError: they did not.
    """
    if t._mfsdp_numbers and not t._sharding.same_on_all_ranks(zlib.crc32(t._mfsdp_numbers.encode())):
        raise RuntimeError(
            f"mfsdp: ranks have computed with a sharded tensor of shape {tuple(t.shape)} and different numbers, here "
            f"{t._mfsdp_numbers[:200]}. Each would change its own rows only: apply numbers that differ by rank to the "
            "result (a sum, a norm, full_tensor())."
        )


def _of_all(function: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether a reduction covers all elements of every tensor."""
    given = [a for a in args[1:] if a is not None]
    order = function.__name__ in _NORMS and len(args) == 2 and given and (given[0] == "fro" or _number(given[0]))
    named = {k for k, v in kwargs.items() if v is not None} <= {"dtype", "p", "ord"} and kwargs.get("p") != "nuc"
    return named and (not given or bool(order))


def _number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


class _WayOut(torch.autograd.Function):
    """Returns values of sharded tensors that are equal on all ranks; sums their gradients (Note [Eager autograd])."""

    @staticmethod
    def forward(ctx: Any, shardings: list[ShardSpec], *values: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.shardings = shardings
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        alike: dict[Any, list[int]] = {}
        for i, (grad, sharding) in enumerate(zip(grads, ctx.shardings)):
            alike.setdefault((sharding.trains_over, grad.dtype), []).append(i)
        out: list[torch.Tensor | None] = [None] * len(grads)
        for members in alike.values():
            total = ctx.shardings[members[0]].total(torch.stack([grads[i] for i in members]))
            for i, one in zip(members, total.unbind(), strict=True):
                out[i] = one
        return None, *out
