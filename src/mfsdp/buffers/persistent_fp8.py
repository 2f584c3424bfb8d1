"""FP8 payload of a unit's parameters that persists between optimizer steps, one byte per element.

Note [Persistent FP8]
Under strategies that keep parameters unsharded, or a shard of them on every outer rank, programs read a persistent copy
(`Weights.source`). If programs read weights only as FP8, the payload persists and is gathered instead: half the bytes.
Each rank casts its own rows in every program, a small part of the cost of casting full weights. The payload is gathered
if main weights were written since the last gather. All ranks agree on when: amax is due then too, which ranks compare
(Note [Amax]).

A payload's key consists of the recipe, the parameters and the kind of blocks; programs with equal keys share it. If
backward casts along another dimension than forward, there are two persistent payloads, with the bytes and memory of
16-bit weights. Gathering the second in every backward and freeing it would halve the memory, but communicate once per
microbatch instead of once per step, the reason for these strategies.

If weights are written between a forward and its backward, amax and rows change, so backward raises; forward has to be
called again. The forward may have read the weights in their own dtype, as where it also uses their sum.

The source of such a unit is a handle without memory. Code that reads it directly (the eager fallback, a program that
reads a parameter in another way) fills it, and it then persists beside the payload.
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
    values: torch.Tensor
    """[spec.source_numel], one byte each."""
    history: _History | None = None
    """History of the weights that were cast, once the payload has arrived."""


class PersistentFp8:
    """The FP8 payloads of one flat buffer, by key."""

    def __init__(self, weights: Weights):
        self._of = weights
        self.codes: dict[str, _Codes] = {}
        self._read: _History | None = None
        """History of the weights that the last forward read."""

    def read_in_full(self) -> None:
        """Records that a program reads the weights in their own dtype: its backward may read a payload of them."""
        self._read = self._of.history

    def refresh(self, key: str, code: torch.Tensor, back: bool) -> tuple[torch.Tensor, list[End]]:
        """Launches the gather of a payload if it is due.

        Args:
            key: of the payload.
            code: this rank's part, cast from current main weights, [spec.main_numel].
            back: whether a backward reads it.

        Returns:
            the payload, [spec.source_numel], and callables to run before it is read.

        Raises:
            RuntimeError: weights were written between forward and this backward.
        """
        now = self._of.history
        if back and now != self._read:
            raise RuntimeError(
                f"mfsdp: the weights of {self._of.buffer.path} have been written between forward and its backward, "
                "which would read other FP8 codes than forward has. Call backward before the step, or compile "
                'with options={"quantize": False}: then what lasts are the values that forward has read'
            )
        self._read = now
        found = self.codes.get(key)
        if found is None:
            with torch.inference_mode(False):
                values = torch.empty(self._of.spec.source_numel, dtype=code.dtype, device=code.device)
            found = self.codes[key] = _Codes(values)
        if found.history == now:
            return found.values, []
        found.history = None  # stays due if no caller waits
        sent, into = code.view(torch.uint8), found.values.view(torch.uint8)
        ends = sync_collectives.replicate(sent, into, self._of.spec)
        self._of.overtake()

        def filled() -> None:
            found.history = now

        return found.values, [*ends, filled]
