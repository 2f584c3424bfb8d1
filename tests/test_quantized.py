"""Frozen quantized weights are sharded and gathered as bytes, with the numbers of unsharded ones."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp import pipeline
from mfsdp.buffers.flat_buffer import buffers_in
from mfsdp.dtensor import quantized
from mfsdp.dtensor.sharded_dtensor import ShardedDTensor
from mfsdp.ir import verifier
from mfsdp.ir.roles import Kind
from mfsdp.ir.saved_copies import copies
from mfsdp.runtime import sync_collectives
from tests.helpers.parity import averaged, compiled, whole
from tests.helpers.quantized import Block, alike, blocks, linear, numbers, parts

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

F32, BF16 = torch.float32, torch.bfloat16


def trained(kind: str, lowering: str, dtype: torch.dtype, **sharding: Any) -> dict[str, float]:
    """Three steps of AdamW over all parameters, with weight decay, beside the unsharded model with all ranks' data."""
    torch._dynamo.reset()
    reference = blocks(kind, dtype)
    model = copy.deepcopy(reference)
    policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=None, param_dtype=dtype)
    mfsdp.fully_shard(model, units=[Block], mp_policy=policy, **sharding)
    run = compiled(model, lowering)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5) for m in (reference, model)]
    before = {k: whole(v) if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    out = {"forward": 0.0, "grad": 0.0}
    for step in range(3):
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()), dtype=dtype)
        want, got = reference(x), run(x)
        if step == 0:
            out["forward"] = (want - got).abs().max().item()
        want.square().mean().backward()
        got.square().mean().backward()
        averaged(reference)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (reference, model)]
        out["norm"] = abs(1 - (norms[1] / norms[0]).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mine, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    trains = [n for n, p in theirs.items() if p.requires_grad]
    assert len(trains) >= 6
    out["weights"] = max((whole(mine[n].detach()) - theirs[n]).abs().max().item() for n in trains)
    after = {k: whole(v) if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    frozen = [k for k in after if ".base." in k and "bias" not in k]
    for k in frozen:
        assert torch.equal(after[k].reshape(-1).view(torch.uint8), before[k].reshape(-1).view(torch.uint8)), k
    assert len(frozen) >= 6
    return out


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "lowering", "dtype", "sharding"),
    [
        ("nested", "none", F32, {}), ("nested", "eager", F32, {}),
        pytest.param("nf4", "eager", BF16, {"strategy": 2}, marks=pytest.mark.exhaustive),
        ("int8", "none", BF16, {"strategy": 1}), ("int8", "eager", F32, {}),
        ("fp4 with a bias", "eager", F32, {"reshard_after_forward": False}),
        ("bf16 storage", "none", BF16, {"strategy": 0}),
        ("torchao int8", "none", F32, {"strategy": 2}), ("torchao int8", "eager", BF16, {}),
        pytest.param(
            "torchao groups with a bias", "eager", F32, {"reshard_after_forward": False}, marks=pytest.mark.exhaustive
        ),
        ("torchao int4", "none", BF16, {}), ("torchao int4", "eager", F32, {"strategy": 1}),
    ],
)  # fmt: skip
def test_trains_as_unsharded(two_ranks, kind, lowering, dtype, sharding):
    for seen in two_ranks.run(trained, kind, lowering, dtype, **sharding):
        assert seen["forward"] == 0.0
        assert max(seen["norm"], seen["weights"]) <= (1e-6 if "bias" in kind else 0.0), seen


@pytest.mark.dist
@pytest.mark.inductor
@pytest.mark.parametrize("kind", ["nested", pytest.param("torchao int8", marks=pytest.mark.exhaustive)])
def test_compiled_by_inductor(two_ranks, kind):
    for seen in two_ranks.run(trained, kind, "inductor", F32, timeout=300):
        assert seen["forward"] < 1e-6 and seen["weights"] < 1e-5, seen


def on_a_mesh(kind: str, outer_strategy: str, lowering: str) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2))
    return trained(kind, lowering, F32, mesh=mesh, outer_strategy=outer_strategy)


