"""The documentation: every page is in the navigation, tables have one width, nothing is too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_tables_have_a_separator_and_one_width(page):
    lines = prose(page).splitlines()
    tables = "\n".join(line if line.startswith("|") else "" for line in lines).strip().split("\n\n")
    for table in (t.strip().splitlines() for t in tables if t.strip()):
        widths = {len(re.sub(r"\\\||`[^`]*`", "", row).strip().strip("|").split("|")) for row in table}
        assert len(table) > 2 and re.fullmatch(r"\|[\s:|-]+\|", table[1]), f"no separator: {table[:2]}"
        assert len(widths) == 1, f"rows of {widths} cells: {table[0]}"
