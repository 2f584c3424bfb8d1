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
from torch.optim import Optimizer

from .symbolic_numbers import CannotRecord, Number, Recorder, Value, math_of_numbers, node_of

SETTINGS = ("params", "param_names")
"""Keys of a parameter group that are not settings."""


Named = Mapping[str, Any]
"""Settings of a parameter group, or state of a parameter, by name."""

Step = Callable[[Optimizer], Any]
"""An optimizer's own step, without hooks."""


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


def is_counter(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu" and not value.is_complex()
    return type(value) in (int, float)


def is_setting(value: object) -> bool:
    """Returns whether a setting is a number that may change between steps."""
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and is_counter(value))


def settings(group: Named) -> tuple[list[tuple[str, int | None]], list[float]]:
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
    step: Step,
    optimizer: Optimizer,
    base: type[Optimizer],
    group: Named,
    state: Named,
    weights: torch.Tensor,
    gradient: torch.Tensor,
) -> Recording:
    """Records a step.

    Args:
        optimizer, base: the optimizer, and the class that ``step`` belongs to.
        group: settings of the parameter group.
        state: of the weights, by name.
        weights, gradient: flat, of equal length; only metadata is read.

    Raises:
        CannotRecord: no graph can express the step.
        Grows: the step creates state.
    """
    inputs = _Inputs(group, state, weights, gradient)
    run = _Run(step, optimizer, base, inputs, state)
    try:
        graph = make_fx(run.step_on, tracing_mode="symbolic")(*inputs.tensors)
    except (CannotRecord, Grows):
        raise
    except Exception as error:
        raise CannotRecord(f"{type(error).__name__}: {error}".split("\n")[0]) from error
    run.check_attributes()
    _check_graph(graph)
    return _recording(graph, inputs, run)


class _Inputs:
    """What the recorded step reads: fake tensors, and a symbolic number for each number of settings and counters.

    Args: as of `record`.
    """

    def __init__(self, group: Named, state: Named, weights: torch.Tensor, gradient: torch.Tensor):
        self.guards: dict[str, bool] = {}
        """See `Number`."""
        shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=shapes)
        self.length = _length(shapes, weights.numel())
        numbers = {k: v for k, v in state.items() if is_counter(v)}

        def fake(t: torch.Tensor) -> torch.Tensor:
            if t.dim() and t.shape != weights.shape:
                raise CannotRecord(f"its state has shape {tuple(t.shape)}, the weights {tuple(weights.shape)}")
            return torch.empty((self.length,) if t.dim() else (), dtype=t.dtype, device=t.device)

        def fakes(values: Named) -> dict[str, torch.Tensor]:
            return {k: fake(v) for k, v in values.items() if isinstance(v, torch.Tensor) and not is_counter(v)}

        with self.mode:
            first = torch.empty(CAPACITY, dtype=torch.float64, device=weights.device), fake(weights), fake(gradient)
            self.state, self.given = fakes(state), fakes(group)
            """State and settings that are tensors."""
            self.counter_tensors = {k: fake(v) for k, v in numbers.items() if isinstance(v, torch.Tensor)}
        self.tensors = [*first, *self.state.values(), *self.given.values()]
        """The arguments of the graph."""
        self.setting_numbers: list[Number] = []
        self.settings = self._symbolic(group)
        self.counters = {k: self._number(v.item() if isinstance(v, torch.Tensor) else v, k) for k, v in numbers.items()}

    def _number(self, value: Value, name: str) -> Number:
        name = re.sub(r"\W", "_", name)
        return Number(value, f"{name}_" if keyword.iskeyword(name) or not name.isidentifier() else name, self.guards)

    def _symbolic(self, group: Named) -> dict[str, Any]:
        """Returns the group's settings with symbolic numbers, for an implementation that can be recorded."""
        out: dict[str, Any] = {k: v for k, v in group.items() if k not in SETTINGS} | self.given
        for (key, at), value in zip(*settings(group), strict=True):
            number = self._number(value, key if at is None else f"{key}_{at}")
            self.setting_numbers.append(number)
            out[key] = number.symbol if at is None else (*out[key][:at], number.symbol, *out[key][at + 1 :])
        out |= {k: False for k in ("fused", "foreach") if k in out}
        if "capturable" in out:
            out["capturable"] = any(t.dim() == 0 for t in self.state.values())
        return out


