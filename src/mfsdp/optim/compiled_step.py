"""The compiled step of a flat optimizer: one call of a compiled graph per parameter range.

`step_tracer` records what the optimizer does to one flat tensor, and Inductor compiles the recording. Ranges of one
kind share a graph, whatever their lengths, so compile time depends neither on depth nor on the number of sizes. Numbers
are inputs, so schedulers cause no recompile. ``torch.compile(optimizer.step)`` is about as fast, but recompiles for
every new learning rate, and steps all ranges at once: no gather could start between them
(docs/internals/measurements.md).
"""

from __future__ import annotations

import logging
import warnings
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, optim
from torch._guards import TracingContext, tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from ..runtime import capturing, devices
from .step_tracer import SETTINGS, Grows, Named, Recording, Step, is_counter, is_setting, record, settings
from .symbolic_numbers import CannotRecord

if TYPE_CHECKING:
    from .parameter_ranges import ParameterRange

log = logging.getLogger("mfsdp")

KNOWN = {
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop, optim.SGD,
}  # fmt: skip
"""Optimizers whose steps access only weights, gradients, state and the settings of parameter groups."""

MANY = 16
"""Maximum recordings of one kind, for optimizers whose Python branches on numbers."""

_SIZES = (2, 1 << 16, 1 << 31)
"""Lengths at which new graphs start: the compiler treats size 1 as no dimension, short ranges do not repay threads,
long ones need 64-bit indices."""


State = Mapping[torch.Tensor, dict[str, Any]]
"""An optimizer's state, by parameter."""

Static = tuple[object, ...]
"""Values that graphs are specialized on."""


@dataclass(frozen=True)
class _Group:
    """The settings of a parameter group in this step."""

    static: Static
    """Settings; the same object while they are equal."""
    numbers: tuple[float, ...]
    given: list[torch.Tensor]
    """Settings that are device tensors."""


@dataclass(eq=False)
class RangePlan:
    """How to call the graph of a range, valid while the range has these state tensors."""

    static: Static
    tail: torch.dtype | None
    """Dtype of the cast that the step also writes."""
    graphs: list[_Graph]
    """Graphs of this kind."""
    weights: torch.Tensor
    length: int
    mine: dict[str, Any]
    """The optimizer state of the range."""
    rest: list[tuple[str, Any]]
    """State entries that are not counters."""
    tensors: list[torch.Tensor]
    counters: list[str]

    def fits(self, static: Static) -> bool:
        if self.static is not static or len(self.mine) != len(self.rest) + len(self.counters):
            return False
        for key, value in self.rest:
            if self.mine.get(key) is not value:
                return False
        return all(is_counter(self.mine.get(key)) for key in self.counters)


@dataclass(eq=False)
class _Graph:
    """A compiled recording."""

    recording: Recording
    call: Callable[[list[Any]], Any]
    only: int | None
    """The only valid length, if Inductor specialized the graph on it."""

    _last: tuple[float, ...] | None = None
    """The last numbers for which the guards held."""

    def holds(self, values: tuple[float, ...]) -> bool:
        if values == self._last:
            return True
        if not self.recording.holds(*values):
            return False
        self._last = values
        return True

    def numbers(self, values: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, tuple[float, ...]]:
        """Returns the numbers that the graph reads, and the counters' values after the step."""
        found, count = self.recording.numbers(*values), self.recording.count
        return devices.numbers(found[:count], torch.float64, device), found[count:]


