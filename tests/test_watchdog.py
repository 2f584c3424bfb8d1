"""The watch: a collective that is not complete in time is reported on every rank, and nothing else changes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp.compiler import backend
from mfsdp.config.options import Options
from mfsdp.runtime import execution, groups, watchdog
from tests.helpers.logs import logged
from tests.helpers.ranks import here

# What is said


def state(rank: int, count: int = 3, at: int = 5, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank, "counts": {"g": count}, "groups": {"g": [*range(1000)]},
        "name": "GPT forward", "place": "wait layers.1", "at": at, "line": "wait_1 = wait u1_full", "number": 7,
        "waited": 12.3, "left": ["GPT backward", 2.0], "busy": False, "stack": ["train.py:3 in main: step()"], **more,
    }  # fmt: skip


def test_a_report_names_who_has_not_come():
    late = {3: state(3, count=2, name="", place="", at=-1), 5: state(5, at=2), 6: None}
    assert watchdog.report(state(0), late, 7, watchdog.Settings()).splitlines() == [
        "mfsdp: rank 0 has waited 12 s at wait layers.1 of GPT forward, run 7 of it",
        "    wait_1 = wait u1_full",
        "  4 of 7 ranks have arrived",
        "  missing: rank 3, which left GPT backward 2 s ago, and is at",
        "      train.py:3 in main: step()",
        "  missing: rank 5, which is in wait layers.1 of GPT forward, run 7 of it, at",
        "      train.py:3 in main: step()",
        "  missing: rank 6, which does not answer: it has died, or lets no Python run",
        "  It continues once they arrive, or ends at the process group's timeout; on_stall='raise' would end it now.",
    ]


def test_a_report_of_many_ranks_is_short():
    late: Any = {r: state(r, count=1) for r in [*range(1, 900), 950]}
    lines = watchdog.report(state(0), late, 1000, watchdog.Settings(raises=True)).splitlines()
    assert len(lines) < 20 and lines[-2:] == ["  missing: ranks 5-899, 950", "  The run ends (on_stall='raise')."]


@pytest.mark.parametrize(
    ("theirs", "come"),
    [
        (state(1), True),
        (state(1, at=6), True),
        (state(1, count=4, at=0), True),  # it is further
        (state(1, at=4), False),
        (state(1, count=2, at=9), False),
        (state(1, counts={}), False),  # it has announced nothing yet
        (state(1000, counts={}), True),  # in none of the groups
    ],
)
def test_who_has_come(theirs, come):
    assert watchdog.has_come(state(0), theirs) is come


@pytest.mark.parametrize("value", [0, -1.0, True, "long", float("nan")])
def test_bad_options(value):
    with pytest.raises(ValueError, match="option patience.*give seconds"):
        Options.parse({"patience": value})
    with pytest.raises(ValueError, match="choose 'report' or 'raise'"):
        Options.parse({"on_stall": "end"})


def test_alone_nobody_watches():
    watchdog.begin()
    assert watchdog._watch is None


class Event:
    """A device's: not there yet, at first. Its thread has to be on the device, also when it is freed."""

    here = False

    def __init__(self, on: list[int], index: int):
        self.on, self.index = on, index

    def query(self) -> bool:
        assert self.on[-1] == self.index
        return self.here

    def __del__(self) -> None:
        self.on.append(self.on[-1] if self.on[-1] == self.index else -1)


def test_on_a_device_a_program_waits_until_what_is_behind_it_is_there(monkeypatch):
    on = [0]  # where a thread begins
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: on[-1])
    monkeypatch.setattr(torch.accelerator, "set_device_index", on.append)
    first, second = (execution.Execution(name) for name in ("forward", "backward"))
    events = [Event(on, 3), Event(on, 2)]
    places = [torch.device("cuda", event.index) for event in events]
    execution._behind.extend(zip((first, second), places, events, strict=True))  # type: ignore[arg-type]
    assert execution.waiting() == [(-1, first)]
    events.pop(0).here = True
    assert execution.waiting() == [(-1, second)]
    events.pop().here = True
    assert execution.waiting() == [] and not execution._behind
    assert set(on) == {0, 2, 3}


def test_restarted_processes_do_not_hear_those_before(monkeypatch):
    """torchrun's agent keeps the store; only agents of one node count restarts alike."""
    names = {}
    for nodes, restarts in (("1", "0"), ("1", "1"), ("1", "2"), ("2", "1")):
        monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        names[nodes, restarts] = groups._prefix()
    assert names == {("1", "0"): "mfsdp", ("1", "1"): "mfsdp/1", ("1", "2"): "mfsdp/2", ("2", "1"): "mfsdp"}


# Ranks


def late_batch(seconds: float) -> None:
    time.sleep(seconds)


