"""Original names, whichever way a model was compiled.

``torch.compile(module)`` wraps the module, and the wrapper puts ``_orig_mod`` into the name of everything below it:
what is saved under such names nobody else can load. Around what is sharded, wrappers give the names that the model has,
and take both.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn

WRAPPER = "_orig_mod"


def original(name: str) -> str:
    """A name without the wrappers' part of it."""
    return ".".join(part for part in name.split(".") if part != WRAPPER) if WRAPPER in name else name


def restore(state: MutableMapping[str, Any], prefix: str = "") -> None:
    """Gives everything below ``prefix`` its original name, in place and in order.

    Raises:
        ValueError: two things would have one name.
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
    """A name as torch finds its way through modules, with the wrappers' part of it."""
    at: Any = model
    out: list[str] = []
    for part in name.split("."):
        while part != WRAPPER and isinstance(at, _wrappers()):
            out.append(WRAPPER)
            at = at._orig_mod
        out.append(part)
        at = at._modules.get(part) if isinstance(at, nn.Module) else None
    return ".".join(out)


def keep_original_names() -> None:
    """Makes wrappers of sharded modules give original names; the others stay as they are.

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


# What wrappers do instead of nn.Module's own


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
