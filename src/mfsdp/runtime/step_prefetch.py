"""Launches a forward's first gathers early, after the optimizer's step of their units.

    backward | step u0 | step u1 | step u2 ... u9 | forward: takes u0, takes u1, wait u0 ...
                       |u0_full==|u1_full==|

Note [Step prefetch]
Nothing in forward hides what it launches before its first wait: its first `prefetch` gathers, or all refreshes of
persistent parameters. So the flat optimizer (`optim.flat_optimizer`) launches these, each when its unit's weights are
new, and the next forward takes them. The results are bitwise those of forward's own gathers.

Selection. A program knows these collectives at compile time (`First`). A model remembers those of the first training
forward after the last step, with their buffers. Static buffers, specs and order are the program's, so a gather writes
where forward wants it and uses no extra memory. The optimizer launches a gather if it owns all trainable parameters of
the unit, and if the group is that of the first such gather; forward launches the others.

Equal on all ranks. Launches depend on programs, parameter groups and earlier prefetches, which are equal on all ranks,
and are announced like a program. But one rank alone may write to its weights afterwards, so each says in the next
program's fingerprint whether it could take the gathers (Note [Desync detection]). If any cannot, all gather again: the
others hold what that rank sent before it wrote.

Validity. A program takes the gathers if it begins with the same list, on the same stream, and the weights' versions and
counted writes are those of the launch. Writes to rows exposed as plain tensors may escape both: of such a shard a copy
is sent, and compared with the rows when forward begins. Rows are exposed only after a gather in flight has completed.
Persistent parameters are not overwritten between a forward and its backward, which reads them.

Drops. A gather is dropped when another program or another model's step needs its static buffer, when a program with
other first gathers begins, when the next step begins, or when uncompiled code refreshes its parameters. A drop waits
for the gather, which must not write to a reused buffer. After two drops in a row the model launches no more: some code
writes after every step, or two models train in turns over the same static buffers.

An end that is never called keeps tensors and a static buffer. If its model is garbage, the next program or
`mfsdp.synchronize` waits for it, not a garbage collector.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import buffer_registry, capturing, devices, engine, execution, kernels
from .desync import Fingerprint
from .instrumentation import observer, recorded
from .transport import End

if TYPE_CHECKING:
    from .buffer_api import Buffer

log = logging.getLogger("mfsdp")

WASTED = 2
"""Launches in a row that no forward could take, after which there are no more."""


@dataclass(frozen=True)
class First:
    """A collective that a program launches before its first wait."""

    argument: int
    """The source, among the program's arguments."""
    spec: str
    """Spec of an all-gather; ``""`` for a refresh."""
    slot: int
    casts: bool
    """Whether the program casts the shard itself."""


Wanted = tuple["Buffer", str, int, bool]
"""A `First` in one execution: with the buffer instead of the argument."""


@dataclass(eq=False)
class PrefetchedGather:
    """A gather in flight that a forward may take."""

    buffer: weakref.ref[Buffer]
    out: torch.Tensor
    """Its output: a full buffer, or a source."""
    ends: list[End]
    history: tuple[int, int]
    """Writes to its weights at the launch."""
    stream: torch.Stream | None
    slot: str
    """Its static buffer; ``""`` for none."""
    snapshot: torch.Tensor | None
    """The main weights that were sent, if rows are exposed as plain tensors."""

    def finish(self) -> None:
        """Returns when it is complete (on CUDA: when the current stream waits for it)."""
        ends, self.ends = self.ends, []
        for end in ends:
            end()
        here = devices.current_stream(self.out.device)
        if ends and here is not None and self.stream is not None and here != self.stream:
            self.stream.wait_stream(here)  # a reader on that stream need not wait

    def usable(self) -> bool:
        """Whether it holds this rank's current weights, on the stream that needs them."""
        buffer = self.buffer()
        if buffer is None or devices.current_stream(self.out.device) != self.stream:
            return False
        weights = buffer.weights
        if weights.history != self.history:
            return False
        if self.snapshot is None or capturing.is_recording():  # which has just been asked
            return True
        return torch.equal(_bits(self.snapshot), _bits(weights.main))

    def drop(self) -> None:
        """Waits for it and releases its output; persistent parameters are due again."""
        _under_way.remove(self)
        self.finish()
        self.out = self.out.new_empty(0)
        buffer = self.buffer()
        if buffer is None:
            buffer_registry.gone()  # now nothing uses its static buffer
        elif buffer.spec.persistent:
            buffer.weights.stale = True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


