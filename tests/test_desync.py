"""Desync: ranks whose collectives differ raise an error that names units, on every rank; none hangs."""

from __future__ import annotations

import contextlib
import copy
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.runtime import desync, groups
from mfsdp.runtime.desync import DesyncError, Fingerprint, GroupState
from tests.helpers.desync import Wire, said, throwaway
from tests.helpers.parity import averaged, error, whole
from tests.helpers.ranks import here

EAGER = {"lowering": "eager"}


class Layers(nn.Module):
    """Equal layers; one of them may be left out, and the order may be turned."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.skip: int | None = None
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(enumerate(self.layers))
        for i, layer in reversed(layers) if self.turned else layers:
            if i != self.skip:
                x = torch.tanh(layer(x))
        return x


class Branches(nn.Module):
    """A branch on data, which Dynamo cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if x.sum() > 0 else self.a(self.b(x))


def compiled_layers(**sharding: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Layers().to(here()), units=["layers.*"], **{"mesh": throwaway(), **sharding})
    return model, torch.compile(model, backend="mfsdp", options=EAGER)


def layers_differ(how: str) -> str:
    model, run = compiled_layers()
    model.skip, model.turned = (1 + dist.get_rank(), False) if how == "skip" else (None, dist.get_rank() == 1)
    return said(lambda: run(torch.ones(2, 4, device=here())).sum().backward())


@pytest.mark.dist
@pytest.mark.parametrize("how", ["skip", "turned"])
def test_equal_layers_are_not_the_same_layer(two_ranks, how):
    for rank, text in enumerate(two_ranks.run(layers_differ, how)):
        ours, theirs = ("'layers.1'", "'layers.2'") if how == "skip" else ("'layers.0'", "'layers.2'")
        named = [ours, theirs] if how == "turned" else [theirs, ours]
        assert "would run different collectives (invariant 13)" in text, text
        assert f"unit {named[rank]} of Layers" in text.split("->")[1].split("\n")[0], text
        assert f"unit {named[1 - rank]} of Layers" in text.split("->")[1].split("\n")[1], text


