"""Prints a program as text (the listing): one line per kernel, collective, wait, allocation or free.

The gutter is the schedule. Lanes: ``C`` compute, ``G`` gather, ``R`` reduce, ``O`` outer axis, ``T`` other
parallelisms, ``A`` all-to-all, ``H`` host copies. ``*`` issued here, ``|`` in flight, ``.`` idle, ``<-o`` compute waits
for the lane, ``>-*`` the lane first waits for compute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..config.options import SHORT_ALL
from ..config.units import Axis, Unit, UnitSpec
from . import byte_costs, ops
from .byte_costs import size
from .program import Program, base_of, is_element, operator, operator_name, product_of, slot_of, view_of
from .roles import Kind, Lane, is_kind, role, unit_of

PARAMS_SHOWN = 4
OPERANDS_SHOWN = 6


@dataclass(frozen=True)
class Schedule:
    """The gutter in numbers."""

    in_flight: int
    """The most collectives and copies in flight at once."""
    no_overlap: int
    """Those with no computation between launch and wait."""
    collectives: int
    """All of them."""


class Summary(NamedTuple):
    """A program's peak in bytes, and the numbers of inserted operations by name."""

    peak: int
    counts: Counter[str]


def render(
    program: Program,
    stage: str,
    before: Summary | None = None,
    *,
    fold: bool = True,
    rows: Sequence[byte_costs.Line] | None = None,
    below: str | None = None,
) -> str:
    """Returns the listing after the pass ``stage``.

    Args:
        program: what to print.
        stage: the pass that ran last, ``"capture"`` before the first.
        before: `summary` of the program before the pass, for the ``change`` and ``peak`` lines.
        fold: whether units equal to an earlier one print as ``like u1``, and long parameter lists are cut.
        rows: its lines, if already computed.
        below: `tail` of the program, if already computed.
    """
    rows = byte_costs.lines(program) if rows is None else rows
    title = f"; mfsdp  {program.name}  {stage}  {program.title}       world {program.world}"
    below = tail(program, rows, fold) if below is None else below
    return "\n".join([title, *_head(program, rows, before), below])


def tail(program: Program, rows: Sequence[byte_costs.Line], fold: bool = True) -> str:
    """Returns the listing below its lines on passes and peak, which depends on the program alone."""
    table = _table(program, rows)
    head = f"{'value':<{table.value - 2}}{'slot   op' if program.slots else 'op'}"
    return "\n".join(
        [
            *_dtypes(program.units, quantised := _quantised(program)),
            *(f"; note   {text}" for text in program.remarks),
            ";",
            *_units(program.units, fold, quantised),
            ";",
            f"; {' '.join(lane.value for lane in _lanes(program))} {head:<{table.op - 1}} "
            f"{'type':<{table.type}} {'delta':>7} {'live':>6}",
            *body(program, rows, table),
            "",
        ]
    )


def summary(rows: Sequence[byte_costs.Line]) -> Summary:
    """The peak and the counts of a program's lines, for `render`'s ``before``."""
    return Summary(byte_costs.peak(rows), Counter(_verb(r.node) for r in rows if role(r.node) is not None))


def around(program: Program, fault: Node, context: int = 10) -> str:
    """The lines around a fault, which is marked with ``->``."""
    rows = byte_costs.lines(program)
    order = {node: i for i, node in enumerate(program.nodes)}
    shown_lines = list(body(program, rows))
    at = min(range(len(rows)), key=lambda i: (abs(order[rows[i].node] - order[fault]), i), default=0)
    shown = range(max(0, at - context), min(len(rows), at + context + 1))
    return "\n".join((" -> " if i == at else "    ") + shown_lines[i] for i in shown)


def schedule(program: Program) -> Schedule:
    """Counts collectives in flight, and those that overlap with nothing."""
    flying: dict[Node, bool] = {}
    most = no_overlap = collectives = 0
    for node in program.nodes:
        if node.target in ops.LAUNCHED:
            flying[product_of(node)] = False
            collectives += 1
            most = max(most, len(flying))
        elif node.target is ops.wait:
            hidden = flying.pop(node.args[0], True)  # type: ignore[arg-type]
            no_overlap += not hidden
        elif byte_costs.is_line(node) and (role(node) is None or node.target is ops.mm):
            flying = dict.fromkeys(flying, True)
    return Schedule(most, no_overlap, collectives)


def _lanes(program: Program) -> tuple[Lane, ...]:
    used = {r.lane for n in program.nodes if (r := role(n)) is not None} | {Lane.COMPUTE, Lane.GATHER, Lane.REDUCE}
    return tuple(lane for lane in Lane if lane in used)


