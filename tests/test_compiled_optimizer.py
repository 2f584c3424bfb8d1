"""`fully_shard_optimizer(compile=True)`: recordings of steps, and what Inductor makes of them."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import mfsdp
from mfsdp.dtensor import optimizer_hooks
from mfsdp.optim import compiled_step
from mfsdp.optim import flat_optimizer as optimizer_
from mfsdp.optim.flat_optimizer import fully_shard_optimizer
from mfsdp.optim.step_tracer import Grows, record, settings
from mfsdp.optim.symbolic_numbers import CannotRecord
from tests.helpers.optimizers import OPTIMIZERS, fill, groups, sharded
from tests.helpers.parity import error, scaled_steps, whole


class Counting(torch.optim.Optimizer):
    """What optimizers outside of torch do: Python's numbers in state, `math`, `.data`, integers, decisions."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "warmup": 2})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None or not p.requires_grad:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                    state["also"] = torch.zeros(())
                state["step"] += 1
                state["also"].data.add_(1)
                state["also"] = state["also"] + 1
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"] = state["v"] * beta2 + (1 - beta2) * p.grad**2
                size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                if state["step"] <= group["warmup"]:
                    size = size / 10
                p.data.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-size)


RECORDED = {**OPTIMIZERS, "counting": Counting}
del RECORDED["asgd"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in RECORDED), *((name, torch.bfloat16) for name in ("sgd", "adamw", "counting"))],
)
def test_a_recording_does_what_the_step_does(name, dtype):
    """With other numbers in every step, and few recordings."""
    torch.manual_seed(0)
    param, mine = nn.Parameter(torch.randn(9, dtype=dtype)), None
    optimizer = RECORDED[name]([param])
    group, step = optimizer.param_groups[0], type(optimizer).step.__wrapped__
    recordings: list[Any] = []
    for number in range(5):
        param.grad, group["lr"] = torch.randn(9, dtype=dtype), 0.1 / (1 + number)
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(param, {}).items()}
        mine, gradient = param.detach().clone(), param.grad.clone()
        counters = {k: float(v) for k, v in state.items() if compiled_step.is_counter(v)}
        values = [*settings(group)[1], *counters.values()]
        found = next((r for r in recordings if r.holds(*values)), None)
        if found is None:
            try:
                found = record(step, optimizer, type(optimizer), group, state, mine, gradient)
                recordings.append(found)
            except Grows:
                assert number == 0
        step(optimizer)
        if found is None:
            continue
        gives = found.numbers(*values)
        tensors = [v for k, v in state.items() if isinstance(v, torch.Tensor) and k not in counters]
        found.graph(torch.tensor(gives[: found.count], dtype=torch.float64), mine, gradient, *tensors)
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
        assert torch.allclose(mine, param, **close)
        for key, value in optimizer.state[param].items():
            if key in counters:
                assert math.isclose(gives[found.count + list(counters).index(key)], float(value), rel_tol=1e-6)
            else:
                assert torch.allclose(state[key], value, **close), key
    limit = 2 if name in ("radam", "counting") else 1  # both decide by the number of steps
    assert len(recordings) <= limit, [r.text for r in recordings]


def test_numbers_may_be_numpys_and_stand_in_lists():
    group = {"lr": np.float64(0.1), "betas": [0.9, 0.99], "foreach": None, "params": []}
    plain = {**group, "lr": 0.1, "betas": (0.9, 0.99)}
    assert settings(group) == settings(plain) and settings(plain)[1] == [0.1, 0.9, 0.99]
    assert [compiled_step._static(v) for v in group.values()] == [compiled_step._static(v) for v in plain.values()]