class Pieces(Layers):
    """The same in plain Python: Dynamo compiles one layer, and calls that program for all, which are equal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.skip:
                torch._dynamo.graph_break()
                x = torch.tanh(layer(x))
        return x


def pieces(strategy: int) -> str:
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Pieces(4), units=["layers.*"], mesh=throwaway(), strategy=strategy)
    run = torch.compile(model, backend="mfsdp", options=EAGER)
    run(torch.ones(2, 4)).sum().backward()
    model.skip = 1 + dist.get_rank()
    return said(lambda: run(torch.ones(2, 4)).sum().backward())


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 3])
def test_equal_layers_that_share_a_program_are_told_apart(two_ranks, strategy):
    for rank, text in enumerate(two_ranks.run(pieces, strategy)):
        assert "(invariant 13)" in text and "'layers.1'" in text and "'layers.2'" in text, text
        assert f"rank {rank}" in text.split("->")[1], text


def known_programs() -> str:
    """Both programs have run on both ranks before; one rank's data says one, the other's the other."""
    model, run = compiled_layers()
    for skip in (1, 2, 1):
        model.skip = skip
        run(torch.ones(2, 4)).sum().backward()
    model.skip = 1 + dist.get_rank()
    return said(lambda: run(torch.ones(2, 4)).sum().backward())


@pytest.mark.dist
def test_programs_that_ran_before_are_compared_every_time(two_ranks):
    for text in two_ranks.run(known_programs):
        assert "(invariant 13)" in text and "'layers.1'" in text and "'layers.2'" in text, text


def one_compiles() -> str:
    """One rank meets something new, the other runs what it has."""
    model, run = compiled_layers()
    run(torch.ones(2, 4)).sum().backward()
    model.skip = 2 if dist.get_rank() == 0 else None
    return said(lambda: run(torch.ones(2, 4)).sum().backward())


@pytest.mark.dist
def test_a_rank_that_compiles_meets_one_that_does_not(two_ranks):
    for text in two_ranks.run(one_compiles):
        assert "(invariant 13)" in text and "nothing more" in text and "'layers.2'" in text, text


def branches(kind: str) -> str:
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Branches(), units=["a", "b"], mesh=throwaway())
    run = torch.compile(model, backend="mfsdp", options=EAGER) if kind == "compiled" else model
    sign = 1 if dist.get_rank() == 0 else -1
    return said(lambda: run(sign * torch.ones(2, 4)))


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["compiled", "uncompiled"])
def test_gathers_of_the_eager_path_are_compared(two_ranks, kind):
    for rank, text in enumerate(two_ranks.run(branches, kind)):
        mine, other = ("a", "b") if rank == 0 else ("b", "a")
        lines = text.splitlines()
        assert any(f"rank {rank}: " in line and f"unit '{mine}' of Branches" in line for line in lines), text
        assert any(f"rank {1 - rank}: " in line and f"unit '{other}' of Branches" in line for line in lines), text


def alone(what: str) -> str:
    """Rank 0 does something by itself; the other trains on."""
    model, run = compiled_layers()
    run(torch.ones(2, 4)).sum().backward()

    def evaluate() -> None:
        with torch.no_grad():
            model.skip = 0
            run(torch.ones(2, 4))

    something = {
        "evaluation": evaluate,
        "full_tensor": lambda: model.layers[2].weight.full_tensor(),
        "gradient": lambda: model.layers[2].weight.grad.full_tensor(),
        "norm": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "summon": lambda: mfsdp.summon_full_params(model).__enter__(),
    }[what]
    train = lambda: run(torch.ones(2, 4)).sum().backward()  # noqa: E731
    if what == "gradient":
        train = lambda: model.layers[2].weight.full_tensor()  # noqa: E731
    return said(something if dist.get_rank() == 0 else train)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("evaluation", "Layers inference"), ("full_tensor", "full_tensor of weight"), ("norm", "norms of 6 tensors"),
        ("summon", "gather of main weights of unit 'layers.0' of Layers"),
    ],
)  # fmt: skip
def test_what_one_rank_does_alone(two_ranks, what, words):
    for rank, text in enumerate(two_ranks.run(alone, what)):
        assert f"rank 0 {words}" in text and "rank 1 Layers forward" in text, (rank, text)


@pytest.mark.dist
def test_a_gradient_does_not_meet_its_parameter(two_ranks):
    for text in two_ranks.run(alone, "gradient"):
        assert "rank 0 full_tensor of a tensor like weight[4, 4]" in text and "full_tensor of weight[4, 4]" in text, (
            text
        )


def everywhere(kind: str, strategy: int) -> float:
    """What ranks may do differently stays right: shapes of their own, programs of their own without collectives."""
    torch.manual_seed(0)
    reference = Layers()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["layers.*"], strategy=strategy)
    run = torch.compile(model, backend="mfsdp", options=EAGER) if kind == "compiled" else model
    for step in range(3):
        x = torch.randn(2 + step * dist.get_rank(), 4)
        for m in (run, reference):
            m(x).sum().backward()
        if dist.get_rank() == step % 2:
            torch.compile(nn.Linear(4, 4), backend="mfsdp", options=EAGER)(x)
    averaged(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(whole(p.grad), q.grad) for p, q in pairs)


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "strategy"), [("compiled", 0), ("compiled", 3), ("uncompiled", 1), ("uncompiled", 2)])
def test_ranks_in_step_are_left_alone(two_ranks, kind, strategy):
    assert max(two_ranks.run(everywhere, kind, strategy)) < 1e-5


def one_keeps_back(kind: str, strategy: int) -> str:
    """Rank 1 is under no_sync, the other synchronises."""
    model, run = compiled_layers(strategy=strategy)
    run = run if kind == "compiled" else model
    keeps = dist.get_rank() == 1

    def step() -> None:
        with mfsdp.no_sync(model, hold=True) if keeps else contextlib.nullcontext():
            run(torch.ones(2, 4)).sum().backward()
        run(torch.ones(2, 4)).sum().backward()

    if strategy == 3:  # otherwise the programs differ, and are compared as such
        with mfsdp.no_sync(model, hold=True):
            pass
    return said(step)


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "strategy"), [("compiled", 0), ("compiled", 3), ("uncompiled", 1)])
def test_one_rank_that_keeps_gradients_back(two_ranks, kind, strategy):
    for text in two_ranks.run(one_keeps_back, kind, strategy):
        assert "(invariant 13)" in text and "unreduced under no_sync" in text and "layers.2" in text, text


def one_of_four(kind: str, skip: bool) -> str:
    """Rank 0 leaves out a layer, where rank 1 gathers it: ranks 2 and 3 meet them over the outer axis alone."""
    ranks = torch.arange(4).view(2, 2)
    groups = [[dist.new_group(part) for part in cut.tolist()][at] for cut, at in
              ((ranks.T, dist.get_rank() % 2), (ranks, dist.get_rank() // 2))]  # fmt: skip
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("dp_outer", "dp_shard"))
    model, run = compiled_layers(mesh=mesh)
    run = run if kind == "compiled" else model
    run(torch.ones(2, 4)).sum().backward()
    if skip and dist.get_rank() == 0:
        model.skip = 1
    return said(lambda: [run(torch.ones(2, 4)).sum().backward() for _ in range(2)])


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["compiled", "uncompiled"])
def test_ranks_that_share_only_the_outer_axis_are_told(four_ranks, kind):
    assert four_ranks.run(one_of_four, kind, False) == ["no error"] * 4
    for text in four_ranks.run(one_of_four, kind, True, timeout=60):
        assert "rank 0" in text and "(invariant 13)" in text, text


def never_comes() -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    _, run = compiled_layers(mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))
    if dist.get_rank() == 1:
        return "went elsewhere"
    return said(lambda: run(torch.ones(2, 4)))


@pytest.mark.dist
def test_a_rank_that_never_comes(two_ranks):
    text, _ = two_ranks.run(never_comes)
    assert "rank 0 has lost the other ranks at wait layers.0 of Layers forward" in text and "Timed out" in text, text


# exceptions


@torch.library.custom_op("toy::trip", mutates_args=())
def trip(x: torch.Tensor) -> torch.Tensor:
    if _trips.get("now"):
        _trips["now"] = False
        raise ValueError("out of memory")
    return x.clone()


@trip.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


trip.register_autograd(lambda ctx, grad: trip(grad))
_trips: dict[str, bool] = {}


class Trips(Layers):
    """May raise between its layers, in forward or in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = trip(torch.tanh(layer(x)))
        return x


