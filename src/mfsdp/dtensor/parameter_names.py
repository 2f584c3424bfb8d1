"""Original parameter names of models wrapped by ``torch.compile``.

The wrapper adds ``_orig_mod`` to the names of everything below it, and other code cannot load what is saved under such
names. Wrappers around sharded modules return the model's own names and accept both.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn

WRAPPER = "_orig_mod"


def original(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != WRAPPER) if WRAPPER in name else name


def restore(state: MutableMapping[str, Any], prefix: str = "") -> None:
    """Renames everything below ``prefix`` to its original name, in place and in order.

    Raises:
        ValueError: two entries get the same name.
    """
    if not any(WRAPPER in name and name.startswith(prefix) for name in state):
        return
    named = [(original(n) if n.startswith(prefix) else n, value) for n, value in state.items()]
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"mfsdp: {twice[0]!r} is there twice, with and without {WRAPPER!r} in its name")
    state.clear()
    state.update(named)


def spelled(model: nn.Module, name: str) -> str:
    """Adds the ``_orig_mod`` parts that torch needs to find a name in ``model``. A parameter of bytes gets its key in
    the state dict (`mfsdp.sharding.quantized_linear`).
    """
    at: Any = model
    out: list[str] = []
    for part in name.split("."):
        while part != WRAPPER and isinstance(at, _wrappers()):
            out.append(WRAPPER)
            at = at._orig_mod
        out.append(getattr(at, "_mfsdp_keys", {}).get(part, part))
        at = at._modules.get(part) if isinstance(at, nn.Module) else None
    return ".".join(out)


def keep_original_names() -> None:
    """Makes wrappers of sharded modules, and no others, return original names.

    Private in torch (``OptimizedModule``); tried on 2.12 to 2.14, not on the others of 2.11 to 2.15.
    """
    wrapper = _wrappers()
    if "state_dict" in vars(wrapper):
        return
    for method in (state_dict, load_state_dict, _load_from_state_dict, named_parameters, named_buffers):
        setattr(wrapper, method.__name__, functools.wraps(getattr(nn.Module, method.__name__))(method))


def _wrappers() -> Any:
    from torch._dynamo.eval_frame import OptimizedModule

    return OptimizedModule


def _sharded(module: nn.Module) -> bool:
    return any("_mfsdp_unit" in m.__dict__ for m in module.modules())


# Methods of nn.Module, replaced on wrappers


def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
    out = nn.Module.state_dict(self, *args, **kwargs)
    if _sharded(self):
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        restore(out, prefix)
        out._metadata = {original(n) if n.startswith(prefix) else n: v for n, v in out._metadata.items()}
    return out


def load_state_dict(self: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
    try:
        found = nn.Module.load_state_dict(self, state_dict, strict=strict, assign=assign)
    except RuntimeError as error:
        if not _sharded(self):
            raise
        raise RuntimeError(str(error).replace(f"{WRAPPER}.", "")) from None
    if _sharded(self):
        for names in found:
            names[:] = map(original, names)
    return found


def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
    if _sharded(self):
        for name in [n for n in state_dict if n.startswith(prefix)]:
            below = name.removeprefix(prefix)
            if below != "_extra_state" and not below.startswith(f"{WRAPPER}."):
                state_dict[f"{prefix}{WRAPPER}.{below}"] = state_dict.pop(name)
    nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)


def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return _original_if_sharded(self, nn.Module.named_parameters(self, *args, **kwargs))


def named_buffers(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    return _original_if_sharded(self, nn.Module.named_buffers(self, *args, **kwargs))


def _original_if_sharded(module: nn.Module, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((original(name), thing) for name, thing in found) if _sharded(module) else found