def _head(program: Program, rows: Sequence[byte_costs.Line], before: Summary | None) -> Iterator[str]:
    now, s = summary(rows), schedule(program)
    peak = size(now.peak)
    if before is not None:
        old, new = before.counts, now.counts
        deltas = [f"{new[k] - old[k]:+d} {k}" for k in sorted(set(old) | set(new)) if new[k] != old[k]]
        deltas += program.changes
        notes = program.notes
        change = "  ".join(deltas + [f"({n})" for n in notes]) if deltas else "none  " + "; ".join(notes)
        yield f"; change {change}".rstrip()
        peak = f"{size(before.peak)} -> {peak}"
    slots = f"    slots {' '.join(program.slots)} = {size(sum(program.slots.values()))}" if program.slots else ""
    slots += f"    host {size(host)}" if (host := byte_costs.on_host(program)) else ""
    yield (f"; peak   {peak}{slots}    in flight {s.in_flight}    without overlap {s.no_overlap} of {s.collectives}")


def _quantised(program: Program) -> dict[str, torch.dtype]:
    """FP8 dtype of each unit that is communicated quantized."""
    sent = (*program.find(Kind.CODES), *program.find(Kind.FULL))
    dtypes = {unit_of(n): n.meta["val"].dtype for n in sent}
    return {unit: dtype for unit, dtype in dtypes.items() if dtype.itemsize == 1}


def _dtypes(units: Sequence[Unit], quantised: Mapping[str, torch.dtype]) -> Iterator[str]:
    """The dtypes of a weight and its gradient along their path, if they differ."""
    alike: dict[Any, list[str]] = {}
    for unit in (u for u in units if u.spec.precision.main.is_floating_point):
        total = unit.spec.sum_dtype(2 if unit.spec.outer > 1 else 0)
        alike.setdefault((unit.spec.precision, total, quantised.get(unit.name)), []).append(unit.name)
    for (p, total, code), names in alike.items():
        life = {
            "main": p.main, "gather": p.comm, "compute": p.compute, "reduce": p.grad_comm, "sum": total, "grad": p.grad
        }  # fmt: skip
        words = {role: SHORT_ALL[dtype] for role, dtype in life.items()}
        wires = (("gather", p.wire), ("reduce", p.grad_wire), ("gather", code and _short(code)))
        words |= {role: wire for role, wire in wires if wire}
        if len(set(words.values())) > 1:
            whose = f"{' '.join(names)}  " if len(alike) > 1 else ""
            yield f"; dtype  {whose}" + "  ".join(f"{role} {word}" for role, word in words.items())


def _units(units: Sequence[Unit], fold: bool, quantised: Mapping[str, torch.dtype]) -> Iterator[str]:
    names = max([4, *(len(u.name) for u in units)])
    fqns = max([8, *(len(u.fqn) for u in units)])
    yield f"; {'unit':<{names}}  {'fqn':<{fqns}}  {'shard':>6}  {'full':>6}  params (offset in elements)"
    first: dict[tuple[object, ...], Unit] = {}

    def likeness(unit: Unit) -> tuple[object, ...]:
        return unit.spec, unit.layout, unit.trainable, unit.sharded, quantised.get(unit.name)

    for key, run in groupby(units, key=likeness):
        alike = list(run)
        printed = alike if not fold else alike[:1] if key not in first else []
        twin = first.setdefault(key, alike[0])
        for unit in printed:
            p = unit.spec.precision
            shard = size(unit.layout.shard_numel * p.main.itemsize)
            full = size(unit.spec.full_numel * quantised.get(unit.name, p.comm).itemsize)
            yield (f"; {unit.name:<{names}}  {unit.fqn:<{fqns}}  {shard:>6}  {full:>6}  {_params(unit, fold)}")
        if folded := alike[len(printed) :]:
            ends = folded if len(folded) == 1 else (folded[0], folded[-1])
            name, fqn = "..".join(u.name for u in ends), " .. ".join(u.fqn for u in ends)
            yield f"; {name:<{names}}  {fqn:<{fqns}}  like {twin.name}"


