"""Who looks at operations as they run, and the frames that they are then given.

Note [Names]
Where in its program a run is, is a number (`Run.at`); errors say the name behind it. A frame of that name, for whoever
looks at stacks, costs about as much as an operation itself, so operations get one only while somebody looks: an
observer (`mfsdp.profile`, `mfsdp.ranges`), torch's FlightRecorder if the environment asks for it, and whoever sets the
option ``frames``, for py-spy and debuggers, which come unannounced. Programs always have theirs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..config.best_effort import only_tells


class Observer(Protocol):
    """Whoever wants to see what programs do as they run (`mfsdp.profile`): called instead of it, with it."""

    def program(self, outline: Any, run: Callable[[list[Any]], Any], args: list[Any]) -> Any: ...

    def operation(self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...


_observer: Observer | None = None


def observer() -> Observer | None:
    """Who looks, in all threads."""
    return _observer


def one_by_one() -> bool:
    """Whether somebody looks who can follow one program at a time only, and says so (``one_by_one``)."""
    return getattr(_observer, "one_by_one", False)


@contextmanager
def observed(by: Observer) -> Iterator[None]:
    """Shows an observer every program, and every operation of those that begin inside of the ``with``.

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
    """Calls what it is given in a frame of that name, for whoever looks at stacks: tracebacks, py-spy, and torch's
    FlightRecorder, whose entries have no other room for a unit.
    """

    def named(kernel: Callable[..., Any], *args: Any) -> Any:
        return kernel(*args)

    def rename() -> None:
        named.__name__ = name
        named.__code__ = named.__code__.replace(co_name=name, co_qualname=name)

    only_tells("names in stacks", None, rename)
    return named


def recorded() -> bool:
    """Whether the environment asks torch's FlightRecorder to keep stacks. Newer versions keep some unasked, in which
    operations have their lines in a driver.
    """
    sizes = (os.environ.get(name, "") for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    return any(size.isdecimal() and int(size) > 0 for size in sizes)
