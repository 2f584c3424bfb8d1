"""What TransformerEngine's modules, parameters and optimizers read and write of themselves, on doubles of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp import pipeline
from mfsdp.dtensor import te_linear
from mfsdp.ir import ops
from mfsdp.ir.fp8_operators import CASTS, InnerCast
from mfsdp.ir.roles import Kind, Role, unit_of
from mfsdp.ir.saved_copies import copies
from tests.helpers.engine_doubles import FusedAdam, GroupedTensor, Linear, QuantizedTensor
from tests.helpers.optimizers import fill
from tests.helpers.parallel import reset, trained_alike
from tests.helpers.parity import compiled, whole
from tests.helpers.plain_shards import Enter, Leave
from tests.helpers.snapshots import snapshot

BF16 = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


class Model(nn.Module):
    def __init__(self, layers: int = 2, **how: Any):
        super().__init__()
        self.layers = nn.ModuleList([Linear(16, 16, **how) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


def batch() -> torch.Tensor:
    return torch.randn(4, 16, dtype=torch.bfloat16)


# Modules


class Parallel(nn.Module):
    """Cut columns, cut rows, and a module that knows the ranks and is whole on each, marked as TE marks all three."""

    def __init__(self, group: Any = None, values: Sequence[Any] = (None, None, None), **how: Any) -> None:
        """``values``: the weights on all ranks together."""
        super().__init__()
        self.group, ranks, rank = group, *((1, 0) if group is None else (group.size(), group.rank()))
        up, down, head = values
        how = {"dtype": torch.float64, **how}
        self.up = Linear(16, 32 // ranks, value=up if up is None else up.chunk(ranks)[rank], **how)
        self.down = Linear(32 // ranks, 16, value=down if down is None else down.chunk(ranks, 1)[rank], **how)
        self.head = Linear(16, 6, value=head, **how)
        for module, mode in (self.up, "column"), (self.down, "row"), (self.head, None):
            module.parallel_mode, module.tp_size, module.tp_group = mode, ranks, group
            module.weight.tensor_model_parallel = True
            module.weight.partition_dim, module.weight.partition_stride = int(mode == "row"), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, cut = (Enter, Leave) if self.group is not None else (None, None)
        h = self.down(torch.relu(self.up(whole.apply(x, self.group) if whole else x)))
        return self.head(cut.apply(h, self.group) if cut else h)


def tensor_parallel(lowering: str) -> tuple[float, str, list[int]]:
    reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    reference, model, rank = Parallel(), Parallel(mesh.get_group("tp")), mesh.get_local_rank("tp")
    with torch.no_grad():
        model.up.weight.copy_(reference.up.weight.chunk(2, 0)[rank])
        model.down.weight.copy_(reference.down.weight.chunk(2, 1)[rank])
        model.head.weight.copy_(reference.head.weight)
    mfsdp.fully_shard(model, mesh=mesh["dp_shard"], units=["up", "down"])
    every = [torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    run, mine = compiled(model, lowering), every[mesh.get_local_rank("dp_shard")]
    wrong = trained_alike(model, run, reference, mine, every, lambda m, x: m(x).square().mean())
    worst = max(wrong, key=wrong.__getitem__)
    return wrong[worst], worst, [n for p in model.parameters() for n in p.shape]


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_tensor_parallel_weights(four_ranks, lowering):
    for wrong, where, shapes in four_ranks.run(tensor_parallel, lowering):
        assert wrong < 1e-9, where
        assert shapes == [32, 16, 16, 32, 6, 16]


def quantised_pieces(folder: str, preserved: bool) -> None:
    """Trains a step on 2 x 2 ranks and loads it on 4 x 1, each from weights that are FP8 from the start."""
    reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    made = torch.Generator().manual_seed(0)
    first, second = ([torch.randn(*n, generator=made).bfloat16() for n in SHAPES] for _ in range(2))
    how = {"dtype": torch.bfloat16, "quantised": True, "preserved": preserved}
    models = Parallel(mesh.get_group("tp"), first, **how), Parallel(None, second, **how)
    places = mesh["dp_shard"], init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    optimizers = []
    for model, place in zip(models, places, strict=True):
        mfsdp.fully_shard(model, mesh=place, units=["up", "down"], mp_policy=BF16)
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.1))
    parts = first[0].chunk(2), first[1].chunk(2, 1), [first[2]]
    for p, pieces, dim in zip(models[0].parameters(), parts, (0, 1, 0), strict=True):
        want = [w if preserved else QuantizedTensor.of(w).dequantize() for w in pieces]
        assert p.dtype is torch.float32 and torch.equal(p.full_tensor(), torch.cat(want, dim).float())
    compiled(models[0], "eager")(batch() + dist.get_rank() // 2).float().square().mean().backward()
    optimizers[0].step()
    dcp.save(dict(zip("mo", get_state_dict(models[0], optimizers[0]), strict=True)), checkpoint_id=folder)
    state = dict(zip("mo", get_state_dict(models[1], optimizers[1]), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(models[1], optimizers[1], model_state_dict=state["m"], optim_state_dict=state["o"])
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        moments = [[o.state[x][n] for n in ("exp_avg", "exp_avg_sq")] for o, x in zip(optimizers, (p, q), strict=True)]
        for a, b in zip([p, *moments[0]], [q, *moments[1]], strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor()) and a.full_tensor().abs().max() > 0


SHAPES = (32, 16), (16, 32), (6, 16)


@pytest.mark.dist
@pytest.mark.parametrize("preserved", [True, False])
def test_quantised_pieces_are_saved_and_loaded_elsewhere(four_ranks, tmp_path, preserved):
    four_ranks.run(quantised_pieces, str(tmp_path), preserved, timeout=300)


def test_modules_are_told():
    model = mfsdp.fully_shard(Model(dtype=torch.float32), units=["layers.*"], mp_policy=BF16)
    for layer in model.layers:
        assert layer.is_fsdp2 and layer.activation_dtype is torch.bfloat16 and type(layer).__name__ == "Linear"
    assert type(model.layers[0]) is type(model.layers[1])
    loss = model(batch())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_that_are_left_alone_tell_nothing():
    model = Model()
    mfsdp.fully_shard(model, ignored_params=[model.layers[0].weight])
    assert model.layers[1].is_fsdp2 and not model.layers[0].is_fsdp2


@pytest.mark.parametrize("quantised", [False, True])
def test_everything_is_taken_back(monkeypatch, quantised):
    model = Model(fuse_wgrad_accumulation=True, quantised=quantised)
    held = [] if quantised else list(model.parameters())  # quantised ones last until nothing can fail
    before, dicts = snapshot(model), [dict(m.__dict__) for m in model.modules()]
    hooks = [(len(m._state_dict_hooks), len(m._load_state_dict_pre_hooks)) for m in model.modules()]

    def fails(*args: Any) -> None:
        raise MemoryError("full")

    monkeypatch.setattr("mfsdp.sharding.shard.move_buffers", fails)
    with pytest.warns(UserWarning, match="fuse_wgrad_accumulation is turned off"), pytest.raises(MemoryError):
        mfsdp.fully_shard(model, units=["layers.*"])
    assert snapshot(model) == before
    assert [(len(m._state_dict_hooks), len(m._load_state_dict_pre_hooks)) for m in model.modules()] == hooks
    for was, m in zip(dicts, model.modules(), strict=True):
        assert all(m.__dict__[name] is value for name, value in was.items())
    assert not held or held[0] is model.layers[0].weight


def test_fused_accumulation_is_turned_off_in_words():
    model = Model(layers=6, fuse_wgrad_accumulation=True)
    with pytest.warns(UserWarning, match=r"turned off in layers\.0 .* and 2 more\. .*Make the modules with fuse_wgrad"):
        mfsdp.fully_shard(model)
    model(batch()).backward()
    assert not any(layer.fuse_wgrad_accumulation for layer in model.layers)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_input_dtypes_are_compared_with_those_of_forward():
    """Main weights have others; so have they without gradients, where ``parameters()`` shows them."""
    model = mfsdp.fully_shard(Model(dtype=torch.float32), mp_policy=mfsdp.MixedPrecisionPolicy(
        compute_dtype=torch.bfloat16, cast_forward_inputs=False))  # fmt: skip
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(TypeError, match="float32 and 'weight'.*bfloat16, which"):
            model(batch().float())
        with torch.set_grad_enabled(enabled):
            model(batch())
        for layer in model.layers:
            layer.activation_dtype = None


REFUSED = {
    "experts in one": (
        lambda m: setattr(m, "weight", nn.Parameter(GroupedTensor.of(torch.ones(2, 4, 4)))),
        NotImplementedError,
        r"layers.0.weight is a GroupedTensor \[2, 4, 4\].*single_grouped_weight=False",
    ),
    "the first FSDP": (lambda m: setattr(m, "fsdp_group", object()), ValueError, "leave out that call"),
    "pieces without values": (
        lambda m: (m.to("meta"), setattr(m, "tp_size", 2), setattr(m, "parallel_mode", "row")),
        NotImplementedError,
        "layers.0.weight is a piece over 2 ranks.*build the model where it will run",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(what):
    change, kind, words = REFUSED[what]
    model = Model()
    change(model.layers[0])
    before = snapshot(model)
    with pytest.raises(kind, match=words):
        mfsdp.fully_shard(model, units=["layers.*"])
    assert snapshot(model) == before


def test_models_on_the_meta_device():
    """``reset_parameters`` registers parameters anew."""
    want = Model(layers=1)
    torch.manual_seed(3)
    want.layers[0].reset_parameters()
    torch.manual_seed(3)
    model = mfsdp.fully_shard(Model(layers=1, device="meta"), units=["layers.*"], device="cpu")
    assert torch.equal(model.layers[0].weight.full_tensor().bfloat16(), want.layers[0].weight)
    with pytest.raises(ValueError, match="cannot be replaced"):
        model.layers[0].weight = nn.Parameter(torch.ones(16, 16))


# Quantised parameters


@pytest.mark.slow
@pytest.mark.parametrize("preserved", [True, False])
def test_quantised_parameters(preserved):
    model = Model(quantised=True, preserved=preserved)
    weights = [layer.weight for layer in model.layers]
    want = [w.get_high_precision_init_val() if preserved else w.dequantize() for w in weights]
    mfsdp.fully_shard(model, units=["layers.*"])
    for layer, value in zip(model.layers, want, strict=True):
        assert layer.weight.dtype is torch.float32 and torch.equal(layer.weight.full_tensor(), value.float())
        assert not layer.primary_weights_in_fp8 and layer.weight.tensor_model_parallel is False
        left = {"_data", "_scale", "_dtype", "_high_precision_init_val", "get_high_precision_init_val"}
        assert not left & set(vars(layer.weight))
    model(batch()).backward()


def test_main_weights_of_quantised_parameters_are_wide():
    with pytest.raises(ValueError, match="layers.0.weight is a QuantizedTensor, and main_params_dtype=None"):
        mfsdp.fully_shard(Model(quantised=True), mp_policy=mfsdp.MixedPrecisionPolicy(main_params_dtype=None))


def test_quantised_models_are_planned():
    model = Model(quantised=True)
    assert [p.phase for p in mfsdp.trace(model, (batch(),), world=4, units=["layers.*"])] == ["forward", "backward"]
    assert isinstance(model.layers[0].weight, QuantizedTensor)


# Programs


def test_forward_saves_no_quantised_weights():
    model = Model()
    for program in mfsdp.trace(model, (batch(),), world=4, units=["layers.*"]):
        pipeline.run(program)
        if program.phase == "forward":
            saved = [n.meta["val"] for n in program.results() if isinstance(n, torch.fx.Node)]
            assert not copies(program) and not any(v.dtype is torch.uint8 and v.numel() for v in saved)


@pytest.mark.filterwarnings("default:mfsdp.* reads parameters")
def test_what_does_not_compile_gathers_once_and_says_so(monkeypatch):
    from mfsdp.sharding import eager, eager_warnings

    model = mfsdp.fully_shard(Model(compiles=False), units=["layers.*"])
    gathers: list[str] = []
    plain = eager.gather
    monkeypatch.setattr(eager, "gather", lambda buffer: gathers.append(buffer.unit.fqn) or plain(buffer))
    monkeypatch.setattr(eager_warnings, "warned", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.compile(model, backend="mfsdp", options={"lowering": "eager"})(batch()).backward()
    words = [str(w.message) for w in told if "outside of a compiled graph" in str(w.message)]
    assert gathers == ["layers.0", "layers.1"] and len(words) == 1 and "Linear.forward" in words[0]
    assert all(p.grad is not None for p in model.parameters())


# te.Linear's weight, cast before its gather (`test_te.py` has TE's own operator)

Quantizer = SimpleNamespace


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    fp8=st.sampled_from(["kFloat8E4M3", "kFloat8E5M2"]),
    power=st.booleans(),
    epsilon=st.sampled_from([0.0, 1e-3]),
)
def test_the_cast_is_that_of_current_scaling(values, dtype, fp8, power, epsilon):
    """By numpy, as TE's kernels compute: float32 quotients, rounded correctly."""
    weight = torch.tensor(values, dtype=dtype)
    quantizer = Quantizer(dtype=Quantizer(name=fp8), force_pow_2_scales=power, amax_epsilon=epsilon)
    payload, inverse = te_linear._current_scaling(lambda op, *args: op(*args), weight, quantizer)
    kind = torch.float8_e4m3fn if fp8 == "kFloat8E4M3" else torch.float8_e5m2
    most = np.float32(torch.finfo(kind).max)
    with np.errstate(all="ignore"):
        amax = np.maximum(np.float32(weight.abs().max().item()), np.float32(epsilon))
        scale = np.float32(1)
        if 0 < amax < np.inf:
            scale = min(most / amax, np.finfo(np.float32).max)
            if power:
                scale = (np.float32(scale).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
        scaled = np.clip(weight.float().numpy() * np.float32(scale), -most, most)
        assert inverse.numpy().tobytes() == np.array([np.float32(1) / np.float32(scale)], np.float32).tobytes()
    assert payload.dtype is torch.uint8 and torch.equal(payload, torch.from_numpy(scaled).to(kind).view(torch.uint8))


def cast_outside(p: Any, node: Any, marker: Any) -> Any:
    """What `te_linear` says of TE's operator, of its double: it takes a payload in the place of a weight."""
    at = list(node.args).index(marker)

    def write() -> None:
        cast = Role(Kind.CAST, unit_of(marker))
        code = p.insert(torch.ops.prims.convert_element_type.default, (marker, torch.float8_e4m3fn), node, cast)
        payload = p.insert(torch.ops.aten.view.dtype, (code, torch.uint8), node, cast)
        p.rewrite(node, node.target, (*node.args[:at], payload, *node.args[at + 1 :]))

    return InnerCast("plain", lambda: "", write)


class Biased(Model):
    """A parameter beside the weight, in its buffer."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_parameter("shift", nn.Parameter(torch.zeros(16, dtype=torch.bfloat16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x) + layer.shift)
        return x.float().square().mean()


class Summed(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.layers[0].weight.float().sum()


@pytest.mark.parametrize(
    ("kind", "on", "codes", "told"),
    [
        (Biased, True, 0, "an operator casts a weight inside, and u0_shift of its buffer is read otherwise: set"),
        (Model, True, 2, "2 units in one byte per element"),
        (Model, False, 0, "u0 is gathered in 16 bits: u0_weight is read by mfsdp_engine::linear, as it is"),
        (Summed, True, 1, "u0_weight is read by operators that cast it inside, and by others"),
    ],
)
def test_casts_inside_of_operators_are_moved(monkeypatch, kind, on, codes, told):
    for name in ("linear", "linear_backward"):
        monkeypatch.setitem(CASTS, f"mfsdp_engine::{name}", cast_outside)
    forward, backward = mfsdp.trace(kind(), (batch(),), world=2, units=["layers.*"])
    assert told in pipeline.run(forward, passes=pipeline.table(quantize=on))["quantize"].listing
    pipeline.run(backward, passes=pipeline.table(quantize=on))
    for program, count in ((forward, codes), (backward, 2 * on)):  # backward does not read the sum
        dtypes = [n.meta["val"].dtype for n in program.calls(ops.all_gather)]
        assert len(dtypes) == 2 and dtypes.count(torch.float8_e4m3fn) == count


def moved_and_not() -> None:
    rank, seen = dist.get_rank(), []
    for on in (True, False):
        reset()
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in ("linear", "linear_backward"):
                monkeypatch.setitem(CASTS, f"mfsdp_engine::{name}", cast_outside)
            model = mfsdp.fully_shard(Model(), units=["layers.*"])
            run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", "quantize": on})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank)).bfloat16()
                run(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append([whole(p) for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.dist
def test_moved_casts_give_the_same_values(two_ranks):
    two_ranks.run(moved_and_not)


def eager_saves() -> tuple[bool, float]:
    """Whether forward keeps anything of a weight's size, without a compiled graph; and how far gradients are off."""
    torch.manual_seed(0)
    plain = Model()
    model = mfsdp.fully_shard(copy.deepcopy(plain), units=["layers.*"])
    x = batch()
    seen: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x)
    kept = [t for t in seen if t.shape[-2:] == (16, 16) or (t.dtype is torch.uint8 and t.numel())]
    loss.backward()
    plain(x).backward()
    errors = [(whole(p.grad) - q.grad).abs().max().item() for p, q in zip(model.parameters(), plain.parameters())]
    return bool(kept), max(errors)


