"""Forward may read other modules' parameters and return parameters: both are unsharded and get gradients."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from tests.helpers.parity import averaged, error, whole


def _all(m: Penalised) -> torch.Tensor:
    return sum(p.square().sum() for p in m.parameters())


def _biases(m: Penalised) -> torch.Tensor:
    return sum(p.square().sum() for name, p in m.named_parameters() if name.endswith("bias"))


def _twice(m: Penalised) -> torch.Tensor:
    return sum(p.square().sum() for _, p in m.named_parameters(remove_duplicate=False))


def _child(m: Penalised) -> torch.Tensor:
    return sum(p.abs().sum() for p in m.first.parameters()) + sum(p.sum() for p in m.parameters(recurse=False))


def _named(m: Penalised) -> torch.Tensor:
    params = dict(m.named_parameters(prefix="model"))
    return params["model.first.weight"].norm() + params["model.scale"].sum()


def _kind(m: Penalised) -> torch.Tensor:
    first = next(m.parameters())
    return torch.ones((), dtype=first.dtype, device=first.device)


PENALTIES = [_all, _biases, _twice, _child, _named, _kind]


def _every(m: Penalised) -> torch.Tensor:
    return _all(m) + _biases(m) + _twice(m) + _child(m) + _named(m) + _kind(m)


class Penalised(nn.Module):
    """A penalty on parameters inside of forward; some are tied, one is frozen, one ignored."""

    def __init__(self, penalty: Any):
        super().__init__()
        self.penalty = penalty
        self.first, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.rest = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.rest[1].weight = self.first.weight
        self.scale, self.ignored = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.frozen, *self.rest):
            x = torch.tanh(layer(x))
        return (x * self.scale).square().mean() + 0.1 * self.penalty(self)


def penalised(penalty: Any, how: str, strategy: int) -> float:
    torch.manual_seed(0)
    reference = Penalised(penalty)
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=["rest.*"], strategy=strategy, ignored_params=[model.ignored])
    warnings.simplefilter("ignore")
    run = model if how == "plain" else torch.compile(model, backend="mfsdp", options={"lowering": how})
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss, want = run(x), reference(x)
    loss.backward()
    want.backward()
    averaged(reference)
    worst = error(loss.detach(), want.detach())
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None and name != "ignored":
            worst = max(worst, error(whole(p.grad), q.grad, 1e-3))
    assert all(isinstance(p, mfsdp.dtensor.sharded_parameter.ShardedParameter) for p in model.first.parameters())
    return worst


def named(given: Any) -> str:
    return getattr(given, "__name__", str(given)).strip("_")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("penalty", "how", "strategies"),
    [
        *((penalty, "plain", (1, 3)) for penalty in PENALTIES),
        (_every, "eager", (3,)), (_biases, "eager", (1,)), (_kind, "eager", (3,)),
    ],
    ids=named,
)  # fmt: skip
def test_parameters_inside_of_forward(two_ranks, penalty, how, strategies):
    for strategy in strategies:
        assert max(two_ranks.run(penalised, penalty, how, strategy)) < 1e-5


UNREADABLE = {
    "container": lambda m: sum(p.sum() for p in m.rest.parameters()),
    "state": lambda m: sum(p.sum() for p in m.state_dict().values()),
    "raw": lambda m: sum(p.sum() for p in m._parameters.values()),
    "functional": lambda m: torch.func.functional_call(
        m.first, {"weight": torch.ones(4, 4)}, (torch.ones(1, 4),)
    ).sum(),
}


@pytest.mark.parametrize("read", UNREADABLE)
def test_what_compiled_code_cannot_read_is_refused_in_words(read):
    torch._dynamo.reset()
    model = mfsdp.fully_shard(Penalised(UNREADABLE[read]))
    with pytest.raises(
        Exception, match=r"compiled code takes the sharded form of the parameter [\w.]+\. Read it as an"
    ):
        torch.compile(model, backend="mfsdp", options={"lowering": "eager"})(torch.ones(1, 4))


def test_functional_call_of_compiled_models():
    model = mfsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=[nn.Linear])
    run, x = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}), torch.ones(1, 4)
    zeros = {name: torch.zeros(p.shape) for name, p in run.named_parameters()}
    want = run(x)
    for m in (run, copy.deepcopy(run)):
        with pytest.raises(RuntimeError, match=r"in the place of weight of unit '0' .*set_stance\('force_eager'\)"):
            torch.func.functional_call(m, zeros, (x,))
        with torch.compiler.set_stance("force_eager"):
            assert not torch.func.functional_call(m, zeros, (x,)).any()
        leave = pytest.raises(RuntimeError, match=r"Leave mfsdp\.summon_full_params first")
        with mfsdp.summon_full_params(m), torch.no_grad(), leave:
            m(x)
        assert torch.equal(m(x), want)
    model.compile(backend="mfsdp", options={"lowering": "eager"})
    zeros = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="force_eager"):
        torch.func.functional_call(model, zeros, (x,))
    with torch.compiler.set_stance("force_eager"):
        assert not torch.func.functional_call(model, zeros, (x,)).any()


def test_a_copy_of_a_part_has_nothing_of_the_rest():
    model = Penalised(_all)
    mfsdp.fully_shard(model, ignored_params=[model.ignored])
    with mfsdp.summon_full_params(model), pytest.raises(RuntimeError, match="is summoned; leave .* before copying"):
        copy.deepcopy(model)
    part = copy.deepcopy(model.first)
    (buffer,) = {ref.buffer for ref in mfsdp.buffers.flat_buffer.refs(part).values()}
    assert {id(params) for params, _ in buffer.places.values()} == {id(part._parameters)}


class Broken(nn.Sequential):
    """Dynamo gives up half-way: the unit is gathered in plain Python, and compiled pieces read it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        torch._dynamo.graph_break()
        return self[1](x)


