"""The kernels behind `ops`: the one file that touches process groups and devices.

Note [Accumulators]
A gradient leaves a program through ``accumulate(shard, gshard, ...)``, not through an output that autograd would add to
``.grad``: so that it happens where the schedule says, in the accumulator's own dtype and without a second copy. The
accumulator is found through the shard tensor, which is an input of every program: the buffer it belongs to hangs on it
as an attribute. Programs stay free of process-wide state, and equal layers stay equal programs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .agreement import Apart, Company, Left, Said, Words, operation
from .graph.ops import LIBRARY
from .spec.units import Spec


class Accumulator(Protocol):
    """What hangs on a shard tensor (`state.FlatBuffer`)."""

    sync: bool

    @property
    def path(self) -> str: ...

    def due(self) -> bool: ...

    def refresh(self) -> list[Callable[[], Any]]: ...

    def hold(self, grads: torch.Tensor, offsets: Iterable[int]) -> bool: ...

    def vote(self, offsets: Iterable[int]) -> None: ...

    def accumulate(self, gshard: torch.Tensor, offsets: Iterable[int], scale: float) -> None: ...


_OWNER = "_mfsdp_buffer"
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By address of the shard's storage: autograd hands back detached aliases of what it saved under hooks."""


def own(shard: torch.Tensor, accumulator: Accumulator) -> None:
    """Makes gradients of the shard go to the accumulator, as long as somebody else holds that: what hangs on a tensor
    that autograd knows is never garbage to Python.
    """
    setattr(shard, _OWNER, weakref.ref(accumulator))
    if not shard.is_meta:
        _owners[shard.untyped_storage().data_ptr()] = accumulator


def owner(shard: torch.Tensor) -> Any:
    """The buffer that the shard tensor belongs to, or ``None``."""
    hung = getattr(shard, _OWNER, None)
    found = None if hung is None else hung()
    if hung is None and type(shard) is torch.Tensor and not shard.is_meta:
        found = _owners.get(shard.untyped_storage().data_ptr())
        if found is not None and found.source.shape != shard.shape:
            return None
    return found


_WHOLE = "_mfsdp_whole"
"""Attribute of gathered parameters of the eager path: their buffer."""


def own_whole(params: Iterable[torch.Tensor], buffer: Any) -> None:
    """Makes a buffer known to the whole parameters that have been gathered from it."""
    for param in params:
        setattr(param, _WHOLE, weakref.ref(buffer))


def read_by(tensor: torch.Tensor) -> Any:
    """The buffer whose parameters a program reads through an argument, shard or gathered parameter, or ``None``."""
    hung = getattr(tensor, _WHOLE, None)
    return owner(tensor) if hung is None else hung()


def sharded() -> bool:
    """Whether this process holds a shard of anything."""
    return len(_owners) > 0


def accumulates(node: Any) -> bool:
    """Whether the backward that is running will bring a gradient to a leaf, given its accumulation node; outside of
    one, ``True``. Private in torch (``_will_engine_execute_node``); tried on 2.11 to 2.13.
    """
    return backward_number() < 0 or bool(torch._C._will_engine_execute_node(node))


def backward_number() -> int:
    """A number of its own for every backward, -1 outside. Private in torch; tried on 2.11 to 2.13."""
    return torch._C._current_graph_task_id()  # type: ignore[no-any-return, attr-defined]


def accumulation_node(leaf: torch.Tensor) -> Any:
    """Where autograd adds up a leaf's gradient; a new one every time, as long as nobody computes with the leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(leaf).node


def after_backward(callback: Callable[[], None]) -> None:
    """Calls something when the backward that is running ends. Private in torch (``_execution_engine.queue_callback``);
    tried on 2.11 to 2.13.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def others_that_differ(group: str, lines: Sequence[str], patience: float = 600.0) -> dict[int, list[str]]:
    """What other ranks of a group have said, by rank, where it is not what this one says; all call it together. Costs a
    few messages through the process group's store, and one with the lines if they differ.

    Raises:
        RuntimeError: a rank has not come to this point in ``patience`` seconds.
    """
    if dist.get_backend(process_group(group)) == "fake":
        return {}  # nobody is there
    ranks = dist.get_process_group_ranks(process_group(group))
    text = "\n".join(lines)
    store, me = c10d._get_default_store(), dist.get_rank()
    _asked[group] = _asked.get(group, 0) + 1
    key = f"mfsdp/alike/{group}/{ranks[0]}/{_asked[group]}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    store.add(f"{key}/{digest}", 1)
    store.set(f"{key}/{me}", "")
    if store.add(f"{key}/arrived", 1) == len(ranks):
        store.set(f"{key}/all", "1")
    try:
        store.wait([f"{key}/all"], timedelta(seconds=patience))
    except (RuntimeError, dist.DistError) as error:
        missing = [r for r in ranks if not store.check([f"{key}/{r}"])]
        raise RuntimeError(
            f"mfsdp: rank {me} shards a model, and ranks {missing} have not come to the same call of fully_shard in "
            f"{patience:g} s: they shard other modules, raised, or died"
        ) from error
    if store.add(f"{key}/{digest}", 0) == len(ranks):
        return {}
    store.set(f"{key}/{me}/lines", text)
    said = {r: store.get(f"{key}/{r}/lines").decode().split("\n") for r in ranks}
    return {r: theirs for r, theirs in said.items() if theirs != list(lines)}


