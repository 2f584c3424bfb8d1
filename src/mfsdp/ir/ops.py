"""The operations of programs: schemas, fake kernels, derivatives. The kernels are in `runtime`.

Two operations are markers, the only ones in a model's own trace:

    param(shard, offset, shape, spec)         parameter at `offset` of the unit's full buffer
    param_grad(grad, shard, offset, spec)     its derivative: the gradient of that parameter

Each marker's kernel works by itself (gathers the unit and cuts out one parameter; reduces one gradient). So a traced
program runs before the first pass, and every pass can be compared with the one before. Passes insert the others:

    returned(param) -> copy                   copy of a parameter that forward returns, in its own memory
    refresh(source)                           re-gathers persistent parameters after an optimizer step; launched,
                                              not finished
    refresh_codes(code, source, key, back, spec) -> codes   the same for FP8 payloads, from this rank's rows of `code`
                                              (Note [Persistent FP8]); a backward reads the weights of its forward;
                                              launched, not finished
    all_gather(shard, spec, slot) -> full     launched, not finished; gathers main weights in the communication dtype
                                              (through a kept cast, Note [Kept casts]) and FP8 payloads as they are
    maxima(shard, grids, spec) -> found       amax of every block over all ranks, float32; launched, not finished;
                                              communicated once per optimizer step (Note [Amax])
    spread(shard, scales, grids, spec) -> flat    the scale of its block for every element of main weights
    cast(shard, spec) -> flat                 main weights rounded to the communication dtype, before FP8; compilers
                                              cannot fuse the rounding away. Other casts are `convert_element_type`
    kept_cast(shard, spec) -> flat            the same, kept until main weights are written (Note [Kept casts]);
                                              read-only
    wait(out, inputs)                         out is complete; inputs must live until here
    free(full)                                the buffer's life ends: behind its last reader, where generated code drops
                                              the last reference instead
    bucket(like, holes, spec, slot) -> gfull  allocates a unit's gradient buffer, with zeros in the holes (start, end,
                                              start, ...)
    pack(gfull, grads, offsets, scale)        copies gradients to their offsets, times scale
    mm(gfull, offset, size, stride, a, b)     writes a matrix product to its place, in the buffer's dtype (`multiplies`)
    hold(source, grads, offsets)              under `no_sync`: keeps grads unreduced, and the reductions of them that
                                              follow do nothing; at a synchronisation: adds what was kept to grads
    add_tangent(grad, tangent)                adds a tangent to a gradient, if the caller gave one (Note [Optional
                                              tangents])
    reduce_scatter(gfull, spec, lane) -> gshard   sum over ranks; launched, not finished
    all_reduce(gfull, spec, lane)             sum over ranks, in place; launched, not finished
    accumulate(shard, gshard, offsets, scale, reused)   adds scale * gshard to the shard's accumulator; the parameters
                                              at `offsets` have a gradient now. The first gshard of a step may become
                                              the accumulator (Note [Accumulator memory]), unless a compiler reuses its
                                              memory
    collective(source, verb, axis, received, splits, order) -> out   of another parallelism; launched, not finished
    offload(x) -> host                        copy of x in host memory, with its strides; launched, not finished
    reload(host, device) -> x                 copy back to the device; launched, not finished
    probe(value, source, starts, sizes, names, what)   in some steps, checks that the value is finite and equal on ranks
                                              that share it; changes nothing (Note [Runtime checks])

``slot`` is the number of a static buffer (`mfsdp.passes.plan_memory`), -1 for memory of its own. ``lane`` is a
`GroupIndex`, not a `Lane` of the listing: a process group of the spec, 0 and 1 on the shard axis, 2 and 3 on the outer.
All operations are stateless except `refresh`, `refresh_codes`, `hold` and `accumulate`; their state is found through
the tensor that programs read parameters from (Note [Accumulators]).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..config import block_grid
from ..config.units import Axis, UnitSpec

LIBRARY = torch.library.Library("mfsdp", "DEF")

_FLEXIBLE = (torch.Tag.flexible_layout,)


def _defined(schema: str, tags: Sequence[torch.Tag] = ()) -> Any:
    """Defines an operation, and returns it."""
    LIBRARY.define(schema, tags=tags)
    return getattr(torch.ops.mfsdp, schema.partition("(")[0]).default


param = _defined("param(Tensor shard, int offset, SymInt[] shape, str spec) -> Tensor")
param_grad = _defined("param_grad(Tensor grad, Tensor shard, int offset, str spec) -> Tensor")
returned = _defined("returned(Tensor param) -> Tensor")
refresh = _defined("refresh(Tensor(a!) source) -> ()")
refresh_codes = _defined("refresh_codes(Tensor code, Tensor source, str key, bool back, str spec) -> Tensor")
all_gather = _defined("all_gather(Tensor shard, str spec, int slot=-1) -> Tensor")
maxima = _defined("maxima(Tensor shard, str grids, str spec) -> Tensor")
spread = _defined("spread(Tensor shard, Tensor[] scales, str grids, str spec) -> Tensor")
cast = _defined("cast(Tensor shard, str spec) -> Tensor")
kept_cast = _defined("kept_cast(Tensor shard, str spec) -> Tensor")
wait = _defined("wait(Tensor(a!) out, Tensor[] inputs) -> ()", _FLEXIBLE)
free = _defined("free(Tensor(a!) full) -> ()")
bucket = _defined("bucket(Tensor like, int[] holes, str spec, int slot=-1) -> Tensor", _FLEXIBLE)
pack = _defined("pack(Tensor(a!) gfull, Tensor[] grads, int[] offsets, float scale) -> ()", _FLEXIBLE)
mm = _defined("mm(Tensor(a!) gfull, int offset, int[] size, int[] stride, Tensor a, Tensor b) -> ()", _FLEXIBLE)
hold = _defined("hold(Tensor source, Tensor(a!) grads, int[] offsets) -> ()")
add_tangent = _defined("add_tangent(Tensor(a!) grad, Tensor? tangent) -> ()")
reduce_scatter = _defined("reduce_scatter(Tensor gfull, str spec, int lane) -> Tensor")
all_reduce = _defined("all_reduce(Tensor(a!) gfull, str spec, int lane) -> ()")
collective = _defined(
    "collective(Tensor source, str verb, str axis, SymInt[] received, SymInt[] splits, Tensor(a!)? order=None)"
    " -> Tensor",
    _FLEXIBLE,  # a copy with other strides is not what `wait` keeps
)
accumulate = _defined(
    "accumulate(Tensor shard, Tensor(a!) gshard, int[] offsets, float scale, bool reused=False) -> ()"
)
offload = _defined("offload(Tensor x) -> Tensor")
reload = _defined("reload(Tensor host, Device device) -> Tensor")
probe = _defined(  # writes nothing, but says so: compilers drop pure operations without results
    "probe(Tensor(a!) value, Tensor? source, int[] starts, int[] sizes, str names, str what) -> ()",
    _FLEXIBLE,
)

OURS = (refresh, refresh_codes, maxima, all_gather, reduce_scatter, all_reduce)
"""Collectives of data parallelism, each of one unit."""

COLLECTIVES = (*OURS, collective)

HOST = (offload, reload)
"""Copies to and from host memory, without other ranks."""

LAUNCHED = (*COLLECTIVES, *HOST)
"""Operations that run concurrently with compute and complete at a wait."""

IN_PLACE = (refresh, all_reduce)
"""Collectives that write to their first argument and return nothing."""

SHOWN = (wait, spread, cast, kept_cast, bucket, pack, mm, hold, add_tangent, accumulate, probe, *LAUNCHED)
"""Operations that instrumentation shows."""

SLOT = {all_gather: 2, bucket: 3}
"""Operations that may fill a static buffer, and the index of that argument."""


def multiplies(product: torch.Tensor, dtype: torch.dtype, wide: bool | None = None) -> bool:
    """Whether `mm` can write the product in that dtype: its own, or float32 for 16 bits if ``wide``; ``None``: if the
    device can.
    """
    narrow = product.dtype in (torch.bfloat16, torch.float16) and dtype is torch.float32
    return product.dtype is dtype or (narrow and (widens(product.device) if wide is None else wide))


def gathered(shard: torch.Tensor, spec: UnitSpec) -> torch.dtype:
    """Dtype of an all-gather's result: the policy's, or an FP8 payload's own."""
    return shard.dtype if shard.dtype.itemsize == 1 else spec.precision.comm


