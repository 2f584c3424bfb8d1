"""Local shards in plain tensors, described by the attributes of Megatron-LM and TransformerEngine.

    attribute of a parameter              ranks of tensor or expert parallelism hold   and their gradients
    tensor_model_parallel, partition_dim  parts, cut along that dimension              belong to the parts
    sequence_parallel                     the same values                              are added
    average_gradients_across_tp_domain    the same values                              are averaged
    allreduce=False                       different experts of the same name           belong to the experts

The global tensor of experts concatenates those of all expert-parallel ranks along dimension 0: of experts stacked in
one tensor the stack of all, of a list of experts the n-th of every rank. Megatron-LM's grouped weight
``[hidden, experts * ffn]`` is ``[experts, hidden, ffn]`` in memory, so this is its order too. Expert tensor parallelism
cuts each rank's part again.

Libraries set the attributes for a single rank too, so they count unless the module, its configuration or Megatron-LM's
state has one rank, or the module is TransformerEngine's and not cut.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..dtensor import transformer_engine as te
from ..dtensor.mesh import TENSOR
from ..dtensor.tp_shards import TPShard, concatenated, has_groups, root_of
from ..runtime import groups


@dataclass(frozen=True)
class _Parallelism:
    """Where the ranks of a parallelism are found."""

    axes: tuple[str, ...]
    """Names in a mesh."""
    module: tuple[str, ...]
    """Attributes of a module: numbers or groups."""
    config: str
    """Attribute of a module's configuration."""
    state: str
    """Function of Megatron-LM's global state."""
    advice: tuple[str, str]
    """Its name, and what to give if its ranks are not known."""

    def ranks(self, owner: nn.Module) -> int | None:
        """Returns their number, if known from the module, its configuration or Megatron-LM."""
        config = getattr(owner, "config", None)
        said = [getattr(owner, name, None) for name in self.module]
        found = map(_size, (*said, getattr(config, self.config, None), self.megatron_group()))
        return next((n for n in found if n is not None), None)

    def mesh(self, owner: nn.Module, mesh: DeviceMesh | None, device: str) -> DeviceMesh | None:
        """Returns them: an axis of the given mesh or of its root mesh, or a group of the module or Megatron-LM."""
        for known in (mesh, root_of(mesh)) if mesh is not None and has_groups(mesh) else ():
            for name in self.axes:
                if name in (known.mesh_dim_names or ()):
                    return known[name]
        group = getattr(owner, self.module[-1], None) or self.megatron_group()
        return groups.as_mesh(group, device, self.axes[0])

    def megatron_group(self) -> object:
        state: Any = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            return None
        return getattr(state, self.state)(check_initialized=False)

    def over(
        self, said: str, value: bool, fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None
    ) -> DeviceMesh | None:
        """Returns the ranks if the parameter has the attribute ``said`` with that value and there are several."""
        ranks = self.ranks(owner) if getattr(param, said, None) is value else 1
        if ranks == 1:
            return None
        axis = self.mesh(owner, mesh, param.device.type)
        if axis is None or (ranks is not None and axis.size() != ranks):
            found = "says over which ranks" if axis is None else f"has {ranks} ranks, as its module says"
            raise NotImplementedError(
                f"fully_shard: parameter {fqn} has {said}={value}, {self.advice[0]} in a plain tensor, and nothing "
                f"{found}. {self.advice[1]}. If every rank does hold it whole, say so with param.{said} = {not value}"
            )
        return axis if axis.size() > 1 else None


_TP = _Parallelism(
    TENSOR,
    ("tp_size", "tp_group"),
    "tensor_model_parallel_size",
    "get_tensor_model_parallel_group",
    ("tensor parallelism", "Give the mesh of both, with axes 'dp_shard' and 'tp'"),
)
_EP = _Parallelism(
    ("ep",),
    ("ep_group",),
    "expert_model_parallel_size",
    "get_expert_model_parallel_group",
    ("an expert", "Give mesh=sparse['efsdp'] of a mesh with axes 'efsdp' and 'ep'"),
)
_ETP = _Parallelism(
    ("etp", "tp"),
    ("_tp_group", "tp_group"),  # TransformerEngine's modules say tp_size=1 of experts
    "expert_tensor_parallel_size",
    "get_expert_tensor_parallel_group",
    ("tensor parallelism of an expert", "Give mesh=sparse['efsdp'] of a mesh with axes 'efsdp', 'ep' and 'etp'"),
)


