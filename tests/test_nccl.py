"""Ranks over NCCL, on as many GPUs as there are, one if need be (`ranks.on_a_gpu`): ``make gpu``. What runs on ranks is
what other tests run over gloo (`ranks.here`). In the order of how much a failure would tell.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mfsdp
from tests import (
    test_accelerate,
    test_checkpoint,
    test_context_parallel,
    test_desync,
    test_expert_parallel,
    test_gpu,
    test_host,
    test_host_state,
    test_overlapped,
    test_quantize,
    test_runtime_checks,
    test_state_dicts,
    test_step_prefetch,
    test_strategies,
    test_te,
    test_tensor_parallel,
    test_together,
    test_unused,
    test_watchdog,
)
from tests.helpers import parity, strategies
from tests.helpers.ranks import Ranks, on_a_gpu

pytestmark = pytest.mark.dist

BF16 = {"mp_policy": mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)}
NARROW = {"mp_policy": mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)}


def mixed(lowering: str, places: list[str], how: dict[str, Any]) -> float:
    """Losses and gradients in bf16 against the unsharded model's in fp32, by strategy."""
    found = [parity.gradients("gpt", lowering, test_strategies.sharding(place, **how)) for place in places]
    return max(max(worst["loss"], worst["average"]) for worst in found)


def launched_ahead(policy: str, strategy: str) -> tuple[int, bool]:
    """What the forward behind a step takes of its gathers, and whether weights are those without."""
    pair = test_step_prefetch.Pair(policy=test_step_prefetch.POLICIES[policy], strategy=strategy)
    taken = [pair.step(f"step {i}", microbatches=2) for i in range(4)]
    return taken[-1], pair.equal()


def late() -> list[str]:
    """A rank comes late to a step: what each rank says of it. Where the host waits depends on the backend."""

    def sleeps(rank: int) -> None:
        if rank == 1:
            time.sleep(4.0)

    with test_watchdog.logged() as texts:
        test_watchdog.trained(sleeps)
        time.sleep(0.5)
    return [text for text in texts if "mfsdp: rank" in text]


def below(bound: float) -> Callable[[list[Any]], None]:
    def check(found: list[Any]) -> None:
        flat = [x for each in found for x in (each.values() if isinstance(each, dict) else [each])]
        assert max(x[0] if isinstance(x, tuple) else x for x in flat) < bound, found

    return check


def named_late(found: list[Any]) -> None:
    assert any(re.search(r"rank 0 has waited \d s", text) for text in found[0]), found
    assert any("missing: rank 1" in text for text in found[0]), found


def told_apart(found: list[Any]) -> None:
    for text in found:
        assert "would run different collectives (invariant 13)" in text and "'layers.1'" in text, text


def taken(count: int) -> Callable[[list[Any]], None]:
    def check(found: list[Any]) -> None:
        assert found == [(count, True)] * 2

    return check


def said(*words: str) -> Callable[[list[Any]], None]:
    def check(found: list[Any]) -> None:
        for lines in found:
            assert len(lines) == 1 and all(word in lines[0] for word in words), lines

    return check


def nothing(found: list[Any]) -> None:
    assert all(not each for each in found), found


def overlapped_alike(found: list[Any]) -> None:
    assert all(not wrong and same and beside == 2 for wrong, beside, same in found), found


def together_alike(found: list[Any]) -> None:
    assert all(all(same) and wrong < 1e-12 for same, wrong, _ in found), found


def on_the_host(found: list[Any]) -> None:
    assert all(there > 0 for each in found for there in each), found


def resumed(found: list[Any]) -> None:
    for seen in found:
        assert seen["ours"] == pytest.approx(seen["ddp"], rel=1e-3) and seen["far"] < 1e-3 and all(seen["bitwise"])


def cast_before(found: list[Any]) -> None:
    assert found[0] == [{True}, {False}], found


def anything(found: list[Any]) -> None:
    """The function on the ranks has looked."""


ONE, TWO = [*strategies.ONE_LEVEL], [*test_strategies.TWO_LEVELS]
Case = tuple[int, Callable[..., Any], tuple[Any, ...], Callable[[list[Any]], None]]

