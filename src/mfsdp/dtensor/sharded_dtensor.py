"""DTensors with uneven shards: parameters, gradients and optimizer state as users see them.

torch's DTensor cuts dimension 0 into even chunks. Here a `Layout` cuts it: every rank holds a range of entire rows, of
any length, perhaps none. `ShardedDTensor` has its own dispatch: elementwise operations run on local tensors, reductions
add one collective, and other operations raise an error that names them. This also removes DTensor's sharding
propagation from the optimizer step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from ..config.layout import Layout, Segment, Slot
from ..runtime import groups, sync_collectives
from . import eager_autograd, torchao
from . import transformer_engine as te
from .eager_autograd import Args, Function, Kwargs
from .shard_spec import ShardSpec, strides_of
from .tp_shards import TPShard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


Types = Sequence[type]
"""Classes of the tensors among an operator's arguments."""

Handler = Callable[[OpOverload, Args, Kwargs], Any]
"""Runs an operator on sharded tensors."""


def _nobody(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    raise AssertionError("mfsdp.dtensor.dispatch has not been imported")


_dispatch: Handler = _nobody


def dispatched_by(handler: Handler) -> None:
    """Sets the handler of operators (`dispatch`, which imports these classes)."""
    global _dispatch
    _dispatch = handler


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: OpOverload, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if any(issubclass(t, ShardedDTensor) for t in types):
            return _dispatch(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_DISPATCHES = not torch.__version__.startswith("2.11.")
"""Whether torch calls ``__torch_dispatch__`` of DTensor subclasses. 2.11, the oldest that is supported, calls DTensor's
own, in C++: there ``__torch_function__`` intercepts every call, under a mode that runs first.
"""


def _native(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Calls a torch function without ``__torch_function__``."""
    if _DISPATCHES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    with _Dispatch(), torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_DETACHES = (torch.Tensor.detach, torch.detach)


class Written(Protocol):
    """Memory of a flat buffer that DTensors view: weights or gradients."""

    stale: bool
    """Set by each write through a DTensor."""
    exposed: bool
    """Whether rows have been handed out as a plain tensor, which may be written to undetected."""

    def before_write(self, rows: torch.Tensor | None = None) -> None:
        """Called before each write through a DTensor, with the rows that will be written to if they are known."""

    def hand_out(self, rows: torch.Tensor) -> None:
        """Called where rows are handed out as a plain tensor; sets ``exposed``."""


class ShardedDTensor(DTensor):
    """A DTensor whose local tensor is the rows that its `ShardSpec` gives this rank.

    Args:
        local: this rank's rows, of shape ``sharding.local().shape``.
        sharding: which rank holds which rows.
    """

    _local_tensor: torch.Tensor
    _sharding: ShardSpec
    _mfsdp_written: Written | None = None
    """What it views, if any."""
    _mfsdp_bytes: tuple[torch.Tensor, object] | None = None
    """Of a part of a quantized weight: the parameter of bytes, and its ``quantized_form.Stored``."""
    _mfsdp_part: tuple[str, object] | None = None
    """Of such a part: its parameter's name, and the weight's ``quantized_form.Form``."""
    _mfsdp_numbers: str = ""
    """Python numbers that it was computed with, outside of forward (`eager_autograd`)."""

    @staticmethod
    def __new__(cls, local: torch.Tensor, sharding: ShardSpec, requires_grad: bool = False) -> ShardedDTensor:
        spec = sharding.spec(local.dtype)
        out = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        out._local_tensor = local.detach()
        out._sharding, out._spec = sharding, spec
        return out

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.Tensor.__init__(self)

    @classmethod
    def __torch_function__(cls, func: Function, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if torch.is_inference_mode_enabled() and func in _DETACHES:  # inference tensors share no version counter
            with torch.inference_mode(False), torch.no_grad():
                return _native(func, args, kwargs or {})
        if not torch.is_grad_enabled() and eager_autograd.plainly_native(
            func, args, kwargs, ShardedDTensor
        ):  # optimizers
            return _native(func, args, kwargs or {})
        return eager_autograd.call(func, args, kwargs or {}, ShardedDTensor, _native, _DISPATCHES)

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        at = self._sharding.local()
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, elements {at.param_offset}.."
            f"{at.param_offset + at.numel} here, local={self._local_tensor})"
        )

    @property
    def sharding(self) -> ShardSpec:
        return self._sharding

    def beside(self, rows: torch.Tensor) -> ShardedDTensor:
        """Returns ``rows``, a view of its rows, as a sharded tensor."""
        out = ShardedDTensor(rows, self._sharding)
        out._mfsdp_written = self._mfsdp_written
        return out

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns this rank's rows, sharing storage. Their gradient is this rank's own, not summed or divided."""
        if self._mfsdp_written is not None:
            self._mfsdp_written.hand_out(self._local_tensor)
        if torch.is_grad_enabled() and self.requires_grad:
            return _Rows.apply(self)  # type: ignore[no-any-return, no-untyped-call]
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns a copy of the full tensor on every rank; a collective. Backward sums its gradient over ranks and
        divides it like every gradient (Note [Eager autograd]); another collective.

        Raises:
            RuntimeError: there are several ranks, but the mesh has no process group (it was made for planning).
        """
        if torch.is_grad_enabled() and self.requires_grad:
            eager_autograd.compare_numbers(self)
            return _Whole.apply(self)  # type: ignore[no-any-return, no-untyped-call]
        return self._whole()

    def _whole(self) -> torch.Tensor:
        here, piece = self._gathered(), self._sharding.piece
        if piece is None:
            return here
        with self._sharding.announced(f"full_tensor of a piece of {list(self.shape)}"):
            return piece.wrap(here).full_tensor()

    def _gathered(self) -> torch.Tensor:
        """Gathers over data-parallel ranks."""
        s = self._sharding
        layout, mine = s.layout, self._local_tensor.detach()
        shape = layout.slots[s.slot].shape
        if layout.world == 1:
            return mine.reshape(shape).clone()
        parts = [s.local(r) for r in range(layout.world)]
        length = max(p.numel for p in parts)
        gathered = mine.reshape(-1)
        if mine.numel() < length:
            gathered = mine.new_zeros(length)
            gathered[: mine.numel()] = mine.reshape(-1)
        what = "" if isinstance(self, torch.nn.Parameter) else "a tensor like "  # gradients and parameters never match
        with s.announced(f"full_tensor of {what}{layout.slots[s.slot].name}{list(s.shape)}"):
            for group in s.groups:
                gathered = sync_collectives.gathered(gathered, group)
        if all((p.param_offset, p.numel) == (rank * length, length) for rank, p in enumerate(parts)):
            return gathered.view(shape)
        whole = gathered.new_empty(shape)
        flat = whole.view(-1)
        for rank, part in enumerate(parts):
            start = rank * length
            flat[part.param_offset : part.param_offset + part.numel] = gathered[start : start + part.numel]
        return whole

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """Returns a plain DTensor with ``[Replicate()]``; raises for other placements."""
        if set(placements or ()) != {Replicate()}:
            raise NotImplementedError(
                f"redistribute of uneven shards to {placements} is not supported; use full_tensor()"
            )
        mesh = self._spec.mesh
        return DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedDTensor:
        out = type(self)._alike(self._local_tensor.clone(), self._sharding, self.requires_grad)
        memo[id(self)] = out
        carry_attributes(self, out)
        return out

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copies values in: the storage belongs to a flat buffer.

        Raises:
            ValueError: the value has another shape, dtype or device.
        """
        mine, its = ((tuple(t.shape), t.dtype, t.device) for t in (self, value))
        if mine != its:
            raise ValueError(
                f"a sharded tensor of shape {mine[0]} in {mine[1]} on {mine[2]} cannot get .data of shape {its[0]} in "
                f"{its[1]} on {its[2]}: only its values may change. Cast or move the model before fully_shard."
            )
        with torch.no_grad():
            self.copy_(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles only this rank's rows; a tensor that is full here becomes a plain one."""
        s, local = self._sharding, self._local_tensor
        alone = s.layout.world == 1 and s.piece is None
        if alone and self._mfsdp_written is not None:  # of a model: any process may load it
            return self._plain(local.view(s.shape).clone()).__reduce_ex__(protocol)
        if not alone:
            _tell_of_pickles()
        slot, segment = s.layout.slots[s.slot], s.layout.segment(s.slot)
        place = (tuple(slot.shape), slot.offset, slot.row, segment.full_start, segment.chunk, s.layout.world)
        written = None if alone else (groups.rank(), groups.world())
        return _rebuilt, (local.clone(), place, s.mesh, written, self.requires_grad, s.piece)

    def _plain(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    @classmethod
    def _alike(cls, local: torch.Tensor, sharding: ShardSpec, requires_grad: bool) -> ShardedDTensor:
        return cls(local, sharding, requires_grad)

    # torch.distributed.checkpoint calls these before it looks at placements (invariant 24)

    def __create_write_items__(self, fqn: str, object: torch.Tensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for i, chunk in enumerate(self._chunks())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self._mfsdp_written is not None:  # every rank calls this before a load, even without chunks
            self._mfsdp_written.before_write(self._local_tensor)
            self._mfsdp_written.stale = True
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, _, n in self._sharding.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        try:
            return self.chunk_at(None if index.offset is None else tuple(index.offset))
        except ValueError as error:
            raise ValueError(f"{error} of {index.fqn}") from None

    def chunk_at(self, where: tuple[int, ...] | None) -> torch.Tensor:
        """Returns a view of one of this rank's chunks; the first for ``None``.

        Raises:
            ValueError: this rank has no chunk at these offsets.
        """
        s, rows = self._sharding, self._local_tensor.view(-1)
        strides = strides_of(torch.Size(s.layout.slots[s.slot].shape))
        for there, here, sizes in s.boxes():
            if where is None or where == there:
                start = sum(o * n for o, n in zip(here, strides, strict=True)) - s.local().param_offset
                return rows.as_strided(sizes, strides, rows.storage_offset() + start)
        raise ValueError(f"this rank holds no chunk at {where}")


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.sharding = x._sharding
        return x._whole()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedDTensor:  # type: ignore[override]
        return ShardedDTensor(ctx.sharding.part(ctx.sharding.total(grad)).clone(), ctx.sharding)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.sharding = x._sharding
        return x._local_tensor.detach()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedDTensor:  # type: ignore[override]
        return ShardedDTensor(grad, ctx.sharding)


@functools.cache
def _tell_of_pickles() -> None:
    warnings.warn(
        "mfsdp: torch.save and pickle write the rows of one rank. Every rank has to write a file of its own, and "
        "to load that one; for one checkpoint of all use torch.distributed.checkpoint.save, mfsdp.Checkpoints, "
        "mfsdp.save_safetensors or get_model_state_dict(..., options=StateDictOptions(full_state_dict=True)).",
        stacklevel=4,
    )


def _rebuilt(
    local: torch.Tensor,
    place: tuple[Any, ...],
    mesh: DeviceMesh,
    written: tuple[int, int] | None,
    requires_grad: bool,
    piece: TPShard | None = None,
) -> ShardedDTensor:
    """Unpickles rows, without a model."""
    here = (groups.rank(), groups.world())
    if written is not None and groups.initialized() and here != written:
        raise RuntimeError(
            f"mfsdp: this file holds the rows of rank {written[0]} of {written[1]}, and this is rank {here[0]} of "
            f"{here[1]}. Every rank loads the file that it wrote; for other numbers of ranks, or one file for all, "
            "save with torch.distributed.checkpoint.save, mfsdp.Checkpoints or mfsdp.save_safetensors."
        )
    shape, offset, row, full_start, chunk, world = place
    layout = Layout(world, (Slot("", shape, offset, row),), (Segment(full_start, 0, chunk),), (0,))
    return ShardedDTensor(local, ShardSpec(layout, 0, mesh, piece=piece), requires_grad)


torch.serialization.add_safe_globals([_rebuilt, TPShard])  # for weights_only, as torch does for DTensor


def take_foreach_paths(kind: type[ShardedDTensor]) -> None:
    """Makes ``clip_grad_norm_`` and optimizers use ``foreach`` for this type, as for DTensor: one collective for all
    norms instead of one each. Private in torch (two lists of types); tried on 2.11 to 2.15.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_clipping

    for types in (of_optimizers, of_clipping):
        if kind not in types:
            types.append(kind)  # type: ignore[arg-type]


take_foreach_paths(ShardedDTensor)


def carry_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the attributes that users have set on a tensor (invariant 21)."""
    made_of = te.inner(source) | torchao.inner(source)
    for name, value in source.__dict__.items():
        if not name.startswith(_OURS) and name not in made_of:
            target.__dict__[name] = value


_OURS = ("_mfsdp", "_local_tensor", "_sharding", "_spec", "_is_param")
