"""`fully_shard`: makes modules units and their parameters shards of flat buffers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..config.options import MixedPrecisionPolicy
from ..config.plans import Plan
from ..runtime import groups as groups_of
from ..runtime import watchdog
from ..state import state_dict_hooks, torchao
from ..state import transformer_engine as te
from ..state.flat_buffer import Outermost, UnitState, refs
from ..state.mesh import TENSOR, Axes, axes
from ..state.sharding_plan import OUTER, ShardingPlan, strategy_name
from ..state.tp_shards import TPShard, has_groups, here, over_tensor_ranks
from . import auto_wrap, cross_rank_check, fp8_weights, fsdp2_api, materialize, parallel, te_modules, validate
from .commit import device_of, fill, ignore, move_buffers
from .module import FSDPModule, own_class, swap_class
from .rollback import Rollback
from .stale_optimizers import no_optimizer
from .unit_assignment import Claim, UnitLike, claim_parameters, described, match

Given = TypeVar("Given", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: Given,
    *,
    units: Iterable[UnitLike] | Literal["auto"] | None = None,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: Any = None,
    strategy: str | int = 3,
    outer_strategy: str = "no_shard",
    mp_policy: MixedPrecisionPolicy | torch.distributed.fsdp.MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = True,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device: torch.device | str | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    offload_policy: Any = None,
    shard_placement_fn: Any = None,
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

    Args:
        module: the root, one unit of a larger model, or several modules that form one unit (a norm and the head after
            it). Compiled code gathers such a unit once, uncompiled code in the forward of each.
        units: classes, import paths, class names, or patterns over module names (``*``: one component, ``**``: any
            number). Each match becomes a unit; the rest belongs to ``module``. ``None``: one unit. ``"auto"``: the
            blocks of the model's own plan, else repeated modules, and the embedding apart from the head if that is
            worth a gather (`mfsdp.sharding.auto_wrap`). For a module named ``auto``: ``units=["auto"]``.
        mesh: a ``DeviceMesh``, 1-D or (outer, shard), or a larger one with axes ``dp_shard`` and, for two levels,
            ``dp_outer`` or ``dp_replicate`` (other names: `mfsdp.state.mesh`). An axis ``cp`` is part of the shard
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
    strategy = strategy_name(strategy)
    if outer_strategy not in OUTER:
        raise ValueError(f"outer_strategy={outer_strategy!r}: choose one of {OUTER}")
    policy = fsdp2_api.policy_of(mp_policy)
    fsdp2_api.reshards(reshard_after_forward)
    if plan is not None and not isinstance(plan, Plan):
        raise ValueError(f"fully_shard: plan={plan!r}: give what mfsdp.plan has made, or mfsdp.Plan.load(path)")
    if plan is not None and reshard_after_forward is not True:
        raise ValueError(
            f"fully_shard: plan= and reshard_after_forward={reshard_after_forward} were both given: the plan chooses "
            "which units stay gathered; leave one out"
        )
    fsdp2_api.no_offload(offload_policy, shard_placement_fn)
    given = _modules(module)
    for m in given:
        if isinstance(m, FSDPModule):
            raise ValueError(
                f"fully_shard: {type(m).__name__} is sharded already. Call it once per module, inner modules first."
            )
    if len(given) > 1 and units:
        raise ValueError("fully_shard: several modules are one unit; leave out units=")
    root = given[0] if len(given) == 1 else nn.ModuleList(given)
    validate.at_rest(root)
    no_optimizer(root)
    auto, ignored = isinstance(units, str) and units == "auto", set(ignored_params or ())
    roots = match(root, None if auto else units)
    parallel.understood(root.modules(), ignored)
    claims = claim_parameters(root, roots, ignored)
    target = device_of(claims, device)
    found = axes(mesh, dp_mesh_dims, target)
    placement = ShardingPlan.of(strategy, outer_strategy, found, target.type)
    if auto:
        units = auto_wrap.auto(claims[0], policy, placement)
        claims = claim_parameters(root, match(root, units), ignored)
    optional = _optional(root, may_be_unused, claims)
    sharding = {
        "strategy": strategy, "outer_strategy": outer_strategy, "mp_policy": str(policy),
        "mesh": " x ".join(map(str, found.grid().shape)), "units": len(claims) + len(_units(root)),
    }  # fmt: skip
    if plan is not None:
        _made_for(plan, root, placement.ranks, sharding)
    loose = bool(optional) or any(unit.may_be_unused for unit in _units(root))
    together = _together(root, found, placement) if loose and target.type != "meta" else ""
    outermost = _outermost(given[0], plan, sharding)
    units_of = {claim.module: UnitState(claim.fqn, outermost, policy) for claim in claims}
    for claim in claims:
        claim.draft(policy, placement, mesh)
    pieces = [p for claim in claims for draft in claim.drafts for p in draft.pieces if p is not None]
    nested = _nested_pieces(root)
    if target.type != "meta":
        _apart_from(placement, pieces, nested)
        meshes = dict.fromkeys(p.mesh for p in (*pieces, *nested))
        beside = [*found.beside(), *(g for mesh in meshes for g in over_tensor_ranks(mesh, TENSOR))]
        once = {tuple(groups_of.ranks(g)): g for g in beside}  # torch may give equal meshes separate groups
        placement = replace(placement, beside=tuple(once.values()))
    groups = [g for g in placement.groups[::2] if g and target.type != "meta"]
    if groups:
        options = (
            f"strategy {strategy}, outer {outer_strategy}, reshard_after_forward {reshard_after_forward}, {policy}, "
            f"may be unused: {', '.join(claim.fqn for claim in claims if claim.module in optional) or 'none'}"
        )
        cross_rank_check.check_same_model(groups, *described(claims, options, values=not sync_module_states))
    synced = groups if sync_module_states else []
    state_dict_hooks.teach()
    kinds = {(p.is_meta, te.quantised(p) or torchao.wrapped(p)) for claim in claims for p in claim.owners}
    keep = len({is_meta for is_meta, _ in kinds}) > 1 or any(quantised for _, quantised in kinds)
    with torch.inference_mode(False), Rollback(placement.cut == 1, keep) as undo:  # tensors made here train
        for param in ignored:
            ignore(param, undo)
        for claim in claims:
            unit = units_of[claim.module]
            unit.root_keeps = reshard_after_forward is None and claim.module is root
            unit.may_be_unused = claim.module in optional
            reshard = not unit.root_keeps and reshard_after_forward is not False
            fill(claim, unit, placement, target, reshard, synced, undo)
        for claim in claims:
            heads = given if claim.module is root else (claim.module,)
            for owner in dict.fromkeys([*heads, *claim.modules]):
                if owner is root and owner not in given:
                    continue
                entering = policy.compute_dtype if policy.cast_forward_inputs and owner in heads else None
                casts = entering, policy.output_dtype if owner in given else None
                swap_class(owner, units_of[claim.module], owner in heads, casts, undo)
        parallel.adapt(root.modules(), undo)
        te_modules.adapt(root, undo)
        fp8_weights.tell(root)
        if target.type != "meta":
            move_buffers(root, target, undo)
        cut = {name: None for p in pieces for name in (*p.cut_by, *p.copied_by)} if target.type != "meta" else {}
        materialize.materialize(root, target, list(dict.fromkeys([*groups, *placement.beside, *cut])), param_init_fn)
        for kept in map(here, dict.fromkeys(root.buffers()) if synced else ()):
            kept.copy_(cross_rank_check.of_first_rank(kept, [*synced, *placement.beside], target))
    watchdog.begin()
    _name(root, units_of[root], outermost)
    _divide_alike(root, placement)
    if loose:
        _loosen(root, outermost, together)
    given[0].__dict__["_mfsdp_call"] = next(_calls), {
        "units": units, "strategy": strategy, "outer_strategy": outer_strategy, "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward, **({} if plan is None else {"plan": plan}),
    }, found.grid().tolist() if found.outer else found.grid()[0].tolist()  # fmt: skip
    return module


_calls = itertools.count()
"""Numbers calls in their order."""


def _modules(given: Any) -> tuple[nn.Module, ...]:
    """Returns the modules of the unit.

    Raises:
        ValueError: the argument is neither a module nor several.
    """
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not found or not all(isinstance(m, nn.Module) for m in found):
        raise ValueError(f"fully_shard: {given!r} is no module")
    return tuple(dict.fromkeys(found))


def _name(root: nn.Module, own: UnitState, outermost: Outermost) -> None:
    """Names the units of ``root``, whose own is ``own``. Units of earlier calls had the root's name."""
    members: dict[UnitState, list[tuple[str, FSDPModule]]] = {}
    for fqn, m in root.named_modules():
        if isinstance(m, FSDPModule):
            members.setdefault(m._mfsdp_unit, []).append((fqn, m))
    for unit, found in members.items():
        unit.fqn, unit.outermost = "(root)" if unit is own else "+".join(fqn for fqn, _ in found), outermost
        if unit is not own and unit.root_keeps:
            found[0][1].set_reshard_after_forward(True, recurse=False)


