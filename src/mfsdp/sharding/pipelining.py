"""`PipelineStage`: torch's pipeline stage for a module that mfsdp has sharded.

    part = torch.compile(part, backend="mfsdp", options={"split_backward": True})
    stage = mfsdp.PipelineStage(part, index, stages, device, group=mesh["pp"].get_group())
    schedule = ScheduleInterleavedZeroBubble([stage, ...], microbatches, loss_fn=loss)

torch's schedules run unchanged; to them a stage is no FSDP module, so that their actions UNSHARD, RESHARD and
REDUCE_GRAD gather and reduce nothing, and 2.15's ``finalize_gradients`` has no effect. Tried with torch 2.13 and 2.15.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage

from ..buffers.flat_buffer import FlatBuffer, buffers_in
from ..buffers.tied_copies import TiedCopy, tied_copy
from ..buffers.unreduced_gradients import reach_zero_grad
from ..runtime.weight_parts import WeightPart, WeightParts
from .module import unwrapped


class PipelineStage(TorchPipelineStage):
    """A stage of ``torch.distributed.pipelining`` for a sharded module, compiled or not.

    Gradients of a step's microbatches are added up, and reduced once per unit, in the backward of the last one. Under
    zero-bubble schedules each backward has two parts if the module was compiled with
    ``options={"split_backward": True}``: gradients of inputs, and gradients of weights when the schedule asks for them.
    Otherwise a backward computes both at once: the same gradients, with bubbles.

    Args:
        submodule: the stage's module after `mfsdp.fully_shard`; also ``torch.compile`` of it, which torch's own stage
            does not take under zero-bubble schedules.
        stage_index, num_stages, device: as in torch, as are further arguments (``input_args``, ``output_args``,
            ``group``, ...), except ``dw_builder``.
        hold: ``False`` reduces gradients of every microbatch under ``optim_grads`` and ``optim_grads_params``: it saves
            a buffer of each unit's size in ``main_grads_dtype``. The outer axis of a two-level mesh is reduced once
            either way.
        max_weight_parts: most microbatches whose weight parts wait, each of which holds about what their forward has
            saved; ``None``: as many as the schedule wants. Beyond it the oldest runs early. Equal on all ranks.

    Raises:
        ValueError: nothing in the module is sharded, another stage has a unit of it, a ``dw_builder`` was given, or an
            argument has another value.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        hold: bool = True,
        max_weight_parts: int | None = None,
        **kwargs: Any,
    ):
        given = inspect.signature(TorchPipelineStage).bind(submodule, stage_index, num_stages, device, *args, **kwargs)
        if given.arguments.pop("dw_builder", None) is not None:
            raise ValueError(
                "mfsdp.PipelineStage: leave out dw_builder: gradients of weights come from the compiled backward "
                '(torch.compile(..., backend="mfsdp", options={"split_backward": True}))'
            )
        if not isinstance(hold, bool):
            raise ValueError(f"mfsdp.PipelineStage: hold={hold!r}: choose True or False")
        most = max_weight_parts
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise ValueError(f"mfsdp.PipelineStage: max_weight_parts={most!r}: give an integer of at least 1, or None")
        module = unwrapped(submodule)
        self._buffers = buffers_in(module)
        if not self._buffers:
            raise ValueError(
                f"mfsdp.PipelineStage: nothing in {type(module).__name__} is sharded: call mfsdp.fully_shard(module, "
                "mesh=mesh['dp'], units=[...]) first, or use torch.distributed.pipelining.PipelineStage"
            )
        _claim(self._buffers, module)
        given.arguments.update(submodule=module, dw_builder=self._take)
        super().__init__(*given.args, **given.kwargs)
        self._run = submodule
        self._most = most
        self._parts = WeightParts()
        self._stored: list[list[WeightPart]] = []
        """The weight parts that wait, by microbatch, the oldest first."""
        self._splits = False
        """Whether the running backward leaves its weight part for later."""
        self._backwards = 0
        """Backwards of this step, whole ones and input parts."""
        self._tied: list[TiedCopy] = []
        """Copies of tied weights whose gradients this step has not completed."""
        reach_zero_grad()
        for buffer in self._buffers:
            if buffer.spec.hold != hold and buffer.spec.world > 1:
                buffer.respec(hold=hold)

    def clear_runtime_states(self) -> None:
        """Begins a step: also drops what a step that raised has left."""
        super().clear_runtime_states()
        self.dw_runner.clear()
        self._parts.clear()
        for buffer in self._buffers:  # another stage may have had the same module
            buffer.gradients.weight_parts = self._parts
        self._stored.clear()
        self._backwards = 0
        self._tied = [copy for buffer in self._buffers for copy in buffer.gradients.accumulator.tied.values()]
        for copy in self._tied:
            copy.begin()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self._run(*args, **kwargs)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        """Runs the module for metadata. Private in torch; tried on 2.13 and 2.15."""
        return super()._compute_outputs(*args, module=self._run, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Returns the first messages to other ranks: torch 2.11 also sends to the own rank where it has two neighboring
        stages (V schedules), which gloo cannot ("Pair is not connected"). Private in torch; tried on 2.11 and 2.13.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward of a microbatch, or its input part."""
        self._splits = not full_backward
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Runs autograd."""
        self._backwards += 1
        with self._reducing():
            if not self._splits:
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            with self._parts.collecting():
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _take(self) -> Callable[[], None]:
        """Is the stage's ``dw_builder``: returns what runs the weight parts of the last backward."""
        parts = self._parts.take()
        if parts:
            self._stored.append(parts)
            if self._most is not None and len(self._stored) > self._most:
                self._run_weights(self._stored[0])
        return lambda: self._run_weights(parts)

    def _run_weights(self, parts: list[WeightPart]) -> None:
        """Runs what is left of a microbatch's weight parts, in the order of its backward."""
        self._stored = [other for other in self._stored if other is not parts]
        while parts:
            part = parts.pop(0)
            with self._parts.running(part), self._reducing():
                part.run()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divides gradients, those of tied weights when they are complete: other ranks may still need this one."""
        if grad_scale_factor != 1:
            for p in self.submod.parameters():
                copy = tied_copy(p)
                if copy is not None:
                    copy.divide(grad_scale_factor)
                elif p.grad is not None:
                    p.grad.div_(grad_scale_factor)

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """Reduces gradients inside of the ``with`` only of buffers to which the step's last gradients come: no more
        backwards follow, and no weight parts wait.
        """
        last = self._backwards == self.chunks
        before = [(buffer, buffer.gradients.sync) for buffer in self._buffers]
        try:
            for buffer, sync in before:
                buffer.gradients.sync = sync and last and not self._parts.waits(buffer)
            yield
            for copy in list(self._tied):
                if last and dict(before)[copy.buffer] and not self._parts.waits(copy.buffer):
                    self._tied.remove(copy)
                    copy.end()
        finally:
            for buffer, sync in before:
                buffer.gradients.sync = sync


_stages: weakref.WeakKeyDictionary[FlatBuffer, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""The stage's module that each flat buffer was last seen in."""


def _claim(buffers: Sequence[FlatBuffer], module: nn.Module) -> None:
    """Refuses flat buffers that two stages of this process share: each would reduce and scale their gradients."""
    for buffer in buffers:
        other = _stages[buffer]() if buffer in _stages else None
        if other is not None and other is not module and set(buffers_in(other)) != set(buffers):
            raise ValueError(
                f"mfsdp.PipelineStage: another stage has {buffer.path} too: shard each stage by a call of fully_shard "
                "of its own. A weight of both needs a parameter in each, of equal values, named to mfsdp.tie_weights"
            )
    _stages.update((buffer, weakref.ref(module)) for buffer in buffers)
