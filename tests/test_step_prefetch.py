"""Gathers that the optimizer's step launches for the next forward (Note [Step prefetch]): which ones, which program
adopts them, and bitwise the same results, whatever runs in between.
"""

from __future__ import annotations

import copy
import gc
import importlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import mfsdp
from mfsdp.runtime import desync, instrumentation, static_buffers, step_prefetch
from mfsdp.runtime.desync import DesyncError, Fingerprint, GroupState
from mfsdp.runtime.execution import Execution
from tests.helpers.dtypes import BF16, HALF
from tests.helpers.parity import whole
from tests.helpers.ranks import collectives_told, here
from tests.helpers.writes import COUNTED, PAST

ADAM: Any = importlib.import_module("torch.optim.adam")
POLICIES: dict[str, Any] = {"same": None, "bf16": BF16, "half": HALF}

WRITES = (*COUNTED, *PAST[:3])


class Net(nn.Module):
    """Four units, and a root of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.layers = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
        self.last = nn.Linear(9, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


class Pair:
    """A model whose optimizer launches ahead, and the same without."""

    def __init__(
        self,
        *,
        policy: Any = None,
        compile: bool = False,
        build: Callable[[], nn.Module] = Net,
        units: Any = (nn.Linear,),
        make: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=0.05),
        options: dict[str, Any] | None = None,
        **sharding: Any,
    ):
        torch.manual_seed(0)
        first = build().to(here())
        self.models = [
            mfsdp.fully_shard(m, units=list(units), mp_policy=policy or mfsdp.MixedPrecisionPolicy(), **sharding)
            for m in (first, copy.deepcopy(first))
        ]
        chosen = {"lowering": "eager", "prefetch": 2, **(options or {})}
        self.runs = [torch.compile(m, backend="mfsdp", options=chosen) for m in self.models]
        self.optimizers = [
            mfsdp.fully_shard_optimizer(make(m.parameters()), compile=compile, ahead=early)
            for m, early in zip(self.models, (True, False), strict=True)
        ]
        self.dtype = torch.bfloat16 if policy is BF16 else torch.float32
        self.taken: list[str] = []
        torch.manual_seed(1 + dist.get_rank())

    def forward(self, name: str = "forward") -> list[torch.Tensor]:
        x = torch.randn(3, 6, dtype=self.dtype).to(here())
        outs = []
        for run in self.runs:
            with adopted() as seen:
                outs.append(run(x))
            self.taken += seen
        assert bool(outs[0].isfinite().all()) and bool(outs[0].any()), name
        assert torch.equal(*outs), f"{name}: what was launched ahead is not what forward would have gathered"
        return outs

    def step(self, name: str = "step", microbatches: int = 1) -> int:
        """One step of both; how many gathers forward took."""
        self.taken.clear()
        for i in range(microbatches):
            outs = self.forward(name)
            for model, out in zip(self.models, outs, strict=True):
                if i < microbatches - 1:
                    with mfsdp.no_sync(model):
                        out.float().square().mean().backward()
                else:
                    out.float().square().mean().backward()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return len(self.taken)

    def step_first(self) -> int:
        """One step of the model that launches ahead, without the other; how many gathers forward took."""
        with adopted() as seen:
            out = self.runs[0](torch.randn(3, 6))
        out.square().mean().backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return len(seen)

    def equal(self) -> bool:
        """Whether both have the same weights."""
        pairs = zip(*(m.parameters() for m in self.models), strict=True)
        return all(torch.equal(whole(a), whole(b)) for a, b in pairs)


@contextmanager
def adopted() -> Iterator[list[str]]:
    """What programs take inside of the ``with``."""
    own, seen = Execution.adopt, []

    def adopt(self: Execution, early: Any) -> Any:
        seen.append(self.name)
        return own(self, early)

    Execution.adopt = adopt  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Execution.adopt = own  # type: ignore[method-assign]


def _and_looked_at(model: nn.Module) -> None:
    """Rows are handed out once more behind a write past versions."""
    first = next(model.parameters())
    first.to_local().data.add_(0.5)
    assert first.to_local().isfinite().all()


def written(policy: str, strategy: str, how: str, **options: Any) -> list[tuple[str, int]]:
    """Every write between a step and forward, with a step without one before it: what forward took. Then writes of one
    rank by itself.
    """
    pair = Pair(policy=POLICIES[policy], compile=how == "compiled", strategy=strategy, options=options)
    out = [(f"start {i}", pair.step(f"start {i}")) for i in range(3)]
    every = (*WRITES[:-1], _and_looked_at, WRITES[-1])
    alone = [write for write in every if write.__name__ in ALONE]
    for i, write in enumerate((*every, *alone)):
        out.append(("between", pair.step("between")))
        if i < len(every) or dist.get_rank() == 0:
            for m in pair.models:
                write(m)
        out.append((write.__name__, pair.step(write.__name__)))
    assert pair.equal()
    return out


ALONE = ("_past_versions", "_numpy", "_and_looked_at")
"""Writes that communicate nothing: a rank may do them by itself."""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("policy", "strategy"),
    [("half", "optim_grads"), pytest.param("same", "optim_grads_params", marks=pytest.mark.exhaustive)],
)
def test_whatever_writes_weights_counts(two_ranks, policy, strategy):
    answers = two_ranks.run(written, policy, strategy, "flat")
    many = 2 if strategy == "optim_grads_params" else 5
    for name, taken in answers[0]:
        keeps = name == "_one_row" and many == 2  # which writes to the last unit
        assert taken == (many if name in ("start 1", "start 2", "between") or keeps else 0), name
    assert answers[0] == answers[1]


@pytest.mark.dist
@pytest.mark.inductor
def test_generated_code_adopts_early_gathers(two_ranks):
    """Of the model and of the optimizer."""
    for answer in two_ranks.run(written, "bf16", "optim_grads_params", "compiled", lowering="stitched", timeout=400):
        assert [taken for _, taken in answer][:5] == [0, 2, 2, 2, 0]


def stale(how: str) -> list[str]:
    """Which writes are noticed by the comparison, if nothing else looks for them."""
    own, seen = step_prefetch.PrefetchedGather.usable, []
    step_prefetch.PrefetchedGather.usable = lambda early: True  # type: ignore[method-assign]
    try:
        for write in WRITES:
            pair = Pair()
            pair.step()
            pair.step()
            if how == "all" or dist.get_rank() == 0:
                for m in pair.models:
                    write(m)
            try:
                pair.step(write.__name__)
            except AssertionError:
                seen.append(write.__name__)
    finally:
        step_prefetch.PrefetchedGather.usable = own  # type: ignore[method-assign]
    return seen


@pytest.mark.dist
def test_a_stale_gather_that_is_taken_is_caught(two_ranks):
    """The mutation: without what makes it unusable the comparison above fails, for every write to such a unit."""
    for seen in two_ranks.run(stale, "all"):
        assert seen == [w.__name__ for w in WRITES if w.__name__ != "_one_row"]


def destroyed() -> bool:
    """Process groups go with something under way; then they are made anew, and another model trains."""
    pair = Pair()
    pair.step()
    pair.step()
    assert step_prefetch.any_under_way()
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    torch._dynamo.reset()
    del pair
    gc.collect()
    other = Pair()
    return [other.step_first() for _ in range(3)] == [0, 2, 2]


@pytest.mark.dist
def test_process_groups_may_go(ranks):
    assert ranks.run(destroyed, timeout=60) == [True] * 2


def deaf(mutated: bool) -> bool:
    """Whether ranks fail where one gathers anew and, mutated, does not tell the others."""
    pair = Pair()
    pair.step()
    pair.step()
    if dist.get_rank() == 0:
        for m in pair.models:
            _one_rank(m)
    own = Execution.anew
    if mutated:
        Execution.anew = lambda run, group, here: here  # type: ignore[method-assign]
    try:
        pair.step()
    except (AssertionError, RuntimeError):
        return True
    finally:
        Execution.anew = own  # type: ignore[method-assign]
    return False


def _one_rank(model: nn.Module) -> None:
    for p in model.parameters():
        p.to_local().data.add_(1.0)


@pytest.mark.dist
def test_a_rank_that_decides_for_itself_is_caught(ranks):
    assert ranks.run(deaf, False) == [False, False]
    answers = ranks.answers(deaf, True, timeout=30)
    ranks.stop()
    assert any(answer is None or not answer[0] or answer[1] for answer in answers)


# Where, and how many


class Told(list[str]):
    """Operations of steps ahead, as an observer sees them; and every step of a unit."""

    def program(self, outline: Any, run: Callable[..., Any], args: list[Any]) -> Any:
        self.append(outline.name)
        return run(args)

    def operation(self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.append(name)
        return kernel(*args)


def told(prefetch: int, models: tuple[int, ...] = (0,), **sharding: Any) -> tuple[list[str], list[int]]:
    """What an observer sees from the end of a backward to the first wait of the next forward; gathers of each of three
    steps, of models in this order: 0 launches ahead, 1 does not.
    """
    pair = Pair(options={"prefetch": prefetch}, **sharding)
    counts = []
    for i in models:
        for _ in range(3):
            launched: list[str] = []
            with collectives_told(lambda kind, group, to=launched: to.append(kind)):  # type: ignore[misc]
                pair.runs[i](torch.randn(3, 6)).square().mean().backward()
                pair.optimizers[i].step()
                pair.optimizers[i].zero_grad()
            counts.append(launched.count("gather"))
    seen = Told()
    step = ADAM.adam
    with instrumentation.observed(seen):

        def noted(params: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(f"step of {len(params)}")
            return step(params, *args, **kwargs)

        ADAM.adam = noted
        try:
            pair.runs[0](torch.randn(3, 6)).square().mean().backward()
            seen.clear()
            pair.optimizers[0].step()
            pair.runs[0](torch.randn(3, 6))
        finally:
            ADAM.adam = step
    at = next(i for i, name in enumerate(seen) if name.startswith("wait"))
    return seen[: at + 1], counts


@pytest.mark.dist
def test_units_step_in_forwards_order_and_gathers_follow_each(two_ranks):
    for seen, counts in two_ranks.run(told, 2, (1, 0)):
        assert seen == [
            "step of 1", "all_gather first ahead", "step of 1", "all_gather layers.0 ahead", "step of 3",
            "Net forward", "all_gather first", "all_gather layers.0", "wait first",
        ]  # fmt: skip
        assert counts == [9, 9, 9, 11, 9, 9], "the first step launches two for the second forward, and so on"
    for seen, counts in two_ranks.run(told, 0):
        assert seen[:2] == ["step of 5", "Net forward"] and len(set(counts)) == 1
    for seen, _ in two_ranks.run(told, 1, strategy=1):
        assert seen[:8] == [
            "step of 1", "refresh first ahead", "step of 1", "refresh layers.0 ahead", "step of 3",
            "refresh layers.1 ahead", "refresh layers.2 ahead", "refresh last ahead",
        ]  # fmt: skip


def profiled() -> tuple[list[str], str]:
    pair = Pair()
    pair.step_first()
    with mfsdp.profile(pair.runs[0], steps=2) as seen:
        more = True
        while more:
            pair.runs[0](torch.randn(3, 6)).square().mean().backward()
            pair.optimizers[0].step()
            pair.optimizers[0].zero_grad()
            more = seen.step()
    return list(seen.ahead), str(seen)


@pytest.mark.dist
def test_a_profile_shows_them(two_ranks):
    names, text = two_ranks.run(profiled)[0]
    assert names == ["all_gather first ahead", "all_gather layers.0 ahead"]
    assert "all_gather layers.0 ahead of forward" in text and "wait first" in text.replace("u0_full", "first")


def recorded() -> list[str]:
    pair = Pair()
    with torch.profiler.profile() as profile:
        for _ in range(2):
            pair.step_first()
    return sorted({e.name for e in profile.events() if "send" in e.name or "recv" in e.name})


@pytest.mark.dist
def test_messages_do_not_outlive_a_profile(two_ranks):
    assert two_ranks.run(recorded, timeout=300) == [[], []]


@pytest.mark.slow
def test_the_ledger_counts_what_is_in_no_static_buffer():
    x, model = torch.empty(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    found = {
        pool: mfsdp.explain(model, (x,), world=4, units=["0", "1"], options={"pool": pool}, suggest=False).ledger
        for pool in (True, False)
    }
    entries = {pool: {e.name: e.nbytes for e in ledger.entries} for pool, ledger in found.items()}
    assert "gathered ahead" not in entries[True]
    assert entries[False].get("gathered ahead", 0) == (64 * 65 * 4 if found[False].phase == "optimizer" else 0)


# Hostile orders


def in_these_orders(names: list[str], **sharding: Any) -> dict[str, int]:
    """Something between a step and the next forward, and what that forward took; two steps before each."""
    pair = Pair(**sharding)
    out = {}
    for name in names:
        pair.step(f"before {name}")
        assert pair.step(f"before {name}"), f"nothing was launched ahead before {name}"
        ORDERS[name](pair)
        out[name] = pair.step(name)
    assert pair.equal(), names
    return out


@torch.no_grad()
def _evaluated(pair: Pair) -> None:
    for m in pair.models:
        m.eval()
    pair.forward("evaluation")
    for m in pair.models:
        m.train()


def _forward_twice(pair: Pair) -> None:
    outs = [*pair.forward("given up"), *pair.forward("given up")]
    del outs


def _microbatches(pair: Pair) -> None:
    assert pair.step("microbatches", 3) == 2, "the first of them"


def _uncompiled(pair: Pair) -> None:
    with torch.compiler.set_stance("force_eager"):
        pair.forward("uncompiled")


def _step_twice(pair: Pair) -> None:
    outs = pair.forward("twice")
    for out in outs:
        out.square().mean().backward()
    for optimizer in pair.optimizers:
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def _interrupted(pair: Pair) -> None:
    class Stop(Exception):
        pass

    def stop(*args: Any) -> None:
        raise Stop

    for model, run in zip(pair.models, pair.runs, strict=True):
        handle = model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(Stop), torch.compiler.set_stance("force_eager"):
            run(torch.randn(3, 6))
        handle.remove()


def _saved_and_loaded(pair: Pair) -> None:
    told: list[Any] = [tempfile.mkdtemp(prefix="mfsdp-borders-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    for i, model in enumerate(pair.models):
        state = model.state_dict()
        dcp.save(state, checkpoint_id=f"{told[0]}/{i}")
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.25)
        dcp.load(state, checkpoint_id=f"{told[0]}/{i}")
        model.load_state_dict(state)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(told[0])


def _looked_at(pair: Pair) -> None:
    """Reading is no writing, on one rank or on all."""
    if dist.get_rank() == 0:
        for m in pair.models:
            assert all(bool(p.to_local().isfinite().all()) for p in m.parameters())
    for m in pair.models:
        assert len([p.full_tensor() for p in m.parameters()]) == 9
        mfsdp.norms(m)


def _own(pair: Pair) -> list[step_prefetch.PrefetchedGather]:
    """What the first model has under way."""
    return step_prefetch.of(r.buffer for m in pair.models[0].modules() for r in getattr(m, "_mfsdp_refs", {}).values())


def _copied(pair: Pair) -> None:
    """The copy has nothing under way, and what it does is its own."""
    twin = copy.deepcopy(pair.models[0])
    assert not step_prefetch.of(r.buffer for m in twin.modules() for r in getattr(m, "_mfsdp_refs", {}).values())
    run = torch.compile(twin, backend="mfsdp", options={"lowering": "eager"})
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.SGD(twin.parameters(), lr=1.0))
    run(torch.randn(3, 6)).square().mean().backward()
    optimizer.step()


def _synchronized(pair: Pair) -> None:
    mine = _own(pair)
    assert len(mine) > 1 and all(early.ends for early in mine)
    mfsdp.synchronize(pair.models[0])
    assert not any(early.ends for early in mine)


def _summoned_to_read(pair: Pair) -> None:
    for m in pair.models:
        with mfsdp.summon_full_params(m, writeback=False):
            pass


def _unsharded(pair: Pair) -> None:
    for m in pair.models:
        with mfsdp.unsharded(m):
            m(torch.randn(3, 6))


def _scaled(pair: Pair) -> None:
    """A step that GradScaler skips launches nothing."""
    outs = pair.forward("scaled")
    for out, optimizer in zip(outs, pair.optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu")
        (scaler.scale(out.square().mean()) * (torch.inf if dist.get_rank() else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not _own(pair)


ORDERS: dict[str, Callable[[Pair], None]] = {
    "evaluation": _evaluated,
    "forward twice": _forward_twice,
    "microbatches": _microbatches,
    "uncompiled": _uncompiled,
    "step twice": _step_twice,
    "interrupted": _interrupted,
    "saved and loaded": _saved_and_loaded,
    "copied": _copied,
    "synchronized": _synchronized,
    "summoned to read": _summoned_to_read,
    "unsharded": _unsharded,
    "scaled": _scaled,
    "looked at": _looked_at,  # last: from there on rows are out as plain tensors
}

TAKEN = dict.fromkeys(("evaluation", "forward twice", "saved and loaded", "scaled", "copied"), 0)
"""What the forward behind it takes; others 2."""


@pytest.mark.dist
@pytest.mark.parametrize("taken", [0, 2])
def test_orders(two_ranks, taken):
    names = [name for name in ORDERS if TAKEN.get(name, 2) == taken]
    assert two_ranks.run(in_these_orders, names) == [dict.fromkeys(names, taken)] * 2


@pytest.mark.dist
def test_orders_where_parameters_last(two_ranks):
    """What is refreshed ahead is refreshed once more where uncompiled code asks."""
    want = {"uncompiled": 0, "synchronized": 5, "step twice": 5, "forward twice": 0, "unsharded": 0, "looked at": 5}
    assert two_ranks.run(in_these_orders, list(want), strategy="optim") == [want] * 2


class Broken(Net):
    """Dynamo traces it as two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


