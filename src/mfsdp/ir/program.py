"""A program: one forward, backward or inference graph on the way to being sharded, with queries and legal edits.

Nodes compare by position: ``a < b`` says that a runs before b.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any, Literal

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._prims import rng_prims
from torch.fx import Node
from torch.fx._lazy_graph_module import _LazyGraphModule  # private; tried on 2.13, there since 2.3

from ..config.units import Axis, Unit
from . import ops
from .roles import Kind, Role, is_kind, mark, role

STORAGE = "mfsdp_storage"
"""``node.meta`` key of what forward saved: (number, fake tensor) of the storage, which several of them may share,
``None`` for the tensor if it is the caller's; and whether backward may write over it."""

SHAPES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, torch.ops.aten.sym_stride.int)
"""Operators that ask for a shape and read no value."""

Phase = Literal["forward", "backward", "inference", "overlapped"]

INPUT = "mfsdp_input"
"""``node.meta`` key of placeholders that belong to the caller (as opposed to what forward saved for backward); the
value is a readable name."""

GIVEN = "mfsdp_given"
"""``node.meta`` key of these, if they are no parameters: ``"argument"`` of the call, or a module's ``"buffer"``."""

AXIS = "mfsdp_axis"
"""``node.meta`` key of torch's own collectives: the ranks that they go over, an `Axis`."""

LAYER = "mfsdp_layer"
"""``node.meta`` key of what runs in a layer, forward and backward: the layer's path."""

READ = "mfsdp_read"
"""``node.meta`` key of these: whether parameters are read through them, shards or what the eager path has gathered."""


