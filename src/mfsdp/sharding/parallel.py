"""Reads other libraries' parallelism from modules and parameters: DTensors, Megatron-LM's attributes, transformers'
styles.

Attributes of Megatron-LM and TransformerEngine mark a plain parameter as a local shard, or its gradient as reduced over
other ranks than the data-parallel ones. TransformerEngine sets them without tensor parallelism too, so they count
unless the module or its configuration has one rank, or is a TransformerEngine module that is not cut.

transformers replaces a module's ``forward`` by a style's function (``tp_forward``, ``ep_forward``), which changes
``_parameters`` while it runs; `Ref.seen` decides what modules see then.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..buffers.flat_buffer import refs
from ..dtensor import transformer_engine as te
from ..dtensor.mesh import TENSOR
from ..dtensor.tp_shards import TPShard
from ..runtime import groups
from .rollback import Rollback


def piece_of(fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None) -> TPShard | None:
    """Returns the local shard that another parallelism has left of a parameter; ``None`` if it is unsharded.

    Args:
        fqn: its name.
        param: the parameter.
        owner: a module that has it.
        mesh: given to `fully_shard`; may have an axis of tensor parallelism.

    Raises:
        ValueError: a DTensor that is neither sharded nor replicated.
        NotImplementedError: it is marked as a shard of an unknown parameter.
    """
    if hasattr(param, "_mfsdp_piece"):
        return param._mfsdp_piece  # type: ignore[no-any-return]
    if isinstance(param, DTensor):
        try:
            return TPShard.of(param)
        except ValueError as error:
            raise ValueError(f"fully_shard: parameter {fqn} is a DTensor that cannot be sharded: {error}") from None
    over = _summed_over(owner)
    if over is not None:
        copy = TPShard.cut_of(over, (Replicate(),) * over.ndim, tuple(param.shape), plain=True, partial=True)
        return copy if over.size() > 1 else None
    return _by_attributes(fqn, param, owner, mesh)


# Megatron-LM

_REFUSED: dict[str, tuple[Any, str]] = {
    "average_gradients_across_tp_domain": (True, "its gradient is also averaged over the ranks of tensor parallelism"),
    "allreduce": (False, "it is an expert that other ranks of data parallelism do not have"),
}
"""Refused attributes: the value that has a meaning, and the meaning."""


def _by_attributes(fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None) -> TPShard | None:
    for name, (value, meaning) in _REFUSED.items():
        ranks = _ranks(owner, expert=name == "allreduce")
        if getattr(param, name, None) is value and ranks != 1:
            over = f" over {ranks} ranks" if ranks else ""
            raise NotImplementedError(
                f"fully_shard: parameter {fqn} has {name}={value}: {meaning}{over}, which is not supported in plain "
                f"tensors. If every rank does hold it whole, say so with param.{name} = {not value}"
            )
    whole = te.is_module(owner) and te.tensor_parallel(owner) == 1
    cut = getattr(param, "tensor_model_parallel", None) is True and not whole
    summand = getattr(param, "sequence_parallel", None) is True
    ranks = _ranks(owner, expert=False)
    if not (cut or summand) or ranks == 1:
        return None
    said = "tensor_model_parallel" if cut else "sequence_parallel"
    axis = _axis(owner, mesh, param.device.type)
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
        return TPShard.cut_of(axis, (Replicate(),), tuple(shape), plain=True, partial=True)
    if not isinstance(dim, int) or not 0 <= dim < len(shape) or param.is_meta:
        why = (
            "is on the meta device: build the model where it will run"
            if param.is_meta
            else (f"has partition_dim={dim}, which is none of its {len(shape)} dimensions")
        )
        raise NotImplementedError(f"fully_shard: parameter {fqn} has tensor_model_parallel=True and {why}")
    shape[dim] *= axis.size()
    stride = int(getattr(param, "partition_stride", 1))
    placement = Shard(dim) if stride == 1 else _StridedShard(dim, split_factor=stride)
    piece = TPShard.cut_of(axis, (placement,), tuple(shape), plain=True)
    if piece.local != tuple(param.shape):
        raise ValueError(
            f"fully_shard: parameter {fqn} is {list(param.shape)}, and partition_dim={dim}, partition_stride={stride} "
            f"over {axis.size()} ranks make {list(piece.local)} of {shape}"
        )
    return piece


def _ranks(owner: nn.Module, expert: bool) -> int | None:
    """Number of ranks of the module's own parallelism, if known from the module, its configuration or Megatron-LM."""
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


def _size(group: object) -> int | None:
    size = getattr(group, "size", None)
    return size() if callable(size) else None


def _megatron_group() -> object:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_tensor_model_parallel_group()


def _axis(owner: nn.Module, mesh: DeviceMesh | None, device: str) -> DeviceMesh | None:
    """The ranks of tensor parallelism: an axis of the mesh, or a group of the module or Megatron-LM."""
    for name in TENSOR if mesh is not None else ():
        if name in (mesh.mesh_dim_names or ()):  # type: ignore[union-attr]
            return mesh[name]  # type: ignore[index]
    return groups.as_mesh(getattr(owner, "tp_group", None) or _megatron_group(), device, "tp")


# transformers. Private there (closures and their names); tried on 5.23


_THEIRS = "transformers.distributed."


def _cells(module: nn.Module) -> dict[str, types.CellType]:
    """Closure cells, by name, of the function by which transformers has replaced a module's forward."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, types.FunctionType) or not forward.__module__.startswith(_THEIRS):
        return {}
    return dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))


def _summed_over(module: nn.Module) -> DeviceMesh | None:
    """The ranks over which hooks, registered by a module's forward, sum its gradients."""
    cells = _cells(module)
    if "is_already_hooked" not in cells:
        return None
    reduce: Any = cells["_all_reduce_grad"].cell_contents
    mesh = dict(zip(reduce.__code__.co_freevars, reduce.__closure__, strict=True))["mesh"].cell_contents
    assert isinstance(mesh, DeviceMesh)
    return mesh


