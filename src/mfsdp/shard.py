"""`fully_shard`: which parameters belong to which unit, and how modules come to read them."""

from __future__ import annotations

import copy
import fnmatch
import functools
import gc
import importlib
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from . import fallback, materialize, ops, runtime
from .config import MixedPrecisionPolicy, Precision
from .dtensor import ShardedParameter, carry_attributes, inner_axis, local_mesh
from .layout import plan
from .placement import OUTER, Placement, strategy_name
from .state import FlatBuffer, Frame, Ref, UnitState, refs

UnitLike = type[nn.Module] | str


class FSDPModule:
    """What a module is, besides itself, once it is a unit. Method names are FSDP2's."""

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``nn.Module``; also forgets gradients that wait for a synchronisation."""
        for buffer in _buffers(self, recurse=True):
            buffer.forget()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees what it gathered. Compiled graphs recompile on the next call."""
        for buffer in _buffers(self, recurse):
            buffer.respec(reshard=bool(reshard_after_forward))

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

    def unshard(self) -> None:
        """Gathers the unit's own parameters for uncompiled code, and keeps them until :meth:`reshard`.

        Compiled graphs are not affected: they gather when they need to. The values are those of the moment: call
        :meth:`reshard` before the optimizer steps.
        """
        unit = self._mfsdp_unit
        unit.kept = True
        for index, buffer in enumerate(unit.buffers):
            if index not in unit.full:
                unit.full[index] = fallback.gather(buffer)

    def reshard(self) -> None:
        """Lets go of what :meth:`unshard` gathered."""
        self._mfsdp_unit.kept = False
        fallback.release(self._mfsdp_unit)


def _buffers(module: Any, recurse: bool) -> list[FlatBuffer]:
    modules = module.modules() if recurse else [module]
    units = [m.__dict__["_mfsdp_unit"] for m in modules if isinstance(m, FSDPModule)]
    return [buffer for unit in units for buffer in unit.buffers]


