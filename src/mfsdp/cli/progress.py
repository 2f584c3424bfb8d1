"""What commands that take minutes say meanwhile, on stderr."""

from __future__ import annotations

import sys
import time

EVERY = 2.0
"""Seconds between two lines, and before the first."""


class Progress:
    """Prints what work has come to, with the seconds since it began; seldom."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if now - self._last >= EVERY:
            self._last = now
            print(f"mfsdp: {now - self._begun:.0f} s, {what}", file=sys.stderr, flush=True)
