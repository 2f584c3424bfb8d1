"""Seconds until every rank reports a fault: ``python -m tests.helpers.faults`` prints a table (docs/guides/faults.md).

The faults are those of `test_desync`. Seconds count from the beginning of the step that fails, on the rank that
hears of it last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tests import test_desync
from tests.helpers.ranks import Ranks

FAULTS: tuple[tuple[str, Callable[..., Any], tuple[Any, ...]], ...] = (
    ("other layers, compiled", test_desync.layers_differ, ("skip",)),
    ("equal layers in another order", test_desync.layers_differ, ("turned",)),
    ("layers that share a program", test_desync.pieces, (3,)),
    ("programs that ran before", test_desync.known_programs, ()),
    ("one compiles, the others do not", test_desync.one_compiles, ()),
    ("a branch by data, compiled", test_desync.branches, ("compiled",)),
    ("a branch by data, uncompiled", test_desync.branches, ("uncompiled",)),
    ("evaluation on one rank", test_desync.alone, ("evaluation",)),
    ("full_tensor() on one rank", test_desync.alone, ("full_tensor",)),
    ("norms on one rank", test_desync.alone, ("norm",)),
    ("summon_full_params on one rank", test_desync.alone, ("summon",)),
    ("one rank under no_sync", test_desync.one_keeps_back, ("compiled", 3)),
    ("an exception swallowed in forward", test_desync.swallowed, ("forward", [1], 2.0)),
    ("an exception swallowed in backward", test_desync.swallowed, ("backward", [1], 2.0)),
)


def timed(fault: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, float]:
    """The error of a fault on this rank, and the seconds until it came."""
    own, seconds = test_desync.said, [0.0]

    def said(run: Callable[[], Any]) -> str:
        begun = time.perf_counter()
        text = own(run)
        seconds[0] = time.perf_counter() - begun
        return text

    test_desync.said = said
    try:
        found = fault(*args)
    finally:
        test_desync.said = own
    return (found if isinstance(found, str) else found[0]), seconds[0]


def main() -> None:
    print(f"| {'fault':<40} | ranks | seconds | first words |")
    for name, fault, args in FAULTS:
        for world in (2, 4):
            ranks = Ranks(world)
            try:
                answers = ranks.run(timed, fault, args, timeout=90)
            except AssertionError as error:
                print(f"| {name:<40} | {world} | | {str(error).splitlines()[0]} |")
                continue
            finally:
                ranks.stop()
            print(f"| {name:<40} | {world} | {max(s for _, s in answers):.2f} | {answers[0][0][:60]!r} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