@pytest.mark.dist
def test_uncompiled_forward_saves_no_weights(two_ranks):
    for kept, error in two_ranks.run(eager_saves):
        assert not kept and error < 1e-2


def test_sharded_models_are_copied_and_planned():
    model = mfsdp.fully_shard(Model(quantised=True), units=["layers.*"])
    assert [p.phase for p in mfsdp.trace(model, (batch(),))] == ["forward", "backward"]
    twin = copy.deepcopy(model)
    twin.layers[0].scale = torch.tensor([2.0])
    assert "layers.0._extra_state" in twin.state_dict() and "layers.0._extra_state" not in model.state_dict()
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="_extra_state"):
        twin.load_state_dict(model.state_dict())


# What is saved beside parameters


def test_empty_extra_state_is_left_out():
    model, plain = mfsdp.fully_shard(Model(), units=["layers.*"]), Model()
    assert list(model.state_dict()) == ["layers.0.weight", "layers.1.weight"]
    assert "layers.0._extra_state" in plain.state_dict()
    model.load_state_dict(model.state_dict())  # strict
    model.load_state_dict({k: v for k, v in plain.state_dict().items() if "_extra" in k}, strict=False)
    given = {name: value.detach() for name, value in get_model_state_dict(model).items()}
    assert list(given) == ["layers.0.weight", "layers.1.weight"]
    set_model_state_dict(model, given, options=StateDictOptions(strict=True))