def widens(device: torch.device) -> bool:
    """Whether torch multiplies 16-bit matrices into float32: on CUDA yes; on CPUs no; on ROCm not in all builds."""
    return device.type == "cuda" and torch.version.hip is None


def _returns_nothing(*args: object, **kwargs: object) -> None: ...


for _operator in (refresh, hold, add_tangent, pack, mm, wait, free, all_reduce, accumulate, probe):
    torch.library.register_fake(_operator, _returns_nothing)


@torch.library.register_fake("mfsdp::param")
def _(shard: torch.Tensor, offset: int, shape: list[int], spec: str) -> torch.Tensor:
    return shard.new_empty(shape, dtype=UnitSpec.decode(spec).precision.compute)


@torch.library.register_fake("mfsdp::param_grad")
def _(grad: torch.Tensor, shard: torch.Tensor, offset: int, spec: str) -> torch.Tensor:
    return torch.empty_like(shard)


@torch.library.register_fake("mfsdp::returned")
def _(param: torch.Tensor) -> torch.Tensor:
    return param.clone()


@torch.library.register_fake("mfsdp::all_gather")
def _(shard: torch.Tensor, spec: str, slot: int = -1) -> torch.Tensor:
    s = UnitSpec.decode(spec)
    return shard.new_empty(s.full_numel, dtype=gathered(shard, s))


