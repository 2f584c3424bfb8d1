"""Observers of operations, and named Python frames for operations that are observed.

Note [Names]
An execution knows its operation by number (`Execution.at`); errors look up the name. A Python frame of that name costs
about as much as the operation. So operations run in one only for an observer (`mfsdp.profile`, `mfsdp.ranges`), if the
environment enables torch's FlightRecorder, or with the option ``frames``, for py-spy and debuggers, which attach
unannounced. Programs always run in one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..config.best_effort import only_tells


class Observer(Protocol):
    """Called in place of a program or operation, which it must run (`mfsdp.profile`)."""

    def program(self, outline: Any, run: Callable[[list[Any]], Any], args: list[Any]) -> Any: ...

    def operation(self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...


_observer: Observer | None = None


def observer() -> Observer | None:
    """The observer, for all threads."""
    return _observer


def one_by_one() -> bool:
    """Whether the observer can follow only one program at a time (``one_by_one``)."""
    return getattr(_observer, "one_by_one", False)


@contextmanager
def observed(by: Observer) -> Iterator[None]:
    """Shows an observer every program that begins inside of the ``with``, and its operations.

    Raises:
        RuntimeError: there is one already.
    """
    global _observer
    if _observer is not None:
        raise RuntimeError("mfsdp.profile: another profile is running; end it first")
    _observer = by
    try:
        yield
    finally:
        _observer = None


@functools.cache
def frame(name: str) -> Callable[..., Any]:
    """Calls its argument in a frame of that name, for tracebacks, py-spy, and torch's FlightRecorder, whose entries
    have no other field for a unit.
    """

    def named(kernel: Callable[..., Any], *args: Any) -> Any:
        return kernel(*args)

    def rename() -> None:
        named.__name__ = name
        named.__code__ = named.__code__.replace(co_name=name, co_qualname=name)

    only_tells("names in stacks", None, rename)
    return named


def recorded() -> bool:
    """Whether the environment makes torch's FlightRecorder keep stacks. Newer versions keep some by default; there,
    operations appear as lines of a driver.
    """
    sizes = (os.environ.get(name, "") for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    return any(size.isdecimal() and int(size) > 0 for size in sizes)
