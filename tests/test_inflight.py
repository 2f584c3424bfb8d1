"""What other streams read and write is held until they are done (Note [In flight]); each place taken back once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.runtime import (
    c10d_transport,
    comm_formats,
    devices,
    execution,
    groups,
    host_memory,
    inflight,
    sync_collectives,
)
from mfsdp.runtime.c10d_transport import C10dTransport
from mfsdp.runtime.inflight import InFlight
from mfsdp.runtime.transport_registry import carried_by
from mfsdp.sharding.module import buffers_of
from tests.helpers.loopback import Loopback, Race, Stream, Streams

SOURCES = Path(mfsdp.__file__).parent
N = 256


@pytest.fixture(autouse=True)
def four() -> Iterator[None]:
    with mfsdp.fake_ranks(4, rank=1):
        yield
    inflight._unfinished.clear()


class Work:
    """Of a collective of NCCL's, as torch has it: it gives up what it holds when anybody waits."""

    def __init__(self, end: Callable[[], None]):
        self.wait = end

    def is_completed(self) -> bool:
        return False


def words_over_nccl(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of this rank and of others, gathered late, on a device."""

    def gather(out: torch.Tensor, mine: torch.Tensor, **_: Any) -> Work:
        return Work(
            streams.collective("gather of words", "g", [out], [mine], lambda outs, reads: outs[0].copy_(reads[0]))
        )

    monkeypatch.setattr(c10d_transport, "_all_gather", gather)
    monkeypatch.setattr(devices, "collective_device", lambda group: torch.device("cpu"))
    answers = c10d_transport.Answers(SimpleNamespace(name="g", size=4, group=None), 17)  # type: ignore[arg-type]
    torch.empty(4)  # whoever comes next
    assert not answers.ready()
    assert answers.wait() == [17] * 4 and answers.ready()


def copy_to_the_host(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.empty(N)
    end = host_memory.copy([(there, torch.ones(N).mul_(3))], "out")
    end.landed()
    assert (there == 3).all()


def copy_to_the_device(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended on another stream than the one that it was launched from."""
    side = Stream(7, "side 7")
    with streams.on(side):
        room = torch.empty(N)
        end = host_memory.copy([(room, torch.ones(N))], "in")
    end()
    assert (room.view(2, -1) == 1).all()
    streams.default.wait_stream(side)
    devices.follow(side, room)


def copy_that_nobody_waits_for(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.empty(N)
    host_memory.copy([(there, torch.ones(N))], "out")
    streams.sides["out"].run()
    streams.host.join(streams.sides["out"].clock)
    host_memory.copy([(torch.empty(N), torch.ones(N))], "out")()
    assert (there == 1).all() and not inflight._unfinished


def gather_of_a_cast(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.empty(4 * N, dtype=torch.bfloat16)
    end = execution.current().gather([(full, torch.ones(N).bfloat16())], groups.default_group())
    torch.empty(N, dtype=torch.bfloat16)
    end()
    assert (full == 1).all()


def ended_elsewhere(launch: Callable[[], Any]) -> Callable[[Streams, pytest.MonkeyPatch], None]:
    """Launched from one stream, and ended on another."""

    def run(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
        with streams.on(Stream(7, "side 7")):
            end = launch()
        end()
        del end

    return run


def gathered() -> Any:
    return execution.current().gather([(torch.empty(4 * N), torch.ones(N))], groups.default_group())


def gathered_in_int8() -> Any:
    full = torch.empty(4 * N, dtype=torch.bfloat16)
    end = comm_formats.gather(execution.current(), [(full, torch.ones(N))], groups.default_group(), "int8")
    return kept_by_the_caller(end, full)


def reduced_in_int8() -> Any:
    shard = torch.empty(N)
    end = comm_formats.scatter(
        execution.current(), [(torch.ones(4 * N), shard)], torch.float32, groups.default_group(), "int8"
    )
    return kept_by_the_caller(end, shard)


def summed_wide() -> Any:
    step = SimpleNamespace(group=groups.default_group(), ranks=4, sum=torch.float32, wire=None)
    tensor = torch.ones(N + 1, dtype=torch.bfloat16)
    return kept_by_the_caller(sync_collectives.summed(tensor, step), tensor)  # type: ignore[arg-type]


def kept_by_the_caller(end: Any, out: torch.Tensor) -> Any:
    """A result is whoever launched it's to keep; here past the end."""

    def call() -> None:
        end()
        KEPT.append(out)

    return call


KEPT: list[torch.Tensor] = []


def summed_wide_over_nccl(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives is added up where the end is called."""

    def all_to_all(out: torch.Tensor, sent: torch.Tensor, **_: Any) -> Work:
        return Work(streams.collective("exchange", "g", [out], [sent], lambda outs, reads: outs[0].copy_(reads[0])))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(C10dTransport, "prompt", True)
    with carried_by(lambda group, kind: C10dTransport(group)), streams.on(Stream(7, "side 7")):
        pairs = [(torch.ones(4 * N, dtype=torch.bfloat16), torch.empty(N))]
        end = execution.current().scatter(pairs, torch.float32, groups.default_group())
    end()
    assert (pairs[0][1].view(2, -1) == 4).all()
    KEPT.extend(pairs[0])


def chained_gathers(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that last, over two axes, cast for it: the second gather sends what the first one brings."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    model = mfsdp.fully_shard(nn.Linear(16, 16), mesh=mesh, strategy=2, outer_strategy="optim", mp_policy=policy)
    (buffer,) = buffers_of(model, True)
    ends = buffer.weights.refresh()
    assert all(stream.of is None for stream in streams.default.clock), "compute waits for neither yet"
    for end in ends:
        end()
    assert torch.isfinite(buffer.weights.source).all()
    KEPT.append(buffer)


CASES: dict[str, tuple[Callable[[Streams, pytest.MonkeyPatch], None], str]] = {
    "words over NCCL": (words_over_nccl, "native.beside"),
    "copy to the host": (copy_to_the_host, "hosts.beside"),
    "copy to the device": (copy_to_the_device, "hosts.beside"),
    "copy that nobody waits for": (copy_that_nobody_waits_for, "hosts.beside"),
    "gather of a cast": (gather_of_a_cast, "runs.InFlight"),
    "gather, ended elsewhere": (ended_elsewhere(gathered), "runs.InFlight"),
    "int8 gather, ended elsewhere": (ended_elsewhere(gathered_in_int8), "formats.InFlight"),
    "int8 sum, ended elsewhere": (ended_elsewhere(reduced_in_int8), "formats.InFlight"),
    "wide sum, ended elsewhere": (ended_elsewhere(summed_wide), "immediate.InFlight"),
    "wide sum over NCCL, ended elsewhere": (summed_wide_over_nccl, "runs.InFlight"),
    "chained gathers": (chained_gathers, "immediate.beside"),
}


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    KEPT.clear()
    with carried_by(Loopback), Streams().watched(monkeypatch) as streams, streams:
        CASES[name][0](streams, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_what_is_under_way_is_held(monkeypatch, name):
    run(name, monkeypatch)


class Careless:
    """An end that holds nothing, and has nobody wait but whoever calls it."""

    def __init__(self, device: torch.device, arrive: Any, *operands: object, event: Any = None):
        self.device, self.arrive, self.event = device, arrive, event

    def __call__(self) -> None:
        arrive, self.arrive = self.arrive, None
        if arrive is not None:
            arrive()
        if self.event is not None:
            devices.current_stream(self.device).wait_event(self.event)  # type: ignore[union-attr]

    def ready(self) -> bool:
        return bool(self.event.query())

    def landed(self) -> None:
        self.event.synchronize()


def carelessly(stream: Any, device: torch.device, work: Any, *operands: object, after: Any = ()) -> Careless:
    stream.wait_stream(devices.current_stream(device))
    with stream:
        end = work()
    return Careless(device, end, event=stream.record_event())


@pytest.mark.parametrize("name", CASES)
def test_each_place_that_holds_nothing_is_found(monkeypatch, name):
    """The fault itself of the first run on two GPUs, and its like."""
    module, what = CASES[name][1].split(".")
    places = {
        "native": c10d_transport,
        "hosts": host_memory,
        "runs": execution,
        "formats": comm_formats,
        "immediate": sync_collectives,
    }
    monkeypatch.setattr(places[module], what, Careless if what == "InFlight" else carelessly)
    with pytest.raises((Race, AssertionError)):
        run(name, monkeypatch)


RULES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "the stream of the allocation waits": (
        "gather, ended elsewhere", lambda m: m.setattr(InFlight, "__init__", without_a_home(InFlight.__init__))
    ),
    "what is dropped is held on": (
        "copy that nobody waits for", lambda m: m.delattr(InFlight, "__del__")
    ),
    "what ends under a side stream is held by what is launched there": (
        "chained gathers", lambda m: m.setattr(inflight, "_here", Forgets())
    ),
}  # fmt: skip


def without_a_home(init: Callable[..., None]) -> Callable[..., None]:
    def made(self: InFlight, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._home = None

    return made


class Forgets:
    """`inflight._here`, which keeps nothing."""

    class Nothing(list[Any]):
        def append(self, held: Any) -> None:
            pass

    kept = Nothing()

    def __setattr__(self, name: str, value: Any) -> None:
        pass


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_that_is_taken_back_is_found(monkeypatch, rule):
    name, take_back = RULES[rule]
    take_back(monkeypatch)
    with pytest.raises((Race, AssertionError)):
        run(name, monkeypatch)


# Nothing else launches

ASYNCHRONOUS = {"record_event", "set_stream", "wait_event", "Stream"}


def launches(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = {k.arg for k in node.keywords if not (isinstance(k.value, ast.Constant) and not k.value.value)}
            for found in ({name} & ASYNCHRONOUS) | ({"async_op", "non_blocking", "async_ops"} & words):
                yield found, node.lineno


@pytest.mark.slow
def test_nothing_else_uses_other_streams():
    """Where something is launched beside the current stream; a new file here has to hold what it launches."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCES.glob("[a-z]*/*.py")):
        for what, _ in launches(ast.parse(path.read_text())):
            found.setdefault(str(path.relative_to(SOURCES)), set()).add(what)
    assert found == {
        "cost_model/machine.py": {"non_blocking"},  # synchronises
        "optim/captured_step.py": {"non_blocking"},  # on the current stream
        "runtime/capturing.py": {"Stream", "set_stream"},  # one that exists; the one of before a failed recording
        "runtime/devices.py": {"Stream", "set_stream", "non_blocking"},  # `numbers`: on the current stream
        "runtime/host_memory.py": {"non_blocking"},  # inside of `beside`
        "runtime/inflight.py": {"record_event", "wait_event"},
        "runtime/c10d_transport.py": {"async_op", "async_ops", "non_blocking"},  # `Run` calls it
        "runtime/runtime_checks.py": {"non_blocking"},  # on the current stream
        "runtime/transport.py": {"async_op"},  # called by `Run`
    }
