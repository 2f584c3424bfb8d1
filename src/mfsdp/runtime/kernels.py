"""The kernels behind `ir.ops`, each with the run that it is part of, which keeps what they have under way.

What they need of a unit's spec is resolved once for each (spec, slot) or (spec, lane), and views of a static buffer are
made once for each place in it.
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
from ..config.units import Axis, UnitSpec
from ..ir.ops import LIBRARY, shape_after
from . import activation_host, comm_formats, execution, join, static_buffers
from . import block_scales as grids_of
from .buffer_registry import orphan, owner, path
from .execution import Execution
from .sync_collectives import gather_now, packed, scattered, summed
from .transport import Pairs, parts

# What is resolved once


@dataclass(frozen=True, slots=True)
class _Room:
    """A full buffer: of parameters to be gathered, or of gradients."""

    slot: str
    """Its static buffer, ``""`` for none."""
    numel: int
    dtype: torch.dtype
    splits: tuple[int, ...]
    ranks: int
    group: str
    """That gathers."""
    wire: str | None
    """The format that it gathers in."""


@cache
def _room(spec: str, slot: int, kind: str, one_byte: bool = False) -> _Room:
    """``one_byte``: whether that travels, instead of what the policy says."""
    s = UnitSpec.decode(spec)
    name = f"{kind}{slot}" if slot >= 0 else ""
    dtype = torch.uint8 if one_byte else s.precision.comm if kind == "p" else s.precision.grad_comm
    return _Room(name, s.full_numel, dtype, s.splits, s.world, s.group, None if one_byte else s.precision.wire)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduce-scatter on a lane: what it gives, and how it adds up."""

    numel: int
    dtype: torch.dtype
    sum: torch.dtype
    splits: tuple[int, ...]
    ranks: int
    group: str
    wire: str | None


@cache
def _reduction(spec: str, lane: int) -> _Reduction:
    s = UnitSpec.decode(spec)
    cut = s.splits_on(lane)
    ranks, wire = s.outer if lane >= 2 else s.world, s.precision.grad_wire
    return _Reduction(sum(cut), s.scatter_dtype(lane), s.sum_dtype(lane), cut, ranks, s.reduce_group_on(lane), wire)


# Parameters


def refresh(run: Execution, source: torch.Tensor) -> None:
    """Launches the gather of parameters that last, if their main weights have changed since."""
    if run.early and (early := run.early.pop(0)) is not None:
        run.adopt(early)
        return
    buffer = owner(source)
    run.launch(source, *(join.refresh(run, buffer) if run.loose else buffer.weights.refresh()))


def refresh_codes(
    run: Execution, code: torch.Tensor, source: torch.Tensor, key: str, back: bool, spec: str
) -> torch.Tensor:
    """Launches the gather of codes that last, if main weights have changed since (Note [Persistent FP8]). ``code``:
    [main_numel]; returns [source_numel], not yet complete. Nobody may write to it.
    """
    codes, ends = _known(owner(source)).weights.lasting.refresh(key, code, back)
    run.launch(codes, *ends)
    return codes  # type: ignore[no-any-return]


def all_gather(run: Execution, shard: torch.Tensor, spec: str, slot: int = -1) -> torch.Tensor:
    """Launches the all-gather of a unit. ``shard``: [shard_numel], or main weights whose cast is kept (Note [Kept
    casts]), or that travel in a format of their own; returns [full_numel], not yet complete. What was launched ahead is
    taken (Note [Step prefetch]).
    """
    if run.early and (early := run.early.pop(0)) is not None:
        return run.adopt(early)
    quantised = shard.dtype.itemsize == 1
    r = _room(spec, slot, "p", quantised)
    sent = shard.view(torch.uint8) if quantised else shard
    if sent.dtype is not r.dtype and r.wire is None:
        sent = shard.detach().to(r.dtype) if (buffer := owner(shard)) is None else buffer.weights.cast()
    full = static_buffers.room(r.slot, r.numel, r.dtype, shard.device)
    if run.loose:
        join.gather(run, _known(owner(shard)))
    run.launch(full, comm_formats.gather(run, _pairs(r, full, sent), r.group, r.wire))
    return full.view(shard.dtype) if quantised else full


def maxima(run: Execution, shard: torch.Tensor, grids: str, spec: str) -> torch.Tensor:
    """Launches what is due of a unit's maxima (Note [Amax]), and of those of the program's other units."""
    weights = _known(owner(shard)).weights
    out = torch.empty(sum(g.numel for g in block_grid.decode(grids)), device=shard.device)
    run.launch(out, *weights.maxima.read(grids, out, run.measured))
    return out


