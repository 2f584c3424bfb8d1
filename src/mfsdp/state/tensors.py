"""DTensors whose shards are uneven: parameters, gradients and optimizer state as users see them.

torch's own DTensor takes for granted that dimension 0 is cut into even pieces. Ours are cut by a `Layout`: every rank
holds a range of whole rows, of any length, perhaps none. `ShardedDTensor` is a DTensor with a dispatch of its own:
elementwise operations run on the local tensors, reductions add one collective, and what is neither is refused by name.
That also takes DTensor's sharding propagation out of the optimizer step.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._guards import TracingContext
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..runtime import groups, immediate
from ..spec.layout import Layout, Segment, Slot
from . import outside
from .sharded import Sharding, strides_of


def _subclasses_dispatch() -> bool:
    """Whether ``__torch_dispatch__`` of a DTensor subclass is called: torch 2.11 goes to DTensor's own in C++ instead.

    There every call is taken up in ``__torch_function__``, under a mode that goes first. Tried on 2.11 to 2.15.
    """
    called = []

    class Probe(DTensor):
        @staticmethod
        def __new__(cls) -> Probe:
            return torch.Tensor._make_wrapper_subclass(cls, (1,))  # type: ignore[return-value]

        __init__ = torch.Tensor.__init__  # type: ignore[assignment]
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            called.append(func)
            return args[0]

    try:
        torch.ops.aten.detach.default(Probe())
    except Exception:  # DTensor's own dispatch finds no spec
        return False
    return bool(called)


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What an operator does to sharded tensors: ``handler(func, args, kwargs)``."""


