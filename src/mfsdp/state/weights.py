"""Main weights of a unit, and what programs read parameters from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..runtime import immediate, owners, runs
from ..runtime.transport import End

if TYPE_CHECKING:
    from .buffer import FlatBuffer


class Weights:
    """The values of a flat buffer's parameters.

    ``main`` is this rank's flat part of the main weights, [layout.shard_numel] in ``precision.main``.
    ``source`` is what programs read parameters from, a leaf: ``main`` itself, or, where the strategy cuts the optimizer
    state further than the parameters, a copy that lasts, [spec.source_numel] in ``precision.comm``.

    Args:
        buffer: whose they are; its layout, placement, precision and spec are there already.
        device: where they live.
    """

    def __init__(self, buffer: FlatBuffer, device: torch.device):
        self._of = buffer
        layout, spec, precision = buffer.layout, buffer.spec, buffer.precision
        self.locals = tuple(layout.local(i, buffer.placement.rank) for i in range(len(layout.slots)))
        """Which rows of each parameter are this rank's, and where they lie in ``main``."""
        self.main = torch.zeros(layout.shard_numel, dtype=precision.main, device=device)
        self.source = self.main
        if spec.kept:
            self.source = torch.zeros(spec.source_numel, dtype=precision.comm, device=device)
        self.stale = True
        """Whether the source has to be filled again."""
        self._version = -1
        self.summoned: torch.Tensor | None = None
        """The full main weights while `summon_full_params` is open."""
        self.born_on_meta: dict[int, torch.dtype] = {}
        """Slots whose parameter was built on the meta device, and its dtype there."""
        self.written: set[int] = set()
        """Those that an initialiser has written."""
        self.initialised = False
        """Whether initialisers are through; what has been written since is real."""
        owners.own(self.source, buffer)
        self.source.requires_grad_()  # nobody may register a hook otherwise

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
        return self._of.spec.kept and (self.stale or self.main._version != self._version)

    def refresh(self) -> list[End]:
        """Launches the gather into the source if it is due; gives what has to be called before it may be read."""
        if not self.due():
            return []
        version = self.main._version
        with torch.no_grad():
            ends = immediate.replicate(self.main.detach(), self.source.detach(), self._of.spec)
        self.stale, self._version = False, -1  # still due, should nobody come to wait

        def filled() -> None:
            self._version = version

        return [*ends, filled]

    # whole values, outside of training

    def gather(self) -> torch.Tensor:
        """The full main weights, [full_numel] in ``precision.main``; a collective."""
        with runs.announced(f"gather of main weights of {self._of.path}", *self._of.spec.meets):
            return immediate.gather_main(self.main, self._of.spec)

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
