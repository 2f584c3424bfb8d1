"""``mfsdp show`` and ``mfsdp diff``: show and compare the listings that ``MFSDP_DUMP`` wrote."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .arguments import Commands, command


def show(commands: Commands) -> None:
    add = command(commands, "show", "the listings in a folder that MFSDP_DUMP has filled", _show)
    add("folder")
    add("--phase", choices=["forward", "backward", "inference"], help="only this one")
    add("--stage", help="after this pass (default: the last); 'all' for every one")


def diff(commands: Commands) -> None:
    add = command(commands, "diff", "what differs between two listings, or between the last ones of two folders", _diff)
    add("a")
    add("b")
    add("--live", action="store_true", help="compare lanes and memory too, which change with everything before them")


_FILE = re.compile(r"graph(\d+)\.(forward|backward|inference)\.(\d+)\.(\w+)\.txt")


def _dumped(folder: Path) -> dict[tuple[int, str], list[tuple[str, Path]]]:
    """Returns a dump's files by graph and phase, in the order of the passes."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; MFSDP_DUMP={folder} during a run makes it")
    found: dict[tuple[int, str], list[tuple[int, str, Path]]] = {}
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match:
            found.setdefault((int(match[1]), match[2]), []).append((int(match[3]), match[4], path))
    if not found:
        raise FileNotFoundError(f"{folder} holds no listings; MFSDP_DUMP={folder} during a run makes them")
    order = {"forward": 0, "backward": 1, "inference": 2}
    keys = sorted(found, key=lambda k: (k[0], order[k[1]]))
    return {key: [(stage, path) for _, stage, path in sorted(found[key])] for key in keys}


def _show(args: argparse.Namespace) -> None:
    shown = False
    for (_, phase), stages in _dumped(Path(args.folder)).items():
        if args.phase not in (None, phase):
            continue
        for stage, path in stages if args.stage else stages[-1:]:
            if args.stage in (None, "all", stage):
                shown = True
                print("\n".join(_coloured(path.read_text().splitlines())))
    if not shown:
        of, after = f" of {args.phase}" if args.phase else "", f" after {args.stage}" if args.stage else ""
        raise ValueError(f"no listing{of}{after} in {args.folder}")


def _diff(args: argparse.Namespace) -> None:
    a, b = Path(args.a), Path(args.b)
    if a.is_dir() != b.is_dir():
        raise ValueError(f"{a} and {b}: give two files or two folders")
    pairs = [(a, b)]
    if a.is_dir():
        first, second = _dumped(a), _dumped(b)
        pairs = [(first[k][-1][1], second[k][-1][1]) for k in first if k in second]
        for key in first.keys() ^ second.keys():
            print(f"only in {a if key in first else b}: graph {key[0]}, {key[1]}")
    for one, other in pairs:
        for file in (one, other):
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {file}")
        lines = list(_changes(one, other, args.live))
        if lines:
            print("\n".join(_coloured(lines, diff=True)))


def _changes(one: Path, other: Path, live: bool) -> Iterator[str]:
    """Yields a unified diff of full lines. Without ``live``, only operations and their order are compared."""
    a, b = one.read_text().splitlines(), other.read_text().splitlines()
    mine, theirs = (lines if live else list(_done(lines)) for lines in (a, b))
    groups = list(difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_grouped_opcodes(3))
    before, after = ([line for line in lines if line.startswith("; peak")] for lines in (a, b))
    changed = not live and before != after
    if groups or changed:
        yield f"--- {one}"
        yield f"+++ {other}"
    if changed:
        yield from (f"-{line}" for line in before)
        yield from (f"+{line}" for line in after)
    for group in groups:
        (_, a1, _, b1, _), (_, _, a2, _, b2) = group[0], group[-1]
        yield f"@@ -{a1 + 1},{a2 - a1} +{b1 + 1},{b2 - b1} @@"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (f" {line}" for line in b[j1:j2])
                continue
            yield from (f"-{line}" for line in a[i1:i2])
            yield from (f"+{line}" for line in b[j1:j2])


_COLUMNS = re.compile(r"; ((?:[A-Z] )+)value ")
_SLOT = re.compile(r"\s+[pg]\d+ = ")
_LIVE = re.compile(r"\s+[-+.]\S*\s+\S+( <peak.*)?$")


def _done(lines: Sequence[str]) -> Iterator[str]:
    """Yields a listing's lines without lanes, static buffers, memory and column widths."""
    gutter = 0
    for line in lines:
        if columns := _COLUMNS.match(line):
            gutter = len(columns[1]) + 1
        if line.startswith(";"):
            yield "" if columns or line.startswith(("; peak", "; change")) else " ".join(line.split())
        else:
            yield " ".join(_SLOT.sub(" = ", _LIVE.sub("", line[gutter:])).split()) if gutter else line


def _coloured(lines: Sequence[str] | Iterator[str], diff: bool = False) -> Iterator[str]:
    """Yields the lines, coloured if stdout is a terminal that supports it (no-color.org)."""
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    for line in lines:
        code = "" if plain else _colour(line, diff)
        yield f"\x1b[{code}m{line}\x1b[0m" if code else line


def _colour(line: str, diff: bool) -> str:
    if diff and line.startswith(("+", "-", "@@")):
        return {"+": "32", "-": "31", "@": "36"}[line[0]]
    line = line[1:] if diff else line
    if line.startswith(";"):
        return "2"
    gutter = line[:9]
    if " <peak" in line:
        return "1;31"
    if "<" in gutter:
        return "33"
    if "= all_gather" in line or "= reduce_scatter" in line or " all_reduce" in line or " refresh" in line:
        return "36"
    return ""
