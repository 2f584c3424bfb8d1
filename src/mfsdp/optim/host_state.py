"""Optimizer state that lives on the host and is streamed through the device during the step.

    host in    |load 2     |load 3     |load 0 ...      a run's state is one block of bytes, copied as one
    compute    step 0 | step 1 | step 2 | step 3
    host out          |store 0    |store 1    |store 2    |store 3 ...

Note [Streamed state]
Between steps the state of a parameter range exists in host memory only; parameters' state, ``state_dict()`` and
checkpoints show that memory. A step processes one range after another, each in one of two persistent device buffers.
After a range's step its buffer is stored to the host, then loaded with the state of the range after the next one; at
the end of a step, with that of the next step's first ranges. So first loads and last stores overlap with forward and
backward, and nothing needs to know when gradients arrive.

Waits: a load waits for the store of the buffer's former state, and for the store of what it reads. A step waits for its
load. Access to rows of the state waits for their store (`HostedDTensor`). If the user holds rows as a plain tensor,
later accesses cannot be observed, so the step itself waits.

An early load is used if the state has not been written since: tensor versions show writes, `stale` shows writes by
address. If rows are out as plain tensors, the state is loaded again.

An interrupted step leaves each range entirely old or entirely new, weights and state. If a range's own step raises, the
version of its weights tells whether they were written. If they were, or the version cannot tell (fused kernels), an
error reports it: weights may be partly new, and state is as before the step. Whole-matrix optimizers (Note [Owners])
write weights later than state: ranges of waves that were under way have new state and old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..dtensor.optimizer_hooks import cut_whole_state
from ..dtensor.shard_spec import ShardSpec
from ..dtensor.sharded_dtensor import ShardedDTensor
from ..runtime import capturing, host_memory

if TYPE_CHECKING:
    from .parameter_ranges import ParameterRange

ALIGNED = 256
"""Alignment in bytes of the tensors in a block."""

Kinds = tuple[tuple[str, torch.dtype], ...]
"""State tensors as long as the weights: names and dtypes."""


StateOf = dict[torch.Tensor, dict[str, Any]]
"""An optimizer's state, by parameter."""


