"""Masks of attention that are known while compiling: which ones become ``is_causal=True``, and that numbers stay."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import attention_masks
from mfsdp.ir.program import operator
from tests.helpers.largest import Largest

T = 64
INF = -math.inf


def arange(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def tril(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool).tril()


def masked_in_place(x: torch.Tensor) -> torch.Tensor:
    mask, places = torch.full((T, T), INF), torch.arange(T)
    return mask.masked_fill_(places < (places + 1).view(T, 1), 0)


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    mask = tril(T, T)
    mask[3][1] = False
    return mask


def of_one_batch(x: torch.Tensor) -> torch.Tensor:
    return tril(T, T) & (torch.arange(2)[:, None, None, None] == 0) | torch.eye(T, dtype=torch.bool)


Mask = Callable[[torch.Tensor], torch.Tensor]

CAUSAL: dict[str, Mask] = {
    "compared": lambda x: torch.arange(T) <= torch.arange(T)[:, None],
    "compared the other way": lambda x: ~(torch.arange(T) > torch.arange(T).view(T, 1)),
    "compared from somewhere": lambda x: (torch.arange(T) + 7 < torch.arange(8, T + 8)[:, None])[None, None],
    "tril": lambda x: tril(T, T),
    "triu of -inf": lambda x: torch.triu(torch.full((T, T), INF), diagonal=1),
    "least number": lambda x: torch.triu(torch.full((1, 1, T, T), torch.finfo(x.dtype).min), diagonal=1),
    "where": lambda x: torch.where(torch.arange(T)[:, None] >= torch.arange(T), 0.0, INF).expand(2, 1, T, T),
    "masked_fill": lambda x: torch.zeros(T, T).masked_fill(torch.arange(T)[:, None] < torch.arange(T), INF),
    "by batch and head": lambda x: arange(1, 1, 1, T) <= arange(2, 3, T, 1) % T,
    "window of all": lambda x: tril(T, T) & (torch.arange(T) > torch.arange(T)[:, None] - T),
}
EMPTY: dict[str, Mask] = {
    "ones": lambda x: torch.ones(1, T, dtype=torch.bool),
    "zeros": lambda x: torch.zeros(2, 3, T, T),
    "wide window": lambda x: (torch.arange(T) - torch.arange(T)[:, None]).abs() < T,
}
STAY: dict[str, tuple[Mask, str]] = {
    "window": (lambda x: tril(T, T) & (torch.arange(T) > torch.arange(T)[:, None] - T + 1), "not causal"),
    "a row masked whole": (lambda x: tril(T, T) & (torch.arange(T)[:, None] > 0), "not causal"),
    "nearly": (lambda x: tril(T, T) | (torch.arange(T * T).view(T, T) == 1), "not causal"),
    "of one batch": (of_one_batch, "not causal"),
    "less": (lambda x: torch.where(tril(T, T), 0.0, -1e9), "adds numbers"),
    "positions": (lambda x: -(torch.arange(float(T)) - torch.arange(T)[:, None]).abs(), "adds numbers"),
    "random": (lambda x: torch.rand(T, T) > -1, "random"),
    "in place": (masked_in_place, "written to"),
    "through a view": (written_through_a_view, "written to"),
    "of an input": (lambda x: tril(T, T) & (x[:1, :, :1] < 9).unsqueeze(1), "depends on the input x"),
}


class Attention(nn.Module):
    def __init__(self, mask: Mask, heads: int = 3, positional: bool = False):
        super().__init__()
        self.mask, self.heads, self.positional = mask, heads, positional
        self.q, self.k = nn.Linear(24, 8 * heads), nn.Linear(24, 8 * heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, 8)).transpose(1, 2) for y in (self.q(x), self.k(x), self.k(x)))
        mask = self.mask(x)
        if self.positional:
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Folding:
    """A backend that folds masks and runs the graph as it is."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.nodes: list[fx.Node] = []
        self.calls: list[dict[str, Any]] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        names = [n.name.removeprefix("l_").removesuffix("_") for n in gm.graph.find_nodes(op="placeholder")]
        self.notes += attention_masks.fold_masks(gm, names)
        for body in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
            body.graph.lint()
            self.nodes += body.graph.nodes
            found = body.graph.find_nodes(op="call_function", target=attention_masks.ATTENTION)
            self.calls += [attention_masks._arguments(node) for node in found]
        return gm


