"""What TransformerEngine reads and writes on its modules, parameters and optimizers.

It is never imported: its classes are known by their names. What they read of themselves is private there; all of it is
here, each behind one function. Tried on 2.20.2.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

_PACKAGE = "transformer_engine."


def _is(kind: Any, *names: str) -> bool:
    """Whether a class is one of theirs, of these names, or made of one."""
    return any(base.__module__.startswith(_PACKAGE) and base.__name__ in names for base in kind.__mro__)


# Parameters


def quantised(tensor: Any) -> bool:
    """Whether it is a ``QuantizedTensor``, as parameters are that were made under ``quantized_model_init``."""
    return _is(type(tensor), "QuantizedTensor")


def grouped(tensor: Any) -> bool:
    """Whether it is a ``GroupedTensor``: matrices of several experts in one parameter, ``[experts, out, in]``."""
    return _is(type(tensor), "GroupedTensor")


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """A quantised tensor as a plain one, of the same shape and nominal dtype: as it was before it was quantised, on the
    CPU, if that has been kept (``preserve_high_precision_init_val=True``), else as it is now, on its own device. Any
    other as it is.
    """
    if not quantised(tensor):
        return tensor
    kept: Any = getattr(tensor, "get_high_precision_init_val", None)
    value = kept() if callable(kept) else None
    with torch.no_grad():
        return cast(torch.Tensor, tensor.dequantize() if value is None else value.detach())


def inner(tensor: torch.Tensor) -> frozenset[str]:
    """Names of attributes by which a quantised tensor is one: those that ``detach()`` gives too, and the value kept
    from before; of any other tensor none.
    """
    if not quantised(tensor):
        return frozenset()
    return frozenset(vars(tensor.detach())) | {
        "_high_precision_init_val",
        "get_high_precision_init_val",
        "clear_high_precision_init_val",
    }


class Lent(torch.Tensor):
    """A whole weight as their modules get it in an uncompiled forward. Their autograd functions (``_LayerNormLinear``,
    ``_LayerNormMLP``, ``_GroupedLinear``) look for ``__fsdp_param__``, take ``get_main_grad`` with them to backward,
    and give autograd ``None`` for a weight that has no ``grad_added_to_main_grad``, an uninitialised dummy for one that
    has. ``overwrite_main_grad`` has them store, not add.
    """

    __fsdp_param__ = overwrite_main_grad = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of nn.Parameter
    _room: Callable[[], torch.Tensor]

    @staticmethod
    def over(whole: torch.Tensor, room: Callable[[], torch.Tensor]) -> Lent:
        """Another tensor over a weight's storage, which autograd takes for no view of it. Private in torch
        (``_make_subclass``, and what is said above instead of ``__torch_function__``); tried on 2.13 and 2.14.

        Args:
            room: where the weight's gradient is to be put; asked for once per use and backward.
        """
        out: Lent = torch.Tensor._make_subclass(Lent, whole.detach())  # type: ignore[assignment]
        out._room = room
        return out

    def get_main_grad(self) -> torch.Tensor:
        return self._room()

    @property
    def main_grad(self) -> None:
        """They hang there what `get_main_grad` gave, which would outlive backward with their ``ctx``."""

    @main_grad.setter
    def main_grad(self, value: torch.Tensor) -> None: ...


# Modules

_KEEPS = ("LayerNormLinear", "LayerNormMLP", "GroupedLinear")
"""Modules that get `Lent` weights: never compiled, and their autograd functions keep the weights themselves."""


def is_module(module: nn.Module) -> bool:
    """Whether it computes in whatever precision ``te.autocast`` says: a ``TransformerEngineBaseModule``."""
    return _is(type(module), "TransformerEngineBaseModule")


def unplaced(module: nn.Module) -> int:
    """Over how many ranks of tensor parallelism its parameters are pieces, where they do not say so yet: only
    ``reset_parameters()`` tells them. 1 for any other module.
    """
    if not is_module(module):
        return 1
    cuts = getattr(module, "parallel_mode", None) in ("row", "column") or getattr(module, "set_parallel_mode", False)
    return int(getattr(module, "tp_size", 1)) if cuts else 1


def wrapped_again(now: torch.Tensor | None, param: torch.Tensor | None) -> bool:
    """Whether a parameter is another one around the same memory: ``reset_parameters()`` of theirs registers such."""
    if now is None or param is None or type(param) is not nn.Parameter or now.is_meta:
        return False
    same = (param.shape, param.dtype, param.stride()) == (now.shape, now.dtype, now.stride())
    return same and param.device == now.device and param.data_ptr() == now.data_ptr()


def shards_itself(module: nn.Module) -> bool:
    """Whether ``prepare_te_modules_for_fsdp`` has told it to cut what forward saves, over a process group."""
    return is_module(module) and getattr(module, "fsdp_group", None) is not None


def adapt(module: nn.Module, computes: Iterable[torch.dtype], unfused: str) -> tuple[bool, list[Callable[[], None]]]:
    """Tells a module whose parameters are sharded that they are: what it saves of them, when it quantises them, what
    dtype they have in forward.

    Args:
        module: any.
        computes: the dtypes that its sharded parameters have in forward.
        unfused: why it cannot write gradients to ``main_grad``, if it cannot.

    Returns:
        Whether its gradients were to be written to ``main_grad``, which no longer is so; and how to take changes back.
    """
    undo: list[Callable[[], None]] = []
    off = bool(unfused) and fuses(module)
    for name in _FUSES if off else ():
        if module.__dict__.get(name):
            _put(module, name, False, undo)
    if is_module(module):
        # Backward quantises what it gathers; forward saves and keeps no quantised weights.
        _put(module, "_is_fsdp2", True, undo)
        _put(module, "_fp8_workspaces", {}, undo)
        _put(module, "primary_weights_in_fp8", False, undo)
        dtypes = set(computes)
        if len(dtypes) == 1:
            _put(module, "activation_dtype", dtypes.pop(), undo)
    return off, undo


_FUSES = ("fuse_wgrad_accumulation", "_accumulate_into_main_grad")
"""Attributes of modules, of operations (`te.ops`)."""


def fuses(module: nn.Module) -> bool:
    """Whether it is to write gradients of weights to ``main_grad`` itself."""
    theirs = is_module(module) or type(module).__module__.startswith(_PACKAGE)
    return theirs and any(module.__dict__.get(name) for name in _FUSES)


def unfused(module: Any, whole: Container[str], dtypes: Iterable[tuple[torch.dtype, torch.dtype]]) -> str:
    """Why a module cannot write gradients of weights to ``main_grad``; ``""`` if it can.

    Args:
        module: one that `fuses`.
        whole: names of its parameters that are sharded and that it sees whole.
        dtypes: those that its parameters have in forward, each with the one in which gradients travel.
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
    """Names of parameters that it multiplies by."""
    if _is(type(module), "GroupedLinear"):
        return [f"weight{i}" for i in range(module.num_gemms)]
    return list(module.weight_names) if _is(type(module), "LayerNormLinear") else ["fc1_weight", "fc2_weight"]


