"""Arguments of megatron-fsdp 0.6.1, and of its older versions, in terms of `mfsdp.fully_shard` and the backend."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...buffers.sharding_plan import OUTER, strategy_name
from ...config.options import Options
from ...runtime import groups
from .. import environment
from .mixed_precision import MixedPrecisionPolicy, policy_of


class ShardingStrategy(IntEnum):
    """What is sharded, by number."""

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3


@dataclass(frozen=True)
class Arguments:
    """Arguments of `fully_shard_model` besides the module, in megatron-fsdp's order and with its defaults.

    docs/from_megatron_fsdp.md says what each does here. The last ones are of older versions (``None``: not given), and
    this integration's own: ``options`` of the backend, ``sharding``, arguments of `mfsdp.fully_shard`, which override
    the others and ``MFSDP_SHARDING``, and whether to ``compile``.

    Raises:
        ValueError: a value that megatron-fsdp does not know either, two that contradict each other, or an option that
            the backend does not have.
        NotImplementedError: what mfsdp does not have; says what to do instead.
        TypeError: an unknown argument.
    """

    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: Any = None
    hybrid_fsdp_expt_group: Any = None
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: Any = None
    expt_fsdp_group_ag: Any = None
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None
    zero_dp_strategy: str | int = 3
    outer_dp_sharding_strategy: str | int = 0
    device: torch.device | None = None
    init_model_with_meta_device: bool = False
    mixed_precision_policy: Any = field(default_factory=MixedPrecisionPolicy)
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    sync_model_each_microbatch: bool = True
    preproc_state_dict_for_dcp_ckpt: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    disable_symmetric_registration: bool = False
    enable_fine_grained_param_gather: bool = False
    use_decoupled_grad: bool = False
    cuda_graph_mode: bool = False
    maxpool_double_buffer: bool = False
    _: KW_ONLY
    preserve_fp32_weights: bool | None = None
    grad_reduce_in_fp32: bool | None = None
    check_for_nan_in_grad: bool | None = None
    options: Mapping[str, Any] | None = None
    sharding: Mapping[str, Any] | None = None
    compile: bool = True

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if str(f.type).startswith("bool") and not (isinstance(value, bool) or value is f.default):
                raise ValueError(f"{f.name}={value!r}: choose True or False")
        if self.cuda_graph_mode:
            raise NotImplementedError(
                "cuda_graph_mode=True: leave it out, and call mfsdp.capture_step(step, model, optimizer)"
            )
        self.strategies()
        self.policy()
        self.backend_options()

    def __deepcopy__(self, memo: object) -> Arguments:
        return self  # a mesh and process groups have no copies

    def strategies(self) -> tuple[str, str]:
        """Returns ``strategy`` and ``outer_strategy`` by name."""
        try:
            strategy = strategy_name(self.zero_dp_strategy)
        except ValueError as error:
            raise ValueError(f"zero_dp_{error}") from None
        outer = self.outer_dp_sharding_strategy
        if isinstance(outer, int) and not isinstance(outer, bool) and outer in range(len(OUTER)):
            outer = OUTER[outer]
        if outer not in OUTER:
            choices = f"{list(range(len(OUTER)))} or {OUTER}"
            raise ValueError(f"outer_dp_sharding_strategy={outer!r}: choose one of {choices}")
        return strategy, str(outer)

    def policy(self) -> MixedPrecisionPolicy:
        """Returns the policy; two flags of older versions set its dtypes."""
        policy = policy_of(self.mixed_precision_policy)
        old = {"preserve_fp32_weights": "main_params_dtype", "grad_reduce_in_fp32": "main_grads_dtype"}
        for name, dtype in old.items():
            value = getattr(self, name)
            if value is None:
                continue
            if policy != MixedPrecisionPolicy():
                raise ValueError(f"{name}= and mixed_precision_policy= both say {dtype}: leave out {name}")
        if self.preserve_fp32_weights is False:
            policy = replace(policy, main_params_dtype=None)
        if self.grad_reduce_in_fp32:
            policy = replace(policy, main_grads_dtype=torch.float32)
        return policy

    def backend_options(self) -> dict[str, Any]:
        """Returns the backend's options: ``options`` and the environment override what other arguments say."""
        said = {
            **({} if self.overlap_param_gather else {"prefetch": 0}),
            **({} if self.overlap_grad_reduce else {"reduce_lag": 0}),
            **({"nccl_ub": True} if self.nccl_ub else {}),
            **({"disable_symmetric_registration": True} if self.disable_symmetric_registration else {}),
        }
        found = {**said, **environment.options(self.options)}
        Options.parse(found)
        if not self.compile and found:
            raise ValueError(
                f"compile=False, and these are options of the compiled model: {found}. Give them to "
                'torch.compile(model.module, backend="mfsdp", options=...)'
            )
        return found

    def for_module(self, module: nn.Module) -> dict[str, Any]:
        """Returns the arguments of `mfsdp.fully_shard` for a module.

        Warns:
            UserWarning: a class of ``fsdp_unit_modules`` is in no module.

        Raises:
            ValueError: the mesh does not have the named axes, or ``hybrid_fsdp_group`` has other ranks than they.
        """
        return {"units": self._units(module), **self._mesh(), **self._same(), **environment.sharding(self.sharding)}

    def for_experts(self, module: nn.Module) -> tuple[list[nn.Module], dict[str, Any]]:
        """Returns the modules of experts that have a mesh of their own, and the arguments of `mfsdp.fully_shard` for
        each.

        Raises:
            ValueError: the mesh's axes have no names in the other arguments, or a module has experts and others.
        """
        mesh = self.expt_device_mesh
        experts = self._experts(module)
        mixed = _mixed(module, experts)
        if mesh is None or not (experts or mixed):
            return [], {}
        if self.dp_shard_dim is None:
            raise ValueError("expt_device_mesh without dp_shard_dim: name its axis of data parallelism")
        if mixed:
            raise ValueError(
                f"expt_device_mesh: {mixed} is an expert's, and its module has parameters of other ranks too: give "
                "experts a module of their own"
            )
        names = [name for name in (self.dp_outer_dim, self.dp_shard_dim) if name in (mesh.mesh_dim_names or ())]
        if self.dp_shard_dim not in names:
            there = mesh.mesh_dim_names
            raise ValueError(f"dp_shard_dim={self.dp_shard_dim!r} is no axis of expt_device_mesh, which has {there}")
        over = environment.sharding(self.sharding)
        other = {name: value for name, value in over.items() if name not in ("mesh", "dp_mesh_dims", "units")}
        return experts, {"mesh": mesh[tuple(names) if len(names) > 1 else names[0]], **self._same(), **other}

    def _experts(self, module: nn.Module) -> list[nn.Module]:
        if self.expt_device_mesh is None:
            return []
        return list(_outermost_experts(module))

    def _same(self) -> dict[str, Any]:
        """What is the same for experts and for the rest."""
        strategy, outer = self.strategies()
        return {
            "strategy": strategy,
            "outer_strategy": outer,
            "mp_policy": self.policy(),
            "device": None if self.init_model_with_meta_device else self.device,
            "sync_module_states": True,
        }

    def _units(self, module: nn.Module) -> list[type[nn.Module] | str] | None:
        if isinstance(self.fsdp_unit_modules, (str, type)):
            raise ValueError(f"fsdp_unit_modules={self.fsdp_unit_modules!r}: give a list, [{self.fsdp_unit_modules!r}]")
        kinds = [_class(unit) for unit in self.fsdp_unit_modules or ()]
        unused = [k.__name__ for k in kinds if not any(isinstance(m, k) for m in module.modules())]
        if unused:
            warnings.warn(
                f"mfsdp: fsdp_unit_modules: no module of this {type(module).__name__} is a {', '.join(unused)}",
                stacklevel=6,
            )
        inner = [m for m in module.modules() if m is not module and isinstance(m, tuple(kinds))]
        apart = {m for expert in self._experts(module) for m in expert.modules()}
        if not self.enable_fine_grained_param_gather and apart.isdisjoint(inner):
            return [k for k in kinds if any(isinstance(m, k) for m in inner)] or None
        chosen = set(inner)
        if self.enable_fine_grained_param_gather:
            chosen = {m for unit in inner for m in unit.modules() if m._parameters}
        return [name for name, m in module.named_modules() if name and m in chosen - apart] or None

    def _mesh(self) -> dict[str, Any]:
        mesh = self.device_mesh
        if (self.dp_outer_dim is None) and self.hybrid_fsdp_group is not None:
            raise ValueError("hybrid_fsdp_group without dp_outer_dim: name the outer axis too, or leave out both")
        if mesh is None:
            if self.dp_outer_dim is not None or self.strategies()[1] != OUTER[0]:
                raise ValueError("dp_outer_dim and outer_dp_sharding_strategy need a device_mesh with that axis")
            return {}
        if self.dp_shard_dim is None:
            if self.dp_outer_dim is not None:
                raise ValueError(f"dp_outer_dim={self.dp_outer_dim!r} without dp_shard_dim: name both axes")
            return {"mesh": mesh}
        if self.dp_outer_dim is None and self.strategies()[1] != OUTER[0]:
            raise ValueError("outer_dp_sharding_strategy without dp_outer_dim: name the outer axis of device_mesh too")
        shard = _axes(mesh, "dp_shard_dim", self.dp_shard_dim)
        outer = () if self.dp_outer_dim is None else _axes(mesh, "dp_outer_dim", self.dp_outer_dim)
        if self.hybrid_fsdp_group is not None:
            mine, given = _ranks(mesh, (*outer, *shard)), groups.ranks(self.hybrid_fsdp_group.group_name)
            if mine != set(given):
                raise ValueError(
                    f"hybrid_fsdp_group has ranks {sorted(given)}, and {(*outer, *shard)} of device_mesh {sorted(mine)}"
                )
        return {"mesh": mesh, "dp_mesh_dims": {"shard": shard, "replicate": outer}}


