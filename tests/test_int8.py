"""Parameters and gradients in int8: what is written and read, how far off it is, and training with it, by hand."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mfsdp
from mfsdp import pipeline
from mfsdp.buffers.sharding_plan import STRATEGIES
from mfsdp.config.comm_formats import int8_nbytes
from mfsdp.config.hardware import hardware
from mfsdp.config.units import UnitSpec
from mfsdp.cost_model import op_cost
from mfsdp.ir import byte_costs, ops
from mfsdp.runtime import comm_formats, execution, groups, sync_collectives
from mfsdp.runtime.c10d_transport import C10dTransport
from mfsdp.runtime.gloo_transport import GlooTransport
from mfsdp.runtime.transport_registry import carried_by
from tests.helpers.models import CASES, MLP, Lumpy
from tests.helpers.parity import batches, compiled
from tests.helpers.strategies import TWO_LEVELS, sharding

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
BOTH = {"param_comm_dtype": "int8", "grad_comm_dtype": "int8"}


def through(x: torch.Tensor, dtype: torch.dtype = F32) -> torch.Tensor:
    """What is read of rows that are written."""
    messages = torch.empty(x.shape[0], int8_nbytes(x.shape[1]), dtype=torch.uint8)
    comm_formats.write(x, messages)
    out = torch.empty(x.shape, dtype=dtype)
    comm_formats.read(messages, out)
    return out


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The same by hand, of one row: block by block, in float32."""
    out = []
    for block in x.flatten().split(128):
        scale = block.abs().max().float() / 127
        wide = block.to(torch.promote_types(block.dtype, F32))
        out.append((wide / scale).round().char() * scale if scale > 0 else torch.zeros(block.shape))
    return torch.cat(out).view(x.shape)


# One row


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(1, 3), st.integers(1, 400), st.sampled_from([F32, BF16, F16, F64]),
    st.floats(-30, 30), st.integers(0, 2**31),
)  # fmt: skip
def test_a_value_is_half_a_scale_off_at_most(rows, numel, dtype, exponent, seed):
    random = torch.Generator().manual_seed(seed)
    size = max(-7.0, min(4.0, exponent)) if dtype is F16 else exponent
    x = (torch.randn(rows, numel, generator=random, dtype=F64) * 10**size).to(dtype)
    got = through(x)
    for row, out in zip(x, got, strict=True):
        assert torch.equal(out, rounded(row))
        for block, read in zip(row.double().split(128), out.double().split(128), strict=True):
            largest = block.abs().max()
            assert (block - read).abs().max() <= largest / 127 / 2 * (1 + 1e-4) and read.abs().max() <= 1.0001 * largest


def test_what_is_not_finite_stays_so():
    """In its block, and there only; zeros are zeros, and so is what has no normal scale."""
    x = torch.ones(1, 128 * 5 + 16)
    x[0, 5], x[0, 130], x[0, 260] = float("nan"), float("inf"), float("-inf")
    x[0, 384:512], x[0, 512:640], x[0, 640:] = 0, 1e-37, 1e-35
    for dtype in (F32, BF16):
        out = through(x, dtype)
        assert not out[0, :384].isfinite().any() and out[0, 384:].isfinite().all()
        assert not out[0, 384:640].any() and (out[0, 640:].float() - 1e-35).abs().max() < 1e-37
    assert torch.equal(through(torch.full((1, 9), 6e-8, dtype=F16), F16), torch.full((1, 9), 6e-8, dtype=F16))


def test_large_rows_are_written_piece_by_piece(monkeypatch):
    x = torch.randn(2, 1000)
    want = through(x)
    monkeypatch.setattr(comm_formats, "AT_ONCE", 300)
    assert torch.equal(through(x), want)


def snr(true: torch.Tensor, got: torch.Tensor) -> float:
    return 20 * torch.log10(true.norm() / (true - got).norm()).item()


