"""Optimizer state on the host (`offload="state"`): bitwise the same state and weights, and less device memory."""

from __future__ import annotations

import copy
import importlib
import time
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mfsdp
from mfsdp.cost_model import memory_model as ledgers
from mfsdp.cost_model.estimate import streamed
from mfsdp.ir.byte_costs import size
from mfsdp.optim import parameter_ranges as ranges
from mfsdp.runtime import host_memory, static_buffers
from tests.helpers.optimizers import OPTIMIZERS, fill, groups, sharded
from tests.helpers.parity import scaled_steps, whole

ADAM: Any = importlib.import_module("torch.optim.adam")
STREAMED = {name: OPTIMIZERS[name] for name in OPTIMIZERS if name != "asgd"}


def same(a: Any, b: Any) -> bool:
    """Whether two state dicts are, bit for bit, and in the same order."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(whole(a), whole(b))) if hasattr(a, "full_tensor") else torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def alike(models: list[nn.Module], optimizers: list[Any]) -> bool:
    """Whether weights and state of both are the same."""
    params = zip(*(m.parameters() for m in models), strict=True)
    return all(same(a, b) for a, b in params) and same(*(o.state_dict() for o in optimizers))


def pair(name: str, models: list[nn.Module]) -> list[Any]:
    """Flat optimizers, of which the second has its state on the host."""
    plain, streamed = (STREAMED[name](groups(m)) for m in models)
    return [mfsdp.fully_shard_optimizer(plain), mfsdp.fully_shard_optimizer(streamed, offload="state")]


def step_both(models: list[nn.Module], optimizers: list[Any], number: int) -> None:
    fill(models, number)
    for o in optimizers:
        o.step()


def steps(name: str, strategy: int, missing: Any = None) -> bool:
    """Five steps, behind which both are the same. The first parameter is frozen; all are in two groups."""
    models = sharded(strategy=strategy)
    for m in models:
        next(m.parameters()).requires_grad_(False)
    optimizers = pair(name, models)
    with host_memory.at_rate(2e7):
        for step in range(5):
            fill(models, step, lambda number, step: number == 0 or (missing is not None and missing(number, step)))
            for o in optimizers:
                o.step()
                o.zero_grad()
            if step != 1 and not alike(models, optimizers):  # two steps also without a look in between
                return False
    return True


@pytest.mark.parametrize("name", STREAMED)
def test_the_same_bits_on_one_rank(name):
    assert steps(name, 3)


def on_ranks() -> list[str]:
    """What is not the same."""
    missing = lambda number, step: (number + step) % 3 == 0  # noqa: E731
    cases = [("adamw fused", 3, None), ("adamw", 3, missing), ("adamw foreach", 0, None), ("sgd", 1, None)]
    return [f"{name}, strategy {strategy}" for name, strategy, missing in cases if not steps(name, strategy, missing)]


@pytest.mark.dist
def test_the_same_bits_on_four_ranks_of_which_some_have_no_rows(four_ranks):
    assert four_ranks.run(on_ranks) == [[]] * 4


class Together:
    """Two models that train on the same batches, compiled, the second with streamed state behind a slow link."""

    def __init__(self, make: Any = lambda p: torch.optim.AdamW(p, lr=1e-2), **kwargs: Any):
        self.models = sharded()
        self.runs = [torch.compile(m, backend="mfsdp", options={"lowering": "eager"}) for m in self.models]
        plain, streamed = (make(groups(m)) for m in self.models)
        self.optimizers = [
            mfsdp.fully_shard_optimizer(plain, **kwargs),
            mfsdp.fully_shard_optimizer(streamed, offload=True, **kwargs),
        ]
        self.state = self.optimizers[1].state
        torch.manual_seed(int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0)

    def step(self) -> None:
        ids = torch.randint(31, (2, 8))
        for run, optimizer in zip(self.runs, self.optimizers, strict=True):

            def closure(run: Any = run, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = run(ids).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    def alike(self) -> bool:
        return alike(self.models, self.optimizers)


def trains() -> list[str]:
    """A training loop, with gathers launched ahead, in which somebody looks at state, writes to it, and loads it."""
    both, wrong = Together(), []

    def check(what: str) -> None:
        if not both.alike():
            wrong.append(what)

    with host_memory.at_rate(1e6):  # some 0.2 s for a block's state
        both.step(), both.step(), both.step()
        check("steps that nobody looks at")
        for o in both.optimizers:
            with torch.no_grad():
                for s in o.state.values():
                    s["exp_avg"].mul_(0.5)
        both.step()
        check("written through DTensors")
        for o in both.optimizers:
            for s in o.state.values():
                if s["exp_avg"].sharding.local().numel:
                    s["exp_avg"].chunk_at(None).mul_(2)
        both.step()
        check("written where checkpoints write")
        for o in both.optimizers:
            for s in o.state.values():
                s["exp_avg"].to_local().data.mul_(2)
        both.step()
        check("written through rows, past versions")
        rows = [[s["exp_avg_sq"].to_local() for s in o.state.values()] for o in both.optimizers]
        both.step()
        if not all(map(torch.equal, *rows)):
            wrong.append("rows that somebody has, right behind the step")
        for mine in rows:
            for r in mine:
                r.data.mul_(2)
        both.step()
        check("the same a step later")
        for o in both.optimizers:
            o.load_state_dict(copy.deepcopy(o.state_dict()))
        check("loaded")
        both.step(), both.step()
        check("stepped on what was loaded")
        both.optimizers[0].load_state_dict(copy.deepcopy(both.optimizers[1].state_dict()))
        both.optimizers[1].load_state_dict(both.optimizers[1].state_dict())
        both.step()
        check("loaded from the other kind, and from itself")
        views = [[s["exp_avg"].detach() for s in o.state.values()] for o in both.optimizers]
        both.step()
        if not all(same(a, b) for a, b in zip(*views, strict=True)):
            wrong.append("views of before the step")
    return wrong


@pytest.mark.dist
def test_streamed_state_that_is_read_or_written_is_of_the_last_step(two_ranks):
    assert two_ranks.run(trains) == [[], []]


def through_checkpoints(folder: str) -> bool:
    """State that was saved from either kind, and loaded into either, of which one has its own state already."""
    models = sharded()
    optimizers = pair("adamw", models)
    for step in range(2):
        step_both(models, optimizers, step)
    for name, m, o in zip("01", models, optimizers, strict=True):
        dcp.save(dict(zip("mo", get_state_dict(m, o), strict=True)), checkpoint_id=f"{folder}/{name}")
    step_both(models, optimizers, 2)
    others = sharded()
    anew = pair("adamw", others)
    for m, o, name in ((models[1], optimizers[1], "0"), (others[0], anew[0], "1"), (others[1], anew[1], "1")):
        weights, moments = get_state_dict(m, o)
        with host_memory.at_rate(1e6):
            dcp.load({"m": weights, "o": moments}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(m, o, model_state_dict=weights, optim_state_dict=moments)
    every, right = [models[1], *others], True
    for step in range(2, 4):
        fill(every, step)
        for o in (optimizers[1], *anew):
            o.step()
        right &= alike(every[:2], [optimizers[1], anew[0]]) and alike(others, anew)
    return right


@pytest.mark.dist
def test_saved_and_loaded_by_torchs_checkpoints(two_ranks, tmp_path):
    assert two_ranks.run(through_checkpoints, str(tmp_path)) == [True, True]


def asynchronously(folder: str) -> bool:
    """A checkpoint is of the step behind which it was begun, whatever is stepped while it is written."""
    models = sharded()
    optimizers = pair("adamw", models)
    checkpoints = mfsdp.Checkpoints(folder)
    for step in range(4):
        step_both(models, optimizers, step)
        if step == 1:
            checkpoints.save(1, models[1], optimizers[1], blocking=False)
            kept = copy.deepcopy(optimizers[1].state_dict())
    checkpoints.wait()
    checkpoints.load(models[1], optimizers[1])
    return same(kept["state"], optimizers[1].state_dict()["state"])


@pytest.mark.dist
def test_a_checkpoint_beside_training(two_ranks, tmp_path):
    assert two_ranks.run(asynchronously, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_and_unscales(fused):
    models = [mfsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=[nn.Linear]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        mfsdp.fully_shard_optimizer(torch.optim.AdamW(m.parameters(), fused=fused), offload=o)
        for m, o in zip(models, (False, True), strict=True)
    ]
    scaled_steps(models, optimizers)
    assert alike(models, optimizers)
    assert {float(s["step"]) for s in optimizers[1].state.values()} == {3.0}


def test_hooks_see_all_of_it():
    """Those around a step see it on the host, complete; the numbers are the same with them."""
    models = sharded()
    optimizers = pair("adamw", models)
    seen: list[list[torch.Tensor]] = [[], []]

    def look(optimizer: Any, *_: Any) -> None:
        mine = seen[optimizers.index(optimizer)]
        for group in optimizer.param_groups:
            for p in group["params"]:
                mine += [v.clone() for v in optimizer.state.get(p, {}).values()]

    for o in optimizers:
        o.register_step_pre_hook(look)
        o.register_step_post_hook(look)
    with host_memory.at_rate(1e6):
        for step in range(3):
            step_both(models, optimizers, step)
    assert len(seen[0]) == len(seen[1]) > 0 and all(map(torch.equal, *seen))
    assert alike(models, optimizers)


def test_what_is_loaded_stays_where_it_is():
    """Not on the device of the weights first; hooks in front of loading see tensors, as they would."""
    (model, _) = sharded()
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()), offload=True)
    fill([model], 0)
    optimizer.step()
    saved, seen = optimizer.state_dict(), []
    rows = [v for s in saved["state"].values() for v in s.values() if v.dim()]
    optimizer.load_state_dict(saved)
    assert all(a is b for a, b in zip(rows, [v for s in optimizer.state.values() for v in s.values() if v.dim()]))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.extend(s["state"][0].values()))
    optimizer.load_state_dict(saved)
    assert len(seen) == 3 and all(isinstance(v, torch.Tensor) for v in seen)


def test_pickled_as_if_it_were_not_streamed(tmp_path):
    models = sharded()
    optimizers = pair("adamw", models)
    for step in range(2):
        step_both(models, optimizers, step)
    for o, name in zip(optimizers, "ab", strict=True):
        with host_memory.at_rate(1e6):
            torch.save(o.state_dict(), tmp_path / name)
    states = [torch.load(tmp_path / name, weights_only=True) for name in "ab"]
    kinds = [[type(v) for s in state["state"].values() for v in s.values()] for state in states]
    assert same(*states) and kinds[0] == kinds[1]
    for o, state in zip(optimizers, states, strict=True):
        o.load_state_dict(state)
    step_both(models, optimizers, 2)
    assert alike(models, optimizers)


def test_who_keeps_state_that_is_replaced_has_it_whole():
    """Its store still needs the room that other state is loaded into. (Of two units: those of more are loaded in turn,
    behind all stores.)
    """
    model = mfsdp.fully_shard(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), units=[nn.Linear])
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()), offload=True)
    fill([model], 0)
    optimizer.step()
    first = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    with host_memory.at_rate(1e4):  # the last store begins when the one before it has taken its time
        optimizer.step()
    kept = dict(optimizer.state.items())
    optimizer.load_state_dict(first)
    optimizer.step()
    assert {float(s["step"]) for s in kept.values()} == {3.0}
    g = {p: whole(p.grad) for p in kept}
    for p, s in kept.items():
        want = g[p] * 0.1
        for _ in range(2):
            want = want.lerp(g[p], 0.1)
        assert torch.allclose(whole(s["exp_avg"]), want)


def test_copies_step_by_themselves():
    models = sharded()
    optimizers = pair("adamw", models)
    for step in range(4):
        step_both(models, optimizers, step)
        assert alike(models, optimizers)
        models, optimizers = copy.deepcopy((models, optimizers))
    assert [o._mfsdp_offload for o in optimizers] == [False, True]


class Full(Exception):
    pass


def interrupted(where: str, at: int, monkeypatch: Any, **settings: Any) -> tuple[list[str], bool]:
    """The third step ends with an exception in front of one part, inside or behind it; then there are two more. What
    it raised, with and without streaming, and whether both are the same.
    """
    monkeypatch.setattr(ranges, "TOGETHER", 0)  # the other one steps unit by unit too
    models = sharded()
    optimizers = [
        mfsdp.fully_shard_optimizer(torch.optim.AdamW(groups(m), foreach=True, **settings), offload=o)
        for m, o in zip(models, (False, True), strict=True)
    ]
    told, step = [], ADAM.adam
    for number in range(5):
        fill(models, number)
        for o in optimizers:
            calls: list[int] = []

            def full(*args: Any, number: int = number, calls: list[int] = calls, **kwargs: Any) -> None:
                calls += [1] if args[0] else []  # not of an empty group
                ends = bool(args[0]) and number == 2 and len(calls) == at
                if ends and where == "before":
                    raise Full
                if ends and where == "inside":
                    kwargs["lr"] = "no number"  # when everything but weights is written
                step(*args, **kwargs)
                if ends and where == "behind":
                    raise Full

            with monkeypatch.context() as patched:
                patched.setattr(ADAM, "adam", full)
                try:
                    o.step()
                except Exception as error:
                    told.append(f"{type(error).__name__}: {error}")
        if number == 2 and where == "inside":
            continue  # one of them has half a step
    return told, alike(models, optimizers)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_step_that_ends_early_leaves_runs_old_or_new(at, monkeypatch):
    assert interrupted("before", at, monkeypatch) == (["Full: "] * 2, True)


def test_what_may_be_half_a_step_is_told(monkeypatch):
    told, _ = interrupted("behind", 2, monkeypatch)
    assert told[0] == "Full: " and "the step of unit '(root)' of GPT" in told[1] and "Load a checkpoint" in told[1], (
        told
    )
    assert "was interrupted by Full where its weights may be new and its state, which is streamed, is as it" in told[1]


def test_state_written_before_weights_is_put_back(monkeypatch):
    """An exception inside of a run's step, when nothing but its state has been written: it is as before."""
    model = sharded()[0]
    optimizer = mfsdp.fully_shard_optimizer(
        torch.optim.AdamW(model.parameters(), foreach=True, weight_decay=0.0), offload=True
    )
    for step in range(2):
        fill([model], step)
        optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_sqrt", lambda *_: (_ for _ in ()).throw(Full))
        with pytest.raises(Full):
            optimizer.step()
    assert same(kept, optimizer.state_dict())
    optimizer.step()
    assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}


