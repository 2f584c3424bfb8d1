"""Whole weights out of a sharded model, unit by unit.

    for name, tensor in mfsdp.stream_weights(model, torch.bfloat16, to=0):  # the same loop on every rank
        send(name, tensor)                                                  # runs on rank 0 only

Ranks that take nothing send their rows and run the loop's body never. A rank that leaves the loop early, by ``break``
or an exception, takes part in the rest without it: the others do not wait.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..buffers.flat_buffer import FlatBuffer, buffers_in
from ..config.units import UnitSpec
from ..dtensor import parameter_names
from ..dtensor.quantized_form import Stored
from ..dtensor.tp_shards import TPShard
from ..runtime import devices, execution, groups, sync_collectives
from ..runtime.buffer_registry import unfinished
from ..runtime.transport import End
from .tensors import kept_dtype, tensors_of

Pairs = Iterable[tuple[str, torch.Tensor]]

Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | Pairs]
"""Maps the tensors of a unit, by name, to those that leave the stream."""


class ParamMeta(NamedTuple):
    """What is known of a tensor before it is there; vLLM's ``ParamMeta`` has the same fields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


Part = dict[str, torch.Tensor]
"""Tensors that a stream brings together: those of a unit, or of a layer of a model that is not sharded."""


class _Places(NamedTuple):
    """Which ranks take a flat buffer, by their indices in its groups; ``None``: all."""

    outer: list[int] | None = None
    shard: list[int] | None = None


class _Arrival(NamedTuple):
    buffer: FlatBuffer
    full: torch.Tensor | None
    end: End


