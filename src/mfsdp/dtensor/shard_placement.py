"""DTensor placements of uneven rows, for which torch's own rule gives wrong answers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard


class RowShard(Shard):
    """``Shard(0)`` in which each rank states its own rows, any number of them.

    torch's own cuts dimension 0 into even chunks. Code that asks a placement instead of computing (torch's
    ``compute_local_shape_and_global_offset``, ``redistribute`` of full tensors) gets the local rows. It equals
    ``Shard(0)``, which ``DTensorSpec`` requires, and another `RowShard` only with the same rows.

    Private in torch (the methods it overrides); tried on 2.12 to 2.14, not on the others of 2.11 to 2.15.

    Args:
        rows: number of local rows, and the first one's index. ``None``: the tensor is cut inside rows; asking raises.
        last: whether this is the last mesh axis that cuts; earlier axes leave the cut to it.
    """

    def __init__(self, rows: tuple[int, int] | None, last: bool = True):
        super().__init__(0)
        self.rows, self.last = rows, last

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, int]:
        if self.rows is None:
            raise NotImplementedError(_NO_RANGE)
        return self.rows if self.last else (curr_local_size, 0)

    def _select_split_tensor(self, tensor: torch.Tensor, num_chunks: int, index: Any, **how: Any) -> torch.Tensor:
        rows, first = self._local_shard_size_and_offset(tensor.shape[0], num_chunks, index)
        part = tensor.narrow(0, first, rows)
        return part.clone() if how.get("clone", True) else part.contiguous()

    def _shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0
    ) -> torch.Tensor:
        return self._select_split_tensor(tensor, mesh.size(mesh_dim), None)

    def _to_replicate_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("torch cannot gather rows that are cut unevenly; use .full_tensor() of the parameter")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return (self.rows, self.last) == (other.rows, other.last)
        return super().__eq__(other)  # may be NotImplemented

    def __hash__(self) -> int:
        """Differs from ``Shard(0)``'s: torch's caches must not confuse the two."""
        return hash((RowShard, self.rows, self.last))

    def __reduce__(self) -> tuple[object, ...]:
        return RowShard, (self.rows, self.last)

    def __repr__(self) -> str:
        return f"RowShard(rows={self.rows})" if self.last else "RowShard()"

    __str__ = __repr__


class StridedRowShard(_StridedShard):
    """``_StridedShard(0, split_factor)``: FSDP2's placement for rows of a dimension that tensor parallelism has cut.

    torch would compute local rows by its rule of even chunks, so those methods raise. Private in torch; tried on
    2.11 to 2.15.

    Args:
        split_factor: number of parts into which the other parallelism cuts dimension 0.
    """

    def __new__(cls, split_factor: int) -> StridedRowShard:
        return super().__new__(cls, 0, split_factor=split_factor)  # type: ignore[call-arg]

    def __init__(self, split_factor: int):
        super().__init__(0, split_factor=split_factor)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(_NO_RANGE)

    _local_shard_size_and_offset = _split_tensor = _to_replicate_tensor = _shard_tensor = _select_shard = _refuse

    def __reduce__(self) -> tuple[object, ...]:
        return StridedRowShard, (self.split_factor,)


_NO_RANGE = (
    "this sharded tensor is cut inside of what dimension 0 counts (an expert of several, rows that tensor parallelism "
    "has cut): which part a rank holds is no range of it. Use .full_tensor(), or mfsdp's and "
    "torch.distributed.checkpoint's functions on state dicts."
)
