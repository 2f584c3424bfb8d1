"""Many ranks in one process, and streams without a GPU: a bench for races.

`Loopback` is a transport whose other ranks are mirror images of this one. Its bytes arrive as late as they may: from
the launch on, what is received is NaN, and what is sent is read when somebody waits. On a GPU a stream of its own does
that, behind a sleep.

`Streams` are a GPU's streams on the CPU. Nothing runs late there; instead every read and write of a storage is noted,
with what its stream had waited for until then (vector clocks). Two accesses of which one writes, and neither has waited
for the other, are a race, whatever the values are this time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mfsdp.runtime import devices, kernels, observers, runs
from mfsdp.runtime.mirror import Mirror
from mfsdp.runtime.transport import End, Pairs, Turn
from mfsdp.state.tensors import ShardedDTensor

CYCLES = 2_000_000
"""That a collective sleeps on a GPU: about a millisecond."""


class Loopback(Mirror):
    """A `Mirror` whose results are not there before they have been waited for."""

    prompt = True
    streams: Streams | None = None
    told: dict[str, str]
    alike = True
    """Whether the other ranks say what this one says."""

    def __init__(self, group: dist.ProcessGroup, device: str):
        super().__init__(group)
        self.side = torch.cuda.Stream() if device == "cuda" else None
        self.told = {}

    def gather(self, pairs: Pairs, turn: Turn) -> End:
        do = super().gather
        return self._late([f for f, _ in pairs], [s.detach() for _, s in pairs], lambda: do(pairs, turn))

    def scatter(self, pairs: Pairs, dtype: torch.dtype, turn: Turn) -> End:
        do = super().scatter
        return self._late([s for _, s in pairs], [f for f, _ in pairs], lambda: do(pairs, dtype, turn))

    def all_reduce(self, tensor: torch.Tensor, op: str, turn: Turn) -> End:
        with no_dispatch():
            value = tensor.clone()
        do = super().all_reduce
        return self._late([tensor], [], lambda: do(tensor.copy_(value), op, turn))

    def _late(self, outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor], do: Callable[[], object]) -> End:
        if self.side is not None:
            return self._behind(outs, do)
        ended = None if self.streams is None else self.streams.transfer(self.name, outs, read)
        with no_dispatch():
            for out in outs:
                _poison(out)

        def end() -> None:
            with no_dispatch():
                do()
            if ended is not None:
                ended()

        return end

    def _behind(self, outs: Sequence[torch.Tensor], do: Callable[[], object]) -> End:
        assert self.side is not None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for out in outs:
                _poison(out)
            torch.cuda._sleep(CYCLES)
            do()
            event = torch.cuda.Event()
            event.record()
        return lambda kept=(outs, do): torch.cuda.current_stream().wait_event(event)

    # words

    def exchange(self, word: int) -> Agreed:
        return Agreed([word] * self.size)

    def tell(self, key: str, text: str) -> None:
        self.told[key.rpartition("/")[0]] = text

    def ask(self, key: str, seconds: float) -> str | None:
        return self.told.get(key.rpartition("/")[0]) if self.alike or key.endswith(f"/{self.me}") else None

    def sever(self) -> None:
        pass

    abort = sever


@dataclass
class Agreed:
    """Words that are known."""

    words: list[int]

    def ready(self) -> bool:
        return True

    def wait(self) -> list[int]:
        return self.words


def _poison(out: torch.Tensor) -> None:
    out.detach().fill_(torch.nan if out.dtype.is_floating_point else 77)


# Streams


class Race(AssertionError):
    """Two accesses of one storage, of which one writes, and neither waits for the other."""


@dataclass(eq=False)
class Stream:
    """One of a GPU's streams: what it has done, and what it has waited for."""

    stream_id: int
    name: str
    clock: dict[Stream, int] = field(default_factory=dict)

    def step(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def join(self, clock: dict[Stream, int]) -> None:
        for stream, at in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), at)

    def wait_stream(self, other: Stream) -> None:
        self.join(other.clock)

    def record_event(self) -> dict[Stream, int]:
        return dict(self.clock)

    wait_event = join