@pytest.mark.slow
@pytest.mark.parametrize("around", ["nothing", "unsharded", "unshard"])
@pytest.mark.parametrize("kind", [nn.Sequential, Broken])
def test_functional_call_of_compiled_pieces(kind, around):
    torch._dynamo.reset()
    warnings.simplefilter("ignore")
    model = mfsdp.fully_shard(kind(nn.Linear(4, 4), nn.Linear(4, 4)))
    run, x = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}), torch.ones(1, 4)
    zeros = {name: torch.zeros(p.shape) for name, p in run.named_parameters()}
    if around == "unshard":
        model.unshard()
    with mfsdp.unsharded(model) if around == "unsharded" else contextlib.nullcontext():
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                want = run(x)
                with pytest.raises(RuntimeError, match="in the place of weight of unit"):
                    torch.func.functional_call(run, zeros, (x,))
                assert torch.equal(run(x), want)
    assert not torch.func.functional_call(
        model, {n.removeprefix("_orig_mod."): z for n, z in zeros.items()}, (x,)
    ).any()


def test_moving_averages_in_a_plain_forward():
    """Under no_grad parameters() shows shards in a forward too, and what is done to them lasts."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast, self.slow = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for p, q in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                    q.lerp_(p, 0.5)
            return self.fast(x)

    reference = Momentum()
    model = mfsdp.fully_shard(copy.deepcopy(reference))
    warnings.simplefilter("ignore")
    for m in (model, reference):
        m(torch.ones(1, 3)).sum().backward()
    assert error(model.slow.weight.full_tensor(), reference.slow.weight) < 1e-6


def _same(m: Returning) -> Any:
    return m.last.weight


def _views(m: Returning) -> Any:
    return m.last.weight.t(), m.last.weight[1:], m.last.weight, m.last.weight


def _frozen(m: Returning) -> Any:
    return {"frozen": m.frozen, "again": m.frozen.view(2, 2).detach()}


def _other(m: Returning) -> Any:
    return m.first.weight.expand(2, 4, 4), m.first.bias


RETURNED = [_same, _views, _frozen, _other]


class Returning(nn.Module):
    """Returns parameters, and views of them."""

    def __init__(self, what: Any):
        super().__init__()
        self.what = what
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.last(torch.relu(self.first(x * self.frozen)))), self.what(self)


def tensors(what: Any) -> list[torch.Tensor]:
    return list(what.values()) if isinstance(what, dict) else [what] if isinstance(what, torch.Tensor) else list(what)


def returning(what: Any, how: str, strategy: int, reshard: bool) -> float:
    torch.manual_seed(0)
    reference = Returning(what)
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=["first", "last"], strategy=strategy, reshard_after_forward=reshard)
    warnings.simplefilter("ignore")
    run = model if how == "plain" else torch.compile(model, backend="mfsdp", options={"lowering": how})
    worst = 0.0
    for step in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        kept = []
        for m in (run, reference):
            out, params = m(x)
            with torch.no_grad():
                m(2 * x)  # static buffers are used again
            kept.append([t.detach().clone() for t in tensors(params)])
            assert all(type(t) in (torch.Tensor, nn.Parameter) for t in tensors(params))
            (out.mean() + sum(t.square().sum() for t in tensors(params))).backward()
        worst = max(worst, *(error(a, b) for a, b in zip(*kept, strict=True)))
    with torch.no_grad():
        pairs = zip(tensors(run(x)[1]), tensors(reference(x)[1]), strict=True)
        worst = max(worst, *(error(a, b) for a, b in pairs))
    averaged(reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        worst = max(worst, error(whole(p.grad), q.grad, 1e-3) if q.grad is not None else 0.0)
    return worst


LAST, CUT, KEPT = (1, True), (3, True), (3, False)
"""Strategies, and whether forward cuts parameters again."""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "how", "ways"),
    [
        *((what, "plain", (LAST, CUT, KEPT)) for what in RETURNED),
        (_views, "eager", (CUT, KEPT)), (_frozen, "eager", (CUT,)), (_other, "eager", (LAST, KEPT)),
        pytest.param(_other, "inductor", (CUT,), marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
    ],
    ids=named,
)  # fmt: skip
def test_parameters_that_forward_returns(two_ranks, what, how, ways):
    for strategy, reshard in ways:
        assert max(two_ranks.run(returning, what, how, strategy, reshard, timeout=300)) < 1e-5, (strategy, reshard)
