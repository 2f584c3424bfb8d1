"""Gathers that are launched ahead of a forward, behind the optimizer's step of their units.

    backward | step u0 | step u1 | step u2 ... u9 | forward: takes u0, takes u1, wait u0 ...
                       |u0_full==|u1_full==|

Note [Step prefetch]
What a forward launches before it waits for anything, its first `prefetch` gathers (or all refreshes of parameters that
last), hides behind nothing of its own. So the flat optimizer (`state.flat_optimizer`) launches these, each as soon as
its unit's weights are new, and the next forward takes them. What they bring is, bit for bit, what forward would have
gathered.

Which. A program knows it when it is compiled (`First`). Each model remembers those of the first forward that trained
behind the last step, with the buffers that it read: static slots, specs and order are the program's own, so a gather
goes where forward wants it, and takes no memory that forward does not take. Launched are those whose every parameter
that trains is this optimizer's, over the group of the first of them; the others stay forward's.

All ranks alike. What is launched hangs on programs, parameter groups and what was taken before, which ranks have alike;
it is announced like a program (Note [Desync detection]). Who may be alone is a rank that has written to its weights
since: no rule makes a write collective. So each says, in the word that it sends anyway where the program begins,
whether it could take what was launched (`agreement.ANEW`), and if any could not, all gather anew: the others have what
that one sent before it wrote. Where the host does not wait for words (NCCL) each goes by its own, and a rank that
gathers anew makes sure first that the others do, and raises if not.

Taken is what begins the same program's list again, on the same stream, from weights that nobody has written since:
their versions and writes counted are those of the launch. Rows that are out as plain tensors may be written past both;
of such a shard a copy is sent, and compared with the rows when forward comes. Rows that get out while their gather is
under way wait for it first.

Parameters that last are not written while a forward waits for its backward (`StepPrefetch.open`), which reads them.

Not taken is: what another program, or another model's step, wants the static buffer of; what a program that gathers
something else first meets; what the next step meets; what uncompiled code refreshes. It is waited for and dropped,
never left to write into a buffer that somebody else has. Twice in a row, and the model launches nothing ahead any more:
something writes behind every step, or two models train in turns over the same static buffers.

An end that nobody calls keeps tensors and a static buffer: what a model leaves that is garbage is waited for where the
next program begins, or by `mfsdp.synchronize`, not by a garbage collector.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..config.units import UnitSpec
from . import buffer_registry, devices, engine, execution, kernels
from .desync import Fingerprint
from .instrumentation import observer, recorded
from .transport import End

log = logging.getLogger("mfsdp")

WASTED = 2
"""After so many launches in a row that no forward could take there are no more."""


@dataclass(frozen=True)
class First:
    """A collective that a program launches before it waits for anything."""

    argument: int
    """The source, among the program's arguments."""
    spec: str
    """Of an all-gather; ``""`` for a refresh."""
    slot: int
    casts: bool
    """Whether the program casts the shard itself."""


Wanted = tuple[Any, str, int, bool]
"""The same in one run: with the buffer instead of the argument."""


@dataclass(eq=False)
class PrefetchedGather:
    """A collective under way that a forward may take."""

    buffer: weakref.ref[Any]
    out: torch.Tensor
    """What it writes to: a full buffer, or a source."""
    ends: list[End]
    history: tuple[int, int]
    """Writes to its weights, when it was launched."""
    stream: torch.Stream | None
    slot: str
    """The static buffer, ``""`` for none."""
    snapshot: torch.Tensor | None
    """The main weights that were sent, where plain tensors of them are out."""

    def finish(self) -> None:
        """Returns once it is complete (on CUDA: once the current stream is behind it)."""
        ends, self.ends = self.ends, []
        for end in ends:
            end()
        here = devices.current_stream(self.out.device)
        if ends and here is not None and self.stream is not None and here != self.stream:
            self.stream.wait_stream(here)  # who takes it there has nothing left to wait for

    def usable(self) -> bool:
        """Whether it brings this rank's weights as they are now, to the stream that wants them."""
        buffer = self.buffer()
        if buffer is None or devices.current_stream(self.out.device) != self.stream:
            return False
        weights = buffer.weights
        if weights.history != self.history:
            return False
        return self.snapshot is None or torch.equal(_bits(self.snapshot), _bits(weights.main))

    def drop(self) -> None:
        """Waits for it, and lets go of what it wrote: parameters that last are due again."""
        _under_way.remove(self)
        self.finish()
        self.out = self.out.new_empty(0)
        buffer = self.buffer()
        if buffer is None:
            buffer_registry.gone()  # and now nobody uses its static buffer
        elif buffer.spec.persistent:
            buffer.weights.stale = True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