def spread(run: Execution, shard: torch.Tensor, scales: Sequence[torch.Tensor], grids: str, spec: str) -> torch.Tensor:
    """For every element of the main weights the scale of its block, [main_numel]; 1 where no parameter is."""
    weights = _known(owner(shard)).weights
    out = torch.ones(UnitSpec.decode(spec).main_numel, dtype=scales[0].dtype, device=shard.device)
    for scale, one in zip(scales, block_grid.decode(grids), strict=True):
        rows, first = weights.rows(out, one.offset)
        grids_of.spread(scale.contiguous().view(-1), rows, first, one)
    return out


def cast(run: Execution, shard: torch.Tensor, spec: str) -> torch.Tensor:
    """The main weights in the dtype that travels, in memory of their own: compilers may write to it. An operation,
    because they do not round what they read again.
    """
    return _known(owner(shard)).weights.main.detach().to(UnitSpec.decode(spec).precision.comm, copy=True)  # type: ignore[no-any-return]


def kept_cast(run: Execution, shard: torch.Tensor, spec: str) -> torch.Tensor:
    """The same, kept until main weights are written (Note [Kept casts]): nobody may write to it."""
    if (buffer := owner(shard)) is None:
        return shard.detach().to(UnitSpec.decode(spec).precision.comm)
    return buffer.weights.cast()  # type: ignore[no-any-return]


def _pairs(r: _Room | _Reduction, full: torch.Tensor, shard: torch.Tensor) -> Pairs:
    """The segments that travel together, as `transport.segments`; those of a static buffer are cut once."""
    if len(r.splits) == 1:
        return [(full, shard)]
    return list(zip(static_buffers.views(full, parts, r.splits, r.ranks), parts(shard, r.splits, 1), strict=True))