def _put(module: nn.Module, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    """As ``fast_setattr`` of theirs."""
    space = module.__dict__
    before = (space[name],) if name in space else ()
    if before and before[0] is value:
        return
    space[name] = value
    undo.append(partial(space.__setitem__, name, before[0]) if before else partial(space.pop, name, None))


def overrides(
    base: type[nn.Module],
    dtypes: Callable[[Any], Iterable[tuple[str, torch.dtype]]],
    lend: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Methods that a class gets when a module of it is sharded; none, if it is not one of theirs.

    Args:
        base: the class.
        dtypes: of a module, its own parameters' names, and the dtypes that they have in forward.
        lend: makes a `Lent` one of a whole weight.
    """
    if not _is(base, "TransformerEngineBaseModule"):
        return {}
    theirs: Any = base

    def set_activation_dtype(self: Any, inp: torch.Tensor) -> None:
        """As theirs, by the dtypes that parameters have in forward: ``parameters()`` shows main weights.

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
        """As theirs: what forward multiplies by."""
        return [lend(weight) for weight in theirs._get_weight_tensors(self)]

    out = {"set_activation_dtype": set_activation_dtype}
    return out | ({"_get_weight_tensors": _get_weight_tensors} if _is(base, *_KEEPS) else {})


# What modules save beside parameters: the scales of DelayedScaling, nothing for other recipes

_EXTRA = "_extra_state"


def leave_out_empty(module: nn.Module) -> Callable[[], None] | None:
    """Takes a module's extra state out of state dicts where it is empty, and lets one be loaded that has none; how to
    take that back, if anything was changed. Other state dicts have entries that not even the same model can load.
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


def _take_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if _empty(state.get(prefix + _EXTRA)):
        del state[prefix + _EXTRA]


def _fill_in(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    if prefix + _EXTRA not in state and _empty(module.get_extra_state()):
        state[prefix + _EXTRA] = torch.empty(0, dtype=torch.uint8)


def _empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


def lost_scales(there: Iterable[tuple[str, Any]], here: Iterable[str]) -> list[str]:
    """Names of extra states in a checkpoint that a state dict has no place for, though it has for what is beside them.

    Args:
        there: names in the checkpoint, with what ``torch.distributed.checkpoint`` says of them.
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
    """Whether an optimizer of the class steps by a kernel of theirs: ``FusedAdam``, ``FusedSGD``."""
    return _is(kind, "FusedAdam", "FusedSGD")


def steps_plainly(optimizer: Any) -> None:
    """Makes sure that an optimizer that is about to step on sharded parameters is none of theirs, which knows even
    shards only.

    Raises:
        RuntimeError: it is.
    """
    if fused(type(optimizer)) and not hasattr(optimizer, "_mfsdp_decoupled"):
        raise RuntimeError(
            f"mfsdp: {type(optimizer).__name__} would make state that is cut into even rows, which parameters are not, "
            "and checkpoints of it would be wrong. Let it step on flat tensors: "
            "mfsdp.fully_shard_optimizer(optimizer, use_decoupled_grad=True), with its own use_decoupled_grad=True"
        )


def understood(optimizer: Any, decoupled: bool) -> None:
    """Looks at an optimizer that is to step on flat tensors.

    Args:
        optimizer: any.
        decoupled: whether gradients come as ``.decoupled_grad``.

    Raises:
        ValueError: one of theirs that reads gradients elsewhere, and would not step at all; or keeps main weights.
        NotImplementedError: its moments share a scale, so that one element's depends on others.
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
    """Scales of moments, of which 16 and 32 bit floats need none; asked for where state was loaded, not made."""

    def __missing__(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        self[param] = {name: torch.ones(1, device=param.device) for name in _MOMENTS}
        return self[param]


def saves(base: Any) -> Any:
    """Whose ``state_dict`` a flat optimizer of the class has: torch's, of theirs, who would cut state evenly."""
    return torch.optim.Optimizer if fused(base) else base


def loads(base: Any) -> dict[str, Any]:
    """The ``load_state_dict`` that a flat optimizer of the class has, if it is one of theirs."""
    if not _is(base, "FusedAdam"):
        return {"load_state_dict": torch.optim.Optimizer.load_state_dict} if fused(base) else {}

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As torch's, with moments in their own dtypes, not in those of parameters."""
        torch.optim.Optimizer.load_state_dict(self, state_dict)
        for state in self.state.values():
            for name in _MOMENTS:
                if name in state:
                    state[name] = state[name].to(getattr(self, f"{name}_dtype"))

    return {"load_state_dict": load_state_dict}
