"""megatron-fsdp's configuration objects, which the constructor of `MegatronFSDP` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from .arguments import Arguments


@dataclass
class FSDPDistributedIndex:
    """The mesh, and the names of its axes, as in `fully_shard_model`."""

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: Any = None
    hybrid_fsdp_expt_group: Any = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: Any = None
    expt_fsdp_group_ag: Any = None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `fully_shard_model` that it stands for."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "hsdp_outer_dp_shard"}
        return {**said, "outer_dp_sharding_strategy": int(self.hsdp_outer_dp_shard)}

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Returns the mesh."""
        return self._mesh(is_expert_parallel)

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """Returns a part of the mesh."""
        names = mesh_dim_names if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        return self._mesh(is_expert_parallel)[names]

    def get_fsdp_group(self, is_expert_parallel: bool = False, independent_all_gather: bool = False) -> Any:
        """Returns the process group of the shard axis; ``independent_all_gather`` has no effect."""
        return self._group(self.dp_shard_dim, is_expert_parallel)

    def get_outer_fsdp_group(self) -> Any:
        """Returns the process group of the outer axis."""
        return self._group(self.dp_outer_dim, False)

    def get_dp_group(self, is_expert_parallel: bool = False) -> Any:
        """Returns the process group of all data-parallel ranks."""
        both = self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        if both is None and self.dp_outer_dim is not None:
            name = "hybrid_fsdp_expt_group" if is_expert_parallel else "hybrid_fsdp_group"
            raise ValueError(
                f"FSDPDistributedIndex.get_dp_group: there are two axes, and no group of both: give {name}"
            )
        return self.get_fsdp_group(is_expert_parallel) if both is None else both

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> NoReturn:
        """Raises NotImplementedError: ``param.to_local()`` is this rank's part."""
        raise NotImplementedError("get_logical_hybrid_fsdp_rank: param.to_local() is this rank's part of a parameter")

    def _mesh(self, expert: bool) -> DeviceMesh:
        mesh = self.expt_device_mesh if expert else self.device_mesh
        if mesh is None:
            raise ValueError("FSDPDistributedIndex: there is no expt_device_mesh")
        return mesh

    def _group(self, name: str | None, expert: bool) -> Any:
        if name is None:
            raise ValueError("FSDPDistributedIndex: the axis has no name: give dp_shard_dim, or dp_outer_dim")
        return self._mesh(expert)[name].get_group()


@dataclass
class DistributedDataParallelConfig:
    """Settings of `MegatronFSDP`, with megatron-fsdp's defaults.

    Raises:
        NotImplementedError: ``bucket_size`` or ``suggested_communication_unit_size`` is set.
    """

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        for name, instead in _NO_SIZES.items():
            if getattr(self, name) is not None:
                raise NotImplementedError(f"{name}={getattr(self, name)!r}: {instead}")

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `fully_shard_model` that it stands for. As there, strategy 3 overlaps gathers
        always.

        Raises:
            ValueError: it has dtypes, which the constructor takes from ``mixed_precision_policy``.
        """
        for f in fields(self):
            if f.name.endswith("_dtype") and getattr(self, f.name) != f.default:
                raise ValueError(
                    f"{f.name}: MegatronFSDP(mixed_precision_policy=) says dtypes; leave it at its default"
                )
        same = {f.name: getattr(self, f.name) for f in fields(self) if f.name in Arguments.__dataclass_fields__}
        renamed = {ours: getattr(self, theirs) for theirs, ours in _RENAMED.items()}
        if self.data_parallel_sharding_strategy == "optim_grads_params":
            same["overlap_param_gather"] = True
        return same | renamed


_NO_SIZES = {
    "bucket_size": "units define what is communicated at once: choose smaller or larger fsdp_unit_modules",
    "suggested_communication_unit_size": "units define what is communicated at once; how far ahead, in units: "
    "options={'prefetch': 2, 'reduce_lag': 2}, in bytes: options={'max_unsharded': 2**30} (MFSDP_OPTIONS)",
}
_RENAMED = {
    "data_parallel_sharding_strategy": "zero_dp_strategy",
    "megatron_fsdp_use_decoupled_grad": "use_decoupled_grad",
    "megatron_fsdp_cuda_graph_mode": "cuda_graph_mode",
    "megatron_fsdp_enable_fine_grained_param_gather": "enable_fine_grained_param_gather",
    "megatron_fsdp_max_pool_double_buffer": "maxpool_double_buffer",
}
