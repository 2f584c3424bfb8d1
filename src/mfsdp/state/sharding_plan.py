"""Strategies as data: which of parameters, gradients and optimizer state is cut over which axis of the mesh.

    over the shard axis    optimizer and main weights   gradients   parameters
    no_shard         0     whole                        whole       whole
    optim            1     cut                          whole       whole
    optim_grads      2     cut                          cut         whole
    optim_grads_params 3   cut                          cut         cut

Over the outer axis of a two-level mesh only the first two are meant: ``no_shard`` is HSDP, ``optim`` is HFSDP. To a
unit whose own strategy is ``no_shard`` or ``optim`` both axes are one: nothing happens in every program that the faster
links of the shard axis would be for.

The names end here. What follows from them are sizes: over how many ranks programs cut a unit (``world``; gradients are
scattered over them in every backward), over how many more its gradients are reduced (``outer``; at every
synchronisation), and whether parameters are gathered in every program or once per optimizer step. ``no_shard`` and
``optim`` on one axis are the outer half of HSDP and HFSDP, with a shard axis of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..config.layout import Layout
from ..config.options import Precision
from ..config.units import UnitSpec
from ..runtime import groups
from .mesh import Axes
from .shard_spec import layout_rank, local_mesh


@dataclass(frozen=True)
class Cut:
    """What is cut over an axis."""

    params: bool
    grads: bool
    optim: bool


STRATEGIES = {
    "no_shard": Cut(params=False, grads=False, optim=False),
    "optim": Cut(params=False, grads=False, optim=True),
    "optim_grads": Cut(params=False, grads=True, optim=True),
    "optim_grads_params": Cut(params=True, grads=True, optim=True),
}
"""By name; the number of a strategy is its place."""

OUTER = ("no_shard", "optim")


def strategy_name(strategy: str | int) -> str:
    """The name of a strategy that may be given as a number.

    Raises:
        ValueError: there is none.
    """
    names = list(STRATEGIES)
    if isinstance(strategy, int) and not isinstance(strategy, bool) and 0 <= strategy < len(names):
        return names[strategy]
    if strategy in names:
        return str(strategy)
    raise ValueError(f"strategy={strategy!r}: choose one of {list(range(len(names)))} or {tuple(names)}")


@dataclass(frozen=True)
class ShardingPlan:
    """A strategy on the ranks of a mesh.

    ``mesh`` holds the ranks that cut main weights: 1-D, or (outer, shard), where the parts of one outer rank lie beside
    those of the next (rank of the layout: ``shard * outer_size + outer``).
    """

    mesh: DeviceMesh = field(hash=False, compare=False)
    world: int
    """Ranks over which programs cut a unit."""
    outer: int
    """Ranks over which its gradients are reduced besides."""
    groups: tuple[str, str, str, str]
    """Names of process groups: for gathers and for reductions, of the shard axis and of the outer axis."""
    outer_optim: bool
    replica: bool
    copies: DeviceMesh | None = field(default=None, hash=False, compare=False)
    """The ranks that hold everything whole, under ``no_shard``; ``mesh`` is this rank alone then."""
    strides: tuple[int, int] = (1, 0)
    """From one rank to the next along the shard and the outer axis (`UnitSpec.stride`)."""
    beside: tuple[str, ...] = ()
    """Names of the process groups of tensor parallelism in the mesh that was given: the same data, and weights that it
    has not cut are the same too."""

    @staticmethod
    def of(strategy: str, outer_strategy: str, axes: Axes, device: str) -> ShardingPlan:
        """The placement of a strategy.

        Args:
            strategy: its name.
            outer_strategy: that of the outer axis, of no effect beside ``optim``, which cuts over both.
            axes: what is used of the mesh.
            device: type of device, ``"meta"`` where nothing will run.

        Raises:
            ValueError: an outer strategy without an outer axis, or beside ``no_shard``; a mesh without process groups.
        """
        roles, alone, grid = STRATEGIES[strategy], ("", ""), axes.grid()
        if outer_strategy == "optim" and axes.outer and not roles.optim:
            raise ValueError(
                f"outer_strategy='optim' cuts optimizer state, and strategy={strategy!r} keeps it whole: use "
                "strategy='optim', which cuts it over both axes"
            )
        if axes.outer and roles.grads:
            shard, both = axes.inner(), axes.both()
            size, outer = both.size(1), both.size(0)
            cut = outer_strategy == "optim" and outer > 1
            groups = _groups(shard, device) + _groups(both, device)
            strides = _step(grid[0]), _step(grid[:, 0])
            return ShardingPlan(
                both if cut else shard, size, outer, groups, cut, not roles.params and size > 1, strides=strides
            )
        one, step = axes.one(), _step(grid.flatten().sort()[0])
        size = one.size()
        if outer_strategy == "optim" and not axes.outer and size > 1:
            raise ValueError("outer_strategy='optim' needs a mesh with an outer axis, (dp_outer, dp_shard)")
        over = _groups(one, device)
        if roles.grads or size == 1:
            return ShardingPlan(one, size, 1, over + alone, False, not roles.params and size > 1, strides=(step, 0))
        if roles.optim:
            return ShardingPlan(one, 1, size, alone + over, True, False, strides=(1, step))
        mine = local_mesh(one.device_type, (1,))
        return ShardingPlan(mine, 1, size, alone + over, False, False, copies=one, strides=(1, step))

    @property
    def ranks(self) -> int:
        """Ranks that train together."""
        return self.world * self.outer

    @property
    def cut(self) -> int:
        """Ranks that cut main weights: what layouts are planned for."""
        return self.world * (self.outer if self.outer_optim else 1)

    @property
    def rank(self) -> int:
        """This rank's number in the layout."""
        return layout_rank(self.mesh)

    def spec(self, layout: Layout, precision: Precision, reshard: bool) -> UnitSpec:
        """How a buffer with that layout is communicated."""
        further = self.outer if self.outer_optim else 1
        return UnitSpec(
            world=self.world,
            group=self.groups[0],
            reduce_group=self.groups[1],
            splits=tuple(n * further for n in layout.splits),
            precision=precision,
            divide=float(self.ranks),
            reshard=reshard,
            outer=self.outer,
            outer_group=self.groups[2],
            outer_reduce_group=self.groups[3],
            outer_optim=self.outer_optim,
            replica=self.replica,
            stride=self.strides[0],
            outer_stride=self.strides[1],
        )


def _step(ranks: torch.Tensor) -> int:
    return int(ranks.diff().max()) if ranks.numel() > 1 else 1


def _groups(mesh: DeviceMesh, device: str) -> tuple[str, str]:
    """Names of the group of a mesh's first axis, and of another over the same ranks.

    Raises:
        ValueError: it has none.
    """
    if mesh.size(0) == 1:
        return "", ""
    if device == "meta":
        name = (mesh.mesh_dim_names or ("plan",))[0]
        return name, f"{name}_reduce"
    try:
        group = mesh.get_group(0).group_name
    except (RuntimeError, AssertionError, KeyError, IndexError) as error:
        raise ValueError(
            f"fully_shard: {mesh} has no process group; make it with torch.distributed.init_device_mesh"
        ) from error
    return groups.lanes_of(group, device)
