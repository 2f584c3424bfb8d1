"""Unsupported operations on a sharded model raise an error of one sentence and change nothing."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.parametrize import remove_parametrizations

import mfsdp
from mfsdp.compiler import backend
from mfsdp.sharding import eager
from tests.helpers.logs import logged


def net(*more: nn.Module, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return mfsdp.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), *more), **options)


def told(call: Callable[[], object]) -> str:
    with pytest.raises((NotImplementedError, RuntimeError, TypeError)) as error:
        call()
    return str(error.value)


TOO_LATE: dict[str, Callable[[nn.Sequential], object]] = {
    "weight_norm": lambda m: nn.utils.weight_norm(m[0]),
    "spectral_norm": lambda m: nn.utils.spectral_norm(m[0]),
    "parametrizations.spectral_norm": lambda m: parametrizations.spectral_norm(m[0]),
    "parametrizations.orthogonal": lambda m: parametrizations.orthogonal(m[0]),
    "prune": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
    "delete": lambda m: delattr(m[0], "weight"),
    "tie": lambda m: setattr(m[0], "other", m[2].weight),
    "parametrizations.weight_norm": lambda m: parametrizations.weight_norm(m[0]),
}


@pytest.mark.parametrize("how", TOO_LATE)
def test_parametrized_too_late(how):
    model, x = net(), torch.randn(2, 8)
    before, names = model(x), list(model.state_dict())
    assert "before fully_shard" in told(lambda: TOO_LATE[how](model))
    assert list(model.state_dict()) == names and [n for n, _ in model.named_parameters()] == names
    assert not list(model[0].buffers()) and not model[0]._forward_pre_hooks
    assert torch.equal(model(x), before)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leave", [True, False])
def test_parametrizations_are_removed_too_late(bias, leave):
    """By the name that was imported before the model was sharded, too."""
    layers = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias), nn.Linear(8, 8))
    parametrize.register_parametrization(layers[0], "weight", Symmetric())
    parametrizations.weight_norm(layers[1])
    parametrize.register_parametrization(layers[2], "weight", Symmetric())
    model, x = mfsdp.fully_shard(layers, ignored_params=set(layers[2].parameters())), torch.randn(2, 8)
    before, names = model(x), list(model.state_dict())
    for layer in model:
        assert "before fully_shard" in told(lambda m=layer: remove_parametrizations(m, "weight", leave))
    assert list(model.state_dict()) == names and torch.equal(model(x), before)
    other = nn.Linear(8, 8)
    parametrize.register_parametrization(other, "weight", Symmetric())
    remove_parametrizations(other, "weight", leave)
    assert isinstance(other.weight, nn.Parameter), "others are free"


def test_old_weight_norm_is_removed():
    model, x = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8))), torch.randn(2, 8)
    want = model(x)
    mfsdp.fully_shard(model)
    nn.utils.remove_weight_norm(model[0])
    assert torch.equal(model(x), want)


def test_models_are_copied_not_pickled():
    model = net()
    for save in (torch.save, pickle.dump):
        for what in (model, model[0], torch.compile(model, backend="mfsdp")):
            text = told(lambda save=save, what=what: save(what, io.BytesIO()))
            assert "save_safetensors" in text and "cannot be pickled" in text
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(1, 8)), model(torch.ones(1, 8))) and copy.copy(model)[0] is model[0]


HOOKS: dict[str, Callable[[nn.Sequential], object]] = {
    "multi": lambda m: torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda g: None),
    "edge": lambda m: torch.autograd.graph.get_gradient_edge(m[0].weight),
    "view": lambda m: m[0].weight.view_as(m[0].weight),
    "expand": lambda m: m[0].weight.expand_as(m[0].weight),
}


@pytest.mark.parametrize("how", HOOKS)
def test_hooks_that_would_never_run(how):
    model = net()
    assert "register_post_accumulate_grad_hook" in told(lambda: HOOKS[how](model))
    with torch.no_grad():
        assert model[0].weight.view_as(model[0].weight) is not None, "what has no node is a view"


@pytest.mark.parametrize("lowering", ["none", "eager"])
def test_gradients_asked_for(lowering):
    """Of parameters by way of the model they are refused; of activations, and outside of forward, they are there."""
    model = net()
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    params, x = list(model.parameters()), torch.randn(2, 8, requires_grad=True)
    asks: list[Callable[[torch.Tensor], object]] = [
        lambda loss: loss.backward(inputs=params),
        lambda loss: loss.backward(inputs=params[0]),
        lambda loss: torch.autograd.backward([loss], None, None, False, None, [x, *params]),
        lambda loss: torch.autograd.grad(loss, params),
        lambda loss: torch.autograd.grad(loss, [x, params[1]], allow_unused=True),
        lambda loss: torch.autograd.grad(outputs=[loss], inputs=params[1]),
        lambda loss: torch.no_grad()(torch.autograd.grad)(loss, params, allow_unused=True),
    ]
    for ask in asks:
        loss = run(x).sum()
        text = told(lambda ask=ask, loss=loss: ask(loss))
        assert "asks for the gradient of the sharded parameter" in text
        assert all(p.grad is None for p in params) and x.grad is None
        loss.backward()
        assert all(p.grad is not None for p in params), "nothing was lost"
        model.zero_grad()
        x.grad = None
    run(x).sum().backward(inputs=(t for t in [x]))
    assert x.grad is not None and all(p.grad is None for p in params)
    assert torch.autograd.grad(run(x).sum(), x)[0].shape == x.shape
    penalty = model[0].weight.square().sum()
    assert torch.equal(
        torch.autograd.grad(penalty, model[0].weight)[0].full_tensor(), 2 * model[0].weight.full_tensor()
    )
    model[0].weight.square().sum().backward(inputs=[model[0].weight])
    assert torch.equal(model[0].weight.grad.full_tensor(), 2 * model[0].weight.full_tensor())
    assert torch.autograd.grad(x.sum(), [x, model[0].weight], allow_unused=True)[1] is None, "it is not used"


def test_forward_mode():
    model = net()
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(2, 8), torch.ones(2, 8))
        assert "functional_call" in told(lambda: model(x))
    assert model(torch.ones(2, 8)).shape == (2, 8)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,))[1],
    "jacfwd": lambda m, x: torch.func.jacfwd(m)(x),
    "grad": lambda m, x: torch.func.grad(lambda y: m(y).sum())(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_of_compiled_models(how, inside):
    """Of a compiled model, and in a compiled function that transforms the model."""
    model, x = net(), torch.ones(2, 8)
    if inside:
        run = torch.compile(lambda x: TRANSFORMS[how](model, x), backend="mfsdp", options={"lowering": "eager"})
        assert "functional_call" in told(lambda: run(x))
    else:
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
        assert "functional_call" in told(lambda: TRANSFORMS[how](run, x))
    assert torch.equal(model(x), net()(x)), "nothing has changed"


@pytest.mark.slow
def test_dual_numbers_in_compiled_code():
    """Dynamo traces them down to operators: they work, and tangents are those of the unsharded model."""
    model, x = net(), torch.randn(2, 8)
    whole = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})

    def tangent(x: torch.Tensor, m: nn.Module) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(m(torch.autograd.forward_ad.make_dual(x, x))).tangent

    run = torch.compile(lambda x: tangent(x, model), backend="mfsdp", options={"lowering": "eager"})
    assert torch.equal(run(x), tangent(x, whole))


@pytest.mark.parametrize("optimizer", ["LBFGS", "Adafactor", "Muon"])
def test_optimizers_that_are_not_elementwise(optimizer):
    model = net()
    before = [p.full_tensor().clone() for p in model.parameters()]
    params = [p for p in model.parameters() if p.dim() == 2] if optimizer == "Muon" else model.parameters()
    steps = getattr(torch.optim, optimizer)(params)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    closure()
    text = told(lambda: steps.step(closure))
    assert text.startswith(f"mfsdp: {optimizer} cannot step sharded parameters") and "elementwise" in text
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(NotImplementedError, match="use .full_tensor") as own:
        model[0].weight.detach().sort()
    assert optimizer not in str(own.value), "nobody steps"


def test_who_asks_in_a_closure():
    """What a closure does is not the optimizer's."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    assert told(lambda: optimizer.step(lambda: model[0].weight.detach().sort())).startswith("aten.sort")


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_with_low_bit_state(name):
    low_bit = pytest.importorskip("torchao.optim")
    model = net()
    assert 'offload="state"' in told(lambda: getattr(low_bit, name)(model.parameters()))
    getattr(low_bit, name)(nn.Linear(8, 8).parameters())


