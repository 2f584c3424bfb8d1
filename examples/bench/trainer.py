"""transformers' Trainer behind a slow link, on mfsdp and on FSDP2: ``python examples/bench/trainer.py``.

A Llama from a small config, read by ``from_pretrained(distributed_config=DistributedConfig(fsdp_size=2))`` with and
without ``import mfsdp.integrations.transformers``, and trained by the same Trainer. Every contender is a program of its
own; they take turns. FSDP2 is told to gather asynchronously and ahead, which it does not do by itself on a CPU. Needs
root and Linux (slowlink.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

CONTENDERS = ("mfsdp", "FSDP2", "FSDP2, `torch_compile=True`")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="2gbit,1gbit", help="of each rank's link")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12, help="of each program, the first four not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contender", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def save(args: argparse.Namespace, folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=args.width, intermediate_size=11 * args.width // 4, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64, num_key_value_heads=args.width // 64, attn_implementation="sdpa",
        max_position_embeddings=args.length, use_cache=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


class Text(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int, length: int):
        self.rows = torch.randint(4096, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Steps(TrainerCallback):
    """When steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def ahead(model: Any) -> None:
    """FSDP2's layers gather asynchronously, one ahead."""
    units = [model.model.embed_tokens, *model.model.layers]
    for unit in (model, *units):
        unit._set_unshard_async_op(True)
    for here, there in pairwise(units):
        here.set_modules_to_forward_prefetch([there])
    for here, there in pairwise(units[::-1]):
        here.set_modules_to_backward_prefetch([there])


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = args.contender == "mfsdp"
    if ours:
        import mfsdp.integrations.transformers  # noqa: F401
    model = LlamaForCausalLM.from_pretrained(
        args.folder / "model", distributed_config=DistributedConfig(fsdp_size=2), dtype=torch.float32
    )
    if not ours:
        ahead(model)
    steps = Steps()
    told = TrainingArguments(
        str(args.folder / "out"), per_device_train_batch_size=2, max_steps=args.steps, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_steps=1, logging_nan_inf_filter=False, learning_rate=1e-3,
        torch_compile="torch_compile" in args.contender,
    )  # fmt: skip
    trainer = Trainer(model, told, train_dataset=Text(4 * args.steps, args.length), callbacks=[steps])
    trainer.train()
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"times": [b - a for a, b in pairwise(steps.ends[3:])], "losses": losses}
        (args.folder / "result.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def main() -> None:
    args = arguments()
    if args.contender is not None:
        worker(args)
        return
    print(f"Llama, {args.layers} layers of width {args.width}, 2 x {args.length} tokens a rank, 2 ranks, AdamW, fp32")
    slow = Path(__file__).with_name("slowlink.sh")
    env = {"OMP_NUM_THREADS": "1", "PIN": "1", "ACCELERATE_USE_CPU": "true", **os.environ}
    for rate in args.rates.split(","):
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        losses: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as there:
            folder = Path(there)
            save(args, folder / "model")
            for _ in range(args.rounds):
                for name in CONTENDERS:
                    more = ["--contender", name, "--folder", there]
                    command = [sys.executable, __file__, *sys.argv[1:], *more]
                    subprocess.run(["bash", slow, "2", rate, "--", *command], check=True, env=env)
                    found = json.loads((folder / "result.json").read_text())
                    times[name] += found["times"]
                    losses[name] = found["losses"]
        base = statistics.median(times["mfsdp"])
        print(f"\n## Link {rate}\n\n| | ms | best | times mfsdp's | last loss |\n|---|---|---|---|---|")
        for name, found in times.items():
            median = statistics.median(found)
            best, last = 1e3 * min(found), losses[name][-1]
            print(f"| {name} | {1e3 * median:.0f} | {best:.0f} | {median / base:.2f} | {last:.5f} |", flush=True)


if __name__ == "__main__":
    main()