class CompiledSteps:
    """Compiled steps of one optimizer.

    Args:
        optimizer, base: the optimizer, and the class whose step is compiled.

    Raises:
        NotImplementedError: the step cannot be compiled; the message gives the reason.
    """

    def __init__(self, optimizer: Optimizer, base: type[Optimizer]):
        self.base = base
        self._uncompiled = unhooked(base)
        self._graphs: dict[Static, list[_Graph]] = {}
        self._own: set[object] = set()
        """Kinds, and kinds with numbers, that the optimizer steps uncompiled."""
        self._statics: dict[int, Static] = {}
        for group in optimizer.param_groups:
            self._try(optimizer, group)

    def step(
        self,
        optimizer: Optimizer,
        runs: Sequence[ParameterRange],
        state: State,
        after: Callable[[ParameterRange], None] | None = None,
    ) -> list[ParameterRange]:
        """Steps the ranges that can be stepped compiled, without hooks, and returns the others, such as those without
        state. Compiles everything before the first step.

        Args:
            optimizer: gives the settings of its parameter groups.
            runs: the ranges.
            state: the state of all ranges.
            after: called for each range after its compiled step.
        """
        capturing.obstacle("a compiled optimizer step takes numbers from the host: leave out compile=True")
        groups = [self._group(optimizer, number) for number in range(len(optimizer.param_groups))]
        ready, left = [], []
        for run in runs:
            call = self._ready(optimizer, run, groups[run.group], state)
            if call is None:
                run.plan = None  # the optimizer itself may make new state
                left.append(run)
            else:
                ready.append(call)
        scale, found = (vars(optimizer).get(name) for name in ("grad_scale", "found_inf"))  # from GradScaler, if fused
        if found is not None and float(found):
            return left
        if scale is not None and ready:
            torch._foreach_mul_([gradient for *_, gradient in ready], 1.0 / float(scale))
        known: dict[tuple[_Graph, tuple[float, ...]], tuple[torch.Tensor, Sequence[float]]] = {}
        for run, plan, graph, values, gradient in ready:
            if (graph, values) not in known:
                known[graph, values] = graph.numbers(values, gradient.device)
            numbers, news = known[graph, values]
            tail = [] if run.cast is None else [run.cast]
            graph.call([plan.length, numbers, plan.weights, gradient, *plan.tensors, *groups[run.group].given, *tail])
            for name, new in zip(plan.counters, news):
                old = plan.mine[name]
                if isinstance(old, torch.Tensor):
                    old.fill_(new)
                else:
                    plan.mine[name] = type(old)(new)
            if after is not None:
                torch.autograd.graph.increment_version(run.flat)
                after(run)
        if after is None:
            torch.autograd.graph.increment_version([run.flat for run, *_ in ready])  # Inductor's code does not
        return left

    def _group(self, optimizer: Optimizer, number: int) -> _Group:
        group = optimizer.param_groups[number]
        simple = (bool, int, float, str, type(None))
        static = (
            tuple((k, *_static(v)) for k, v in group.items() if k not in SETTINGS),
            tuple((k, v) for k, v in vars(optimizer).items() if type(v) in simple and not k.startswith("_")),
        )
        if self._statics.get(number) != static:
            self._statics[number] = static
        given = [v for v in group.values() if isinstance(v, torch.Tensor) and not is_counter(v)]
        return _Group(self._statics[number], tuple(settings(group)[1]), given)

    def _ready(
        self, optimizer: Optimizer, run: ParameterRange, group: _Group, state: State
    ) -> tuple[ParameterRange, RangePlan, _Graph, tuple[float, ...], torch.Tensor] | None:
        """Returns the arguments of a range's graph, compiling it if needed. ``None``: the optimizer steps the range
        itself.
        """
        gradient = run.flat.grad
        if gradient is None:
            return None
        plan = run.plan
        tail = None if run.cast is None else run.cast.dtype
        if plan is None or plan.tail is not tail or not plan.fits(group.static):
            plan = run.plan = self._planned(group.static, run, gradient, state.get(run.flat, {}))
        mine = plan.mine
        values = group.numbers + tuple([float(mine[k]) for k in plan.counters])
        for graph in plan.graphs:
            if (graph.only is None or graph.only == plan.length) and graph.holds(values):
                return run, plan, graph, values, gradient
        made = self._made(optimizer, run.group, plan, values, gradient)
        return None if made is None else (run, plan, made, values, gradient)

    def _planned(self, static: Static, run: ParameterRange, gradient: torch.Tensor, state: dict[str, Any]) -> RangePlan:
        weights, tail = run.flat.detach(), None if run.cast is None else run.cast.dtype
        counters = [k for k, v in state.items() if is_counter(v)]
        rest = [(k, v) for k, v in state.items() if k not in counters]
        kind = (
            static,
            tail,
            bisect(_SIZES, weights.numel()),
            weights.device,
            weights.dtype,
            gradient.dtype,
            tuple((k, type(v)) if k in counters else (k, *_static(v)) for k, v in state.items()),
        )
        tensors = [v for _, v in rest if isinstance(v, torch.Tensor)]
        graphs = self._graphs.setdefault(kind, [])
        return RangePlan(static, tail, graphs, weights, weights.numel(), state, rest, tensors, counters)

    def _made(
        self, optimizer: Optimizer, number: int, plan: RangePlan, values: tuple[float, ...], gradient: torch.Tensor
    ) -> _Graph | None:
        """Compiles a step for these numbers; returns ``None`` if the optimizer has to step the range itself."""
        graphs = plan.graphs
        if (id(graphs), values) in self._own or id(graphs) in self._own:
            return None
        if len(graphs) == MANY:
            self._own.add(id(graphs))
            warnings.warn(
                f"mfsdp: {self.base.__name__} decides by numbers that keep changing: there are {MANY} compiled steps "
                f"of one kind, and from here on this kind is stepped uncompiled. The last one is good for: "
                f"{graphs[-1].recording.text.splitlines()[0].split(': ', 1)[1]}",
                stacklevel=6,
            )
            return None
        try:
            recording = self._record(optimizer, optimizer.param_groups[number], plan.mine, plan.weights, gradient)
        except Grows:
            self._own.add((id(graphs), values))
            return None
        graphs.append(_lowered(recording, plan.tail))
        return graphs[-1]

    def _record(
        self, optimizer: Optimizer, group: Named, state: Named, weights: torch.Tensor, gradient: torch.Tensor
    ) -> Recording:
        try:
            return record(self._uncompiled, optimizer, self.base, group, state, weights, gradient)
        except CannotRecord as why:
            raise self._refusal(str(why)) from why

    def _refusal(self, why: str) -> NotImplementedError:
        return NotImplementedError(
            f"fully_shard_optimizer(compile=True) does not support this {self.base.__name__}: {why}. Leave compile "
            "out; it steps on flat tensors all the same."
        )

    def _try(self, optimizer: Optimizer, group: Named) -> None:
        """Records the second step of a two-element tensor, so that unsupported optimizers raise now."""
        if group.get("differentiable"):
            raise self._refusal("differentiable=True")
        like = next((p for p in group["params"] if hasattr(p, "to_local")), None)
        if like is None or like.device.type == "meta":
            return
        weights, gradient = (torch.zeros(2, dtype=like.dtype, device=like.device) for _ in range(2))
        param = torch.nn.Parameter(weights.clone())
        param.grad = gradient
        twin: Any = object.__new__(self.base)
        vars(twin).update(vars(optimizer))
        twin.param_groups, twin.state = [{**group, "params": [param]}], defaultdict(dict)
        with torch.no_grad():
            self._uncompiled(twin)
        self._record(optimizer, group, twin.state.get(param, {}), weights, gradient)


