"""The kernels of `ir.ops`. Each gets its execution, which holds what is in flight.

Values derived from a spec are computed once per (spec, slot) or (spec, lane), and views of a static buffer once per
place in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch

from ..config import block_grid
from ..config.reductions import reduction
from ..config.units import Axis, GroupIndex, UnitSpec
from ..ir.ops import LIBRARY, shape_after
from . import activation_host, block_scales, comm_formats, execution, static_buffers
from .buffer_registry import known, orphan, owner, path
from .execution import Execution
from .sync_collectives import gather_now, packed, reduced_over, summed
from .transport import segments

# Values derived from a spec


@dataclass(frozen=True, slots=True)
class _FullBuffer:
    """A full buffer, for parameters or gradients."""

    slot: str
    """Its static buffer; ``""`` for none."""
    numel: int
    dtype: torch.dtype
    splits: tuple[int, ...]
    ranks: int
    group: str
    """Process group of the gather."""
    wire: str | None
    """Communication format of the gather."""


@cache
def _full_buffer(spec: str, slot: int, kind: str, one_byte: bool = False) -> _FullBuffer:
    """``one_byte``: an FP8 payload is communicated, instead of the policy's dtype."""
    s = UnitSpec.decode(spec)
    name = f"{kind}{slot}" if slot >= 0 else ""
    dtype = torch.uint8 if one_byte else s.precision.comm if kind == "p" else s.precision.grad_comm
    return _FullBuffer(name, s.full_numel, dtype, s.splits, s.world, s.group, None if one_byte else s.precision.wire)


# Parameters


def refresh(run: Execution, source: torch.Tensor) -> None:
    """Launches the gather of persistent parameters, if main weights have changed since the last one."""
    if run.forward:
        known(source).weights.lasting.read_in_full()
    if run.early and (early := run.early.pop(0)) is not None:
        run.adopt(early)
        return
    buffer = known(source)
    if run.separate is not None:
        run.separate.refresh(run, buffer)
    run.launch(source, *buffer.weights.refresh())


def refresh_codes(
    run: Execution, code: torch.Tensor, source: torch.Tensor, key: str, back: bool, spec: str
) -> torch.Tensor:
    """Launches the gather of a persistent FP8 payload, if main weights have changed since the last one (Note
    [Persistent FP8]). ``code``: [main_numel]. Returns [source_numel], not yet complete, read-only.
    """
    codes, ends = known(source).weights.lasting.refresh(key, code, back)
    run.launch(codes, *ends)
    return codes


def all_gather(run: Execution, shard: torch.Tensor, spec: str, slot: int = -1) -> torch.Tensor:
    """Launches a unit's all-gather, or takes a prefetched one (Note [Step prefetch]). ``shard``: [shard_numel], or main
    weights, sent as their kept cast (Note [Kept casts]) or in a communication format. Returns [full_numel], not yet
    complete.
    """
    if run.early and (early := run.early.pop(0)) is not None:
        return run.adopt(early)
    quantised = shard.dtype.itemsize == 1
    r = _full_buffer(spec, slot, "p", quantised)
    sent = shard.view(torch.uint8) if quantised else shard
    if sent.dtype is not r.dtype and r.wire is None:
        sent = shard.detach().to(r.dtype) if (buffer := owner(shard)) is None else buffer.weights.cast()
    full = static_buffers.room(r.slot, r.numel, r.dtype, shard.device)
    if run.separate is not None:
        run.separate.gather(run, known(shard))
    run.launch(full, comm_formats.gather(run, segments(r.splits, r.ranks, full, sent), r.group, r.wire))
    return full.view(shard.dtype) if quantised else full


def maxima(run: Execution, shard: torch.Tensor, grids: str, spec: str) -> torch.Tensor:
    """Launches a unit's amax all-reduce, if due, with those of the program's other units (Note [Amax])."""
    weights = known(shard).weights
    out = torch.empty(sum(g.numel for g in block_grid.decode(grids)), device=shard.device)
    run.launch(out, *weights.maxima.read(grids, out, run.measured))
    return out


