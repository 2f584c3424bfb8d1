"""Pieces: what another kind of parallelism has left of a parameter on this rank, before data parallelism cuts it.

    a parameter [6, 4]     tensor parallelism over two     its rows over two data-parallel ranks
    | row 0 |              | row 0 |                       | row 0 |
    | row 1 |              | row 1 |   this rank's piece   | row 1 |   this rank's shard
    | ...   |              | row 2 |
    | row 5 |

Tensor and expert parallelism make `DTensor`\\ s of parameters (``parallelize_module``, torchtitan, transformers). Flat
buffers hold the piece, a plain tensor; modules get it back as a DTensor of the same mesh and placements. So what
DTensor does with it is in the graph as plain operations and collectives, the gradient comes back as a piece, and
layouts and passes know nothing of it. Megatron-LM's pieces are plain tensors, and stay so.
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
"""Indices of one dimension of the whole that lie beside each other: the first, and how many."""

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Where it begins in the whole parameter, where in the piece, and its sizes."""


@dataclass(frozen=True)
class TPShard:
    """A piece of a parameter, and what it is a piece of."""

    mesh: DeviceMesh
    """Over which it was cut or copied: not one of data parallelism."""
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    """Of the whole parameter."""
    runs: tuple[tuple[Run, ...], ...]
    """For every dimension, which indices of the whole the piece has, in its order."""
    plain: bool = False
    """Whether modules see what is on this rank."""
    partial: bool = False
    """Whether gradients of ranks that hold the same are summands, of a plain one."""

    @staticmethod
    def of(param: DTensor) -> TPShard:
        """The piece that a DTensor is on this rank.

        Raises:
            ValueError: it is no piece but a summand, or cut in a way that is not known.
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
    ) -> TPShard:
        """This rank's piece of a parameter of that shape.

        Raises:
            ValueError: this rank has none, or a placement neither cuts nor copies.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this rank is not in its mesh, {mesh}")
        runs = runs_of(shape, tuple(mesh.shape), tuple(coordinate), placements)
        return TPShard(mesh, placements, shape, runs, plain, partial)

    @property
    def local(self) -> tuple[int, ...]:
        """Its own shape."""
        return tuple(sum(n for _, n in runs) for runs in self.runs)

    def seen(self, local: torch.Tensor) -> torch.Tensor:
        """The piece as modules see it; what is computed with it is differentiated to the piece."""
        if self.partial:  # DTensor's derivative adds them up
            return self.wrap(local).to_local(grad_placements=[Partial()] * self.mesh.ndim)
        return local if self.plain else self.wrap(local)

    def found(self, local: torch.Tensor) -> torch.Tensor:
        """The piece as it came to `fully_shard`."""
        return local if self.plain else self.wrap(local)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The piece as a DTensor."""
        shape = torch.Size(self.shape)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))  # contiguous, as it is in the flat buffer
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of a whole tensor."""
        for dim, runs in enumerate(self.runs):
            if runs != ((0, whole.shape[dim]),):
                parts = [whole.narrow(dim, start, n) for start, n in runs]
                whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else whole.narrow(dim, 0, 0)
        return whole

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Box]:
        """A box of the piece, as boxes of the whole."""
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
        """Names of the process groups whose ranks hold different parts of it."""
        return self._groups(cut=True)

    @property
    def copied_by(self) -> tuple[str, ...]:
        """Names of those whose ranks hold the same."""
        return self._groups(cut=False)

    def _groups(self, cut: bool) -> tuple[str, ...]:
        dims = [i for i, p in enumerate(self.placements) if self.mesh.size(i) > 1 and isinstance(p, Replicate) != cut]
        return tuple(str(self.mesh.get_group(i).group_name) for i in dims)

    @property
    def parts(self) -> int:
        """How many different ones there are."""
        return math.prod(self.factor(dim) for dim in range(len(self.shape)))

    def factor(self, dim: int) -> int:
        """How many parts there are of a dimension."""
        return math.prod(self.mesh.size(i) for i, p in enumerate(self.placements) if _cuts(p, dim, len(self.shape)))


def runs_of(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[Run, ...], ...]:
    """Which indices of every dimension a rank has.

    Args:
        shape: of the whole tensor.
        mesh: the number of ranks along every axis.
        coordinate: the rank's place along every axis.
        placements: as those of a DTensor.

    Raises:
        ValueError: a placement neither cuts nor copies.
    """
    for p in placements:
        if not isinstance(p, (Shard, _StridedShard, Replicate)):
            raise ValueError(f"{p} is neither Shard nor Replicate: redistribute it before fully_shard")
    return tuple(_runs(n, dim, len(shape), mesh, coordinate, placements) for dim, n in enumerate(shape))


def _runs(
    n: int, dim: int, ndim: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Run, ...]:
    """As torch cuts: an axis of the mesh after the other. Private in torch (``_split_tensor``, ``_StridedShard``);
    tried on 2.11 to 2.15.
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
    """Names of the process groups of a mesh's axes that are called so."""
    told = mesh.mesh_dim_names or ()
    wide = [i for i, name in enumerate(told) if name in names and mesh.size(i) > 1 and has_groups(mesh)]
    return tuple(str(mesh.get_group(i).group_name) for i in wide)


def sizes_along(meshes: Iterable[DeviceMesh], names: Sequence[str]) -> dict[str, int]:
    """How many ranks the axes of meshes have that are called so, by name; of more than one."""
    axes = [(name, mesh.size(i)) for mesh in meshes for i, name in enumerate(mesh.mesh_dim_names or ())]
    return {name: size for name, size in axes if name in names and size > 1}


def _cuts(placement: Placement, dim: int, ndim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim % max(ndim, 1) == dim


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this rank. Private in torch (``_local_tensor``); tried on 2.11 to 2.15."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_groups(mesh: DeviceMesh) -> bool:
    """Whether there are process groups behind a mesh, and torch can slice and join it. Private in torch
    (``_dim_group_names``); tried on 2.11 to 2.15.
    """
    return hasattr(mesh, "_dim_group_names")


def concatenated(*meshes: DeviceMesh) -> DeviceMesh:
    """Meshes over the same ranks as one, their axes side by side. Private in torch; tried on 2.11 to 2.15."""
    return DeviceMesh._concatenate(list(meshes))
