"""A model cut into pipeline stages, trained by torch's schedules, against itself in one piece on all ranks' data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils.checkpoint import checkpoint

import mfsdp
from tests.helpers.parity import error
from tests.helpers.ranks import collectives_told

VOCAB, WIDTH, LAYERS, MICROBATCHES, BATCH, STEPS, CLIP = 32, 16, 4, 4, 8, 2, 0.05
LOOP = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V = ("ZBVZeroBubble", "DualPipeV")
SINGLE = ("GPipe", "1F1B")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    checkpointed = False

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: Any = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x if self.head is None else self.head(self.norm(x))


def stage_of(number: int, count: int, tied: bool = False) -> Model:
    """A stage: a copy without what the others have. Paths of parameters stay."""
    model = Model(tied)
    for i in range(LAYERS):
        if i * count // LAYERS != number:
            del model.layers[str(i)]
    if number > 0:
        model.embed = None
    if number < count - 1:
        model.norm = model.head = None
    return model


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a data-parallel rank."""
    ids = torch.randint(VOCAB, (BATCH, 5), generator=torch.Generator().manual_seed(1000 * step + rank))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@cache
def in_one_piece(
    ranks: int, tied: bool = False
) -> tuple[dict[str, torch.Tensor], list[float], list[list[torch.Tensor]]]:
    """Weights after two clipped steps of AdamW, the norms, and the losses by step and rank."""
    model = Model(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms, losses = [], []
    for step in range(STEPS):
        losses.append([])
        for rank in range(ranks):
            x, y = batch(step, rank)
            mine = [loss_of(model(a), b) for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)]
            (sum(mine) / MICROBATCHES / ranks).backward()  # type: ignore[union-attr]
            losses[-1].append(torch.stack([loss.detach() for loss in mine]))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms, losses


@dataclass
class Pipeline:
    """A rank's stages, sharded and compiled once, for schedules of one placement."""

    mesh: DeviceMesh
    placement: str
    """``"single"``, ``"loop"`` or ``"v"``."""
    sharding: dict[str, Any] = field(default_factory=dict)
    compile: Callable[[nn.Module], Any] = lambda module: module
    stage: Callable[..., Any] = mfsdp.PipelineStage
    prepare: Callable[[Model], object] = lambda model: None
    """Called with each stage's module before it is sharded."""
    flat: bool = False
    """Whether the optimizer steps on flat buffers."""
    tied: bool = False
    """Whether embedding and head are one weight."""

    def __post_init__(self) -> None:
        self.pp = self.mesh["pp"]
        rank = self.pp.get_local_rank()
        numbers = {"single": [rank], "loop": [rank, rank + 2], "v": [rank, 3 - rank]}[self.placement]
        self.count = 2 if self.placement == "single" else 4
        self.data = [name for name in self.mesh.mesh_dim_names or () if name.startswith("dp")]
        self.rank = self.mesh[tuple(self.data)].get_local_rank() if len(self.data) == 1 else self._rank_of_two()
        self.ranks = self.mesh[tuple(self.data)].size()
        self.modules: dict[int, Model] = {}
        for number in numbers:
            module = self.modules[number] = stage_of(number, self.count, self.tied)
            self.prepare(module)
            policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=None)
            ends = [name for name in ("embed", "head") if self.tied and getattr(module, name) is not None]
            mfsdp.fully_shard(module, mesh=self.mesh, units=[Block, *ends], mp_policy=policy, **self.sharding)
        if self.tied:
            mfsdp.tie_weights(list(self.modules.values()), ["embed.weight", "head.weight"], mesh=self.mesh)
        self.start = {n: p.detach().clone() for m in self.modules.values() for n, p in m.named_parameters()}
        self.compiled = {number: self.compile(module) for number, module in self.modules.items()}

    def _rank_of_two(self) -> int:
        outer, inner = (self.mesh[name] for name in self.data)
        return int(outer.get_local_rank() * inner.size() + inner.get_local_rank())

    def scheduled(self, name: str, scale: bool = True, **more: Any) -> Any:
        """A schedule of this rank's stages."""
        make = partial(self.stage, num_stages=self.count, device=torch.device("cpu"), group=self.pp.get_group(), **more)
        stages = [make(submodule=self.compiled[n], stage_index=n) for n in self.modules]
        kind = torch_schedules.get_schedule_class(name)
        several = issubclass(kind, torch_schedules.PipelineScheduleMulti)
        return kind(stages if several else stages[0], MICROBATCHES, loss_fn=loss_of, scale_grads=scale)  # type: ignore[arg-type]

    def step(self, schedule: Any, number: int) -> list[torch.Tensor]:
        """Runs one step of a schedule; returns the losses, on the rank with the last stage."""
        x, y = batch(number, self.rank)
        losses: list[torch.Tensor] = []
        schedule.step(
            *((x,) if 0 in self.modules else ()), target=y if self.count - 1 in self.modules else None, losses=losses,
            return_outputs=False,
        )  # fmt: skip
        return losses

    def parameters(self) -> dict[str, Any]:
        return {n: p for m in self.modules.values() for n, p in m.named_parameters()}

    def reset(self) -> None:
        with torch.no_grad():
            for name, p in self.parameters().items():
                p.grad = None
                p.copy_(self.start[name])

    def trained(self, name: str, **more: Any) -> dict[str, Any]:
        """The largest relative errors of two steps of a schedule, and the second step's collectives by kind."""
        self.reset()
        weights, norms, losses = in_one_piece(self.ranks, self.tied)
        schedule = self.scheduled(name, **more)
        optimizer: Any = torch.optim.AdamW(self.parameters().values(), lr=1e-2, weight_decay=0.1)
        optimizer = mfsdp.fully_shard_optimizer(optimizer) if self.flat else optimizer
        worst, counts = 0.0, Counter[str]()
        for step in range(STEPS):
            counts.clear()
            with collectives_told(lambda kind, group: counts.update([kind])):
                mine = self.step(schedule, step)
            if mine:
                worst = max(worst, error(torch.stack([x.detach() for x in mine]), losses[step][self.rank]))
            missing = [n for n, p in self.parameters().items() if p.grad is None]
            assert not missing, f"{name}: no gradient of {missing}"
            norm = mfsdp.clip_grad_norm_(list(self.modules.values()), CLIP, mesh=self.mesh)
            worst = max(worst, abs(float(norm) / norms[step] - 1))
            optimizer.step()
            optimizer.zero_grad()
        wanted = {n: weights[n] if n in weights else weights["embed.weight"] for n in self.parameters()}
        worst = max([worst, *(error(p.full_tensor(), wanted[n]) for n, p in self.parameters().items())])
        if self.tied:
            copies = [p.to_local() for n, p in self.parameters().items() if n in ("embed.weight", "head.weight")]
            every: list[list[torch.Tensor]] = [[]] * self.pp.size()
            torch.distributed.all_gather_object(every, copies, group=self.pp.get_group())
            first, second = (copy for there in every for copy in there)
            assert torch.equal(first, second), "copies of a tied weight have drifted apart"
        return {"worst": worst, "units": self.units, **counts}

    @property
    def units(self) -> int:
        """How many units are gathered, of all stages of the rank."""
        found = {id(b) for m in self.modules.values() for u in mfsdp_units(m) for b in u.buffers}
        return len(found)


def mfsdp_units(module: nn.Module) -> list[Any]:
    return [m._mfsdp_unit for m in module.modules() if isinstance(m, mfsdp.FSDPModule)]
