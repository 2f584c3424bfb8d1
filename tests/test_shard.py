"""`fully_shard` in one process and on planning meshes: units, names, attributes, and every kind of bad input."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from abc import ABC, abstractmethod

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import mfsdp
from mfsdp.dtensor.shard_spec import local_mesh
from mfsdp.sharding import commit, unit_assignment
from mfsdp.sharding.stale_optimizers import no_optimizer
from tests.helpers.models import GPT, MLP, Adapted, Block, Frozen, LoRA
from tests.helpers.parity import whole
from tests.helpers.snapshots import snapshot


def units_of(model: nn.Module) -> dict[str, list[str]]:
    """Names of parameters by unit."""
    found: dict[str, list[str]] = {}
    for _, m in model.named_modules():
        for ref in m.__dict__.get("_mfsdp_refs", {}).values():
            names = found.setdefault(ref.unit.fqn, [])
            name = ref.buffer.layout.slots[ref.slot].name
            if name not in names:
                names.append(name)
    return found


# units


@pytest.mark.parametrize(
    "units", [[Block], ["Block"], ["tests.helpers.models.Block"], ["blocks.*"], ["**.0", "blocks.1"]]
)
def test_units_by_class_name_path_and_pattern(units):
    model = mfsdp.fully_shard(GPT(), units=units)
    found = units_of(model)
    assert list(found) == ["(root)", "blocks.0", "blocks.1"]
    assert found["(root)"] == ["tokens.weight", "places.weight", "norm.weight", "norm.bias"]
    assert found["blocks.0"][:2] == ["norm1.weight", "norm1.bias"]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("blocks.*.up", ["blocks.0.up", "blocks.1.up"]),
        ("**.up", ["blocks.0.up", "blocks.1.up"]),
        ("blocks.[1-9]", ["blocks.1"]),
        ("blocks.0.norm?", ["blocks.0.norm1", "blocks.0.norm2"]),
        ("**.norm", ["norm"]),
    ],
)
def test_patterns(pattern, matches):
    found = units_of(mfsdp.fully_shard(GPT(), units=[pattern]))
    assert sorted(set(found) - {"(root)"}) == sorted(matches)


def test_one_call_per_block_is_the_same_as_one_call():
    a, b = GPT(tied=False), GPT(tied=False)
    for block in a.blocks:
        mfsdp.fully_shard(block)
    mfsdp.fully_shard(a)
    mfsdp.fully_shard(b, units=[Block])
    names = [list(found.values()) for found in (units_of(a), units_of(b))]
    assert names[0] == names[1]
    assert [n for n, _ in a.named_parameters()] == [n for n, _ in b.named_parameters()]


def test_the_same_object_with_the_same_names():
    model = GPT()
    names, shapes = [n for n, _ in model.named_parameters()], [p.shape for p in model.parameters()]
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = list(model.state_dict())
    out = mfsdp.fully_shard(model, units=[Block])
    assert out is model and isinstance(model, GPT) and isinstance(model, mfsdp.FSDPModule)
    assert isinstance(model.blocks[0], mfsdp.FSDPModule) and not isinstance(model.norm, mfsdp.FSDPModule)
    assert type(model.blocks[0]) is type(model.blocks[1]), "equal layers keep equal types"
    assert [n for n, _ in model.named_parameters()] == names and list(model.state_dict()) == state
    assert [p.shape for p in model.parameters()] == shapes
    for n, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
        assert torch.equal(p.full_tensor(), values[n])
    assert model.tokens.weight is model.head.weight, "tied parameters stay one"


def test_attributes_are_carried():
    model = MLP()
    model.scale.sequence_parallel = False
    model.up.weight.weight_decay = 0.0
    mfsdp.fully_shard(model, units=["up"])
    assert model.scale.sequence_parallel is False
    assert model.up.weight.weight_decay == 0.0
    assert not hasattr(model.down.weight, "weight_decay")


def test_buffers_and_ignored_parameters_are_left_alone():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    keep, buffers = model[0].weight, dict(model.named_buffers())
    mfsdp.fully_shard(model, ignored_params=[keep])
    assert model[0].weight is keep and type(keep) is nn.Parameter
    assert all(b is buffers[n] for n, b in model.named_buffers())


def test_frozen_parameters_cost_no_gradient_and_no_optimizer_memory():
    for model, frozen in ((Frozen(), "layers.1"), (Adapted(), "layers.0.base")):
        mfsdp.fully_shard(model, units=["layers.*"])
        x = torch.randn(3, next(model.parameters()).shape[-1])
        model(x).sum().backward()
        assert all((p.grad is None) == n.startswith(frozen) or "base" in n for n, p in model.named_parameters())
        buffers = {r.buffer for m in model.modules() for r in m.__dict__.get("_mfsdp_refs", {}).values()}
        assert {b.trainable for b in buffers} == {True, False}
        assert all((b.gradients.flat is not None) == b.trainable for b in buffers)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        assert not any(p in optimizer.state for p in model.parameters() if not p.requires_grad)


def test_precision_of_each_role():
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    model = mfsdp.fully_shard(nn.Linear(8, 8), mp_policy=policy)
    seen = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    out = model(torch.ones(2, 8, dtype=torch.bfloat16))
    out.sum().backward()
    assert out.dtype is torch.bfloat16 and model.weight.dtype is torch.float32
    assert model.weight.grad.dtype is torch.float32
    own = mfsdp.fully_shard(nn.Linear(8, 8).bfloat16(), mp_policy=mfsdp.MixedPrecisionPolicy(main_params_dtype=None))
    assert own.weight.dtype is torch.bfloat16
    default = mfsdp.fully_shard(nn.Linear(8, 8).bfloat16())
    assert default.weight.dtype is torch.float32, "main weights are fp32 unless told otherwise"
    assert default(torch.ones(2, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_deepcopy_gives_a_model_of_its_own():
    model = mfsdp.fully_shard(MLP(), units=["up"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.up.weight.zero_()
    assert model.up.weight.full_tensor().abs().sum() > 0
    x = torch.randn(2, 24)
    twin(x).sum().backward()
    assert model.up.weight.grad is None and twin.up.weight.grad is not None


def test_summon_full_params():
    model = mfsdp.fully_shard(GPT(), units=[Block])
    with mfsdp.summon_full_params(model):
        assert type(model.tokens.weight) is nn.Parameter
        assert model.tokens.weight is model.head.weight
        model.tokens.weight.data.fill_(2.0)
        with pytest.raises(ValueError, match="already"), mfsdp.summon_full_params(model):
            pass
    assert isinstance(model.tokens.weight, DTensor)
    assert (model.tokens.weight.full_tensor() == 2.0).all()
    with mfsdp.summon_full_params(model, writeback=False):
        model.tokens.weight.data.fill_(3.0)
    assert (model.tokens.weight.full_tensor() == 2.0).all()
    with pytest.raises(ValueError, match="not sharded"), mfsdp.summon_full_params(nn.Linear(2, 2)):
        pass


# bad input: a clear error, and the model as it was


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)


def two_devices() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = torch.empty(4, 4)
    fake = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model[1].weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
    return model


BAD = {
    "a pattern that matches nothing": (MLP, {"units": ["layers.*"]}, r"'layers\.\*' matches no module.*up, down"),
    "a class that is not there": (MLP, {"units": [Block]}, "Block.*matches no module.*Classes in it: Linear"),
    "a name that is not there": (MLP, {"units": ["upp"]}, "'upp' matches no module"),
    "no list": (MLP, {"units": "up"}, r"give a list, units=\['up'\]"),
    "a unit of another kind": (MLP, {"units": [3]}, "3 is no class, import path"),
    "an integer parameter": (Odd, {}, "table is torch.int64.*ignored_params"),
    "different devices": (two_devices, {}, r"different devices \(.*cpu.*cuda.*move the model"),
    "an unknown strategy": (MLP, {"strategy": "zero3"}, "strategy='zero3': choose one of"),
    "an unknown outer strategy": (MLP, {"outer_strategy": "x"}, "outer_strategy='x': choose"),
    "no policy": (MLP, {"mp_policy": torch.bfloat16}, "give a mfsdp.MixedPrecisionPolicy"),
    "no mesh": (MLP, {"mesh": 4}, "mesh=4: give a torch.distributed DeviceMesh"),
    "a mesh without a group": (
        MLP,
        {"mesh": local_mesh("cpu", (4,)), "device": "cpu"},
        "has no process group.*init_device",
    ),
    "a mesh of another device": (MLP, {"mesh": local_mesh("cuda", (4,)), "device": "cpu"}, "over 'cuda'.*pass device="),
    "an outer strategy without an outer axis": (
        MLP,
        {"mesh": local_mesh("cpu", (4,)), "device": "cpu", "outer_strategy": "optim"},
        "needs a mesh with an outer axis",
    ),
    "a mesh this rank is not in": (MLP, {"mesh": local_mesh("cpu", (2,), rank=5), "device": "cpu"}, "rank is not in"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_leaves_the_model_as_it_was(what):
    build, arguments, message = BAD[what]
    model = build()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        mfsdp.fully_shard(model, **arguments)
    assert snapshot(model) == before


def test_wrapping_twice():
    model = mfsdp.fully_shard(MLP(), units=["up"])
    before = snapshot(model)
    with pytest.raises(ValueError, match="sharded already"):
        mfsdp.fully_shard(model)
    with pytest.raises(ValueError, match="leave it out of `units`"):
        mfsdp.fully_shard(nn.Sequential(model), units=[MLP])
    assert snapshot(model) == before


def test_a_parameter_tied_into_a_unit_that_is_sharded_already():
    model = GPT()
    mfsdp.fully_shard(model.tokens)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"head\.weight belongs to the unit.*one call"):
        mfsdp.fully_shard(model, units=[Block])
    assert snapshot(model) == before


@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_from_before_wrapping(build):
    model = MLP()
    optimizer = build(model.parameters(), lr=0.1)
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"an optimizer \({build.__name__}\) holds parameters.*after fully_shard"):
        mfsdp.fully_shard(model, units=["up"])
    assert snapshot(model) == before
    del optimizer
    mfsdp.fully_shard(model, units=["up"])


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_an_optimizer_over_an_old_list_is_seen_in_the_first_backward(compile):
    model = MLP()
    old = list(model.parameters())
    mfsdp.fully_shard(model, units=["up"])
    optimizer = torch.optim.AdamW(old)
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}) if compile else model
    with pytest.raises(ValueError, match="AdamW holds parameters of unit.*before fully_shard"):
        run(torch.randn(2, 24)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    del optimizer
    run(torch.randn(2, 24)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_plain_references_to_parameters_do_not_start_a_search(monkeypatch):
    """The search through all objects is slow; it starts only when somebody besides the module holds a parameter."""
    searched = []
    monkeypatch.setattr("mfsdp.sharding.stale_optimizers._optimizer_of", lambda params: searched.append(params))
    for build in (MLP, GPT, LoRA, Frozen):
        mfsdp.fully_shard(build(), units=[nn.Linear])
    assert not searched
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    no_optimizer(model)
    assert searched and optimizer


class Fails:
    """A flat buffer for which there is no memory, after so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.real, self.left = commit.FlatBuffer, after
        monkeypatch.setattr(commit, "FlatBuffer", self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.left -= 1
        if self.left < 0:
            raise MemoryError("none left")
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_failure_half_way_is_taken_back(monkeypatch, after):
    model = nn.Sequential(GPT(), nn.LSTM(3, 4).bfloat16(), nn.Linear(2, 2).requires_grad_(False))
    model[0].norm.weight.tag = 3
    before = {n: (p.detach().clone(), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    shape = [(fqn, kind, names) for fqn, kind, _, names in snapshot(model)]
    held = model[0].tokens.weight
    Fails(monkeypatch, after)
    with pytest.raises(MemoryError, match="none left"):
        mfsdp.fully_shard(model, units=[Block])
    assert [(fqn, kind, names) for fqn, kind, _, names in snapshot(model)] == shape
    assert model[0].tokens.weight is held is model[0].head.weight and model[0].norm.weight.tag == 3
    for n, p in model.named_parameters():
        value, dtype, trainable = before[n]
        assert type(p) is nn.Parameter and (p.dtype, p.requires_grad) == (dtype, trainable) and torch.equal(p, value)
    monkeypatch.undo()
    model[1](torch.randn(1, 3, dtype=torch.bfloat16))
    mfsdp.fully_shard(model, units=[Block])


def test_a_failure_where_this_rank_has_a_part_says_what_is_lost(monkeypatch):
    model = GPT()
    held = model.blocks[0].up.weight
    Fails(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="none left.* when it had freed .* of unit 'blocks.0'.*Build the model anew"):
        mfsdp.fully_shard(model, units=[Block], mesh=local_mesh("cpu", (2,)), device="meta")
    assert model.blocks[0].up.weight is held and model.blocks[0].down.weight.is_meta
    assert type(model) is GPT and not model.blocks[1].up.weight.is_meta


def test_a_sharded_model_refuses_what_would_break_it():
    model = mfsdp.fully_shard(MLP(), units=["up"])
    with pytest.raises(ValueError, match="cannot go from torch.float32.*before fully_shard"):
        model.bfloat16()
    with pytest.raises(ValueError, match="cannot be replaced"):
        model.up.weight = nn.Parameter(torch.zeros(37, 24))
    assert model.cpu() is model and model.float() is model, "what changes nothing is allowed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute_dtype": torch.int8}, "compute_dtype=torch.int8"),
        ({"main_grads_dtype": "f"}, "main_grads_dtype='f'"),
    ],
)
def test_bad_policies(arguments, message):
    with pytest.raises(ValueError, match=message):
        mfsdp.MixedPrecisionPolicy(**arguments)


