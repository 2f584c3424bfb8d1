"""One process of eight, whose collectives are torch's fakes: real programs, with slots, casts and packs, on one device.

What it shows on a GPU, no other test shows there with a single one: a world of one gathers nothing.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.dtensor.mesh import axes
from mfsdp.runtime import instrumentation, static_buffers
from tests.helpers.models import GPT, Block

WORLD = 8
PLACES: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": 0},
    "optim": {"strategy": 1},
    "optim_grads": {"strategy": 2},
    "optim_grads_params": {"strategy": 3},
    "kept": {"strategy": 3, "reshard_after_forward": False},
    "hsdp": {"strategy": 3, "mesh": (2, 4)},
    "hfsdp": {"strategy": 3, "mesh": (2, 4), "outer_strategy": "optim"},
}
LOWERINGS = [
    ("cpu", "eager"),
    pytest.param("cuda", "eager", marks=pytest.mark.gpu),
    pytest.param("cuda", "inductor", marks=[pytest.mark.gpu, pytest.mark.inductor]),
]


@pytest.fixture
def eight() -> Iterator[None]:
    static_buffers.reset()
    with mfsdp.fake_ranks(WORLD, rank=3):
        yield
    static_buffers.reset()


class Counted:
    """Counts programs and their operations as they run, and rooms that were not in the static buffer that was meant."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.operations: Counter[str] = Counter()
        self.missed: list[str] = []
        room = static_buffers.room

        def noted(slot: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            out = room(slot, numel, dtype, device)
            static = static_buffers._slots.get((device, slot))
            if slot and (static is None or out.untyped_storage().data_ptr() != static.storage.data_ptr()):
                self.missed.append(slot)
            return out

        monkeypatch.setattr(static_buffers, "room", noted)

    def program(self, outline: Any, run: Any, args: list[Any]) -> Any:
        self.operations["program"] += 1
        return run(args)

    def operation(self, name: str, kernel: Any, args: tuple[Any, ...]) -> Any:
        self.operations[name.partition(" ")[0]] += 1
        return kernel(*args)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "lowering"), LOWERINGS)
@pytest.mark.parametrize(
    "place",
    [p if p in ("optim_grads_params", "hfsdp") else pytest.param(p, marks=pytest.mark.exhaustive) for p in PLACES],
)
def test_steps_of_one_of_eight_ranks(eight, monkeypatch, device, lowering, place):
    arguments = dict(PLACES[place])
    if "mesh" in arguments:
        arguments["mesh"] = init_device_mesh(device, arguments["mesh"], mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = GPT(tied=False, width=64).to(device)
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    mfsdp.fully_shard(model, units=[Block], mp_policy=policy, **arguments)
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(31, (4, 8), device=device)
    counted, reserved, static = Counted(monkeypatch), [], []
    for _ in range(4):
        counted.operations.clear()
        with instrumentation.observed(counted):
            loss = run(ids).float().square().mean()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss) and torch.isfinite(norm)
        del loss
        static.append(static_buffers.sizes())
        reserved.append(torch.cuda.memory_reserved() if device == "cuda" else 0)
    assert not counted.missed, "a static buffer was still in use"
    assert static[1] == static[-1] and len(set(reserved[2:])) == 1, f"memory grows: {static}, {reserved}"
    did = counted.operations
    assert did["wait"] and did["pack"] and did["accumulate"] == 3, did
    assert did["all_gather"] == {"optim_grads_params": 6, "hsdp": 6, "hfsdp": 6, "kept": 3}.get(place, 0), did
    assert did["refresh"] == (3 if place in ("optim", "optim_grads", "hfsdp") else 0), did
    assert did["reduce_scatter"] == {"no_shard": 0, "hfsdp": 6}.get(place, 3), did
    assert did["all_reduce"] == (3 if place in ("no_shard", "hsdp") else 0), did


@pytest.mark.slow
def test_a_graph_break_affects_only_calls_of_its_kind(eight, monkeypatch):
    """A step stays two programs where evaluation breaks, before or after the step was compiled."""
    counted = Counted(monkeypatch)
    model, other, broken = (with_norm(norm) for norm in (BrokenInEvaluation, nn.LayerNorm, Broken))
    for trains_first in (True, False):
        torch._dynamo.reset()
        assert not trains_first or ran(model, counted) == (2, 2)
        programs, _ = ran(model.eval(), counted)
        assert programs > 1, "it did not break"
        assert ran(model.train(), counted) == ran(other, counted) == (2, 2)
    programs, accumulated = ran(broken, counted)
    assert programs > 2 and accumulated == 1
    _, accumulated = ran(other, counted)
    assert accumulated == 1, "a break affects other models of the class no more: docs/guides/compile.md says it does"
    torch._dynamo.reset()
    assert ran(other, counted) == (2, 2)


def with_norm(norm: type[nn.Module]) -> nn.Module:
    model = GPT(tied=False, width=24, layers=1)
    model.norm = norm(24)
    return mfsdp.fully_shard(model, units=[Block])


def ran(model: nn.Module, counted: Counted) -> tuple[int, int]:
    """Returns how many programs a step or an evaluation runs, and how many of their operations accumulate."""
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    counted.operations.clear()
    with instrumentation.observed(counted), torch.set_grad_enabled(model.training), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mfsdp: .* outside of a compiled graph")
        out = run(torch.randint(31, (4, 8))).square().mean()
        if model.training:
            out.backward()
    return counted.operations["program"], counted.operations["accumulate"]