_under_way: list[PrefetchedGather] = []
"""Everything that no forward has taken yet, of all models."""


class StepPrefetch:
    """What is launched ahead of one model's forwards."""

    def __init__(self) -> None:
        self.wanted: tuple[Wanted, ...] = ()
        """What the first forward that trained behind the last step launched first."""
        self.learns = True
        """Whether no such forward has come since."""
        self.group = ""
        """Over which something was launched that no program has decided on; ``""`` for nothing."""
        self.wants: tuple[Wanted, ...] = ()
        """``wanted`` when it was."""
        self.launched: list[PrefetchedGather | None] = []
        """By place in ``wants``."""
        self.wasted = 0
        """Launches in a row that nobody took."""
        self.open = 0
        """Forwards since the last step that no backward has come for."""

    def __reduce__(self) -> Any:
        """A copy of a model has nothing under way."""
        return StepPrefetch, ()

    # behind an optimizer's step

    def depart(self, stepped: Collection[Any], mine: Collection[int], name: str) -> GatherLauncher | None:
        """What the step that begins now may launch.

        Args:
            stepped: buffers of which it steps parameters.
            mine: ``id`` of every parameter of the optimizer.
            name: of the model.
        """
        if engine.backward_number() >= 0:
            return None  # it steps inside of a backward, which wants the static buffers
        alive, self.open = self.open > 0, 0
        if self.group and not any(e is not None and e.buffer() in stepped for e in self.launched):
            return None  # another optimizer's, of other units
        self.settle()
        self.learns = True
        if not self.wanted or self.wasted >= WASTED:
            return None
        group, chosen = "", []
        for want in self.wanted:
            held = alive and not want[1]  # a backward to come wants parameters that last as they are
            over = "" if held else _group(want, stepped, mine)
            group = group or over
            chosen.append(want if over and over == group else None)
        return GatherLauncher(self, chosen, group, name) if group else None

    def settle(self) -> None:
        """Drops what was launched and not taken."""
        if self.group:
            self._decided(taken=False)

    def _decided(self, taken: bool) -> list[PrefetchedGather | None]:
        launched, self.launched, self.group, self.wants = self.launched, [], "", ()
        self.wasted = 0 if taken else self.wasted + 1
        there = [early for early in launched if early is not None and early in _under_way]
        if taken:
            for early in there:
                _under_way.remove(early)
            return launched
        for early in there:
            early.drop()
        if self.wasted == WASTED:
            log.info(
                "mfsdp: an optimizer's step launches no gathers ahead of forward any more: %d times in a row none "
                "could take them (something writes to weights behind every step, or other programs come first)",
                WASTED,
            )
        return []

    # where a program begins

    def meet(self, wanted: tuple[Wanted, ...], trains: bool) -> bool:
        """A program begins that launches this first. Whether it may take what was launched: then `decide`."""
        if trains and self.learns:
            self.wanted, self.learns = wanted, False
        if self.group and wanted != self.wants:
            self._decided(taken=False)
        return bool(self.group)

    @property
    def anew(self) -> bool:
        """Whether this rank cannot take what was launched."""
        return not all(early is None or (early in _under_way and early.usable()) for early in self.launched)

    def decide(self, run: execution.Execution, anew: bool) -> None:
        """Gives a run what was launched, or, if any rank says that, drops it. ``anew``: what this rank has said."""
        again = run.anew(self.group, anew)
        run.early = self._decided(taken=not again)


def _group(want: Wanted, stepped: Collection[Any], mine: Collection[int]) -> str:
    """The group that an optimizer may launch it over; ``""``: it is not for it to launch."""
    buffer, text, _, _ = want
    spec: UnitSpec = buffer.spec
    if not text:  # main weights that no step writes need no refresh
        both = spec.replica and spec.outer_optim
        if both or buffer not in stepped:
            return ""
    elif text != buffer.text:
        return ""
    trains = (p for p, does in zip(buffer.params, buffer.trains, strict=True) if does)
    if not all(id(p) in mine for p in trains):
        return ""
    return spec.group if text or not spec.outer_optim else spec.outer_group


