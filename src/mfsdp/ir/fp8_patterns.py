"""Finds parameters that a program reads only as FP8 payloads (one byte per element), and how it computes those.

The analysis follows a parameter's users from its marker. Views and permutations move elements, pointwise operators keep
them separate, ``amax`` of magnitudes gives one amax per block. The first value of one byte per element is the payload.
Its *recipe* is a chain of pointwise operators on the element and on *scales*, which depend on amax alone. Node names
and operator order do not matter, so it works under every lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..config.block_grid import Digit, Grid
from .program import SHAPES, Program, operator_name
from .symbolic_sizes import shape_of

aten, prims = torch.ops.aten, torch.ops.prims

SCALE = "mfsdp_scale"
"""``node.meta`` key of scale computations that a pass has moved before a gather."""

Dims = tuple[tuple[Digit, ...], ...]
"""Per dimension of a value: its digits of an index into the flattened parameter (`config.block_grid`)."""

Step = tuple[Any, tuple[Any, ...]]
"""A pointwise operator of a recipe and its arguments: constants and `Operand`."""


@dataclass(frozen=True)
class Operand:
    kind: str
    """``"element"`` of the parameter, result of a ``"step"``, or a ``"scale"``."""
    number: int = 0


@dataclass(eq=False)
class Fp8Cast:
    """An FP8 payload of a parameter."""

    nodes: list[Node]
    """The nodes that compute it, with the dimensions of each."""
    dims: list[Dims]
    steps: tuple[Step, ...]
    """The recipe; the last step gives the payload."""
    scales: list[tuple[Node, Grid]]
    meaning: Any
    """Equal for equal payloads of one parameter; comparable as text between programs if ``constants`` is empty."""
    constants: list[str] = field(default_factory=list)
    """The program's own tensors that scales depend on."""


@dataclass(eq=False)
class Read:
    """How a program reads one parameter."""

    markers: list[Node]
    offset: int
    elements: dict[Node, Dims] = field(default_factory=dict)
    """Values with all its elements, before the payload."""
    maxima: dict[Node, Dims] = field(default_factory=dict)
    codes: list[Fp8Cast] = field(default_factory=list)
    reason: str = ""
    """Why the program needs it in the policy's dtype."""
    foreign: bool = False
    """Whether an operator that is not torch's own reads it."""


def reads(p: Program, markers: Sequence[Node]) -> list[Read]:
    """Returns how a program reads each parameter of a unit.

    Args:
        markers: all of the unit, in program order.
    """
    found: dict[int, Read] = {}
    whose: dict[Node, Read] = {}
    for marker in markers:
        offset = marker.args[1]
        assert isinstance(offset, int)
        read = found.setdefault(offset, Read([], offset))
        read.markers.append(marker)
        read.elements[marker] = _whole(tuple(marker.meta["val"].shape))
        whose[marker] = read
    meanings = _Meanings(whose)
    todo = list(dict.fromkeys(user for marker in markers for user in marker.users))
    heapify(todo)
    seen = set(todo)
    while todo:  # in program order: inputs come first
        node = heappop(todo)
        if node.target in SHAPES:
            continue
        read, *others = dict.fromkeys(whose[n] for n in node.all_input_nodes if n in whose)
        if others:
            for each in (read, *others):
                each.reason = each.reason or f"{_called(each)} meets another parameter in {node.name}"
            continue
        _follow(node, read, whose, meanings)
        for user in node.users if node in whose else ():
            if user not in seen:
                seen.add(user)
                heappush(todo, user)
    return list(found.values())


def _called(read: Read) -> str:
    return read.markers[0].name


def _follow(node: Node, read: Read, whose: dict[Node, Read], meanings: _Meanings) -> None:
    """Records what a node computes from elements of a parameter."""
    value = node.meta.get("val")
    dims = None
    if isinstance(value, torch.Tensor):
        shape = tuple(shape_of(value))
        largest = _reduced(node, read)
        if largest is not None:
            read.maxima[node] = largest
            return
        source = read.elements.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if source is not None and node.target in _MOVED:
            dims = _MOVED[node.target](source, node, shape)
        elif pointwise(node):
            own = [read.elements[n] for n in node.all_input_nodes if n in read.elements]
            alike = all(d == own[0] for d in own)
            dims = own[0] if alike and tuple(prod(d.size for d in dim) for dim in own[0]) == shape else None
    if dims is None:
        read.reason = read.reason or f"{_called(read)} is read by {_operator(node)}"
        read.foreign |= operator_name(node.target).partition("::")[0] not in ("", "aten", "prims", "mfsdp")
        return
    assert isinstance(value, torch.Tensor)
    read.elements[node] = dims
    if value.dtype.itemsize > 1 or value.dtype is torch.bool:
        whose[node] = read
        return
    del read.elements[node]
    code = _code(node, dims, read, meanings)
    if isinstance(code, str):
        read.reason = read.reason or code
        return
    same = next((c for c in read.codes if c.meaning == code.meaning), None)
    if same is None:
        read.codes.append(code)
    else:
        same.nodes += code.nodes
        same.dims += code.dims


