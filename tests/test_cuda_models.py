"""What a GPU runs of Llama-3.2-1B, Qwen3-0.6B and GPT-2, of fewer layers, without one: code that Inductor writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp
from mfsdp import pipeline
from mfsdp.ir.program import Phase
from tests.helpers.cuda_code import Written, plain, written
from tests.helpers.generated_code import uncommented

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="what stands for a GPU here would hide a real one"),
]

LAYERS, BATCH, LENGTH = 4, 2, 1536


def build(name: str, **more: Any) -> nn.Module:
    import transformers

    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    config = getattr(transformers, f"{name}Config")(use_cache=False, tie_word_embeddings=True, **more)
    with torch.device("meta"):
        return getattr(transformers, kind)(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (
        lambda: build(
            "Llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=LAYERS, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        ),
        "LlamaDecoderLayer",
    ),
    "qwen3": (
        lambda: build(
            "Qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=LAYERS, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=8192,
        ),
        "Qwen3DecoderLayer",
    ),
    "gpt2": (
        lambda: build("GPT2", n_layer=LAYERS, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "GPT2Block",
    ),
}  # fmt: skip

models = pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen3", "gpt2"))]
)
bf16 = torch.bfloat16
POLICY = mfsdp.MixedPrecisionPolicy(compute_dtype=bf16)


def batch() -> dict[str, Any]:
    ids = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@cache
def programs(name: str, world: int) -> dict[Phase, Written]:
    """As GPUs run them: matrix products may write a wider dtype than they read (``wide``)."""
    model, unit = MODELS[name][0](), MODELS[name][1]
    return written(model, batch(), [unit], POLICY, world=world, passes=pipeline.table(wide=True), split=True)


@cache
def alone(name: str) -> dict[Phase, Written]:
    """The model in bf16 under plain ``torch.compile``."""
    torch._dynamo.reset()
    return plain(MODELS[name][0]().to(bf16), batch())


def lines(program: Written, what: str) -> list[str]:
    return [line for line in uncommented(program.code).splitlines() if re.search(what, line)]


@models
def test_attention_is_causal_and_has_no_mask(name):
    for program in programs(name, 8).values():
        attention = lines(program, r"= torch\.ops\.aten\._scaled_dot_product\w+\.default\(")
        assert len(attention) == LAYERS
        assert all(", 0.0, True, " in line and "attn_mask" not in line for line in attention)
        scores = re.findall(rf"empty_strided\w*\(\([^()]*\b{LENGTH}, {LENGTH}\)", program.code)
        assert not scores, "a mask, or scores"


@models
def test_keys_and_values_are_not_repeated(name):
    assert not lines(programs(name, 8)["forward"], r"triton_\w*expand\w*clone\w*\.run"), "repeat_kv"


@models
def test_products_are_written_where_gradients_go(name):
    """All gradients of matrices but the embedding's: each product of backward that has one writes into a buffer."""
    inside = lines(programs(name, 8)["backward"], r"(torch\.ops\.mfsdp\.mm\.default|Kernels\.mm)\(")
    assert len(inside) == LAYERS * {"llama": 7, "qwen3": 7, "gpt2": 4}[name]


@models
def test_gradient_of_logits_is_in_their_memory(name):
    words = MODELS[name][0]().config.vocab_size
    assert not lines(programs(name, 8)["backward"], rf"empty_strided\w*\(\([^()]*\b{words}\)")


@models
def test_bytes_that_kernels_move(name):
    """Besides products and attention, against the model alone: casts, copies, what fusion misses."""
    mine, theirs = (sum(p.nbytes for p in them.values()) for them in (programs(name, 8), alone(name)))
    print(f"{name}: {mine / 2**20:.0f} MiB, {theirs / 2**20:.0f} MiB under torch.compile: {mine / theirs:.3f}")
    assert mine <= 1.02 * theirs


def test_shards_are_cast_once():
    """At most one cast of a unit in a step, which `refresh` makes, or the optimizer: none in programs."""
    model, unit = MODELS["gpt2"][0](), MODELS["gpt2"][1]
    traced = mfsdp.trace(model, (), batch(), world=1, units=[unit], mp_policy=POLICY, lowering="inductor")
    passes = pipeline.table(wide=True)
    listed = [line for p in list(traced) for line in pipeline.run(p, passes=passes)[-1].listing.splitlines()]
    assert not [line for line in listed if re.search(r" (cast|_to_copy|convert_element_type) u\d+_shard", line)]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("llama", 8),
        *(pytest.param(n, w, marks=pytest.mark.exhaustive) for n, w in (("qwen3", 8), ("gpt2", 8), ("gpt2", 1))),
    ],
)
def test_no_kernel_multiplies_by_one(name, world):
    """Scales of what is packed and accumulated are arguments, of which kernels leave out one (`test_zero_grad.py`).
    Rotary embeddings scale their own sines.
    """
    code = programs(name, world)["backward"].code
    assert not by_one(code)
    assert name != "llama" or by_one(code.replace(" 2.0, tl.float32)", " 1.0, tl.float32)")), "finds none"


def by_one(code: str) -> list[str]:
    """Returns the lines of Triton kernels that multiply by one what is no sine or cosine, nor a reciprocal, as which
    torch 2.12 and older write SiLU's derivative.
    """
    found = []
    for kernel in code.split("@triton.jit"):
        said = dict(re.findall(r"(\w+) = (.+)", kernel))
        ones = [name for name, value in said.items() if re.match(r"tl\.full\(\[[\d, ]*\], 1(\.0)?,", value)]
        natural = re.compile(rf"tl_math\.(sin|cos)\(|\(({'|'.join(ones)}) / ")
        for line, *factors in re.findall(r"(\w+ = (\w+) \* (\w+))", kernel):
            others = [said.get(f, "") for f in factors if f not in ones]
            if len(others) < 2 and not all(map(natural.match, others)):
                found.append(line)
    return found
