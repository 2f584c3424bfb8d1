"""Many ranks in one process, and streams without a GPU: a bench for races.

`Loopback` is a transport whose other ranks are mirror images of this one. Its bytes arrive as late as they may: from
the launch on, what is received is NaN, and what is sent is read when somebody waits. On a GPU a stream of its own does
that, behind a sleep.

`Streams` are a GPU's streams on the CPU. Every read and write of a storage is noted, with what its stream had waited
for until then (vector clocks). Two accesses of which one writes, and neither has waited for the other, are a race,
whatever the values are this time. So is a storage whose last reference goes while another stream may use it: the
allocator would give its memory to the next kernel of the stream that it was allocated on. Collectives, and copies on
streams beside those of compute, run as late as they may and hold nothing: what is gone by then is poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mfsdp.dtensor.sharded_dtensor import ShardedDTensor
from mfsdp.runtime import devices, execution, instrumentation, kernels
from mfsdp.runtime.announcements import Announcements
from mfsdp.runtime.fake_transport import FakeTransport
from mfsdp.runtime.transport import End, Pairs

CYCLES = 2_000_000
"""That a collective sleeps on a GPU: about a millisecond."""


class Loopback(FakeTransport):
    """A `FakeTransport` whose results are not there before they have been waited for."""

    prompt = True
    streams: Streams | None = None
    told: dict[str, str]
    alike = True
    """Whether the other ranks say what this one says."""

    def __init__(self, group: dist.ProcessGroup, device: str):
        super().__init__(group)
        self.side = torch.cuda.Stream() if device == "cuda" else None
        self.told = {}

    def gather(self, pairs: Pairs, turn: Announcements) -> End:
        do = super().gather
        full, shards = [f for f, _ in pairs], [s.detach() for _, s in pairs]
        return self._late(full, shards, lambda outs, reads: do(list(zip(outs, reads, strict=True)), turn))

    def scatter(self, pairs: Pairs, dtype: torch.dtype, turn: Announcements) -> End:
        do = super().scatter
        full, shards = [f for f, _ in pairs], [s for _, s in pairs]
        return self._late(shards, full, lambda outs, reads: do(list(zip(reads, outs, strict=True)), dtype, turn))

    def all_reduce(self, tensor: torch.Tensor, op: str, turn: Announcements) -> End:
        with no_dispatch():
            value = tensor.clone()
        do = super().all_reduce
        return self._late([tensor], [], lambda outs, _: do(outs[0].copy_(value), op, turn))

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, received: Sequence[int], splits: Sequence[int], turn: Announcements
    ) -> End:
        do = super().all_to_all
        return self._late([out], [sent], lambda outs, reads: do(outs[0], reads[0], received, splits, turn))

    def _late(self, outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor], do: Move) -> End:
        """Holds none of them: whoever launches does."""
        if self.side is not None:
            return self._behind(outs, read, do)
        with no_dispatch():
            for out in outs:
                _poison(out)
        if self.streams is not None:
            return self.streams.collective(f"collective over {self.name}", self.name, outs, read, do)
        borrowed = [[Borrowed(tensor) for tensor in tensors] for tensors in (outs, read)]

        def end() -> None:
            with no_dispatch():
                do(*([each.back() for each in some] for some in borrowed))

        return end

    def _behind(self, outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor], do: Move) -> End:
        assert self.side is not None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for out in outs:
                _poison(out)
            torch.cuda._sleep(CYCLES)
            do(outs, read)
            event = torch.cuda.Event()
            event.record()
        return lambda: torch.cuda.current_stream().wait_event(event)

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


def _poison(out: torch.Tensor) -> torch.Tensor:
    return out.detach().fill_(torch.nan if out.dtype.is_floating_point else 77)


Move = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]
"""Moves bytes: to these tensors, from those."""


class Borrowed:
    """A tensor of which only the address is known, as a stream knows it."""

    def __init__(self, tensor: torch.Tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._how = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._like = torch.empty(0, dtype=tensor.dtype)

    @property
    def there(self) -> bool:
        """Whether its memory is still its own."""
        return not self._storage.expired()

    def back(self) -> torch.Tensor:
        """The tensor; poison, if its memory has been given away."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return _poison(self._like.new_empty(self._how[1]))
        return self._like.new_empty(0).set_(storage, *self._how)  # type: ignore[call-overload, no-any-return]


# Streams


class Race(AssertionError):
    """Two accesses of one storage, of which one writes, and neither waits for the other; or one of memory that has been
    given away.
    """


@dataclass(eq=False)
class Stream:
    """One of a GPU's streams: what it has done, and what it has waited for."""

    stream_id: int
    name: str
    of: Streams | None = None
    """Of one whose copies run late: whose it is."""
    clock: dict[Stream, int] = field(default_factory=dict)
    queue: list[Callable[[], object]] = field(default_factory=list)
    """What it has been given and has not done."""
    done: int = 0
    """How many it had been given before those."""
    _around: Stream | None = None

    def step(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def join(self, clock: dict[Stream, int]) -> None:
        for stream, at in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), at)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        return Event(self, dict(self.clock), self.done + len(self.queue))

    def wait_event(self, event: Event) -> None:
        self.join(event.clock)
        if self.of is None:
            event.arrive()
        else:
            self.queue.append(event.arrive)

    def run(self, until: int | None = None) -> None:
        """Does what it has been given, the first ``until`` of it, or all."""
        while self.queue and (until is None or self.done < until):
            self.done += 1
            self.queue.pop(0)()

    def __enter__(self) -> Self:
        assert self.of is not None
        self._around, self.of.now = self.of.now, self
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.of is not None and self._around is not None
        self.of.now = self._around


