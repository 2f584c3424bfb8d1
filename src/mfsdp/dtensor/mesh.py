"""Maps the axes of a device mesh to their purpose: which ranks train together.

Each axis is used, left to another parallelism that its name tells, or refused (invariant 37): over an unused axis,
replicas would diverge.

    dp_shard, shard, dp_shard_cp, fsdp    the shard axis: units are sharded over it
    dp_outer, dp_replicate, replicate     the outer axis
    cp                                    part of the shard axis: its ranks have equal weights and other tokens
    tp, etp, tensor, model                left to tensor parallelism
    pp, pipe, pipeline                    left to pipeline parallelism
    ep, sp                                refused: the name does not tell which weights their ranks share

A mesh of two axes with none of the names of the last four lines is (outer, shard), whatever the names. ``dp_mesh_dims``
gives other names their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime import groups
from .shard_spec import local_mesh
from .tp_shards import has_groups, over_tensor_ranks

SHARD = ("dp_shard", "shard", "dp_shard_cp", "fsdp")
OUTER = ("dp_outer", "dp_replicate", "replicate")
FOLDED = ("cp",)
TENSOR = ("tp", "etp", "tensor", "model")
PIPELINE = ("pp", "pipe", "pipeline")

OTHERS = (*TENSOR, *PIPELINE)
REFUSED = {
    "ep": "its ranks hold different experts, and the same of everything else. Shard the experts of each layer first, "
    "over the ranks that hold the same ones, fully_shard(experts, mesh=sparse_mesh['efsdp']), then the model over a "
    "mesh of all data-parallel ranks",
    "sp": "if its ranks have whole weights and see other tokens (Ulysses), shard over it too, "
    "dp_mesh_dims={'shard': ('dp_shard', 'sp')}; if they are those of tensor parallelism, leave it out, "
    "mesh['dp_shard']",
}


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that data parallelism uses, by number, in the mesh's order."""

    mesh: DeviceMesh
    outer: tuple[int, ...]
    """Empty for a single level."""
    shard: tuple[int, ...]

    def inner(self) -> DeviceMesh:
        """Returns the shard axis, 1-D."""
        return flat(self.mesh, self.shard)

    def both(self) -> DeviceMesh:
        """Returns the 2-D mesh (outer, shard)."""
        mesh, names, dims = self.mesh, self.mesh.mesh_dim_names, (*self.outer, *self.shard)
        if not has_groups(mesh):
            shape = (_size(mesh, self.outer), _size(mesh, self.shard))
            return local_mesh(mesh.device_type, shape, _number(mesh, dims))
        if names and len(dims) == 2 and dims[0] < dims[1]:
            return mesh if mesh.ndim == 2 else mesh[tuple(names[i] for i in dims)]
        axes = flat(mesh, self.outer), flat(mesh, self.shard)
        return DeviceMesh.from_group(
            [axis.get_group() for axis in axes],
            mesh.device_type,
            self.grid(),
            mesh_dim_names=tuple((axis.mesh_dim_names or ("",))[0] for axis in axes),
        )

    def beside(self) -> tuple[str, ...]:
        """Returns the names of the process groups of tensor parallelism."""
        names = self.mesh.mesh_dim_names or ()
        used = {names[i] for i in (*self.outer, *self.shard)} if names else set()
        return over_tensor_ranks(self.mesh, [n for n in TENSOR if n not in used])

    def grid(self) -> torch.Tensor:
        """Returns the ranks that train together with this one, [outer, shard]."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        dims = (*self.outer, *self.shard)
        rest = [i for i in range(self.mesh.ndim) if i not in dims]
        ranks = self.mesh.mesh.permute(*rest, *dims)[tuple(coordinate[i] for i in rest)]
        return ranks.reshape(_size(self.mesh, self.outer), _size(self.mesh, self.shard))

    def one(self) -> DeviceMesh:
        """Returns all data-parallel axes as one axis."""
        return flat(self.mesh, tuple(sorted((*self.outer, *self.shard))))


def axes(mesh: DeviceMesh | None, dp_mesh_dims: Any, device: torch.device) -> Axes:
    """Returns the axes of a mesh that `fully_shard` uses.

    Args:
        mesh: ``None``: all ranks of the default group, or this process alone.
        dp_mesh_dims: names, see `fully_shard`.
        device: where parameters will live; the meta device if nothing will run.

    Raises:
        ValueError: no mesh, a mesh of another device type, without this rank or with ranks out of order; an axis would
            be unused.
    """
    if mesh is None:
        if dp_mesh_dims is not None:
            raise ValueError(f"dp_mesh_dims={dp_mesh_dims!r} names axes of a mesh: give mesh= too")
        if not groups.initialized():
            if device.type != "meta":
                groups.told_of_launcher()
            return Axes(local_mesh(device.type, (1,)), (), (0,))
        mesh = init_device_mesh(device.type, (groups.world(),), mesh_dim_names=("fsdp",))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh={mesh!r}: give a torch.distributed DeviceMesh")
    found = _by_name(mesh) if dp_mesh_dims is None else _by_dims(mesh, dp_mesh_dims)
    if device.type != "meta" and mesh.device_type != device.type:
        raise ValueError(
            f"fully_shard: the mesh is over {mesh.device_type!r} but parameters go to {str(device)!r}; "
            "pass device= or a mesh of that device type"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"fully_shard: this rank is not in {mesh}; shard only on ranks that are")
    grid = found.grid()
    if not ((grid.diff(dim=0) > 0).all() and (grid.diff(dim=1) > 0).all()):
        raise ValueError(f"fully_shard: ranks must ascend along the axes of a mesh; they are {grid.tolist()}")
    return found


def flat(mesh: DeviceMesh, dims: tuple[int, ...]) -> DeviceMesh:
    """Returns some axes of a mesh as one, with a process group; if it is new, all ranks of the job create it together.

    Private in torch (``_flatten``, ``_dim_group_names``); tried on 2.13.
    """
    if mesh.ndim == 1:
        return mesh
    if not has_groups(mesh):
        return local_mesh(mesh.device_type, (_size(mesh, dims),), _number(mesh, dims))
    mesh = _with_names(mesh)
    names, wide = mesh.mesh_dim_names, [i for i in dims if mesh.size(i) > 1]
    assert names is not None
    if len(wide) <= 1:
        return mesh[names[(wide or dims)[-1]]]
    made: DeviceMesh = mesh[tuple(names[i] for i in wide)]._flatten()
    if (made.mesh.diff() > 0).all():
        return made
    return DeviceMesh.from_group(made.get_group(), made.device_type, mesh_dim_names=made.mesh_dim_names)  # in its order


def _with_names(mesh: DeviceMesh) -> DeviceMesh:
    """Gives a two-axis mesh names if it has none: torch slices and flattens by name. Done once per mesh."""
    if mesh.mesh_dim_names is not None:
        return mesh
    if mesh not in _named_ones:
        groups, names = mesh.get_all_groups(), ("dp_outer", "dp_shard")
        _named_ones[mesh] = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=names)
    return _named_ones[mesh]  # type: ignore[no-any-return]


_named_ones: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The named mesh made for each mesh without names."""


