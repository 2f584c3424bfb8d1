"""transformers integration: after the import, ``DistributedConfig`` means mfsdp.

    import mfsdp.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(fsdp_size=8))

`from_pretrained` returns a model that is sharded by its own plan (``fsdp_plan``) and compiled in place. Every rank
reads its own rows from the files, and, where each expert is a tensor, only experts that it has a part of. Parameters
that transformers joins or splits while reading are read in full, one at a time. The model initializes parameters that
the files lack, with the same random numbers on all ranks.

`ShardingConfig`, or ``MFSDP_OPTIONS`` and ``MFSDP_SHARDING`` in the environment (`mfsdp.integrations.environment`),
take settings that the configuration has no field for.

`_install` and `_shard` list every replacement in transformers; tried with 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers.core_model_loading as loading
import transformers.distributed.fsdp as theirs
import transformers.distributed.mixin as mixin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig
from transformers.modeling_utils import PreTrainedModel

from ..buffers.flat_buffer import Ref, refs
from ..checkpoints.tensors import boxes
from ..config.options import MixedPrecisionPolicy
from ..config.patches import around
from ..dtensor.sharded_dtensor import ShardedDTensor
from ..runtime import devices, groups, sync_collectives
from ..sharding import materialize
from ..sharding.module import FSDPModule
from ..sharding.shard import fully_shard
from . import environment

Device = torch.device | str | int | None

PLANNED = ("module", "units", "mesh", "dp_mesh_dims", "device", "reshard_after_forward", "param_init_fn")
"""Arguments of `fully_shard` that follow from a configuration."""


@dataclass(repr=False)
class ShardingConfig(DistributedConfig):  # type: ignore[misc]
    """transformers' configuration, with settings that it has no field for.

    Args:
        options: of the backend, as in ``torch.compile(..., options=...)``; they override ``MFSDP_OPTIONS``.
        sharding: arguments of `mfsdp.fully_shard` (``strategy``, ``mp_policy``, ...). They override ``MFSDP_SHARDING``,
            which overrides the configuration's own fields. Units and ranks are set by its own fields only:
            ``fsdp_plan``, ``fsdp_size``, ``dp_replicate_size``.

    Raises:
        ValueError: an option that the backend does not have, or an argument that the configuration's own fields set.
    """

    options: dict[str, Any] | None = None
    sharding: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        environment.options(self.options)
        _arguments(self)


@dataclass
class _Reading:
    """State of a model between sharding and the end of `from_pretrained`."""

    initialise: list[Callable[[], None]]
    """Functions that initialize parameters that the files lack."""
    unlike: list[str] = field(default_factory=list)
    """Names of tied parameters that the files contain twice, with different values."""


# Sharding


def _shard(own: Callable[..., PreTrainedModel], model: PreTrainedModel, *plan: object) -> PreTrainedModel:
    """Replaces ``apply_fully_sharded_data_parallelism``: its calls of torch's `fully_shard` go to mfsdp's."""
    config = getattr(model.config, "distributed_config", None)
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotImplementedError(
            f"from_pretrained: {type(model).__name__} is quantised ({model.config.quantization_config}), which mfsdp "
            "does not shard; leave out quantization_config"
        )
    options, more = environment.options(getattr(config, "options", None)), _arguments(config)

    def ours(module: nn.Module | list[nn.Module], *, mesh: DeviceMesh, **asked: Any) -> list[nn.Module]:
        dims = {"shard": names[-1], "replicate": names[:-1]} if len(names := mesh.mesh_dim_names or ()) > 1 else None
        given = {"reshard_after_forward": None, "mp_policy": MixedPrecisionPolicy(main_params_dtype=None), **asked}
        unit = _with_tied(model, module if isinstance(module, list) else [module])
        return fully_shard(unit, mesh=mesh, dp_mesh_dims=dims, **{**given, **more})

    model.tie_weights(recompute_mapping=False)  # transformers ties after loading; here they must share a shard first
    torchs = theirs.fully_shard
    theirs.fully_shard = ours  # type: ignore[assignment]
    try:
        with materialize.postponed() as calls:
            model = own(model, *plan)
    finally:
        theirs.fully_shard = torchs
    del model._is_fsdp_managed_module  # Dynamo does not trace modules with it; see `_managed`
    model.__dict__["_mfsdp_reading"] = _Reading(calls)
    model.compile(backend="mfsdp", options=options)
    return model


def _managed(own: Callable[[nn.Module], bool], module: nn.Module) -> bool:
    """Replaces ``is_fsdp_managed_module``: whether ranks must continue together (``generate``), and the model's own
    methods turn off gradient synchronization (Trainer).
    """
    loaded = getattr(module, "is_distributed_loading_by_transformers", False) and isinstance(module, FSDPModule)
    return bool(loaded or own(module))


def _with_tied(model: nn.Module, unit: list[nn.Module]) -> list[nn.Module]:
    """Returns a unit, and the modules outside it that share a parameter with it (an embedding and its tied head)."""
    inside = dict.fromkeys(m for root in unit for m in root.modules())
    params = {id(p) for m in inside for p in m._parameters.values() if p is not None}
    tied = [m for m in model.modules() if m not in inside and params & {id(p) for p in m._parameters.values()}]
    return [*unit, *tied]


def _arguments(config: DistributedConfig | None) -> dict[str, Any]:
    """Returns the arguments of `mfsdp.fully_shard` that a configuration or the environment adds."""
    found = environment.sharding(getattr(config, "sharding", None))
    if clash := [name for name in PLANNED if name in found]:
        raise ValueError(
            f"sharding={', '.join(clash)}: DistributedConfig's own fields say that: fsdp_plan, fsdp_size, "
            "dp_replicate_size"
        )
    return found


# Reading


class _Rows:
    """Replaces transformers' ``DtensorShardOperation`` for one parameter of mfsdp: reads this rank's part of it."""

    def __init__(self, param: ShardedDTensor):
        self._shape = tuple(param.shape)
        self._places = [place for place, _ in boxes(param)]
        ends = [(place[0].start, place[0].stop) for place in self._places if place]
        self._ours = min((e[0] for e in ends), default=0), max((e[1] for e in ends), default=1)

    @property
    def owned(self) -> range:
        """Indices of dimension 0 of which this rank holds a part; the first, if it holds nothing."""
        return range(*self._ours)

    def shard_tensor(
        self, source: Any, tensor_idx: int | None = None, device: Device = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """Returns this rank's elements, 1-D, of a tensor in a file, or of a slice of it, which is read when indexed.

        With ``tensor_idx``, its number among those that are joined, or split, to parameters: all of it; but ``None`` if
        it becomes a part of dimension 0 of which this rank holds nothing. If the parameter has another shape: a meta
        tensor of the file's.
        """
        shape = tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        if tensor_idx is not None:
            apart = len(shape) == len(self._shape) - 1
            return None if apart and tensor_idx % self._shape[0] not in self.owned else _read(source, (), device, dtype)
        if shape != self._shape:
            return torch.empty(shape, dtype=dtype, device="meta")
        parts = [_read(source, place, device, dtype).reshape(-1) for place in self._places]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)


def _read(source: Any, place: tuple[slice, ...], device: Device, dtype: torch.dtype | None) -> torch.Tensor:
    found: torch.Tensor = source[place] if place else source[...]
    return found.to(device=device, dtype=dtype)


def _operation(own: Callable[[torch.Tensor], object], param: torch.Tensor) -> object:
    """Replaces ``DtensorShardOperation``, for parameters of mfsdp and of torch."""
    return _Rows(param) if isinstance(param, ShardedDTensor) else own(param)


def _spawn(own: Callable[..., Any], thread_pool: object, *args: Any, sharding_op: object = None, **kwargs: Any) -> Any:
    """Replaces ``spawn_materialize``: a tensor that is joined or split is read in turn, so that one is full at a
    time.
    """
    if isinstance(sharding_op, _Rows) and kwargs.get("tensor_idx") is not None:
        thread_pool = None
    return own(thread_pool, *args, sharding_op=sharding_op, **kwargs)


@torch.no_grad()
def _set(
    own: Callable[..., None],
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    info: loading.LoadStateDictInfo,
    quantizer: object,
) -> None:
    """Replaces ``set_param_for_module``; writes in place."""
    ref = _ref(model, name)
    if ref is None:
        own(model, name, value, info, quantizer)
        return
    info.missing_keys.discard(name)
    param = ref.buffer.params[ref.slot]
    assert isinstance(param, ShardedDTensor)
    found = _mine(param, value)
    if found is None:
        info.mismatched_keys.add((name, value.shape, param.shape))  # type: ignore[arg-type]
        return
    news = materialize.came(ref)
    for view, part in zip((view for _, view in boxes(param)), found, strict=True):
        if not news and not torch.equal(view, part.view_as(view).to(view)):
            model.__dict__["_mfsdp_reading"].unlike.append(name)
        view.copy_(part.view_as(view))


def _mine(param: ShardedDTensor, value: torch.Tensor) -> list[torch.Tensor] | None:
    """Returns this rank's boxes of a parameter from what `_Rows` has read, possibly joined or split since; ``None`` if
    the shape is not the parameter's.
    """
    if value.is_meta:
        return None
    mine = list(boxes(param))
    if value.shape == param.shape:
        return [value[place] for place, _ in mine]
    if value.dim() == 1 and value.numel() == sum(view.numel() for _, view in mine):
        return list(value.split([view.numel() for _, view in mine]))
    owned = _Rows(param).owned
    if value.shape == (len(owned), *param.shape[1:]):
        return [
            value[(slice(place[0].start - owned.start, place[0].stop - owned.start), *place[1:])] for place, _ in mine
        ]
    return None


def _ref(model: nn.Module, name: str) -> Ref | None:
    path, _, last = name.rpartition(".")
    return refs(model.get_submodule(path)).get(last)


def _rest(own: Callable[..., None], self: Any, missing_keys: set[str], *args: object) -> None:
    """Replaces ``PreTrainedModel._move_missing_keys_from_meta_to_device``: initializes what the files lack."""
    reading: _Reading | None = self.__dict__.pop("_mfsdp_reading", None)
    if reading is None:
        own(self, missing_keys, *args)
        return
    found = {name: ref for name in self.state_dict() if (ref := _ref(self, name)) is not None}
    lacks = [name for name, ref in found.items() if ref.slot in ref.buffer.weights.born_on_meta]
    _agree(self, reading, lacks)
    for name in found.keys() - set(lacks):
        self.get_parameter(name)._is_hf_initialized = True
    if lacks:
        for initialise in reading.initialise:
            initialise()
        for name in lacks:
            self.get_parameter(name)._is_hf_initialized = True
    else:
        own(self, missing_keys - found.keys(), *args)


def _agree(model: nn.Module, reading: _Reading, lacks: list[str]) -> None:
    """Refuses, on every rank, files that differ between ranks, or have different values of tied parameters."""
    group = groups.default_group()
    here = torch.tensor([bool(reading.unlike), len(lacks), -len(lacks)], device=devices.collective_device(group))
    unlike, most, least = sync_collectives.reduced(here, "max", group).tolist()
    if unlike:
        said = ", ".join(reading.unlike) or "see the errors of other ranks"
        raise ValueError(
            f"from_pretrained: {type(model).__name__} ties parameters of which the files have different values "
            f"({said}): give config.tie_word_embeddings=False to keep both"
        )
    if most != -least:
        raise ValueError(
            f"from_pretrained: files of this rank lack {len(lacks)} parameters, those of others up to {most}: give all "
            "ranks the same files"
        )


def _install() -> None:
    """Wraps transformers' functions, once. Private there; tried with 5.23."""
    table: list[tuple[Any, str, Callable[..., Any]]] = [
        (mixin, "apply_fully_sharded_data_parallelism", _shard),
        (loading, "DtensorShardOperation", _operation),
        (loading, "spawn_materialize", _spawn),
        (loading, "set_param_for_module", _set),
        (PreTrainedModel, "_move_missing_keys_from_meta_to_device", _rest),
    ]
    managed = theirs.is_fsdp_managed_module
    for module in [m for name, m in sys.modules.items() if name.startswith("transformers.")]:
        if module.__dict__.get("is_fsdp_managed_module") is managed:  # also those that imported it by name
            table.append((module, "is_fsdp_managed_module", _managed))
    for where, name, ours in table:
        setattr(where, name, around(getattr(where, name), ours))


_install()
