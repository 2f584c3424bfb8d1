"""What programs of the fuzzer are made of. Their text is copied into the program: nothing here knows of its neighbours
in this folder, and a class uses no other.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

# Blocks: ``[batch, length, width]`` to the same shape.


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Convolution(nn.Module):
    def __init__(self, width: int, channels: int):
        super().__init__()
        self.inner = nn.Conv1d(width, channels, 3, padding=1)
        self.back = nn.Conv1d(channels, width, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.inner(x.transpose(1, 2)))).transpose(1, 2)


class Image(nn.Module):
    """Convolutions over (length, width) as if it were a picture."""

    def __init__(self, channels: int):
        super().__init__()
        self.inner, self.norm = nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(1, channels)
        self.back = nn.Conv2d(channels, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.norm(self.inner(x.unsqueeze(1)))).squeeze(1)


class BatchNorm(nn.Module):
    """Buffers that forward writes."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Places(nn.Module):
    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Experts(nn.Module):
    """Each token goes to one expert; those without tokens are not called, which differs by rank."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        scores = F.softmax(self.router(flat), -1)
        best, out = scores.argmax(-1), flat
        for number, expert in enumerate(self.experts):
            mine = (best == number).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(flat[mine]) * scores[mine, number, None])
        return out.view_as(x)


class Mixture(nn.Module):
    """All experts on all tokens, in one stacked weight."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.stacked = nn.Parameter(torch.empty(experts, width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.stacked, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bte,eij,btj->bti", F.softmax(self.router(x), -1), self.stacked, x)


class Views(nn.Module):
    """Autograd saves views of its parameters in other dtypes, conjugate ones too."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.turn = nn.Parameter(torch.empty(width, 2)), nn.Parameter(torch.empty(width, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight), nn.init.normal_(self.turn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(self.weight) * torch.view_as_complex(self.turn).conj()
        return x * turned.real + turned.imag


class Scale(nn.Module):
    """A parameter without dimensions, one with one row, one with one column."""

    def __init__(self, width: int):
        super().__init__()
        self.gain, self.row = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(1, width))
        self.column = nn.Parameter(torch.empty(width, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 1.1)
        nn.init.normal_(self.row, std=0.5)
        nn.init.normal_(self.column, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.row + (x @ self.column)


class LoRA(nn.Module):
    """A frozen weight with a low-rank adapter that trains."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class WeightNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = torch.nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Recurrent(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Reader(nn.Module):
    """Without parameters of its own; reads the weight of a child that is never called."""

    def __init__(self, width: int):
        super().__init__()
        self.child = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.child.weight.T)


# Blocks at the edge: each is right, or refused in words.


class Hole(nn.Module):
    """A parameter without elements beside one that has some."""

    def __init__(self, width: int):
        super().__init__()
        self.none, self.some = nn.Parameter(torch.empty(0, width)), nn.Parameter(torch.empty(3, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.some)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat([self.none, self.some]).sum(0)


class Codebook(nn.Module):
    """Forward writes a parameter that does not train."""

    def __init__(self, width: int):
        super().__init__()
        self.code = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.code.mul_(0.5)
        return x + self.code


class Clamped(nn.Module):
    """Forward writes a parameter that trains."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


class Renormed(nn.Module):
    """Forward writes the rows that it looks up; all ranks look up all of them."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(length, width, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(torch.arange(self.table.num_embeddings, device=x.device))
        return x + rows.sum(0)


class Sparse(nn.Module):
    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(length, width, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device))


