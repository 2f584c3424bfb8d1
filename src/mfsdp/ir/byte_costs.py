"""Memory that each line of a program allocates and frees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Node

from ..config.comm_formats import int8_nbytes
from ..config.units import UnitSpec
from . import ops
from .program import (
    INPUT,
    KEPT,
    OPTIONAL,
    SHAPES,
    STORAGE,
    Program,
    base_of,
    by_target,
    is_element,
    lane_of,
    operator,
    slot_of,
    view_of,
)  # fmt: skip
from .roles import Kind, is_kind
from .symbolic_sizes import shape_of


def nbytes(value: object) -> int:
    """Bytes of a fake tensor or of all tensors in a list; symbolic sizes count with their hints."""
    if isinstance(value, (list, tuple)):
        return sum(nbytes(v) for v in value)
    if not isinstance(value, torch.Tensor):
        return 0
    return numel(value) * value.dtype.itemsize


def numel(value: torch.Tensor) -> int:
    """Number of elements; symbolic sizes count with their hints."""
    return shape_of(value).numel()


@dataclass(frozen=True)
class Line:
    """A node with a cost: kernel, collective, wait, allocation or free."""

    node: Node
    delta: int
    """Bytes allocated minus bytes freed."""
    live: int
    """Bytes live after it, without what the caller owns."""
    top: int
    """Bytes live while it runs, inputs and outputs included."""


def is_line(node: Node) -> bool:
    """Whether the node has a line: no views, shape queries, constants, placeholders or output."""
    if node.op != "call_function" or _shape_query(node.target):
        return False
    return view_of(node) is None and (_is_operator(node.target) or hasattr(operator(node)[0], "_schema"))


@by_target
def _shape_query(target: object) -> bool:
    return target in SHAPES


@by_target
def _is_operator(target: object) -> bool:
    return hasattr(target, "_schema")


class Move(NamedTuple):
    """The allocation or free of a value."""

    node: Node
    """The node whose results these are, all unless `part` is set."""
    nbytes: int
    """Negative for a free."""
    part: int | None = None
    """Index of one result; `WORKSPACE` for the extra buffers of a collective."""
    place: Node | None = None
    """The node whose memory the value reuses."""


WORKSPACE = -1


def lines(
    program: Program,
    fused: Sequence[Sequence[Node]] = (),
    moves: list[Move] | None = None,
    *,
    accumulators: bool = True,
) -> list[Line]:
    """Returns every line with its bytes. Full buffers live until `free`, accumulators to the end, other values until
    their last reader.

    Args:
        program: after any pass.
        fused: runs of lines that become one kernel each. A value takes no memory if only its own kernel reads it, or if
            it is cheap enough to recompute at every use. A result reuses an equally large input that the kernel is the
            last to read.
        moves: receives every allocation and free, in order.
        accumulators: whether accumulators are allocated (Note [Accumulator memory]), as in the first backward of a
            step.
    """
    moves = [] if moves is None else moves
    values = _Lifetimes(program, fused, accumulators)
    live = sum(program.slots.values()) + sum(values.saved.values())
    out = []
    workspaces: dict[Node, int] = {}
    for node in values.nodes:
        gone = values.freed_after(node)
        if values.bases[node] is not node or not is_line(node):
            live += sum(move.nbytes for move in gone)
            moves += gone
            continue
        if node.target is ops.wait:
            launch: Node = node.args[0]  # type: ignore[assignment]
            gone.append(Move(launch, -workspaces.pop(launch, 0), WORKSPACE))
        extra = workspace(node)
        if node.target is ops.refresh:
            extra = refreshed(program.spec_of(node))
        if extra:
            workspaces[node.args[0] if node.target in ops.IN_PLACE else node] = extra  # type: ignore[index]
        if (node, None) not in values.last_reader and not is_kind(node, Kind.FULL, Kind.ACCUMULATE):
            gone.append(Move(node, -values.held[node]))
        own = values.allocated[node]
        moves += [Move(node, own, None, values.reused.get(node)), Move(node, extra, WORKSPACE), *gone]
        top = live + own + extra
        delta = own + extra + sum(move.nbytes for move in gone)
        live += delta
        out.append(Line(node, delta, live, top))
    return out


_Value = tuple[Node, int | None]
"""The node that owns a storage, and the index of one of its results or ``None`` for all."""


class _Lifetimes:
    """Bytes of each value of a program, and the node after which it is freed. Arguments as for `lines`."""

    def __init__(self, program: Program, fused: Sequence[Sequence[Node]], accumulators: bool) -> None:
        self.program, self.nodes = program, program.nodes
        self.saved, self._shared = saved(program)
        self.bases, self._results = _bases(self.nodes), _results(self.nodes)
        self.last_reader: dict[_Value, Node] = {}
        recomputed = self._find_last_readers({node: run[-1] for run in fused for node in run})
        self.allocated = {node: allocation(node) for node in self.nodes}
        """Bytes of new memory for each node's results."""
        self.held = self.allocated | self.saved
        """Bytes to free with each node's results."""
        self.reused: dict[Node, Node] = {}
        """Nodes whose results take over the memory of another node's."""
        if accumulators:
            self._allocate_accumulators()
        several = dict.fromkeys(owner for owner, part in self.last_reader if part is not None)
        self._frees, self._partial_frees = self._find_frees(), self._find_partial_frees(several)
        for run in fused:
            self._fuse(run, recomputed, several)

    def freed_after(self, node: Node) -> list[Move]:
        """Returns the frees of values that this node is the last to read. Call it once per node, in program order."""
        gone = [self._free_part(owner, i) for owner, i in self._partial_frees.get(node, ())]
        return gone + [Move(owner, -self.held[owner]) for owner in self._frees.get(node, ())]

    def _free_part(self, owner: Node, part: int) -> Move:
        taken = min(self.held[owner], nbytes(owner.meta["val"][part]))  # zero if the owner has no memory
        self.held[owner] -= taken
        return Move(owner, -taken, part)

    def _read_by(self, node: Node) -> Iterator[_Value]:
        for arg in node.all_input_nodes:
            owner = self.bases[arg]
            yield self._shared.get(owner, owner), None
            if arg in self._results:
                yield self._results[arg]

    def _find_last_readers(self, end: Mapping[Node, Node]) -> Collection[Node]:
        """Fills `last_reader`, given the last line of each fused line's kernel. Returns the recomputed values, whose
        inputs must live until the recomputation.
        """
        for node in self.nodes:
            for value in self._read_by(node):
                self.last_reader[value] = end.get(node, node)
        recomputed = _inlined(self.nodes, end, self.bases)
        for node in reversed(recomputed):
            for value in self._read_by(node):
                self.last_reader[value] = max(self.last_reader[value], self.last_reader[node, None])
        return recomputed

    def _allocate_accumulators(self) -> None:
        for node in self.program.find(Kind.ACCUMULATE):
            if becomes(self.program, node):
                source = self.bases[node.args[1]]  # type: ignore[index]
                self.reused[node], self.last_reader[source, None] = source, self.program.output
            else:
                self.held[node] = self.allocated[node] = accumulator(self.program, node)

    def _find_frees(self) -> dict[Node, list[Node]]:
        """Returns the owners of the storages that each node is the last to read."""
        frees: dict[Node, list[Node]] = {}
        for (owner, part), reader in self.last_reader.items():
            never_freed = is_kind(owner, Kind.FULL) and not any(is_kind(u, Kind.FREE) for u in owner.users)
            if (
                part is None
                and not never_freed
                and KEPT not in owner.meta
                and reader is not self.program.output
                and owned(owner)
            ):
                frees.setdefault(reader, []).append(owner)
        return frees

    def _find_partial_frees(self, several: Iterable[Node]) -> dict[Node, list[tuple[Node, int]]]:
        """Returns the single results that each node is the last to read, if their owner has others that live on."""
        frees: dict[Node, list[tuple[Node, int]]] = {}
        for owner in several:
            for i in range(len(owner.meta["val"])):
                reader = self.last_reader.get((owner, i), owner)  # no readers: freed at once
                if reader is not self.last_reader[owner, None]:
                    frees.setdefault(reader, []).append((owner, i))
        return frees

    def _fuse(self, run: Sequence[Node], recomputed: Collection[Node], several: Collection[Node]) -> None:
        """Removes the memory of values inside a kernel, and lets its results reuse the inputs that it frees."""
        inside = set(run)
        freed = self._frees.get(run[-1], [])
        reusable: dict[int, list[Node]] = {}
        for owner in freed:
            if owner not in inside and owner not in several and not is_kind(owner, Kind.FULL) and _donated(owner):
                reusable.setdefault(self.held[owner], []).append(owner)
        for node in run:
            read = (node, None) in self.last_reader
            if node in recomputed or (len(run) > 1 and read and not escapes(node, inside)):
                self.held[node] = self.allocated[node] = 0
            elif self.held[node] and reusable.get(self.held[node]):
                self.allocated[node], self.reused[node] = 0, reusable[self.held[node]].pop(0)
                freed.remove(self.reused[node])


