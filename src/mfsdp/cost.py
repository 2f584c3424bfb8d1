"""What a program costs in bytes, line by line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .program import INPUT, Program, base_of, slot_of, view_of
from .roles import Kind, is_kind


def nbytes(value: Any) -> int:
    """Bytes of a fake tensor, or of all tensors in a list. Symbolic sizes count with their hints."""
    if isinstance(value, (list, tuple)):
        return sum(nbytes(v) for v in value)
    if not isinstance(value, torch.Tensor):
        return 0
    return numel(value) * value.dtype.itemsize


def numel(value: torch.Tensor) -> int:
    """Elements, symbolic sizes with their hints."""
    return shape_of(value).numel()


def shape_of(value: torch.Tensor) -> torch.Size:
    """The shape, symbolic sizes with their hints: whoever computes with live symbols puts guards on them, and the
    program is compiled anew for every shape.
    """
    return torch.Size(n if isinstance(n, int) else n.node.hint for n in value.shape)


@dataclass(frozen=True)
class Line:
    """One node that costs something: a kernel, a collective, a wait, a change of memory."""

    node: Node
    delta: int
    """Bytes allocated minus bytes freed by it."""
    live: int
    """Bytes live after it: gathered buffers, activations, gradients; not what the caller owns."""
    top: int
    """Bytes live while it runs: what it reads is still there, what it writes already."""


def is_line(node: Node) -> bool:
    """Views, constants, placeholders and the output cost nothing and have no line."""
    return node.op == "call_function" and view_of(node) is None and hasattr(node.target, "_schema")


def lines(program: Program) -> list[Line]:
    """Every line with its bytes. Full buffers live until their `free`, everything else until its last reader."""
    nodes = program.nodes
    last: dict[Node, Node] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            last[base_of(arg)] = node
    frees: dict[Node, list[Node]] = {}
    output = program.output
    for owner, reader in last.items():
        if is_kind(owner, Kind.FULL) and not any(is_kind(u, Kind.FREE) for u in owner.users):
            continue  # nobody frees it
        if reader is not output and owned(owner):
            frees.setdefault(reader, []).append(owner)
    live = sum(program.slots.values())
    live += sum(nbytes(n.meta.get("val")) for n in nodes if n.op == "placeholder" and owned(n))
    out = []
    for node in nodes:
        freed = sum(allocation(n) for n in frees.get(node, ()))
        if not is_line(node):
            live -= freed
            continue
        allocated = allocation(node)
        top = live + allocated
        if node not in last and not is_kind(node, Kind.FULL):
            freed += allocated  # nobody reads it
        live += allocated - freed
        out.append(Line(node, allocated - freed, live, top))
    return out


def allocation(node: Node) -> int:
    """Bytes that the node's value takes when it comes to be: none in a static buffer."""
    return 0 if slot_of(node) else nbytes(node.meta.get("val"))


def owned(node: Node) -> bool:
    """Whether the program itself frees the value: not the caller's inputs."""
    return not (node.op == "get_attr" or (node.op == "placeholder" and INPUT in node.meta))


def peak(rows: Iterable[Line]) -> int:
    """The largest number of bytes live while any line runs."""
    return max((row.top for row in rows), default=0)


def size(n: int, sign: bool = False) -> str:
    """Bytes as the listing writes them: ``512B``, ``258K``, ``2.02M``, ``1.50G``."""
    lead = ("+" if n > 0 else "-" if n < 0 else "") if sign else ""
    n = abs(n)
    if n < 2**10:
        text = f"{n}B"
    elif n < 2**20:
        text = f"{n / 2**10:.0f}K"
    elif n < 2**30:
        text = f"{n / 2**20:.2f}M"
    else:
        text = f"{n / 2**30:.2f}G"
    return lead + text
