"""Late collectives change no result, and no stream touches a buffer that another stream still uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.buffers.weights import Weights
from mfsdp.runtime import devices, execution, static_buffers
from mfsdp.runtime.announcements import Announcements
from mfsdp.runtime.desync import Left
from mfsdp.runtime.fake_transport import FakeTransport
from mfsdp.runtime.transport import End, Pairs
from mfsdp.runtime.transport_registry import carried_by
from tests.helpers.loopback import Loopback, Race, Stream, Streams

PLACES: dict[str, dict[str, Any]] = {
    "optim": {"strategy": 1},
    "optim_grads": {"strategy": 2},
    "optim_grads_params": {"strategy": 3},
    "kept": {"strategy": 3, "reshard_after_forward": False},
    "hsdp": {"mesh": (2, 2)},
    "hfsdp": {"mesh": (2, 2), "outer_strategy": "optim"},
    "hfsdp of optim_grads": {"mesh": (2, 2), "strategy": 2, "outer_strategy": "optim"},
}

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def four() -> Iterator[None]:
    static_buffers.reset()
    with mfsdp.fake_ranks(4, rank=1):
        yield
    static_buffers.reset()


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Three blocks between an embedding and a head, which are the root's."""

    def __init__(self, width: int = 32, vocabulary: int = 31):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Broken(nn.Module):
    """A block that Dynamo cannot trace as one."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.block(x)


class Setup:
    """A sharded model, its compiled form and an optimizer; and a stream besides the default one."""

    def __init__(self, device: str, place: str, options: dict[str, Any], broken: bool = False, flat: bool = False):
        torch.manual_seed(0)
        model = Net()
        if broken:
            model.blocks[1] = Broken(model.blocks[1])
        arguments = dict(PLACES[place])
        if "mesh" in arguments:
            arguments["mesh"] = init_device_mesh(device, arguments["mesh"], mesh_dim_names=("dp_replicate", "dp_shard"))
        policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        self.model = mfsdp.fully_shard(model.to(device), units=[Block], mp_policy=policy, **arguments)
        options = {"lowering": "eager", **options}
        self.run = torch.compile(self.model, backend="mfsdp", dynamic=False, options=options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if flat:
            mfsdp.fully_shard_optimizer(self.optimizer)
        self.device, self.count = device, 0

    def batch(self) -> torch.Tensor:
        self.count += 1
        torch.manual_seed(self.count)
        return torch.randint(31, (2, 8)).to(self.device)

    def loss(self) -> torch.Tensor:
        return self.run(self.batch()).float().square().mean()

    def step(self, streams: Streams | None = None) -> None:
        with nullcontext() if streams is None else streams:
            self.optimizer.step()
        self.optimizer.zero_grad()


Way = Callable[[Setup, "Streams | None"], None]


def side_of(streams: Streams | None, device: str, number: int) -> Any:
    """Launches go to another stream; the caller waits for it no earlier than at the end."""
    if streams is not None:
        return streams.on(Stream(number, f"side {number}"))
    if device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)
    return nullcontext()


def plain(setup: Setup, streams: Streams | None) -> None:
    setup.loss().backward()


def on_a_side_stream(setup: Setup, streams: Streams | None) -> None:
    """Forward there, and so backward; the optimizer steps on the default one."""
    with side_of(streams, setup.device, 7):
        loss = setup.loss()
    loss.backward()


def forwards_first(setup: Setup, streams: Streams | None) -> None:
    one, other = setup.loss(), setup.loss()
    one.backward()
    other.backward()


def accumulated(setup: Setup, streams: Streams | None) -> None:
    with mfsdp.no_sync(setup.model):
        setup.loss().backward()
    setup.loss().backward()


def given_up(setup: Setup, streams: Streams | None, first: int = 3, compiled: bool = True) -> None:
    """An exception in the middle of forward, on all ranks, and the step once more."""

    class Full(Exception):
        pass

    wait, seen = execution.Execution.wait, 0

    def full(run: execution.Execution, out: torch.Tensor) -> None:
        nonlocal seen
        seen += 1
        if seen == first:
            raise Full
        wait(run, out)

    execution.Execution.wait = full  # type: ignore[method-assign]
    try:
        with pytest.raises(Full):
            setup.loss()
    finally:
        execution.Execution.wait = wait  # type: ignore[method-assign]
    run = setup.run if compiled else setup.model
    run(setup.batch()).float().square().mean().backward()


def given_up_for_eager(setup: Setup, streams: Streams | None) -> None:
    """The same at once, and then uncompiled code reads what had been launched."""
    given_up(setup, streams, first=1, compiled=False)


def written(setup: Setup, streams: Streams | None) -> None:
    """Behind every other step weights are written, and what was launched is not taken."""
    if setup.count % 2:
        with nullcontext() if streams is None else streams, torch.no_grad():
            for p in setup.model.parameters():
                p.mul_(0.5)
    setup.loss().backward()


WAYS: dict[str, tuple[Way, dict[str, Any]]] = {
    "plain": (plain, {}),
    "far ahead, far behind": (plain, {"prefetch": 2, "reduce_lag": 2}),
    "on a side stream": (on_a_side_stream, {}),
    "forwards first": (forwards_first, {}),
    "accumulated": (accumulated, {}),
    "graph break": (plain, {}),
    "launched ahead": (plain, {"prefetch": 2}),
    "launched ahead, written to": (written, {"prefetch": 2}),
    "given up": (given_up, {}),
    "given up for uncompiled code": (given_up_for_eager, {}),
}


def trained(way: str, place: str, device: str, streams: Streams | None = None) -> list[torch.Tensor]:
    """Weights and static buffers' use after three steps."""
    torch._dynamo.reset()
    static_buffers.reset()
    do, options = WAYS[way]
    setup = Setup(device, place, options, broken=way == "graph break", flat=way.startswith("launched"))
    for _ in range(3):
        do(setup, streams)
        setup.step(streams)
    return [p.to_local().detach().cpu().clone() for p in setup.model.parameters()]


