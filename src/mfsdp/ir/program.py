"""A program: one forward, backward or inference graph that passes rewrite, with queries and edits.

Nodes compare by position: ``a < b`` means that a runs before b.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, wraps
from operator import is_
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx._lazy_graph_module import _LazyGraphModule  # private; tried on 2.13, there since 2.3

from ..config.units import Axis, Unit, UnitSpec
from . import ops
from .roles import Kind, Role, mark, role, unit_of

STORAGE = "mfsdp_storage"
"""``node.meta`` key of saved values: their `Storage`."""


class Storage(NamedTuple):
    """The storage of a value that forward has saved."""

    number: int
    """Values with the same number share it."""
    value: torch.Tensor | None
    """A fake tensor as large as it; ``None`` if the caller owns it."""
    overwrite: Literal["no", "yes", "if unheld"]
    """Whether backward may overwrite it; ``"if unheld"``: forward returns it too (Note [Overwritten results])."""


T = TypeVar("T")

KEPT = "mfsdp_kept"
"""``node.meta`` key of placeholders that live on behind the program, for another part of the backward."""

SHAPES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, torch.ops.aten.sym_stride.int)
"""Operators that read a shape and no value."""

Phase = Literal["forward", "backward", "inference", "overlapped"]

Part = Literal["", "input", "weight"]
"""Which part of a backward: all of it, or one of `split_backward`'s."""

INPUT = "mfsdp_input"
"""``node.meta`` key of placeholders that the caller owns, unlike what forward saved for backward; the value is a
readable name."""

GIVEN = "mfsdp_given"
"""``node.meta`` key of those that are no parameters: ``"argument"`` of the call, or a module's ``"buffer"``."""

OPTIONAL = "mfsdp_optional"
"""``node.meta`` key of tangents that may be ``None``: the caller need not differentiate that result."""

AXIS = "mfsdp_axis"
"""``node.meta`` key of torch's own collectives: their ranks, an `Axis`."""

LAYER = "mfsdp_layer"
"""``node.meta`` key of nodes in a layer, forward and backward: the layer's path."""

READ = "mfsdp_read"
"""``node.meta`` key of caller-owned placeholders: whether parameters are read through them (shards, or the eager
fallback's gathers)."""


