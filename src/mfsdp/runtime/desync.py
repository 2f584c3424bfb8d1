"""Desync detection: ranks announce what they run next, and compare.

Note [Desync detection]
Process groups match collectives by launch order only. Two ranks that take different paths through a model (LayerDrop,
early exit, a branch on data, evaluation on one rank) would exchange wrong parameters, unnoticed if sizes are equal. So
every rank announces what it runs next: once per program, compared as a whole, and once per gather or reduction of the
eager fallback. It sends a fingerprint of eight bytes, a hash of the collectives' texts with their units' paths. This
costs no wait:

* Over gloo the fingerprint is a message to every other rank, sent when the program begins and compared at its first
  wait. The program's own messages have a tag made from the fingerprint and the number of earlier announcements, so
  messages of two programs never match: no wrong values, and no wrong sizes, at which gloo ends the process.
* Over NCCL an all-gather of fingerprints precedes the program's collectives on their stream. The host compares them
  once they arrive: at once in a program's first execution, one or a few programs later in all others.

One bit says whether this rank must gather prefetched (Note [Step prefetch]) or persistent parameters (Note [Unseen
writes]) again. Ranks may differ in it where the host waits for answers anyway; elsewhere that is an error.

Five bits count optimizer steps on the group's parameters, modulo 32. A rank that skips a step (it caught an exception)
would train on with shards of another step, in collectives that are the same on all ranks.

The other bits are mixed with a digest of the state dicts loaded into the group's weights: names, and some values of
full tensors. If only one rank loads one, some weights are old and some new.

If fingerprints differ, every rank raises, and ranks explain theirs through the store.

A rank that an exception takes out of a program has not launched collectives that others wait for. It records that in
the store. Before it communicates again, it checks that all ranks left the same program at the same collective (all ran
out of memory): then they start over. Otherwise the group is lost: the rank records why and breaks the connections that
others may wait on, and all raise.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .transport import Answers, Transport

if TYPE_CHECKING:
    from .join import SkippedUnit

PATIENCE = 10.0
"""Seconds for other ranks to explain why they diverged, or to report that they left a program too."""

BEHIND = 16
"""Limit of unchecked announcements, where the host does not wait for them."""


@dataclass(frozen=True)
class Fingerprint:
    """What a rank is about to run on a process group."""

    name: str
    """The program or operation, for error messages."""
    lines: tuple[str, ...]
    """Must be the same on all ranks: each collective, with its unit's path and sizes."""
    optional: bool = False
    """Whether ranks about to run something else join with zeros (Note [Joining with zeros])."""

    def __post_init__(self) -> None:
        _known[self.digest] = self

    @cached_property
    def digest(self) -> int:
        """57 bits; the lowest says whether it is optional."""
        hashed = int.from_bytes(hashlib.sha256("\n".join(self.lines).encode()).digest()[:8]) >> 7
        return hashed & ~1 | self.optional


ANEW = 1 << 62
"""The bit that says: this rank gathers prefetched or persistent parameters again."""

STEPS = 31 << 57
"""The bits that count this rank's optimizer steps."""

HOW = ANEW | STEPS

LOADS = (1 << 57) - 2
"""The bits mixed with what this rank has loaded."""


_known: dict[int, Fingerprint] = {}
"""This process's fingerprints by digest; another rank's is usually among them."""


@cache
def operation(what: str, optional: bool = False) -> Fingerprint:
    """The fingerprint of a single operation."""
    return Fingerprint(what, (what,), optional)


class DesyncError(RuntimeError):
    """Ranks have diverged."""


class PeerLostError(RuntimeError):
    """Other ranks cannot be reached any more."""


@dataclass
class Left:
    """A program that an exception has ended."""

    name: str
    place: str
    """The operation that raised."""
    launched: int
    """Collectives launched until then."""
    why: str
    groups: list[GroupState]
    """Groups that the program was announced to."""
    all: list[GroupState]
    """These, and other groups whose ranks may wait."""
    ends: list[Callable[[], Any]]
    """Ends of work that the program had launched."""

    def __str__(self) -> str:
        return f"left {self.name} {self.place}, after {self.launched} collectives ({self.why})"

    def begin_anew(self) -> None:
        """Checks that all ranks left at the same collective, then starts over.

        Raises:
            DesyncError: some did not.
        """
        for group in self.groups:
            group.compare_left(self)
        for group in self.groups:
            group.left = None
        for end in self.ends:
            end()