def test_bad_calls_of_methods():
    model = mfsdp.fully_shard(MLP())
    for factor in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            model.set_gradient_divide_factor(factor)
    with pytest.raises(ValueError, match="True or False"):
        model.set_requires_gradient_sync(1)
    with pytest.raises(ValueError, match="not sharded"), mfsdp.no_sync(nn.Linear(2, 2)):
        pass


def test_nothing_keeps_the_old_parameters_alive():
    model = MLP()
    old = [weakref.ref(p) for p in model.parameters()]
    mfsdp.fully_shard(model, units=["up"])
    gc.collect()
    assert not [r for r in old if r() is not None]


def test_a_model_that_is_gone_leaves_nothing_behind():
    model = mfsdp.fully_shard(MLP(), units=["up"])
    model.up.weight.register_hook(lambda g: g)
    model(torch.randn(2, 24)).sum().backward()
    twin = copy.deepcopy(model)
    buffers = [weakref.ref(u._mfsdp_unit.buffers[0]) for m in (model, twin) for u in (m, m.up)]
    main = [weakref.ref(b().weights.main) for b in buffers]
    del model, twin
    gc.collect()
    assert not any(ref() is not None for ref in (*buffers, *main))


def test_freezing_inside_of_summon_lasts():
    model = mfsdp.fully_shard(MLP())
    with mfsdp.summon_full_params(model):
        model.up.requires_grad_(False)
    assert not model.up.weight.requires_grad and model.down.weight.requires_grad