def _nobody(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise AssertionError("mfsdp.state.dispatch has not been imported")


_dispatch: Handler = _nobody


def dispatched_by(handler: Handler) -> None:
    """Says what happens to operators (`dispatch`, which knows these classes)."""
    global _dispatch
    _dispatch = handler


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, ShardedDTensor) for t in types):
            return _dispatch(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_DISPATCHES = _subclasses_dispatch()


def _native(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of torch on sharded tensors as they are."""
    if _DISPATCHES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    with _Dispatch(), torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class ShardedDTensor(DTensor):
    """A DTensor whose local tensor is the range of rows that its `Sharding` gives this rank.

    Args:
        local: this rank's rows, of shape ``sharding.local().shape``.
        sharding: who holds what.
    """

    _local_tensor: torch.Tensor
    _sharding: Sharding
    _mfsdp_written: Any = None
    """What it is a view of, weights or gradients of a flat buffer, if it is: ``stale`` is set when it is written to."""
    _mfsdp_numbers: str = ""
    """The numbers that it was computed with, outside of forward (`outside`)."""

    @staticmethod
    def __new__(cls, local: torch.Tensor, sharding: Sharding, requires_grad: bool = False) -> ShardedDTensor:
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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled() and outside.plainly_native(func, args, kwargs, ShardedDTensor):  # optimizers
            return _native(func, args, kwargs or {})
        return outside.call(func, args, kwargs or {}, ShardedDTensor, _native, _DISPATCHES)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        at = self._sharding.local()
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, elements {at.param_offset}.."
            f"{at.param_offset + at.numel} here, local={self._local_tensor})"
        )

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's rows, sharing storage. Their derivative is this rank's own, neither summed nor divided."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Rows.apply(self)  # type: ignore[no-any-return, no-untyped-call]
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor on every rank, a copy; a collective. Its derivative is the sum of all ranks', divided like
        every gradient (Note [The way out]); another collective.

        Raises:
            RuntimeError: several ranks, but the mesh has no process group (it was made for planning).
        """
        if torch.is_grad_enabled() and self.requires_grad:
            outside.compare_numbers(self)
            return _Whole.apply(self)  # type: ignore[no-any-return, no-untyped-call]
        return self._gathered()

    def _gathered(self) -> torch.Tensor:
        s = self._sharding
        layout, mine = s.layout, self._local_tensor.detach()
        if layout.world == 1:
            return mine.reshape(s.shape).clone()
        parts = [s.local(r) for r in range(layout.world)]
        length = max(p.numel for p in parts)
        gathered = mine.reshape(-1)
        if mine.numel() < length:
            gathered = mine.new_zeros(length)
            gathered[: mine.numel()] = mine.reshape(-1)
        with s.announced(f"full_tensor of {layout.slots[s.slot].name}{list(s.shape)}"):
            for group in s.groups:
                gathered = immediate.gathered(gathered, group)
        if all((p.param_offset, p.numel) == (rank * length, length) for rank, p in enumerate(parts)):
            return gathered.view(s.shape)
        whole = gathered.new_empty(s.shape)
        flat = whole.view(-1)
        for rank, part in enumerate(parts):
            start = rank * length
            flat[part.param_offset : part.param_offset + part.numel] = gathered[start : start + part.numel]
        return whole

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """To ``[Replicate()]``, as a plain DTensor; nothing else."""
        if set(placements or ()) != {Replicate()}:
            raise NotImplementedError(
                f"redistribute of uneven shards to {placements} is not supported; use full_tensor()"
            )
        mesh = self._spec.mesh
        return DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        out = type(self)._alike(self._local_tensor.clone(), self._sharding, self.requires_grad)
        memo[id(self)] = out
        carry_attributes(self, out)
        return out

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copies values in: the storage is a piece of a flat buffer, and stays.

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
        """This rank's rows, what others hold is not in the pickle; a tensor that is whole here becomes a plain one."""
        s, local = self._sharding, self._local_tensor
        if s.layout.world == 1 and self._mfsdp_written is not None:  # of a model: anybody may load it
            whole = local.view(s.shape).clone()
            kept = torch.nn.Parameter(whole, self.requires_grad) if isinstance(self, ShardedParameter) else whole
            return kept.__reduce_ex__(protocol)
        alone = s.layout.world == 1
        if not alone:
            _tell_of_pickles()
        slot, segment = s.layout.slots[s.slot], s.layout.segment(s.slot)
        place = (tuple(slot.shape), slot.offset, slot.row, segment.full_start, segment.chunk, s.layout.world)
        written = None if alone else (groups.rank(), groups.world())
        return _rebuilt, (local.clone(), place, s.mesh, written, self.requires_grad)

    @classmethod
    def _alike(cls, local: torch.Tensor, sharding: Sharding, requires_grad: bool) -> ShardedDTensor:
        return cls(local, sharding, requires_grad)

    # torch.distributed.checkpoint asks for these before it looks at placements (law 24)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self._mfsdp_written is not None:
            self._mfsdp_written.stale = True  # every rank asks for its chunks before it loads, even if it has none
        s = self._sharding
        boxes = s.layout.chunks(s.slot, s.rank)
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        try:
            return self.chunk_at(None if index.offset is None else tuple(index.offset))
        except ValueError as error:
            raise ValueError(f"{error} of {index.fqn}") from None

    def chunk_at(self, where: tuple[int, ...] | None) -> torch.Tensor:
        """One of this rank's chunks, a view; the first for ``None``.

        Raises:
            ValueError: it holds none at these offsets.
        """
        s, at = self._sharding, self._sharding.local()
        for offsets, sizes in s.layout.chunks(s.slot, s.rank):
            if where is None or where == offsets:
                flat = sum(o * n for o, n in zip(offsets, strides_of(torch.Size(s.shape)), strict=True))
                start = flat - at.param_offset
                return self._local_tensor.view(-1)[start : start + math.prod(sizes)].view(sizes)
        raise ValueError(f"this rank holds no chunk at {where}")


class _Whole(torch.autograd.Function):
    """All rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: ShardedDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.sharding = x._sharding
        return x._gathered()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedDTensor:  # type: ignore[override]
        return ShardedDTensor(ctx.sharding.part(ctx.sharding.total(grad)).clone(), ctx.sharding)


class _Rows(torch.autograd.Function):
    """This rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: ShardedDTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.sharding = x._sharding
        return x._local_tensor.detach()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedDTensor:  # type: ignore[override]
        return ShardedDTensor(grad, ctx.sharding)


class ShardedParameter(ShardedDTensor):
    """A parameter. Its ``.grad`` lives in its owner, the unit's flat buffer: a view into the gradient accumulator.

    Args:
        local, sharding, requires_grad: as above.
        owner: the flat buffer whose main weights it is a view of; without one ``.grad`` is an attribute.
    """

    _mfsdp_owner: Any
    _mfsdp_grad: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        sharding: Sharding,
        requires_grad: bool = True,
        owner: Any = None,
    ) -> ShardedParameter:
        out = cast(ShardedParameter, ShardedDTensor.__new__(cls, local, sharding, requires_grad))
        out._is_param = True  # what isinstance(_, torch.nn.Parameter) asks for
        out._mfsdp_owner, out._mfsdp_written = owner, None if owner is None else owner.weights
        out._mfsdp_grad = None
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.requires_grad.__set__(out, True)  # type: ignore[attr-defined]  # no hook otherwise
            torch.Tensor.register_post_accumulate_grad_hook(out, _brought)
            torch.Tensor.requires_grad.__set__(out, requires_grad)  # type: ignore[attr-defined]
        return out

    def __tensor_flatten__(self) -> Any:
        """Refuses to be an input of compiled code. Private in torch (``TracingContext``); tried on 2.13.

        Raises:
            NotImplementedError: Dynamo is tracing.
        """
        if TracingContext.try_get() is None:
            return super().__tensor_flatten__()  # type: ignore[no-untyped-call]
        name = self._sharding.layout.slots[self._sharding.slot].name
        raise NotImplementedError(
            f"mfsdp: compiled code takes the sharded form of the parameter {name}. Read it as an "
            "attribute of its module (module.weight), or through parameters() of a module that has parameters of its "
            "own: there it is whole. state_dict(), torch.func.functional_call and parameters() of containers "
            "(ModuleList) read what is sharded: do that in a function under torch.compiler.disable, or outside."
        )

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        if self._mfsdp_owner is None:
            return self._mfsdp_grad
        return self._mfsdp_owner.gradients.of(self._sharding.slot)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._mfsdp_owner is None:
            self._mfsdp_grad = value
        else:
            self._mfsdp_owner.gradients.set(self._sharding.slot, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None  # type: ignore[method-assign, assignment]

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        if self._mfsdp_owner is not None:
            self._mfsdp_owner.set_trains(self._sharding.slot, value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        self.requires_grad = requires_grad  # type: ignore[method-assign]
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:  # type: ignore[override]
        """``hook(grad)``, once per backward that reduces, with the reduced gradient that is about to be added to
        ``.grad``, a DTensor; it may return another one. What `no_sync` holds back is in it when it is reduced.
        """
        return self._hook("hooks", hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """``hook(param)``, once per backward that synchronises, when ``.grad`` is complete. It may step an optimizer
        and set ``.grad`` to ``None``: no program of this backward reads the parameter any more.
        """
        return self._hook("post_hooks", hook)

    def _hook(self, where: str, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if self._mfsdp_owner is None:
            raise RuntimeError("a sharded parameter without a model gets no gradients that a hook could see")
        hooks = getattr(self._mfsdp_owner.gradients, where).setdefault(self._sharding.slot, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._mfsdp_owner is not None:
            copy.deepcopy(self._mfsdp_owner, memo)  # copies all of its parameters
            return memo[id(self)]
        return super().__deepcopy__(memo)


def _brought(param: torch.Tensor) -> None:
    """What autograd itself has brought to a parameter, from outside of forward, belongs to its ``.grad`` too."""
    assert isinstance(param, ShardedParameter)
    with torch._C.DisableTorchFunctionSubclass():
        grad = torch.Tensor.grad.__get__(param)  # type: ignore[union-attr]
        torch.Tensor.grad.__set__(param, None)  # type: ignore[union-attr]
    rows = grad._local_tensor if isinstance(grad, ShardedDTensor) else param._sharding.part(grad)
    if param._mfsdp_owner is not None:
        param._mfsdp_owner.gradients.bring(param._sharding.slot, rows)
    elif param._mfsdp_grad is None:
        param._mfsdp_grad = ShardedDTensor(rows.clone(), param._sharding)
    else:
        param._mfsdp_grad += rows


_told_of_pickles = False


def _tell_of_pickles() -> None:
    global _told_of_pickles
    if not _told_of_pickles:
        _told_of_pickles = True
        warnings.warn(
            "mfsdp: torch.save and pickle write the rows of one rank. Every rank has to write a file of its own, and "
            "to load that one; for one checkpoint of all use torch.distributed.checkpoint.save, mfsdp.Checkpoints, "
            "mfsdp.save_safetensors or get_model_state_dict(..., options=StateDictOptions(full_state_dict=True)).",
            stacklevel=4,
        )


def _rebuilt(
    local: torch.Tensor, place: tuple[Any, ...], mesh: DeviceMesh, written: tuple[int, int] | None, requires_grad: bool
) -> ShardedDTensor:
    """What comes out of a pickle: rows without a model.

    Raises:
        RuntimeError: another rank, or one of another number of ranks, has written it.
    """
    here = (groups.rank(), groups.world())
    if written is not None and groups.initialized() and here != written:
        raise RuntimeError(
            f"mfsdp: this file holds the rows of rank {written[0]} of {written[1]}, and this is rank {here[0]} of "
            f"{here[1]}. Every rank loads the file that it wrote; for other numbers of ranks, or one file for all, "
            "save with torch.distributed.checkpoint.save, mfsdp.Checkpoints or mfsdp.save_safetensors."
        )
    shape, offset, row, full_start, chunk, world = place
    layout = Layout(world, (Slot("", shape, offset, row),), (Segment(full_start, 0, chunk),), (0,))
    return ShardedDTensor(local, Sharding(layout, 0, mesh), requires_grad)


torch.serialization.add_safe_globals([_rebuilt])  # for weights_only, as torch does for DTensor


def _take_foreach_paths() -> None:
    """Lets ``clip_grad_norm_`` and optimizers choose their ``foreach`` form for us, as they do for DTensor: one
    collective for all norms instead of one each. Private in torch (two lists of types); tried on 2.11 to 2.15.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_clipping

    for types in (of_optimizers, of_clipping):
        types.extend(t for t in (ShardedDTensor, ShardedParameter) if t not in types)  # type: ignore[misc]


_take_foreach_paths()


def carry_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies every attribute that somebody put on a tensor (law 21), but not ours."""
    for name, value in source.__dict__.items():
        if not name.startswith(_OURS):
            target.__dict__[name] = value


_OURS = ("_mfsdp", "_local_tensor", "_sharding", "_spec", "_is_param")