@dataclass
class PendingCheck:
    """One announcement, with its answers."""

    group: GroupState
    words: Fingerprint
    tag: int
    """Of the announced messages; announcements in flight have different tags."""
    answers: Answers
    anew: bool = False
    """Whether this rank gathers prefetched or persistent parameters again; after the check, whether any rank does."""
    steps: int = 0
    """Its bits that count optimizer steps."""
    loads: int = 0
    """What its fingerprint is mixed with."""
    checked: bool = False

    def check(self) -> None:
        """Waits for the other ranks' fingerprints and compares.

        Raises:
            DesyncError: a rank is about to run something else, or has taken another number of steps.
        """
        if self.checked:
            return
        self.checked = True
        answers = self.group.meet(self) if self.group.skippable else self.heard()
        mine, anew = self.words.digest, self.anew
        for other, theirs in zip(self.group.wire.ranks, answers, strict=True):
            if theirs & ~HOW != mine:
                self.group.differ(self, other, theirs & ~HOW)
            if theirs & STEPS != self.steps:
                self.group.stepped_apart(other)
            if bool(theirs & ANEW) is not anew:
                if not self.group.wire.prompt:
                    self.group.gone_apart(anew, other)
                self.anew = True
        self.group.known.add(mine)

    def heard(self) -> list[int]:
        """Every rank's fingerprint, by rank, unmixed with this rank's `loads`."""
        return [theirs ^ self.loads for theirs in self.answers.wait()]