@pytest.mark.dist
def test_on_four_ranks(four_ranks):
    found = [
        *four_ranks.run(trained, "nested", "eager", F32),
        *four_ranks.run(on_a_mesh, "nested", "no_shard", "none"),
        *four_ranks.run(on_a_mesh, "torchao int8", "optim", "none"),
        *four_ranks.run(on_a_mesh, "nested", "optim", "eager"),
    ]
    for seen in found:
        assert seen["forward"] == 0.0 and seen["weights"] < 1e-5, seen


# What is gathered and what is saved


@pytest.mark.slow
def test_bytes_are_gathered_and_matrices_are_not_saved():
    """In forward and in backward, 3.88 times fewer than of bf16, and 3.54 of scales that are not nested."""
    for kind, fewer in (("nested", 3.87), ("nf4", 3.55), ("int8", 1.99), ("torchao int8", 1.98)):
        model = blocks(kind, BF16, (512, 512, 512))
        traced = mfsdp.trace(model, (torch.randn(3, 512, dtype=BF16),), world=2, units=[Block])
        for program in (traced.forward, traced.backward):
            pipeline.run(program)
            found = [n.meta["val"] for n in program.find(Kind.FULL) if n.meta["val"].dtype is torch.uint8]
            assert len(found) == (2 if program is traced.forward else 1), "backward does not read the first block's"
            assert 2 * 512 * 512 / found[0].numel() > fewer - 0.03
        saved = traced.forward.results()[traced.forward.returned :]
        assert not copies(traced.forward)
        assert all(math.prod(n.meta["val"].shape) < 512 * 512 for n in saved if isinstance(n, torch.fx.Node))


@pytest.mark.slow
def test_a_saved_matrix_breaks_an_invariant():
    """Tables in buffers would do it: the matrix would not depend on parameters alone, and AOTAutograd saves it."""
    forward = mfsdp.trace(blocks("nested"), (torch.randn(3, 128),), world=2, units=[Block]).forward
    *_, matrix = (n for n in forward.nodes if n.meta.get("val") is not None and n.meta["val"].shape == (192, 128))
    output = forward.graph.output_node()
    output.args = ([*output.args[0], matrix],)
    assert [how for _, how in copies(forward)] == ["from parameters"]
    with pytest.raises(mfsdp.InvariantError, match="invariant 47"):
        verifier.check(forward)


def gathered_uncompiled() -> tuple[int, int, list[int]]:
    """Bytes gathered in uint8, their number of gathers, and elements of what else autograd saves."""
    model = mfsdp.fully_shard(blocks("nested"), units=[Block])
    counted: list[int] = []
    own = sync_collectives.gather_now

    def counts(source: torch.Tensor, spec: str) -> torch.Tensor:
        full = own(source, spec)
        counted.extend([full.nbytes] if full.dtype is torch.uint8 else [])
        return full

    saved: list[int] = []
    sync_collectives.gather_now = counts
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            out = model(torch.randn(3, 128, requires_grad=True))
        out.sum().backward()
    finally:
        sync_collectives.gather_now = own
    return sum(counted), len(counted), saved


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_uncompiled_code_saves_no_matrix(two_ranks):
    for total, count, saved in two_ranks.run(gathered_uncompiled):
        assert count == 6 and total < 2 * 0.54 * (128 * 192 + 192 * 100 + 100 * 72) + 2 * 3 * 1300
        assert saved and max(saved) < 100 * 72


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nested", "torchao int8"])
def test_prediction(kind):
    """Of weights on the meta device, which will be quantized; and of those that are: the same."""
    real, planned = (blocks(kind, widths=(512, 512), device=device) for device in ("cpu", "meta"))
    report, same = (
        mfsdp.explain(m, (torch.randn(3, 512),), world=2, units=[Block], suggest=False) for m in (real, planned)
    )
    assert (report.step, report.peak) == (same.step, same.peak) and "u8[" in str(report)
    weight = real[0].base.weight
    assert (weight.qdata if "torchao" in kind else weight.quant_state.absmax).device.type == "cpu", "nothing is changed"
    sharded = mfsdp.fully_shard(real, units=[Block])
    assert mfsdp.explain(sharded, (torch.randn(3, 512),), world=2, suggest=False).peak == report.peak


# Checkpoints


def other(kind: str) -> nn.Module:
    """A model with other values, quantized alike."""
    torch.manual_seed(1)
    out = blocks(kind)
    for block in out:
        with torch.no_grad():
            block.base = linear(kind, block.base.in_features, block.base.out_features, F32)
            block.up.weight.mul_(2)
    return out