class Broken(nn.LayerNorm):
    """A norm that Dynamo cannot trace as one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class BrokenInEvaluation(Broken):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.LayerNorm.forward(self, x) if self.training else super().forward(x)


@pytest.mark.slow
def test_a_program_says_which_static_buffers_it_needs(eight, monkeypatch):
    """Before it begins: on a GPU they are made then."""
    torch._dynamo.reset()  # other tests of this process compile the same forward
    reserved: list[dict[str, int]] = []
    monkeypatch.setattr(
        static_buffers, "reserve", lambda rooms: reserved.append({name: n for (_, name), n in rooms.items()})
    )
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(tied=False, width=64), units=[Block])
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager"})
    loss = run(torch.randint(31, (4, 8))).square().mean()
    assert len(reserved) == 1 and reserved[0] == static_buffers.sizes()
    loss.backward()
    assert len(reserved) == 2 and {**reserved[0], **reserved[1]} == static_buffers.sizes()
    assert {name[0] for name in reserved[1]} == {"p", "g"}


@pytest.mark.parametrize(
    ("names", "inner", "outer", "one"),
    [
        (("dp_replicate", "dp_shard", "tp"), [1, 3], [3, 7], [1, 3, 5, 7]),
        (("dp_replicate", "dp_shard", "cp"), [0, 1, 2, 3], [3, 7], list(range(8))),
        (("pp", "dp_replicate", "dp_shard"), [2, 3], [1, 3], [0, 1, 2, 3]),
        (("dp_replicate", "tp", "dp_shard"), [2, 3], [3, 7], [2, 3, 6, 7]),
    ],
)
def test_groups_of_the_axes_of_rank_three(eight, names, inner, outer, one):
    """The ranks of process groups are those of the meshes, in their order."""
    found = axes(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names), None, torch.device("cpu"))
    both = found.both()
    for mesh, dim, ranks in ((found.inner(), 0, inner), (both, 0, outer), (both, 1, inner), (found.one(), 0, one)):
        assert dist.get_process_group_ranks(mesh.get_group(dim)) == ranks
        assert ranks[mesh.get_coordinate()[dim]] == 3
    assert found.one() == found.one() and found.both() == both, "nothing is made twice"


def test_axes_as_one_are_in_the_order_of_their_group(eight):
    """Over [[0, 2], [1, 3]] ranks ascend along both axes, and not along both as one."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "dp_replicate"))
    found = axes(mesh, {"shard": "dp_shard", "replicate": "dp_replicate"}, torch.device("cpu"))
    assert found.both().mesh.tolist() == [[0, 2], [1, 3]] and found.both().get_coordinate() == (1, 1)
    assert found.one().mesh.tolist() == dist.get_process_group_ranks(found.one().get_group()) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, told", [(("pp", "dp_shard"), "4 ranks [4]"), (("dp_outer", "dp_shard"), "8 ranks [2, 4]")]
)
def test_a_sharded_model_is_explained_over_its_mesh(eight, names, told):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    model = mfsdp.fully_shard(GPT(layers=1), mesh=mesh, units=[Block])
    report = mfsdp.explain(model, (torch.zeros(1, 4, dtype=torch.int64),), suggest=False)
    held = {e.name: e.nbytes for e in report.ledger.entries}
    units = [m._mfsdp_unit for m in model.modules() if isinstance(m, mfsdp.FSDPModule)]
    assert held["main weights"] == sum(b.weights.main.nbytes for unit in units for b in unit.buffers)
    assert f"on {told}" in str(report)
    other = mfsdp.explain(model, (torch.zeros(1, 4, dtype=torch.int64),), world=2, suggest=False)
    assert "on 2 ranks [2]" in str(other)


def test_a_mesh_without_names(eight):
    mesh = init_device_mesh("cpu", (2, 4))
    found = axes(mesh, None, torch.device("cpu"))
    assert dist.get_process_group_ranks(found.inner().get_group()) == [0, 1, 2, 3]
    assert dist.get_process_group_ranks(found.both().get_group(0)) == [3, 7]
    assert found.one().get_group() is found.one().get_group() is dist.group.WORLD


class Layers(nn.Module):
    """Equal layers in plain Python: Dynamo compiles one, and calls that program for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = torch.tanh(layer(x))
        return x


class Names:
    """What operations are called as they run."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def program(self, outline: Any, run: Any, args: list[Any]) -> Any:
        return run(args)

    def operation(self, name: str, kernel: Any, args: tuple[Any, ...]) -> Any:
        self.seen.append(name)
        return kernel(*args)


@pytest.mark.slow
def test_operations_are_called_after_the_unit_that_they_are_of(eight):
    """Also where equal layers share a program."""
    model = mfsdp.fully_shard(Layers(), units=["layers.*"])
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": "eager"})
    with instrumentation.observed(names := Names()):
        run(torch.ones(2, 16)).sum().backward()
    for verb, order in (("all_gather", (0, 1, 2)), ("accumulate", (2, 1, 0))):
        assert [n for n in names.seen if n.startswith(verb)][:3] == [f"{verb} layers.{i}" for i in order]
