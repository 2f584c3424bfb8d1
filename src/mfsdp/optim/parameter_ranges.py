"""Parameter ranges: flat tensors that an optimizer steps on instead of hundreds of DTensors, and that step.

Parameters of a flat buffer that are adjacent, belong to one parameter group and have the same step history form a
*range*: one view into the flat main weights, one into the flat gradients, and optimizer state of the same length.
During ``step()`` the optimizer sees ranges instead of parameters. Before and after, ``param_groups`` hold the model's
parameters, and ``state`` their state, as views into the ranges' state.

Ranges include the padding between parameters. Its weights, gradients and state are zero and stay zero under every
optimizer that leaves zero weights with zero gradients alone, as torch's elementwise ones do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..buffers.flat_buffer import FlatBuffer
from ..dtensor.optimizer_hooks import hooked
from ..dtensor.sharded_dtensor import ShardedDTensor
from ..dtensor.sharded_parameter import ShardedParameter
from ..runtime.execution import Execution
from ..runtime.step_prefetch import GatherLauncher
from .compiled_step import KNOWN, CompiledSteps, RangePlan, unhooked
from .host_state import HostedState, StateStreams
from .matrix_step import MatrixStep

ParamLists = list[list[nn.Parameter]]
"""Parameters by parameter group."""

Members = dict[FlatBuffer, tuple[tuple[int, int], ...]]
"""Parameters that have a gradient: slots of a buffer, with their parameter groups."""

History = tuple[int, tuple[object, ...]]
"""A parameter's group, and what else must be equal for parameters to share state."""

ALONE = 2
"""How many units an uncompiled step takes one by one, to launch their gathers in between."""

TOGETHER = 64 << 20
"""Bytes of the other weights per call of an uncompiled step, unless one range is larger. A foreach step needs that much
temporary memory; in smaller parts the host would limit the device."""


def is_sharded(param: object) -> bool:
    """Returns whether a parameter is of a model that mfsdp has sharded."""
    return isinstance(param, ShardedParameter) and param._mfsdp_owner is not None


@dataclass(eq=False)
class ParameterRange:
    """Parameters that step together."""

    buffer: FlatBuffer
    slots: list[int]
    start: int
    """First element, in this rank's flat main weights."""
    flat: nn.Parameter
    group: int
    ghost: bool = False
    """This rank holds no rows of the parameters; a single element, always zero, represents them."""
    made: dict[str, Any] = field(default_factory=dict)
    """The range's state, as the parameters' state shows it."""
    shown: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The parameters' state, by slot."""
    cast: torch.Tensor | None = None
    """Its part of a kept cast, which a compiled step also writes."""
    plan: RangePlan | None = None
    """How to call its compiled step (`CompiledSteps`)."""
    hosted: HostedState | None = None
    """Its streamed state, if any."""

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self.buffer.path

    def part(self, whole: torch.Tensor, slot: int) -> torch.Tensor:
        """Returns one parameter's part of a tensor as long as the range."""
        at = self.buffer.weights.locals[slot]
        start = at.shard_offset - self.start if at.numel else 0
        return whole[start : start + at.numel].view(at.shape)

    def gradient(self) -> torch.Tensor:
        whole = self.buffer.gradients.total()
        if self.ghost or whole is None:
            return torch.zeros(1, dtype=self.buffer.precision.grad, device=self.flat.device)
        length = self.flat.numel()
        return whole if whole.numel() == length else whole[self.start : self.start + length]


class _StepPrefetch:
    """Launches gathers after the steps of units (Note [Step prefetch]).

    Args:
        launchers: of each model, in order.
        runs: the ranges to step.
    """

    def __init__(self, launchers: list[GatherLauncher], runs: list[ParameterRange]):
        self.launchers = launchers
        self.buffers = cast(dict[FlatBuffer, None], dict.fromkeys(b for each in launchers for b in each.buffers))
        """Buffers of the units that forward gathers first, in its order."""
        self.left = Counter(run.buffer for run in runs if run.buffer in self.buffers)
        self.stepped: set[FlatBuffer] = set()
        """Those of them whose step is done."""
        self.kept: dict[FlatBuffer, torch.Tensor | None] = {}
        """Kept casts that the step also writes."""

    def ordered(self, runs: list[ParameterRange]) -> list[ParameterRange]:
        """Returns the ranges with those of these units first."""
        place = {buffer: i for i, buffer in enumerate(self.buffers)}
        return sorted(runs, key=lambda run: place.get(run.buffer, len(place)))

    def __call__(self, run: ParameterRange) -> None:
        """Called after a range's step."""
        buffer = run.buffer
        if buffer in self.left:
            self.left[buffer] -= 1
            if not self.left[buffer]:
                if self.kept.get(buffer) is None:
                    buffer.weights.stale = True
                else:
                    buffer.weights.kept_cast.written_along()
                self.stepped.add(buffer)
                self._launch(self.stepped | (self.buffers.keys() - self.left.keys()))

    def end(self) -> None:
        """Called after the whole step."""
        self._launch(None)

    def _launch(self, ready: set[FlatBuffer] | None) -> None:
        for launcher in self.launchers:
            launcher.launch(ready)
            if not launcher.complete:
                return

    def abandon(self, error: BaseException, run: Execution | None = None) -> None:
        for launcher in self.launchers:
            launcher.abandon(error, run)


