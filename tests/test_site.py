"""The documentation: every page is in the navigation, tables have one width, nothing is too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mfsdp

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def prose(page: Path) -> str:
    """A page without its fenced code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def words(page: Path) -> int:
    return sum(bool(re.search(r"\w", word)) for word in prose(page).split())


def test_navigation_and_llms_txt_name_every_page():
    names = {str(page.relative_to(DOCS)) for page in PAGES}
    assert len(names) > 20
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert set(re.findall(r"\S+\.md", nav)) == names
    assert set(re.findall(r"\]\((\S+\.md)\)", (DOCS / "llms.txt").read_text())) == names


def test_length():
    assert words(ROOT / "README.md") + sum(map(words, PAGES)) <= 25_000
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    glossary = (DOCS / "internals" / "glossary.md").read_text()
    assert 20 <= len(re.findall(r"^\| (?!---|term)", glossary, re.MULTILINE)) <= 40


def tables(text: str) -> list[list[str]]:
    """Runs of lines outside of fenced code that begin with a pipe, each with the line before it."""
    runs: list[list[str]] = []
    before = ""
    for line in text.splitlines():
        row = line.lstrip().startswith("|")
        if row and not before.lstrip().startswith("|"):
            runs.append([before])
        if row:
            runs[-1].append(line.strip())
        before = line
    return runs


def faults(page: str) -> list[str]:
    """What hides its tables from renderers: GitHub's splits cells at pipes that are not escaped, in code too."""
    found = []
    for before, *rows in tables(re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)):
        widths = {len(re.split(r"(?<!\\)\|", row.removeprefix("|").removesuffix("|"))) for row in rows}
        found += [f"text above: {rows[0]}"] * bool(before.strip())
        found += [f"no separator: {rows[:2]}"] * (len(rows) < 3 or not re.fullmatch(r"\|( *:?-+:? *\|)+", rows[1]))
        found += [f"rows of {widths} cells: {rows[0]}"] * (len(widths) != 1)
        found += [f"open at its end: {row}" for row in rows if not row.endswith("|")]
    return found


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_is_one(page):
    assert not faults(page.read_text())


def test_what_is_no_table_is_noticed():
    table = "\n| a | b |\n|---|:-:|\n| `x \\| y` | 2 |\n"
    assert not faults(table) and not faults(f"```\n{table[1:-6]}\n```\n")
    broken = {
        "cells": [table.replace("| 2 |", "|"), table.replace("\\|", "|")],
        "separator": [
            table.replace("|---|:-:|\n", ""),
            table.replace("-", "."),
            table.replace("| `x \\| y` | 2 |\n", ""),
        ],
        "text above": ["text" + table],
        "open at its end": [table.replace("2 |", "2")],
    }
    for word, texts in broken.items():
        for text in texts:
            assert any(word in fault for fault in faults(text)), text


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {f"mfsdp.{name}" for name in mfsdp.__all__} <= set(listed)
