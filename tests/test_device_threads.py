"""What a GPU's threads do: autograd runs backward in one of its own, and recordings may fail half-way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp.runtime import capturing, devices
from tests.helpers.dtypes import BF16

Run = Callable[[Callable[[], None]], None]


@pytest.fixture(params=["in this thread", "in another"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a backward as on a CPU, and as on a GPU."""
    if request.param == "in this thread":
        yield lambda backward: backward()
        return
    with ThreadPoolExecutor(1) as pool:
        yield lambda backward: pool.submit(backward).result()


class Recomputed(nn.Module):
    """Its second layer is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x).tanh(), use_reentrant=False)  # type: ignore[no-any-return]


def test_a_write_behind_a_backward_that_died_in_a_recomputation(run: Run) -> None:
    class Broken(Exception):
        pass

    def breaks(grad: torch.Tensor) -> None:
        raise Broken

    model = mfsdp.fully_shard(Recomputed(), device="cpu", mp_policy=BF16)
    x = torch.randn(3, 16, requires_grad=True)
    x.register_hook(breaks)
    loss = model(x).sum()
    with pytest.raises(Broken):
        run(loss.backward)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    first, second = model(x), model(x)
    assert torch.equal(first, second)


def test_a_kept_unit_is_recomputed(run: Run) -> None:
    unit: Any = mfsdp.fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), device="cpu", mp_policy=BF16)
    unit.unshard()
    x = torch.randn(3, 16, requires_grad=True)
    run(checkpoint(unit, x, use_reentrant=False).sum().backward)
    unit.reshard()
    assert x.grad is not None and unit[0].weight.grad is not None


class Cuda:
    """The part of ``torch.cuda`` that records, where a recording fails as torch 2.11's: it leaves the thread on the
    recording's stream, and the allocator in the pool.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.stream, self.pools, self.recording = "outside", 0, set[int]()
        names = {
            "CUDAGraph": object, "Stream": lambda **names: "recorded", "graph": self.graph,
            "graph_pool_handle": self.pool, "empty_cache": lambda: None, "memory_reserved": lambda device: 0,
            "current_stream": lambda device: self.stream, "set_stream": self.set_stream,
        }  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    @contextmanager
    def graph(self, graph: object, pool: int, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert pool not in self.recording, "already recording to this pool"
        before, self.stream = self.stream, stream
        self.recording.add(pool)
        yield
        self.recording.remove(pool)
        self.stream = before

    def end(self, index: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("not recording to this pool")
        self.recording.remove(pool)


def test_a_recording_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device, pool = Cuda(monkeypatch), torch.device("cuda", 0), capturing.Pool()
    stream = torch.Stream(device="cpu")

    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    for work in (lambda: None, fails, fails, lambda: None):
        graph = capturing.CudaGraph(device, pool)
        if work is fails:
            with pytest.raises(RuntimeError, match="not permitted"):
                graph.record(work, stream)
        else:
            graph.record(work, stream)
        assert (cuda.stream, cuda.recording) == ("outside", set())
    assert cuda.pools == 3


def test_numbers_go_to_a_device_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Pinned:
        def to(self, *args: Any, **how: Any) -> None:
            told.append(how)

    def tensor(values: Any, **how: Any) -> Pinned:
        told.append(how)
        return Pinned()

    monkeypatch.setattr(torch, "tensor", tensor)
    devices.numbers([1.0], torch.float64, torch.device("cuda", 0))
    assert told == [{"dtype": torch.float64, "device": "cpu", "pin_memory": True}, {"non_blocking": True}]
