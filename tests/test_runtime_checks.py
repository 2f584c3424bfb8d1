"""Options ``check_finite`` and ``check_replicas`` (Note [Runtime checks]), and `mfsdp.checksum`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.config.options import Options
from tests.helpers.ranks import here


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if ", step " in record.getMessage():  # on a busy machine the watch has something to say too
            self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, logger = Logged(), logging.getLogger("mfsdp")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def told(lines: list[str], count: int = 1, seconds: float = 20.0) -> list[str]:
    """Waits for as many lines as all ranks should have."""
    until = time.monotonic() + seconds
    while len(lines) < count and time.monotonic() < until:
        time.sleep(0.05)
    dist.barrier()
    return list(lines)


def model_of(lowering: str = "eager", units: Any = (Block,), **more: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    options = {name: more.pop(name) for name in ("check_finite", "check_replicas", "patience") if name in more}
    model: nn.Module = Net().to(here())
    if units is not None:
        model = mfsdp.fully_shard(model, units=list(units), **more)
    options = {"patience": 0.5, **options}
    run: Any = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering, **options})
    return model, run


def data(step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 8).to(here())


def poison(tensor: torch.Tensor, value: float = float("nan")) -> None:
    with torch.no_grad():
        tensor.view(-1)[3] = value


def trained(what: str, lowering: str, steps: int = 4, at: int = 2, **more: Any) -> list[str]:
    """Trains, and on the second rank something goes wrong in one step."""
    model, run = model_of(lowering, **{"check_finite": 1, **more})
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    mine = dist.get_rank() == 1
    with logged() as lines:
        for step in range(1, steps + 1):
            x = data(step)
            if step == at and what == "argument" and mine:
                poison(x)
            if step == at and what == "weights":
                rows = dict(model.named_parameters())["layers.1.down.weight"].to_local()
                if mine:
                    poison(rows, float("inf"))
            loss = run(x).square().mean()
            if step == at and what == "gradient" and mine:
                loss = loss * float("inf")
            loss.backward()
            optim.step()
            optim.zero_grad()
        return told(lines)


FIRST = {
    "argument": "rank 1, step 2, Net forward: NaN in argument x of the call\n  then in the result of ",
    "weights": "rank 1, step 2, Net forward: Inf in weights of layers.1.down.weight\n  then in ",
    "gradient": "rank 1, step 2, Net backward: NaN in the result of mm in unit '(root)'\n  then in ",
}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "lowering"),
    [
        ("argument", "eager"), ("weights", "eager"), ("gradient", "eager"),
        pytest.param("argument", "stitched", marks=pytest.mark.slow),
        *(pytest.param(*more, marks=pytest.mark.exhaustive)
          for more in (("argument", "whole"), ("weights", "stitched"), ("weights", "whole"),
                       ("gradient", "stitched"), ("gradient", "whole"))),
    ],
)  # fmt: skip
def test_the_first_place_and_its_rank_are_told_once_on_all_ranks(two_ranks, what, lowering):
    for lines in two_ranks.run(trained, what, lowering):
        assert len(lines) == 1 and lines[0].startswith("mfsdp: " + FIRST[what]), lines


def apart(lowering: str = "eager") -> list[str]:
    """Over two axes, or whole on all ranks, one rank's weights drift."""
    two = dist.get_world_size() == 4
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("dp_outer", "dp_shard")) if two else None
    sharding: dict[str, Any] = {"mesh": mesh} if two else {"strategy": "no_shard"}
    model, run = model_of(lowering, check_replicas=2, **sharding)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    with logged() as lines:
        for step in range(1, 5):
            if step == 2:
                rows = dict(model.named_parameters())["layers.1.down.weight"].to_local()
                if dist.get_rank() == 1:
                    with torch.no_grad():
                        rows.view(-1)[0] += 1
            run(data(step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            assert step > 2 or not lines
        return told(lines)


SAID = "step 3, Net forward: weights of layers.1.down.weight over {}, ranks {} differ\n"


@pytest.mark.dist
def test_replicas_that_drift_are_told(two_ranks):
    """Whole on all ranks: in the first step that compares them, behind the one in which they went apart."""
    for (line,) in two_ranks.run(apart):
        assert SAID.format("world", [0, 1]) in line, line


@pytest.mark.dist
def test_replicas_over_the_outer_axis(four_ranks):
    for (line,) in four_ranks.run(apart):
        assert SAID.format("dp_outer", [1, 3]) in line, line


def numbers(lowering: str) -> tuple[list[str], list[torch.Tensor]]:
    """A healthy run, with probes and without."""
    out = []
    for options in ({}, {"check_finite": 2, "check_replicas": 2}):
        model, run = model_of(lowering, **options)
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        with logged() as lines:
            for step in range(3):
                for _ in range(2):
                    with mfsdp.no_sync(model):
                        run(data(step)).square().mean().backward()
                run(data(step)).square().mean().backward()
                optim.step()
                optim.zero_grad()
            out.append((told(lines, 0), mfsdp.checksum(model)))
    return out


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", pytest.param("stitched", marks=pytest.mark.exhaustive)])
def test_a_healthy_run_is_what_it_would_have_been(two_ranks, lowering):
    for (_, without), (lines, with_probes) in two_ranks.run(numbers, lowering):
        assert not lines and without == with_probes


def scaled() -> tuple[list[str], bool]:
    """Gradients that are too large for a moment, as a GradScaler's."""
    model, run = model_of(check_finite=1)
    before = mfsdp.checksum(model)
    with logged() as lines:
        for step in range(1, 7):
            loss = run(data(step)).square().mean()
            (loss * (float("inf") if step in (2, 3, 6) else 1)).backward()
            model.zero_grad()
        return told(lines, 4), mfsdp.checksum(model) == before


@pytest.mark.dist
def test_what_passes_is_told_again_when_it_comes_again(two_ranks):
    for lines, same in two_ranks.run(scaled):
        assert same and len(lines) == 4, lines  # of both ranks, in steps 2 and 6
        assert sorted(line[: len("mfsdp: rank 0, step 2")] for line in lines) == [
            f"mfsdp: rank {rank}, step {step}" for rank in (0, 1) for step in (2, 6)
        ]


def sums(layouts: list[dict[str, Any]]) -> list[Any]:
    out: list[Any] = []
    for given in layouts:
        sharding = dict(given)
        if "mesh" in sharding:
            sharding["mesh"] = init_device_mesh("cpu", sharding["mesh"], mesh_dim_names=("dp_outer", "dp_shard"))
        model, run = model_of(**sharding)
        out.append((mfsdp.checksum(model), mfsdp.checksum(run), mfsdp.checksum(run, each=True)))
    return out


LAYOUTS: list[dict[str, Any]] = [{"units": None}, {}, {"strategy": 0}, {"strategy": 1}, {"units": [nn.Linear]}]


def test_a_checksum_sees_every_bit_and_place():
    torch.manual_seed(0)
    model = Net()
    seen = {mfsdp.checksum(model)}
    weight = model.layers[1].down.weight
    for change in (
        lambda: weight.view(-1)[:2].copy_(weight.view(-1)[:2].flip(0)),
        lambda: weight.copy_(weight.flip(0)),
        lambda: weight.view(-1)[5].copy_(-weight.view(-1)[5]),
        lambda: weight.view(-1)[5].copy_(torch.nextafter(weight.view(-1)[5], torch.tensor(9.0))),
    ):
        with torch.no_grad():
            change()
        seen.add(mfsdp.checksum(model))
    assert len(seen) == 5
    each = mfsdp.checksum(model, each=True)
    with torch.no_grad():
        model.head.bias.add_(1)
    other = mfsdp.checksum(model, each=True)
    assert [name for name in each if each[name] != other[name]] == ["head.bias"]


@pytest.mark.dist
def test_a_checksum_is_the_same_however_weights_are_cut(two_ranks, four_ranks):
    two = two_ranks.run(sums, LAYOUTS)
    four = four_ranks.run(sums, [*LAYOUTS, {"mesh": (2, 2)}, {"mesh": (2, 2), "outer_strategy": "optim"}])
    first = two[0][0]
    assert first[0] == first[1]
    assert all(found == first for rank in (*two, *four) for found in rank)


@pytest.mark.parametrize("value", [-1, True, 1.5, "often", None])
@pytest.mark.parametrize("name", ["check_finite", "check_replicas"])
def test_bad_options(name, value):
    with pytest.raises(ValueError, match=f"option {name}=.*give an integer of at least 0"):
        Options.parse({name: value})