class ParameterRanges:
    """The ranges of one optimizer.

    Args:
        base: its class.
        decoupled, steps, ahead: see `fully_shard_optimizer`.
        streamed: whether state is on the host.
        matrices: the step of a whole-matrix optimizer.
    """

    def __init__(
        self, base: type[Optimizer], decoupled: bool, steps: CompiledSteps | None, ahead: bool, streamed: bool,
        matrices: MatrixStep | None = None,
    ):  # fmt: skip
        self.base, self.decoupled, self.steps, self.ahead, self.matrices = base, decoupled, steps, ahead, matrices
        self.streams = StateStreams() if streamed else None
        self.members: Members = {}
        self.runs: list[ParameterRange] = []
        self.state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)

    def step(self, optimizer: Optimizer) -> None:
        """Runs the optimizer's own step on ranges."""
        members = _members(optimizer)
        for buffer in members:
            buffer.weights.before_write()
        if members != self.members or not self.shown_in(optimizer):
            self._build(optimizer, members)
        if self.streams is not None:
            self.streams.end(self.runs, read=True)  # for hooks before the step
        launchers = self._launchers(optimizer)
        if not launchers:
            self._step(optimizer, None, self.runs)
            return
        prefetch = _StepPrefetch(launchers, self.runs)
        try:
            self._step(optimizer, prefetch, prefetch.ordered(self.runs))
            prefetch.end()
        except BaseException as error:
            prefetch.abandon(error)
            raise

    def _launchers(self, optimizer: Optimizer) -> list[GatherLauncher]:
        """Returns the launchers of gathers to launch during the step, one per model."""
        if not self.ahead:
            return []
        models = {buffer.unit.outermost.ahead: buffer.unit.outermost.name for buffer in self.members}
        mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
        found = (ahead.depart(self.members, mine, name) for ahead, name in models.items())
        return [launcher for launcher in found if launcher is not None]

    def _step(self, optimizer: Optimizer, prefetch: _StepPrefetch | None, runs: list[ParameterRange]) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        params = [g["params"] for g in groups]
        plain = [[p for p in own if not is_sharded(p)] for own in params]
        lists = [list(own) for own in plain]
        along: set[FlatBuffer] = set()  # whose kept cast the step has written too
        watched = hooked(optimizer)
        at_once = None if watched else prefetch  # hooks may write to what they see
        for run in runs:
            lists[run.group].append(run.flat)
            if self.decoupled:
                run.flat.decoupled_grad = run.gradient().to(run.buffer.precision.grad)  # type: ignore[attr-defined]
            else:
                run.flat.grad = run.gradient().to(run.flat.dtype)
        others = [p for own in plain for p in own]
        self.state.update({p: state[p] for p in others if p in state})
        try:
            for group, flats in zip(groups, lists, strict=True):
                group["params"] = flats
            optimizer.state = cast(Any, self.state)
            if self.steps is not None or self.matrices is not None or self.base in KNOWN:
                in_parts = partial(self._in_parts, plain=plain, runs=runs, prefetch=at_once, along=along)
                Optimizer.profile_hook_step(in_parts)(optimizer)
            else:
                self.base.step(optimizer)
        finally:
            for group, own in zip(groups, params, strict=True):
                group["params"] = own
            optimizer.state = state
            launched = set() if at_once is None else at_once.stepped
            for run in self.runs:
                run.flat.grad = run.flat.decoupled_grad = None  # type: ignore[attr-defined]
                run.cast = None
                if run.buffer not in launched and (run.buffer not in along or watched):
                    run.buffer.weights.stale = True
            if self.streams is not None:
                self._show_all(optimizer)  # also what an interrupted step has created
        state.update({p: self.state[p] for p in others if p in self.state})
        self._show_all(optimizer)

    def _show_all(self, optimizer: Optimizer) -> None:
        """Shows state that a step has created."""
        shown = [self._show(optimizer, run) for run in self.runs]
        if any(shown):  # in the order of parameters: the order of ranges differs by rank
            state = optimizer.state
            order = {p: state[p] for group in optimizer.param_groups for p in group["params"] if p in state}
            state.clear()
            state.update(order)

    def _in_parts(
        self,
        optimizer: Optimizer,
        *,
        plain: ParamLists,
        runs: list[ParameterRange],
        prefetch: _StepPrefetch | None,
        along: set[FlatBuffer],
    ) -> None:
        """Runs the step of one of torch's optimizers on some ranges at a time (`_parts`), with unsharded parameters in
        the last part. Steps compiled what can be.
        """
        every = [group["params"] for group in optimizer.param_groups]
        if self.streams is not None:
            self.streams.begin(runs)
        if self.matrices is not None:
            self.matrices.step(optimizer, runs, self.state, prefetch, self._on_device)
            parts, prefetch = [list[ParameterRange]()] if any(plain) else [], None
        elif self.steps is None:
            parts = self._parts(runs, [] if prefetch is None else list(prefetch.left)[:ALONE])
        else:
            left = self._step_compiled(self.steps, optimizer, runs, prefetch, along)
            parts, prefetch = [left] if left or any(plain) else [], None
        for i, some in enumerate(parts):
            for number, group in enumerate(optimizer.param_groups):
                flats = [run.flat for run in some if run.group == number]
                group["params"] = flats + plain[number] if i == len(parts) - 1 else flats
            with self._on_device(optimizer, some):
                unhooked(self.base)(optimizer)
            if prefetch is not None:
                for run in some:
                    prefetch(run)
        if self.streams is not None:
            self.streams.end(runs, read=hooked(optimizer))
        for group, own in zip(optimizer.param_groups, every, strict=True):  # what post hooks see
            group["params"] = own

    def _parts(self, runs: list[ParameterRange], early: list[FlatBuffer]) -> list[list[ParameterRange]]:
        """Returns the ranges to step per call: those of each unit that forward gathers first, then up to `TOGETHER`
        bytes of the others. With streamed state, one range per call and an empty last part.
        """
        if self.streams is not None:
            return [*([run] for run in runs), []]
        parts = [[run for run in runs if run.buffer is buffer] for buffer in early]
        rest, size = list[ParameterRange](), 0
        for run in runs:
            if run.buffer not in early:
                if rest and size + run.flat.nbytes > TOGETHER:
                    parts.append(rest)
                    rest, size = [], 0
                rest.append(run)
                size += run.flat.nbytes
        return [*parts, rest]

    def _on_device(self, optimizer: Optimizer, runs: list[ParameterRange]) -> AbstractContextManager[None]:
        """Wraps one call: its range's state is on the device."""
        if self.streams is None or not runs:
            return nullcontext()
        (run,) = runs
        return self.streams.on_device(run, self.state, versioned=not optimizer.param_groups[run.group].get("fused"))

    def _step_compiled(
        self,
        steps: CompiledSteps,
        optimizer: Optimizer,
        runs: list[ParameterRange],
        prefetch: _StepPrefetch | None,
        along: set[FlatBuffer],
    ) -> list[ParameterRange]:
        """Steps ranges compiled; returns those left to the optimizer. The step also writes kept casts (Note [Kept
        casts]), except of buffers with ranges that are left; ``along`` receives the buffers.
        """
        kept = {run.buffer: run.buffer.weights.kept_cast.current() for run in self.runs}
        for run in self.runs:
            whole = None if run.ghost else kept[run.buffer]
            run.cast = None if whole is None else whole[run.start : run.start + run.flat.numel()]
        if prefetch is not None:
            prefetch.kept = kept
        left = steps.step(optimizer, runs, self.state, prefetch)
        along.update({buffer for buffer, cast in kept.items() if cast is not None} - {run.buffer for run in left})
        for buffer in along:
            buffer.weights.kept_cast.written_along()
        return left

    def shown_in(self, optimizer: Optimizer) -> bool:
        """Returns whether parameters still have the state that the ranges show."""
        return all(self._untouched(optimizer, run) for run in self.runs)

    def _untouched(self, optimizer: Optimizer, run: ParameterRange) -> bool:
        """Whether parameters still have the state that the range shows; a load replaces it."""
        return all(optimizer.state.get(run.buffer.params[s]) is run.shown.get(s) for s in run.slots)

    def _build(self, optimizer: Optimizer, members: Members) -> None:
        """Builds ranges of the parameters that have gradients, with their present state."""
        if self.streams is not None:
            self.streams.forget(self.runs)
        self.members, self.runs, self.state = members, [], defaultdict(dict)
        for buffer, slots in members.items():
            history = {slot: (group, _history(optimizer, buffer.params[slot])) for slot, group in slots}
            for stretch in _stretches(buffer, history):
                self._add(optimizer, buffer, stretch, history[stretch[0]][0])

    def _add(self, optimizer: Optimizer, buffer: FlatBuffer, slots: list[int], group: int) -> None:
        ranges = [buffer.weights.locals[s] for s in slots if buffer.weights.locals[s].numel]
        start = min((at.shard_offset for at in ranges), default=0)
        end = max((at.shard_offset + at.numel for at in ranges), default=0)
        main = buffer.weights.main.detach()
        weights = main[start:end] if ranges else main.new_zeros(1)
        run = ParameterRange(buffer, slots, start, nn.Parameter(weights), group, ghost=not ranges)
        self.runs.append(run)
        given = optimizer.state.get(buffer.params[slots[0]], {})
        room = self._room(run, {k: v.dtype for k, v in given.items() if isinstance(v, ShardedDTensor)})
        for key, value in given.items():
            if isinstance(value, ShardedDTensor):
                whole = room[key].zero_()
                for slot in slots:
                    run.part(whole, slot).copy_(optimizer.state[buffer.params[slot]][key].to_local())
                self.state[run.flat][key] = whole
            else:
                self.state[run.flat][key] = value.clone() if isinstance(value, torch.Tensor) else value
        if self.state.get(run.flat):
            self._show(optimizer, run)

    def _room(self, run: ParameterRange, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Allocates uninitialized state of a range's length."""
        numel, device = run.flat.numel(), run.flat.device
        if self.streams is None:
            return {key: torch.empty(numel, dtype=dtype, device=device) for key, dtype in dtypes.items()}
        if dtypes:
            run.hosted = HostedState(tuple(dtypes.items()), numel, device)
        return {} if run.hosted is None else run.hosted.tensors

    def _show(self, optimizer: Optimizer, run: ParameterRange) -> bool:
        """Makes parameters' state views into the range's if the optimizer has replaced that; returns whether it has."""
        mine = self.state.get(run.flat, {})
        if len(mine) == len(run.made) and all(run.made.get(key) is value for key, value in mine.items()):
            return False
        run.made = dict(mine)
        for slot in run.slots:
            param = run.buffer.params[slot]
            run.shown[slot] = {k: _view(optimizer, k, v, run, slot, param) for k, v in mine.items()}
            optimizer.state[param] = run.shown[slot]
        return True


def _view(optimizer: Optimizer, key: str, value: Any, run: ParameterRange, slot: int, param: ShardedParameter) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape != run.flat.shape:
        raise NotImplementedError(
            f"fully_shard_optimizer does not support {type(optimizer).__name__}: its state {key!r} is not elementwise"
        )
    rows = run.part(value, slot)
    return ShardedDTensor(rows, param.sharding) if run.hosted is None else run.hosted.show(rows, param.sharding)


def _members(optimizer: Optimizer) -> Members:
    found: dict[FlatBuffer, list[tuple[int, int]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if is_sharded(param):
                buffer, slot = param._mfsdp_owner, param.sharding.slot
                if buffer.gradients.has(slot):
                    found.setdefault(buffer, []).append((slot, number))
    return {buffer: tuple(sorted(slots)) for buffer, slots in found.items()}


def _history(optimizer: Optimizer, param: ShardedParameter) -> tuple[object, ...]:
    """Returns what must be equal for parameters to share state: steps taken, and names of state entries."""
    state = optimizer.state.get(param, {})
    numbers = (v for v in state.values() if isinstance(v, (int, float, torch.Tensor)))
    scalars = tuple(float(v) for v in numbers if not (isinstance(v, torch.Tensor) and v.dim()))
    return scalars, tuple(k for k, v in state.items() if v is not None)


def _stretches(buffer: FlatBuffer, history: dict[int, History]) -> list[list[int]]:
    """Groups adjacent slots of equal history in the shard. A slot without rows on this rank joins the first group of
    equal history, or forms its own.
    """
    places = buffer.weights.locals
    there = sorted((s for s in range(len(places)) if places[s].numel), key=lambda s: places[s].shard_offset)
    out: list[list[int]] = []
    before: History | None = None
    for slot in there:
        now = history.get(slot)
        if now is not None:
            if now == before:
                out[-1].append(slot)
            else:
                out.append([slot])
        before = now
    for slot, now in history.items():
        if not places[slot].numel:
            like = next((stretch for stretch in out if history[stretch[0]] == now), None)
            if like is None:
                out.append([slot])
            else:
                like.append(slot)
    return out
