"""Optimizers of megatron-fsdp's form: flat, with its keyword arguments, and with state to load into."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ...buffers.flat_buffer import FlatBuffer
from ...buffers.norms import check_finite
from ...dtensor.optimizer_hooks import buffers_of
from ...optim import flat_optimizer
from ...sharding.module import FSDPModule


@dataclass(frozen=True)
class _Settings:
    """What a model's optimizer has to know of `fully_shard_model`'s arguments."""

    decoupled: bool = False
    ahead: bool = True
    finite: Callable[[], nn.Module | None] = lambda: None
    """A weak reference to the model, if its gradients are to be checked before a step."""


_SETTINGS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Settings of models, by the state of their outermost module."""


def remember(root: FSDPModule, *, decoupled: bool = False, ahead: bool = True, finite: bool = False) -> None:
    """Keeps settings for the optimizer of a model."""
    model = weakref.ref(cast(nn.Module, root)) if finite else _Settings.finite
    _SETTINGS[root._mfsdp_unit.outermost] = _Settings(decoupled, ahead, model)


def _settings(optimizer: Optimizer) -> _Settings:
    owners = buffers_of(optimizer) if isinstance(optimizer, Optimizer) else []
    found = _SETTINGS.get(owners[0].unit.outermost) if owners else None
    return found or _Settings()


def fully_shard_optimizer(
    optimizer: Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    *,
    compile: bool = False,
    offload: bool | str | None = None,
) -> Optimizer:
    """Makes an optimizer over parameters of a `MegatronFSDP` step on flat tensors; returns the same optimizer.

    Its ``step`` takes ``sync_grad_before_optimizer_step`` and ``install_optimized_model_weights``, its ``zero_grad``
    ``zero_grad_buffer``. Before the first step, ``state_dict()`` has zeros to load a checkpoint into; the optimizer
    itself stays without state. (megatron-fsdp takes a step with zero gradients here, which decays weights.) All ranks
    must call that ``state_dict()``.

    Args:
        optimizer: elementwise, built from ``model.parameters()``.
        preproc_state_dict_for_dcp_ckpt: no effect: ``torch.distributed.checkpoint`` always takes the state dict.
        compile, offload: see `mfsdp.fully_shard_optimizer`.

    Raises:
        TypeError, ValueError, NotImplementedError: see `mfsdp.fully_shard_optimizer`.
    """
    return adapt(optimizer, _settings(optimizer).decoupled, compile, offload)


def adapt(optimizer: Optimizer, decoupled: bool, compile: bool = False, offload: bool | str | None = None) -> Optimizer:
    """Makes an optimizer flat, with megatron-fsdp's keyword arguments, and returns it."""
    ahead = _settings(optimizer).ahead
    flat = flat_optimizer.fully_shard_optimizer(
        optimizer, compile, use_decoupled_grad=decoupled, ahead=ahead, offload=offload
    )
    base: Any = type(flat)
    flat.__class__ = _subclass(base)
    return flat


def complete(buffers: Iterable[FlatBuffer]) -> None:
    """Checks that no gradients are left unreduced.

    Raises:
        RuntimeError: names the unit.
    """
    for buffer in buffers:
        if buffer.gradients.holds:
            raise RuntimeError(
                f"mfsdp: gradients of unit {buffer.unit.fqn!r} are not reduced: every backward since the last step ran "
                "with is_last_microbatch=False, or inside no_sync(). Run the last backward of a step outside, or set "
                "model.is_last_microbatch = True before it"
            )


class _Flat(Optimizer):
    """Above a flat optimizer's class: megatron-fsdp's keyword arguments, and state to load into."""

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
    ) -> Any:
        """Takes a step. The two flags have no effect: backward reduces gradients, and the next gather reads weights.

        Raises:
            RuntimeError: gradients are not reduced.
            FloatingPointError: gradients have an Inf or NaN, and the model was sharded with
                ``report_nan_in_param_grad=True``.
        """

        def checked() -> Any:
            loss = None if closure is None else closure()
            complete(buffers_of(self))
            if (model := _settings(self).finite()) is not None:
                check_finite(model)
            return loss

        if closure is None:
            checked()
        return super().step(None if closure is None else checked)  # type: ignore[arg-type]

    step.hooked = True  # type: ignore[attr-defined]  # the base's step runs the hooks

    def zero_grad(self, set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        """As the base's.

        Raises:
            NotImplementedError: ``zero_grad_buffer=False``.
        """
        if not zero_grad_buffer:
            raise NotImplementedError(
                "zero_grad(zero_grad_buffer=False): gradients have one buffer, of which param.grad is a view: leave "
                "out zero_grad() to keep them"
            )
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the base's; before the first step with zeros in the place of state.

        Warns:
            UserWarning: before the first step, and gradients are there: it has no state.
        """
        gradients = any(p.grad is not None for group in self.param_groups for p in group["params"])
        if not self.state and not gradients and not any(b.gradients.holds for b in buffers_of(self)):
            return _with_zeros(self)
        if not self.state:
            warnings.warn(
                "mfsdp: state_dict() before the first step has no state to load into while there are gradients: call "
                "zero_grad() first",
                stacklevel=2,
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base's; state of parameters that had not been stepped is left out, so that the first step makes it."""
        kept = {p: s for p, s in state_dict["state"].items() if s.get("step", 1) or isinstance(self, Adagrad)}
        super().load_state_dict({**state_dict, "state": kept})


@functools.cache
def _subclass(flat: type[Optimizer]) -> type[Optimizer]:
    return type(flat.__name__, (_Flat, flat), {"__module__": flat.__module__})


def _with_zeros(optimizer: Any) -> dict[str, Any]:
    """Returns the state dict after a step with zero gradients, learning rates and weight decay, with ``step`` 0. A
    double takes the step, without hooks: the optimizer and its groups, in which some count steps, stay as they are.
    """
    double: Any = object.__new__(type(optimizer))
    base: Any = super(_Flat, double)
    double.__setstate__({**optimizer.__getstate__(), "state": defaultdict(dict)})
    for name, value in vars(optimizer).items():
        if "hooks" not in name and name != "_mfsdp_runs":
            vars(double).setdefault(name, value)
    double.param_groups = [{**group, **_nothing(group)} for group in optimizer.param_groups]
    try:
        for param in (p for group in double.param_groups for p in group["params"] if p.requires_grad):
            param.grad = torch.zeros_like(param)
        base.step()
    finally:
        base.zero_grad()
    double.param_groups = optimizer.param_groups
    out: dict[str, Any] = base.state_dict()
    for state in out["state"].values():
        if "step" in state:
            state["step"] = state["step"] * 0
    return out


def _nothing(group: dict[str, Any]) -> dict[str, Any]:
    """Zeros for the settings of a group that move weights without a gradient, or state."""
    kept = {name: group[name] for name in ("lr", "weight_decay") if name in group}
    return {n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0.0 for n, v in kept.items()}


def refuse(optimizer: Optimizer, strange: torch.Tensor | None) -> NoReturn:
    """Raises for an optimizer that cannot be given sharded parameters."""
    name = type(optimizer).__name__
    if strange is None:
        raise ValueError(
            f"fully_shard: the {name} has state of unsharded parameters, which would be lost. Call fully_shard before "
            "the first step and load the state afterwards; one that makes its state when it is built, as Adagrad does, "
            "is built from the parameters of fully_shard_model(...) and given to fully_shard_optimizer"
        )
    raise ValueError(
        f"fully_shard: the {name} holds a parameter of shape {tuple(strange.shape)} that is not in the module: nobody "
        "would reduce its gradients. Give it an optimizer of its own, or make it a part of the module"
    )
