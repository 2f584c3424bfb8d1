"""A CUDA graph on the CPU: records operations and collectives while a step runs, and executes them again.

As on a GPU, recording changes no memory, advances no generator and refuses to wait for a value; the graph owns what the
step allocates, and knows everything else by its address alone, whoever has that memory by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mfsdp.runtime import capturing, execution, kernels, step_prefetch
from mfsdp.runtime.execution import Execution

LAUNCHES = ("gather", "scatter", "all_reduce", "all_to_all")


class CpuGraph(TorchDispatchMode):
    """Records on the CPU, under lowering ``"eager"`` or uncompiled."""

    made: int = 0

    def __init__(self, device: torch.device):
        super().__init__()
        self.nbytes = 0
        self._calls: list[list[Any]] = []
        """Per recorded call: function, arguments, keyword arguments, results."""
        self._born: dict[int, torch.UntypedStorage] = {}
        self._former: dict[int, torch.Tensor] = {}
        """By address, what memory held before the first write."""
        CpuGraph.made += 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def record(self, work: Callable[[], Any], stream: torch.Stream | None) -> Any:
        assert not any(early.ends for early in step_prefetch._under_way), "a wait for what was launched before"
        random = torch.get_rng_state()
        with _lines(self), self:
            out = work()
        launched = [number for number, call in enumerate(self._calls) if isinstance(call[0], str) and call[0] != "wait"]
        assert launched == sorted(call[1][0] for call in self._calls if call[0] == "wait"), "each launch has its wait"
        torch.set_rng_state(random)
        for address, former in self._former.items():
            _at(address, former.numel()).copy_(former)
        self._former.clear()
        self.nbytes = sum(storage.nbytes() for storage in self._born.values())
        return out

    def replay(self) -> None:
        assert not capturing.is_recording()
        launched: dict[int, Any] = {}
        with torch.no_grad():
            for number, (function, args, kwargs, results) in enumerate(self._calls):
                if function == "wait":
                    launched.pop(args[0])()
                    continue
                if isinstance(function, str):
                    group, device, *rest = args
                    line = execution.transport_of(group, device)
                    launched[number] = getattr(line, function)(*rest, execution.current())
                    continue
                new = function(*args, **kwargs)
                if function.namespace == "_c10d_functional":
                    new = tree_map(torch.ops._c10d_functional.wait_tensor, new)
                for old, value in zip(tree_leaves(results), tree_leaves(new), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(value)

    # recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "mfsdp":
            kernel = getattr(kernels, name)
            with self:
                return (execution.dispatched(kernel) if hasattr(kernels.SHOWN, name) else kernel)(*args)
        if name in ("_local_scalar_dense", "nonzero", "equal"):
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        self._save([a for a, schema in _given(func, args, kwargs) if schema.alias_info and schema.alias_info.is_write])
        there = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        fresh = tree_map(lambda t: t if isinstance(t, torch.Tensor) and _storage(t) not in there else None, out)
        for t in tree_leaves(fresh):
            if t is not None:
                self._born[_storage(t)] = t.untyped_storage()
        does = func._schema.is_mutable or any(t is not None for t in tree_leaves(fresh))
        if does and name not in ("wait_tensor", "empty", "empty_strided", "empty_like", "new_empty", "detach"):
            self._note(func, args, kwargs, fresh)
        return out

    def launch(self, what: str, line: Any, args: Sequence[Any], run: Execution) -> Callable[[], None]:
        """Records a collective, which runs at once; returns its end."""
        with no_dispatch():
            self._save(tree_leaves(args))
            end = getattr(line, what)(*args, run)
        self._note(what, (line.name, torch.device("cpu"), *args))
        return partial(self._wait, len(self._calls) - 1, end)

    def _wait(self, number: int, end: Callable[[], None]) -> None:
        with no_dispatch():
            end()
        self._note("wait", (number,))

    def _note(self, function: Any, args: Any, kwargs: Any = None, results: Any = None) -> None:
        with no_dispatch():
            self._calls.append(tree_map(self._by_address, [function, args, kwargs or {}, results]))

    def _save(self, written: Sequence[Any]) -> None:
        for t in tree_leaves(written):
            if isinstance(t, torch.Tensor) and t.numel() and _storage(t) not in self._born:
                memory = t.untyped_storage()
                if memory.data_ptr() not in self._former:
                    with no_dispatch():
                        self._former[memory.data_ptr()] = _at(memory.data_ptr(), memory.nbytes()).clone()

    def _by_address(self, value: Any) -> Any:
        """The same tensor without a reference to its memory, unless the graph owns that."""
        if not isinstance(value, torch.Tensor) or _storage(value) in self._born or not value.numel():
            return value
        memory = value.untyped_storage()
        alias = _at(memory.data_ptr(), memory.nbytes()).untyped_storage()
        place = value.storage_offset(), value.shape, value.stride()
        return torch.empty(0, dtype=value.dtype).set_(alias, *place)  # type: ignore[call-overload]


def _at(address: int, nbytes: int) -> torch.Tensor:
    """Memory at an address, as bytes, whoever owns it."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _given(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The arguments of a call with their schemas."""
    for value, schema in zip(args, func._schema.arguments, strict=False):
        yield value, schema
    for schema in func._schema.arguments:
        if schema.name in kwargs:
            yield kwargs[schema.name], schema


class _Line:
    """A transport whose collectives are recorded."""

    def __init__(self, line: Any, graph: CpuGraph):
        self._line, self._graph = line, graph

    def __getattr__(self, name: str) -> Any:
        if name not in LAUNCHES:
            return getattr(self._line, name)
        return lambda *args: self._graph.launch(name, self._line, args[:-1], args[-1])


@contextmanager
def _lines(graph: CpuGraph) -> Iterator[None]:
    whole = Execution.line
    Execution.line = lambda self, group, device: _Line(whole(self, group, device), graph)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Execution.line = whole  # type: ignore[method-assign]


@contextmanager
def graphs() -> Iterator[None]:
    """Steps on the CPU are captured inside of the ``with``."""
    capturing.GRAPHS["cpu"] = CpuGraph
    try:
        yield
    finally:
        del capturing.GRAPHS["cpu"]
