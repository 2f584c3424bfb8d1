"""QLoRA as people write it: BitsAndBytesConfig or TorchAoConfig, peft and Trainer, on two ranks and under DDP."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp
from tests.helpers.parity import whole
from tests.helpers.quantized import config, parts
from tests.helpers.trainers import environment, logged, trainer

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("torchao")

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


def loaded(base: str, kind: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    if kind == "torchao":
        how: Any = TorchAoConfig(config("torchao int8"))
    else:
        four = {"quant_type": "nf4", "use_double_quant": True, "compute_dtype": torch.float32}
        how = BitsAndBytesConfig(
            load_in_8bit=kind == "8 bits", load_in_4bit=kind == "4 bits",
            **{f"bnb_4bit_{name}": value for name, value in four.items()},
        )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, device_map={"": "cpu"}, dtype=torch.float32
    )


def quantized(base: str, kind: str = "4 bits", **lora: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = loaded(base, kind)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **lora))


def adapted(base: str, folder: str, kind: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    import mfsdp.integrations.accelerate

    model, again = quantized(base, kind), quantized(base, kind)
    if kind == "torchao":  # DDP cannot broadcast its tensors, which are alike here
        again._ddp_params_and_buffers_to_ignore = [n for n, p in again.named_parameters() if hasattr(p, "qdata")]
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
    theirs = {k: v for k, v in parts(again.state_dict()).items() if "lora" not in k}
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
@pytest.mark.parametrize(
    "kind", ["4 bits", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("8 bits", "torchao"))]
)
def test_trainer_trains_adapters_of_a_quantized_model(ranks, base, kind, tmp_path):
    from peft import PeftModel

    for seen in ranks.run(adapted, base, str(tmp_path), kind, timeout=300):
        assert len(seen["ours"]) == 6 and seen["ours"] == pytest.approx(seen["ddp"], rel=1e-4), seen
        assert not seen["breaks"] and seen["far"] < 1e-3 and seen["base"] and seen["units"] == 3, seen
        assert seen["count"] == 28 and seen["u8"] == 14 * {"4 bits": 6, "8 bits": 2, "torchao": 3}[kind]
    fresh = quantized(base, kind).unload()
    PeftModel.from_pretrained(fresh, tmp_path / "adapters")


def test_what_peft_does_to_weights(base):
    model = mfsdp.fully_shard(quantized(base), units="auto")
    with pytest.raises(NotImplementedError, match="load them with an unsharded model, and merge there"):
        model.merge_and_unload()
    eight = mfsdp.fully_shard(quantized(base, "8 bits"), units="auto")
    with pytest.raises(NotImplementedError, match="load them with an unsharded model, and merge there"):
        eight.merge_adapter()
    ao = mfsdp.fully_shard(quantized(base, "torchao"), units="auto")
    with pytest.raises(NotImplementedError, match="do not support dequantization") as of_peft:
        ao.merge_adapter()
    assert "load them with an unsharded model, and merge there" in str(of_peft.value.__cause__)
    for kind in ("4 bits", "torchao"):
        with pytest.raises(NotImplementedError, match="DoraLinearVariant.*Use plain LoRA"):
            mfsdp.fully_shard(quantized(base, kind, use_dora=True), units="auto")


def test_a_folder_that_transformers_reads(base, tmp_path):
    """Weights of torchao come back from what a sharded model has saved, and into one from what transformers saves."""
    from transformers import AutoModelForCausalLM

    model, x = loaded(base, "torchao"), torch.arange(8)[None]
    want = model(x).logits
    model.save_pretrained(tmp_path / "theirs")
    sharded = mfsdp.fully_shard(model, units="auto")
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    mfsdp.load_safetensors(sharded, tmp_path / "theirs")
    assert torch.equal(sharded(x).logits, want)
    mfsdp.save_safetensors(sharded, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert torch.equal(again(x).logits, want)


# Merged on the way out


def unsharded_merge(base: str, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What peft gives of an unsharded model with weights dequantized to a dtype, and the adapters of ``model``."""
    from bitsandbytes.functional import dequantize_4bit
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    inner = model.get_base_model()
    for path, module in plain.named_modules():
        layer = getattr(inner.get_submodule(path), "base_layer", None)
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is not None:
            module.weight.data = dequantize_4bit(layer.weight.data, state).to(dtype)
        elif hasattr(getattr(layer, "weight", None), "qdata"):  # torchao
            module.weight.data = layer.weight.dequantize().to(dtype)
        elif layer is not None:  # 8 bits
            module.weight.data = (layer.weight.data.float() * (layer.weight.SCB.view(-1, 1) * (1 / 127))).to(dtype)
    again = get_peft_model(plain, model.peft_config["default"])
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for n, p in again.named_parameters():
        if p.requires_grad:
            p.data = trained[n].data.clone()
    return {n: t.to(dtype) for n, t in again.merge_and_unload().state_dict().items()}  # an embedding that trains: fp32


def streams_merged(base: str, kind: str, dtype: torch.dtype, to: int | None) -> list[str]:
    from mfsdp.integrations.peft import merged

    model = quantized(base, kind, modules_to_save=["embed_tokens"])
    want = unsharded_merge(base, model, dtype)
    faults = []
    for name, each in (("unsharded", model), ("sharded", mfsdp.fully_shard(model, units="auto"))):
        stream = mfsdp.stream_weights(each, to=to, convert=merged(each, dtype))
        got = dict(stream)
        said = {m.name: (m.dtype, m.shape) for m in stream.metadata()}
        faults += [] if said.keys() == want.keys() else [f"{name}: {sorted(said.keys() ^ want.keys())}"]
        faults += [f"{name}: {n}" for n in want if said[n] != (dtype, tuple(want[n].shape))]
        if stream.consumes:
            faults += [f"{name}: {n} differs" for n, t in want.items() if not torch.equal(got[n], t)]
        elif got:
            faults.append(f"{name}: {list(got)} on another rank")
    return faults


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "torchao"])
def test_a_stream_merges_adapters_as_peft_does(two_ranks, base, kind):
    for dtype, to in ((torch.bfloat16, 1), (torch.float32, None)):
        assert two_ranks.run(streams_merged, base, kind, dtype, to) == [[], []]


def test_what_is_not_merged(base):
    from peft import IA3Config, LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from mfsdp.integrations.peft import merged

    def plain() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(base)

    def lora(*targets: str, **more: Any) -> nn.Module:
        return get_peft_model(plain(), LoraConfig(target_modules=list(targets), **more))

    for model, words in (
        (get_peft_model(plain(), IA3Config(task_type="CAUSAL_LM")), r"the model has an adapter \(IA3Model\)"),
        (lora("q_proj", use_dora=True), r"q_proj has an adapter \(DoraLinearVariant\)"),
        (lora("embed_tokens"), r"embed_tokens has an adapter \(Embedding\)"),
        (lora("q_proj", trainable_token_indices=[1]), r"embed_tokens has an adapter \(TrainableTokensWrapper\)"),
    ):
        with pytest.raises(NotImplementedError, match=words + ".*load them with an unsharded model"):
            merged(model, torch.bfloat16)
    model = lora("q_proj")
    with pytest.raises(ValueError, match="a part of .*q_proj, without '(weight|lora_A.*)'.*choose units"):
        merged(mfsdp.fully_shard(model, units=["**.q_proj.base_layer"]), torch.bfloat16)
    model = lora("q_proj")
    model.merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter"):
        merged(model, torch.bfloat16)
