"""Evaluates constants of Dynamo's graph on the CPU: in full, by tile, or as bounds of the elements of each tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

TILE = 256
"""Rows and columns of a tile."""

MAX_ELEMENTS = 2**28
"""Limit of elements evaluated one by one, and of bytes of a value evaluated in full: about a second on one core."""


class Stays(Exception):
    """A mask is not known at compile time; the message says why."""


def name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def shape_of(node: fx.Node) -> torch.Size:
    return node.meta["example_value"].shape  # type: ignore[no-any-return]


class Pure(TorchDispatchMode):
    """Refuses operators that draw random numbers and operators that are not torch's own. Private in torch
    (``TorchDispatchMode``); tried on 2.13, there in 2.11 to 2.15.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Stays(f"{func} draws random numbers")
        if func.namespace != "aten":
            raise Stays(f"it depends on {func}")
        return func(*args, **(kwargs or {}))


_AND_OR = ("and_", "or_", "logical_and", "logical_or", "bitwise_and", "bitwise_or")
_NOT = ("invert", "logical_not", "bitwise_not")
_COPIES = ("to", "bool", "float", "contiguous", "clone", "expand")

_MONOTONE = {
    "le": "-+", "lt": "-+", "ge": "+-", "gt": "+-", "add": "++", "sub": "+-",
    **dict.fromkeys(_AND_OR, "++"), **dict.fromkeys(_NOT, "-"),
}  # fmt: skip
"""By an operator's name, for each argument whether the result rises or falls with it."""

_DERIVED = {*_MONOTONE, *_COPIES, "eq", "ne", "where", "masked_fill"}
"""Operators for which bounds may follow from bounds of their arguments."""

_POINTWISE = _DERIVED | {"xor", "logical_xor", "neg", "mul", "truediv", "floordiv", "mod", "abs"}
"""Names of elementwise operators: a result depends only on the elements at its own position, with broadcasting."""

Bounds = tuple[torch.Tensor, torch.Tensor]


