"""What the host knows of a flat buffer between two steps, for steps that are recorded and replayed.

Note [Steady state]
Runtime code decides on the host: whether a cast or a gather is due, whether a gradient is stored or added, and where.
A recorded step repeats the decisions of the step that was recorded. They are those that Python would take again if the
step begins in the same state and at the same addresses, and the step can go on for ever if it ends where it began.
`state` lists what the decisions depend on, apart from counters, which a replay moves as the step would have done
(`Weights.replayed`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from .flat_buffer import FlatBuffer

State = dict[str, Hashable]
"""What a step begins with, by a name for messages."""


def address(tensor: torch.Tensor | None) -> Hashable:
    """Returns where a tensor is, its dtype and its shape; ``None`` for no tensor."""
    return None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def all_hooks(*hooks: Mapping[Any, Any] | None) -> tuple[Any, ...]:
    """Returns the hooks in some dicts of them."""
    return tuple(hook for each in hooks if each for hook in each.values())


def tensors(buffer: FlatBuffer) -> Iterator[torch.Tensor | None]:
    """Yields what a recorded step reads or writes at its address and no graph pool owns."""
    weights, gradients = buffer.weights, buffer.gradients
    yield from (weights.main, weights.source, weights.kept_cast.values)
    yield from (codes.values for codes in weights.lasting.codes.values())
    yield from (gradients.accumulator.flat, gradients.accumulator.narrow, gradients.accumulator.memory.spare)


def state(buffer: FlatBuffer) -> State:
    """Returns what a step's decisions about a buffer depend on."""
    weights, gradients, unit = buffer.weights, buffer.gradients, buffer.unit
    accumulator = gradients.accumulator
    lasting = ((key, codes.history == weights.history) for key, codes in weights.lasting.codes.items())
    name = f"unit {unit.fqn!r}"
    return {
        f"addresses of {name}": tuple(map(address, tensors(buffer))),
        f"weights of {name}": (
            weights.stale, weights.due(), weights.has_room, weights.kept_cast.written(),
            weights.maxima.due(), tuple(lasting), weights.summoned is None,
        ),
        f"gradients of {name}": (
            gradients.sync, gradients.late, gradients.waits, gradients.overlap is None,
            all_hooks(*gradients.hooks.grad_hooks.values(), *gradients.hooks.post_hooks.values()),
            tuple(sorted(accumulator.slots)), tuple(sorted(accumulator.dropped)),
            accumulator.lent,
        ),
        f"settings of {name}": (tuple(buffer.trains), buffer.text, unit.open, unit.kept, tuple(sorted(unit.full))),
    }  # fmt: skip