def swallowed(phase: str, who: list[int], pause: float) -> tuple[str, float]:
    """Some ranks raise inside of a program, catch it, and go on with the next batch."""
    desync.PATIENCE = pause
    torch.manual_seed(0)
    reference = Trips(4)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["layers.*"], mesh=throwaway())
    run = torch.compile(model, backend="mfsdp", options=EAGER)
    x = torch.randn(3, 4)
    run(x).sum().backward()
    trips = dist.get_rank() in who

    def steps() -> None:
        try:
            _trips["now"] = trips and phase == "forward"
            loss = run(x).sum()
            _trips["now"] = trips and phase == "backward"
            loss.backward()
        except ValueError as error:
            assert "out of memory" in str(error)
        model.zero_grad()
        run(x).sum().backward()

    try:
        text = said(steps)
    finally:
        desync.PATIENCE, _trips["now"] = 10.0, False
    if text != "no error":
        return text, 0.0
    reference(x).sum().backward()
    averaged(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return text, max(error(whole(p.grad), q.grad) for p, q in pairs)


@pytest.mark.dist
@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.exhaustive), "backward"])
def test_an_exception_that_one_rank_swallows(two_ranks, phase):
    for text, _ in two_ranks.run(swallowed, phase, [1], 2.0):
        assert "the ranks are out of step (invariant 50)" in text, text
        assert f"rank 1 left Trips {phase} at or after " in text and "(ValueError: out of memory)" in text, text


