"""Weights that the model casts to FP8 travel in FP8, and nothing else changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import mfsdp
from mfsdp import pipeline
from mfsdp.config.block_grid import Digit, Grid, decode, encode
from mfsdp.ir import ops
from mfsdp.ir.byte_costs import nbytes
from mfsdp.ir.program import Program
from mfsdp.ir.roles import Kind
from mfsdp.runtime import block_scales
from tests.helpers.fp8 import RECIPES, Coded, Pair, stack
from tests.helpers.ranks import collectives_told, here

BF16 = {"dtype": torch.bfloat16}

Layers = tuple[tuple[str, int | None], ...]
"""Recipes of a model's layers, and how wide each is inside."""

EVERY: Layers = tuple((recipe, None) for recipe in RECIPES)
SOME, OTHERS = EVERY[::2], EVERY[1::2]


def built(layers: Layers, width: int = 128) -> nn.Sequential:
    return nn.Sequential(*(Pair(width, recipe, hidden) for recipe, hidden in layers)).to(**BF16)


def programs(model: nn.Module, width: int = 128, lowering: str = "eager", **sharding: Any) -> list[Program]:
    sharding = {"units": [Pair], **({} if "mesh_shape" in sharding else {"world": 2}), **sharding}
    return list(mfsdp.trace(model, (torch.empty(4, width, **BF16),), lowering=lowering, **sharding))


@cache
def _traced(lowering: str, layers: Layers, **sharding: Any) -> list[Program]:
    with torch.device("meta"):
        return programs(built(layers), lowering=lowering, **sharding)


def traced(lowering: str = "eager", layers: Layers = SOME, **sharding: Any) -> list[Program]:
    return [p.copy() for p in _traced(lowering, layers, **sharding)]


def gathered(p: Program, codes: bool) -> int:
    """Bytes of gathers of what is quantised, in either dtype: of units whose name ends in a letter."""
    launches = [n for n in p.find(Kind.FULL) if n.target is ops.all_gather and n.meta["mfsdp"].unit.endswith("b")]
    assert launches and all((n.meta["val"].dtype is torch.float8_e4m3fn) is codes for n in launches)
    return sum(nbytes(n.meta["val"]) for n in launches)