def test_gradients_that_somebody_holds_survive_zero_grad():
    model = mfsdp.fully_shard(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 24)).sum().backward()
    held = [p.grad for p in model.parameters()]
    before = [g.full_tensor() for g in held]
    optimizer.zero_grad()
    model(torch.randn(2, 24)).sum().backward()
    assert all(torch.equal(g.full_tensor(), b) for g, b in zip(held, before, strict=True))
    first = next(model.parameters())
    first.grad = None
    model(torch.zeros(2, 24)).sum().backward()
    assert not first.grad.full_tensor().any(), "what was dropped is not added to"


@pytest.mark.filterwarnings("ignore:mfsdp. .* outside of a compiled graph")
class Abstract(ABC, nn.Module):
    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Concrete(Abstract):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


def test_classes_that_name_another_base_before_module():
    """Python lays their instances out otherwise; FSDP2 cannot shard them."""
    plain = nn.Sequential(Concrete(), Concrete())
    model = mfsdp.fully_shard(copy.deepcopy(plain), units=[Concrete])
    assert isinstance(model[0], mfsdp.FSDPModule) and isinstance(model[0], Abstract)
    x = torch.randn(3, 4)
    for run in (model, torch.compile(model, backend="mfsdp", options={"lowering": "eager"})):
        run(x).sum().backward()
        plain(x).sum().backward()
        assert all(torch.equal(whole(p.grad), q.grad) for p, q in zip(model.parameters(), plain.parameters()))
        model[0].zero_grad(), model.zero_grad(), plain.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert [p.phase for p in mfsdp.trace(model, (x,))] == ["forward", "backward"]
    assert type(copy.deepcopy(model)[1]) is type(model[1])