WRITES: dict[str, Callable[[nn.Sequential, torch.optim.Optimizer], object]] = {
    "in place": lambda m, _: m.state_dict()["0.weight"].mul_(2),
    "step": lambda m, o: o.step(),
    "load": lambda m, _: m.load_state_dict({k: v.full_tensor() for k, v in m.state_dict().items()}),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("how", WRITES)
def test_writes_while_parameters_are_kept(how, flat):
    model, x = net(), torch.randn(2, 8)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if flat:
        optimizer = mfsdp.fully_shard_optimizer(optimizer)
    model(x).sum().backward()
    before = model(x)
    with mfsdp.unsharded(model):
        assert "Leave mfsdp.unsharded" in told(lambda: WRITES[how](model, optimizer))
        assert torch.equal(model(x), before) and not optimizer.state
    model.unshard()
    WRITES[how](model, optimizer)
    assert not model._mfsdp_unit.kept and not model._mfsdp_unit.full, "let go of"
    assert torch.equal(model(x), before) == (how == "load")


def unshards(lowering: str, flat: bool) -> tuple[bool, int]:
    """FSDP2's explicit prefetch: ``unshard()`` in front of every forward, and no ``reshard()``."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = mfsdp.fully_shard(copy.deepcopy(reference))
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    if flat:
        mfsdp.fully_shard_optimizer(optimizers[0])
    for step in range(3):
        model.unshard()
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for m in (run, reference):
            m(x).square().sum().backward()
        for p in reference.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close = [
        torch.allclose(p.full_tensor(), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    return all(close), len(eager._tickets)


@pytest.mark.dist
def test_unshard_in_front_of_every_forward(two_ranks):
    for lowering, flat in (("none", False), ("none", True), ("eager", False), ("eager", True)):
        assert two_ranks.run(unshards, lowering, flat) == [(True, 0)] * 2, (lowering, flat)


def drawn(strategy: int, mesh: tuple[int, ...], each: bool, lowering: str) -> str:
    """What is said where ranks draw with seeds of their own."""
    names = ("dp_replicate", "dp_shard")[-len(mesh) :]
    model = net(strategy=strategy, mesh=dist.init_device_mesh("cpu", mesh, mesh_dim_names=names))
    run = torch.compile(model, backend="mfsdp", options={"lowering": lowering}) if lowering != "none" else model
    torch.manual_seed(1 + each * dist.get_rank())
    nn.init.normal_(model[0].weight)
    try:
        run(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "mesh", "lowering"),
    [
        (0, (2,), "eager"), (3, (2, 1), "none"),
        pytest.param(0, (2,), "none", marks=pytest.mark.exhaustive),
        pytest.param(3, (2, 1), "eager", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_replicas_drawn_with_other_seeds(two_fresh_ranks, strategy, mesh, lowering):
    assert two_fresh_ranks.run(drawn, 3, (2,), True, "none") == ["", ""], "every rank has rows of its own"
    assert two_fresh_ranks.run(drawn, strategy, mesh, False, lowering) == ["", ""]
    for text in two_fresh_ranks.run(drawn, strategy, mesh, True, lowering):
        assert "needs the same seed" in text and "normal_" in text


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).relu()


class Parted(nn.Module):
    """Blocks that are sharded, between layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reduce(p: torch.Tensor) -> None:
    dist.all_reduce(p.grad)


def unsharded_parts(kind: str) -> tuple[list[str], bool]:
    """What is told of unsharded layers in two backwards, and whether their gradients are the same on all ranks."""
    model = Parted()
    plain = [*model.stem.parameters(), *model.head.parameters()]
    if kind == "frozen":
        model.stem.requires_grad_(False)
        model.head.requires_grad_(False)
    if kind == "frozen blocks":
        model.blocks.requires_grad_(False)
    for block in model.blocks:
        mfsdp.fully_shard(block, ignored_params=set(plain) if kind == "ignored" else None)
    if kind == "behind":
        mfsdp.fully_shard(model)
        model.head = nn.Linear(8, 8)
    if kind == "hooks":
        for p in plain:
            p.register_post_accumulate_grad_hook(reduce)
    run: Any = model
    if kind == "compiled":
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    elif kind == "compiled blocks":
        for block in model.blocks:
            block.compile(backend="mfsdp", options={"lowering": "eager"})
    elif kind == "ddp":
        run = nn.Sequential(nn.parallel.DistributedDataParallel(model.stem), *model.blocks,
                            nn.parallel.DistributedDataParallel(model.head))  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
            run(x).square().sum().backward()
    grad = model.head.weight.grad
    total = None if grad is None or kind == "behind" else grad.clone()
    if total is not None:
        dist.all_reduce(total)
    same = total is None or torch.allclose(total / 2, grad)
    return [str(w.message) for w in seen if "nobody averages" in str(w.message)], same


@pytest.mark.dist
def test_parts_that_nobody_averages(two_ranks):
    """All that blocks leave out, or that came behind `fully_shard`, in code that is not compiled: told once."""
    for kind in ("frozen", "ignored", "hooks", "ddp", "compiled"):
        for texts, same in two_ranks.run(unsharded_parts, kind):
            assert not texts and (same or kind == "ignored"), (kind, texts)
    for kind in ("plain", "compiled blocks", "frozen blocks"):
        for texts, same in two_ranks.run(unsharded_parts, kind):
            assert len(texts) == 1 and not same, (kind, texts)
            assert "stem.weight, stem.bias, head.weight, ... of Parted" in texts[0]
    for texts, _ in two_ranks.run(unsharded_parts, "behind"):
        assert len(texts) == 1 and "head.weight, head.bias of Parted" in texts[0]


def test_nobody_else_to_average_with():
    model = Parted()
    mfsdp.fully_shard(model.blocks[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*nobody averages")
        model(torch.ones(2, 8)).sum().backward()


def by_torch() -> list[str]:
    model = Parted()
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block)
    torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    calls: list[Callable[[], object]] = [
        lambda: mfsdp.fully_shard(model), lambda: mfsdp.fully_shard(nn.Sequential(model)),
        lambda: mfsdp.no_sync(model).__enter__(), lambda: mfsdp.check_replicas(model),
        lambda: mfsdp.fully_shard_optimizer(optimizer),
    ]  # fmt: skip
    texts = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        texts.append(str(error.value))
    backend._warned_unsharded = False
    with logged() as found:
        torch.compile(model, backend="mfsdp", options={"lowering": "eager"})(torch.ones(2, 8)).sum().backward()
    return [*texts, "; ".join(found)]


@pytest.mark.dist
def test_models_that_fsdp2_has_sharded(two_ranks):
    for texts in two_ranks.run(by_torch):
        for text in texts:
            assert "FSDP2" in text and "mfsdp.fully_shard" in text, text
