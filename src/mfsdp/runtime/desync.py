"""Ranks stay in step: each says what it is about to run, and looks at what the others have said.

Note [Desync detection]
Collectives of a process group meet in the order in which each rank launches them, whatever they carry. Two ranks that
take different ways through a model (LayerDrop, early exit, a branch on data, evaluation on one rank) would give each
other the wrong parameters; where sizes are equal, nobody would notice. So every rank announces what it is about to run:
once per program, which is compared as a whole, and once per gather or reduction on the eager path. An announcement is
one word of eight bytes, a hash of the collectives' texts with the paths of their units, and it costs no waiting:

* Over gloo the word is a message to every other rank, launched where the program begins and looked at where it waits
  for the first time. The program's own messages carry a tag made from the word and from how many there were before, so
  messages of two programs never meet: neither wrong values, nor sizes at which gloo ends the process.
* Over NCCL words are gathered in front of the program's own collectives, on the same stream, and the host looks at them
  once they are there: at once in a program's first run, one or a few programs later in all others.

A bit of the word is not of what is run, but of how: whether this rank has to gather anew what was launched ahead of a
program (Note [Step prefetch]), or lasts (Note [Unseen writes]). It may differ where the host waits for answers anyway;
elsewhere that is an error too.

Five more are the number of steps that optimizers have taken on what the group shares, modulo 32. A rank that has left
a step out (an exception that it swallowed) would train on with shards of another step than the others', in collectives
that are all alike.

The rest of a word is mixed with what has been loaded into the weights that the group shares: of state dicts names, and
some values of whole tensors. One that a rank alone has loaded would leave some weights old and some new.

Words that differ are an error on every rank, which then tell each other what they meant through the store.

A rank that an exception takes out of a program has not launched what the others wait for. It says so in the store, and
before it communicates again it makes sure that all ranks have left the same program at the same collective (all of them
ran out of memory): then they begin anew. Otherwise the group is lost: the rank writes down why, breaks the connections
that others may be waiting on, and all raise.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

PATIENCE = 10.0
"""Seconds that ranks are given to say why they have gone apart, or that they have left a program too."""

BEHIND = 16
"""Announcements that may be under way, where the host does not wait for them."""


@dataclass(frozen=True)
class Fingerprint:
    """What a rank is about to run on a process group."""

    name: str
    """The program, or the operation, for people."""
    lines: tuple[str, ...]
    """What ranks must have alike: each collective, with its unit's path and sizes."""
    optional: bool = False
    """Whether ranks that are about to do something else take part in it (Note [Joining with zeros])."""

    def __post_init__(self) -> None:
        _known[self.digest] = self

    @cached_property
    def digest(self) -> int:
        """57 bits, the last of them says whether it is optional."""
        hashed = int.from_bytes(hashlib.sha256("\n".join(self.lines).encode()).digest()[:8]) >> 7
        return hashed & ~1 | self.optional


ANEW = 1 << 62
"""The bit of a word that says: this rank gathers anew what was launched ahead, or lasts."""

STEPS = 31 << 57
"""The bits of a word that say how often optimizers have stepped on this rank."""

HOW = ANEW | STEPS

LOADS = (1 << 57) - 2
"""The bits of a word that are mixed with what has been loaded on this rank."""


_known: dict[int, Fingerprint] = {}
"""All that this process has meant to say: most often it is what another rank has said, too."""


@cache
def operation(what: str, optional: bool = False) -> Fingerprint:
    """The words for a single operation."""
    return Fingerprint(what, (what,), optional)


class Answers(Protocol):
    """An exchange under way."""

    def ready(self) -> bool:
        """Whether nobody has to be waited for."""

    def wait(self) -> list[int]:
        """Every rank's word, by rank of the group."""


@runtime_checkable
class Wire(Protocol):
    """What carries words between the ranks of a group (`carriers.wire_of`)."""

    @property
    def ranks(self) -> Sequence[int]:
        """Of the default group, in order."""

    @property
    def me(self) -> int: ...

    @property
    def prompt(self) -> bool:
        """Whether the host may wait for answers where it waits anyway."""

    def exchange(self, word: int) -> Answers: ...

    def tell(self, key: str, text: str) -> None: ...

    def ask(self, key: str, seconds: float) -> str | None:
        """What somebody has told, or ``None`` after so many seconds."""

    def sever(self) -> None:
        """Ends what other ranks of the group are waiting for, with an error."""

    def abort(self) -> None:
        """Ends what this rank is waiting for, too, in whatever thread."""


class DesyncError(RuntimeError):
    """Ranks have gone apart."""


class PeerLostError(RuntimeError):
    """Other ranks are not there any more."""


class Standing(Protocol):
    """What takes part where another rank uses a unit (Note [Joining with zeros])."""

    def choices(self) -> Iterable[tuple[Fingerprint, Callable[[PendingCheck], None]]]:
        """What a rank may say of it, and what takes part in that for one that says something else."""