_asked: dict[str, int] = {}


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. Private in torch; tried on 2.11 to 2.13."""
    try:
        return c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise RuntimeError(
            f"process group {name!r} is not there. Initialise torch.distributed before the first step, "
            "and do not destroy or recreate the group that the model was sharded over."
        ) from error


def world() -> int:
    """Ranks of the default group, 1 when there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def another_group(name: str) -> str:
    """Name of a second group over the same ranks: collectives of one group run one after the other, of two at once.
    Its ranks call together; made once.
    """
    group = process_group(name)
    found = _others.get(name)
    if found is None or found[0]() is not group:
        ranks = dist.get_process_group_ranks(group)
        other = dist.new_group(ranks, use_local_synchronization=True, group_desc="mfsdp_reduce")
        found = _others[name] = (weakref.ref(group), str(other.group_name))
    return found[1]


_others: dict[str, tuple[weakref.ref[dist.ProcessGroup], str]] = {}


def rank() -> int:
    """This process's rank in the default group, 0 when there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def initialized() -> bool:
    """Whether there is a default group."""
    return dist.is_available() and dist.is_initialized()


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group's collectives take: a group that ``init_process_group()`` makes by itself on a
    machine with an accelerator has no backend for the CPU's.
    """
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else home()


def accelerator() -> torch.device | None:
    """The kind of accelerator that is here, without an index; asking does not begin to use it."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def home() -> torch.device:
    """The device of this process: the one that the default group is bound to; else, if the process has not used its
    accelerator yet, the one of ``LOCAL_RANK``, which torchrun sets; else the current one. The CPU, if there is no
    accelerator. What a process that had chosen none gets is its current device from now on.
    """
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    group = dist.group.WORLD if initialized() else None
    bound = None if group is None else group.bound_device_id
    index = bound.index if bound is not None and bound.type == kind.type else None
    if not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        if index is None and int(local := os.environ.get("LOCAL_RANK", "0")) < torch.accelerator.device_count():
            index = int(local)
        if index is not None:
            torch.accelerator.set_device_index(index)
    return torch.device(kind.type, torch.accelerator.current_device_index() if index is None else index)


def alone_on(device: torch.device) -> None:
    """Makes sure that no other rank has this device, where NCCL connects them: it refuses that in words that help
    nobody, or memory runs out first. The last of two ranks to come finds out.

    Raises:
        ValueError: another rank has it.
    """
    shared = device.type == "cpu" or f"{device.type}:nccl" not in (dist.get_backend_config() if initialized() else "")
    if shared or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    number = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    if number is not None:
        _claim(str(number), device)


@functools.cache
def _claim(number: str, device: torch.device) -> None:
    """Private in torch (``_get_default_store``); tried on 2.11 to 2.13."""
    me = str(rank())
    other = c10d._get_default_store().compare_set(f"mfsdp/device/{number}", "", me).decode()
    if other != me:
        raise ValueError(
            f"fully_shard: ranks {other} and {me} are on the same device, {device} here. Give each rank its own before "
            f"anything uses one: torch.{device.type}.set_device(int(os.environ['LOCAL_RANK'])), or "
            "init_process_group(device_id=...)"
        )


def default_group() -> str:
    """Name of the default group."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def reduced(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduces a tensor in place and returns it; ``op`` is ``"sum"``, ``"min"`` or ``"max"``."""
    ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    _running.runs[-1].compare()
    dist.all_reduce(tensor, ops[op], group=group)
    return tensor


def all_objects(mine: Any) -> list[Any]:
    """Every rank's small object, by rank; over the default group, if there is one."""
    if world() == 1:
        return [mine]
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, mine)
    return found


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor of the group's first rank, in place."""
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return tensor


def measured_link(device: torch.device, nbytes: int = 2**22, rounds: int = 8) -> tuple[float, float, float, float]:
    """What connects the ranks of the default group, measured with gathers of ``nbytes``: bytes per second of one rank,
    seconds of a hop, seconds per byte that it takes from computation (on the CPU), and what a gather that finds its
    group idle takes longer, as a part. The same on all ranks, which must call it together.
    """
    ranks, everybody = world(), process_group(default_group())
    shard = torch.zeros(nbytes // ranks, dtype=torch.uint8, device=device)
    full = shard.new_empty(shard.numel() * ranks)

    def timed(count: int, part: torch.Tensor, whole: torch.Tensor, queued: bool) -> tuple[float, float]:
        dist.barrier()
        begun, burnt = time.perf_counter(), time.process_time()
        ends = []
        for _ in range(count):
            end = gather_flat(whole, part, group=everybody)
            if queued:
                ends.append(end)
            else:
                end()
        for end in ends:
            end()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - begun) / count, (time.process_time() - burnt) / count

    timed(rounds, shard, full, True)
    small = min(timed(rounds, shard[:1], full[:ranks], False)[0] for _ in range(3))
    alone = min(timed(rounds, shard, full, False)[0] for _ in range(3))
    queued, burnt = min(timed(rounds, shard, full, True) for _ in range(3))
    sent = shard.numel() * (ranks - 1)
    cpu = min(burnt / sent, 0.9 * queued / sent) if device.type == "cpu" else 0.0
    numbers = torch.tensor([sent / queued, small / (ranks - 1), cpu, max(0.0, alone / queued - 1)], dtype=torch.float64)
    rate, hop, taken, restart = broadcast(numbers.to(device), everybody).tolist()
    return rate, hop, taken, restart


