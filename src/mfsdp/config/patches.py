"""Every change that the core makes to objects of torch and others, in one table, and the one function that makes it.

Integrations (`mfsdp.integrations`) patch their own framework when they are imported, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_EVEN = "torch's own rule cuts and gathers even shards only; tried on torch 2.12 to 2.15"

PATCHES: dict[str, str] = {
    "torch.optim.optimizer.Optimizer.add_param_group": (
        "no hook tells where optimizers get parameters: sharded ones need step hooks"
    ),
    "torch.optim.optimizer.Optimizer.zero_grad": (
        "unreduced gradients are in no .grad, and a step that is given up must drop them; when the first gradient is "
        "left unreduced"
    ),
    "torch.nn.modules.module.Module.zero_grad": "as for optimizers",
    "torch.autograd.backward": (
        "no hook tells of inputs=, and sharded parameters get their gradients outside of autograd's leaves"
    ),
    "torch._dynamo.backends.registry.lookup_backend": "a misspelt name of the backend is answered by torch alone",
    "torch.nn.utils.parametrize.is_parametrized": (
        "no hook tells of a parametrization that comes or goes, which would part a parameter from its buffer"
    ),
    "torch.distributed._state_dict_utils._distribute_tensors": _EVEN,
    "torch.distributed.checkpoint.state_dict._broadcast_state_dict": _EVEN,
    "torch.distributed.checkpoint.state_dict._distribute_state_dict": _EVEN,
    "torch.distributed.checkpoint.state_dict._maybe_full_or_cpu_state_dict": (
        "unsharded models have torchao's weights in one piece; tried on torch 2.11, 2.13, 2.15"
    ),
    "torch.distributed.checkpoint.state_dict._get_fqns": (
        "names of compiled wrappers are not the model's; tried on torch 2.12 to 2.15"
    ),
    "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.set_up_planner": (
        "a load must find optimizer state, and be told where FP8 scales would be lost; tried on torch 2.12 to 2.15"
    ),
    "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.commit_tensor": (
        "quantized layers must hear of what was read in place"
    ),
    "peft.utils.save_and_load._reshard_dtensor_values_for_load": (
        "peft cuts adapters by torch's even rule; if peft is imported then; tried on peft 0.21"
    ),
    "torch._inductor.async_compile.AsyncCompile.wait": (
        "kernels of several graphs compile at the same time; when a program's subgraphs are compiled"
    ),
    "torch._inductor.codecache.FxGraphCache._save_graph": (
        "it runs behind `wait`, which is put off; when a program's subgraphs are compiled"
    ),
    "torch._dynamo.eval_frame.OptimizedModule": (
        "five methods of wrappers of sharded modules return original names (`dtensor.parameter_names`); tried on torch "
        "2.12 to 2.14"
    ),
    "torch.nn.modules.module.register_module_module_registration_hook": (
        "peft would size adapters of sharded layers by a rank's rows (`sharding.hf_overrides`); when mfsdp.sharding is "
        "imported; tried on peft 0.21"
    ),
    "sys.excepthook": (
        "other ranks are told of the exception that ends this one (`runtime.watchdog`); when ranks compare programs; "
        "tried on Python 3.11"
    ),
    "torch._higher_order_ops.invoke_subgraph": (
        "its operator is marked as safe for inputs that training mutates (`compiler.outlining`); only while layers "
        "are outlined"
    ),
    "math": (
        "its functions follow symbolic numbers (`optim.symbolic_numbers`); only while an optimizer step is traced; "
        "tried on Python 3.11"
    ),
}
"""Why, by the full name of the function that is wrapped; of the last five, of the object that is changed otherwise. If
not said otherwise: when the first model is sharded; tried on torch 2.13.
"""


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
