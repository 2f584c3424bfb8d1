"""Runs a backward as two programs, the second at once or when a pipeline schedule asks for it.

Note [Weight parts]
A split backward (`ir.split_backward`) runs its input part in autograd. If the stage of a zero-bubble schedule collects
weight parts (`WeightParts.collecting`), the other one is stored with its arguments, and runs in
`WeightPart.run`, outside of autograd. Otherwise it runs at once, so that a split backward is right in every loop. It
also runs at once where something has to see gradients before autograd goes on: hooks on parameters, and rows that are
out as plain tensors. In a backward that is not for parameters (``torch.autograd.grad``) it does not run at all.

Until a stored part has run, gradients of its units are incomplete: reading ``.grad``, and so an optimizer's step,
raises. A step that was given up half-way leaves parts behind, which ``zero_grad`` or the next one drops.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import capturing
from .buffer_registry import owner
from .deferred import DeferredArguments
from .overlap import must_run_now
from .program_info import ProgramInfo

if TYPE_CHECKING:
    from .buffer_api import Buffer


class PartProgram(Protocol):
    """A compiled program of a split backward."""

    info: ProgramInfo

    def __call__(self, args: list[Any]) -> Any: ...


class SplitProgram:
    """A backward of two programs; takes its arguments as one list, which it empties.

    Args:
        input, weight: its parts.
        takes: the arguments that each takes; the weight part then takes the input part's last ``saved`` results.
        saved: how many.
    """

    def __init__(self, input: PartProgram, weight: PartProgram, takes: tuple[Sequence[int], Sequence[int]], saved: int):
        self.input, self.weight, self._takes, self._saved = input, weight, takes, saved
        self._boxed_call = True  # on the instance: torch's wrappers copy instance attributes

    def __call__(self, args: list[Any]) -> Any:
        first, rest = ([args[i] for i in takes] for takes in self._takes)
        args.clear()
        buffers = [owner(rest[i]) for i in self.weight.info.sources]
        stages = {buffer.gradients.weight_parts for buffer in buffers if buffer is not None}
        parts = stages.pop() if len(stages) == 1 else None
        out = list(self.input(first))
        count = len(out) - self._saved
        rest += out[count:]
        del out[count:]
        if not any(buffer is None or buffer.gradients.wanted() for buffer in buffers):
            return out
        if parts is None or not parts.collects or must_run_now(buffers):
            self.weight(rest)
        else:
            parts.add(WeightPart(self.weight, rest, buffers))
        return out


class WeightPart(DeferredArguments):
    """A weight part that has not run."""

    def __init__(self, program: PartProgram, args: list[Any], buffers: Sequence[Buffer | None]):
        super().__init__(program.info.outline.name, args, buffers)
        self._program = program

    def run(self) -> None:
        """Runs it, on the stream that autograd would have used.

        Raises:
            RuntimeError: weights or saved tensors have been written since.
        """
        self.check("its turn in the schedule", "step when the schedule has ended")
        with self.place.launching(), torch.no_grad():
            self._program(self.args)


class WeightParts:
    """Weight parts of one pipeline stage that have not run."""

    def __init__(self) -> None:
        self.collects = False
        """Whether weight parts of the running backward are stored."""
        self._new: list[WeightPart] = []
        self._waiting: list[WeightPart] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Stores the weight parts of backwards inside of the ``with``."""
        self._new, self.collects = [], True
        try:
            yield
        finally:
            self.collects = False

    def add(self, part: WeightPart) -> None:
        capturing.obstacle("weight parts of a pipeline stage wait for their turn")
        self._new.append(part)
        self._waiting.append(part)
        _stages_waiting.add(self)

    def take(self) -> list[WeightPart]:
        """Returns the weight parts of the last backward, in its order."""
        new, self._new = self._new, []
        return new

    @contextmanager
    def running(self, part: WeightPart) -> Iterator[None]:
        """Takes a stored part that runs inside of the ``with``; if it raises, its gradients stay incomplete.

        Raises:
            RuntimeError: the part was dropped.
        """
        if part not in self._waiting:
            raise RuntimeError(f"mfsdp: {part.name} was dropped, by zero_grad() or a new step, before its turn")
        self._waiting.remove(part)
        try:
            yield
        except BaseException:
            self._waiting.append(part)
            raise
        if not self._waiting:
            _stages_waiting.discard(self)

    def clear(self) -> None:
        """Drops all parts, with what they hold."""
        for part in self._waiting:
            part.args.clear()
        self._waiting.clear()
        self._new = []
        _stages_waiting.discard(self)

    def waits(self, buffer: Buffer) -> int:
        """How many weight parts with gradients of a buffer have not run."""
        return sum(buffer in part.buffers for part in self._waiting)


_stages_waiting: weakref.WeakSet[WeightParts] = weakref.WeakSet()


def any_waiting() -> bool:
    """Whether a weight part of any stage has not run."""
    return bool(_stages_waiting)
