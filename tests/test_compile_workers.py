"""Kernels of several graphs compile at the same time; what fails names its graph, and caches get what is complete."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from functorch.compile import config as functorch_config
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import FxGraphCache, LambdaFuture
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import InductorError
from torch._inductor.utils import fresh_cache

import mfsdp
from tests.helpers.parity import error

LOG = list[str]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[LOG]:
    """What Inductor does, in order, with two workers: hands out a kernel, waits, and what caches get."""
    log: LOG = []

    def noted(owner: Any, name: str, word: str) -> None:
        before = getattr(owner, name)

        def call(*args: Any) -> Any:
            log.append(word)
            return before(*args)

        monkeypatch.setattr(owner, name, staticmethod(call) if owner is FxGraphCache else call)

    noted(AsyncCompile, "cpp_pybinding", "kernel")
    noted(AsyncCompile, "_wait_futures", "wait")
    noted(FxGraphCache, "_write_to_local_cache", "kept")
    torch._dynamo.reset()
    with inductor_config.patch(compile_threads=2):
        yield log
    torch._dynamo.reset()


def layers() -> nn.Module:
    torch.manual_seed(0)
    activations = (nn.GELU(), nn.Tanh(), nn.SiLU())
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), activation) for activation in activations))


def sharded(model: nn.Module) -> tuple[nn.Module, Any]:
    mfsdp.fully_shard(model, units=["0", "1", "2"])
    return model, torch.compile(model, backend="mfsdp", dynamic=False)


@pytest.mark.inductor
def test_all_kernels_are_handed_out_before_one_is_waited_for(log):
    reference = layers()
    model, run = sharded(copy.deepcopy(reference))
    x = torch.randn(2, 16)
    with functorch_config.patch(enable_autograd_cache=False):
        loss = run(x).square().sum()
        forward = [word for word in log if word != "kept"]
        log.clear()
        loss.backward()
        backward = [word for word in log if word != "kept"]
    for phase in (forward, backward):
        first = phase.index("wait")
        assert first > 1 and set(phase[:first]) == {"kernel"} and set(phase[first:]) == {"wait"}, phase
    assert backward.count("wait") > 1
    want = reference(x).square().sum()
    want.backward()
    assert error(loss, want) < 1e-5
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(p.grad.full_tensor(), q.grad) < 1e-5


@pytest.fixture
def idle(log: LOG, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], Any]]]:
    """Caches of its own, and kernels that no compiler sees: what waits for them calls these instead."""
    pick_vec_isa()  # which needs a compiler, once
    kernels: list[Callable[[], Any]] = []

    def pybinding(self: AsyncCompile, types: list[str], code: str) -> LambdaFuture:
        log.append("kernel")
        return LambdaFuture(kernels[min(log.count("kernel"), len(kernels)) - 1])

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", pybinding)
    with fresh_cache():
        yield kernels


def nothing() -> Any:
    return lambda *args: None


def entries() -> int:
    return sum(1 for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).glob("fxgraph/**/*") if path.is_file())


@pytest.mark.inductor
def test_caches_get_a_graph_behind_its_kernels(log, idle):
    """And a second start finds it there."""
    idle.append(nothing)
    for hits in range(2):
        counters.clear()
        torch._dynamo.reset()
        _, run = sharded(layers())
        del log[:]
        run(torch.randn(2, 16)).square().sum().backward()
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        if not hits:
            # forward, then backward: each graph behind its kernels, and the program behind all of them
            letters = "".join({"kernel": "k", "wait": "w", "kept": "e"}[word] for word in log)
            assert re.fullmatch("kk+(we)+ekk+(we)(we)+e", letters), log
            assert entries() == log.count("kept")


@pytest.mark.inductor
def test_a_kernel_that_does_not_compile(log, idle):
    """Its stretch is named, caches get nothing of it, and the next attempt compiles it."""

    def broken() -> Any:
        raise RuntimeError("no such instruction")

    idle += [nothing, broken]
    _, run = sharded(layers())
    with pytest.raises(InductorError, match="RuntimeError: no such instruction") as raised:
        run(torch.randn(2, 16))
    assert any("mfsdp: while Body" in note and ", the subgraph from " in note for note in raised.value.__notes__)
    idle[:] = [nothing]
    run(torch.randn(2, 16)).square().sum().backward()
