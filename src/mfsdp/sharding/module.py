"""Classes of sharded modules: subclasses whose parameters are properties, with the methods of a unit."""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex, cast

import torch
from torch import nn

from ..buffers import state_dict_hooks
from ..buffers.flat_buffer import FlatBuffer, Ref, UnitState, refs
from ..dtensor import transformer_engine as te
from ..ir import ops
from . import eager, fsdp2_api, hf_overrides, parametrized
from .rollback import Rollback

Casts = tuple[torch.dtype | None, torch.dtype | None]
"""Dtypes that a unit's forward casts its floating-point arguments and results to."""

Methods = dict[str, Callable[..., Any]]
"""Methods of a class, by name."""


class FSDPModule(fsdp2_api.Spelling):
    """Base class of units. Method names are FSDP2's.

    It is no ``torch.distributed.fsdp.FSDPModule``: code that finds one uses its internal state, which does not exist
    here (torch's pipeline stage delays and reduces gradients through it: use `mfsdp.PipelineStage`; the memory tracker
    reads it). Code that checks ``isinstance`` treats this as a plain module. Check for ``mfsdp.FSDPModule``.
    """

    _mfsdp_unit: UnitState

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True, hold: bool | None = None
    ) -> None:
        """Sets whether the following backwards synchronize gradients: ``False`` for all microbatches of a step but the
        last. Switching does not recompile.

        Without synchronization, ``no_shard`` and ``optim`` add up full gradients and communicate nothing;
        ``optim_grads`` and ``optim_grads_params`` scatter gradients in every backward and add up shards, which skips
        the reduction over the outer axis of a two-level mesh, and nothing on a one-level mesh.

        Args:
            requires_gradient_sync: whether to synchronize.
            recurse: whether to include units below.
            hold: ``True``: from now on ``optim_grads`` and ``optim_grads_params`` add up full gradients too. This costs
                a buffer of the unit's size in ``main_grads_dtype`` and saves a reduction per microbatch. Graphs
                recompile once. ``None`` changes nothing.
        """
        _boolean("requires_gradient_sync", requires_gradient_sync)
        for buffer in buffers_of(self, recurse):
            buffer.gradients.sync = requires_gradient_sync
            if hold is not None and hold != buffer.spec.hold and buffer.spec.world > 1:
                buffer.respec(hold=hold)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether the following backwards reduce gradients over the outer axis of a two-level mesh; those over the
        shard axis continue. It is the only reduction of unsharded gradients (``no_shard``, ``optim``).
        """
        _boolean("requires_all_reduce", requires_all_reduce)
        for buffer in buffers_of(self, recurse):
            if buffer.spec.outer > 1 and not buffer.spec.hold:
                buffer.gradients.sync = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether forward frees what it gathered. Compiled graphs recompile on the next call.

        Raises:
            ValueError: it is not ``True`` or ``False``.
        """
        _boolean("reshard_after_forward", reshard_after_forward)
        self._mfsdp_unit.root_keeps = False
        for buffer in buffers_of(self, recurse):
            buffer.respec(reshard=reshard_after_forward)

    def set_gradient_divide_factor(self, factor: float, recurse: bool = False) -> None:
        """Sets the divisor of sums over ranks; by default the number of ranks over which the outermost module was
        sharded. Compiled graphs recompile.

        For a loss per token with different numbers of tokens per rank: use a factor of 1, and divide each rank's sum by
        the number of all ranks' tokens.

        Args:
            factor: positive.
            recurse: whether to include units below; off by default, as in FSDP2.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"factor={factor!r}: must be positive and finite")
        for buffer in buffers_of(self, recurse):
            buffer.unit.divides = True
            buffer.respec(divide=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def reset_iter_state(self) -> None:
        """Drops unreduced gradients after an exception, as in FSDP2."""
        for buffer in buffers_of(self, recurse=True):
            buffer.gradients.forget()

    def unshard(self, async_op: bool = False) -> fsdp2_api.Unsharding | None:
        """Gathers the unit's own parameters for uncompiled code, until `reshard`.

        Compiled graphs are not affected; they gather by themselves. An optimizer's step, or any other write to the
        sharded parameters, frees the gathered values as `reshard` does.

        Args:
            async_op: ``True`` returns a handle whose ``wait()`` returns at once.
        """
        unit = self._mfsdp_unit
        unit.kept, unit.reshard = True, self.reshard
        for index, buffer in enumerate(unit.buffers):
            if index not in unit.full:
                unit.full[index] = eager.gather(buffer)
        return fsdp2_api.Unsharding() if async_op else None

    def reshard(self) -> None:
        """Frees what `unshard` gathered.

        Raises:
            RuntimeError: a gathered parameter was written to; the write is lost.
        """
        self._mfsdp_unit.kept = False
        try:
            eager.check(self._mfsdp_unit, "between unshard() and reshard()")
        finally:
            eager.release(self._mfsdp_unit)


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: choose True or False")


def buffers_of(module: FSDPModule, recurse: bool) -> list[FlatBuffer]:
    units = units_of(cast(nn.Module, module)) if recurse else [module._mfsdp_unit]
    return [buffer for unit in units for buffer in unit.buffers]


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module that ``torch.compile(module)`` was called on."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def units_of(root: nn.Module) -> dict[UnitState, list[str]]:
    """Returns the units in a model, each with the names of its modules."""
    out: dict[UnitState, list[str]] = {}
    for name, m in root.named_modules():
        if isinstance(m, FSDPModule):
            out.setdefault(m._mfsdp_unit, []).append(name)
    return out


def hand_over(owner: nn.Module, name: str, ref: Ref, original: Callable[[], nn.Parameter], rollback: Rollback) -> None:
    _put(owner, name, cast(nn.Parameter, ref.buffer.params[ref.slot]))
    owner.__dict__.setdefault("_mfsdp_refs", {})[name] = ref
    ref.buffer.place(owner._parameters, name, ref.slot)

    def back() -> None:
        _put(owner, name, original())
        owner.__dict__.pop("_mfsdp_refs", None)

    rollback.steps.append(back)


def _put(owner: nn.Module, name: str, param: nn.Parameter) -> None:
    """Sets the module's parameter, also in the parameter list of recurrent layers."""
    owner._parameters[name] = param
    if isinstance(owner, nn.RNNBase) and name in owner._flat_weights_names:
        owner.__dict__["_flat_weights"][owner._flat_weights_names.index(name)] = param


