"""`fully_shard_optimizer`: makes any elementwise optimizer step on flat tensors instead of hundreds of DTensors.

Parameters of a flat buffer that are adjacent, belong to one parameter group and have the same step history form a
*range*: one view into the flat main weights, one into the flat gradients, and optimizer state of the same length.
During ``step()`` the optimizer sees ranges instead of parameters. Before and after, ``param_groups`` hold the model's
parameters, and ``state`` their state, as views into the ranges' state.

Ranges include the padding between parameters. Its weights, gradients and state are zero and stay zero under every
optimizer that leaves zero weights with zero gradients alone, as torch's elementwise ones do.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..runtime.step_prefetch import GatherLauncher
from . import transformer_engine as te
from .compiled_step import KNOWN, CompiledSteps, unhooked
from .flat_buffer import FlatBuffer
from .host_state import HostedState, StateStreams, load
from .optimizer_hooks import count, hooked, left_alone
from .sharded_dtensor import ShardedDTensor
from .sharded_parameter import ShardedParameter

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")
"""torch optimizers whose update of one element depends on others."""


def fully_shard_optimizer(
    optimizer: Optimizer,
    compile: bool = False,
    *,
    use_decoupled_grad: bool = False,
    ahead: bool = True,
    offload: bool | str | None = None,
) -> Optimizer:
    """Makes an optimizer step on few flat tensors; returns the same optimizer, with the same state dict.

    Results equal those of the original optimizer. Parameter groups keep their settings; parameters without a gradient
    are skipped; unsharded parameters step as before. Call it before building schedulers.

    Args:
        optimizer: an elementwise optimizer over parameters of a model sharded by `mfsdp.fully_shard`.
        use_decoupled_grad: pass gradients as ``.decoupled_grad`` in ``main_grads_dtype`` (as TransformerEngine's and
            Apex's fused optimizers read them) instead of as ``.grad`` in the dtype of the weights.
        compile: compile the step with Inductor, one graph call per range. Results equal the original step up to
            rounding, not bitwise. Numbers (learning rates, step counts) may change in every step without a recompile.
            The optimizer itself takes a parameter's first step, which creates its state, and steps unsharded
            parameters. ``torch.compile`` around a step does not change it.
        ahead: launch the first gathers of the next forward, each after its unit's step (Note [Step prefetch] in
            ``runtime/step_prefetch.py``). Forward uses them if weights have not been written since; its results are
            bitwise the same. Not with the backend's option ``prefetch=0``. All ranks must pass the same value.
        offload: ``True`` or ``"state"``: keep state on the host in pinned memory and stream it through the device unit
            by unit during the step (Note [Streamed state] in ``state/host_state.py``). Results are bitwise the same.
            For torch's own optimizers; state of unsharded parameters and main weights stay on the device. ``None``: as
            the model's plan says (`mfsdp.plan`), else off.

    Raises:
        TypeError: not a `torch.optim.Optimizer`.
        ValueError: the optimizer is flat already, has no sharded parameter, or a scheduler has wrapped its ``step``; it
            is torch's or TransformerEngine's and reads gradients elsewhere; it keeps main weights itself; ``offload``
            is another value.
        NotImplementedError: its update is not elementwise; with ``compile``, it is not torch's own, or cannot be
            compiled (the message gives the reason); with ``offload``, it is not torch's own, ``compile`` is set too, or
            ``offload`` would move main weights.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fully_shard_optimizer: {optimizer!r} is no torch.optim.Optimizer")
    name = type(optimizer).__name__
    if isinstance(optimizer, _FlatOptimizer):
        raise ValueError(f"fully_shard_optimizer: this {name} steps on flat tensors already")
    if any(base.__name__ in NOT_ELEMENTWISE for base in type(optimizer).__mro__):
        raise NotImplementedError(
            f"fully_shard_optimizer does not support {name}: what it does to one element depends on others"
        )
    if not any(_ours(p) for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(f"fully_shard_optimizer: none of the {name}'s parameters is sharded; call fully_shard first")
    if "step" in vars(optimizer):
        raise ValueError(f"fully_shard_optimizer: something has wrapped the {name}'s step; build schedulers afterwards")
    te.understood(optimizer, use_decoupled_grad)
    base: Any = type(optimizer)
    if use_decoupled_grad and base.__module__.startswith("torch.optim."):
        raise ValueError(
            f"fully_shard_optimizer: torch's {name} reads .grad, and use_decoupled_grad=True puts gradients elsewhere: "
            "it would not step. Leave out use_decoupled_grad"
        )
    if compile and base not in KNOWN:
        raise NotImplementedError(
            f"fully_shard_optimizer: {name} cannot be compiled: a recording is vouched for of torch's own "
            f"{', '.join(sorted(known.__name__ for known in KNOWN))} only, since what others keep where is not known. "
            "Leave out compile=True"
        )
    streamed = _streamed(_planned(optimizer) if offload is None else offload, base, compile)
    steps = CompiledSteps(optimizer, base, use_decoupled_grad) if compile else None
    vars(optimizer).update(
        _mfsdp_decoupled=use_decoupled_grad, _mfsdp_compile=compile, _mfsdp_ahead=ahead, _mfsdp_offload=streamed
    )
    optimizer._mfsdp_runs = _ParamRanges(base, use_decoupled_grad, steps, ahead, streamed)  # type: ignore[attr-defined]
    optimizer.__class__ = _subclass(base)
    return optimizer


def _planned(optimizer: Optimizer) -> bool:
    """Whether the model's plan puts optimizer state on the host."""
    ours = (p for g in optimizer.param_groups for p in g["params"] if _ours(p))
    plans = (param._mfsdp_owner.unit.outermost.plan for param in ours)
    return any(plan is not None and plan.optimizer == "host" for plan in plans)


def _streamed(offload: bool | str, base: Any, compile: bool) -> bool:
    """Whether to stream state; raises for unsupported combinations."""
    if offload is False:
        return False
    if offload in ("main", "all"):
        raise NotImplementedError(
            f"fully_shard_optimizer: offload={offload!r}: main weights stay on the device. Parameters are views into "
            "them, and programs read them in forward wherever no cast is kept: where they travel as they "
            'are or in int8, with keep_cast=False, after to_local(). Nothing has been changed. offload="state" moves '
            "the optimizer's state, the larger part under Adam. Main weights are fewer bytes on more ranks, or in "
            "MixedPrecisionPolicy(main_params_dtype=torch.bfloat16), which trains differently"
        )
    if offload not in (True, "state"):
        raise ValueError(f'fully_shard_optimizer: offload={offload!r}: choose False, True or "state"')
    if base not in KNOWN:
        raise NotImplementedError(
            f"fully_shard_optimizer: the state of {base.__name__} cannot be streamed: units would be stepped one by "
            "one, which is known to be the same step of torch's own "
            f"{', '.join(sorted(known.__name__ for known in KNOWN))} only. Leave out offload"
        )
    if compile:
        raise NotImplementedError(
            "fully_shard_optimizer: a compiled step knows where state is, and streamed state is in one room after the "
            "other. Leave out compile=True or offload"
        )
    return True


class _FlatOptimizer:
    """Marks the class of a flat optimizer."""


@functools.cache
def _subclass(base: Any) -> Any:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step on flat tensors."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runs = vars(self).get("_mfsdp_runs")
        if runs is None:  # this optimizer is a copy
            steps = CompiledSteps(self, base, self._mfsdp_decoupled) if self._mfsdp_compile else None
            rest = self._mfsdp_ahead, self._mfsdp_offload
            runs = self._mfsdp_runs = _ParamRanges(base, self._mfsdp_decoupled, steps, *rest)
        runs.step(self)
        count(runs.members)
        return loss

    def __getstate__(self: Any) -> dict[str, Any]:
        names = ("_mfsdp_decoupled", "_mfsdp_compile", "_mfsdp_ahead", "_mfsdp_offload")
        mine = {name: getattr(self, name) for name in names}
        return {**base.__getstate__(self), **mine}

    def state_dict(self: Any) -> dict[str, Any]:
        """As the base's; copies numbers that parameters of a range share: the loading optimizer updates them."""
        out: dict[str, Any] = te.saves(base).state_dict(self)
        out["state"] = {p: {k: _own(v) for k, v in state.items()} for p, state in out["state"].items()}
        return out

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As the base's; does not move streamed state to the device."""
        if self._mfsdp_offload:
            load(base.load_state_dict, self, state_dict)
        else:
            base.load_state_dict(self, state_dict)

    step = left_alone(step)
    step.hooked = True  # type: ignore[attr-defined]  # the base's step runs the hooks
    space = {"step": step, "state_dict": state_dict, "load_state_dict": load_state_dict, "__getstate__": __getstate__}
    space |= {"__module__": base.__module__} | te.loads(base)
    return type(base.__name__, (_FlatOptimizer, base), space)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _ours(param: Any) -> bool:
    return isinstance(param, ShardedParameter) and param._mfsdp_owner is not None


@dataclass(eq=False)
class _ParamRange:
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
    plan: Any = None
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


Members = dict[FlatBuffer, tuple[tuple[int, int], ...]]
"""Parameters that have a gradient: slots of a buffer, with their parameter groups."""


ALONE = 2
"""How many units an uncompiled step takes one by one, to launch their gathers in between."""

TOGETHER = 64 << 20
"""Bytes of the other weights per call of an uncompiled step, unless one range is larger. A foreach step needs that much
temporary memory; in smaller parts the host would limit the device."""


class _StepPrefetch:
    """Launches gathers after the steps of units (Note [Step prefetch]).

    Args:
        departures: launchers of each model, in order.
        runs: the ranges to step.
    """

    def __init__(self, departures: list[GatherLauncher], runs: list[_ParamRange]):
        self.departures = departures
        self.buffers: dict[FlatBuffer, None] = dict.fromkeys(b for d in departures for b in d.buffers)
        """Buffers of the units that forward gathers first, in its order."""
        self.left = Counter(run.buffer for run in runs if run.buffer in self.buffers)
        self.stepped: set[FlatBuffer] = set()
        """Those of them whose step is done."""
        self.kept: dict[FlatBuffer, Any] = {}
        """Kept casts that the step also writes."""

    def ordered(self, runs: list[_ParamRange]) -> list[_ParamRange]:
        """Returns the ranges with those of these units first."""
        place = {buffer: i for i, buffer in enumerate(self.buffers)}
        return sorted(runs, key=lambda run: place.get(run.buffer, len(place)))

    def __call__(self, run: _ParamRange) -> None:
        """Called after a range's step."""
        buffer = run.buffer
        if buffer in self.left:
            self.left[buffer] -= 1
            if not self.left[buffer]:
                if self.kept.get(buffer) is None:
                    buffer.weights.stale = True
                else:
                    buffer.weights.written_along()
                self.stepped.add(buffer)
                self._launch(self.stepped | (self.buffers.keys() - self.left.keys()))

    def end(self) -> None:
        """Called after the whole step."""
        self._launch(None)

    def _launch(self, ready: set[FlatBuffer] | None) -> None:
        for departure in self.departures:
            departure.launch(ready)
            if not departure.complete:
                return

    def abandon(self, error: BaseException) -> None:
        for departure in self.departures:
            departure.abandon(error)


class _ParamRanges:
    """The ranges of one optimizer.

    Args:
        base: its class.
        decoupled, steps, ahead: see `fully_shard_optimizer`.
        streamed: whether state is on the host.
    """

    def __init__(self, base: Any, decoupled: bool, steps: CompiledSteps | None, ahead: bool, streamed: bool):
        self.base, self.decoupled, self.steps, self.ahead = base, decoupled, steps, ahead
        self.streams = StateStreams() if streamed else None
        self.members: Members = {}
        self.runs: list[_ParamRange] = []
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)

    def step(self, optimizer: Optimizer) -> None:
        """Runs the optimizer's own step on ranges."""
        members = _members(optimizer)
        for buffer in members:
            buffer.weights.before_write()
        if members != self.members or not all(self._untouched(optimizer, run) for run in self.runs):
            self._build(optimizer, members)
        if self.streams is not None:
            self.streams.end(self.runs, looked_at=True)  # for hooks before the step
        departures = self._departures(optimizer)
        if not departures:
            self._step(optimizer, None, self.runs)
            return
        behind = _StepPrefetch(departures, self.runs)
        try:
            self._step(optimizer, behind, behind.ordered(self.runs))
            behind.end()
        except BaseException as error:
            behind.abandon(error)
            raise

    def _departures(self, optimizer: Optimizer) -> list[GatherLauncher]:
        """Returns the launchers of gathers to launch during the step, one per model."""
        if not self.ahead:
            return []
        models = {buffer.unit.outermost.ahead: buffer.unit.outermost.name for buffer in self.members}
        mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
        found = (ahead.depart(self.members, mine, name) for ahead, name in models.items())
        return [departure for departure in found if departure is not None]

    def _step(self, optimizer: Optimizer, behind: _StepPrefetch | None, runs: list[_ParamRange]) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        params = [g["params"] for g in groups]
        plain = [[p for p in own if not _ours(p)] for own in params]
        lists = [list(own) for own in plain]
        along: set[FlatBuffer] = set()
        watched = hooked(optimizer)
        at_once = None if watched else behind  # hooks may write to what they see
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
            if self.steps is not None:
                casts = self._casts(along, at_once)
                self.steps.step(optimizer, runs, self.state, plain, casts, at_once)
            elif self.base in KNOWN:
                Optimizer.profile_hook_step(partial(self._in_parts, plain=plain, runs=runs, behind=at_once))(optimizer)
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
        self, optimizer: Optimizer, *, plain: list[list[Any]], runs: list[_ParamRange], behind: _StepPrefetch | None
    ) -> None:
        """Runs the step of one of torch's optimizers on some ranges at a time (`_parts`), with unsharded parameters in
        the last part.
        """
        every = [group["params"] for group in optimizer.param_groups]
        parts = self._parts(runs, [] if behind is None else list(behind.left)[:ALONE])
        if self.streams is not None:
            self.streams.begin(runs)
        for i, some in enumerate(parts):
            for number, group in enumerate(optimizer.param_groups):
                flats = [run.flat for run in some if run.group == number]
                group["params"] = flats + plain[number] if i == len(parts) - 1 else flats
            with self._lent(optimizer, some):
                unhooked(self.base)(optimizer)
            if behind is not None:
                for run in some:
                    behind(run)
        if self.streams is not None:
            self.streams.end(runs, looked_at=hooked(optimizer))
        for group, own in zip(optimizer.param_groups, every, strict=True):  # what post hooks see
            group["params"] = own

    def _parts(self, runs: list[_ParamRange], early: list[FlatBuffer]) -> list[list[_ParamRange]]:
        """Returns the ranges to step per call: those of each unit that forward gathers first, then up to `TOGETHER`
        bytes of the others. With streamed state, one range per call and an empty last part.
        """
        if self.streams is not None:
            return [*([run] for run in runs), []]
        parts = [[run for run in runs if run.buffer is buffer] for buffer in early]
        rest, size = list[_ParamRange](), 0
        for run in runs:
            if run.buffer not in early:
                if rest and size + run.flat.nbytes > TOGETHER:
                    parts.append(rest)
                    rest, size = [], 0
                rest.append(run)
                size += run.flat.nbytes
        return [*parts, rest]

    def _lent(self, optimizer: Optimizer, runs: list[_ParamRange]) -> AbstractContextManager[None]:
        """Wraps one call: its range's state is on the device."""
        if self.streams is None or not runs:
            return nullcontext()
        (run,) = runs
        return self.streams.lent(run, self.state, tells=not optimizer.param_groups[run.group].get("fused"))

    @contextmanager
    def _casts(self, along: set[FlatBuffer], behind: _StepPrefetch | None) -> Iterator[list[Any]]:
        """Wraps the compiled part of a step: lends ranges their parts of kept casts (Note [Kept casts]), and records
        which casts were written, except for the ranges that the yielded list receives.
        """
        kept = {run.buffer: run.buffer.weights.kept() for run in self.runs}
        for run in self.runs:
            whole = None if run.ghost else kept[run.buffer]
            run.cast = None if whole is None else whole[run.start : run.start + run.flat.numel()]
        if behind is not None:
            behind.kept = kept
        left: list[_ParamRange] = []
        yield left
        along.update({buffer for buffer, cast in kept.items() if cast is not None} - {run.buffer for run in left})
        for buffer in along:
            buffer.weights.written_along()

    def _untouched(self, optimizer: Optimizer, run: _ParamRange) -> bool:
        """Whether parameters still have the state that the range shows; a load replaces it."""
        return all(optimizer.state.get(run.buffer.params[s]) is run.shown.get(s) for s in run.slots)

    def _build(self, optimizer: Optimizer, members: Members) -> None:
        """Builds ranges of the parameters that have gradients, with their present state."""
        if self.streams is not None:
            self.streams.forget(self.runs)
        self.members, self.runs, self.state = members, [], defaultdict(dict)
        for buffer, slots in members.items():
            history = {slot: (group, *_history(optimizer, buffer.params[slot])) for slot, group in slots}
            for stretch in _stretches(buffer, history):
                self._add(optimizer, buffer, stretch, history[stretch[0]][0])

    def _add(self, optimizer: Optimizer, buffer: FlatBuffer, slots: list[int], group: int) -> None:
        ranges = [buffer.weights.locals[s] for s in slots if buffer.weights.locals[s].numel]
        start = min((at.shard_offset for at in ranges), default=0)
        end = max((at.shard_offset + at.numel for at in ranges), default=0)
        main = buffer.weights.main.detach()
        weights = main[start:end] if ranges else main.new_zeros(1)
        run = _ParamRange(buffer, slots, start, nn.Parameter(weights), group, ghost=not ranges)
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

    def _room(self, run: _ParamRange, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Allocates uninitialized state of a range's length."""
        numel, device = run.flat.numel(), run.flat.device
        if self.streams is None:
            return {key: torch.empty(numel, dtype=dtype, device=device) for key, dtype in dtypes.items()}
        if dtypes:
            run.hosted = HostedState(tuple(dtypes.items()), numel, device)
        return {} if run.hosted is None else run.hosted.tensors

    def _show(self, optimizer: Optimizer, run: _ParamRange) -> bool:
        """Makes parameters' state views into the range's if the optimizer has replaced that; returns whether it has."""
        mine = self.state.get(run.flat, {})
        if len(mine) == len(run.made) and all(run.made.get(key) is value for key, value in mine.items()):
            return False
        run.made = dict(mine)
        for slot in run.slots:
            param = run.buffer.params[slot]
            run.shown[slot] = {k: _seen(optimizer, k, v, run, slot, param) for k, v in mine.items()}
            optimizer.state[param] = run.shown[slot]
        return True


def _seen(optimizer: Optimizer, key: str, value: Any, run: _ParamRange, slot: int, param: ShardedParameter) -> Any:
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
            if _ours(param):
                buffer, slot = param._mfsdp_owner, param.sharding.slot
                if buffer.gradients.has(slot):
                    found.setdefault(buffer, []).append((slot, number))
    return {buffer: tuple(sorted(slots)) for buffer, slots in found.items()}


def _history(optimizer: Optimizer, param: Any) -> tuple[Any, ...]:
    """Returns what must be equal for parameters to share state: steps taken, and names of state entries."""
    state = optimizer.state.get(param, {})
    numbers = [
        v for v in state.values() if isinstance(v, (int, float)) or (isinstance(v, torch.Tensor) and v.dim() == 0)
    ]
    scalars = [float(v) for v in numbers]
    return (tuple(scalars), tuple(k for k, v in state.items() if v is not None))


def _stretches(buffer: FlatBuffer, history: dict[int, tuple[Any, ...]]) -> list[list[int]]:
    """Groups adjacent slots of equal history in the shard. A slot without rows on this rank joins the first group of
    equal history, or forms its own.
    """
    places = buffer.weights.locals
    there = sorted((s for s in range(len(places)) if places[s].numel), key=lambda s: places[s].shard_offset)
    out: list[list[int]] = []
    before: tuple[Any, ...] | None = None
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
