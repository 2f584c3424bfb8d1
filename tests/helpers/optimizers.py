"""Sharded models with flat optimizers, beside unsharded ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import mfsdp
from tests.helpers.models import GPT, Block
from tests.helpers.ranks import here

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and learn faster."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "lr": 0.05, "weight_decay": 0.0}]


def fill(models: list[nn.Module], step: int, missing: Any = None) -> None:
    """The same gradients in all models; those of parameters that ``missing`` names are ``None``."""
    torch.manual_seed(100 + step)
    for number, params in enumerate(zip(*(m.parameters() for m in models), strict=True)):
        grad = torch.randn(params[0].shape).to(params[0].device)
        for p in params:
            at = p.sharding.local()
            part = grad.reshape(-1)[at.param_offset : at.param_offset + at.numel].view(at.shape)
            p.grad = None if missing is not None and missing(number, step) else type(p)._alike(part, p.sharding, False)


def sharded(**kwargs: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    first = GPT(tied=False, layers=1).to(here())
    models = [first, copy.deepcopy(first)]
    return [mfsdp.fully_shard(m, units=[Block], **kwargs) for m in models]
