"""Prints the progress of long commands to stderr."""

from __future__ import annotations

import sys
import time

EVERY = 2.0
"""Seconds between two lines and before the first one."""


class Progress:
    """Prints the current work with the seconds since the start, at most once in `EVERY` seconds."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if now - self._last >= EVERY:
            self._last = now
            print(f"mfsdp: {now - self._begun:.0f} s, {what}", file=sys.stderr, flush=True)
