"""`mfsdp.capture_step`: a replayed step has the bits of one that runs, whatever happened in between (Note [Captured
steps]).
"""

from __future__ import annotations

import gc
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.buffers.flat_buffer import buffers_in
from mfsdp.optim import captured_step
from mfsdp.optim.captured_step import STEADY, UNSTEADY
from mfsdp.optim.step_state import StepState
from mfsdp.runtime import capturing, devices, static_buffers
from tests.helpers.dtypes import BF16
from tests.helpers.graphs import graphs
from tests.helpers.parity import compiled
from tests.helpers.ranks import here

DUE = captured_step.due

TORCH_GRAPH = torch.cuda.graph

WARM = STEADY + 2
"""Calls until the state is steady and the step recorded: the first makes optimizer state and buffers."""


class Net(nn.Module):
    """Two units and a root, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class Momentum(torch.optim.Optimizer):
    """Reads nothing on the host, as torch's do on a GPU with capturable=True and a tensor for the learning rate."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": torch.tensor(0.1, device=here()), "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"], state["sum"] = torch.zeros((), device=p.device), torch.zeros_like(p)
                state["step"] += 1
                state["sum"].mul_(group["momentum"]).add_(p.grad)
                p.sub_(state["sum"] * group["lr"] / state["step"].sqrt())


