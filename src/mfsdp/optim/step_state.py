"""What a training step begins with, as far as its host code depends on it, for steps that are recorded and replayed.

Note [Steady state]
Runtime code decides on the host: whether a cast or a gather is due, whether a gradient is stored or added, and where.
A recorded step repeats the decisions of the step that was recorded. They are those that Python would take again if the
step begins in the same state and at the same addresses, and the step can go on for ever if it ends where it began.
`StepState.now` lists what the decisions depend on, apart from counters, which a replay moves as the step would have
done (`Weights.replayed`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..buffers.flat_buffer import FlatBuffer, buffers_in
from ..runtime import static_buffers
from ..runtime.buffer_api import Outermost
from .parameter_ranges import is_sharded

State = dict[str, Hashable]
"""What a step begins with, by a name for messages."""

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types whose values are compared as they are."""


class StepState:
    """The state of all that a step uses.

    Args:
        step: the function.
        models, optimizers: what it uses.
        stream: on which it runs; ``None`` on a CPU.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        stream: torch.Stream | None,
    ):
        self.models, self.optimizers, self.stream = models, optimizers, stream
        self.buffers = list(dict.fromkeys(buffer for model in models for buffer in buffers_in(model)))
        outermost = {id(buffer.unit.outermost): buffer.unit.outermost for buffer in self.buffers}
        self.outermost: list[Outermost] = list(outermost.values())
        self._variables = _variables(step)
        self._modules: list[nn.Module] = []
        self._children: list[int] = []

    def now(self) -> State:
        """Returns what the next step depends on, apart from counters and the values of tensors."""
        found: State = {}
        for buffer in self.buffers:
            found |= _of_buffer(buffer)
        for outermost in self.outermost:
            found[f"gathers ahead of {outermost.name}"] = outermost.ahead.state
            found[f"loads of {outermost.name}"] = tuple(outermost.half)
        found["global hooks"] = _all_hooks(*_global_hooks())
        found["modules"] = tuple(map(_module, self._all_modules()))
        for number, optimizer in enumerate(self.optimizers):
            name = f"{type(optimizer).__name__} {number}"
            found[f"settings of {name}"] = tuple(_settings(group) for group in optimizer.param_groups)
            found[f"state of {name}"] = tuple(map(_value, _state(optimizer)))
            found[f"hooks of {name}"] = _all_hooks(
                optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
            )
        found["variables of the step"] = tuple(map(_value, self._named()))
        found["static buffers"] = tuple((key, id(static)) for key, static in static_buffers.of_stream(self.stream))
        return found

    def held(self) -> list[Any]:
        """Returns what a recorded step uses at fixed addresses and does not own."""
        held: list[Any] = [tensor for buffer in self.buffers for tensor in _tensors_of(buffer)]
        held += [static for _, static in static_buffers.of_stream(self.stream)]
        held += [tensor for optimizer in self.optimizers for tensor in _state(optimizer)] + self._named()
        return held + [tensor for module in self._all_modules() for tensor in _own(module)]

    def writes(self) -> dict[tuple[str, tuple[int, ...]], object]:
        """Returns counts of writes to weights, by name and the ids of parameters."""
        found: dict[tuple[str, tuple[int, ...]], object] = {}
        for buffer in self.buffers:
            found[buffer.path, tuple(map(id, buffer.params))] = buffer.weights.history
        for name, p in (named for model in self.models for named in model.named_parameters()):
            if not is_sharded(p):
                found[name, (id(p),)] = p._version
        return found

    def _all_modules(self) -> list[nn.Module]:
        """All modules, found again if one has other children than before."""
        children = [id(child) for module in self._modules for child in module._modules.values()]
        if children != self._children or not self._modules:
            self._modules = list(dict.fromkeys(module for model in self.models for module in model.modules()))
            self._children = [id(child) for module in self._modules for child in module._modules.values()]
        return self._modules

    def _named(self) -> list[Any]:
        """Values of the variables that the step itself names: tensors, numbers, text."""
        values = [read() for read in self._variables]
        return [value for value in values if isinstance(value, (*PLAIN, torch.Tensor))]


def context(device: torch.device) -> tuple[Hashable, ...]:
    """Returns what torch does differently in the caller's context."""
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast


def numbers(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Returns tensors of one element among an optimizer's settings and state, with their keys."""
    values = [item for group in optimizer.param_groups for item in group.items()]
    values += [item for state in optimizer.state.values() for item in state.items()]
    return [(key, value) for key, value in values if isinstance(value, torch.Tensor) and value.numel() == 1]


def _tensors_of(buffer: FlatBuffer) -> Iterator[torch.Tensor | None]:
    """Yields what a recorded step reads or writes at its address and no graph pool owns."""
    weights, gradients = buffer.weights, buffer.gradients
    yield from (weights.main, weights.source, weights.kept_cast.values)
    yield from (codes.values for codes in weights.lasting.codes.values())
    yield from (gradients.accumulator.flat, gradients.accumulator.narrow, gradients.accumulator.memory.spare)


def _of_buffer(buffer: FlatBuffer) -> State:
    """Returns what a step's decisions about a buffer depend on."""
    weights, gradients, unit = buffer.weights, buffer.gradients, buffer.unit
    accumulator = gradients.accumulator
    lasting = ((key, codes.history == weights.history) for key, codes in weights.lasting.codes.items())
    name = f"unit {unit.fqn!r}"
    return {
        f"addresses of {name}": tuple(map(_address, _tensors_of(buffer))),
        f"weights of {name}": (
            weights.stale, weights.due(), weights.has_room, weights.kept_cast.written(),
            weights.maxima.due(), tuple(lasting), weights.summoned is None,
        ),
        f"gradients of {name}": (
            gradients.sync, gradients.late, gradients.waits, gradients.overlap is None,
            _all_hooks(*gradients.hooks.grad_hooks.values(), *gradients.hooks.post_hooks.values()),
            tuple(sorted(accumulator.slots)), tuple(sorted(accumulator.dropped)),
            accumulator.lent,
        ),
        f"settings of {name}": (tuple(buffer.trains), buffer.text, unit.open, unit.kept, tuple(sorted(unit.full))),
    }  # fmt: skip


def _address(tensor: torch.Tensor | None) -> Hashable:
    """Returns where a tensor is, its dtype and its shape; ``None`` for no tensor."""
    return None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _all_hooks(*hooks: Mapping[Any, Any] | None) -> tuple[Any, ...]:
    """Returns the hooks in some dicts of them."""
    return tuple(hook for each in hooks if each for hook in each.values())


def _own(module: nn.Module) -> list[torch.Tensor]:
    own = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in own if tensor is not None]


def _module(module: nn.Module) -> Hashable:
    """Its own numbers and texts (mode, dropout's p), hooks, parameters and buffers."""
    hooks = _all_hooks(
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    )
    plain = tuple(value for value in vars(module).values() if type(value) in (bool, int, float, str))
    return id(module), plain, hooks, tuple(map(_tensor, _own(module)))


def _tensor(tensor: torch.Tensor) -> Hashable:
    """Of a sharded parameter only which it is: its buffer knows the rest."""
    if is_sharded(tensor):
        return id(tensor)
    hooks = _all_hooks(tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return id(tensor), tensor.requires_grad, _address(tensor), _address(tensor.grad), hooks


def _global_hooks() -> list[Mapping[Any, Any]]:
    """Hooks of all modules and optimizers. Private in torch; tried on 2.13, not on the others of 2.11 to 2.15."""
    names = "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"
    hooks = [getattr(torch.nn.modules.module, f"_global_{name}") for name in names]
    return [*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def _settings(group: dict[str, Any]) -> Hashable:
    values = tuple((key, _value(value)) for key, value in group.items() if key != "params")
    return tuple(map(id, group["params"])), values


def _state(optimizer: Optimizer) -> list[Any]:
    """The values of an optimizer's state, and whether parameters still show those that a flat step uses."""
    ranges = vars(optimizer).get("_mfsdp_runs")
    state = optimizer.state if ranges is None else ranges.state
    values = [value for each in state.values() for value in each.values()]
    return values if ranges is None else [*values, ranges.shown_in(optimizer)]


def _value(value: Any) -> Hashable:
    """A tensor's place, another value itself."""
    if isinstance(value, torch.Tensor):
        return _address(value)
    return value if isinstance(value, (*PLAIN, tuple)) else repr(value)


def _variables(step: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Functions that read the variables outside of a function that it names."""
    if isinstance(step, partial):
        given = [step.func, *step.args, *step.keywords.values()]
        return [read for each in given if callable(each) for read in _variables(each)]
    function = getattr(step, "__func__", step)
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return []
    space, cells = function.__globals__, function.__closure__ or ()
    reads: list[Callable[[], Any]] = [partial(_contents, cell) for cell in cells]
    return reads + [partial(space.get, name) for name in _names(code) if name in space]


def _names(code: CodeType) -> list[str]:
    """Global names in code, and in functions and comprehensions inside of it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for each in inner for name in _names(each))]))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