@dataclass
class _Storage:
    """Who has touched it last: streams, when on their clocks, and in which operation."""

    there: StorageWeakRef
    written: tuple[Stream, int, str] | None = None
    read: dict[Stream, tuple[int, str]] = field(default_factory=dict)


_METADATA = {torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage}
"""Write to no memory."""


class Streams(TorchDispatchMode):
    """Streams of one device, and whoever looks at what runs on them; also `observers.Observer`, since programs are
    compiled outside of a mode. A backward runs on the stream of the forward before it, as autograd sees to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.default = Stream(0, "default")
        self.now = self.default
        self.races: list[str] = []
        self._comm: dict[str, Stream] = {}
        self._seen: dict[int, _Storage] = {}
        self._forward: dict[str, Stream] = {}

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """What is launched inside goes to a stream, which has waited for what the caller's had to do before."""
        before, self.now = self.now, stream
        stream.wait_stream(before)
        try:
            yield
        finally:
            self.now = before

    def transfer(self, group: str, outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A collective: behind what the current stream has launched, on the stream of its group."""
        comm = self._comm.setdefault(group, Stream(100 + len(self._comm), f"collectives of {group}"))
        comm.wait_stream(self.now)
        self._note(f"collective over {group}", comm, read, outs)
        clock = dict(comm.clock)
        return lambda: self.now.join(clock)

    def _note(self, what: str, stream: Stream, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        at = stream.step()
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                self._touch(what, stream, at, tensor, writes)

    def _touch(self, what: str, stream: Stream, at: int, tensor: torch.Tensor, writes: bool) -> None:
        if isinstance(tensor, ShardedDTensor):
            tensor = tensor._local_tensor
        if tensor.is_meta or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        known = self._seen.get(storage._cdata)
        if known is None or known.there.expired():
            known = self._seen[storage._cdata] = _Storage(StorageWeakRef(storage))
        before = [known.written] if known.written is not None else []
        if writes:
            before += [(s, when, op) for s, (when, op) in known.read.items()]
        for other, when, op in before:
            if other is not stream and stream.clock.get(other, 0) < when:
                self.races.append(f"{what} on {stream.name} does not wait for {op} on {other.name}")
        if writes:
            known.written, known.read = (stream, at, what), {}
        else:
            known.read[stream] = (at, what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "mfsdp":
            kernel = getattr(kernels, func._schema.name.removeprefix("mfsdp::"))
            with self:
                return kernel(runs.current(), *args, **kwargs)
        out = func(*args, **kwargs)
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        view = (any(r.alias_info is not None for r in func._schema.returns) and not written) or func in _METADATA
        if not view:
            reads = [t for n, x in given.items() for t in tree_leaves(x) if isinstance(t, torch.Tensor)]
            writes = [t for n in written for t in tree_leaves(given.get(n)) if isinstance(t, torch.Tensor)]
            writes += [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self._note(func._schema.name, self.now, reads, writes)
        return out

    # `observers.Observer`

    def program(self, outline: Any, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        name, _, phase = outline.name.rpartition(" ")
        here = self.now
        if phase == "forward":
            self._forward[name] = here
        stream = self._forward.get(name, here) if phase == "backward" else here
        stream.wait_stream(here)
        self.now = stream
        try:
            with self:
                return run(args)
        finally:
            self.now = here

    def operation(self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return kernel(*args)

    @contextmanager
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
        """Programs inside run on these streams. In the end there must have been no race.

        Raises:
            Race: there was one.
        """
        monkeypatch.setattr(devices, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(Loopback, "streams", self)
        with observers.observed(self):
            yield self
        if self.races:
            raise Race("\n".join(dict.fromkeys(self.races)))
