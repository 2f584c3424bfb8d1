"""Reads other libraries' parallelism from modules and parameters: DTensors, Megatron-LM's attributes (`plain_shards`),
transformers' styles.

transformers replaces a module's ``forward`` by a style's function (``tp_forward``, ``ep_forward``), which changes
``_parameters`` while it runs; `Ref.seen` decides what modules see then.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..buffers.flat_buffer import refs
from ..dtensor.tp_shards import TPShard
from . import plain_shards
from .rollback import Rollback


def piece_of(fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None) -> TPShard | None:
    """Returns the local shard that another parallelism has left of a parameter; ``None`` if it is unsharded.

    Args:
        fqn: its name.
        param: the parameter.
        owner: a module that has it.
        mesh: given to `fully_shard`; may have an axis of tensor parallelism.

    Raises:
        ValueError: a DTensor that is neither sharded nor replicated; nothing tells whether ranks of expert parallelism
            hold different values.
        NotImplementedError: it is marked as a shard of an unknown parameter.
    """
    piece = _piece_of(fqn, param, owner, mesh)
    if mesh is not None:
        plain_shards.described(fqn, piece, mesh)
    return piece


def _piece_of(fqn: str, param: nn.Parameter, owner: nn.Module, mesh: DeviceMesh | None) -> TPShard | None:
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
    return plain_shards.by_attributes(fqn, param, owner, mesh)


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


def hooked(param: torch.Tensor) -> bool:
    """Whether a hook other than those of `is_sum` is registered. Private in torch (two attributes); tried on 2.11 to
    2.15.
    """
    hooks = [param._backward_hooks, param._post_accumulate_grad_hooks]  # type: ignore[attr-defined]
    return any(not is_sum(hook) for found in hooks if found for hook in found.values())


def is_sum(hook: Callable[..., object]) -> bool:
    """Whether a parameter's hook does what `TPShard.summands` do."""
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
        if "is_already_hooked" in cells:  # `TPShard.seen` sums them
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
    hides: bool
    """Whether transformers' class would hide a bias by local tensors: no need here."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return not self.hides and super().should_use_local_tensors(module)  # type: ignore[misc, no-any-return]

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> _Showing:
        return _Showing(self, self.should_use_local_tensors(module))


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
def _style(kind: Any) -> type:
    hides = kind.context_around_forward.__qualname__.startswith("RowwiseParallel.")
    return type(kind.__name__, (_Inside, kind), {"hides": hides})


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