def _operator(node: Node) -> str:
    return operator_name(node.target).removeprefix("aten::") or node.op


# What operators do to elements


def _whole(shape: tuple[int, ...]) -> Dims:
    return tuple((Digit(prod(shape[i + 1 :]), n),) if n != 1 else () for i, n in enumerate(shape))


def _viewed(dims: Dims, node: Node, shape: tuple[int, ...]) -> Dims | None:
    """The dimensions of a view."""
    flat = [d for dim in dims for d in dim]
    if prod(d.size for d in flat) != prod(shape):
        return None
    out = []
    for extent in shape:
        dim = []
        while extent > 1:
            if not flat:
                return None
            digit = flat.pop(0)
            if extent % digit.size == 0:
                dim.append(digit)
                extent //= digit.size
            elif digit.size % extent == 0:
                rest = digit.size // extent
                dim.append(Digit(digit.stride * rest, extent))
                flat.insert(0, Digit(digit.stride, rest))
                extent = 1
            else:
                return None
        out.append(tuple(dim))
    return tuple(out)


def _permuted(dims: Dims, node: Node, shape: tuple[int, ...]) -> Dims:
    order, args = list(range(len(dims))), list[Any](node.args)
    if node.target is aten.permute.default:
        order = [d % len(dims) for d in args[1]]
    elif node.target is aten.t.default:
        order.reverse()
    else:
        a, b = (d % len(dims) for d in args[1:3])
        order[a], order[b] = order[b], order[a]
    return tuple(dims[d] for d in order)


def _same(dims: Dims, node: Node, shape: tuple[int, ...]) -> Dims:
    return dims


_MOVED: dict[Any, Callable[[Dims, Node, tuple[int, ...]], Dims | None]] = {
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _permuted),
    **dict.fromkeys(
        (
            aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
            aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
        ),
        _viewed,
    ),
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default), _same),
}  # fmt: skip
"""Operators that return the same elements in other dimensions."""

_CASTS = (aten._to_copy.default, prims.convert_element_type.default)


def random(node: Node) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def pointwise(node: Node) -> bool:
    """Whether each element of the result depends only on the same element of the arguments."""
    if random(node):
        return False
    if node.target is aten.view.dtype:
        return bool(node.args[0].meta["val"].dtype.itemsize == node.meta["val"].dtype.itemsize)  # type: ignore[union-attr]
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _CASTS


def _reduced(node: Node, read: Read) -> Dims | None:
    """The result's dimensions if the node is an amax of magnitudes."""
    if node.target not in (aten.amax.default, aten.max.default) or not _magnitude(node.args[0], read):
        return None
    dims = read.elements[node.args[0]]  # type: ignore[index]
    over = node.args[1] if len(node.args) > 1 else ()
    gone = {d % len(dims) for d in over} if over else set(range(len(dims)))  # type: ignore[union-attr, operator]
    kept = len(node.args) > 2 and bool(node.args[2])
    return tuple(() if i in gone else dim for i, dim in enumerate(dims) if kept or i not in gone)


def _magnitude(node: Any, read: Read) -> bool:
    """Whether it holds the magnitudes of a parameter's elements, in any order and no narrower dtype."""
    signless = False
    while node not in read.markers:
        if node not in read.elements:
            return False
        if node.target is aten.abs.default:
            signless = True
        elif node.target in _CASTS:
            if node.meta["val"].dtype.itemsize < node.args[0].meta["val"].dtype.itemsize:
                return False
        elif node.target not in _MOVED:
            return False
        node = node.args[0]
    return signless


# Identity of payloads