class Refused(torch.optim.Optimizer):
    def __init__(self, params: Any, how: str):
        self.how, self.taken = how, 0
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.how == "attribute":
                self.taken += 1
            if self.how == "setting":
                group["steps"] += 1
            for p in group["params"]:
                if self.how == "value" and p.grad.abs().max() > 1:
                    p.grad.zero_()
                if self.how == "random":
                    p.add_(torch.rand_like(p))
                if self.how == "number":
                    steps = self.state[p].setdefault("steps", 0)
                    self.state[p]["steps"] = steps + 1
                    p.add_(p.grad, alpha=-[0.1, 0.2, 0.3][int(steps) % 3])
                else:
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("attribute", "keeps state of its own, not by parameter: taken"),
        ("setting", "changes settings of its parameter group: steps"),
        ("value", "data-dependent|DataDependent"),
        ("random", "draws random numbers"),
        ("number", "needs a number of each step as it is"),
    ],
)
def test_what_cannot_be_compiled_is_refused_when_it_is_built(how, why, monkeypatch):
    with pytest.raises(NotImplementedError, match="torch's own Adadelta, .*Leave out compile=True"):
        fully_shard_optimizer(Refused(mfsdp.fully_shard(nn.Linear(4, 4)).parameters(), how), compile=True)
    monkeypatch.setattr(optimizer_, "KNOWN", {Refused})
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    optimizer = Refused(model.parameters(), how)
    with pytest.raises(NotImplementedError, match=f"does not support this Refused: .*({why}).*Leave compile out"):
        fully_shard_optimizer(optimizer, compile=True)
    assert type(optimizer) is Refused
    fully_shard_optimizer(optimizer)


def test_differentiable_and_asgd_are_refused():
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    for optimizer in (
        torch.optim.SGD(model.parameters(), differentiable=True),
        torch.optim.ASGD(model.parameters()),
    ):
        with pytest.raises(NotImplementedError, match="does not support this SGD|ASGD cannot be compiled"):
            fully_shard_optimizer(optimizer, compile=True)


def test_a_step_that_is_compiled_from_outside():
    """Over sharded parameters it says what to do; a flat optimizer's own is left alone, in words, once."""
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"mfsdp\.fully_shard_optimizer\(optimizer, compile=True\)"):
        torch.compile(optimizer.step, backend="eager")()
    flat = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    optimizer_hooks._tell.cache_clear()
    step = torch.compile(flat.step, backend="eager")
    with pytest.warns(UserWarning, match="leaves the step of AdamW on flat tensors as it is"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()

        @torch.compile(backend="eager")
        def train(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            flat.step()
            return y * 2

        train(torch.ones(2))
    assert {float(s["step"]) for s in flat.state.values()} == {3.0}
    plain = torch.optim.SGD([w := nn.Parameter(torch.ones(2))], lr=0.1)
    w.grad = torch.ones(2)
    torch.compile(plain.step, backend="eager")()  # others' are as before


def pair(make: Any, **kwargs: Any) -> tuple[list[nn.Module], list[Any]]:
    """Twice the same model and optimizer; the second one's step is compiled."""
    models = sharded(**kwargs)
    optimizers = [make(groups(m)) for m in models]
    return models, [fully_shard_optimizer(o, compile=c) for o, c in zip(optimizers, (False, True), strict=True)]


def apart(models: list[nn.Module], optimizers: list[Any]) -> tuple[float, float]:
    """How far parameters and state are from each other."""
    worst = max(error(whole(q), whole(p)) for p, q in zip(*(m.parameters() for m in models), strict=True))
    state = 0.0
    for mine, its in zip(*(o.state_dict()["state"].values() for o in optimizers), strict=True):
        assert list(mine) == list(its)
        for a, b in zip(mine.values(), its.values(), strict=True):
            if isinstance(a, torch.Tensor):
                state = max(state, error(whole(b), whole(a)) if hasattr(a, "full_tensor") else error(b, a))
    return worst, state


def trained(name: str, alternate: bool) -> tuple[float, float, int, int]:
    """Nine steps under a scheduler that moves learning rate and momentum, with a load in the middle."""
    models, optimizers = pair(OPTIMIZERS[name])
    steps: list[int] = []
    optimizers[1].register_step_post_hook(lambda o, *_: steps.append(sum(len(g["params"]) for g in o.param_groups)))
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.01, 0.05], total_steps=20) for o in optimizers]
    missing = (lambda number, step: (number + step) % 3 == 0) if alternate else None
    for step in range(9):
        fill(models, step, missing)
        for o, s in zip(optimizers, schedulers, strict=True):
            o.step()
            s.step()
            o.zero_grad()
        if step == 5:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    graphs = sum(map(len, optimizers[1]._mfsdp_runs.steps._graphs.values()))
    return *apart(models, optimizers), graphs, len([n for n in steps if n])


