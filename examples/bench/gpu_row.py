"""One contender of gpu.py, in a process of its own: ``python gpu_row.py SPEC``, JSON of :class:`Row`; one process a
rank. Rank 0 writes what it measured to ``Row.result``.

All train the same model from the same weights, in bf16 with fp32 main weights and fp32 gradients, on the same tokens
(the same on every rank, so that one process is the reference of many), with AdamW.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """A configuration of transformers; batch and sequence that fit one GPU of 80 GB."""

    config: str
    sizes: dict[str, Any]
    batch: int
    seq: int
    blocks: str = "model.layers"


TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}  # fmt: skip
"""GPT-2's configuration knows these names, too."""


def llama(hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, tied: bool, **more: Any) -> Any:
    return {"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
            "tie_word_embeddings": tied, "max_position_embeddings": 8192, **more}  # fmt: skip


MODELS = {
    "llama-1b": Model("LlamaConfig", llama(2048, 8192, 16, 32, 8, 128256, True), 2, 4096),
    "llama-8b": Model("LlamaConfig", llama(4096, 14336, 4, 32, 8, 128256, False), 2, 4096),
    "qwen3-0.6b": Model("Qwen3Config", llama(1024, 3072, 28, 16, 8, 151936, True, head_dim=128), 2, 4096),
    "gpt2": Model("GPT2Config", dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0), 8, 1024,
                  "transformer.h"),
    "mixture": Model("MixtralConfig", llama(1024, 3584, 8, 16, 8, 32000, False, num_local_experts=8), 2, 4096),
}  # fmt: skip
"""Of Llama-3-8B as many layers as ``--layers`` says."""


@dataclass(frozen=True)
class Row:
    contender: str
    model: str
    world: int
    fake: bool
    """Whether the other ranks are not there."""
    batch: int
    seq: int
    layers: int
    """0: as many as the model has."""
    tiny: bool
    steps: int
    warmup: int
    lowering: str
    options: dict[str, Any]
    """More of the backend mfsdp's."""
    hardware: str
    kernels: int
    result: str


def build(row: Row, device: str) -> nn.Module:
    import transformers

    model = MODELS[row.model]
    more = {"experts_implementation": "grouped_mm"} if row.model == "mixture" else {}
    config = getattr(transformers, model.config)(**model.sizes, attn_implementation="sdpa", **more)
    layers = {"num_hidden_layers": row.layers} if row.layers else {}
    for name, value in {**(TINY if row.tiny else {}), **layers}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config).float()
    made.loss_type = "ForCausalLM"  # GPT-2's class name does not say so: a warning breaks the graph
    return made  # type: ignore[no-any-return]


def operations(model: nn.Module, batch: int, seq: int) -> float:
    """Floating-point operations of a step, the same for all contenders: six for each token and element of a weight
    that multiplies it (of experts, those that a token is sent to), and twelve for each pair of tokens, layer and
    element of a head's vector, halved: attention is causal. What is computed again is not counted.
    """
    config: Any = model.config
    heads, hidden = config.num_attention_heads, config.hidden_size
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    routed = getattr(config, "num_experts_per_tok", 0) / (getattr(config, "num_local_experts", 0) or 1)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(model.get_output_embeddings().weight)}  # type: ignore[operator]
    used = sum(p.numel() * (routed if p.dim() == 3 else 1) for p in model.parameters() if id(p) not in tables)
    return batch * seq * (6 * used + 12 * config.num_hidden_layers * width * seq / 2)


# Contenders: each gives a call that computes the loss, and an optimizer


@dataclass
class Setting:
    row: Row
    model: Any
    ids: torch.Tensor
    device: str

    @property
    def blocks(self) -> list[Any]:
        return list(self.model.get_submodule(MODELS[self.row.model].blocks))

    def adamw(self, model: Any, **more: Any) -> Any:
        more |= {"fused": True} if self.device == "cuda" else {}
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **more)

    def compile(self, function: Any, mode: str | None = None) -> Any:
        return torch.compile(function, backend="aot_eager" if self.row.lowering == "eager" else "inductor", mode=mode)

    def mesh(self) -> Any:
        return dist.device_mesh.init_device_mesh(self.device, (dist.get_world_size(),), mesh_dim_names=("dp",))

    def whole(self, model: Any) -> Callable[[], torch.Tensor]:
        return lambda: model(input_ids=self.ids, labels=self.ids).loss  # type: ignore[no-any-return]

    def by_layers(self, model: Any) -> Callable[[], torch.Tensor]:
        """The loss compiled by itself: it is the largest memory of a step."""

        def entropy(logits: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), self.ids[:, 1:].flatten())

        compiled = self.compile(entropy)
        return lambda: compiled(model(input_ids=self.ids).logits)  # type: ignore[no-any-return]


