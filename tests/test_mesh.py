"""Law 37: every axis of a mesh that was given is used, left to a named other parallelism, or refused."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.dtensor.mesh import axes
from mfsdp.runtime import groups
from tests.helpers.models import CASES, MLP
from tests.helpers.parity import batches, clip_and_step, compiled, error, farthest
from tests.helpers.ranks import Ranks

Names = tuple[str, ...] | None

USED: list[tuple[Names, Any, tuple[int, ...], tuple[int, ...]]] = [
    # names, dp_mesh_dims, the outer axes, the shard axes
    (("dp_outer", "dp_shard"), None, (0,), (1,)),
    (("dp_replicate", "dp_shard"), None, (0,), (1,)),
    (("replicate", "shard"), None, (0,), (1,)),
    (("dp_replicate", "dp_shard_cp"), None, (0,), (1,)),
    (("dp", "fsdp"), None, (0,), (1,)),
    (("one", "another"), None, (0,), (1,)),
    (None, None, (0,), (1,)),
    (("dp_shard", "cp"), None, (), (0, 1)),
    (("cp", "dp_shard"), None, (), (0, 1)),
    (("dp_replicate", "cp"), None, (0,), (1,)),
    (("dp_shard", "tp"), None, (), (0,)),
    (("pp", "dp_shard"), None, (), (1,)),
    (("fsdp", "model"), None, (), (0,)),
    (("anything",), None, (), (0,)),
    (("replicate", "shard", "tp"), None, (0,), (1,)),
    (("dp_replicate", "dp_shard", "cp"), None, (0,), (1, 2)),
    (("dp_replicate", "cp", "dp_shard"), None, (0,), (1, 2)),
    (("pp", "dp_shard", "cp"), None, (), (1, 2)),
    (("data", "model"), "data", (), (0,)),
    (("data", "model"), {"shard": "data"}, (), (0,)),
    (("far", "near", "tp"), ("far", "near"), (0,), (1,)),
    (("far", "near", "tp"), {"replicate": "near", "shard": "far"}, (1,), (0,)),
    (("dp_shard", "dp_replicate"), {"replicate": "dp_replicate", "shard": "dp_shard"}, (1,), (0,)),
    (("dp_shard", "sp"), {"shard": ("dp_shard", "sp")}, (), (0, 1)),
    (("a", "b", "c"), {"shard": ["c", "b"], "replicate": "a"}, (0,), (1, 2)),
    (("a", "b", "c"), {"shard": "c", "replicate": ("b", "a")}, (0, 1), (2,)),
]

REFUSED: list[tuple[Names, Any, str]] = [
    (("dp_shard", "ep"), None, r"axis 'ep' of the mesh.*fully_shard\(experts, mesh=sparse_mesh\['efsdp'\]\)"),
    (("dp_replicate", "dp_shard", "ep"), None, "axis 'ep'"),
    (("dp", "sp"), None, "axis 'sp'.*Ulysses"),
    (("dp_shard", "dp_replicate"), None, "'dp_replicate' has to come before 'dp_shard'.*dp_mesh_dims="),
    (("fsdp", "other"), None, "which axes of the mesh"),
    (("other", "replicate"), None, "which axes of the mesh"),
    (("shard", "fsdp"), None, "which axes of the mesh"),
    (("dp", "tp"), None, "Name the one to shard over 'dp_shard'.*dp_mesh_dims="),
    (("data", "model"), None, "which axes of the mesh"),
    (("dp_outer", "tp"), None, "which axes of the mesh"),
    (("tp", "pp"), None, "which axes of the mesh"),
    (("dp_replicate", "dp_shard", "other"), None, "which axes of the mesh"),
    (None, "dp_shard", r"\['dp_shard'\] are no axes of the mesh of 2 axes without names"),
    (("a", "b"), "c", r"\['c'\] are no axes of the mesh \('a', 'b'\)"),
    (("a", "b"), {"shard": "a", "replicate": "a"}, "an axis is named twice"),
    (("a", "b"), {"replicate": "a"}, "names no axis to shard over.*strategy='no_shard'"),
    (("a", "b"), {"shard": 3}, "give torch's DataParallelMeshDims"),
    (("a", "b"), {"shards": "a"}, "give torch's DataParallelMeshDims"),
    (("a", "b"), 7, "give torch's DataParallelMeshDims"),
    (("dp_shard", "cp"), ("dp_shard", "cp"), "give torch's DataParallelMeshDims"),
    (("dp_shard", "cp"), "dp_shard", r"leaves out \['cp'\]: ranks would train apart"),
    (("dp_replicate", "dp_shard"), "dp_shard", r"leaves out \['dp_replicate'\].*mesh\['dp_shard'\]"),
    (("dp_shard", "ep"), "dp_shard", "axis 'ep'"),
]


def planned(names: Names, rank: int = 0) -> DeviceMesh:
    """A mesh of two ranks along each axis, without process groups."""
    ndim = 2 if names is None else len(names)
    ranks = torch.arange(2**ndim).view((2,) * ndim)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


@pytest.mark.parametrize(("names", "dims", "outer", "shard"), USED)
def test_what_axes_are_for(names, dims, outer, shard):
    """And every rank finds its own place in them, on a mesh for planning."""
    places = set()
    for rank in range(2 ** len(names or "ab")):
        found = axes(planned(names, rank), dims, torch.device("meta"))
        assert (found.outer, found.shard) == (outer, shard)
        at = planned(names, rank).get_coordinate()
        rest = tuple(at[i] for i in range(len(at)) if i not in outer + shard)
        both = found.both().get_coordinate()
        assert both[1] == found.inner().get_coordinate()[0]
        places.add((rest, both, *found.one().get_coordinate()))
    assert len(places) == 2 ** len(names or "ab")


@pytest.mark.parametrize(("names", "dims", "words"), REFUSED)
def test_axes_that_nobody_would_use_are_refused(names, dims, words):
    with pytest.raises(ValueError, match=words):
        mfsdp.fully_shard(MLP(), mesh=planned(names), dp_mesh_dims=dims, device="meta")


def test_axes_of_one_rank_need_no_purpose():
    ranks = torch.arange(2).view(2, 1, 1)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp_shard", "ep", "x"), _init_backend=False, _rank=0)
    assert axes(mesh, None, torch.device("meta")).shard == (0,)


def test_names_without_a_mesh_are_refused():
    with pytest.raises(ValueError, match="dp_mesh_dims='a' names axes of a mesh: give mesh= too"):
        mfsdp.fully_shard(MLP(), dp_mesh_dims="a")
    with pytest.raises(ValueError, match="trace: dp_mesh_dims= is not needed"):
        mfsdp.trace(MLP(), (torch.randn(2, 24),), dp_mesh_dims="a")


def test_ranks_out_of_order_are_refused():
    """Groups of ranks are sorted, meshes need not be: rows would be gathered in another order than they were cut."""
    for ranks in ([1, 0], [[2, 3], [0, 1]], [[1, 0], [3, 2]]):
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
        with pytest.raises(ValueError, match="ranks must ascend along the axes"):
            mfsdp.fully_shard(MLP(), mesh=mesh, device="meta")


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="of later versions of torch")
def test_the_argument_of_fsdp2():
    given = torch.distributed.fsdp.DataParallelMeshDims(shard=("b", "c"), replicate="a")
    found = axes(planned(("a", "b", "c")), given, torch.device("meta"))
    assert (found.outer, found.shard) == ((0,), (1, 2))
    with pytest.raises(ValueError, match="names no axis to shard over"):
        axes(planned(("a", "b")), torch.distributed.fsdp.DataParallelMeshDims(replicate="a"), torch.device("meta"))


@pytest.mark.slow
def test_two_levels_are_planned_as_one_where_nothing_is_cut_between():
    strategy = "optim"
    model, x = torch.nn.Sequential(MLP(), MLP()), (torch.randn(2, 24),)
    two = mfsdp.trace(model, x, mesh_shape=(2, 4), units=[MLP], strategy=strategy)
    one = mfsdp.trace(model, x, world=8, units=[MLP], strategy=strategy)
    for a, b in zip(two, one, strict=True):
        assert [s.listing for s in mfsdp.pipeline.run(a)] == [s.listing for s in mfsdp.pipeline.run(b)]
    assert mfsdp.explain(model, x, mesh_shape=(2, 4), units=[MLP], strategy=strategy, suggest=False).step > 0


# against the unsharded model

_groups: dict[tuple[int, ...], Any] = {}


def mesh_of(names: Names, shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of all ranks. Meshes share process groups, of which this process makes few: gloo's have threads."""
    world = dist.get_world_size()
    if not _groups:
        pairs = [(0, 1), (2, 3), (0, 2), (1, 3)] if world == 4 else []
        for ranks in [*((r,) for r in range(world)), *pairs]:
            _groups[ranks] = dist.new_group(ranks)
        _groups[tuple(range(world))] = dist.group.WORLD
    grid = torch.arange(world).view(shape)
    at = tuple((grid == dist.get_rank()).nonzero()[0].tolist())
    along = [grid[tuple(slice(None) if i == d else n for i, n in enumerate(at))] for d in range(len(shape))]
    groups = [_groups[tuple(ranks.tolist())] for ranks in along]
    mesh = DeviceMesh.from_group(groups, "cpu", grid, mesh_dim_names=names or ("", ""))
    if names is None:
        mesh._mesh_dim_names = None
    return mesh