class Trained:
    """A model with its optimizer, and its step, captured or not."""

    def __init__(
        self, captured: bool, *, microbatches: int = 1, clip: bool = True, lowering: str = "eager",
        optimizer: Callable[[Any], torch.optim.Optimizer] = Momentum, options: Any = None, ahead: bool = True,
        muon: bool = False, **sharding: Any,
    ):  # fmt: skip
        torch.manual_seed(0)
        if "mesh" in sharding:
            axes = sharding["mesh"]
            sharding["mesh"] = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.model = mfsdp.fully_shard(Net().to(here()), units=[nn.Sequential], **sharding)
        mfsdp.keep_gradients(self.model)
        kinds: list[list[Any]] = [[], []]
        for p in self.model.parameters():
            kinds[muon and p.dim() == 2].append(p)
        self.optimizers = [mfsdp.fully_shard_optimizer(optimizer(kinds[0]), ahead=ahead)]
        if muon:
            matrices = torch.optim.Muon(kinds[1], lr=torch.tensor(0.02, device=here()))  # type: ignore[arg-type]
            self.optimizers.append(mfsdp.fully_shard_optimizer(matrices, max_staging=1))
        self.optimizer = self.optimizers[-1]
        self.run = compiled(self.model, lowering, **(options or {}))
        self.microbatches, self.clip, scale = microbatches, clip, torch.ones((), device=here())

        def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
            return self._step(x * scale)

        def change() -> None:
            nonlocal scale
            scale = scale * 0.5

        self.step: Any = mfsdp.capture_step(step, self.run, self.optimizers) if captured else step
        self.change_a_variable = change

    def _step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        total = torch.zeros((), device=x.device)
        parts = x.chunk(self.microbatches)
        for i, part in enumerate(parts):
            with nullcontext() if i == len(parts) - 1 else mfsdp.no_sync(self.model):
                loss = self.run(part).float().square().mean()
                loss.backward()
            total = total + loss
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5) if self.clip else total
        for each in self.optimizers:
            each.step()
            each.zero_grad()
        return {"loss": total, "norm": getattr(norm, "full_tensor", lambda: norm)()}

    def train(self, seed: int, rows: int = 4, me: int = 0) -> list[float]:
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(10 * seed + me)).to(here())
        torch.manual_seed(seed)
        return [value.item() for value in self.step(x).values() if not value.is_meta] + [torch.rand(()).item()]

    def weights(self) -> list[torch.Tensor]:
        return [p.full_tensor().clone() for p in self.model.parameters()]

    @property
    def replays(self) -> int:
        return sum(recording.replays for seen in self.step._seen.values() for _, recording in seen.recordings)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that has graphs, which may be recorded in any call."""
    monkeypatch.setattr(captured_step, "due", lambda call: True)
    monkeypatch.setattr(captured_step, "_numbers", itertools.count(1))
    static_buffers.reset()
    with graphs():
        yield
    static_buffers.reset()


@pytest.fixture
def four() -> Iterator[None]:
    """One of four ranks."""
    with mfsdp.fake_ranks(4, rank=1):
        yield


CASES: dict[str, dict[str, Any]] = {
    "3": {}, "2": {"strategy": "optim_grads"}, "1": {"strategy": "optim"}, "0": {"strategy": "no_shard"},
    "hsdp": {"mesh": {"dp_outer": 2, "dp_shard": 2}},
    "microbatches, hsdp": {"mesh": {"dp_outer": 2, "dp_shard": 2}, "microbatches": 2},
    "hfsdp": {"mesh": {"dp_outer": 2, "dp_shard": 2}, "outer_strategy": "optim"},
    "bf16": {"mp_policy": BF16}, "bf16, 2": {"mp_policy": BF16, "strategy": "optim_grads"},
    "muon": {"muon": True}, "muon, hsdp": {"muon": True, "mesh": {"dp_outer": 2, "dp_shard": 2}},
    "microbatches": {"microbatches": 2}, "microbatches, 0": {"microbatches": 2, "strategy": "no_shard"},
    "no prefetch": {"options": {"prefetch": 0, "reduce_lag": 0, "pool": False}},
}  # fmt: skip
QUICK, COVERED = ("3",), ("hsdp", "muon", "bf16", "microbatches", "microbatches, 0")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c, marks=[] if c in QUICK else [pytest.mark.slow, *([pytest.mark.exhaustive] if c in COVERED else [])]
        )
        for c in CASES
    ],
)
def test_twenty_steps_have_the_bits_of_steps_that_run(four, case):
    """Losses, norms, dropout and weights; one recording, and the generator goes on as if the step had run."""
    t = alike([(20, None)], **CASES[case])
    assert t.step.describe().startswith(f"captured step 1: {20 - WARM + 1} replays, "), t.step.describe()


def _reset(t: Trained) -> None:
    static_buffers.reset()


def _reset_and_write(t: Trained) -> None:
    static_buffers.reset()
    _write(t)


def _evaluate(t: Trained) -> None:
    with torch.no_grad():
        t.run(torch.ones(2, 8))


def _write(t: Trained) -> None:
    with torch.no_grad():
        next(t.model.parameters()).mul_(0.5)


def _write_rows(t: Trained) -> None:
    next(t.model.parameters()).detach().to_local().numpy().__imul__(0.5)


def _load(t: Trained) -> None:
    t.model.load_state_dict({k: v.full_tensor() * 0.9 for k, v in t.model.state_dict().items()})


def _load_optimizer(t: Trained) -> None:
    loaded = t.optimizer.state_dict()
    for state in loaded["state"].values():
        state |= {name: value * 0.5 for name, value in state.items() if name != "step"}
    t.optimizer.load_state_dict(loaded)


def _freeze(t: Trained) -> None:
    p = next(t.model.parameters())
    p.requires_grad_(not p.requires_grad)


def _lr(t: Trained) -> None:
    t.optimizer.param_groups[0]["lr"].mul_(0.5)


def _other_lr(t: Trained) -> None:
    t.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)


def _mode(t: Trained) -> None:
    t.model.train(not t.model.training)


def _another_step(t: Trained) -> None:
    t._step(torch.ones(4, 8))


def _backward(t: Trained) -> None:
    """Leaves gradients for the step."""
    t.run(torch.ones(4, 8)).sum().backward()


def _keep_a_gradient(t: Trained) -> None:
    t.run(torch.ones(4, 8)).sum().backward()
    vars(t).setdefault("mine", []).append([p.grad for p in t.model.parameters()])
    t.optimizer.zero_grad()


def _read(t: Trained) -> None:
    t.model.state_dict()
    mfsdp.norms(t.model)


def _momentum(t: Trained) -> None:
    t.optimizer.param_groups[0]["momentum"] = 1.3 - t.optimizer.param_groups[0]["momentum"]


def _clip(t: Trained) -> None:
    t.clip = not t.clip
    if hasattr(t.step, "reset"):
        t.step.reset()  # an attribute of an object: not seen


def _variable(t: Trained) -> None:
    t.change_a_variable()


def _hook(t: Trained) -> None:
    """After a step, makes its weights smaller."""
    param = t.model.last.weight
    t.optimizer.register_step_post_hook(lambda *_: param.data.mul_(0.9))


def _module_hook(t: Trained) -> None:
    t.model.last.register_forward_hook(lambda module, args, out: out * 0.5)


def _another_hook(t: Trained) -> None:
    """As many hooks as before."""
    for each in vars(t).pop("hooked", []):
        each.remove()
    factor = vars(t)["factor"] = 0.5 * vars(t).get("factor", 1.0)
    weight = t.model.last.weight
    t.hooked = [weight.register_hook(lambda grad: grad * factor)]


def _dropout(t: Trained) -> None:
    t.model.layers[0][2].p += 0.1


def _replace_a_layer(t: Trained) -> None:
    t.model.layers[0][1] = nn.ReLU()


ACTIONS = [
    _another_hook, _dropout, _variable, _hook, _module_hook, _replace_a_layer, _evaluate, _write, _write_rows, _load,
    _load_optimizer, _freeze, _lr, _other_lr, _mode, _another_step, _backward, _keep_a_gradient, _read, _momentum,
    _clip, _reset,
]  # fmt: skip


Plan = list[tuple[int, Callable[[Trained], object] | None]]
"""Steps, then an action, and so on."""


def alike(plan: Plan, **settings: Any) -> Trained:
    """Follows a plan with steps that run, and with captured ones: the same losses, norms, random numbers, weights."""
    told, trained = [], []
    for captured in (False, True):
        torch._dynamo.reset()
        static_buffers.reset()
        t, values = Trained(captured, **settings), []
        for steps, does in [*plan, (0, None)]:
            values += [t.train(len(values)) for _ in range(steps)]
            torch.manual_seed(len(values))
            if does is not None:
                does(t)
        told.append((values, [p.detach().to_local().tolist() for p in t.model.parameters()]))
        trained.append(t)
    assert told[0] == told[1]
    return trained[1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim_grads_params", pytest.param("optim_grads", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("does", ACTIONS, ids=lambda does: does.__name__.strip("_"))
def test_what_a_user_does_between_steps_is_seen(four, does, strategy):
    t = alike([(6, does), (4, does), (6, None)], strategy=strategy)
    assert t.replays


NEEDED = {
    "gathers ahead": (_evaluate, {}), "settings of unit": (_freeze, {}), "modules": (_replace_a_layer, {}),
    "settings of Momentum": (_other_lr, {}), "settings of Momentum|state of": (_load_optimizer, {}),
    "variables": (_variable, {}), "hooks of": (_hook, {}), "static": (_reset_and_write, {}),
    "addresses|gradients": (_backward, {"ahead": False}),
}  # fmt: skip


@pytest.mark.parametrize("parts", [p if p == "static" else pytest.param(p, marks=pytest.mark.slow) for p in NEEDED])
def test_each_part_of_the_state_is_needed(four, monkeypatch, parts):
    """Without it, a step is replayed that is another one (invariant 71)."""
    does, how = NEEDED[parts]
    whole = StepState.now
    left_out = tuple(parts.split("|"))
    monkeypatch.setattr(
        StepState, "now", lambda self: {k: v for k, v in whole(self).items() if not k.startswith(left_out)}
    )
    with pytest.raises((AssertionError, RuntimeError)):
        alike([(6, does), (6, None)], **how)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    strategy=st.sampled_from(["optim_grads_params", "optim_grads", "no_shard"]),
    muon=st.booleans(),
    plan=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, *ACTIONS])), max_size=5),
)
def test_any_order_of_them(strategy, muon, plan):
    with mfsdp.fake_ranks(4, rank=1):
        alike([*plan, (5, None)], strategy=strategy, muon=muon)


@pytest.mark.slow
def test_a_step_that_ran_elsewhere_is_waited_for(four):
    """It may end in the state that is recorded, with gathers in flight."""
    assert alike([(WARM - 1, _another_step), (5, _another_step), (2, None)]).replays


@pytest.mark.parametrize("captured", [False, True])
def test_gathers_of_another_model_are_dropped(four, captured):
    """A replay writes to static buffers which another step's gathers, in flight, have filled."""
    told = []
    for both in ([False, False], [True, captured]):
        static_buffers.reset()
        first, second = Trained(both[0], ahead=False), Trained(both[1])
        turns = [*([second] * 6), *([first] * 6), second, second, second, first, second]
        told.append(([t.train(seed) for seed, t in enumerate(turns)], [t.weights() for t in (first, second)]))
    assert first.replays and (not captured or second.replays)
    assert str(told[0]) == str(told[1])


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None)
@given(
    strategy=st.sampled_from(["optim_grads_params", "optim_grads", "optim", "no_shard"]),
    microbatches=st.integers(1, 2),
    muon=st.booleans(),
    plan=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(ACTIONS)), max_size=8),
)
def test_many_orders_of_them(strategy, microbatches, muon, plan):
    with mfsdp.fake_ranks(4, rank=1):
        alike([*plan, (6, None)], strategy=strategy, microbatches=microbatches, muon=muon)