@pytest.mark.dist
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_that_all_ranks_swallow(two_ranks, phase):
    for text, worst in two_ranks.run(swallowed, phase, [0, 1], 10.0):
        assert text == "no error" and worst < 1e-6, (text, worst)


def left_out(kind: str, mesh: Any, again: bool) -> str:
    """An optimizer's step that rank 1 leaves out, then all of them, behind an exception that it swallows."""
    more = {} if mesh is None else {"mesh": dist.init_device_mesh("cpu", mesh, mesh_dim_names=("dp_outer", "dp_shard"))}
    model, run = compiled_layers(**more)
    run = model if "uncompiled" in kind else run
    optimizer = torch.optim.Adam(model.parameters(), fused=kind == "fused")
    if "flat" in kind:
        mfsdp.fully_shard_optimizer(
            optimizer, ahead=False
        )  # what it launches ahead is told apart as such (invariant 13)

    def steps() -> None:
        for step in range(3):
            run(torch.ones(2, 4)).sum().backward()
            if step != 1 or not (again or dist.get_rank() == 1):
                optimizer.step()
            optimizer.zero_grad()

    return said(steps)


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "mesh"), [("plain", None), ("fused", (2, 1)), ("uncompiled, flat", None)])
def test_a_step_of_the_optimizer_that_one_rank_leaves_out(ranks, kind, mesh):
    assert ranks.run(left_out, kind, mesh, True) == ["no error"] * 2
    for text in ranks.run(left_out, kind, mesh, False):
        counts = re.search(
            r"rank (\d) has taken (\d) steps of its optimizers, and rank (\d) (\d) \(invariant 66\)", text
        )
        assert counts is not None, text
        steps = {counts[1]: int(counts[2]), counts[3]: int(counts[4])}
        assert steps["0"] == steps["1"] + 1, text


# without ranks


def test_words_that_nobody_waits_for_are_looked_at_when_they_are_there():
    other = 12345
    wire = Wire([None, other, None, None])
    wire.told[f"words/{other}"] = '["other forward", "all_gather u0"]'
    company, mine = GroupState("g", wire), Fingerprint("mine forward", ("all_gather u1",))
    assert company.announce(mine).checked, "the first run of a program waits"
    assert not company.announce(mine).checked
    late = wire.last
    company.announce(mine)
    late.here = True
    with pytest.raises(DesyncError, match="rank 0 mine forward, rank 1 other forward"):
        company.announce(mine)
    with pytest.raises(DesyncError, match="rank 0 mine forward, rank 1 other forward"):
        company.announce(mine)


def test_words_are_waited_for_when_too_many_are_under_way():
    wire = Wire([None] + [5] + [None] * desync.BEHIND * 2)
    company, mine = GroupState("g", wire), Fingerprint("mine", ("all_gather u1",))
    for _ in range(desync.BEHIND + 2):
        company.announce(mine)
    with pytest.raises(DesyncError, match="something that it does not explain"):
        company.announce(mine)


def test_messages_of_two_announcements_have_two_tags():
    company = GroupState("g", Wire([None] * 100))
    tags = {company.announce(Fingerprint("m", (f"u{i % 3}",))).tag for i in range(100)}
    assert len(tags) == 100 and all(1 << 30 <= tag < 1 << 31 for tag in tags)


def with_a_group_of_its_own() -> float:
    """Rank 0 has made a group that nobody else is in, as for logging."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    model = mfsdp.fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    return model.bias.grad.full_tensor().sum().item()


@pytest.mark.dist
def test_ranks_may_be_in_different_numbers_of_groups(two_fresh_ranks):
    assert two_fresh_ranks.run(with_a_group_of_its_own, timeout=60) == [16.0, 16.0]


def test_where_they_may_not_they_are_told(monkeypatch):
    """New groups of some ranks are called after how many each of them is in."""
    says = {1: ["0"], 2: ["another name", "7"]}
    monkeypatch.setattr(groups, "others_that_differ", lambda name, lines: {1: says[len(lines)]})
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError, match=r"rank 1 in 7: a new one would .* after fully_shard"):
        groups._one_name("g", [0, 1], hashed=True)
