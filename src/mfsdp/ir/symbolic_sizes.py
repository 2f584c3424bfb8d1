"""Estimates symbolic sizes before a program has run.

A size that varies between calls has a hint: its value in the traced call. A data-dependent size (tokens of an expert)
has none; its estimate is a balanced router's: an equal part of the rows that are sent. Without that, it is the upper
bound; without a bound, one. Private in torch (symbolic shapes); tried on 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

_expected: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""Estimates of data-dependent symbols, per tracing (a ``ShapeEnv``)."""


def hint(size: Any) -> Any:
    """Returns a number for a symbolic size; anything else unchanged. Computing with live symbols would add guards, and
    the program would recompile for every shape.
    """
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    node = size.node
    return node.hint if node.hint is not None else _count(node)


def shape_of(value: torch.Tensor) -> torch.Size:
    """Returns the shape as numbers."""
    shape = value.shape
    return shape if all(type(n) is int for n in shape) else torch.Size(hint(n) for n in shape)


def symbolic(value: object) -> bool:
    """Whether a number is symbolic, or a tensor's shape, strides or offset are."""
    if isinstance(value, torch.Tensor):
        return any(map(symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def expect(sizes: Sequence[Any], total: int) -> None:
    """Records the sum of data-dependent sizes; the estimate of each is an equal part."""
    for size in sizes:
        if isinstance(size, torch.SymInt) and size.node.hint is None:
            known = _expected.setdefault(size.node.shape_env, {})
            for symbol in size.node.expr.free_symbols:
                known.setdefault(symbol, max(1, total // len(sizes)))


def _count(node: Any) -> int:
    env, expr = node.shape_env, node.expr
    known = _expected.get(env, {})
    values = {s: known.get(s) or _most(env, s) for s in expr.free_symbols}
    return max(0, int(expr.xreplace(values)))


def _most(env: Any, symbol: Any) -> int:
    if not env.is_unbacked_symint(symbol):
        return int(env.backed_var_to_val[symbol] if hasattr(env, "backed_var_to_val") else env.var_to_val[symbol])
    upper = env.var_to_range[symbol].upper
    return int(upper) if upper.is_finite and upper < 2**40 else 1