def together(mesh: DeviceMesh, outer: tuple[int, ...], shard: tuple[int, ...]) -> list[int]:
    """The ranks that a rank is to train with, by the table above."""
    at = mesh.get_coordinate()
    where = tuple(slice(None) if i in outer + shard else at[i] for i in range(mesh.ndim))
    return mesh.mesh[where].flatten().tolist()


def trained(
    used: int, shape: tuple[int, ...], strategy: int, outer_strategy: str, lowering: str, microbatches: int = 1
) -> float:
    """The largest relative error of a parameter after two steps, against the model that sees the batches of all ranks
    that train together: every rank has its own.
    """
    names, dims, outer, shard = USED[used]
    mesh = mesh_of(names, shape)
    case = CASES["mlp"]
    torch.manual_seed(0)
    reference = case.build().double()
    model = copy.deepcopy(reference)
    chosen = outer_strategy if outer and strategy else "no_shard"
    mfsdp.fully_shard(model, units=case.units, mesh=mesh, dp_mesh_dims=dims, strategy=strategy, outer_strategy=chosen)
    run = compiled(model, lowering)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    ranks = together(mesh, outer, shard)
    for step in range(2):
        for m in range(microbatches):
            data = [x.double() for x in batches(case, 10 * step + m)]
            with contextlib.nullcontext() if m == microbatches - 1 else mfsdp.no_sync(model):
                case.loss(run, data[dist.get_rank()]).backward()
            for r in ranks:
                (case.loss(reference, data[r]) / len(ranks)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (model, reference)]
        assert error(norms[0], norms[1]) < 1e-9, f"norms {norms}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return farthest(model, reference)


