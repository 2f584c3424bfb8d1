"""QLoRA of a small Llama: what a rank holds, and the loss. ``torchrun --nproc-per-node=2 examples/bench/qlora.py``.

FSDP2 is given the quantized weights in ``ignored_params``: it has no shards of them (accelerate#3987). DDP holds
everything on each rank. Same weights, adapters and batches.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import mfsdp

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "demo"))
from bench import peak_of
from data import Batches, corpus


def built(width: int, layers: int) -> nn.Module:
    """A Llama over bytes in fp32, its blocks' linear layers in nested NF4, with LoRA of rank 8 beside them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=256, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            quantized = Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            quantized.load_state_dict(module.state_dict())
            model.model.layers.set_submodule(name, quantized.to("cpu"))
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", exclude_modules="lm_head"))


def ours(model: Any) -> Any:
    mfsdp.fully_shard(model, units="auto")
    return torch.compile(model, backend="mfsdp", options={"lowering": "eager"})


def fsdp2(model: Any) -> Any:
    whole = {m.weight for m in model.modules() if isinstance(m, Linear4bit) and not hasattr(m, "base_layer")}
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, ignored_params=whole)
    return fully_shard(model, ignored_params=whole)


WAYS: dict[str, Callable[[Any], Any]] = {"mfsdp": ours, "FSDP2": fsdp2, "DDP": DistributedDataParallel}


def held() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    tensors: list[Any] = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors = [t for t in tensors if not t.is_meta and not isinstance(t, FakeTensor)]
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


def trained(way: Callable[[Any], Any], args: argparse.Namespace, text: torch.Tensor) -> tuple[int, int, list[float]]:
    """Bytes held between steps, those that a step allocates on top, and the losses, means over ranks."""
    before = held()
    model = built(args.width, args.layers)
    run = way(model)
    optimizer = torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], lr=1e-3)
    feed, losses = Batches(text, args.batch, args.length, seed=dist.get_rank()), []

    def step() -> None:
        inputs, _ = feed.next()
        loss = run(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())

    for _ in range(args.steps - 1):
        step()
    kept = held() - before
    return kept, peak_of(step), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text, _ = corpus()
    curves: dict[str, list[float]] = {}
    for name, way in WAYS.items():
        kept, peak, curves[name] = trained(way, args, text)
        apart = max(abs(a - b) for a, b in zip(curves[name], curves["mfsdp"], strict=True))
        if dist.get_rank() == 0:
            curve = " ".join(f"{loss:.4f}" for loss in [*curves[name][:: max(1, args.steps // 6)], curves[name][-1]])
            memory = f"held {kept / 1e6:6.2f} MB, {peak / 1e6:6.2f} more in a step"
            print(f"{name:6s} {memory}; losses {curve}, at most {apart:.1e} from mfsdp's", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
