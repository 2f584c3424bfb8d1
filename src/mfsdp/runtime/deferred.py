"""A program that runs later than autograd asks for it: its arguments, and a check that they have not been written."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import devices

if TYPE_CHECKING:
    from .buffer_api import Buffer


class DeferredArguments:
    """The arguments of a deferred program.

    Args:
        name: the program's, for errors.
        args: emptied.
        buffers: whose parameters it reads, or whose gradients it produces.
        copied: arguments that may be written before it runs: the caller's, and buffers of the model.
    """

    def __init__(
        self, name: str, args: list[Any], buffers: Iterable[Buffer | None], copied: Collection[int] = ()
    ) -> None:
        self.name, self.buffers, self.place = name, list(dict.fromkeys(filter(None, buffers))), devices.Place()
        self.args = [_copied(arg) if i in copied else arg for i, arg in enumerate(args)]
        args.clear()
        self._versions = [_version(arg) for arg in self.args]
        self._weights = [buffer.weights.history for buffer in self.buffers]

    def check(self, until: str, instead: str) -> None:
        """Raises a RuntimeError if anything has been written.

        Args:
            until: what the program waits for.
            instead: what to do to the weights instead.
        """
        for buffer, history in zip(self.buffers, self._weights, strict=True):
            if buffer.weights.history != history:
                raise RuntimeError(
                    f"mfsdp: weights of {buffer.path} have been written while {self.name} waits for {until}: {instead}"
                )
        if [_version(arg) for arg in self.args] != self._versions:
            raise RuntimeError(
                f"mfsdp: what forward has returned or saved has been written to while {self.name} waits for {until}: "
                "write to a copy, or later"
            )


def _version(arg: object) -> int:
    return arg._version if isinstance(arg, torch.Tensor) and not arg.is_inference() else 0


def _copied(arg: Any) -> Any:
    """A copy with the strides that a program was compiled for."""
    if not isinstance(arg, torch.Tensor) or not arg.numel():
        return arg
    with torch.no_grad():
        extent = 1 + sum((n - 1) * stride for n, stride in zip(arg.shape, arg.stride(), strict=True))
        return arg.as_strided((extent,), (1,)).clone().as_strided(arg.shape, arg.stride(), 0)
