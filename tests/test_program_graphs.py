"""``cuda_graph="programs"``: a replayed program has the bits of one that runs, whatever happened in between (Note
[Captured programs]).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.runtime import program_graphs as captured
from mfsdp.runtime import static_buffers
from tests.helpers.dtypes import BF16
from tests.helpers.logs import logged
from tests.helpers.models import GPT, Block
from tests.helpers.program_graphs import program_graphs
from tests.helpers.without_inductor import without_inductor

pytestmark = pytest.mark.slow

STEPS = captured.WARM + 4


class Layer(nn.Module):
    """Saves activations, draws random numbers, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean((0, 1))
        return x + self.drop(self.down(torch.tanh(self.up(x * mask))))


class Net(nn.Module):
    """Two units and a root, which returns two results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x, mask)
        return self.last(x), x.mean(1)


class Trained:
    """A model and what people do with it."""

    def __init__(self, on: bool, build: Callable[[], nn.Module] = Net, options: Any = None, **sharding: Any):
        torch._dynamo.reset()
        static_buffers.reset()
        torch.manual_seed(0)
        if "mesh" in sharding:
            axes = sharding["mesh"]
            sharding["mesh"] = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.model = mfsdp.fully_shard(build(), units=[Layer], **sharding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        more = {"lowering": "stitched", "cuda_graph": "programs" if on else None}
        self.run = torch.compile(self.model, backend="mfsdp", dynamic=False, options={**more, **(options or {})})
        self.calls, self.told, self.kept = 0, [], []  # type: ignore[var-annotated]

    def loss(self, rows: int = 2) -> torch.Tensor:
        self.calls += 1
        me = dist.get_rank() if dist.is_initialized() else 0
        random = torch.Generator().manual_seed(10 * self.calls + me)
        torch.manual_seed(self.calls)
        out, mean = self.run(torch.randn(rows, 4, 8, generator=random), torch.rand(rows, 4, 8, generator=random))
        self.kept += [out.detach(), mean]
        return out.square().mean() + mean.sum()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            loss = self.loss()
            loss.backward()
            self.told.append(loss.detach())
            self.step()

    def results(self) -> list[torch.Tensor]:
        whole = [p.full_tensor() for p in self.model.parameters()] if dist.is_initialized() else []
        return [*self.told, *self.kept, *whole, *self.model.buffers(), torch.rand(3)]


def two_forwards(t: Trained) -> None:
    """Before their backwards."""
    losses = [t.loss(), t.loss()]
    for loss in losses:
        loss.backward()
    t.step()


def microbatches(t: Trained) -> None:
    for _ in range(2):
        t.loss().backward()
    t.step()


def unsynced(t: Trained) -> None:
    with mfsdp.no_sync(t.model):
        t.loss().backward()
    t.loss().backward()
    t.step()


def evaluate(t: Trained) -> None:
    with torch.no_grad():
        t.told.append(t.loss())


def infer(t: Trained) -> None:
    with torch.inference_mode():
        t.told.append(t.loss().clone())


def forward_alone(t: Trained) -> None:
    t.kept.append(t.loss())  # with its graph


def write(t: Trained) -> None:
    with torch.no_grad():
        next(t.model.parameters()).mul_(0.5)


def other_rows(t: Trained) -> None:
    t.loss(rows=3).backward()
    t.step()


def move_buffers(t: Trained) -> None:
    vars(t).setdefault("former", []).extend(static_buffers._slots.values())
    static_buffers.reset()


def twice(t: Trained) -> None:
    """Backward through one graph, twice."""
    loss = t.loss()
    try:
        loss.backward(retain_graph=True)
        loss.backward()
    except RuntimeError as error:
        t.told.append(torch.tensor(float(len(str(error)))))
    t.step()


def load(t: Trained) -> None:
    t.model.load_state_dict({k: v * 0.9 for k, v in t.model.state_dict().items()})


ACTIONS = [
    two_forwards, microbatches, unsynced, evaluate, infer, forward_alone, write, other_rows, move_buffers, twice, load,
]  # fmt: skip

Plan = list[tuple[int, Callable[[Trained], None]]]


def alike(plan: Plan, **settings: Any) -> Trained:
    """Follows a plan with programs that run, and with captured ones: the same numbers."""
    found = []
    for on in (False, True):
        t = Trained(on, **settings)
        for steps, does in plan:
            t.train(steps)
            does(t)
        t.train(2)
        found.append(t.results())
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
    return t


@pytest.fixture(autouse=True)
def graphs() -> Iterator[Any]:
    """A CPU that has graphs, and whose subgraphs ATen runs."""
    captured._all.clear()
    with program_graphs() as made, without_inductor():
        yield made


@pytest.fixture
def four() -> Iterator[None]:
    """One of four ranks."""
    with mfsdp.fake_ranks(4, rank=1):
        yield


CASES: dict[str, dict[str, Any]] = {
    "0, checks": {"strategy": "no_shard", "options": {"check_finite": 2, "check_replicas": 2}},
    "hfsdp": {"mesh": {"dp_outer": 2, "dp_shard": 2}, "outer_strategy": "optim"},
    "bf16, 2": {"mp_policy": BF16, "strategy": "optim_grads"},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "3": {}, "2": {"strategy": "optim_grads"}, "1": {"strategy": "optim"}, "0": {"strategy": "no_shard"},
    "hsdp": {"mesh": {"dp_outer": 2, "dp_shard": 2}}, "bf16": {"mp_policy": BF16},
    "no prefetch": {"options": {"prefetch": 0, "reduce_lag": 0}},
}  # fmt: skip


STATIC = ("3", "2", "hsdp", "bf16", "bf16, 2", "no prefetch")
"""Where all gradients are written to static buffers. Those that become accumulators are elsewhere on a CPU."""


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE)])
def test_steps_have_the_bits_of_steps_that_run(four, graphs, case):
    """Every subgraph of forward and backward is captured and replayed."""
    alike([(2 * STEPS, microbatches)], **(CASES | MORE)[case])
    forward, backward = sorted((each for each in captured._all if each._captured), key=lambda each: len(each.sites))
    assert forward._captured.keys() == forward.sites.keys()
    replays = [graph.replays for graph in graphs]
    if case in STATIC:
        assert backward._captured.keys() == backward.sites.keys()
    assert max(replays) > captured.MISSES  # addresses that were the same by chance cost another capture


def test_what_happens_between_steps(four, graphs):
    """Nobody sees a tensor that a replay overwrites, and no replay reads what has moved."""
    alike([(STEPS, ACTIONS[0]), *((2, does) for does in ACTIONS for _ in range(2)), *((0, does) for does in ACTIONS)])
    assert max(graph.replays for graph in graphs) > len(ACTIONS)


@pytest.mark.exhaustive
@settings(max_examples=100, deadline=None)
@given(
    strategy=st.sampled_from(["optim_grads_params", "optim_grads", "no_shard"]),
    plan=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(ACTIONS)), max_size=8),
)
def test_any_order_of_them(strategy, plan):
    with mfsdp.fake_ranks(4, rank=1):
        alike([*plan, (STEPS, write)], strategy=strategy)


@pytest.mark.parametrize(
    ("what", "does"),
    [("free", two_forwards), ("moved", move_buffers), ("leaving", evaluate)],
)
def test_each_comparison_is_needed(four, monkeypatch, what, does):
    """Without it the numbers are others."""
    if what == "free":
        monkeypatch.setattr(captured._Captured, "free", lambda self: True)
    elif what == "moved":
        replay = captured._Captured.replay
        monkeypatch.setattr(captured.ProgramGraphs, "_replay", lambda self, n, body, x: replay(self._captured[n], x))
    else:
        monkeypatch.setattr(captured, "_copy", lambda x: x)
    with pytest.raises(AssertionError):
        alike([(STEPS, does), (2, does), (2, does)])


def test_what_moves_is_copied_or_runs(four, graphs):
    """A program whose inputs have moved twice is captured anew, four times at most."""
    t = Trained(True)
    t.train(captured.WARM + 1)
    first = list(graphs)
    for _ in range(8):
        static_buffers.reset()
        t.kept.append(torch.empty(999))  # elsewhere
        t.train(captured.MISSES)
    assert first and len(graphs) <= captured.MOST * len(first)


def test_another_stream_thread_or_observer_runs(four, graphs, monkeypatch):
    t = Trained(True)
    t.train(3 * STEPS)
    before = sum(graph.replays for graph in graphs)
    with mfsdp.profile(t.model) as profile:
        t.train()
        profile.step()
    for each in captured._all:
        monkeypatch.setattr(each, "_stream", "another")
    t.train()
    monkeypatch.undo()
    assert captured._busy[torch.device("cpu")].acquire(blocking=False)
    t.train()
    captured._busy[torch.device("cpu")].release()
    assert sum(graph.replays for graph in graphs) == before
    t.train()
    assert sum(graph.replays for graph in graphs) > before


def test_an_exception_leaves_nothing_half_captured(four, graphs):
    class Broken(Exception):
        pass

    def alter(grad: torch.Tensor) -> None:
        raise Broken

    t = Trained(True)
    hook = t.model.last.weight.register_hook(alter)
    for _ in range(STEPS):
        with pytest.raises(Broken):
            t.loss().backward()
        t.optimizer.zero_grad()
    hook.remove()
    t.train(STEPS)
    assert graphs and graphs[-1].replays


def test_a_graph_that_cannot_be_captured(four, graphs, monkeypatch):
    record = captured.GRAPHS["cpu"].record  # type: ignore[attr-defined]

    def fails(self: Any, work: Any, stream: Any) -> Any:
        if len(graphs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(self, work, stream)

    monkeypatch.setattr(captured.GRAPHS["cpu"], "record", fails)
    with logged() as told:
        alike([(STEPS, write)])
    assert sum("subgraph 1 of Net forward is not captured: operation not permitted" in text for text in told) == 1
    assert graphs[0].replays and not graphs[1].replays


def test_memory_goes_with_the_model(four, graphs):
    t = Trained(True)
    t.train(STEPS)
    gone = [weakref.ref(graph) for graph in graphs]
    graphs.clear()
    del t
    torch._dynamo.reset()
    gc.collect()
    assert gone and not any(ref() for ref in gone)


def test_the_ledger_knows_what_graphs_hold():
    """All that forward saves, while backward runs and while the optimizer steps."""
    x, mask = torch.zeros(64, 4, 8), torch.zeros(64, 4, 8)
    plain, graphs = (
        mfsdp.explain(Net(), (x, mask), world=4, units=[Layer], hardware="h100", options=options).ledger
        for options in ({}, {"cuda_graph": "programs"})
    )
    saved = graphs.at_step - plain.at_step
    assert saved > 2 * x.nbytes and 0 < sum(e.nbytes for e in graphs.entries if "graphs" in e.what) <= saved
    more = [graphs.live["backward"][line] - n for line, n in plain.live["backward"].items()]
    assert more == sorted(more) and more[0] == 0 and 0 < more[-1] <= saved
    assert graphs.live["forward"] == plain.live["forward"]


def trains(strategy: str) -> tuple[list[Any], list[Any], int, int]:
    """With Inductor: bodies write results over inputs that nobody reads any more."""
    found = []
    with program_graphs() as made:
        for on in (False, True):
            torch._dynamo.reset()
            static_buffers.reset()
            torch.manual_seed(0)
            model = mfsdp.fully_shard(GPT(), units=[Block], strategy=strategy)
            optimizer = mfsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            run: Any = torch.compile(model, backend="mfsdp", mode="reduce-overhead" if on else None)
            random, values = torch.Generator().manual_seed(dist.get_rank()), []
            for step in range(2 * STEPS + 2):
                torch.manual_seed(step)
                ids = torch.randint(0, 17, (2, 8), generator=random)
                loss = run(ids).float().logsumexp(-1).mean()
                loss.backward()
                values.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found.append([values, [p.full_tensor().tolist() for p in model.parameters()]])
    return *found, len(made), max(graph.replays for graph in made)  # type: ignore[return-value]


@pytest.mark.inductor
@pytest.mark.parametrize("strategy", ["optim_grads_params", pytest.param("optim_grads", marks=pytest.mark.exhaustive)])
def test_two_ranks(two_ranks, strategy):
    for plain, replayed, made, replays in two_ranks.run(trains, strategy, timeout=300):
        assert plain == replayed and made > 6 and replays > captured.MISSES
