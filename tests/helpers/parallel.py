"""Models under tensor, expert and context parallelism against their unsharded selves on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tests.helpers.parity import error
from tests.helpers.ranks import here

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def tokens(number: int, vocab: int = 34, length: int = 9) -> torch.Tensor:
    """The batch of a data-parallel rank."""
    torch.manual_seed(7 + number)
    return torch.randint(vocab, (2, length)).to(here())


def trained_alike(
    model: nn.Module,
    run: Any,
    reference: nn.Module,
    mine: torch.Tensor,
    every: list[torch.Tensor],
    loss: Loss = next_token,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-2),
    wrap: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer,
) -> dict[str, float]:
    """The largest relative error of gradients, norms and weights over steps with clipping, by what it is."""
    wrong: dict[str, float] = {}

    def note(what: str, value: float) -> None:
        wrong[what] = max(wrong.get(what, 0.0), value)

    ours, theirs = wrap(optimizer(model.parameters())), optimizer(reference.parameters())
    names = [n for n, _ in reference.named_parameters()]
    for _ in range(steps):
        mean = loss(run, mine)
        mean.backward()
        together = sum(loss(reference, batch) for batch in every) / len(every)
        assert isinstance(together, torch.Tensor)
        together.backward()
        for n, p, q in zip(names, model.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None, n
            note(f"gradient of {n}", error(p.grad.full_tensor(), q.grad))  # type: ignore[attr-defined]
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
        note("norm", error(*norms))
        for o in (ours, theirs):
            o.step()
            o.zero_grad()
    for n, p, q in zip(names, model.parameters(), reference.parameters(), strict=True):
        note(n, error(p.full_tensor().detach(), q.detach()))  # type: ignore[attr-defined]
    return wrong


def graphs() -> tuple[int, int]:
    """How many graphs Dynamo has made since the last `reset`, and at how many places it broke."""
    return counters["stats"].get("unique_graphs", 0), sum(counters["graph_break"].values())


def reset() -> None:
    torch._dynamo.reset()
    counters.clear()


def twin(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal models in fp64, the same on every rank."""
    torch.manual_seed(0)
    reference = build().double().to(here())
    return reference, copy.deepcopy(reference)
