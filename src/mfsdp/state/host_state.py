"""Optimizer state that lives on the host, and passes through the device while the optimizer steps.

    host in    |load 2     |load 3     |load 0 ...      a run's state is one block of bytes, copied as one
    compute    step 0 | step 1 | step 2 | step 3
    host out          |store 0    |store 1    |store 2    |store 3 ...

Note [Streamed state]
Between steps a run's state is in host memory only, and that is what parameters' state, ``state_dict()`` and checkpoints
show. A step takes one run after the other. Each is stepped on its state in one of two rooms on the device, which are
there from step to step, like all static buffers. What is in a room is stored as soon as the run has been stepped, and
the room filled with the run after the next; behind the last runs of a step, with the first ones of the next. So first
loads hide behind forward and backward, last stores too, and nobody has to say when gradients arrive.

Who waits. A load: for the store of what the room held, and of what it reads. A step: for its load. Whoever looks at
rows of the state: for their store (`HostedDTensor`). Where somebody has got rows as a plain tensor nobody can know when
he looks, and the step itself waits.

What is loaded early is taken if nobody has written to the state since: versions tell of it, `stale` of writes by
address; of rows that are out as plain tensors nobody can know, and they are loaded anew.

A step that is interrupted leaves every run old or new, with its weights. Where the exception comes from inside of a
run's own step, versions of its weights tell whether they were written. If they were, or cannot tell (fused kernels), it
is an error of its own, for weights are half new then, and state is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..runtime import host_memory
from .optimizer_hooks import cut_whole_state
from .shard_spec import ShardSpec
from .sharded_dtensor import ShardedDTensor

ALIGNED = 256
"""Bytes that the tensors of a block start at multiples of."""

Kinds = tuple[tuple[str, torch.dtype], ...]
"""State that is as long as the weights: names and dtypes."""


class HostRange(Protocol):
    """What is stepped."""

    flat: torch.nn.Parameter
    hosted: HostedState | None
    """Its state, once there is any."""

    @property
    def name(self) -> str:
        """What errors call it."""


class HostedState:
    """The state of one run: a block of bytes on the host.

    Args:
        kinds: what it is made of.
        numel: elements of each.
        device: where it is stepped.
    """

    def __init__(self, kinds: Kinds, numel: int, device: torch.device):
        self.kinds, self.numel, self.device = kinds, numel, device
        self.nbytes = sum(size_of(numel, dtype.itemsize) for _, dtype in kinds)
        self.block = host_memory.room(self.nbytes, device)
        self.memory = self.block.data
        """The same, with a version of its own: what copies write is no write."""
        self.tensors = self.over(self.block)
        """What parameters' state shows views of."""
        self.stored: host_memory.CopyHandle | None = None
        """Of a store that may be under way."""
        self.stale = False
        """Whether it has been written through DTensors since it was loaded."""
        self.exposed = False
        """Whether somebody has had rows of it as a plain tensor."""

    def over(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that a block of bytes is made of."""
        out, start = {}, 0
        for name, dtype in self.kinds:
            out[name] = block[start : start + self.numel * dtype.itemsize].view(dtype)
            start += size_of(self.numel, dtype.itemsize)
        return out

    def settle(self) -> None:
        """Returns once the host may read it."""
        stored = self.stored
        if stored is not None:
            stored.landed()
            self.stored = None

    def show(self, rows: torch.Tensor, sharding: ShardSpec) -> HostedDTensor:
        """Rows of one of its tensors, as users see them."""
        out = HostedDTensor(rows, sharding)
        out._mfsdp_written = self
        return out


class HostedDTensor(ShardedDTensor):
    """One whose rows are on the host; whoever asks for them waits for the store that may be on its way there."""

    _mfsdp_written: HostedState | None = None

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        if self._mfsdp_written is not None:
            self._mfsdp_written.settle()
        return self._local_tensor_on_host

    @_local_tensor.setter
    def _local_tensor(self, rows: torch.Tensor) -> None:
        self._local_tensor_on_host = rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As of state that is not streamed."""
        return ShardedDTensor(self._local_tensor, self._sharding).__reduce_ex__(protocol)

    @classmethod
    def _alike(cls, local: torch.Tensor, sharding: ShardSpec, requires_grad: bool) -> ShardedDTensor:
        return ShardedDTensor(local, sharding, requires_grad)

    def beside(self, rows: torch.Tensor) -> ShardedDTensor:
        """A view of it, given its rows."""
        hosted = self._mfsdp_written
        return super().beside(rows) if hosted is None else hosted.show(rows, self._sharding)

    def _gathered(self) -> torch.Tensor:
        """Over data-parallel ranks, whose group may take no tensors of the host."""
        rows = self._local_tensor
        device = rows.device if self._mfsdp_written is None else self._mfsdp_written.device
        return ShardedDTensor(rows.to(device), self._sharding)._gathered()


@dataclass(eq=False)
class _Room:
    """Memory on the device for the state of one run."""

    memory: torch.Tensor
    hosted: HostedState | None = None
    """Whose state is in it, or on its way."""
    loaded: host_memory.CopyHandle | None = None
    version: int = -1
    """Of the state on the host, when it was loaded."""

    def current(self) -> bool:
        """Whether what is in it is what the host has."""
        hosted = self.hosted
        if hosted is None or hosted.exposed or hosted.stale:
            return False
        return hosted.block._version == self.version


@dataclass(eq=False)
class StateStreams:
    """The state of one optimizer's runs on its way through the device."""

    _rooms: list[_Room] = field(default_factory=list)
    _order: list[HostedState] = field(default_factory=list)
    """What the step takes."""
    _at: int = 0
    _new: list[host_memory.CopyHandle] = field(default_factory=list)
    """Stores of state that this step has made."""

    def begin(self, runs: Sequence[HostRange]) -> None:
        """A step begins, and takes these runs in this order."""
        self._order, self._at, self._new = [run.hosted for run in runs if run.hosted is not None], 0, []
        devices = {run.flat.device for run in runs}
        if len(devices) > 1:
            raise NotImplementedError(
                f"fully_shard_optimizer(offload=True) does not support parameters on {', '.join(map(str, devices))} in "
                "one optimizer: give each device an optimizer of its own"
            )
        self._make_rooms()
        first = self._order[: len(self._rooms)]
        for room in self._rooms:
            if room.hosted not in first or not room.current():
                room.hosted = None
        for hosted in first:
            if not any(room.hosted is hosted for room in self._rooms):
                self._load(hosted, next(room for room in self._rooms if room.hosted is None))

    def _make_rooms(self) -> None:
        nbytes = max((hosted.nbytes for hosted in self._order), default=0)
        count = min(2, len(self._order))
        if count > len(self._rooms) or any(room.memory.numel() < nbytes for room in self._rooms[:count]):
            device = self._order[0].device
            self._rooms.clear()  # ends of copies hold what is under way
            self._rooms += [_Room(torch.empty(nbytes, dtype=torch.uint8, device=device)) for _ in range(count)]

    def _load(self, hosted: HostedState, room: _Room) -> None:
        stores = [end for h in (hosted, room.hosted) if h is not None and (end := h.stored) is not None]
        version, hosted.stale, room.hosted = hosted.block._version, False, None
        room.loaded = host_memory.copy([(room.memory[: hosted.nbytes], hosted.memory)], "in", stores)
        room.hosted, room.version = hosted, version

    @contextmanager
    def lent(self, run: HostRange, state: dict[Any, dict[str, Any]], tells: bool) -> Iterator[None]:
        """Around the step of one run, the next in order: its state is on the device.

        Args:
            run: which.
            state: the optimizer's, which holds the run's on the host before and behind.
            tells: whether versions tell of what the step writes.

        Raises:
            RuntimeError: an exception has interrupted it where it cannot be told that nothing was written.
        """
        before = state.get(run.flat)
        numbers = {k: v.clone() for k, v in (before or {}).items() if isinstance(v, torch.Tensor) and not v.dim()}
        room, there = self._enter(run.hosted)
        version, stored = run.flat._version, False
        try:
            if before is not None:
                state[run.flat] = {**before, **there}
            yield
            state[run.flat] = self._leave(run, room, there, state.get(run.flat, {}))
            stored = True
        except BaseException as error:
            if stored:
                raise
            if room is not None:
                room.hosted = None
            state.pop(run.flat, None)
            if before is not None:
                state[run.flat] = before
                for name, number in numbers.items():
                    before[name].copy_(number)
            if tells and run.flat._version == version:
                raise
            raise RuntimeError(
                f"mfsdp: the step of {run.name} was interrupted by {type(error).__name__} where its weights may be new "
                "and its state, which is streamed, is as it was before. Load a checkpoint; units that were stepped "
                "before it are new, those behind it are old, both with their state"
            ) from error

    def _enter(self, hosted: HostedState | None) -> tuple[_Room | None, dict[str, torch.Tensor]]:
        """The room that a run's state is in, and what is there."""
        if hosted is None:
            return None, {}
        room = next(room for room in self._rooms if room.hosted is hosted)
        if room.loaded is not None:
            try:
                room.loaded()
            except BaseException:
                room.hosted = None
                raise
            room.loaded = None
        return room, hosted.over(room.memory)

    def _leave(
        self, run: HostRange, room: _Room | None, there: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Launches the store of a run that has been stepped, and the load of the one after the next; its state, on the
        host.
        """
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
        if not tensors:
            return dict(state)
        kinds, hosted = tuple((k, v.dtype) for k, v in tensors.items()), run.hosted
        if hosted is None or hosted.kinds != kinds:
            hosted = HostedState(kinds, run.flat.numel(), run.flat.device)
        stays = room is not None and hosted is run.hosted and all(there.get(k) is v for k, v in tensors.items())
        if room is not None and stays:
            pairs: host_memory.Pairs = [(hosted.memory, room.memory[: hosted.nbytes])]
        else:
            pairs = [(there, tensors[k]) for k, there in hosted.over(hosted.memory).items()]
        hosted.stored = host_memory.copy(pairs, "out")
        if room is None:
            self._new.append(hosted.stored)
            if len(self._new) == 2:
                self._new.pop(0)()
        else:
            room.hosted = hosted if stays else None
            self._order[self._at] = hosted
            self._advance(room)
        run.hosted = hosted
        return {**state, **hosted.tensors}

    def _advance(self, room: _Room) -> None:
        """Fills the room of what has just been stepped."""
        behind = self._at + 2
        following = self._order[behind % len(self._order)]
        self._at += 1
        if any(other.hosted is following for other in self._rooms):
            return
        if behind < len(self._order) or not following.exposed:
            self._load(following, room)

    def end(self, runs: Sequence[HostRange], looked_at: bool) -> None:
        """A step is done.

        Args:
            runs: all of them.
            looked_at: whether somebody is about to look at their state, in ways that do not wait.
        """
        for run in runs:
            if run.hosted is not None and (looked_at or run.hosted.exposed):
                run.hosted.settle()

    def forget(self, runs: Sequence[HostRange]) -> None:
        """Other runs take their place. Their last stores end, for whoever still has their state; if one has failed, he
        is told when he looks.
        """
        for run in runs:
            if run.hosted is not None:
                with suppress(Exception):
                    run.hosted.settle()


class _Stays:
    """State that torch takes for no tensor, and brings to no device."""

    def __init__(self, value: ShardedDTensor):
        self.value = value


def load(theirs: Callable[[Any, dict[str, Any]], Any], optimizer: Any, state_dict: dict[str, Any]) -> None:
    """An optimizer's ``load_state_dict``, which leaves sharded state where it is: torch's brings all of it to the
    device of the weights, where it need not fit. Where others have hooks in front of it, they see what they expect.
    Private in torch (``_optimizer_load_state_dict_pre_hooks``); tried on 2.13, not on the others of 2.11 to 2.15.
    """
    if all(hook is cut_whole_state for hook in optimizer._optimizer_load_state_dict_pre_hooks.values()):
        state_dict = cut_whole_state(optimizer, state_dict) or state_dict
        stays = {
            key: {name: _Stays(v) if isinstance(v, ShardedDTensor) else v for name, v in state.items()}
            for key, state in state_dict["state"].items()
        }
        state_dict = {**state_dict, "state": stays}
    theirs(optimizer, state_dict)
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, _Stays):
                state[name] = value.value.to(param.dtype) if param.is_floating_point() else value.value


def size_of(numel: int, itemsize: int) -> int:
    """Bytes that a tensor takes in a block."""
    return -(-numel * itemsize // ALIGNED) * ALIGNED
