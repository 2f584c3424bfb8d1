"""`fully_shard`: makes modules units and their parameters shards of flat buffers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..buffers import state_dict_hooks
from ..buffers.flat_buffer import UnitState, refs
from ..buffers.sharding_plan import OUTER, ShardingPlan, strategy_name
from ..config.options import MixedPrecisionPolicy
from ..config.plans import Plan
from ..dtensor import torchao
from ..dtensor import transformer_engine as te
from ..dtensor.mesh import TENSOR, Axes, axes
from ..dtensor.tp_shards import TPShard, has_groups, here, over_tensor_ranks
from ..runtime import groups as groups_of
from ..runtime import watchdog
from ..runtime.buffer_api import Outermost
from . import (
    auto_wrap,
    cross_rank_check,
    eager_warnings,
    fp8_weights,
    fsdp2_api,
    materialize,
    parallel,
    parametrized,
    plain_shards,
    quantized_linear,
    te_modules,
    validate,
)
from .commit import device_of, fill, ignore, move_buffers
from .module import FSDPModule, own_class, swap_class, units_of
from .rollback import Rollback
from .stale_optimizers import no_optimizer
from .unit_assignment import PlannedUnit, UnitLike, assign_parameters, described, match

Given = TypeVar("Given", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: Given,
    *,
    units: Iterable[UnitLike] | Literal["auto"] | None = None,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: Any = None,
    strategy: str | int = 3,
    outer_strategy: str = "no_shard",
    mp_policy: fsdp2_api.Policy = None,
    reshard_after_forward: bool | None = True,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device: torch.device | str | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    offload_policy: torch.distributed.fsdp.OffloadPolicy | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    sync_module_states: bool = False,
    may_be_unused: bool | Iterable[UnitLike] = False,
    plan: Plan | None = None,
) -> Given:
    """Shards the parameters of a module over data-parallel ranks, in one flat buffer per unit.

    Returns the same object; its class becomes a subclass that is also `FSDPModule`. ``parameters()`` and
    ``state_dict()`` show DTensors with the original names and global shapes; inside ``forward`` a parameter is the full
    tensor, in ``compute_dtype``. As in FSDP2, you can instead call it on every block, then on the root.

    Originals are freed as their values are copied: memory holds at most the model, the shards made so far and one unit
    (TransformerEngine's quantized originals are freed at the end). If a later step fails (memory, an initializer), the
    model is restored; where originals were freed, new parameters get their values, or, if this rank holds only a part,
    an error asks to build the model again.

    Frozen weights of linear layers that bitsandbytes has quantized to 4 or 8 bits, or torchao (weight-only), become
    parameters of bytes, which are gathered as bytes (`mfsdp.sharding.quantized_linear`).

    Args:
        module: the root, one unit of a larger model, or several modules that form one unit (a norm and the head after
            it). Compiled code gathers such a unit once, uncompiled code in the forward of each.
        units: classes, import paths, class names, or patterns over module names (``*``: one component, ``**``: any
            number). Each match becomes a unit; the rest belongs to ``module``. ``None``: one unit. ``"auto"``: the
            blocks of the model's own plan, else repeated modules, and the embedding apart from the head if that is
            worth a gather (`mfsdp.sharding.auto_wrap`). For a module named ``auto``: ``units=["auto"]``.
        mesh: a ``DeviceMesh``, 1-D or (outer, shard), or a larger one with axes ``dp_shard`` and, for two levels,
            ``dp_outer`` or ``dp_replicate`` (other names: `mfsdp.dtensor.mesh`). An axis ``cp`` is part of the shard
            axis; ``tp`` and ``pp`` are left alone; others are refused. Default: all ranks of the default process group,
            or this process alone if there is none.
        dp_mesh_dims: the axes of ``mesh`` to use, if their names do not tell: torch's ``DataParallelMeshDims``, a dict
            ``{"shard": name, "replicate": name}`` (several names: these axes count as one), or two names, (outer,
            shard). Other axes are left alone.
        strategy: what is sharded, by name or number: ``"no_shard"``/0 nothing; ``"optim"``/1 optimizer state (gradients
            are added up locally and reduced at a synchronization); ``"optim_grads"``/2 also gradients (scattered in
            every backward); ``"optim_grads_params"``/3 also parameters (gathered in every forward and backward). Below
            3 they stay unsharded and are gathered once per optimizer step. 0 and 1 treat both axes of a two-level mesh
            as one.
        outer_strategy: the same over the outer axis of a two-level mesh: ``"no_shard"`` (HSDP: gradients are
            all-reduced over it) or ``"optim"`` (HFSDP: optimizer state is sharded over it too).
        mp_policy: dtypes per role, `MixedPrecisionPolicy`, or torch's own of that name.
        reshard_after_forward: ``False`` keeps parameters gathered until backward; ``None``, FSDP2's default, is
            ``False`` for the outermost module and ``True`` for others.
        ignored_params: parameters that are not sharded and whose gradients are not reduced.
        device: the device of parameters and buffers. Tensors on meta are materialized there unit by unit, with the
            values of an unsharded init under the same seed. Default: the current accelerator, else the CPU.
        param_init_fn: for models on meta, what ``model.apply(param_init_fn)`` is for others. After the modules' own
            initializers it gets every module with parameters or buffers from meta, children first, with full
            parameters, and writes them.
        offload_policy, shard_placement_fn: FSDP2's; refused unless they have no effect.
        sync_module_states: copies parameters and buffers from the mesh's first rank. Without it, ranks compare samples,
            and a warning names parameters that differ.
        may_be_unused: whether ranks may skip units of this call in a step, in forward or entirely, while others use
            them (a data-dependent branch, layer drop, an image tower): ``True`` for all, or a list as in ``units``.
            Ranks that skip a unit join its gathers and reductions with zeros. A unit that any rank has used in a
            backward has gradients on every rank, for all its parameters; one that none has used has none. Every
            collective of such a model is first announced to all ranks (`mfsdp.runtime.join`), which costs their answers
            each time. Without it, ranks that differ raise an error that names unit and ranks. ``torch.cond`` branches
            do not need it.
        plan: from `mfsdp.plan`, for this model over as many ranks. Compiled code follows it: which layers are
            recomputed, stay gathered after forward or are offloaded to the host, and the prefetch depth. Uncompiled
            code ignores it. Pass it in the last call, which shards the whole model.

    Warns:
        UserWarning: parameters differ between ranks; no initializer has written some from meta.

    Raises:
        ValueError: bad arguments, a unit that matches nothing, a module or parameter that is sharded already, a
            parameter that is not floating point, parameters on different devices, a mesh without this rank, an
            optimizer that holds parameters of the module, a unit below that is gathered or has gradients. Nothing has
            been copied or changed then.
        NotImplementedError: an unsupported combination; a parameter that is a tensor subclass, has sparse gradients, or
            is marked as a local shard of an unknown parameter (Megatron-LM's attributes). Nothing has changed then
            either.
        RuntimeError: other ranks have built another model, or shard it differently; or it failed half-way, and this
            rank alone cannot restore the model.
    """
    how = _Arguments.of(strategy, outer_strategy, mp_policy, reshard_after_forward, plan)
    fsdp2_api.no_offload(offload_policy, shard_placement_fn)
    given = _modules(module, units)
    root = given[0] if len(given) == 1 else nn.ModuleList(given)
    validate.at_rest(root)
    no_optimizer(root)
    auto, ignored = isinstance(units, str) and units == "auto", set(ignored_params or ())
    roots = match(root, None if auto else units)
    with quantized_linear.taken_apart(root, ignored):
        parallel.understood(root.modules(), ignored)
        planned = assign_parameters(root, roots, ignored)
        target = device_of(planned, device)
        found = axes(mesh, dp_mesh_dims, target)
        placement = ShardingPlan.of(how.strategy, outer_strategy, found, target.type)
        if auto:
            units = auto_wrap.auto(planned[0], how.policy, placement)
            planned = assign_parameters(root, match(root, units), ignored)
        optional = _optional(root, may_be_unused, planned)
        call = _Call(given, root, how, planned, target, found, placement, optional, mesh)
        if call.groups:
            # No variable may hold what is compared: originals are freed one by one below.
            cross_rank_check.check_same_model(
                call.groups, *described(planned, call.options(), values=not sync_module_states)
            )
        synced = call.groups if sync_module_states else []
        state_dict_hooks.teach()
        parametrized.refuse()
        eager_warnings.expect_unsharded()
        # Tensors made here train, even if the caller is in inference mode.
        with torch.inference_mode(False), Rollback(placement.cut == 1, _keeps_originals(planned)) as rollback:
            for param in ignored:
                ignore(param, rollback)
            call.commit(synced, rollback)
            parallel.adapt(root.modules(), rollback)
            te_modules.adapt(root, rollback)
            fp8_weights.tell(root)
            if call.runs:
                move_buffers(root, target, rollback)
            materialize.materialize(root, target, call.sharing(), param_init_fn)
            for kept in map(here, dict.fromkeys(root.buffers()) if synced else ()):
                kept.copy_(cross_rank_check.of_first_rank(kept, [*synced, *call.placement.beside], target))
        watchdog.begin()
        call.finish(units)
    return module


@dataclass(frozen=True)
class _Arguments:
    """The arguments of `fully_shard` that say how to shard, checked."""

    strategy: str
    outer_strategy: str
    policy: MixedPrecisionPolicy
    reshard: bool | None
    plan: Plan | None

    @staticmethod
    def of(
        strategy: str | int, outer_strategy: str, mp_policy: fsdp2_api.Policy, reshard: bool | None, plan: Plan | None
    ) -> _Arguments:
        """Checks and converts arguments of `fully_shard`."""
        name = strategy_name(strategy)
        if outer_strategy not in OUTER:
            raise ValueError(f"outer_strategy={outer_strategy!r}: choose one of {OUTER}")
        policy = fsdp2_api.policy_of(mp_policy)
        fsdp2_api.reshards(reshard)
        if plan is not None and not isinstance(plan, Plan):
            raise ValueError(f"fully_shard: plan={plan!r}: give what mfsdp.plan has made, or mfsdp.Plan.load(path)")
        if plan is not None and reshard is not True:
            raise ValueError(
                f"fully_shard: plan= and reshard_after_forward={reshard} were both given: the plan "
                "chooses which units stay gathered; leave one out"
            )
        return _Arguments(name, outer_strategy, policy, reshard, plan)


class _Call:
    """One call of `fully_shard`, on a module or a list of several (``root``). Making it plans the buffers of all units,
    finds the ranks that have to do with them, and changes no module; `commit` and `finish` do.
    """

    def __init__(
        self,
        given: tuple[nn.Module, ...],
        root: nn.Module,
        how: _Arguments,
        planned: list[PlannedUnit],
        device: torch.device,
        found: Axes,
        placement: ShardingPlan,
        optional: set[nn.Module],
        mesh: DeviceMesh | None,
    ):
        self.given, self.root, self.how, self.planned = given, root, how, planned
        self.device, self.axes, self.placement, self.optional = device, found, placement, optional
        self.runs = device.type != "meta"
        """Whether the device holds values; the meta device, for tracing, has no process groups either."""
        self.groups = [g for g in placement.groups[::2] if g and self.runs]
        """Names of the process groups of data parallelism."""
        nested = units_of(root)
        self.outermost = _outermost(given[0], root, how, found, placement.ranks, len(planned) + len(nested))
        optional_units = bool(optional) or any(unit.may_be_unused for unit in nested)
        self.shared_over = self._shared_over(nested) if optional_units else None
        """The group of all ranks that share the model, ``""`` for one process; ``None`` if no unit may be skipped."""
        for unit in planned:
            unit.plan_buffers(how.policy, placement, mesh)
        self.pieces = [p for unit in planned for buffer in unit.buffers for p in buffer.pieces if p is not None]
        """Local shards of the call's units under other parallelisms."""
        if self.runs:
            for unit in planned:
                for param, piece in ((p, piece) for b in unit.buffers for p, piece in zip(b.params, b.pieces)):
                    plain_shards.initialized(unit.fqn_of(param), param, piece)
            earlier = [r.piece for m in root.modules() for r in refs(m).values() if r.piece is not None]
            _apart_from(placement, self.pieces, earlier)
            meshes = dict.fromkeys(p.mesh for p in (*self.pieces, *earlier))
            beside = [*found.beside(), *(g for mesh in meshes for g in over_tensor_ranks(mesh, TENSOR))]
            once = {tuple(groups_of.ranks(g)): g for g in beside}  # torch may give equal meshes separate groups
            self.placement = replace(placement, beside=tuple(once.values()))

    def _shared_over(self, nested: Iterable[UnitState]) -> str:
        """Returns the group of all ranks that share a model with optional units; ``""`` for one process, or on meta."""
        if not self.runs:
            return ""
        wide = self.placement.world > 1 and self.placement.outer > 1
        group = str(self.axes.one().get_group(0).group_name) if wide else next(iter(self.groups), "")
        ranks = set(groups_of.ranks(group)) if group else {groups_of.rank()}
        for unit in nested:
            names = dict.fromkeys(name for buffer in unit.buffers for name in buffer.spec.peer_groups)
            others = {r for name in names for r in groups_of.ranks(name)} - ranks
            if others:
                raise ValueError(
                    f"may_be_unused: unit {unit.fqn!r}, which was sharded before, is shared with ranks "
                    f"{sorted(others)}, and {type(self.root).__name__} is not: shard the model over all of its units' "
                    "ranks"
                )
        return group

    def options(self) -> str:
        """Describes the arguments that ranks must agree on."""
        how = self.how
        return (
            f"strategy {how.strategy}, outer {how.outer_strategy}, reshard_after_forward {how.reshard}, {how.policy}, "
            f"may be unused: {', '.join(unit.fqn for unit in self.planned if unit.module in self.optional) or 'none'}"
        )

    def sharing(self) -> list[str]:
        """Returns the names of all process groups whose ranks hold parts or copies of the parameters."""
        cut = [name for p in self.pieces for name in (*p.cut_by, *p.copied_by)] if self.runs else []
        return list(dict.fromkeys([*self.groups, *self.placement.beside, *cut]))

    def commit(self, synced: Sequence[str], rollback: Rollback) -> None:
        """Moves values, of the first rank of ``synced`` groups, into flat buffers; then gives modules new classes."""
        policy, reshard = self.how.policy, self.how.reshard
        states = [UnitState(unit.fqn, self.outermost, policy) for unit in self.planned]
        for unit, state in zip(self.planned, states, strict=True):
            state.root_keeps = reshard is None and unit.module is self.root
            state.may_be_unused = unit.module in self.optional
            frees = not state.root_keeps and reshard is not False
            fill(unit, state, self.placement, self.device, frees, synced, rollback)
        for unit, state in zip(self.planned, states, strict=True):
            heads = self.given if unit.module is self.root else (unit.module,)
            for owner in dict.fromkeys([*heads, *unit.modules]):
                if owner is self.root and owner not in self.given:
                    continue
                entering = policy.compute_dtype if policy.cast_forward_inputs and owner in heads else None
                casts = entering, policy.output_dtype if owner in self.given else None
                swap_class(owner, state, owner in heads, casts, rollback)

    def finish(self, units: Iterable[UnitLike] | None) -> None:
        """Tells units, also of earlier calls, about the model around them, and records the call for tracing.

        All divide gradients by all ranks whose losses are averaged, even if fewer hold the same parameters (experts).
        If ranks may skip some, all join with zeros (Note [Joining with zeros]).
        """
        first, how, grid, group = self.given[0], self.how, self.axes.grid(), self.shared_over
        own, ranks = first.__dict__["_mfsdp_unit"], self.placement.ranks
        if group is not None:
            self.outermost.loose.loosen(self.outermost.name, group)
        for unit, names in units_of(self.root).items():
            unit.outermost, unit.ranks = self.outermost, ranks
            unit.fqn = "(root)" if unit is own else "+".join(names)
            changes: dict[str, object] = {} if unit.divides else {"divide": float(ranks)}
            if unit is not own and unit.root_keeps:
                unit.root_keeps, changes["reshard"] = False, True
            if group is not None:
                changes |= {"optional": unit.may_be_unused, "any_optional": bool(group)}
            for buffer in unit.buffers:
                buffer.respec(**changes)
                if group:
                    self.outermost.loose.join(buffer)
        first.__dict__["_mfsdp_call"] = next(_calls), {
            "units": units, "strategy": how.strategy, "outer_strategy": how.outer_strategy, "mp_policy": how.policy,
            "reshard_after_forward": how.reshard, **({} if how.plan is None else {"plan": how.plan}),
        }, grid.tolist() if self.axes.outer else grid[0].tolist()  # fmt: skip


_calls = itertools.count()
"""Numbers calls in their order."""


def _modules(given: nn.Module | Sequence[nn.Module], units: object) -> tuple[nn.Module, ...]:
    """Returns the given modules, one or the several of one unit."""
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not found or not all(isinstance(m, nn.Module) for m in found):
        raise ValueError(f"fully_shard: {given!r} is no module")
    for m in found:
        if isinstance(m, FSDPModule):
            raise ValueError(
                f"fully_shard: {type(m).__name__} is sharded already. Call it once per module, inner modules first."
            )
    once = tuple(dict.fromkeys(found))
    if len(once) > 1 and units:
        raise ValueError("fully_shard: several modules are one unit; leave out units=")
    return once


def _keeps_originals(planned: Sequence[PlannedUnit]) -> bool:
    """Whether originals outlive the call (`Rollback`): models partly on meta, and quantized parameters."""
    kinds = {(p.is_meta, te.quantised(p) or torchao.wrapped(p)) for unit in planned for p in unit.owners}
    return len({is_meta for is_meta, _ in kinds}) > 1 or any(quantised for _, quantised in kinds)


def _apart_from(placement: ShardingPlan, pieces: Sequence[TPShard], nested: Sequence[TPShard]) -> None:
    """Checks that data-parallel ranks have data of their own, unlike tensor-parallel ones."""
    ours = {r for name in placement.groups[::2] if name for r in groups_of.ranks(name)}
    for piece, earlier in [*((p, False) for p in dict.fromkeys(pieces)), *((p, True) for p in dict.fromkeys(nested))]:
        names = piece.mesh.mesh_dim_names or ("",) * piece.mesh.ndim
        for dim, name in enumerate(names) if has_groups(piece.mesh) else ():
            if earlier and name and name not in TENSOR:
                continue  # experts, whose ranks have data of their own
            theirs = groups_of.ranks(str(piece.mesh.get_group(dim).group_name))
            if len(ours.intersection(theirs)) > 1:
                raise ValueError(
                    f"fully_shard: axis {name or dim!r} of {piece.mesh}, over which a parameter was cut or copied, has "
                    "ranks in common with those to shard over. Give the mesh of both, or the data-parallel part of it, "
                    "mesh=mesh['dp_shard']; experts are sharded first, each over the ranks that hold the same ones"
                )


def _optional(root: nn.Module, asked: bool | Iterable[UnitLike], planned: Sequence[PlannedUnit]) -> set[nn.Module]:
    """Returns the modules whose units ranks may skip."""
    mine = {unit.module for unit in planned}
    if isinstance(asked, bool):
        return mine if asked else set()
    *chosen, _ = match(root, asked)
    other = next((m for m in chosen if m not in mine), None)
    if other is not None:
        fqn = next(fqn for fqn, m in root.named_modules() if m is other)
        raise ValueError(
            f"may_be_unused: {fqn}, a {type(other).__name__}, is no unit of this call: name it in units= too, or a "
            "unit around it"
        )
    return set(chosen)


def _outermost(first: nn.Module, root: nn.Module, how: _Arguments, found: Axes, ranks: int, units: int) -> Outermost:
    """Describes the model to its units, after checking that the plan was made for it and its sharding."""
    sharding = {
        "strategy": how.strategy, "outer_strategy": how.outer_strategy, "mp_policy": str(how.policy),
        "mesh": " x ".join(map(str, found.grid().shape)), "units": units,
    }  # fmt: skip
    if how.plan is not None:
        sizes = {fqn: sum(p.numel() for p in m.parameters()) for fqn, m in root.named_modules()}
        classes = {fqn: own_class(m).__name__ for fqn, m in root.named_modules()}
        how.plan.fits(type(root).__name__, ranks, sizes, classes, sharding)
    names = inspect.signature(first.forward).parameters
    return Outermost(type(first).__name__, tuple(names), plan=how.plan, sharding=sharding)
