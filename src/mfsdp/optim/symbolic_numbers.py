"""Symbolic numbers: an optimizer's arithmetic as text, while `step_tracer` records its step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from ..dtensor.eager_autograd import Args, Kwargs
    from ..dtensor.sharded_dtensor import Types

aten = torch.ops.aten


Value = bool | int | float


class CannotRecord(Exception):
    """No graph can express the step; the message says why."""


_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "mod": "%", "truediv": "/", "float_truediv": "/", "int_truediv": "/",
    "floordiv": "//", "int_floordiv": "//", "pow": "**", "float_pow": "**", "pow_by_natural": "**",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "and", "or_": "or",
}  # fmt: skip
_MATH = ("sqrt", "exp", "log", "sin", "cos", "tanh")
_FUNCTIONS = {
    "neg": "-", "abs": "abs", "sym_float": "float", "floor": "math.floor", "ceil": "math.ceil", "trunc": "math.trunc",
    "sym_min": "min", "sym_max": "max", **{f"sym_{name}": f"math.{name}" for name in _MATH},
}  # fmt: skip


class Number:
    """The node of a ``torch.SymFloat``: a value and the text that computes it, in place of torch's own expressions.
    Private in torch (the interface of such nodes); tried on 2.13, not on the others of 2.11 to 2.15.
    """

    constant = None

    def __init__(self, value: Value, text: str, guards: dict[str, bool]):
        self.value, self.text, self.guards = value, text, guards
        """``guards``: conditions that must hold, and whether each fixes a number's value."""

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def is_constant(self) -> bool:
        return False

    is_nested_int = is_constant

    def maybe_as_int(self) -> None:
        return None

    def _graph_repr(self) -> str:
        return self.text

    def wrap_float(self, value: Value) -> Number:
        return Number(value, f"({value!r})", self.guards)

    wrap_int = wrap_bool = wrap_float

    def guard_float(self, file: object = "", line: object = 0) -> Value:
        """Returns the value to Python, and adds a guard."""
        if type(self.value) is bool:
            self.guards[self.text if self.value else f"(not {self.text})"] = False
        else:
            self.guards[f"({self.text} == {self.value!r})"] = True
        return self.value

    guard_int = guard_bool = expect_true = guard_or_false = guard_or_true = int_ = guard_float

    def bool_(self) -> Value:
        return (self if type(self.value) is bool else self.ne(self.wrap_float(0))).guard_float()

    def __getattr__(self, name: str) -> Callable[..., Number]:
        if name in _SYMBOLS:
            return lambda other: self._of(f"({{}} {_SYMBOLS[name]} {{}})", self, other)
        if name in _FUNCTIONS:
            return lambda *others: self._of(f"{_FUNCTIONS[name]}({{}}{', {}' * len(others)})", self, *others)
        raise AttributeError(name)

    def _of(self, form: str, *given: Number) -> Number:
        names = [f"x{i}" for i in range(len(given))]
        values = {name: n.value for name, n in zip(names, given, strict=True)}
        value = eval(form.format(*names), {"math": math, **values})
        return Number(value, form.format(*(n.text for n in given)), self.guards)

    @property
    def symbol(self) -> torch.SymInt | torch.SymFloat:
        return torch.SymInt(self) if type(self.value) is int else torch.SymFloat(self)


def node_of(x: object) -> Number | None:
    node = getattr(x, "node", None) if isinstance(x, (torch.SymFloat, torch.SymInt, torch.SymBool)) else None
    return node if isinstance(node, Number) else None


@contextmanager
def math_of_numbers() -> Iterator[None]:
    """Makes functions of ``math`` accept symbolic numbers."""

    def following(name: str, plain: Callable[..., float]) -> Callable[..., Any]:
        def function(x: Any, *more: Any) -> Any:
            node = None if more else node_of(x)
            return plain(x, *more) if node is None else getattr(node, f"sym_{name}")().symbol

        return function

    before = {name: getattr(math, name) for name in _MATH}
    try:
        for name, plain in before.items():
            setattr(math, name, following(name, plain))
        yield
    finally:
        for name, plain in before.items():
            setattr(math, name, plain)


# Operators on numbers

_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, alpha=1: x + alpha * y,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "rsub": lambda x, y, alpha=1: y - alpha * x,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "neg": lambda x: -x,
    "sqrt": lambda x: x**0.5,
    "reciprocal": lambda x: 1.0 / x,
    "fill": lambda x, y: y,
    "copy": lambda x, y, non_blocking=False: y,
    "zero": lambda x: 0.0,
    **dict.fromkeys(("clone", "_to_copy"), lambda x, **_: x),
}
"""By operator name, for zero-dimensional tensors that are all numbers."""

