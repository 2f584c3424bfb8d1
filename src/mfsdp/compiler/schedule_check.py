"""Checks that generated code runs the listing's operations in the listing's order (invariant 16)."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch.fx import Node
from torch.fx.node import Argument

from ..config.best_effort import only_tells
from ..ir import ops, printer
from ..ir.program import Program, group_of
from ..ir.verifier import InvariantError
from .subgraphs import CALLED

log = logging.getLogger("mfsdp")

Operand = tuple[str, Any]
"""``("op", i)``: the result of our i-th operation. ``("in", name)``: an input. ``("is", value)``: a constant."""


@dataclass(frozen=True)
class Operation:
    """One of our operations, in a listing or in code."""

    verb: str
    operands: tuple[Operand | None, ...]
    """Up to the first list; ``None`` for results of other kernels."""
    text: str
    node: Node | None = None
    group: str = ""
    """The group of a collective."""

    def same(self, other: Operation) -> bool:
        """Returns whether both may be the same operation. A cast's result in a listing may be an input in code."""
        pairs = zip(self.operands, other.operands, strict=False)
        return self.verb == other.verb and all(a == b or not _known(a, b) for a, b in pairs)


def _known(a: Operand | None, b: Operand | None) -> bool:
    return a is not None and b is not None and a[0] == b[0]


def listed(program: Program, driven: bool = False) -> list[Operation]:
    """Returns our operations of a program that is about to be lowered, in order; for a driver (`stitched`), those of
    the schedule.
    """
    number: dict[Node, int] = {}
    out: list[Operation] = []
    for node in program.nodes:
        if getattr(node.target, "namespace", "") != "mfsdp" or node.target is ops.free:
            continue
        verb = node.target._schema.name.removeprefix("mfsdp::")  # type: ignore[union-attr]
        if driven and verb in CALLED:
            continue
        scalars = takewhile(lambda arg: not isinstance(arg, (list, tuple)), node.args)
        operands = tuple(_operand(arg, number, driven) for arg in scalars)
        group = group_of(program, node) if node.target in ops.COLLECTIVES else ""
        number[node] = len(out)
        text = only_tells("lines of the listing", node.name, printer.text, node)
        out.append(Operation(verb, operands, text, node, group))
    return out


def _operand(arg: Argument, number: Mapping[Node, int], driven: bool) -> Operand | None:
    if not isinstance(arg, Node):
        return "is", arg
    if arg in number:
        return "op", number[arg]
    return ("in", arg.name if driven else str(arg.target)) if arg.op == "placeholder" else None


