"""Units that a rank may leave out of a step: it stands in for them, so that the others need not wait.

Note [Joining with zeros]
A branch on data, layers that are dropped, a tower for pictures where a batch has none: some ranks use a unit, others do
not, and nobody knows before (``may_be_unused``). In such a model, a *loose* one, every collective is announced by
itself (Note [Desync detection]), also those of compiled programs, which ranks may have different ones of, and nothing
is launched before all ranks of the group have answered. Where answers differ and some are about units of such a model,
one of these comes first, the same on all ranks. Those who said something else stand in: they send their shard and drop
what they get, or reduce zeros and accumulate what the others have brought. Then they say again what they had said. So
it does not matter when a rank uses a unit, how often, compiled or not, or in which order: sums are the same, whoever
brings what when.

On a mesh of two axes all ranks of both are told of everything, as one group, and a reduction over both is one
operation: if ranks of an axis agreed among themselves, two of them might each be bound to another one's choice.

A rank may be done while others are not: the end of a backward is announced too (of a forward, where there is no
backward), and what a unit has kept back under `no_sync` is reduced there, if nobody has used it since. Units that were
not said to be left out are named there: who has left out one of these is told (invariant 13). Parameters have a gradient if
any rank has used their unit, so nobody has to ask for which.

It costs one answer of all ranks for each collective; what is sent in two stages, and parameters that last, are waited
for at once. Between two of these announcements ranks must not wait for each other in other ways (a barrier of the
user's own in the middle of forward): whoever left the unit out would be in that, and the others here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from ..config.units import UnitSpec
from . import comm_formats, engine, execution, sync_collectives
from .buffer_registry import gather_of, owner, reduction_of, refresh_of
from .desync import Fingerprint, PendingCheck, operation
from .execution import Execution
from .transport import End, segments
from .transport_registry import group_state


class OptionalUnits:
    """What a model knows of units that its ranks may leave out; nothing, if every rank uses every unit."""

    def __init__(self) -> None:
        self.name = ""
        """The model's, and a number: ranks tell a model from its copies."""
        self.group = ""
        """Name of the group of all ranks that have a part of the model."""
        self.scopes = 0
        """Forwards in plain Python that are open."""
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._used: set[str] = set()
        """Units that may not be left out and have had gradients of this rank in the backward that is running."""
        self._ending = -1
        """Number of the backward whose end will be announced."""

    def __bool__(self) -> bool:
        return bool(self.group)

    def __deepcopy__(self, memo: dict[int, object]) -> OptionalUnits:
        twin = OptionalUnits()
        if self:
            twin.loosen(self.name.partition(" ")[0], self.group)
        return twin

    def loosen(self, name: str, group: str) -> None:
        """Lets ranks leave units out."""
        self.name, self.group = f"{name} {next(_models)}", group

    def join(self, buffer: Any) -> None:
        """Takes in a buffer of the model."""
        self._members.add(buffer)
        buffer.left_out = buffer.left_out or SkippedUnit(buffer)
        company = group_state(self.group)
        if company is not None:
            company.standing.add(buffer.left_out)

    def begins(self) -> None:
        """What is outside of a backward begins: an earlier one may have died of an exception."""
        if engine.backward_number() < 0:
            self._ending = -1
            self._used.clear()

    def uses(self, buffer: Any) -> None:
        """This rank has gradients of a buffer."""
        if self and not buffer.spec.optional:
            self._used.add(buffer.unit.fqn)

    def in_backward(self) -> None:
        """A part of the model runs in a backward, if one runs: the end of the outermost one will be announced."""
        now = engine.backward_number()
        if not self or now < 0 or now == self._ending or (self._ending >= 0 and engine.nested()):
            return
        self._ending = now
        self._used.clear()
        engine.after_backward(self._end_backward)

    def _end_backward(self) -> None:
        for buffer in sorted(self._members, key=lambda buffer: buffer.path):
            if buffer.gradients.holds and buffer.gradients.sync:  # nobody has used it since
                sync_collectives.reduce_nothing(buffer.weights.source, buffer.text)
        used, self._used = self._used, set()
        self.end("backward", f", with gradients of {', '.join(sorted(used)) or 'no unit that has to be used'}")
        self._ending = -1

    def end(self, phase: str, what: str = "") -> None:
        """Returns when all ranks have come to the end of a phase of the model; stands in until then.

        Raises:
            RuntimeError: they have not, or not with the same units.
        """
        with execution.announced(f"end of {phase} of {self.name}{what}", self.group):
            pass


