"""Whole weights into a model, unit by unit: each rank keeps its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..buffers.flat_buffer import FlatBuffer, buffers_in, half_loaded, shared_over
from ..runtime import devices, execution, groups
from ..runtime.transport_registry import count_load, record_load
from .files import some
from .streams import ParamMeta, WeightStream
from .tensors import keep, refuse_unsharded_quantized, tensors_of

ALIGN = 16
"""Bytes; where each tensor of a message starts."""


def load_stream(
    model: nn.Module, source: Any, *, from_rank: int | None = None, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Reads weights from a stream of whole tensors into a model; each rank keeps its rows. All ranks that hold the
    model must call it.

    Names, dtypes and shapes are compared before anything is written. A source that fails in the middle leaves the model
    half loaded: it refuses to compute until another load.

    Args:
        model: sharded (also by FSDP2), unsharded, or sharded in parts; values are cast to its dtypes.
        source: a dict of whole tensors by the model's names, or an iterable of (name, tensor) with ``metadata()``, such
            as `stream_weights` returns. It is read once, in order.
        from_rank: the rank of the default group that has the source, and broadcasts it unit by unit; the other ranks'
            ``source`` is not read. ``None``: every rank has the same source, and nothing is communicated.
        strict: whether a tensor that only one side has is an error. One name of tied weights is enough.

    Returns:
        The names that the source lacks, and the names that the model lacks.

    Raises:
        TypeError: the source has no ``metadata()``.
        ValueError: names differ and ``strict``; shapes differ, or one dtype is floating-point and the other is not; the
            source is not for this rank; ``from_rank`` is not a rank. The model is unchanged.
        RuntimeError: inside of `mfsdp.unsharded` (unchanged); the source does not give what its ``metadata()`` says, or
            failed on ``from_rank`` (half loaded).
        NotImplementedError: a quantized weight is not sharded; or ``from_rank``, and the model is sharded over some of
            the default group's ranks only, on more than one axis.
    """
    model = getattr(model, "_orig_mod", model)
    refuse_unsharded_quantized(model, "load_stream")
    wanted = tensors_of(model)
    group, place = _group_of(model, from_rank)
    here = from_rank is None or groups.rank() == from_rank
    metadata = _metadata(source, from_rank) if here and not group else _announced(source, from_rank, group, place)
    missing, unexpected = _compared(model, wanted, metadata, strict)
    buffers = buffers_in(model)
    for buffer in buffers:
        buffer.weights.before_write()
    given = _in_order(source, metadata) if here else _in_order({}, [])
    with closing(given), half_loaded(model, "load_stream"), torch.inference_mode(False), torch.no_grad():
        if group:
            names = "".join(name for name, _, _ in metadata)
            count_load(shared_over(model), "a stream of weights", names.encode())
            _broadcast(model, given, [(m, wanted.get(m.name)) for m in metadata], group, place)
        else:
            _keep_all(given, wanted, shared_over(model))
    return missing, unexpected


def _keep_all(given: Iterator[tuple[str, torch.Tensor]], wanted: dict[str, torch.Tensor], over: Iterable[str]) -> None:
    for name, value in given:
        if (tensor := wanted.get(name)) is not None:
            keep(tensor, value)
            record_load(over, name, value, tensor.dtype)


# before anything is written


def _metadata(source: Any, from_rank: int | None) -> list[ParamMeta]:
    """Returns what the source will give."""
    if isinstance(source, Mapping):
        wrong = [name for name, t in source.items() if not isinstance(t, torch.Tensor) or isinstance(t, DTensor)]
        if wrong:
            raise ValueError(
                f"load_stream: {some(wrong)} in the source: not whole tensors. Of a sharded model give "
                "mfsdp.stream_weights(model), not its state_dict()"
            )
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in source.items()]
    if not callable(getattr(source, "metadata", None)):
        raise TypeError(
            f"load_stream: {type(source).__name__} has no metadata(): names and shapes are compared before anything is "
            "written. Give a dict, what stream_weights returns, or an iterable whose metadata() returns (name, dtype, "
            "shape) in order"
        )
    if isinstance(source, WeightStream):
        if not source.consumes:
            raise ValueError(
                f"load_stream: the stream goes to ranks {list(source.to or ())}, and this is rank {groups.rank()}: "
                "iterate it here, `for _ in stream: pass`, or stream to all ranks, to=None"
            )
        if from_rank is not None and source.communicates:
            raise ValueError(
                "load_stream: from_rank reads the source on one rank only, and all ranks have to iterate a stream of a "
                "sharded model: leave out from_rank, and stream to all ranks, to=None"
            )
    return [ParamMeta(m.name, m.dtype, tuple(m.shape)) for m in source.metadata()]


