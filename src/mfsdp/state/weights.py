"""Main weights of a unit, and what programs read parameters from.

Note [Kept casts]
Where main weights are of another dtype than what travels, a program casts the shard in front of every gather, or, under
the backend's option ``keep_cast``, gathers a cast that lasts (`Weights.cast`); over one rank it reads that. It is made
anew when main weights have been written since: versions tell of writes through plain tensors, `Weights.stale` of those
through DTensors and flat optimizers, and behind the step of any other optimizer it is due (`untraced`). Whoever has got
hold of the rows as a plain tensor (``to_local()``) may write to them past all of these (``.data``, NumPy, a
collective): from then on that unit's cast is made for every gather, as without the option. Nothing is communicated for
it, so ranks need not agree on when. What travels in int8 is quantised from main weights for every gather, and there is
no cast.

Note [Unseen writes]
Parameters that last (strategies 1 and 2, HFSDP) are gathered when main weights have been written, which is a
collective. Writes through DTensors count on every rank, those through plain tensors (``to_local()``, ``.data``, NumPy,
DLPack) at most on the rank that has written. Once somebody has had rows as a plain tensor, the shard's checksum tells
(`Weights.unseen`): reading gathers nothing. A rank that finds such a write says so in the word that it sends anyway
(`agreement.ANEW`), and all gather again; where the host does not wait for words (NCCL), ranks that have written only
here and there are an error. The checksum costs a pass over the shard where a program begins, and on CUDA a wait for the
device, on ranks that have given rows out.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..config.units import UnitSpec
from ..runtime import devices, execution, step_prefetch, sync_collectives
from ..runtime.checksums import checksum
from ..runtime.transport import End
from .amax import AmaxTracker
from .persistent_fp8 import PersistentFp8

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer


class Weights:
    """The values of a flat buffer's parameters.

    ``main`` is this rank's flat part of the main weights, [layout.shard_numel] in ``precision.main``.
    ``source`` is what programs read parameters from, a leaf: ``main`` itself, or, where the strategy cuts the optimizer
    state further than the parameters, a copy that lasts, [spec.source_numel] in ``precision.comm``, which has no memory
    before it is filled: programs that read codes (Note [Persistent FP8]) only tell by it whose they are.

    Args:
        buffer: whose they are; its layout, placement, precision and spec are there already.
        device: where they live.
    """

    def __init__(self, buffer: FlatBuffer, device: torch.device):
        self._of = buffer
        layout, spec, precision = buffer.layout, buffer.spec, buffer.precision
        self.locals = tuple(layout.local(i, buffer.placement.rank) for i in range(len(layout.slots)))
        """Which rows of each parameter are this rank's, and where they lie in ``main``."""
        self._slots = {slot.offset: i for i, slot in enumerate(layout.slots)}
        self.main = torch.zeros(layout.shard_numel, dtype=precision.main, device=device)
        self.source = self.main
        if spec.persistent:
            self.source = torch.empty(spec.source_numel, dtype=precision.comm, device=device)
            self.source.untyped_storage().resize_(0)
        self.maxima, self.lasting = AmaxTracker(self), PersistentFp8(self)
        self._cast: torch.Tensor | None = None
        """This rank's shard in the dtype that travels, [layout.shard_numel], once a program has asked for it."""
        self._exposed = False
        self._sum: torch.Tensor | None = None
        """Of ``main``, once rows are out, as it was when somebody looked last (Note [Unseen writes])."""
        self._writes = 0
        """Of ``main``, past its version."""
        self._cast_due = True
        self._cast_version = -1
        self._cast_stream: torch.Stream | None = None
        self.stale = True
        self._version = -1
        self._overtaken: tuple[int, int] | None = None
        self.summoned: torch.Tensor | None = None
        """The full main weights while `summon_full_params` is open."""
        self.born_on_meta: dict[int, torch.dtype] = {}
        """Slots whose parameter was built on the meta device, and its dtype there."""
        self.written: set[int] = set()
        """Those that an initialiser has written."""
        self.initialised = False
        """Whether initialisers are through; what has been written since is real."""

    def before_write(self) -> None:
        """Lets go of gathered parameters that ``unshard()`` keeps: the next forward gathers what is written now.

        Raises:
            RuntimeError: inside of `mfsdp.unsharded`, where forwards would go on with the former values.
        """
        unit = self._of.unit
        if unit.kept and unit.open:
            raise RuntimeError(
                f"mfsdp: weights of {self.path} would be written while its gathered parameters are kept: forwards "
                "would go on with the former values. Leave mfsdp.unsharded first"
            )
        if unit.kept:
            unit.reshard()

    def widen(self, dtype: torch.dtype) -> None:
        """Moves ``main`` to memory of its own, in a wider dtype. What a backward has yet to read stays."""
        for early in step_prefetch.of([self._of]):
            early.drop()
        with torch.inference_mode(False), torch.no_grad():
            self.main = self.main.detach().to(dtype)
        if not self.spec.persistent:
            self.source = self.main
        self._cast, self._exposed, self._sum, self.stale = None, False, None, True

    @property
    def stale(self) -> bool:
        """Whether the source has to be filled again. Whoever writes main weights past their version sets it."""
        return self._stale

    @stale.setter
    def stale(self, value: bool) -> None:
        self._stale = value
        if value:
            self.note_write()

    @property
    def exposed(self) -> bool:
        """Whether somebody has had rows of ``main`` as a plain tensor. Whoever gives them out sets it, before."""
        return self._exposed

    @exposed.setter
    def exposed(self, value: bool) -> None:
        self._of.gradients.arrive()
        if not self._exposed and self._of.spec.persistent:
            self._sum = checksum(self.main)
        self._exposed = value
        if step_prefetch.any_under_way():
            step_prefetch.showing(self._of)

    @property
    def history(self) -> tuple[int, int]:
        """Changes when main weights are written, but for rows that are out as plain tensors."""
        return self._writes, self.main._version

    @property
    def path(self) -> str:
        """What errors call the buffer."""
        return self._of.path

    @property
    def spec(self) -> UnitSpec:
        """How the buffer is communicated."""
        return self._of.spec

    @property
    def comm(self) -> torch.dtype:
        """In which parameters travel, where nothing says otherwise."""
        return self._of.precision.comm

    def rows(self, flat: torch.Tensor, offset: int) -> tuple[torch.Tensor, int]:
        """This rank's rows of the parameter at ``offset``, a view into a flat shard, [rows, elements of a row]; and the
        number of the first of them.
        """
        slot = self._slots[offset]
        at, row = self.locals[slot], self._of.layout.slots[slot].row
        part = flat.detach()[at.shard_offset : at.shard_offset + at.numel]
        return part.view(-1, row), at.param_offset // row

    def view(self, flat: torch.Tensor, slot: int) -> torch.Tensor:
        """This rank's rows of a parameter, as a view into a flat shard."""
        at = self.locals[slot]
        return flat.detach()[at.shard_offset : at.shard_offset + at.numel].view(at.shape)

    def full_view(self, full: torch.Tensor, slot: int) -> torch.Tensor:
        """A whole parameter, as a tensor over the full buffer's storage that autograd does not take for a view."""
        s = self._of.layout.slots[slot]
        strides = torch.empty(s.shape, device="meta").stride()
        return full.new_empty(0).set_(full.untyped_storage(), s.offset, s.shape, strides)

    # parameters that last

    def due(self) -> bool:
        """Whether main weights have been written since the source was filled last. All ranks agree: writes through
        DTensors count on every rank, also where it holds no rows.
        """
        if not self._of.spec.persistent:
            return False
        return self.stale or self.main._version != self._version or bool(step_prefetch.of([self._of]))

    def unseen(self) -> bool:
        """Whether this rank has written to main weights since the source was filled in ways that other ranks may not
        know of, which makes the source due (Note [Unseen writes]).
        """
        if not self._of.spec.persistent or self.stale or step_prefetch.of([self._of]):
            return False
        if self._sum is not None and not torch.equal(self._sum, now := checksum(self.main)):
            self._sum, self.stale = now, True
        return self.due()

    def refresh(self) -> list[End]:
        """Launches the gather into the source if it is due; gives what has to be called before it may be read."""
        if not self.due():
            return []
        for early in step_prefetch.of([self._of]):
            early.drop()
        version, main = self.main._version, self.main.detach()
        if not self.has_room:
            self.source.untyped_storage().resize_(self.source.nbytes)
        with torch.no_grad():
            if self.exposed:
                main = main.clone()
                self._sum = checksum(main)
            ends = sync_collectives.replicate(main, self.source.detach(), self._of.spec)
        self.overtake()
        self.stale, self._version = False, -1  # still due, should nobody come to wait

        def filled() -> None:
            self._version = version

        return [*ends, filled]

    @property
    def has_room(self) -> bool:
        """Whether the source has memory: somebody has asked for it to be filled."""
        return bool(self.source.untyped_storage().nbytes())

    def overtake(self) -> None:
        """Tells autograd, once for all writes to main weights, that what it may have saved of the source is not what
        is read now: a library writes past its version.
        """
        if self._overtaken != self.history:
            torch.autograd.graph.increment_version(self.source)
            self._overtaken = self.history

    # what travels (Note [Kept casts])

    def cast(self) -> torch.Tensor:
        """The shard in ``precision.comm``, as main weights are now. Nobody may write to it. Where it has to be made
        anew, so are those of all units of the model that have to, in one call.
        """
        if self._cast is None or self._cast_is_due():
            model, device = self._of.unit.outermost, self.main.device
            others = [
                w for w in _casting if w is not self and w._of.unit.outermost is model and w.main.device == device
            ]
            _cast_again([self, *(w for w in others if w._cast_is_due() and not w.exposed)])
        assert self._cast is not None
        devices.follow(self._cast_stream, self._cast)
        return self._cast

    def kept(self) -> torch.Tensor | None:
        """The cast, if it is there and as main weights are: whoever writes those may write it along. Not of main
        weights of 16 bits, which a compiler need not round before it casts them.
        """
        there = self._cast is not None and self.main.itemsize >= 4 and not self._cast_is_due()
        return self._cast if there else None

    def written_along(self) -> None:
        """Says that the cast is as main weights are now."""
        self._cast_due, self._cast_version = False, self.main._version
        self._cast_stream = devices.current_stream(self.main.device)

    def note_write(self) -> None:
        """Says that somebody may have written main weights, on this rank: the cast is made anew."""
        self._writes += 1
        self._cast_due = True

    def _cast_is_due(self) -> bool:
        return self._cast_due or self.exposed or self.main._version != self._cast_version

    # whole values, outside of training

    def gather(self) -> torch.Tensor:
        """The full main weights, [full_numel] in ``precision.main``; a collective."""
        with execution.announced(f"gather of main weights of {self._of.path}", *self._of.spec.peer_groups):
            return sync_collectives.gather_main(self.main, self._of.spec)

    def scatter(self, full: torch.Tensor) -> None:
        """Keeps this rank's part of full main weights."""
        self.stale = True
        with torch.no_grad():
            for slot in range(len(self._of.layout.slots)):
                self.keep(slot, self.full_view(full, slot))

    def keep(self, slot: int, value: torch.Tensor) -> None:
        """Keeps this rank's part of one whole parameter."""
        at = self.locals[slot]
        part = value.detach().reshape(-1)[at.param_offset : at.param_offset + at.numel]
        self.view(self.main, slot).copy_(part.view(at.shape))


_casting: weakref.WeakSet[Weights] = weakref.WeakSet()
"""Those whose cast is kept."""


def _cast_again(weights: Sequence[Weights]) -> None:
    """Makes casts anew, in one kernel where a device has one."""
    with torch.inference_mode(False), torch.no_grad():
        for w in weights:
            if w._cast is None:
                w._cast = torch.empty_like(w.main, dtype=w._of.precision.comm, requires_grad=False)
                _casting.add(w)
            devices.follow(w._cast_stream, w._cast)
        torch._foreach_copy_([w._cast for w in weights if w._cast is not None], [w.main.detach() for w in weights])
    for w in weights:
        w.written_along()