class Subclass(nn.Module):
    """A parameter that is two tensors."""

    def __init__(self, width: int):
        super().__init__()
        from torch.testing._internal.two_tensor import TwoTensor

        pair = TwoTensor(torch.ones(width), torch.full((width,), 2.0))
        self.pair = nn.Parameter(pair, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = self.pair.detach()
        return x + (pair.a + pair.b if hasattr(pair, "b") else pair)


class Own(nn.Module):
    """Reads its own ``parameters()`` in forward."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.1 * sum(p.square().sum() for p in self.inner.parameters())


class Differs(nn.Module):
    """Ranks call other layers than each other, or in another order."""

    def __init__(self, width: int, how: str):
        super().__init__()
        self.layers, self.how, self.rank = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "skip":
            order = [i for i in range(3) if i != 1 + self.rank]
        elif self.how == "order":
            order = [0, 1, 2] if self.rank == 0 else [1, 0, 2]
        else:  # a branch on data
            order = [0, 1, 2] if bool(x.detach().square().sum() * self.rank < 1e-30) else [0, 2, 1]
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


# What goes wrong


class Fault(Exception):
    """What a program raises itself."""


def trips(armed: list[str], where: str) -> None:
    """Raises, once, if this is the place."""
    if where in armed:
        armed.clear()
        raise Fault(f"in {where}")


def tripwire(armed: list[str]) -> Any:
    """An operation inside of a model that gives what it gets, and may raise in forward or in backward."""

    @torch.library.custom_op("fuzz::wire", mutates_args=())
    def wire(x: torch.Tensor, where: str) -> torch.Tensor:
        trips(armed, where)
        return x.clone()

    wire.register_fake(lambda x, where: torch.empty_like(x))
    wire.register_autograd(lambda ctx, grad: (wire(grad, "backward"), None))
    return wire


# Around the model


@torch.compiler.disable
def uncompiled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def whole(t: Any) -> Any:
    """The global value of what may be sharded; gradients pass."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def rows(p: torch.Tensor) -> torch.Tensor:
    """This rank's rows of what may be sharded, as a plain tensor over the same memory."""
    return p.to_local() if isinstance(p, DTensor) else p.detach()


def same(faults: list[str], what: str, mine: Any, theirs: Any, bound: float, floor: float = 1e-12) -> None:
    """Notes a difference larger than ``bound``, relative to the largest value or to ``floor``."""
    mine, theirs = whole(mine), whole(theirs)
    if mine is None or theirs is None:
        if mine is not theirs and (theirs is None or theirs.numel()):
            faults.append(f"{what}: {'None' if mine is None else 'a tensor'} for {'None' if theirs is None else 'one'}")
        return
    mine, theirs = mine.detach().double(), theirs.detach().double()
    if mine.shape != theirs.shape:
        faults.append(f"{what}: shape {tuple(mine.shape)} for {tuple(theirs.shape)}")
    elif not torch.equal(mine.isnan(), theirs.isnan()):
        faults.append(f"{what}: not a number where the other has one, or the other way round")
    elif mine.numel():
        mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        error = ((mine - theirs).abs().max() / theirs.abs().max().clamp_min(max(floor, 1e-12))).item()
        if not error <= bound:
            faults.append(f"{what}: off by {error:.2g} of the largest value")


def averaged(reference: nn.Module, world: int) -> None:
    """Means over ranks of the reference's gradients; a rank that has none, where another has one, brings zeros."""
    for p in reference.parameters():
        have = torch.tensor(float(p.grad is not None))
        if world > 1:
            dist.all_reduce(have)
        if not have:
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        grad = grad.to_dense() if grad.is_sparse else grad
        if world > 1:
            dist.all_reduce(grad)
            grad = grad / world
        p.grad = grad.detach()


def gradients(faults: list[str], step: int, model: nn.Module, reference: nn.Module, bound: float) -> bool:
    """Compares all gradients; what is nothing but rounding is measured against the others. ``False`` where the
    reference runs away, and rounding with it.
    """
    theirs = dict(reference.named_parameters())
    mine = dict(model.named_parameters())
    if list(mine) != list(theirs):
        faults.append(f"parameters are called {list(mine)}, should be {list(theirs)}")
        return False
    have = [p.grad.double().nan_to_num() for p in theirs.values() if p.grad is not None and p.numel()]
    grads = [g.abs().max().item() for g in have]
    if not all(g < (1e3 if step else 1e9) for g in grads):
        return False
    for name, p in mine.items():
        same(faults, f"step {step}: gradient of {name}", p.grad, theirs[name].grad, bound, 5e-2 * max(grads, default=0))
    return True


def values(faults: list[str], when: str, model: nn.Module, reference: nn.Module, bound: float) -> None:
    """Compares all parameters and buffers."""
    for p, (name, q) in zip(model.parameters(), reference.named_parameters(), strict=True):
        same(faults, f"{when}: {name}", p, q, bound, 1e-2)
    for b, (name, c) in zip(model.buffers(), reference.named_buffers(), strict=True):
        same(faults, f"{when}: buffer {name}", b, c, bound, 1e-2)


def saved_and_loaded(model: nn.Module, optimizer: torch.optim.Optimizer, world: int) -> None:
    """Writes a checkpoint, ruins the weights, and reads it."""
    with tempfile.TemporaryDirectory() as mine:
        place = [mine]
        if world > 1:
            dist.broadcast_object_list(place)
        dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=place[0])
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=place[0])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        if world > 1:
            dist.barrier()
