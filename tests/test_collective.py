"""The pass `collective`, on one process of eight whose collectives are torch's fakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mfsdp
from mfsdp import InvariantError
from mfsdp.ir import ops, printer
from mfsdp.ir.program import Program, base_of, is_functional_collective, view_of
from mfsdp.ir.roles import Lane, role
from tests.helpers.collectives import parallel, programs
from tests.helpers.parallel import reset


@pytest.fixture
def mesh() -> Iterator[Any]:
    with mfsdp.fake_ranks(8, rank=3):
        reset()
        yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))


@pytest.mark.slow
def test_all_are_ours_and_have_a_lane(mesh):
    forward, backward = parallel(mesh)
    for p in (forward, backward):
        assert not [n for n in p.nodes if is_functional_collective(n)]
        found = [n for n in p.nodes if n.target is ops.collective]
        assert found and all(role(n).lane is Lane.TENSOR and role(n).unit == "tp" for n in found)
        for launch in found:
            (wait,) = (u for u in launch.users if u.target is ops.wait)
            readers = [r for r in p.readers(launch) if r is not wait]
            between = p.nodes[p.nodes.index(wait) : p.nodes.index(min(readers))]
            computing = [n.name for n in between if role(n) is None and view_of(n) is None]
            assert not computing, f"{launch.name} is waited for before {computing}"
    text = printer.render(backward, "assign_groups")
    assert "; C G R T " in text and ", tp" in text


@pytest.mark.slow
def test_gradients_over_tp_travel_beside_compute(mesh):
    _, backward = parallel(mesh)
    hidden = 0
    for launch in (n for n in backward.nodes if n.target is ops.collective):
        (wait,) = (u for u in launch.users if u.target is ops.wait)
        nodes = backward.nodes
        between = nodes[nodes.index(launch) + 1 : nodes.index(wait)]
        hidden += any(role(n) is None and n.op == "call_function" for n in between)
    assert hidden >= 2  # the norms' weights


class Gathering(nn.Module):
    """A weight that tensor parallelism gathers inside of forward: straight out of the gathered buffer."""

    def __init__(self, mesh: Any):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.weight.redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined]
        return (x @ whole.t()).relu()  # type: ignore[no-any-return]


def early(p: Program) -> None:
    """The hazard put back: the buffer goes while another rank's gather reads it."""
    for free in (n for n in p.nodes if n.target is ops.free):
        launch = next((n for n in p.nodes if n.target is ops.collective), None)
        if launch is not None and base_of(launch.args[0]) is base_of(free.args[0]):  # type: ignore[arg-type]
            p.move([free], launch.next)


def test_what_a_collective_reads_lives_until_its_wait(mesh):
    def step(run: Any) -> None:
        run(torch.randn(3, 6)).sum().backward()

    def build() -> nn.Module:
        return mfsdp.fully_shard(Gathering(mesh["tp"]), mesh=mesh)

    forward, _ = programs(build(), step)
    free = next(n for n in forward.nodes if n.target is ops.free)
    launch = next(n for n in forward.nodes if n.target is ops.collective)
    (wait,) = (u for u in launch.users if u.target is ops.wait)
    assert wait < free
    reset()
    with pytest.raises(Exception) as caught:
        programs(build(), step, ("early", early))
    cause: Any = caught.value
    while cause is not None and not isinstance(cause, InvariantError):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    assert isinstance(cause, InvariantError) and cause.invariant in (5, 11), caught.value


class Own(nn.Module):
    """A model with collectives of its own: one of a kind that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = fc.all_reduce(self.linear(x), "max", dist.group.WORLD)
        return y + fc.all_reduce(x, "product", dist.group.WORLD)  # type: ignore[no-any-return]


def test_what_is_not_known_stays(mesh):
    with torch.no_grad():
        (inference,) = programs(mfsdp.fully_shard(Own(), mesh=mesh["dp_shard"]), lambda run: run(torch.randn(3, 6)))
    left = [n for n in inference.nodes if is_functional_collective(n)]
    assert len(left) == 1 and "product" in str(left[0].args)
    (ours,) = (n for n in inference.nodes if n.target is ops.collective)
    assert printer.text(ours).endswith("max, world")
