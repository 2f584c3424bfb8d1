"""Local shards ("pieces") that another parallelism makes of parameters, before data parallelism cuts them.

    a parameter [6, 4]     tensor parallelism over two     its rows over two data-parallel ranks
    | row 0 |              | row 0 |                       | row 0 |
    | row 1 |              | row 1 |   this rank's piece   | row 1 |   this rank's shard
    | ...   |              | row 2 |
    | row 5 |

Tensor and expert parallelism make `DTensor`\\ s of parameters (``parallelize_module``, torchtitan, transformers). Flat
buffers hold the local shard as a plain tensor; modules get it back as a DTensor of the same mesh and placements. So
DTensor's work is plain operations and collectives in the graph, the gradient arrives as a local shard, and layouts and
passes do not deal with TP. Megatron-LM's local shards are plain tensors, and stay so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Run = tuple[int, int]
"""Consecutive indices of one dimension of the full tensor: the first, and how many."""

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets in the full parameter, offsets in the local shard, and sizes."""


@dataclass(frozen=True)
class TPShard:
    mesh: DeviceMesh
    """Over which the parameter was cut or replicated: not a data-parallel mesh."""
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    """Of the full parameter."""
    runs: tuple[tuple[Run, ...], ...]
    """Which indices of the full tensor the local shard has, in its order, for every dimension."""
    plain: bool = False
    """Whether modules see the local tensor, not a DTensor."""
    summands: tuple[Placement, ...] = ()
    """Placements of gradients, if ranks that hold the same plain shard have partial sums; else empty."""
    averaged: int = 1
    """By how many ranks the sum of ``summands`` is divided."""

    @staticmethod
    def of(param: DTensor) -> TPShard:
        """Returns a DTensor's local shard.

        Raises:
            ValueError: it is a partial sum, or cut in an unknown way.
        """
        mesh, placements = param.device_mesh, tuple(param.placements)
        piece, found = TPShard.cut_of(mesh, placements, tuple(param.shape)), tuple(here(param).shape)
        if piece.local != found:
            raise ValueError(f"{placements} of {list(param.shape)} make {list(piece.local)}, and {list(found)} is here")
        return piece

    @staticmethod
    def cut_of(
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        plain: bool = False,
        partial: bool = False,
        averaged: bool = False,
    ) -> TPShard:
        """Returns this rank's local shard of a parameter of that shape.

        Args:
            mesh: over which it was cut or replicated.
            placements: one per axis.
            shape: of the full parameter.
            plain: whether modules see a plain tensor.
            partial: whether gradients of ranks that hold the same plain shard are partial sums.
            averaged: whether their average counts, instead of the sum.

        Raises:
            ValueError: this rank is not in the mesh, or a placement neither cuts nor replicates.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this rank is not in its mesh, {mesh}")
        runs = runs_of(shape, tuple(mesh.shape), tuple(coordinate), placements)
        copied = [i for i, p in enumerate(placements) if isinstance(p, Replicate)] if partial else []
        summands = tuple(Partial() if i in copied else p for i, p in enumerate(placements)) if partial else ()
        ranks = math.prod(mesh.size(i) for i in copied) if averaged else 1
        return TPShard(mesh, placements, shape, runs, plain, summands, ranks)

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the local shard."""
        return tuple(sum(n for _, n in runs) for runs in self.runs)

    def seen(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the local shard as modules see it; gradients flow back to it."""
        if not self.summands:
            return local if self.plain else self.wrap(local)
        out = self.wrap(local).to_local(grad_placements=self.summands)  # DTensor's backward sums them
        return _Divided.apply(out, self.averaged) if self.averaged > 1 else out  # type: ignore[no-any-return]

    def found(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the local shard as `fully_shard` received it."""
        return local if self.plain else self.wrap(local)

    def wrap(self, local: torch.Tensor) -> DTensor:
        shape = torch.Size(self.shape)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))  # contiguous, as it is in the flat buffer
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the local shard of a full tensor."""
        for dim, runs in enumerate(self.runs):
            if runs != ((0, whole.shape[dim]),):
                parts = [whole.narrow(dim, start, n) for start, n in runs]
                whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else whole.narrow(dim, 0, 0)
        return whole

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Box]:
        """Maps a box of the local shard to boxes of the full tensor."""
        out: list[Box] = [((), (), ())]
        for runs, first, count in zip(self.runs, offsets, sizes, strict=True):
            spans, at = [], 0
            for start, n in runs:
                low, high = max(first, at), min(first + count, at + n)
                if low < high:
                    spans.append((start + low - at, low, high - low))
                at += n
            out = [((*a, there), (*b, here), (*c, n)) for a, b, c in out for there, here, n in spans]
        return out

    @property
    def cut_by(self) -> tuple[str, ...]:
        """Names of process groups whose ranks hold different parts."""
        return self._groups(cut=True)

    @property
    def copied_by(self) -> tuple[str, ...]:
        """Names of process groups whose ranks hold the same part."""
        return self._groups(cut=False)

    def _groups(self, cut: bool) -> tuple[str, ...]:
        dims = [i for i, p in enumerate(self.placements) if self.mesh.size(i) > 1 and isinstance(p, Replicate) != cut]
        return tuple(str(self.mesh.get_group(i).group_name) for i in dims)

    @property
    def parts(self) -> int:
        return math.prod(self.factor(dim) for dim in range(len(self.shape)))

    def factor(self, dim: int) -> int:
        """Returns into how many parts a dimension is cut."""
        return math.prod(self.mesh.size(i) for i, p in enumerate(self.placements) if _cuts(p, dim, len(self.shape)))


class _Divided(torch.autograd.Function):
    """Divides a gradient: gloo has no average."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: int) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / ctx.by, None


