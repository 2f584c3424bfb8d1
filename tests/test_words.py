"""Prose uses the field's words: those on this list are retired, from pages, docstrings, comments and messages."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

RETIRED = {
    "laws?": "invariant",
    "kept back|keeps? back": "unreduced (gradients)",
    "stands? in for|standing in": "joins with zeros",
    "carriers?": "transport",
    "blueprints?": "meta copy",
    "whoever": "(name the caller)",
    "stretch(es)? of compute|in stretches": "subgraph",
    "hangs? on": "depends on",
    "travels? (in|as)": "is gathered in, is communicated in",
    "not come: rank": "missing: rank",
    "codes that last": "persistent FP8 payload",
    "on another way": "diverged",
    "price list": "marginal-cost table",
}
"""Words, and what takes their place."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page; strings and comments of a source file."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                yield token.start[0], " ".join(token.string.split())


def test_retired_words_are_gone():
    source = [*(ROOT / "src" / "mfsdp").rglob("*.py"), *(ROOT / "passes").glob("*.py")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pattern = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
    assert len(source) > 150 and len(pages) > 20
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in (*source, *pages)
        for line, text in prose(path)
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)
