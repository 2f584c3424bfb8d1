"""`fully_shard`: which parameters belong to which unit, and how modules come to read them."""

from __future__ import annotations

import copy
import fnmatch
import functools
import gc
import importlib
import inspect
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..graph import ops
from ..runtime import devices
from ..spec.config import MixedPrecisionPolicy, Precision
from ..spec.layout import Layout, plan
from ..state import statedicts
from ..state.buffer import FlatBuffer, Frame, Ref, UnitState, refs
from ..state.dtensor import carry_attributes
from ..state.mesh import axes
from ..state.placement import OUTER, Placement, strategy_name
from . import admission, alike, clients, eager, fsdp2, materialize, writes
from .undo import Undo

UnitLike = type[nn.Module] | str
Casts = tuple[torch.dtype | None, torch.dtype | None]
"""What floating-point arguments of a unit's forward are cast to, and its results."""


class FSDPModule(fsdp2.Spelling):
    """What a module is, besides itself, once it is a unit. Method names are FSDP2's.

    It is no ``torch.distributed.fsdp.FSDPModule``: who finds one reaches for the state behind it, and there is none
    (torch's pipeline schedules hold its gradients back and reduce them through it; its memory tracker reads it). What
    asks by ``isinstance`` takes this one for a plain module, which gives the right numbers; ask for
    ``mfsdp.FSDPModule``.
    """

    _mfsdp_unit: UnitState

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True, hold: bool | None = None
    ) -> None:
        """Whether the backward calls that follow synchronise gradients: set to ``False`` for all microbatches of a step
        but the last. Switching costs no recompilation.

        In between, ``no_shard`` and ``optim`` add up whole gradients, and nothing is communicated;
        ``optim_grads`` and ``optim_grads_params`` scatter gradients in every backward and add up shards, which on a
        two-level mesh leaves out the reduction over the outer axis, and on a one-level mesh nothing.

        Args:
            requires_gradient_sync: what it says.
            recurse: whether units below are meant too.
            hold: ``True`` makes ``optim_grads`` and ``optim_grads_params`` add up whole gradients too, from now on:
                a buffer of the unit's size in ``main_grads_dtype`` for one reduction less per microbatch. Compiled
                graphs recompile once. ``None`` leaves it as it is.
        """
        if not isinstance(requires_gradient_sync, bool):
            raise ValueError(f"requires_gradient_sync={requires_gradient_sync!r}: choose True or False")
        for buffer in _buffers(self, recurse):
            buffer.sync = requires_gradient_sync
            if hold is not None and hold != buffer.spec.hold and buffer.spec.world > 1:
                buffer.respec(hold=hold)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether the backward calls that follow reduce gradients over the outer axis of a two-level mesh; those over
        the shard axis go on. Where gradients are whole (``no_shard``, ``optim``) it is their only reduction.
        """
        if not isinstance(requires_all_reduce, bool):
            raise ValueError(f"requires_all_reduce={requires_all_reduce!r}: choose True or False")
        for buffer in _buffers(self, recurse):
            if buffer.spec.outer > 1 and not buffer.spec.hold:
                buffer.sync = requires_all_reduce

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``nn.Module``; also forgets gradients that wait for a synchronisation."""
        for buffer in _buffers(self, recurse=True):
            buffer.forget()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees what it gathered. Compiled graphs recompile on the next call.

        Raises:
            ValueError: it is neither ``True`` nor ``False``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward={reshard_after_forward!r}: choose True or False")
        self._mfsdp_unit.root_keeps = False
        for buffer in _buffers(self, recurse):
            buffer.respec(reshard=reshard_after_forward)

    def set_gradient_divide_factor(self, factor: float, recurse: bool = False) -> None:
        """What sums over ranks are divided by, instead of the number of ranks. Compiled graphs recompile.

        For a loss per token, where ranks have different numbers of them: a factor of 1, and every rank divides the sum
        over its tokens by the number of all ranks' tokens.

        Args:
            factor: positive.
            recurse: whether units below are meant too; as in FSDP2 they are not.
        """
        if not factor > 0:
            raise ValueError(f"factor={factor!r}: must be positive")
        for buffer in _buffers(self, recurse):
            buffer.respec(divide=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's former name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def reset_iter_state(self) -> None:
        """After an exception: forgets gradients that wait for a synchronisation, as in FSDP2."""
        for buffer in _buffers(self, recurse=True):
            buffer.forget()

    def unshard(self, async_op: bool = False) -> fsdp2.Unsharding | None:
        """Gathers the unit's own parameters for uncompiled code, and keeps them until :meth:`reshard`.

        Compiled graphs are not affected: they gather when they need to. The values are those of the moment: call
        :meth:`reshard` before the optimizer steps.

        Args:
            async_op: ``True`` gives a handle whose ``wait()`` returns at once: they are there already.
        """
        unit = self._mfsdp_unit
        unit.kept = True
        for index, buffer in enumerate(unit.buffers):
            if index not in unit.full:
                unit.full[index] = eager.gather(buffer)
        return fsdp2.Unsharding() if async_op else None

    def reshard(self) -> None:
        """Lets go of what :meth:`unshard` gathered.

        Raises:
            RuntimeError: it has been written to; what was written is lost.
        """
        self._mfsdp_unit.kept = False
        try:
            eager.check(self._mfsdp_unit, "between unshard() and reshard()")
        finally:
            eager.release(self._mfsdp_unit)


def _buffers(module: Any, recurse: bool) -> list[FlatBuffer]:
    modules = module.modules() if recurse else [module]
    units = [m.__dict__["_mfsdp_unit"] for m in modules if isinstance(m, FSDPModule)]
    return [buffer for unit in dict.fromkeys(units) for buffer in unit.buffers]


Given = TypeVar("Given", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: Given,
    *,
    units: Sequence[UnitLike] | None = None,
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
) -> Given:
    """Shards the parameters of a module over data-parallel ranks, in one flat buffer per unit.

    The same object comes back; its class becomes a subclass that also is :class:`FSDPModule`. ``parameters()`` and
    ``state_dict()`` show DTensors with the original names and global shapes; inside ``forward`` a parameter is the full
    tensor, in ``compute_dtype``. As in FSDP2 one may instead call it on every block and then on the root.

    Originals are freed as their values are taken over: at no time there is more than the model, the shards made so far
    and one unit. If something fails after that has begun (memory, an initialiser), the model is put back as it was;
    where originals were freed, new parameters get their values, or, where this rank holds only a part of them, an error
    says that the model has to be built anew.

    Args:
        module: the root, or one unit of a larger model; or several modules, which are one unit together (a norm and the
            head behind it). Compiled code gathers them once, uncompiled code in the forward of each.
        units: classes, import paths, class names, or patterns over module names (``*`` is one component, ``**`` any
            number); each match becomes a unit, what no unit claims belongs to ``module``. ``None``: one unit.
        mesh: ``DeviceMesh``, 1-D or (outer, shard); or a larger one with axes named ``dp_shard`` and, for two levels,
            ``dp_outer`` or ``dp_replicate`` (other names: :mod:`mfsdp.state.mesh`). An axis ``cp`` is part
            of the shard axis; ``tp`` and ``pp`` are left alone; what is neither is refused.
            Default: all ranks of the default process group, or this process alone when there is none.
        dp_mesh_dims: which axes of ``mesh`` are meant, if their names do not say so: torch's ``DataParallelMeshDims``,
            a dict ``{"shard": name, "replicate": name}`` (several names: these axes are taken as one), or two names,
            (outer, shard). Axes that it leaves out belong to others.
        strategy: what is sharded, by name or number: ``"no_shard"``/0, ``"optim"``/1 (optimizer state; gradients are
            added up locally and reduced at a synchronisation), ``"optim_grads"``/2 (gradients are scattered in every
            backward), ``"optim_grads_params"``/3 (parameters are gathered in every forward and backward; below 3 they
            stay whole on every rank, and are gathered once per optimizer step). 0 and 1 take both axes of a two-level
            mesh as one.
        outer_strategy: over the outer axis of a two-level mesh: ``"no_shard"`` (HSDP: gradients are all-reduced over
            it) or ``"optim"`` (HFSDP: optimizer state is sharded over it too).
        mp_policy: dtypes per role, :class:`MixedPrecisionPolicy`, or torch's own of that name.
        reshard_after_forward: ``False`` keeps the parameters gathered from forward to backward; ``None``, FSDP2's
            default, is ``False`` for the outermost module and ``True`` for all others.
        ignored_params: parameters left as they are, not sharded, their gradients not reduced.
        device: where parameters live; parameters on the meta device are materialised there unit by unit, with the
            values that an unsharded init under the same seed gives. Default: the current accelerator, else the CPU.
        param_init_fn: for models on the meta device, what ``model.apply(param_init_fn)`` is for others: after the
            modules' own initialisers it gets every module that has parameters or buffers from the meta device,
            children first, and writes them: parameters are whole, meanwhile.
        offload_policy, shard_placement_fn: FSDP2's, refused unless they ask for nothing.
        sync_module_states: gives parameters and buffers the values that they have on the first rank of the mesh.
            Without it a sample of the values is compared, and a warning names parameters that differ.

    Warns:
        UserWarning: parameters have other values on other ranks; no initialiser has written some from the meta device.

    Raises:
        ValueError: bad arguments, a unit that matches nothing, a module or parameter that is sharded already, a
            parameter that is not floating point, parameters on different devices, a mesh this rank is not in, an
            optimizer that holds parameters of the module, a unit below that is gathered or has gradients. Nothing has
            been copied or changed then.
        NotImplementedError: a combination that is not built yet, a parameter that is a tensor subclass, a piece of
            tensor parallelism (Megatron-LM's attributes), or has sparse gradients; likewise.
        RuntimeError: other ranks have built another model, or shard it differently; or it failed half-way, and this
            rank alone cannot put the model back.
    """
    strategy = strategy_name(strategy)
    if outer_strategy not in OUTER:
        raise ValueError(f"outer_strategy={outer_strategy!r}: choose one of {OUTER}")
    policy = fsdp2.policy_of(mp_policy)
    fsdp2.reshards(reshard_after_forward)
    fsdp2.no_offload(offload_policy, shard_placement_fn)
    given = _modules(module)
    for m in given:
        if isinstance(m, FSDPModule):
            raise ValueError(
                f"fully_shard: {type(m).__name__} is sharded already. Call it once per module, inner modules first."
            )
    if len(given) > 1 and units:
        raise ValueError("fully_shard: several modules are one unit; leave out units=")
    root = given[0] if len(given) == 1 else nn.ModuleList(given)
    admission.at_rest(root)
    _no_optimizer(root)
    roots = _match(root, units)
    ignored = set(ignored_params or ())
    claims = _claim(root, roots, ignored)
    target = _device(claims, device)
    placement = Placement.of(strategy, outer_strategy, axes(mesh, dp_mesh_dims, target), target.type)
    frame = _frame(given[0])
    units_of = {claim.module: UnitState(claim.fqn, frame, policy) for claim in claims}
    for claim in claims:
        claim.draft(policy, placement)
    groups = [g for g in placement.groups[::2] if g and target.type != "meta"]
    if groups:
        options = (
            f"strategy {strategy}, outer {outer_strategy}, reshard_after_forward {reshard_after_forward}, {policy}"
        )
        alike.compare(groups, *_described(claims, options, values=not sync_module_states))
    synced = groups if sync_module_states else []
    statedicts.teach()
    with Undo(placement.cut == 1, keep=len({p.is_meta for c in claims for p in c.owners}) > 1) as undo:
        for param in ignored:
            _ignore(param, undo)
        for claim in claims:
            unit = units_of[claim.module]
            unit.root_keeps = reshard_after_forward is None and claim.module is root
            reshard = not unit.root_keeps and reshard_after_forward is not False
            _fill(claim, unit, placement, target, reshard, synced, undo)
        for claim in claims:
            heads = given if claim.module is root else (claim.module,)
            for owner in dict.fromkeys([*heads, *claim.modules]):
                if owner is root and owner not in given:
                    continue
                entering = policy.compute_dtype if policy.cast_forward_inputs and owner in heads else None
                casts = entering, policy.output_dtype if owner in given else None
                _swap(owner, units_of[claim.module], owner in heads, casts, undo)
        materialize.materialize(root, target, groups, param_init_fn)
        for kept in dict.fromkeys(root.buffers()) if synced else ():
            kept.copy_(alike.of_first_rank(kept, synced, target))
    _name(root, units_of[root], frame)
    given[0].__dict__["_mfsdp_call"] = next(_calls), {
        "units": units, "strategy": strategy, "outer_strategy": outer_strategy, "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward,
    }  # fmt: skip
    return module


_calls = itertools.count()
"""Numbers of calls, in their order."""


def _modules(given: Any) -> tuple[nn.Module, ...]:
    """What is to be a unit.

    Raises:
        ValueError: it is neither a module nor several.
    """
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not found or not all(isinstance(m, nn.Module) for m in found):
        raise ValueError(f"fully_shard: {given!r} is no module")
    return tuple(dict.fromkeys(found))


def _name(root: nn.Module, own: UnitState, frame: Frame) -> None:
    """Names the units of ``root``, whose own is ``own``: those of earlier calls thought that they were the root."""
    members: dict[UnitState, list[tuple[str, FSDPModule]]] = {}
    for fqn, m in root.named_modules():
        if isinstance(m, FSDPModule):
            members.setdefault(m._mfsdp_unit, []).append((fqn, m))
    for unit, found in members.items():
        unit.fqn, unit.frame = "(root)" if unit is own else "+".join(fqn for fqn, _ in found), frame
        if unit is not own and unit.root_keeps:
            found[0][1].set_reshard_after_forward(True, recurse=False)


@dataclass
class Blueprint:
    """A model on the meta device as it was before it was sharded, if it was; and how it was."""

    model: nn.Module
    calls: list[tuple[nn.Module | list[nn.Module], dict[str, Any]]]
    """Which of its modules were given to :func:`fully_shard`, with which arguments, in order."""
    twins: dict[int, Any]
    """What has become of tensors, by ``id``."""


def blueprint(model: nn.Module) -> Blueprint:
    """The plan of a model, which is not changed; parameters require gradients as when they were sharded.

    Raises:
        ValueError: the model holds something that cannot be copied, or is a part of a unit of several modules.
    """
    memo: dict[int, Any] = {}
    inside = {id(m._parameters) for m in model.modules()}
    members: dict[UnitState, list[int]] = {}
    for number, m in enumerate(model.modules()):
        if isinstance(m, FSDPModule):
            unit = m._mfsdp_unit
            members.setdefault(unit, []).append(number)
            if any(id(params) not in inside for b in unit.buffers for params, _ in b.places.values()):
                raise ValueError(
                    f"mfsdp: {type(m).__name__} is one unit with other modules ({unit.fqn!r}), and cannot be traced "
                    "without them: trace a module around all of them"
                )
    for m in model.modules():
        if "_mfsdp_unit" in m.__dict__:
            memo[id(m.__dict__["_mfsdp_unit"])] = None
        if refs(m):
            memo[id(refs(m))] = {}
        for ref in refs(m).values():
            param = ref.buffer.params[ref.slot]
            if id(param) not in memo:
                own = ref.unit.policy.compute_dtype is None
                kind = ref.buffer.precision.compute if own else ref.buffer.precision.main
                twin = nn.Parameter(torch.empty(ref.shape, dtype=kind, device="meta"), ref.buffer.born_trainable)
                carry_attributes(param, twin)
                memo[id(param)] = twin
        kept = [t for t in m.__dict__.values() if isinstance(t, torch.Tensor)]
        for tensor in [*m._parameters.values(), *m._buffers.values(), *kept]:
            if tensor is not None and id(tensor) not in memo:
                plain: torch.Tensor = tensor.detach().to("meta")
                if isinstance(tensor, nn.Parameter):
                    plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
                plain.__dict__.update(tensor.__dict__)
                memo[id(tensor)] = plain
    twins = dict(memo)
    try:
        out = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"mfsdp: {type(model).__name__} cannot be copied to be traced: {error}") from error
    modules = list(out.modules())
    calls = []
    for numbers in members.values():
        given = [modules[number] for number in numbers]
        calls += [(call, given) for m in given if (call := m.__dict__.pop("_mfsdp_call", None))]
    for m in modules:
        if "_mfsdp_unit" in m.__dict__:
            m.__class__ = type(m).__bases__[-1]
            for name in ("_mfsdp_unit", "_mfsdp_refs"):
                m.__dict__.pop(name, None)
    calls.sort(key=lambda made: made[0][0])
    return Blueprint(out, [(given if len(given) > 1 else given[0], call) for (_, call), given in calls], twins)


