"""transformers' Trainer on ranks of tests, as launchers start it, and what it has saved as others read it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.ranks import here


@contextmanager
def environment(**more: str) -> Iterator[None]:
    """What launchers say to processes; afterwards accelerate has forgotten it."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "OMP_NUM_THREADS": 1,
    }
    if here().type == "cpu":
        names["ACCELERATE_USE_CPU"] = "true"
    else:
        names["LOCAL_RANK"] = here().index
    os.environ.update({**{k: str(v) for k, v in names.items()}, **more})
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
if sys.argv[3:]:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, sys.argv[3])
with torch.no_grad():
    torch.save(model(torch.arange(12)[None]).logits, sys.argv[2])
"""


def fresh_logits(folder: str | Path, *more: str) -> torch.Tensor:
    """Of what ``from_pretrained`` reads there, in a process that knows nothing of us."""
    out = Path(folder, "logits.pt")
    subprocess.run([sys.executable, "-c", LOGITS, str(folder), str(out), *more], check=True, timeout=120)
    return torch.load(out)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Tokens that are their own labels."""

    def __init__(self, count: int):
        self.rows = torch.randint(67, (count, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trainer(folder: str, model: nn.Module, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {
        "per_device_train_batch_size": 2, "max_steps": 3, "gradient_accumulation_steps": 2, "save_steps": 2,
        "logging_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 1.0, "report_to": [],
        "use_cpu": here().type == "cpu", "disable_tqdm": True, "per_device_eval_batch_size": 2,
        "logging_nan_inf_filter": False,
    }  # fmt: skip
    args = TrainingArguments(folder, **{**given, **arguments})
    return Trainer(model, args, train_dataset=Rows(24), eval_dataset=Rows(4))


def fine_tuner(folder: str, model: nn.Module, **arguments: Any) -> Any:
    """TRL's SFTTrainer on sentences of different lengths, which it tokenizes and pads to 8 tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 67)}}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    texts = [
        " ".join(f"w{2 + x % 65}" for x in row["input_ids"][: 3 + i % 5].tolist()) for i, row in enumerate(Rows(24))
    ]
    given = {
        "per_device_train_batch_size": 2, "max_steps": 3, "save_strategy": "no",
        "logging_steps": 1, "learning_rate": 1e-2, "report_to": [], "use_cpu": here().type == "cpu", "bf16": False,
        "disable_tqdm": True, "gradient_checkpointing": False, "pad_to_multiple_of": 8,
    }  # fmt: skip
    args = SFTConfig(folder, **{**given, **arguments})
    return SFTTrainer(model, args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)


def logged(trainer: Any, *names: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