def is_sum(hook: Callable[..., object]) -> bool:
    """Whether a parameter's hook does what `TPShard.partial` does."""
    return str(getattr(hook, "__module__", "")).startswith(_THEIRS) and hook.__name__ == "_all_reduce_grad"


def understood(modules: Iterable[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Refuses styles that `adapt` cannot adapt.

    Raises:
        NotImplementedError: a third-party style, or one that sums gradients of which only some are ours.
    """
    for module in modules:
        cells, name = _cells(module), type(module).__name__
        own = [p for p in module._parameters.values() if p is not None]
        if "is_already_hooked" in cells and 0 < sum(p in ignored for p in own) < len(own):
            raise NotImplementedError(
                f"fully_shard: transformers sums gradients of {name} over tensor parallelism; ignored_params has some "
                "of its parameters: give all or none of them"
            )
        kind: Any = type(cells["self"].cell_contents) if "self" in cells else _Inside
        if not issubclass(kind, _Inside) and not kind.context_around_forward.__module__.startswith(_THEIRS):
            raise NotImplementedError(
                f"fully_shard: the style {kind.__name__} of {name} has a context_around_forward of its own, which may "
                "change parameters that are sharded"
            )


def adapt(modules: Iterable[nn.Module], rollback: Rollback) -> None:
    """Makes forwards of transformers' styles leave ``_parameters`` alone and call the forward of the module's new
    class.
    """
    for module in modules:
        cells = _cells(module) if refs(module) else {}
        if "is_already_hooked" in cells:  # `TPShard.partial` sums them
            _forward(module, cells["original_forward"].cell_contents, rollback)
        elif "self" in cells:
            style: Any = cells["self"].cell_contents
            if not isinstance(style, _Inside):
                style = _adapted(style)
                _put(cells["self"], "cell_contents", style, rollback)
            for key, ref in refs(module).items():
                if ref.piece is not None:
                    refs(module)[key] = replace(ref, style=style)
            if "original_forward" in cells:
                _put(cells["original_forward"], "cell_contents", _called(module, cells["original_forward"]), rollback)
            own = cells["implementation"].cell_contents if "implementation" in cells else None
            for way in (own, *(v for v in vars(own).values() if hasattr(v, "experts_forward"))) if own else ():
                bound = types.CellType(way.experts_forward)
                _put(way, "experts_forward", _called(module, bound), rollback)
                kind: Any = type(way)
                if getattr(kind.__call__, "__qualname__", "") == "AllToAllEP.__call__":
                    _put(way, "__class__", _unbranched(kind), rollback)


def _called(module: nn.Module, cell: types.CellType) -> Callable[..., Any]:
    """The module's current forward if the cell holds the one from before, else the cell's content."""
    bound = cell.cell_contents
    own = isinstance(bound, types.MethodType) and bound.__self__ is module and bound.__name__ == "forward"
    return types.MethodType(type(module).forward, module) if own else bound


def _forward(module: nn.Module, original: Callable[..., object], rollback: Rollback) -> None:
    theirs = module.__dict__.pop("forward")
    if getattr(original, "__self__", None) is not module:
        module.__dict__["forward"] = original
    rollback.steps.append(lambda: module.__dict__.update(forward=theirs))


def _put(thing: object, name: str, value: object, rollback: Rollback) -> None:
    before = getattr(thing, name)
    setattr(thing, name, value)
    rollback.steps.append(lambda: setattr(thing, name, before))


class _Inside:
    """A style whose forward shows local tensors without changing ``_parameters``."""

    inside: bool
    """Whether its forward runs and shows local tensors."""


class _Showing:
    """A context that sets whether a module sees local tensors."""

    def __init__(self, style: _Inside, value: bool):
        self.style, self.value, self.before = style, value, False

    def __enter__(self) -> None:
        self.before, self.style.inside = self.style.inside, self.value

    def __exit__(self, *error: object) -> None:
        self.style.inside = self.before


def _adapted(style: Any) -> Any:
    """A copy of the style for one module, since modules share styles."""
    kind: Any = type(style)
    out: Any = object.__new__(_style(kind))
    out.__dict__.update(style.__dict__, inside=False)
    return out


@functools.cache
def _style(kind: type) -> type:
    theirs: Any = kind
    hides = theirs.context_around_forward.__qualname__.startswith("RowwiseParallel.")  # hides its bias: no need here

    def should_use_local_tensors(self: _Inside, module: nn.Module) -> bool:
        return not hides and theirs.should_use_local_tensors(self, module)

    def context_around_forward(self: _Inside, module: nn.Module, mesh: DeviceMesh) -> _Showing:
        return _Showing(self, should_use_local_tensors(self, module))

    space = {"context_around_forward": context_around_forward, "should_use_local_tensors": should_use_local_tensors}
    return type(kind.__name__, (_Inside, kind), space)


@functools.cache
def _unbranched(kind: type) -> type:
    """An expert dispatcher that never branches on the number of tokens in a graph, where it is unknown; experts accept
    none.
    """
    theirs: Any = kind.__call__

    def __call__(self: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            return theirs(self, hidden_states, index, weights)  # type: ignore[no-any-return]
        *rows, state = self._dispatch_tokens(hidden_states, index, weights)
        return self._combine_tokens(self.experts_forward(*rows), state)  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"__call__": __call__})