def own_class(module: nn.Module) -> type[nn.Module]:
    """A module's class from before it was sharded."""
    return getattr(type(module), "_mfsdp_class", type(module))


def swap_class(owner: nn.Module, unit: UnitState, is_unit: bool, casts: Casts, rollback: Rollback) -> None:
    old = type(owner)
    owner.__dict__["_mfsdp_unit"] = unit
    owner.__class__ = _subclass(old, tuple(refs(owner)), is_unit, *casts)  # type: ignore[arg-type]
    hooks = owner._forward_hooks.copy()
    owner._forward_hooks.update({i: hf_overrides.traceable(hook) for i, hook in hooks.items()})

    def back() -> None:
        owner.__class__ = old
        owner._forward_hooks.update(hooks)
        owner.__dict__.pop("_mfsdp_unit", None)

    rollback.steps.append(back)


@functools.cache
def _subclass(
    base: type[nn.Module],
    names: tuple[str, ...],
    is_unit: bool,
    entering: torch.dtype | None,
    leaving: torch.dtype | None,
) -> type[nn.Module]:
    """The class of a sharded module: parameters are properties; forward opens a scope for the eager fallback and casts
    inputs and outputs.

    Cached: equal layers share a type, and Dynamo's guards stay the same.
    """
    space: dict[str, Any] = {
        "_mfsdp_class": base,
        "forward": _forward(base, is_unit, fsdp2_api.with_casts(base.forward, entering, leaving)),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        **_copying(base),
        **_registering(base),
        **_loading(base),
        **{name: _property(name) for name in names},
        **hf_overrides.overrides(base),
        **te.overrides(base, _dtypes, eager.lend),
    }
    if base.named_parameters is nn.Module.named_parameters and base.parameters is nn.Module.parameters:
        space |= _listing(base)
    if issubclass(base, nn.RNNBase):
        space["_flat_weights"] = property(
            lambda self: [getattr(self, n) if n in self._parameters else None for n in self._flat_weights_names],
            lambda self, value: None,
        )
    first = base
    while issubclass(first.__base__, nn.Module):  # type: ignore[arg-type]
        first = first.__base__  # type: ignore[assignment]
    # instances may change their class if memory is laid out alike: FSDPModule comes first only before nn.Module
    bases = (FSDPModule, base) if first is nn.Module else (base, FSDPModule)
    space |= _zeroing(base) if is_unit else {}
    return cast(type[nn.Module], type(base.__name__, bases if is_unit else (base,), space))


