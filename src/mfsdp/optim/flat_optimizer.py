"""`fully_shard_optimizer`: makes any elementwise optimizer, and Muon, step on flat tensors (`parameter_ranges`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..dtensor import transformer_engine as te
from ..dtensor.optimizer_hooks import count, left_alone
from .compiled_step import KNOWN, CompiledSteps
from .host_state import load
from .matrix_step import MAX_STAGING, MatrixStep
from .muon import GROUP_KEYS, RECIPES, REFUSED
from .parameter_ranges import ParameterRanges, is_sharded

_SETTINGS = ("_mfsdp_decoupled", "_mfsdp_compile", "_mfsdp_ahead", "_mfsdp_offload", "_mfsdp_max_staging")
"""Attributes of a flat optimizer: the arguments of `_ranges`. Copies keep them, and make ranges of their own."""


def fully_shard_optimizer(
    optimizer: Optimizer,
    compile: bool = False,
    *,
    use_decoupled_grad: bool = False,
    ahead: bool = True,
    offload: bool | str | None = None,
    max_staging: int | None = None,
) -> Optimizer:
    """Makes an optimizer step on few flat tensors; returns the same optimizer, with the same state dict.

    Results equal those of the original optimizer. Parameter groups keep their settings; parameters without a gradient
    are skipped; unsharded parameters step as before. Call it before building schedulers.

    ``torch.optim.Muon`` steps whole matrices, each on one rank (Note [Owners] in ``optim/owners.py``): one all-to-all
    there and one back, in bfloat16, per wave of units. Its constructor takes matrices only; give stacked experts
    [e, m, n] to ``add_param_group``. A parameter group's ``split_sizes`` are the rows of the matrices that a fused
    projection consists of, [q, k, v] say. A matrix that tensor parallelism has cut is stepped whole; with the group key
    ``"blockwise": True``, each rank's piece is a matrix. All ranks of the job call this together, and every step. Its
    method ``describe()`` returns the last step's waves, owners and bytes as text.

    Args:
        optimizer: an elementwise optimizer, or ``torch.optim.Muon``, over parameters of a model sharded by
            `mfsdp.fully_shard`.
        use_decoupled_grad: pass gradients as ``.decoupled_grad`` in ``main_grads_dtype`` (as TransformerEngine's and
            Apex's fused optimizers read them) instead of as ``.grad`` in the dtype of the weights.
        compile: compile the step with Inductor, one graph call per range. Results equal the original step up to
            rounding, not bitwise. Numbers (learning rates, step counts) may change in every step without a recompile.
            The optimizer itself takes a parameter's first step, which creates its state, and steps unsharded
            parameters. ``torch.compile`` around a step does not change it.
        ahead: launch the first gathers of the next forward, each after its unit's step (Note [Step prefetch] in
            ``runtime/step_prefetch.py``). Forward uses them if weights have not been written since; its results are
            bitwise the same. Not with the backend's option ``prefetch=0``. All ranks must pass the same value.
        offload: ``True`` or ``"state"``: keep state on the host in pinned memory and stream it through the device unit
            by unit during the step (Note [Streamed state] in ``optim/host_state.py``). Results are bitwise the same.
            For torch's own optimizers; state of unsharded parameters and main weights stay on the device. ``None``: as
            the model's plan says (`mfsdp.plan`), else off.
        max_staging: Muon: bytes of rows and matrices that a rank may hold at once during the step (default 1 GiB;
            one unit at least). Less memory makes more waves, which wait for each other. The same on all ranks.

    Raises:
        TypeError: not a `torch.optim.Optimizer`.
        ValueError: the optimizer is flat already, has no sharded parameter, or a scheduler has wrapped its ``step``; it
            is torch's or TransformerEngine's and reads gradients elsewhere; it keeps main weights itself; ``offload``
            or ``max_staging`` is another value; Muon has a parameter that is no matrix, or ``split_sizes`` that do not
            fit.
        NotImplementedError: its update is neither elementwise nor that of ``torch.optim.Muon``; with ``compile``, it is
            Muon or not torch's own, or cannot be compiled (the message gives the reason); with ``offload``, it is not
            torch's own, ``compile`` is set too, or ``offload`` would move main weights.
    """
    steps_flat(optimizer, compile, use_decoupled_grad)
    _has_sharded(optimizer)
    base = type(optimizer)
    streamed = _streamed(_planned(optimizer) if offload is None else offload, base, compile)
    settings = use_decoupled_grad, compile, ahead, streamed, _staging(max_staging, base)
    ranges = _ranges(optimizer, base, *settings)
    vars(optimizer).update(zip(_SETTINGS, settings, strict=True), _mfsdp_runs=ranges)
    optimizer.__class__ = _subclass(base)  # type: ignore[arg-type]
    return optimizer


def steps_flat(optimizer: Optimizer, compile: bool = False, use_decoupled_grad: bool = False) -> None:
    """Checks that an optimizer can step on flat tensors, whatever its parameters are.

    Raises:
        TypeError, ValueError, NotImplementedError: see `fully_shard_optimizer`.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fully_shard_optimizer: {optimizer!r} is no torch.optim.Optimizer")
    base = type(optimizer)
    name = base.__name__
    if is_flat(optimizer):
        raise ValueError(f"fully_shard_optimizer: this {name} steps on flat tensors already")
    if base in RECIPES:
        RECIPES[base].check(optimizer)
    elif refused := [REFUSED[parent.__name__] for parent in base.__mro__ if parent.__name__ in REFUSED]:
        raise NotImplementedError(f"fully_shard_optimizer does not support {name}: {refused[0]}")
    if "step" in vars(optimizer):
        raise ValueError(f"fully_shard_optimizer: something has wrapped the {name}'s step; build schedulers afterwards")
    if use_decoupled_grad and base.__module__.startswith("torch.optim."):
        raise ValueError(
            f"fully_shard_optimizer: torch's {name} reads .grad, and use_decoupled_grad=True puts gradients elsewhere: "
            "it would not step. Leave out use_decoupled_grad"
        )
    if compile and base not in KNOWN:
        raise NotImplementedError(
            f"fully_shard_optimizer: {name} cannot be compiled: a recording is vouched for of torch's own "
            f"{', '.join(sorted(known.__name__ for known in KNOWN))} only, since what others keep where is not known. "
            "Leave out compile=True"
        )
    te.understood(optimizer, use_decoupled_grad)