def _params(unit: Unit, fold: bool) -> str:
    slots = unit.layout.slots
    texts = [f"{s.name}[{','.join(map(str, s.shape))}]@{s.offset}" for s in slots]
    if fold and len(texts) > PARAMS_SHOWN:
        texts = [*texts[:PARAMS_SHOWN], f"and {len(texts) - PARAMS_SHOWN} more"]
    words = [*texts, f"pad {unit.layout.pad}"] if unit.layout.pad else texts
    if not unit.trainable:
        words.append("frozen")
    elif held := unit.spec.unreduced_numel:
        words.append(f"hold {size(held * unit.spec.precision.grad.itemsize)}")
    if unit.spec.optional:
        words.append("may be unused")
    if not unit.sharded:
        words.append("not sharded")
    return "  ".join(words)


def body(program: Program, rows: Sequence[byte_costs.Line], table: _Table | None = None) -> Iterator[str]:
    """Yields one line of text for each of a program's lines."""
    table = table or _table(program, rows)
    top = byte_costs.peak(rows)
    peak_at = next((i for i, r in enumerate(rows) if r.top == top), -1)
    flying: dict[Node, Lane] = {}
    lanes = _lanes(program)
    for i, row in enumerate(rows):
        node = row.node
        gutter = _gutter(node, flying, lanes)
        slot = f" {slot_of(node):>2}" if program.slots else ""
        valued = node.meta.get("val") is not None
        value = f"{_shown(node.name):<{table.value}}{slot} = " if valued else " " * (table.value + 3 + len(slot))
        op = f"{value}{table.texts[i]}"
        if len(op) > table.op:
            op = f"{op[: table.op - 3]}..."
        delta = size(row.delta, sign=True) if row.delta else "."
        within = "" if size(row.top) == size(row.live) else f" {size(row.top)}"
        mark = f" <peak{within}" if i == peak_at else ""
        yield (
            f"{gutter}  {op:<{table.op}} {table.types[i]:<{table.type}} {delta:>7} {size(row.live):>6}{mark}".rstrip()
        )


@dataclass(frozen=True)
class _Table:
    """Texts of operations and types, and common column widths of a listing."""

    texts: tuple[str, ...]
    types: tuple[str, ...]
    value: int
    op: int
    """Includes the value column."""
    type: int


def _table(program: Program, rows: Sequence[byte_costs.Line]) -> _Table:
    """Columns as wide as the longest line, within limits; longer operands are cut."""
    slot = 3 if program.slots else 0
    texts = tuple(text(r.node) for r in rows)
    names = [len(_shown(r.node.name)) for r in rows if r.node.meta.get("val") is not None]
    value = min(max([22, *names]), 30)
    ops = [value + slot + 3 + len(x) for x in texts]
    types = tuple(_type(r.node.meta.get("val")) for r in rows)
    return _Table(texts, types, value, min(max([67, *ops]), value + slot + 70), max([16, *map(len, types)]))


def _shown(name: str) -> str:
    """A readable name, without the device that torch traced on, which may differ from the one it runs on."""
    return name.replace("_for_cpu", "").replace("scaled_dot_product_", "").removeprefix("_")


def _gutter(node: Node, flying: dict[Node, Lane], lanes: Sequence[Lane]) -> str:
    """Two characters per lane, minus one. Updates ``flying``."""
    busy = set(flying.values())
    cells = {lane: ("|" if lane in busy else ".") for lane in lanes}
    r = role(node)
    if node.target is ops.wait:
        lane = flying.pop(node.args[0], r.lane if r else Lane.GATHER)  # type: ignore[arg-type]
        return _joined(cells, lane, "<", "o")
    if node.target in ops.LAUNCHED:
        assert r is not None
        flying[product_of(node)] = r.lane
        if base_of(node.args[0]).op != "placeholder":  # type: ignore[arg-type]
            return _joined(cells, r.lane, ">", "*")
        cells[r.lane] = "*"
    else:
        cells[Lane.COMPUTE] = "*"
    return " ".join(cells.values())


def _joined(cells: dict[Lane, str], lane: Lane, left: str, right: str) -> str:
    """A connector from compute to another lane, across what is in flight between them."""
    out, lanes = left, list(cells)
    for between in lanes[1:]:
        if between is lane:
            out += "-" + right
            break
        out += "-" + ("+" if cells[between] == "|" else "-")
    rest = lanes[lanes.index(lane) + 1 :]
    return out + "".join(" " + cells[x] for x in rest)


def _verb(node: Node) -> str:
    if node.target is ops.collective:
        return str(node.args[1]).partition(" ")[0]
    target = operator(node)[0]
    return _shown((operator_name(target) or str(target)).split("::")[-1].removeprefix("_"))


