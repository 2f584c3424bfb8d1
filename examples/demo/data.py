"""Text that is on every machine: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def corpus(folder: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes, uint8. One file in twenty, chosen by a hash of its path, is held out."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    train, held = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED & set(name.parts):
            continue
        out = held if hashlib.sha256(name.as_posix().encode()).digest()[0] < 13 else train
        out += path.read_bytes() + b"\n"
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held, dtype=torch.uint8)


class Batches:
    """Random windows; every rank draws its own."""

    def __init__(self, text: torch.Tensor, batch: int, length: int, seed: int):
        self.text, self.batch, self.length = text, batch, length
        self.random = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 ``[batch, length]``; targets are the inputs moved by one byte."""
        starts = torch.randint(len(self.text) - self.length - 1, (self.batch,), generator=self.random)
        windows = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.random.set_state(state["random"])