@dataclass(eq=False)
class GatherLauncher:
    """The launches of one step, in forward's order: each once its unit has been stepped."""

    ahead: StepPrefetch
    chosen: list[Wanted | None]
    """By place in what forward wants first."""
    group: str
    name: str
    at: int = 0
    """The next of them."""
    run: execution.Execution | None = None

    @property
    def buffers(self) -> list[Any]:
        """Those of units that are launched, in order."""
        return [want[0] for want in self.chosen if want is not None]

    @property
    def complete(self) -> bool:
        """Whether everything is launched."""
        return self.at == len(self.chosen)

    def launch(self, ready: Collection[Any] | None = None) -> None:
        """Launches what comes next, as long as its buffer's step is done: those in ``ready``, or all.

        Raises:
            Apart: other ranks launch something else.
        """
        while not self.complete:
            want = self.chosen[self.at]
            if want is not None:
                if ready is not None and want[0] not in ready:
                    return
                self._launch(want)
            self.at += 1

    def _launch(self, want: Wanted) -> None:
        if self.run is None:
            lines = tuple(_line(w) for w in self.chosen if w is not None)
            seen = observer() is not None or recorded()
            name = f"step ahead of {self.name}'s forward"
            meets = dict.fromkeys(g for buffer in self.buffers for g in buffer.spec.peer_groups)
            self.run = execution.Execution(name, lambda: [line.partition(",")[0] for line in lines], meets, shown=seen)
            self.run.announce({self.group: Fingerprint(name, lines)})
            self.ahead.group, self.ahead.wants = self.group, self.ahead.wanted
            self.ahead.launched = [None] * len(self.chosen)
        with execution.part_of(self.run), torch.no_grad():
            self.run.at += 1
            self.ahead.launched[self.at] = _launched(want, self.run)

    def abandon(self, error: BaseException) -> None:
        """An exception has ended the step: what was launched is called for when all ranks begin anew."""
        run, ahead = self.run, self.ahead
        if run is None:
            return
        for early in ahead.launched:
            if early is not None and early in _under_way:
                _under_way.remove(early)
                run.pending.setdefault(early.out.untyped_storage().data_ptr(), []).extend(early.ends)
        ahead.group, ahead.wants, ahead.launched = "", (), []
        run.leave(error)


def _line(want: Wanted) -> str:
    """What ranks compare: the name of the operation, and what else they have to have alike."""
    buffer, text, slot, _ = want
    verb = "all_gather" if text else "refresh"
    return f"{verb} {buffer.unit.fqn} ahead, to slot {slot}, {buffer.spec.sizes}"


def _launched(want: Wanted, run: execution.Execution) -> PrefetchedGather:
    buffer, text, slot, casts = want
    weights = buffer.weights
    operations: Any = kernels.SHOWN if run.shown else kernels
    history = weights.history
    snapshot = weights.main.detach().clone() if weights.exposed else None
    name = f"p{slot}" if slot >= 0 else ""
    make_room([(weights.main.device, name)])
    if text:
        shard = weights.source
        if casts or snapshot is not None:
            shard = weights.main.detach() if snapshot is None else snapshot
            if buffer.precision.wire is None:
                shard = shard.to(buffer.precision.comm)
        out: torch.Tensor = operations.all_gather(run, shard, text, slot)
    else:
        out = weights.source.detach()
        operations.refresh(run, weights.source)
    ends = run.pending.pop(out.untyped_storage().data_ptr())
    stream = devices.current_stream(out.device)
    early = PrefetchedGather(weakref.ref(buffer), out, ends, history, stream, name, snapshot)
    _under_way.append(early)
    return early


# For whoever comes across what is under way


def make_room(rooms: Collection[tuple[torch.device, str]]) -> None:
    """Drops what is in static buffers that somebody wants now, and what models that are gone have left."""
    for early in list(_under_way):
        if early.buffer() is None or (early.slot and (early.out.device, early.slot) in rooms):
            early.drop()


def of(buffers: Iterable[Any]) -> list[PrefetchedGather]:
    """What is under way for buffers."""
    if not _under_way:
        return []
    those = set(buffers)
    return [early for early in _under_way if early.buffer() in those]


def showing(buffer: Any) -> None:
    """Before rows of a buffer get out as plain tensors: waits for what reads them, and remembers what was sent."""
    for early in of([buffer]):
        early.finish()
        if early.snapshot is None:
            early.snapshot = buffer.weights.main.detach().clone()


def complete(buffers: Iterable[Any]) -> None:
    """Waits for what is under way for buffers, or for no model any more; forward may still take it."""
    those = set(buffers)
    for early in list(_under_way):
        if (buffer := early.buffer()) is None:
            early.drop()
        elif buffer in those:
            early.finish()


def any_under_way() -> bool:
    """Whether anything is."""
    return bool(_under_way)