@torch.library.register_fake("mfsdp::refresh_codes")
def _(code: torch.Tensor, source: torch.Tensor, key: str, back: bool, spec: str) -> torch.Tensor:
    return code.new_empty(UnitSpec.decode(spec).source_numel)


@torch.library.register_fake("mfsdp::maxima")
def _(shard: torch.Tensor, grids: str, spec: str) -> torch.Tensor:
    return shard.new_empty(sum(g.numel for g in block_grid.decode(grids)), dtype=torch.float32)


@torch.library.register_fake("mfsdp::spread")
def _(shard: torch.Tensor, scales: list[torch.Tensor], grids: str, spec: str) -> torch.Tensor:
    return scales[0].new_empty(UnitSpec.decode(spec).main_numel)


@torch.library.register_fake("mfsdp::kept_cast")
@torch.library.register_fake("mfsdp::cast")
def _(shard: torch.Tensor, spec: str) -> torch.Tensor:
    s = UnitSpec.decode(spec)
    return shard.new_empty(s.main_numel, dtype=s.precision.comm)


@torch.library.register_fake("mfsdp::bucket")
def _(like: torch.Tensor, holes: list[int], spec: str, slot: int = -1) -> torch.Tensor:
    s = UnitSpec.decode(spec)
    return like.new_empty(s.full_numel, dtype=s.precision.grad_comm)


@torch.library.register_fake("mfsdp::reduce_scatter")
def _(gfull: torch.Tensor, spec: str, lane: int) -> torch.Tensor:
    s = UnitSpec.decode(spec)
    return gfull.new_empty(sum(s.splits_on(lane)), dtype=s.scatter_dtype(lane))


@torch.library.register_fake("mfsdp::collective")
def _(
    source: torch.Tensor,
    verb: str,
    axis: str,
    received: list[int],
    splits: list[int],
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    return source.new_empty(shape_after(source, verb, Axis.decode(axis), received))


def shape_after(source: torch.Tensor, verb: str, axis: Axis, received: Sequence[int]) -> list[int]:
    """Shape of the result of another parallelism's collective."""
    rows, *rest = source.shape or (1,)
    if verb == "all_gather":
        return [rows * axis.ranks, *rest]
    if verb.startswith("reduce_scatter"):
        return [rows // axis.ranks, *rest]
    if received:
        return [sum(received[1:], received[0]), *rest]
    return list(source.shape)


@torch.library.register_fake("mfsdp::offload")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


@torch.library.register_fake("mfsdp::reload")
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    shard, ctx.offset, _, ctx.spec = inputs
    ctx.save_for_backward(shard)


def _derivative(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (shard,) = ctx.saved_tensors
    return param_grad(grad, shard, ctx.offset, ctx.spec), None, None, None


torch.library.register_autograd("mfsdp::param", _derivative, setup_context=_save)
