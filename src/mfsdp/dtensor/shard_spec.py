"""The sharding of one tensor: which rows each rank holds, and over which process groups."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..config.layout import Layout, Local
from ..runtime import execution, groups, sync_collectives
from .shard_placement import RowShard, StridedRowShard
from .tp_shards import Box, TPShard, concatenated, has_groups


def local_mesh(
    device_type: str, shape: tuple[int, ...], rank: int = 0, numbers: Sequence[int] | None = None
) -> DeviceMesh:
    """Returns a mesh without process groups, over one axis or (outer, shard): for one process, or for planning.
    ``numbers`` are its ranks, by default 0, 1, ...

    Private in torch (``_init_backend``, ``_rank``); tried on 2.11 to 2.15.
    """
    names = ("dp_outer", "dp_shard")[-len(shape) :]
    with torch.device("cpu"):  # not on the default device
        ranks = torch.tensor(numbers or range(math.prod(shape))).view(shape)
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def layout_rank(mesh: DeviceMesh) -> int:
    """Returns this rank's index in a layout over the mesh: 1-D, or (outer, shard) with outer ranks adjacent."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "fully_shard lets no rank in that is not in the mesh"
    if mesh.ndim == 1:
        return int(coordinate[0])
    outer, shard = coordinate
    return int(shard) * mesh.size(0) + int(outer)


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of one tensor, shared by a parameter, its gradient and its optimizer state."""

    layout: Layout
    slot: int
    mesh: DeviceMesh
    copies: DeviceMesh | None = None
    """If nothing is cut and ``mesh`` is this rank alone: the ranks that all hold the full tensor."""
    home: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)
    """A weak reference to the parameter's flat buffer, if it belongs to a model."""
    piece: TPShard | None = None
    """The local shard of another parallelism, which data parallelism cuts."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape if self.piece else self.layout.slots[self.slot].shape

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the DTensor spec for a dtype; cached, because optimizers make many tensors."""
        known = self.__dict__.setdefault("_specs", {})
        if dtype not in known:
            shape = torch.Size(self.shape)
            meta = TensorMeta(shape, strides_of(shape), dtype)
            known[dtype] = DTensorSpec(*self._mesh_and_placements, tensor_meta=meta)
        return known[dtype]  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_specs"}

    def local(self, rank: int | None = None) -> Local:
        """Returns a rank's part, by default this one's."""
        return self.layout.local(self.slot, self.rank if rank is None else rank)

    @property
    def rank(self) -> int:
        return layout_rank(self.mesh)

    @property
    def groups(self) -> list[str]:
        """Names of the process groups that shard the tensor. Gathering over each in turn gives the layout's order.

        Raises:
            RuntimeError: the mesh has none (it was made for planning).
        """
        try:
            dims = [dim for dim in range(self.mesh.ndim) if self.mesh.size(dim) > 1]
            own = [str(self.mesh.get_group(dim).group_name) for dim in dims]
            return [groups.gathers_of(name, self.mesh.device_type) for name in own]
        except (RuntimeError, AssertionError, KeyError, IndexError) as error:
            raise RuntimeError(
                f"{self.mesh} has no process group: this model was sharded for planning and cannot communicate"
            ) from error

    @property
    def over(self) -> tuple[str, ...]:
        """Names of all process groups whose ranks hold different parts: data-parallel ones first."""
        return (*self.groups, *(self.piece.cut_by if self.piece else ()))

    @property
    def parts(self) -> int:
        return self.layout.world * (self.piece.parts if self.piece else 1)

    @property
    def trains_over(self) -> tuple[tuple[str, ...], float]:
        """Names of the process groups whose ranks have their own data, and the divisor of summed gradients.

        Raises:
            NotImplementedError: another parallelism cuts the tensor over several axes, and only some of them share
                data.
        """
        buffer = None if self.home is None else self.home()
        if buffer is None:
            return tuple(self.groups), float(self.layout.world)
        spec, others = buffer.spec, buffer.unit.ranks // buffer.spec.ranks
        names = tuple(filter(None, (spec.group, spec.outer_group)))
        if others > 1 and self.piece is not None:  # experts: their mesh also splits data
            if self.piece.parts != others:
                raise NotImplementedError(
                    f"mfsdp: {self.layout.slots[self.slot].name} is cut into {self.piece.parts} pieces, over ranks of "
                    f"which {others} have data of their own: a loss cannot be made of it outside of forward"
                )
            names += self.piece.cut_by
        return names, spec.divide

    def total(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns a gradient summed over ranks and divided (Note [Eager autograd]); a collective per group."""
        names, divide = self.trains_over
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous()
        with execution.announced(f"derivatives of {self.layout.slots[self.slot].name}{list(self.shape)}", *names):
            for name in names:
                total = sync_collectives.reduced(total, "sum", name)
        return total.div_(divide).to(grad.dtype)

    def same_on_all_ranks(self, number: int) -> bool:
        """Returns whether all ranks that hold the tensor have the same number; a collective."""
        low_high = torch.tensor([-number, number], device=self.mesh.device_type)
        with self.announced(f"numbers of {self.layout.slots[self.slot].name}{list(self.shape)}"):
            for group in self.over:
                low_high = sync_collectives.reduced(low_high, "max", group)
        return bool(low_high.sum() == 0)

    def announced(self, what: str) -> AbstractContextManager[None]:
        """Announces collectives over the ranks that hold the tensor (`execution.announced`)."""
        return execution.announced(what, *self.over)

    @cached_property
    def _mesh_and_placements(self) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The mesh and placements that torch sees: the local rows; a local shard of TP in FSDP2's form."""
        mesh = self.copies or self.mesh
        if self.piece is None:
            return mesh, self._rows()
        if not (has_groups(mesh) and has_groups(self.piece.mesh)):
            return self.piece.mesh, self.piece.placements
        try:
            both = concatenated(mesh, self.piece.mesh)
        except (RuntimeError, TypeError, ValueError):  # unnamed, or not of one root mesh: torch cannot join them
            return self.piece.mesh, self.piece.placements
        cuts = self.piece.factor(0) if self.shape and self.copies is None else 1
        rows = self._rows() if cuts == 1 else (StridedRowShard(cuts),) * self.mesh.ndim
        return both, (*rows, *self.piece.placements)

    def _rows(self) -> tuple[Placement, ...]:
        if self.copies is not None:
            return (Replicate(),) * self.copies.ndim
        shape = self.layout.slots[self.slot].shape
        if self.layout.world == 1 or not shape or self.mesh.get_coordinate() is None:
            return (Shard(0),) * self.mesh.ndim
        at, columns = self.local(), max(math.prod(shape[1:]), 1)
        rows = (at.numel // columns, at.param_offset // columns) if at.shape[1:] == shape[1:] else None
        return (*(RowShard(rows, last=False) for _ in range(self.mesh.ndim - 1)), RowShard(rows))

    def boxes(self, rank: int | None = None) -> list[Box]:
        """Returns a rank's part as boxes, by default this one's."""
        chunks = self.layout.chunks(self.slot, self.rank if rank is None else rank)
        if self.piece is None:
            return [(offsets, offsets, sizes) for offsets, sizes in chunks]
        return [box for chunk in chunks for box in self.piece.boxes(*chunk)]

    def same(self, other: ShardSpec) -> bool:
        """Returns whether ranks hold the same rows of tensors of the same shape."""
        if self is other or other.__dict__.get("_like") is self:
            return True
        alike = (
            self.shape == other.shape
            and self.piece == other.piece
            and self.layout.world == other.layout.world
            and all(
                (a.param_offset, a.numel) == (b.param_offset, b.numel)
                for a, b in ((self.local(r), other.local(r)) for r in range(self.layout.world))
            )
        )
        if alike:
            other.__dict__["_like"] = self  # optimizer state from a pickle is compared in every step
        return alike

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        at = self.local()
        if not any(whole.stride()) and whole.dim():  # one value everywhere, such as the gradient of a sum
            return whole[(0,) * whole.dim()].expand(at.shape) if whole.numel() else whole.new_empty(at.shape)
        if self.piece is not None:
            whole = self.piece.cut(whole)
        return whole.reshape(-1)[at.param_offset : at.param_offset + at.numel].view(at.shape)


def strides_of(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
