"""Recipes of whole-matrix optimizers: what `torch.optim.Muon` does to rows, and what to a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

Group = Mapping[str, Any]
"""A parameter group."""

Block = tuple[int, int, int]
"""A matrix in a parameter: its first row in the flattened parameter, its rows, its columns."""


class Muon:
    """The step of ``torch.optim.Muon`` (2.13), in its order and dtypes: bitwise the same for equal gradients. It rounds
    to bfloat16 before it needs whole matrices and returns bfloat16, so that ``wire`` loses nothing.

    Parameter groups may have ``split_sizes``: rows of the matrices that a fused projection consists of, [q, k, v] or
    one per head. Stacked experts, [e, m, n], are e matrices. torch's step on bfloat16 weights with ``nesterov=False``
    overwrites the momentum with what it orthogonalizes; this one does not.
    """

    wire = torch.bfloat16
    """The communication dtype of matrices and updates."""

    def check(self, optimizer: Optimizer) -> None:
        """Raises NotImplementedError for settings that it does not know."""
        unknown = optimizer.defaults.keys() - {
            "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn",
        }  # fmt: skip
        if unknown:
            raise NotImplementedError(
                f"fully_shard_optimizer: this torch's Muon has settings that mfsdp does not know, "
                f"{', '.join(sorted(unknown))}: its step may be another. Use a torch that versions.md lists"
            )

    def blocks(self, name: str, shape: Sequence[int], group: Group) -> list[Block]:
        """Returns the matrices of a parameter.

        Raises:
            ValueError: it has none; ``split_sizes`` does not fit.
        """
        if len(shape) not in (2, 3):
            raise ValueError(
                f"fully_shard_optimizer: Muon steps matrices [m, n] and stacked matrices [e, m, n]; {name} is "
                f"{list(shape)}. Give it to another optimizer (AdamW)"
            )
        *stacked, m, n = shape
        if not math.prod(shape):
            return []
        splits = [m] if group.get("split_sizes") is None else list(group["split_sizes"])
        if not all(isinstance(rows, int) and rows > 0 for rows in splits) or sum(splits) != m:
            raise ValueError(
                f"fully_shard_optimizer: split_sizes={splits} does not divide {name}, {list(shape)}: give positive "
                f"numbers of rows with the sum {m}"
            )
        starts = [sum(splits[:i]) for i in range(len(splits))]
        every = range(math.prod(stacked))
        return [(e * m + start, rows, n) for e in every for start, rows in zip(starts, splits, strict=True)]

    def begin(self, group: Group, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """Updates state, and returns what matrices are made of. Elementwise, [n] in the dtype of the weights."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum: torch.Tensor = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def whole(self, group: Group, matrices: torch.Tensor) -> torch.Tensor:
        """Returns the updates of equal matrices, [b, m, n] in ``wire``."""
        return orthogonal(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def decay(self, group: Group, weights: torch.Tensor) -> None:
        """Changes weights before updates are added. Elementwise, [n]."""
        weights.mul_(1 - _rate(group) * group["weight_decay"])

    def add(self, group: Group, weights: torch.Tensor, update: torch.Tensor, rows: int, columns: int) -> None:
        """Adds elements of the update of a matrix, [rows, columns], to those of its weights; both [n].

        The factors are those of torch's ``adjust_lr_fn``: Jordan's, and RMS matching (Moonshot, arXiv:2502.16982). The
        host does not read a learning rate that is a tensor; torch's does, and rounds once where this rounds twice.
        """
        how = group["adjust_lr_fn"]
        if how in (None, "original"):
            ratio = math.sqrt(max(1, rows / columns))
        else:
            assert how == "match_rms_adamw", how
            ratio = 0.2 * math.sqrt(max(rows, columns))
        factor = -(_rate(group) * ratio)
        if isinstance(factor, torch.Tensor):
            weights.add_(update.to(weights.dtype) * factor)
        else:
            weights.add_(update, alpha=factor)


def _rate(group: Group) -> Any:
    """The learning rate: a number, or a tensor without dimensions."""
    rate = group["lr"]
    return rate.reshape(()) if isinstance(rate, torch.Tensor) else float(rate)


def orthogonal(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Newton-Schulz iterations (Jordan, kellerjordan.github.io/posts/muon): U V^T, about, of every matrix U S V^T.
    Bitwise torch's one by one on this CPU; libraries for GPUs may sum batches in another order.

    Args:
        matrices: [b, m, n].
        coefficients: a, b, c of a X + (b G + c G G) X, where G = X X^T.
        steps: iterations.
        eps: least norm to divide by.

    Returns:
        [b, m, n], in the dtype of ``matrices``.
    """
    if not 0 <= steps < 100:
        raise ValueError(f"ns_steps={steps}: give a number below 100")
    a, b, c = coefficients
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices
    norms = torch.stack([matrix.norm() for matrix in x])  # a reduction over a batch would round otherwise
    x = x / norms.clamp(min=eps).view(-1, 1, 1)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


GROUP_KEYS = ("split_sizes", "blockwise")
"""Keys of parameter groups that torch does not have."""

RECIPES: dict[type[Optimizer], Muon] = {torch.optim.Muon: Muon()}
"""Recipes by the exact class of the optimizer."""

REFUSED = {
    "Adafactor": "what it does to one element depends on others",
    "LBFGS": "what it does to one element depends on others",
    **dict.fromkeys(
        ("Shampoo", "DistributedShampoo", "SOAP", "PSGD", "Kron"),
        "it keeps matrices of state per parameter, [m, m] and [n, n], which belong to the rank that steps the whole "
        "matrix. State here is cut into rows as weights are, and checkpoints would have no place for others",
    ),
    **dict.fromkeys(
        ("Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam", "NorMuon", "Dion", "Dion2"),
        "its step needs whole matrices, and only that of torch.optim.Muon itself is known. Use torch.optim.Muon",
    ),
}
"""Optimizers that are no recipe's, by the name of a base class, and why flat rows would be wrong for them."""