def test_errors_are_those_of_the_page():
    """Sums of gradients over 2, 8 and 64 ranks, and weights, in dB."""
    random = torch.Generator().manual_seed(0)
    signal = torch.randn(1, 2**13, generator=random) * 1e-3
    for ranks, floor in ((2, 43.5), (8, 44.5), (64, 49.0)):
        parts = [signal + torch.randn(signal.shape, generator=random) * 4e-3 for _ in range(ranks)]
        assert floor < snr(sum(p.double() for p in parts), sum(map(through, parts))) < floor + 2
    weights = torch.randn(1, 2**15, generator=random) * 0.02
    spiky = torch.where(torch.rand(weights.shape, generator=random) < 1e-3, weights * 50, weights)
    assert 43 < snr(weights, through(weights)) < 45 and 31 < snr(spiky, through(spiky)) < 36


# Who asks for it


def test_nobody_gets_it_unasked():
    p = mfsdp.MixedPrecisionPolicy(compute_dtype=BF16, grad_comm_dtype=BF16, param_comm_dtype=BF16).resolve(F32)
    assert p.wire is None and p.grad_wire is None
    p = mfsdp.MixedPrecisionPolicy(compute_dtype=BF16, **BOTH).resolve(F32)
    assert (p.main, p.comm, p.compute, p.grad_comm, p.grad) == (F32, BF16, BF16, BF16, F32)
    assert (p.wire, p.grad_wire) == ("int8", "int8") and p.sum(2) is p.sum(1000) is F32
    assert mfsdp.MixedPrecisionPolicy(main_grads_dtype=BF16, **BOTH).resolve(F32).sum(2) is F32
    assert mfsdp.MixedPrecisionPolicy(reduce_dtype="int8") == mfsdp.MixedPrecisionPolicy(grad_comm_dtype="int8")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("grad_comm_dtype", "int4", "four bits keep 20 dB"),
        ("param_comm_dtype", "nvfp4", "no such device has run this yet"),
        ("param_comm_dtype", "mxfp4", "no such device"),
        ("grad_comm_dtype", "fp8", "32 dB"),
        ("grad_comm_dtype", torch.float8_e4m3fn, "32 dB"),
        ("param_comm_dtype", torch.int8, "give the string 'int8'"),
        ("param_comm_dtype", "INT8", "give the string 'int8'"),
        ("param_comm_dtype", "bf16", "or 'int8'"),
        ("compute_dtype", "int8", "compute_dtype='int8' is not supported; choose None or one of"),
        ("main_grads_dtype", "int8", "main_grads_dtype='int8' is not supported"),
    ],
)
def test_what_is_refused(name, value, words):
    with pytest.raises(ValueError, match=words):
        mfsdp.MixedPrecisionPolicy(**{name: value})


def test_no_library_adds_up_bytes():
    with pytest.raises(ValueError, match="grad_sum='native' with grad_comm_dtype='int8'"):
        mfsdp.MixedPrecisionPolicy(grad_comm_dtype="int8", grad_sum="native")


@pytest.mark.parametrize("words", [{}, {"param_comm_dtype": "int8"}, {"grad_comm_dtype": "int8"}, BOTH])
def test_specs_say_it(words):
    p = mfsdp.MixedPrecisionPolicy(**words).resolve(F32)
    spec = UnitSpec(2, "g", "r", (16, 144), p, 4.0, True, 2, "o", "q", True)
    assert UnitSpec.decode(spec.encode()) == spec
    assert spec.int8_bytes(0) == 16 + 4 + 144 + 8 and spec.int8_bytes(2) == 8 + 4 + 72 + 4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [0, 3])
