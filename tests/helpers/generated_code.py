"""Reads generated code: launches in it, and those of a listing."""

from __future__ import annotations

import re


def launches(code: str) -> list[str]:
    """The variables that hold what all-gathers write; before torch 2.15 bound twice."""
    found = re.findall(r"(?m)^ *(\w+) = torch\.ops\.mfsdp\.all_gather\.default\(.*\n(?: *(\w+) = \w+$)?", code)
    return [again or once for once, again in found]


EVENT = r"\b(all_gather|wait|reduce_scatter|accumulate|bucket|pack|addmm|mm)\b"


def of_listing(text: str) -> list[str]:
    """What a listing says is done, in order."""
    lines = [line[5:] for line in text.splitlines() if not line.startswith(";")]
    return [m[1].removeprefix("add") for line in lines if (m := re.search(rf"(?:= |^ *){EVENT} ", line))]


def of_code(code: str) -> list[str]:
    """What generated code does, in order."""
    calls = re.findall(rf"(?:ops\.mfsdp\.|extern_kernels\.){EVENT}(?:\.default)?\(", code)
    return [name.removeprefix("add") for name in calls]


def uncommented(code: str) -> str:
    return re.sub(r"(?m)^ *#.*\n", "", code)
