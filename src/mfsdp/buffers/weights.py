"""Main weights of a unit, and the tensors that programs read parameters from.

Note [Unseen writes]
A write to main weights makes the gather of persistent parameters (strategies 1 and 2, HFSDP) due. The gather is a
collective, but not every rank sees every write. All ranks count writes through DTensors; at most the writing rank
counts those through plain tensors (``to_local()``, ``.data``, NumPy, DLPack). Once rows have been handed out as a plain
tensor, the shard's checksum shows such writes (`Weights.unseen`); rows that are only read cause no gather. A rank that
finds a write flags it in the fingerprint that it sends anyway (`desync.ANEW`), and all gather again; where the host
does not wait for fingerprints (NCCL), a write on only some ranks is an error. On ranks that have handed rows out, the
checksum costs a pass over the shard where a program begins, and on CUDA a wait for the device.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from ..config.units import UnitSpec
from ..runtime import capturing, execution, step_prefetch, sync_collectives
from ..runtime.checksums import checksum
from ..runtime.transport import End
from .amax import AmaxTracker
from .kept_cast import KeptCast
from .persistent_fp8 import PersistentFp8

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer


class Weights:
    """The values of a flat buffer's parameters.

    ``main`` is this rank's flat shard of main weights, [layout.shard_numel] in ``precision.main``.
    ``source`` is the leaf that programs read parameters from: ``main``, or, where the strategy cuts optimizer state
    further than parameters, a persistent copy, [spec.source_numel] in ``precision.comm``. The copy has no memory before
    it is filled: programs that read the FP8 payload (Note [Persistent FP8]) use it only to identify the buffer.

    It has more than 15 attributes because every write to ``main`` makes all of the others due.

    Args:
        buffer: the owner; its layout, placement, precision and spec are set.
        device: where the weights live.
    """

    def __init__(self, buffer: FlatBuffer, device: torch.device):
        self.buffer = buffer
        layout, spec, precision = buffer.layout, buffer.spec, buffer.precision
        self.locals = tuple(layout.local(i, buffer.placement.rank) for i in range(len(layout.slots)))
        """This rank's rows of each parameter, and their place in ``main``."""
        self.slots = {slot.offset: i for i, slot in enumerate(layout.slots)}
        """Slots, by where their parameters start."""
        self.main = torch.zeros(layout.shard_numel, dtype=precision.main, device=device)
        self.source = self.main
        if spec.persistent:
            self.source = torch.empty(spec.source_numel, dtype=precision.comm, device=device)
            self.source.untyped_storage().resize_(0)
        self.maxima, self.lasting = AmaxTracker(self), PersistentFp8(self)
        self.kept_cast = KeptCast(self)
        self._exposed = False
        self._sum: torch.Tensor | None = None
        """Last checksum of ``main``, once rows have been handed out (Note [Unseen writes])."""
        self._writes = 0
        """Writes to ``main`` past its version counter."""
        self._former = 0
        """Versions of former tensors in place of ``main``."""
        self.widened = False
        """Whether `widen` has moved ``main``."""
        self.stale = True
        self._version = -1
        self._overtaken: tuple[int, int] | None = None
        self.summoned: torch.Tensor | None = None
        """The full main weights while `summon_full_params` is open."""
        self.born_on_meta: dict[int, torch.dtype] = {}
        """Slots whose parameter was built on the meta device, and its dtype there."""
        self.written: set[int] = set()
        """Slots that an initialiser has written."""
        self.initialised = False
        """Whether initialisers are done; later writes are real values."""

    def before_write(self, rows: torch.Tensor | None = None) -> None:
        """Frees gathered parameters that ``unshard()`` keeps, so that the next forward gathers new values.

        Args:
            rows: what will be written to, if not ``main``.

        Raises:
            RuntimeError: inside `mfsdp.unsharded`, where forwards would use the old values; `rows` are from before
                `widen`.
        """
        if self._left(rows):
            raise RuntimeError(f"mfsdp: a tensor that {self._retaken()}: the write would be lost")
        unit = self.buffer.unit
        if unit.kept and unit.open:
            raise RuntimeError(
                f"mfsdp: weights of {self.buffer.path} would be written while its gathered parameters are kept: "
                "forwards would go on with the former values. Leave mfsdp.unsharded first"
            )
        if unit.kept:
            unit.reshard()

    def hand_out(self, rows: torch.Tensor) -> None:
        """Notes that rows are handed out as a plain tensor.

        Warns:
            UserWarning: they are from before `widen`, and writes to them will be lost.
        """
        if self._left(rows):
            warnings.warn(f"mfsdp: what {self._retaken()}", stacklevel=3)
        else:
            self.exposed = True

    def _left(self, rows: torch.Tensor | None) -> bool:
        """Returns whether rows are from before `widen`."""
        checked = rows if self.widened and rows is not None and rows.numel() else self.main
        return bool(checked.untyped_storage()._cdata != self.main.untyped_storage()._cdata)

    def _retaken(self) -> str:
        return (
            f"was taken of {self.buffer.path} while it was frozen does not view its weights any more, which were cast "
            "to the dtype of main weights: take it again (detach(), to_local(), state_dict())"
        )

    def widen(self, dtype: torch.dtype) -> None:
        """Moves ``main`` to new memory in a wider dtype. What a backward has yet to read stays.

        Warns:
            UserWarning: rows have been handed out as plain tensors, and writes to them will be lost.
        """
        if self._exposed:
            warnings.warn(f"mfsdp: what {self._retaken()}", stacklevel=2)
        self.widened = True
        for early in step_prefetch.of([self.buffer]):
            early.drop()
        former = self.version
        with torch.inference_mode(False), torch.no_grad():
            self.main = self.main.detach().to(dtype)
        if not self.buffer.spec.persistent:
            self.source = self.main
        self.kept_cast = KeptCast(self)
        self._exposed, self._sum, self.stale = False, None, True
        self._former = former - self.main._version

    @property
    def stale(self) -> bool:
        """Whether the source has to be filled again. Code that writes past the version counter sets it."""
        return self._stale

    @stale.setter
    def stale(self, value: bool) -> None:
        self._stale = value
        if value:
            self.note_write()
            torch.autograd.graph.increment_version(self.main)

    @property
    def exposed(self) -> bool:
        """Whether rows of ``main`` have been handed out as a plain tensor; set beforehand."""
        return self._exposed

    @exposed.setter
    def exposed(self, value: bool) -> None:
        self.buffer.gradients.arrive()
        if not self._exposed and self.buffer.spec.persistent:
            self._sum = checksum(self.main)
        self._exposed = value
        if step_prefetch.any_under_way():
            step_prefetch.showing(self.buffer)

    @property
    def history(self) -> tuple[int, int]:
        """Changes when main weights may have been written, except through rows handed out as plain tensors."""
        return self._writes, self.main._version

    @property
    def version(self) -> int:
        """Changes when main weights are written: a forward from before has no backward any more. Not when `widen` moves
        them.
        """
        return self._former + self.main._version

    @property
    def spec(self) -> UnitSpec:
        """How the buffer is communicated."""
        return self.buffer.spec

    def rows(self, flat: torch.Tensor, offset: int) -> tuple[torch.Tensor, int]:
        """Returns a view of this rank's rows of the parameter at ``offset`` in a flat shard, [rows, elements of a row],
        and the first row's index.
        """
        slot = self.slots[offset]
        at, row = self.locals[slot], self.buffer.layout.slots[slot].row
        part = flat.detach()[at.shard_offset : at.shard_offset + at.numel]
        return part.view(-1, row), at.param_offset // row

    def view(self, flat: torch.Tensor, slot: int) -> torch.Tensor:
        """Returns a view of this rank's rows of a parameter in a flat shard."""
        at = self.locals[slot]
        return flat.detach()[at.shard_offset : at.shard_offset + at.numel].view(at.shape)

    def full_view(self, full: torch.Tensor, slot: int) -> torch.Tensor:
        """Returns a full parameter over the full buffer's storage, which autograd does not treat as a view."""
        s = self.buffer.layout.slots[slot]
        strides = torch.empty(s.shape, device="meta").stride()
        return full.new_empty(0).set_(full.untyped_storage(), s.offset, s.shape, strides)

    # persistent parameters

    def due(self) -> bool:
        """Returns whether main weights have been written since the source was filled. All ranks agree: writes through
        DTensors count on every rank, also on one without rows.
        """
        if not self.buffer.spec.persistent:
            return False
        return self.stale or self.main._version != self._version or bool(step_prefetch.of([self.buffer]))

    def unseen(self) -> bool:
        """Returns whether this rank has written to main weights since the source was filled in ways that other ranks
        may not see, which makes the source due (Note [Unseen writes]).
        """
        if not self.buffer.spec.persistent or self.stale or step_prefetch.of([self.buffer]):
            return False
        if self._sum is not None:
            capturing.obstacle(f"rows of {self.buffer.path} are out as plain tensors, and may be written unseen")
        if self._sum is not None and not torch.equal(self._sum, now := checksum(self.main)):
            self._sum, self.stale = now, True
        return self.due()

    def refresh(self) -> list[End]:
        """Launches the gather into the source if due; returns callables to run before it is read."""
        if not self.due():
            return []
        for early in step_prefetch.of([self.buffer]):
            early.drop()
        version, main = self.main._version, self.main.detach()
        if not self.has_room:
            self.source.untyped_storage().resize_(self.source.nbytes)
        with torch.no_grad():
            if self.exposed:
                main = main.clone()
                self._sum = checksum(main)
            ends = sync_collectives.replicate(main, self.source.detach(), self.buffer.spec)
        self.overtake()
        self.stale, self._version = False, -1  # stays due if no caller waits

        def filled() -> None:
            self._version = version

        return [*ends, filled]

    @property
    def has_room(self) -> bool:
        """Whether the source has memory: a fill has been requested."""
        return bool(self.source.untyped_storage().nbytes())

    def overtake(self) -> None:
        """Tells autograd, once for all writes to main weights, that a saved source is out of date: collectives write
        past its version counter.
        """
        if self._overtaken != self.history:
            torch.autograd.graph.increment_version(self.source)
            self._overtaken = self.history

    def note_write(self) -> None:
        """Records that main weights may have been written on this rank."""
        self._writes += 1
        self.kept_cast.due = True

    def replayed(self) -> None:
        """Counts the write of a replayed step, which has also redone what was up to date with the weights (Note [Steady
        state]).
        """
        before, filled = self.history, self._version == self.main._version and not self.stale
        redone: list[Any] = [codes for codes in self.lasting.codes.values() if codes.history == before]
        early = [early for early in step_prefetch.of([self.buffer]) if early.history == before]
        for gather in early:
            if gather.snapshot is not None:
                gather.snapshot = self.main.detach().clone()
        redone += early
        cast = not self.kept_cast.written()
        torch.autograd.graph.increment_version(self.main)
        for made in redone:
            made.history = self.history
        if cast:
            self.kept_cast.written_along()
        if filled:
            self._version = self.main._version
        if self.buffer.spec.persistent:
            self.overtake()

    def cast(self) -> torch.Tensor:
        """Returns the shard in ``precision.comm`` (`KeptCast.read`)."""
        return self.kept_cast.read()

    # full values, outside of training

    def gather(self) -> torch.Tensor:
        """Returns the full main weights, [full_numel] in ``precision.main``; a collective."""
        with execution.announced(f"gather of main weights of {self.buffer.path}", *self.buffer.spec.peer_groups):
            return sync_collectives.gather_main(self.main, self.buffer.spec)

    def scatter(self, full: torch.Tensor) -> None:
        """Stores this rank's part of full main weights."""
        self.stale = True
        with torch.no_grad():
            for slot in range(len(self.buffer.layout.slots)):
                self.keep(slot, self.full_view(full, slot))

    def keep(self, slot: int, value: torch.Tensor) -> None:
        """Stores this rank's part of one full parameter."""
        at = self.locals[slot]
        part = value.detach().reshape(-1)[at.param_offset : at.param_offset + at.numel]
        self.view(self.main, slot).copy_(part.view(at.shape))
