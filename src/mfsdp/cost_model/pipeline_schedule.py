"""Simulates the schedules of ``torch.distributed.pipelining``: all ranks' actions and messages in time.

rank 0   |F0|F1|....|B0|F2|B1|....|B2|
  send      |0=|1=|       |2=|                an activation or a gradient, on the link of its sender and its receiver
rank 1      ....|F0|B0|F1|B1|..|F2|B2|

The order is torch's own. A message moves once its sender has sent and its receiver expects it; a rank sends one at a
time and receives one at a time, both at once. Compute stops where torch waits: zero-bubble and interleaved schedules
wait for what an action reads; GPipe and 1F1B also post a receive only then, and 1F1B waits for the send beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

SINGLE = ("GPipe", "1F1B")
"""Schedules with one stage per rank."""

SPLITTING = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that ask for gradients of inputs and of weights separately."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which rank ``r`` has the stages ``r`` and ``stages - 1 - r``."""

SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", *SPLITTING)
"""Names of schedules, as in torch."""


class Action(NamedTuple):
    """A program's execution, or a message: what one stage does for one microbatch."""

    kind: str
    """``"F"`` forward, ``"B"`` backward, ``"I"`` and ``"W"`` its input part and its weight part. Of a message, what has
    computed it: ``"F"`` or ``"B"``."""
    stage: int
    """Of a message, the sender's."""
    microbatch: int


Verb = Literal["run", "send", "recv", "wait"]
Order = Sequence[tuple[Verb, Action]]
"""What a rank does, one after another; it runs and waits, but does not stop to send or receive."""


@dataclass(frozen=True)
class Span:
    """An action or a message in time, in seconds from the start of the step."""

    rank: int
    """Of a message, its sender's."""
    to: int
    """Of a message, its receiver's rank, else ``rank``."""
    action: Action
    start: float
    end: float

    @property
    def is_message(self) -> bool:
        return self.to != self.rank


def orders(name: str, stages: int, per_rank: int, microbatches: int) -> list[Order]:
    """Returns each rank's order.

    Args:
        name: one of `SCHEDULES`.
        stages: number of stages in the pipeline.
        per_rank: stages on each rank.
        microbatches: of a step.

    Raises:
        ValueError: torch refuses these numbers.
    """
    ranks = stages // per_rank
    schedule = _torch_schedule(name, ranks, per_rank, microbatches)
    if name in SINGLE:
        computed = [list(_numbered(actions)) for _, actions in sorted(schedule.pipeline_order.items())]
        return [list(_blocking(actions, stages, eager=name == "GPipe")) for actions in computed]
    mine = schedule.pipeline_order_with_comms
    return [list(_asynchronous(actions, stages)) for _, actions in sorted(mine.items())]


def _torch_schedule(name: str, ranks: int, per_rank: int, microbatches: int) -> Any:
    """Returns torch's schedule object, without process group: its constructor reads only numbers of its stages. Private
    in torch (``pipeline_order``, ``pipeline_order_with_comms``, their actions); tried on 2.11, 2.13 and 2.15, of 2.11
    to 2.15 that are supported.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    numbers = {"num_stages": ranks * per_rank, "group_size": ranks, "group_rank": 0, "submod": None}
    stages: Any = [SimpleNamespace(stage_index=i, **numbers) for i in range(per_rank)]
    try:
        return get_schedule_class(name)(stages[0] if name in SINGLE else stages, microbatches)
    except ValueError as error:
        raise ValueError(f"explain: schedule={name!r}, microbatches={microbatches}: {error}") from error


def _numbered(actions: Sequence[Any]) -> Iterator[Action]:
    """Yields the actions of GPipe or 1F1B, microbatches in order: torch's list of 1F1B, which it prints but does not
    run, gives the last rank 1 to n instead of 0 to n - 1.
    """
    count = dict.fromkeys("FB", 0)
    for kind, stage in ((a.computation_type.value, a.stage_index) for a in actions if a.is_compute_op):
        yield Action(kind, stage, count[kind])
        count[kind] += 1


def _asynchronous(actions: Sequence[Any], stages: int) -> Iterator[tuple[Verb, Action]]:
    """Yields the order of a list of torch's with sends and receives, none of which stops the rank."""
    local = {a.stage_index for a in actions if a.is_compute_op and a.sub_actions is None}
    for outer in actions:
        for a in outer.sub_actions or (outer,):
            kind, stage, microbatch = a.computation_type.value, a.stage_index, a.microbatch_index
            if a.is_compute_op:
                needed = _needs(Action(kind, stage, microbatch), stages)
                if needed is not None and needed.stage not in local:
                    yield "wait", needed
                yield "run", Action(kind, stage, microbatch)
            elif kind.startswith("SEND_"):
                yield "send", Action(kind[-1], stage, microbatch)
            elif kind.startswith("RECV_"):
                yield "recv", Action(kind[-1], stage - 1 if kind[-1] == "F" else stage + 1, microbatch)
            elif kind.startswith("WAIT_SEND_"):  # 2.15
                yield "wait", Action(kind[-1], stage, microbatch)


