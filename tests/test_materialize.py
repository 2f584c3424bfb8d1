"""Models from the meta device: the values of an unsharded init under the same seed, never whole on any rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp
from examples.demo.model import Block as DemoBlock
from examples.demo.model import Config, Llama
from tests.models import MLP, Conv, llama
from tests.parity import whole


class Initialised(nn.Module):
    """A GPT that initialises as many do: constructors first, then ``_init_weights`` on every module."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(3))
        self.head = nn.Linear(12, 19, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def demo() -> nn.Module:
    model = Llama(Config(layers=2, width=32, length=16))
    model.apply(model._init_weights)
    return model


BUILDS: dict[str, tuple[Any, Any, list[Any]]] = {
    # unsharded, on meta, units
    "conv": (Conv, Conv, ["conv*"]),
    "gpt": (Initialised, Initialised, ["blocks.*"]),
    "demo": (demo, lambda: Llama(Config(layers=2, width=32, length=16)), [DemoBlock]),
    "llama": (llama, llama, ["LlamaDecoderLayer"]),
}


def differing(name: str, spread: int) -> list[str]:
    """Names of parameters and buffers that are not those of the unsharded init; ``spread``: other seeds elsewhere."""
    unsharded, build, units = BUILDS[name]
    torch.manual_seed(3)
    reference = unsharded()
    after = torch.randn(2)
    with torch.device("meta"):
        model = build()
    torch.manual_seed(3 + spread * dist.get_rank() if dist.is_initialized() else 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mfsdp.fully_shard(model, units=units, device="cpu")
    out = [n for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True)
           if not torch.equal(whole(p), q)]  # fmt: skip
    out += [n for (n, p), q in zip(model.named_buffers(), reference.buffers(), strict=True) if not torch.equal(p, q)]
    if not spread and name == "conv" and not torch.equal(torch.randn(2), after):
        out.append("the state of the random numbers")
    return out


@pytest.mark.dist
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("spread", [0, 1])
def test_the_values_of_an_unsharded_init(two_ranks, name, spread):
    assert two_ranks.run(differing, name, spread)[:2] in ([[], []],)


@pytest.mark.parametrize("name", BUILDS)
def test_in_one_process(name):
    assert not differing(name, 0)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.arange(4.0))
        self.known = nn.Linear(4, 4)


def custom(module: nn.Module) -> None:
    """A user's function: draws for whatever has a weight, whole as it is, and fills a buffer."""
    if isinstance(module, Bare):
        module.weight.copy_(torch.randn(4))
        module.table.fill_(2)
    elif getattr(module, "weight", None) is not None:
        nn.init.uniform_(module.weight, -1, module.weight.shape[0])


def differing_custom() -> list[str]:
    """With ties and something that nothing else initialises: the values of ``build(); apply(custom)``."""
    out = []
    for build in (Bare, Initialised):
        torch.manual_seed(3)
        reference = build()
        if build is Bare:  # its constructor draws what it writes itself, which nobody can repeat
            torch.manual_seed(3)
            reference.known.reset_parameters()
        with torch.no_grad():
            reference.apply(custom)
        with torch.device("meta"):
            model = build()
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mfsdp.fully_shard(model, units=[nn.Linear], device="cpu", param_init_fn=custom)
        pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
        out += [n for (n, p), q in pairs if not torch.equal(whole(p), q)]
        out += [
            n for (n, p), q in zip(model.named_buffers(), reference.buffers(), strict=True) if not torch.equal(p, q)
        ]
    return out


@pytest.mark.dist
def test_a_function_of_the_user(two_ranks):
    assert two_ranks.run(differing_custom) == [[], []]
    assert not differing_custom()


class Largest(TorchDispatchMode):
    """Elements alive in tensors made meanwhile: the most at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta and type(t) is torch.Tensor:
                key = t.untyped_storage()._cdata
                if key not in self.live:
                    self.live[key] = t.untyped_storage().nbytes()
                    weakref.finalize(t.untyped_storage(), self.live.pop, key, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


class Large(nn.Module):
    """An embedding, tied to the head, and blocks of several layers; its own initialiser on top of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(16))
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


def most_bytes() -> tuple[int, int, int]:
    """At any time of sharding a meta model; what the shards take; the largest unit. Least of several times: gloo's
    threads hold for a moment what they have sent.
    """
    most = []
    for _ in range(5):
        with torch.device("meta"):
            model = Large()
        with Largest() as seen:
            mfsdp.fully_shard(model, units=["blocks.*"], device="cpu", param_init_fn=lambda m: None)
        most.append(seen.most)
    shards = sum(p.to_local().nbytes for p in model.parameters())
    return min(most), shards, max(300 * 64, 4 * 65 * 64) * 4


@pytest.mark.dist
def test_never_more_than_the_shards_and_two_units(four_ranks):
    for most, shards, unit in four_ranks.run(most_bytes):
        assert shards < most < shards + 2 * unit


def test_what_nothing_initialises_is_named():
    with torch.device("meta"):
        model = Bare()
    with pytest.warns(UserWarning, match="nothing has initialised") as caught:
        mfsdp.fully_shard(model, device="cpu")
    text = str(caught[0].message)
    assert "weight" in text and "table" in text and "known" not in text
    assert torch.isnan(model.weight.full_tensor()).all() and torch.isnan(model.table).all()


def test_parameters_with_values_keep_them():
    with torch.device("meta"):
        model = MLP()
    model.down = nn.Linear(37, 24)
    kept = model.down.weight.detach().clone()
    model.scale = nn.Parameter(torch.full((24,), 2.0))
    mfsdp.fully_shard(model, units=["up", "down"], device="cpu")
    assert torch.equal(model.down.weight.full_tensor(), kept)
    assert (model.scale.full_tensor() == 2).all()


def test_per_block_calls_draw_in_the_order_of_the_calls():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    torch.manual_seed(4)
    for layer in model:
        mfsdp.fully_shard(layer, device="cpu")
    mfsdp.fully_shard(model, device="cpu")
    torch.manual_seed(4)
    reference = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