# Units


def _match(root: nn.Module, units: Sequence[UnitLike] | None) -> list[nn.Module]:
    """The modules that become units, the root last."""
    if isinstance(units, (str, type)):
        raise ValueError(f"units={units!r}: give a list, units=[{units!r}]")
    chosen: dict[nn.Module, None] = {}
    for unit in units or ():
        matches = [m for fqn, m in root.named_modules() if m is not root and _is(unit, fqn, m)]
        if not matches:
            kinds = sorted({type(m).__name__ for m in root.modules()} - {type(root).__name__})
            names = [fqn for fqn, _ in root.named_modules() if fqn]
            raise ValueError(
                f"units: {unit!r} matches no module of {type(root).__name__}. Classes in it: {', '.join(kinds[:20])}; "
                f"names: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )
        chosen.update(dict.fromkeys(matches))
    for m in chosen:
        if isinstance(m, FSDPModule):
            raise ValueError(f"units: {type(m).__name__} is sharded already; leave it out of `units`")
    return [*chosen, root]


def _is(unit: UnitLike, fqn: str, module: nn.Module) -> bool:
    if isinstance(unit, type):
        return isinstance(module, unit)
    if not isinstance(unit, str) or not unit:
        raise ValueError(f"units: {unit!r} is no class, import path, class name or name pattern")
    if not set("*?[") & set(unit):
        found = _import(unit)
        if found is not None:
            return isinstance(module, found)
        return unit in (fqn, type(module).__name__)
    return _matches(fqn.split("."), unit.split("."))


@functools.cache
def _import(path: str) -> type | None:
    where, _, name = path.rpartition(".")
    if not where or where.split(".")[0] not in sys.modules:
        return None
    try:
        found = getattr(importlib.import_module(where), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Component by component as in shells; ``**`` is any number of components."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[i:], pattern[1:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _frame(module: nn.Module) -> Frame:
    names = inspect.signature(module.forward).parameters
    return Frame(type(module).__name__, tuple(names))


@dataclass
class _Draft:
    """A flat buffer to be. Parameters leave the list when their values have been taken over."""

    layout: Layout
    precision: Precision
    trainable: bool
    params: list[nn.Parameter]


@dataclass
class _Claim:
    """A unit to be: its module, the modules whose forward it covers, the parameters it owns and where they hang."""

    module: nn.Module
    fqn: str
    modules: list[nn.Module] = field(default_factory=list)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    drafts: list[_Draft] = field(default_factory=list)

    def draft(self, policy: MixedPrecisionPolicy, placement: Placement) -> None:
        """Plans the unit's buffers, one for each kind of parameter."""
        kinds: dict[tuple[Precision, bool], list[nn.Parameter]] = {}
        for param in self.owners:
            kinds.setdefault((policy.resolve(param.dtype), param.requires_grad), []).append(param)
        for (precision, trainable), params in kinds.items():
            layout = plan([(self.names[p], tuple(p.shape)) for p in params], placement.cut)
            self.drafts.append(_Draft(layout, precision, trainable, params))


def _claim(root: nn.Module, roots: list[nn.Module], ignored: set[nn.Parameter]) -> list[_Claim]:
    """Gives every parameter to the innermost unit that holds all its uses. Changes nothing."""
    fqns = {m: fqn for fqn, m in root.named_modules()}
    claims = {m: _Claim(m, fqns[m] or "(root)") for m in roots}
    path = {m: fqns[m] for m in roots}

    def innermost(fqn: str) -> nn.Module:
        holders = [m for m in roots if not path[m] or fqn == path[m] or fqn.startswith(path[m] + ".")]
        return max(holders, key=lambda m: len(path[m]))

    def common(a: nn.Module, b: nn.Module) -> nn.Module:
        while a is not b:
            longer = a if len(path[a]) >= len(path[b]) else b
            outer = innermost(path[longer].rpartition(".")[0])
            a, b = (outer, b) if longer is a else (a, outer)
        return a

    home: dict[nn.Parameter, nn.Module] = {}
    places: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for fqn, m in root.named_modules():
        if m.__dict__.get("_mfsdp_unit") is not None:
            continue  # of an earlier call
        unit = innermost(fqn)
        if m._parameters or m is unit:
            claims[unit].modules.append(m)
        for name, param in m._parameters.items():
            if param is None or param in ignored:
                continue
            full = f"{fqn}.{name}" if fqn else name
            _not_taken(full, param)
            admission.admit(full, param, m)
            writes.refuse_renormalising(m, full)
            home[param] = common(home[param], unit) if param in home else unit
            places.setdefault(param, []).append((m, name, full))
    for param, uses in places.items():
        claim = claims[home[param]]
        claim.owners[param] = [(m, name) for m, name, _ in uses]
        prefix = path[home[param]]
        claim.names[param] = uses[0][2].removeprefix(prefix + "." if prefix else "")
    return list(claims.values())


def _not_taken(fqn: str, param: nn.Parameter) -> None:
    if param in _stale:
        raise ValueError(
            f"fully_shard: parameter {fqn} belongs to the unit {_stale[param].unit.fqn!r} already; tie weights before "
            "sharding and shard both modules in one call, fully_shard(root, units=[...])"
        )


def _device(claims: list[_Claim], device: torch.device | str | None) -> torch.device:
    there = {p.device: name for c in claims for p, name in c.names.items() if p.device.type != "meta"}
    if len(there) > 1:
        where = ", ".join(f"{name} on {d}" for d, name in there.items())
        raise ValueError(
            f"fully_shard: parameters are on different devices ({where}); move the model to one device first"
        )
    asked = None if device is None else torch.device(device)
    chosen = devices.home() if asked is None or asked == devices.accelerator() else asked
    devices.alone_on(chosen)
    return chosen


_stale: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters from before wrapping that somebody still holds, and what they became; by identity."""


def _no_optimizer(module: nn.Module) -> None:
    """Refuses when an optimizer holds a parameter of the module: it would go on stepping on the old ones."""
    if _references(module) <= _references(nn.Linear(1, 1, device="meta")):
        return  # nobody but modules holds any: no need to look at all objects
    holder = _optimizer_of(set(module.parameters()))
    if holder is not None:
        raise ValueError(
            f"fully_shard: a {type(holder).__name__} holds parameters of this module; build the optimizer after "
            "fully_shard, from model.parameters()"
        )


def _references(module: nn.Module) -> int:
    """The most references that any parameter has, besides those of its modules."""
    owners = [m._parameters for m in module.modules()]
    places = Counter(id(p) for own in owners for p in own.values())
    counts = [sys.getrefcount(p) - places[id(p)] for own in owners for p in own.values() if p is not None]
    return max(counts, default=0)


def _no_stale_optimizer(buffer: FlatBuffer) -> None:
    """The same question in the first backward, for an optimizer that was given a list from before wrapping."""
    former = {p for p, ref in _stale.items() if ref.buffer is buffer}
    holder = _optimizer_of(former) if former else None
    if holder is not None:
        raise ValueError(
            f"mfsdp: a {type(holder).__name__} holds parameters of unit {buffer.unit.fqn!r} from before fully_shard "
            "and would step on those; build it from model.parameters() after fully_shard"
        )


def _optimizer_of(params: set[nn.Parameter]) -> torch.optim.Optimizer | None:
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer):
            optimizer = cast(torch.optim.Optimizer, thing)
            if any(p in params for group in optimizer.param_groups for p in group["params"]):
                return optimizer
    return None


# Building and handing over


def _ignore(param: nn.Parameter, undo: Undo) -> None:
    if not hasattr(param, "_mfsdp_ignored"):
        param._mfsdp_ignored = True  # type: ignore[attr-defined]
        undo.steps.append(lambda: delattr(param, "_mfsdp_ignored"))


def _fill(
    claim: _Claim,
    unit: UnitState,
    placement: Placement,
    device: torch.device,
    reshard: bool,
    synced: Sequence[str],
    undo: Undo,
) -> None:
    """Makes the unit's buffers; takes values over, parameter by parameter, and frees the originals."""
    undo.steps.append(lambda: _forget_stale(unit))
    for index, draft in enumerate(claim.drafts):
        buffer = FlatBuffer(
            unit, draft.layout, placement, draft.precision,
            trainable=draft.trainable, reshard=reshard, device=device,
        )  # fmt: skip
        buffer.before_first_gradient = _no_stale_optimizer
        unit.buffers.append(buffer)
        for slot, entry in enumerate(draft.layout.slots):
            _take_over(
                claim, draft.params.pop(0), Ref(buffer, slot, entry.offset, entry.shape, unit, index), synced, undo
            )


def _take_over(claim: _Claim, param: nn.Parameter, ref: Ref, synced: Sequence[str], undo: Undo) -> None:
    buffer, slot = ref.buffer, ref.slot
    carry_attributes(param, buffer.params[slot])
    with torch.no_grad():
        if param.is_meta:
            buffer.born_on_meta[slot] = param.dtype
            buffer.view(buffer.main, slot).fill_(torch.nan)
        else:
            buffer.keep(slot, alike.of_first_rank(param, synced, buffer.main.device) if synced else param)
    former = undo.former(param, ref)
    for owner, name in claim.owners.pop(param):
        _hand_over(owner, name, ref, former, undo)
    del claim.names[param]
    _stale[param] = ref


def _described(claims: Sequence[_Claim], options: str, values: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What ranks have to agree on, line by line, and values that they should."""
    lines, real = [options], dict[str, torch.Tensor]()
    for claim in claims:
        for draft in claim.drafts:
            kind = type(claim.module).__name__
            lines.append(f"unit {claim.fqn}, a {kind} of {len(draft.params)} parameters, cut {draft.layout.splits}")
            for param in draft.params:
                name = claim.names[param] if claim.fqn == "(root)" else f"{claim.fqn}.{claim.names[param]}"
                where = "on the meta device" if param.is_meta else "with values"
                lines.append(f"{name} {list(param.shape)} {param.dtype}, trains {param.requires_grad}, {where}")
                if values and not param.is_meta:
                    real[name] = param
    return lines, real


def _forget_stale(unit: UnitState) -> None:
    for param in [p for p, ref in _stale.items() if ref.unit is unit]:
        del _stale[param]


def _hand_over(owner: nn.Module, name: str, ref: Ref, former: Callable[[], nn.Parameter], undo: Undo) -> None:
    _put(owner, name, cast(nn.Parameter, ref.buffer.params[ref.slot]))
    owner.__dict__.setdefault("_mfsdp_refs", {})[name] = ref
    ref.buffer.place(owner._parameters, name, ref.slot)

    def back() -> None:
        _put(owner, name, former())
        refs(owner).pop(name, None)
        if not refs(owner):
            owner.__dict__.pop("_mfsdp_refs", None)

    undo.steps.append(back)


def _put(owner: nn.Module, name: str, param: nn.Parameter) -> None:
    """Makes it the module's parameter, also in the list of their own that recurrent layers have."""
    owner._parameters[name] = param
    if isinstance(owner, nn.RNNBase) and name in owner._flat_weights_names:
        owner.__dict__["_flat_weights"][owner._flat_weights_names.index(name)] = param


def _swap(owner: nn.Module, unit: UnitState, is_unit: bool, casts: Casts, undo: Undo) -> None:
    old = type(owner)
    owner.__dict__["_mfsdp_unit"] = unit
    owner.__class__ = _subclass(old, tuple(refs(owner)), is_unit, *casts)  # type: ignore[arg-type]

    def back() -> None:
        owner.__class__ = old
        owner.__dict__.pop("_mfsdp_unit", None)
        owner.__dict__.pop("_mfsdp_refs", None)

    undo.steps.append(back)


@functools.cache
def _subclass(
    base: type[nn.Module],
    names: tuple[str, ...],
    is_unit: bool,
    entering: torch.dtype | None,
    leaving: torch.dtype | None,
) -> type[nn.Module]:
    """The class that a module gets: parameters are properties, forward opens a scope for the eager path, and casts what
    enters and leaves it.

    Cached, so that equal layers keep equal types and Dynamo's guards stay the same.
    """
    call = fsdp2.with_casts(base.forward, entering, leaving)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A graph break inside of a `try` makes Dynamo run this frame as plain Python, where the scope is opened.
        nothing = torch.compiler.is_compiling() or (self._mfsdp_unit.open and not torch.is_grad_enabled())
        scope = None if nothing else eager.scope(self, is_unit)
        try:
            out = call(self, *args, **kwargs)
            if scope is not None:
                scope.check()
            return out
        finally:
            if scope is not None:
                scope.close()

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Somebody makes another of the same class, as slices of containers do: that one is not sharded.
        self.__class__ = base
        base.__init__(self, *args, **kwargs)

    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        if torch.compiler.is_compiling() or eager.inside():
            return _parameters(self, *args, **kwargs)
        return base.named_parameters(self, *args, **kwargs)

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[Any]:
        if torch.compiler.is_compiling() or eager.inside():
            return (p for _, p in _parameters(self, recurse=recurse))
        return base.parameters(self, recurse)

    def __setstate__(self: nn.Module, state: dict[str, Any]) -> None:
        base.__setstate__(self, state)
        for name, ref in refs(self).items():  # of a copy
            ref.buffer.place(self._parameters, name, ref.slot)

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if name in refs(self) and param is not self._parameters.get(name):
            raise ValueError(
                f"{type(self).__name__}.{name} is sharded and cannot be replaced; write its values in place, "
                "with copy_() or inside mfsdp.summon_full_params(model)"
            )
        base.register_parameter(self, name, param)

    def _load_from_state_dict(self: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if torch.__future__.get_swap_module_params_on_conversion():
            raise NotImplementedError(
                f"{type(self).__name__} is sharded: parameters cannot be swapped, "
                "torch.__future__.set_swap_module_params_on_conversion(False) loads into them"
            )
        if metadata.get("assign_to_params_buffers"):  # parameters are pieces of flat buffers: they get the values
            for name in refs(self):
                param, value = self._parameters[name], state_dict.get(prefix + name)
                if isinstance(value, torch.Tensor) and param is not None and value.shape == param.shape:
                    with torch.no_grad():
                        param.copy_(value)
                    state_dict[prefix + name] = param
        base._load_from_state_dict(self, state_dict, prefix, metadata, *rest)

    def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        for ref in refs(self).values():
            probe = torch.empty(0, dtype=ref.buffer.main.dtype, device=ref.buffer.main.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise ValueError(
                    f"{type(self).__name__} is sharded: parameters cannot go from {probe.dtype} on {probe.device} to "
                    f"{moved.dtype} on {moved.device}. Move or cast the model before fully_shard."
                )
        own, self._parameters = self._parameters, {}
        try:
            return base._apply(self, fn, recurse)  # type: ignore[no-any-return]
        finally:
            self._parameters = own

    space: dict[str, Any] = {
        "forward": functools.wraps(base.forward)(own_code(forward, base.__name__)),
        "__init__": functools.wraps(base.__init__)(__init__),
        "__setstate__": __setstate__,
        "register_parameter": register_parameter,
        "_load_from_state_dict": _load_from_state_dict,
        "_apply": _apply,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        **{name: _property(name) for name in names},
        **clients.overrides(base),
    }
    if base.named_parameters is nn.Module.named_parameters and base.parameters is nn.Module.parameters:
        space |= {"named_parameters": named_parameters, "parameters": parameters}
    if issubclass(base, nn.RNNBase):
        space["_flat_weights"] = property(
            lambda self: [getattr(self, n) if n in self._parameters else None for n in self._flat_weights_names],
            lambda self, value: None,
        )
    bases = (FSDPModule, base) if is_unit else (base,)
    return cast(type[nn.Module], type(base.__name__, bases, space))


def _parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """What ``named_parameters()`` gives inside of a forward: whole parameters, as ``self.weight`` is. Dynamo traces it,
    so it never looks at what ``_parameters`` holds.
    """
    seen: list[Any] = []
    plain: list[Any] = []
    for path, m in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        own = m.__dict__.get("_mfsdp_refs", {})
        for name in m._parameters:
            if name in own:
                key = (own[name].unit.fqn, own[name].index, own[name].slot)
                if remove_duplicate and key in seen:
                    continue
                seen.append(key)
            value = getattr(m, name)
            if value is None or (remove_duplicate and any(value is other for other in plain)):
                continue
            if name not in own:
                plain.append(value)
            yield (f"{path}.{name}" if path else name), value


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with a code object of its own: Dynamo's caches and recompile limits count by code object."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{name}_forward")
    out = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    out.__kwdefaults__ = function.__kwdefaults__
    return out


def _property(name: str) -> property:
    def get(self: nn.Module) -> torch.Tensor:
        ref: Any = self._mfsdp_refs[name]  # type: ignore[index]
        if torch.compiler.is_compiling():
            if ref.unit.open:
                return ref.unit.full[ref.index][ref.slot]  # type: ignore[no-any-return]
            out = ops.param(ref.buffer.source, ref.offset, ref.shape, ref.buffer.text)
            return out.detach() if ref.buffer.trainable and not ref.buffer.trains[ref.slot] else out  # type: ignore[no-any-return]
        return eager.read(self, name, ref)  # type: ignore[no-any-return]

    # Where plain Python reads a parameter, a graph of one marker would gather the unit for it alone.
    eager.never_a_frame(get)
    return property(get)


# Around training


@contextmanager
def no_sync(module: nn.Module, *, hold: bool | None = None) -> Iterator[None]:
    """Backward calls inside of the ``with`` do not synchronise gradients; the next one outside does, for all.

    Every unit that took part inside has to take part in the one that synchronises. What waits is not in ``.grad``;
    ``zero_grad`` of an optimizer, of the model or of torch.compile's wrapper forgets it, and the step is given up.

    Args:
        module: a sharded model, or any of its modules.
        hold: see :meth:`FSDPModule.set_requires_gradient_sync`.

    Raises:
        ValueError: nothing of the module is sharded.
    """
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    if not units:
        raise ValueError("no_sync: the model is not sharded; call mfsdp.fully_shard first")
    before = [(buffer, buffer.sync) for unit in units for buffer in _buffers(unit, recurse=False)]
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False, hold=hold)
    try:
        yield
    finally:
        for buffer, sync in before:
            buffer.sync = sync


@contextmanager
def summon_full_params(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Whole main weights as plain parameters inside of the ``with``; edits are kept. All ranks must enter together.

    Args:
        module: a sharded model, or any of its modules.
        writeback: whether edits are written back to the shards; each rank writes its own part, so edit alike.

    Raises:
        ValueError: nothing of the module is sharded, or it is summoned already.
    """
    found = {r.buffer: None for m in module.modules() for r in refs(m).values()}
    if not found:
        raise ValueError("summon_full_params: the model is not sharded; call mfsdp.fully_shard first")
    if any(b.summoned is not None for b in found):
        raise ValueError("summon_full_params: the parameters are summoned already")
    places = [(m, name, ref) for m in module.modules() for name, ref in refs(m).items()]
    whole: dict[tuple[int, int], nn.Parameter] = {}
    try:
        for buffer in found:
            buffer.summoned = buffer.gather_main()
        for m, name, ref in places:
            full = ref.buffer.summoned
            assert full is not None
            view = ref.buffer.full_view(full, ref.slot)
            key = (id(ref.buffer), ref.slot)
            if key not in whole:
                whole[key] = nn.Parameter(view, requires_grad=ref.buffer.trains[ref.slot])
            m._parameters[name] = whole[key]
        yield
        if writeback:
            for buffer in found:
                assert buffer.summoned is not None
                buffer.scatter_main(buffer.summoned)
    finally:
        for m, name, ref in places:
            param, edited = ref.buffer.params[ref.slot], whole.get((id(ref.buffer), ref.slot))
            if edited is not None and edited.requires_grad != param.requires_grad:
                param.requires_grad_(edited.requires_grad)
            m._parameters[name] = cast(nn.Parameter, param)
        for buffer in found:
            buffer.summoned = None


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Keeps all parameters gathered inside of the ``with``, for many forwards of the same weights: generation,
    evaluation. Nothing is communicated per forward, compiled or not; memory holds the whole model in ``compute_dtype``.
    All ranks must enter together; what runs inside may differ by rank.

    Compiled graphs are compiled once more, without collectives. Parameters are read as they were on entry: leave before
    the optimizer steps. Gradients of a backward inside are reduced, unit by unit, so ranks must call it together.

    Args:
        module: a sharded model, or any of its modules.

    Raises:
        ValueError: nothing of the module is sharded.
        RuntimeError: it is called inside of itself, or inside of a forward of the model.
    """
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    if not units:
        raise ValueError("unsharded: the model is not sharded; call mfsdp.fully_shard first")
    if any(m._mfsdp_unit.open for m in units):
        raise RuntimeError("unsharded: the model is unsharded already, or in a forward")
    with ExitStack() as leaving:
        for m in units:
            if not m._mfsdp_unit.kept:
                leaving.callback(m.reshard)
            leaving.callback(setattr, m._mfsdp_unit, "open", False)
            m.unshard()
            m._mfsdp_unit.open = True
        yield
