"""Accelerate's FSDP configuration of version 2 means mfsdp: loops, checkpoints, transformers' Trainer, PEFT, TRL."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from tests.models import GPT, llama
from tests.parity import error, whole
from tests.ranks import Ranks, collectives_told

EAGER = {"lowering": "eager"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks in which accelerate is not as others find it."""
    found = Ranks(2, start="forkserver")
    yield found
    found.stop()


@contextmanager
def accelerator(*, plugin: dict[str, Any] | None = None, **kwargs: Any) -> Iterator[Any]:
    """An Accelerator on CPUs, as `accelerate launch --cpu` has it, and none behind it."""
    with environment():
        import accelerate

        from mfsdp.integrations.accelerate import ShardingPlugin

        fields = {"options": EAGER, **(plugin or {})}
        yield accelerate.Accelerator(cpu=True, fsdp_plugin=ShardingPlugin(**fields), **kwargs)


@contextmanager
def environment(**more: str) -> Iterator[None]:
    """What launchers say to processes; afterwards accelerate has forgotten it."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ.update({**{k: str(v) for k, v in names.items()}, "ACCELERATE_USE_CPU": "true", **more})
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def data(count: int, size: int = 2, length: int = 8) -> torch.Tensor:
    """The same on every rank: each takes its part of it."""
    return torch.randint(31, (count, size, length), generator=torch.Generator().manual_seed(5))


class Model(GPT):
    """With a loss, as transformers' models have it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


def pair(build: Callable[[], nn.Module] = Model) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build()
    return model, copy.deepcopy(model)


def far(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of any parameter."""
    theirs = dict(reference.named_parameters())
    ours = {n.replace("._checkpoint_wrapped_module", ""): p for n, p in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    return max(float((whole(p).detach().float() - theirs[n].detach().float()).abs().max()) for n, p in ours.items())


def reference_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor], parts: int
) -> torch.Tensor:
    """One step of the unsharded model on all ranks' batches; the norm before clipping."""
    for x in batches:
        (model(x) / parts).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def loop(order: str, plugin: dict[str, Any]) -> dict[str, Any]:
    """Five batches per rank, two to a step: the last step has one. Beside the unsharded model."""
    with accelerator(plugin=plugin, gradient_accumulation_steps=2) as acc:
        given, reference = pair()
        rows = data(20).flatten(0, 1)
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        things = {"m": given, "o": adamw(given), "l": loader}
        prepared = dict(zip(order, acc.prepare(*(things[k] for k in order)), strict=True))
        model, optimizer, loader = (prepared[k] for k in "mol")
        assert model is given and isinstance(model, mfsdp.FSDPModule) and acc.is_fsdp2
        theirs = adamw(reference)
        told: list[str] = []
        norms, scattered, waiting = [], [], []
        with collectives_told(lambda kind, group: told.append(kind)):
            for i, x in enumerate(loader):
                both = rows.split(4)[2 * i : 2 * i + 2]
                assert torch.equal(x, both[acc.process_index]), "data of its own"
                waiting += both
                with acc.accumulate(model):
                    del told[:]
                    acc.backward(model(x))
                    scattered.append(told.count("scatter"))
                    if acc.sync_gradients:
                        norm = acc.clip_grad_norm_(model.parameters(), 1.0)
                        norms.append(error(norm, reference_step(reference, theirs, waiting, 4)))
                        waiting = []
                    optimizer.step()
                    optimizer.zero_grad()
        return {"far": far(model, reference), "norms": norms, "scattered": scattered,
                "units": len({id(m._mfsdp_unit) for m in model.modules() if isinstance(m, mfsdp.FSDPModule)})}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    ("order", "plugin", "units"),
    [
        ("mol", BLOCKS, 3),
        ("lom", {"auto_wrap_policy": "size_based_wrap", "min_num_params": 3000, "reshard_after_forward": False}, None),
        ("oml", {}, 3),
    ],
)
def test_a_loop_is_the_unsharded_one(ranks, order, plugin, units):
    for seen in ranks.run(loop, order, plugin):
        assert seen["far"] < 2e-4 and max(seen["norms"]) < 1e-5 and len(seen["norms"]) == 3
        kept = [s == 0 for s in seen["scattered"]]
        assert kept == [True, False, True, False, False], "nothing travels between the steps"
        assert units is None or seen["units"] == units