def test_scales_are_saved_and_loaded(tmp_path):
    """Those of DelayedScaling."""
    model, other = (mfsdp.fully_shard(Model(), units=["layers.*"]) for _ in range(2))
    model.layers[0].scale = torch.tensor([2.0, 3.0])
    state = model.state_dict()
    assert list(state) == ["layers.0.weight", "layers.0._extra_state", "layers.1.weight"]
    other.load_state_dict(state)
    assert other.layers[0].scale.tolist() == [2.0, 3.0] and other.layers[1].scale is None
    del state["layers.0._extra_state"]
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\._extra_state"):
        other.load_state_dict(state)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "some")
    fresh = mfsdp.fully_shard(Model(), units=["layers.*"])
    with pytest.warns(UserWarning, match=r"scales of .*DelayedScaling \(layers\.0\._extra_state, 1 in all\)"):
        dcp.load(fresh.state_dict(), checkpoint_id=tmp_path / "some")
    fresh.layers[0].scale = torch.tensor([1.0, 1.0])
    loaded = fresh.state_dict()
    dcp.load(loaded, checkpoint_id=tmp_path / "some")
    fresh.load_state_dict(loaded)
    assert fresh.layers[0].scale.tolist() == [2.0, 3.0]


# Optimizers


def sharded() -> list[nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 5))
    return [mfsdp.fully_shard(copy.deepcopy(first)) for _ in range(3)]