LIKE_PLAIN = ("far ahead, far behind", "on a side stream")
"""What has the values of `plain`."""


ELSEWHERE = ("accumulated", "far ahead, far behind", "given up for uncompiled code")
"""What other strategies run."""


@cache
def wanted(way: str, place: str, device: str) -> list[torch.Tensor]:
    """What is trained where nothing is late."""
    with carried_by(lambda group, kind: FakeTransport(group)):
        return trained(way, place, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("place", "way"),
    [
        *(("optim_grads_params", way) for way in WAYS if way not in ELSEWHERE),
        *(pytest.param("optim_grads_params", way, marks=pytest.mark.exhaustive) for way in ELSEWHERE),
        ("optim_grads", "given up for uncompiled code"),
        pytest.param("optim_grads", "launched ahead", marks=pytest.mark.exhaustive),
        pytest.param("optim_grads", "far ahead, far behind", marks=pytest.mark.exhaustive),
        pytest.param("optim_grads", "on a side stream", marks=pytest.mark.exhaustive),
    ],
)
def test_late_collectives_change_no_bit(monkeypatch, way, place, device):
    check(monkeypatch, way, place, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("place", "way"),
    [
        ("optim", "accumulated"),
        pytest.param("hsdp", "accumulated", marks=pytest.mark.exhaustive),
        ("hfsdp", "far ahead, far behind"),
        pytest.param("kept", "far ahead, far behind", marks=pytest.mark.exhaustive),
        pytest.param("hfsdp of optim_grads", "accumulated", marks=pytest.mark.exhaustive),
        pytest.param("hfsdp of optim_grads", "far ahead, far behind", marks=pytest.mark.exhaustive),
    ],
)
def test_late_collectives_of_other_strategies_change_no_bit(monkeypatch, way, place, device):
    check(monkeypatch, way, place, device)


def check(monkeypatch: pytest.MonkeyPatch, way: str, place: str, device: str) -> None:
    with carried_by(Loopback):
        if device == "cuda":
            got = trained(way, place, device)
        else:
            with Streams().watched(monkeypatch) as streams:
                got = trained(way, place, device, streams)
    want = wanted("plain" if way in LIKE_PLAIN else way, place, device)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs) and torch.isfinite(mine).all()