def text(node: Node) -> str:
    """The operation column of a line."""
    if node.target in (ops.wait, ops.free, ops.refresh, ops.maxima, ops.cast, ops.kept_cast, ops.refresh_codes):
        return f"{_verb(node)} {operand(node.args[0])}"
    if node.target in (ops.spread, ops.hold):
        return f"{_verb(node)} {operand(node.args[1])}"
    if node.target is ops.accumulate:
        _, gshard, _, scale = node.args
        return f"accumulate {unit_of(node)}_grad, {operand(gshard)}, {_factor(scale)}"
    if node.target is ops.bucket:
        return f"bucket {unit_of(node)}"
    if node.target is ops.pack:
        gfull, grads, _, scale = node.args
        tail = "" if scale == 1.0 else f", {_factor(scale)}"
        return f"pack {operand(gfull)}, {operand(grads)}{tail}"
    if node.target is ops.mm:
        gfull, offset, _, _, a, b = node.args
        return f"mm {operand(gfull)}@{offset}, {operand(a)}, {operand(b)}"
    if node.target in (ops.all_gather, ops.reduce_scatter, ops.all_reduce):
        p, gathers = UnitSpec.decode(str(node.args[1])).precision, node.target is ops.all_gather
        wire = p.wire if gathers else p.grad_wire
        tail = ("" if gathers else ", sum") + (f", {wire} {size(byte_costs.travels(node))}" if wire else "")
        return f"{_verb(node)} {operand(node.args[0])}{tail}"
    if node.target is ops.probe:
        return f"probe {operand(node.args[0])}{', weights' * (node.args[5] == 'weights')}"
    if node.target is ops.collective:
        source, verb, axis, *_ = node.args
        op = str(verb).partition(" ")[2]
        words = [operand(source), *([op] if op not in ("", "sum") else []), Axis.decode(axis).name]  # type: ignore[arg-type]
        return f"{_verb(node)} {', '.join(words)}"
    args = [operand(a) for a in _known(node)]
    return f"{_verb(node)} {', '.join(args)}".rstrip()


def _known(node: Node) -> list[object]:
    """Arguments worth showing: no encoded specs, no trailing defaults."""
    if is_kind(node, Kind.PARAM, Kind.GRAD):
        return [a for a in node.args if not isinstance(a, str)]
    _, args, kwargs = operator(node)
    given = [*args, *kwargs.values()]
    wrapper = [a for a in node.all_input_nodes if args is not node.args and a not in pytree.tree_leaves(given)]
    return [a for a in (*given, *wrapper) if not isinstance(a, _UNSAID)]


def _factor(scale: object) -> str:
    assert isinstance(scale, float)
    inverse = 1 / scale
    return f"1/{inverse:g}" if scale != 1.0 and abs(inverse - round(inverse)) < 1e-9 else f"{scale:g}"


def operand(arg: object) -> str:
    """An argument as text; a view prints as its base."""
    if isinstance(arg, Node):
        return _name(arg)
    if isinstance(arg, (list, tuple)):
        texts = [operand(a) for a in arg]
        if any(isinstance(a, Node) for a in arg):
            if len(texts) > OPERANDS_SHOWN:
                texts = [*texts[:3], f"... {len(texts) - 4} more ...", texts[-1]]
            return ", ".join(texts)
        return f"[{','.join(texts)}]"
    if isinstance(arg, torch.dtype):
        return SHORT_ALL.get(arg, str(arg).removeprefix("torch."))
    return str(arg)


def _name(node: Node) -> str:
    if is_kind(node, Kind.PARAM, Kind.FULL, Kind.CODES, Kind.SHARD):
        return node.name
    parent = view_of(node)
    if parent is None:
        return _shown(node.name)
    if node.target in _TRANSPOSES and node.meta["val"].dim() == 2:
        text = _name(parent)
        return text[:-2] if text.endswith(".T") else f"{text}.T"
    if is_element(node):
        return f"{_name(parent)}[{node.args[1]}]"
    return _name(parent)


_UNSAID = (type(None), torch.device, torch.layout, torch.memory_format)
"""Argument types that listings omit; some differ between machines."""

_TRANSPOSES = (
    torch.ops.aten.t.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
)


def _type(value: object) -> str:
    if isinstance(value, (list, tuple)):
        value = next((v for v in value if isinstance(v, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{SHORT_ALL.get(value.dtype, _short(value.dtype))}[{','.join(map(_extent, value.shape))}]"


def _extent(n: object) -> str:
    """A size; data-dependent ones print as ``n0``, since ``u0`` is a unit."""
    return str(n) if type(n) is int else re.sub(r"\bu(\d+)\b", r"n\1", str(n)).replace(" ", "")


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return name.replace("uint", "u").replace("int", "i").replace("float", "f")
