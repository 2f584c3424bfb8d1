"""What an execution announces to other ranks before it communicates (Note [Desync detection])."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from . import capturing, groups
from .desync import DesyncError, Fingerprint, GroupState, PeerLostError, PendingCheck, operation
from .transport_registry import group_state

UNANNOUNCED = 0x6D66
"""The tag of unannounced messages, distinct from a user's own (pipeline stages)."""


class Announcements:
    """Announcements of a program or of one operation, and the tags of their messages.

    Args:
        name: the program or operation, for errors.
        meets: all groups in which other ranks may wait for this one once it has diverged.
    """

    def __init__(self, name: str, meets: Iterable[str]):
        self.name, self.meets = name, meets
        self.announced: list[PendingCheck] = []
        self.tags: dict[str, int] = {}
        """Message tags by group."""
        self.compared = True
        self.waits = 0
        """Waits begun plus waits ended: odd during a wait (Note [Watchdog])."""

    @property
    def place(self) -> str:
        """The current or last operation with its unit's path; ``""`` before the first."""
        return ""

    def announce(self, sequences: Mapping[str, Fingerprint], anew: Collection[str] = ()) -> None:
        """Tells the ranks of groups what this rank is about to run; in groups ``anew`` also that it gathers prefetched
        or persistent parameters again.
        """
        if capturing.is_recording():
            return  # the whole step has been announced
        for name, words in sequences.items():
            state = group_state(name)
            if state is not None:
                self.waits += 1
                try:
                    pending = state.announce(words, name in anew)
                    if state.skippable:
                        pending.check()
                except DesyncError as error:  # where the host does not wait for answers, errors appear here
                    state.lost_with(list(dict.fromkeys([state, *self.all()])), str(error))
                except RuntimeError as error:
                    self.disconnected(error, [state])
                    raise
                finally:
                    self.waits += 1
                self.part(pending)

    def part(self, pending: PendingCheck) -> None:
        """Takes part in what was announced."""
        self.announced.append(pending)
        name = pending.group.name
        self.tags[name] = pending.tag
        if (other := groups.other_of(name)) is not None:
            self.tags[other] = pending.tag
        self.compared = False

    def next(self, what: str, group: str, over: Iterable[str]) -> None:
        """Announces its next collective, over some groups, to ``group``, if each is announced separately."""
        self.announced = [pending for pending in self.announced if pending.group.name != group]
        self.announce({group: operation(what, optional=True)})
        self.carry(group, over)

    def carry(self, group: str, over: Iterable[str]) -> None:
        """Uses the tag of the announcement to ``group`` for messages over other groups."""
        for name in over if group in self.tags else ():
            self.tags[name] = self.tags[group]
            if (other := groups.other_of(name)) is not None:
                self.tags[other] = self.tags[group]

    def anew(self, group: str, here: bool) -> bool:
        """Whether to gather prefetched or persistent parameters again. Where the host waits for answers anyway: if any
        rank of the group says so. Elsewhere: if this rank does; it then checks that the others do too.

        Raises:
            DesyncError: they do not.
        """
        pending = next((pending for pending in self.announced if pending.group.name == group), None)
        if pending is None:
            return here
        if pending.group.wire.prompt:
            self.agree()
            return pending.anew
        if here:
            try:
                pending.check()
            except DesyncError as error:
                pending.group.lost_with(self.all(), str(error))
        return here

    def written(self, over: Sequence[str], here: bool) -> bool:
        """Whether any rank has made unseen writes to persistent parameters gathered over these groups (Note [Unseen
        writes]); ``here``: this rank has. Ranks of two axes ask along one, then along the other.
        """
        for i, group in enumerate(over):
            state = group_state(group)
            if i and state is not None and state.wire.prompt:
                self.announced = [pending for pending in self.announced if pending.group is not state]
                self.announce({group: operation("weights written unseen")}, [group] if here else ())
            here = self.anew(group, here)
        return here

    def tag(self, group: str) -> int:
        """The tag of its messages over a group; no two programs share one."""
        return self.tags.get(group, UNANNOUNCED)

    def agree(self) -> None:
        """Checks that all ranks run the same, before waiting for their messages."""
        if self.compared:
            return
        self.compared = True
        self.waits += 1
        try:
            for pending in self.announced:
                if pending.group.wire.prompt:
                    pending.check()
        except DesyncError as error:
            states = self.all()
            if len(states) > 1:  # ranks of the other groups see no difference
                states[0].lost_with(states, str(error))
            raise
        except RuntimeError as error:
            self.disconnected(error, self.all())
            raise
        finally:
            self.waits += 1

    def all(self) -> list[GroupState]:
        """All groups involved, those told first."""
        states = [pending.group for pending in self.announced]
        meets = (group_state(name) for name in self.meets)
        return list(dict.fromkeys([*states, *(c for c in meets if c is not None)]))

    def disconnected(self, error: RuntimeError, states: list[GroupState]) -> None:
        """Replaces the error of a broken connection with a clear one."""
        if not states or isinstance(error, (DesyncError, PeerLostError)):
            return
        ended = next((c.lost for c in states if c.lost), "")  # by the watchdog
        story = ended or next(filter(None, (c.story() for c in states)), "") or groups.first_to_end() or f"{error}"
        at = f"{self.place} of {self.name}" if self.place else self.name
        for state in states:
            state.wire.sever()
            state.lost = ended or f"mfsdp: rank {groups.rank()} has lost the other ranks at {at}: {story}"
        raise PeerLostError(states[0].lost) from error