def wait(run: Execution, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Returns once ``out`` may be read (on CUDA: once the current stream is behind the collective)."""
    run.wait(out)


def free(full: torch.Tensor) -> None:
    """Nothing: lowerings drop the node, and with it the last reference."""


# Gradients


def bucket(run: Execution, like: torch.Tensor, holes: Sequence[int], spec: str, slot: int = -1) -> torch.Tensor:
    """Room for a unit's gradients, [full_numel] in the dtype that travels; zeros in the holes, nothing elsewhere."""
    r = _room(spec, slot, "g")
    gfull = static_buffers.room(r.slot, r.numel, r.dtype, like.device)
    if run.held:
        run.held.discard(gfull.data_ptr())
    if run.loose:
        run.reducing[gfull.data_ptr()] = _known(owner(like))
    if holes:
        torch._foreach_zero_(static_buffers.views(gfull, _holes, tuple(holes)))  # type: ignore[arg-type]
    return gfull


def _holes(gfull: torch.Tensor, holes: Sequence[int]) -> list[torch.Tensor]:
    return [gfull[start:end] for start, end in zip(holes[::2], holes[1::2], strict=True)]


def pack(
    run: Execution, gfull: torch.Tensor, grads: Sequence[torch.Tensor], offsets: Sequence[int], scale: float
) -> None:
    """Copies gradients to their places, cast and scaled."""
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
    """Writes ``a @ b`` to its place, in the dtype of that."""
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
    """Keeps gradients back, or adds what was kept back to them."""
    held, key = run.held, grads.data_ptr()
    if key not in held and owner(source).gradients.hold(grads, offsets):
        held.add(key)  # where it is there, an earlier reduction has not happened


def reduce_scatter(run: Execution, gfull: torch.Tensor, spec: str, lane: int) -> torch.Tensor:
    """Launches the sum over ranks. ``gfull``: [full_numel], on an outer lane [shard_numel]; returns this rank's part,
    not yet complete.
    """
    r, held = _reduction(spec, lane), run.held
    gshard = torch.empty(r.numel, dtype=r.dtype, device=gfull.device)
    if held:
        held.discard(gshard.data_ptr())
        if gfull.data_ptr() in held:
            held.remove(gfull.data_ptr())
            held.add(gshard.data_ptr())
            run.launch(gshard)
            return gshard
    if run.loose:
        return join.reduce_scatter(run, gfull, gshard, UnitSpec.decode(spec), lane)
    run.launch(gshard, comm_formats.scatter(run, _pairs(r, gfull, gshard), r.sum, r.group, r.wire))
    return gshard


def all_reduce(run: Execution, gfull: torch.Tensor, spec: str, lane: int) -> None:
    """Launches the sum over ranks, in place."""
    if gfull.data_ptr() in run.held:
        run.launch(gfull)
        return
    if run.loose:
        join.all_reduce(run, gfull, UnitSpec.decode(spec), lane)
        return
    run.launch(gfull, summed(gfull, UnitSpec.decode(spec), lane))


def accumulate(
    run: Execution,
    shard: torch.Tensor,
    gshard: torch.Tensor,
    offsets: Sequence[int],
    scale: float,
    reused: bool = False,
) -> None:
    """Adds ``scale * gshard`` to the accumulator of the shard's buffer (Note [Accumulators]), or makes it that; not
    where a compiler gives its memory to another value afterwards (``reused``).
    """
    buffer = owner(shard)
    if buffer is None and orphan(shard):
        return  # the model is gone
    buffer = _known(buffer)
    held = run.held
    if held and gshard.data_ptr() in held:
        held.remove(gshard.data_ptr())
    else:
        buffer.gradients.accumulate(gshard.detach() if reused else gshard, offsets, scale)  # an alias: it is shared


def _known(buffer: Any) -> Any:
    """The owner of a shard, if there is one."""
    if buffer is None:
        raise RuntimeError(
            "mfsdp: backward got a copy of a shard instead of the shard. Saved-tensor hooks that copy what they are "
            "given (torch.autograd.graph.save_on_cpu) do not compose with a compiled sharded model."
        )
    return buffer


# Probes


def probe(
    run: Execution,
    value: torch.Tensor,
    source: torch.Tensor | None,
    starts: Sequence[int],
    sizes: Sequence[int],
    names: str,
    what: str,
) -> None:
    """Looks at a value, if it is time (Note [Runtime checks]).

    Args:
        value: what to look at; under ``"weights"`` the source.
        source: what the unit's parameters are read from; ``None``, if they are not sharded, or none are read.
        starts: where the unit's parameters begin in a flat value; empty: it is this rank's rows of them, or not flat.
        sizes: their elements.
        names: their names, with commas between.
        what: see `probes.Place`.
    """
    if run.looking is not None:
        run.looking.look(run, value, source, starts, sizes, names, what)


# The host


def offload(run: Execution, x: torch.Tensor) -> torch.Tensor:
    """Launches the copy of a tensor to host memory, where it lies as it does here (Note [Activation memory on the
    host]).
    """
    out, end = activation_host.offload(x)
    run.copy(out, end)
    return out


def reload(run: Execution, x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Launches the copy of what lies on the host to a device."""
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
        source: what this rank gives.
        verb: ``"all_reduce OP"``, ``"all_gather"``, ``"reduce_scatter OP"`` (along dimension 0, as
            ``_c10d_functional``'s) or ``"all_to_all"``; OP is ``sum``, ``avg``, ``max`` or ``min``.
        axis: over which ranks, an `Axis` as text.
        received: of an all-to-all: how many rows come from each rank; empty: equal parts.
        splits: how many go to each.
        order: for compilers (`lowering.keep_order`).

    Returns:
        what is not complete yet.
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

    def complete(reads: torch.Tensor = source) -> None:  # which may be a copy of ours
        end()
        if op == "avg":
            out.div_(over.ranks)

    run.launch(out, complete)
    if run.turn is not None:
        run.exchanges.add(out.untyped_storage().data_ptr())
    return out


def _apart(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Room with an address of its own, also if it is empty (an expert without tokens)."""
    numel = prod(shape)
    return like.new_empty(max(numel, 1))[:numel].view(shape)


# Markers that no pass has seen


def param(shard: torch.Tensor, offset: int, shape: list[int], spec: str) -> torch.Tensor:
    """The marker's own meaning: gathers the unit and copies one parameter out."""
    if not execution.in_program():
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
    is a shard; `immediate.reduce_rest` does the rest.
    """
    s = UnitSpec.decode(spec)
    gfull = packed([grad], [offset], s, grad.device)
    if s.gathers:
        with execution.announced(f"reduction of {path(shard)} at {offset}", s.group):
            gfull = scattered(gfull, s, 0)
    return gfull.to(shard.dtype).mul_(1 / s.divide)


def returned(param: torch.Tensor) -> torch.Tensor:
    """A copy. Not ``clone``, which Inductor takes out where it thinks that nobody will notice."""
    return param.clone()


def _shown(kernel: Callable[..., Any], run: Execution, *args: Any) -> Any:
    return run.show(kernel, *args)


for _marker in (param, param_grad, returned, free):
    LIBRARY.impl(_marker.__name__, _marker, "CompositeExplicitAutograd")
_KERNELS = (
    refresh, refresh_codes, maxima, spread, cast, kept_cast, all_gather, wait, bucket, pack, mm, hold, reduce_scatter,
    all_reduce, accumulate, collective, probe, offload, reload,
)  # fmt: skip
for _kernel in _KERNELS:
    LIBRARY.impl(_kernel.__name__, execution.dispatched(_kernel), "CompositeExplicitAutograd")

SHOWN = SimpleNamespace(**{k.__name__: partial(_shown, k) for k in _KERNELS})
"""The same for programs that somebody looks at (Note [Names])."""
