"""Models from the meta device: the values of an unsharded init under the same seed, never whole on any rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mfsdp
from examples.bench.bench import peak_of
from examples.demo.model import Block as DemoBlock
from examples.demo.model import Config, Llama
from tests.helpers.largest import Largest
from tests.helpers.models import GPT, MLP, Block, Conv, llama
from tests.helpers.parity import whole


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


class Large(nn.Module):
    """An embedding, tied to the head, and blocks of several layers; its own initialiser on top of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(6))
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
    for _ in range(3):
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


OCCASIONS: dict[str, tuple[Any, Any]] = {
    "gpt": (lambda: GPT(width=128, layers=1, vocabulary=5000, length=64), None),
    "bf16, again": (lambda: llama(1, width=128).to(torch.bfloat16), lambda m: None),
}


def occasions(name: str, folder: str) -> list[tuple[int, int]]:
    """Bytes told and taken while a model is initialised, and while it is saved."""
    make, init = OCCASIONS[name]
    with torch.device("meta"):
        model = make()
    ids = torch.zeros(2, 8, dtype=torch.long)
    sharding = {"units": [Block if isinstance(model, GPT) else "LlamaDecoderLayer"], "param_init_fn": init}
    told = mfsdp.explain(model, (ids,), world=dist.get_world_size(), suggest=False, **sharding).ledger.occasions
    taken = [peak_of(lambda: mfsdp.fully_shard(model, device="cpu", **sharding))]
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    out = model(ids)
    getattr(out, "logits", out).float().square().mean().backward()
    optimizer.step()
    checkpoints = mfsdp.Checkpoints(folder)
    taken.append(peak_of(lambda: checkpoints.save(1, model, optimizer, blocking=False)))
    checkpoints.wait()
    return list(zip([e.nbytes for e in told], taken, strict=True))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive) if n == "bf16, again" else n for n in OCCASIONS]
)
def test_explain_knows_what_initialising_and_saving_take(two_ranks, tmp_path, name):
    for rank in two_ranks.run(occasions, name, str(tmp_path)):
        for told, taken in rank:
            assert told == pytest.approx(taken, rel=0.03)


def most_bytes_of_a_real_model(**sharding: Any) -> tuple[int, int, int, int]:
    """At any time of sharding a model with values; what it takes itself; what the shards take; the largest unit."""
    with Largest() as seen:
        model = Large()
        seen.most = 0
        mfsdp.fully_shard(model, units=["blocks.*"], device="cpu", **sharding)
    whole_bytes = sum(p.nbytes for p in model.parameters())
    shards = sum(p.to_local().nbytes for p in model.parameters())
    return seen.most, whole_bytes, shards, max(300 * 64, 4 * 65 * 64) * 4


def test_originals_are_freed_as_their_values_are_taken_over():
    most, model, shards, unit = most_bytes_of_a_real_model()
    assert shards == model < most <= model + 1.1 * unit
    wide = mfsdp.MixedPrecisionPolicy(main_params_dtype=torch.float64)
    most, model, shards, unit = most_bytes_of_a_real_model(mp_policy=wide)
    assert most <= shards + 1.1 * 2 * unit


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 3])
def test_originals_are_freed_on_two_ranks(two_ranks, strategy):
    for most, model, _, unit in two_ranks.run(most_bytes_of_a_real_model, strategy=strategy):
        assert model < most <= model + 1.1 * unit


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


# models partly on the meta device


class Zeroing(nn.Module):
    """Its initialisers write to whatever is below it, and to what they should not."""

    def __init__(self, real: nn.Module, ignored: nn.Module) -> None:
        super().__init__()
        self.meta = nn.Linear(6, 6, device="meta")
        self.meta.bias = nn.Parameter(torch.full((6,), 5.0))
        self.real, self.ignored = real, ignored
        self.tied = nn.Linear(6, 6, bias=False, device="meta")
        self.tied.weight = real.weight
        self.register_buffer("here", torch.arange(3.0))
        self.register_buffer("there", torch.empty(3, device="meta"))
        self.meta.register_buffer("there", self.there)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.real.weight)
        nn.init.zeros_(self.ignored.weight)
        self.here = torch.zeros(3)
        self.there.fill_(7.0)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias)


