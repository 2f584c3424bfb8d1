"""What TransformerEngine (TE) reads and writes on its modules, parameters and optimizers.

Recognises TE's classes by name, without importing TE. All uses of its private attributes are here, each behind one
function. Tried on 2.20.2.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

_PACKAGE = "transformer_engine."


def _is(kind: type, *names: str) -> bool:
    """Returns whether a class is, or derives from, a TE class with one of these names."""
    return any(base.__module__.startswith(_PACKAGE) and base.__name__ in names for base in kind.__mro__)


# Parameters


def quantised(tensor: object) -> bool:
    """Returns whether it is a ``QuantizedTensor``, like parameters made under ``quantized_model_init``."""
    return _is(type(tensor), "QuantizedTensor")


def grouped(tensor: object) -> bool:
    """Returns whether it is a ``GroupedTensor``: several experts' matrices in one parameter, ``[experts, out, in]``."""
    return _is(type(tensor), "GroupedTensor")


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a quantised tensor as a plain one, of the same shape and nominal dtype; any other unchanged.

    The values are those before quantisation, on the CPU, if TE has kept them
    (``preserve_high_precision_init_val=True``); else dequantised ones, on the tensor's own device.
    """
    if not quantised(tensor):
        return tensor
    kept: Any = getattr(tensor, "get_high_precision_init_val", None)
    value = kept() if callable(kept) else None
    with torch.no_grad():
        return cast(torch.Tensor, tensor.dequantize() if value is None else value.detach())


def inner(tensor: torch.Tensor) -> frozenset[str]:
    """Returns the names of attributes that implement a quantised tensor: those that ``detach()`` copies, and the value
    from before quantisation; none for other tensors.
    """
    if not quantised(tensor):
        return frozenset()
    return frozenset(vars(tensor.detach())) | {
        "_high_precision_init_val",
        "get_high_precision_init_val",
        "clear_high_precision_init_val",
    }


class Lent(torch.Tensor):
    """A full weight as TE's modules get it in an uncompiled forward.

    TE's autograd functions (``_LayerNormLinear``, ``_LayerNormMLP``, ``_GroupedLinear``) look for ``__fsdp_param__``,
    keep ``get_main_grad`` for backward, and give autograd ``None`` for a weight without ``grad_added_to_main_grad``, an
    uninitialised dummy for one with it. ``overwrite_main_grad`` makes them store, not add.
    """

    __fsdp_param__ = overwrite_main_grad = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # like nn.Parameter
    _room: Callable[[], torch.Tensor]

    @staticmethod
    def over(whole: torch.Tensor, room: Callable[[], torch.Tensor]) -> Lent:
        """Returns a tensor over a weight's storage that autograd does not treat as a view. Private in torch
        (``_make_subclass``, ``_disabled_torch_function_impl``); tried on 2.13 and 2.14.

        Args:
            room: returns the buffer for the weight's gradient; called once per use and backward.
        """
        out: Lent = torch.Tensor._make_subclass(Lent, whole.detach())  # type: ignore[assignment]
        out._room = room
        return out

    def get_main_grad(self) -> torch.Tensor:
        return self._room()

    @property
    def main_grad(self) -> None:
        """Discards what TE stores here, `get_main_grad`'s result: it would outlive backward with TE's ``ctx``."""

    @main_grad.setter
    def main_grad(self, value: torch.Tensor) -> None: ...


# Modules

_KEEPS = ("LayerNormLinear", "LayerNormMLP", "GroupedLinear")
"""Modules that get `Lent` weights: never compiled; their autograd functions keep the weights themselves."""


def is_module(module: nn.Module) -> bool:
    """Returns whether it is a ``TransformerEngineBaseModule``, which computes in ``te.autocast``'s precision."""
    return _is(type(module), "TransformerEngineBaseModule")


