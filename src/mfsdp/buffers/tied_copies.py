"""Gradients of weights that several pipeline stages hold copies of (tied embeddings).

Note [Tied weights]
Each copy is a parameter of its own: equal values, gradients and settings keep copies equal, bit for bit. The reduced
gradient of a copy goes to a message, not to the accumulator. When a step's last backward is done in the stages of all
copies of a rank, the rank sends the sum of its messages to the other ranks with copies; each adds all sums, in rank
order, and accumulates the total.

The first stage's last backward comes after all others, and ranks with other stages still have to send what it needs.
So the exchange is launched by the stage and completed where a gradient of the copy is read. Before that, torch divides
gradients by the number of microbatches: a copy stores the divisor. Hooks would read too early and are refused.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..runtime import capturing, devices, execution
from ..runtime.transport import End

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer

COUNTED = 64
"""Exchanges are numbered modulo this, exact in every dtype of gradients."""


class TiedWeight:
    """A weight with copies in several stages, as one rank sees it.

    Args:
        name: the same on all ranks.
        group: of the pipeline, with no other collectives.
        place: this rank's index in it.
        others: those of the other ranks with copies.
    """

    def __init__(self, name: str, group: str, place: int, others: Sequence[int]):
        self.name, self.group, self.place, self.others = name, group, place, others
        self.tag = 1 << 30 | zlib.crc32(name.encode()) & (1 << 30) - 1
        """Of its messages: ranks may end stages with copies of several weights in different orders."""
        self.copies: list[TiedCopy] = []
        """This rank's, in order of stages."""
        self.ended: set[TiedCopy] = set()
        """Those whose stage has ended the running step."""
        self.count = 0

    def launch(self) -> None:
        """Launches the exchange of a step."""
        capturing.obstacle("copies of tied weights are exchanged between pipeline stages")
        self.ended.clear()
        exchange = _Exchange(self)
        for copy in self.copies:
            copy.due.append((exchange, copy.divisors))
            copy.message, copy.divisors = None, []
        self.count += 1


class TiedCopy:
    """A parameter that is a copy of a tied weight; belongs to its buffer's accumulator."""

    def __init__(self, weight: TiedWeight, buffer: FlatBuffer, slot: int, counts: bool):
        self.weight, self.buffer, self.slot = weight, buffer, slot
        self.counts = counts
        """Whether a norm over all stages counts this copy: the pipeline's first one."""
        self.message: torch.Tensor | None = None
        """Reduced gradients of this rank's rows that have not been sent, in ``precision.grad``."""
        self.divisors: list[float] = []
        """What the step's gradient is to be divided by."""
        self.due: list[tuple[_Exchange, list[float]]] = []
        """Steps whose total has not been accumulated, with their divisors."""
        _copies.add(self)

    def take(self, gshard: torch.Tensor, scale: float) -> None:
        """Moves the gradient out of one that is about to be accumulated, [shard_numel]."""
        rows = self.buffer.weights.view(gshard, self.slot)
        if self.message is None:
            self.message = torch.zeros_like(rows, dtype=self.buffer.precision.grad)
        self.message.add_(rows, alpha=scale)
        rows.zero_()

    def begin(self) -> None:
        """Begins a step of the schedule; drops what is left of one that raised."""
        if self in self.weight.ended:
            self.weight.ended.discard(self)
            self.message, self.divisors = None, []

    def end(self) -> None:
        """Ends a step: no gradients follow from this copy's stage."""
        self.weight.ended.add(self)
        if len(self.weight.ended) == len(self.weight.copies):
            self.weight.launch()

    @property
    def unsent(self) -> bool:
        """Whether there is a gradient that no exchange has taken."""
        return self.message is not None or self in self.weight.ended

    def divide(self, divisor: float) -> None:
        """Divides ``.grad``, and gradients that wait when they arrive."""
        accumulator = self.buffer.gradients.accumulator
        if self.slot in accumulator.slots:
            accumulator.grad(self.slot).div_(divisor)
        for _, divisors in self.due:
            divisors.append(divisor)
        if self in self.weight.ended:
            self.divisors.append(divisor)

    def arrive(self) -> None:
        """Completes exchanges and accumulates their totals.

        Raises:
            RuntimeError: gradients have come outside of a step; or ranks with copies are in different steps, or only
                some have frozen theirs.
        """
        while self.due:
            exchange, divisors = self.due[0]
            total = exchange.total()
            self.due.pop(0)
            if total is not None:
                for divisor in divisors:
                    total = total / divisor
                self.buffer.gradients.accumulator.add_rows(self.slot, total)
        if self.unsent:
            raise RuntimeError(
                f"mfsdp: the gradient of the tied weight {self.weight.name} is incomplete: of "
                f"{self.buffer.layout.slots[self.slot].name} it has come outside of a step of mfsdp.PipelineStage, or "
                "the step has not ended. Train all stages with copies by one schedule; after an exception in it, call "
                "zero_grad() on all ranks"
            )

    def drop(self) -> None:
        """Drops gradients that wait; an exchange under way is completed first."""
        while self.due:
            self.due.pop(0)[0].total()
        self.message, self.divisors = None, []
        self.weight.ended.discard(self)


