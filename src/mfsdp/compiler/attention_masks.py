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
from torch.fx.node import Argument
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..sharding.mutation_check import written
from .layer_match import CALL, CHECKPOINT
from .mask_values import MAX_ELEMENTS, TILE, Pure, Stays, Values, name_of, shape_of

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
    operands, input_names = _operands(gm), dict(zip(gm.graph.find_nodes(op="placeholder"), names, strict=True))
    verdicts: dict[fx.Node, str] = {}
    changed = False
    bodies = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    for body in bodies:
        for node in body.graph.find_nodes(op="call_function", target=ATTENTION):
            given = _arguments(node)
            mask = given["attn_mask"]
            if not isinstance(mask, fx.Node):
                continue
            reason = _unfit(given)
            if not reason and mask not in verdicts:
                verdicts[mask] = _verdict(mask, operands, input_names)
            verdict = reason or verdicts[mask]
            # with more keys than queries, what is_causal means is ambiguous
            if verdict == NOTHING or (verdict == CAUSAL and shape_of(given["query"])[-2] == shape_of(given["key"])[-2]):
                changed = True
                repeated = _repeated(given)
                if repeated:
                    given["key"], given["value"], given["enable_gqa"] = *repeated, True
                given["attn_mask"], given["is_causal"] = None, verdict == CAUSAL
                verdict += "; keys and values are not repeated (enable_gqa=True)" if repeated else ""
                before = list(node.all_input_nodes)
                node.args, node.kwargs = (), given
                for value in before:
                    _erase(value, operands)
            found[verdict] += 1
    if changed:
        for body in bodies:
            body.recompile()
    return [f"{n} x {ATTENTION.__name__}: {text}" for text, n in found.items()]


CAUSAL = "a constant causal mask is replaced by is_causal=True"
NOTHING = "a constant mask that masks nothing is left out"

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**_DEFAULTS, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}


def _unfit(given: Mapping[str, Any]) -> str:
    """Returns why the mask of this call is not evaluated; ``""`` if it can be. Private in torch
    (``torch.utils._python_dispatch``); tried on 2.13, there in 2.11 to 2.15.
    """
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


def _verdict(mask: fx.Node, operands: Mapping[fx.Node, fx.Node], names: Mapping[fx.Node, str]) -> str:
    """Returns `CAUSAL`, `NOTHING`, or why the mask stays."""
    size = list(shape_of(mask))
    try:
        _constant(mask, operands, names)
        with torch.device("cpu"), torch.no_grad(), Pure():
            found = _pattern(Values(operands), mask, *size[-2:])
    except Stays as why:
        return f"a mask stays: {why}"
    except Exception as error:  # any error of torch for operators that cannot run here
        return f"a mask stays: {type(error).__name__} where it was evaluated: {str(error).splitlines()[:1]}"
    return found or f"a constant mask {size} stays: it is not causal, and masks something"


def _pattern(values: Values, mask: fx.Node, rows: int, columns: int) -> str:
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
        raise Stays(f"{list(shape_of(mask))} is too large to be evaluated while compiling; leave it out of the model")
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
        Stays: elsewhere the mask adds a number that does not mask.
    """
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
        raise Stays("it adds numbers")
    return seen


def _constant(mask: fx.Node, operands: Mapping[fx.Node, fx.Node], names: Mapping[fx.Node, str]) -> None:
    """Checks all values that a mask is computed from.

    Raises:
        Stays: a value is not known at compile time.
    """
    seen: set[fx.Node] = set()
    todo = [mask]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("example_value")
        if node in operands:
            todo.append(operands[node])
        elif node.op == "placeholder":
            name = names.get(node, node.name)
            raise Stays(
                f"{list(shape_of(mask))} depends on the input {name}: it is computed and read in every step, and "
                f"attention takes no flash kernel (a third as fast on an H100). If {name} hides nothing, do not pass it"
            )
        elif node.op not in ("call_function", "call_method") or not _known(node):
            raise Stays(f"it depends on {getattr(node.target, '__name__', node.target)}")
        elif not isinstance(value, (torch.Tensor, int, float, bool, tuple, list)) or written(node):
            raise Stays(f"it depends on {node.name}, which is written to or unknown")
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
    if key is None or value is None or shape_of(key) != shape_of(value) or shape_of(key)[-1] != query.shape[-1]:
        return None
    return key, value


def _ungrouped(node: fx.Node) -> fx.Node | None:
    """Returns ``x`` of ``x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)``."""
    expand: Any = node.args[0] if name_of(node) in ("reshape", "contiguous") and node.args else None
    index: Any = expand.args[0] if isinstance(expand, fx.Node) and name_of(expand) == "expand" else None
    if not isinstance(index, fx.Node) or index.target is not operator.getitem:
        return None
    source, places = index.args
    full = slice(None)
    if not isinstance(source, fx.Node) or places not in ((full, full, None, full, full), (full, full, None)):
        return None
    if len(shape_of(source)) != 4 or len(shape_of(expand)) != 5:
        return None
    (b, h, t, d), n = shape_of(source), shape_of(expand)[2]
    return source if shape_of(expand) == (b, h, n, t, d) and shape_of(node) == (b, h * n, t, d) else None


def _calls(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, int, fx.GraphModule]]:
    """Yields calls of checkpoints and shared graphs, the index of the first operand, and the graph that is called."""
    for target, first in ((CHECKPOINT, 1), (CALL, 2)):
        for call in gm.graph.find_nodes(op="call_function", target=target):
            yield call, first, getattr(gm, str(call.args[0].target))  # type: ignore[union-attr]


def _operands(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Maps placeholders of checkpoints and shared graphs to the outer value, if all calls have the same one."""
    found: dict[fx.Node, set[Argument]] = {}
    for graph in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        for call, first, body in _calls(graph):
            for own, value in zip(body.graph.find_nodes(op="placeholder"), call.args[first:], strict=False):
                found.setdefault(own, set()).add(value)
    one = {own: next(iter(values)) for own, values in found.items() if len(values) == 1}
    return {own: value for own, value in one.items() if isinstance(value, fx.Node)}


def _erase(node: fx.Node, operands: Mapping[fx.Node, fx.Node]) -> None:
    """Erases an unused value, and inputs that nothing else reads."""
    inputs = list(node.all_input_nodes)
    if node.users or (node.op == "placeholder" and node not in operands):
        return
    if node.op == "placeholder":
        inputs = [operands[node]]
        number = node.graph.find_nodes(op="placeholder").index(node)
        for call, first, body in _calls(operands[node].graph.owning_module):  # type: ignore[arg-type]
            if body.graph is node.graph:
                call.args = tuple(arg for i, arg in enumerate(call.args) if i != first + number)
    node.graph.erase_node(node)
    for value in inputs:
        _erase(value, operands)
