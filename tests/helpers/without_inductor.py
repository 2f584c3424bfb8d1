"""Inductor's graphs, with their compute run by ATen: fast to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mfsdp.compiler import lowering, stitched


@contextmanager
def without_inductor() -> Iterator[None]:
    """The graphs of ``"stitched"`` and ``"whole"``, cut or not, their compute run by ATen."""
    before = dict(lowering.LOWERINGS)
    nothing: Callable[..., Any] = lowering._kernels
    lowering.LOWERINGS["stitched"] = partial(lowering.inductor, compile=stitched.stitched(_never, nothing))
    lowering.LOWERINGS["whole"] = partial(lowering.inductor, compile=nothing)
    try:
        yield
    finally:
        lowering.LOWERINGS.update(before)


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("it could not be cut")