Contender = tuple[Callable[[], torch.Tensor], Any]
"""What computes the loss, and the optimizer; ``None``: it is the whole step."""


def plain(s: Setting) -> Contender:
    net = s.compile(s.model)

    def call() -> torch.Tensor:
        with torch.autocast(s.device, BF16):
            return net(input_ids=s.ids, labels=s.ids).loss  # type: ignore[no-any-return]

    return call, s.adamw(s.model)


def fsdp2(s: Setting, whole: bool, mode: str | None = None) -> Contender:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    given: Any = {"mesh": s.mesh(), "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)}
    for block in s.blocks:
        if not whole:
            block.compile(backend="aot_eager" if s.row.lowering == "eager" else "inductor")
        fully_shard(block, **given)
    fully_shard(s.model, **given)
    call = s.whole(s.compile(s.model, mode)) if whole else s.by_layers(s.model)
    return call, s.adamw(s.model)


def narrow(s: Setting) -> None:
    """Megatron-FSDP computes in the dtype of the parameters, and keeps main weights beside them. Layers compiled, the
    hooks around them not. The package takes classes of Megatron-Core where it is installed, of whatever version: 0.6.1
    does not fit 0.16.1, so that it is hidden.
    """
    sys.modules["megatron.core"] = None  # type: ignore[assignment]
    for parameter in s.model.parameters():
        parameter.data = parameter.data.to(BF16)
    for block in s.blocks:
        block.forward = s.compile(block.forward)


def megatron_v1(s: Setting) -> Contender:
    narrow(s)
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
    model = fully_shard_model(
        s.model, s.mesh(), "dp", fsdp_unit_modules=[type(s.blocks[0])], zero_dp_strategy=3,
        mixed_precision_policy=policy,
    )  # fmt: skip
    return s.by_layers(model), fully_shard_optimizer(s.adamw(model))


def megatron_v2(s: Setting) -> Contender:
    narrow(s)
    from megatron_fsdp import MixedPrecisionPolicy
    from megatron_fsdp.experimental import Flat, Placements, fully_shard, fully_shard_optimizer

    mesh, flat = s.mesh(), [Flat()]
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
    for module in (*s.blocks, s.model):
        fully_shard(module, mesh, Placements(["dp"], flat, flat, flat), policy)
    optimizer = s.adamw(s.model)
    fully_shard_optimizer(optimizer)
    return s.by_layers(s.model), optimizer


def captured(s: Setting) -> Contender:
    """A whole step as one CUDA graph, which has no optimizer beside it."""
    import mfsdp

    call, optimizer = ours(s, flat=True, **({"capturable": True} if s.device == "cuda" else {}))
    return mfsdp.capture_step(partial(train, call, optimizer), s.model, optimizer), None


def graphs(s: Setting) -> Contender:
    """CUDA graphs of the compute between collectives."""
    stitched = s.row.lowering != "eager"
    row = replace(s.row, options={**s.row.options, **({"cuda_graph": "programs"} if stitched else {})})
    return ours(replace(s, row=row), flat=True)


def ours(s: Setting, flat: bool, **more: Any) -> Contender:
    import mfsdp

    mfsdp.fully_shard(s.model, **_sharding(s.row))
    optimizer = s.adamw(s.model, **more)
    options = {"lowering": s.row.lowering, **s.row.options}
    net = torch.compile(s.model, backend="mfsdp", options=options)
    return s.whole(net), mfsdp.fully_shard_optimizer(optimizer) if flat else optimizer


def _sharding(row: Row) -> dict[str, Any]:
    import mfsdp

    return {"units": [f"{MODELS[row.model].blocks}.*"], "mp_policy": mfsdp.MixedPrecisionPolicy(compute_dtype=BF16)}


CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "plain": plain,
    "fsdp2-layers": lambda s: fsdp2(s, whole=False),
    "mfsdp": lambda s: ours(s, flat=False),
    "mfsdp-optimizer": lambda s: ours(s, flat=True),
    "mfsdp-captured": captured,
    "mfsdp-graphs": graphs,
    "megatron-v1": megatron_v1,
    "megatron-v2": megatron_v2,
    "fsdp2-whole": lambda s: fsdp2(s, whole=True),
    "fsdp2-reduce-overhead": lambda s: fsdp2(s, whole=True, mode="reduce-overhead" if s.device == "cuda" else None),
}


