"""The command line: ``python -m mfsdp`` or the script ``mfsdp``. Commands import their dependencies when they run."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence

from .. import __version__
from ..config.best_effort import listening
from . import convert, explain, measure, show

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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0 on success, or 1 after printing one line about an error that the user can fix."""
    parser = argparse.ArgumentParser(prog="mfsdp", description="Sharded training as a compiler: tools around it.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for add in (
        explain.explain,
        explain.plan,
        measure.measure,
        show.show,
        show.diff,
        convert.convert,
    ):
        add(commands)
    args = parser.parse_args(argv)
    try:
        with listening(Progress()):
            args.run(args)
    except BrokenPipeError:  # head, less
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, RuntimeError, ImportError, re.error) as error:
        print(f"mfsdp: {str(error).removeprefix('mfsdp: ')}", file=sys.stderr)
        return 1
    return 0