def folded(model: nn.Module, **inputs: Any) -> Folding:
    """Compares results and gradients with those of the model as it is, and tells what was folded."""
    torch._dynamo.reset()
    backend, twin = Folding(), copy.deepcopy(model)
    out = []
    for one, run in ((model, model), (twin, torch.compile(twin, backend=backend, fullgraph=True))):
        torch.manual_seed(0)
        result = run(**inputs)
        result = getattr(result, "logits", result)
        result.float().square().mean().backward()
        out.append((result.detach(), [p.grad for p in one.parameters()]))
    (a, mine), (b, theirs) = out
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    return backend


def batch() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, T, 24)


@pytest.mark.parametrize(
    ("name", "positional"), [*((name, False) for name in [*CAUSAL, *EMPTY]), ("tril", True), ("ones", True)]
)
def test_what_is_causal_or_empty_is_left_out(name, positional):
    causal = name in CAUSAL
    backend = folded(Attention({**CAUSAL, **EMPTY}[name], positional=positional), x=batch())
    (call,) = backend.calls
    assert call["attn_mask"] is None and call["is_causal"] is causal
    assert not {n.name for n in backend.nodes} & {"arange", "ones", "full", "tril", "triu", "le"}, "nobody reads it"
    text = "constant causal mask is replaced" if causal else "masks nothing"
    assert len(backend.notes) == 1 and text in backend.notes[0]


@pytest.mark.parametrize("name", STAY)
def test_what_is_neither_stays(name):
    mask, why = STAY[name]
    model = Attention(mask)
    backend = folded(model, x=batch()) if name != "a row masked whole" else told(model, x=batch())
    (call,) = backend.calls
    assert isinstance(call["attn_mask"], fx.Node) and call["is_causal"] is False
    assert len(backend.notes) == 1 and "stays" in backend.notes[0] and why in backend.notes[0]


def told(model: nn.Module, dynamic: bool | None = None, **inputs: Any) -> Folding:
    """What was folded."""
    torch._dynamo.reset()
    backend = Folding()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(**inputs)
    return backend


@pytest.mark.slow
def test_tiles_tell_what_elements_tell():
    """Every border lies somewhere in a tile; lengths are no multiples of tiles."""
    length = 3 * attention_masks.TILE + 17
    borders = [(offset, length) for offset in (-attention_masks.TILE - 1, -1, 0, 1, attention_masks.TILE)]
    for offset, window in [*borders, (0, length - 1), (0, length + 1)]:

        def mask(x: torch.Tensor, offset: int = offset, window: int = window) -> torch.Tensor:
            rows, columns = torch.arange(length)[:, None], torch.arange(length)
            return (columns <= rows + offset) & (columns > rows - window)

        causal = torch.equal(mask(batch()), tril(length, length))
        (call,) = told(Attention(mask, heads=1), x=torch.randn(1, length, 24)).calls
        assert (call["attn_mask"] is None) == causal == (offset == 0 and window >= length)


@pytest.mark.slow
def test_bounds_hold_all_elements():
    """Random comparisons, sums and choices: what bounds say of a tile holds for each element of it."""
    generator = torch.Generator().manual_seed(0)
    length = 2 * attention_masks.TILE + 5

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    def mask_of(x: torch.Tensor, choices: list[int]) -> torch.Tensor:
        rows, columns = torch.arange(length)[:, None], torch.arange(length)
        values = [rows, columns, rows - columns + choices[0], (rows + columns) - 2 * choices[1] + 0 * columns]
        tests = [torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne]
        a = tests[choices[2]](values[choices[3]], values[choices[4]])
        b = tests[choices[5]](values[choices[6]], choices[7])
        both = [a & b, a | ~b, torch.where(a, b, ~b), torch.where(a, 0.0, torch.where(b, INF, 1.0))]
        return both[choices[8]].expand(length, length)

    for _ in range(4):
        choices = [pick(n) for n in (length, length, 6, 4, 4, 6, 4, length, 4)]
        seen: list[Any] = []

        def backend(gm: fx.GraphModule, inputs: Any, seen: list[Any] = seen) -> Any:
            (node,) = gm.graph.find_nodes(op="call_function", target=attention_masks.ATTENTION)
            seen += attention_masks.Values({}).bounds(attention_masks._arguments(node)["attn_mask"])
            return gm

        torch._dynamo.reset()
        model = Attention(lambda x, choices=choices: mask_of(x, choices), heads=1)
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(1, length, 24))
        mask = mask_of(batch(), choices)
        low, high = (
            x.expand(3, 3).repeat_interleave(attention_masks.TILE, 0).repeat_interleave(attention_masks.TILE, 1)
            for x in seen
        )
        low, high = low[:length, :length], high[:length, :length]
        assert bool((low <= mask).all()) and bool((mask <= high).all()), choices


