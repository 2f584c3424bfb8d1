"""What other libraries' parallelism says of modules and parameters: DTensors, Megatron-LM's attributes, transformers'
styles.

Megatron-LM and TransformerEngine say by attributes of a plain parameter that it is a piece of a larger one, or that its
gradient is reduced over other ranks than those of data parallelism. TransformerEngine sets them without tensor
parallelism too, so they count unless the module or its configuration says that one rank holds all.

transformers replaces ``forward`` of a module by a function that a style has written (``tp_forward``, ``ep_forward``),
which changes ``_parameters`` while it runs: what modules see then is for `Ref.seen` to say.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..runtime import groups
from ..state.buffer import refs
from ..state.mesh import TENSOR
from ..state.pieces import Piece
from .undo import Undo


def piece_of(fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None) -> Piece | None:
    """What another parallelism has left of a parameter on this rank, ``None`` of one that is whole.

    Args:
        fqn: its name.
        param: the parameter.
        owner: a module that has it.
        mesh: that was given to `fully_shard`; an axis of it may be tensor parallelism's.

    Raises:
        ValueError: a DTensor that is neither cut nor copied.
        NotImplementedError: it is said to be a piece, and not of what.
    """
    if hasattr(param, "_mfsdp_piece"):
        return param._mfsdp_piece  # type: ignore[no-any-return]
    if isinstance(param, DTensor):
        try:
            return Piece.of(param)
        except ValueError as error:
            raise ValueError(f"fully_shard: parameter {fqn} is a DTensor that cannot be sharded: {error}") from None
    over = _summed_over(owner)
    if over is not None:
        copy = Piece.cut_of(over, (Replicate(),) * over.ndim, tuple(param.shape), plain=True, partial=True)
        return copy if over.size() > 1 else None
    return _by_attributes(fqn, param, owner, mesh)


# Megatron-LM

_REFUSED: dict[str, tuple[Any, str]] = {
    "average_gradients_across_tp_domain": (True, "its gradient is also averaged over the ranks of tensor parallelism"),
    "allreduce": (False, "it is an expert that other ranks of data parallelism do not have"),
}
"""Attributes, by which value they mean something, and what."""


def _by_attributes(fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None) -> Piece | None:
    for name, (value, meaning) in _REFUSED.items():
        ranks = _ranks(owner, expert=name == "allreduce")
        if getattr(param, name, None) is value and ranks != 1:
            over = f" over {ranks} ranks" if ranks else ""
            raise NotImplementedError(
                f"fully_shard: parameter {fqn} has {name}={value}: {meaning}{over}, which is not supported in plain "
                f"tensors. If every rank does hold it whole, say so with param.{name} = {not value}"
            )
    cut = getattr(param, "tensor_model_parallel", None) is True
    summand = getattr(param, "sequence_parallel", None) is True
    ranks = _ranks(owner, expert=False)
    if not (cut or summand) or ranks == 1:
        return None
    said = "tensor_model_parallel" if cut else "sequence_parallel"
    axis = _axis(owner, mesh)
    if axis is None or (ranks is not None and axis.size() != ranks):
        found = "says over which ranks" if axis is None else f"has {ranks} ranks, as its module says"
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} has {said}=True, tensor parallelism in a plain tensor, and nothing {found}. "
            f"Give the mesh of both, with axes 'dp_shard' and 'tp'. If every rank does hold it whole, say so with "
            f"param.{said} = False"
        )
    if axis.size() == 1:
        return None
    shape, dim = list(param.shape), getattr(param, "partition_dim", None)
    if not cut:
        return Piece.cut_of(axis, (Replicate(),), tuple(shape), plain=True, partial=True)
    if not isinstance(dim, int) or not 0 <= dim < len(shape) or param.is_meta:
        why = "is on the meta device" if param.is_meta else f"has partition_dim={dim}"
        raise NotImplementedError(
            f"fully_shard: parameter {fqn} has tensor_model_parallel=True and {why}. It is sharded when its dimension "
            "is known, and it has values"
        )
    shape[dim] *= axis.size()
    stride = int(getattr(param, "partition_stride", 1))
    placement = Shard(dim) if stride == 1 else _StridedShard(dim, split_factor=stride)
    return Piece.cut_of(axis, (placement,), tuple(shape), plain=True)


def _ranks(owner: nn.Module, expert: bool) -> int | None:
    """How many ranks the module's own parallelism has, if the module, its configuration or Megatron-LM says so."""
    config = getattr(owner, "config", None)
    if expert:
        said = [_size(getattr(owner, "ep_group", None)), getattr(config, "expert_model_parallel_size", None)]
    else:
        said = [
            getattr(owner, "tp_size", None),
            _size(getattr(owner, "tp_group", None)),
            getattr(config, "tensor_model_parallel_size", None),
            _size(_megatron_group()),
        ]
    return next((n for n in said if isinstance(n, int)), None)