def tensor_parallel(module: nn.Module) -> int:
    """Returns over how many tensor-parallel ranks a module's parameters are cut; 1 for other modules.

    Marks on parameters do not say it: ``reset_parameters()`` marks weights of every module, also of whole ones, and
    before it none are marked. ``LayerNormMLP`` is cut in both of its modes.
    """
    if not is_module(module):
        return 1
    cuts = getattr(module, "parallel_mode", None) in ("row", "column") or hasattr(module, "set_parallel_mode")
    return int(getattr(module, "tp_size", 1)) if cuts else 1


def wrapped_again(now: torch.Tensor | None, param: torch.Tensor | None) -> bool:
    """Returns whether ``param`` is a new parameter over ``now``'s memory, as TE's ``reset_parameters()`` registers."""
    if now is None or param is None or type(param) is not nn.Parameter or now.is_meta:
        return False
    same = (param.shape, param.dtype, param.stride()) == (now.shape, now.dtype, now.stride())
    return same and param.device == now.device and param.data_ptr() == now.data_ptr()


def shards_itself(module: nn.Module) -> bool:
    """Returns whether ``prepare_te_modules_for_fsdp`` has made it shard saved activations over a process group."""
    return is_module(module) and getattr(module, "fsdp_group", None) is not None


def adapt(module: nn.Module, computes: Iterable[torch.dtype], unfused: str) -> tuple[bool, list[Callable[[], None]]]:
    """Configures a module for sharded parameters: when it saves and quantises them, and their dtype in forward.

    Args:
        module: any.
        computes: dtypes of its sharded parameters in forward.
        unfused: why it cannot write gradients to ``main_grad``, if so.

    Returns:
        whether this turned off writing gradients to ``main_grad``; and how to undo the changes.
    """
    undo: list[Callable[[], None]] = []
    off = bool(unfused) and fuses(module)
    for name in _FUSES if off else ():
        if module.__dict__.get(name):
            _put(module, name, False, undo)
    if is_module(module):
        # Backward quantises gathered weights; forward keeps no quantised ones.
        _put(module, "_is_fsdp2", True, undo)
        _put(module, "_fp8_workspaces", {}, undo)
        _put(module, "primary_weights_in_fp8", False, undo)
        dtypes = set(computes)
        if len(dtypes) == 1:
            _put(module, "activation_dtype", dtypes.pop(), undo)
    return off, undo


_FUSES = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""Attributes of modules, and of operations (`te.ops`), for writing gradients to ``main_grad``."""


def fuses(module: nn.Module) -> bool:
    """Returns whether a module is set to write weight gradients to ``main_grad``."""
    theirs = is_module(module) or type(module).__module__.startswith(_PACKAGE)
    return theirs and any(module.__dict__.get(name) for name in _FUSES)


def unfused(module: Any, whole: Container[str], dtypes: Iterable[tuple[torch.dtype, torch.dtype]]) -> str:
    """Returns why a module cannot write weight gradients to ``main_grad``; ``""`` if it can.

    Args:
        module: one that `fuses`.
        whole: names of its sharded parameters that it sees as plain tensors.
        dtypes: its parameters' dtypes in forward, each with the gradients' communication dtype.
    """
    if _is(type(module), "Linear") and is_module(module):
        return "te.Linear is compiled without it only"
    if not _is(type(module), *_KEEPS):
        return "backward looks for main_grad on what autograd has saved"
    if getattr(module, "checkpoint", False):  # `_LayerNormMLP._recompute`
        return "with checkpoint=True it looks for main_grad on what autograd has saved"
    names = _weights(module)
    if len(names) > 1 and _is(type(module), "LayerNormLinear"):
        return "a weight in several parameters is concatenated"
    if any(name not in whole for name in names):
        return "not all of its weights are sharded and plain"
    wrong = [grad for compute, grad in dtypes if grad not in (torch.float32, compute)]
    return f"it writes no gradients in {wrong[0]}" if wrong else ""


def _weights(module: Any) -> list[str]:
    """Returns the names of the parameters that it multiplies by."""
    if _is(type(module), "GroupedLinear"):
        return [f"weight{i}" for i in range(module.num_gemms)]
    return list(module.weight_names) if _is(type(module), "LayerNormLinear") else ["fc1_weight", "fc2_weight"]


def _put(module: nn.Module, name: str, value: object, undo: list[Callable[[], None]]) -> None:
    """Sets an attribute like TE's ``fast_setattr``, and adds its undo."""
    space = module.__dict__
    before = (space[name],) if name in space else ()
    if before and before[0] is value:
        return
    space[name] = value
    undo.append(partial(space.__setitem__, name, before[0]) if before else partial(space.pop, name, None))


