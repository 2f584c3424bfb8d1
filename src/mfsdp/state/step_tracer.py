"""Records an optimizer's step on one flat tensor as a graph whose numbers are inputs.

The optimizer's own Python runs once, on fake tensors. Tensor operations become a graph. Arithmetic on numbers (the
learning rate that a scheduler moves, step counts, bias corrections) becomes text (`symbolic_numbers`), which the host
evaluates in every step, in double precision, like uncompiled Python. No number is a constant of the graph:

    1.0 - lr * weight_decay                   p.mul_(n[0])
    1.0 - betas_0                             m.lerp_(g, n[1])
    ...                                       ...
    -(lr / (1.0 - betas_0 ** (step + 1)))     p.addcdiv_(m, d, value=n[5])

Where Python branches on a number (``if weight_decay != 0``), the condition becomes a *guard*, also text: a recording is
valid while its guards hold. A number whose use text cannot express (``int(lr)``) is guarded by its value.

*Counters* are host state: zero-dimensional CPU tensors, and Python numbers. They are treated as numbers.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .symbolic_numbers import CannotRecord, Number, Recorder, math_of_numbers, node_of

SETTINGS = ("params", "param_names")
"""Keys of a parameter group that are not settings."""


class Grows(Exception):
    """The step creates state; the optimizer has to run it uncompiled once."""


CAPACITY = 64
"""How many numbers a recording may read."""


@dataclass(frozen=True)
class Recording:
    """A recorded step, valid while its guards hold."""

    graph: fx.GraphModule
    """``graph(numbers, weights, gradient, *tensors)`` writes to weights and state; ``numbers``: float64 [count]."""
    mode: FakeTensorMode
    length: torch.SymInt | int
    """Elements of weights, gradient and state."""
    count: int
    """Numbers that the graph reads."""
    holds: Callable[..., bool]
    """Takes the numbers of the group and of counters; returns whether the guards hold."""
    numbers: Callable[..., tuple[float, ...]]
    """Takes the same; returns the numbers that the graph reads, then the counters' values after the step."""
    text: str
    """The recording in readable form."""


def is_counter(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu" and not value.is_complex()
    return type(value) in (int, float)


def is_setting(value: Any) -> bool:
    """Returns whether a setting is a number that may change between steps."""
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and is_counter(value))


def settings(group: Mapping[str, Any]) -> tuple[list[tuple[str, int | None]], list[float]]:
    """Returns the places and values of the numbers among a group's settings."""
    places: list[tuple[str, int | None]] = []
    values: list[float] = []
    for key, value in group.items():
        if key in SETTINGS:
            continue
        parts = enumerate(value) if isinstance(value, (tuple, list)) else [(None, value)]
        for at, part in parts:
            if is_setting(part):
                places.append((key, at))
                values.append(float(part))
    return places, values