def saved_and_loaded(folder: str, kind: str) -> None:
    reference = blocks(kind)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block], strategy=1 if kind == "bf16 storage" else 3)
    model(torch.ones(3, 128))
    alike(numbers(model), parts(reference.state_dict()))
    alike(numbers(copy.deepcopy(model)), parts(reference.state_dict()))
    new = other(kind)
    x = torch.randn(3, 128)
    assert not torch.equal(new(x), reference(x))
    model.load_state_dict(new.state_dict())
    alike(numbers(model), parts(new.state_dict()))
    assert torch.equal(model(x), new(x)), "nested scales have another offset now"
    mfsdp.save_safetensors(model, f"{folder}/{kind}")
    again = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])
    mfsdp.load_safetensors(again, f"{folder}/{kind}")
    alike(numbers(again), parts(new.state_dict()))
    assert torch.equal(again(x), new(x))
    third = mfsdp.fully_shard(new, units=[Block])
    want = model(x)
    with torch.no_grad():
        for p in third.parameters():
            p.zero_()
    torch.distributed.checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/dcp {kind}")
    state = get_model_state_dict(third)
    torch.distributed.checkpoint.load({"model": state}, checkpoint_id=f"{folder}/dcp {kind}")
    set_model_state_dict(third, state)
    assert torch.equal(third(x), want)
    if "torchao" in kind:
        everywhere = StateDictOptions(full_state_dict=True)
        set_model_state_dict(again, get_model_state_dict(model, options=everywhere), options=everywhere)
        alike(numbers(again), numbers(model))
        state = reference.state_dict() if dist.get_rank() == 0 else {}
        with pytest.raises(ValueError, match="_weight_scale.* is part of a quantized weight: call load_state_dict"):
            set_model_state_dict(
                again, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            )
        alike(numbers(again), numbers(model))
    whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        plain, metadata = safetensors(f"{folder}/{kind}")
        alike({k: parts(whole_state)[k] for k in plain}, plain)
        if "torchao" in kind:
            from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

            for state in (whole_state, unflatten_tensor_state_dict(plain, metadata)[0]):
                unsharded = blocks(kind)
                unsharded.load_state_dict(state, assign=True)
                assert torch.equal(unsharded(x), want)


def safetensors(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["nested", "bf16 storage", "int8", "torchao int8", "torchao int4"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_state_dicts_are_the_librarys_own(two_ranks, kind, tmp_path):
    two_ranks.run(saved_and_loaded, str(tmp_path), kind)


def streamed(kind: str, to: int | None) -> tuple[int, int, int, int]:
    """Streams in another dtype; returns how many tensors came, how many gathers, and the bytes that they and the flat
    buffers have. Codes and scales are exact, and no tensor is gathered by itself.
    """
    reference = blocks(kind, BF16)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])
    sizes: list[int] = []
    own = sync_collectives.collect

    def counts(shard: torch.Tensor, splits: tuple[int, ...], ranks: int, *rest: Any) -> Any:
        sizes.append(ranks * shard.nbytes)
        return own(shard, splits, ranks, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_collectives, "collect", counts)
        patch.delattr(ShardedDTensor, "full_tensor")
        stream = mfsdp.stream_weights(model, F32, to=to)
        got = dict(stream)
    want = {n: t.to(F32) if ".base." not in n else t for n, t in parts(reference.state_dict()).items()}
    if stream.consumes:
        alike({name: got[name] for name in want}, want)
        assert [tuple(m) for m in stream.metadata()] == [(n, t.dtype, tuple(t.shape)) for n, t in got.items()]
    held = sum(b.spec.full_numel * (1 if b.weights.main.dtype is torch.uint8 else 4) for b in buffers_in(model))
    return len(got), len(sizes), sum(sizes), held


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["nested", "bf16 storage", "int8", "torchao int8"])
def test_a_stream_gathers_bytes_by_unit(two_ranks, kind):
    for to in (None, 1):
        for rank, (got, gathers, sent, held) in enumerate(two_ranks.run(streamed, kind, to)):
            assert (gathers, sent) == (6, held), "a buffer of bytes and one of LoRA's matrices in each of three units"
            assert bool(got) == (to is None or rank == to)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_whose_packed_entry_has_another_length(tmp_path):
    """It is JSON with the nested scales' offset, a number of more or fewer digits."""
    key = "1.base.weight.quant_state.bitsandbytes__nf4"
    model, source = mfsdp.fully_shard(blocks("nested"), units=[Block]), other("nested")
    while len(source.state_dict()[key]) == len(model.state_dict()[key]):
        source[1].base = linear("nested", 192, 100, F32)
    want, before = source(torch.ones(3, 128)), numbers(copy.deepcopy(model))
    dcp = torch.distributed.checkpoint
    dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(dcp.CheckpointException, match=r"Missing key.*: model\.more"):
        dcp.load({"model": {**model.state_dict(), "more": torch.ones(1)}}, checkpoint_id=tmp_path / "theirs")
    alike(numbers(model), before)
    for where in ("theirs", "ours"):
        again = copy.deepcopy(model)
        if where == "ours":
            checkpoints = mfsdp.Checkpoints(tmp_path)
            checkpoints.save(0, mfsdp.fully_shard(source, units=[Block]))
            checkpoints.load(again)
        else:
            dcp.load({"model": again.state_dict()}, checkpoint_id=tmp_path / where)
        assert torch.equal(again(torch.ones(3, 128)), want), where
        alike(numbers(again), numbers(source))


