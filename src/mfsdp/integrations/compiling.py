"""What integrations that compile a model in place share."""

from __future__ import annotations

from torch import nn

from ..sharding.module import FSDPModule


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, in place or wrapped. Private in torch (``_compiled_call_impl``); tried on 2.13."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def not_compiled(module: nn.Module, caller: str, options: str, *, sharded: bool = False) -> None:
    """Refuses a module of which a part is compiled: it would read parameters one by one, unknown to the backend.

    Args:
        module: the model.
        caller: who compiles it, for the message.
        options: where the backend's options go instead.
        sharded: whether sharded parts may be compiled: in place, when they were sharded.

    Raises:
        ValueError: names the compiled part.
    """
    for name, m in module.named_modules():
        if is_compiled(m) and not (sharded and isinstance(m, FSDPModule)):
            raise ValueError(
                f"{caller} compiles the module itself, and {name or type(m).__name__} is compiled already: leave out "
                f"torch.compile, and give its options to {options}"
            )