# Blocks and rows


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (0, 1), (1, 32), (32, 1), (8, 8), (3, 64)])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_maxima_of_parts_are_maxima_of_the_whole(block, data):
    n, k = 96, 64
    rows, columns = block[0] or n, block[1] or k
    counts = [k // columns if rows < n or columns < k else 1, 1]
    upper = [Digit(rows * k, n // rows, counts[0] if n // rows > 1 else 0), Digit(k, rows)]
    lower = [Digit(columns, k // columns, 1 if k // columns > 1 else 0), Digit(1, columns)]
    grid = Grid(0, tuple(d for d in (*upper, *lower) if d.size > 1))
    whole = torch.randn(n, k, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    if data.draw(st.booleans()):
        whole[data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))] = torch.nan
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    parts = list(zip([0, *cuts], [*cuts, n], strict=True))
    found = torch.stack([block_scales.largest(whole[a:b], a, grid) for a, b in parts]).amax(0).view(torch.float32)
    blocks = whole.abs().view(n // rows, rows, k // columns, columns)
    want = blocks.amax((1, 3))
    torch.testing.assert_close(found, want.reshape(-1), rtol=0, atol=0, equal_nan=True)
    out = torch.empty(n, k)
    for a, b in parts:
        block_scales.spread(found, out[a:b], a, grid)
    everywhere = want[:, None, :, None].expand_as(blocks).reshape(n, k)
    torch.testing.assert_close(out, everywhere, rtol=0, atol=0, equal_nan=True)
    assert decode(encode((grid, grid))) == (grid, grid) and decode("") == ()


# Programs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "recipes"),
    [
        ("eager", SOME),
        ("inductor", OTHERS),
        pytest.param("eager", OTHERS, marks=pytest.mark.exhaustive),
        pytest.param("inductor", SOME, marks=pytest.mark.exhaustive),
    ],
)
def test_fp8_weights_travel_in_half_the_bytes(lowering, recipes):
    """Of every recipe, each in a unit of its own."""
    for p in traced(lowering, recipes):
        plain, coded = p.copy(), p
        pipeline.run(plain, passes=pipeline.table(quantize=False), listings=False)
        stages = pipeline.run(coded)
        assert f"{len(recipes)} units in one byte per element" in stages["quantize"].listing
        assert 2 * gathered(coded, True) == gathered(plain, False)
        reading = [n for n in coded.nodes if n.target is ops.maxima]
        assert len(reading) == len(recipes), "maxima of all blocks of a unit are one node"


@pytest.mark.slow
def test_no_code_is_saved_for_backward():
    forward, backward = traced()
    pipeline.run(forward)
    assert not [r for r in forward.results() if isinstance(r, torch.fx.Node) and r.meta["val"].dtype.itemsize == 1]
    assert all(n.meta["val"].dtype.itemsize > 1 for n in backward.nodes if n.op == "placeholder")


def test_the_listing(golden):
    with torch.device("meta"):
        model = nn.Sequential(Coded(64, 64), Coded(64, 32)).to(**BF16)
    for p in programs(model, 64, units=None, name="fp8", world=4):
        golden(f"fp8.{p.phase}", pipeline.run(p)[-1].listing)


class Reads(Coded):
    """Reads its weight in one more way."""

    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__(64, 64)
        self.way = way
        self.register_buffer("history", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.way(x, self.weight) + 0 * self.history


def by_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def by_another_code(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ (w * 0.5).to(torch.float8_e4m3fn).to(x.dtype)


def by_the_mean(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ (w / w.abs().mean()).to(torch.float8_e4m3fn).to(x.dtype)


def by_activations(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ (w.float() * x.float().abs().amax()).to(torch.float8_e4m3fn).to(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "why"),
    [
        (by_product, "u0_0_weight is read by mm"),
        (by_another_code, "0_weight is quantised in 2 ways here"),
        (by_the_mean, "u0_0_weight is read by mean"),
        (by_activations, "the scale of u0_0_weight depends on more than maxima of weights"),
    ],
)
def test_what_cannot_travel_in_one_byte_says_why(way, why):
    with torch.device("meta"):
        forward, *_ = programs(nn.Sequential(Reads(way)).to(**BF16), 64, units=None)
    listing = pipeline.run(forward)["quantize"].listing
    assert "u0 is gathered in 16 bits: " in listing and why in listing


@pytest.mark.slow
def test_off_and_int8_say_so():
    forward, _ = traced()
    assert "16 bits: off" in pipeline.run(forward, passes=pipeline.table(quantize=False))["quantize"].listing
    int8 = mfsdp.MixedPrecisionPolicy(param_comm_dtype="int8")
    with torch.device("meta"):
        forward, _ = programs(stack("rowwise", layers=1).to(**BF16), mp_policy=int8)
    assert "int8 was asked for by name" in pipeline.run(forward)["quantize"].listing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "kinds", "layers", "sharding"),
    [
        ("rowwise", 2, 1, {"strategy": 1}),
        ("tensorwise", 1, 2, {"mesh_shape": (2, 2), "outer_strategy": "optim"}),
    ],
)
def test_what_lasts_are_codes(recipe, kinds, layers, sharding):
    """One byte per element lasts and travels; a second recipe of backward's own lasts beside it."""
    model = stack(recipe, layers=layers).to(**BF16)
    sharding = sharding if "mesh_shape" in sharding else {"world": 2, **sharding}
    told = mfsdp.explain(model, (torch.empty(4, 128, **BF16),), units=[Pair], suggest=False, **sharding)
    keys: dict[str, set[str]] = {}
    for p in traced(layers=((recipe, None),) * len(model), **sharding):
        pipeline.run(p)
        for node in p.find(Kind.CODES):
            spec = p.unit(node.meta["mfsdp"].unit).spec
            assert nbytes(node.meta["val"]) == spec.source_numel and node.args[0].meta["val"].numel() == spec.main_numel
            keys.setdefault(node.meta["mfsdp"].unit, set()).add(node.args[2])
        assert not spec.gathers or (gathered(p, True) and {n.args[0] for n in p.find(Kind.FULL)} >= {node})
    assert [len(of) for of in keys.values()] == [kinds] * layers, "by unit"
    lasts = {entry.name: entry.nbytes for entry in told.ledger.entries}
    assert lasts["persistent FP8 weights"] == layers * kinds * spec.source_numel
    assert lasts["parameters that last"] < spec.source_numel / 8, "norms and biases"


def test_weights_of_fp8_have_a_buffer_of_their_own():
    model = mfsdp.fully_shard(stack("rowwise").to(**BF16), units=[Pair], device="cpu")
    names = [[slot.name for slot in b.layout.slots] for b in model[0]._mfsdp_unit.buffers]
    assert names == [["norm.weight", "down.bias"], ["up.weight", "down.weight"]]


# Ranks


def trained(options: dict[str, Any], layers: Layers, width: int, **sharding: Any) -> tuple[Any, ...]:
    """Losses and weights after three steps of two microbatches; what was sent; how often maxima went over ranks."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    rank = torch.distributed.get_rank()
    if "mesh" in sharding:
        sharding["mesh"] = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
    model = mfsdp.fully_shard(built(layers, width), units=[Pair], **sharding)
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, sums = [], []
    with collectives_told(lambda kind, group: sums.append(kind)):
        for step in range(3):
            for micro in range(2):
                if step == 2 and not micro:
                    sums.clear()
                x = torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + 5 * micro + rank))
                loss = run(x.to(**BF16)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    weights = [p.full_tensor() for p in model.parameters()]
    return losses, weights, sums.count("all_reduce")


def lasting() -> list[dict[str, int]]:
    """Bytes that gathers of FP8 weights bring in a step of three microbatches, and that last, with the pass and
    without; meanwhile weights are read and written in every other way, and values stay the same.
    """
    from mfsdp.runtime.execution import Execution

    rank, found, seen = torch.distributed.get_rank(), [], []
    own = Execution.gather
    for on in (True, False):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = mfsdp.fully_shard(stack("tensorwise").to(**BF16), units=[Pair], strategy=2)
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", "quantize": on})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        buffers = [unit._mfsdp_unit.buffers[1] for unit in model]
        moved = []

        def gather(self: Execution, pairs: Any, group: str, moved: list[int] = moved) -> Any:
            moved += [full.nbytes for full, _ in pairs if full.numel() >= 2**16]
            return own(self, pairs, group)

        def trained(run: Any = run, model: Any = model) -> list[torch.Tensor]:
            outs = []
            for micro in range(3):
                x = torch.randn(4, 128, generator=torch.Generator().manual_seed(micro + rank)).to(**BF16)
                with mfsdp.no_sync(model) if micro < 2 else nullcontext():
                    outs.append(run(x))
                    outs[-1].float().square().mean().backward()
            return outs

        Execution.gather = gather
        try:
            outs = trained()
            optimizer.step()
            optimizer.zero_grad()
            moved.clear()
            outs += trained()
            counted = sum(moved)
        finally:
            Execution.gather = own
        lasts = sum(c.values.nbytes for b in buffers for c in b.weights.lasting.codes.values())
        lasts += sum(b.weights.source.untyped_storage().nbytes() for b in buffers)
        found.append({"moved": counted, "lasts": lasts})
        x = torch.ones(4, 128, **BF16)
        optimizer.step()
        with torch.no_grad():
            outs.append(run(x))  # another program
            outs.append(model(x))  # the eager path, in 16 bits
            for p in model.parameters():
                p.mul_(0.5)
            outs.append(run(x))
            with mfsdp.summon_full_params(model, writeback=True):
                model[0].up.weight.add_(0.25)
            outs.append(run(x))
            outs.append(copy.deepcopy(model)(x))
            model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        outs += [run(x), *trained(), model(x)]
        with mfsdp.unsharded(model):
            outs.append(run(x))
        if on:
            loss = run(x).sum()
            optimizer.step()
            with pytest.raises(RuntimeError, match="written between forward and its backward"):
                loss.backward()
        seen.append([out.detach() for out in outs])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    return found


@pytest.mark.dist
def test_codes_last_and_are_gathered_once_per_step(two_ranks):
    for on, off in two_ranks.run(lasting):
        assert off == {"moved": 2 * 2**17, "lasts": 2 * 2**17}, "two units in 16 bits, once"
        assert on == {"moved": 2**17, "lasts": 2**17}


class Sum(Coded):
    """Its forward reads the weight in two ways, its backward the FP8 payload alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.weight.detach().sum()


def in_full_first() -> None:
    rank, seen = torch.distributed.get_rank(), []
    for on in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Sum(64, 64, "tensorwise"), Sum(64, 64, "tensorwise")).to(**BF16)
        mfsdp.fully_shard(model, units=[Sum], strategy=2)
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", "quantize": on})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + rank)).to(**BF16)
            run(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append([p.full_tensor() for p in model.parameters()])
        loss = run(torch.ones(4, 64, **BF16)).sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        if on:
            with pytest.raises(RuntimeError, match="written between forward and its backward"):
                loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.dist
@pytest.mark.slow
def test_forward_may_read_what_backward_reads_in_fp8(two_ranks):
    two_ranks.run(in_full_first)


def on_and_off(layers: Layers, options: dict[str, Any], width: int = 128, **sharding: Any) -> list[int]:
    """How often maxima went over ranks in the last step, with the pass and without."""
    on = trained({**options}, layers, width, **sharding)
    off = trained({**options, "quantize": False}, layers, width, **sharding)
    assert on[0] == off[0], (on[0], off[0])
    for a, b in zip(on[1], off[1], strict=True):
        assert torch.equal(a, b)
    return [on[2], off[2]]


ROWWISE: Layers = (("rowwise", None),) * 2


@pytest.mark.dist
def test_every_value_is_the_same(two_ranks):
    """With the recipes that the next test does not have."""
    layers = (("rowwise, tensorwise", None), ("128x128", None), ("1x128", None))
    for on, off in two_ranks.run(on_and_off, layers, {}):
        assert (on, off) == (1, 0), "one all-reduce per step, for all units and both directions"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "strategy", "options"),
    [
        pytest.param((("rowwise", 40), ("tensorwise", 2)), 3, {"keep_cast": False}, marks=pytest.mark.exhaustive),
        ((("mxfp8", 32), ("rowwise", 2)), 1, {"prefetch": 0}),
        pytest.param((("mxfp8", 32), ("rowwise", 2)), 3, {"keep_cast": False}, marks=pytest.mark.exhaustive),
        pytest.param((("rowwise", 40), ("tensorwise", 2)), 1, {"prefetch": 0}, marks=pytest.mark.exhaustive),
    ],
)
def test_uneven_rows_and_ranks_without_any(three_ranks, layers, strategy, options):
    three_ranks.run(on_and_off, layers, options, 32, strategy=strategy, timeout=300)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sharding"),
    [
        pytest.param(
            {"prefetch": 2, "pool": False},
            {"mp_policy": mfsdp.MixedPrecisionPolicy(main_params_dtype=None, grad_comm_dtype=torch.bfloat16)},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({}, {"outer_strategy": "optim"}, marks=pytest.mark.exhaustive),
        (
            {},
            {
                "outer_strategy": "optim",
                "strategy": 2,
                "mp_policy": mfsdp.MixedPrecisionPolicy(main_params_dtype=None),
            },
        ),
    ],
)
def test_two_levels(four_ranks, options, sharding):
    four_ranks.run(on_and_off, ROWWISE, options, mesh=None, **sharding)


@pytest.mark.dist
@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "strategy"), [("inductor", 3), pytest.param("whole", 2, marks=pytest.mark.exhaustive)]
)
def test_every_value_is_the_same_under_inductor(two_ranks, lowering, strategy):
    two_ranks.run(on_and_off, ROWWISE[:1], {"lowering": lowering}, strategy=strategy, timeout=500)


def written(how: str) -> str:
    """Rows are written behind the optimizer: by one rank alone, or in a way that no version shows."""
    torch.manual_seed(0)
    outs = []
    for options in ({"quantize": True}, {"quantize": False}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = mfsdp.fully_shard(stack("tensorwise", 32, layers=1).to(**BF16), units=[Pair])
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", **options})
        x = torch.randn(4, 32, **BF16)
        run(x).sum().backward()
        for weight in (model[0].up.weight, model[0].down.weight):
            rows = weight.to_local()
            if how == "hidden":
                rows.data.mul_(3)
            elif torch.distributed.get_rank() == 0 and rows.numel():
                with torch.no_grad():
                    (rows.data if how == "hidden alone" else rows).mul_(3)
        try:
            outs.append(run(x))
        except RuntimeError as error:
            return str(error)
    assert torch.equal(*outs)
    return ""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "hidden alone"])