def test_stepping_on_shards_is_refused():
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    optimizer = FusedAdam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    before = whole(model.weight).clone()
    with pytest.raises(RuntimeError, match=r"fully_shard_optimizer\(optimizer, use_decoupled_grad=True\)"):
        optimizer.step()
    assert not optimizer.state and torch.equal(whole(model.weight), before)


BAD = {
    "gradients elsewhere": ({}, {"use_decoupled_grad": True}, ValueError, "reads .grad, .* to both"),
    "or there": ({"use_decoupled_grad": True}, {}, ValueError, "reads .decoupled_grad, .*would not step"),
    "main weights": ({"master_weights": True}, {}, ValueError, "a second time.*Leave out master_weights"),
    "scaled moments": ({"exp_avg_sq_dtype": torch.uint8}, {}, NotImplementedError, "exp_avg_sq_dtype=torch.uint8"),
    "half moments": ({"exp_avg_dtype": torch.float16}, {}, NotImplementedError, "choose torch.float32 or torch.bf"),
}


@pytest.mark.parametrize("what", BAD)
def test_optimizers_that_are_refused(what):
    theirs, ours, kind, words = BAD[what]
    optimizer = FusedAdam(mfsdp.fully_shard(nn.Linear(4, 4)).parameters(), **theirs)
    with pytest.raises(kind, match=words):
        mfsdp.fully_shard_optimizer(optimizer, **ours)
    assert type(optimizer) is FusedAdam