def runs_of(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[Run, ...], ...]:
    """Returns the indices of every dimension that a rank has.

    Args:
        shape: of the full tensor.
        mesh: number of ranks along every axis.
        coordinate: the rank's index along every axis.
        placements: like a DTensor's.

    Raises:
        ValueError: a placement neither cuts nor replicates.
    """
    for p in placements:
        if not isinstance(p, (Shard, _StridedShard, Replicate)):
            raise ValueError(f"{p} is neither Shard nor Replicate: redistribute it before fully_shard")
    return tuple(_runs(n, dim, len(shape), mesh, coordinate, placements) for dim, n in enumerate(shape))


def _runs(
    n: int, dim: int, ndim: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Run, ...]:
    """Cuts like torch, one mesh axis after the other. Private in torch (``_split_tensor``, ``_StridedShard``); tried on
    2.11 to 2.15.
    """
    at: torch.Tensor | None = None
    for ranks, here, placement in zip(mesh, coordinate, placements, strict=True):
        if ranks > 1 and _cuts(placement, dim, ndim):
            factor = placement.split_factor if isinstance(placement, _StridedShard) else None
            along: Any = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
            at = torch.arange(n, device="cpu") if at is None else at
            at = along._split_tensor(at, ranks, with_padding=False, contiguous=False)[0][here]
    if at is None:
        return ((0, n),)
    starts = [0, *(at.diff() != 1).nonzero().flatten().add(1).tolist(), at.numel()]
    return tuple((int(at[a]), b - a) for a, b in itertools.pairwise(starts) if b > a)


def over_tensor_ranks(mesh: DeviceMesh, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the process groups of a mesh's axes that have one of these names."""
    axes = mesh.mesh_dim_names or ()
    wide = [i for i, name in enumerate(axes) if name in names and mesh.size(i) > 1 and has_groups(mesh)]
    return tuple(str(mesh.get_group(i).group_name) for i in wide)


def sizes_along(meshes: Iterable[DeviceMesh], names: Sequence[str]) -> dict[str, int]:
    """Returns the sizes, if above one, of axes that have one of these names."""
    axes = [(name, mesh.size(i)) for mesh in meshes for i, name in enumerate(mesh.mesh_dim_names or ())]
    return {name: size for name, size in axes if name in names and size > 1}


def _cuts(placement: Placement, dim: int, ndim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim % max(ndim, 1) == dim


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor, any other unchanged. Private in torch (``_local_tensor``); tried on
    2.11 to 2.15.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_groups(mesh: DeviceMesh) -> bool:
    """Returns whether a mesh has process groups, so that torch can slice and join it. Private in torch
    (``_dim_group_names``); tried on 2.11 to 2.15.
    """
    return hasattr(mesh, "_dim_group_names")


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh from which a mesh was sliced, or itself. Private in torch (``_get_root_mesh``); tried on 2.11,
    2.13 and 2.14.
    """
    return mesh._get_root_mesh()


def concatenated(*meshes: DeviceMesh) -> DeviceMesh:
    """Joins meshes over the same ranks, their axes side by side. Private in torch; tried on 2.11 to 2.15."""
    return DeviceMesh._concatenate(list(meshes))