def ones(module: nn.Module) -> None:
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.fill_(1.0)


def kept(where: str, **sharding: Any) -> list[str]:
    """Names of real values that are not what they were."""
    model = Zeroing(nn.Linear(6, 6), nn.Linear(6, 6))
    ignored = list(model.ignored.parameters())
    want = {n: t.detach().clone() for n, t in model.state_dict().items() if not t.is_meta}
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    mfsdp.fully_shard(
        model, units=["real", "meta"], device="cpu", ignored_params=ignored,
        param_init_fn=ones if where == "user" else None, **sharding,
    )  # fmt: skip
    got = {n: whole(t) if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    assert model.meta.there is model.there, "a tied buffer"
    assert not torch.isnan(got["meta.weight"]).any()
    assert (got["there"] == (1 if where == "user" else 7)).all()
    return [n for n, t in want.items() if not torch.equal(got[n], t)]


@pytest.mark.parametrize("where", ["module", "user"])
def test_what_is_real_keeps_its_value(where):
    assert kept(where) == []


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("where", ["module", "user"])
def test_what_is_real_keeps_its_value_on_two_ranks(two_ranks, strategy, where):
    torch.manual_seed(0)
    assert two_ranks.run(kept_alike, where, strategy) == [[], []]


def kept_alike(where: str, strategy: int) -> list[str]:
    torch.manual_seed(0)
    return kept(where, strategy=strategy)


def test_a_failing_initialiser_leaves_a_model_partly_on_meta_as_it_was():
    model = Zeroing(nn.Linear(6, 6), nn.Linear(6, 6))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    tensors = [*model.parameters(), *model.buffers()]

    def fail(module: nn.Module) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        mfsdp.fully_shard(model, device="cpu", param_init_fn=fail)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    assert all(before[n].is_meta or torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_initialisers_see_the_attributes_of_parameters():
    class Flagged(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if getattr(self.weight, "is_residual", False):
                nn.init.zeros_(self.weight)

    layer = Flagged(3, 3, device="meta")
    layer.weight.is_residual = True
    mfsdp.fully_shard(layer, device="cpu")
    assert (layer.weight.full_tensor() == 0).all()


@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "summoned"])
def test_what_was_loaded_between_two_calls_is_real(how):
    with torch.device("meta"):
        model = Initialised()
    block, other = model.blocks[0], model.blocks[1]
    for m in (block, other):
        mfsdp.fully_shard(m, device="cpu")
    want = {n: torch.full(p.shape, 3.0) for n, p in block.named_parameters()}
    if how == "load_state_dict":
        block.load_state_dict(want)
    elif how == "copy_":
        for n, p in block.named_parameters():
            p.detach().copy_(want[n])
    else:
        with mfsdp.summon_full_params(block):
            for p in block.parameters():
                p.data.fill_(3.0)
    mfsdp.fully_shard(model, device="cpu")
    assert all((p.full_tensor() == 3).all() for p in block.parameters())
    assert other[1].weight.full_tensor().std() < 0.03, "initialised by the root"


class Rotary(nn.Module):
    """A buffer that is computed, as rotary positions are, beside weights that are initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("cache", torch.zeros(4, 6), persistent=False)

    def reset_parameters(self) -> None:
        values = torch.arange(24.0).view(4, 6)
        if isinstance(self.cache, DTensor):
            values = distribute_tensor(values, self.cache.device_mesh, self.cache.placements)
        with torch.no_grad():
            self.cache.copy_(values)


def a_laid_out_buffer() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    with torch.device("meta"):
        model = Rotary()
    model.cache = distribute_tensor(model.cache, mesh["tp"], [Shard(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mfsdp.fully_shard(model, mesh=mesh["dp_shard"])
    cache = model.cache
    assert isinstance(cache, DTensor) and cache.placements == (Shard(1),) and cache.to_local().shape == (4, 3)
    return cache.full_tensor().tolist()


@pytest.mark.dist
def test_buffers_keep_their_layout(two_ranks):
    assert two_ranks.run(a_laid_out_buffer) == [torch.arange(24.0).view(4, 6).tolist()] * 2