def test_a_tensor_may_choose_by_its_own_method():
    """``x.where(condition, y)`` has the bounds of ``torch.where(condition, x, y)``."""
    length = 2 * attention_masks.TILE + 5

    def mask(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(length)
        return torch.zeros(length, length).where(places <= places[:, None], float("-inf"))

    (call,) = told(Attention(mask, heads=1), x=torch.randn(1, length, 24)).calls
    assert call["attn_mask"] is None and call["is_causal"] is True


@pytest.mark.slow
def test_long_masks_take_no_memory():
    """131,072 tokens: 16 GiB."""
    length = 2**17

    def mask(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(length, device=x.device)
        return places[None, None, None] <= places[None, None, :, None]

    model = Attention(mask, heads=1).to("meta")

    class Measuring(Folding):
        def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
            with Largest() as seen:
                super().__call__(gm, inputs)
            self.most = seen.most
            raise NotImplementedError

    backend = Measuring()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="NotImplementedError"):
        torch.compile(model, backend=backend, fullgraph=True)(torch.empty(1, length, 24, device="meta"))
    assert backend.calls[0]["is_causal"] is True and backend.most < 2**22, "positions, and bounds of 512 x 512 tiles"


@pytest.mark.slow
def test_lengths_that_are_not_known_stay():
    def mask(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()

    backend = told(Attention(mask), dynamic=True, x=batch())
    assert "lengths are not known" in backend.notes[0]
    assert told(Attention(mask), dynamic=False, x=batch()).calls[0]["is_causal"] is True


def test_keys_of_another_number_stay():
    class Crossed(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.q(x[:, : T // 2])[:, None], self.k(x)[:, None]
            return F.scaled_dot_product_attention(q, k, k, attn_mask=tril(T // 2, T))

    assert "stays" in folded(Crossed(tril), x=batch()).notes[0]


def config(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 67, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "use_cache": False, **more}  # fmt: skip


def llama(**more: Any) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config(**more)))


def hugging(name: str, **more: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, f"{name}Config")(**more)
    kind = "ForMaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name.removesuffix('Text')}{kind}")(made)


WIDTHS = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 67,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {k: v for k, v in config().items() if k not in ("num_key_value_heads", "use_cache")}
GEMMA = config(head_dim=16, layer_types=["sliding_attention", "full_attention"])
FAMILIES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama with a cache": (lambda: llama(use_cache=True), ["2 x causal"]),
    "gpt2": (lambda: hugging("GPT2", **WIDTHS), ["2 x causal"]),
    "gemma3": (lambda: hugging("Gemma3Text", **GEMMA, sliding_window=16), ["1 x stays", "1 x causal"]),
    "bert": (lambda: hugging("Bert", **BERT), []),
}  # fmt: skip


def ids() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(67, (2, T))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive) if n in ("bert", "gpt2") else n for n in FAMILIES]
)
def test_families(name):
    """Whatever the version of transformers builds a mask for: in the end attention is causal, or has its window."""
    build, expected = FAMILIES[name]
    torch.manual_seed(0)
    backend = folded(build().eval(), input_ids=ids())
    assert len(backend.calls) == 2
    causal = sum(call["attn_mask"] is None and call["is_causal"] for call in backend.calls)
    windows = sum(call["attn_mask"] is not None for call in backend.calls)
    assert causal == sum(int(text[0]) for text in expected if "causal" in text)
    assert windows == sum(int(text[0]) for text in expected if "stays" in text)
    assert all("causal" in text for text in backend.notes)