class Frozen(Net):
    """Its first unit does not train, nor a part of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.layers[0].bias.requires_grad_(False)


def elsewhere(build: Callable[[], nn.Module], units: Any, steps: int = 4, **settings: Any) -> list[int]:
    """What forwards of another model take, bitwise as without."""
    pair = Pair(build=build, units=units, **settings)
    out = [pair.step(f"{i}") for i in range(steps)]
    assert pair.equal()
    return out


@pytest.mark.dist
def test_other_models_and_options(two_ranks):
    cases: list[tuple[Any, list[int]]] = [
        ((Broken, [nn.Linear]), [0, 1, 1, 1]),  # the first graph has one unit
        ((Frozen, [nn.Linear]), [0, 3, 3, 3]),  # the second has two flat buffers
        ((Net, []), [0, 1, 1, 1]),  # one unit, not resharded: in no static buffer
    ]
    for (build, units), want in cases:
        assert two_ranks.run(elsewhere, build, units) == [want] * 2, build


@pytest.mark.dist
@pytest.mark.exhaustive
def test_more_of_them(two_ranks):
    options = {"keep_cast": False, "max_unsharded": 10**6}
    assert two_ranks.run(elsewhere, Net, [nn.Linear], options=options, policy=HALF)[0][1:] == [2] * 3
    assert two_ranks.run(elsewhere, Frozen, [nn.Linear], strategy=1)[0] == [0, 4, 4, 4]


MESHES: dict[str, dict[str, Any]] = {
    "hfsdp": {"outer_strategy": "optim"},
    "hfsdp of optim_grads": {"outer_strategy": "optim", "strategy": "optim_grads"},
}


def over_two_axes(name: str) -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    pair = Pair(mesh=mesh, policy=HALF, **MESHES[name])
    out = [pair.step(f"{i}") for i in range(3)]
    for model in pair.models:
        for p in model.parameters():
            p.to_local().data.add_(0.5)
    out += [pair.step("written"), pair.step("again")]
    assert pair.equal()
    return out


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n == "hfsdp" else n for n in MESHES])
def test_two_axes(four_ranks, name):
    answers = four_ranks.run(over_two_axes, name)
    many = 0 if name == "hfsdp of optim_grads" else 5  # two gathers, one behind the other: not
    for rank, answer in enumerate(answers):
        rows = name != "hfsdp" or not rank % 2  # all ranks of the group of ranks 1 and 3 have no rows
        assert answer == [0, many, many, 0 if rows else many, many], (rank, answer)


def several_optimizers(whose: str) -> list[int]:
    """Two optimizers over one model, each flat."""
    pair = Pair()
    pair.optimizers = []
    for i, model in enumerate(pair.models):
        params = list(model.parameters())
        parts = {"by unit": (params[:2], params[2:]), "within": (params[:3:2], [params[1], *params[3:]])}[whose]
        both = [mfsdp.fully_shard_optimizer(torch.optim.AdamW(part, lr=0.05), ahead=i == 0) for part in parts]
        pair.optimizers.append(_Both(both))
    out = [pair.step(f"{i}") for i in range(4)]
    assert pair.equal()
    return out


class _Both:
    def __init__(self, both: list[Any]):
        self.both = both

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


@pytest.mark.dist
def test_several_optimizers(two_ranks):
    assert two_ranks.run(several_optimizers, "by unit") == [[0, 1, 1, 1]] * 2
    assert two_ranks.run(several_optimizers, "within") == [[0, 0, 0, 0]] * 2, "neither steps a whole unit of them"


def in_turns() -> tuple[list[int], int]:
    """Two models that train in turns over the same static buffers; what they take, and static buffers in use."""
    pairs = [Pair(), Pair()]
    before = sum(static_buffers.misses.values())
    out = []
    for i in range(3):
        for pair in pairs:
            out.append(pair.step(f"turn {i}"))
    assert all(pair.equal() for pair in pairs)
    return out, sum(static_buffers.misses.values()) - before


@pytest.mark.dist
def test_models_in_turns_give_up(two_ranks):
    for taken, misses in two_ranks.run(in_turns):
        assert not any(taken) and misses == 0, (taken, misses)


def own_optimizers() -> list[Any]:
    """Nothing is launched behind the step of an optimizer that is not flat, or was told not to; what is launched
    behind one that is not torch's, behind all of it; and behind hooks."""
    pair = Pair(make=Counted)
    out: list[Any] = [pair.step(f"{i}") for i in range(3)]
    out.append(pair.optimizers[0].count)
    hooked = Pair()
    for i in range(4):
        if i == 2:
            for optimizer in hooked.optimizers:
                optimizer.register_step_post_hook(_halves)
        out.append(hooked.step(f"hooked {i}"))
    assert pair.equal() and hooked.equal()
    plain = Pair()
    plain.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in plain.models]
    out += [plain.step(f"{i}") for i in range(3)]
    return out


