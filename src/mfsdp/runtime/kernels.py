"""The kernels behind `graph.ops`. What they have under way is kept by the run that they belong to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

import torch

from ..graph.ops import LIBRARY, shape_after
from ..spec.units import Axis, Spec
from . import runs, slots
from .immediate import gather_now, packed, scattered, summed
from .owners import orphan, owner, path
from .transport import segments

# Parameters


def refresh(source: torch.Tensor) -> None:
    """Launches the gather of parameters that last, if their main weights have changed since."""
    runs.current().launch(source, *owner(source).weights.refresh())


def all_gather(shard: torch.Tensor, spec: str, slot: int = -1) -> torch.Tensor:
    """Launches the all-gather of a unit. ``shard``: [shard_numel]; returns [full_numel], not yet complete."""
    s, run = Spec.decode(spec), runs.current()
    full = slots.room(f"p{slot}" if slot >= 0 else "", s.full_numel, shard.dtype, shard.device)
    run.launch(full, run.gather(segments(s.splits, s.world, full, shard), s.group))
    return full


def wait(out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Returns once ``out`` may be read (on CUDA: once the current stream is behind the collective)."""
    runs.current().wait(out)


def free(full: torch.Tensor) -> None:
    """Nothing: lowerings drop the node, and with it the last reference."""


# Gradients


def bucket(like: torch.Tensor, holes: list[int], spec: str, slot: int = -1) -> torch.Tensor:
    """Room for a unit's gradients, [full_numel] in the dtype that travels; zeros in the holes, nothing elsewhere."""
    s = Spec.decode(spec)
    gfull = slots.room(f"g{slot}" if slot >= 0 else "", s.full_numel, s.precision.grad_comm, like.device)
    runs.current().held.discard(gfull.data_ptr())
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
    """Writes ``a @ b`` to its place, in the dtype of that."""
    place = gfull.as_strided(size, stride, offset)
    if place.dtype is a.dtype:
        torch.mm(a, b, out=place)
    else:
        multiply_wide(a, b, place)


def multiply_wide(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the product of 16-bit matrices in float32, without rounding in between; on CUDA. Not run yet: the schema
    (``aten::mm.dtype_out``) was read in 2.13.
    """
    torch.mm(a, b, out_dtype=out.dtype, out=out)


def hold(source: torch.Tensor, grads: torch.Tensor, offsets: list[int]) -> None:
    """Keeps gradients back, or adds what was kept back to them."""
    held, key = runs.current().held, grads.data_ptr()
    if key not in held and owner(source).gradients.hold(grads, offsets):
        held.add(key)  # where it is there, an earlier reduction has not happened


def reduce_scatter(gfull: torch.Tensor, spec: str, lane: int) -> torch.Tensor:
    """Launches the sum over ranks. ``gfull``: [full_numel], on an outer lane [shard_numel]; returns this rank's part,
    not yet complete.
    """
    s, run = Spec.decode(spec), runs.current()
    gshard = gfull.new_empty(sum(s.cut(lane)), dtype=s.scattered(lane))
    run.held.discard(gshard.data_ptr())
    if gfull.data_ptr() in run.held:
        run.held.remove(gfull.data_ptr())
        run.held.add(gshard.data_ptr())
        run.launch(gshard)
        return gshard
    pairs = segments(s.cut(lane), s.outer if lane >= 2 else s.world, gfull, gshard)
    run.launch(gshard, run.scatter(pairs, s.sum(lane), s.groups[lane]))
    return gshard


def all_reduce(gfull: torch.Tensor, spec: str, lane: int) -> None:
    """Launches the sum over ranks, in place."""
    run = runs.current()
    if gfull.data_ptr() in run.held:
        run.launch(gfull)
    else:
        run.launch(gfull, summed(gfull, Spec.decode(spec), lane))


def accumulate(shard: torch.Tensor, gshard: torch.Tensor, offsets: list[int], scale: float) -> None:
    """Adds ``scale * gshard`` to the accumulator of the shard's buffer (Note [Accumulators])."""
    buffer = owner(shard)
    if buffer is None:
        if orphan(shard):
            return  # the model is gone
        raise RuntimeError(
            "mfsdp: backward got a copy of a shard instead of the shard. Saved-tensor hooks that copy what they are "
            "given (torch.autograd.graph.save_on_cpu) do not compose with a compiled sharded model."
        )
    held = runs.current().held
    if gshard.data_ptr() in held:
        held.remove(gshard.data_ptr())
    else:
        buffer.gradients.accumulate(gshard, offsets, scale)


# Other parallelisms


def collective(
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
    over, run, (kind, _, op) = Axis.decode(axis), runs.current(), verb.partition(" ")
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
    return out


def _apart(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Room with an address of its own, also if it is empty (an expert without tokens)."""
    numel = prod(shape)
    return like.new_empty(max(numel, 1))[:numel].view(shape)


# Markers that no pass has seen


def param(shard: torch.Tensor, offset: int, shape: list[int], spec: str) -> torch.Tensor:
    """The marker's own meaning: gathers the unit and copies one parameter out."""
    if not runs.in_program():
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
    s = Spec.decode(spec)
    gfull = packed([grad], [offset], s)
    if s.gathers:
        with runs.announced(f"reduction of {path(shard)} at {offset}", s.group):
            gfull = scattered(gfull, s, 0)
    return gfull.to(shard.dtype).mul_(1 / s.divide)


def returned(param: torch.Tensor) -> torch.Tensor:
    """A copy. Not ``clone``, which Inductor takes out where it thinks that nobody will notice."""
    return param.clone()


for _marker in (param, param_grad, returned, free):
    LIBRARY.impl(_marker.__name__, _marker, "CompositeExplicitAutograd")
for _local in (wait, bucket, pack, mm, hold, accumulate):
    LIBRARY.impl(_local.__name__, runs.shown(_local, launches=False), "CompositeExplicitAutograd")
for _collective in (refresh, all_gather, reduce_scatter, all_reduce, collective):
    LIBRARY.impl(_collective.__name__, runs.shown(_collective, launches=True), "CompositeExplicitAutograd")