def trained(
    late: Callable[[int], None], compiled: bool = True, mesh: Any = None, raises: bool = False, **options: Any
) -> list[float]:
    """Losses of three steps, of this rank's own data. One may be late to the third; only there patience is short."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))).to(here())
    more = {"mesh": dist.init_device_mesh("cpu", mesh, mesh_dim_names=("dp_outer", "dp_shard"))} if mesh else {}
    mfsdp.fully_shard(model, units=["0", "1"], **more)
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", **options}) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if step == 2:
            watchdog.settle(options.get("patience", 0.5), raises, options.get("dump"))
            late(dist.get_rank())
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(here())
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def last_comes_late(compiled: bool, mesh: Any, folder: str | None) -> list[str]:
    def late(rank: int) -> None:
        if rank == dist.get_world_size() - 1:
            late_batch(3.0)

    with logged() as texts:
        losses = trained(late, compiled, mesh, **({"dump": folder} if folder else {}))
        time.sleep(0.5)
    with logged():
        assert losses == trained(lambda rank: None, compiled, mesh)
    return [text for text in texts if "mfsdp: rank" in text]


@pytest.mark.dist
@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_late_is_named_on_all_and_waited_for(two_ranks, tmp_path, compiled):
    folder = str(tmp_path) if compiled else None
    answers = two_ranks.run(last_comes_late, compiled, None, folder)
    for rank, texts in enumerate(answers):
        said, *rest = texts
        where = "wait 0 of Sequential forward" if compiled else "gather of unit '0' of Sequential"
        assert re.search(rf"rank 0 has waited \d s at {where}", said), said
        assert ("run 3 of it\n    wait_default = wait u0_full" in said) is compiled
        assert "  1 of 2 ranks have arrived\n  missing: rank 1, which " in said
        assert "in late_batch: time.sleep(seconds)" in said
        assert len(rest) == (rank == 0) and all("rank 0 goes on with" in text for text in rest)
    if compiled:
        stacks = {path.name.partition(".")[2]: path.read_text() for path in tmp_path.glob("stall*.txt")}
        assert stacks.keys() == {"rank0.txt", "rank1.txt"} and "late_batch" in stacks["rank1.txt"]


@pytest.mark.dist
def test_over_two_axes_every_group_says_for_whom_it_waits(four_ranks):
    for texts in four_ranks.run(last_comes_late, True, (2, 2), None):
        said = [text for text in texts if "has waited" in text]
        assert 1 <= len(said) <= 3
        assert any("rank 2 has waited" in text and "  missing: rank 3, which left" in text for text in said)


def ended() -> tuple[str, str, float]:
    """What was logged, what was raised, and how long after the third step had begun."""
    begun = [0.0]

    def late(rank: int) -> None:
        begun[0] = time.monotonic()
        late_batch(5.0 * rank)

    with logged() as texts:
        try:
            trained(late, raises=True, on_stall="raise")
        except RuntimeError as error:
            return texts[0], str(error), time.monotonic() - begun[0]
    return texts[0], "", 0.0


@pytest.mark.dist
def test_a_stall_ends_the_run_where_that_is_asked_for(two_fresh_ranks):
    (told, first, waited), (also, second, _) = two_fresh_ranks.run(ended)
    assert told == also == first == second and "missing: rank 1" in told and "The run ends" in told
    assert 0 < waited < 5, "it did not wait until the other came"


def compiles_long() -> list[str]:
    before = backend._refuse_memory_budget

    def slowly(gm: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(2.5)
        before(gm)

    backend._refuse_memory_budget = slowly
    try:
        with logged() as texts:
            trained(lambda rank: None, patience=0.5)
    finally:
        backend._refuse_memory_budget = before
    return [text for text in texts if "has waited" in text]


@pytest.mark.dist
def test_time_spent_compiling_does_not_count(two_ranks):
    assert two_ranks.run(compiles_long) == [[], []]


def stopped() -> list[str]:
    """Rank 1 lets no Python run: stopped by a signal, until rank 0 has waited enough."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())

    def late(rank: int) -> None:
        if rank == 0:
            os.kill(pids[1], signal.SIGSTOP)

    with logged() as texts:
        other = None
        if dist.get_rank() == 0:
            other = threading.Timer(watchdog.ANSWERS + 4, os.kill, (pids[1], signal.SIGCONT))
            other.start()
        trained(late)
        if other is not None:
            other.join()
    return [text for text in texts if "has waited" in text]


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named_too(two_fresh_ranks):
    texts, _ = two_fresh_ranks.run(stopped)
    assert len(texts) == 1 and "missing: rank 1, which does not answer" in texts[0]


# Exceptions

ENDING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import mfsdp

where, lowering = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
mfsdp.fully_shard(model, units=["0", "1"])
run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}) if lowering == "eager" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def trips(place, step):
    if (place, step, dist.get_rank()) == (where, 2, 1):
        raise MemoryError("no room for 3 GiB")

for step in range(4):
    trips("loader", step)
    out = run(torch.randn(4, 8))
    out.register_hook(lambda grad: trips("backward", step))
    out.square().mean().backward()
    trips("optimizer", step)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "lowering"),
    [
        ("backward", "eager"),
        pytest.param("loader", "none", marks=pytest.mark.exhaustive),
        pytest.param("loader", "eager", marks=pytest.mark.exhaustive),
        pytest.param("optimizer", "none", marks=pytest.mark.exhaustive),
        pytest.param("optimizer", "eager", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_what_ends_one_process_the_others_say(tmp_path, where, lowering):
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{free.getsockname()[1]}", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, where, lowering], env={**os.environ, **address, "RANK": f"{rank}"},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    first, second = (rank.communicate(timeout=100)[1] for rank in ranks)
    assert "MemoryError: no room for 3 GiB" in second and [rank.returncode for rank in ranks] == [1, 1]
    told = first.rpartition("mfsdp: rank 0 has lost the other ranks at ")[2]
    assert "of Sequential " in told and ": rank 1 has ended with MemoryError: no room for 3 GiB" in told, first
    assert 'in trips: raise MemoryError("no room for 3 GiB")' in told
