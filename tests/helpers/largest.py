"""Records the largest tensor that operators make."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Elements alive in tensors made meanwhile: the most at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta and type(t) is torch.Tensor:
                key = t.untyped_storage()._cdata
                if key not in self.live:
                    self.live[key] = t.untyped_storage().nbytes()
                    weakref.finalize(t.untyped_storage(), self.live.pop, key, None)
        self.most = max(self.most, sum(self.live.values()))
        return out