CASES: dict[str, Case] = {
    # ranks, what runs on each, its arguments (`TMP` is a folder), what has to have come out
    **{f"{p}, three microbatches": (2, test_strategies.parity, (p, "gpt", 3, "eager"), below(1e-8)) for p in ONE},
    "bf16 compute": (2, mixed, ("eager", ONE, BF16), below(5e-2)),
    "bf16 wires": (2, mixed, ("eager", ONE, NARROW), below(5e-2)),
    "Inductor": (2, parity.training, ("gpt", "inductor", 3), below(1e-4)),
    "Inductor, bf16": (2, mixed, ("inductor", ["optim_grads_params", "optim"], BF16), below(5e-2)),
    "Inductor, whole": (2, parity.gradients, ("gpt", "whole"), below(1e-4)),
    "uncompiled": (2, parity.training, ("gpt", "none", 3), below(1e-4)),
    "launched ahead": (2, launched_ahead, ("half", "optim_grads_params"), taken(2)),
    "launched ahead, parameters last": (2, launched_ahead, ("half", "optim"), taken(5)),
    **{f"{p}, two microbatches": (4, test_strategies.parity, (p, "gpt", 2, "eager"), below(1e-8)) for p in TWO},
    "two levels, bf16": (4, mixed, ("eager", TWO, BF16), below(5e-2)),
    "a rank goes another way": (2, test_desync.layers_differ, ("skip",), told_apart),
    "a rank is late": (2, late, (), named_late),
    "tensor parallel": (4, test_tensor_parallel.parity, ("eager",), below(1e-9)),
    "expert parallel, uneven splits": (4, test_expert_parallel.parity, ("eager", 2), below(1e-9)),
    "context parallel": (4, test_context_parallel.parity, (test_context_parallel.Ulysses, "eager"), below(1e-9)),
    "overlapped": (2, test_overlapped.bitwise, ("eager", 3, False), overlapped_alike),
    "together": (2, test_together.losses_and_gradients, ("eager",), together_alike),
    "may_be_unused": (2, test_unused.trained, ({"strategy": 3}, "eager"), below(1e-4)),
    "may_be_unused, two levels": (4, test_unused.trained, ({}, "eager", (2, 2), False, 2), below(1e-4)),
    "check_finite": (
        2,
        test_runtime_checks.trained,
        ("argument", "eager"),
        said("rank 1, step 2", "NaN in argument x"),
    ),
    "check_replicas": (2, test_runtime_checks.apart, (), said("weights of layers.1.down.weight over world")),
    "streamed state": (2, test_host_state.on_ranks, (), nothing),
    "saved on the host": (2, test_host.several, ("eager", "gpt", "dropout"), on_the_host),
    "checkpoints of every kind": (2, test_checkpoint.matrix, ("TMP", "optim_grads_params"), below(1e-9)),
    "full state dicts": (2, test_state_dicts.full_states, ("gpt", "optim_grads_params", True, True), anything),
    "Trainer": (2, test_accelerate.trained, ("TMP",), resumed),
    "FP8 of torchao": (2, test_quantize.torchao_alike, ("rowwise",), anything),
    "FP8 of te.Linear": (2, test_te.trained, ("optim_grads_params", "inductor", "TMP"), cast_before),
}

NEEDS = {
    "Trainer": ("accelerate", "transformers"),
    "FP8 of torchao": ("torchao",),
    "FP8 of te.Linear": ("transformer_engine",),
}

HERE = ("optim_grads_params, three microbatches",)
"""What ordinary tests run over gloo, for this file's sake."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str, int], Ranks]]:
    made: dict[tuple[str, int], Ranks] = {}

    def get(backend: str, world: int) -> Ranks:
        for ranks in [made.pop(key) for key in list(made) if key != (backend, world)]:
            ranks.stop()  # they hold memory of the GPU
        return made.setdefault((backend, world), Ranks(world, backend, "spawn" if backend == "nccl" else "forkserver"))

    yield get
    for ranks in made.values():
        ranks.stop()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "gloo") for name in HERE),
        *(pytest.param(name, "gloo", marks=pytest.mark.slow) for name in ("a rank is late", "launched ahead")),
        *(pytest.param(name, "nccl", marks=[pytest.mark.gpu, pytest.mark.inductor]) for name in CASES),
    ],
)
def test_ranks(pools, tmp_path, name, backend):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    world, function, given, check = CASES[name]
    check(pools(backend, world).run(function, *(str(tmp_path) if x == "TMP" else x for x in given), timeout=120))


@pytest.mark.gpu
@pytest.mark.inductor
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(("wires", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_two_gpus_agree_with_one(pools, wires, bound, segments):
    assert max(pools("nccl", 2).run(test_gpu.parity_on_gpus, wires, segments)) < bound


@pytest.mark.parametrize(("world", "gpus", "shared"), [(2, 2, False), (2, 1, True), (4, 2, True), (4, 8, False)])
def test_ranks_that_share_a_gpu_are_hosts_of_their_own(world, gpus, shared):
    found = [on_a_gpu(rank, world, gpus) for rank in range(world)]
    assert [int(each["LOCAL_RANK"]) for each in found] == [rank % gpus for rank in range(world)]
    assert [each.get("NCCL_HOSTID") for each in found] == [f"host{r}" if shared else None for r in range(world)]