def test_what_does_not_fit_is_not_loaded():
    model = mfsdp.fully_shard(blocks("nested"), units=[Block])
    before = numbers(model)
    for kind in ("fp4 with a bias", "nf4"):
        with pytest.raises(RuntimeError, match="quantized"):
            model.load_state_dict(blocks(kind).state_dict(), strict=False)
        assert torch.equal(
            model.state_dict()["0.base.weight_absmax".replace("_", ".", 1)].full_tensor(),
            before["0.base.weight.absmax"],
        )
    state = numbers(model)
    del state["0.base.weight.absmax"], state["1.base.weight.quant_state.bitsandbytes__nf4"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.base\.weight\.absmax.*1\.base\.weight\.quant_state"):
        model.load_state_dict(state)


# What is refused


class Recomputed(nn.Module):
    def __init__(self, layers: nn.Sequential, reentrant: bool):
        super().__init__()
        self.layers, self.reentrant = layers, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def linear_on_meta() -> nn.Module:
    with torch.device("meta"):
        return linear("nested", 64, 64, F32)


def refusals() -> dict[str, tuple[str, Any]]:
    from bitsandbytes import nn as bnb

    class Own(bnb.Linear4bit):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    turned = linear("nf4", 128, 64, F32)
    turned.in_features, turned.out_features = 64, 128
    trains = linear("bf16 storage", 64, 64, F32)
    trains.weight.requires_grad_(True)
    embedding = bnb.Embedding4bit(8, 64).to("cpu")
    return {
        "not yet": ("call model.to", bnb.Linear4bit(64, 64)),
        "not yet in 8 bits": ("call model.to", bnb.Linear8bitLt(64, 64, has_fp16_weights=False)),
        "trains": ("cannot train", trains),
        "turned": (r"quantized as a matrix \[64, 128\]", turned),
        "own forward": ("not read by the forward of bitsandbytes alone", Own(64, 64).to("cpu")),
        "on meta": ("build the model where it will run", linear_on_meta()),
        "an embedding": ("is a Params4bit, a tensor subclass", embedding),
    }


@pytest.mark.parametrize(
    "name", ["not yet", "not yet in 8 bits", "trains", "turned", "own forward", "on meta", "an embedding"]
)
def test_refused(name):
    words, layer = refusals()[name]
    model = nn.Sequential(linear("nested", 64, 64, F32), layer)
    weights, kinds = [m.weight for m in model], [type(m) for m in model]
    with pytest.raises((ValueError, NotImplementedError), match=words):
        mfsdp.fully_shard(model, units=["*"])
    assert [m.weight for m in model] == weights and [type(m) for m in model] == kinds, "nothing has changed"
    if name != "on meta":
        mfsdp.fully_shard(model, units=["*"], ignored_params=[model[1].weight])
    assert model[1].weight is weights[1]


@pytest.mark.slow
def test_a_failure_half_way_is_undone(monkeypatch):
    for kind in ("nested", "bf16 storage", "int8", "torchao int8"):
        reference = blocks(kind)
        model = copy.deepcopy(reference)
        classes = [type(m) for m in model.modules()]
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(mfsdp.sharding.shard.te_modules, "adapt", lambda *args: exec("raise MemoryError"))
            mfsdp.fully_shard(model, units=[Block])
        assert [type(m) for m in model.modules()] == classes
        alike(parts(model.state_dict()), parts(reference.state_dict()))
        x = torch.randn(3, 128)
        assert torch.equal(model(x), reference(x))
        mfsdp.fully_shard(model, units=[Block])
        alike(numbers(model), parts(reference.state_dict()))


@pytest.mark.parametrize("kind", ["nested", "torchao int8"])
def test_originals_are_freed(kind):
    model = blocks(kind)
    weight: Any = model[0].base.weight
    inside = (weight.qdata, weight.scale) if "torchao" in kind else (weight.quant_state, weight.quant_state.absmax)
    alive = [weakref.ref(t) for t in (weight, *inside)]
    del weight, inside
    mfsdp.fully_shard(model, units=[Block])
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("kind", ["nested", "torchao int8"])
def test_bytes_are_neither_cast_nor_trained(kind):
    model = mfsdp.fully_shard(blocks(kind, BF16), units=[Block], mp_policy=mfsdp.MixedPrecisionPolicy(None))
    before = numbers(model)
    for change in (lambda: model.to(BF16), lambda: model.bfloat16(), lambda: model.to("cpu")):
        change()
    with pytest.raises(RuntimeError, match="floating point"):
        model[0].base.weight.requires_grad_(True)
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.9))
    for _ in range(2):
        model(torch.randn(3, 128, dtype=BF16)).sum().backward()
        optimizer.step()
        model.zero_grad()
    after = numbers(model)
    alike({k: v for k, v in after.items() if "base" in k}, {k: v for k, v in before.items() if "base" in k})
    assert not torch.equal(after["0.up.weight"], before["0.up.weight"])
    with mfsdp.summon_full_params(model):
        alike(parts(model.state_dict()), after)
    for p in model.parameters():
        assert p.dtype in (torch.uint8, BF16) and (p.dtype is BF16) == p.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_recomputed_layers(reentrant, lowering):
    if reentrant and lowering == "eager":
        pytest.skip("Dynamo does not trace it")
    reference = blocks("nested")
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])

    x = torch.randn(3, 128, requires_grad=True)
    run, refer = compiled(Recomputed(model, reentrant), lowering), Recomputed(reference, False)
    for each in (run, refer):
        each(x).square().sum().backward()
    for name, p in reference.named_parameters():
        assert p.grad is None or torch.equal(model.get_parameter(name).grad.full_tensor(), p.grad), name