# Named *_single from torch 2.13 on, where the old names warn; tried on 2.11 to 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_flat(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    """Launches the all-gather of every rank's ``part``, [n], into ``out``, [ranks * n]. Returns what has to be called
    before ``out`` may be read. On gloo, whose own gathers into memory of its own and copies, ranks send to each other.
    """
    if not _on_gloo(group, out):
        _running.runs[-1].compare()
        return _all_gather(out, part, group=group, async_op=True).wait  # type: ignore[no-any-return, union-attr]
    n = part.numel()
    parts = {rank: out[rank * n : (rank + 1) * n] for rank in range(group.size())}
    parts.pop(group.rank()).copy_(part.detach())
    return _swap(parts, dict.fromkeys(parts, part), group)


def _on_gloo(group: dist.ProcessGroup, tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and "cpu:gloo" in dist.get_backend_config(group)


TAG = 0x6D66
"""Of our messages that nobody has announced, so that they do not meet a user's own (pipeline stages)."""

WORD = TAG + 1
"""Of announcements."""


def _swap(
    here: dict[int, torch.Tensor], there: dict[int, torch.Tensor], group: dist.ProcessGroup
) -> Callable[[], None]:
    """Launches messages: what ranks of the group send arrives in ``here``, and ``there`` goes to them. Returns what has
    to be called before either may be touched.
    """
    assert all(t.is_contiguous() for t in [*here.values(), *there.values()]), "messages are contiguous"
    run = _running.runs[-1]
    tag = run.tags.get(group.group_name, TAG)
    works = _posted(here, there, group, tag)

    def finish() -> None:
        run.finish(works)
        _messages.pop(id(works), None)

    return finish


def _posted(
    here: dict[int, torch.Tensor], there: dict[int, torch.Tensor], group: dist.ProcessGroup, tag: int
) -> list[Any]:
    """Messages under way, receives first; on the CPU straight to the group."""
    works: list[Any]
    if all(t.is_cpu for t in here.values()):
        works = [group.recv([t], r, tag) for r, t in here.items()]
        works += [group.send([t], r, tag) for r, t in there.items()]
    else:
        receives = [dist.P2POp(dist.irecv, t, group=group, group_peer=r, tag=tag) for r, t in here.items()]
        sends = [dist.P2POp(dist.isend, t, group=group, group_peer=r, tag=tag) for r, t in there.items()]
        works = dist.batch_isend_irecv([*receives, *sends]) if receives else []
    _messages[id(works)] = works
    return works


_messages: dict[int, list[Any]] = {}
"""Under way, or never waited for: gloo breaks a connection if a message's handle goes before the message has."""


class _Answers:
    """Words that are messages, over gloo."""

    def __init__(self, word: int, group: dist.ProcessGroup):
        self.words = torch.full((group.size(),), word)
        self.others = [r for r in range(group.size()) if r != group.rank()]
        here, mine = {r: self.words[r : r + 1] for r in self.others}, torch.tensor([word])
        self.works = _posted(here, dict.fromkeys(here, mine), group, WORD)

    def ready(self) -> bool:
        return False

    def wait(self) -> list[int]:
        for work in self.works:
            work.wait()
        _messages.pop(id(self.works), None)
        return self.words.tolist()  # type: ignore[no-any-return]


class _Gathered:
    """Words that are gathered, on a device: on the stream of the group's collectives, and from there to the host,
    without that either the host or the current stream waits.
    """

    def __init__(self, word: int, group: dist.ProcessGroup):
        device = collective_device(group)
        mine = torch.full((1,), word, device=device)
        self.words = mine.new_empty(group.size())
        self.work: Any = _all_gather(self.words, mine, group=group, async_op=True)
        self.event: torch.Event | None = None
        if device.type != "cpu":
            side = torch.Stream(device)
            with side:
                self.work.wait()
                told = torch.empty(self.words.shape, dtype=torch.int64, pin_memory=True)
                self.words = told.copy_(self.words, non_blocking=True)
                self.event = torch.Event(device)
                self.event.record(side)

    def ready(self) -> bool:
        return bool(self.work.is_completed() if self.event is None else self.event.query())

    def wait(self) -> list[int]:
        if self.event is None:
            self.work.wait()
        else:
            self.event.synchronize()
        return self.words.tolist()  # type: ignore[no-any-return]