def overrides(
    base: type[nn.Module],
    dtypes: Callable[[nn.Module], Iterable[tuple[str, torch.dtype]]],
    lend: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Returns the methods that a TE class gets when a module of it is sharded; none for other classes.

    Args:
        base: the class.
        dtypes: returns the names of a module's own parameters, and their dtypes in forward.
        lend: makes a `Lent` tensor of a full weight.
    """
    if not _is(base, "TransformerEngineBaseModule"):
        return {}
    theirs: Any = base

    def set_activation_dtype(self: Any, inp: torch.Tensor) -> None:
        """Replaces TE's, to check parameters' dtypes in forward: ``parameters()`` shows main weights.

        Raises:
            TypeError: the input has another, outside of autocast.
        """
        if torch.is_autocast_enabled():
            theirs.set_activation_dtype(self, inp)
        elif self.activation_dtype != inp.dtype:
            for name, dtype in () if self.allow_different_data_and_param_types else dtypes(self):
                if dtype != inp.dtype:
                    raise TypeError(
                        "Data types for parameters must match when outside of autocasted region. Found input dtype: "
                        f"{inp.dtype} and {name!r} dtype: {dtype}, which mfsdp's compute_dtype says"
                    )
            self.fast_setattr("activation_dtype", inp.dtype)

    def _get_weight_tensors(self: Any) -> list[Any]:
        """Returns the weights that forward multiplies by, as `Lent`."""
        return [lend(weight) for weight in theirs._get_weight_tensors(self)]

    out = {"set_activation_dtype": set_activation_dtype}
    return out | ({"_get_weight_tensors": _get_weight_tensors} if _is(base, *_KEEPS) else {})


# Extra state of modules: the scales of DelayedScaling, empty for other recipes

_EXTRA = "_extra_state"


def leave_out_empty(module: nn.Module) -> Callable[[], None] | None:
    """Removes a module's empty extra state from state dicts, and loads state dicts without it; returns an undo, if
    anything changed. Otherwise state dicts have entries that not even the same model can load.
    """
    theirs: Any = getattr(type(module), "get_extra_state", None)
    ours = theirs is not None and any(
        "get_extra_state" in vars(b) and b.__module__.startswith(_PACKAGE) for b in type(module).__mro__
    )
    if not ours or _take_out in module._state_dict_hooks.values():
        return None
    handles = [
        module.register_state_dict_post_hook(_take_out),
        module.register_load_state_dict_pre_hook(_fill_in),
    ]

    def back() -> None:
        for handle in handles:
            handle.remove()

    return back


def _take_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    if _empty(state.get(prefix + _EXTRA)):
        del state[prefix + _EXTRA]


def _fill_in(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    if prefix + _EXTRA not in state and _empty(module.get_extra_state()):
        state[prefix + _EXTRA] = torch.empty(0, dtype=torch.uint8)


def _empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


def lost_scales(there: Iterable[tuple[str, object]], here: Iterable[str]) -> list[str]:
    """Returns names of extra states in a checkpoint that a state dict lacks, though it has entries beside them.

    Args:
        there: names in the checkpoint, with ``torch.distributed.checkpoint``'s metadata.
        here: names in the state dict.
    """
    known = set(here)
    tops = {name.split(".")[0] for name in known}
    return [
        name
        for name, kind in there
        if name.split(".")[-1] == _EXTRA
        and name not in known
        and name.split(".")[0] in tops | {_EXTRA}
        and getattr(kind, "size", torch.Size([0])).numel()
    ]


# Optimizers

_MOMENTS = ("exp_avg", "exp_avg_sq")


def fused(kind: type) -> bool:
    """Returns whether an optimizer class steps with a TE kernel: ``FusedAdam``, ``FusedSGD``."""
    return _is(kind, "FusedAdam", "FusedSGD")


def steps_plainly(optimizer: Optimizer) -> None:
    """Refuses TE's optimizers on sharded parameters; they support only even shards.

    Raises:
        RuntimeError: the optimizer is TE's.
    """
    if fused(type(optimizer)) and not hasattr(optimizer, "_mfsdp_decoupled"):
        raise RuntimeError(
            f"mfsdp: {type(optimizer).__name__} would make state that is cut into even rows, which parameters are not, "
            "and checkpoints of it would be wrong. Let it step on flat tensors: "
            "mfsdp.fully_shard_optimizer(optimizer, use_decoupled_grad=True), with its own use_decoupled_grad=True"
        )


def understood(optimizer: Optimizer, decoupled: bool) -> None:
    """Checks an optimizer that is to step on flat tensors.

    Args:
        optimizer: any.
        decoupled: whether gradients are in ``.decoupled_grad``.

    Raises:
        ValueError: a TE optimizer reads gradients elsewhere, and would not step; or keeps main weights.
        NotImplementedError: its moments share a scale, so one element's depends on others.
    """
    if not fused(type(optimizer)):
        return
    name = type(optimizer).__name__
    reads = bool(getattr(optimizer, "use_decoupled_grad", False))
    if reads != decoupled:
        raise ValueError(
            f"fully_shard_optimizer: {name} reads .{'decoupled_grad' if reads else 'grad'}, and "
            f"use_decoupled_grad={decoupled} puts gradients elsewhere: it would not step. "
            + (
                "Give use_decoupled_grad=True to both"
                if _is(type(optimizer), "FusedAdam")
                else "Leave out use_decoupled_grad"
            )
        )
    if getattr(optimizer, "master_weights", False):
        raise ValueError(
            f"fully_shard_optimizer: {name}(master_weights=True) would keep main weights a second time: mfsdp steps on "
            "them already (MixedPrecisionPolicy(main_params_dtype=torch.float32), the default). Leave out "
            "master_weights"
        )
    for moment in _MOMENTS if _is(type(optimizer), "FusedAdam") else ():
        dtype = getattr(optimizer, f"{moment}_dtype")
        if dtype not in (torch.float32, torch.bfloat16):
            raise NotImplementedError(
                f"fully_shard_optimizer: {name}({moment}_dtype={dtype}) scales each tensor by its largest element, and "
                "flat tensors are not one parameter each; choose torch.float32 or torch.bfloat16"
            )
    if hasattr(optimizer, "_scales"):
        optimizer._scales = _Ones()


class _Ones(dict[Any, dict[str, torch.Tensor]]):
    """Scales of moments; 16- and 32-bit floats need none. Read where state was loaded, not created."""

    def __missing__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        self[param] = {name: torch.ones(1, device=param.device) for name in _MOMENTS}
        return self[param]


def saves(base: type[Optimizer]) -> type[Optimizer]:
    """Returns the class whose ``state_dict`` a flat optimizer uses: TE's own would cut state evenly."""
    return Optimizer if fused(base) else base


def loads(base: type[Optimizer]) -> dict[str, Callable[..., None]]:
    """Returns the ``load_state_dict`` of a flat TE optimizer."""
    if not _is(base, "FusedAdam"):
        return {"load_state_dict": Optimizer.load_state_dict} if fused(base) else {}

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Loads like torch's, but keeps moments in their own dtypes."""
        Optimizer.load_state_dict(self, state_dict)
        for state in self.state.values():
            for name in _MOMENTS:
                if name in state:
                    state[name] = state[name].to(getattr(self, f"{name}_dtype"))

    return {"load_state_dict": load_state_dict}