@pytest.mark.slow
@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_checkpointed_layers_get_no_mask(again):
    model = llama().train()
    if again:
        model.gradient_checkpointing_enable()
    more = {"labels": ids()} if again else {}
    backend = folded(model, input_ids=ids(), **more)
    assert not any(call["enable_gqa"] for call in backend.calls), "no kernel for 32 bits on GPUs"
    assert all(call["attn_mask"] is None and call["is_causal"] for call in backend.calls) and len(backend.calls) == 2
    assert not any("mask" in node.name for node in backend.nodes), "no operand of a checkpoint"


def named_and_stays(backend: Folding, given: str) -> None:
    assert all(isinstance(call["attn_mask"], fx.Node) for call in backend.calls)
    (note,) = backend.notes
    assert f"depends on the input kwargs_{given}" in note and "do not pass it" in note


@pytest.mark.slow
def test_positions_that_are_given_are_named_and_the_mask_stays():
    places = torch.arange(T).expand(2, -1)
    named_and_stays(folded(llama(num_hidden_layers=1), input_ids=ids(), position_ids=places), "position_ids")


@pytest.mark.slow
def test_padding_is_seen_and_named():
    mask = torch.ones_like(ids())
    mask[0, : T // 4] = 0
    model, backend = llama(num_hidden_layers=1), Folding()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain, mine = (run(input_ids=ids(), attention_mask=mask).logits for run in (model, compiled))
    torch.testing.assert_close(plain, mine, rtol=1e-5, atol=1e-5)
    named_and_stays(backend, "attention_mask")


@pytest.mark.slow
def test_groups_of_queries_are_not_repeated_in_16_bits():
    torch.manual_seed(0)
    model = llama().bfloat16()
    backend = told(model, input_ids=ids())
    assert all(call["enable_gqa"] for call in backend.calls) and "enable_gqa=True" in backend.notes[0]
    assert not any(attention_masks.name_of(node) == "expand" and "hidden_states" in node.name for node in backend.nodes)


@pytest.mark.slow
def test_programs_have_causal_attention():
    """`trace` and with it `explain`: equal layers are outlined after masks were left out."""
    model = llama(num_hidden_layers=4).train()
    model.gradient_checkpointing_enable()
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    traced = mfsdp.trace(model, kwargs={"input_ids": ids()}, world=2, units=["LlamaDecoderLayer"], mp_policy=policy)
    text = pipeline.run(traced.forward)[-1].listing
    assert "; note   4 x scaled_dot_product_attention: a constant causal mask is replaced by is_causal=True" in text
    attention = [
        (args, kwargs) for n in traced.forward.nodes for op, args, kwargs in [operator(n)] if "attention" in str(op)
    ]
    assert len(attention) == 4 and all(args[4] is True and "attn_mask" not in kwargs for args, kwargs in attention)
    assert not any(
        n.target in (torch.ops.aten.le.Tensor, torch.ops.aten.arange.default) and _square(n)
        for n in traced.forward.nodes
    )
    assert "; note" not in pipeline.run(traced.backward)[-1].listing


def _square(node: fx.Node) -> bool:
    return tuple(node.meta["val"].shape[-2:]) == (T, T)


@pytest.mark.slow
def test_explain_says_what_a_mask_costs():
    kwargs = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    sharding = {"world": 2, "units": ["LlamaDecoderLayer"]}
    report = mfsdp.explain(llama(num_hidden_layers=1), kwargs=kwargs, hardware="h100", suggest=False, **sharding)
    assert (
        "note: 1 x scaled_dot_product_attention: a mask stays: [2, 1, 64, 64] depends on the input attention_mask"
        in str(report)
    )


@pytest.mark.slow
def test_compiled_by_the_backend():
    """Losses and gradients of a sharded model, against the model alone."""
    torch.manual_seed(0)
    plain = llama(num_hidden_layers=1)
    model = mfsdp.fully_shard(copy.deepcopy(plain), units=["LlamaDecoderLayer"])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}, fullgraph=True)
    losses = [run(input_ids=ids(), labels=ids()).loss for run in (plain, compiled)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad.full_tensor(), rtol=1e-4, atol=1e-6)