# On ranks with data of their own


def trains(strategy: str, muon: bool) -> tuple[object, object, int]:
    told = []
    for captured in (False, True):
        torch._dynamo.reset()
        static_buffers.reset()
        with graphs():
            t = Trained(captured, strategy=strategy, microbatches=2, muon=muon)
            values = [t.train(seed, me=dist.get_rank()) for seed in range(9)]
        told.append((values, [p.full_tensor().tolist() for p in t.model.parameters()]))
    return *told, t.replays


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "muon"), [("optim_grads_params", True), ("no_shard", False)])
def test_two_ranks(two_ranks, strategy, muon):
    """Each with data of its own; collectives are replayed too."""
    answers = two_ranks.run(trains, strategy, muon)
    for plain, captured, replays in answers:
        assert plain == captured and replays == 9 - WARM + 1
    assert answers[0][0][0] != answers[1][0][0]


def apart(what: str) -> str:
    with graphs():
        static_buffers.reset()
        t = Trained(True)
        for seed in range(6):
            t.train(seed)
        try:
            with torch.no_grad():
                if dist.get_rank() == 1 and what == "writes":
                    next(t.model.parameters()).mul_(0.5)
            t.train(7, rows=4 if dist.get_rank() == 0 or what == "writes" else 2)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("what", ["other shapes", "writes"])
