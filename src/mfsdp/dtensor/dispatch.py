"""Handlers of torch's operators for sharded tensors, each selected once. Private in torch (``OpOverload``, its
``_schema``); tried on 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from ..runtime import sync_collectives
from ..runtime.transport_registry import record_load
from . import unsupported
from .eager_autograd import Args, Kwargs
from .shard_placement import RowShard, StridedRowShard
from .shard_spec import ShardSpec
from .sharded_dtensor import Handler, ShardedDTensor, dispatched_by

aten = torch.ops.aten


def _dispatch(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    if func._schema.is_mutable:
        written = kwargs.get("out", args[0])
        for tensor in written if isinstance(written, (list, tuple)) else (written,):
            if isinstance(tensor, ShardedDTensor) and tensor._mfsdp_written is not None:
                tensor._mfsdp_written.before_write(tensor._local_tensor)
                tensor._mfsdp_written.stale = True
    try:
        return _handler_of(func)(func, args, kwargs)
    except NotImplementedError as error:
        raise unsupported.explained(error) from None


@functools.cache
def _handler_of(func: OpOverload) -> Handler:
    name = func._schema.name.removeprefix("aten::")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith("_foreach_"):
        one = name.removeprefix("_foreach_").removesuffix("_")
        return _lists if _is_elementwise(one) and one not in _BY_NAME else _refuse
    if name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return _lists
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return _elementwise
    return _elementwise if name.endswith("_backward") and _is_elementwise(name) else _refuse


def _is_elementwise(name: str) -> bool:
    """Whether an operator, or the one it is the derivative of, is elementwise in some overload. torch tags only some
    derivatives, and no list operators.
    """
    if name in _ELEMENTWISE or f"{name}_" in _ELEMENTWISE:
        return True
    packet = getattr(aten, name.removesuffix("_backward"), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


_ELEMENTWISE = frozenset([
    "detach", "alias", "clone", "copy_", "_to_copy", "zero_", "fill_", "zeros_like", "ones_like", "empty_like",
    "full_like", "lift_fresh", "masked_fill_", "masked_fill", "lerp", "lerp_", "nan_to_num", "nan_to_num_",
    "is_same_size",
])  # fmt: skip


def _elementwise(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Runs on the local tensors; shards full tensors of the same global shape first."""
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, ShardedDTensor)), None)
    if first is None:
        raise NotImplementedError(f"{func}: no sharded tensor among the arguments")
    sharding = first._sharding
    if func._schema.is_mutable and not isinstance(kwargs.get("out", args[0]), ShardedDTensor):
        raise NotImplementedError(
            f"{func}: a sharded tensor cannot be written into a plain one; use .full_tensor() or .to_local()"
        )

    def local(x: Any) -> Any:
        return _cut(func, x, sharding) if isinstance(x, torch.Tensor) else x

    result = func(*(local(a) for a in args), **{k: local(v) for k, v in kwargs.items()})
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    if first is args[0] and func._schema.returns[0].alias_info is not None:
        return first.beside(result)
    if isinstance(result, tuple):
        return tuple(ShardedDTensor(r, sharding) for r in result)
    return ShardedDTensor(result, sharding) if isinstance(result, torch.Tensor) else result


def _cut(func: OpOverload, x: torch.Tensor, sharding: ShardSpec) -> torch.Tensor:
    """Returns this rank's part of a tensor used elementwise with a sharded one; passes numbers through."""
    if isinstance(x, ShardedDTensor):
        if not sharding.same(x._sharding):
            raise NotImplementedError(
                f"{func}: two sharded tensors of shapes {tuple(sharding.shape)} and {tuple(x.shape)} are not cut "
                "alike; use .full_tensor()"
            )
        return x._local_tensor
    if isinstance(x, DTensor):
        raise NotImplementedError(f"{func}: a sharded tensor and a DTensor of torch's: use .full_tensor() of it")
    if x.dim() == 0:
        return x
    if x.numel() == 1 and x.dim() <= len(sharding.shape) and x.shape != sharding.shape:
        return x.reshape(1)
    if tuple(x.shape) != tuple(sharding.shape):
        raise NotImplementedError(
            f"{func}: a plain tensor of shape {tuple(x.shape)} does not fit one of shape "
            f"{tuple(sharding.shape)} that is sharded; use .full_tensor() or .to_local()"
        )
    return sharding.part(x)


