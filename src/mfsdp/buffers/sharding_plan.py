"""Strategies as data: which of parameters, gradients and optimizer state is cut over which axis of the mesh.

    over the shard axis    optimizer and main weights   gradients   parameters
    no_shard         0     whole                        whole       whole
    optim            1     cut                          whole       whole
    optim_grads      2     cut                          cut         whole
    optim_grads_params 3   cut                          cut         cut

Over the outer axis of a two-level mesh only the first two apply: ``no_shard`` is HSDP, ``optim`` is HFSDP. A unit whose
own strategy is ``no_shard`` or ``optim`` treats both axes as one: none of its collectives runs in every program, which
is what the shard axis's faster links are for.

This module turns the names into sizes: over how many ranks programs cut a unit (``world``; every backward scatters
gradients over them), over how many more its gradients are reduced (``outer``; at every synchronisation), and whether
parameters are gathered in every program or once per optimizer step. On one axis, ``no_shard`` and ``optim`` are the
outer half of HSDP and HFSDP, with a shard axis of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..config.layout import Layout
from ..config.options import Precision
from ..config.units import UnitSpec
from ..dtensor.mesh import Axes
from ..dtensor.shard_spec import layout_rank, local_mesh
from ..runtime import groups

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Names of strategies; a strategy's number is its position. Each cuts one thing more than the one before it."""

OUTER = ("no_shard", "optim")


def strategy_name(strategy: str | int) -> str:
    """Returns a strategy's name, given its name or number.

    Raises:
        ValueError: there is no such strategy.
    """
    if isinstance(strategy, int) and not isinstance(strategy, bool) and 0 <= strategy < len(STRATEGIES):
        return STRATEGIES[strategy]
    if strategy in STRATEGIES:
        return str(strategy)
    raise ValueError(f"strategy={strategy!r}: choose one of {list(range(len(STRATEGIES)))} or {STRATEGIES}")


@dataclass(frozen=True)
class ShardingPlan:
    """A strategy on the ranks of a mesh.

    ``mesh`` holds the ranks that cut main weights: 1-D, or (outer, shard) with the parts of outer ranks adjacent (index
    in the layout: ``shard * outer_size + outer``).
    """

    mesh: DeviceMesh = field(hash=False, compare=False)
    world: int
    """Ranks over which programs cut a unit."""
    outer: int
    """Further ranks over which its gradients are reduced."""
    groups: tuple[str, str, str, str]
    """Names of process groups: for gathers and reductions, of the shard axis, then of the outer axis."""
    outer_optim: bool
    replica: bool
    copies: DeviceMesh | None = field(default=None, hash=False, compare=False)
    """Under ``no_shard``, the ranks that hold everything in full; ``mesh`` is then this rank alone."""
    strides: tuple[int, int] = (1, 0)
    """Distance between ranks along the shard and the outer axis (`UnitSpec.stride`)."""
    beside: tuple[str, ...] = ()
    """Names of the given mesh's tensor-parallel process groups: their ranks have the same data, and equal values of
    weights that TP has not cut.
    """

    @staticmethod
    def of(strategy: str, outer_strategy: str, axes: Axes, device: str) -> ShardingPlan:
        """Places a strategy on a mesh.

        Args:
            strategy: its name.
            outer_strategy: the outer axis's; no effect with ``optim``, which cuts over both axes.
            axes: the axes of the mesh that are used.
            device: device type, ``"meta"`` if nothing will run.

        Raises:
            ValueError: an outer strategy without an outer axis, or with ``no_shard``; a mesh without process groups.
        """
        optim, grads, params = (STRATEGIES.index(strategy) >= number for number in (1, 2, 3))
        alone, grid = ("", ""), axes.grid()
        if outer_strategy == "optim" and axes.outer and not optim:
            raise ValueError(
                f"outer_strategy='optim' cuts optimizer state, and strategy={strategy!r} keeps it whole: use "
                "strategy='optim', which cuts it over both axes"
            )
        if axes.outer and grads:
            shard, both = axes.inner(), axes.both()
            size, outer = both.size(1), both.size(0)
            cut = outer_strategy == "optim" and outer > 1
            groups = _groups(shard, device) + _groups(both, device)
            strides = _step(grid[0]), _step(grid[:, 0])
            replica = not params and size > 1
            return ShardingPlan(both if cut else shard, size, outer, groups, cut, replica, strides=strides)
        one, step = axes.one(), _step(grid.flatten().sort()[0])
        size = one.size()
        if outer_strategy == "optim" and not axes.outer and size > 1:
            raise ValueError("outer_strategy='optim' needs a mesh with an outer axis, (dp_outer, dp_shard)")
        over = _groups(one, device)
        if grads or size == 1:
            return ShardingPlan(one, size, 1, over + alone, False, not params and size > 1, strides=(step, 0))
        if optim:
            return ShardingPlan(one, 1, size, alone + over, True, False, strides=(1, step))
        mine = local_mesh(one.device_type, (1,))
        return ShardingPlan(mine, 1, size, alone + over, False, False, copies=one, strides=(1, step))

    @property
    def ranks(self) -> int:
        """Ranks that train together."""
        return self.world * self.outer

    @property
    def cut(self) -> int:
        """Ranks that cut main weights; layouts are planned for this number."""
        return self.world * (self.outer if self.outer_optim else 1)

    @property
    def rank(self) -> int:
        return layout_rank(self.mesh)

    def spec(self, layout: Layout, precision: Precision, reshard: bool) -> UnitSpec:
        """Returns how a buffer with that layout is communicated."""
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
    """Returns the names of the group of a mesh's first axis, and of another over the same ranks."""
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
