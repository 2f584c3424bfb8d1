"""Lets a rank skip units: it joins their collectives with zeros, so that other ranks need not wait.

Note [Joining with zeros]
With a data-dependent branch, dropped layers, or a vision tower and a batch without pictures, some ranks use a unit,
others do not, and none knows in advance (``may_be_unused``). In such a *loose* model, each collective is announced
separately (Note [Desync detection]), also in compiled programs, which may differ between ranks. It launches only when
all ranks of the group have answered. If answers differ and some concern units of a loose model, one of these comes
first, the same on all ranks. Ranks that announced something else join it: they send their shard and drop the result, or
reduce zeros and accumulate the sum. Then they repeat their announcement. So units may be used at any time, in any
order, compiled or not; the sums are the same.

On a mesh of two axes, all ranks of both get every announcement, as one group, and a reduction over both is one
operation. If each axis agreed separately, two ranks could be bound to different choices.

Ranks may finish at different times. So the end of a backward is announced too (of a forward, if there is no backward).
Gradients that a unit keeps unreduced under `no_sync` are reduced there, if no rank has used it since. The announcement
names the used units that are not optional, so a rank that skipped one is reported (invariant 13). A parameter has a
gradient if any rank used its unit; ranks need not ask for which.

Costs: all ranks answer before each collective; collectives over two axes and gathers of persistent parameters complete
at once. Between announcements, ranks must not wait for each other otherwise (a user's barrier in the middle of
forward): a rank that skips the unit would wait there, and the others here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..config.reductions import Reduction, reduction, reduction_steps
from . import comm_formats, engine, execution
from .buffer_registry import gather_of, known, reduction_of, refresh_of
from .desync import Fingerprint, PendingCheck, operation
from .execution import Execution
from .sync_collectives import at_once, gather_now, reduce_nothing, reduced_over, summed
from .transport import segments
from .transport_registry import group_state

if TYPE_CHECKING:
    from .buffer_api import Buffer


class OptionalUnits:
    """A model's optional units; false if every rank uses every unit."""

    def __init__(self) -> None:
        self.name = ""
        """The model's name and a number, which tells copies apart."""
        self.group = ""
        """Name of the group of all ranks with a part of the model."""
        self.scopes = 0
        """Open forwards in plain Python."""
        self._members: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._used: set[str] = set()
        """Units that are not optional and had gradients of this rank in the running backward."""
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
        """Allows ranks to skip units."""
        self.name, self.group = f"{name} {next(_models)}", group

    def join(self, buffer: Buffer) -> None:
        """Adds a buffer of the model."""
        self._members.add(buffer)
        buffer.left_out = buffer.left_out or SkippedUnit(buffer)
        state = group_state(self.group)
        if state is not None:
            state.skippable.add(buffer.left_out)

    def begins(self) -> None:
        """Resets the state outside of a backward; an exception may have ended the last one."""
        if engine.backward_number() < 0:
            self._ending = -1
            self._used.clear()

    def uses(self, buffer: Buffer) -> None:
        """Records that this rank has gradients of a buffer."""
        if self and not buffer.spec.optional:
            self._used.add(buffer.unit.fqn)

    def in_backward(self) -> None:
        """Schedules the announcement of the outermost backward's end, if one runs."""
        now = engine.backward_number()
        if not self or now < 0 or now == self._ending or (self._ending >= 0 and engine.nested()):
            return
        self._ending = now
        self._used.clear()
        engine.after_backward(self._end_backward)

    def _end_backward(self) -> None:
        for buffer in sorted(self._members, key=lambda buffer: buffer.path):
            if buffer.gradients.holds and buffer.gradients.sync:  # no rank has used it since
                reduce_nothing(buffer.weights.source, buffer.text)
        used, self._used = self._used, set()
        self.end("backward", f", with gradients of {', '.join(sorted(used)) or 'no unit that has to be used'}")
        self._ending = -1

    def end(self, phase: str, what: str = "") -> None:
        """Returns when all ranks have reached the end of a phase; joins their collectives until then.

        Raises:
            RuntimeError: some have not, or have used other units.
        """
        with execution.announced(f"end of {phase} of {self.name}{what}", self.group):
            pass


