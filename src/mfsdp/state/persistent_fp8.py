"""Codes of a unit's parameters that last from one optimizer step to the next, one byte per element.

Note [Persistent FP8]
Where the strategy leaves parameters whole, or a shard of them on every outer rank, programs read a copy that lasts
(`Weights.source`). Of weights that a program reads only as codes it is the codes that last, and that are gathered: half
the bytes. Each rank casts its own rows in every program, a small part of what whole weights would be to cast; they are
sent when main weights have been written since they were last. All ranks agree when that is: maxima are due then
too, which ranks compare (Note [Amax]).

Which codes: a key says the recipe, of which parameters, with blocks of which kind, so programs that mean the same read
the same bytes. Where backward casts as forward does there is one; where it casts along the other dimension there are
two, both of which last: as many bytes and as much memory as 16 bits have. To gather the second in every backward, and
free it, would halve the memory, and make the once per step, which these strategies are chosen for, once per microbatch.

A backward reads what its forward has read. If weights have been written between the two, maxima and rows are other ones
by now, so it raises; forward would have to be called again.

The source of such a unit is only a handle, without memory. Whoever reads it as it is (the eager path, a program that
reads a parameter in another way) fills it: it lasts beside the codes from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..runtime import sync_collectives
from ..runtime.transport import End

if TYPE_CHECKING:
    from .weights import Weights

_History = tuple[int, int]


@dataclass(eq=False)
class _Codes:
    """Those of one recipe."""

    values: torch.Tensor
    """[spec.source_numel], one byte each."""
    history: _History | None = None
    """Of the weights that they are of, once they have arrived."""


class PersistentFp8:
    """Those of one flat buffer, by recipe."""

    def __init__(self, weights: Weights):
        self._of = weights
        self._codes: dict[str, _Codes] = {}
        self._read: _History | None = None
        """Of the weights that forward has read last."""

    def refresh(self, key: str, code: torch.Tensor, back: bool) -> tuple[torch.Tensor, list[End]]:
        """Launches the gather of codes if it is due.

        Args:
            key: which codes.
            code: this rank's part as main weights are now, [spec.main_numel].
            back: whether it is for a backward.

        Returns:
            the codes, [spec.source_numel], and what has to be called before they may be read.

        Raises:
            RuntimeError: weights have been written between forward and this backward.
        """
        now = self._of.history
        if back and now != self._read:
            raise RuntimeError(
                f"mfsdp: the weights of {self._of.path} have been written between forward and its backward, "
                "which would read other FP8 codes than forward has. Call backward before the step, or compile "
                'with options={"quantize": False}: then what lasts are the values that forward has read'
            )
        self._read = now
        found = self._codes.get(key)
        if found is None:
            with torch.inference_mode(False):
                values = torch.empty(self._of.spec.source_numel, dtype=code.dtype, device=code.device)
            found = self._codes[key] = _Codes(values)
        if found.history == now:
            return found.values, []
        found.history = None  # still due, should nobody come to wait
        sent, into = code.view(torch.uint8), found.values.view(torch.uint8)
        ends = sync_collectives.replicate(sent, into, self._of.spec)
        self._of.overtake()

        def filled() -> None:
            found.history = now

        return found.values, [*ends, filled]