@pytest.mark.dist
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("name", "alternate"), [("adamw", True), pytest.param("sgd", False, marks=pytest.mark.exhaustive)]
)
def test_compiled_steps_are_those_of_the_optimizer(two_ranks, name, alternate):
    for worst, state, graphs, steps in two_ranks.run(trained, name, alternate):
        assert worst < 1e-6 and state < 1e-6
        assert graphs <= 8, "numbers and lengths compile nothing anew"
        assert steps == 9, "hooks run once in a step"


@pytest.mark.inductor
def test_depth_and_sizes_compile_nothing_anew():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 3 + n) for n in range(12)), nn.Linear(1, 1, bias=False))
    mfsdp.fully_shard(model, units=[nn.Linear])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), compile=True)
    before = [whole(p).clone() for p in model.parameters()]
    fill([model], 0)
    grads = [whole(p.grad).clone() for p in model.parameters()]
    version = next(iter(model.parameters())).to_local()._version
    optimizer.step()
    for p, b, g in zip(model.parameters(), before, grads, strict=True):
        assert torch.allclose(whole(p), b - 0.1 * g)
    assert sum(map(len, optimizer._mfsdp_runs.steps._graphs.values())) == 2, "one, and one for a single element"
    assert next(iter(model.parameters())).to_local()._version > version, "compiled writes count"


@pytest.mark.inductor
def test_grad_scaler_skips_and_unscales():
    models = [mfsdp.fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    with torch.no_grad():
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            q.copy_(p)
    optimizers = [
        fully_shard_optimizer(torch.optim.AdamW(m.parameters(), fused=True), compile=c)
        for m, c in zip(models, (False, True), strict=True)
    ]
    scaled_steps(models, optimizers)
    assert apart(models, optimizers)[0] < 1e-6
    assert {float(s["step"]) for s in optimizers[1].state.values()} == {3.0}


@pytest.mark.inductor
def test_decisions_that_never_end_are_told(monkeypatch):
    class Fickle(torch.optim.Optimizer):
        def __init__(self, params: Any):
            super().__init__(params, {"lr": 0.0})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-[0.1, 0.2][int(group["lr"]) % 2])

    monkeypatch.setattr(optimizer_, "KNOWN", {Fickle})
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    optimizer = fully_shard_optimizer(Fickle(model.parameters()), compile=True)
    before, limit = compiled_step.MANY, 2
    compiled_step.MANY = limit
    try:
        for step in range(limit + 1):
            optimizer.param_groups[0]["lr"] = float(step)
            fill([model], step)
            weight = next(iter(model.parameters()))
            kept = whole(weight).clone()
            if step < limit:
                optimizer.step()
            else:
                with pytest.warns(UserWarning, match=r"2 compiled steps of one kind.*trunc\(lr\) == 1"):
                    optimizer.step()
            assert not torch.equal(kept, whole(weight))
    finally:
        compiled_step.MANY = before


def test_no_tensor_is_kept_alive():
    """A recording looks at tensors only."""
    weights, gradient = torch.zeros(4), torch.zeros(4)
    optimizer = torch.optim.SGD([nn.Parameter(weights)], lr=0.1)
    made = record(
        type(optimizer).step.__wrapped__, optimizer, torch.optim.SGD, optimizer.param_groups[0], {}, weights, gradient
    )
    assert weights.abs().sum() == 0 and not weights.requires_grad and made.count == 1
    with pytest.raises(CannotRecord, match="shape"):
        record(
            type(optimizer).step.__wrapped__,
            optimizer,
            torch.optim.SGD,
            optimizer.param_groups[0],
            {"x": torch.zeros(3)},
            weights,
            gradient,
        )


@pytest.mark.inductor
def test_inductors_cache_takes_it():
    """A second process finds the graph there: nothing in it refuses to be pickled for the key."""
    found = []
    with fresh_cache():
        for _ in range(2):
            counters.clear()
            torch.manual_seed(0)
            model = mfsdp.fully_shard(nn.Linear(24, 24))
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), compile=True)
            for _ in range(2):
                model(torch.ones(2, 24)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            known = {k: n for k, n in counters["inductor"].items() if k.startswith("fxgraph_cache")}
            found.append((known, model.weight.full_tensor().detach()))
    (first, once), (second, again) = found
    assert first == {"fxgraph_cache_miss": 1} and second == {"fxgraph_cache_hit": 1}
    assert torch.equal(once, again)