def test_the_first_step_too_is_told_as_far_as_it_came(monkeypatch):
    model = sharded()[0]
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()), offload=True)
    fill([model], 0)
    step, calls = ADAM.adam, []

    def full(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Full
        step(*args, **kwargs)

    monkeypatch.setattr(ADAM, "adam", full)
    with pytest.raises(Full):
        optimizer.step()
    there = [p in optimizer.state for p in model.parameters()]
    assert any(there) and not all(there)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [1.0 + t for t in there]


@pytest.mark.parametrize("direction", ["in", "out"])
def test_copies_that_fail_are_told(direction, monkeypatch):
    models = sharded()
    optimizers = pair("adamw", models)
    for step in range(2):
        step_both(models, optimizers, step)
    assert alike(models, optimizers)
    saved = copy.deepcopy((models[0].state_dict(), optimizers[0].state_dict()))
    copied, calls = host_memory.copy, []

    def fails(pairs: Any, towards: str, after: Any = ()) -> Any:
        calls.append(towards)
        if calls.count(direction) == 2 and towards == direction:
            pairs = [(pairs[0][0], torch.empty(0)[:, None])]
        return copied(pairs, towards, after)

    fill(models, 2)
    with monkeypatch.context() as patched:
        patched.setattr(host_memory, "copy", fails)
        if direction == "in":
            with pytest.raises(RuntimeError, match="doesn't match"):
                for _ in range(3):
                    optimizers[1].step()
        else:
            with pytest.raises(RuntimeError, match="doesn't match"):
                optimizers[1].step()
    if direction == "in":  # nothing is lost: what was not loaded is loaded again
        optimizers[1].step()
        optimizers[1].state_dict()
        return
    for _ in range(2):  # a run's state is lost, and whoever looks is told, always
        with pytest.raises(RuntimeError, match="doesn't match"):
            [s["exp_avg"].sum() for s in optimizers[1].state.values()]
    with pytest.raises(RuntimeError, match="doesn't match"):
        optimizers[1].step()
    for m, o in zip(models, optimizers, strict=True):  # until other state is loaded
        m.load_state_dict(saved[0])
        o.load_state_dict(copy.deepcopy(saved[1]))
        o.step()
    assert alike(models, optimizers)


def raising_alone() -> str:
    """A load fails on one rank, in a step that launches gathers."""
    both = Together()
    both.step(), both.step()
    copied = host_memory.copy

    def fails(pairs: Any, direction: Any, after: Any = ()) -> Any:
        if direction == "in" and dist.get_rank() == 1:
            pairs = [(pairs[0][0], torch.empty(0)[:, None])]
        return copied(pairs, direction, after)

    host_memory.copy = fails
    try:
        both.step(), both.step()
    except RuntimeError:
        pass
    finally:
        host_memory.copy = copied
    try:
        both.step(), both.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_a_rank_that_fails_alone_ends_all(two_fresh_ranks):
    answers = two_fresh_ranks.run(raising_alone, timeout=60)
    assert "no error" not in answers, answers


def test_what_cannot_be_streamed_is_refused():
    def made(kind: Any, **kwargs: Any) -> Any:
        model = mfsdp.fully_shard(nn.Linear(4, 4))
        return mfsdp.fully_shard_optimizer(kind(model.parameters(), lr=0.1), **kwargs)

    for offload in ("main", "all"):
        optimizer = torch.optim.AdamW(mfsdp.fully_shard(nn.Linear(4, 4)).parameters())
        before = dict(vars(optimizer))
        with pytest.raises(NotImplementedError, match=f"'{offload}': main weights stay .* no cast is kept"):
            mfsdp.fully_shard_optimizer(optimizer, offload=offload)
        assert type(optimizer) is torch.optim.AdamW and vars(optimizer) == before
    with pytest.raises(ValueError, match="offload='disk': choose False, True or \"state\""):
        made(torch.optim.AdamW, offload="disk")
    with pytest.raises(NotImplementedError, match="Leave out compile=True or offload"):
        made(torch.optim.AdamW, offload=True, compile=True)
    with pytest.raises(NotImplementedError, match="the state of ASGD cannot be streamed"):
        made(torch.optim.ASGD, offload=True)


WIDTH, UNITS = 256, 4


def peak(name: str, stepping: str) -> tuple[int, Any]:
    """What torch's allocator says of the third step, and what `explain` says of it."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler as profile:
        model = mfsdp.fully_shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))), units=[nn.Linear])
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
        optimizer = FOREACH[name](model.parameters())
        if stepping != "whole":
            mfsdp.fully_shard_optimizer(optimizer, offload=stepping == "offloaded")
        x = torch.randn(4, WIDTH)
        for _ in range(3):
            with torch.profiler.record_function("a step"):
                run(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())  # type: ignore[union-attr]
    third = [e.start_ns() for e in events if e.name() == "a step"][2]
    memory = [e for e in events if e.name() == "[memory]"]
    live = zip(memory, accumulate(e.nbytes() for e in memory), strict=True)
    eager = {"lowering": "eager"}
    said = mfsdp.explain(model, (x,), world=1, optimizer=name, stepping=stepping, suggest=False, options=eager)
    return max(held for e, held in live if e.start_ns() >= third), said.ledger


FOREACH: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREACH)
def test_memory_is_what_the_ledger_says(name, monkeypatch):
    """On the device: two rooms, and what a foreach step holds besides, of one unit instead of all of them."""
    found = {}
    for stepping in ("whole", "flat", "offloaded"):
        monkeypatch.setattr(static_buffers, "_slots", {})  # each makes its own
        for module in (ranges, ledgers):
            monkeypatch.setattr(module, "TOGETHER", 0)
        measured, said = found[stepping] = peak(name, stepping)
        assert abs(measured / said.peak - 1) < 0.01, (stepping, measured, str(said))
    state = {"adamw": 2, "momentum": 1}[name] * UNITS * 4 * (WIDTH + 1) * WIDTH
    assert found["offloaded"][1].host == state and not found["flat"][1].host
    assert f"on the host: optimizer state{' ' * 6}{size(state):>9}" in str(found["offloaded"][1])
    fallen = found["whole"][0] - found["offloaded"][0]
    assert fallen > state * (1 - 2 / UNITS) * 0.99, "all of it but two rooms"
    with pytest.raises(ValueError, match="stepping='polo': choose one of whole, flat, offloaded"):
        mfsdp.explain(nn.Linear(2, 2), (torch.empty(1, 2),), stepping="polo")
    if name == "adamw":
        assert found["whole"][0] - found["flat"][0] > 0.99 * state / 2 * (1 - 1 / UNITS), "temporaries of other units"


@pytest.mark.slow
@pytest.mark.parametrize(("main", "stay"), [(torch.float32, (4, 8, 4, 2)), (torch.bfloat16, (2, 4, 4, 0))])
def test_bytes_per_element_are_what_the_page_says(main, stay):
    """What lasts of AdamW where bf16 travels (docs/guides/memory.md): only state goes, but for its two rooms."""
    for stepping in ("flat", "offloaded"):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))).bfloat16()
            x = torch.empty(1, WIDTH, dtype=torch.bfloat16)
        policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=main)
        said = mfsdp.explain(
            model, (x,), world=8, units=[nn.Linear], mp_policy=policy, stepping=stepping, suggest=False,
            options={"lowering": "eager"},
        ).ledger  # fmt: skip
        there = {e.name: e.nbytes for e in said.entries}
        names = ("main weights", "optimizer state", "gradients", "shards in what travels")
        rooms = 2 / UNITS if stepping == "offloaded" else 1
        want = (stay[0], stay[1] * rooms, *stay[2:])
        assert [there.get(n, 0) / (UNITS * WIDTH * WIDTH / 8) for n in names] == pytest.approx(want)


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.0, 0.1])
def test_time_is_what_the_clock_says(between):
    """Behind a link that takes longer than the step itself; what stands between steps hides first loads."""
    units = 6
    model = mfsdp.fully_shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units))), units=[nn.Linear])
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), foreach=True), offload=True)
    model(torch.randn(4, WIDTH)).square().mean().backward()

    def measured(rate: float) -> float:
        took = []
        with host_memory.at_rate(rate):
            for _ in range(6):
                begun = time.perf_counter()
                optimizer.step()
                took.append(time.perf_counter() - begun)
                time.sleep(between)
        return sorted(took[1:])[2]

    optimizer.step()
    rate, alone = 1e7, measured(float("inf")) / units
    said = streamed([alone] * units, [2 * 4 * (WIDTH + 1) * WIDTH / rate] * units, between)
    assert abs(measured(rate) / said - 1) < 0.1, (measured(rate), said, alone)