class Values:
    """Values of nodes in Dynamo's graph: in full, by tile, or as bounds of each tile. All broadcast to the node's
    shape; leading axes along which all elements are equal are cut to one.
    """

    def __init__(self, operands: Mapping[fx.Node, fx.Node]):
        self.operands = operands
        self._whole: dict[fx.Node, Any] = {}
        self._leaves: dict[fx.Node, torch.Tensor] = {}
        self._bounds: dict[fx.Node, Bounds] = {}

    def whole(self, node: fx.Node) -> Any:
        """Returns the full value."""
        node = self._outer(node)
        if node not in self._whole:
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor) and value.numel() * value.itemsize > MAX_ELEMENTS:
                raise Stays(f"{name_of(node)} {list(value.shape)} is too large to be evaluated while compiling")
            self._whole[node] = _called(node, self.whole)
        return self._whole[node]

    def tile(self, node: fx.Node, i: int, j: int) -> torch.Tensor:
        """Returns the tile in tile row i and tile column j."""
        node = self._outer(node)
        if _in_pieces(node):
            if name_of(node) == "expand":
                return _at(self.tile(node.args[0], i, j), node)  # type: ignore[arg-type]
            return _called(node, lambda x: self.tile(x, i, j) if _is_tensor(x) else self.whole(x))  # type: ignore[no-any-return]
        value = self._leaf(node)
        for axis, number in ((-2, i), (-1, j)):
            if value.dim() >= -axis and value.shape[axis] > 1:
                start = number * TILE
                value = value.narrow(axis, start, min(TILE, value.shape[axis] - start))
        return value

    def bounds(self, node: fx.Node) -> Bounds:
        """Returns a lower and an upper bound of the elements of every tile."""
        node = self._outer(node)
        if node not in self._bounds:
            found = None
            if _in_pieces(node) and name_of(node) in _DERIVED and not node.kwargs.keys() - {"device", "dtype"}:
                values = node.args[:1] if name_of(node) in _COPIES else node.args
                found = _derived(node, [self._pair(x) for x in values])
            self._bounds[node] = found or self._bounds_of_all(node)
        return self._bounds[node]

    def _pair(self, x: Argument) -> Bounds:
        if isinstance(x, fx.Node) and _is_tensor(x):
            return self.bounds(x)
        return torch.as_tensor(x), torch.as_tensor(x)

    def _bounds_of_all(self, node: fx.Node) -> Bounds:
        low = high = self._leaf(node)
        for axis in (-1, -2):
            if low.dim() >= -axis and (size := low.shape[axis]) > 1:
                places = torch.arange(-(-size // TILE) * TILE).clamp_(max=size - 1)
                low, high = (
                    f(x.index_select(axis, places).unflatten(axis, (-1, TILE)), axis)
                    for f, x in ((torch.amin, low), (torch.amax, high))
                )
        return low, high

    def _leaf(self, node: fx.Node) -> torch.Tensor:
        if node not in self._leaves:
            value = self.whole(node)
            for axis in range(value.dim() - 2):
                first = value.narrow(axis, 0, 1)
                value = first if value.shape[axis] > 1 and bool((value == first).all()) else value
            self._leaves[node] = value
        return self._leaves[node]

    def _outer(self, node: fx.Node) -> fx.Node:
        while node in self.operands:
            node = self.operands[node]
        return node


def _in_pieces(node: fx.Node) -> bool:
    """Returns whether a value is large and the result of an elementwise operator."""
    return name_of(node) in _POINTWISE and node.meta["example_value"].numel() > TILE**2


def _at(value: torch.Tensor, node: fx.Node) -> torch.Tensor:
    return value[(None,) * (len(shape_of(node)) - value.dim())]


def _derived(node: fx.Node, given: Sequence[Bounds]) -> Bounds | None:
    """Returns bounds that follow from bounds of the arguments; ``None`` if they do not for these dtypes."""
    name, dtype = name_of(node), node.meta["example_value"].dtype
    (a, a_high), (b, b_high) = given[0], given[-1]
    if name in _COPIES:
        if dtype != a.dtype != torch.bool:
            return None
        return _at(a.to(dtype), node), _at(a_high.to(dtype), node)
    if name in ("eq", "ne"):
        equal, possible = (a == b_high) & (a_high == b), (a <= b_high) & (b <= a_high)
        return (equal, possible) if name == "eq" else (~possible, ~equal)
    if name in ("where", "masked_fill"):
        own = node.op == "call_method"  # x.where(condition, y)
        order = (1, 2, 0) if name == "masked_fill" else (1, 0, 2) if own else (0, 1, 2)
        (always, ever), yes, no = (given[i] for i in order)
        (a, a_high), (b, b_high) = ((low.to(dtype), high.to(dtype)) for low, high in (yes, no))
        low, high = torch.minimum(a, b), torch.maximum(a_high, b_high)
        return (
            torch.where(always, a, torch.where(ever, low, b)),
            torch.where(always, a_high, torch.where(ever, high, b_high)),
        )
    if name in _AND_OR + _NOT and any(low.dtype != torch.bool for low, _ in given):
        return None
    if name in ("add", "sub") and any(low.is_floating_point() for low, _ in given):
        return None
    ordered = [pair if sign == "+" else pair[::-1] for pair, sign in zip(given, _MONOTONE[name], strict=True)]
    low, high = (_run(node, args) for args in zip(*ordered, strict=True))
    return low, high


def _run(node: fx.Node, args: Sequence[Any], **kwargs: Any) -> Any:
    """Calls a node's operator with other arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _called(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Runs a node on the CPU with the values of its arguments."""

    def value(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return value_of(x)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    args: Any = map_aggregate(node.args, value)
    kwargs: Any = {
        k: "cpu" if k == "device" and v is not None else map_aggregate(v, value) for k, v in node.kwargs.items()
    }
    return _run(node, args, **kwargs)
