"""A sharded mixture of experts beside its unsharded self, its experts as DTensors or as plain tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from examples.parallel.model import Experts, Mixtral, MixtureLayer, expert_parallel
from tests.helpers.parallel import reset, twin
from tests.helpers.plain_shards import Enter, Leave
from tests.helpers.ranks import here


def meshes(ranks: int) -> tuple[DeviceMesh, DeviceMesh]:
    """All data-parallel ranks, and the same as (efsdp, ep)."""
    world = dist.get_world_size()
    dense = init_device_mesh(here().type, (world,), mesh_dim_names=("dp_shard",))
    return dense, init_device_mesh(here().type, (world // ranks, ranks), mesh_dim_names=("efsdp", "ep"))


def sharded(ranks: int, strategy: int = 3, of_experts: int = 3, **more: Any) -> tuple[Any, Any]:
    torch._dynamo.config.capture_scalar_outputs = True
    reset()
    dense, sparse = meshes(ranks)
    reference, model = twin(lambda: Mixtral(**more))
    expert_parallel(model, sparse["ep"])
    for experts in (m for m in model.modules() if isinstance(m, Experts)):
        mfsdp.fully_shard(experts, mesh=sparse["efsdp"], strategy=of_experts)
    mfsdp.fully_shard(model, mesh=dense, units=[MixtureLayer], strategy=strategy)
    return reference, model


class CutExperts(Experts):
    """Each expert over `etp`: its ranks have the same tokens, and a part of the hidden units."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return Leave.apply(super().forward(Enter.apply(x, self.etp), counts), self.etp)


class Listed(Experts):
    """Experts as a list of modules. With ``parts`` above one, weights are those of as many ranks, one after the other:
    rank r has rows r of each.
    """

    def __init__(self, whole: Experts, parts: int):
        nn.Module.__init__(self)
        self.number, self.group, self.parts = whole.number, None, parts
        here = whole.number // parts
        self.local_experts = nn.ModuleList(nn.Module() for _ in range(here))
        for n, expert in enumerate(self.local_experts):
            expert.w1, expert.w2 = (nn.Parameter(w.detach()[n::here].flatten(0, 1)) for w in (whole.w1, whole.w2))

    def stacked(self, name: str) -> torch.Tensor:
        every = [getattr(expert, name).unflatten(0, (self.parts, -1)) for expert in self.local_experts]
        return torch.stack(every, 1).flatten(0, 1)

    w1 = property(lambda self: self.stacked("w1"))
    w2 = property(lambda self: self.stacked("w2"))


class Grouped(Experts):
    """Experts in two matrices, whose memory is that of a stack, as Megatron-LM's ``GroupedMLP``."""

    def __init__(self, whole: Experts, parts: int):
        nn.Module.__init__(self)
        self.number, self.group, (_, self.hidden, self.width) = whole.number, None, whole.w1.shape
        here = whole.number // parts
        self.weight1 = nn.Parameter(whole.w1.detach().mT.reshape(parts * self.width, here * self.hidden).clone())
        self.weight2 = nn.Parameter(whole.w2.detach().mT.reshape(-1, self.width).clone())

    w1 = property(lambda self: self.weight1.view(-1, self.width, self.hidden).mT)
    w2 = property(lambda self: self.weight2.view(-1, self.hidden, self.width).mT)


def laid_out(model: nn.Module, kind: str, parts: int) -> None:
    """Gives the experts of every layer another form: ``"stacked"`` (as they are), ``"listed"``, ``"grouped"``."""
    for layer in (m for m in model.modules() if isinstance(m, MixtureLayer)):
        if kind != "stacked":
            layer.experts = {"listed": Listed, "grouped": Grouped}[kind](layer.experts, parts)


def plain_experts(model: nn.Module, mesh: DeviceMesh) -> list[Experts]:
    """Leaves each rank of ``ep`` its experts, as plain tensors marked as Megatron-LM does."""
    found = [m for m in model.modules() if isinstance(m, Experts)]
    for experts in found:
        for module in experts.modules():
            for name, whole in list(module._parameters.items()):
                assert whole is not None
                mine = nn.Parameter(whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone())
                mine.allreduce = False  # type: ignore[attr-defined]
                module.register_parameter(name, mine)
        experts.group, experts.parts = mesh.get_group(), 1  # type: ignore[assignment]
    return found