class Program:
    """An ATen graph whose placeholders, markers and inserted nodes carry roles.

    Args:
        gm: the graph, functional but for the operations of `ops` and trailing ``copy_`` to buffers.
        phase: ``"forward"``, ``"backward"``, ``"inference"``, or ``"overlapped"``: a backward and the forward beside it
            (`merge`).
        units: the flat buffers the graph reads or writes, in order of first use in forward.
        name: what listings call it.
    """

    def __init__(self, gm: torch.fx.GraphModule, phase: Phase, units: Sequence[Unit], name: str = "model"):
        self.gm, self.phase, self.units, self.name = gm, phase, tuple(units), name
        self._units = {u.name: u for u in self.units}
        self.gradients: dict[int, tuple[str, int]] = {}
        """Backward: which outputs are gradients of parameters that are not sharded: index -> (unit, offset)."""
        self.trained: dict[str, frozenset[int]] = {}
        """Backward: units with gradients when the program was captured, and the offsets of their parameters."""
        self.returned: int | None = None
        """Forward, when it was captured: how many of its first results are for its caller. The rest is saved."""
        self.reduced = False
        """Whether `reduce` has run: from then on all these gradients reach accumulators (invariant 15)."""
        self.slots: dict[str, int] = {}
        """Bytes of every static buffer, by name, once there are any."""
        self.remarks: list[str] = []
        """What was done, or is to be known, before any pass, for the listing's head."""
        self.notes: list[str] = []
        """What the running pass has to say, for the listing's ``change`` line."""
        self.changes: list[str] = []
        """What it has changed besides adding and removing lines."""
        self.told = True
        """Whether anybody reads that: what costs time to find out need not be, if nobody does."""

    # queries

    @property
    def graph(self) -> torch.fx.Graph:
        return self.gm.graph

    @property
    def nodes(self) -> list[Node]:
        return list(self.graph.nodes)

    @property
    def output(self) -> Node:
        return self.graph.output_node()

    @property
    def world(self) -> int:
        return self.units[0].spec.ranks if self.units else 1

    def results(self) -> list[Any]:
        """The graph's outputs: nodes, constants and ``None``."""
        return list(self.output.args[0])  # type: ignore[arg-type]

    def find(self, kind: Kind) -> list[Node]:
        """Nodes of a kind, in program order."""
        return [n for n in self.graph.nodes if is_kind(n, kind)]

    def by_unit(self, kind: Kind) -> dict[Unit, list[Node]]:
        """Nodes of a kind, in program order, of every unit that has any; units in their order."""
        found: dict[str, list[Node]] = {}
        for node in self.find(kind):
            found.setdefault(role(node).unit, []).append(node)  # type: ignore[union-attr]
        return {u: found[u.name] for u in self.units if u.name in found}

    def unit(self, name: str) -> Unit:
        """The unit of that name."""
        return self._units[name]

    def aliases(self, node: Node) -> list[Node]:
        """The node and every view of it, in program order."""
        family, stack = {node}, [node]
        while stack:
            parent = stack.pop()
            for user in parent.users:
                if view_of(user) is parent and user not in family:
                    family.add(user)
                    stack.append(user)
        return sorted(family)

    def readers(self, node: Node) -> list[Node]:
        """Every node that reads or writes the value or a view of it, plain views excluded, in program order. What a
        collective of torch's reads, its wait reads too.
        """
        family = set(self.aliases(node))
        found = {u for n in family for u in n.users if (u not in family or mutates(u)) and u.target not in SHAPES}
        return sorted(found.union(*(u.users for u in found if is_functional_collective(u))))

    def copy(self) -> Program:
        """A program of its own, to run other passes on."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        graph.output_node().meta = dict(self.output.meta)
        gm = _LazyGraphModule(self.gm, graph)  # no code is written until it is called
        twin = Program(gm, self.phase, self.units, self.name)
        twin.gradients, twin.slots = dict(self.gradients), dict(self.slots)
        twin.trained, twin.reduced, twin.returned = dict(self.trained), self.reduced, self.returned
        twin.told, twin.remarks = self.told, self.remarks
        return twin

    # edits

    def insert(
        self,
        target: Any,
        args: tuple[Any, ...],
        before: Node,
        r: Role,
        name: str | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Node:
        """A new node before another one, with its role; its shape follows from the operation's fake kernel."""
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["val"] = self._fake(target, args, kwargs)
        return mark(node, r)

    def rewrite(self, node: Node, target: Any, args: tuple[Any, ...]) -> None:
        """Makes a node compute something else, of the same role and name."""
        node.target, node.args, node.kwargs = target, args, {}
        node.meta["val"] = self._fake(target, args)

    def fill(self) -> None:
        """Gives the wrappers of operators that draw random numbers (`operator`) a name and a value, which AOTAutograd
        leaves out.
        """
        for node in self.nodes:
            target, args, kwargs = operator(node)
            if target is node.target:
                continue
            if "val" not in node.meta:
                parts = tuple(u.meta["val"] for u in node.users if is_element(u))
                node.meta["val"] = parts or self._fake(target, args, kwargs)
            self.rename(node, target._schema.name.split("::")[-1])

    def _fake(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """What the operation would give."""
        values, named = torch.fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        with self._fake_mode, torch.no_grad():
            return target(*values, **named)

    @cached_property
    def _fake_mode(self) -> Any:
        """The mode of the program's fake tensors. Private in torch (``detect_fake_mode``); tried on 2.11 to 2.15."""
        mode = detect_fake_mode([n.meta.get("val") for n in self.nodes if n.op == "placeholder"])
        assert mode is not None, "a program's placeholders carry fake tensors"
        return mode

    def start(self) -> Node:
        """The first node behind the placeholders."""
        return next(n for n in self.nodes if n.op != "placeholder")

    def move(self, nodes: Sequence[Node], before: Node) -> None:
        """Moves nodes, in the order given, in front of another one; all others keep their places."""
        for node in nodes:
            before.prepend(node)

    def rename(self, node: Node, name: str) -> None:
        """Gives the node a name that says its role."""
        node._rename(name)

    def set_results(self, values: Sequence[Any]) -> None:
        """Replaces the graph's outputs."""
        self.output.args = (tuple(values),)

    def erase(self, node: Node) -> None:
        """Removes a node that nothing reads any more."""
        self.graph.erase_node(node)

    def changed(self, text: str) -> None:
        """Says what the running pass did that the count of lines does not show."""
        self.changes.append(text)

    def note(self, text: str) -> None:
        """Says with what knobs the running pass did it, or why it did nothing (invariant 28)."""
        self.notes.append(text)


def is_functional_collective(node: Node) -> bool:
    """Whether it is one of torch's, launched, to be waited for by ``wait_tensor``. Private in torch; tried on 2.11 to
    2.15.
    """
    namespace, _, name = getattr(getattr(node.target, "_schema", None), "name", "").partition("::")
    return namespace == "_c10d_functional" and name != "wait_tensor"


def is_element(node: Node) -> bool:
    """Whether the node is one of several results of another."""
    return _takes_one(node.target)


def _takes_one(target: Any) -> bool:
    return getattr(target, "__name__", "") == "getitem"


def view_of(node: Node) -> Node | None:
    """The node whose storage this one shares, or ``None`` when it has its own.

    Views, in-place results and the elements of a multiple output share. Told from the operator's schema, not its name.
    """
    if node.op != "call_function" or not _shares(node.target):
        return None
    first = node.args[0]
    return first if isinstance(first, Node) else None


@cache
def _shares(target: Any) -> bool:
    """Whether what an operator gives shares the storage of its first argument."""
    if _takes_one(target) or target is torch.ops.aten._unsafe_view.default:
        return True  # whatever the schema says
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.returns and schema.returns[0].alias_info is not None)


