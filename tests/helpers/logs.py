"""Collects the log of `mfsdp`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mfsdp.runtime import watchdog


@contextmanager
def logged() -> Iterator[list[str]]:
    """What this process logs; and afterwards the watch is what it is by itself."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mfsdp").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("mfsdp").removeHandler(handler)
        watchdog.settle(watchdog.Settings.patience, False, None)
