"""The kernels behind `ops`: the one file that touches process groups and devices.

Note [Accumulators]
A gradient leaves a program through ``accumulate(shard, gshard, ...)``, not through an output that autograd would add to
``.grad``: so that it happens where the schedule says, in the accumulator's own dtype and without a second copy. The
accumulator is found through the shard tensor, which is an input of every program: the buffer it belongs to hangs on it
as an attribute. Programs stay free of process-wide state, and equal layers stay equal programs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .ops import LIBRARY
from .units import Spec


class Accumulator(Protocol):
    """What hangs on a shard tensor (`state.FlatBuffer`)."""

    def accumulate(self, gshard: torch.Tensor, offsets: Iterable[int], scale: float) -> None: ...


_OWNER = "_mfsdp_buffer"
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By address of the shard's storage: autograd hands back detached aliases of what it saved under hooks."""


def own(shard: torch.Tensor, accumulator: Accumulator) -> None:
    """Makes gradients of the shard go to the accumulator."""
    setattr(shard, _OWNER, accumulator)
    if not shard.is_meta:
        _owners[shard.untyped_storage().data_ptr()] = accumulator


def owner(shard: torch.Tensor) -> Any:
    """The buffer that the shard tensor belongs to, or ``None``."""
    found = getattr(shard, _OWNER, None)
    if found is None and type(shard) is torch.Tensor and not shard.is_meta:
        found = _owners.get(shard.untyped_storage().data_ptr())
        if found is not None and found.main.shape != shard.shape:
            return None
    return found


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


def rank() -> int:
    """This process's rank in the default group, 0 when there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def initialized() -> bool:
    """Whether there is a default group."""
    return dist.is_available() and dist.is_initialized()


def default_group() -> str:
    """Name of the default group."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def reduced(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduces a tensor in place and returns it; ``op`` is ``"sum"``, ``"min"`` or ``"max"``."""
    ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    dist.all_reduce(tensor, ops[op], group=group)
    return tensor


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor of the group's first rank, in place."""
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return tensor


# Named *_single from torch 2.13 on, where the old names warn; tried on 2.11 to 2.13.
gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_under_way: dict[int, list[Any]] = {}


def _launched(out: torch.Tensor, works: list[Any]) -> None:
    _under_way[out.untyped_storage().data_ptr()] = works


def all_gather(shard: torch.Tensor, spec: str) -> torch.Tensor:
    """Launches the all-gather of a unit. ``shard``: [shard_numel]; returns [full_numel], not yet complete."""
    s = Spec.decode(spec)
    full = shard.new_empty(s.full_numel)
    group = process_group(s.group)
    works, start, at = [], 0, 0
    for chunk in s.splits:
        out, part = full[start : start + s.world * chunk], shard[at : at + chunk]
        works.append(gather_flat(out, part, group=group, async_op=True))
        start, at = start + s.world * chunk, at + chunk
    _launched(full, works)
    return full


def reduce_scatter(gfull: torch.Tensor, spec: str) -> torch.Tensor:
    """Launches the sum over ranks. ``gfull``: [full_numel]; returns [shard_numel], not yet complete."""
    s = Spec.decode(spec)
    gshard = gfull.new_empty(s.shard_numel)
    group = process_group(s.group)
    works, start, at = [], 0, 0
    for chunk in s.splits:
        part, out = gfull[start : start + s.world * chunk], gshard[at : at + chunk]
        works.append(scatter_flat(out, part, group=group, async_op=True))
        start, at = start + s.world * chunk, at + chunk
    _launched(gshard, works)
    return gshard


def all_reduce(gfull: torch.Tensor, spec: str) -> None:
    """Launches the sum over ranks, in place."""
    work = dist.all_reduce(gfull, group=process_group(Spec.decode(spec).group), async_op=True)
    _launched(gfull, [work])


def wait(out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Returns once ``out`` may be read (on CUDA: once the current stream is behind the collective)."""
    for work in _under_way.pop(out.untyped_storage().data_ptr()):
        work.wait()


def free(full: torch.Tensor) -> None:
    """Nothing: lowerings drop the node, and with it the last reference."""


def pack(grads: list[torch.Tensor], offsets: list[int], spec: str, scale: float) -> torch.Tensor:
    """Copies gradients to their places in a flat buffer, cast to the dtype that travels; zeros between them."""
    s = Spec.decode(spec)
    gfull = grads[0].new_empty(s.full_numel, dtype=s.precision.grad_comm)
    end, places = 0, []
    for grad, offset in sorted(zip(grads, offsets, strict=True), key=lambda pair: pair[1]):
        gfull[end:offset].zero_()
        end = offset + grad.numel()
        places.append((gfull[offset:end].view(grad.shape), grad))
    gfull[end:].zero_()
    if places:
        torch._foreach_copy_([p for p, _ in places], [g for _, g in places])
    if scale != 1.0:
        gfull.mul_(scale)
    return gfull


def accumulate(shard: torch.Tensor, gshard: torch.Tensor, offsets: list[int], scale: float) -> None:
    """Adds ``scale * gshard`` to the accumulator of the shard's buffer (Note [Accumulators])."""
    accumulator = owner(shard)
    if accumulator is None:
        raise RuntimeError(
            "mfsdp: backward got a copy of a shard instead of the shard. Saved-tensor hooks that copy what they are "
            "given (torch.autograd.graph.save_on_cpu) do not compose with a compiled sharded model."
        )
    accumulator.accumulate(gshard, offsets, scale)


def gather_now(shard: torch.Tensor, spec: str) -> torch.Tensor:
    """The complete full buffer, in the dtype that the model computes in. Never aliases the shard's storage
    unless the group has one member and no cast is needed.
    """
    s = Spec.decode(spec)
    flat = shard.detach().to(s.precision.comm)
    if s.world > 1:
        source, flat = flat, all_gather(flat, spec)
        wait(flat, [source])
    return flat.to(s.precision.compute)


def reduce_now(shard: torch.Tensor, grads: list[torch.Tensor], offsets: list[int], spec: str) -> None:
    """Packs, reduces and accumulates gradients at once."""
    s = Spec.decode(spec)
    gshard = pack(grads, offsets, spec, 1.0)
    if s.world > 1:
        gfull, gshard = gshard, reduce_scatter(gshard, spec)
        wait(gshard, [gfull])
    accumulate(shard, gshard, offsets, 1 / s.divide)


def param(shard: torch.Tensor, offset: int, shape: list[int], spec: str) -> torch.Tensor:
    """The marker's own meaning: gathers the unit and copies one parameter out."""
    full = gather_now(shard, spec)
    n = torch.Size(shape).numel()
    return full[offset : offset + n].view(shape).clone()


def param_grad(grad: torch.Tensor, shard: torch.Tensor, offset: int, spec: str) -> torch.Tensor:
    """The marker's own meaning: reduces one gradient; the result has the shard's shape and dtype."""
    s = Spec.decode(spec)
    gshard = pack([grad], [offset], spec, 1.0)
    if s.world > 1:
        gfull, gshard = gshard, reduce_scatter(gshard, spec)
        wait(gshard, [gfull])
    return gshard.to(shard.dtype).mul_(1 / s.divide)


for _kernel in (
    param, param_grad, all_gather, wait, free, pack, reduce_scatter, all_reduce, accumulate,
):  # fmt: skip
    LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