def _lists(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """``foreach`` and fused operators: runs on lists of local tensors, without the empty ones (invariant 22). Lists may
    also contain unsharded tensors, at the same place in all lists.
    """
    n = len(args[0])
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and len(a) == n]
    sharded = [next((x[i] for x in lists if isinstance(x[i], ShardedDTensor)), None) for i in range(n)]
    if not any(s is not None for s in sharded):
        raise NotImplementedError(f"{func}: no sharded tensor in the first lists")
    keep = [i for i, s in enumerate(sharded) if s is None or s._local_tensor.numel()]

    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    def part(x: Any, like: ShardedDTensor | None, writes: bool) -> Any:
        if like is None or not isinstance(x, torch.Tensor):
            return x
        if writes and x.dim() and not isinstance(x, ShardedDTensor):
            raise NotImplementedError(
                f"{func}: a sharded tensor of shape {tuple(like.shape)} cannot be written into a plain one; use "
                ".full_tensor() or .to_local()"
            )
        return _cut(func, x, like._sharding)

    given = _named(func, args, kwargs)
    for name, x in given.items():
        if isinstance(x, (list, tuple)) and len(x) == n:  # also empty ones: all ranks refuse
            parts = [part(t, like, name in written) for t, like in zip(x, sharded, strict=True)]
            given[name] = [parts[i] for i in keep]
    out = func(**given) if keep else ()
    if func._schema.is_mutable:
        return None
    found = dict(zip(keep, out, strict=True))
    results: list[Any] = []
    for i, like in enumerate(sharded):
        rows = found.get(i)
        if like is not None:
            rows = ShardedDTensor(like._local_tensor.clone() if rows is None else rows, like._sharding)
        results.append(rows)
    return results


