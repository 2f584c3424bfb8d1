"""TransformerEngine itself, of which `test_transformer_engine.py` has doubles: ``make te``. Most of this needs no GPU:
models are traced, not run, as if one of some capability were there.
"""

from __future__ import annotations

import copy
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mfsdp
from mfsdp import pipeline
from mfsdp.dtensor import te_linear, transformer_engine
from mfsdp.ir import ops
from mfsdp.ir.saved_copies import copies
from mfsdp.sharding import eager
from tests.helpers.logs import logged
from tests.helpers.optimizers import fill
from tests.helpers.parity import whole
from tests.helpers.ranks import here

pytestmark = pytest.mark.te


@pytest.fixture
def te(monkeypatch) -> Any:
    return package(monkeypatch)


def package(monkeypatch: Any) -> Any:
    """TransformerEngine, where a Hopper seems to be."""
    if not torch.cuda.is_available():
        pretend(monkeypatch, (9, 0))
    import transformer_engine.pytorch as te
    import transformer_engine.pytorch.module.base as base

    if not torch.cuda.is_available():
        text = textwrap.dedent(inspect.getsource(base.TransformerEngineBaseModule.prepare_forward))
        assert text.count("if not inp.is_cuda:") == 1
        made: dict[str, Any] = {}
        exec(compile(text.replace("if not inp.is_cuda:", "if False:"), base.__file__, "exec"), base.__dict__, made)
        monkeypatch.setattr(base.TransformerEngineBaseModule, "prepare_forward", made["prepare_forward"])
    return te


def pretend(monkeypatch: Any, capability: tuple[int, int]) -> None:
    class Properties:
        major, minor = capability
        name, multi_processor_count, total_memory = "none", 132, 80 << 30

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: Properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, module in list(sys.modules.items()):  # they remember what they have seen
        if name in ("transformer_engine.pytorch.utils", "transformer_engine.pytorch.quantization"):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()
            if hasattr(module, "FP8GlobalStateManager"):
                module.FP8GlobalStateManager.reset()


@contextmanager
def building() -> Iterator[None]:
    """Constructors ask for a GPU."""
    asks, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = asks


class Model(nn.Module):
    def __init__(self, te: Any, make: Callable[[], nn.Module], recipe: Any = None):
        super().__init__()
        with building():
            self.layers = nn.ModuleList([make() for _ in range(2)])
        self.autocast, self.recipe = te.autocast, recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recipe is None:
            for layer in self.layers:
                x = torch.relu(layer(x))
        else:
            with self.autocast(enabled=True, recipe=self.recipe):
                for layer in self.layers:
                    x = torch.relu(layer(x))
        return x.float().square().mean()


HOW: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}


def linear(te: Any, recipe: Any = None, **how: Any) -> Model:
    return Model(te, lambda: te.Linear(64, 64, bias=False, **HOW | how), recipe)


def programs(model: nn.Module) -> list[Any]:
    torch._dynamo.reset()
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=next(model.parameters()).device)
    return list(mfsdp.trace(model, (x,), world=4, units=["layers.*"]))


def kept(program: Any) -> list[torch.Tensor]:
    """What forward saves of a weight's size, in one byte per element."""
    values = [n.meta["val"] for n in program.results() if isinstance(n, torch.fx.Node)]
    return [v for v in values if v.dtype is torch.uint8 and v.numel() >= 64 * 64]


def foreign(program: Any) -> set[str]:
    """Operators that are neither torch's nor ours."""
    names = {n.target._schema.name for n in program.nodes if hasattr(n.target, "_schema")}
    return {name for name in names if name.split("::")[0] not in ("aten", "prims", "mfsdp")}