def operator(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a node calls, and with which arguments.

    AOTAutograd wraps an operator that may draw random numbers and is computed again in backward: in one that saves the
    generator's state, and in one that goes back to it. Private in torch (``rng_prims``); tried on 2.13.
    """
    target, args, kwargs = node.target, node.args, node.kwargs
    if target in (rng_prims.run_and_save_rng_state, rng_prims.graphsafe_run_with_rng_state):
        return args[0], args[1:], {name: value for name, value in kwargs.items() if name != "rng_state"}
    if target is rng_prims.run_with_rng_state:
        return args[1], args[2:], dict(kwargs)
    return target, args, dict(kwargs)


def mutates(node: Node) -> list[Node]:
    """The arguments that the node writes to."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    return [
        arg
        for arg, declared in zip(node.args, schema.arguments, strict=False)
        if isinstance(arg, Node) and declared.alias_info is not None and declared.alias_info.is_write
    ]


def first_launches(program: Program) -> list[Node]:
    """Gathers that it launches before it waits for anything."""
    nodes = itertools.takewhile(lambda n: n.target is not ops.wait, program.nodes)
    return [n for n in nodes if n.target in (ops.refresh, ops.all_gather)]


def by_module(program: Program, nodes: Iterable[Node]) -> list[list[Node]]:
    """Nodes with units, one behind the other, in runs of those whose flat buffers are one module's."""
    fqn = {unit.name: unit.fqn for unit in program.units}
    return [list(run) for _, run in itertools.groupby(nodes, key=lambda node: fqn[role(node).unit])]  # type: ignore[union-attr]


def slot_of(node: Node) -> str:
    """Name of the static buffer that the node fills, ``p0`` (gathered) or ``g0`` (gradients); ``""`` for none."""
    place = ops.SLOT.get(node.target)  # type: ignore[call-overload]
    number = node.args[place] if place is not None and len(node.args) > place else -1
    if not isinstance(number, int) or number < 0:
        return ""
    return f"{'p' if node.target is ops.all_gather else 'g'}{number}"


def group_of(program: Program, node: Node) -> str:
    """Name of the process group that a collective goes through."""
    if node.target is ops.collective:
        return Axis.decode(node.args[2]).group  # type: ignore[arg-type]
    r = role(node)
    assert r is not None
    return program.unit(r.unit).spec.groups[lane_of(node)]


def lane_of(node: Node) -> int:
    """Which of its unit's process groups (`Spec.groups`) a collective goes through; that of gathers for others."""
    if node.target in (ops.reduce_scatter, ops.all_reduce):
        return node.args[2]  # type: ignore[return-value]
    return 0


def base_of(node: Node) -> Node:
    """The node that owns the storage."""
    while (parent := view_of(node)) is not None:
        node = parent
    return node


def storage_of(node: Node) -> Node:
    """Like `base_of`, but the elements of a multiple output are apart, unless those are views (``split``)."""
    while (parent := view_of(node)) is not None:
        if is_element(node) and view_of(parent) is None:
            break
        node = parent
    return node
