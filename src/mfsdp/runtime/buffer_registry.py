"""Maps shards and gathered parameters to their flat buffers.

Note [Accumulators]
A gradient leaves a program through ``accumulate(shard, gshard, ...)``, not through an output that autograd would add to
``.grad``. So the schedule decides when accumulation happens; it uses the accumulator's own dtype and needs no second
copy. The shard tensor, an input of every program, leads to the accumulator: the shard's buffer is its attribute.
Programs hold no process-wide state, and equal layers stay equal programs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .static_buffers import holders, release

if TYPE_CHECKING:
    from .buffer_api import Buffer, Outermost

_OWNER = "_mfsdp_buffer"
_owners: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
"""By the shard's storage object, whose memory may not exist yet: autograd returns detached aliases of tensors saved
under hooks.
"""


def register(shard: torch.Tensor, buffer: Buffer) -> None:
    """Records a shard's flat buffer (`buffers.flat_buffer`). The reference is weak: Python never collects what
    a tensor known to autograd holds.
    """
    setattr(shard, _OWNER, weakref.ref(buffer))
    if not shard.is_meta:
        _owners[shard.untyped_storage()._cdata] = buffer
        weakref.finalize(buffer, gone).atexit = False


def gone() -> None:
    """Runs when a buffer is deleted. After the last one, releases the static buffers, which programs of all models
    share.
    """
    if not list(_owners.values()):
        release()


def owner(shard: torch.Tensor) -> Buffer | None:
    """The buffer that owns a shard tensor, or ``None``."""
    hung: weakref.ref[Buffer] | None = getattr(shard, _OWNER, None)
    found = None if hung is None else hung()
    if hung is None and type(shard) is torch.Tensor and not shard.is_meta:
        found = _owners.get(shard.untyped_storage()._cdata)
        if found is not None and found.weights.source.shape != shard.shape:
            return None
    return found


def known(shard: torch.Tensor) -> Buffer:
    """The same, where there has to be one.

    Raises:
        RuntimeError: there is none.
    """
    if (found := owner(shard)) is None:
        raise RuntimeError(
            "mfsdp: backward got a copy of a shard instead of the shard. Saved-tensor hooks that copy what they are "
            "given (torch.autograd.graph.save_on_cpu) do not compose with a compiled sharded model."
        )
    return found


def orphan(shard: torch.Tensor) -> bool:
    """Whether the shard's buffer has been deleted."""
    return hasattr(shard, _OWNER) and owner(shard) is None


_WHOLE = "_mfsdp_whole"
"""Attribute of parameters gathered by the eager fallback: their buffer."""


def register_full(params: Iterable[torch.Tensor], buffer: Buffer) -> None:
    """Records the buffer that full parameters were gathered from."""
    for param in params:
        setattr(param, _WHOLE, weakref.ref(buffer))


def read_by(tensor: torch.Tensor) -> Buffer | None:
    """The buffer that a program reads through an argument (shard or gathered parameter), or ``None``."""
    hung: weakref.ref[Buffer] | None = getattr(tensor, _WHOLE, None)
    return owner(tensor) if hung is None else hung()


def sharded() -> bool:
    """Whether this process holds any shard."""
    return len(_owners) > 0


def shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors use the same storage."""
    return holders(tensor.untyped_storage()) > 2  # the tensor's own reference and this handle's


def path(source: torch.Tensor) -> str:
    """The path of a shard's unit, for error messages."""
    found = owner(source)
    return "a unit that is gone" if found is None else found.path


def gather_of(source: torch.Tensor) -> str:
    """What a rank announces before it gathers a unit (Note [Desync detection])."""
    return f"gather of {_one(source)}"


def refresh_of(source: torch.Tensor) -> str:
    """What a rank announces before it gathers persistent parameters separately."""
    return f"gather of parameters that last of {_one(source)}"


def reduction_of(source: torch.Tensor, wanted: bool | None = None) -> str:
    """What a rank announces before it reduces gradients. ``wanted``: whether they will be accumulated; ``None``: ask
    the buffer.
    """
    found = known(source)
    kept = ", unreduced under no_sync" if found.spec.unreduced_numel and not found.gradients.sync else ""
    wanted = not found.spec.any_optional or (found.gradients.wanted() if wanted is None else wanted)
    return f"reduction of {_one(source)}{kept}{'' if wanted else ', in a backward for inputs alone'}"


def _one(source: torch.Tensor) -> str:
    """The unit's path, with the model's name if another rank may look the unit up by it (Note [Joining with zeros])."""
    found = owner(source)
    which = f", model {found.unit.outermost.loose.name}" if found is not None and found.spec.any_optional else ""
    return f"{path(source)}{which}"


def unfinished(outermost: Outermost) -> RuntimeError:
    """The error for a model with old and new values, because a load did not finish."""
    return RuntimeError(
        f"mfsdp: {outermost.name} is half loaded: {outermost.half[0]} has not ended, so some values are old, some are "
        "new. Load it again, or another checkpoint (Checkpoints.load, load_safetensors), on all ranks"
    )