def steps(narrow: bool) -> tuple[float, list[str], list[Any]]:
    """Largest error against AdamW, after a state dict was loaded half-way; kinds and dtypes of state; counts."""
    dtype = torch.bfloat16 if narrow else torch.float32
    how = {"use_decoupled_grad": True, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    models = sharded()
    plain = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    flat, resumed = (
        mfsdp.fully_shard_optimizer(FusedAdam(m.parameters(), lr=1e-2, **how), use_decoupled_grad=True)
        for m in models[1:]
    )
    for step in range(4):
        if step == 2:
            get_optimizer_state_dict(models[1], flat)
            resumed.load_state_dict(copy.deepcopy(flat.state_dict()))
            models[2].load_state_dict(models[1].state_dict())
        fill(models, step)
        for o in (plain, flat, *([resumed] if step >= 2 else [])):
            o.step()
        for m in models:
            m.zero_grad()
    pairs = [(p, q) for m in models[1:] for p, q in zip(models[0].parameters(), m.parameters())]
    state = [v for s in resumed.state_dict()["state"].values() for v in s.values()]
    assert all(v._sharding is not None for v in state)
    kinds = sorted({f"{type(v).__name__} {v.dtype}" for v in state})
    return max((whole(p) - whole(q)).abs().max().item() for p, q in pairs), kinds, [
        o.param_groups[0]["step"] for o in (flat, resumed)
    ]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("narrow", [False, True])
def test_it_steps_as_adamw_and_is_saved_by_rows(two_ranks, narrow):
    for error, kinds, counts in two_ranks.run(steps, narrow):
        assert error < (1e-2 if narrow else 1e-6) and counts == [4, 4]
        assert kinds == ["ShardedDTensor torch.bfloat16" if narrow else "ShardedDTensor torch.float32"]


def test_saving_a_fresh_one_counts_no_step(tmp_path):
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    optimizer = mfsdp.fully_shard_optimizer(
        FusedAdam(model.parameters(), use_decoupled_grad=True), use_decoupled_grad=True
    )
    from mfsdp.checkpoints.checkpoint import _state_to_save

    saved = _state_to_save(model, [optimizer])
    assert [g["step"] for g in saved["optimizer"]["param_groups"]] == [0]
    assert "step" not in optimizer.param_groups[0] and not optimizer.state and not dist.is_initialized()