def _class(unit: type[nn.Module] | str) -> type[nn.Module]:
    """Returns a unit's class, also for an import path."""
    found: object = unit
    if isinstance(unit, str):
        where, _, name = unit.rpartition(".")
        try:
            found = getattr(importlib.import_module(where), name, None) if where else None
        except (ImportError, TypeError, ValueError):  # also of a relative path
            found = None
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise ValueError(f"fsdp_unit_modules: {unit!r} is no class of modules, nor the import path of one")


def _is_expert(param: nn.Parameter) -> bool:
    """Whether Megatron-LM marks a parameter as an expert's, and it is not sharded yet."""
    return getattr(param, "allreduce", True) is False and type(param) is nn.Parameter


def _outermost_experts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields modules whose parameters are all experts', and none below them."""
    experts = [_is_expert(p) for p in module.parameters()]
    if experts and all(experts):
        yield module
        return
    for child in module.children():
        yield from _outermost_experts(child)


def _mixed(module: nn.Module, experts: Sequence[nn.Module]) -> str | None:
    """Returns the name of an expert's parameter that is in none of these modules."""
    inside = {id(p) for m in experts for p in m.parameters()}
    return next((n for n, p in module.named_parameters() if _is_expert(p) and id(p) not in inside), None)


def _axes(mesh: DeviceMesh, argument: str, name: str) -> tuple[str, ...]:
    """Returns the axes of a mesh that a name stands for: one of its own, or what ``mesh[axes]._flatten(name)`` made."""
    names = mesh.mesh_dim_names or ()
    if name in names:
        return (name,)
    try:
        with warnings.catch_warnings():  # torch's, that flattened axes should be kept by the caller
            warnings.simplefilter("ignore")
            ranks = set(mesh[name].mesh.flatten().tolist())
    except (KeyError, RuntimeError):
        raise ValueError(f"{argument}={name!r} is no axis of device_mesh, which has {names}") from None
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            if _ranks(mesh, chosen) == ranks:
                return chosen
    raise ValueError(f"{argument}={name!r} of device_mesh has ranks {sorted(ranks)}, which are no axes of it")


def _ranks(mesh: DeviceMesh, names: Sequence[str]) -> set[int]:
    """Returns the ranks that differ from this one along some axes only."""
    own = mesh.get_coordinate() or [0] * mesh.ndim
    every = slice(None)
    at = tuple(every if name in names else here for name, here in zip(mesh.mesh_dim_names or (), own, strict=True))
    return set(mesh.mesh[at].flatten().tolist())
