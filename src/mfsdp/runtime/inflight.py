"""Keeps operands of asynchronous work (collectives, copies) alive while it runs beside the current stream.

Note [In flight]
When a tensor's last reference goes, the allocator may reuse its memory on the stream that it was allocated on, while
another stream, of a collective or a copy, still uses it. So the last reference must stay until the host has seen that
stream's event complete, or the allocating stream waits for it. A third stream's wait is not enough (``Work.wait()``
under a side stream drops the Work's references).

Only `InFlight` implements this rule. It holds every asynchronous launch, with the closures that end it, until then;
tests search the sources for launches without one. Create it on the stream that the operands were allocated on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import capturing, devices

End = Callable[[], Any]


class InFlight:
    """The end of asynchronous work. When called, makes the current stream wait for the work (without streams: waits
    itself) and releases the operands (Note [In flight]).

    Args:
        device: where the work runs.
        arrive: makes the current stream wait; what it refers to stays alive too.
        operands: inputs and outputs.
        event: recorded after work on a stream of mfsdp.
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
        """Whether work on a stream of mfsdp is complete."""
        assert self.event is not None
        return bool(self.event.query())

    def landed(self) -> None:
        """Returns once the work is complete and the host may read its result."""
        assert self.event is not None
        self.event.synchronize()
        self._arrive, self._operands = None, ()

    def __del__(self) -> None:
        if getattr(self, "_home", None) is not None and (self._arrive is not None or self._operands):
            _unfinished.append((self.event, self._arrive, self._operands))


class _Here(threading.local):
    kept: list[Any] | None = None
    """Inside of `beside`: what ends called there have released."""


_here = _Here()

_unfinished: list[tuple[torch.Event | None, End | None, Sequence[object]]] = []
"""Work that nobody waits for any more, held until its event completes. Collectives have no event and stay forever:
after an exception other ranks may never join them.
"""


def beside(
    stream: torch.Stream,
    device: torch.device,
    work: Callable[[], End | None],
    *operands: object,
    after: Sequence[torch.Event] = (),
) -> InFlight:
    """Launches work on another stream, after the current stream's work.

    Args:
        stream: where the work runs.
        device: the stream's device.
        work: launches it; may return a function to call at the wait.
        operands: inputs and outputs that ``work`` does not refer to.
        after: events to wait for first.
    """
    if _unfinished and not capturing.is_recording():  # which allows no queries
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
