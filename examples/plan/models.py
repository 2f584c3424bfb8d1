"""What large models take and gain: ``python examples/plan/models.py``, plans of Llama-3 and of DeepSeek-V3's shape.

No process group, no GPU, no memory for the models: shapes alone, from configurations (extra ``test``: transformers).
Prints each plan, its price list and what other budgets would give, and draws the latter (extra ``demo``: matplotlib).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mfsdp

LLAMA: dict[str, dict[str, int]] = {
    "Llama-3-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama-3-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "Llama-3-405B": {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    },
}  # fmt: skip
"""Meta's configurations (arXiv:2407.21783, table 3)."""

CASES: dict[str, tuple[str, int, int]] = {
    "Llama-3-8B on 8 H100": ("Llama-3-8B", 8, 4096),
    "Llama-3-70B on 64 H100": ("Llama-3-70B", 64, 4096),
    "Llama-3-405B on 1,024 H100": ("Llama-3-405B", 1024, 4096),
    "Llama-3-405B on 16,384 H100": ("Llama-3-405B", 16384, 4096),
}
"""Model, ranks, tokens of a rank's sequence."""


def llama(name: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, use_cache=False, **LLAMA[name])
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[no-any-return]


def planned(case: str, memory: str, curve: bool) -> mfsdp.Plan:
    name, world, length = CASES[case]
    ids = torch.zeros(1, length, dtype=torch.long)
    begun = time.perf_counter()
    plan = mfsdp.plan(
        llama(name), (), {"input_ids": ids, "labels": ids}, memory=memory, world=world, units="auto", curve=curve
    )
    print(f"{case}: planned in {time.perf_counter() - begun:.1f} s, tracing included\n{plan}\n", flush=True)
    return plan


def deepseek(memory: str, curve: bool) -> mfsdp.Plan:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from explain import deepseek_v3

    with mfsdp.fake_ranks(2048):
        model = deepseek_v3.sharded(61, 2048, 64, again=False)
        ids = torch.zeros(1, 4096, dtype=torch.long)
        begun = time.perf_counter()
        plan = mfsdp.plan(model, (ids, ids), memory=memory, curve=curve)
    print(f"DeepSeek-V3's shape: planned in {time.perf_counter() - begun:.1f} s\n{plan}\n", flush=True)
    return plan


def draw(plans: dict[str, mfsdp.Plan], path: str) -> None:
    """Steps over budgets."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(plans), figsize=(4.2 * len(plans), 3.2), layout="constrained", squeeze=False)
    for axis, (case, plan) in zip(axes[0], plans.items(), strict=True):
        points = sorted({(p.peak, p.step) for p in plan.curve})
        axis.step([x / 2**30 for x, _ in points], [1e3 * y for _, y in points], where="post", marker="o")
        axis.axvline(plan.memory / 2**30, color="0.5", linestyle="--")
        axis.set(title=case, xlabel="GiB per rank", ylabel="ms per step")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES, "DeepSeek-V3"], help="(default: all)")
    parser.add_argument("--memory", default="70GB", help="of a rank (default: 70GB)")
    parser.add_argument("--curve", action="store_true", help="also what other budgets would give")
    parser.add_argument("--plot", help="draw them")
    args: Any = parser.parse_args()
    plans = {}
    for case in args.case or [*CASES, "DeepSeek-V3"]:
        found = deepseek(args.memory, args.curve) if case == "DeepSeek-V3" else planned(case, args.memory, args.curve)
        plans[case] = found
    if args.plot:
        draw(plans, args.plot)


if __name__ == "__main__":
    main()