def spread(run: Execution, shard: torch.Tensor, scales: Sequence[torch.Tensor], grids: str, spec: str) -> torch.Tensor:
    """The scale of each main weight's block, [main_numel]; 1 outside of parameters."""
    weights = known(shard).weights
    out = torch.ones(UnitSpec.decode(spec).main_numel, dtype=scales[0].dtype, device=shard.device)
    for scale, one in zip(scales, block_grid.decode(grids), strict=True):
        rows, first = weights.rows(out, one.offset)
        block_scales.spread(scale.contiguous().view(-1), rows, first, one)
    return out


def cast(run: Execution, shard: torch.Tensor, spec: str) -> torch.Tensor:
    """The main weights in the communication dtype, in new memory: compilers may write to it. It is an operation because
    compilers skip the rounding of a value that they read again.
    """
    return known(shard).weights.main.detach().to(UnitSpec.decode(spec).precision.comm, copy=True)


def kept_cast(run: Execution, shard: torch.Tensor, spec: str) -> torch.Tensor:
    """The same, kept until main weights are written (Note [Kept casts]): read-only."""
    if (buffer := owner(shard)) is None:
        return shard.detach().to(UnitSpec.decode(spec).precision.comm)
    return buffer.weights.cast()


def wait(run: Execution, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Returns when ``out`` may be read (on CUDA: when the current stream waits for the collective)."""
    run.wait(out)


def free(full: torch.Tensor) -> None:
    """Does nothing: lowerings drop the node, and with it the last reference."""


# Gradients


def bucket(run: Execution, like: torch.Tensor, holes: Sequence[int], spec: str, slot: int = -1) -> torch.Tensor:
    """A bucket for a unit's gradients, [full_numel] in the communication dtype: zeros in holes, else uninitialized."""
    r = _full_buffer(spec, slot, "g")
    gfull = static_buffers.room(r.slot, r.numel, r.dtype, like.device)
    if run.held:
        run.held.discard(gfull.data_ptr())
    if run.separate is not None:
        run.separate.reducing[gfull.data_ptr()] = known(like)
    if holes:
        torch._foreach_zero_(static_buffers.views(gfull, _holes, tuple(holes)))  # type: ignore[arg-type]
    return gfull


def _holes(gfull: torch.Tensor, holes: Sequence[int]) -> list[torch.Tensor]:
    return [gfull[start:end] for start, end in zip(holes[::2], holes[1::2], strict=True)]


def pack(
    run: Execution, gfull: torch.Tensor, grads: Sequence[torch.Tensor], offsets: Sequence[int], scale: float
) -> None:
    """Copies gradients to their offsets, cast and scaled."""
    if grads:
        places = static_buffers.views(gfull, _places, tuple(offsets), tuple(map(_shape, grads)))
        torch._foreach_copy_(places, grads)  # type: ignore[arg-type]
        if scale != 1.0:
            torch._foreach_mul_(places, scale)  # type: ignore[call-overload]


_shape = attrgetter("shape")


def _places(gfull: torch.Tensor, offsets: Sequence[int], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    return [gfull[o : o + s.numel()].view(s) for o, s in zip(offsets, shapes, strict=True)]


def mm(
    run: Execution,
    gfull: torch.Tensor,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    a: torch.Tensor,
    b: torch.Tensor,
) -> None:
    """Writes ``a @ b`` to its place, in the bucket's dtype."""
    (place,) = static_buffers.views(gfull, _place, offset, tuple(size), tuple(stride))
    if place.dtype is a.dtype:
        torch.mm(a, b, out=place)
    else:
        multiply_wide(a, b, place)


def _place(gfull: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> list[torch.Tensor]:
    return [gfull.as_strided(size, stride, offset)]


def multiply_wide(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the product of 16-bit matrices in float32, without rounding in between; on CUDA. Not run yet: the schema
    (``aten::mm.dtype_out``) was read in 2.13.
    """
    torch.mm(a, b, out_dtype=out.dtype, out=out)


def hold(run: Execution, source: torch.Tensor, grads: torch.Tensor, offsets: Sequence[int]) -> None:
    """Keeps gradients unreduced, or adds unreduced ones to them."""
    held, key = run.held, grads.data_ptr()
    if (buffer := owner(source)) is None and orphan(source):
        return  # the model is gone
    if key not in held and (buffer or known(source)).gradients.hold(grads, offsets):
        held.add(key)  # the key is present if an earlier reduction was skipped


def add_tangent(run: Execution, grad: torch.Tensor, tangent: torch.Tensor | None) -> None:
    """Adds what the caller's gradient of a result contributes, in place (Note [Optional tangents]). ``grad``:
    contiguous, of as many elements.
    """
    if tangent is not None:
        grad.view(tangent.shape).add_(tangent)


def reduce_scatter(run: Execution, gfull: torch.Tensor, spec: str, lane: int) -> torch.Tensor:
    """Launches the sum over ranks. ``gfull``: [full_numel], on an outer lane [shard_numel]. Returns this rank's part,
    not yet complete.
    """
    r, held = reduction(spec, lane), run.held
    gshard = torch.empty(r.numel, dtype=r.dtype, device=gfull.device)
    if held:
        held.discard(gshard.data_ptr())
        if gfull.data_ptr() in held:
            held.remove(gfull.data_ptr())
            held.add(gshard.data_ptr())
            run.launch(gshard)
            return gshard
    if run.separate is not None:
        return run.separate.reduce_scatter(run, gfull, gshard, spec, lane)
    run.launch(gshard, comm_formats.scatter(run, segments(r.splits, r.ranks, gfull, gshard), r.sum, r.group, r.wire))
    return gshard


def all_reduce(run: Execution, gfull: torch.Tensor, spec: str, lane: int) -> None:
    """Launches the sum over ranks, in place."""
    if gfull.data_ptr() in run.held:
        run.launch(gfull)
        return
    if run.separate is not None:
        run.separate.all_reduce(run, gfull, reduction(spec, lane))
        return
    run.launch(gfull, summed(gfull, reduction(spec, lane)))


def accumulate(
    run: Execution,
    shard: torch.Tensor,
    gshard: torch.Tensor,
    offsets: Sequence[int],
    scale: float,
    reused: bool = False,
) -> None:
    """Adds ``scale * gshard`` to the accumulator of the shard's buffer (Note [Accumulators]), or makes ``gshard`` the
    accumulator, unless a compiler reuses its memory later (``reused``).
    """
    if (buffer := owner(shard)) is None and orphan(shard):
        return  # the model is gone
    held = run.held
    if held and gshard.data_ptr() in held:
        held.remove(gshard.data_ptr())
    else:
        total = gshard.detach() if reused else gshard  # an alias shares memory
        (buffer or known(shard)).gradients.accumulate(total, offsets, scale)


# Runtime checks


def probe(
    run: Execution,
    value: torch.Tensor,
    source: torch.Tensor | None,
    starts: Sequence[int],
    sizes: Sequence[int],
    names: str,
    what: str,
) -> None:
    """Checks a value, if a check is due (Note [Runtime checks]).

    Args:
        value: the value; under ``"weights"`` the source.
        source: where the unit's parameters are read from; ``None`` if they are not sharded, or none are read.
        starts: where the unit's parameters begin in a flat value; empty: it is this rank's rows of them, or not flat.
        sizes: their elements.
        names: their names, separated by commas.
        what: see `runtime_checks.Place`.
    """
    if run.check is not None:
        run.check.probe(run, value, source, starts, sizes, names, what)


# The host


def offload(run: Execution, x: torch.Tensor) -> torch.Tensor:
    """Launches the copy of a tensor to the host, with the same strides (Note [Activation memory on the host])."""
    out, end = activation_host.offload(x)
    run.copy(out, end)
    return out


def reload(run: Execution, x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Launches the copy of a host tensor to a device."""
    out, end = activation_host.reload(x, device)
    run.copy(out, end)
    return out


# Other parallelisms


def collective(
    run: Execution,
    source: torch.Tensor,
    verb: str,
    axis: str,
    received: Sequence[int],
    splits: Sequence[int],
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launches a collective of another parallelism.

    Args:
        source: this rank's input.
        verb: ``"all_reduce OP"``, ``"all_gather"``, ``"reduce_scatter OP"`` (along dimension 0, as
            ``_c10d_functional``'s) or ``"all_to_all"``; OP is ``sum``, ``avg``, ``max`` or ``min``.
        axis: the ranks, an `Axis` as text.
        received: of an all-to-all: rows from each rank; empty: equal parts.
        splits: rows to each rank.
        order: for compilers (`lowering.keep_order`).

    Returns:
        the result, not yet complete.
    """
    over, (kind, _, op) = Axis.decode(axis), verb.partition(" ")
    source = source.contiguous()
    out = _apart(source, shape_after(source, verb, over, received))
    if kind == "all_reduce":
        out.copy_(source)
        end = run.all_reduce(out, "sum" if op == "avg" else op, over.group)
    elif kind == "all_gather":
        end = run.gather([(out.view(-1), source.view(-1))], over.group)
    elif kind == "reduce_scatter":
        end = run.scatter([(source.view(-1), out.view(-1))], source.dtype, over.group)
    else:
        even = [source.shape[0] // over.ranks] * over.ranks
        end = run.all_to_all(out, source, received or even, splits or even, over.group)

    def complete(reads: torch.Tensor = source) -> None:  # keeps a contiguous copy alive
        end()
        if op == "avg":
            out.div_(over.ranks)

    run.launch(out, complete)
    if run.turn is not None:
        run.exchanges.add(out.untyped_storage().data_ptr())
    return out


def _apart(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Memory with an address of its own, also if empty (an expert without tokens)."""
    numel = prod(shape)
    return like.new_empty(max(numel, 1))[:numel].view(shape)


# Markers that no pass has rewritten


def param(shard: torch.Tensor, offset: int, shape: list[int], spec: str) -> torch.Tensor:
    """Runs the marker by itself: gathers the unit and copies one parameter out."""
    if not execution.in_program():
        _warn_of_another_backend(path(shard))
    full = gather_now(shard, spec)
    n = torch.Size(shape).numel()
    return full[offset : offset + n].view(shape).clone()


def _warn_of_another_backend(unit: str) -> None:
    """Warns once: markers run outside of programs, so another backend has compiled the model."""
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
    """Runs the marker by itself: one gradient in the shape and dtype of the tensor read, reduced if that is a shard;
    `sync_collectives.reduce_rest` does the rest.
    """
    s = UnitSpec.decode(spec)
    gfull = packed([grad], [offset], s, grad.device)
    if s.gathers:
        with execution.announced(f"reduction of {path(shard)} at {offset}", s.group):
            gfull = reduced_over(gfull, reduction(spec, GroupIndex.SHARD_GATHER))
    return gfull.to(shard.dtype).mul_(1 / s.divide)


def returned(param: torch.Tensor) -> torch.Tensor:
    """A copy. Not ``clone``, which Inductor removes where it takes it for redundant."""
    return param.clone()


def _shown(kernel: Callable[..., Any], run: Execution, *args: Any) -> Any:
    return run.show(kernel, *args)


for _marker in (param, param_grad, returned, free):
    LIBRARY.impl(_marker.__name__, _marker, "CompositeExplicitAutograd")
_KERNELS = (
    refresh, refresh_codes, maxima, spread, cast, kept_cast, all_gather, wait, bucket, pack, mm, hold, add_tangent,
    reduce_scatter, all_reduce, accumulate, collective, probe, offload, reload,
)  # fmt: skip
for _kernel in _KERNELS:
    LIBRARY.impl(_kernel.__name__, execution.dispatched(_kernel), "CompositeExplicitAutograd")

SHOWN = SimpleNamespace(**{k.__name__: partial(_shown, k) for k in _KERNELS})
"""The same, for observed programs (Note [Names])."""
