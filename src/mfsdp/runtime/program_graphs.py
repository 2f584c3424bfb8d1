"""Replays the compute of programs as CUDA graphs (option ``cuda_graph="programs"``).

Note [Captured programs]
A program is bodies of compute with operations of the schedule between them. Each body is captured as a CUDA graph of
its own. Collectives and everything that Python decides in a step stay as they are, and so do all checks of ranks.

The first `WARM` executions run the bodies, and all but the first note the addresses of their inputs; the next one
captures them, all together, in one memory pool. A graph reads an input at its address, or, if that has changed before,
a copy at a fixed one. Later executions compare addresses: a body whose inputs are elsewhere runs uncaptured, with the
same result, and after `MISSES` such executions all bodies are captured anew, at most `MOST` times.

Results that leave the program are copied, so nobody sees a tensor that a replay overwrites, but for those that forward
saves for backward: if one of them is still in use (two forwards before a backward), the whole program runs uncaptured.
All other results are dead when the program ends; the pool's memory serves several of them, in the order of the capture.
So one program replays at a time on a device, on the stream on which it was captured.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import capturing, devices, execution
from .capturing import GRAPHS, CudaGraph, Pool
from .static_buffers import holders

log = logging.getLogger("mfsdp")

Body = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled subgraph of compute; empties the list of its inputs."""

Caller = Callable[[int, Body, list[torch.Tensor]], Sequence[torch.Tensor]]
"""Calls a body, which has a number in its program."""

WARM = 3
"""Executions before a program is captured."""

MISSES = 2
"""Executions in a row with an input that has moved, after which a program is captured anew."""

MOST = 4
"""Captures of one program."""

_busy: dict[torch.device, threading.Lock] = {}
"""By device, held while a program runs that may be captured."""

_all: weakref.WeakSet[ProgramGraphs] = weakref.WeakSet()


@dataclass(frozen=True)
class Site:
    """A call of a body in a program."""

    saved: Collection[int]
    """Results that forward saves for backward."""
    leaving: Collection[int]
    """Other results that may be read after the program."""
    movable: Collection[int]
    """Inputs that may be copied if their address changes: neither written, nor gathered, nor saved by forward."""