def _nested_pieces(root: nn.Module) -> list[TPShard]:
    """Local shards of units of earlier calls."""
    found = [ref.piece for m in root.modules() for ref in refs(m).values()]
    return [piece for piece in found if piece is not None]


def _apart_from(placement: ShardingPlan, pieces: Sequence[TPShard], nested: Sequence[TPShard]) -> None:
    """Checks that data-parallel ranks have data of their own, unlike tensor-parallel ones.

    Raises:
        ValueError: an axis that has cut a parameter, or has a tensor-parallel name, shares ranks with data parallelism.
    """
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


def _divide_alike(root: nn.Module, placement: ShardingPlan) -> None:
    """Divides gradients of earlier calls' units as this one's: by all ranks whose losses are averaged, even if fewer
    hold the same parameters (experts).
    """
    for unit in _units(root):
        unit.ranks = placement.ranks
        for buffer in unit.buffers if not unit.divides else ():
            if buffer.spec.divide != float(placement.ranks):
                buffer.respec(divide=float(placement.ranks))


def _optional(root: nn.Module, asked: bool | Iterable[UnitLike], claims: Sequence[Claim]) -> set[nn.Module]:
    """Returns the modules whose units ranks may skip.

    Raises:
        ValueError: a match is no unit of this call.
    """
    mine = {claim.module for claim in claims}
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