class HostedState:
    """The state of one range: a block of bytes on the host.

    Args:
        kinds: names and dtypes of the state tensors.
        numel: elements of each.
        device: where the step runs.
    """

    def __init__(self, kinds: Kinds, numel: int, device: torch.device):
        self.kinds, self.numel, self.device = kinds, numel, device
        self.nbytes = sum(size_of(numel, dtype.itemsize) for _, dtype in kinds)
        self.block = host_memory.room(self.nbytes, device)
        self.memory = self.block.data
        """The same memory with its own version, so that copies do not count as writes."""
        self.tensors = self.over(self.block)
        """The tensors that parameters' state shows views of."""
        self.stored: host_memory.CopyHandle | None = None
        """Handle of a store that may be in flight."""
        self.stale = False
        """Whether DTensors have written it since it was loaded."""
        self.exposed = False
        """Whether rows have been given out as a plain tensor."""

    def over(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a block's tensors by name, as views."""
        out, start = {}, 0
        for name, dtype in self.kinds:
            out[name] = block[start : start + self.numel * dtype.itemsize].view(dtype)
            start += size_of(self.numel, dtype.itemsize)
        return out

    def before_write(self, rows: torch.Tensor | None = None) -> None:
        """Reading the rows waits for a store in flight."""

    def hand_out(self, rows: torch.Tensor) -> None:
        self.exposed = True

    def settle(self) -> None:
        """Waits until the host may read the state."""
        stored = self.stored
        if stored is not None:
            stored.landed()
            self.stored = None

    def show(self, rows: torch.Tensor, sharding: ShardSpec) -> HostedDTensor:
        """Returns rows of one of its tensors as users see them."""
        out = HostedDTensor(rows, sharding)
        out._mfsdp_written = self
        return out


class HostedDTensor(ShardedDTensor):
    """A `ShardedDTensor` with rows on the host; reading them waits for a store in flight."""

    _mfsdp_written: HostedState | None = None  # type: ignore[assignment]

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        if self._mfsdp_written is not None:
            self._mfsdp_written.settle()
        return self._local_tensor_on_host

    @_local_tensor.setter
    def _local_tensor(self, rows: torch.Tensor) -> None:
        self._local_tensor_on_host = rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles like state that is not streamed."""
        return ShardedDTensor(self._local_tensor, self._sharding).__reduce_ex__(protocol)

    @classmethod
    def _alike(cls, local: torch.Tensor, sharding: ShardSpec, requires_grad: bool) -> ShardedDTensor:
        return ShardedDTensor(local, sharding, requires_grad)

    def beside(self, rows: torch.Tensor) -> ShardedDTensor:
        """Returns a view with the given rows."""
        hosted = self._mfsdp_written
        return super().beside(rows) if hosted is None else hosted.show(rows, self._sharding)

    def _gathered(self) -> torch.Tensor:
        """Gathers over data-parallel ranks, on the device: their group may not support host tensors."""
        rows = self._local_tensor
        device = rows.device if self._mfsdp_written is None else self._mfsdp_written.device
        return ShardedDTensor(rows.to(device), self._sharding)._gathered()


@dataclass(eq=False)
class _Staging:
    """A staging buffer: device memory for the state of one range."""

    memory: torch.Tensor
    hosted: HostedState | None = None
    """The state that it holds or is being loaded with."""
    loaded: host_memory.CopyHandle | None = None
    version: int = -1
    """Version of the host's state when it was loaded."""

    def current(self) -> bool:
        """Whether it holds the host's current state."""
        hosted = self.hosted
        if hosted is None or hosted.exposed or hosted.stale:
            return False
        return hosted.block._version == self.version


@dataclass(eq=False)
class StateStreams:
    """Streams the state of one optimizer's ranges through the device."""

    _buffers: list[_Staging] = field(default_factory=list)
    _order: list[HostedState] = field(default_factory=list)
    """The order in which the step takes them."""
    _at: int = 0
    _new: list[host_memory.CopyHandle] = field(default_factory=list)
    """Stores of state that this step has created."""

    def begin(self, runs: Sequence[ParameterRange]) -> None:
        """Begins a step over these ranges, in this order."""
        capturing.obstacle("the optimizer's state is on the host (offload=)")
        self._order, self._at, self._new = [run.hosted for run in runs if run.hosted is not None], 0, []
        devices = {run.flat.device for run in runs}
        if len(devices) > 1:
            raise NotImplementedError(
                f"fully_shard_optimizer(offload=True) does not support parameters on {', '.join(map(str, devices))} in "
                "one optimizer: give each device an optimizer of its own"
            )
        self._allocate()
        first = self._order[: len(self._buffers)]
        for buffer in self._buffers:
            if buffer.hosted not in first or not buffer.current():
                buffer.hosted = None
        for hosted in first:
            if not any(buffer.hosted is hosted for buffer in self._buffers):
                self._load(hosted, next(buffer for buffer in self._buffers if buffer.hosted is None))

    def _allocate(self) -> None:
        nbytes = max((hosted.nbytes for hosted in self._order), default=0)
        count = min(2, len(self._order))
        if count > len(self._buffers) or any(buffer.memory.numel() < nbytes for buffer in self._buffers[:count]):
            device = self._order[0].device
            self._buffers.clear()  # copy handles keep buffers in flight alive
            self._buffers += [_Staging(torch.empty(nbytes, dtype=torch.uint8, device=device)) for _ in range(count)]

    def _load(self, hosted: HostedState, buffer: _Staging) -> None:
        stores = [end for h in (hosted, buffer.hosted) if h is not None and (end := h.stored) is not None]
        version, hosted.stale, buffer.hosted = hosted.block._version, False, None
        buffer.loaded = host_memory.copy([(buffer.memory[: hosted.nbytes], hosted.memory)], "in", stores)
        buffer.hosted, buffer.version = hosted, version

    @contextmanager
    def on_device(self, run: ParameterRange, state: StateOf, versioned: bool) -> Iterator[None]:
        """Wraps the step of one range, the next in order: its state is on the device.

        Args:
            run: the range.
            state: the optimizer's; holds the range's state on the host before and after.
            versioned: whether tensor versions show what the step writes.

        Raises:
            RuntimeError: an exception interrupted the step, and its weights may have been written.
        """
        before = state.get(run.flat)
        numbers = {k: v.clone() for k, v in (before or {}).items() if isinstance(v, torch.Tensor) and not v.dim()}
        buffer, there = self._enter(run.hosted)
        version, stored = run.flat._version, False
        try:
            if before is not None:
                state[run.flat] = {**before, **there}
            yield
            state[run.flat] = self._leave(run, buffer, there, state.get(run.flat, {}))
            stored = True
        except BaseException as error:
            if stored:
                raise
            if buffer is not None:
                buffer.hosted = None
            state.pop(run.flat, None)
            if before is not None:
                state[run.flat] = before
                for name, number in numbers.items():
                    before[name].copy_(number)
            if versioned and run.flat._version == version:
                raise
            raise RuntimeError(
                f"mfsdp: the step of {run.name} was interrupted by {type(error).__name__} where its weights may be new "
                "and its state, which is streamed, is as it was before. Load a checkpoint; units that were stepped "
                "before it are new, those behind it are old, both with their state"
            ) from error

    def _enter(self, hosted: HostedState | None) -> tuple[_Staging | None, dict[str, torch.Tensor]]:
        """Returns the device buffer that holds a range's state, and the state tensors in it."""
        if hosted is None:
            return None, {}
        buffer = next(buffer for buffer in self._buffers if buffer.hosted is hosted)
        if buffer.loaded is not None:
            try:
                buffer.loaded()
            except BaseException:
                buffer.hosted = None
                raise
            buffer.loaded = None
        return buffer, hosted.over(buffer.memory)

    def _leave(
        self,
        run: ParameterRange,
        buffer: _Staging | None,
        there: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Launches the store of a stepped range and the load of the one after the next; returns the range's state on
        the host.
        """
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
        if not tensors:
            return dict(state)
        kinds, hosted = tuple((k, v.dtype) for k, v in tensors.items()), run.hosted
        if hosted is None or hosted.kinds != kinds:
            hosted = HostedState(kinds, run.flat.numel(), run.flat.device)
        stays = buffer is not None and hosted is run.hosted and all(there.get(k) is v for k, v in tensors.items())
        if buffer is not None and stays:
            pairs: host_memory.Pairs = [(hosted.memory, buffer.memory[: hosted.nbytes])]
        else:
            pairs = [(there, tensors[k]) for k, there in hosted.over(hosted.memory).items()]
        hosted.stored = host_memory.copy(pairs, "out")
        if buffer is None:
            self._new.append(hosted.stored)
            if len(self._new) == 2:
                self._new.pop(0)()
        else:
            buffer.hosted = hosted if stays else None
            self._order[self._at] = hosted
            self._advance(buffer)
        run.hosted = hosted
        return {**state, **hosted.tensors}

    def _advance(self, buffer: _Staging) -> None:
        """Loads the next waiting range into the buffer of the range just stepped."""
        behind = self._at + 2
        following = self._order[behind % len(self._order)]
        self._at += 1
        if any(other.hosted is following for other in self._buffers):
            return
        if behind < len(self._order) or not following.exposed:
            self._load(following, buffer)

    def end(self, runs: Sequence[ParameterRange], read: bool) -> None:
        """Ends a step.

        Args:
            runs: all ranges.
            read: whether their state is about to be read in ways that do not wait.
        """
        for run in runs:
            if run.hosted is not None and (read or run.hosted.exposed):
                run.hosted.settle()

    def forget(self, runs: Sequence[ParameterRange]) -> None:
        """Waits for the last stores of ranges that others replace; their state may still be referenced. A failed store
        raises on later access.
        """
        for run in runs:
            if run.hosted is not None:
                with suppress(Exception):
                    run.hosted.settle()


class _Stays:
    """Hides state from torch, which would move tensors to the device."""

    def __init__(self, value: ShardedDTensor):
        self.value = value


def load(theirs: Callable[[Optimizer, dict[str, Any]], Any], optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Runs an optimizer's ``load_state_dict`` and leaves sharded state where it is: torch would move all of it to the
    device of the weights, where it may not fit. If others have registered pre-hooks, those see plain state. Private in
    torch (``_optimizer_load_state_dict_pre_hooks``); tried on 2.13, not on the others of 2.11 to 2.15.
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
    """Returns the bytes that a tensor takes in a block."""
    return -(-numel * itemsize // ALIGNED) * ALIGNED
