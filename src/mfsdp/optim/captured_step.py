"""`capture_step`: a whole training step as one CUDA graph.

Note [Captured steps]
A step is recorded if a step before it ended in the state in which it began (Note [Steady state]), and replayed whenever
it would begin in that state again, with arguments of the same shapes. Otherwise it runs as Python: after something has
written weights, loaded a checkpoint, frozen a parameter, evaluated between steps, changed a setting. Such a step
usually ends in the state that was recorded, so the next one is replayed; what has moved for good is recorded anew.

Arguments are copied to fixed places. Results are copies. What a graph reads and writes at fixed addresses is held by
the graph's `_Recording`, so that nobody else gets that memory.

Ranks record together: before the calls that `due` names they ask each other whether all are ready, which makes the host
wait. They announce a replay as they announce a program (Note [Desync detection]): a rank that runs Python instead is
named. Every collective is waited for in the recording that launches it: gathers that the optimizer's step launches for
the next forward, where the step ends, on the device.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..buffers.flat_buffer import FlatBuffer, buffers_in, shared_over
from ..dtensor.optimizer_hooks import count
from ..runtime import capturing, devices, execution, step_prefetch
from ..runtime.capturing import GRAPHS, CudaGraph
from ..runtime.desync import operation
from .flat_optimizer import is_flat
from .parameter_ranges import is_sharded
from .step_state import PLAIN, State, StepState, context, numbers

log = logging.getLogger("mfsdp")

STEADY = 2
"""Steps in a row that must begin and end in the same state before one is recorded."""

UNSTEADY = 10
"""Steps in a row that do not, after which a warning says what changes."""

MOST = 8
"""Recordings of one step function; further shapes run as Python."""

_numbers = itertools.count(1)
"""Of recordings, the same on all ranks, which record together."""

KEYS = 64
"""Kinds of arguments that are remembered."""


def due(call: int) -> bool:
    """Whether ranks may record a call: soon at first, later twice in 64 calls, for shapes that take turns too."""
    return call > 3 and (call % 64 < 2 or any(n & (n - 1) == 0 for n in (call, call - 1)))


Key = tuple[TreeSpec, tuple[Hashable, ...]]
"""The structure of arguments, and of each its value, or its shape, strides, dtype and device."""


def capture_step(
    step: Callable[..., Any], modules: nn.Module | Sequence[nn.Module], optimizers: Optimizer | Sequence[Optimizer] = ()
) -> CapturedStep:
    """Returns a function that does what ``step`` does, by one launch of a CUDA graph where that is the same.

        def step(ids, labels):
            loss = loss_of(model(ids), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = mfsdp.capture_step(step, model, optimizer)

    The first calls run ``step`` itself. From then on its Python does not run: everything that differs from step to step
    has to be a tensor argument, on the device, in lists, tuples or dicts. Results are detached copies. torch's
    optimizers need ``capturable=True``, and a learning rate that a schedule changes has to be a tensor on the device. A
    step that cannot be captured, or begins in another state than a captured one, runs as before; a warning says why,
    once. `CapturedStep.describe` lists what is captured. On a CPU nothing is. Capturing has not run on a GPU yet.

    Seen: writes to weights, loads, other learning rates, modes, frozen parameters, other variables that ``step`` itself
    names if they are tensors, numbers or text. Not seen: attributes of objects, files, time.

    Gradients keep their memory, as under `keep_gradients`. All ranks must call the function together, with arguments of
    equal shapes.

    Args:
        step: any number of forwards and backwards, clipping, and steps of ``optimizers``. If it steps an optimizer, it
            should call ``zero_grad`` too.
        modules: the sharded models that it uses, compiled or not.
        optimizers: all that it steps; those of sharded parameters made by `fully_shard_optimizer`.

    Raises:
        TypeError: ``step``, ``modules`` or ``optimizers`` are something else.
        ValueError: nothing of the modules is sharded; an optimizer of sharded parameters is not flat.
    """
    models = [modules] if isinstance(modules, (nn.Module, Optimizer)) else list(modules)
    stepped = [optimizers] if isinstance(optimizers, (nn.Module, Optimizer)) else list(optimizers)
    if not callable(step):
        raise TypeError(f"capture_step: {step!r} cannot be called: give step, modules, optimizers")
    for value, kind in [*((m, nn.Module) for m in models), *((o, Optimizer) for o in stepped)]:
        if not isinstance(value, kind):
            raise TypeError(f"capture_step: {value!r} is no {kind.__name__}: give step, modules, optimizers")
    if not any(map(buffers_in, models)):
        raise ValueError("capture_step: nothing of the modules is sharded; call mfsdp.fully_shard first")
    for optimizer in stepped:
        sharded = any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])
        if sharded and not is_flat(optimizer):
            raise ValueError(
                f"capture_step: the {type(optimizer).__name__} steps sharded parameters one by one; call "
                "mfsdp.fully_shard_optimizer(optimizer) first"
            )
    return CapturedStep(step, models, stepped)


@dataclass(eq=False)
class _Recording:
    """A captured step."""

    graph: CudaGraph
    inputs: list[torch.Tensor]
    """Copies of the tensor arguments."""
    results: Any
    """What the step returned; tensors are overwritten by every replay."""
    held: list[Any]
    """What the graph uses and does not own."""
    written: list[FlatBuffer]
    """Whose weights it writes."""
    name: str
    replays: int = 0


@dataclass
class _Seen:
    """What is known of calls with one key."""

    state: State = field(default_factory=dict)
    """In which the last of them ended."""
    times: int = 0
    """How many in a row have begun and ended in it."""
    unsteady: int = 0
    """How many in a row have not."""
    refused: bool = False
    """Whether something stands in the way."""
    results: Hashable = None
    """The structure of results, and those that are no tensors."""
    recordings: list[tuple[State, _Recording]] = field(default_factory=list)


class CapturedStep:
    """See `capture_step`."""

    def __init__(self, step: Callable[..., Any], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]):
        buffers = [buffer for model in models for buffer in buffers_in(model)]
        for buffer in buffers:
            buffer.gradients.keeps = True
        self._device = buffers[0].weights.main.device
        self._makes_graph = GRAPHS.get(self._device.type)
        self._stream = devices.side(self._device, "captured steps")
        self._step, self._state = step, StepState(step, models, optimizers, self._stream)
        self._groups = list(dict.fromkeys(group for model in models for group in shared_over(model)))
        self._seen: dict[Key, _Seen] = {}
        self._told: dict[str, None] = {}
        self._calls = 0
        if self._makes_graph is None:
            log.info("mfsdp: steps on %s run as they are: there are no graphs", self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step.

        Raises:
            TypeError: an argument is neither a tensor nor a number, text or ``None``, in lists, tuples and dicts.
            RuntimeError: recording failed: its Python has run and nothing on the device.
            DesyncError: another rank does something else.
        """
        leaves, tree = tree_flatten((args, kwargs))
        key = tree, (*map(_described, leaves), *context(self._device))
        if self._makes_graph is None or capturing.is_recording():
            return _copied(self._step(*args, **kwargs))
        with devices.between(self._stream, self._device):  # the default stream cannot be captured
            return self._take(key, leaves)

    def describe(self) -> str:
        """Returns the captured steps as text, one line each, and why others are not captured."""
        lines = [
            f"{recording.name}: {recording.replays} replays, {recording.graph.nbytes:,} bytes of its own"
            for seen in self._seen.values()
            for _, recording in seen.recordings
        ]
        return "\n".join([*(lines or ["no step is captured"]), *(f"not captured: {why}" for why in self._told)])

    def reset(self) -> None:
        """Drops all captured steps and their memory. Call it before process groups are destroyed."""
        self._seen.clear()
        self._told.clear()
        self._calls = 0

    # one step

    def _take(self, key: Key, leaves: list[Any]) -> Any:
        step_prefetch.settle_for(self._state.buffers, self._device)
        for buffer in self._state.buffers:
            buffer.gradients.follow_stream()
        before, seen = self._state.now(), self._seen_of(key)
        found = next((recording for state, recording in seen.recordings if state == before), None)
        ready = found is None and seen.times >= STEADY and seen.state == before and not seen.refused
        if ready and sum(len(each.recordings) for each in self._seen.values()) >= MOST:
            self._tell(f"{MOST} steps of other shapes or states are captured already")
            seen.refused, ready = True, False
        self._calls += 1
        if due(self._calls) and self._all(ready):
            return self._record(seen, key[0], before, leaves)
        if found is not None:
            return self._replay(found, leaves)
        watch = seen.times == STEADY - 1 and seen.state == before
        out = self._watched(seen, key, leaves) if watch else self._run(key[0], leaves)
        self._note(seen, before, self._state.now())
        return _copied(out)

    def _seen_of(self, key: Key) -> _Seen:
        if key not in self._seen and len(self._seen) >= KEYS:
            self._tell(f"more than {KEYS} kinds of arguments: give numbers that change as tensors")
            unused = next((key for key, seen in self._seen.items() if not seen.recordings), None)
            self._seen.pop(unused, None)  # type: ignore[arg-type]
        return self._seen.setdefault(key, _Seen())

    def _all(self, ready: bool) -> bool:
        """Whether all ranks are ready to record; the host waits for them."""
        what = "question whether a step can be captured"
        word = torch.tensor([float(ready)], device=self._device)
        with execution.announced(what, *self._groups):
            for group in self._groups:
                execution.current().all_reduce(word, "min", group)()
        return bool(word)

    def _run(self, tree: TreeSpec, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, tree)
        out = self._step(*args, **kwargs)
        step_prefetch.complete(self._state.buffers)
        return out

    def _watched(self, seen: _Seen, key: Key, leaves: list[Any]) -> Any:
        """Runs a step and finds out why it could not be recorded."""
        writes, versions = self._state.writes(), _versions(leaves)
        with capturing.watching() as found:
            for why in self._forbidden(leaves):
                capturing.obstacle(why)
            with capturing.host_waits(self._device), _Watch():
                out = self._run(key[0], leaves)
        if _versions(leaves) != versions:
            found["the step writes an argument"] = None
        seen.results = _constants(out)
        strange = {type(leaf).__name__ for leaf in tree_leaves(out) if not isinstance(leaf, (*PLAIN, torch.Tensor))}
        found |= {f"the step returns a {name}: give tensors, in lists, tuples and dicts": None for name in strange}
        mine = {
            id(p) for optimizer in self._state.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        for (name, params), version in self._state.writes().items():
            if version != writes.get((name, params)) and mine.isdisjoint(params):
                found[f"the step writes {name}, of no optimizer that capture_step was given"] = None
        seen.refused = bool(found)
        for why in found:
            self._tell(why)
        return out

    def _note(self, seen: _Seen, before: State, after: State) -> None:
        """Counts steady steps; says once what keeps steps from being steady."""
        last = seen.state or before
        changed = [name for name in after if not last.get(name) == before.get(name) == after[name]]
        seen.state, seen.times = after, 0 if changed else seen.times + 1
        seen.unsteady = seen.unsteady + 1 if changed else 0
        if seen.unsteady == UNSTEADY:
            self._tell(f"every step changes {', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''}")

    def _record(self, seen: _Seen, tree: TreeSpec, state: State, leaves: list[Any]) -> Any:
        assert self._makes_graph is not None
        inputs = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        given = iter(inputs)
        static = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        graph, name = self._makes_graph(self._device), f"captured step {next(_numbers)}"
        histories = {buffer: buffer.weights.history for buffer in self._state.buffers}
        with self._announced(name), capturing.recording():
            try:
                out = graph.record(lambda: self._run(tree, static), self._stream)
            except BaseException as error:
                seen.refused = True
                error.add_note(
                    "mfsdp: while a step was captured: its Python has run, and nothing of it on the device. Load a "
                    "checkpoint, or start again without mfsdp.capture_step"
                )
                raise
        log.info("mfsdp: %s: %d bytes of its own", name, graph.nbytes)
        written = [buffer for buffer, history in histories.items() if buffer.weights.history != history]
        recording = _Recording(graph, inputs, out, self._state.held(), written, name)
        if self._state.now() == state and _constants(out) == seen.results:
            self._drop_unreachable(state)
            seen.recordings.append((state, recording))
        else:  # it is this step, and no other
            seen.times = 0
        with self._announced(name):
            return self._launch(recording)

    def _replay(self, recording: _Recording, leaves: list[Any]) -> Any:
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        with torch.no_grad():
            for static, given in zip(recording.inputs, tensors, strict=True):
                static.copy_(given, non_blocking=True)
        with self._announced(recording.name):
            out = self._launch(recording)
        for buffer in recording.written:
            buffer.weights.replayed()
        count(recording.written)
        return out

    def _drop_unreachable(self, state: State) -> None:
        """Drops recordings that use memory which is not used any more."""
        for seen in self._seen.values():
            seen.recordings = [each for each in seen.recordings if _memory(each[0]) == _memory(state)]

    def _launch(self, recording: _Recording) -> Any:
        recording.graph.replay()
        recording.replays += 1
        return _copied(recording.results)

    @contextmanager
    def _announced(self, name: str) -> Iterator[None]:
        """Tells the other ranks that a recorded step begins, as a program does."""
        run = execution.Execution(name)
        run.announce(dict.fromkeys(self._groups, operation(name)))
        for group in self._groups[:1]:
            run.line(group, self._device)  # the watchdog looks at programs that communicate
        with execution.inside(run):
            run.agree()
            yield

    def _forbidden(self, leaves: list[Any]) -> Iterator[str]:
        """Yields what is known to be uncapturable before the step runs."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device != self._device:
                yield f"an argument is on {leaf.device}; move it to {self._device} first"
            elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                yield "an argument requires a gradient"
        for optimizer in self._state.optimizers:
            name = type(optimizer).__name__
            if self._device.type == "cuda" and any(g.get("capturable") is False for g in optimizer.param_groups):
                yield f"the {name} was built without capturable=True"
            for key, value in numbers(optimizer):
                if value.device != self._device:
                    yield f"{key} of the {name} is a tensor on {value.device}; make it on {self._device}"

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told[why] = None
            warnings.warn(f"mfsdp: the step is not captured and runs as before: {why}", stacklevel=4)


class _Watch(TorchDispatchMode):
    """Finds operations for which the host waits. Private in torch (``TorchDispatchMode``); tried on 2.13, not on the
    others of 2.11 to 2.15.
    """

    _WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile's code run."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # its own operations come here too
        name = func._schema.name.removeprefix("aten::")
        if name in self._WAITS:
            capturing.obstacle(f"the host waits for a value ({name.strip('_')}, as in .item())")
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_") and out.device != args[1 if name == "copy_" else 0].device:
            capturing.obstacle("tensors are copied from one device to another; pass them on the device")
        return out


def _described(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf
    raise TypeError(
        f"capture_step: an argument of the step is a {type(leaf).__name__}: give tensors, numbers and text, in lists, "
        "tuples and dicts (dict(batch))"
    )


def _versions(leaves: list[Any]) -> list[int]:
    """Counts of writes to arguments; inference tensors have none."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference())
    return [tensor._version for tensor in tensors]


def _constants(results: Any) -> Hashable:
    """The structure of results, and those that are no tensors."""
    leaves, tree = tree_flatten(results)
    return tree, tuple(leaf for leaf in leaves if isinstance(leaf, PLAIN))


def _memory(state: State) -> State:
    """The part of a state that says where memory is."""
    return {name: value for name, value in state.items() if name.startswith(("addresses", "state of", "static"))}


def _copied(results: Any) -> Any:
    leaves, tree = tree_flatten(results)
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(copies, tree)