SHAPES = {1: [(4,)], 2: [(2, 2), (1, 4), (4, 1)], 3: [(2, 2, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1)]}
"""By axes."""


def every(lowering: str, all_shapes: bool) -> dict[str, float]:
    """All uses of axes in the table, each once, in all shapes or one of them in turn, with the four strategies in turn:
    those that are wrong.
    """
    wrong, strategy, seen = {}, 0, set()
    for used, (names, dims, outer, shard) in enumerate(USED):
        what = (len(names or "ab"), outer, shard)
        if what in seen:
            continue
        seen.add(what)
        shapes = SHAPES[len(names or "ab")]
        for shape in shapes if all_shapes else [shapes[len(seen) % len(shapes)]]:
            strategy = (strategy + 1) % 4
            choice = "optim" if outer and strategy % 2 else "no_shard"
            worst = trained(used, shape, strategy, choice, lowering)
            if worst > 1e-9:
                wrong[f"{names} {dims} {shape} {strategy} {choice}"] = worst
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize("all_shapes", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_mesh_of_four_ranks(four_ranks, all_shapes):
    assert four_ranks.run(every, "none", all_shapes, timeout=600) == [{}] * 4


@pytest.mark.dist
@pytest.mark.parametrize(
    ("names", "shape", "strategy"),
    [
        pytest.param(("dp_replicate", "dp_shard"), (1, 4), 0, marks=pytest.mark.exhaustive),
        (("dp_replicate", "dp_shard"), (2, 2), 3),
        pytest.param(("dp_replicate", "dp_shard", "cp"), (2, 2, 1), 1, marks=pytest.mark.exhaustive),
        (("dp_replicate", "dp_shard", "cp"), (2, 1, 2), 2),
        (("dp_shard", "tp"), (2, 2), 3),
    ],
)
def test_compiled(four_ranks, names, shape, strategy):
    used = [n for n, *_ in USED].index(names)
    assert max(four_ranks.run(trained, used, shape, strategy, "optim", "eager", 2, timeout=300)) < 1e-9


# strategies 0 and 1 on two levels


def two_levels(strategy: int) -> torch.nn.Module:
    torch.manual_seed(strategy)
    mesh = mesh_of(("dp_replicate", "dp_shard"), (2, dist.get_world_size() // 2))
    return mfsdp.fully_shard(CASES["mlp"].build(), units=CASES["mlp"].units, mesh=mesh, strategy=strategy)


def flattened(strategy: int, folder: str) -> None:
    """What a user does with a model: looks at its parameters, copies it, saves it, loads it elsewhere."""
    model = two_levels(strategy)
    run = compiled(model, "eager")
    case, world = CASES["mlp"], dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        case.loss(run, batches(case, step)[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = sum(p.to_local().numel() for p in model.parameters())
    told = torch.tensor(held)
    dist.all_reduce(told)
    assert told.item() == sum(p.numel() for p in model.parameters()) * (world if strategy == 0 else 1)
    for p in model.parameters():
        replicated = [isinstance(placement, torch.distributed.tensor.Replicate) for placement in p.placements]
        assert p.device_mesh.size() == world and replicated == [strategy == 0], (p.device_mesh, p.placements)
    whole = [p.full_tensor() for p in model.parameters()]
    twin = copy.deepcopy(model)
    for p, q in zip(twin.parameters(), whole, strict=True):
        assert torch.equal(p.full_tensor(), q) and p.device_mesh.size() == world
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    for other in range(4):
        into = two_levels(other)
        again = torch.optim.AdamW(into.parameters(), lr=1e-2)
        weights, state = get_state_dict(into, again)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=folder)
        set_state_dict(into, again, model_state_dict=weights, optim_state_dict=state)
        for p, q, mine in zip(into.parameters(), whole, model.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
            moments = (again.state[p]["exp_avg"], optimizer.state[mine]["exp_avg"])
            assert torch.equal(*(m.full_tensor() for m in moments))
    norms = mfsdp.norms(model)
    for name, p in model.named_parameters():
        assert error(torch.as_tensor(norms[name]), p.full_tensor().norm()) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 1])
def test_a_model_on_two_levels_that_are_one(four_ranks, tmp_path, strategy):
    four_ranks.run(flattened, strategy, str(tmp_path), timeout=300)


def mixed() -> float:
    """Units with strategies of their own on one two-level mesh."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    reference = case.build().double()
    model = copy.deepcopy(reference)
    mesh = mesh_of(("dp_replicate", "dp_shard"), (2, 2))
    for strategy, block in enumerate(model.blocks):
        mfsdp.fully_shard(block, strategy=strategy, mesh=mesh)
    mfsdp.fully_shard(model, strategy=3, outer_strategy="optim", mesh=mesh)
    run = compiled(model, "eager")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(2):
        for m in (run, reference):
            case.loss(m, batches(case, step)[dist.get_rank()]).backward()
        clip_and_step(model, reference, optimizers, 1e-9)
    return farthest(model, reference)


@pytest.mark.dist
def test_units_with_strategies_of_their_own_on_two_levels(four_ranks):
    assert max(four_ranks.run(mixed, timeout=300)) < 1e-9


class Torch:
    """Groups over NCCL, played by gloo's, and what is asked of torch for them."""

    def __init__(self, config: str, bound: bool):
        self.config, self.bound, self.asked = config, bound, list[str]()

    def __enter__(self) -> Torch:
        self.really = dist.new_group
        options = SimpleNamespace(Options=lambda is_high_priority_stream: "options")
        self.patches = [
            mock.patch.object(dist, "get_backend_config", lambda group=None: self.config),
            mock.patch.object(dist, "ProcessGroupNCCL", options, create=True),
            mock.patch.object(dist, "new_group", self.new_group),
            mock.patch.object(dist, "split_group", self.split_group),
            mock.patch.object(groups, "_lanes", {}),
        ]
        for patch in self.patches:
            patch.start()
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0) if self.bound else None
        return self

    def __exit__(self, *error: Any) -> None:
        dist.group.WORLD.bound_device_id = None
        for patch in self.patches:
            patch.stop()

    def new_group(self, ranks: list[int], backend: str | None = None, pg_options: Any = None, **how: Any) -> Any:
        """Bound, it splits the default group, whose every rank has to call."""
        self.asked.append(f"new {backend} of {list(ranks)}")
        assert not self.bound or len(ranks) == dist.get_world_size(), "other ranks of the default group wait for ever"
        return self.made(ranks, **how)

    def made(self, ranks: list[int], **how: Any) -> Any:
        dist.group.WORLD.bound_device_id = None
        try:
            return self.really(ranks, **how)
        finally:
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0) if self.bound else None

    def split_group(
        self,
        parent: Any,
        ranks: list[list[int]],
        pg_options: Any = None,
        group_desc: str = "",
        backend: str | None = None,
    ) -> Any:
        """Of the parent's ranks, by their places there; as torch 2.14 compares names of backends."""
        if backend is not None and backend not in self.config.split(","):
            raise ValueError(f"Backend mismatch: {backend} of {self.config}")
        (places,) = ranks
        assert places == list(range(parent.size())) and pg_options == "options"
        self.asked.append(f"split {backend} of {dist.get_process_group_ranks(parent)}")
        return self.made(dist.get_process_group_ranks(parent), use_local_synchronization=True, group_desc=group_desc)


def lanes_over_nccl(members: list[int], config: str, bound: bool, number: int) -> list[str]:
    """What is asked of torch for the lanes of a group of some ranks; others of the default group do nothing."""
    dist.distributed_c10d._world.group_count = 1000 * number  # the next test finds all ranks alike
    if dist.get_rank() not in members:
        return []
    group = dist.new_group(members, use_local_synchronization=len(members) < dist.get_world_size())
    with Torch(config, bound) as torch_:
        lanes = groups.lanes_of(str(group.group_name), "cuda")
        assert groups.lanes_of(str(group.group_name), "cuda") == lanes and len({*lanes, str(group.group_name)}) == 3
    for lane in lanes:
        total = torch.ones(1)
        dist.all_reduce(total, group=groups.process_group(lane))
        assert total == len(members) and groups.ranks(lane) == members
    return torch_.asked


@pytest.fixture(scope="module")
def three() -> Iterator[Callable[..., list[Any]]]:
    """Three ranks of this file's own: some of them make groups that others do not know."""
    ranks, numbers = Ranks(3, start="forkserver"), itertools.count(1)
    yield lambda *given: ranks.run(lanes_over_nccl, *given, next(numbers))
    ranks.stop()


@pytest.mark.dist
@pytest.mark.parametrize("nccl", ["nccl", "nccl2", "nccl-legacy"])
@pytest.mark.parametrize("config", ["cuda:{}", "cpu:gloo,cuda:{}"])
def test_lanes_of_a_part_of_the_ranks_are_split_from_its_own_group(three, nccl, config):
    """Where the default group is bound to a device, as every group of torch 2.15's default backend is."""
    for rank, asked in enumerate(three([0, 2], config.format(nccl), True)):
        assert asked == ([] if rank == 1 else [f"split cuda:{nccl} of [0, 2]"] * 2)


@pytest.mark.dist
@pytest.mark.parametrize("nccl", ["nccl", "nccl2"])
@pytest.mark.parametrize(("members", "bound"), [([0, 1, 2], True), ([0, 1, 2], False), ([0, 2], False)])
def test_other_lanes_are_new_groups_of_the_same_backend(three, nccl, members, bound):
    for rank, asked in enumerate(three(members, f"cuda:{nccl}", bound)):
        assert asked == ([f"new {nccl} of {members}"] * 2 if rank in members else [])