def _together(root: nn.Module, found: Axes, placement: ShardingPlan) -> str:
    """The group of all ranks that share a model with optional units; ``""`` for one process.

    Raises:
        ValueError: units of earlier calls are shared with further ranks.
    """
    first = next(filter(None, placement.groups[::2]), "")
    group = str(found.one().get_group(0).group_name) if placement.world > 1 and placement.outer > 1 else first
    ranks = set(groups_of.ranks(group)) if group else {groups_of.rank()}
    for unit in _units(root):
        others = {
            r for buffer in unit.buffers for name in buffer.spec.peer_groups for r in groups_of.ranks(name)
        } - ranks
        if others:
            raise ValueError(
                f"may_be_unused: unit {unit.fqn!r}, which was sharded before, is shared with ranks {sorted(others)}, "
                f"and {type(root).__name__} is not: shard the model over all of its units' ranks"
            )
    return group


def _loosen(root: nn.Module, outermost: Outermost, group: str) -> None:
    """Tells all units of a model that ranks may skip some (Note [Joining with zeros])."""
    outermost.loose.loosen(outermost.name, group)
    for unit in _units(root):
        for buffer in unit.buffers:
            buffer.respec(optional=unit.may_be_unused, any_optional=bool(group))
            if group:
                outermost.loose.join(buffer)


def _units(root: nn.Module) -> list[UnitState]:
    return list(dict.fromkeys(m._mfsdp_unit for m in root.modules() if isinstance(m, FSDPModule)))


def _made_for(plan: Plan, root: nn.Module, ranks: int, sharding: dict[str, Any]) -> None:
    """Checks that a plan was made for a model.

    Raises:
        ValueError: it was not.
    """
    sizes = {fqn: sum(p.numel() for p in m.parameters()) for fqn, m in root.named_modules()}
    classes = {fqn: own_class(m).__name__ for fqn, m in root.named_modules()}
    plan.fits(type(root).__name__, ranks, sizes, classes, sharding)


def _outermost(module: nn.Module, plan: Plan | None, sharding: dict[str, Any]) -> Outermost:
    names = inspect.signature(module.forward).parameters
    return Outermost(type(module).__name__, tuple(names), plan=plan, sharding=sharding)