def test_what_travels_is_counted(strategy):
    with torch.device("meta"):
        model, x = nn.Linear(256, 256), torch.empty(8, 256)
    programs = {
        wire: mfsdp.trace(model, (x,), world=4, strategy=strategy, mp_policy=mfsdp.MixedPrecisionPolicy(BF16, **words))
        for wire, words in (("int8", BOTH), ("bf16", {"param_comm_dtype": BF16, "grad_comm_dtype": BF16}))
    }  # fmt: skip
    sent: dict[str, list[int]] = {}
    for wire, traced in programs.items():
        for program in (traced.forward, traced.backward):
            text = pipeline.run(program)[-1].listing
            machine = hardware("h100")
            times = op_cost.op_times(program, machine)
            for node in program.nodes:
                if node.target in (ops.all_gather, ops.reduce_scatter, ops.all_reduce):
                    sent.setdefault(wire, []).append(byte_costs.travels(node))
                    assert times[node].transfer.moving > 0
                    assert (f", int8 {byte_costs.size(byte_costs.travels(node))}" in text) == (wire == "int8")
            assert ("reduce int8" in text) == (wire == "int8") and ("gather int8" in text) == (wire == "int8")
            waits = [times[n].seconds for n in program.nodes if n.target is ops.wait]
            assert all((seconds > 0) == (wire == "int8") for seconds in waits)
            assert "_cast" not in text or strategy == 0 or wire == "bf16", "main weights are quantised as they are"
    assert len(sent["int8"]) == (1 if strategy == 0 else 2)
    padded = [n // 2 for n in sent["bf16"]]
    assert sent["int8"] == [n + 4 * 4 * -(-n // 4 // 128) for n in padded], "a byte each, and a scale for each 128"


def test_memory_of_what_travels():
    with torch.device("meta"):
        model, x = nn.Linear(256, 256), torch.empty(8, 256)
    sharding = {"world": 4, "strategy": 3, "mp_policy": mfsdp.MixedPrecisionPolicy(**BOTH)}
    backward = mfsdp.trace(model, (x,), **sharding).backward
    pipeline.run(backward)
    gather, sums = ([n for n in backward.nodes if n.target is op] for op in (ops.all_gather, ops.reduce_scatter))
    for node, factor in [(n, 5 / 4) for n in gather] + [(n, 2) for n in sums]:
        assert byte_costs.workspace(node) == factor * byte_costs.travels(node)


# On ranks


def carried(kind: str) -> tuple[bool, bool, bool]:
    """Gathers and sums of two segments of uneven ends, by hand; whether all ranks have the same."""
    with carried_by(lambda group, device: C10dTransport(group)) if kind == "native" else nullcontext():
        group, me, world, run = groups.default_group(), dist.get_rank(), dist.get_world_size(), execution.current()
        sizes = (300, 16)
        shards = [torch.randn(n, generator=torch.Generator().manual_seed(me)) for n in sizes]
        fulls = [torch.empty(world * n, dtype=BF16) for n in sizes]
        comm_formats.gather(run, list(zip(fulls, shards, strict=True)), group, "int8")()
        right = True
        for full, n in zip(fulls, sizes, strict=True):
            every = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(world)]
            right &= torch.equal(full, torch.cat([rounded(x) for x in every]).to(BF16))
        sums = [torch.empty(n) for n in sizes]
        mine = [torch.randn(world * n, generator=torch.Generator().manual_seed(9 + me)).to(BF16) for n in sizes]
        comm_formats.scatter(run, list(zip(mine, sums, strict=True)), F32, group, "int8")()
        added = True
        for total, n in zip(sums, sizes, strict=True):
            every = [torch.randn(world * n, generator=torch.Generator().manual_seed(9 + r)).to(BF16)[me * n :][:n]
                     for r in range(world)]  # fmt: skip
            first, *rest = map(rounded, every)
            added &= torch.equal(total, sum(rest, first))
        alike = [torch.empty_like(fulls[0]) for _ in range(world)]
        dist.all_gather(alike, fulls[0])
        return right, added, all(torch.equal(a, alike[0]) for a in alike)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["gloo", "native"])
def test_what_is_carried(two_ranks, kind):
    assert two_ranks.run(carried, kind) == [(True, True, True)] * 2


class Plain:
    """The same training by hand: of whole flat buffers, with other ranks' gradients asked for."""

    def __init__(self, model: Any, plain: nn.Module, place: str):
        self.plain, self.place, self.world = plain, place, dist.get_world_size()
        self.buffers = [b for m in model.modules() if isinstance(m, mfsdp.FSDPModule) for b in m._mfsdp_unit.buffers]

    def parts(self, buffer: Any, full: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's part of each segment."""
        segments = buffer.layout.segments
        return [p for s in segments for p in full[s.full_start :][: self.world * s.chunk].split(s.chunk)]

    def names(self, buffer: Any) -> list[tuple[Any, str]]:
        prefix = "" if buffer.unit.fqn == "(root)" else f"{buffer.unit.fqn}."
        return [(slot, prefix + slot.name) for slot in buffer.layout.slots]

    def weights(self) -> dict[str, torch.Tensor]:
        out = {}
        for b in self.buffers:
            full = b.weights.gather()
            if b.precision.wire and self.place != "no_shard":
                full = torch.cat([rounded(part) for part in self.parts(b, full)])
            for slot, name in self.names(b):
                out[name] = full[slot.offset :][: slot.numel].view(slot.shape).to(b.precision.compute)
        return out

    def step(self, data: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradient of a step."""
        weights = {n: w.requires_grad_() for n, w in self.weights().items()}
        grads = [
            dict(zip(weights, torch.autograd.grad(loss(torch.func.functional_call(self.plain, weights, x)),
                                                  list(weights.values())), strict=True))
            for x in data
        ]  # fmt: skip
        out = {}
        for b in self.buffers:
            packed = []
            for micro in grads:
                packed.append(torch.zeros(b.layout.full_numel, dtype=b.precision.grad_comm))
                for slot, name in self.names(b):
                    packed[-1][slot.offset :][: slot.numel] = micro[name].flatten()
            if self.place in ("no_shard", "optim"):
                kept = packed[0].float()
                packed = [(kept + packed[1]).to(b.precision.grad_comm)]
            total = sum(self.reduced(b, flat) for flat in packed)
            for slot, name in self.names(b):
                out[name] = total[slot.offset :][: slot.numel].view(slot.shape)
        return out

    def reduced(self, b: Any, flat: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(every, flat)
        quantise = rounded if b.precision.grad_wire else torch.Tensor.float
        if self.place != "no_shard":
            return sum(torch.cat([quantise(p) for p in self.parts(b, x)]) for x in every) / self.world
        each = -(-flat.numel() // self.world)
        rows = [nn.functional.pad(x, (0, self.world * each - x.numel())).view(self.world, each) for x in every]
        total = sum(torch.stack([quantise(p) for p in x]) for x in rows)
        again = torch.stack([quantise(p) for p in total]).to(flat.dtype)
        return again.flatten()[: flat.numel()].float() / self.world


def loss(out: torch.Tensor) -> torch.Tensor:
    return (out.float() - 0.5).square().mean()


def trained(
    places: list[str], lowering: str, words: dict[str, Any], model: type[nn.Module] = MLP, flat: bool = False,
    keep_cast: bool = True,
) -> tuple[list[str], dict[str, list[torch.Tensor]]]:  # fmt: skip
    """Gradients that are not bitwise those by hand, and last weights, by strategy: two steps of two microbatches."""
    wrong, last = [], {}
    for place in places:
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = model()
        policy = mfsdp.MixedPrecisionPolicy(**words)
        sharded = copy.deepcopy(plain)
        mfsdp.fully_shard(sharded, units=["up", "down"] if model is MLP else [], **sharding(place, mp_policy=policy))
        by_hand = Plain(sharded, plain.to(words.get("compute_dtype", F32)), place)
        run = compiled(sharded, lowering, **({} if lowering == "none" else {"keep_cast": keep_cast}))
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        if flat:
            mfsdp.fully_shard_optimizer(optimizer)
        torch.manual_seed(5 + dist.get_rank())
        for step in range(3):
            width = 24 if model is MLP else 33
            data = [torch.randn(4, width, dtype=words.get("compute_dtype", F32)) for _ in range(2)]
            for m, x in enumerate(data):
                with nullcontext() if m else mfsdp.no_sync(sharded):
                    loss(run(x)).backward()
            want = by_hand.step(data)
            for name, p in sharded.named_parameters():
                if not torch.equal(p.grad.full_tensor(), want[name]):
                    wrong.append(f"{place} step {step} {name}")
            optimizer.step()
            optimizer.zero_grad()
        last[place] = [p.full_tensor().detach() for p in sharded.parameters()]
    return wrong, last


MIXED: dict[str, dict[str, Any]] = {
    "parameters": {"param_comm_dtype": "int8", "grad_comm_dtype": BF16, "grad_sum": "wide", "compute_dtype": BF16},
    "gradients": {"grad_comm_dtype": "int8"},
    "both": BOTH,
    "both, bf16": {**BOTH, "compute_dtype": BF16},
}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lowering", "name"),
    [
        pytest.param("eager", "both", marks=pytest.mark.exhaustive),
        ("eager", "both, bf16"),
        ("none", "both"),
        pytest.param("eager", "gradients", marks=pytest.mark.exhaustive),
        ("none", "parameters"),
    ],
)
def test_training_is_what_it_is_by_hand(two_ranks, lowering, name):
    """Every strategy; bitwise, on both ranks, with rows that are cut unevenly."""
    places = [p for p in STRATEGIES if name != "parameters" or p != "no_shard"]  # where sums in bf16 are rounded
    for wrong, last in two_ranks.run(trained, places, lowering, MIXED[name]):
        assert wrong == []
        first, *others = [last[p] for p in places if p not in ("no_shard", "optim")]
        assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.dist
def test_several_segments_travel_in_one_message(two_ranks):
    for wrong, _ in two_ranks.run(trained, ["optim_grads_params"], "eager", BOTH, Lumpy):
        assert wrong == []


@pytest.mark.dist
@pytest.mark.parametrize("keep_cast", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_gathers_launched_behind_the_step(two_ranks, keep_cast):
    """A flat optimizer launches forward's first gathers: of the same weights, quantised in the same way."""
    args = ["optim_grads", "optim_grads_params"], "eager", BOTH
    for wrong, _ in two_ranks.run(trained, *args, flat=True, keep_cast=keep_cast):
        assert wrong == []


@pytest.mark.dist
@pytest.mark.inductor
def test_inductor(two_ranks):
    """Weights are near those of the same model without Inductor."""
    place = "optim_grads_params"
    (_, want), (_, got) = (two_ranks.run(trained, [place], how, BOTH)[0] for how in ("eager", "inductor"))
    for a, b in zip(want[place], got[place], strict=True):
        assert (a - b).abs().max() < 0.03, "three steps of 0.01"


def exact_outside() -> list[str]:
    """What is not what main weights are: values and state dicts never come in int8; what forward sees does."""
    torch.manual_seed(0)
    plain = MLP()
    model = copy.deepcopy(plain)
    mfsdp.fully_shard(model, units=["up", "down"], mp_policy=mfsdp.MixedPrecisionPolicy(**BOTH))
    wrong = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), plain.get_parameter(n))]
    whole = {n: v.full_tensor() for n, v in model.state_dict().items()}
    wrong += [f"state {n}" for n, v in whole.items() if not torch.equal(v, plain.get_parameter(n))]
    with mfsdp.summon_full_params(model):
        wrong += [f"summoned {n}" for n, p in model.named_parameters() if not torch.equal(p, plain.get_parameter(n))]
    for module in (model, model.up, model.down):
        (buffer,) = module._mfsdp_unit.buffers
        seen = sync_collectives.gather_now(buffer.weights.source, buffer.text)
        every = [torch.empty_like(seen) for _ in range(dist.get_world_size())]
        dist.all_gather(every, seen)
        if not all(torch.equal(x, seen) for x in every):
            wrong.append(f"ranks see other parameters of {buffer.unit.fqn}")
        off = (seen - buffer.weights.gather()).abs().max()
        if module is not model and not 0 < off <= buffer.weights.gather().abs().max() / 254 * 1.001:
            wrong.append(f"{buffer.unit.fqn} is {off} off")
    return wrong


