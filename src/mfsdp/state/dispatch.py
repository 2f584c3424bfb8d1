"""What torch's operators do to sharded tensors: a handler for each, decided once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..runtime import immediate
from .rows import RowShard, StridedRowShard
from .sharded import Sharding
from .tensors import Handler, ShardedDTensor, dispatched_by

aten = torch.ops.aten


_handlers: dict[Any, Handler] = {}


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _handler_of(func)
    if func._schema.is_mutable:
        written = kwargs.get("out", args[0])
        for tensor in written if isinstance(written, (list, tuple)) else (written,):
            if isinstance(tensor, ShardedDTensor) and tensor._mfsdp_written is not None:
                tensor._mfsdp_written.stale = True
    return handler(func, args, kwargs)


def _handler_of(func: Any) -> Handler:
    name = func._schema.name.removeprefix("aten::")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(("_foreach_", "_fused_")):
        return _lists
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE or _derivative_of_pointwise(name):
        return _elementwise
    return _refuse


def _derivative_of_pointwise(name: str) -> bool:
    """Whether it is the derivative of an elementwise operator, which torch tags in part only."""
    packet = getattr(aten, name.removesuffix("_backward"), None) if name.endswith("_backward") else None
    return packet is not None and torch.Tag.pointwise in packet.default.tags


_ELEMENTWISE = frozenset(
    [
        "detach",
        "alias",
        "clone",
        "copy_",
        "_to_copy",
        "zero_",
        "fill_",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "lift_fresh",
        "masked_fill_",
        "masked_fill",
        "lerp",
        "lerp_",
        "nan_to_num",
        "nan_to_num_",
        "is_same_size",
    ]
)


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs on the local tensors; whole tensors of the same global shape are cut first."""
    sharding = _sharding_of(func, args, kwargs)
    if not isinstance(args[0], ShardedDTensor) and func._schema.is_mutable:
        raise NotImplementedError(
            f"{func}: a sharded tensor cannot be written into a plain one; use .full_tensor() or .to_local()"
        )

    def local(x: Any) -> Any:
        if isinstance(x, ShardedDTensor):
            if not sharding.same(x._sharding):
                raise NotImplementedError(
                    f"{func}: two sharded tensors of shapes {tuple(sharding.shape)} and {tuple(x.shape)} are not cut "
                    "alike; use .full_tensor()"
                )
            return x._local_tensor
        if isinstance(x, DTensor):
            raise NotImplementedError(f"{func}: a sharded tensor and a DTensor of torch's: use .full_tensor() of it")
        if isinstance(x, torch.Tensor) and x.dim() > 0:
            if tuple(x.shape) != tuple(sharding.shape):
                raise NotImplementedError(
                    f"{func}: a plain tensor of shape {tuple(x.shape)} does not fit one of shape "
                    f"{tuple(sharding.shape)} that is sharded; use .full_tensor() or .to_local()"
                )
            return sharding.part(x)
        return x

    result = func(*(local(a) for a in args), **{k: local(v) for k, v in kwargs.items()})
    if func._schema.is_mutable:
        return args[0]
    if not isinstance(result, torch.Tensor):
        return result
    first = args[0]
    if isinstance(first, ShardedDTensor) and func._schema.returns[0].alias_info is not None:
        return first.beside(result)
    return ShardedDTensor(result, sharding)


def _sharding_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharding:
    for x in (*args, *kwargs.values()):
        if isinstance(x, ShardedDTensor):
            return x._sharding
    raise NotImplementedError(f"{func}: no sharded tensor among the arguments")


def _lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``foreach`` and fused operators: on lists of local tensors, without the empty ones (law 22)."""
    n = len(args[0])
    sharded = next((a for a in args if _has_sharded(a)), None)
    if sharded is None:
        raise NotImplementedError(f"{func}: no sharded tensor in the first lists")
    keep = [i for i, t in enumerate(sharded) if _local(t).numel()]

    def local(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            if len(x) == n and x is not sharded:
                for a, b in zip(sharded, x, strict=True):
                    if isinstance(b, ShardedDTensor) and not a._sharding.same(b._sharding):
                        raise NotImplementedError(
                            f"{func}: two sharded tensors of shapes {tuple(a.shape)} and {tuple(b.shape)} are not cut "
                            "alike; use .full_tensor()"
                        )
            if len(x) == n and len(keep) < n:
                return [_local(x[i]) for i in keep]
            return [_local(t) for t in x]
        return _local(x)

    out = None
    if keep:
        out = func(*(local(a) for a in args), **{k: local(v) for k, v in kwargs.items()})
    if func._schema.is_mutable:
        return None
    results: list[Any] = [None] * n
    for i, t in zip(keep, out or (), strict=False):
        results[i] = ShardedDTensor(t, sharded[i]._sharding)
    for i in set(range(n)) - set(keep):
        results[i] = ShardedDTensor(_local(sharded[i]).clone(), sharded[i]._sharding)
    return results


def _has_sharded(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(isinstance(t, ShardedDTensor) for t in x)


def _local(x: Any) -> Any:
    return x._local_tensor if isinstance(x, ShardedDTensor) else x


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws the whole tensor and keeps this rank's rows: the values of an unsharded init under the same seed."""
    target: ShardedDTensor = args[0]
    like = not func._schema.is_mutable
    dtype = (kwargs.get("dtype") if like else None) or target.dtype
    whole = torch.empty(target.shape, dtype=dtype, device=target._local_tensor.device)
    drawn = func(whole, *args[1:], **kwargs)
    part = target._sharding.part(drawn)
    if like:
        return ShardedDTensor(part.clone(), target._sharding)
    target._local_tensor.copy_(part)
    return target