def by_attributes(fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None) -> TPShard | None:
    """Returns the local shard that attributes describe; ``None`` if there is none.

    Args:
        fqn: the parameter's name.
        param: a plain tensor.
        owner: a module that has it.
        mesh: given to `fully_shard`.

    Raises:
        ValueError: the parameter's shape does not fit its attributes.
        NotImplementedError: its ranks are not known; attributes contradict each other.
    """
    expert = _EP.over("allreduce", False, fqn, param, owner, mesh)
    tensor = _TP if expert is None else _ETP
    whole = te.is_module(owner) and te.tensor_parallel(owner) == 1
    cut = None if whole else tensor.over("tensor_model_parallel", True, fqn, param, owner, mesh)
    averaged = tensor.over("average_gradients_across_tp_domain", True, fqn, param, owner, mesh)
    summed = tensor.over("sequence_parallel", True, fqn, param, owner, mesh)
    if averaged is not None and (cut is not None or expert is not None):
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} has average_gradients_across_tp_domain=True, and ranks hold different parts "
            "of it, whose gradients have no average. Leave the attribute out"
        )
    if expert is not None and cut is None and getattr(owner, "tp_size", None) == 1 and (_ETP.ranks(owner) or 1) > 1:
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} is an expert, and TransformerEngine's modules do not say how tensor "
            "parallelism cuts experts: set expert_tensor_parallel_size=1"
        )
    cuts: list[tuple[DeviceMesh, Placement]] = []
    if expert is not None:
        _cuttable(fqn, param, "allreduce=False", 0)
        cuts.append((expert, Shard(0)))
    if cut is not None:
        stride = int(getattr(param, "partition_stride", 1))
        dim = _cuttable(fqn, param, "tensor_model_parallel=True", getattr(param, "partition_dim", None))
        cuts.append((cut, Shard(dim) if stride == 1 else _StridedShard(dim, split_factor=stride)))
        return _piece(fqn, param, cuts)
    copied = averaged if averaged is not None else summed
    if copied is None:
        return _piece(fqn, param, cuts)
    return _piece(fqn, param, [*cuts, (copied, Replicate())], partial=True, averaged=averaged is not None)


def _cuttable(fqn: str, param: nn.Parameter, said: str, dim: object) -> int:
    if not param.dim():
        why = "has no dimension along which the values of all ranks are one tensor"
    elif not isinstance(dim, int) or not 0 <= dim < param.dim():
        why = f"has partition_dim={dim}, which is none of its {param.dim()} dimensions"
    else:
        return dim
    raise NotImplementedError(f"fully_shard: parameter {fqn} has {said} and {why}")


def _piece(fqn: str, param: nn.Parameter, cuts: list[tuple[DeviceMesh, Placement]], **grads: bool) -> TPShard | None:
    """Returns this rank's shard of a parameter that has been cut or copied over these axes, one after the other."""
    if not cuts:
        return None
    placements, shape = tuple(placement for _, placement in cuts), list(param.shape)
    for axis, placement in cuts:
        if not isinstance(placement, Replicate):
            shape[placement.dim] *= axis.size()  # type: ignore[attr-defined]
    piece = TPShard.cut_of(_joined([axis for axis, _ in cuts]), placements, tuple(shape), plain=True, **grads)
    if piece.local != tuple(param.shape):
        raise ValueError(
            f"fully_shard: parameter {fqn} is {list(param.shape)}, and partition_dim={param.partition_dim}, "  # type: ignore[attr-defined]
            f"partition_stride={param.partition_stride} over {cuts[-1][0].size()} ranks make {list(piece.local)} of "  # type: ignore[attr-defined]
            f"{shape}"
        )
    return piece


def _joined(axes: list[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh of one or two axes."""
    if len(axes) == 1:
        return axes[0]
    first, second = axes
    if root_of(first) is root_of(second):
        return concatenated(first, second)
    rows, columns = (torch.tensor(groups.ranks(str(axis.get_group().group_name)), device="cpu") for axis in axes)
    names = tuple(name for axis in axes for name in axis.mesh_dim_names or ())
    grid = rows.unsqueeze(1) + columns - groups.rank()  # a regular grid, of which this rank knows its row and column
    return DeviceMesh.from_group([axis.get_group() for axis in axes], first.device_type, grid, mesh_dim_names=names)


def described(fqn: str, piece: TPShard | None, mesh: DeviceMesh) -> None:
    """Refuses a parameter over the ranks of an axis ``ep`` beside the mesh if it does not say what they hold: experts
    of the same name or, with gradients that nobody would add, the same values.

    Args:
        fqn: the parameter's name.
        piece: its local shard, if it has one.
        mesh: given to `fully_shard`.

    Raises:
        ValueError: it does not say.
    """
    root = root_of(mesh) if has_groups(mesh) else mesh
    if not has_groups(mesh) or "ep" not in (root.mesh_dim_names or ()):
        return
    experts = set(_ranks_along(root["ep"], 0))
    if len(experts.intersection(mesh.mesh.flatten().tolist())) > 1 or len(experts) == 1:
        return
    axes = range(piece.mesh.ndim) if piece is not None and has_groups(piece.mesh) else ()
    if piece is not None and any(experts <= set(_ranks_along(piece.mesh, axis)) for axis in axes):
        return
    raise ValueError(
        f"fully_shard: parameter {fqn} is sharded beside the axis 'ep' of {root}, and does not say what the ranks of "
        "that axis hold. If each has experts of its own, say so with param.allreduce = False, or make it a DTensor "
        "over mesh['ep']. If all hold the same values, shard it with the rest of the model, over all its ranks"
    )


def initialized(fqn: str, param: nn.Parameter, piece: TPShard | None) -> None:
    """Refuses a part of a parameter on the meta device, if it is to have values.

    Raises:
        NotImplementedError: it is one.
    """
    if param.is_meta and piece is not None and piece.plain and piece.local != piece.shape:
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} is a local shard in a plain tensor and on the meta device, where no "
            "initializer knows its part: build the model where it will run"
        )


def _ranks_along(mesh: DeviceMesh, axis: int) -> tuple[int, ...] | list[int]:
    return groups.ranks(str(mesh.get_group(axis).group_name))


def _size(said: object) -> int | None:
    """Returns a number of ranks: a number, or that of a group."""
    if isinstance(said, int):
        return said
    size = getattr(said, "size", None)
    found = size() if callable(size) else None
    return found if isinstance(found, int) else None