@pytest.mark.dist
def test_values_outside_of_forward_are_exact(two_ranks):
    assert two_ranks.run(exact_outside) == [[]] * 2


def bytes_sent(words: dict[str, Any]) -> int:
    """Bytes of messages that this rank sends in a forward and a backward, without words."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    mfsdp.fully_shard(model, mp_policy=mfsdp.MixedPrecisionPolicy(**words), reshard_after_forward=True)
    run = compiled(model, "eager")
    sent, swap = [], GlooTransport.swap

    def told(self: GlooTransport, here: Any, there: Any, tag: int) -> Any:
        sent.append(sum(t.nbytes for _, t in there if t.nbytes > 8))
        return swap(self, here, there, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooTransport, "swap", told)
        run(torch.randn(2, 256, requires_grad=True)).sum().backward()
    return sum(sent)


@pytest.mark.dist
def test_bytes_on_the_wire(two_ranks):
    half = 256 * 256 // 2
    for words, want in (
        ({"compute_dtype": BF16, "grad_comm_dtype": BF16, "cast_forward_inputs": True}, 3 * 2 * half),
        ({"compute_dtype": BF16, **BOTH}, 3 * (half + half // 32)),
        (BOTH, 3 * (half + half // 32)),
    ):
        assert two_ranks.run(bytes_sent, words) == [want] * 2


def poisoned(place: str, values: list[float], lowering: str) -> list[tuple[bool, bool, bool]]:
    """One rank's loss is no number, in one element; what every rank has of gradients, and of their norm, by value."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP()
    mfsdp.fully_shard(model, units=["up", "down"], **sharding(place, mp_policy=mfsdp.MixedPrecisionPolicy(**BOTH)))
    run, found = compiled(model, lowering), []
    for value in values:
        model.zero_grad()
        weight = torch.ones(4, 24)
        if dist.get_rank():
            weight[1, 3] = value
        (run(torch.randn(4, 24)) * weight).sum().backward()
        grads = [p.grad.full_tensor() for p in (model.down.weight, model.down.bias)]
        bad = all(not g[3].isfinite().any() for g in grads)
        fine = bool(model.down.weight.grad.full_tensor()[20].isfinite().all())
        found.append((bad, fine, bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite())))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("place", ["no_shard", "optim_grads_params"])