def unhooked(base: type[Optimizer]) -> Step:
    """Returns an optimizer's own step, without hooks."""
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _static(value: object) -> Static:
    """Returns the part of a setting or state entry that graphs are specialized on."""
    if is_setting(value):
        return (float,)
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.dtype, value.device, value.dim())
    if isinstance(value, (tuple, list)):
        return (tuple, *(_static(v) for v in value))
    return (type(value), value if type(value) in (bool, int, str, type(None)) else _Same(value))


@dataclass(frozen=True, eq=False)
class _Same:
    """Compares equal for the same object, which it keeps alive."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _lowered(recording: Recording, tail: torch.dtype | None) -> _Graph:
    """Compiles a recording with Inductor. Inductor's errors (no C++ compiler) are passed on. With ``tail``, the graph
    also writes the weights, cast to that dtype, to one more argument. Private in torch (``compile_fx_inner`` and its
    arguments); tried on 2.13, not on the others of 2.11 to 2.15.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    mode, length = recording.mode, recording.length
    inputs = [n.meta["val"] for n in recording.graph.graph.find_nodes(op="placeholder")]
    with mode:
        inputs[0] = torch.empty(recording.count, dtype=torch.float64, device=inputs[1].device)
    functional = torch.func.functionalize(recording.graph, remove="mutations_and_views")
    gm: fx.GraphModule = make_fx(functional, select_decomp_table(), tracing_mode="symbolic")(*inputs)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.select_copy.int):
        node.target = torch.ops.aten.select.int  # of numbers; nothing writes to these views
    gm.graph.output_node().args = ((),)
    gm.shape_env = None  # Inductor cannot pickle it for its cache key; the inputs have it
    if tail is not None:
        _with_cast(gm, tail)
        with mode:
            inputs.append(torch.empty((length,), dtype=tail, device=inputs[1].device))
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("length").meta["val"] = length
    gm.graph.lint()
    gm.recompile()
    shapes = mode.shape_env
    before = len(shapes.guards)  # type: ignore[union-attr]
    with V.set_fake_mode(mode), tracing(TracingContext(mode)), config.patch(size_asserts=False):
        call: Any = compile_fx_inner(gm, [length, *inputs], is_inference=True, cudagraphs=BoxedBool(False))
    special = len(shapes.guards) > before  # type: ignore[union-attr]
    log.debug("mfsdp: an optimizer's step was compiled\n%s", recording.text)
    return _Graph(
        recording, getattr(call, "current_callable", None) or call, int(inputs[1].numel()) if special else None
    )  # type: ignore[arg-type]


def _with_cast(gm: fx.GraphModule, dtype: torch.dtype) -> None:
    """Makes a step also write its weights, cast to another dtype, to one more argument (Note [Kept casts])."""
    places = gm.graph.find_nodes(op="placeholder")
    written = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    value = next((n.args[1] for n in written if n.args[0] is places[1]), places[1])
    with gm.graph.inserting_after(places[-1]):
        cast = gm.graph.placeholder("cast")
    cast.meta["val"] = places[1].meta["val"].to(dtype)
    with gm.graph.inserting_before(gm.graph.output_node()):
        narrow = gm.graph.call_function(torch.ops.prims.convert_element_type.default, (value, dtype))
        narrow.meta["val"] = cast.meta["val"]
        gm.graph.call_function(torch.ops.aten.copy_.default, (cast, narrow)).meta["val"] = cast.meta["val"]