def test_a_slice_of_a_sharded_container_is_a_plain_container():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    want = model[:2](x)
    mfsdp.fully_shard(model)
    part = model[:2]
    assert type(part) is nn.Sequential and type(copy.deepcopy(model)) is type(model)
    assert torch.equal(part(x), want)


@pytest.mark.filterwarnings("ignore:mfsdp. .* outside of a compiled graph")
def test_recurrent_layers_list_what_they_have():
    torch.manual_seed(0)
    layer, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    want = layer(x)[0].detach()
    old = [weakref.ref(p) for p in layer.parameters()]
    mfsdp.fully_shard(layer)
    assert not any(r() is not None for r in old)
    assert torch.allclose(layer(x)[0], want)
    assert torch.allclose(copy.deepcopy(layer)(x)[0], want)


# processes that do not know of each other


def test_processes_without_a_group_are_told_that_they_train_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"started 2 processes .* trains by itself") as told:
        mfsdp.fully_shard(MLP())
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mfsdp.fully_shard(MLP(), device="meta")
        monkeypatch.setenv("WORLD_SIZE", "1")
        mfsdp.fully_shard(MLP())


def test_units_are_ordered_as_modules_are():
    """A set, or a list of one, has another order in each process."""

    class Vision(nn.Linear):
        pass

    class Text(nn.Linear):
        pass

    model = nn.Sequential(Vision(4, 4), Text(4, 4), Vision(4, 4))
    for units in (["Vision", "Text"], ["Text", "Vision"], {Text, Vision}):
        assert unit_assignment.match(model, units) == [*model, model]


@pytest.mark.parametrize("built", ["outside", "inside"])
def test_inside_of_inference_mode(built):
    """A model is sharded there, trains behind it, and shows its state there."""
    torch.manual_seed(0)
    model, reference = nn.Linear(6, 4), nn.Linear(6, 4)
    with torch.inference_mode():
        model = nn.Linear(6, 4) if built == "inside" else model
        model.load_state_dict(reference.state_dict())
        mfsdp.fully_shard(model)
    with torch.inference_mode():
        for name, value in model.state_dict().items():
            assert not value.is_inference() and torch.equal(value.full_tensor(), reference.get_parameter(name))
        assert torch.equal(model.weight.detach().full_tensor(), reference.weight)
        model.load_state_dict({name: 2 * value for name, value in reference.state_dict().items()})
    x = torch.ones(3, 6)
    out = model(x)
    out.sum().backward()
    torch.testing.assert_close(out, 2 * reference(x))
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), 3.0))
