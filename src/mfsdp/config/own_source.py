"""Which lines of a stack are this package's own."""

from __future__ import annotations

import os

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def ours(file: str) -> bool:
    """Whether a file is part of this package."""
    return file.startswith(PACKAGE)
