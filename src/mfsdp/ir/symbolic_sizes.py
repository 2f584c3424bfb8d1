"""Sizes that are symbols: what to count with, before a program has run.

A size that varies from call to call has a hint, that of the call that was traced. A size that depends on data (tokens
that an expert gets) has none: it is expected to be what a balanced router would give, an equal part of the rows that
are sent; else the most that is possible; else one. Private in torch (symbolic shapes); tried on 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

_expected: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""By the tracing that has made them (a ``ShapeEnv``): symbols that depend on data."""


def hint(size: Any) -> Any:
    """A number for a symbolic one; anything else as it is. Whoever computes with live symbols puts guards on them, and
    the program is compiled anew for every shape.
    """
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    node = size.node
    return node.hint if node.hint is not None else _count(node)


def shape_of(value: torch.Tensor) -> torch.Size:
    """The shape, as numbers."""
    shape = value.shape
    return shape if all(type(n) is int for n in shape) else torch.Size(hint(n) for n in shape)


def expect(sizes: Sequence[Any], total: int) -> None:
    """Says of data-dependent sizes what they add up to; each is expected to be an equal part."""
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