class Counted(torch.optim.SGD):
    """Counts its steps, as some fused optimizers do."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] / self.count)

    def __init__(self, params: Any):
        super().__init__(params, lr=0.1)


@torch.no_grad()
def _halves(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(0.5)


@pytest.mark.dist
def test_other_optimizers(two_ranks):
    for answer in two_ranks.run(own_optimizers):
        assert answer == [0, 2, 2, 3, 0, 2, 2, 2, 0, 0, 0]


def raising(where: str, rank: int | None) -> str:
    """An optimizer's step that raises behind one of two launches, and a step once more."""
    pair = Pair()
    for _ in range(2):
        pair.step_first()
    model, run, optimizer = pair.models[0], pair.runs[0], pair.optimizers[0]
    run(torch.randn(3, 6)).square().mean().backward()
    step, calls = ADAM.adam, []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == int(where) and rank in (None, dist.get_rank()):
            raise MemoryError("full")
        return step(*args, **kwargs)

    ADAM.adam = full
    try:
        optimizer.step()
    except MemoryError:
        pass
    finally:
        ADAM.adam = step
    model.zero_grad()
    try:
        for _ in range(2):
            run(torch.randn(3, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
@pytest.mark.parametrize("where", ["2", "3"])
def test_a_step_that_raises_on_all_ranks(two_ranks, where):
    assert two_ranks.run(raising, where, None, timeout=60) == ["no error"] * 2


@pytest.mark.dist
def test_a_step_that_raises_on_one_rank_ends_all(two_fresh_ranks):
    answers = two_fresh_ranks.run(raising, "2", 1, timeout=60)
    assert all(
        "invariant 13" in text or "invariant 50" in text or "lost the other ranks" in text for text in answers
    ), answers


def gone() -> tuple[bool, bool, bool]:
    """A model that is garbage while something is under way."""
    pair = Pair()
    pair.step()
    pair.step()
    before = step_prefetch.any_under_way()
    main = weakref.ref(pair.models[0].first._mfsdp_unit.buffers[0].weights.main)
    other = Pair()
    pair = None  # type: ignore[assignment]
    torch._dynamo.reset()
    gc.collect()
    other.step()
    left = [early for early in step_prefetch._under_way if early.buffer() is None]
    vacant = all(s.vacant() for (_, name), s in static_buffers._slots.items() if name.startswith("g"))
    assert vacant
    return before, main() is None, not left


@pytest.mark.dist
def test_a_model_that_is_gone_leaves_nothing_under_way(two_ranks):
    assert two_ranks.run(gone) == [(True, True, True)] * 2


def test_synchronize_wants_a_sharded_model():
    with pytest.raises(ValueError, match="synchronize: the model is not sharded"):
        mfsdp.synchronize(nn.Linear(2, 2))


def test_ranks_that_do_not_wait_for_words_raise():
    """Where the host does not wait (NCCL), by hand: rank 1 takes what rank 0 gathers anew, and the other way round."""
    from tests.helpers.desync import Wire

    for mine in (True, False):
        words = Fingerprint("mine forward", ("all_gather u0",))
        company = GroupState("g", Wire([words.digest | desync.ANEW * (not mine)]))
        with pytest.raises(DesyncError, match=rf"rank {1 - mine:d} has written to its rows .*rank {mine:d} has not"):
            company.announce(words, mine).check()
