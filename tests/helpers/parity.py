"""Runs on every rank: a sharded model against the unsharded one, with different data on each rank."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from tests.helpers.models import CASES, Case
from tests.helpers.ranks import here


def build(case: Case, **sharding: Any) -> tuple[nn.Module, nn.Module]:
    """The unsharded model and a sharded copy of it, the same on every rank."""
    torch.manual_seed(0)
    reference = case.build().to(here())
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=case.units, **sharding)
    return reference, model


def compiled(model: nn.Module, lowering: str, **options: Any) -> nn.Module:
    """The model under a lowering; ``"none"`` leaves it uncompiled."""
    if lowering == "none":
        warnings.simplefilter("ignore")
        return model
    return torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering, **options})  # type: ignore[return-value]


def batches(case: Case, step: int = 0) -> list[torch.Tensor]:
    """Every rank's batch; all ranks know all of them, and each trains on its own."""
    out = []
    for rank in range(dist.get_world_size()):
        torch.manual_seed(1000 * step + rank + 1)
        out.append(case.batch().to(here()))
    return out


def averaged(reference: nn.Module) -> None:
    """Averages the reference's gradients over ranks: what the sharded model must give bitwise on two ranks."""
    for p in reference.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


def clip_and_step(
    model: nn.Module, reference: nn.Module, optimizers: list[torch.optim.Optimizer], tolerance: float, none: bool = True
) -> None:
    """Averages the reference's gradients, clips both models to norms that have to agree, and steps both optimizers."""
    averaged(reference)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (model, reference)]
    assert error(norms[0], norms[1]) < tolerance, f"norms {norms}"
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)


def farthest(model: nn.Module, reference: nn.Module) -> float:
    """The largest relative error of any parameter."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(p.full_tensor().detach(), q.detach()) for p, q in pairs)  # type: ignore[attr-defined]


def whole(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.full_tensor()  # type: ignore[attr-defined]


def error(a: torch.Tensor, b: torch.Tensor, floor: float = 1e-12) -> float:
    """Largest difference, relative to the largest value, or to ``floor`` if that is larger."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(floor)).item() if b.numel() else 0.0


def gradients(name: str, lowering: str, sharding: dict[str, Any] | None = None, **options: Any) -> dict[str, float]:
    """Loss and gradients of two backward calls. Returns the largest relative errors, by what was compared."""
    case = CASES[name]
    reference, model = build(case, **(sharding or {}))
    run = compiled(model, lowering, **options)
    refer = torch.compile(reference, backend="aot_eager") if case.traced and lowering == "eager" else reference
    mine = batches(case)[dist.get_rank()]
    worst = {"loss": 0.0, "average": 0.0, "joined": 0.0}
    for _ in range(2):
        loss, want = case.loss(run, mine), case.loss(refer, mine)
        loss.backward()
        want.backward()
        worst["loss"] = max(worst["loss"], error(loss.detach(), want.detach()))
    averaged(reference)
    _compare(worst, "average", model, reference)
    for a, b in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5), "buffers differ"
    if case.joined:
        reference.zero_grad()
        both = torch.cat(batches(case))
        (2 * case.loss(reference, both)).backward()
        _compare(worst, "joined", model, reference)
    return worst


def _compare(worst: dict[str, float], what: str, model: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    mine = dict(model.named_parameters())
    assert list(mine) == list(theirs)
    # A bias in front of a batch norm has a gradient of nothing but rounding: measure it against the others.
    largest = max(q.grad.abs().max().item() for q in theirs.values() if q.grad is not None)
    for n, p in mine.items():
        got, expected = whole(p.grad), theirs[n].grad
        assert (got is None) == (expected is None), f"{n}: gradient {got is None} / {expected is None}"
        if got is not None and expected is not None:
            assert got.shape == expected.shape
            worst[what] = max(worst[what], error(got, expected, 1e-2 * largest))


def training(name: str, lowering: str, steps: int = 10) -> float:
    """AdamW with weight decay and clipping: the largest relative error of any parameter after the last step."""
    case = CASES[name]
    reference, model = build(case)
    run = compiled(model, lowering)
    refer = torch.compile(reference, backend="aot_eager") if case.traced else reference
    rank = dist.get_rank()
    # Biases of attention's keys have gradients of nothing but rounding, and Adam would step by them: eps is above it.
    more = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
    optimizers = [torch.optim.AdamW(m.parameters(), **more) for m in (model, reference)]
    for step in range(steps):
        x = batches(case, step)[rank]
        case.loss(run, x).backward()
        case.loss(refer, x).backward()
        clip_and_step(model, reference, optimizers, 1e-5, none=step % 2 == 0)
    worst = farthest(model, reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        state = optimizers[0].state[p]
        for key, value in optimizers[1].state[q].items():
            mine = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
            worst = max(worst, error(mine, value))
    return worst


def scaled_steps(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Four steps of each model under a scaler of its own; the third one's gradients are infinite, and skipped."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in models]
    for step in range(4):
        for m, o, s in zip(models, optimizers, scalers, strict=True):
            out = m(torch.full((2, 4), math.inf if step == 2 else 1.0 + step)).square().mean()
            s.scale(out).backward()
            s.step(o)
            s.update()
            o.zero_grad()