def test_a_write_of_one_rank_alone_is_told(two_fresh_ranks, how):
    for text in two_fresh_ranks.run(written, how):
        assert "largest magnitudes in blocks of 0, written since they were taken" in text


@pytest.mark.dist
@pytest.mark.slow
def test_a_write_that_nobody_is_told_of_is_found(two_ranks):
    assert two_ranks.run(written, "hidden") == ["", ""]


# torchao


def torchao_model(recipe: str, width: int = 64) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = [nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))]
    model = nn.Sequential(*layers, nn.Linear(width, width, bias=False)).to(**BF16)
    fsdp = recipe == "fsdp"
    config = (
        Float8LinearConfig(enable_fsdp_float8_all_gather=True) if fsdp else Float8LinearConfig.from_recipe_name(recipe)
    )
    return convert_to_float8_training(model, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "lowering"), [("tensorwise", "inductor"), ("rowwise", "eager"), ("rowwise_with_gw_hp", "inductor")]
)
def test_torchao(recipe, lowering):
    pytest.importorskip("torchao")
    for p in programs(torchao_model(recipe), 64, lowering, units=["0"]):
        listing = pipeline.run(p)["quantize"].listing
        assert "2 units in one byte per element" in listing and "bits" not in listing.split("; peak")[0]


def torchao_trained(recipe: str, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    rank = torch.distributed.get_rank()
    model = torchao_model(recipe).to(here())
    if backend == "fsdp2":
        model = model.float()
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        torch.distributed.fsdp.fully_shard(model[0], mp_policy=policy)
        torch.distributed.fsdp.fully_shard(model, mp_policy=policy)
        run = model
    else:
        mfsdp.fully_shard(model, units=["0"])
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(here(), **BF16)
        run(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


def tensor_parallel_alike(dump: str) -> None:
    """Two by two, with the pass and without, and beside a whole model."""
    from torch.distributed.tensor.parallel import parallelize_module
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    losses: list[list[float]] = []
    for how in ("on", "off", "whole"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model: Any = torchao_model("tensorwise")
        run = model
        if how != "whole":
            parallelize_module(model, mesh["tp"], {"0.1": Float8ColwiseParallel(), "0.3": Float8RowwiseParallel()})
            mfsdp.fully_shard(model, units=["0"], mesh=mesh["dp_shard"])
            options = {"lowering": "eager", "quantize": how == "on", "dump": f"{dump}/{how}"}
            run = torch.compile(model, backend="mfsdp", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            inputs = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(step)).to(**BF16)
            outs = [run(inputs[mesh["dp_shard"].get_local_rank()])] if how != "whole" else [model(x) for x in inputs]
            each = [out.float().square().mean() for out in outs]
            losses[-1].append(each[mesh["dp_shard"].get_local_rank() if how == "whole" else 0].item())
            (sum(each) / len(each)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]
    torch.testing.assert_close(losses[0], losses[2], rtol=0.02, atol=0)


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.slow
def test_torchao_beside_tensor_parallelism(four_ranks, tmp_path):
    """A scale of the whole weight: its maxima go over data-parallel ranks, and by DTensor over tensor-parallel ones."""
    pytest.importorskip("torchao")
    four_ranks.run(tensor_parallel_alike, str(tmp_path))
    listings = [path.read_text() for path in tmp_path.glob("on/*.quantize.txt")]
    assert len(listings) == 2 and all("2 units in one byte per element" in text for text in listings)
    assert [line for text in listings for line in text.splitlines() if "max, tp" in line and "f64[]" in line]


def torchao_alike(recipe: str) -> int:
    ours, theirs = (torchao_trained(recipe, backend) for backend in ("mfsdp", "fsdp2"))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    return len(ours)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_torchao_trains_as_under_fsdp2(two_ranks, recipe):
    pytest.importorskip("torchao")
    assert two_ranks.run(torchao_alike, recipe) == [6, 6]


@pytest.mark.slow
def test_what_fsdp2_needs_for_it_is_not_needed():
    pytest.importorskip("torchao")
    model = torchao_model("fsdp")
    before = model[1].weight
    with pytest.warns(UserWarning, match="enable_fsdp_float8_all_gather=True is not needed"):
        mfsdp.fully_shard(model, units=["0"], device="cpu")
    assert torch.equal(model[1].weight.full_tensor(), before._tensor.float())
    assert not {"_tensor", "_precomputed_scale"} & set(model[1].weight.__dict__)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns of its own deprecations where it is first imported
        forward, *_ = programs(torchao_model("tensorwise"), 64, units=["0"])
    assert "2 units in one byte" in pipeline.run(forward)["quantize"].listing