class _Line:
    """What carries words between the ranks of a group: `agreement.Transport`."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = weakref.ref(group)
        self.ranks, self.me = dist.get_process_group_ranks(group), dist.get_rank()
        self.prompt = "cpu:gloo" in dist.get_backend_config(group)

    def exchange(self, word: int) -> _Answers | _Gathered:
        group = self.group()
        assert group is not None
        return _Answers(word, group) if self.prompt else _Gathered(word, group)

    def tell(self, key: str, text: str) -> None:
        c10d._get_default_store().set(f"mfsdp/{key}", text)

    def ask(self, key: str, seconds: float) -> str | None:
        store = c10d._get_default_store()
        try:
            store.wait([f"mfsdp/{key}"], timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return str(store.get(f"mfsdp/{key}").decode())

    def sever(self) -> None:
        """Over gloo a message that times out breaks all connections of its group, on both sides."""
        group = self.group()
        if group is None or not self.prompt:
            return
        other = _others.get(group.group_name)
        for over in (group, *([] if other is None else [process_group(other[1])])):
            for peer in set(range(over.size())) - {over.rank()}:
                with suppress(RuntimeError):
                    over.recv([torch.empty(1)], peer, WORD + 1).wait(timedelta(milliseconds=1))


_companies: dict[str, tuple[weakref.ref[dist.ProcessGroup], Company | None]] = {}


def _company(name: str) -> Company | None:
    """The ranks of a group, where there is somebody to agree with."""
    group = process_group(name)
    found = _companies.get(name)
    if found is None or found[0]() is not group:
        somebody = group.size() > 1 and dist.get_backend(group) != "fake"
        found = _companies[name] = (weakref.ref(group), Company(name, _Line(group)) if somebody else None)
    return found[1]


class _Run:
    """A program that is running, or an operation of the eager path (Note [In step])."""

    def __init__(
        self,
        name: str = "",
        frames: Iterator[tuple[str, Callable[..., Any]]] = iter(()),  # noqa: B008
        meets: Iterable[str] = (),
    ):
        self.name = name
        self.meets = meets
        """Names of all groups in which other ranks may wait for this one, once it has gone apart from some."""
        self.frames = frames
        """Its operations still to come, by name, and their frames."""
        self.at = ""
        """The one that is running, or ran last, with the path of its unit."""
        self.launched = 0
        """Collectives so far."""
        self.said: list[Said] = []
        self.tags: dict[str, int] = {}
        """Of its messages, by group."""
        self.compared = True

    def announce(self, sequences: Mapping[str, Words]) -> None:
        """Tells the ranks of groups what this one is about to run."""
        for name, words in sequences.items():
            company = _company(name)
            if company is not None:
                try:
                    said = company.announce(words)
                except Apart as error:  # where the host does not wait for answers it hears of it here
                    company.lost_with(list(dict.fromkeys([company, *self.all()])), str(error))
                except RuntimeError as error:
                    self.disconnected(error, [company])
                    raise
                self.said.append(said)
                self.tags[name] = said.tag
                if name in _others:
                    self.tags[_others[name][1]] = said.tag
                self.compared = False

    def compare(self) -> None:
        """Makes sure that all ranks are running the same, before what they send is waited for."""
        if self.compared:
            return
        self.compared = True
        try:
            for said in self.said:
                if said.company.transport.prompt:
                    said.check()
        except Apart as error:
            companies = self.all()
            if len(companies) > 1:  # ranks of the other groups have seen no difference
                companies[0].lost_with(companies, str(error))
            raise
        except RuntimeError as error:
            self.disconnected(error, self.all())
            raise

    def all(self) -> list[Company]:
        """The ranks of all groups that it has to do with: those that have been told first."""
        companies = [said.company for said in self.said]
        meets = (_company(name) for name in self.meets)
        return list(dict.fromkeys([*companies, *(c for c in meets if c is not None)]))

    def finish(self, works: Iterable[Any]) -> None:
        """Waits for collectives."""
        self.compare()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self.disconnected(error, self.all())
            raise

    def disconnected(self, error: RuntimeError, companies: list[Company]) -> None:
        """Raises with words what is left of a broken connection."""
        if not companies or isinstance(error, Apart):
            return
        story = next(filter(None, (c.story() for c in companies)), f"{error}")
        at = f"{self.at} of {self.name}" if self.at else self.name
        for company in companies:
            company.transport.sever()
            company.lost = f"mfsdp: rank {rank()} has lost the other ranks at {at}: {story}"
        raise RuntimeError(companies[0].lost) from error

    def leave(self, error: BaseException, ends: list[Callable[[], Any]]) -> None:
        """Notes that an exception has ended it, and what has to be called before its memory is free."""
        companies = [said.company for said in self.said]
        if not companies:
            _abandoned.extend(ends)
        elif any(company.lost for company in companies):
            forget_slots()  # those that it has taken will never be free
        else:
            place = f"at or after {self.at}" if self.at else "at its beginning"
            why = f"{type(error).__name__}: {error}"
            left = Left(self.name, place, self.launched, why, companies, self.all(), ends)
            for company in companies:
                company.leave(left)


_slots: dict[tuple[torch.device, str], torch.UntypedStorage] = {}
"""Static buffers by device and name; they stay from step to step, and programs share them."""


def slot_bytes() -> dict[str, int]:
    """Bytes of every static buffer, by name."""
    return {name: storage.nbytes() for (_, name), storage in sorted(_slots.items(), key=lambda kv: kv[0][1])}


def forget_slots() -> None:
    """Lets go of all static buffers; programs make them anew."""
    _slots.clear()


def _room(slot: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised flat tensor, in a static buffer if one is named. A buffer that is still in use (two forwards
    before a backward, a lowering that kept an alias) is left alone: then the tensor has memory of its own.
    """
    if not slot:
        return torch.empty(numel, dtype=dtype, device=device)
    stream = current_stream(device)
    if stream is not None and stream.stream_id:
        slot = f"{slot}@{stream.stream_id}"  # nobody orders two streams: each has buffers of its own
    storage = _slots.get((device, slot))
    size = numel * dtype.itemsize
    if storage is not None and not _vacant(storage, device):
        return torch.empty(numel, dtype=dtype, device=device)
    if storage is None or storage.nbytes() < size:
        storage = None
        _slots.pop((device, slot), None)  # the old and the new one are never there at once
        storage = _slots[device, slot] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,))  # type: ignore[no-any-return, call-overload]


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that this thread launches on; ``None`` where there is none."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def follow(stream: torch.Stream | None, tensor: torch.Tensor) -> None:
    """Makes the current stream wait for what another one has done to a tensor, and keeps the tensor's memory from being
    given away before the current one is done with it.
    """
    here = current_stream(tensor.device)
    if here is not None and stream is not None and here != stream:
        here.wait_stream(stream)
        tensor.record_stream(here)