@dataclass(eq=False)
class GroupState:
    """One rank's view of a process group."""

    name: str
    wire: Transport
    known: set[int] = field(default_factory=set)
    """Digests that all ranks have announced together."""
    count: int = 0
    """Announcements so far, the same on all ranks."""
    steps: int = 0
    """Optimizer steps on the group's parameters."""
    loads: int = 0
    """Digest of all state dicts loaded into the group's parameters."""
    loaded: str = "no state dict"
    """The last of them, for error messages."""
    left: Left | None = None
    lost: str = ""
    """Why the group cannot be used any more."""
    skippable: WeakSet[SkippedUnit] = field(default_factory=WeakSet)
    """Units that ranks may skip; with any, every announcement is checked before launches."""
    _open: deque[PendingCheck] = field(default_factory=deque)
    """Not compared yet."""

    def announce(self, words: Fingerprint, anew: bool = False) -> PendingCheck:
        """Announces what comes next. ``anew``: this rank gathers prefetched or persistent parameters again.

        Raises:
            DesyncError: ranks diverged before.
        """
        if self.left is not None:
            self.left.begin_anew()
        if self.lost:
            raise DesyncError(self.lost)
        self._look_back()
        pending = PendingCheck(self, words, *self._say(words, anew), anew, self._stepped, self.loads)
        self._open.append(pending)
        if not self.wire.prompt and words.digest not in self.known:
            pending.check()
        return pending

    def _say(self, words: Fingerprint, anew: bool) -> tuple[int, Answers]:
        self.count += 1
        return self._tag(words), self.wire.exchange(words.digest ^ self.loads | ANEW * anew | self._stepped)

    def load(self, what: str, digest: int) -> None:
        """Counts a state dict loaded into the group's parameters."""
        self.loads, self.loaded = (self.loads * 0x9E3779B1 + digest) & LOADS, what

    @property
    def _stepped(self) -> int:
        return (self.steps << 57) & STEPS

    def meet(self, pending: PendingCheck) -> list[int]:
        """Waits until all ranks announce the same. Until then, joins with zeros the units that other ranks use first
        (Note [Joining with zeros]). Returns every rank's fingerprint, by rank: equal, unless ranks differ in something
        that they may not skip.
        """
        while True:
            answers = pending.heard()
            there = {theirs & ~HOW for theirs in answers}
            optional = [word for word in there if word & 1]
            if len(there) == 1 or not optional or len({theirs & STEPS for theirs in answers}) > 1:
                return answers
            first = min(optional)  # the same on all ranks
            if first == pending.words.digest:  # the others join with zeros
                return [first | theirs & HOW for theirs in answers]
            choices = (choice for each in self.skippable for choice in each.choices())
            known = next((choice for choice in choices if choice[0].digest == first), None)
            if known is None:  # of a model that this rank does not have
                return answers
            words, stand_in = known
            stand_in(replace(pending, words=words, tag=self._tag(words), anew=False, checked=True))
            pending.tag, pending.answers = self._say(pending.words, pending.anew)

    def _tag(self, words: Fingerprint) -> int:
        """31 bits with the highest set, unlike the small tags of users."""
        return 1 << 30 | (words.digest ^ self.count * 0x9E3779B1) & (1 << 30) - 1

    def _look_back(self) -> None:
        while self._open:
            pending = self._open[0]
            if not (pending.checked or self.wire.prompt or pending.answers.ready() or len(self._open) > BEHIND):
                return
            self._open.popleft()
            pending.check()

    def differ(self, pending: PendingCheck, other: int, theirs: int) -> None:
        """Raises an error that names what both ranks are about to run, or have loaded."""
        me, mine = self.wire.me, pending.words
        self.wire.tell(f"loads/{self.name}/{me}", json.dumps([pending.loads, self.loaded]))
        loads, loaded = json.loads(self.wire.ask(f"loads/{self.name}/{other}", PATIENCE) or "[null, null]")
        if loaded is not None and loads != pending.loads:
            self.loaded_apart(other, loaded)
        self.wire.tell(f"words/{mine.digest}", json.dumps([mine.name, *mine.lines]))
        if theirs in _known:
            name, lines = _known[theirs].name, list(_known[theirs].lines)
        else:
            told = self.wire.ask(f"words/{theirs}", PATIENCE)
            name, *lines = json.loads(told) if told else ["something that it does not explain"]
        self.lose(
            f"mfsdp: rank {me} and rank {other} would run different collectives (invariant 13): rank {me} {mine.name}, "
            f"rank {other} {name}\n{difference(me, mine.lines, other, lines)}\nAll ranks of a group have to take the "
            "same way through the model, the same layers in the same order whatever their data says, and to call "
            "together what communicates (evaluation, full_tensor(), norms)."
        )

    def gone_apart(self, anew: bool, other: int) -> None:
        """Raises: only some ranks gather again (invariant 63)."""
        me = self.wire.me
        writer, taker = (me, other) if anew else (other, me)
        self.lose(
            f"mfsdp: rank {writer} has written to its rows of weights, and rank {taker} has not (invariant 63), since "
            "an optimizer's step launched forward's first gathers, or since parameters that last were gathered. Where "
            "the host does not wait for other ranks, write on all of them together, through the parameter itself "
            "(param.copy_(...), under no_grad); and behind a step, if one rank has to write alone, build the optimizer "
            "with mfsdp.fully_shard_optimizer(optimizer, ahead=False)."
        )

    def stepped_apart(self, other: int) -> None:
        """Raises: some ranks have skipped an optimizer step (invariant 66)."""
        me = self.wire.me
        self.wire.tell(f"steps/{self.name}/{me}", str(self.steps))
        theirs = self.wire.ask(f"steps/{self.name}/{other}", PATIENCE) or "another number of"
        self.lose(
            f"mfsdp: rank {me} has taken {self.steps} steps of its optimizers, and rank {other} {theirs} "
            "(invariant 66): their shards are of different weights. An optimizer's step can be left out only on all "
            "ranks together; an exception that one rank catches in front of it has to end the run on all."
        )

    def loaded_apart(self, other: int, loaded: str) -> None:
        """Raises: ranks have loaded different state dicts or drawn different values (invariant 69)."""
        self.lose(
            f"mfsdp: rank {self.wire.me} and rank {other} have loaded different state dicts (invariant 69), at last "
            f"{self.loaded}, and {loaded}: some weights would be old and some new. Every rank has to load, and the "
            "same values; what is drawn anew (nn.init) needs the same seed on all. For a state dict that only rank 0 "
            "has: torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, options=StateDictOptions("
            "full_state_dict=True, broadcast_from_rank0=True)), on all ranks."
        )

    def lose(self, text: str) -> None:
        """Raises, now and on every later use of the group."""
        self.lost = text
        self._open.clear()
        raise DesyncError(text)

    def leave(self, left: Left) -> None:
        """Records that an exception has ended a program, and tells the other ranks."""
        self.left = left
        self._tell_quietly(f"left/{self.name}/{self.count}/{self.wire.me}", json.dumps([left.launched, str(left)]))

    def compare_left(self, left: Left) -> None:
        """Raises unless all ranks left the same program at the same collective."""
        for other in self.wire.ranks:
            told = self.wire.ask(f"left/{self.name}/{self.count}/{other}", PATIENCE)
            launched, story = json.loads(told) if told else (None, "did not")
            if launched != left.launched:
                me = self.wire.me
                text = (
                    f"mfsdp: the ranks are out of step (invariant 50): rank {me} {left}, and rank {other} {story}. "
                    "An exception inside of a program can be caught only if all ranks raise it in the same place; "
                    "otherwise let it end the run on all ranks."
                )
                self.lost_with(left.all, text)

    def lost_with(self, groups: Sequence[GroupState], text: str) -> None:
        """Raises, after telling all ranks of some groups why and breaking their connections."""
        _lose_all(groups, text)
        for group in groups:
            group.wire.sever()
        raise DesyncError(text)

    def story(self) -> str:
        """Why another rank broke the connections, or ``""``."""
        try:
            return self.wire.ask(f"lost/{self.name}/{self.wire.ranks[0]}", 0.1) or ""
        except RuntimeError:
            return ""

    def _tell_quietly(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # the store died with its process; the current error says more
            self.wire.tell(key, text)


def end_all(groups: Sequence[GroupState], text: str) -> None:
    """Ends waits of some groups, from a thread that uses none of them: their ranks raise, now or on the next use."""
    _lose_all(groups, text)
    for group in groups:
        group.wire.abort()


def _lose_all(groups: Sequence[GroupState], text: str) -> None:
    for group in groups:
        group.lost, group.left = text, None
        group._open.clear()
        group._tell_quietly(f"lost/{group.name}/{group.wire.ranks[0]}", text)


def difference(me: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    """The first line that differs, after up to three before it."""
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
    lines = [f"    {i}  {text}" for i, text in enumerate(mine[:at])][-3:]
    a, b = (s[at] if at < len(s) else "nothing more" for s in (mine, theirs))
    return "\n".join([*lines, f" -> {at}  rank {me}: {a}", f"    {at}  rank {other}: {b}"])