def test_a_rank_that_runs_python_is_named(two_fresh_ranks, what):
    """A replay is announced like a program."""
    for told in two_fresh_ranks.run(apart, what, timeout=60):
        assert "different collectives (invariant 13)" in told and "captured step 1" in told and "forward" in told


def test_when_ranks_ask_each_other():
    """Often at first, then seldom; shapes that take turns get theirs."""
    assert [call for call in range(200) if DUE(call)] == [4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193]


# What is not captured


def told(t: Trained, calls: int = 4) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for seed in range(calls):
            t.train(seed)
    assert not t.replays and t.step.describe().startswith("no step is captured\nnot captured: ")
    return "\n".join(str(w.message) for w in found if "not captured" in str(w.message))


def _writes(t: Trained) -> None:
    total = torch.zeros(())
    step = mfsdp.capture_step(lambda x, total: {"loss": total.add_(t._step(x)["loss"])}, t.run, t.optimizer)
    t.step = lambda x: step(x, total)
    t.step._seen, t.step.describe = step._seen, step.describe


def _returns(t: Trained) -> None:
    t.step = mfsdp.capture_step(lambda x: {**t._step(x), "more": Result()}, t.run, t.optimizer)


class Result:
    """No tensor."""

    is_meta = True


def _copies(t: Trained) -> None:
    t.step = mfsdp.capture_step(lambda x: {**t._step(x), "meta": x.to("meta")}, t.run, t.optimizer)


def _counts(t: Trained) -> None:
    calls = 0

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        return t._step(x)

    t.step = mfsdp.capture_step(step, t.run, t.optimizer)


def _reads(t: Trained) -> None:
    t.step = mfsdp.capture_step(lambda x: {k: v + v.item() for k, v in t._step(x).items()}, t.run, t.optimizer)


def _unknown(t: Trained) -> None:
    t.step = mfsdp.capture_step(t._step, t.run)


def _scheduled(t: Trained) -> None:
    t.optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=0.9 * o.param_groups[0]["lr"]))
    t.optimizer.param_groups[0]["lr"] = 0.1