@dataclass
class Left:
    """A program that an exception has ended."""

    name: str
    place: str
    """The operation that it was in."""
    launched: int
    """Its collectives until then."""
    why: str
    companies: list[GroupState]
    """Those that were told of it."""
    all: list[GroupState]
    """Those whose ranks may wait, besides."""
    ends: list[Callable[[], Any]]
    """What has to be called for what it had launched."""

    def __str__(self) -> str:
        return f"left {self.name} {self.place}, after {self.launched} collectives ({self.why})"

    def begin_anew(self) -> None:
        """Makes sure that all ranks have left where this one has.

        Raises:
            Apart: some have not.
        """
        for company in self.companies:
            company.compare_left(self)
        for company in self.companies:
            company.left = None
        for end in self.ends:
            end()


@dataclass
class PendingCheck:
    """An announcement."""

    company: GroupState
    words: Fingerprint
    tag: int
    """For the messages of what was announced; never that of another announcement that they could meet."""
    answers: Answers
    anew: bool = False
    """Whether this rank gathers anew what was launched ahead, or lasts; once it is checked, whether any does."""
    steps: int = 0
    """The bits of its word that say how often optimizers had stepped."""
    loads: int = 0
    """What its word is mixed with."""
    checked: bool = False

    def check(self) -> None:
        """Waits for the other ranks' words and compares.

        Raises:
            Apart: a rank is about to run something else, or has not stepped as often.
        """
        if self.checked:
            return
        self.checked = True
        answers = self.company.meet(self) if self.company.standing else self.heard()
        mine, anew = self.words.digest, self.anew
        for other, theirs in zip(self.company.wire.ranks, answers, strict=True):
            if theirs & ~HOW != mine:
                self.company.differ(self, other, theirs & ~HOW)
            if theirs & STEPS != self.steps:
                self.company.stepped_apart(other)
            if bool(theirs & ANEW) is not anew:
                if not self.company.wire.prompt:
                    self.company.gone_apart(anew, other)
                self.anew = True
        self.company.known.add(mine)

    def heard(self) -> list[int]:
        """Every rank's word, by rank, without what this rank has loaded."""
        return [theirs ^ self.loads for theirs in self.answers.wait()]