def _announced(source: Any, from_rank: int | None, group: str, place: int) -> list[ParamMeta]:
    """Returns what the source of one rank will give, on all ranks, or raises its error there."""
    text, failure = "", None
    if groups.rank() == from_rank:
        try:
            said = [
                (name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in _metadata(source, from_rank)
            ]
            text = json.dumps({"metadata": said})
        except Exception as error:
            text, failure = json.dumps({"error": f"{type(error).__name__}: {error}"}), error
    content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    execution.all_call(f"load_stream from rank {from_rank}", (group,))
    device = devices.collective_device(group)
    size = groups.broadcast(torch.tensor([content.numel()], device=device), group, place)
    content = content.to(device) if text else torch.empty(int(size), dtype=torch.uint8, device=device)
    told = json.loads(bytes(groups.broadcast(content, group, place).tolist()))
    if failure is not None:
        raise failure
    if "error" in told:
        raise ValueError(f"load_stream: the source of rank {from_rank} cannot be read: {told['error']}")
    return [ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in told["metadata"]]


def _compared(
    model: nn.Module, wanted: dict[str, torch.Tensor], metadata: list[ParamMeta], strict: bool
) -> tuple[list[str], list[str]]:
    """Returns the names that only one side has; refuses what does not fit."""
    there = {m.name: m for m in metadata}
    if len(there) < len(metadata):
        raise ValueError("load_stream: the source gives two tensors one name")
    ids = {id(wanted[name]) for name in there if name in wanted}
    missing = [name for name, t in wanted.items() if id(t) not in ids]
    unexpected = [name for name in there if name not in wanted]
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_stream: source and {type(model).__name__} do not fit: missing in the source: {some(missing)}; not "
            f"in the model: {some(unexpected)}. Give names of the model, or strict=False to read what fits"
        )
    wrong = []
    for name in there.keys() & wanted.keys():
        its, mine = there[name], wanted[name]
        floats = its.dtype.is_floating_point and mine.is_floating_point() and not hasattr(mine, "_mfsdp_exact")
        if its.shape != tuple(mine.shape) and not hasattr(mine, "_mfsdp_resizes"):
            wrong.append(f"{name} is {list(its.shape)} in the source, {list(mine.shape)} in the model")
        elif its.dtype is not mine.dtype and not floats:
            wrong.append(f"{name} is {its.dtype} in the source, {mine.dtype} in the model")
        elif mine.is_meta:
            wrong.append(f"{name} is on the meta device in the model")
    if wrong:
        raise ValueError(f"load_stream: tensors do not fit: {some(sorted(wrong))}")
    return missing, unexpected


def _in_order(source: Any, metadata: list[ParamMeta]) -> Generator[tuple[str, torch.Tensor]]:
    """Yields what the source gives, checked against its metadata."""
    expected = iter(metadata)
    for name, value in source.items() if isinstance(source, Mapping) else source:
        meta = next(expected, None)
        if isinstance(value, DTensor):
            raise RuntimeError(f"load_stream: the source gives {name} as a DTensor; give it whole: full_tensor()")
        if meta is None or (name, tuple(value.shape), value.dtype) != (meta.name, meta.shape, meta.dtype):
            said = "nothing more" if meta is None else f"{meta.name} {list(meta.shape)} in {meta.dtype}"
            raise RuntimeError(
                f"load_stream: the source gives {name} {list(value.shape)} in {value.dtype} where its metadata() says "
                f"{said}"
            )
        yield name, value
    if (meta := next(expected, None)) is not None:
        raise RuntimeError(f"load_stream: the source ended before {meta.name}, which its metadata() names")