OBSTACLES: dict[str, tuple[dict[str, Any], Callable[[Trained], None] | None, int, str]] = {
    "item": ({}, _reads, 4, "the host waits for a value (local_scalar_dense, as in .item())"),
    "writes": ({}, _writes, 4, "the step writes an argument"),
    "returns": ({}, _returns, 4, "the step returns a Result: give tensors, in lists, tuples and dicts"),
    "copies": ({}, _copies, 4, "tensors are copied from one device to another"),
    "a counter": ({}, _counts, UNSTEADY + 1, "every step changes variables of the step"),
    "lr": ({}, _scheduled, UNSTEADY + 1, "every step changes settings of Momentum 0"),
    "optimizer": ({}, _unknown, 4, "of no optimizer that capture_step was given"),
    "uncompiled": ({"lowering": "none"}, None, 4, "ranks ask each other which parameters have a gradient"),
    "checks": ({"options": {"check_finite": 100}}, None, 4, "options check_finite and check_replicas"),
    "numbers": ({"optimizer": partial(torch.optim.AdamW, foreach=True)}, None, 4, "as in .item()"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_captured_says_why_once_and_runs_as_before(four, name):
    settings, changed, calls, words = OBSTACLES[name]
    t = Trained(True, **settings)
    if changed is not None:
        changed(t)
    text = told(t, calls)
    assert text.startswith("mfsdp: the step is not captured and runs as before: ") and words in text
    assert told(t, 3) == ""


def test_what_a_gpu_would_not_see(four):
    """Numbers that the host reads, and arguments that it would have to copy."""
    t = Trained(True)
    t.train(0)
    wants = torch.ones(1, requires_grad=True)
    assert list(t.step._forbidden([torch.ones(2), wants])) == ["an argument requires a gradient"]
    t.step._device = torch.device("cuda", 0)
    t.optimizer.param_groups[0]["capturable"] = False
    assert list(dict.fromkeys(t.step._forbidden([torch.ones(2)]))) == [
        "an argument is on cpu; move it to cuda:0 first", "the Momentum was built without capturable=True",
        "lr of the Momentum is a tensor on cpu; make it on cuda:0",
        "step of the Momentum is a tensor on cpu; make it on cuda:0",
    ]  # fmt: skip


def test_what_a_step_names_is_compared():
    """A view of other rows, a global in a comprehension, a partial."""
    table = torch.ones(4, 2)
    view = table[:2]

    def step() -> float:
        return sum(x.sum() * WARM for x in view)  # type: ignore[return-value]

    state = StepState(partial(step), [], [], None)
    before = state.now()
    assert WARM in before["variables of the step"]  # type: ignore[operator]
    view = table[:4]
    assert state.now() != before


def test_autograd_calls_us_on_the_stream_of_the_step(four, monkeypatch):
    """A node of autograd runs on the stream that it was made on."""
    t = Trained(False)
    buffer = buffers_in(t.model)[0]
    monkeypatch.setattr(devices, "current_stream", lambda device: "another")
    buffer.gradients.follow_stream()
    monkeypatch.undo()
    assert buffer.gradients._node_stream == "another"
    t.train(0)
    assert all(p.grad is None for p in t.model.parameters())


def test_the_hosts_waits_on_a_gpu_are_obstacles(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = capturing.host_waits(torch.device("cuda"))
    with pytest.warns(UserWarning, match="another"), capturing.watching() as found, waits:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert modes == ["warn", 0] and len(found) == 1 and "the host waits for the device" in next(iter(found))


def test_streamed_state_is_not_captured(four):
    t = Trained(False, clip=False, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    t.optimizer = mfsdp.fully_shard_optimizer(torch.optim.SGD(t.model.parameters(), 0.1, momentum=0.9), offload=True)
    t.optimizers = [t.optimizer]
    t.step = mfsdp.capture_step(t._step, t.run, t.optimizer)
    assert "the optimizer's state is on the host (offload=)" in told(t)


@pytest.mark.slow
def test_no_more_shapes_than_a_few(four, monkeypatch):
    monkeypatch.setattr(captured_step, "MOST", 3)
    t = Trained(True)
    for rows in range(2, 5):
        for seed in range(WARM):
            t.train(seed, rows=rows)
    assert t.step.describe().count("replays") == 3
    with pytest.warns(match="3 steps of other shapes or states are captured already"):
        t.train(0, rows=20), t.train(1, rows=20), t.train(2, rows=20)
    t.step.reset()
    assert t.step.describe() == "no step is captured"


def test_numbers_that_change_are_told(four, monkeypatch):
    monkeypatch.setattr(captured_step, "KEYS", 5)
    t = Trained(False)
    step = mfsdp.capture_step(lambda x, scale: t._step(x * scale), t.run, t.optimizer)
    with pytest.warns(match="more than 5 kinds of arguments: give numbers that change as tensors"):
        for number in range(8):
            step(torch.ones(4, 8), float(number))
    assert len(step._seen) == 5


def test_what_is_given_is_checked(four):
    t = Trained(False)
    for arguments, words in [
        ((None, t.model), "None cannot be called: give step, modules, optimizers"),
        ((t._step, t.optimizer), "is no Module: give step, modules, optimizers"),
        ((t._step, t.model, t.model), "is no Optimizer"),
    ]:
        with pytest.raises(TypeError, match=words):
            mfsdp.capture_step(*arguments)
    with pytest.raises(ValueError, match="nothing of the modules is sharded"):
        mfsdp.capture_step(t._step, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"call mfsdp.fully_shard_optimizer\(optimizer\) first"):
        mfsdp.capture_step(t._step, t.model, torch.optim.SGD(t.model.parameters()))
    step = mfsdp.capture_step(t._step, t.model, t.optimizer)
    with pytest.raises(TypeError, match=r"an argument of the step is a object: .* \(dict\(batch\)\)"):
        step(object())


def test_results_and_arguments_are_the_callers(four):
    """A result is not overwritten by the next replay, and an argument may be."""
    t, x = Trained(True), torch.ones(4, 8)
    for _ in range(WARM):
        t.step(x)
    first = t.step(x)["loss"]
    before = first.clone()
    x.fill_(3.0)
    assert t.step(x)["loss"] != before and torch.equal(first, before) and not first.requires_grad


def test_memory_goes_with_the_model(four):
    t = Trained(True)
    for seed in range(6):
        t.train(seed)
    (recording,) = [r for seen in t.step._seen.values() for _, r in seen.recordings]
    gone = [weakref.ref(recording.graph), weakref.ref(t.model.last.weight)]
    del t, recording
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_a_step_that_raises_while_it_is_captured(four):
    """The error says where the model stands; nothing has been written on the device."""
    t = Trained(True)
    for seed in range(WARM - 1):
        t.train(seed)
    before = t.weights()
    t.optimizer.step = lambda: torch.zeros(()).item()
    with pytest.raises(RuntimeError, match="operation not permitted") as info:
        t.train(9)
    assert "its Python has run, and nothing of it on the device" in "".join(info.value.__notes__)
    assert all(map(torch.equal, before, t.weights()))


def test_cuda_graphs_are_made_as_torch_asks(monkeypatch):
    """In one pool, on the step's stream, with other threads free to call; not run on a GPU."""
    calls: list[Any] = []
    graph = SimpleNamespace(replay=lambda: calls.append("replay"))
    fake = {
        "Stream": lambda **names: names["stream_id"],
        "CUDAGraph": lambda: graph, "graph_pool_handle": lambda: (0, 1),
        "memory_reserved": lambda device: 100 * len(calls), "current_stream": lambda device: None,
        "graph": lambda *given, **how: calls.append((given, how)) or nullcontext(),
    }  # fmt: skip
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(capturing.CudaGraph, "_pools", {})
    pools = (), (), (capturing.Pool((0, 2)),)
    made = [capturing.CudaGraph(torch.device("cuda", 0), *pool) for pool in pools]
    stream: Any = SimpleNamespace(stream_id=7, device_index=0, device_type=1)
    assert [each.record(lambda: "out", stream) for each in made] == ["out"] * 3
    made[0].replay()
    how = {"pool": (0, 1), "stream": 7, "capture_error_mode": "thread_local"}
    assert calls == [((graph,), how)] * 2 + [((graph,), how | {"pool": (0, 2)}), "replay"] and made[0].nbytes == 100
    assert {"pool", "stream", "capture_error_mode"} <= set(inspect.signature(TORCH_GRAPH.__init__).parameters)
