"""Recognizes source files of this package, for stack traces."""

from __future__ import annotations

import os

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def ours(file: str) -> bool:
    """Whether a file belongs to this package."""
    return file.startswith(PACKAGE)
