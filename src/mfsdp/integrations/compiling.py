"""What integrations that compile a model in place share."""

from __future__ import annotations

from torch import nn

from ..sharding.module import FSDPModule


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, in place or wrapped. Private in torch (``_compiled_call_impl``); tried on 2.13."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def not_compiled(module: nn.Module, caller: str, options: str) -> None:
    """Refuses a module of which a part is compiled: it would read parameters one by one, unknown to the backend.

    Args:
        module: the model.
        caller: who compiles it, for the message.
        options: where the backend's options go instead.

    Raises:
        ValueError: names the compiled part.
    """
    _refuse([name or type(module).__name__ for name, m in module.named_modules() if is_compiled(m)], caller, options)


def not_compiled_elsewhere(module: nn.Module, caller: str, options: str) -> None:
    """As `not_compiled`, but parts that are sharded may have been compiled in place when they were."""
    found = [(n, m) for n, m in module.named_modules() if is_compiled(m) and not isinstance(m, FSDPModule)]
    _refuse([name or type(m).__name__ for name, m in found], caller, options)


def _refuse(found: list[str], caller: str, options: str) -> None:
    if found:
        raise ValueError(
            f"{caller} compiles the module itself, and {found[0]} is compiled already: leave out "
            f"torch.compile, and give its options to {options}"
        )