_models = itertools.count()
"""Numbers of loose models, the same on all ranks, which make them together."""


class SkippedUnit:
    """A flat buffer, for ranks that run something else where another one uses it."""

    def __init__(self, buffer: Any):
        self._buffer = weakref.ref(buffer)

    def choices(self) -> Iterator[tuple[Fingerprint, Callable[[PendingCheck], None]]]:
        """What ranks may say of it, and how another one stands in."""
        buffer = self._buffer()
        if buffer is None:
            return
        source = buffer.weights.source
        for what, does in (
            (gather_of(source), sync_collectives.gather_now),
            (refresh_of(source), _refresh),
            (reduction_of(source, wanted=True), sync_collectives.reduce_nothing),
            (reduction_of(source, wanted=False), partial(sync_collectives.reduce_nothing, wanted=False)),
        ):
            yield operation(what, optional=True), partial(self._stand_in, does)

    def _stand_in(self, does: Callable[[torch.Tensor, str], object], said: PendingCheck) -> None:
        buffer: Any = self._buffer()
        run = Execution(said.words.name, meets=buffer.spec.peer_groups)
        run.part(said)
        run.carry(said.company.name, buffer.spec.peer_groups)
        with execution.part_of(run), torch.no_grad():
            does(buffer.weights.source, buffer.text)


def _refresh(source: torch.Tensor, spec: str) -> None:
    weights = owner(source).weights
    weights.stale = True  # another rank's is
    at_once(weights.refresh())


# Collectives of a loose program


def gather(run: Execution, buffer: Any) -> None:
    """Announces a gather."""
    run.next(gather_of(buffer.weights.source), _group(buffer), buffer.spec.peer_groups)


def refresh(run: Execution, buffer: Any) -> list[End]:
    """Announces the gather of parameters that last, if it is due, and waits for it: who stands in for what comes next
    reads them. Gives what is left to be called, nothing.
    """
    weights = buffer.weights
    if not weights.due():
        return []
    run.next(refresh_of(weights.source), _group(buffer), buffer.spec.peer_groups)
    return at_once(weights.refresh())


def reduce_scatter(run: Execution, given: torch.Tensor, out: torch.Tensor, s: UnitSpec, lane: int) -> torch.Tensor:
    """Announces and launches a reduce-scatter into ``out``. Where another reduction follows, over the outer axis, both
    are done here: whoever stands in does so, and must not meet others in between.
    """
    if lane >= 2 and s.world > 1:
        out = run.outer.pop(given.data_ptr())
        run.launch(out)
        return out
    buffer = _announced(run, given)
    if s.outer == 1 or s.world == 1:
        pairs = segments(s.splits_on(lane), s.ranks, given, out)
        run.launch(
            out, comm_formats.scatter(run, pairs, s.sum_dtype(lane), s.reduce_group_on(lane), s.precision.grad_wire)
        )
        return out
    out = sync_collectives.scattered(given, s, lane)
    run.launch(out)
    if buffer.gradients.hold(out, buffer.gradients.offsets):
        run.held.add(out.data_ptr())
    else:
        run.outer[out.data_ptr()] = sync_collectives.over_outer(out, s)
    return out


def all_reduce(run: Execution, given: torch.Tensor, s: UnitSpec, lane: int) -> None:
    """Announces and launches a sum in place, unless `reduce_scatter` has done it."""
    run.launch(given)
    if run.outer.pop(given.data_ptr(), None) is None:
        _announced(run, given)
        sync_collectives.summed(given, s, lane)()


def _announced(run: Execution, given: torch.Tensor) -> Any:
    """Announces the reduction of a bucket; gives the buffer that it is of."""
    buffer = run.reducing.pop(given.data_ptr())
    run.next(reduction_of(buffer.weights.source), _group(buffer), buffer.spec.peer_groups)
    return buffer


def _group(buffer: Any) -> str:
    group: str = buffer.unit.outermost.loose.group
    return group


def at_once(ends: Iterable[End]) -> list[End]:
    """Calls ends; none are left."""
    for end in ends:
        end()
    return []
