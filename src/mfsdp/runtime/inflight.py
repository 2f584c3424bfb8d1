"""What runs beside the current stream, collectives and copies, with all that they read and write.

Note [In flight]
The allocator gives a tensor's memory away with its last reference, to whatever comes next on the stream that the memory
was allocated on. Another stream, of a collective or a copy, may still read or write it then. So the last reference must
not go before either the host has seen that stream's event complete, or the stream of the allocation waits for it; that
some third stream waits is not enough (``Work.wait()`` under a side stream gives up what the Work itself holds).

`InFlight` is the one place that keeps this rule. Whatever is launched asynchronously is held by one until then, with
the closures that end it, and tests read the sources for launches that are not. It is created on the stream that its
operands were allocated on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import devices

End = Callable[[], Any]


class InFlight:
    """The end of something under way: called, it returns when the current stream is behind it (without streams: when it
    is complete), and lets go of its operands (Note [In flight]).

    Args:
        device: where it runs.
        arrive: makes the current stream wait for it; what it refers to is held as well.
        operands: what it reads and writes.
        event: behind it, where a stream of ours runs it.
    """

    __slots__ = ("_arrive", "_device", "_home", "_operands", "event")

    def __init__(
        self, device: torch.device, arrive: End | None, *operands: object, event: torch.Event | None = None
    ) -> None:
        self._device, self._home = device, devices.current_stream(device)
        self._arrive, self._operands, self.event = arrive, operands, event

    def __call__(self) -> None:
        if self._arrive is not None:
            self._arrive()
        here = devices.current_stream(self._device)
        if here is not None and self.event is not None:
            here.wait_event(self.event)
        held = self._arrive, self._operands
        self._arrive, self._operands = None, ()
        if here is None or self._home is None or here == self._home:
            return
        if _here.kept is None:
            self._home.wait_event(here.record_event())
        else:
            _here.kept.append(held)

    def ready(self) -> bool:
        """Whether what a stream of ours runs is complete."""
        assert self.event is not None
        return bool(self.event.query())

    def landed(self) -> None:
        """Returns once it is complete: the host may read what was copied."""
        assert self.event is not None
        self.event.synchronize()
        self._arrive, self._operands = None, ()

    def __del__(self) -> None:
        if getattr(self, "_home", None) is not None and (self._arrive is not None or self._operands):
            _unfinished.append((self.event, self._arrive, self._operands))


class _Here(threading.local):
    kept: list[Any] | None = None
    """Inside of `beside`: what ends called there have let go of."""


_here = _Here()

_unfinished: list[tuple[torch.Event | None, End | None, Sequence[object]]] = []
"""What nobody waits for any more: held until its event is complete. A collective has none: after an exception the other
ranks may never come, and it is held for good.
"""


def beside(
    stream: torch.Stream,
    device: torch.device,
    work: Callable[[], End | None],
    *operands: object,
    after: Sequence[torch.Event] = (),
) -> InFlight:
    """Launches something on another stream, behind what the current one has been given.

    Args:
        stream: where it runs.
        device: of the stream.
        work: launches it; it may return what is left to be called when somebody waits.
        operands: what it reads and writes, besides what ``work`` refers to.
        after: events that it waits for.
    """
    if _unfinished:
        _unfinished[:] = [each for each in _unfinished if each[0] is None or not each[0].query()]
    here = devices.current_stream(device)
    assert here is not None
    stream.wait_stream(here)
    for event in after:
        stream.wait_event(event)
    before, kept = _here.kept, list[Any]()
    _here.kept, end = kept, None
    try:
        with stream:
            end = work()
    finally:
        _here.kept = before
        flight = InFlight(device, end, work, kept, *operands, event=stream.record_event())
    return flight
