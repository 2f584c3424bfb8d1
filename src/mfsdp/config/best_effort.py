"""What only tells never ends a run: logs, listings, estimates that nobody decides by, names, reports."""

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
    """What ``tell(*args, **kwargs)`` returns; where it raises, ``otherwise``, and one warning says what is missing.

    It stands where what decides calls what only tells. The same error is logged once in a process, with its traceback
    at debug level.

    Args:
        missing: what is not there because of it, in words: ``the listing after pool``.
        otherwise: what to go on with.
        tell: changes nothing that a run needs.
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
    """Tells who listens what long work has come to."""
    for listen in _listeners:
        only_tells("progress", None, listen, what)


@contextmanager
def listening(listen: Callable[[str], None]) -> Iterator[None]:
    """Inside of the ``with`` long work calls ``listen(what)`` every now and then."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)