_copies: weakref.WeakSet[TiedCopy] = weakref.WeakSet()


def any_unsent() -> bool:
    """Whether any copy of this process has a gradient that no exchange has taken."""
    return any(copy.unsent for copy in _copies)


def tied_copy(param: torch.Tensor) -> TiedCopy | None:
    """Returns a parameter as a copy of a tied weight; ``None`` if it is none."""
    owner = getattr(param, "_mfsdp_owner", None)
    return None if owner is None else owner.gradients.accumulator.tied.get(param.sharding.slot)  # type: ignore[attr-defined]


class _Exchange:
    """A step's gradients under way between the ranks with copies."""

    def __init__(self, weight: TiedWeight):
        self._weight = weight
        copies = weight.copies
        messages = [copy.message for copy in copies if copy.message is not None]
        first = copies[0].buffer
        rows = first.weights.view(first.weights.main, copies[0].slot)
        trains = all(copy.buffer.trains[copy.slot] for copy in copies)
        state = [float(weight.count % COUNTED), float(trains), float(bool(messages))]
        mine = torch.zeros(len(state) + rows.numel(), dtype=first.precision.grad, device=rows.device)
        for copy, message in ((copy, copy.message) for copy in copies if copy.message is not None):
            devices.follow(copy.buffer.gradients.accumulator.stream, message)
            mine[len(state) :].add_(message.reshape(-1))
        mine[: len(state)] = devices.numbers(state, mine.dtype, mine.device)
        self._shape, self._state = rows.shape, state
        self._parts = {weight.place: mine, **{rank: torch.empty_like(mine) for rank in weight.others}}
        received = [(rank, self._parts[rank]) for rank in weight.others]
        self._run = execution.Execution(f"sum of gradients of tied weight {weight.name}", meets=[weight.group])
        self._run.tags[weight.group] = weight.tag
        self._end: End | None = None
        if weight.others:
            self._end = self._run.trade(received, [(rank, mine) for rank in weight.others], weight.group)
        self._total: torch.Tensor | None = None

    def total(self) -> torch.Tensor | None:
        """Returns the sum over all copies, this rank's rows; ``None`` if there is no gradient."""
        if self._parts:
            if self._end is not None:
                with execution.part_of(self._run):
                    self._end()
            states = {rank: part[: len(self._state)].tolist() for rank, part in self._parts.items()}
            for rank, (count, trains, _) in states.items():
                self._compare(rank, count, trains)
            rows = [part[len(self._state) :] for _, part in sorted(self._parts.items())]
            total = rows[0].clone()
            for more in rows[1:]:
                total += more
            self._total = total.view(self._shape) if any(has for _, _, has in states.values()) else None
            self._parts, self._end = {}, None
        return self._total

    def _compare(self, rank: int, count: float, trains: float) -> None:
        if count != self._state[0]:
            raise RuntimeError(
                f"mfsdp: ranks {self._weight.place} and {rank} of the pipeline hold copies of the tied weight "
                f"{self._weight.name} and have run different numbers of steps, or one has dropped a step: end the run "
                "on all ranks"
            )
        if trains != self._state[1]:
            raise RuntimeError(
                f"mfsdp: the tied weight {self._weight.name} trains on only one of ranks {self._weight.place} and "
                f"{rank} of the pipeline: freeze all copies, or none"
            )
