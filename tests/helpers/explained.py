"""Toys to explain, round numbers for their hardware, and the memory that ranks really hold."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import nn

import mfsdp
from examples.bench.bench import peak_of
from mfsdp.config.hardware import Hardware, Link
from mfsdp.cost_model import machine
from tests.helpers.models import GPT
from tests.helpers.parity import compiled
from tests.helpers.toys import BF16, Toy2
from tests.helpers.without_inductor import without_kernels

UNITS = {"units": ["layers.0", "layers.2"], "mp_policy": BF16}


def meta_toy() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Toy2().to(torch.bfloat16), torch.empty(256, 1024, dtype=torch.bfloat16)


def toy(**kwargs: Any) -> Any:
    model, x = meta_toy()
    return mfsdp.explain(model, (x,), **{**UNITS, **kwargs})


def toys(**kwargs: Any) -> Any:
    model, x = meta_toy()
    return mfsdp.compare(model, (x,), **{**UNITS, **kwargs})


PLAIN = Hardware("plain", {"bf16": 1e12}, 10**9, 1e12, Link(1e9, 0.0), Link(1e9, 0.0), reached=1, reached_bandwidth=1)
"""Nothing but round numbers: a gather of a toy unit takes 7/8 of 2.11 MB at 1 GB/s, 1849.344 us."""


class Loss(nn.Module):
    """A language model that answers with its loss alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def built(name: str) -> tuple[nn.Module, torch.Tensor, str]:
    """Models whose peak is in a block, in the loss, in what is computed again; a batch, and their units. Of one all
    units stay gathered.
    """
    if name != "llama":
        model = GPT(width=192, layers=2 if name == "checkpointed" else 4, tied=False, recompute=name == "checkpointed")
        return model, torch.randint(31, (128, 8)), "Block"
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=128, intermediate_size=344, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return Loss(LlamaForCausalLM(config)), torch.randint(8000, (2, 128)), "LlamaDecoderLayer"


def sharding_of(name: str, strategy: int, plan: mfsdp.Plan | None = None) -> dict[str, Any]:
    *_, unit = built(name)
    given = {"units": [unit], "strategy": strategy, **({} if plan is None else {"plan": plan})}
    return given | ({"reshard_after_forward": False} if name == "gathered" else {})


@without_kernels()
def held(name: str, lowering: str, strategy: int, plan: mfsdp.Plan | None = None) -> int:
    """The most bytes that a rank has held in its third step."""
    torch.manual_seed(0)
    gc.collect()
    model, ids, _ = built(name)
    sharding = sharding_of(name, strategy, plan)
    mfsdp.runtime.static_buffers.reset()
    mfsdp.fully_shard(model, **sharding)
    run = compiled(model, lowering, check=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        run(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    buffers = [b for m in model.modules() if isinstance(m, mfsdp.FSDPModule) for b in m._mfsdp_unit.buffers]
    weights = [b.weights for b in buffers]
    lasting = [t for w in weights for t in {id(w.main): w.main, id(w.source): w.source}.values()]
    lasting += [v.to_local() for s in optimizer.state.values() for v in s.values() if v.dim()]
    total = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in lasting}.values())
    total += sum(mfsdp.runtime.static_buffers.sizes().values()) + ids.nbytes
    return total + peak_of(step)


def hastily() -> Hardware:
    """``mfsdp.measure``, in fewer rounds."""
    best, lost = machine._best, machine.lost
    machine._best, machine.lost = lambda function, rounds=1: best(function, 1), partial(lost, rounds=1)
    try:
        return mfsdp.measure()
    finally:
        machine._best, machine.lost = best, lost