def fully_shard(
    module: nn.Module,
    *,
    units: Sequence[UnitLike] | None = None,
    mesh: DeviceMesh | None = None,
    strategy: str | int = 3,
    outer_strategy: str = "no_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device: torch.device | str | None = None,
    param_init_fn: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Shards the parameters of a module over data-parallel ranks, in one flat buffer per unit.

    The same object comes back; its class becomes a subclass that also is :class:`FSDPModule`. ``parameters()`` and
    ``state_dict()`` show DTensors with the original names and global shapes; inside ``forward`` a parameter is the full
    tensor, in ``compute_dtype``. As in FSDP2 one may instead call it on every block and then on the root.

    Args:
        module: the root, or one unit of a larger model.
        units: classes, import paths, class names, or patterns over module names (``*`` is one component, ``**`` any
            number); each match becomes a unit, what no unit claims belongs to ``module``. ``None``: one unit.
        mesh: ``DeviceMesh``, 1-D or (outer, shard); or a larger one with axes named ``dp_shard`` and, for two levels,
            ``dp_outer``. Default: all ranks of the default process group, or this process alone when there is none.
        strategy: what is sharded, by name or number: ``"no_shard"``/0, ``"optim"``/1 (optimizer state; gradients are
            added up locally and reduced at a synchronisation), ``"optim_grads"``/2 (gradients are scattered in every
            backward), ``"optim_grads_params"``/3 (parameters are gathered in every forward and backward; below 3 they
            stay whole on every rank, and are gathered once per optimizer step).
        outer_strategy: over the outer axis of a two-level mesh: ``"no_shard"`` (HSDP: gradients are all-reduced over
            it) or ``"optim"`` (HFSDP: optimizer state is sharded over it too).
        mp_policy: dtypes per role, :class:`MixedPrecisionPolicy`.
        reshard_after_forward: ``False`` keeps the parameters gathered from forward to backward.
        ignored_params: parameters left as they are, not sharded, their gradients not reduced.
        device: where parameters live; parameters on the meta device are materialised there unit by unit, with the
            values that an unsharded init under the same seed gives. Default: the current accelerator, else the CPU.
        param_init_fn: for models on the meta device, what ``model.apply(param_init_fn)`` is for others: after the
            modules' own initialisers it gets every module that has parameters or buffers from the meta device,
            children first, and writes them: parameters are whole, meanwhile.

    Raises:
        ValueError: bad arguments, a unit that matches nothing, a module or parameter that is sharded already, a
            parameter that is not floating point, parameters on different devices, a mesh this rank is not in, an
            optimizer that holds parameters of the module. The model is left as it was.
        NotImplementedError: a combination that is not built yet.
    """
    strategy = strategy_name(strategy)
    if outer_strategy not in OUTER:
        raise ValueError(f"outer_strategy={outer_strategy!r}: choose one of {OUTER}")
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(f"mp_policy={mp_policy!r}: give a mfsdp.MixedPrecisionPolicy")
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"fully_shard: {type(module).__name__} is sharded already. Call it once per module, inner modules first."
        )
    _no_optimizer(module)
    roots = _match(module, units)
    ignored = set(ignored_params or ())
    claims = _claim(module, roots, ignored)
    target = _device(claims, device)
    placement = Placement.of(strategy, outer_strategy, *_mesh(mesh, target), target.type)
    frame = _frame(module)
    states = {claim.module: UnitState(claim.fqn, frame, policy) for claim in claims}
    where: dict[nn.Parameter, Ref] = {}
    for claim in claims:
        _build(claim, states[claim.module], where, policy, placement, target, reshard_after_forward)
    with _undo() as undo:
        for param in ignored:
            param._mfsdp_ignored = True  # type: ignore[attr-defined]
        for claim in claims:
            for param, owners in claim.owners.items():
                for owner, name in owners:
                    _hand_over(owner, name, where[param], undo)
        for claim in claims:
            for owner in claim.modules:
                _swap(owner, states[claim.module], owner is claim.module, undo)
        materialize.materialize(module, target, [g for g in placement.groups[::2] if g], param_init_fn)
    for fqn, m in module.named_modules():
        if isinstance(m, FSDPModule):  # those of earlier calls thought they were the root
            m._mfsdp_unit.fqn, m._mfsdp_unit.frame = fqn or "(root)", frame
    module.__dict__["_mfsdp_call"] = {
        "units": units, "strategy": strategy, "outer_strategy": outer_strategy, "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward,
    }  # fmt: skip
    for param, ref in where.items():
        _stale[param] = ref
        ref.buffer.before_first_gradient = _no_stale_optimizer
    return module


@dataclass
class Blueprint:
    """A model on the meta device as it was before it was sharded, if it was; and how it was."""

    model: nn.Module
    calls: list[tuple[nn.Module, dict[str, Any]]]
    """Which of its modules were given to :func:`fully_shard`, with which arguments, in order."""
    twins: dict[int, Any]
    """What has become of tensors, by ``id``."""


def blueprint(model: nn.Module) -> Blueprint:
    """The plan of a model, which is not changed; parameters require gradients as when they were sharded.

    Raises:
        ValueError: the model holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
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
    calls = []
    for m in out.modules():
        if "_mfsdp_unit" in m.__dict__:
            m.__class__ = type(m).__bases__[-1]
            call = m.__dict__.pop("_mfsdp_call", None)
            for name in ("_mfsdp_unit", "_mfsdp_refs"):
                m.__dict__.pop(name, None)
            if call is not None:
                calls.append((m, call))
    return Blueprint(out, calls[::-1], twins)


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
class _Claim:
    """A unit to be: its module, the modules whose forward it covers, the parameters it owns and where they hang."""

    module: nn.Module
    fqn: str
    modules: list[nn.Module] = field(default_factory=list)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    names: dict[nn.Parameter, str] = field(default_factory=dict)


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
            if param is None or param in ignored or isinstance(param, ShardedParameter):
                continue
            full = f"{fqn}.{name}" if fqn else name
            _valid_parameter(full, param)
            home[param] = common(home[param], unit) if param in home else unit
            places.setdefault(param, []).append((m, name, full))
    for param, uses in places.items():
        claim = claims[home[param]]
        claim.owners[param] = [(m, name) for m, name, _ in uses]
        prefix = path[home[param]]
        claim.names[param] = uses[0][2].removeprefix(prefix + "." if prefix else "")
    return list(claims.values())


def _valid_parameter(fqn: str, param: nn.Parameter) -> None:
    if not param.is_floating_point():
        raise ValueError(
            f"fully_shard: parameter {fqn} is {param.dtype}; only floating-point parameters can be sharded. "
            "Pass it in ignored_params, or make it a buffer."
        )
    if param in _stale:
        raise ValueError(
            f"fully_shard: parameter {fqn} belongs to the unit {_stale[param].unit.fqn!r} already; tie weights before "
            "sharding and shard both modules in one call, fully_shard(root, units=[...])"
        )


def _device(claims: list[_Claim], device: torch.device | str | None) -> torch.device:
    devices = {p.device: name for c in claims for p, name in c.names.items() if p.device.type != "meta"}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {d}" for d, name in devices.items())
        raise ValueError(
            f"fully_shard: parameters are on different devices ({where}); move the model to one device first"
        )
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


_OTHER_AXES = {"tp", "cp", "ep", "pp", "sp", "etp"}
"""Names of axes that are never meant where none is named: those of other kinds of parallelism."""


def _mesh(mesh: DeviceMesh | None, device: torch.device) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The 1-D mesh to shard over, and the (outer, shard) mesh that it is part of, if there is an outer axis."""
    if mesh is None:
        if not runtime.initialized():
            return local_mesh(device.type, (1,)), None
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device.type, (runtime.world(),), mesh_dim_names=("dp_shard",))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh={mesh!r}: give a torch.distributed DeviceMesh")
    names = mesh.mesh_dim_names or ()
    both: DeviceMesh | None = None
    if mesh.ndim > 1:
        if names == ("dp_outer", "dp_shard"):
            both = mesh
        elif "dp_shard" in names and "dp_outer" in names:
            if names.index("dp_shard") < names.index("dp_outer"):
                raise ValueError(f"fully_shard: 'dp_outer' has to come before 'dp_shard' in the mesh; it is {names}")
            both = mesh["dp_outer", "dp_shard"]
        elif "dp_shard" not in names and mesh.ndim == 2 and names and not _OTHER_AXES & set(names):
            both = mesh
        elif "dp_shard" not in names:
            raise ValueError(
                f"fully_shard: which axes of the {mesh.ndim}-D mesh are meant? Name the one to shard over 'dp_shard', "
                f"and an outer one 'dp_outer'; the axes are {names or 'unnamed'}"
            )
        mesh = inner_axis(mesh, "dp_shard" if "dp_shard" in names else names[1])
    if device.type != "meta" and mesh.device_type != device.type:
        raise ValueError(
            f"fully_shard: the mesh is over {mesh.device_type!r} but parameters go to {str(device)!r}; "
            "pass device= or a mesh of that device type"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"fully_shard: this rank is not in {mesh}; shard only on ranks that are")
    return mesh, both


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


def _build(
    claim: _Claim,
    unit: UnitState,
    where: dict[nn.Parameter, Ref],
    policy: MixedPrecisionPolicy,
    placement: Placement,
    device: torch.device,
    reshard: bool,
) -> None:
    """Makes the unit's buffers and fills them; the module is not touched."""
    kinds: dict[tuple[Precision, bool], list[nn.Parameter]] = {}
    for param in claim.owners:
        kinds.setdefault((policy.resolve(param.dtype), param.requires_grad), []).append(param)
    for (precision, trainable), params in kinds.items():
        layout = plan([(claim.names[p], tuple(p.shape)) for p in params], placement.cut)
        buffer = FlatBuffer(unit, layout, placement, precision, trainable=trainable, reshard=reshard, device=device)
        unit.buffers.append(buffer)
        for slot, param in enumerate(params):
            carry_attributes(param, buffer.params[slot])
            entry = layout.slots[slot]
            where[param] = Ref(buffer, slot, entry.offset, entry.shape, unit, len(unit.buffers) - 1)
            with torch.no_grad():
                if param.is_meta:
                    buffer.born_on_meta[slot] = param.dtype
                    buffer.view(buffer.main, slot).fill_(torch.nan)
                else:
                    buffer.keep(slot, param)


@contextmanager
def _undo() -> Iterator[list[Callable[[], None]]]:
    """Collects how to take changes back, and does so when something fails."""
    steps: list[Callable[[], None]] = []
    try:
        yield steps
    except BaseException:
        for step in reversed(steps):
            step()
        raise


def _hand_over(owner: nn.Module, name: str, ref: Ref, undo: list[Callable[[], None]]) -> None:
    old = owner._parameters[name]
    owner._parameters[name] = cast(nn.Parameter, ref.buffer.params[ref.slot])
    owner.__dict__.setdefault("_mfsdp_refs", {})[name] = ref

    def back() -> None:
        owner._parameters[name] = old
        owner.__dict__.get("_mfsdp_refs", {}).pop(name, None)

    undo.append(back)


def _swap(owner: nn.Module, unit: UnitState, is_unit: bool, undo: list[Callable[[], None]]) -> None:
    old = type(owner)
    owner.__dict__["_mfsdp_unit"] = unit
    owner.__class__ = _subclass(old, tuple(refs(owner)), is_unit)  # type: ignore[arg-type]

    def back() -> None:
        owner.__class__ = old
        owner.__dict__.pop("_mfsdp_unit", None)
        owner.__dict__.pop("_mfsdp_refs", None)

    undo.append(back)


@functools.cache
def _subclass(base: type[nn.Module], names: tuple[str, ...], is_unit: bool) -> type[nn.Module]:
    """The class that a module gets: parameters are properties, forward opens a scope for the eager path.

    Cached, so that equal layers keep equal types and Dynamo's guards stay the same.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A graph break inside of a `try` makes Dynamo run this frame as plain Python, where the scope is opened.
        scope = None if torch.compiler.is_compiling() or self._mfsdp_unit.open else fallback.scope(self)
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            if scope is not None:
                scope.close()

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if name in refs(self) and param is not self._parameters.get(name):
            raise ValueError(
                f"{type(self).__name__}.{name} is sharded and cannot be replaced; write its values in place, "
                "with copy_() or inside mfsdp.summon_full_params(model)"
            )
        base.register_parameter(self, name, param)

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
        "register_parameter": register_parameter,
        "_apply": _apply,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        **{name: _property(name) for name in names},
    }
    if issubclass(base, nn.RNNBase):
        space["_flat_weights"] = property(
            lambda self: [getattr(self, n) if n in self._parameters else None for n in self._flat_weights_names],
            lambda self, value: None,
        )
    bases = (FSDPModule, base) if is_unit else (base,)
    return cast(type[nn.Module], type(base.__name__, bases, space))


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
        return fallback.read(self, name, ref)  # type: ignore[no-any-return]

    # Where plain Python reads a parameter, a graph of one marker would gather the unit for it alone.
    fallback.never_a_frame(get)
    return property(get)


# Around training


@contextmanager
def no_sync(module: nn.Module, *, hold: bool | None = None) -> Iterator[None]:
    """Backward calls inside of the ``with`` do not synchronise gradients; the next one outside does, for all.

    Every unit that took part inside has to take part in the one that synchronises. What waits is not in ``.grad``, and
    neither optimizers' ``zero_grad`` nor that of torch.compile's wrapper reaches it: to give up a step half-way, call
    ``zero_grad`` of what `fully_shard` returned.

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
    kept = [m._mfsdp_unit.kept for m in units]
    try:
        for m in units:
            m.unshard()
            m._mfsdp_unit.open = True
        yield
    finally:
        for m, was in zip(units, kept, strict=True):
            m._mfsdp_unit.open = False
            if not was:
                m.reshard()
