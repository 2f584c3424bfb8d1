"""Inductor's graphs, with their compute run by ATen: fast to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from functorch.compile import config as functorch_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache

from mfsdp.compiler import lowering, stitched
from mfsdp.compiler.layer_match import described


@contextmanager
def without_inductor(overwrite: bool = False) -> Iterator[None]:
    """The graphs of ``"stitched"`` and ``"whole"``, cut or not, their compute run by ATen.

    Args:
        overwrite: whether subgraphs overwrite, with NaN, all inputs that they may overwrite.
    """
    before = dict(lowering.LOWERINGS)
    nothing: Callable[..., Any] = _overwriting if overwrite else lowering._kernels
    lowering.LOWERINGS["stitched"] = partial(lowering.inductor, compile=stitched.stitched(_never, nothing))
    lowering.LOWERINGS["whole"] = partial(lowering.inductor, compile=nothing)
    try:
        with functorch_config.patch(enable_autograd_cache=False):  # it may hold what Inductor has compiled
            yield
    finally:
        lowering.LOWERINGS.update(before)


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("it could not be cut")


def _overwriting(graph: torch.fx.GraphModule, example: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
    """Its first result is in the place of the last input that it may overwrite and that is like it."""
    run = lowering._kernels(graph, example, **kwargs)
    dying = [i for i, n in enumerate(graph.graph.find_nodes(op="placeholder")) if n.name.startswith("dying")]

    def body(args: list[Any]) -> Any:
        gone = [args[i] for i in dying]
        out = list(run(args))
        kept = {x.untyped_storage()._cdata for x in out if isinstance(x, torch.Tensor)}
        gone = [x for x in gone if x.untyped_storage()._cdata not in kept and x.is_floating_point()]
        for x in gone:
            x.fill_(float("nan"))
        for i, result in enumerate(out):
            place = next((x for x in reversed(gone) if described(x) == described(result)), None)
            if place is not None:
                out[i] = place.copy_(result)
                break
        return out

    return body


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inductor's code, whose C++ kernels are not compiled, which takes most of the time, and do nothing: for tests that
    look at no values.
    """
    try:
        with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *kernel: lambda *args: None):
            yield
    finally:
        PyCodeCache.cache_clear()  # of modules without kernels
