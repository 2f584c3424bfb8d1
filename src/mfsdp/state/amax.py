"""The largest magnitudes in blocks of a unit's parameters, over all ranks, from one optimizer step to the next.

Note [Amax]
A scale for FP8 weights is computed from the largest magnitude in a block, and a block may have rows on several ranks:
so each takes the maximum over its own rows, and an all-reduce that over ranks. Both are needed once per optimizer step,
however many microbatches follow, forward and backward: a program's first `maxima` brings those of all its units, for
all grids that any program has asked of them. All ranks have to agree when that is: a write that one of them has made
alone is an error, told in words where the program begins (`AmaxTracker.due` is part of what is announced).

Rows that are out as plain tensors may be written past what tells of writes; then the maximum would be an old one, and
what has grown would be cut off at it. Of such buffers this rank's own part is computed again where a program begins;
if it is another, the maxima are due. A rank that has no rows of what was written cannot know, so ranks may disagree:
that is told like a write of one rank alone, on all of them. Parameters that last are as they were gathered, whatever
is written in such a way, and so are their maxima.
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
    """Maxima of one grid's blocks after another's, int32."""

    own: torch.Tensor
    """Over this rank's rows."""
    bits: torch.Tensor
    """Over those of all ranks, once they have arrived."""
    history: tuple[int, int]
    """Of the weights, when they were taken."""
    run: execution.Execution
    """That has launched the all-reduce."""
    arrive: End | None
    """To be called before they are read, until then."""
    stream: torch.Stream | None

    def bring(self) -> None:
        """Returns once they are there (on CUDA: once the current stream is behind them)."""
        if self.arrive is not None:
            self.arrive()
        devices.follow(self.stream, self.bits)


class AmaxTracker:
    """Those of one flat buffer, by grids as text."""

    def __init__(self, weights: Weights):
        self._of = weights
        self._asked: dict[str, _Found | None] = {}

    def due(self) -> bool:
        """Whether main weights have been written since they were taken. Nothing is due before it has been asked for."""
        if self._of.exposed and not self._of.spec.persistent:
            with torch.no_grad():
                for text, found in self._asked.items():
                    if found is not None and not torch.equal(found.own, self._own(text)):
                        self._asked[text] = None
        return any(not self._fresh(found) for found in self._asked.values())

    def read(self, text: str, out: torch.Tensor, beside: Iterable[Weights]) -> list[End]:
        """Launches what is due.

        Args:
            text: grids.
            out: float32, as many as the grids have elements; what they will be.
            beside: of which buffers to bring what is due at once.

        Returns:
            what has to be called before ``out`` may be read.
        """
        self._asked.setdefault(text, None)
        if not self._fresh(self._asked[text]):
            everyone = dict.fromkeys(
                [self, *(w.maxima for w in beside if w.spec.gather_groups == self._of.spec.gather_groups)]
            )
            _take([(m, t) for m in everyone for t, found in m._asked.items() if not m._fresh(found)])
        found = self._asked[text]
        assert found is not None

        def there() -> None:
            found.bring()
            out.copy_(found.bits.view(torch.float32).to(self._of.comm))

        return [there]

    def _fresh(self, found: _Found | None) -> bool:
        if found is None or found.history != self._of.history:
            return False
        return found.arrive is None or found.run is execution.current()

    def _own(self, text: str) -> torch.Tensor:
        main = self._of.main
        return torch.cat([block_scales.largest(*self._of.rows(main, grid.offset), grid) for grid in decode(text)])


def _take(wanted: Sequence[tuple[AmaxTracker, str]]) -> None:
    """Launches one all-reduce for all of these, over each axis that cuts their main weights."""
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
    """Launches maxima over the first of one or two groups; over the other when somebody waits."""
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