def _random(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Draws the full tensor and keeps this rank's rows, so values equal an unsharded init with the same seed. Gathers
    arguments that parametrize the distribution (probabilities, limits) first.
    """
    target, *rest = args
    if not isinstance(target, ShardedDTensor) or "out" in kwargs:
        _refuse(func, args, kwargs)
    like = not func._schema.is_mutable
    if func is aten.bernoulli.default:
        whole = target.full_tensor()
    else:
        dtype = (kwargs.get("dtype") if like else None) or target.dtype
        whole = torch.empty(target.shape, dtype=dtype, device=target._local_tensor.device)
    drawn = func(whole, *(x.full_tensor() if isinstance(x, DTensor) else x for x in rest), **kwargs)
    part = target._sharding.part(drawn)
    if like:
        return ShardedDTensor(part.clone(), target._sharding)
    target._local_tensor.copy_(part)
    buffer = None if target._mfsdp_written is None or target._sharding.home is None else target._sharding.home()
    if buffer is not None and (replicas := buffer.copies(target._sharding.slot)):  # equal only if seeds are
        what = f"values that {func._schema.name.removeprefix('aten::')} has drawn for {buffer.path}"
        record_load(replicas, what, drawn, drawn.dtype)
    return target


def _reduction(whole: Callable[..., torch.Tensor], op: str) -> Handler:
    """Returns a handler that reduces to one value: over local rows, then over ranks by ``op``."""

    def handler(func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
        x: ShardedDTensor = args[0]
        shape, given = _whole_only(func, args, kwargs)
        if not x.numel():  # nothing to communicate
            nothing: torch.Tensor = func(x._local_tensor.new_empty(x.shape), *args[1:], **kwargs)
            return nothing
        rows = x._local_tensor.reshape(-1)
        if not rows.numel():
            rows = rows.new_full((1,), _neutral(whole, rows.dtype))
        partial = whole(rows, dtype=given["dtype"]) if given.get("dtype") else whole(rows)
        if whole is torch.mean:
            partial = partial * (x._local_tensor.numel() / x.numel())
        return _extreme(partial, op, x._sharding).view(shape)

    return handler


def _neutral(whole: Callable[..., torch.Tensor], dtype: torch.dtype) -> float | bool:
    """Returns the neutral element that a rank without rows contributes to a reduction."""
    if whole not in (torch.amax, torch.amin):
        return whole is torch.all
    if dtype is torch.bool:
        return whole is torch.amin
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    low, high = (-math.inf, math.inf) if dtype.is_floating_point else (limits.min, limits.max)
    return low if whole is torch.amax else high


def _named(func: OpOverload, args: Args, kwargs: Kwargs) -> Kwargs:
    """Returns the arguments that were given, by name."""
    return {**dict(zip((a.name for a in func._schema.arguments), args)), **kwargs}


def _whole_only(func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[list[int], Kwargs]:
    """Returns the result shape of a reduction of all elements to one value, and its arguments by name."""
    x, given = args[0], _named(func, args, kwargs)
    dims = given.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    count = max(1, x.dim())
    some = dims is not None and {d % count for d in dims} != set(range(count))
    if dims == [] and func._schema.name not in ("aten::any", "aten::all", "aten::count_nonzero"):
        some = False  # all dimensions
    if some or len(func._schema.returns) > 1 or "out" in given or not isinstance(x, ShardedDTensor):
        raise NotImplementedError(
            f"{func} over dimensions {dims} of a sharded tensor is not supported; use .full_tensor()"
        )
    return [1] * x.dim() if given.get("keepdim") else [], given


def _all_reduce(partial: torch.Tensor, op: str, sharding: ShardSpec) -> torch.Tensor:
    if sharding.parts == 1:
        return partial
    total = partial.to(torch.uint8) if partial.dtype is torch.bool else partial.contiguous()
    if total.is_complex():
        return torch.view_as_complex(_all_reduce(torch.view_as_real(total), op, sharding))
    with sharding.announced(f"{op} of a tensor {list(sharding.shape)} over ranks"):
        for group in sharding.over:
            total = sync_collectives.reduced(total, op, group)
    return total.bool() if partial.dtype is torch.bool else total


def _extreme(partial: torch.Tensor, op: str, sharding: ShardSpec) -> torch.Tensor:
    """`_all_reduce`; a maximum or minimum propagates the NaNs of every rank."""
    if op == "sum" or not partial.is_floating_point():
        return _all_reduce(partial, op, sharding)
    sign = 1 if op == "max" else -1
    stacked = torch.stack([sign * partial, partial.isnan().to(partial.dtype)])
    largest, nan = _all_reduce(stacked, "max", sharding)
    return torch.where(nan == 0, sign * largest, torch.nan)


def _norm(func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """``linalg.vector_norm`` and ``norm`` of the full tensor."""
    shape, given = _whole_only(func, args, kwargs)
    order = given.get("ord", given.get("p"))
    return _norms([args[0]], 2.0 if order is None else float(order), given.get("dtype"))[0].view(shape)


def _foreach_norm(func: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """Computes all norms with one collective, launched on every rank whatever rows it holds."""
    given = _named(func, args, kwargs)
    return _norms(args[0], float(given.get("ord", 2)), given.get("dtype"))


def _norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Returns norms of order p, with one collective for all tensors that are sharded over the same ranks. Plain tensors
    are allowed.
    """
    alike: dict[tuple[str, ...] | None, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault(_over(t) if isinstance(t, ShardedDTensor) else None, []).append(i)
    out: dict[int, torch.Tensor] = {}
    for over, members in alike.items():
        mine = [tensors[i] for i in members]
        found = torch._foreach_norm(mine, order, dtype) if over is None else _norms_over(cast(Any, mine), order, dtype)
        out |= zip(members, found, strict=True)
    return [out[i] for i in range(len(tensors))]


def _over(t: ShardedDTensor) -> tuple[str, ...]:
    """Returns the process groups to reduce over; none if there is only one part."""
    return t._sharding.over if t._sharding.parts > 1 else ()


def _norms_over(tensors: Sequence[ShardedDTensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Takes the p-th root of the sum over ranks of the p-th powers of the local norms."""
    sharding, rows = tensors[0]._sharding, [t._local_tensor for t in tensors]
    full = [t for t in rows if t.numel()]
    wide = torch.float64 if any(t.dtype is torch.float64 for t in rows) else torch.float32
    nothing = torch.full((), math.inf if order == -math.inf else 0.0, dtype=wide, device=rows[0].device)
    some = iter(torch._foreach_norm(full, order, wide) if full else ())
    partial = torch.stack([next(some) if t.numel() else nothing for t in rows])  # no host sync
    with sharding.announced(f"norms of {len(tensors)} tensors"):
        if math.isinf(order):
            total = _extreme(partial, "max" if order > 0 else "min", sharding)
        elif order == 0:
            total = _all_reduce(partial, "sum", sharding)
        else:
            powers = partial.pow(order)
            if order < 0:
                powers = powers.masked_fill(partial == 0, 0)
            total = _all_reduce(powers, "sum", sharding).pow(1 / order)
    return [n.to(dtype or t.dtype) for n, t in zip(total.unbind(), rows, strict=True)]


def _unscale(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """``GradScaler``'s unscale: scales gradients in place; all ranks see an Inf or NaN of any rank."""
    tensors, found, inverse = args
    locals_ = [t._local_tensor if isinstance(t, ShardedDTensor) else t for t in tensors]
    some = [t for t in locals_ if t.numel()]
    if some:
        func(some, found, inverse)
    for sharding in {_over(t): t._sharding for t in tensors if isinstance(t, ShardedDTensor)}.values():
        found.copy_(_all_reduce(found, "max", sharding))


def _view(func: OpOverload, args: Args, kwargs: Kwargs) -> ShardedDTensor:
    x: ShardedDTensor = args[0]
    if isinstance(args[1], torch.dtype):
        if args[1].itemsize != x.dtype.itemsize:
            _refuse(func, args, kwargs)
        return x.beside(x._local_tensor.view(args[1]))
    shape = list(args[1])
    if -1 in shape:
        known = -math.prod(shape)
        shape[shape.index(-1)] = x.numel() // known if known else 0
    if tuple(shape) != tuple(x.shape):
        raise NotImplementedError(
            f"{func}: a sharded tensor cannot be viewed as {tuple(args[1])}; use .full_tensor() or .to_local()"
        )
    return x.beside(x._local_tensor)


def _copy(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """``copy_``: local between equal shardings. Gathers a source that is sharded in another way, so that any state dict
    can be loaded; all ranks must then take part.
    """
    target, source, *rest = args
    if not isinstance(target, ShardedDTensor) or not isinstance(source, DTensor) or source.shape != target.shape:
        return _elementwise(func, args, kwargs)
    if isinstance(source, ShardedDTensor):
        if target._sharding.same(source._sharding):
            return _elementwise(func, args, kwargs)
        source = source.full_tensor()
    elif any(isinstance(p, (RowShard, StridedRowShard)) for p in source.placements):
        local = source._local_tensor
        if source.placements != target.placements or local.shape != target._local_tensor.shape:
            _refuse(func, args, kwargs)
        func(target._local_tensor, local, *rest, **kwargs)
        return target
    else:
        values: Any = source.detach()  # on a parameter torch 2.12 would call detach_, which its DTensors lack
        source = values.full_tensor()
    return _elementwise(func, (target, source, *rest), kwargs)


def _new(func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """``new_zeros`` and similar: returns a tensor of the same sharding for the same shape, else a plain one."""
    x: ShardedDTensor = args[0]
    if tuple(args[1]) == tuple(x.shape):
        local = func(x._local_tensor, list(x._local_tensor.shape), *args[2:], **kwargs)
        return ShardedDTensor(local, x._sharding)
    return func(x._local_tensor, *args[1:], **kwargs)  # type: ignore[no-any-return]


def _equal(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    a, b = args
    if not (isinstance(a, ShardedDTensor) and isinstance(b, ShardedDTensor) and a._sharding.same(b._sharding)):
        _refuse(func, args, kwargs)
    here = torch.tensor(torch.equal(a._local_tensor, b._local_tensor), device=a._local_tensor.device)
    return bool(_all_reduce(here, "min", a._sharding))


def _masked_put(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """``x[mask] = number``, the only indexing that is elementwise."""
    x, indices, value, *rest = args
    mask: Any = indices[0]
    alike = isinstance(mask, ShardedDTensor) and mask.dtype is torch.bool and mask._sharding.same(x._sharding)
    if len(indices) != 1 or not alike or value.numel() != 1:
        _refuse(func, args, kwargs)
    func(x._local_tensor, [mask._local_tensor], value, *rest, **kwargs)
    return x


def _item(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    return args[0].full_tensor().item()


def _refuse(func: OpOverload, args: Args, kwargs: Kwargs) -> NoReturn:
    raise NotImplementedError(
        f"{func} is not supported on a tensor that is sharded unevenly; use .full_tensor() (whole, on every rank) or "
        ".to_local() (this rank's rows). Inside of a compiled or called model, parameters are whole."
    )


_RANDOM = (
    "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_", "geometric_",
    "rand_like", "randn_like", "randint_like", "bernoulli",
)  # fmt: skip

_BY_NAME: dict[str, Handler] = {
    **dict.fromkeys(_RANDOM, _random),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _new),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(("max", "amax"), _reduction(torch.amax, "max")),
    **dict.fromkeys(("min", "amin"), _reduction(torch.amin, "min")),
    "sum": _reduction(torch.sum, "sum"),
    "mean": _reduction(torch.mean, "sum"),
    "any": _reduction(torch.any, "max"),
    "all": _reduction(torch.all, "min"),
    "count_nonzero": _reduction(torch.count_nonzero, "sum"),
    "_foreach_norm": _foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "copy_": _copy,
    "equal": _equal,
    "index_put_": _masked_put,
    "_local_scalar_dense": _item,
}

dispatched_by(_dispatch)
