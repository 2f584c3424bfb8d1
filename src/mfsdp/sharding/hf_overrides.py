"""Adapts methods of frameworks (transformers, peft) to sharded modules, or refuses them with the alternative."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config.patches import around


def overrides(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Overrides for a sharded module's class: hooks, and those methods of transformers' models that it has."""
    ours: dict[str, Callable[..., Any]] = {
        "register_forward_hook": register_forward_hook,
        "save_pretrained": save_pretrained,
        "resize_token_embeddings": resize_token_embeddings,
    }
    theirs = {name: getattr(base, name, None) for name in ours}
    return {name: around(method, ours[name]) for name, method in theirs.items() if callable(method)}


def save_pretrained(
    theirs: Callable[..., Any], model: nn.Module, folder: Any, *args: Any, state_dict: Any = None, **more: Any
) -> Any:
    """Calls transformers' own if full tensors are passed or on this rank, or if it gathers them itself, for models that
    it has loaded in parts.

    Raises:
        NotImplementedError: parameters are cut over ranks; it may have been called on one only.
    """
    if state_dict is None and getattr(model, "is_distributed_loading_by_transformers", False):
        return theirs(model, folder, *args, **more)
    given = model.state_dict(keep_vars=True) if state_dict is None else state_dict
    whole: dict[str, Any] = {}
    once: dict[int, Any] = {}
    for name, tensor in given.items():
        ranks = _ranks(tensor)
        if ranks > 1:
            raise NotImplementedError(
                f"save_pretrained: {type(model).__name__} is sharded over {ranks} ranks. Call mfsdp.save_safetensors("
                "model, folder) on every rank, which from_pretrained reads, or give save_pretrained a whole "
                "state_dict=, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
            )
        if id(tensor) not in once:  # tied tensors stay tied
            once[id(tensor)] = tensor.full_tensor() if ranks else tensor
        whole[name] = once[id(tensor)]
    if state_dict is not None or "state_dict" in inspect.signature(theirs).parameters:
        more["state_dict"] = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in whole.items()}
    return theirs(model, folder, *args, **more)


def resize_token_embeddings(
    theirs: Callable[..., Any], model: nn.Module, size: int | None = None, *args: Any, **more: Any
) -> Any:
    """Returns the embeddings if there is nothing to resize, as transformers' own does.

    Raises:
        NotImplementedError: there is.
    """
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    if size is not None or more.get("pad_to_multiple_of"):
        raise NotImplementedError(
            f"resize_token_embeddings: {type(model).__name__} is sharded, and its parameters keep their shapes; "
            "resize before fully_shard"
        )
    return embeddings


def register_forward_hook(
    theirs: Callable[..., Any], module: nn.Module, hook: Callable[..., Any], *args: Any, **more: Any
) -> Any:
    """Registers a hook as `traceable`."""
    return theirs(module, traceable(hook), *args, **more)


def traceable(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that Dynamo traces: of transformers' and peft's, the one that calls ``requires_grad_()`` on the
    embedding's output does nothing in compiled code.

    It is there for reentrant checkpointing of frozen models (`enable_input_require_grads`). Dynamo traces a checkpoint
    as an operator, through which gradients reach adapters without it, and breaks the graph at ``requires_grad_()``.
    """
    package = str(getattr(hook, "__module__", "")).partition(".")[0]
    name = str(getattr(hook, "__name__", ""))
    if package not in ("transformers", "peft") or not name.startswith("make_inputs_require_grad"):
        return hook

    def uncompiled(module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(module, args, output)

    return functools.wraps(hook, ("__doc__",))(uncompiled)


def _ranks(tensor: object) -> int:
    """Number of ranks over which a tensor is sharded; 0 if it is not ours."""
    sharding = getattr(tensor, "_sharding", None)
    return 0 if sharding is None else int(sharding.layout.world)


def _refuse_adapters(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Checks before peft makes an adapter for a sharded layer. Peft would take it for a tensor-parallel one and size
    the adapter by this rank's rows, unless the mesh axis has the name that peft knows.
    """
    if name != "base_layer" or child is None or "_mfsdp_refs" not in child.__dict__:
        return
    peft = sys.modules.get("peft.tuners.tuners_utils")
    weight = child._parameters.get("weight")
    if peft is None or weight is None or not isinstance(module, peft.BaseTunerLayer) or _ranks(weight) < 2:
        return
    axes = set(weight.device_mesh.mesh_dim_names or ())  # type: ignore[attr-defined]
    if not axes <= {"fsdp"}:
        raise ValueError(
            f"mfsdp: peft would give the adapter of a sharded {type(child).__name__} the sizes of this rank's rows, "
            f"because axes of the mesh are called {sorted(axes)}. Call get_peft_model before fully_shard, or call the "
            "axis to shard over 'fsdp'."
        )


nn.modules.module.register_module_module_registration_hook(_refuse_adapters)
