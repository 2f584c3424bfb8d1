"""Whose a tensor is: shards and gathered parameters know the buffer that they belong to.

Note [Accumulators]
A gradient leaves a program through ``accumulate(shard, gshard, ...)``, not through an output that autograd would add to
``.grad``: so that it happens where the schedule says, in the accumulator's own dtype and without a second copy. The
accumulator is found through the shard tensor, which is an input of every program: the buffer it belongs to hangs on it
as an attribute. Programs stay free of process-wide state, and equal layers stay equal programs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from .static_buffers import holders, release

_OWNER = "_mfsdp_buffer"
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By the shard's storage, which may have no memory yet: autograd hands back detached aliases of what it saved under
hooks."""


def register(shard: torch.Tensor, buffer: Any) -> None:
    """Makes a shard known as a flat buffer's (`state.flat_buffer.FlatBuffer`), as long as somebody else holds that:
    what hangs on a tensor that autograd knows is never garbage to Python.
    """
    setattr(shard, _OWNER, weakref.ref(buffer))
    if not shard.is_meta:
        _owners[shard.untyped_storage()._cdata] = buffer
        weakref.finalize(buffer, gone).atexit = False


def gone() -> None:
    """A buffer is gone; with the last one go static buffers, which programs of all models share."""
    if not list(_owners.values()):
        release()


def owner(shard: torch.Tensor) -> Any:
    """The buffer that the shard tensor belongs to, or ``None``."""
    hung = getattr(shard, _OWNER, None)
    found = None if hung is None else hung()
    if hung is None and type(shard) is torch.Tensor and not shard.is_meta:
        found = _owners.get(shard.untyped_storage()._cdata)
        if found is not None and found.weights.source.shape != shard.shape:
            return None
    return found


def orphan(shard: torch.Tensor) -> bool:
    """Whether it belonged to a buffer that is gone."""
    return hasattr(shard, _OWNER) and owner(shard) is None


_WHOLE = "_mfsdp_whole"
"""Attribute of gathered parameters of the eager path: their buffer."""


def register_full(params: Iterable[torch.Tensor], buffer: Any) -> None:
    """Makes a buffer known to the whole parameters that have been gathered from it."""
    for param in params:
        setattr(param, _WHOLE, weakref.ref(buffer))


def read_by(tensor: torch.Tensor) -> Any:
    """The buffer whose parameters a program reads through an argument, shard or gathered parameter, or ``None``."""
    hung = getattr(tensor, _WHOLE, None)
    return owner(tensor) if hung is None else hung()


def sharded() -> bool:
    """Whether this process holds a shard of anything."""
    return len(_owners) > 0


def shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors have its storage too."""
    return holders(tensor.untyped_storage()) > 2  # the tensor's own, and of the handle that is asked for here


def path(source: torch.Tensor) -> str:
    """What errors call the unit that a shard belongs to."""
    found = owner(source)
    return "a unit that is gone" if found is None else str(found.path)


def gather_of(source: torch.Tensor) -> str:
    """What a rank says before it gathers a unit (Note [Desync detection])."""
    return f"gather of {_one(source)}"


def refresh_of(source: torch.Tensor) -> str:
    """What it says before it gathers parameters that last, where that is announced by itself."""
    return f"gather of parameters that last of {_one(source)}"


def reduction_of(source: torch.Tensor, wanted: bool | None = None) -> str:
    """What it says before it reduces gradients. ``wanted``: whether they will be accumulated; ``None``: ask."""
    found = owner(source)
    kept = ", kept back under no_sync" if found.spec.unreduced_numel and not found.gradients.sync else ""
    wanted = not found.spec.any_optional or (found.gradients.wanted() if wanted is None else wanted)
    return f"reduction of {_one(source)}{kept}{'' if wanted else ', in a backward for inputs alone'}"


def _one(source: torch.Tensor) -> str:
    """A path, with which model is meant where another rank may have to find it by that (Note [Joining with zeros])."""
    found = owner(source)
    which = f", model {found.unit.outermost.loose.name}" if found is not None and found.spec.any_optional else ""
    return f"{path(source)}{which}"


def unfinished(outermost: Any) -> RuntimeError:
    """The error of a model that may have old values beside new ones."""
    return RuntimeError(
        f"mfsdp: {outermost.name} is half loaded: {outermost.half[0]} has not ended, so some values are old, some are "
        "new. Load it again, or another checkpoint (Checkpoints.load, load_safetensors), on all ranks"
    )
