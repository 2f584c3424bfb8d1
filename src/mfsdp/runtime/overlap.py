"""Runs a deferred backward and the next forward in turns (1F1B).

Note [Interleaved programs]
While one program communicates its expert exchanges, the other computes. Neither program changes. Each runs in its own
thread, one at a time, with its own static buffers, and the turn passes where a program would wait for a collective of
another parallelism. So the order of both together follows from the order of each, the same on every rank and under
every lowering: the backward up to its first such wait, the forward up to its first, the backward up to its next, and so
on (`ir.merge` writes it down).

A backward can be deferred if it only accumulates gradients (Note [Accumulators]) and no hook needs them. It is stored
with its arguments, and autograd goes on as if it had run. Any access to a gradient runs it first (`Gradients.due`),
regardless of the caller's context: another backward, autocast, inference mode. So it runs in a thread without this
context, and launches on the stream that autograd would have used. The caller's own tensors are copied; weights and
saved tensors must not be written.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import capturing, static_buffers
from .deferred import DeferredArguments
from .instrumentation import one_by_one

if TYPE_CHECKING:
    from .buffer_api import Buffer
    from .compiled_program import CompiledProgram

log = logging.getLogger("mfsdp")

Turn = Callable[[], None]
"""Runs the other program up to its next wait."""


class Overlap:
    """A model's deferred backward, if there is one (`mfsdp.overlapped`)."""

    def __init__(self) -> None:
        self._waiting: _Waiting | None = None
        self._waited = False
        self._told: set[str] = set()

    def backward(self, program: CompiledProgram, args: list[Any], buffers: Sequence[Buffer | None]) -> Any:
        """Defers a backward, or runs it if it cannot be deferred."""
        capturing.obstacle("backwards wait for the next forward under mfsdp.overlapped")
        self.finish()
        why = "a profile looks at programs one by one" if one_by_one() else ""
        info = program.info
        why = why or ("" if info.silent_results else "it gives gradients of inputs") or must_run_now(buffers)
        if why:
            self._tell(f"{info.outline.name} runs at once: {why}")
            return program.execute(args, None)
        self._waiting, self._waited = _Waiting(program, args, buffers), True
        for buffer in self._waiting.buffers:
            buffer.gradients.due = self.finish
        return (None,) * info.silent_results

    def forward(self, program: CompiledProgram, args: list[Any], buffers: Sequence[Buffer | None]) -> Any:
        """Runs a forward, in turns with the deferred backward."""
        if one_by_one():
            self.finish()
        waiting = self._taken()
        if waiting is None:
            return program.execute(args, None)
        return _beside(waiting, partial(program.execute, args))

    def finish(self) -> None:
        """Runs the deferred backward, if there is one."""
        waiting = self._taken()
        if waiting is not None:
            _threads().submit(waiting.run, None).result()
            waiting.place.join()

    def leave(self, model: str) -> None:
        """Runs the deferred backward; logs if no backward was ever deferred."""
        self.finish()
        if not self._waited:
            self._tell(
                f"no backward has waited: no compiled backward of {model} has collectives of another parallelism, or "
                "none could wait"
            )

    def drop(self) -> None:
        """Forgets the deferred backward, and frees static buffers."""
        waiting, self._waiting = self._waiting, None
        for buffer in waiting.buffers if waiting is not None else ():
            buffer.gradients.due = None
        static_buffers.forget_beside()

    def _taken(self) -> _Waiting | None:
        """Takes the deferred backward, to run it.

        Raises:
            RuntimeError: its inputs have been written. It stays deferred, and every later access raises.
        """
        waiting = self._waiting
        if waiting is not None:
            waiting.check(
                "the next forward", "leave mfsdp.overlapped before, or look at a gradient (param.grad), which runs it"
            )
            self._waiting = None
            for buffer in waiting.buffers:
                buffer.gradients.due = None
        return waiting

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            log.info("mfsdp: overlapped: %s", words)


def must_run_now(buffers: Sequence[Buffer | None]) -> str:
    """Why gradients of these buffers must be there when autograd goes on; ``""`` if they may come later."""
    for buffer in buffers:
        if buffer is None or not buffer.gradients.wanted():
            return "it is not for all parameters (torch.autograd.grad, backward(inputs=...))"
        if buffer.gradients.heard():
            return f"hooks of {buffer.path} want to see its gradients"
        if buffer.weights.exposed:
            return f"rows of {buffer.path} are out as plain tensors (to_local()), and may be written to unseen"
    return ""


class _Waiting(DeferredArguments):
    """A deferred backward with its arguments, its device and stream, and how gradients were to be synchronized."""

    def __init__(self, program: CompiledProgram, args: list[Any], buffers: Sequence[Buffer | None]):
        super().__init__(program.info.outline.name, args, buffers, program.info.caller_inputs)
        self.program = program
        self.syncs = [buffer.gradients.sync for buffer in self.buffers]

    def run(self, turn: Turn | None) -> None:
        """Runs it, in a separate thread."""
        self.place.settle()
        now = [buffer.gradients.sync for buffer in self.buffers]
        try:
            self._sync(self.syncs)
            with torch.no_grad():
                self.program.execute(self.args, turn)
        finally:
            self._sync(now)

    def _sync(self, syncs: Sequence[bool]) -> None:
        for buffer, sync in zip(self.buffers, syncs, strict=True):
            buffer.gradients.sync = sync


def _beside(waiting: _Waiting, forward: Callable[[Turn], Any]) -> Any:
    """Runs both in turns, the backward first; returns the forward's result. If one raises, the other still runs to its
    end, for the other ranks' collectives.
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
    """Threads for backwards, reused with the thread pools that compute creates for them."""
    return ThreadPoolExecutor(thread_name_prefix="mfsdp backward")


class _Turns:
    """Two threads, 0 and 1; one runs at a time."""

    def __init__(self) -> None:
        self._mine = threading.Semaphore(0), threading.Semaphore(0)
        self._left = [False, False]

    def take(self, me: int) -> None:
        """Waits for the turn."""
        self._mine[me].acquire()

    def give(self, me: int) -> None:
        """Passes the turn to the other thread, and waits to get it back."""
        if not self._left[1 - me]:
            self._mine[1 - me].release()
            self.take(me)

    def leave(self, me: int) -> None:
        """Passes the turn for good."""
        self._left[me] = True
        self._mine[1 - me].release()
