"""Amax of the blocks of a unit's parameters, over all ranks, kept from one optimizer step to the next.

Note [Amax]
An FP8 scale is computed from a block's amax, and several ranks may hold rows of one block. Each rank takes the maximum
over its own rows; an all-reduce combines them. Both happen once per optimizer step, for any number of microbatches,
forward and backward: the first `maxima` of a program computes the amax of all its units, for all grids that any program
has requested. All ranks must agree when this is due, so `AmaxTracker.due` is part of the fingerprint: if only one rank
has written its weights, the program raises a clear error where it begins.

Writes through rows that are out as plain tensors may escape detection. The amax would then be stale, and larger values
would be clipped. For such a buffer each program recomputes this rank's own part where it begins; if it has changed, an
all-reduce is due. Ranks without rows of the written block cannot notice, so ranks may disagree: all of them then raise,
as after a write on one rank. Such writes do not change gathered persistent parameters, nor their amax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..config.block_grid import decode
from ..runtime import block_scales, devices, execution
from ..runtime.transport import End

if TYPE_CHECKING:
    from .weights import Weights


@dataclass(eq=False)
class _Found:
    """Amax of the blocks of some grids, one grid after another, int32."""

    own: torch.Tensor
    """Over this rank's rows."""
    bits: torch.Tensor
    """Over the rows of all ranks, valid after the all-reduce."""
    history: tuple[int, int]
    """`Weights.history` when they were computed."""
    run: execution.Execution
    """The execution that launched the all-reduce."""
    arrive: End | None
    """Waits for the all-reduce; ``None`` once it has arrived."""
    stream: torch.Stream | None

    def bring(self) -> None:
        """Waits for the all-reduce (on CUDA: makes the current stream wait)."""
        if self.arrive is not None:
            self.arrive()
        devices.follow(self.stream, self.bits)


class AmaxTracker:
    """The amax of one flat buffer, by encoded grids."""

    def __init__(self, weights: Weights):
        self._of = weights
        self._asked: dict[str, _Found | None] = {}

    def due(self) -> bool:
        """Whether main weights changed since the last all-reduce. ``False`` until a program has requested amax."""
        if self._of.exposed and not self._of.spec.persistent:
            with torch.no_grad():
                for text, found in self._asked.items():
                    if found is not None and not torch.equal(found.own, self._own(text)):
                        self._asked[text] = None
        return any(not self._fresh(found) for found in self._asked.values())

    def read(self, text: str, out: torch.Tensor, beside: Iterable[AmaxTracker]) -> list[End]:
        """Launches the all-reduces that are due.

        Args:
            text: encoded grids.
            out: float32, one element per block; receives the amax.
            beside: those of other buffers: what is due of them is reduced in the same collective.

        Returns:
            functions to call before ``out`` may be read.
        """
        self._asked.setdefault(text, None)
        if not self._fresh(self._asked[text]):
            everyone = dict.fromkeys(
                [self, *(m for m in beside if m._of.spec.gather_groups == self._of.spec.gather_groups)]
            )
            _take([(m, t) for m in everyone for t, found in m._asked.items() if not m._fresh(found)])
        found = self._asked[text]
        assert found is not None

        def there() -> None:
            found.bring()
            out.copy_(found.bits.view(torch.float32).to(self._of.buffer.precision.comm))

        return [there]

    def _fresh(self, found: _Found | None) -> bool:
        if found is None or found.history != self._of.history:
            return False
        return found.arrive is None or found.run is execution.current()

    def _own(self, text: str) -> torch.Tensor:
        main = self._of.main
        return torch.cat([block_scales.largest(*self._of.rows(main, grid.offset), grid) for grid in decode(text)])


def _take(wanted: Sequence[tuple[AmaxTracker, str]]) -> None:
    """Launches one all-reduce for all of these, over each axis that shards their main weights."""
    with torch.inference_mode(False), torch.no_grad():
        own = [m._own(text) for m, text in wanted]
        together = torch.cat(own)
        run = execution.current()
        end = _over(run, together, wanted[0][0]._of.spec.gather_groups)
        stream = devices.current_stream(together.device)
        parts = together.split([part.numel() for part in own])
        founds = [
            _Found(part, bits, m._of.history, run, None, stream)
            for (m, _), part, bits in zip(wanted, own, parts, strict=True)
        ]
    for (m, text), found in zip(wanted, founds, strict=True):
        m._asked[text] = found
    for found in founds:
        found.arrive = partial(_arrive, end, founds)


def _over(run: execution.Execution, together: torch.Tensor, groups: Sequence[str]) -> End:
    """Launches a max all-reduce over the first of one or two groups; the second runs at the wait."""
    arrived = run.all_reduce(together, "max", groups[0])
    if len(groups) == 1:
        return arrived

    def further() -> None:
        arrived()
        run.launched += 1
        run.all_reduce(together, "max", groups[1])()

    return further


def _arrive(end: End, founds: Sequence[_Found]) -> None:
    end()
    for found in founds:
        found.arrive = None