def _has_sharded(optimizer: Optimizer) -> None:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    if not any(map(is_sharded, params)):
        name = type(optimizer).__name__
        instead = ", in the place of torch's FSDP2" if any(isinstance(p, DTensor) for p in params) else " first"
        raise ValueError(
            f"fully_shard_optimizer: none of the {name}'s parameters is sharded; call mfsdp.fully_shard{instead}"
        )


def _planned(optimizer: Optimizer) -> bool:
    """Whether the model's plan puts optimizer state on the host."""
    ours = (p for g in optimizer.param_groups for p in g["params"] if is_sharded(p))
    plans = (param._mfsdp_owner.unit.outermost.plan for param in ours)
    return any(plan is not None and plan.optimizer == "host" for plan in plans)


def _streamed(offload: bool | str, base: type[Optimizer], compile: bool) -> bool:
    """Whether to stream state; raises for unsupported combinations."""
    if offload is False:
        return False
    if offload in ("main", "all"):
        raise NotImplementedError(
            f"fully_shard_optimizer: offload={offload!r}: main weights stay on the device. Parameters are views into "
            "them, and programs read them in forward wherever no cast is kept: where they are gathered as they "
            'are or in int8, with keep_cast=False, after to_local(). Nothing has been changed. offload="state" moves '
            "the optimizer's state, the larger part under Adam. Main weights are fewer bytes on more ranks, or in "
            "MixedPrecisionPolicy(main_params_dtype=torch.bfloat16), which trains differently"
        )
    if offload not in (True, "state"):
        raise ValueError(f'fully_shard_optimizer: offload={offload!r}: choose False, True or "state"')
    if base not in KNOWN and base not in RECIPES:
        raise NotImplementedError(
            f"fully_shard_optimizer: the state of {base.__name__} cannot be streamed: units would be stepped one by "
            "one, which is known to be the same step of torch's own "
            f"{', '.join(sorted(known.__name__ for known in KNOWN))} only. Leave out offload"
        )
    if compile:
        raise NotImplementedError(
            "fully_shard_optimizer: a compiled step knows where state is, and state on the host takes turns in device "
            "memory. Leave out compile=True or offload"
        )
    return True


