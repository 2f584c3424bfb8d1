"""`fully_shard_optimizer`: the same results and the same state as the optimizer by itself, on few flat tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp.optim.flat_optimizer import fully_shard_optimizer
from tests.helpers.models import CASES
from tests.helpers.optimizers import OPTIMIZERS, fill, groups, sharded
from tests.helpers.parity import error, whole


def compare(name: str, strategy: int, alternate: bool) -> tuple[float, float, list[int]]:
    """Largest errors of parameters and of state after five steps, and how many tensors the flat one steps on."""
    models = sharded(strategy=strategy)
    plain, flat = (OPTIMIZERS[name](groups(m)) for m in models)
    flat = fully_shard_optimizer(flat)
    sizes: list[int] = []
    flat.register_step_pre_hook(lambda o, *_: sizes.extend(p.numel() for g in o.param_groups for p in g["params"]))
    missing = (lambda number, step: (number + step) % 3 == 0) if alternate else None
    for step in range(5):
        fill(models, step, missing)
        plain.step()
        flat.step()
        for o in (plain, flat):
            o.zero_grad()
    worst = max(error(whole(q), whole(p)) for p, q in zip(*(m.parameters() for m in models), strict=True))
    want, got = plain.state_dict(), flat.state_dict()
    assert want["param_groups"] == got["param_groups"]
    assert want["state"].keys() == got["state"].keys()
    state = 0.0
    for key, mine in want["state"].items():
        assert mine.keys() == got["state"][key].keys(), (mine.keys(), got["state"][key].keys())
        for a, b in zip(mine.values(), got["state"][key].values(), strict=True):
            if isinstance(a, torch.Tensor):
                assert a.shape == b.shape and type(a) is type(b)
                state = max(state, error(whole(b), whole(a)) if hasattr(a, "full_tensor") else error(b, a))
            else:
                assert a == b
    assert min(sizes) > 0, "an optimizer gets no empty tensor"
    return worst, state, sizes


@pytest.mark.dist
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_the_optimizer_by_itself(two_ranks, name):
    for worst, state, _ in two_ranks.run(compare, name, 3, False):
        assert worst < 1e-6 and state < 1e-6


@pytest.mark.dist
@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_gradients_that_come_and_go(two_ranks, name):
    for worst, state, _ in two_ranks.run(compare, name, 3, True):
        assert worst < 1e-6 and state < 1e-6


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 1])
def test_under_other_strategies(two_ranks, strategy):
    for worst, state, _ in two_ranks.run(compare, "adamw", strategy, False):
        assert worst < 1e-6 and state < 1e-6


def one_group() -> list[int]:
    (model, _) = sharded()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    sizes: list[int] = []
    optimizer.register_step_pre_hook(lambda o, *_: sizes.extend(p.numel() for g in o.param_groups for p in g["params"]))
    fill([model], 0)
    optimizer.step()
    return sizes


@pytest.mark.dist
def test_one_tensor_for_each_unit(two_ranks):
    for sizes in two_ranks.run(one_group):
        assert len(sizes) <= 3, f"a block and the root, of at most two segments: {sizes}"


def resumed() -> tuple[float, float]:
    """State that was loaded, from either kind into the other, goes on as if never stopped."""
    models = sharded()
    plain, flat = (torch.optim.AdamW(groups(m)) for m in models)
    fully_shard_optimizer(flat)
    for step in range(2):
        fill(models, step)
        plain.step()
        flat.step()
    others = [copy.deepcopy(m) for m in models]
    from_flat = torch.optim.AdamW(groups(others[0]))
    from_flat.load_state_dict(copy.deepcopy(flat.state_dict()))  # torch takes the tensors themselves
    from_plain = fully_shard_optimizer(torch.optim.AdamW(groups(others[1])))
    from_plain.load_state_dict(copy.deepcopy(plain.state_dict()))
    for step in range(2, 4):
        fill([*models, *others], step)
        for o in (plain, flat, from_flat, from_plain):
            o.step()
    flat.load_state_dict(copy.deepcopy(flat.state_dict()))
    fill([*models, *others], 4)
    for o in (plain, flat, from_flat, from_plain):
        o.step()
    want = [whole(p) for p in models[0].parameters()]
    worst = 0.0
    for m in (models[1], *others):
        worst = max(worst, *(error(whole(p), w) for p, w in zip(m.parameters(), want, strict=True)))
    steps = {float(s["step"]) for s in flat.state.values()}
    return worst, float(steps == {5.0})


@pytest.mark.dist
def test_state_is_loaded_from_either_into_either(two_ranks):
    for worst, right in two_ranks.run(resumed):
        assert worst < 1e-6 and right == 1.0


def trains() -> float:
    """A whole loop, with a scheduler and clipping, on a strategy whose parameters last."""
    models = sharded(strategy=1)
    runs = [torch.compile(m, backend="mfsdp", options={"lowering": "eager"}) for m in models]
    plain, flat = (torch.optim.AdamW(groups(m), lr=1e-2) for m in models)
    fully_shard_optimizer(flat)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n) for o in (plain, flat)]
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        ids = CASES["gpt"].batch()
        for m, run, o, s in zip(models, runs, (plain, flat), schedulers, strict=True):
            run(ids).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            s.step()
            o.zero_grad()
    return max(error(whole(q), whole(p)) for p, q in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.dist
def test_a_training_loop(two_ranks):
    assert max(two_ranks.run(trains)) < 1e-5


def decoupled() -> bool:
    model = mfsdp.fully_shard(
        nn.Linear(16, 16), mp_policy=mfsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    )

    class Reads(torch.optim.Optimizer):
        def __init__(self, params: Any):
            super().__init__(params, {})

        def step(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    assert p.grad is None and p.decoupled_grad.dtype is torch.float32
                    p.data.sub_(p.decoupled_grad)

    optimizer = fully_shard_optimizer(Reads(model.parameters()), use_decoupled_grad=True)
    before = [whole(p).clone() for p in model.parameters()]
    fill([model], 0)
    grads = [whole(p.grad).clone() for p in model.parameters()]
    optimizer.step()
    return all(torch.allclose(whole(p), b - g) for p, b, g in zip(model.parameters(), before, grads, strict=True))


@pytest.mark.dist
def test_decoupled_gradients(two_ranks):
    assert two_ranks.run(decoupled) == [True, True]


def test_parameters_that_are_not_sharded_and_come_later():
    model, plain = mfsdp.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        (model(torch.ones(2, 4)) + plain(torch.ones(2, 4))).sum().backward()
        before = plain.weight.detach().clone()
        optimizer.step()
        assert torch.equal(before, plain.weight) == (step == 0)
        if step == 0:
            optimizer.add_param_group({"params": plain.parameters()})


def test_deepcopy_steps_the_copy():
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        kept = [whole(p).clone() for p in model.parameters()]
        model, optimizer = copy.deepcopy((model, optimizer))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not any(torch.equal(whole(p), k) for p, k in zip(model.parameters(), kept, strict=True))


def test_bad_input():
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"is no torch\.optim\.Optimizer"):
        fully_shard_optimizer(model)
    with pytest.raises(ValueError, match="call mfsdp.fully_shard first"):
        fully_shard_optimizer(torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match="Adafactor.*depends on others"):
        fully_shard_optimizer(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ValueError, match="torch's AdamW reads .grad.* would not step"):
        fully_shard_optimizer(torch.optim.AdamW(model.parameters()), use_decoupled_grad=True)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="already"):
        fully_shard_optimizer(optimizer)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    with pytest.raises(ValueError, match="build schedulers afterwards"):
        fully_shard_optimizer(scheduled)
    assert type(scheduled) is torch.optim.SGD


class Wide(torch.optim.Optimizer):
    """State of another shape than the parameter's."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["norms"] = torch.zeros(3)


def test_state_that_is_not_elementwise_is_refused():
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    optimizer = fully_shard_optimizer(Wide(model.parameters()))
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(NotImplementedError, match="Wide: its state 'norms' is not elementwise"):
        optimizer.step()