class _Meanings:
    """Identifies values that depend on amax alone."""

    def __init__(self, whose: dict[Node, Read]):
        self.whose = whose
        self._known: dict[Node, str | None] = {}

    def of(self, node: Node) -> str | None:
        """Equal for equal values; ``None`` if the value depends on more than amax and constants and may differ between
        ranks.
        """
        if node not in self._known:
            self._known[node] = self._of(node)
        return self._known[node]

    def _of(self, node: Node) -> str | None:
        if not self._alone(node):
            return None
        read = self._largest(node)
        if read is not None:
            return self._name(("largest", read.offset, read.maxima[node], node.meta["val"].dtype))
        if node.op == "get_attr":
            return self._name(("constant", node.target))
        args, spec = pytree.tree_flatten((node.args, node.kwargs))
        told = [("node", self.of(a)) if isinstance(a, Node) else ("constant", repr(a)) for a in args]
        return self._name((str(node.target), tuple(told), str(spec)))

    def _largest(self, node: Node) -> Read | None:
        """The parameter whose amax it is."""
        return next((r for n in node.all_input_nodes if (r := self.whose.get(n)) and node in r.maxima), None)

    def _sources(self, node: Node) -> Iterator[Node]:
        """A node and all that it is computed from, up to amax and constants."""
        todo, seen = [node], {node}
        while todo:
            node = todo.pop()
            yield node
            if node.op != "get_attr" and self._largest(node) is None:
                todo += [n for n in node.all_input_nodes if n not in seen]
                seen.update(node.all_input_nodes)

    def _alone(self, node: Node) -> bool:
        """Whether it depends on amax and constants alone."""
        return all(
            n.op == "get_attr" or self._largest(n) is not None
            or (n.op == "call_function" and n not in self.whose and not random(n))
            for n in self._sources(node)
        )  # fmt: skip

    @staticmethod
    def _name(meaning: object) -> str:
        """A hash, the same in every program."""
        return sha256(repr(meaning).encode()).hexdigest()[:16]

    def constants(self, node: Node) -> list[str]:
        """Names of the program's tensors that a scale depends on."""
        return [n.name for n in self._sources(node) if n.op == "get_attr"]


def _code(node: Node, dims: Dims, read: Read, meanings: _Meanings) -> Fp8Cast | str:
    """The payload and its recipe, or why there is none."""
    steps: list[Step] = []
    numbers: dict[Node, Operand] = {}
    scales: list[tuple[Node, Grid]] = []
    means: list[Any] = []

    def operand(arg: Any, at: Dims, by: Node) -> Any:
        if not isinstance(arg, Node):
            return arg
        if arg in read.elements or arg is node:
            return element(arg)
        meaning = meanings.of(arg)
        if meaning is None:
            raise _Unlike(f"the scale of {_called(read)} depends on more than maxima of weights ({arg.name})")
        kinds = {n.meta["val"].dtype for n in by.all_input_nodes if n in read.elements}
        if not arg.meta["val"].ndim and kinds != {arg.meta["val"].dtype}:
            # in type promotion a 0-d tensor's dtype counts less
            raise _Unlike(f"{_called(read)} meets a scale of another dtype in {_operator(by)}")
        grid = _grid(read.offset, at, arg)
        means.append((meaning, grid))
        scales.append((arg, grid))
        return Operand("scale", len(scales) - 1)

    def element(at: Node) -> Operand:
        while at.target in _MOVED and at not in read.markers:
            at = at.args[0]  # type: ignore[assignment]
        if at in read.markers:
            return Operand("element")
        if at not in numbers:
            if at.target is aten._to_copy.default:
                step: Step = (_CASTS[1], (element(at.args[0]), at.meta["val"].dtype))  # type: ignore[arg-type]
            elif at.kwargs:
                raise _Unlike(f"{_called(read)} is quantised with arguments of {_operator(at)} that have names")
            else:
                own = dims if at is node else read.elements[at]
                step = (at.target, tuple(operand(arg, own, at) for arg in at.args))
            steps.append(step)
            numbers[at] = Operand("step", len(steps) - 1)
        return numbers[at]

    try:
        element(node)
    except _Unlike as why:
        return str(why)
    constants = [name for scale, _ in scales for name in meanings.constants(scale)]
    return Fp8Cast([node], [dims], tuple(steps), scales, (tuple(steps), tuple(means)), constants)


class _Unlike(Exception):
    """A shard cannot be quantized as the program does it."""


def _grid(offset: int, dims: Dims, scale: Node) -> Grid:
    """Maps each element of a parameter to the element of a scale that broadcasts to it."""
    shape = shape_of(scale.meta["val"])
    extents = (1,) * (len(dims) - len(shape)) + tuple(shape)
    kept = tuple(dim if extent > 1 else () for dim, extent in zip(dims, extents, strict=True))
    return blocks(offset, dims, kept, [prod(extents[i + 1 :]) for i in range(len(extents))])


def blocks(offset: int, every: Dims, kept: Dims, strides: Sequence[int]) -> Grid:
    """Maps elements to their block's amax in a tensor with the given strides.

    Args:
        every: dimensions of the elements.
        kept: dimensions of the amax.
    """
    places: dict[tuple[int, int], int] = {}
    for dim, step in zip(kept, strides, strict=True):
        for digit in reversed(dim):
            places[digit.stride, digit.size] = step
            step *= digit.size
    digits = [Digit(d.stride, d.size, places.get((d.stride, d.size), 0)) for dim in every for d in dim]
    return Grid(offset, tuple(sorted(digits, reverse=True)))