# What is measured


def train(call: Callable[[], torch.Tensor], optimizer: Any) -> torch.Tensor:
    loss = call()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measured(s: Setting) -> dict[str, Any]:
    sync = torch.cuda.synchronize if s.device == "cuda" else lambda: None
    flop, parameters = operations(s.model, s.row.batch, s.row.seq), sum(p.numel() for p in s.model.parameters())
    call, optimizer = CONTENDERS[s.row.contender](s)

    step = call if optimizer is None else partial(train, call, optimizer)
    sync()
    begun = time.perf_counter()
    losses = [float(step())]
    sync()
    first = time.perf_counter() - begun
    for _ in range(s.row.warmup):
        step()
    sync()
    if s.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(s.row.steps):
        begun = time.perf_counter()
        loss = step()
        host.append(1e3 * (time.perf_counter() - begun))
        sync()
        times.append(1e3 * (time.perf_counter() - begun))
    losses.append(float(loss))
    breaks = [reason.partition("\n")[0] for reason in torch._dynamo.utils.counters["graph_break"]]
    found = {
        "ms": statistics.median(times), "all_ms": times, "host_ms": statistics.median(host), "first_s": first,
        "losses": losses, "flop": flop, "parameters": parameters, "tokens": s.row.batch * s.row.seq, "breaks": breaks,
    }  # fmt: skip
    if s.device == "cuda":
        found["peak"], found["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    if s.row.kernels and s.device == "cuda":
        found["kernels"] = kernels(step, s.row.kernels)
    return found


def kernels(step: Callable[[], Any], count: int) -> list[tuple[float, int, str]]:
    """Milliseconds, calls and name of a step's kernels, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    took, calls = Counter[str](), Counter[str]()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took[event.name] += event.time_range.elapsed_us() / 1e3
            calls[event.name] += 1
    return [(ms, calls[name], name) for name, ms in took.most_common(count)]


def explained(row: Row) -> dict[str, Any]:
    """What `mfsdp.explain` tells, by contender."""
    import mfsdp
    from mfsdp.config.hardware import hardware
    from mfsdp.cost_model.machine import this_machine

    machine = hardware(row.hardware or this_machine() or mfsdp.measure())
    model = build(row, "meta")
    ids = torch.zeros(row.batch, row.seq, dtype=torch.long, device="meta")
    found = {}
    for name, stepping in (("mfsdp", "whole"), ("mfsdp-optimizer", "flat")):
        report = mfsdp.explain(
            model, kwargs={"input_ids": ids, "labels": ids}, world=row.world, hardware=machine, suggest=False,
            optimizer="fused_adamw" if machine.cuda else "adamw", stepping=stepping,
            options={"lowering": row.lowering, **row.options}, **_sharding(row),
        )  # fmt: skip
        found[name] = {"ms": 1e3 * report.step, "peak": report.peak}
    return {"explained": found}


def join(row: Row, device: str) -> None:
    """The process group; a device of one's own where there are as many."""
    rank = int(os.environ.get("RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if row.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=row.world)
    else:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=row.world)


def main() -> None:
    row = Row(**json.loads(sys.argv[1]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    if row.contender == "explain":
        found = explained(row)
    else:
        join(row, device)
        model = build(row, device)
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        ids = torch.randint(vocabulary, (row.batch, row.seq), generator=torch.Generator().manual_seed(1))
        found = measured(Setting(row, model, ids.to(device), device))
    if os.environ.get("RANK", "0") == "0":
        Path(row.result).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # no group is taken down: that may wait for others


if __name__ == "__main__":
    main()