@pytest.mark.slow
def test_odd_sizes():
    """A weight with an odd number of elements, and one in blocks of 4096."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for shape, size in (((7, 9), 64), ((64, 100), 4096), ((3, 64), 64)):
        for nested in (False, True):
            value, state = quantize_4bit(torch.randn(shape), blocksize=size, compress_statistics=nested)
            layer = linear("nf4", shape[1], shape[0], F32)
            layer.weight.data, layer.weight.quant_state = value, state
            form = (apart := quantized.take_apart("x", layer)).form
            assert torch.equal(form.matrix(tuple(apart.values.values()), F32), dequantize_4bit(value, state))


def test_weights_that_an_evaluation_on_a_cpu_has_reordered():
    """Their scales are rounded to bf16 by then, and no longer nested."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu, dequantize_4bit

    for kind in ("nested", "nf4", "bf16 storage"):
        layer = linear(kind, 128, 64, F32)
        state = copy.deepcopy(layer.weight.quant_state)
        if state.nested:
            state.absmax = state.state2.code[state.absmax.int()] * state.state2.absmax[:1] + state.offset
            state.nested, state.state2 = False, None
        state.absmax = state.absmax.bfloat16().float()
        want = dequantize_4bit(layer.weight.data, state)
        layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu(
            layer.weight.data, layer.weight.quant_state
        )
        mfsdp.fully_shard(layer)
        assert torch.equal(layer(torch.eye(128)), want.T)