def two_models(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """A model and its copy, each on a stream of its own, in turns."""
    with carried_by(Loopback), Streams().watched(monkeypatch) as streams:
        torch._dynamo.reset()
        one = Setup(device, "optim_grads_params", {})
        other = copy.copy(one)
        other.model = copy.deepcopy(one.model)
        other.run = torch.compile(other.model, backend="mfsdp", dynamic=False, options={"lowering": "eager"})
        ways = Stream(7, "one's"), Stream(8, "other's")
        for _ in range(2):
            for setup, stream in zip((one, other), ways, strict=True):
                with streams.on(stream):
                    setup.loss()


@pytest.mark.slow
def test_two_models_on_two_streams(monkeypatch):
    two_models(monkeypatch)


@pytest.mark.slow
def test_gathers_over_two_axes_wait_for_each_other_not_for_compute(monkeypatch):
    """All gathers are launched at the start of forward; a stream beside compute waits for those over the outer axis."""
    events: list[str] = []

    class Told(Loopback):
        def gather(self, pairs: Pairs, turn: Announcements) -> End:
            axis = "inner" if self.ranks == [0, 1] else "outer"
            events.append(f"launch {axis}")
            end = super().gather(pairs, turn)
            return lambda: (events.append(f"end {axis}"), end())

    with carried_by(Told), Streams().watched(monkeypatch) as streams:
        torch._dynamo.reset()
        setup = Setup("cpu", "hfsdp of optim_grads", {})
        for _ in range(2):
            events.clear()
            setup.loss().backward()
            setup.step(streams)
            want = ["launch outer", "end outer", "launch inner"] * 4 + ["end inner"] * 4
            assert events == want, "three blocks and the root"


# Each hazard put back is found


@pytest.mark.slow
def test_static_buffers_of_all_streams_together_are_found(monkeypatch):
    room = static_buffers.room
    monkeypatch.setattr(
        static_buffers,
        "room",
        lambda slot, numel, dtype, device: _on_the_default_stream(room, slot, numel, dtype, device),
    )
    with pytest.raises(Race, match="all_gather|collective"):
        two_models(monkeypatch)


def _on_the_default_stream(room: Any, *args: Any) -> torch.Tensor:
    now = devices.current_stream
    devices.current_stream = lambda device: None
    try:
        return room(*args)
    finally:
        devices.current_stream = now


@pytest.mark.slow
def test_gradients_that_nobody_follows_are_found(monkeypatch):
    monkeypatch.setattr(devices, "follow", lambda stream, tensor: None)
    with pytest.raises(Race, match=r"default does not wait for .* on side 7"):
        check(monkeypatch, "on a side stream", "optim_grads_params", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", pytest.param("accumulated", marks=pytest.mark.exhaustive)])
def test_waits_that_do_not_wait_are_found(monkeypatch, way):
    monkeypatch.setattr(execution.Execution, "wait", lambda run, out: run.pending.pop(out.untyped_storage().data_ptr()))
    with pytest.raises(Race, match="does not wait for collective over"):
        check(monkeypatch, way, "optim_grads_params", "cpu")


@pytest.mark.slow
def test_gathers_launched_ahead_that_nobody_waits_for_are_found(monkeypatch):
    def adopt(run: execution.Execution, early: Any) -> torch.Tensor:
        run.launch(early.out)
        return early.out

    monkeypatch.setattr(execution.Execution, "adopt", adopt)
    with pytest.raises(Race, match="does not wait for collective over"):
        check(monkeypatch, "launched ahead", "optim_grads_params", "cpu")


@pytest.mark.slow
def test_sources_that_count_as_filled_too_early_are_found(monkeypatch):
    """Parameters that last, whose gather an exception kept from ending: who begins anew ends it, and without that it
    is due again.
    """
    refresh, place = Weights.refresh, ("given up for uncompiled code", "optim_grads", "cpu")

    def begins_anew(left: Left) -> None:
        for company in left.groups:
            company.left = None

    monkeypatch.setattr(Left, "begin_anew", begins_anew)
    check(monkeypatch, *place)

    def early(weights: Weights) -> list[Any]:
        version, ends = weights.main._version, refresh(weights)
        weights._version = version
        return ends

    monkeypatch.setattr(Weights, "refresh", early)
    with pytest.raises(AssertionError):
        check(monkeypatch, *place)


@pytest.mark.slow
def test_a_rank_that_swallows_an_exception_is_out_of_step(monkeypatch):
    monkeypatch.setattr("mfsdp.runtime.desync.PATIENCE", 0.1)
    monkeypatch.setattr(Loopback, "alike", False)
    with carried_by(Loopback), pytest.raises(RuntimeError, match=r"out of step \(invariant 50\)"):
        trained("given up", "optim_grads_params", "cpu")
