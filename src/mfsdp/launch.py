"""Runs a program that does not import mfsdp: ``accelerate launch -m mfsdp.launch -m package.train --its arguments``.

``python -m mfsdp.launch -m module args`` and ``python -m mfsdp.launch script.py args`` import
`mfsdp.integrations.accelerate` first, then run the module or script as Python does.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m mfsdp.launch (-m module | script.py) [arguments]"


def main(arguments: Sequence[str]) -> None:
    """Runs the module or script that the arguments name.

    Raises:
        SystemExit: they name none, or a script that does not exist. Errors of the program propagate.
    """
    given = list(arguments)
    is_module = given[:1] == ["-m"]
    program = given[is_module : is_module + 1]
    if not program or program[0].startswith("-"):
        raise SystemExit(USAGE)
    if not is_module and not Path(program[0]).exists():
        raise SystemExit(f"mfsdp.launch: there is no file {program[0]}; a module is named behind -m\n{USAGE}")
    from .integrations import accelerate  # noqa: F401

    sys.argv = given[is_module:]
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
