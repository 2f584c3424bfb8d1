"""Two programs at once: a backward that waits runs beside the next forward, and they take turns (1F1B).

Note [Interleaved programs]
What experts exchange in one program travels while the other computes. Neither program is changed: each runs in a thread
of its own, one of them at a time, and the turn goes over wherever a program would wait for a collective of another
parallelism. So the order of the two together follows from theirs, the same on every rank and under every lowering: the
backward up to its first such wait, the forward up to its first, the backward up to its next, and so on (`ir.merge`
writes it down). Their static buffers are apart.

A backward may wait if gradients are all that it gives, through accumulators (Note [Accumulators]), and nobody wants to
hear of them: it is then remembered with its arguments, and autograd goes on as if it had run. Whoever looks at a
gradient runs it first (`Gradients.due`), whatever he is in the middle of: another backward, autocast, inference mode.
So it runs in a thread that knows nothing of that, and launches where autograd would have. What belongs to the caller is
copied; weights, and what forward has saved, must stay as they are.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import devices, static_buffers
from .instrumentation import one_by_one

log = logging.getLogger("mfsdp")

Turn = Callable[[], None]
"""Lets the other program run up to its next wait."""


@dataclass
class Part:
    """An execution of a program that an `Overlap` may put off.

    Args:
        name: the program's, for logs.
        run: runs it with its arguments; ``turn`` is called where it would wait, ``None``: it runs alone.
        args: its arguments, one list, emptied by whoever takes them.
        buffers: whose gradients it brings, or whose parameters it reads.
        results: how many results it has, if it gives none of them: all are ``None``; else 0.
        given: which arguments may be written to before it runs: the caller's own, and buffers of the model.
    """

    name: str
    run: Callable[[list[Any], Turn | None], Any]
    args: list[Any]
    buffers: Sequence[Any]
    results: int
    given: Sequence[int] = ()


class Overlap:
    """The backward that waits, if there is one, of a model (`mfsdp.overlapped`)."""

    def __init__(self) -> None:
        self._waiting: _Waiting | None = None
        self._waited = False
        self._told: set[str] = set()

    def backward(self, part: Part) -> Any:
        """Puts a backward off, or runs it, if it cannot wait."""
        self.finish()
        why = "a profile looks at programs one by one" if one_by_one() else _urgent(part)
        if why:
            self._tell(f"{part.name} runs at once: {why}")
            return part.run(part.args, None)
        self._waiting, self._waited = _Waiting(part), True
        for buffer in self._waiting.buffers:
            buffer.gradients.due = self.finish
        return (None,) * part.results

    def forward(self, part: Part) -> Any:
        """Runs a forward, and beside it the backward that waits."""
        if one_by_one():
            self.finish()
        waiting = self._taken()
        if waiting is None:
            return part.run(part.args, None)
        return _beside(waiting, partial(part.run, part.args))

    def finish(self) -> None:
        """Runs the backward that waits, if there is one."""
        waiting = self._taken()
        if waiting is not None:
            _threads().submit(waiting.run, None).result()
            waiting.place.join()

    def leave(self, model: str) -> None:
        """Runs what waits; says so if nothing ever has."""
        self.finish()
        if not self._waited:
            self._tell(
                f"no backward has waited: no compiled backward of {model} has collectives of another parallelism, or "
                "none could wait"
            )

    def drop(self) -> None:
        """Forgets what waits, and gives back static buffers."""
        waiting, self._waiting = self._waiting, None
        for buffer in waiting.buffers if waiting is not None else ():
            buffer.gradients.due = None
        static_buffers.forget_beside()

    def _taken(self) -> _Waiting | None:
        """What waits, for whoever runs it now.

        Raises:
            RuntimeError: what it needs has been written to. It goes on waiting: whoever looks again is told again.
        """
        waiting = self._waiting
        if waiting is not None:
            waiting.check()
            self._waiting = None
            for buffer in waiting.buffers:
                buffer.gradients.due = None
        return waiting

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            log.info("mfsdp: overlapped: %s", words)


def _urgent(part: Part) -> str:
    """Why a backward cannot wait; ``""`` if it can."""
    if not part.results:
        return "it gives gradients of inputs"
    for buffer in part.buffers:
        if buffer is None or not buffer.gradients.wanted():
            return "it is not for all parameters (torch.autograd.grad, backward(inputs=...))"
        if buffer.gradients.heard():
            return f"hooks of {buffer.path} want to see its gradients"
        if buffer.weights.exposed:
            return f"rows of {buffer.path} are out as plain tensors (to_local()), and may be written to unseen"
    return ""


class _Waiting:
    """A backward with its arguments as they were, where it was called, and how gradients were to be synchronised."""

    def __init__(self, part: Part):
        self.part, self.buffers, self.place = part, list(dict.fromkeys(part.buffers)), devices.Place()
        self.args = list(part.args)
        part.args.clear()
        for i in part.given:
            self.args[i] = _copied(self.args[i])
        self.versions = [_version(arg) for arg in self.args]
        self.weights = [buffer.weights.history for buffer in self.buffers]
        self.syncs = [buffer.gradients.sync for buffer in self.buffers]

    def check(self) -> None:
        """Raises a RuntimeError if what it needs has been written to."""
        for buffer, history in zip(self.buffers, self.weights, strict=True):
            if buffer.weights.history != history:
                raise RuntimeError(
                    f"mfsdp: weights of {buffer.path} have been written while {self.part.name} waits for the next "
                    "forward: leave mfsdp.overlapped before, or look at a gradient (param.grad), which runs it"
                )
        if [_version(arg) for arg in self.args] != self.versions:
            raise RuntimeError(
                f"mfsdp: what forward has returned or saved has been written to while {self.part.name} waits for the "
                "next forward: write to a copy, or leave mfsdp.overlapped before"
            )

    def run(self, turn: Turn | None) -> None:
        """Runs it, in a thread of its own."""
        self.place.settle()
        now = [buffer.gradients.sync for buffer in self.buffers]
        try:
            self._sync(self.syncs)
            with torch.no_grad():
                self.part.run(self.args, turn)
        finally:
            self._sync(now)

    def _sync(self, syncs: Sequence[bool]) -> None:
        for buffer, sync in zip(self.buffers, syncs, strict=True):
            buffer.gradients.sync = sync


def _version(arg: Any) -> int:
    return arg._version if isinstance(arg, torch.Tensor) and not arg.is_inference() else 0


def _copied(arg: Any) -> Any:
    """A copy, with the strides that a program was compiled for."""
    if not isinstance(arg, torch.Tensor) or not arg.numel():
        return arg
    with torch.no_grad():
        extent = 1 + sum((n - 1) * stride for n, stride in zip(arg.shape, arg.stride(), strict=True))
        return arg.as_strided((extent,), (1,)).clone().as_strided(arg.shape, arg.stride(), 0)


def _beside(waiting: _Waiting, forward: Callable[[Turn], Any]) -> Any:
    """Runs both in turns, the backward first; returns what the forward returns. If one raises the other still runs to
    its end: its ranks count on it.
    """
    turns = _Turns()

    def beside() -> None:
        try:
            with static_buffers.beside():
                waiting.run(partial(turns.give, 0))
        finally:
            turns.leave(0)

    done = _threads().submit(beside)
    try:
        turns.take(1)
        out = forward(partial(turns.give, 1))
    except BaseException as error:
        turns.leave(1)
        if (other := done.exception()) is not None:
            error.add_note(f"mfsdp: and in the backward beside it, {type(other).__name__}: {other}")
        raise
    turns.leave(1)
    done.result()
    waiting.place.join()
    return out


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads for backwards; each is used again, with the pools that compute has made for it."""
    return ThreadPoolExecutor(thread_name_prefix="mfsdp backward")


class _Turns:
    """Two threads, 0 and 1, of which one runs."""

    def __init__(self) -> None:
        self._mine = threading.Semaphore(0), threading.Semaphore(0)
        self._left = [False, False]

    def take(self, me: int) -> None:
        """Waits for the turn."""
        self._mine[me].acquire()

    def give(self, me: int) -> None:
        """Gives the turn to the other one and waits to get it back."""
        if not self._left[1 - me]:
            self._mine[1 - me].release()
            self.take(me)

    def leave(self, me: int) -> None:
        """Gives it for good."""
        self._left[me] = True
        self._mine[1 - me].release()