_OF_TENSORS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y, alpha=1: x + alpha * y,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "rsub": lambda x, y, alpha=1: y - alpha * x,
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "fill": lambda x, y: torch.zeros_like(x) + y,
    "full_like": lambda x, y, **_: torch.zeros_like(x) + y,
    "clamp": lambda x, low=None, high=None: torch.clamp(x, low, high),
    "clamp_min": torch.maximum,
    "clamp_max": torch.minimum,
    **{n: getattr(torch, n) for n in ("mul", "div", "pow", "lerp", "maximum", "minimum")},
    **{n: getattr(torch, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")},
}
"""By operator name, with zero-dimensional tensors in place of numbers."""


class Recorder(TorchDispatchMode):
    """Replaces numbers in recorded operators by reads from ``numbers``.

    Args:
        numbers: what the graph reads numbers from, 1-D, float64.
        guards: see `Number`.
    """

    def __init__(self, numbers: torch.Tensor, guards: dict[str, bool]):
        super().__init__()
        self.numbers, self.guards = numbers, guards
        self.texts: dict[str, int] = {}
        """Index in ``numbers`` of each number, by text."""
        self.contents: dict[int, Number] = {}
        """Number in each counter, by the tensor's ``id``."""
        self._alive: list[torch.Tensor] = []

    def counter(self, tensor: torch.Tensor, content: Number) -> torch.Tensor:
        self.contents[id(tensor)] = content
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: OpOverload, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        counted = [x for x in leaves if id(x) in self.contents]
        if not counted and all(node_of(x) is None for x in leaves):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self.contents[id(args[0])].symbol
        if func in (aten.detach.default, aten.alias.default):
            return args[0]  # writes to the alias are writes to the counter
        name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
        base, in_place = name.removesuffix("_"), name.endswith("_")
        lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
        if "_foreach_" in func._schema.name and lists:
            n = len(lists[0])
            rows = [[x[i] if isinstance(x, (list, tuple)) and len(x) == n else x for x in args] for i in range(n)]
            results = [self._one(func, base, in_place, row, kwargs) for row in rows]
            return None if in_place else results
        return self._one(func, base, in_place, list(args), kwargs)

    def _one(self, func: OpOverload, base: str, in_place: bool, args: list[Any], kwargs: Kwargs) -> Any:
        """Applies an operator to one tensor."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if base in _OF_NUMBERS and tensors and all(self._content(t) is not None for t in tensors):
            inside = [self._content(x).symbol if isinstance(x, torch.Tensor) else x for x in args]  # type: ignore[union-attr]
            found: Any = _OF_NUMBERS[base](*inside, **kwargs)
            content = node_of(found) or Number(found, repr(found), self.guards)
            if in_place:
                return self.counter(args[0], content)
            return self.counter(torch.empty((), dtype=kwargs.get("dtype") or args[0].dtype), content)
        if in_place and id(args[0]) in self.contents:
            raise CannotRecord(f"{func} writes tensors into a counter of the host")
        floats = [t for t in tensors if t.is_floating_point() and id(t) not in self.contents]
        if base not in _OF_TENSORS or not floats or "out" in kwargs:
            if any(id(x) in self.contents for x in tensors):
                raise CannotRecord(f"{func} reads a counter of the host")
            plain = tree_map(lambda x: x if (n := node_of(x)) is None else n.guard_float(), (args, kwargs))
            return func(*plain[0], **plain[1])
        narrow = functools.reduce(torch.promote_types, [t.dtype for t in floats if t.dim()] or [floats[0].dtype])
        wide = torch.promote_types(narrow, torch.float32)  # the dtype that kernels compute in

        def widened(x: Any) -> Any:
            node = node_of(x) or self.contents.get(id(x))
            if node is not None:
                return self._read(node, wide)
            return x.to(wide) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        result = _OF_TENSORS[base](*map(widened, args), **{k: widened(v) for k, v in kwargs.items()})
        if result.dtype is wide:
            result = result.to(narrow)
        return args[0].copy_(result) if in_place else result

    def _content(self, tensor: torch.Tensor) -> Number | None:
        """Returns the number in a counter or a zero-dimensional constant."""
        if id(tensor) in self.contents:
            return self.contents[id(tensor)]
        constant = getattr(tensor, "constant", None)
        if constant is None or constant.dim():
            return None
        return Number(constant.item(), f"({constant.item()!r})", self.guards)

    def _read(self, node: Number, dtype: torch.dtype) -> torch.Tensor:
        place = self.texts.setdefault(f"float({node.text})", len(self.texts))
        return aten.select.int(self.numbers, 0, place).to(dtype)  # type: ignore[no-any-return]