def test_what_is_no_number_arrives(two_ranks, place):
    values = [float("nan"), float("inf")]
    assert two_ranks.run(poisoned, place, values, "eager") == [[(True, True, False)] * 2] * 2


def on_two_levels(place: str) -> tuple[bool, bool, float]:
    """Whether all ranks see the same parameters, whether replicas stay alike, and how far off a gradient is, over its
    largest.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = MLP()
    model = copy.deepcopy(plain)
    words = sharding(place, mp_policy=mfsdp.MixedPrecisionPolicy(**BOTH))
    mfsdp.fully_shard(model, units=["up", "down"], **words)
    run = compiled(model, "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = batches(CASES["mlp"])
    run(data[dist.get_rank()]).square().mean().backward()
    for x in data:
        (plain(x).square().mean() / len(data)).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    off = max(((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)
    optimizer.step()
    optimizer.zero_grad()
    run(data[dist.get_rank()]).square().mean().backward()
    seen = torch.cat([
        sync_collectives.gather_now(b.weights.source, b.text) for m in (model, model.up, model.down)
        for b in m._mfsdp_unit.buffers
    ])  # fmt: skip
    values = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
    alike = []
    for mine in (seen, values):
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        alike.append(all(torch.equal(x, every[0]) for x in every))
    return alike[0], alike[1], off


@pytest.mark.dist
@pytest.mark.parametrize("place", TWO_LEVELS)
def test_two_levels(four_ranks, place):
    for seen, values, off in four_ranks.run(on_two_levels, place):
        assert seen and values and off < 0.05