class Program:
    """An ATen graph whose placeholders, markers and inserted nodes carry roles.

    Args:
        gm: the graph, functional except for the operations of `ops` and trailing ``copy_`` to buffers.
        phase: ``"forward"``, ``"backward"``, ``"inference"``, or ``"overlapped"``: a backward merged with a concurrent
            forward (`merge`).
        units: the flat buffers that the graph reads or writes, in order of first use in forward.
        name: its name in listings.
    """

    def __init__(self, gm: torch.fx.GraphModule, phase: Phase, units: Sequence[Unit], name: str = "model"):
        self.gm, self.phase, self.units, self.name = gm, phase, tuple(units), name
        self.part: Part = ""
        self._units = {u.name: u for u in self.units}
        self.gradients: dict[int, tuple[str, int]] = {}
        """Backward: the outputs that are gradients of unsharded parameters: index -> (unit, offset)."""
        self.trained: dict[str, frozenset[int]] = {}
        """Backward: units with gradients at capture, and their parameters' offsets."""
        self.returned: int | None = None
        """Forward, at capture: how many results the caller gets; the rest is saved."""
        self.reduced = False
        """Whether `reduce` has run: from then on all these gradients reach accumulators (invariant 15)."""
        self.slots: dict[str, int] = {}
        """Bytes of each static buffer, by name."""
        self.remarks: list[str] = []
        """Remarks from before the first pass."""
        self.notes: list[str] = []
        """Notes of the current pass, for the ``change`` line."""
        self.changes: list[str] = []
        """Its changes that counts of lines do not show."""
        self.told = True
        """Whether anything reads notes. If not, passes skip expensive ones."""

    # queries

    @property
    def graph(self) -> torch.fx.Graph:
        return self.gm.graph

    @property
    def title(self) -> str:
        """The phase, and which part of it: ``"forward"``, ``"backward weight"``."""
        return f"{self.phase} {self.part}".rstrip()

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
        return [n for n in self.graph.nodes if (r := role(n)) is not None and r.kind is kind]

    def calls(self, *targets: torch._ops.OpOverload) -> list[Node]:
        """Nodes that call one of these operators, in program order."""
        return [n for n in self.graph.nodes if n.target in targets]

    def by_unit(self, kind: Kind) -> dict[Unit, list[Node]]:
        """Nodes of a kind by unit, both in order."""
        found: dict[str, list[Node]] = {}
        for node in self.find(kind):
            found.setdefault(unit_of(node), []).append(node)
        return {u: found[u.name] for u in self.units if u.name in found}

    def unit(self, name: str) -> Unit:
        return self._units[name]

    def spec_of(self, node: Node) -> UnitSpec:
        """The spec of the unit of a node that carries a role."""
        return self._units[unit_of(node)].spec

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
        """Nodes that read or write the value or a view of it, without plain views, in program order. The wait of a
        torch collective reads the collective's inputs too.
        """
        family = set(self.aliases(node))
        found = {u for n in family for u in n.users if (u not in family or mutates(u)) and u.target not in SHAPES}
        return sorted(found.union(*(u.users for u in found if is_functional_collective(u))))

    def copy(self) -> Program:
        """An independent copy, to run other passes on."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        graph.output_node().meta = dict(self.output.meta)
        gm = _LazyGraphModule(self.gm, graph)  # generates no code until it is called
        twin = Program(gm, self.phase, self.units, self.name)
        twin.gradients, twin.slots = dict(self.gradients), dict(self.slots)
        twin.trained, twin.reduced, twin.returned = dict(self.trained), self.reduced, self.returned
        twin.told, twin.remarks, twin.part = self.told, self.remarks, self.part
        return twin

    def state(self) -> list[object]:
        """Everything that passes may change, to be compared with `equal`."""
        own = (self.slots, self.gradients, self.trained, self.units, self.reduced, self.returned, self.part)
        found: list[object] = [tuple(dict(x) if isinstance(x, dict) else x for x in own)]
        for n in self.graph.nodes:
            found += (n, n.op, n.name, n.target, n.args, n.kwargs, *n.meta, *n.meta.values())
        return found

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
        """Inserts a node before another; the operation's fake kernel gives its value."""
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["val"] = self._fake(target, args, kwargs)
        return mark(node, r)

    def launch(self, target: Any, args: tuple[Any, ...], before: Node, r: Role, name: str | None = None) -> Node:
        """Inserts a launch that reads its first argument, and right behind it its wait. Returns what that completes."""
        launch = self.insert(target, args, before, r, name)
        product = product_of(launch)
        sources = [args[0]] if product is launch else []
        self.insert(ops.wait, (product, sources), before, Role(Kind.WAIT, r.unit, r.lane))
        return product

    def rewrite(self, node: Node, target: Any, args: tuple[Any, ...]) -> None:
        """Changes what a node computes, not its role and name. Private in torch (``eager_input_vals``: arguments of
        custom operators, whose strides Inductor keeps); tried on 2.13 and 2.14, there in 2.11 to 2.15.
        """
        node.target, node.args, node.kwargs = target, args, {}
        if "eager_input_vals" in node.meta:
            node.meta["eager_input_vals"] = torch.fx.map_arg((args, {}), lambda n: n.meta["val"])
        node.meta["val"] = self._fake(target, args)

    def fill(self) -> None:
        """Names the wrappers of random operators (`operator`) and gives them values; AOTAutograd does not."""
        for node in self.nodes:
            target, args, kwargs = operator(node)
            if target is node.target:
                continue
            if "val" not in node.meta:
                parts = tuple(u.meta["val"] for u in node.users if is_element(u))
                node.meta["val"] = parts or self._fake(target, args, kwargs)
            self.rename(node, operator_name(target).partition("::")[2])

    def _fake(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        values, named = torch.fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        with self._fake_mode, torch.no_grad():
            return target(*values, **named)

    @cached_property
    def _fake_mode(self) -> FakeTensorMode:
        """The mode of the program's fake tensors. Private in torch (``detect_fake_mode``); tried on 2.11 to 2.15."""
        mode = detect_fake_mode([n.meta.get("val") for n in self.nodes if n.op == "placeholder"])
        assert mode is not None, "a program's placeholders carry fake tensors"
        return mode

    def start(self) -> Node:
        """The first node after the placeholders."""
        return next(n for n in self.nodes if n.op != "placeholder")

    def launch_before(self, launch: Node, target: Node) -> bool:
        """Moves a launch, and the nodes that compute its input, before ``target``. Returns whether anything moved."""
        group, todo = {launch}, [launch]
        while todo:
            for source in todo.pop().all_input_nodes:
                waits = [u for u in source.users if u.target is ops.wait and u.args[0] is source and u < launch]
                for node in (source, *waits):
                    if node.op == "call_function" and node not in group and not node < target:
                        group.add(node)
                        todo.append(node)
        if target in group or launch.next is target:
            return False
        self.move(sorted(group), target)
        return True

    def move(self, nodes: Sequence[Node], before: Node) -> None:
        """Moves nodes, in the given order, before another."""
        for node in nodes:
            before.prepend(node)

    def rename(self, node: Node, name: str) -> None:
        """Renames the node after its role."""
        node._rename(name)

    def set_results(self, values: Sequence[Any]) -> None:
        """Replaces the graph's outputs."""
        self.output.args = (tuple(values),)

    def erase(self, node: Node) -> None:
        """Removes a node without readers."""
        self.graph.erase_node(node)

    def changed(self, text: str) -> None:
        """Records a change that counts of lines do not show."""
        self.changes.append(text)

    def note(self, text: str) -> None:
        """Records the pass's settings, or why it did nothing (invariant 28)."""
        self.notes.append(text)


def equal(before: Sequence[object], after: Sequence[object]) -> bool:
    """Whether two states of a program are the same. Objects of nodes are compared by identity: arguments are immutable,
    and values have no truth.
    """
    return len(before) == len(after) and before[:1] == after[:1] and all(map(is_, before[1:], after[1:]))


def operator_name(target: object) -> str:
    """An operator's name with its namespace, ``aten::mm``; ``""`` for other functions."""
    return str(getattr(getattr(target, "_schema", None), "name", ""))


def is_functional_collective(node: Node) -> bool:
    """Whether it launches one of torch's own collectives, which ``wait_tensor`` completes. Private in torch; tried on
    2.11 to 2.15.
    """
    namespace, _, name = operator_name(node.target).partition("::")
    return namespace == "_c10d_functional" and name != "wait_tensor"


def is_element(node: Node) -> bool:
    """Whether the node is one of several results of another node."""
    return _takes_one(node.target)


def _takes_one(target: object) -> bool:
    return getattr(target, "__name__", "") == "getitem"


def view_of(node: Node) -> Node | None:
    """The node whose storage this one shares, or ``None``.

    Views, in-place results and elements of a multiple output share. The operator's schema tells, not its name.
    """
    if node.op != "call_function" or not _shares(node.target):
        return None
    first = node.args[0]
    return first if isinstance(first, Node) else None


def by_target(fact: Callable[[Any], T]) -> Callable[[Any], T]:
    """Caches a fact about targets of nodes by identity: operators hash slowly, and this is asked for every node."""
    known: dict[int, tuple[object, T]] = {}

    @wraps(fact)
    def cached(target: Any) -> T:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = target, fact(target)
        return found[1]

    return cached


@by_target
def _shares(target: object) -> bool:
    """Whether an operator's result shares the storage of its first argument."""
    if _takes_one(target) or target is torch.ops.aten._unsafe_view.default:
        return True  # their schemas do not say it
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.returns and schema.returns[0].alias_info is not None)


