"""Compiles the kernels of several graphs at the same time.

Note [Parallel compilation]
Inductor hands a graph's kernels to its workers (processes for Triton, threads that run a C++ compiler for CPUs), and
the Python module that it generates waits for them while it is loaded. So code for a second graph is generated only once
the kernels of the first are compiled, and most workers idle. Inside `parallel`, modules do not wait (`handed_out`): all
graphs are generated first, and `parallel` waits at its end.

Inductor's work after the wait moves there too: it bundles Triton's kernels and puts the graph into its cache. So no
entry lacks its kernels, and a failed or interrupted compilation leaves none. With one worker
(``TORCHINDUCTOR_COMPILE_THREADS=1``) each kernel is compiled where it is generated, as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

from functorch.compile import config as functorch_config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import FxGraphCache
from torch._inductor.exc import InductorError
from torch._inductor.triton_bundler import TritonBundler

from ..config.patches import wrap

T = TypeVar("T")

_pending: ContextVar[list[Callable[[], None]] | None] = ContextVar("mfsdp_pending", default=None)
"""Work that this thread does when it leaves `parallel`."""

_graph: ContextVar[_Graph | None] = ContextVar("mfsdp_graph", default=None)
"""The graph that this thread compiles without waiting for its kernels."""


@contextmanager
def parallel() -> Iterator[None]:
    """Compiles the kernels of all graphs that are passed to `handed_out` inside at the same time; waits for them at the
    end.

    Raises:
        InductorError: a kernel does not compile; a note names its graph.
    """
    if _pending.get() is not None:
        yield
        return
    pending: list[Callable[[], None]] = []
    token = _pending.set(pending)
    try:
        yield
    finally:
        _pending.reset(token)
    for finish in pending:
        finish()


def afterwards(function: Callable[[], None]) -> None:
    """Calls a function once all kernels that were handed out are compiled; immediately outside of `parallel`."""
    pending = _pending.get()
    if pending is None:
        function()
    else:
        pending.append(function)


def handed_out(compile: Callable[[], T], name: str) -> T:
    """Compiles a graph; inside `parallel` without waiting for its kernels. The result must not run before `parallel` is
    left.

    Args:
        compile: calls ``compile_fx_inner``.
        name: the graph's name in errors.
    """
    pending = _pending.get()
    # a bundled entry of AOTAutograd's cache stores the kernels as soon as a graph is generated
    if pending is None or get_compile_threads() <= 1 or functorch_config.bundled_autograd_cache:
        with _named(name):
            return compile()
    _install()
    graph = _Graph()
    token = _graph.set(graph)
    try:
        with _named(name):
            return compile()
    finally:
        _graph.reset(token)
        pending.append(partial(graph.finish, name))


class _Graph:
    """The deferred part of the compilation of a graph."""

    def __init__(self) -> None:
        self.waits: list[partial[None]] = []
        self.saves: list[partial[None]] = []

    def finish(self, name: str) -> None:
        """Waits for the kernels and puts the graph into Inductor's cache. Private in torch (``TritonBundler``,
        ``set_triton_bundle``, ``InductorError``); tried on 2.13, read in 2.11, 2.14 and 2.15 (of 2.11 to 2.15).
        """
        with _named(name):
            TritonBundler.begin_compile()
            try:
                for wait in self.waits:
                    wait()
                for save in self.saves:
                    save.args[1].set_triton_bundle(TritonBundler.collect()[0])
                    save()
            except Exception as error:  # as Inductor raises it when it waits itself
                raise InductorError(error, None).with_traceback(error.__traceback__) from None
            finally:
                TritonBundler.end_compile()


@functools.cache
def _install() -> None:
    """Patches generated modules and Inductor's cache to defer their work to `_graph`. Private in torch
    (``AsyncCompile.wait``, which every generated module calls, and ``FxGraphCache._save_graph``, which is called after
    it); tried on 2.13, read in 2.11, 2.14 and 2.15 (of 2.11 to 2.15).
    """
    wrap(AsyncCompile, "wait", partial(_deferred, "waits"))
    wrap(FxGraphCache, "_save_graph", partial(_deferred, "saves"))


def _deferred(kind: str, theirs: Callable[..., None], *args: object) -> None:
    graph = _graph.get()
    if graph is None:
        theirs(*args)
    else:
        getattr(graph, kind).append(partial(theirs, *args))


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"mfsdp: while {name} was compiled")
        raise