def _staging(given: int | None, base: type[Optimizer]) -> int:
    """Returns the bound of staging memory."""
    if given is None:
        return MAX_STAGING
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"fully_shard_optimizer: max_staging={given!r}: give a positive number of bytes")
    if base not in RECIPES:
        raise ValueError(
            f"fully_shard_optimizer: max_staging={given!r} is of torch.optim.Muon, which steps whole matrices; "
            f"{base.__name__} steps rows where they are. Leave it out"
        )
    return given


def _ranges(
    optimizer: Optimizer, base: type[Optimizer], decoupled: bool, compile: bool, ahead: bool, streamed: bool, room: int
) -> ParameterRanges:
    steps = CompiledSteps(optimizer, base) if compile else None
    matrices = MatrixStep(optimizer, RECIPES[base], room) if base in RECIPES else None
    return ParameterRanges(base, decoupled, steps, ahead, streamed, matrices)


class _FlatOptimizer:
    """Marks the class of a flat optimizer."""


def is_flat(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer steps on flat tensors."""
    return isinstance(optimizer, _FlatOptimizer)


@functools.cache
def _subclass(base: type[Optimizer]) -> type[Optimizer]:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step on flat tensors."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runs = vars(self).get("_mfsdp_runs")
        if runs is None:  # this optimizer is a copy
            runs = self._mfsdp_runs = _ranges(self, base, *(getattr(self, name) for name in _SETTINGS))
        runs.step(self)
        count(runs.members)
        return loss

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**base.__getstate__(self), **{name: getattr(self, name) for name in _SETTINGS}}

    def state_dict(self: Any) -> dict[str, Any]:
        """As the base's; copies numbers that parameters of a range share: the loading optimizer updates them."""
        out: dict[str, Any] = te.saves(base).state_dict(self)
        out["state"] = {p: {k: _own(v) for k, v in state.items()} for p, state in out["state"].items()}
        return out

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As the base's; does not move streamed state to the device."""
        kept = [{key: group[key] for key in keys if key in group} for group in self.param_groups]
        if self._mfsdp_offload:
            load(base.load_state_dict, self, state_dict)
        else:
            base.load_state_dict(self, state_dict)
        for group, mine in zip(self.param_groups, kept, strict=True):
            group.update({key: value for key, value in mine.items() if key not in group})

    def describe(self: Any) -> str:
        """Returns the last step as text: its lanes, then what every wave holds, sends and costs."""
        runs = vars(self).get("_mfsdp_runs")
        if runs is None:  # this optimizer is a copy
            runs = self._mfsdp_runs = _ranges(self, base, *(getattr(self, name) for name in _SETTINGS))
        return str(runs.matrices.describe(base.__name__))

    keys = GROUP_KEYS if base in RECIPES else ()  # torch forgets keys that a state dict lacks
    step = left_alone(step)
    step.hooked = True  # type: ignore[attr-defined]  # the base's step runs the hooks
    space: dict[str, Any] = {"__module__": base.__module__, "__getstate__": __getstate__}
    space |= {"step": step, "state_dict": state_dict, "load_state_dict": load_state_dict} | te.loads(base)
    space |= {"describe": describe} if base in RECIPES else {}
    return type(base.__name__, (_FlatOptimizer, base), space)


def _own(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