def operator(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operator that a node calls, and its arguments.

    AOTAutograd wraps random operators that backward recomputes: one wrapper saves the generator's state, one restores
    it. Private in torch (``rng_prims``); tried on 2.13.
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
    """Gathers that the program launches before its first wait."""
    nodes = itertools.takewhile(lambda n: n.target is not ops.wait, program.nodes)
    return [n for n in nodes if n.target in (ops.refresh, ops.all_gather)]


def by_module(program: Program, nodes: Iterable[Node]) -> list[list[Node]]:
    """Consecutive nodes of one module's flat buffers, grouped."""
    return [list(run) for _, run in itertools.groupby(nodes, key=lambda node: program.unit(unit_of(node)).fqn)]


def slot_of(node: Node) -> str:
    """Name of the static buffer that the node fills, ``p0`` (gathered) or ``g0`` (gradients); ``""`` if none."""
    place = _slot_argument(node.target)
    number = node.args[place] if place is not None and len(node.args) > place else -1
    if not isinstance(number, int) or number < 0:
        return ""
    return f"{'p' if node.target is ops.all_gather else 'g'}{number}"


@by_target
def _slot_argument(target: Any) -> int | None:
    return ops.SLOT.get(target)


def product_of(launch: Node) -> Node:
    """The value that a launched operation completes: its result, or the argument that it writes in place."""
    return launch.args[0] if launch.target in ops.IN_PLACE else launch  # type: ignore[return-value]


def group_of(program: Program, node: Node) -> str:
    """Name of the process group of a collective."""
    if node.target is ops.collective:
        return Axis.decode(node.args[2]).group  # type: ignore[arg-type]
    return program.spec_of(node).groups[lane_of(node)]


def lane_of(node: Node) -> int:
    """The `GroupIndex` (not the listing's `Lane`) of a unit's collective: that of gathers, unless it reduces."""
    if node.target in (ops.reduce_scatter, ops.all_reduce):
        return node.args[2]  # type: ignore[return-value]
    return 0


def base_of(node: Node) -> Node:
    """The node that owns the storage."""
    while (parent := view_of(node)) is not None:
        node = parent
    return node


def storage_of(node: Node) -> Node:
    """Like `base_of`, but elements of a multiple output own their storage, unless they are views (``split``)."""
    while (parent := view_of(node)) is not None:
        if is_element(node) and view_of(parent) is None:
            break
        node = parent
    return node
