"""Evaluates attention masks that depend on constants alone at compile time; causal ones become ``is_causal=True``.

Note [Constant masks]
Models often build their attention mask in the graph, from ``arange`` and positions: transformers does so if it would
have to inspect values to leave the mask out. Attention then reads the mask from memory for every head and cannot use
the fastest kernels: on an H100 it took 63.6 ms instead of 20.1 ms for Llama-3.2-1B with 2 x 4,096 tokens. `fold_masks`
checks every ``scaled_dot_product_attention`` in Dynamo's graph, before equal layers are outlined:

    mask is                                    becomes
    lower triangular, as many queries as keys  is_causal=True
    nothing masked                             no mask
    anything else                              stays

In a float mask, 0 keeps an element, and -inf or the dtype's least number masks it: softmax gives exactly 0 there, since
no row is masked entirely. A mask is constant if torch's operators compute it from numbers: no graph input, no unknown
length, nothing random, no writes. If keys and values are repeated for groups of queries only because of a mask
(transformers' ``repeat_kv``), ``enable_gqa=True`` takes them unrepeated.

Masks are evaluated on the CPU and never materialized in full (16 GiB for 131,072 tokens): comparisons of positions give
bounds for each tile, and only tiles along the diagonal are evaluated element by element.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ..sharding.mutation_check import written
from .layer_match import CALL, CHECKPOINT

TILE = 256
"""Rows and columns of a tile."""

MAX_ELEMENTS = 2**28
"""Limit of elements evaluated one by one, and of bytes of a value evaluated in full: about a second on one core."""

ATTENTION = torch.nn.functional.scaled_dot_product_attention


def fold_masks(gm: fx.GraphModule, names: Sequence[str]) -> list[str]:
    """Removes attention masks that are known at compile time, in place.

    Args:
        gm: Dynamo's graph.
        names: names of its inputs, in order, for texts.

    Returns:
        Texts for the listing: what was replaced, what was not, and why.
    """
    found: Counter[str] = Counter()
    stands, given_names = _operands(gm), dict(zip(gm.graph.find_nodes(op="placeholder"), names, strict=True))
    verdicts: dict[fx.Node, str] = {}
    changed = False
    for body in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        for node in body.graph.find_nodes(op="call_function", target=ATTENTION):
            given = _arguments(node)
            mask = given["attn_mask"]
            if not isinstance(mask, fx.Node):
                continue
            reason = _unfit(node, given)
            if not reason and mask not in verdicts:
                verdicts[mask] = _verdict(mask, stands, given_names)
            verdict = reason or verdicts[mask]
            if verdict in (CAUSAL, NOTHING) and (verdict == NOTHING or _square(given)):
                changed = True
                repeated = _repeated(given)
                if repeated:
                    given["key"], given["value"], given["enable_gqa"] = *repeated, True
                given["attn_mask"], given["is_causal"] = None, verdict == CAUSAL
                verdict += "; keys and values are not repeated (enable_gqa=True)" if repeated else ""
                before = list(node.all_input_nodes)
                node.args, node.kwargs = (), given
                for value in before:
                    _erase(value, stands)
            found[verdict] += 1
    if changed:
        for body in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
            body.recompile()
    return [f"{n} x {ATTENTION.__name__}: {text}" for text, n in found.items()]


CAUSAL = "a constant causal mask is replaced by is_causal=True"
NOTHING = "a constant mask that masks nothing is left out"

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**_DEFAULTS, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}


def _operands(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Maps placeholders of checkpoints and shared graphs to the outer value, if all calls have the same one."""
    found: dict[fx.Node, set[Any]] = {}
    for graph in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        for target, first in ((CHECKPOINT, 1), (CALL, 2)):
            for call in graph.graph.find_nodes(op="call_function", target=target):
                body: Any = getattr(graph, str(call.args[0].target))  # type: ignore[union-attr]
                for own, value in zip(body.graph.find_nodes(op="placeholder"), call.args[first:], strict=False):
                    found.setdefault(own, set()).add(value)
    one = {own: next(iter(values)) for own, values in found.items() if len(values) == 1}
    return {own: value for own, value in one.items() if isinstance(value, fx.Node)}


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["example_value"].shape)