class WeightStream:
    """The weights of a model, as `stream_weights` returns them. Each iteration is a new pass, with the weights of that
    time. It has the interface of vLLM's ``WeightSource`` (docs.vllm.ai, training/weight_transfer/base).
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        to: tuple[int, ...] | None,
        only: Callable[[str], bool] | None,
        prefetch: int,
        convert: Convert | None,
    ):
        self.model, self.dtype, self.to = getattr(model, "_orig_mod", model), dtype, to
        self.only, self.prefetch, self.convert = only, prefetch, convert

    @property
    def consumes(self) -> bool:
        """Whether this rank gets tensors."""
        return self.to is None or groups.rank() in self.to

    @property
    def communicates(self) -> bool:
        """Whether other ranks hold parts of the tensors."""
        parts = self.parts()
        foreign = any(isinstance(t, DTensor) and _owner(t) is None for part in parts for t in part.values())
        return foreign or any(b.spec.ranks > 1 or any(b.pieces) for part in parts for b in _buffers_of(part))

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of every tensor, in the order in which they come, on every rank. It does
        not communicate; ``convert`` runs on meta tensors.

        Raises:
            ValueError: ``convert`` gives two tensors one name.
        """
        out: dict[str, ParamMeta] = {}
        for part in self.parts():
            empty = {
                name: torch.empty(tuple(t.shape), dtype=kept_dtype(t, self.dtype), device="meta")
                for name, t in part.items()
            }
            for name, tensor in self._converted(empty):
                if name in out:
                    raise ValueError(f"stream_weights: two tensors are called {name!r}; give each a name of its own")
                out[name] = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
        return list(out.values())

    def parts(self) -> list[Part]:
        """Returns the model's tensors as they come; of tied ones the first name only."""
        units = {
            parameter_names.original(name): module.__dict__["_mfsdp_unit"]
            for name, module in self.model.named_modules()
            if "_mfsdp_unit" in module.__dict__
        }
        seen: set[int] = set()
        parts: dict[object, Part] = {}
        for name, tensor in tensors_of(self.model).items():
            if id(tensor) in seen or (self.only is not None and not self.only(name)):
                continue
            seen.add(id(tensor))
            owner = _owner(tensor)
            key = _place(name, units) if owner is None else owner.unit
            parts.setdefault(key, {})[name] = tensor
        return list(parts.values())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        arrivals, home = self._arrivals(), threading.get_ident()
        try:
            for weights in arrivals:
                pairs = self._converted(weights)
                while pairs:
                    yield pairs.pop(0)
        except BaseException:
            # The others need this rank's rows. Garbage collection may end the loop in another thread or inside of
            # another operation: ranks then differ in what they run next, which raises DesyncError on all.
            if threading.get_ident() == home and not execution.in_program():
                weights, pairs = {}, []
                for _ in arrivals:
                    pass
            raise

    def _converted(self, weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Returns what leaves the stream of a unit's tensors, and empties the dict that they are in."""
        out: Mapping[str, torch.Tensor] | Pairs = weights
        if self.convert is not None and weights:
            out = self.convert(dict(weights))
        pairs = list(out.items() if isinstance(out, Mapping) else out)
        weights.clear()
        return pairs

    # what arrives: the same collectives, whichever ranks take the tensors

    def _arrivals(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the whole tensors of each part; none on ranks that take nothing."""
        parts = self.parts()
        buffers = [buffer for part in parts for buffer in _buffers_of(part)]
        for outermost in (buffer.unit.outermost for buffer in buffers_in(self.model)):
            if outermost.half:
                raise unfinished(outermost)
        places = self._places(buffers)
        coming = iter(parts)
        under_way: deque[tuple[Part, list[_Arrival]]] = deque()
        while True:
            while len(under_way) <= self.prefetch and (part := next(coming, None)) is not None:
                under_way.append((part, [self._launch(buffer, places[buffer]) for buffer in _buffers_of(part)]))
            if not under_way:
                return
            yield self._arrived(*under_way.popleft())

    @torch.inference_mode(False)
    @torch.no_grad()
    def _launch(self, buffer: FlatBuffer, places: _Places) -> _Arrival:
        """Launches what brings a flat buffer to the ranks that take it."""
        s, main = buffer.spec, buffer.weights.main.detach()
        if places.shard == [] and not (s.outer_optim and places.outer):
            return _Arrival(buffer, None, _done)
        what = f"stream of {buffer.path} in {kept_dtype(main, self.dtype)}"
        whom = "" if self.to is None else f" to ranks {list(self.to)}"
        full: torch.Tensor | None = main.to(kept_dtype(main, self.dtype), copy=True)  # rows may be written meanwhile
        end: End = _done
        if s.outer_optim and s.outer > 1:
            with execution.announced(f"{what}, outer axis{whom}", s.outer_group):
                full, end = sync_collectives.collect(full, s.splits_on(2), s.outer, s.outer_group, places.outer)  # type: ignore[arg-type]
        if s.world > 1 and full is not None:
            end()
            with execution.announced(f"{what}{whom}", s.group):
                full, end = sync_collectives.collect(full, s.splits, s.world, s.group, places.shard)
        return _Arrival(buffer, full if places.shard != [] else None, end)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _arrived(self, part: Part, arrivals: list[_Arrival]) -> dict[str, torch.Tensor]:
        """Waits for the buffers of a part; returns its tensors if this rank takes them."""
        fulls: dict[FlatBuffer, torch.Tensor | None] = {}
        while arrivals:
            arrival = arrivals.pop(0)
            arrival.end()
            fulls[arrival.buffer] = arrival.full
        out: dict[str, torch.Tensor] = {}
        for name, tensor in part.items():
            owner = _owner(tensor)
            value = self._foreign(tensor) if owner is None else self._own(tensor, fulls[owner])
            if value is not None and self.consumes:
                out[name] = value
        return out

    def _own(self, param: Any, full: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a whole parameter of a gathered buffer, a view; joined over the ranks of another parallelism."""
        if full is None:
            return None
        param, stored = _kept_as(param)
        layout, slot = param.sharding.layout, param.sharding.slot
        at, piece = layout.slots[slot], param.sharding.piece
        value = full[at.offset : at.offset + at.numel].view(at.shape)
        if piece is None:
            return value if stored is None else stored.seen(value)
        if not self._wants(piece):
            return None
        with execution.announced(f"stream of a piece of {at.name}{list(piece.shape)}", *piece.cut_by):
            return piece.wrap(value).full_tensor()  # type: ignore[no-any-return]

    def _foreign(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of a tensor that is not in a flat buffer."""
        kept = kept_dtype(tensor, self.dtype)
        if isinstance(tensor, DTensor):
            return tensor.detach().to(kept).full_tensor()  # type: ignore[attr-defined, no-any-return]
        return tensor.detach().to(kept, copy=True) if self.consumes else None

    # who takes what

    def _wants(self, piece: TPShard) -> bool:
        """Whether a rank among those that hold a parameter's pieces takes it; they agree."""
        return self.to is None or bool(set(self.to) & set(piece.mesh.mesh.flatten().tolist()))

    def _places(self, buffers: list[FlatBuffer]) -> dict[FlatBuffer, _Places]:
        """Returns which ranks take each buffer. If only some do, ranks tell each other: on meshes of several axes a
        rank does not know what others of its group need.
        """
        if self.to is None:
            return dict.fromkeys(buffers, _Places())
        wanted = {b: self.consumes or any(p is not None and self._wants(p) for p in b.pieces) for b in buffers}
        shard = self._told(wanted, lambda spec: spec.group)
        outer = self._told({b: bool(shard[b]) for b in buffers}, lambda spec: spec.outer_group)
        for b in buffers:
            if not outer[b] and not b.placement.beside and not any(b.pieces):
                raise ValueError(
                    f"stream_weights: to={list(self.to)}, and none of these ranks holds {b.path}: name ranks of the "
                    "default group that the model is sharded over"
                )
        return {b: _Places(outer[b], shard[b]) for b in buffers}

    def _told(self, wanted: dict[FlatBuffer, bool], group_of: Callable[[UnitSpec], str]) -> dict[FlatBuffer, list[int]]:
        """Exchanges over a group of each buffer whether a rank wants it; returns indices of those that do."""
        by_group: dict[str, list[FlatBuffer]] = {}
        for buffer in wanted:
            by_group.setdefault(group_of(buffer.spec), []).append(buffer)
        out: dict[FlatBuffer, list[int]] = {}
        for group, members in by_group.items():
            flags = torch.tensor([wanted[b] for b in members], dtype=torch.uint8)
            said = flags.view(1, -1)
            if group:
                what = f"stream of {len(members)} buffers of {type(self.model).__name__} to ranks {self.to}"
                with execution.announced(what, group):
                    said = sync_collectives.gathered(flags.to(devices.collective_device(group)), group)
            rows = said.view(-1, len(members)).tolist()
            out |= {b: [r for r, row in enumerate(rows) if row[i]] for i, b in enumerate(members)}
        return out


def stream_weights(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    to: int | Sequence[int] | None = None,
    only: Callable[[str], bool] | None = None,
    prefetch: int = 1,
    convert: Convert | None = None,
) -> WeightStream:
    """Returns the model's whole main weights and persistent buffers as (name, tensor) pairs, unit by unit. All ranks
    that hold the model must iterate together, also those that take nothing; they may leave at any time, and the rest
    then passes without them.

    A tensor is a view of memory of its unit that the stream does not use again: it stays valid, and keeps the unit's
    memory until it is dropped. ``clone()`` it to keep one alone. A rank that takes tensors holds one unit, ``prefetch``
    more that are under way, and what the loop still holds; another one its rows in ``dtype``. With tensor or expert
    parallelism, ranks that hold pieces of what another one takes gather as well.

    Args:
        model: sharded (also by FSDP2), unsharded, or sharded in parts. Names are the model's own; of tied weights the
            first.
        dtype: of floating-point tensors, cast before they are communicated: bitwise ``full_tensor().to(dtype)``;
            ``None``: that of the main weights.
        to: the ranks of the default group that take the tensors; ``None``: all. The same on all ranks.
        only: says by name which tensors are streamed; units without any are not communicated. The same on all ranks.
        prefetch: how many units are under way while the loop uses one.
        convert: maps the tensors of a unit, a dict by name, to those that leave the stream, a dict or pairs: renames,
            splits, joins or merges them. It must not depend on values: `WeightStream.metadata` calls it with meta
            tensors. `mfsdp.integrations.hub_names` has transformers' conversions to the names of the hub.

    Raises:
        ValueError: an invalid argument; while iterating, ``to`` names no rank that holds the model.
        RuntimeError: while iterating, the model is half loaded.
        DesyncError: while iterating, ranks stream different units, or not all of them iterate.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"stream_weights: dtype={dtype!r}: give a floating-point dtype of 16 bits or more")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"stream_weights: prefetch={prefetch!r} must be an integer, 0 or more")
    for name, value in (("only", only), ("convert", convert)):
        if value is not None and not callable(value):
            raise ValueError(f"stream_weights: {name}={value!r} must be a function")
    return WeightStream(model, dtype, _ranks(to), only, prefetch, convert)


def _ranks(to: Any) -> tuple[int, ...] | None:
    if to is None:
        return None
    ranks = (to,) if isinstance(to, int) else tuple(to) if isinstance(to, Sequence) else ()
    world = groups.world()
    if not ranks or any(isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < world for r in ranks):
        raise ValueError(
            f"stream_weights: to={to!r}: give a rank, several, or None for all; ranks are 0 to {world - 1}"
        )
    return tuple(sorted(set(ranks)))


def _kept_as(tensor: Any) -> tuple[Any, Stored | None]:
    """Returns the parameter that a tensor of a model is, and, of a part of a quantized weight, what its bytes are."""
    return getattr(tensor, "_mfsdp_bytes", None) or (tensor, None)


def _owner(tensor: Any) -> FlatBuffer | None:
    """Returns the flat buffer of a sharded parameter."""
    return getattr(_kept_as(tensor)[0], "_mfsdp_owner", None)


def _buffers_of(part: Part) -> list[FlatBuffer]:
    return list(dict.fromkeys(owner for t in part.values() if (owner := _owner(t)) is not None))


def _place(name: str, units: Mapping[str, object]) -> object:
    """Returns the unit around a tensor that is in no flat buffer, or the path of its layer."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in units:
            return units[path]
    layer = re.match(r"(?:.*?\.)?\d+\.", name)
    return layer[0] if layer else ""


def _done() -> None:
    pass
