"""Graphs that Inductor compiles one after the other, and whose kernels compile at the same time.

Note [Parallel compilation]
Inductor hands the kernels of a graph to its workers (processes for Triton, threads that run a C++ compiler for CPUs),
and the Python module that it has generated for the graph waits for them while it is loaded. So of several graphs, code
for the second is generated when the kernels of the first are there, and most workers have nothing to do. Inside of
`parallel` modules do not wait (`handed_out`): all graphs are generated first, and what waits is done when it is left.

What Inductor does behind the wait is done there too: it bundles Triton's kernels and puts the graph into its cache. So
no entry is without its kernels, and what fails or is interrupted leaves none. Where there is one worker
(``TORCHINDUCTOR_COMPILE_THREADS=1``) each kernel is compiled where it is generated, as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch._functorch.config as functorch_config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import FxGraphCache
from torch._inductor.exc import InductorError
from torch._inductor.triton_bundler import TritonBundler

_left: ContextVar[list[Callable[[], None]] | None] = ContextVar("mfsdp_left", default=None)
"""What is left to do when `parallel` is left, in this thread."""

_graph: ContextVar[_Graph | None] = ContextVar("mfsdp_graph", default=None)
"""The graph that is being compiled in this thread and is not waited for."""


@contextmanager
def parallel() -> Iterator[None]:
    """Has the kernels of all graphs that are compiled inside with `handed_out` compile at the same time; they are there
    when it is left.

    Raises:
        InductorError: a kernel does not compile; a note says of which graph it is.
    """
    if _left.get() is not None:
        yield
        return
    left: list[Callable[[], None]] = []
    token = _left.set(left)
    try:
        yield
    finally:
        _left.reset(token)
    for finish in left:
        finish()


def afterwards(function: Callable[[], None]) -> None:
    """Calls a function when all kernels that have been handed out are there; at once outside of `parallel`."""
    left = _left.get()
    if left is None:
        function()
    else:
        left.append(function)


def handed_out(compile: Callable[[], Any], name: str) -> Any:
    """Compiles a graph, inside of `parallel` without waiting for its kernels. What is returned must not run before that
    is left.

    Args:
        compile: calls ``compile_fx_inner``.
        name: what errors call the graph.
    """
    left = _left.get()
    # a bundled entry of AOTAutograd's takes the kernels with it as soon as a graph is generated
    if left is None or get_compile_threads() <= 1 or functorch_config.bundled_autograd_cache:
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
        left.append(partial(graph.finish, name))


class _Graph:
    """What has been put off of the compilation of a graph."""

    def __init__(self) -> None:
        self.waits: list[Callable[[], None]] = []
        self.saves: list[partial[None]] = []

    def finish(self, name: str) -> None:
        """Waits for its kernels and puts it into Inductor's cache. Private in torch (``TritonBundler``,
        ``set_triton_bundle``, ``InductorError``); tried on 2.13, read in 2.11, 2.14
        and 2.15 (of 2.11 to 2.15).
        """
        with _named(name):
            TritonBundler.begin_compile()
            try:
                for wait in self.waits:
                    wait()
                for save in self.saves:
                    save.args[1].set_triton_bundle(TritonBundler.collect()[0])
                    save()
            except Exception as error:  # as Inductor raises it where it waits itself
                raise InductorError(error, None).with_traceback(error.__traceback__) from None
            finally:
                TritonBundler.end_compile()


@functools.cache
def _install() -> None:
    """Makes generated modules and Inductor's cache ask `_graph`. Private in torch (``AsyncCompile.wait``, which every
    generated module calls, and ``FxGraphCache._save_graph``, which is called behind it); tried on 2.13, read in
    2.11, 2.14 and 2.15 (of 2.11 to 2.15).
    """
    wait, save = AsyncCompile.wait, FxGraphCache._save_graph

    @functools.wraps(wait)
    def wait_or_put_off(self: AsyncCompile, scope: dict[str, Any]) -> None:
        graph = _graph.get()
        if graph is None:
            wait(self, scope)
        else:
            graph.waits.append(partial(wait, self, scope))

    @functools.wraps(save)
    def save_or_put_off(*args: Any) -> None:
        graph = _graph.get()
        if graph is None:
            save(*args)
        else:
            graph.saves.append(partial(save, *args))

    AsyncCompile.wait = wait_or_put_off  # type: ignore[method-assign]
    FxGraphCache._save_graph = staticmethod(save_or_put_off)  # type: ignore[assignment]


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"mfsdp: while {name} was compiled")
        raise