@dataclass(eq=False)
class GroupState:
    """The ranks of a process group, as one of them sees it."""

    name: str
    wire: Wire
    known: set[int] = field(default_factory=set)
    """Words that all ranks have said at once."""
    count: int = 0
    """Announcements so far, the same on all ranks."""
    steps: int = 0
    """Of optimizers so far, on what the group shares."""
    loads: int = 0
    """A number of all state dicts that have been loaded into what the group shares."""
    loaded: str = "no state dict"
    """The last of them, for people."""
    left: Left | None = None
    lost: str = ""
    """Why nothing can be run any more."""
    standing: WeakSet[Standing] = field(default_factory=WeakSet)
    """What its ranks may leave out: then every announcement is waited for before anything is launched."""
    _open: deque[PendingCheck] = field(default_factory=deque)
    """Announcements that have not been compared."""

    def announce(self, words: Fingerprint, anew: bool = False) -> PendingCheck:
        """Tells the other ranks what comes next, and whether this one gathers anew what was launched ahead of it, or
        lasts.

        Raises:
            Apart: ranks have gone apart before.
        """
        if self.left is not None:
            self.left.begin_anew()
        if self.lost:
            raise DesyncError(self.lost)
        self._look_back()
        said = PendingCheck(self, words, *self._say(words, anew), anew, self._stepped, self.loads)
        self._open.append(said)
        if not self.wire.prompt and words.digest not in self.known:
            said.check()
        return said

    def _say(self, words: Fingerprint, anew: bool) -> tuple[int, Answers]:
        self.count += 1
        return self._tag(words), self.wire.exchange(words.digest ^ self.loads | ANEW * anew | self._stepped)

    def load(self, what: str, digest: int) -> None:
        """Counts a state dict that is loaded into what the group shares."""
        self.loads, self.loaded = (self.loads * 0x9E3779B1 + digest) & LOADS, what

    @property
    def _stepped(self) -> int:
        return (self.steps << 57) & STEPS

    def meet(self, said: PendingCheck) -> list[int]:
        """Waits until all ranks are about to run what has been announced, and stands in for those that run before it
        what this one leaves out (Note [Joining with zeros]). Gives every rank's word, by rank: all alike, unless ranks
        differ in what may not be left out.
        """
        while True:
            answers = said.heard()
            there = {theirs & ~HOW for theirs in answers}
            optional = [word for word in there if word & 1]
            if len(there) == 1 or not optional or len({theirs & STEPS for theirs in answers}) > 1:
                return answers
            first = min(optional)  # the same on all ranks
            if first == said.words.digest:  # the others stand in
                return [first | theirs & HOW for theirs in answers]
            choices = (choice for each in self.standing for choice in each.choices())
            known = next((choice for choice in choices if choice[0].digest == first), None)
            if known is None:  # of a model that is not here
                return answers
            words, stand_in = known
            stand_in(
                PendingCheck(self, words, self._tag(words), said.answers, False, said.steps, said.loads, checked=True)
            )
            said.tag, said.answers = self._say(said.words, said.anew)

    def _tag(self, words: Fingerprint) -> int:
        """31 bits, the first of them set: apart from the small ones that users take."""
        return 1 << 30 | (words.digest ^ self.count * 0x9E3779B1) & (1 << 30) - 1

    def _look_back(self) -> None:
        while self._open:
            said = self._open[0]
            if not (said.checked or self.wire.prompt or said.answers.ready() or len(self._open) > BEHIND):
                return
            self._open.popleft()
            said.check()

    def differ(self, said: PendingCheck, other: int, theirs: int) -> None:
        """Raises an error that says what both ranks are about to run, or have loaded."""
        me, mine = self.wire.me, said.words
        self.wire.tell(f"loads/{self.name}/{me}", json.dumps([said.loads, self.loaded]))
        loads, loaded = json.loads(self.wire.ask(f"loads/{self.name}/{other}", PATIENCE) or "[null, null]")
        if loaded is not None and loads != said.loads:
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
        """Raises: some ranks gather anew what others take as it is (invariant 63)."""
        me = self.wire.me
        writer, taker = (me, other) if anew else (other, me)
        self.lose(
            f"mfsdp: rank {writer} has written to its rows of weights, and rank {taker} has not (invariant 63), since an "
            "optimizer's step launched forward's first gathers, or since parameters that last were gathered. Where the "
            "host does not wait for other ranks, write on all of them together, through the parameter itself "
            "(param.copy_(...), under no_grad); and behind a step, if one rank has to write alone, build the optimizer "
            "with mfsdp.fully_shard_optimizer(optimizer, ahead=False)."
        )

    def stepped_apart(self, other: int) -> None:
        """Raises: some ranks have left out an optimizer's step (invariant 66)."""
        me = self.wire.me
        self.wire.tell(f"steps/{self.name}/{me}", str(self.steps))
        theirs = self.wire.ask(f"steps/{self.name}/{other}", PATIENCE) or "another number of"
        self.lose(
            f"mfsdp: rank {me} has taken {self.steps} steps of its optimizers, and rank {other} {theirs} (invariant 66): "
            "their shards are of different weights. An optimizer's step can be left out only on all ranks together; an "
            "exception that one rank catches in front of it has to end the run on all."
        )

    def loaded_apart(self, other: int, loaded: str) -> None:
        """Raises: ranks have loaded different state dicts, or drawn different values (invariant 69)."""
        self.lose(
            f"mfsdp: rank {self.wire.me} and rank {other} have loaded different state dicts (invariant 69), at last "
            f"{self.loaded}, and {loaded}: some weights would be old and some new. Every rank has to load, and the "
            "same values; what is drawn anew (nn.init) needs the same seed on all. For a state dict that only rank 0 "
            "has: torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, options=StateDictOptions("
            "full_state_dict=True, broadcast_from_rank0=True)), on all ranks."
        )

    def lose(self, text: str) -> None:
        """Raises, now and whenever the group is used again."""
        self.lost = text
        self._open.clear()
        raise DesyncError(text)

    def leave(self, left: Left) -> None:
        """Notes that an exception has ended a program, and tells the others."""
        self.left = left
        self._tell_quietly(f"left/{self.name}/{self.count}/{self.wire.me}", json.dumps([left.launched, str(left)]))

    def compare_left(self, left: Left) -> None:
        """Raises unless all ranks have left the same program at the same collective."""
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

    def lost_with(self, companies: Sequence[GroupState], text: str) -> None:
        """Raises, after it has told all ranks of some groups why, whatever they are waiting for."""
        _lose_all(companies, text)
        for company in companies:
            company.wire.sever()
        raise DesyncError(text)

    def story(self) -> str:
        """Why another rank has broken the connections, if it has said so."""
        try:
            return self.wire.ask(f"lost/{self.name}/{self.wire.ranks[0]}", 0.1) or ""
        except RuntimeError:
            return ""

    def _tell_quietly(self, key: str, text: str) -> None:
        try:
            self.wire.tell(key, text)
        except RuntimeError:  # the store has died with its process; the error under way says more
            return


def end_all(companies: Sequence[GroupState], text: str) -> None:
    """Ends what ranks of some groups wait for, from a thread that is in none of it: all raise, now or when they use the
    group again.
    """
    _lose_all(companies, text)
    for company in companies:
        company.wire.abort()


def _lose_all(companies: Sequence[GroupState], text: str) -> None:
    for company in companies:
        company.lost, company.left = text, None
        company._open.clear()
        company._tell_quietly(f"lost/{company.name}/{company.wire.ranks[0]}", text)


def difference(me: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    """The first line that differs, and some before it."""
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
    lines = [f"    {i}  {text}" for i, text in enumerate(mine[:at])][-3:]
    a, b = (s[at] if at < len(s) else "nothing more" for s in (mine, theirs))
    return "\n".join([*lines, f" -> {at}  rank {me}: {a}", f"    {at}  rank {other}: {b}"])