class _Run:
    """The step to record, of a copy of the optimizer.

    Args: as of `record`.
    """

    def __init__(self, step: Step, optimizer: Optimizer, base: type[Optimizer], inputs: _Inputs, state: Named):
        self.step, self.inputs, self.state = step, inputs, state
        self.optimizer: Any = object.__new__(base)
        attributes: dict[str, Any] = self.optimizer.__dict__
        attributes.update(vars(optimizer))
        attributes.update({k: OrderedDict() for k in vars(optimizer) if re.fullmatch(r"_optimizer_step_\w+_hooks", k)})
        for name in ("grad_scale", "found_inf"):  # set by GradScaler; gradients are unscaled already
            attributes.pop(name, None)
        self.before = dict(attributes)
        self.recorder: Recorder
        self.after: dict[str, Any] = {}
        """The state after the step."""

    def step_on(self, numbers: torch.Tensor, p: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor) -> None:
        """Steps on the inputs. `make_fx` calls it, so the tensors stand for the graph's arguments."""
        inputs, optimizer = self.inputs, self.optimizer
        self.recorder = recorder = Recorder(numbers, inputs.guards)
        held: dict[str, Any] = dict(zip([*inputs.state, *inputs.given], rest, strict=True))
        settled = {**inputs.settings, **{k: held[k] for k in inputs.given}}
        for k, n in inputs.counters.items():
            held[k] = recorder.counter(inputs.counter_tensors[k], n) if k in inputs.counter_tensors else n.symbol
        start = {k: held.get(k, v) for k, v in self.state.items()}
        p.requires_grad_()
        p.grad = g
        optimizer.param_groups, optimizer.state = [{**settled, "params": [p]}], defaultdict(dict, {p: dict(start)})
        try:
            with torch.no_grad(), recorder, math_of_numbers():
                self.step(optimizer)
            self._collect_state(optimizer.state.get(p, {}), start)
            moved = [k for k, v in settled.items() if optimizer.param_groups[0].get(k) is not v]
            if moved or len(optimizer.param_groups[0]) != len(settled) + 1:
                raise CannotRecord(f"it changes settings of its parameter group: {', '.join(moved)}")
        finally:
            p.grad = None
            p.requires_grad_(False)

    def _collect_state(self, now: dict[str, Any], start: dict[str, Any]) -> None:
        """Keeps the state after the step, and copies tensors that it has replaced into those that it got."""
        if now.keys() != start.keys() or any(start[k] is None and now[k] is not None for k in now):
            raise Grows
        for k, tensor in now.items():
            if k in self.inputs.state and tensor is not start[k]:
                start[k].copy_(tensor)
        self.after.update(now)

    def check_attributes(self) -> None:
        """Raises `CannotRecord` if the step has changed attributes of the optimizer."""
        now = {k: v for k, v in vars(self.optimizer).items() if k not in ("state", "param_groups")}
        moved = [k for k, v in now.items() if self.before.get(k, v) is not v and self.before.get(k) != v]
        made = sorted(now.keys() - self.before.keys())
        if moved or made:
            raise CannotRecord(f"it keeps state of its own, not by parameter: {', '.join([*moved, *made])}")


def _check_graph(graph: fx.GraphModule) -> None:
    constants = [getattr(graph, str(n.target)) for n in graph.graph.find_nodes(op="get_attr")]
    if any(isinstance(c, FakeTensor) for c in constants):
        raise CannotRecord("it writes to tensors that it gets round the graph, such as .data")
    if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.graph.nodes):
        raise CannotRecord("it draws random numbers")


def _recording(graph: fx.GraphModule, inputs: _Inputs, run: _Run) -> Recording:
    """Returns the recording of a run, with its guards and numbers compiled from their texts."""
    guards, counters, recorder = inputs.guards, inputs.counters, run.recorder
    counted = {n.text for n in counters.values()}
    pinned = [text for text, value in guards.items() if value and set(re.findall(r"\w+", text)) & counted]
    if pinned:
        raise CannotRecord(f"it needs a number of each step as it is: {pinned[0]}")
    texts = [*recorder.texts, *(_text(run.after[k], recorder) for k in counters)]
    if len(recorder.texts) > CAPACITY:
        raise CannotRecord(f"it reads more than {CAPACITY} numbers")
    heads = ", ".join(n.text for n in (*inputs.setting_numbers, *counters.values()))
    scope = {"math": math, "inf": math.inf, "nan": math.nan}
    holds = f"lambda {heads}: {' and '.join(guards) or 'True'}"
    gives = f"lambda {heads}: ({', '.join(texts)}{',' * (len(texts) == 1)})"
    return Recording(
        graph, inputs.mode, inputs.length, len(recorder.texts), eval(holds, scope), eval(gives, scope),
        "\n".join([f"holds    {holds}", f"numbers  {gives}", graph.code.strip()]),
    )  # fmt: skip


def _text(value: object, recorder: Recorder) -> str:
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