def _size(group: Any) -> int | None:
    size = getattr(group, "size", None)
    return size() if callable(size) else None


def _megatron_group() -> Any:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_tensor_model_parallel_group()


def _axis(owner: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The ranks of tensor parallelism: an axis of the mesh, or a group that the module or Megatron-LM knows."""
    for name in TENSOR if mesh is not None else ():
        if name in (mesh.mesh_dim_names or ()):  # type: ignore[union-attr]
            return mesh[name]  # type: ignore[index]
    return groups.as_mesh(getattr(owner, "tp_group", None) or _megatron_group(), "tp")


# transformers. Private there (closures and their names); tried on 5.23


def _cells(module: nn.Module) -> dict[str, types.CellType]:
    """What the function that transformers has put in front of a module's forward holds on to, by name."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, types.FunctionType) or not forward.__module__.startswith("transformers.distributed."):
        return {}
    return dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))


def _summed_over(module: nn.Module) -> DeviceMesh | None:
    """Over which ranks gradients of a module that is copied are summed, by hooks that its forward registers."""
    cells = _cells(module)
    if "is_already_hooked" not in cells:
        return None
    reduce: Any = cells["_all_reduce_grad"].cell_contents
    mesh = dict(zip(reduce.__code__.co_freevars, reduce.__closure__, strict=True))["mesh"].cell_contents
    assert isinstance(mesh, DeviceMesh)
    return mesh


def adapt(modules: Iterable[nn.Module], undo: Undo) -> None:
    """Makes forwards of transformers' styles leave ``_parameters`` alone."""
    for module in modules:
        cells = _cells(module) if refs(module) else {}
        if "is_already_hooked" in cells:  # `Piece.partial` sums them
            _forward(module, cells["original_forward"].cell_contents, undo)
        elif "self" in cells:
            style: Any = cells["self"].cell_contents
            if not hasattr(style, "_mfsdp"):
                style = _adapted(style)
                _fill(cells["self"], style, undo)
            for name, ref in refs(module).items():
                if ref.piece is not None:
                    refs(module)[name] = replace(ref, local=style.should_use_local_tensors)
            if "implementation" in cells:
                own = cells["implementation"].cell_contents
                for way in (own, getattr(own, "all_to_all", None)):
                    if hasattr(way, "_dispatch_tokens") and not hasattr(way, "_mfsdp"):
                        kind: Any = type(way)
                        _become(way, _unbranched(kind), undo)


def _forward(module: nn.Module, original: Any, undo: Undo) -> None:
    theirs = module.__dict__.pop("forward")
    if getattr(original, "__func__", None) is not type(module).forward:
        module.__dict__["forward"] = original
    undo.steps.append(lambda: module.__dict__.update(forward=theirs))


def _fill(cell: types.CellType, value: Any, undo: Undo) -> None:
    former = cell.cell_contents
    cell.cell_contents = value
    undo.steps.append(lambda: setattr(cell, "cell_contents", former))


def _become(thing: Any, kind: type, undo: Undo) -> None:
    former = type(thing)
    thing.__class__ = kind
    undo.steps.append(lambda: setattr(thing, "__class__", former))


def _adapted(style: Any) -> Any:
    """The style, which other modules share, changing no ``_parameters``."""
    kind: Any = type(style)
    out: Any = object.__new__(_style(kind))
    out.__dict__ = style.__dict__
    return out


@functools.cache
def _style(kind: type) -> type:
    def context_around_forward(self: Any, module: nn.Module, mesh: DeviceMesh) -> Any:
        return contextlib.nullcontext()

    space: dict[str, Any] = {"context_around_forward": context_around_forward, "_mfsdp": True}
    base = next(c for c in reversed(kind.__mro__) if hasattr(c, "context_around_forward"))
    if kind.context_around_forward is not base.context_around_forward:  # type: ignore[attr-defined]  # hides a bias
        space["should_use_local_tensors"] = lambda self, module: False
    return type(kind.__name__, (kind,), space)


@functools.cache
def _unbranched(kind: type) -> type:
    """A way to bring tokens to experts that in a graph never asks whether there are any: how many is not known there,
    and experts take none.
    """
    theirs: Any = kind.__call__

    def __call__(self: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return theirs(self, hidden_states, index, weights)  # type: ignore[no-any-return]
        *rows, state = self._dispatch_tokens(hidden_states, index, weights)
        return self._combine_tokens(self.experts_forward(*rows), state)  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"__call__": __call__, "_mfsdp": True})
