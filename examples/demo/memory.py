"""The memory of one rank, from live tensors, beside what plain data parallelism would need for the same model."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address, every storage once."""
    found = {}
    for t in tensors:
        if t.device.type != "meta" and t.layout is torch.strided:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return found


def live() -> dict[int, int]:
    """Every storage that a tensor of this process holds."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    return storages(tensors)


class Ledger:
    """Fill in at three points of a step: before forward, between forward and backward, after the optimizer."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[int, int]] = {}
        self._before = 0

    def before_forward(self) -> None:
        self._before = sum(live().values())

    def after_forward(self) -> None:
        saved = sum(live().values()) - self._before
        self.rows["activations saved for backward"] = (saved, saved)

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, blocks: type[nn.Module]) -> None:
        params = list(model.parameters())
        whole = {p: p.numel() * p.element_size() for p in params}
        inside = [sum(whole[p] for p in m.parameters()) for m in model.modules() if isinstance(m, blocks)]
        total = sum(whole.values())
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        theirs = sum(t.numel() * t.element_size() for t in state)
        grads = [p.grad for p in params if p.grad is not None]
        mine = sum(t.numel() * t.element_size() for t in map(local, state))
        self.rows = {
            "main weights": (sum(storages(map(local, params)).values()), total),
            "gradients": (sum(storages(map(local, grads)).values()), sum(whole.values())),
            "optimizer state": (mine, theirs),
            "gathered at once: root and one block": (total - sum(inside) + max(inside), 0),
            **self.rows,
        }

    def __str__(self) -> str:
        lines = [f"{'':<38}{'sharded':>10}{'plain data parallel':>22}"]
        rows = {**self.rows, "sum": tuple(map(sum, zip(*self.rows.values(), strict=True)))}
        for name, (mine, theirs) in rows.items():
            lines.append(f"{name:<38}{mine / 2**20:>7.1f} MB{theirs / 2**20:>19.1f} MB")
        return "\n".join(lines)