# from one rank


def _group_of(model: nn.Module, from_rank: int | None) -> tuple[str, int]:
    """Returns the group of all ranks that hold a model, ``""`` if nothing is to be communicated, and the index of
    ``from_rank`` in it.
    """
    if from_rank is None:
        return "", 0
    world = groups.world()
    if isinstance(from_rank, bool) or not isinstance(from_rank, int) or not 0 <= from_rank < world:
        raise ValueError(f"load_stream: from_rank={from_rank!r}: ranks are 0 to {world - 1}")
    if world == 1:
        return "", 0
    found = {name: groups.ranks(name) for name in shared_over(model)}
    if len(found) == 1 and not any(b.placement.beside or any(b.pieces) for b in buffers_in(model)):
        ((group, members),) = found.items()
    elif not found or any(_holders(buffer) == world for buffer in buffers_in(model)):
        group, members = groups.default_group(), list(range(world))
    else:
        raise NotImplementedError(
            f"load_stream: from_rank, and {type(model).__name__} is sharded over some of the {world} ranks only, on "
            "more than one axis: give every rank the source"
        )
    if from_rank not in members:
        raise ValueError(f"load_stream: from_rank={from_rank} does not hold the model; its ranks are {members}")
    return group, members.index(from_rank)


def _holders(buffer: FlatBuffer) -> int:
    """Returns how many ranks hold parts or copies of a buffer."""
    meshes = {piece.mesh.size() for piece in buffer.pieces if piece is not None}
    return buffer.spec.ranks * max([*meshes, math.prod(len(groups.ranks(g)) for g in buffer.placement.beside)])


def _broadcast(
    model: nn.Module,
    given: Iterator[tuple[str, torch.Tensor]],
    expected: list[tuple[ParamMeta, torch.Tensor | None]],
    group: str,
    place: int,
) -> None:
    """Sends tensors from one rank, those of a unit that follow each other as one message of bytes."""
    device, source = devices.collective_device(group), groups.ranks(group)[place]
    for _, members in groupby(expected, lambda pair: getattr(pair[1], "_mfsdp_owner", None) or pair[0].name):
        batch = list(members)
        offsets, end = [], 0
        for meta, tensor in batch:
            offsets.append(end)
            if tensor is not None:
                end += -(-math.prod(meta.shape) * _sent(meta, tensor).itemsize // ALIGN) * ALIGN
        staging = torch.empty(end, dtype=torch.uint8, device=device)
        failure: Exception | None = None
        if groups.rank() == source:
            try:
                for (meta, tensor), offset in zip(batch, offsets, strict=True):
                    _, value = next(given)
                    if tensor is not None:
                        _view(staging, offset, meta, tensor).copy_(value)
                if batch[-1] is expected[-1]:
                    next(given, None)  # raises if there is more
            except Exception as error:
                failure = error
        execution.all_call(f"load_stream of {type(model).__name__} from rank {source}", (group,))
        good = groups.broadcast(torch.tensor([int(failure is None)], device=device), group, place)
        if failure is not None:
            raise failure
        if not good.item():
            raise RuntimeError(
                f"load_stream: the source of rank {source} failed; see its error. The model is half loaded"
            )
        groups.broadcast(staging, group, place)
        for (meta, tensor), offset in zip(batch, offsets, strict=True):
            if tensor is not None:
                keep(tensor, _view(staging, offset, meta, tensor))


def _sent(meta: ParamMeta, tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which a tensor is sent: the narrower of the source's and the model's."""
    return meta.dtype if meta.dtype.itemsize <= tensor.dtype.itemsize else tensor.dtype


def _view(staging: torch.Tensor, offset: int, meta: ParamMeta, tensor: torch.Tensor) -> torch.Tensor:
    dtype = _sent(meta, tensor)
    return staging[offset : offset + math.prod(meta.shape) * dtype.itemsize].view(dtype).view(meta.shape)