RECIPES = {
    "bf16": (None, (9, 0)),
    "Float8CurrentScaling": ("Float8CurrentScaling", (9, 0)),
    "MXFP8BlockScaling": ("MXFP8BlockScaling", (10, 0)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_linear_is_one_graph(te, monkeypatch, golden, name):
    from transformer_engine.common import recipe

    kind, capability = RECIPES[name]
    if not torch.cuda.is_available():
        pretend(monkeypatch, capability)
    listings = []
    for program in programs(linear(te, getattr(recipe, kind)() if kind else None)):
        what = "linear" if program.phase == "forward" else "linear_backward"
        stages = pipeline.run(program)
        listings.append(stages[-1].listing)
        told = stages["quantize"].listing
        why = {
            "bf16": f"u1_weight is read by transformer_engine_compile::{what}, as it is",
            "Float8CurrentScaling": "TransformerEngine casts inside, and one before the gather can be compared",
            "MXFP8BlockScaling": "MXFP8Quantizer casts inside: only Float8CurrentScaling is cast before the gather",
        }
        assert f"u1 is gathered in 16 bits: {why[name]}" in told
        assert program.phase == "backward" or not (copies(program) or kept(program))
        assert foreign(program) == {f"transformer_engine_compile::{what}"}
    assert len(listings) == 2
    if name == "Float8CurrentScaling":
        golden("te_linear", "\n".join(listings))


def test_without_being_told_forward_saves_quantised_weights(te, monkeypatch):
    """The law sees it: what `_is_fsdp2` is for."""
    from transformer_engine.common import recipe

    monkeypatch.setattr(transformer_engine, "is_module", lambda module: False)
    monkeypatch.setattr(transformer_engine, "overrides", lambda *a: {})
    model = linear(te, recipe.Float8CurrentScaling())
    for layer in model.layers:
        layer.fast_setattr("activation_dtype", torch.bfloat16)
    forward = programs(model)[0]
    assert len(kept(forward)) >= 2 and copies(forward)


def test_fused_accumulation_is_turned_off(te):
    """It breaks the graph otherwise."""
    with pytest.warns(UserWarning, match=r"off in layers.0 \(te.Linear is compiled without it only\), layers.1"):
        found = programs(linear(te, fuse_wgrad_accumulation=True))
    assert [p.phase for p in found] == ["forward", "backward"]


NOT_COMPILED: dict[str, Callable[[Any], nn.Module]] = {
    "LayerNormLinear": lambda te: te.LayerNormLinear(64, 64, **HOW),
    "LayerNormMLP": lambda te: te.LayerNormMLP(64, 64, **HOW),
    "RMSNorm": lambda te: te.RMSNorm(64, dtype=torch.bfloat16, device="cpu"),
    "TransformerLayer": lambda te: te.TransformerLayer(64, 64, 4, **HOW),
}


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_does_not_compile_is_known(te, name):
    """Once this fails for one, docs and this table can say that it compiles."""
    with pytest.raises(torch._dynamo.exc.Unsupported):
        programs(Model(te, lambda: NOT_COMPILED[name](te)))


def test_the_recipe_that_does_not_compile(te):
    from transformer_engine.common import recipe

    with pytest.raises(torch._dynamo.exc.Unsupported, match="DelayedScaling is not supported under torch.compile"):
        programs(linear(te, recipe.DelayedScaling()))


# The weight of te.Linear, cast before its gather


def quantised(value: torch.Tensor, quantizer: Any) -> Any:
    """What TE's kernels return, by numbers of numpy."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    fp8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[quantizer.dtype.name[-4:]]
    amax = np.float32(value.detach().abs().max().item())
    scale = np.float32(torch.finfo(fp8).max) / amax if amax else np.float32(1)
    data = (value.detach().float() * float(scale)).to(fp8).view(torch.uint8)
    parts = {
        "data": data if quantizer.rowwise_usage else None,
        "data_transpose": data.t().contiguous() if quantizer.columnwise_usage else None,
        "fp8_scale_inv": torch.tensor([float(np.float32(1) / scale)]),
    }
    how = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, **parts}
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=value.dtype, **how)
    return Float8Tensor(shape=value.shape, dtype=value.dtype, device=value.device, **how)


def multiplied(
    a: Any, b: Any, out_dtype: Any = None, layout: str = "TN", bias: Any = None, **_: Any
) -> tuple[Any, ...]:
    """``general_gemm`` of FP8 operands on a Hopper, which reads one side's transpose in backward."""
    if layout == "NN":
        assert torch.equal(a._transpose, a._data.t()) and not a._transpose_invalid
    x, y = (m.dequantize(dtype=torch.float32).flatten(0, -2) for m in (a, b))
    out = {"TN": lambda: y @ x.t(), "NN": lambda: y @ x, "NT": lambda: y.t() @ x}[layout]()
    return (out if bias is None else out + bias).to(out_dtype), None, None, None


@pytest.fixture
def cpu_kernels(te, monkeypatch) -> None:
    replace_kernels(monkeypatch)


def replace_kernels(monkeypatch: Any) -> None:
    """TE's own forward and backward run, with kernels of a CPU."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import utils
    from transformer_engine.pytorch.module import linear
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.storage import float8_tensor_storage

    monkeypatch.setattr(te_linear, "_on_gpu", lambda weight: True)
    monkeypatch.setattr(te_linear, "_verdicts", {})
    monkeypatch.setattr(Float8CurrentScalingQuantizer, "quantize_impl", lambda self, value: quantised(value, self))
    monkeypatch.setattr(linear, "general_gemm", multiplied)
    for module in (utils, float8_tensor_storage):
        monkeypatch.setattr(module, "_empty_tensor", torch.Tensor)
    monkeypatch.setattr(tex, "fp8_transpose", lambda data, dtype, out=None: data.t().contiguous())


def test_linear_takes_weights_that_were_cast_before(te, cpu_kernels, golden):
    from transformer_engine.common import recipe

    listings = []
    for program in programs(linear(te, recipe.Float8CurrentScaling())):
        stages = pipeline.run(program)
        launches = program.calls(ops.all_gather)
        assert len(launches) == 2 and all(n.meta["val"].dtype is torch.float8_e4m3fn for n in launches)
        listings.append(stages[-1].listing)
    golden("te_linear_fp8", "\n".join(listings))


def trained(strategy: str, lowering: str, folder: str) -> list[set[bool]]:
    """Whether programs gather codes, with the pass and without; losses, gradients and weights are equal."""
    found, codes = [], []
    rank = torch.distributed.get_rank()
    for on in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            te = package(monkeypatch)
            if here().type == "cpu":
                replace_kernels(monkeypatch)
            from transformer_engine.common import recipe

            model = linear(te, recipe.Float8CurrentScaling(), device=here())
            mfsdp.fully_shard(model, units=["layers.*"], strategy=strategy)
            dump = Path(folder, f"{rank} {on}")
            options = {"lowering": lowering, "quantize": on, "dump": str(dump)}
            run = torch.compile(model, backend="mfsdp", options=options)
            optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
            values = []
            for step in range(3):
                x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank)).bfloat16()
                loss = run(x.to(here()))
                loss.backward()
                values += [loss.detach(), *(whole(p.grad) for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
        found.append([*values, *map(whole, model.parameters())])
        gather = "all_gather u1_code" if strategy == "optim_grads_params" else "refresh_codes u1_code"
        listings = [p.read_text() for p in dump.rglob("*.txt") if "assign_groups" in p.name]  # rank 0 writes them
        codes.append({gather in text for text in listings})
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][-5])
    return codes


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
def test_values_are_those_of_its_own_cast(two_ranks, tmp_path, strategy, lowering):
    assert two_ranks.run(trained, strategy, lowering, str(tmp_path))[0] == [{True}, {False}]


@pytest.mark.parametrize("why", ["has other bits than", "was not compared: RuntimeError: no memory"])
def test_a_cast_with_other_bits_is_left_inside(te, cpu_kernels, monkeypatch, why):
    from transformer_engine.common import recipe

    def another(*args: Any) -> Any:
        if "memory" in why:
            raise RuntimeError("no memory")
        payload, inverse = own(*args)
        return payload, args[0](torch.ops.aten.mul.Tensor, inverse, 2)

    own = te_linear._current_scaling
    monkeypatch.setattr(te_linear, "_current_scaling", another)
    with logged() as texts:
        for program in programs(linear(te, recipe.Float8CurrentScaling())):
            listing = pipeline.run(program)["quantize"].listing
            assert f"u1 is gathered in 16 bits: TransformerEngine's cast {why}" in listing
            assert all(n.meta["val"].dtype is torch.bfloat16 for n in program.calls(ops.all_gather))
    assert len(texts) == 1 and why in texts[0]


def test_what_else_is_in_the_buffer_is_named(te, cpu_kernels):
    from transformer_engine.common import recipe

    biased = Model(te, lambda: te.Linear(64, 64, **HOW), recipe.Float8CurrentScaling())
    forward, _ = programs(biased)
    told = pipeline.run(forward)["quantize"].listing
    assert 'u0_bias of its buffer is read otherwise: set quantized_parameters = ("weight",)' in told
    for layer in biased.layers:
        layer.quantized_parameters = ("weight",)
    forward, _ = programs(biased)
    pipeline.run(forward)
    dtypes = [n.meta["val"].dtype for n in forward.calls(ops.all_gather)]
    assert sorted(map(str, dtypes)) == ["torch.bfloat16"] * 2 + ["torch.float8_e4m3fn"] * 2


MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "Linear": lambda te: te.Linear(16, 16, **HOW),
    "LayerNormLinear": NOT_COMPILED["LayerNormLinear"],
    "LayerNormMLP": NOT_COMPILED["LayerNormMLP"],
    "GroupedLinear": lambda te: te.GroupedLinear(2, 16, 16, **HOW),
    "TransformerLayer": NOT_COMPILED["TransformerLayer"],
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_told(te, name):
    """They read what we write: another version may not."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    with building():
        model = nn.Sequential(MODULES[name](te))
    assert any(k.endswith("_extra_state") for k in model.state_dict())
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    mfsdp.fully_shard(model, mp_policy=mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
    assert all(torch.equal(p.full_tensor().to(weights[n]), weights[n]) for n, p in model.named_parameters())
    assert list(model.state_dict()) == list(weights)
    model.load_state_dict(model.state_dict())
    inside = [m for m in model.modules() if isinstance(m, TransformerEngineBaseModule) and m._parameters]
    assert inside
    for m in inside:
        assert m.is_fsdp2 and m.activation_dtype is torch.bfloat16 and transformer_engine.is_module(m)
        assert {"fsdp_group", "primary_weights_in_fp8", "_fp8_workspaces"} <= set(vars(m))
        m.fast_setattr("allow_different_data_and_param_types", False)
        with pytest.raises(TypeError, match="compute_dtype says"):
            m.set_activation_dtype(torch.ones(1))


@pytest.mark.filterwarnings("ignore:mfsdp.* reads parameters")
@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_modules_ask_weights_for_main_grad(te, name):
    """What `Lent` has is what they look for, in this version too: they run on a GPU only."""
    shape = (2, 16, 16) if name == "GroupedLinear" else (64, 64)
    with building():
        model: Any = nn.Sequential(getattr(te, name)(*shape, fuse_wgrad_accumulation=True, **HOW))
    mfsdp.fully_shard(model, mp_policy=mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
    assert model[0].fuse_wgrad_accumulation
    source = inspect.getsource(sys.modules[type(model[0]).__module__])
    forward = "".join(inspect.getsource(type(model[0]).__mro__[1].forward).split())
    assert "self._get_weight_and_bias_tensors()" in forward or "self._get_weight_tensors()" in forward
    for line in ("__fsdp_param__", ".get_main_grad", '"overwrite_main_grad"'):
        assert line in source
    dummies = source.count('"grad_added_to_main_grad"\n') + source.count('"grad_added_to_main_grad"):')
    assert dummies and dummies == source.count("elif ctx.fuse_wgrad_accumulation:")  # where it is not: None
    scope = eager.scope(model, True)
    weights = model[0]._get_weight_tensors()
    scope.close()
    assert len(weights) == (1 if name == "LayerNormLinear" else 2)
    assert all(type(w) is transformer_engine.Lent and w.get_main_grad().shape == w.shape for w in weights)


def test_models_on_the_meta_device(te):
    with building():
        model, want = (nn.Sequential(te.Linear(16, 16, **{**HOW, "device": d})) for d in ("meta", "cpu"))
    torch.manual_seed(1)
    want[0].get_rng_state_tracker = None
    for module in (*model, *want):
        for meta in module.param_init_meta.values():
            meta.get_rng_state_tracker = None  # theirs are a GPU's
    want[0].reset_parameters()
    torch.manual_seed(1)
    mfsdp.fully_shard(model, device="cpu")
    assert all(torch.equal(whole(p).bfloat16(), q) for p, q in zip(model.parameters(), want.parameters(), strict=True))


def test_quantised_parameters(te):
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    with building():
        model = nn.Sequential(te.Linear(16, 16, bias=False, **HOW))
    data = torch.randn(16, 16).to(torch.float8_e4m3fn)
    weight = nn.Parameter(
        Float8Tensor(
            shape=(16, 16), dtype=torch.bfloat16, data=data.view(torch.uint8), fp8_scale_inv=torch.tensor([0.5]),
            fp8_dtype=DType.kFloat8E4M3, device="cpu",
        )
    )  # fmt: skip
    weight.tensor_model_parallel = False
    model[0].module_setattr("weight", weight)
    model[0].primary_weights_in_fp8 = True
    assert transformer_engine.quantised(model[0].weight)
    mfsdp.fully_shard(model)
    assert torch.equal(model[0].weight.full_tensor().cpu(), data.float() * 0.5) and not model[0].primary_weights_in_fp8
    assert model[0].weight.tensor_model_parallel is False and not {"_data", "_scale_inv"} & set(vars(model[0].weight))


def adam(te: Any, params: Any, **how: Any) -> Any:
    """``FusedAdam`` whose kernel is a CPU's, where there is no GPU."""
    if torch.cuda.is_available():
        return te.optimizers.FusedAdam(params, **how)
    make = torch.tensor
    torch.tensor = lambda *a, device=None, **k: make(*a, **k)  # type: ignore[assignment]
    try:
        out = te.optimizers.FusedAdam(params, **how)
    finally:
        torch.tensor = make  # type: ignore[assignment]
    out.multi_tensor_adam = _adam
    return out


@torch.no_grad()
def _adam(
    _: int, overflow: Any, lists: Any, lr: float, one: float, two: float, eps: float, n: int, mode: int, bias: int,
    decay: float,
) -> None:  # fmt: skip
    assert mode == bias == 1
    for g, p, m, v in zip(*lists, strict=True):
        assert all(type(t) is torch.Tensor and t.numel() for t in (g, p, m, v))
        wide_m = m.float().mul_(one).add_(g.float(), alpha=1 - one)
        wide_v = v.float().mul_(two).addcmul_(g.float(), g.float(), value=1 - two)
        m.copy_(wide_m)
        v.copy_(wide_v)
        p.mul_(1 - lr * decay)
        p.addcdiv_(wide_m / (1 - one**n), (wide_v / (1 - two**n)).sqrt() + eps, value=-lr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_optimizer_steps_as_adamw(te, dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain, model, other = (nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 5)).to(device) for _ in range(3))
    for m in (model, other):
        m.load_state_dict(plain.state_dict())
    models = [mfsdp.fully_shard(m) for m in (plain, model, other)]
    how = {"lr": 1e-2, "weight_decay": 0.01, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    want = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    flat, resumed = (
        mfsdp.fully_shard_optimizer(adam(te, m.parameters(), use_decoupled_grad=True, **how), use_decoupled_grad=True)
        for m in (model, other)
    )
    for step in range(4):
        if step == 2:
            resumed.load_state_dict(copy.deepcopy(flat.state_dict()))
            other.load_state_dict(model.state_dict())
        fill(models, step)
        for optimizer in (want, flat, *([resumed] if step >= 2 else [])):
            optimizer.step()
        for m in models:
            m.zero_grad()
    for m in (model, other):
        for p, q in zip(plain.parameters(), m.parameters(), strict=True):
            torch.testing.assert_close(whole(q), whole(p), rtol=0, atol=1e-6 if dtype is torch.float32 else 1e-2)
    state = [v for s in resumed.state_dict()["state"].values() for v in s.values()]
    assert len(state) == 8 and {(type(v).__name__, v.dtype) for v in state} == {("ShardedDTensor", dtype)}
    assert resumed.param_groups[0]["step"] == 4


def test_its_optimizer_is_refused_on_shards(te):
    model = mfsdp.fully_shard(nn.Linear(4, 4).to("cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = adam(te, model.parameters())
    fill([model], 0)
    with pytest.raises(RuntimeError, match="fully_shard_optimizer"):
        optimizer.step()
    with pytest.raises(ValueError, match="master_weights"):
        mfsdp.fully_shard_optimizer(adam(te, model.parameters(), master_weights=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["", "eager", "inductor"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_steps_on_a_gpu(te, name, compiled):
    """Losses are those of the model alone, in FP8 with current scaling."""
    from transformer_engine.common import recipe

    losses: list[list[float]] = []
    for shards in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        kind = {"Linear": te.Linear, "LayerNormLinear": te.LayerNormLinear}.get(name, te.LayerNormMLP)
        model: Any = Model(te, lambda: kind(64, 64, params_dtype=torch.bfloat16, device="cuda"), recipe=(  # noqa: B023
            recipe.Float8CurrentScaling()))  # fmt: skip
        if shards:
            policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.bfloat16)
            mfsdp.fully_shard(model, units=["layers.*"], mp_policy=policy)
        run = torch.compile(model, backend="mfsdp", options={"lowering": compiled}) if shards and compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda", generator=_generator(step))
            loss = run(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("power", [False, True])
def test_casts_before_the_gather_have_the_bits_of_its_kernels(te, power):
    """The comparison that lets weights of te.Linear travel in FP8."""
    from transformer_engine.common import recipe

    how = recipe.Float8CurrentScaling(fp8_quant_fwd_weight=recipe.QParams(power_2_scale=power))
    for program in programs(linear(te, how, device="cuda")):
        told = pipeline.run(program)["quantize"].listing
        gathers = program.calls(ops.all_gather)
        assert gathers and all(n.meta["val"].dtype is torch.float8_e4m3fn for n in gathers), told


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:mfsdp.* reads parameters")
@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_main_grad_on_a_gpu(te, name):
    """Gradients that modules write in float32 are those that autograd brings in bf16, before they are rounded."""
    grads: list[list[torch.Tensor]] = []
    for fuse in (False, True):
        torch.manual_seed(0)
        how = {"params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": fuse}
        grouped = name == "GroupedLinear"
        layer: Any = getattr(te, name)(*((3, 64, 64) if grouped else (64, 64)), **how)
        policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)
        mfsdp.fully_shard(layer, mp_policy=policy)
        for step in range(2):
            x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda", generator=_generator(step))
            out = layer(x, [16, 0, 16]) if grouped else layer(x)
            out.float().square().mean().backward()
        grads.append([whole(p.grad) for p in layer.parameters()])
    for plain, fused in zip(*grads, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1.6e-2, atol=1e-5)


def _generator(step: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(step)