def _blocking(actions: Sequence[Action], stages: int, eager: bool) -> Iterator[tuple[Verb, Action]]:
    """Yields the order of GPipe (``eager``) or 1F1B with their sends and receives.

    Both wait for what an action reads. GPipe waits for sends when its forwards, and its backwards, are done. 1F1B waits
    for a send before the next one in the same direction; where forwards and backwards alternate, beside the receive.
    """
    unsent: list[Action] = []
    for now, after in zip(actions, [*actions[1:], None], strict=True):
        if now is actions[0] and (needed := _needs(now, stages)) is not None:
            yield from (("recv", needed), ("wait", needed))
        yield "run", now
        if not eager:
            yield from (("wait", message) for message in unsent)
            unsent = []
        turns = after is not None and after.kind != now.kind
        if (message := _gives(now, stages)) is not None:
            yield "send", message
            unsent.append(message)
        needed = None if after is None else _needs(after, stages)
        if turns and eager:
            yield from (("wait", message) for message in unsent)
            unsent = []
        if needed is not None:
            yield "recv", needed
        if turns and not eager:
            yield from (("wait", message) for message in unsent)
            unsent = []
        if needed is not None:
            yield "wait", needed
    yield from (("wait", message) for message in unsent)


def _needs(action: Action, stages: int) -> Action | None:
    """Returns the message that an action reads, if another stage computes it."""
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage - 1, microbatch) if stage else None
    return Action("B", stage + 1, microbatch) if kind in "BI" and stage < stages - 1 else None


def _gives(action: Action, stages: int) -> Action | None:
    """Returns the message that holds an action's result, if another stage reads it."""
    kind, stage, microbatch = action
    if kind == "F":
        return action if stage < stages - 1 else None
    return Action("B", stage, microbatch) if kind in "BI" and stage else None


def simulate(
    ranks: Sequence[Order], seconds: Mapping[Action, float], moving: Mapping[tuple[str, int], float]
) -> list[Span]:
    """Returns all actions and messages in time.

    Args:
        ranks: of `orders`.
        seconds: of each action.
        moving: seconds of messages, by kind and sending stage.
    """
    home = {action.stage: rank for rank, order in enumerate(ranks) for verb, action in order if verb == "run"}
    clock, done = [0.0] * len(ranks), [0] * len(ranks)
    sent: dict[Action, float] = {}
    expected: dict[Action, float] = {}
    ended: dict[Action, float] = {}
    sends, receives = [0.0] * len(ranks), [0.0] * len(ranks)
    spans: list[Span] = []
    while True:
        for rank, order in enumerate(ranks):
            while done[rank] < len(order):
                verb, action = order[done[rank]]
                if verb == "wait":
                    if action not in ended:
                        break
                    clock[rank] = max(clock[rank], ended[action])
                elif verb == "run":
                    begun = clock[rank]
                    clock[rank] += seconds[action]
                    spans.append(Span(rank, rank, action, begun, clock[rank]))
                else:
                    (sent if verb == "send" else expected)[action] = clock[rank]
                done[rank] += 1
        waiting = []
        for message in sent.keys() & expected.keys():
            here, there = home[message.stage], home[message.stage + (1 if message.kind == "F" else -1)]
            start = max(sent[message], expected[message], sends[here], receives[there])
            waiting.append((start, message, here, there))
        if not waiting:
            break
        start, message, here, there = min(waiting)
        sends[here] = receives[there] = ended[message] = start + moving[message.kind, message.stage]
        spans.append(Span(here, there, message, start, ended[message]))
        del sent[message], expected[message]
    assert all(n == len(order) for n, order in zip(done, ranks, strict=True)), "ranks wait for each other"
    return sorted(spans, key=lambda s: (s.start, s.end))
