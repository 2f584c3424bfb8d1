"""Models and trainers that people bring, with compute in bf16 on two ranks: one graph each, and the unsharded numbers.

`make matrix` runs these on every version of torch (marker ``clients``): Dynamo differs most in what clients hand it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import mfsdp
from tests.helpers.models import llama, mixtral, peft
from tests.helpers.parity import averaged, error, whole
from tests.helpers.trainers import environment, fine_tuner, logged, trainer

pytestmark = [pytest.mark.clients, pytest.mark.dist, pytest.mark.slow]

BF16 = torch.bfloat16


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=67, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False, attn_implementation="sdpa",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers has none for it, and logs that in forward: a graph break
    return model


MODELS = {
    "llama": (llama, "LlamaDecoderLayer"),
    "qwen3": (qwen3, "Qwen3DecoderLayer"),
    "gpt2": (gpt2, "GPT2Block"),
    "mixtral": (mixtral, "MixtralDecoderLayer"),
    "peft": (peft, "LlamaDecoderLayer"),
}


def graphs() -> dict[str, Any]:
    """How many Dynamo has made, and why it has broken any."""
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": list(counters["graph_break"])}


def trained(name: str, compiled: bool) -> dict[str, Any]:
    """Three SGD steps in bf16 beside the unsharded model, whose parameters are cast by hand: main weights in fp32.

    Args:
        compiled: whether the unsharded model runs as a graph of torch's own.
    """
    torch._dynamo.reset()
    counters.clear()
    build, layer = MODELS[name]
    torch.manual_seed(0)
    reference = build()
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=[layer], mp_policy=mfsdp.MixedPrecisionPolicy(compute_dtype=BF16))
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    main = dict(reference.named_parameters())

    def refer(parameters: dict[str, torch.Tensor], **inputs: Any) -> Any:
        return torch.func.functional_call(reference, parameters, kwargs=inputs)

    if compiled:
        refer = torch.compile(refer, backend="aot_eager")
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (model.parameters(), main.values())]
    out: dict[str, Any] = {"loss": 0.0, "grad": 0.0, "weight": 0.0}
    counted = {}
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(67, (2, 9))
        loss = run(ids, labels=ids, use_cache=False).loss
        loss.backward()
        counted = counted or graphs()
        narrow = {n: p.to(BF16) for n, p in main.items()}
        want = refer(narrow, input_ids=ids, labels=ids, use_cache=False).loss
        want.backward()
        averaged(reference)
        out["loss"] = max(out["loss"], error(loss.detach(), want.detach()))
        largest = max(p.grad.abs().max().item() for p in main.values() if p.grad is not None)
        for n, p in model.named_parameters():
            assert (p.grad is None) == (main[n].grad is None), n
            if p.grad is not None:
                out["grad"] = max(out["grad"], error(whole(p.grad), main[n].grad, 1e-2 * largest))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for n, p in model.named_parameters():
        out["weight"] = max(out["weight"], error(whole(p.detach()), main[n].detach()))
    return {**out, **counted}


@pytest.mark.parametrize("name", MODELS)
def test_models_in_bf16_are_one_graph_and_the_unsharded_numbers(ranks, name):
    """Eagerly and as a graph the model alone rounds to bf16 in different places: one of the two is ours."""
    largest = []
    for compiled in (False, True):
        for seen in ranks.run(trained, name, compiled, timeout=240):
            assert seen["graphs"] == 1 and seen["breaks"] == [], seen
            largest.append(max(seen["loss"], seen["grad"], seen["weight"]))
        if max(largest[-2:]) < 1e-5:
            return
    raise AssertionError(largest)


def by_trainer(folder: str, adapters: bool) -> dict[str, Any]:
    """transformers' Trainer in bf16, under ours and under DDP, whose autocast casts other values than FSDP does."""
    import mfsdp.integrations.accelerate

    torch.manual_seed(0)
    model = peft() if adapters else llama(1)
    again = copy.deepcopy(model)
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    with environment():
        ddp = trainer(folder + "/ddp", again, bf16=True, save_strategy="no")
        ddp.train()
    counters.clear()
    with environment(MFSDP_OPTIONS='{"lowering": "eager"}'):
        ours = trainer(folder + "/ours", model, bf16=True, save_strategy="no", **fsdp)
        ours.train()
    assert isinstance(model, mfsdp.FSDPModule)
    return {**graphs(), "ours": logged(ours, "loss", "grad_norm"), "ddp": logged(ddp, "loss", "grad_norm")}