def written(code: str, driven: bool = False) -> list[Operation]:
    """Returns our operations in Inductor's code, in order, or those of the schedule in a driver's. The form of
    Inductor's code is private in torch; tried on 2.11 to 2.15.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:  # C++
        return []
    bodies = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    statements = [n for body in bodies for n in ast.walk(body) if isinstance(n, ast.stmt) and n is not body]
    bound: dict[str, Operand] = {}
    out: list[Operation] = []
    for statement in sorted(statements, key=lambda n: n.lineno):
        value = getattr(statement, "value", None)
        targets: list[ast.expr] = getattr(statement, "targets", [])
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        verb, given, text = _call(value)
        if verb and not (driven and verb in CALLED):
            scalars = takewhile(lambda arg: not isinstance(arg, (ast.List, ast.Tuple)), given)
            out.append(Operation(verb, tuple(_value(arg, bound) for arg in scalars), text))
            bound.update(dict.fromkeys(names, ("op", len(out) - 1)))
        elif isinstance(value, ast.Name) and value.id in ("args", "Args"):
            inputs = [e for t in targets for e in getattr(t, "elts", [t])]
            bound.update({e.id: ("in", e.id) for e in inputs if isinstance(e, ast.Name)})
        elif isinstance(value, ast.Name) and value.id in bound:
            bound.update(dict.fromkeys(names, bound[value.id]))
        else:
            for name in names:
                bound.pop(name, None)
    return out


def _call(value: ast.expr | None) -> tuple[str, list[ast.expr], str]:
    """Returns which of our operations is called, its arguments, and the text of the call."""
    if not isinstance(value, ast.Call):
        return "", [], ""
    text = ast.unparse(value)
    parts = ast.unparse(value.func).split(".")
    if parts[0] == "Kernels":  # Kernels.wait(Run, ...)
        return parts[1], value.args[1:], text
    return (parts[3], value.args, text) if parts[:3] == ["torch", "ops", "mfsdp"] else ("", [], text)


def _value(arg: ast.expr, bound: Mapping[str, Operand]) -> Operand | None:
    if isinstance(arg, ast.Name):
        return bound.get(arg.id)
    try:
        return "is", ast.literal_eval(arg)
    except ValueError:
        return None


def compare(expected: list[Operation], code: str, driven: bool = False) -> None:
    """Compares a listing with the code generated from it. Logs a warning if an operation other than a collective has
    moved. ``driven``: the code is a driver's, which contains the operations of the schedule.

    Raises:
        InvariantError: the code runs the collectives of a process group in another order, or lacks an operation. Ranks
            compile separately, so others may have kept the order.
    """
    found = written(code, driven)
    if expected and not found:
        log.info("mfsdp: generated code is not in Python (cpp_wrapper), and was not compared with the listing")
        return
    if len(found) == len(expected) and all(a.same(b) for a, b in zip(expected, found)):
        return
    verbs = {op._schema.name.removeprefix("mfsdp::") for op in ops.COLLECTIVES}
    theirs = [o for o in found if o.verb in verbs]
    ours = [o for o in expected if o.group]
    over = {_constants(o): o.group for o in ours}
    if strange := next((o for o in theirs if _constants(o) not in over), None):
        raise InvariantError(16, _node(expected[-1]), f"{strange.text} of the code is not in the listing")
    for group in dict.fromkeys(over.values()):
        pair = [o for o in ours if o.group == group], [o for o in theirs if over[_constants(o)] == group]
        for at, (mine, its) in enumerate(zip(*pair)):
            if not _alike(mine, expected, its, found):
                text = f"collective {at}: `{mine.text}` in the listing, {its.text} in the code"
                raise InvariantError(16, _node(mine), text)
    if len(ours) != len(theirs):
        text = f"there are {len(ours)} collectives in the listing, and {len(theirs)} in the code"
        raise InvariantError(16, _node(expected[-1]), text)
    left = list(found)
    for mine in expected:
        twin = next((o for o in left if _alike(mine, expected, o, found)), None)
        if twin is None:
            raise InvariantError(16, _node(mine), f"`{mine.text}` of the listing is not in the code")
        left.remove(twin)
    for mine, its in zip(expected, found):
        if not mine.same(its):
            log.warning(
                "mfsdp: the compiler has moved an operation: where the listing has `%s`, the code has %s. What was to "
                "overlap may not.",
                mine.text,
                its.text,
            )
            return


def _constants(operation: Operation) -> tuple[object, ...]:
    """Returns a collective's verb and constants, which together identify its group."""
    return operation.verb, *(o[1] for o in operation.operands if o is not None and o[0] == "is")


def _alike(a: Operation, those: list[Operation], b: Operation, others: list[Operation]) -> bool:
    """Returns whether two operations do the same with the same operands, regardless of the operands' numbers."""
    if a.verb != b.verb:
        return False
    for x, y in zip(a.operands, b.operands, strict=False):
        if x is None or y is None or x[0] != y[0]:
            continue
        if not (_alike(those[x[1]], those, others[y[1]], others) if x[0] == "op" else x == y):
            return False
    return True


def _node(operation: Operation) -> Node:
    assert operation.node is not None, "of a listing"
    return operation.node
