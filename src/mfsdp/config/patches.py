"""Every change that the core makes to objects of torch and others, in one table, and the one function that makes it.

Integrations (`mfsdp.integrations`) patch their own framework when they are imported, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """Why a function of others is wrapped, from when on, and with which versions that was tried."""

    why: str
    when: str
    tried: str


_SHARDED = "the first model is sharded"
_STATE_DICTS = Patch("torch's own rule cuts and gathers even shards only", _SHARDED, "torch 2.12 to 2.15")

PATCHES: dict[str, Patch] = {
    "torch.optim.optimizer.Optimizer.add_param_group": Patch(
        "no hook tells where optimizers get parameters: sharded ones need step hooks", _SHARDED, "torch 2.13"
    ),
    "torch.optim.optimizer.Optimizer.zero_grad": Patch(
        "unreduced gradients are in no .grad, and a step that is given up must drop them",
        "the first gradient is left unreduced",
        "torch 2.13",
    ),
    "torch.nn.modules.module.Module.zero_grad": Patch(
        "as for optimizers", "the first gradient is left unreduced", "torch 2.13"
    ),
    "torch.autograd.backward": Patch(
        "no hook tells of inputs=, and sharded parameters get their gradients outside of autograd's leaves",
        _SHARDED,
        "torch 2.13",
    ),
    "torch._dynamo.backends.registry.lookup_backend": Patch(
        "a misspelt name of the backend is answered by torch alone", _SHARDED, "torch 2.13"
    ),
    "torch.nn.utils.parametrize.is_parametrized": Patch(
        "no hook tells of a parametrization that comes or goes, which would part a parameter from its buffer",
        _SHARDED,
        "torch 2.13",
    ),
    "torch.distributed._state_dict_utils._distribute_tensors": _STATE_DICTS,
    "torch.distributed.checkpoint.state_dict._broadcast_state_dict": _STATE_DICTS,
    "torch.distributed.checkpoint.state_dict._distribute_state_dict": _STATE_DICTS,
    "torch.distributed.checkpoint.state_dict._maybe_full_or_cpu_state_dict": Patch(
        "unsharded models have torchao's weights in one piece", _SHARDED, "torch 2.11, 2.13, 2.15"
    ),
    "torch.distributed.checkpoint.state_dict._get_fqns": Patch(
        "names of compiled wrappers are not the model's", _SHARDED, "torch 2.12 to 2.15"
    ),
    "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.set_up_planner": Patch(
        "a load must find optimizer state, and be told where FP8 scales would be lost", _SHARDED, "torch 2.12 to 2.15"
    ),
    "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.commit_tensor": Patch(
        "quantized layers must hear of what was read in place", _SHARDED, "torch 2.13"
    ),
    "peft.utils.save_and_load._reshard_dtensor_values_for_load": Patch(
        "peft cuts adapters by torch's even rule", "a model is sharded and peft is imported", "peft 0.21"
    ),
    "torch._inductor.async_compile.AsyncCompile.wait": Patch(
        "kernels of several graphs compile at the same time", "a program's subgraphs are compiled", "torch 2.13"
    ),
    "torch._inductor.codecache.FxGraphCache._save_graph": Patch(
        "it runs behind `wait`, which is put off", "a program's subgraphs are compiled", "torch 2.13"
    ),
    "torch._dynamo.eval_frame.OptimizedModule": Patch(
        "five methods of wrappers of sharded modules return original names (`dtensor.parameter_names`)",
        _SHARDED,
        "torch 2.12 to 2.14",
    ),
    "torch.nn.modules.module.register_module_module_registration_hook": Patch(
        "peft would size adapters of sharded layers by a rank's rows (`sharding.hf_overrides`)",
        "mfsdp.sharding is imported",
        "peft 0.21",
    ),
    "sys.excepthook": Patch(
        "other ranks are told of the exception that ends this one (`runtime.watchdog`)",
        "ranks compare programs",
        "Python 3.11",
    ),
    "torch._higher_order_ops.invoke_subgraph": Patch(
        "its operator is marked as safe for inputs that training mutates (`compiler.outlining`)",
        "only while layers are outlined",
        "torch 2.13",
    ),
    "math": Patch(
        "its functions follow symbolic numbers (`optim.symbolic_numbers`)",
        "only while an optimizer step is traced",
        "Python 3.11",
    ),
}
"""By the full name of the function that is wrapped; of the last five, of the object that is changed otherwise."""


def around(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function like ``theirs`` that calls ``ours(theirs, *args, **kwargs)``."""

    @functools.wraps(theirs)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return wrapped


def wrap(owner: Any, name: str, ours: Callable[..., Any], traced: bool = True) -> None:
    """Replaces ``owner.name`` by ``ours(theirs, *args, **kwargs)``, once per process. ``traced``: whether Dynamo may
    trace into it.

    Raises:
        KeyError: the patch is not in `PATCHES`.
    """
    theirs = getattr(owner, name)
    short = f"{owner.__name__.rpartition('.')[2]}.{name}"
    if not any(f".{key}".endswith(f".{short}") for key in PATCHES):
        raise KeyError(f"{short} is not in mfsdp.config.patches.PATCHES")
    if getattr(theirs, "_mfsdp", False):
        return

    wrapped = around(theirs, ours)
    if not traced:
        import torch

        wrapped = torch.compiler.disable(wrapped)
    wrapped._mfsdp = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(wrapped) if isinstance(vars(owner).get(name), staticmethod) else wrapped)