@dataclass(eq=False)
class Event:
    """Behind what a stream has been given."""

    stream: Stream
    clock: dict[Stream, int]
    count: int

    def arrive(self) -> None:
        self.stream.run(self.count)

    def query(self) -> bool:
        return self.stream.done >= self.count

    def synchronize(self) -> None:
        """The host waits."""
        self.arrive()
        if self.stream.of is not None:
            self.stream.of.host.join(self.clock)


@dataclass
class _Storage:
    """Where it was allocated, and who has touched it last: streams, when on their clocks, and in which operation."""

    there: StorageWeakRef
    home: Stream
    written: tuple[Stream, int, str] | None = None
    read: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    told: set[Stream] = field(default_factory=set)
    """Streams that the allocator was told of (``record_stream``)."""

    def uses(self) -> Iterator[tuple[Stream, int, str]]:
        if self.written is not None:
            yield self.written
        for stream, (when, op) in self.read.items():
            yield stream, when, op


_METADATA = {torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage}
"""Write to no memory."""


class Streams(TorchDispatchMode):
    """Streams of one device, and whoever looks at what runs on them; also `observers.Observer`, since programs are
    compiled outside of a mode. A backward runs on the stream of the forward before it, as autograd sees to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.default = Stream(0, "default")
        self.host = Stream(-1, "host")
        self.now = self.default
        self.races: list[str] = []
        self.sides: dict[str, Stream] = {}
        self._watches = False
        self._inside = 0
        self._comm: dict[str, Stream] = {}
        self._seen: dict[int, _Storage] = {}
        self._forward: dict[str, Stream] = {}

    def __enter__(self) -> Any:
        self._inside += 1
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._inside -= 1
        super().__exit__(*exc)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """What is launched inside goes to a stream, which has waited for what the caller's had to do before."""
        before, self.now = self.now, stream
        stream.wait_stream(before)
        try:
            yield
        finally:
            self.now = before

    def side(self, device: torch.device, what: str) -> Stream:
        """`devices.side`."""
        return self.sides.setdefault(what, Stream(200 + len(self.sides), what, self))

    def collective(
        self, what: str, group: str, outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor], do: Move
    ) -> Callable[[], None]:
        """Behind what the current stream has launched, on the stream of its group; gives what makes another wait."""
        comm = self._comm.setdefault(group, Stream(100 + len(self._comm), f"collectives of {group}", self))
        comm.wait_stream(self.now)
        self._late(what, comm, outs, read, do)
        event = comm.record_event()
        return lambda: self.now.wait_event(event)

    def _late(
        self, what: str, stream: Stream, outs: Sequence[torch.Tensor], read: Sequence[torch.Tensor], do: Move
    ) -> None:
        self._note(what, stream, read, outs)
        borrowed = [[Borrowed(tensor) for tensor in tensors] for tensors in (outs, read)]

        def run() -> None:
            if not all(each.there for some in borrowed for each in some):
                self.races.append(f"{what} on {stream.name} uses memory that has been given away")
            with no_dispatch():
                do(*([each.back() for each in some] for some in borrowed))

        stream.queue.append(run)

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
            known = self._seen[storage._cdata] = _Storage(StorageWeakRef(storage), self.now)
            finalize(storage, self._freed, known).atexit = False
        for use in known.uses():
            other, when, op = use
            if other is not stream and (writes or use is known.written) and not self._behind(stream, other, when):
                self.races.append(f"{what} on {stream.name} does not wait for {op} on {other.name}")
        if writes:
            known.written, known.read = (stream, at, what), {}
        else:
            known.read[stream] = (at, what)

    def _freed(self, known: _Storage) -> None:
        """The last reference has gone: who may still use the memory? Outside of the mode only our own streams: whoever
        lets go of a model whose programs ran on several streams has to wait for those.
        """
        for other, when, op in known.uses() if self._watches else ():
            ours = other.of is not None or self._inside > 0
            if ours and other not in (known.home, *known.told) and not self._behind(known.home, other, when):
                self.races.append(f"memory of {known.home.name} goes while {op} on {other.name} may use it")

    def _behind(self, stream: Stream, other: Stream, when: int) -> bool:
        """Whether what a stream is given next comes behind what another one was given: it waits, or the host has."""
        return stream.clock.get(other, 0) >= when or self.host.clock.get(other, 0) >= when

    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        known = self._seen.get(tensor.untyped_storage()._cdata)
        if known is not None and not known.there.expired():
            known.told.add(stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "mfsdp":
            kernel = getattr(kernels, func._schema.name.removeprefix("mfsdp::"))
            with self:
                return kernel(execution.current(), *args, **kwargs)
        if self.now.of is not None:
            if func is torch.ops.aten.copy_.default:
                self._late("copy", self.now, args[:1], args[1:2], lambda outs, reads: outs[0].copy_(reads[0]))
                return args[0]
            self.now.run()
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
        monkeypatch.setattr(devices, "side", self.side)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record_stream(tensor, stream))
        monkeypatch.setattr(Loopback, "streams", self)
        self._watches = True
        with instrumentation.observed(self):
            yield self
        self._watches = False
        if self.races:
            raise Race("\n".join(dict.fromkeys(self.races)))