def accumulator(program: Program, node: Node) -> int:
    """Bytes of the accumulator of an accumulate."""
    spec = program.spec_of(node)
    return spec.main_numel * spec.precision.grad.itemsize


def becomes(program: Program, node: Node) -> bool:
    """Whether a step's first gradient becomes the accumulator without a copy (Note [Accumulator memory])."""
    source = base_of(node.args[1])  # type: ignore[arg-type]
    if source.target not in (ops.bucket, ops.reduce_scatter) or slot_of(source):
        return False
    return source.meta["val"].dtype is program.spec_of(node).precision.grad


def workspace(node: Node) -> int:
    """Bytes that a collective allocates besides its result, until its wait.

    A sum in a dtype wider than the communication dtype needs a receive buffer as large as what is sent, an all-reduce
    also one for the part that it gathers. In int8: a send and a receive buffer.
    """
    if node.target not in (ops.all_gather, ops.reduce_scatter, ops.all_reduce):
        return 0
    spec = UnitSpec.decode(node.args[1])  # type: ignore[arg-type]
    if node.target is ops.all_gather:
        return (spec.world + 1) * spec.int8_bytes(0) if spec.precision.wire else 0
    lane = lane_of(node)
    if spec.sum_dtype(lane) is spec.precision.grad_comm and spec.precision.grad_wire is None:
        return 0
    gathered = 0 if node.target is ops.reduce_scatter else _part(node, spec)
    if spec.precision.grad_wire:
        return 2 * travels(node) + gathered * spec.sum_dtype(lane).itemsize
    return travels(node) + gathered * spec.precision.grad_comm.itemsize


