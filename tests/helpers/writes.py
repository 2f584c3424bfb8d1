"""Every way to write to the weights of a sharded model, each a function of the model. ``COUNTED``: through parameters,
on all ranks; ``PAST``: through rows as plain tensors, past what counts writes, by whichever rank calls it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from tests.helpers.parity import whole


def _past_versions(model: nn.Module) -> None:
    for p in model.parameters():
        p.to_local().data.mul_(0.5)


def _numpy(model: nn.Module) -> None:
    for p in model.parameters():
        p.detach().to_local().numpy()[...] += 0.25


def _broadcast(model: nn.Module) -> None:
    for p in model.parameters():
        rows = p.to_local()
        rows.data.fill_(1.0 + dist.get_rank())
        if p.sharding.local().numel:
            rows.data.div_(3)


@torch.no_grad()
def _in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.75)


@torch.no_grad()
def _foreach(model: nn.Module) -> None:
    torch._foreach_add_(list(model.parameters()), 0.125)


def _data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.add_(0.5)


def _copied(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({k: whole(v) * 1.5 for k, v in model.state_dict().items()})


def _summoned(model: nn.Module) -> None:
    with mfsdp.summon_full_params(model):
        for p in model.parameters():
            p.data.sub_(0.25)


@torch.no_grad()
def _one_row(model: nn.Module) -> None:
    """Only one rank's rows change, of one unit."""
    param = list(model.parameters())[-1]
    mask = torch.zeros(param.shape)
    mask[0] = 1
    param.add_(mask)


@torch.no_grad()
def _swapped(model: nn.Module) -> None:
    """As averages of weights are swapped in and out."""
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.copy_(p * 0.5)
    for p, k in zip(model.parameters(), kept, strict=True):
        p.lerp_(k, 0.5)


def _detached(model: nn.Module) -> None:
    for p in model.parameters():
        p.detach().to_local().mul_(0.5)


def _of_state_dict(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.to_local().neg_()


@torch.no_grad()
def _rows(model: nn.Module) -> None:
    for p in model.parameters():
        p.to_local().view(-1)[:].mul_(0.5)


def _dlpack(model: nn.Module) -> None:
    for p in model.parameters():
        torch.from_dlpack(p.detach().to_local()).add_(0.25)


@torch.no_grad()
def _out(model: nn.Module) -> None:
    for p in model.parameters():
        rows = p.to_local()
        torch.mul(rows, 0.5, out=rows)


def _rows_foreach(model: nn.Module) -> None:
    torch._foreach_mul_([p.detach().to_local() for p in model.parameters()], 0.5)


@torch.inference_mode()
def _inference(model: nn.Module) -> None:
    for p in model.parameters():
        p.to_local().add_(0.25)


@torch.library.custom_op("mfsdp_tests::double_", mutates_args=["x"])
def _double(x: torch.Tensor) -> None:
    x.numpy()[...] *= 2


def _custom_operator(model: nn.Module) -> None:
    for p in model.parameters():
        _double(p.detach().to_local())


def _first_row(model: nn.Module) -> None:
    """Of the rank that holds it, in one unit."""
    param = next(iter(model.parameters()))
    if param.sharding.local().param_offset == 0:
        param.detach().to_local()[:1] += 1


COUNTED = (_in_place, _foreach, _data, _copied, _loaded, _summoned, _one_row, _swapped)
PAST = (
    _past_versions,
    _numpy,
    _broadcast,
    _detached,
    _of_state_dict,
    _rows,
    _dlpack,
    _out,
    _rows_foreach,
    _inference,
    _custom_operator,
    _first_row,
)