_models = itertools.count()
"""Numbers of loose models, equal on all ranks, which create them together."""


class SkippedUnit:
    """A flat buffer that this rank joins with zeros when another one uses it."""

    def __init__(self, buffer: Buffer):
        self._buffer = weakref.ref(buffer)

    def choices(self) -> Iterator[tuple[Fingerprint, Callable[[PendingCheck], None]]]:
        """What other ranks may announce for it, each with the function that joins."""
        buffer = self._buffer()
        if buffer is None:
            return
        source = buffer.weights.source
        for what, does in (
            (gather_of(source), gather_now),
            (refresh_of(source), _refresh),
            (reduction_of(source, wanted=True), reduce_nothing),
            (reduction_of(source, wanted=False), partial(reduce_nothing, wanted=False)),
        ):
            yield operation(what, optional=True), partial(self._stand_in, does)

    def _stand_in(self, does: Callable[[torch.Tensor, str], object], pending: PendingCheck) -> None:
        buffer = self._buffer()
        assert buffer is not None, "`choices` has just found it"
        run = Execution(pending.words.name, meets=buffer.spec.peer_groups)
        run.part(pending)
        run.carry(pending.group.name, buffer.spec.peer_groups)
        with execution.part_of(run), torch.no_grad():
            does(buffer.weights.source, buffer.text)


def _refresh(source: torch.Tensor, spec: str) -> None:
    weights = known(source).weights
    weights.stale = True  # another rank's parameters are stale
    at_once(weights.refresh())


class SeparateAnnouncements:
    """Announces the collectives of a loose program one by one."""

    def __init__(self) -> None:
        self.reducing: dict[int, Buffer] = {}
        """Buffers by address of their gradients, until the first reduction."""
        self._outer: dict[int, torch.Tensor] = {}
        """Results of the reduction over the outer axis, by address of the first reduction's result."""

    def gather(self, run: Execution, buffer: Buffer) -> None:
        """Announces a gather."""
        _announce(run, buffer, gather_of(buffer.weights.source))

    def refresh(self, run: Execution, buffer: Buffer) -> None:
        """Announces the gather of persistent parameters, if due, and completes it: a rank that joins the next
        collective reads them.
        """
        if buffer.weights.due():
            _announce(run, buffer, refresh_of(buffer.weights.source))
            at_once(buffer.weights.refresh())

    def reduce_scatter(
        self, run: Execution, given: torch.Tensor, out: torch.Tensor, spec: str, index: int
    ) -> torch.Tensor:
        """Announces and launches a reduce-scatter into ``out``. If one over the outer axis follows, both are done here:
        a rank that joins does both, and must not meet others in between.
        """
        if given.data_ptr() in self._outer:
            out = self._outer.pop(given.data_ptr())
            run.launch(out)
            return out
        buffer, step, more = self._announce(run, given), reduction(spec, index), reduction_steps(spec)[1:]
        if not more:
            pairs = segments(step.splits, step.ranks, given, out)
            run.launch(out, comm_formats.scatter(run, pairs, step.sum, step.group, step.wire))
            return out
        out = reduced_over(given, step)
        run.launch(out)
        if buffer.gradients.hold(out, buffer.gradients.offsets):
            run.held.add(out.data_ptr())
        else:
            self._outer[out.data_ptr()] = reduced_over(out, more[0])
        return out

    def all_reduce(self, run: Execution, given: torch.Tensor, step: Reduction) -> None:
        """Announces and completes a sum in place, unless `reduce_scatter` has done it."""
        run.launch(given)
        if self._outer.pop(given.data_ptr(), None) is None:
            self._announce(run, given)
            summed(given, step)()

    def _announce(self, run: Execution, given: torch.Tensor) -> Buffer:
        """Announces a bucket's reduction; returns its flat buffer."""
        buffer = self.reducing.pop(given.data_ptr())
        _announce(run, buffer, reduction_of(buffer.weights.source))
        return buffer


def _announce(run: Execution, buffer: Buffer, what: str) -> None:
    run.next(what, buffer.unit.outermost.loose.group, buffer.spec.peer_groups)
