"""Calls code whose errors must not stop training: logs, listings, names, reports, estimates that decide nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

log = logging.getLogger("mfsdp")

T = TypeVar("T")
P = ParamSpec("P")

_said: set[tuple[str, str]] = set()


def only_tells(missing: str, otherwise: T, tell: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns ``tell(*args, **kwargs)``; if it raises, ``otherwise``, with one warning that names what is missing.

    Essential code calls informative code through this function. Each error is logged once per process, with its
    traceback at debug level.

    Args:
        missing: the missing output, for the warning: ``the listing after plan_memory``.
        otherwise: the fallback.
        tell: changes nothing that training needs.
    """
    try:
        return tell(*args, **kwargs)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if (missing, text) not in _said:
            _said.add((missing, text))
            log.warning("mfsdp: without %s: %s. The run goes on; please report this.", missing, text)
            log.debug("mfsdp: without %s", missing, exc_info=True)
        return otherwise


_listeners: list[Callable[[str], None]] = []


def doing(what: str) -> None:
    """Reports progress of long work to listeners."""
    for listen in _listeners:
        only_tells("progress", None, listen, what)


@contextmanager
def listening(listen: Callable[[str], None]) -> Iterator[None]:
    """Calls ``listen(what)`` with the progress of long work inside the ``with``."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)