def _unfit(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Returns why the mask of this call is not evaluated; ``""`` if it can be."""
    values = [given[name].meta.get("example_value") for name in ("query", "key", "value", "attn_mask")]
    query, key, _, mask = values
    if any(type(v).__name__ == "DTensor" or is_traceable_wrapper_subclass(v) for v in values):
        return "a mask stays: tensors are DTensors"
    if any(isinstance(n, torch.SymInt) for v in values for n in v.shape):
        return (
            "a mask stays: lengths are not known while compiling (with torch.compile(dynamic=False), and batches of "
            "few lengths, a causal one is replaced)"
        )
    if mask.dtype not in (torch.bool, query.dtype) or mask.requires_grad or given["is_causal"] is not False:
        return "a mask stays: it has another dtype, needs a gradient, or comes with is_causal"
    pairs = zip(reversed(mask.shape[:-2]), reversed(query.shape[:-2]), strict=False)
    over = mask.dim() > query.dim() or any(m not in (1, q) for m, q in pairs)
    fits = len(mask.shape) >= 2 and all(
        m in (1, n) for m, n in zip(mask.shape[-2:], (query.shape[-2], key.shape[-2]), strict=True)
    )
    return "" if fits and not over else "a mask stays: the result takes a shape from it"


def _square(given: Mapping[str, Any]) -> bool:
    """Returns whether ``is_causal`` is unambiguous: there are as many queries as keys."""
    return bool(_shape(given["query"])[-2] == _shape(given["key"])[-2])


class _Stays(Exception):
    """A mask is not known at compile time; the message says why."""


def _verdict(mask: fx.Node, stands: Mapping[fx.Node, fx.Node], names: Mapping[fx.Node, str]) -> str:
    """Returns `CAUSAL`, `NOTHING`, or why the mask stays."""
    size = list(_shape(mask))
    try:
        _constant(mask, stands, names)
        with torch.device("cpu"), torch.no_grad(), _Pure():
            found = _pattern(_Values(stands), mask, *size[-2:])
    except _Stays as why:
        return f"a mask stays: {why}"
    except Exception as error:  # any error of torch for operators that cannot run here
        return f"a mask stays: {type(error).__name__} where it was evaluated: {str(error).splitlines()[:1]}"
    return found or f"a constant mask {size} stays: it is not causal, and masks something"


def _pattern(values: _Values, mask: fx.Node, rows: int, columns: int) -> str:
    """Returns `CAUSAL`, `NOTHING`, or ``""``. Checks the bounds of each tile first, then the elements of undecided
    tiles, and of tiles on the diagonal if the mask may be causal.
    """
    through, masked = (_whole_axes(x, -(-rows // TILE), -(-columns // TILE)) for x in _sides(*values.bounds(mask)))
    grid = torch.ones_like(through)
    below = grid.tril(-1)
    causal = rows == columns and not bool((through & grid.triu(1) | masked & below).any())
    nothing = not bool(masked.any())
    open_ = ~through & ~masked | (grid ^ below ^ grid.triu(1) if causal else torch.zeros_like(grid))
    tiles = open_.nonzero().tolist()
    if len(tiles) * TILE**2 > MAX_ELEMENTS:
        raise _Stays(f"{list(_shape(mask))} is too large to be evaluated while compiling; leave it out of the model")
    for i, j in tiles:
        seen = _through(values.tile(mask, i, j))
        expected = torch.ones(seen.shape[-2:], dtype=torch.bool).tril_((i - j) * TILE)
        causal, nothing = causal and bool((seen == expected).all()), nothing and bool(seen.all())
        if not (causal or nothing):
            break
    return NOTHING if nothing else CAUSAL if causal else ""


def _sides(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which tiles keep all elements, and which mask all."""
    if low.dtype == torch.bool:
        return low & high, ~low & ~high
    return (low == 0) & (high == 0), high <= torch.finfo(low.dtype).min


def _whole_axes(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Reduces leading axes with ``all``, so that one truth value is left for each tile."""
    x = x[(None,) * (2 - x.dim())] if x.dim() < 2 else x.flatten(0, -3).all(0) if x.dim() > 2 else x
    return x.expand(rows, columns)


def _through(mask: torch.Tensor) -> torch.Tensor:
    """Returns where a mask keeps elements, as booleans.

    Raises:
        _Stays: elsewhere the mask adds a number that does not mask.
    """
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
        raise _Stays("it adds numbers")
    return seen


def _constant(mask: fx.Node, stands: Mapping[fx.Node, fx.Node], names: Mapping[fx.Node, str]) -> None:
    """Checks all values that a mask is computed from.

    Raises:
        _Stays: a value is not known at compile time.
    """
    seen: set[fx.Node] = set()
    todo = [mask]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("example_value")
        if node in stands:
            todo.append(stands[node])
        elif node.op == "placeholder":
            name = names.get(node, node.name)
            raise _Stays(
                f"{list(_shape(mask))} depends on the input {name}: it is computed and read in every step, and "
                f"attention takes no flash kernel (a third as fast on an H100). If {name} hides nothing, do not pass it"
            )
        elif node.op not in ("call_function", "call_method") or not _known(node):
            raise _Stays(f"it depends on {getattr(node.target, '__name__', node.target)}")
        elif not isinstance(value, (torch.Tensor, int, float, bool, tuple, list)) or written(node):
            raise _Stays(f"it depends on {node.name}, which is written to or unknown")
        todo += node.all_input_nodes


def _known(node: fx.Node) -> bool:
    """Returns whether a node calls a torch operator on tensors, or a Python operator."""
    if node.op == "call_method":
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).startswith("aten.")
    module = getattr(node.target, "__module__", None) or ""
    return module in ("_operator", "builtins", "torch", "torch.functional", "torch._C._nn", "torch.nn.functional") or (
        getattr(torch, getattr(node.target, "__name__", ""), None) is node.target
    )


class _Pure(TorchDispatchMode):
    """Refuses operators that draw random numbers and operators that are not torch's own. Private in torch
    (``TorchDispatchMode``); tried on 2.13, there in 2.11 to 2.15.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Stays(f"{func} draws random numbers")
        if func.namespace != "aten":
            raise _Stays(f"it depends on {func}")
        return func(*args, **(kwargs or {}))


_POINTWISE = {
    "le", "lt", "ge", "gt", "eq", "ne", "and_", "or_", "xor", "invert", "neg", "add", "sub", "mul", "truediv",
    "floordiv", "mod", "abs", "to", "bool", "float", "where", "masked_fill", "logical_and", "logical_or",
    "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "contiguous", "clone", "expand",
}  # fmt: skip
"""Names of elementwise operators: a result depends only on the elements at its own position, with broadcasting."""

Bounds = tuple[torch.Tensor, torch.Tensor]


class _Values:
    """Values of nodes in Dynamo's graph: in full, by tile, or as bounds of each tile. All broadcast to the node's
    shape; leading axes along which all elements are equal are cut to one.
    """

    def __init__(self, stands: Mapping[fx.Node, fx.Node]):
        self.stands = stands
        self._whole: dict[fx.Node, Any] = {}
        self._leaves: dict[fx.Node, torch.Tensor] = {}
        self._bounds: dict[fx.Node, Bounds] = {}

    def whole(self, node: fx.Node) -> Any:
        """Returns the full value."""
        node = self._meant(node)
        if node not in self._whole:
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor) and value.numel() * value.itemsize > MAX_ELEMENTS:
                raise _Stays(f"{_name(node)} {list(value.shape)} is too large to be evaluated while compiling")
            self._whole[node] = _called(node, self.whole)
        return self._whole[node]

    def tile(self, node: fx.Node, i: int, j: int) -> torch.Tensor:
        """Returns the tile in tile row i and tile column j."""
        node = self._meant(node)
        if _in_pieces(node):
            if _name(node) == "expand":
                return _at(self.tile(node.args[0], i, j), node)  # type: ignore[arg-type]
            return _called(node, lambda x: self.tile(x, i, j) if _is_tensor(x) else self.whole(x))  # type: ignore[no-any-return]
        value = self._leaf(node)
        for axis, number in ((-2, i), (-1, j)):
            if value.dim() >= -axis and value.shape[axis] > 1:
                start = number * TILE
                value = value.narrow(axis, start, min(TILE, value.shape[axis] - start))
        return value

    def bounds(self, node: fx.Node) -> Bounds:
        """Returns a lower and an upper bound of the elements of every tile."""
        node = self._meant(node)
        if node not in self._bounds:
            rule = (
                _RULES.get(_name(node)) if _in_pieces(node) and not node.kwargs.keys() - {"device", "dtype"} else None
            )
            given = (
                [self.bounds(x) if isinstance(x, fx.Node) and _is_tensor(x) else x for x in node.args] if rule else []
            )
            found = rule(node, *given) if rule else None
            self._bounds[node] = found or self._bounds_of_all(node)
        return self._bounds[node]

    def _bounds_of_all(self, node: fx.Node) -> Bounds:
        low = high = self._leaf(node)
        for axis in (-1, -2):
            if low.dim() >= -axis and (size := low.shape[axis]) > 1:
                places = torch.arange(-(-size // TILE) * TILE).clamp_(max=size - 1)
                low, high = (
                    f(x.index_select(axis, places).unflatten(axis, (-1, TILE)), axis)
                    for f, x in ((torch.amin, low), (torch.amax, high))
                )
        return low, high

    def _leaf(self, node: fx.Node) -> torch.Tensor:
        if node not in self._leaves:
            value = self.whole(node)
            for axis in range(value.dim() - 2):
                first = value.narrow(axis, 0, 1)
                value = first if value.shape[axis] > 1 and bool((value == first).all()) else value
            self._leaves[node] = value
        return self._leaves[node]

    def _meant(self, node: fx.Node) -> fx.Node:
        while node in self.stands:
            node = self.stands[node]
        return node


def _in_pieces(node: fx.Node) -> bool:
    """Returns whether a value is large and the result of an elementwise operator."""
    return _name(node) in _POINTWISE and node.meta["example_value"].numel() > TILE**2


def _at(value: torch.Tensor, node: fx.Node) -> torch.Tensor:
    return value[(None,) * (len(_shape(node)) - value.dim())]


# Rules for bounds: take a node, and bounds or numbers for its arguments; return ``None`` if they do not apply


def _pair(x: Any) -> Bounds:
    return x if isinstance(x, tuple) else (torch.as_tensor(x), torch.as_tensor(x))


def _le(node: fx.Node, a: Any, b: Any) -> Bounds:
    (a, over), (b, above) = _pair(a), _pair(b)
    return over <= b, a <= above


def _lt(node: fx.Node, a: Any, b: Any) -> Bounds:
    (a, over), (b, above) = _pair(a), _pair(b)
    return over < b, a < above


def _eq(node: fx.Node, a: Any, b: Any) -> Bounds:
    (a, over), (b, above) = _pair(a), _pair(b)
    return (a == above) & (over == b), (a <= above) & (b <= over)


def _and(node: fx.Node, a: Any, b: Any) -> Bounds | None:
    (a, over), (b, above) = _pair(a), _pair(b)
    return (a & b, over & above) if a.dtype == b.dtype == torch.bool else None


def _or(node: fx.Node, a: Any, b: Any) -> Bounds | None:
    (a, over), (b, above) = _pair(a), _pair(b)
    return (a | b, over | above) if a.dtype == b.dtype == torch.bool else None


def _not(node: fx.Node, a: Any) -> Bounds | None:
    return (~a[1], ~a[0]) if a[0].dtype == torch.bool else None


def _add(node: fx.Node, a: Any, b: Any) -> Bounds | None:
    (a, over), (b, above) = _pair(a), _pair(b)
    return None if a.is_floating_point() or b.is_floating_point() else (a + b, over + above)


def _sub(node: fx.Node, a: Any, b: Any) -> Bounds | None:
    (a, over), (b, above) = _pair(a), _pair(b)
    return None if a.is_floating_point() or b.is_floating_point() else (a - above, over - b)


def _same(node: fx.Node, a: Any, *rest: Any) -> Bounds | None:
    """Rule for operators that return their argument, as it is or in a dtype that keeps its order."""
    dtype = node.meta["example_value"].dtype
    if dtype != a[0].dtype and (dtype == torch.bool or a[0].dtype != torch.bool):
        return None
    return _at(a[0].to(dtype), node), _at(a[1].to(dtype), node)


def _where(node: fx.Node, condition: Any, a: Any, b: Any) -> Bounds | None:
    (always, ever), (a, over), (b, above) = condition, _pair(a), _pair(b)
    dtype = node.meta["example_value"].dtype
    a, over, b, above = (x.to(dtype) for x in (a, over, b, above))
    low, high = torch.minimum(a, b), torch.maximum(over, above)
    return torch.where(always, a, torch.where(ever, low, b)), torch.where(always, over, torch.where(ever, high, above))


_RULES: dict[str, Any] = {
    "le": _le, "lt": _lt, "ge": lambda node, a, b: _le(node, b, a), "gt": lambda node, a, b: _lt(node, b, a),
    "eq": _eq, "ne": lambda node, a, b: tuple(~x for x in reversed(_eq(node, a, b))), "and_": _and, "or_": _or,
    "logical_and": _and, "logical_or": _or, "bitwise_and": _and, "bitwise_or": _or, "invert": _not,
    "logical_not": _not, "bitwise_not": _not, "add": _add, "sub": _sub, "to": _same, "bool": _same, "float": _same,
    "contiguous": _same, "clone": _same, "expand": _same, "where": _where,
    "masked_fill": lambda node, x, condition, value: _where(node, condition, value, x),
}  # fmt: skip


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _called(node: fx.Node, value: Any) -> Any:
    """Runs a node on the CPU with the values of its arguments."""

    def held(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return value(x)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    args: Any = map_aggregate(node.args, held)
    kwargs: Any = {
        k: "cpu" if k == "device" and v is not None else map_aggregate(v, held) for k, v in node.kwargs.items()
    }
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _repeated(given: Mapping[str, Any]) -> tuple[fx.Node, fx.Node] | None:
    """Returns keys and values before their repetition for groups of queries, if both are repeated equally and a kernel
    takes them unrepeated. Only 16-bit dtypes have such a kernel: with 32 bits, attention on a GPU would materialize all
    scores.
    """
    query = given["query"].meta["example_value"]
    if query.dtype.itemsize != 2 or given["enable_gqa"] or query.dim() != 4 or query.shape[-1] > 256:
        return None
    if not torch.backends.cuda.flash_sdp_enabled():
        return None
    found = [_ungrouped(given[name]) for name in ("key", "value")]
    key, value = found
    if key is None or value is None or _shape(key) != _shape(value) or _shape(key)[-1] != query.shape[-1]:
        return None
    return key, value


def _ungrouped(node: fx.Node) -> fx.Node | None:
    """Returns ``x`` of ``x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)``."""
    expand: Any = node.args[0] if _name(node) in ("reshape", "contiguous") and node.args else None
    index: Any = expand.args[0] if isinstance(expand, fx.Node) and _name(expand) == "expand" else None
    if not isinstance(index, fx.Node) or index.target is not operator.getitem:
        return None
    source, places = index.args
    full = slice(None)
    if not isinstance(source, fx.Node) or places not in ((full, full, None, full, full), (full, full, None)):
        return None
    b, h, t, d = shape = _shape(source) if len(_shape(source)) == 4 else (0, 0, 0, 0)
    n = _shape(expand)[2] if len(_shape(expand)) == 5 else 0
    same = _shape(expand) == (b, h, n, t, d) and _shape(node) == (b, h * n, t, d) and shape != (0, 0, 0, 0)
    return source if same else None


def _erase(node: fx.Node, stands: Mapping[fx.Node, fx.Node]) -> None:
    """Erases an unused value, and inputs that nothing else reads."""
    if node.users or (node.op == "placeholder" and node not in stands):
        return
    if node.op == "placeholder":
        number = node.graph.find_nodes(op="placeholder").index(node)
        outer = stands[node]
        for call in _callers(node, outer):
            call.args = tuple(a for i, a in enumerate(call.args) if i != number + (2 if call.target is CALL else 1))
        node.graph.erase_node(node)
        _erase(outer, stands)
        return
    inputs = list(node.all_input_nodes)
    node.graph.erase_node(node)
    for value in inputs:
        _erase(value, stands)


def _callers(placeholder: fx.Node, outer: fx.Node) -> Iterator[fx.Node]:
    """Yields the calls of the placeholder's graph."""
    for call in list(outer.users):
        if call.target in (CHECKPOINT, CALL):
            body = getattr(call.graph.owning_module, str(call.args[0].target))  # type: ignore[union-attr]
            if body.graph is placeholder.graph:
                yield call