def record(
    step: Callable[..., Any],
    optimizer: Any,
    base: type,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    weights: torch.Tensor,
    gradient: torch.Tensor,
    decoupled: bool = False,
) -> Recording:
    """Records a step.

    Args:
        step: the optimizer's own, without hooks.
        optimizer, base: the optimizer, and the class that ``step`` belongs to.
        group: settings of the parameter group.
        state: of the weights, by name.
        weights, gradient: flat, of equal length; only metadata is read.
        decoupled: whether the gradient is given as ``.decoupled_grad``.

    Raises:
        CannotRecord: no graph can express the step.
        Grows: the step creates state.
    """
    guards: dict[str, bool] = {}
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    length = _length(shapes, weights.numel())
    names: list[str] = []

    def named(value: Any, name: str) -> Any:
        name = re.sub(r"\W", "_", name)
        names.append(f"{name}_" if keyword.iskeyword(name) or not name.isidentifier() else name)
        return Number(value, names[-1], guards)

    def like(t: torch.Tensor) -> torch.Tensor:
        if t.dim() and t.shape != weights.shape:
            raise CannotRecord(f"its state has shape {tuple(t.shape)}, the weights {tuple(weights.shape)}")
        return torch.empty((length,) if t.dim() else (), dtype=t.dtype, device=t.device)

    with mode:
        numbers = torch.empty(CAPACITY, dtype=torch.float64, device=weights.device)
        tensors = {k: like(v) for k, v in state.items() if isinstance(v, torch.Tensor) and not is_counter(v)}
        given = {k: like(v) for k, v in group.items() if isinstance(v, torch.Tensor) and not is_counter(v)}
        counters = {k: like(v) for k, v in state.items() if isinstance(v, torch.Tensor) and k not in tensors}
        inputs = [numbers, like(weights), like(gradient), *tensors.values(), *given.values()]
    chosen: dict[str, Any] = {k: v for k, v in group.items() if k not in SETTINGS} | given
    for key, at in (places := settings(group)[0]):
        part = float(chosen[key] if at is None else chosen[key][at])
        number = named(part, key if at is None else f"{key}_{at}").symbol
        chosen[key] = number if at is None else (*chosen[key][:at], number, *chosen[key][at + 1 :])
    contents = {k: named(v.item() if isinstance(v, torch.Tensor) else v, k) for k, v in state.items() if is_counter(v)}
    chosen |= {k: False for k in ("fused", "foreach") if k in chosen}
    if "capturable" in chosen:
        chosen["capturable"] = any(t.dim() == 0 for t in tensors.values())
    twin: Any = object.__new__(base)
    vars(twin).update(vars(optimizer))
    vars(twin).update({k: OrderedDict() for k in vars(optimizer) if re.fullmatch(r"_optimizer_step_\w+_hooks", k)})
    for told in ("grad_scale", "found_inf"):  # set by GradScaler; gradients are unscaled already
        vars(twin).pop(told, None)
    before = dict(vars(twin))
    recorder: list[Recorder] = []
    after: dict[str, Any] = {}

    def run(numbers: torch.Tensor, p: Any, g: torch.Tensor, *rest: torch.Tensor) -> None:
        held = dict(zip([*tensors, *given], rest, strict=True))
        recorder.append(Recorder(numbers, guards))
        mine = {k: recorder[0].counter(counters[k], n) if k in counters else n.symbol for k, n in contents.items()}
        start = {k: mine.get(k, held.get(k, v)) for k, v in state.items()}
        settled = {**chosen, **{k: held[k] for k in given}}
        p.requires_grad_()
        if decoupled:
            p.decoupled_grad = g
        else:
            p.grad = g
        twin.param_groups, twin.state = [{**settled, "params": [p]}], defaultdict(dict, {p: dict(start)})
        try:
            with torch.no_grad(), recorder[0], math_of_numbers():
                step(twin)
            now = twin.state.get(p, {})
            if now.keys() != start.keys() or any(start[k] is None and now[k] is not None for k in now):
                raise Grows
            for k, tensor in now.items():
                if k in tensors and tensor is not start[k]:
                    start[k].copy_(tensor)
            after.update(now)
            moved = [k for k, v in settled.items() if twin.param_groups[0].get(k) is not v]
            if moved or len(twin.param_groups[0]) != len(settled) + 1:
                raise CannotRecord(f"it changes settings of its parameter group: {', '.join(moved)}")
        finally:
            p.grad = None
            p.requires_grad_(False)

    try:
        graph = make_fx(run, tracing_mode="symbolic")(*inputs)
    except (CannotRecord, Grows):
        raise
    except Exception as error:
        raise CannotRecord(f"{type(error).__name__}: {error}".split("\n")[0]) from error
    del before["state"], before["param_groups"]
    moved = [k for k, v in vars(twin).items() if before.get(k, v) is not v and before.get(k) != v]
    made = sorted(vars(twin).keys() - before.keys() - {"state", "param_groups"})
    if moved or made:
        raise CannotRecord(f"it keeps state of its own, not by parameter: {', '.join([*moved, *made])}")
    constants = [getattr(graph, str(n.target)) for n in graph.graph.find_nodes(op="get_attr")]
    if any(isinstance(c, FakeTensor) for c in constants):
        raise CannotRecord("it writes to tensors that it gets round the graph, such as .data")
    if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.graph.nodes):
        raise CannotRecord("it draws random numbers")
    pinned = [
        text for text, value in guards.items() if value and set(re.findall(r"\w+", text)) & set(names[len(places) :])
    ]
    if pinned:
        raise CannotRecord(f"it needs a number of each step as it is: {pinned[0]}")
    found = recorder[0]
    news = [_text(after[k], found) for k in contents]
    texts = [*found.texts, *news]
    if len(found.texts) > CAPACITY:
        raise CannotRecord(f"it reads more than {CAPACITY} numbers")
    heads = ", ".join(names)
    scope = {"math": math, "inf": math.inf, "nan": math.nan}
    holds = f"lambda {heads}: {' and '.join(guards) or 'True'}"
    gives = f"lambda {heads}: ({', '.join(texts)}{',' * (len(texts) == 1)})"
    return Recording(
        graph, mode, length, len(found.texts), eval(holds, scope), eval(gives, scope),
        "\n".join([f"holds    {holds}", f"numbers  {gives}", graph.code.strip()]),
    )  # fmt: skip


def _text(value: Any, recorder: Recorder) -> str:
    if isinstance(value, torch.Tensor):
        if id(value) not in recorder.contents:
            raise CannotRecord("it puts tensors into a counter of the host")
        return recorder.contents[id(value)].text
    node = node_of(value)
    return repr(value) if node is None else node.text


def _length(shapes: ShapeEnv, numel: int) -> torch.SymInt | int:
    """Returns a symbolic length, so that only length 1 needs another graph. Private in torch, as fake tensors are;
    tried on 2.13, not on the others of 2.11 to 2.15.
    """
    if numel == 1:
        return 1
    from torch._dynamo.source import ConstantSource

    source = ConstantSource("length")
    symbol = shapes.create_symbol(numel, source, dynamic_dim=DimDynamic.DUCK)
    return shapes.create_symintnode(symbol, hint=numel, source=source)  # type: ignore[return-value]