def _forward(base: type[nn.Module], is_unit: bool, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward of a sharded class: ``call``, in a scope of the eager fallback.

    Note [Graph breaks]
    A graph break inside a ``try`` makes Dynamo run the frame's code as plain Python from then on, for all calls of all
    models that share it. A unit's forward therefore has the ``try`` one frame below, which is compiled only as part of
    this one: a break ends the graph at the call, guarded by arguments, mode, and whether gradients are enabled.
    """

    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        nothing = torch.compiler.is_compiling() or (self._mfsdp_unit.open and not torch.is_grad_enabled())
        scope = None if nothing else eager.scope(self, is_unit)
        try:
            out = call(self, *args, **kwargs)
            if scope is not None:
                scope.check()
            return out
        finally:
            if scope is not None:
                scope.close()

    scoped = own_code(scoped, base.__name__)
    if is_unit:
        eager.never_a_frame(scoped)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bool(self.training)  # Dynamo guards what is read
        return scoped(self, *args, **kwargs)

    return functools.wraps(base.forward)(own_code(forward, base.__name__) if is_unit else scoped)


def _copying(base: type[nn.Module]) -> Methods:
    """Returns the methods of a sharded class for new instances (not sharded), copies, and pickles (refused)."""

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Another instance of the class, such as a slice of a container, is not sharded.
        self.__class__ = base
        base.__init__(self, *args, **kwargs)

    def __setstate__(self: nn.Module, state: dict[str, object]) -> None:
        base.__setstate__(self, state)
        for name, ref in refs(self).items():  # of a copy
            ref.buffer.place(self._parameters, name, ref.slot)

    def __reduce_ex__(self: nn.Module, protocol: SupportsIndex) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "copy":
            raise TypeError(
                f"mfsdp: a sharded {base.__name__} cannot be pickled (torch.save(model)): its class was made for it, "
                "and its rows are of one rank. Save values: mfsdp.save_safetensors, mfsdp.Checkpoints, or "
                "torch.distributed.checkpoint.save(model.state_dict(), ...), on all ranks"
            )
        return base.__reduce_ex__(self, protocol)

    init = functools.wraps(base.__init__)(__init__)
    return {"__init__": init, "__setstate__": __setstate__, "__reduce_ex__": __reduce_ex__}


def _zeroing(base: type[nn.Module]) -> Methods:
    """Returns the ``zero_grad`` of a unit, which also drops unreduced gradients."""

    def zero_grad(self: FSDPModule, set_to_none: bool = True) -> None:
        """As before sharding; also drops unreduced gradients."""
        self.reset_iter_state()
        base.zero_grad(self, set_to_none)  # type: ignore[arg-type]

    return {"zero_grad": zero_grad}


def _listing(base: type[nn.Module]) -> Methods:
    """Returns the methods of a sharded class that list parameters: full ones inside a forward."""

    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if torch.compiler.is_compiling() or eager.inside():
            return _parameters(self, *args, **kwargs)
        return base.named_parameters(self, *args, **kwargs)

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
        if torch.compiler.is_compiling() or eager.inside():
            return (p for _, p in _parameters(self, recurse=recurse))
        return base.parameters(self, recurse)

    return {"named_parameters": named_parameters, "parameters": parameters}


def _registering(base: type[nn.Module]) -> Methods:
    """Returns the methods of a sharded class that refuse to remove or replace its parameters."""

    def __delattr__(self: nn.Module, name: str) -> None:
        if name in refs(self):
            raise parametrized.too_late(base, name)
        base.__delattr__(self, name)

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None, **more: Any) -> None:
        if gone := [n for n in refs(self) if n not in self._parameters and name.startswith(f"{n}_")]:
            own: dict[str, Any] = {n: ref.buffer.params[ref.slot] for n, ref in refs(self).items()}
            rest = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update(own | rest)
            raise parametrized.too_late(base, gone[0])
        if getattr(param, "_mfsdp_owner", None) is not None and name not in refs(self):
            raise parametrized.too_late(base, name)
        if name in refs(self) and param is not (now := self._parameters.get(name)):
            ref: Any = refs(self)[name]
            if now is not ref.buffer.params[ref.slot] and te.wrapped_again(now, param):
                return  # an initialiser has registered and written it (`materialize`)
            raise ValueError(
                f"{type(self).__name__}.{name} is sharded and cannot be replaced; write its values in place, "
                "with copy_() or inside mfsdp.summon_full_params(model)"
            )
        base.register_parameter(self, name, param, **more)

    return {"__delattr__": __delattr__, "register_parameter": register_parameter}


def _loading(base: type[nn.Module]) -> Methods:
    """Returns the methods of a sharded class that load values, in place, and that refuse to move or cast them."""

    def _load_from_state_dict(self: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if torch.__future__.get_swap_module_params_on_conversion():
            raise NotImplementedError(
                f"{type(self).__name__} is sharded: parameters cannot be swapped, "
                "torch.__future__.set_swap_module_params_on_conversion(False) loads into them"
            )
        state_dict_hooks.loaded(self, state_dict, prefix)
        if metadata.get("assign_to_params_buffers"):  # parameters are views of flat buffers: copy the values
            for name in refs(self):
                param, value = self._parameters[name], state_dict.get(prefix + name)
                if isinstance(value, torch.Tensor) and param is not None and value.shape == param.shape:
                    with torch.no_grad():
                        param.copy_(value)
                    state_dict[prefix + name] = param
        base._load_from_state_dict(self, state_dict, prefix, metadata, *rest)

    def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        for ref in refs(self).values():
            probe = torch.empty(0, dtype=ref.buffer.weights.main.dtype, device=ref.buffer.weights.main.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise ValueError(
                    f"{type(self).__name__} is sharded: parameters cannot go from {probe.dtype} on {probe.device} to "
                    f"{moved.dtype} on {moved.device}. Move or cast the model before fully_shard."
                )
        own, self._parameters = self._parameters, {}
        try:
            return base._apply(self, fn, recurse)  # type: ignore[no-any-return]
        finally:
            self._parameters = own

    return {"_load_from_state_dict": _load_from_state_dict, "_apply": _apply}


def _parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """``named_parameters()`` inside a forward: full parameters, as ``self.weight`` is. Dynamo traces it, so it never
    reads the values of ``_parameters``.
    """
    seen: list[Any] = []
    plain: list[Any] = []
    for path, m in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        own = m.__dict__.get("_mfsdp_refs", {})
        for name in m._parameters:
            if name in own:
                key = (own[name].unit.fqn, own[name].index, own[name].slot)
                if remove_duplicate and key in seen:
                    continue
                seen.append(key)
            value = getattr(m, name)
            if value is None or (remove_duplicate and any(value is other for other in plain)):
                continue
            if name not in own:
                plain.append(value)
            yield (f"{path}.{name}" if path else name), value


def _dtypes(module: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """A module's own parameters and their dtypes inside forward. Dynamo traces it."""
    own = module.__dict__.get("_mfsdp_refs", {})
    for name in module._parameters:
        if name in own:
            yield name, own[name].buffer.precision.compute
        elif (value := getattr(module, name)) is not None:
            yield name, value.dtype


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the function with its own code object: Dynamo's caches and recompile limits count per code object."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{name}_forward")
    out = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    out.__kwdefaults__ = function.__kwdefaults__
    return out


def _property(name: str) -> property:
    def get(self: nn.Module) -> torch.Tensor:
        ref: Any = self._mfsdp_refs[name]  # type: ignore[index]
        if torch.compiler.is_compiling():
            if ref.unit.open:
                out = ref.unit.full[ref.index][ref.slot]
            else:
                buffer = ref.buffer  # Dynamo's time goes by attributes
                out = ops.param(buffer.weights.source, ref.offset, ref.shape, buffer.text)
                if buffer.trainable and not buffer.trains[ref.slot]:
                    out = out.detach()
            return out if ref.piece is None else ref.seen(out)  # type: ignore[no-any-return]
        return eager.read(self, name, ref)  # type: ignore[no-any-return]

    # Compiled as a frame, a graph of one marker would gather the unit for one parameter.
    eager.never_a_frame(get)
    return property(get)