def refreshed(spec: UnitSpec) -> int:
    """The same for a refresh: in int8 a send and a receive buffer over each axis."""
    over = [(2, spec.outer)] * spec.outer_optim + [(0, spec.world)] * spec.replica
    return sum((ranks + 1) * spec.int8_bytes(lane) for lane, ranks in over) if spec.precision.wire else 0


def travels(node: Node) -> int:
    """Bytes of the full buffer of a gather or reduction as communicated, in int8 with scales."""
    spec = UnitSpec.decode(node.args[1])  # type: ignore[arg-type]
    if node.target is ops.all_gather:
        return spec.world * spec.int8_bytes(0) if spec.precision.wire else nbytes(node.meta["val"])
    if spec.precision.grad_wire is None:
        return nbytes(node.args[0].meta["val"])  # type: ignore[union-attr]
    lane, scatters = lane_of(node), node.target is ops.reduce_scatter
    return spec.ranks_on(lane) * (spec.int8_bytes(lane) if scatters else int8_nbytes(_part(node, spec)))


def _part(node: Node, spec: UnitSpec) -> int:
    """Elements of one rank's part of what a reduction sends."""
    return -(-numel(node.args[0].meta["val"]) // spec.ranks_on(lane_of(node)))  # type: ignore[union-attr]


def _donated(node: Node) -> bool:
    """Whether Inductor may overwrite the value: the program's own, or saved by forward, results of which the caller is
    assumed to have given up; not one that autograd passes in.
    """
    return node.op != "placeholder" or (STORAGE in node.meta and node.meta[STORAGE].overwrite != "no")


READS = 4
"""Most reads of a value that is recomputed at every use: Inductor's ``realize_reads_threshold``. Its other rules (heavy
CPU operations, long chains) materialize more values than are counted here."""


def _bases(nodes: Iterable[Node]) -> dict[Node, Node]:
    out: dict[Node, Node] = {}
    for node in nodes:
        parent = view_of(node)
        out[node] = node if parent is None else out[parent]
    return out


def _results(nodes: Iterable[Node]) -> dict[Node, _Value]:
    """Elements of multiple outputs with their own memory, and views of them: (operator, index)."""
    out: dict[Node, _Value] = {}
    for node in nodes:
        parent = view_of(node)
        if parent in out:
            out[node] = out[parent]
        elif parent is not None and is_element(node) and view_of(parent) is None and owned(parent):
            out[node] = parent, node.args[1]  # type: ignore[assignment]
    return out


def _inlined(nodes: Sequence[Node], fused: Mapping[Node, Node], bases: Mapping[Node, Node]) -> dict[Node, int]:
    """Values that Inductor recomputes at every use, with their number of reads, in program order: pointwise ones that
    only generated kernels read.
    """
    out: dict[Node, int] = {}
    for node in nodes:
        if node not in fused or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        reads = sum(out.get(bases[a], 1) for a in node.all_input_nodes)
        users = _readers(node)
        if users and reads <= READS and all(u in fused for u in users):
            out[node] = reads
    return out


def _readers(node: Node) -> set[Node]:
    """Readers of the value and of its views."""
    found, stack = set[Node](), [node]
    while stack:
        for user in stack.pop().users:
            if view_of(user) is not None:
                stack.append(user)
            else:
                found.add(user)
    return found


def saved(program: Program) -> tuple[dict[Node, int], dict[Node, Node]]:
    """Saved tensors: bytes of each storage, by its first placeholder, and that placeholder for the others."""
    held: dict[Node, int] = {}
    shared: dict[Node, Node] = {}
    first: dict[int, Node] = {}
    for node in program.nodes:
        if node.op == "placeholder" and owned(node):
            number, value, *_ = node.meta.get(STORAGE, (-len(held) - 1, node.meta.get("val")))
            owner = first.setdefault(number, node)
            if owner is node:
                held[node] = 0 if node.meta.get(OPTIONAL) else nbytes(value)
            else:
                shared[node] = owner
    return held, shared


def escapes(node: Node, inside: set[Node]) -> bool:
    """Whether a node outside of the kernel reads the value."""
    return not _readers(node) <= inside


def allocation(node: Node) -> int:
    """Bytes that the node allocates: none in static or persistent buffers or on the host."""
    elsewhere = node.target in (ops.refresh_codes, ops.kept_cast, ops.offload)
    return 0 if slot_of(node) or elsewhere else nbytes(node.meta.get("val"))


def on_host(program: Program) -> int:
    """Bytes on the host between forward and backward."""
    return sum(nbytes(node.meta["val"]) for node in program.find(Kind.OFFLOAD))


def owned(node: Node) -> bool:
    """Whether the program frees the value, not the caller."""
    return not (node.op == "get_attr" or (node.op == "placeholder" and INPUT in node.meta))


def peak(rows: Iterable[Line]) -> int:
    """The most bytes live on any line."""
    return max((row.top for row in rows), default=0)


def size(n: int, sign: bool = False) -> str:
    """Formats bytes as in the listing: ``512B``, ``258K``, ``2.02M``, ``1.50G``."""
    lead = ("+" if n > 0 else "-" if n < 0 else "") if sign else ""
    n = abs(n)
    for unit, letter, digits in ((2**30, "G", 2), (2**20, "M", 2), (2**10, "K", 0)):
        if n >= unit:
            return f"{lead}{n / unit:.{digits}f}{letter}"
    return f"{lead}{n}B"