def _reduction(combine: str, empty: float) -> Handler:
    """A reduction to one value: over the local rows, then over ranks. ``empty``: what a rank without rows gives."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        x: ShardedDTensor = args[0]
        _whole_only(func, args, kwargs)
        local = x._local_tensor
        if local.numel():
            partial = func(local, *args[1:], **kwargs)
        else:
            partial = func(local.new_ones(1), *args[1:], **kwargs).fill_(empty)
        if combine == "mean":
            partial = partial * (local.numel() / max(1, x.numel()))
        return _all_reduce(partial, _OPS[combine], x._sharding)

    return handler


def _whole_only(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dims = next((v for v in (*args[1:], kwargs.get("dim")) if isinstance(v, (list, tuple))), None)
    if dims and len(dims) != args[0].dim():
        raise NotImplementedError(
            f"{func} over dimensions {list(dims)} of a sharded tensor is not supported; use .full_tensor()"
        )


_OPS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "any": "max", "all": "min"}


def _all_reduce(partial: torch.Tensor, op: str, sharding: Sharding) -> torch.Tensor:
    if sharding.parts == 1:
        return partial
    total = partial.to(torch.uint8) if partial.dtype is torch.bool else partial.contiguous()
    with sharding.announced(f"{op} of a tensor {list(sharding.shape)} over ranks"):
        for group in sharding.over:
            total = immediate.reduced(total, op, group)
    return total.bool() if partial.dtype is torch.bool else total


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``linalg.vector_norm`` and ``norm``, over the whole tensor."""
    _whole_only(func, args, kwargs)
    order = args[1] if len(args) > 1 and args[1] is not None else kwargs.get("ord", kwargs.get("p", 2))
    return _norms([args[0]], 2.0 if order is None else float(order), kwargs.get("dtype"))[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """All norms with one collective, the same on every rank whatever it holds."""
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return _norms(args[0], order, dtype)


def _norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Norms of order p; one collective for all tensors that are cut over the same ranks. Some may be plain ones."""
    alike: dict[tuple[str, ...] | None, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault(_over(t) if isinstance(t, ShardedDTensor) else None, []).append(i)
    out: dict[int, torch.Tensor] = {}
    for over, members in alike.items():
        mine = [tensors[i] for i in members]
        found = torch._foreach_norm(mine, order, dtype) if over is None else _norms_over(mine, order, dtype)
        out |= zip(members, found, strict=True)
    return [out[i] for i in range(len(tensors))]


def _over(t: ShardedDTensor) -> tuple[str, ...]:
    """The process groups that a value of the whole tensor is reduced over; none where nothing can communicate."""
    return t._sharding.over if t._sharding.parts > 1 else ()


def _norms_over(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The p-th root of the sum over ranks of the p-th powers of the local norms."""
    with tensors[0]._sharding.announced(f"norms of {len(tensors)} tensors"):
        return _powers_over(tensors, order, dtype)


def _powers_over(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    locals_ = [t._local_tensor for t in tensors]
    full = [t for t in locals_ if t.numel()]
    wide = torch.float64 if any(t.dtype is torch.float64 for t in locals_) else torch.float32
    neutral = math.inf if order == -math.inf else 0.0
    nothing = torch.full((), neutral, dtype=wide, device=locals_[0].device)
    some = iter(torch._foreach_norm(full, order, wide) if full else ())
    partial = torch.stack([next(some) if t.numel() else nothing for t in locals_])  # the host waits for nothing
    if math.isinf(order):
        sign = math.copysign(1, order)
        told = torch.cat([sign * partial, partial.isnan()])  # a maximum may lose the NaNs of other ranks
        largest, nan = _all_reduce(told, "max", tensors[0]._sharding).chunk(2)
        total = (sign * largest).where(nan == 0, torch.nan)
    elif order == 0:
        total = _all_reduce(partial, "sum", tensors[0]._sharding)
    else:
        powers = partial.pow(order)
        if order < 0:
            powers = powers.masked_fill(partial == 0, 0)
        total = _all_reduce(powers, "sum", tensors[0]._sharding).pow(1 / order)
    return [n.to(dtype or t.dtype) for n, t in zip(total.unbind(), locals_, strict=True)]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``GradScaler``'s: scales gradients in place; an Inf or NaN on any rank is found on all of them."""
    tensors, found, inverse = args
    some = [_local(t) for t in tensors if _local(t).numel()]
    if some:
        func(some, found, inverse)
    for sharding in {_over(t): t._sharding for t in tensors if isinstance(t, ShardedDTensor)}.values():
        found.copy_(_all_reduce(found, "max", sharding))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedDTensor:
    x: ShardedDTensor = args[0]
    shape = list(args[1])
    if -1 in shape:
        known = -math.prod(shape)
        shape[shape.index(-1)] = x.numel() // known if known else 0
    if tuple(shape) != tuple(x.shape):
        raise NotImplementedError(
            f"{func}: a sharded tensor cannot be viewed as {tuple(args[1])}; use .full_tensor() or .to_local(). "
            "DistributedDataParallel has no place around a sharded model, which averages gradients itself; "
            "mfsdp.save_safetensors saves one."
        )
    return x.beside(x._local_tensor)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_``: between equal cuts locally; from tensors that are cut in another way by way of the whole, so that
    whatever a state dict holds can be loaded. All ranks have to take part then.
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
            return _refuse(func, args, kwargs)
        func(target._local_tensor, local, *rest, **kwargs)
        return target
    else:
        values: Any = source.detach()  # of a parameter torch 2.12 would call detach_, which its DTensors lack
        source = values.full_tensor()
    return _elementwise(func, (target, source, *rest), kwargs)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``new_zeros`` and the like: sharded alike if of the same shape, else plain."""
    x: ShardedDTensor = args[0]
    if tuple(args[1]) == tuple(x.shape):
        local = func(x._local_tensor, list(x._local_tensor.shape), *args[2:], **kwargs)
        return ShardedDTensor(local, x._sharding)
    return func(x._local_tensor, *args[1:], **kwargs)  # type: ignore[no-any-return]


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    a, b = args
    if not (isinstance(a, ShardedDTensor) and isinstance(b, ShardedDTensor) and a._sharding.same(b._sharding)):
        return _refuse(func, args, kwargs)  # type: ignore[no-any-return]
    here = torch.tensor(torch.equal(a._local_tensor, b._local_tensor), device=a._local_tensor.device)
    return bool(_all_reduce(here, "min", a._sharding))


def _masked_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = number``, the one kind of indexing that is elementwise."""
    x, indices, value, *rest = args
    mask: Any = indices[0]
    alike = isinstance(mask, ShardedDTensor) and mask.dtype is torch.bool and mask._sharding.same(x._sharding)
    if len(indices) != 1 or not alike or value.numel() != 1:
        return _refuse(func, args, kwargs)
    func(x._local_tensor, [mask._local_tensor], value, *rest, **kwargs)
    return x


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].full_tensor().item()


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"{func} is not supported on a tensor that is sharded unevenly; use .full_tensor() (whole, on every rank) or "
        ".to_local() (this rank's rows). Inside of a compiled or called model, parameters are whole."
    )


_BY_NAME: dict[str, Handler] = {
    **dict.fromkeys(
        [
            "normal_",
            "uniform_",
            "bernoulli_",
            "exponential_",
            "log_normal_",
            "cauchy_",
            "random_",
            "geometric_",
            "rand_like",
            "randn_like",
            "randint_like",
            "bernoulli",
        ],
        _random,
    ),
    "sum": _reduction("sum", 0.0),
    "mean": _reduction("mean", 0.0),
    "max": _reduction("max", -math.inf),
    "min": _reduction("min", math.inf),
    "amax": _reduction("max", -math.inf),
    "amin": _reduction("min", math.inf),
    "any": _reduction("any", 0.0),
    "all": _reduction("all", 1.0),
    "count_nonzero": _reduction("sum", 0.0),
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "_foreach_norm": _foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "copy_": _copy,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "_reshape_alias": _view,
    "new_zeros": _new,
    "new_ones": _new,
    "new_empty": _new,
    "new_full": _new,
    "equal": _equal,
    "index_put_": _masked_put,
    "_local_scalar_dense": _item,
}

dispatched_by(_dispatch)