def _size(mesh: DeviceMesh, dims: Iterable[int]) -> int:
    return math.prod(mesh.size(i) for i in dims)


def _number(mesh: DeviceMesh, dims: Iterable[int]) -> int:
    """Returns this rank's index along some axes."""
    coordinate, number = mesh.get_coordinate(), 0
    assert coordinate is not None
    for i in dims:
        number = number * mesh.size(i) + coordinate[i]
    return number


# Names


def _by_name(mesh: DeviceMesh) -> Axes:
    """Assigns the axes of a mesh by their names alone."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    if mesh.ndim == 1:
        return Axes(mesh, (), (0,))
    others = {*FOLDED, *OTHERS, *REFUSED}
    if mesh.ndim == 2 and not (others & set(names) or names[0] in SHARD or names[1] in OUTER):
        return Axes(mesh, (0,), (1,))
    _refuse(mesh, REFUSED)
    shard, outer = _numbers(names, SHARD), _numbers(names, OUTER)
    known = {*SHARD, *OUTER, *others}
    unknown = [n or "unnamed" for i, n in enumerate(names) if n not in known and mesh.size(i) > 1]
    if unknown or not (shard or _numbers(names, FOLDED)) or len(shard) > 1 or len(outer) > 1:
        raise ValueError(
            f"fully_shard: which axes of the mesh {_named(mesh)} are meant? Name the one to shard over 'dp_shard', and "
            "an outer one 'dp_outer', or say which are, dp_mesh_dims={'shard': name, 'replicate': name}; 'tp' and 'pp' "
            "are left alone"
        )
    if shard and outer and shard < outer:
        raise ValueError(
            f"fully_shard: {names[outer[0]]!r} has to come before {names[shard[0]]!r} in the mesh; it is {names}. If "
            f"that is meant: dp_mesh_dims={{'shard': {names[shard[0]]!r}, 'replicate': {names[outer[0]]!r}}}"
        )
    return Axes(mesh, outer, _numbers(names, (*SHARD, *FOLDED)))


def _by_dims(mesh: DeviceMesh, dims: Any) -> Axes:
    """Assigns axes as the user says; other parallelisms own the axes left out, if their names allow it."""
    replicate, shard = _dims(dims)
    names, given = mesh.mesh_dim_names or (), (*replicate, *shard)
    strangers = [n for n in given if n not in names]
    if strangers or len(set(given)) < len(given):
        what = f"{strangers} are no axes" if strangers else "an axis is named twice"
        raise ValueError(f"dp_mesh_dims={dims!r}: {what} of the mesh {_named(mesh)}")
    if not shard:
        raise ValueError(
            f"dp_mesh_dims={dims!r} names no axis to shard over; if parameters are to stay whole on every rank, name "
            "it as 'shard' and choose strategy='no_shard'"
        )
    _refuse(mesh, {n: why for n, why in REFUSED.items() if n not in given})
    mine = {*SHARD, *OUTER, *FOLDED}
    left = [n for i, n in enumerate(names) if n in mine and n not in given and mesh.size(i) > 1]
    if left:
        raise ValueError(
            f"dp_mesh_dims={dims!r} leaves out {left}: ranks would train apart over it. Name it too, as 'shard' or "
            f"'replicate', or give the part of the mesh that is meant, mesh[{', '.join(map(repr, given))}]"
        )
    return Axes(mesh, _numbers(names, replicate), _numbers(names, shard))


def _dims(dims: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the outer and of the shard axis; each may have several."""
    if isinstance(dims, str):
        dims = {"shard": dims}
    elif isinstance(dims, Sequence) and len(dims) == 2 and dims[0] not in SHARD and dims[1] not in (*OUTER, *FOLDED):
        dims = {"replicate": dims[0], "shard": dims[1]}
    elif hasattr(dims, "shard") and hasattr(dims, "replicate"):
        dims = {"replicate": dims.replicate, "shard": dims.shard}
    if isinstance(dims, Mapping) and set(dims) <= {"replicate", "shard"}:
        found = [dims.get(n) or () for n in ("replicate", "shard")]
        outer, shard = ([n] if isinstance(n, str) or not isinstance(n, Sequence) else n for n in found)
        if all(isinstance(n, str) for n in (*outer, *shard)):
            return tuple(outer), tuple(shard)
    raise ValueError(
        f"dp_mesh_dims={dims!r}: give torch's DataParallelMeshDims, or {{'shard': name, 'replicate': name}}, each a "
        "name or several; or two names, (outer, shard)"
    )


def _refuse(mesh: DeviceMesh, reasons: Mapping[str, str]) -> None:
    for i, name in enumerate(mesh.mesh_dim_names or ()):
        if name in reasons and mesh.size(i) > 1:
            raise ValueError(f"fully_shard: axis {name!r} of the mesh {_named(mesh)}: {reasons[name]}")


def _named(mesh: DeviceMesh) -> str:
    return str(mesh.mesh_dim_names or f"of {mesh.ndim} axes without names")


def _numbers(names: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(names) if name in wanted)