class ProgramGraphs:
    """The captured bodies of one program (Note [Captured programs]).

    Args:
        sites: the calls that may be captured, by number.
    """

    def __init__(self, sites: Mapping[int, Site]):
        self.sites = sites
        self._runs = 0
        self._captures = 0
        self._misses = 0
        """Executions in a row in which inputs of captured bodies were elsewhere."""
        self._missed = False
        self._stream: torch.Stream | None = None
        self._seen: dict[int, list[int]] = {}
        """Addresses of inputs, by site."""
        self._moved: dict[int, set[int]] = {}
        """Inputs that have had several addresses, by site."""
        self._captured: dict[int, _Captured] = {}
        _all.add(self)

    def run(self, program: Callable[[list[Any], Caller], Any], args: list[Any]) -> Any:
        """Runs a program, which gives each call of a body to its second argument."""
        device = next((a.device for a in args if isinstance(a, torch.Tensor) and a.device.type in GRAPHS), None)
        run = execution.current()
        if device is None or not self.sites or capturing.is_recording() or run.turn is not None or run.shown:
            return program(args, plainly)
        busy = _busy.setdefault(device, threading.Lock())
        if not busy.acquire(blocking=False):
            return program(args, plainly)
        try:
            return self._run(program, args, device)
        finally:
            busy.release()

    def _run(self, program: Callable[[list[Any], Caller], Any], args: list[Any], device: torch.device) -> Any:
        if self._captured:
            if self._stream != devices.current_stream(device) or not all(c.free() for c in self._captured.values()):
                return program(args, plainly)
            self._missed = False
            out = program(args, self._replay)
            self._misses = self._misses + 1 if self._missed else 0
            if self._misses == MISSES and self._captures < MOST:
                devices.synchronize(device)  # graphs end before their memory does
                self._captured = {}
            return out
        self._runs += 1
        if self._runs <= WARM:
            return program(args, self._watch if self._runs > 1 else plainly)  # the first makes static buffers
        if self._captures == MOST:
            return program(args, plainly)
        return self._capture(program, args, device)

    def _watch(self, number: int, body: Body, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs a body, and notes which inputs are elsewhere than the last time."""
        here = [x.data_ptr() for x in given]
        before = self._seen.get(number, here)
        self._moved.setdefault(number, set()).update(i for i, (a, b) in enumerate(zip(before, here)) if a != b)
        self._seen[number] = here
        return body(given)

    def _capture(self, program: Callable[[list[Any], Caller], Any], args: list[Any], device: torch.device) -> Any:
        self._captures += 1
        self._misses, self._stream = 0, devices.current_stream(device)
        new = _Recorder(self._moved, self.sites, device)
        out = program(args, new)
        self._captured = new.captured
        name, nbytes = execution.current().name, sum(each.graph.nbytes for each in new.captured.values())
        log.info("mfsdp: %s: %d of %d subgraphs captured, %d bytes", name, len(new.captured), len(self.sites), nbytes)
        if not new.captured:
            self._captures = MOST
        return out

    def _replay(self, number: int, body: Body, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        captured = self._captured.get(number)
        if captured is None:
            return body(given)
        moved = [i for i, address in captured.fixed if given[i].data_ptr() != address]
        if moved:
            self._missed = True
            self._moved.setdefault(number, set()).update(moved)
            return body(given)
        return captured.replay(given)

    def saves(self, address: int) -> bool:
        """Whether captured bodies save a result there."""
        return any(address == storage.data_ptr() for c in self._captured.values() for storage, _ in c.owned)


class _Recorder:
    """Captures the bodies of a running program, and replays each at once."""

    def __init__(self, moved: Mapping[int, set[int]], sites: Mapping[int, Site], device: torch.device):
        self._moved, self._sites, self._device = moved, sites, device
        self._made: set[int] = set()
        """Addresses of captured bodies' results, which no replay moves."""
        self._pool = Pool()
        self.captured: dict[int, _Captured] = {}

    def __call__(self, number: int, body: Body, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        site, moved = self._sites[number], self._moved.get(number, ())
        copied = {i for i in moved if not self._stays(_storage(given[i]))}
        if not (copied.issubset(site.movable) and all(map(self._captures, given))):
            return body(given)
        inputs = [_copy(x) if i in copied else unowned(x) for i, x in enumerate(given)]
        graph = GRAPHS[self._device.type](self._device, self._pool)
        try:
            out = graph.record(partial(_again, body, inputs), devices.side(self._device, "captured programs"))
        except RuntimeError as error:
            log.warning("mfsdp: subgraph %d of %s is not captured: %s", number, execution.current().name, error)
            return body(given)
        places = {address: i for i, x in enumerate(given) if i not in copied and (address := _storage(x))}
        reused = {i: at for i, x in enumerate(out) if (at := places.get(_storage(x))) is not None}
        out = [_in(given[reused[i]].untyped_storage(), x) if i in reused else x for i, x in enumerate(out)]
        taken = {i: at for i, at in reused.items() if _storage(given[at]) not in self._made}
        graph.replay()
        given.clear()
        self._made.update(map(_storage, out))
        self.captured[number] = captured = _Captured(graph, inputs, copied, out, site, taken)
        return captured.given_out(out)

    def _stays(self, address: int) -> bool:
        return address in self._made or any(graphs.saves(address) for graphs in list(_all))

    def _captures(self, x: torch.Tensor) -> bool:
        return x.device == self._device and not (x.is_conj() or x.is_neg())


class _Captured:
    """A captured body.

    Args:
        inputs: what it reads.
        copied: the inputs that are copies.
        out: its results.
        site: which results outlive the program.
        reused: results in the memory of an input that is not a captured body's, with the input.
    """

    def __init__(
        self,
        graph: CudaGraph,
        inputs: Sequence[torch.Tensor],
        copied: Collection[int],
        out: Sequence[torch.Tensor],
        site: Site,
        reused: Mapping[int, int],
    ):
        self.graph, self._site, self._reused = graph, site, reused
        self.fixed = [(i, x.data_ptr()) for i, x in enumerate(inputs) if i not in copied]
        self._copied = [(i, inputs[i]) for i in copied]
        held = [i for i in site.saved if i not in reused]
        self.results = [x if i in held else unowned(x) for i, x in enumerate(out)]
        storages = [self.results[i].untyped_storage() for i in held]
        self.owned = [(storage, holders(storage)) for storage in storages]
        """Memory of results that forward saves, and how many have it here."""

    def free(self) -> bool:
        """Whether nobody else has what the last replay saved for backward."""
        return all(holders(storage) <= mine for storage, mine in self.owned)

    def replay(self, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        for i, copy in self._copied:
            copy.copy_(given[i])
        out = list(self.results)
        for i, at in self._reused.items():
            out[i] = _in(given[at].untyped_storage(), out[i])
        self.graph.replay()
        given.clear()
        return self.given_out(out)

    def given_out(self, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns results as the program gets them: those saved as new tensors, which are counted."""
        saved, leaving = self._site.saved, self._site.leaving
        return [x.data if i in saved else _copy(x) if i in leaving else x for i, x in enumerate(out)]


def plainly(number: int, body: Body, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Calls a body."""
    return body(given)


def _again(body: Body, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return body(list(inputs))


def _copy(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def unowned(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory that does not own it. Private in torch
    (``_construct_storage_from_data_pointer``); tried on 2.11, 2.13 and 2.15.
    """
    whole = x.untyped_storage()
    build: Any = torch._C._construct_storage_from_data_pointer  # type: ignore[attr-defined]
    return _in(build(whole.data_ptr(), whole.device, whole.nbytes()), x)


def _in(memory: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like another one, in a storage over the same memory."""
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        return empty.set_(memory, like.storage_offset(), like.shape, like.stride())  # type: ignore[call-overload, no-any-return]