_under_way: list[PrefetchedGather] = []
"""Gathers that no forward has taken yet, of all models."""


class StepPrefetch:
    """Prefetched gathers of one model."""

    def __init__(self) -> None:
        self.wanted: tuple[Wanted, ...] = ()
        """First collectives of the first training forward after the last step."""
        self.learns = True
        """Whether there has been no such forward yet."""
        self.in_flight: GatherLauncher | None = None
        """What a step has launched and no program has taken or dropped."""
        self.wasted = 0
        """Launches in a row that no forward took."""
        self.open = 0
        """Forwards since the last step that have had no backward."""

    def __reduce__(self) -> tuple[type[StepPrefetch], tuple[()]]:
        """A copy of a model has nothing in flight."""
        return StepPrefetch, ()

    @property
    def state(self) -> tuple[Hashable, ...]:
        """What the next step depends on (Note [Steady state])."""
        flight = self.in_flight
        ready = None if flight is None else not flight.anew
        return ready, len(self.wanted), self.learns, self.wasted, self.open

    # after an optimizer's step

    def depart(self, stepped: Collection[Buffer], mine: Collection[int], name: str) -> GatherLauncher | None:
        """The launcher for the step that begins now; ``None`` if it may launch nothing.

        Args:
            stepped: buffers whose parameters it steps.
            mine: ``id`` of every parameter of the optimizer.
            name: the model's.
        """
        if engine.backward_number() >= 0:
            return None  # it steps inside of a backward, which needs the static buffers
        alive, self.open = self.open > 0, 0
        launched = self.in_flight.launched if self.in_flight is not None else []
        if self.in_flight is not None and not any(e is not None and e.buffer() in stepped for e in launched):
            return None  # another optimizer's gathers, of other units
        self.settle()
        self.learns = True
        if not self.wanted or self.wasted >= WASTED:
            return None
        group, chosen = "", []
        for want in self.wanted:
            held = alive and not want[1]  # a later backward needs the persistent parameters unchanged
            over = "" if held else _group(want, stepped, mine)
            group = group or over
            chosen.append(want if over and over == group else None)
        return GatherLauncher(self, self.wanted, chosen, group, name) if group else None

    def settle(self) -> None:
        """Drops what was launched and not taken."""
        if self.in_flight is not None:
            self.decided(self.in_flight.launched, taken=False)

    def decided(self, launched: list[PrefetchedGather | None], taken: bool) -> list[PrefetchedGather | None]:
        """Hands over what was launched, or drops it and returns nothing."""
        self.in_flight = None
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

    # at the beginning of a program

    def meet(self, wanted: tuple[Wanted, ...], trains: bool) -> GatherLauncher | None:
        """Notes that a program begins with these collectives. Returns what was launched, if it may take that."""
        if trains and self.learns:
            self.wanted, self.learns = wanted, False
        if self.in_flight is not None and wanted != self.in_flight.wanted:
            self.settle()
        return self.in_flight