@pytest.mark.parametrize("adapters", [False, True])
def test_trainer_in_bf16_is_one_graph_and_trains_as_ddp_does(ranks, adapters, tmp_path):
    for seen in ranks.run(by_trainer, str(tmp_path), adapters, timeout=240):
        assert seen["graphs"] == 1 and seen["breaks"] == [], seen
        assert len(seen["ours"]) == 6 and seen["ours"] == pytest.approx(seen["ddp"], rel=0.03), seen


def fine_tuned(folder: str) -> dict[str, Any]:
    """TRL's SFTTrainer in fp32, under ours and under DDP: the loss by its own fused head, over tokens of all ranks."""
    import mfsdp.integrations.accelerate

    torch.manual_seed(0)
    model = llama(1)
    again = copy.deepcopy(model)
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    with environment():
        ddp = fine_tuner(folder + "/ddp", again)
        ddp.train()
    counters.clear()
    with environment(MFSDP_OPTIONS='{"lowering": "eager"}'):
        ours = fine_tuner(folder + "/ours", model, **fsdp)
        ours.train()
    assert isinstance(model, mfsdp.FSDPModule)
    far = max(error(whole(p.detach()), q.detach()) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    return {**graphs(), "ours": logged(ours, *names), "ddp": logged(ddp, *names), "far": far}


def test_trl_fine_tunes_as_ddp_does(ranks, tmp_path):
    """Bitwise on torch 2.13. TRL 1.16 multiplies into a strided ``out=``: there and nowhere else the graph breaks."""
    pytest.importorskip("trl", exc_type=ImportError)
    for seen in ranks.run(fine_tuned, str(tmp_path), timeout=240):
        assert len(seen["ours"]) == 15 and seen["ours"] == pytest.approx(seen["ddp"], rel=1e-5), seen
        assert seen["far"] < 1e-5 and len(seen["breaks"]) <= 1, seen


SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
HEADS = {**SIZES, "head_dim": 8}
MIXTURE = {
    **HEADS, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "Bloom": {**SIZES, "n_layer": 2, "n_head": 4},
    "Cohere2": {**HEADS, **SLIDING},
    "DeepseekV3": {**MIXTURE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "Falcon": {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
    "GPTNeoX": SIZES,
    "Gemma2": {**HEADS, "query_pre_attn_scalar": 8},
    "Gemma3Text": {**HEADS, **SLIDING, "query_pre_attn_scalar": 8},
    "Glm4": HEADS,
    "GptOss": {**MIXTURE, **SLIDING},
    "Granite": SIZES,
    "Llama4Text": {**MIXTURE, "intermediate_size_mlp": 48, "attention_chunk_size": 32},
    "Mamba2": {**HEADS, "num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "Mistral": {**HEADS, "sliding_window": 4},
    "ModernBert": {**SIZES, "global_attn_every_n_layers": 2, "local_attention": 8},
    "OPT": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Olmo2": SIZES,
    "Phi3": SIZES,
    "Qwen2": SIZES,
    "Qwen3Moe": MIXTURE,
    "SmolLM3": SIZES,
    "Starcoder2": {**SIZES, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}


@pytest.mark.parametrize("frozen", [False, True], ids=["all train", "norms train"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_are_one_graph_and_the_unsharded_bits(family, frozen):
    """On one rank, with layers computed again and a padded row. Frozen models also have reentrant checkpoints."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    kind = "AutoModelForMaskedLM" if family.endswith("Bert") else "AutoModelForCausalLM"
    torch.manual_seed(0)
    reference = getattr(transformers, kind).from_config(config, dtype=torch.float32).train()
    if frozen:
        for p in reference.parameters():
            p.requires_grad_(p.dim() == 1)
    model = copy.deepcopy(reference)
    for each in (model, reference):
        each.gradient_checkpointing_enable({"use_reentrant": frozen})
    mfsdp.fully_shard(model, units="auto")
    ids, mask = torch.randint(3, 67, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    labels = ids.where(mask.bool(), -100)
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    losses = [each(input_ids=ids, attention_mask=mask, labels=labels).loss for each in (run, reference)]
    for loss in losses:
        loss.backward()
    assert graphs() == {"graphs": 1, "breaks": []} and torch.equal(*losses)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(whole(p.grad), q.grad), name