PATIENCE = 0.002
"""Seconds that a static buffer on the CPU is waited for: gloo's threads let go of a collective's tensors a moment after
they have woken whoever waits for it.
"""


def _vacant(storage: torch.UntypedStorage, device: torch.device) -> bool:
    """Whether nobody else uses a static buffer."""
    deadline = time.monotonic() + (PATIENCE if device.type == "cpu" else 0)
    while (taken := _holders(storage) > 1) and time.monotonic() < deadline:
        time.sleep(1e-5)
    return not taken


def _holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles share the storage. Private in torch; tried on 2.11 to 2.13."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[no-any-return, attr-defined]


_under_way: dict[int, list[Callable[[], Any]]] = {}
"""What has to be called before a collective's result may be read, by address of the result's storage."""


def _launched(out: torch.Tensor, ends: list[Callable[[], Any]]) -> None:
    _under_way[out.untyped_storage().data_ptr()] = ends


def segments(
    splits: Iterable[int], ranks: int, full: torch.Tensor, shard: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a full buffer and of a shard that travel together."""
    start = at = 0
    for chunk in splits:
        yield full[start : start + ranks * chunk], shard[at : at + chunk]
        start, at = start + ranks * chunk, at + chunk


def _gathered(
    full: torch.Tensor, shard: torch.Tensor, splits: Iterable[int], ranks: int, group: str
) -> list[Callable[[], Any]]:
    """Launches all-gathers into ``full``; what has to be called before it may be read."""
    over = process_group(group)
    parts = segments(splits, ranks, full, shard)
    return [gather_flat(out, part, group=over) for out, part in parts]


def all_gather(shard: torch.Tensor, spec: str, slot: int = -1) -> torch.Tensor:
    """Launches the all-gather of a unit. ``shard``: [shard_numel]; returns [full_numel], not yet complete."""
    s = Spec.decode(spec)
    full = _room(f"p{slot}" if slot >= 0 else "", s.full_numel, shard.dtype, shard.device)
    _launched(full, _gathered(full, shard, s.splits, s.world, s.group))
    return full


def refresh(source: torch.Tensor) -> None:
    """Launches the gather of parameters that last, if their main weights have changed since."""
    # Behind what an earlier program may have left, which an exception kept from waiting.
    _under_way.setdefault(source.untyped_storage().data_ptr(), []).extend(owner(source).refresh())


def replicate(main: torch.Tensor, source: torch.Tensor, s: Spec) -> list[Callable[[], Any]]:
    """Launches what brings main weights, [main_numel], to the parameters that last, [source_numel]."""
    shard = main.to(s.precision.comm)
    if not s.outer_optim:
        return _gathered(source, shard, s.splits, s.world, s.group)
    if not s.replica:
        return _gathered(source, shard, s.cut(2), s.outer, s.outer_group)
    inner = _whole(shard, s.cut(2), s.outer, s.outer_group)
    return _gathered(source, inner, s.splits, s.world, s.group)


_held: set[int] = set()
"""Gradients that stay where they are, and what reductions of them would have given, by address."""


def hold(source: torch.Tensor, grads: torch.Tensor, offsets: list[int]) -> None:
    """Keeps gradients back, or adds what was kept back to them."""
    key = grads.data_ptr()
    if key in _held:
        return  # an earlier reduction has not happened
    if owner(source).hold(grads, offsets):
        _held.add(key)


def reduce_scatter(gfull: torch.Tensor, spec: str, lane: int) -> torch.Tensor:
    """Launches the sum over ranks. ``gfull``: [full_numel], on an outer lane [shard_numel]; returns this rank's part,
    not yet complete.
    """
    s = Spec.decode(spec)
    gshard = gfull.new_empty(sum(s.cut(lane)), dtype=s.scattered(lane))
    _held.discard(gshard.data_ptr())
    if gfull.data_ptr() in _held:
        _held.remove(gfull.data_ptr())
        _held.add(gshard.data_ptr())
        _launched(gshard, [])
        return gshard
    group, ranks = process_group(s.groups[lane]), s.outer if lane >= 2 else s.world
    launch: Callable[..., Callable[[], Any]] = _scatter
    if _on_gloo(group, gfull) or s.precision.sum is not s.precision.grad_comm:
        launch = partial(_exchange, dtype=s.precision.sum)
    _launched(gshard, [launch(out, part, group) for part, out in segments(s.cut(lane), ranks, gfull, gshard)])
    return gshard


def _scatter(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    _running.runs[-1].compare()
    return _reduce_scatter(out, part, group=group, async_op=True).wait  # type: ignore[no-any-return, union-attr]


def _exchange(
    out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype
) -> Callable[[], None]:
    """A reduce-scatter that adds up in a dtype of its own; and one for gloo, whose own is an all-reduce: twice the
    bytes. Every rank sends every other one its part, and adds up what it gets, in the order of ranks, when it is waited
    for. Two ranks need no memory besides the result, if all dtypes are one.
    """
    me, world = group.rank(), group.size()
    mine = part.view(world, -1)
    others = [r for r in range(world) if r != me]
    in_place = out.dtype is part.dtype is dtype
    rooms = [torch.empty_like(out, dtype=part.dtype) for _ in (others[1:] if in_place else others)]
    room = dict(zip(others, [out, *rooms] if in_place else rooms, strict=True))
    arrived = _swap(room, {r: mine[r] for r in others}, group)

    def finish() -> None:
        arrived()
        first, second, *more = [room.get(r, mine[me]) for r in range(world)]
        if in_place:
            total = torch.add(first, second, out=out)
        else:
            total = first.to(dtype, copy=True).add_(second)
        for another in more:
            total.add_(another)
        if total is not out:
            out.copy_(total)

    return finish


def all_reduce(gfull: torch.Tensor, spec: str, lane: int) -> None:
    """Launches the sum over ranks, in place."""
    if gfull.data_ptr() in _held:
        _launched(gfull, [])
        return
    running = _running.runs[-1]
    running.compare()
    work = dist.all_reduce(gfull, group=process_group(Spec.decode(spec).groups[lane]), async_op=True)
    _launched(gfull, [partial(running.finish, [work])])


def wait(out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Returns once ``out`` may be read (on CUDA: once the current stream is behind the collective)."""
    for end in _under_way.pop(out.untyped_storage().data_ptr()):
        end()


def free(full: torch.Tensor) -> None:
    """Nothing: lowerings drop the node, and with it the last reference."""


def bucket(like: torch.Tensor, holes: list[int], spec: str, slot: int = -1) -> torch.Tensor:
    """Room for a unit's gradients, [full_numel] in the dtype that travels; zeros in the holes, nothing elsewhere."""
    s = Spec.decode(spec)
    gfull = _room(f"g{slot}" if slot >= 0 else "", s.full_numel, s.precision.grad_comm, like.device)
    _held.discard(gfull.data_ptr())
    zeros = [gfull[start:end] for start, end in zip(holes[::2], holes[1::2], strict=True)]
    if zeros:
        torch._foreach_zero_(zeros)
    return gfull


def pack(gfull: torch.Tensor, grads: list[torch.Tensor], offsets: list[int], scale: float) -> None:
    """Copies gradients to their places, cast and scaled."""
    places = [gfull[o : o + g.numel()].view(g.shape) for g, o in zip(grads, offsets, strict=True)]
    if places:
        torch._foreach_copy_(places, grads)
        if scale != 1.0:
            torch._foreach_mul_(places, scale)


def mm(gfull: torch.Tensor, offset: int, size: list[int], stride: list[int], a: torch.Tensor, b: torch.Tensor) -> None:
    """Writes ``a @ b`` to its place."""
    torch.mm(a, b, out=gfull.as_strided(size, stride, offset))


def accumulate(shard: torch.Tensor, gshard: torch.Tensor, offsets: list[int], scale: float) -> None:
    """Adds ``scale * gshard`` to the accumulator of the shard's buffer (Note [Accumulators])."""
    accumulator = owner(shard)
    if accumulator is None and hasattr(shard, _OWNER):
        return  # the model is gone
    if accumulator is None:
        raise RuntimeError(
            "mfsdp: backward got a copy of a shard instead of the shard. Saved-tensor hooks that copy what they are "
            "given (torch.autograd.graph.save_on_cpu) do not compose with a compiled sharded model."
        )
    if gshard.data_ptr() in _held:
        _held.remove(gshard.data_ptr())
        return
    accumulator.accumulate(gshard, offsets, scale)


def gather_now(source: torch.Tensor, spec: str) -> torch.Tensor:
    """The complete full buffer, in the dtype that the model computes in. Shares the source's storage where nothing
    has to be gathered or cast.
    """
    s = Spec.decode(spec)
    buffer = owner(source)
    communicates = s.gathers or (buffer is not None and buffer.due())
    with announced(f"gather of {path(source)}", *(s.gathering if communicates else ()), meets=s.meets):
        if s.kept:
            refresh(source)
            wait(source, [])
        flat = source.detach().to(s.precision.comm)
        if s.gathers:
            shard, flat = flat, all_gather(flat, spec)
            wait(flat, [shard])
    return flat.to(s.precision.compute)


def gather_main(main: torch.Tensor, s: Spec) -> torch.Tensor:
    """All main weights of a unit, [full_numel], in memory of their own."""
    flat = main.detach()
    if s.outer_optim:
        flat = _whole(flat, s.cut(2), s.outer, s.outer_group)
    if s.world > 1:
        flat = _whole(flat, s.splits, s.world, s.group)
    return flat.clone() if flat.data_ptr() == main.data_ptr() else flat


def _whole(shard: torch.Tensor, splits: tuple[int, ...], ranks: int, group: str) -> torch.Tensor:
    full = shard.new_empty(ranks * sum(splits))
    for end in _gathered(full, shard, splits, ranks, group):
        end()
    return full


def reduce_now(source: torch.Tensor, grads: list[torch.Tensor], offsets: list[int], spec: str) -> None:
    """Packs, reduces and accumulates gradients at once."""
    s = Spec.decode(spec)
    total = _packed(grads, offsets, spec)
    kept = ", kept back under no_sync" if s.held_numel and not owner(source).sync else ""
    with announced(f"reduction of {path(source)}{kept}", *s.meets):
        if s.world > 1:
            if s.hold:
                hold(source, total, offsets)
            total = _over_shards(total, spec)
        if s.outer > 1:
            hold(source, total, offsets)
            total = _over_outer(total, spec)
        if s.ranks > 1 and total.data_ptr() not in _held:
            owner(source).vote(offsets)
    accumulate(source, total, offsets, 1 / s.divide)


def everywhere(here: torch.Tensor, s: Spec) -> torch.Tensor:
    """Where any rank that trains the unit says yes. ``here``: booleans."""
    told = here.to(torch.uint8)
    for group in filter(None, (s.group, s.outer_group)):
        reduced(told, "max", process_group(group))
    return told


def _packed(grads: list[torch.Tensor], offsets: list[int], spec: str) -> torch.Tensor:
    gfull = bucket(grads[0], [0, Spec.decode(spec).full_numel], spec)
    pack(gfull, grads, offsets, 1.0)
    return gfull


def _over_shards(gfull: torch.Tensor, spec: str) -> torch.Tensor:
    gshard = reduce_scatter(gfull, spec, 0)
    wait(gshard, [gfull])
    return gshard


def _over_outer(gshard: torch.Tensor, spec: str) -> torch.Tensor:
    out = gshard
    if Spec.decode(spec).outer_optim:
        out = reduce_scatter(gshard, spec, 2)
    else:
        all_reduce(gshard, spec, 2)
    wait(out, [gshard])
    return out


def param(shard: torch.Tensor, offset: int, shape: list[int], spec: str) -> torch.Tensor:
    """The marker's own meaning: gathers the unit and copies one parameter out."""
    if len(_running.runs) == 1:
        _warn_of_another_backend(path(shard))
    full = gather_now(shard, spec)
    n = torch.Size(shape).numel()
    return full[offset : offset + n].view(shape).clone()


def _warn_of_another_backend(unit: str) -> None:
    """Markers run by themselves in no program of ours: the model was compiled, but not by this backend."""
    global _told
    if not _told:
        _told = True
        warnings.warn(
            f"mfsdp: {unit} is sharded, and compiled by another backend, which gathers the whole unit for each of its "
            'parameters, without overlap. Call torch.compile(model, backend="mfsdp") instead.',
            stacklevel=3,
        )


_told = False


def param_grad(grad: torch.Tensor, shard: torch.Tensor, offset: int, spec: str) -> torch.Tensor:
    """The marker's own meaning: one gradient in the shape and dtype of what was read, reduced if that
    is a shard; `reduce_rest` does the rest.
    """
    s = Spec.decode(spec)
    gfull = _packed([grad], [offset], spec)
    if s.gathers:
        with announced(f"reduction of {path(shard)} at {offset}", s.group):
            gfull = _over_shards(gfull, spec)
    return gfull.to(shard.dtype).mul_(1 / s.divide)


def returned(param: torch.Tensor) -> torch.Tensor:
    """A copy. Not ``clone``, which Inductor takes out where it thinks that nobody will notice."""
    return param.clone()


def reduce_rest(grad: torch.Tensor, spec: str) -> torch.Tensor:
    """What markers have left to be reduced: from the source's shape to that of the main weights."""
    s = Spec.decode(spec)
    grad = grad.to(s.precision.grad_comm)
    if s.replica:
        grad = _over_shards(grad, spec)
    return _over_outer(grad, spec) if s.outer > 1 else grad


class Observer(Protocol):
    """Whoever wants to see what programs do as they run (`mfsdp.profile`): called instead of it, with it."""

    def program(self, outline: Any, run: Callable[[list[Any]], Any], args: list[Any]) -> Any: ...

    def operation(self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...


_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Shows an observer every program and every operation inside of the ``with``.

    Raises:
        RuntimeError: there is one already.
    """
    global _observer
    if _observer is not None:
        raise RuntimeError("mfsdp.profile: another profile is running; end it first")
    _observer = observer
    try:
        yield
    finally:
        _observer = None


class Outline(Protocol):
    """What is known of a compiled program (`mfsdp.profile`)."""

    @property
    def name(self) -> str:
        """The model and the phase."""

    @property
    def operations(self) -> Sequence[str]:
        """Names of its operations in their order, with the unit's: ``all_gather layers.3``."""


def marked(
    outline: Outline,
    run: Callable[[list[Any]], Any],
    sequences: Mapping[str, Sequence[str]] | None = None,
    sources: Mapping[int, str] | None = None,
    held: Collection[int] = (),
    reads: Sequence[int] = (),
    meets: Sequence[str] = (),
) -> Callable[[list[Any]], Any]:
    """A compiled program that says when it runs, and what each of its operations is called. It takes its arguments as
    one list and may empty that, as functions of AOTAutograd do.

    Args:
        outline: names.
        run: the program.
        sequences: its collectives by group, one text each: what all ranks of the group must have alike (law 13). They
            are compared every time that it runs (Note [In step]).
        sources: which of its arguments are sources, and of which unit, ``u0``. Equal layers may share a program: whose
            parameters it reads is told from its arguments, and stands in ``sequences`` where `PATH` says.
        held: which of them may keep gradients back (`no_sync`); whether they do is compared too.
        reads: which of its arguments parameters are read through in forward (sources, or gathered parameters):
            they have to be the modules' still.
        meets: all groups of its units, also those that it communicates over in another phase only.

    Raises:
        RuntimeError: another rank runs something else (from the program, on every rank, with the first difference), or
            has been left behind by an exception.
    """
    named = partial(_frame(outline.name), run)
    frames = tuple((name.partition(" ")[0], _frame(name)) for name in outline.operations)

    units = sources or {}

    @functools.cache
    def words(paths: tuple[str, ...], kept: tuple[str, ...]) -> dict[str, Words]:
        more = (f"gradients of {', '.join(kept)} are kept back under no_sync",) if kept else ()

        def told(line: str) -> str:
            for unit, path in zip(units.values(), paths, strict=True):
                line = line.replace(PATH.format(unit), path)
            return line

        return {group: Words(outline.name, (*map(told, lines), *more)) for group, lines in (sequences or {}).items()}

    def said(args: list[Any]) -> dict[str, Words]:
        paths = tuple(_fqn(args[i]) for i in units)
        if not held:
            return words(paths, ())
        holding = [(i, path) for i, path in zip(units, paths, strict=True) if i in held]
        words(paths, tuple(path for _, path in holding))  # what another rank may say
        return words(paths, tuple(path for i, path in holding if _keeps(args[i])))

    def program(args: list[Any]) -> Any:
        running = _Run(outline.name, iter(frames), meets)
        running.announce(said(args) if sequences else {})
        while _abandoned:
            _abandoned.pop(0)()
        before = set(_under_way)
        _running.runs.append(running)
        try:
            for buffer in dict.fromkeys(read_by(args[i]) for i in reads):
                if buffer is not None:
                    buffer.in_place()
            return named(args) if _observer is None else _observer.program(outline, named, args)
        except BaseException as error:
            keys = _under_way.keys() - before
            running.leave(error, [end for key in keys for end in _under_way.pop(key)])
            raise
        finally:
            _running.runs.pop()

    program._boxed_call = True  # type: ignore[attr-defined]
    return program


PATH = "\0{}\0"
"""Stands for the path of a unit in what ranks compare."""


def _fqn(source: torch.Tensor) -> str:
    """The path of the unit that a source belongs to."""
    buffer = owner(source)
    return "?" if buffer is None else str(buffer.unit.fqn)


def _keeps(source: torch.Tensor) -> bool:
    buffer = owner(source)
    return buffer is not None and not buffer.sync


_abandoned: list[Callable[[], Any]] = []
"""What an exception kept a program from calling that no other rank knows of: the next one does, so that static buffers
are free again. Not earlier: the other ranks may not come."""


@contextmanager
def announced(what: str, *groups: str, meets: Sequence[str] = ()) -> Iterator[None]:
    """Around collectives of no program: tells the ranks of groups what this one is about to do. Inside of something
    that has been announced it is part of that. ``meets``: other groups whose ranks may wait for this one later.
    """
    if not groups or any(group in _running.runs[-1].tags for group in groups):
        yield
        return
    running = _Run(what, meets=meets)
    running.announce(dict.fromkeys(groups, operation(what)))
    _running.runs.append(running)
    try:
        yield
    finally:
        _running.runs.pop()


def path(source: torch.Tensor) -> str:
    """What errors call the unit that a shard belongs to."""
    found = owner(source)
    return "a unit that is gone" if found is None else str(found.path)


class _Running(threading.local):
    def __init__(self) -> None:
        self.runs: list[_Run] = [_Run()]
        """What this thread is in: programs and operations, the innermost last; the first stands for neither."""


_running = _Running()


@functools.cache
def _frame(name: str) -> Callable[..., Any]:
    """Calls what it is given in a frame of that name, for whoever looks at stacks: tracebacks, py-spy, and torch's
    FlightRecorder, whose entries have no other room for a unit.
    """

    def frame(kernel: Callable[..., Any], *args: Any) -> Any:
        return kernel(*args)

    frame.__name__ = name
    frame.__code__ = frame.__code__.replace(co_name=name, co_qualname=name)
    return frame


def _shown(kernel: Callable[..., Any]) -> Callable[..., Any]:
    nameless = (kernel.__name__, _frame(kernel.__name__))

    launches = kernel in (refresh, all_gather, reduce_scatter, all_reduce)

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        running = _running.runs[-1]
        operation, frame = next(running.frames, nameless)
        if operation != kernel.__name__:  # not the order of the outline: no name is better than a wrong one
            _, frame = nameless
        running.at = frame.__name__
        if _observer is None:
            out = frame(kernel, *args)
        else:
            out = _observer.operation(frame.__name__, partial(frame, kernel), args)
        running.launched += launches
        return out

    return run


for _kernel in (param, param_grad, returned, free):
    LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
for _operation in (refresh, all_gather, wait, bucket, pack, mm, hold, reduce_scatter, all_reduce, accumulate):
    LIBRARY.impl(_operation.__name__, _shown(_operation), "CompositeExplicitAutograd")