def _group(want: Wanted, stepped: Collection[Buffer], mine: Collection[int]) -> str:
    """The group over which an optimizer may launch a collective; ``""`` if it must not."""
    buffer, text, _, _ = want
    spec = buffer.spec
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
    """Launches the gathers of one step in forward's order, each after its unit's step; forward takes them."""

    ahead: StepPrefetch
    wanted: tuple[Wanted, ...]
    """Forward's first collectives."""
    chosen: list[Wanted | None]
    """The same; ``None``: forward launches it."""
    group: str
    name: str
    at: int = 0
    """Position of the next one."""
    run: execution.Execution | None = None
    launched: list[PrefetchedGather | None] = field(default_factory=list)
    """By position."""

    @property
    def buffers(self) -> list[Buffer]:
        """Buffers of the gathers to launch, in order."""
        return [want[0] for want in self.chosen if want is not None]

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to launch."""
        return self.at == len(self.chosen)

    def launch(self, ready: Collection[Buffer] | None = None) -> None:
        """Launches the next gathers whose buffers' steps are done: those in ``ready``, or all.

        Raises:
            DesyncError: other ranks launch something else.
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
            self.ahead.in_flight, self.launched = self, [None] * len(self.chosen)
        with execution.part_of(self.run), torch.no_grad():
            self.run.at += 1
            self.launched[self.at] = _launched(want, self.run)

    def abandon(self, error: BaseException, run: execution.Execution | None = None) -> None:
        """Cleans up after a step that raised: the ends of its launches are called when all ranks begin anew.

        Args:
            error: what it raised.
            run: an execution that the exception is about to end too; the launches become its own.
        """
        mine, self.run = self.run, None
        if mine is None:
            return
        for early in self.launched:
            if early is not None and early in _under_way:
                _under_way.remove(early)
                mine.pending.setdefault(early.out.untyped_storage().data_ptr(), []).extend(early.ends)
        self.ahead.in_flight = None
        if run is None:
            mine.leave(error)
            return
        run.announced += mine.announced
        run.launched += mine.launched
        for out, ends in mine.pending.items():
            run.pending.setdefault(out, []).extend(ends)

    # at the beginning of a program

    @property
    def anew(self) -> bool:
        """Whether this rank cannot take what was launched."""
        return not all(early is None or (early in _under_way and early.usable()) for early in self.launched)

    def decide(self, run: execution.Execution, anew: bool) -> None:
        """Gives an execution what was launched, or drops it if any rank cannot take it. ``anew``: whether this rank
        cannot.
        """
        run.early = self.ahead.decided(self.launched, taken=not run.anew(self.group, anew))


def _line(want: Wanted) -> str:
    """What ranks compare: the operation's name, and values that must be equal."""
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


# For code that meets gathers in flight


def make_room(rooms: Collection[tuple[torch.device, str]]) -> None:
    """Drops gathers in static buffers that are needed now, and those of deleted models."""
    for early in list(_under_way):
        if early.buffer() is None or (early.slot and (early.out.device, early.slot) in rooms):
            early.drop()


def of(buffers: Iterable[Buffer]) -> list[PrefetchedGather]:
    """Gathers in flight for buffers."""
    if not _under_way:
        return []
    those = set(buffers)
    return [early for early in _under_way if early.buffer() in those]


def showing(buffer: Buffer) -> None:
    """Before rows of a buffer become plain tensors: waits for gathers that read them, and keeps a copy of what was
    sent.
    """
    for early in of([buffer]):
        early.finish()
        if early.snapshot is None:
            early.snapshot = buffer.weights.main.detach().clone()


def complete(buffers: Iterable[Buffer]) -> None:
    """Waits for the gathers of buffers, which forward may still take; drops those of deleted models."""
    those = set(buffers)
    for early in list(_under_way):
        if (buffer := early.buffer()) is None:
            early.drop()
        elif buffer in those:
            early.finish()


def settle_for(buffers: Collection[Buffer], device: torch.device) -> None:
    """Before a step of these buffers that may be replayed, and so drops nothing itself: waits for all gathers, and
    drops those of other models in static buffers of the current stream.
    """
    here = devices.current_stream(device)
    for early in list(_under_way):
        buffer = early.buffer()
        if buffer is None or (early.slot and buffer not in buffers and early.stream == here):
            early.drop()
        else:
            early.finish()


def any_under_way() -> bool:
    """Whether any gather is in flight."""
    return bool(_under_way)
