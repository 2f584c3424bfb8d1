"""QLoRA as people write it: BitsAndBytesConfig, peft and Trainer, on two ranks and under DDP."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp
from tests.helpers.parity import whole
from tests.helpers.trainers import environment, logged, trainer

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

pytestmark = pytest.mark.slow

FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Llama in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    folder = str(tmp_path_factory.mktemp("base"))
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantized(base: str, eight: bool = False, **lora: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": torch.float32}
    how = BitsAndBytesConfig(
        load_in_8bit=eight, load_in_4bit=not eight, **{f"bnb_4bit_{name}": value for name, value in four.items()}
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, device_map={"": "cpu"}, dtype=torch.float32
    )
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **lora))


def adapted(base: str, folder: str, eight: bool) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    import mfsdp.integrations.accelerate

    model, again = quantized(base, eight), quantized(base, eight)
    before = sum(counters["graph_break"].values())
    with environment():
        ddp = trainer(folder + "/ddp", again, save_strategy="no")
        ddp.train()
    with environment(MFSDP_OPTIONS=json.dumps({"lowering": "eager"})):
        ours = trainer(folder + "/ours", model, **FSDP)
        ours.train()
        ours.save_model(folder + "/adapters")
    trained = {n: p for n, p in again.named_parameters() if p.requires_grad}
    mine = dict(model.named_parameters())
    far = max((whole(mine[n].detach()) - p).abs().max().item() for n, p in trained.items())
    state = {k: v for k, v in model.state_dict().items() if "lora" not in k}
    theirs = {k: v for k, v in again.state_dict().items() if "lora" not in k}
    same = [
        torch.equal(whole(state[k]) if hasattr(state[k], "full_tensor") else state[k], v) for k, v in theirs.items()
    ]
    return {
        "breaks": sum(counters["graph_break"].values()) - before,
        "ours": logged(ours, "loss", "grad_norm"), "ddp": logged(ddp, "loss", "grad_norm"), "far": far,
        "count": len(trained), "base": list(state) == list(theirs) and all(same),
        "units": len([m for m in model.modules() if isinstance(m, mfsdp.FSDPModule)]),
        "u8": len([p for p in model.parameters() if p.dtype is torch.uint8]),
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("eight", [False, True])
def test_trainer_trains_adapters_of_a_quantized_model(ranks, base, eight, tmp_path):
    from peft import PeftModel

    for seen in ranks.run(adapted, base, str(tmp_path), eight, timeout=300):
        assert len(seen["ours"]) == 6 and seen["ours"] == pytest.approx(seen["ddp"], rel=1e-4), seen
        assert not seen["breaks"] and seen["far"] < 1e-3 and seen["base"] and seen["units"] == 3, seen
        assert seen["count"] == 28 and seen["u8"] == 14 * (2 if eight else 6)
    fresh = quantized(base, eight).unload()
    PeftModel.from_pretrained(fresh, tmp_path / "adapters")


def test_what_peft_does_to_weights(base):
    model = mfsdp.fully_shard(quantized(base), units="auto")
    with pytest.raises(NotImplementedError, match="load them with an unsharded model, and merge there"):
        model.merge_and_unload()
    eight = mfsdp.fully_shard(quantized(base, eight=True), units="auto")
    with pytest.raises(NotImplementedError, match="load them with an unsharded model, and merge there"):
        eight.merge_adapter()
    with pytest.raises(NotImplementedError, match="DoraLinearVariant.*Use plain LoRA"):
        mfsdp.fully_shard(quantized(base, use_dora=True), units="auto")
