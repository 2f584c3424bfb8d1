"""Sharded parameters: DTensors whose gradients live in the unit's flat buffer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .shard_spec import ShardSpec
from .sharded_dtensor import ShardedDTensor, take_foreach_paths


class ShardedParameter(ShardedDTensor):
    """A sharded parameter. ``.grad`` is a view into the gradient accumulator of its owner, the unit's flat buffer.

    Args:
        local, sharding, requires_grad: as for `ShardedDTensor`.
        owner: the flat buffer whose main weights it views; without one, ``.grad`` is an attribute.
    """

    _mfsdp_owner: Any
    _mfsdp_grad: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        sharding: ShardSpec,
        requires_grad: bool = True,
        owner: Any = None,
    ) -> ShardedParameter:
        out = cast(ShardedParameter, ShardedDTensor.__new__(cls, local, sharding, requires_grad))
        out._is_param = True  # makes it an instance of torch.nn.Parameter
        out._mfsdp_owner, out._mfsdp_written = owner, None if owner is None else owner.weights
        out._mfsdp_grad = None
        if not local.is_floating_point():
            return out
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.requires_grad.__set__(out, True)  # type: ignore[attr-defined]  # hooks require it
            torch.Tensor.register_post_accumulate_grad_hook(out, _autograd_view)
            torch.Tensor.requires_grad.__set__(out, requires_grad)  # type: ignore[attr-defined]
        return out

    def __tensor_flatten__(self) -> Any:
        """Refuses to be an input of compiled code. Private in torch (``TracingContext``); tried on 2.11 to 2.15.

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
        if self._mfsdp_owner is not None and value is True:
            self._mfsdp_owner.widen()  # may run out of memory
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        if self._mfsdp_owner is not None:
            self._mfsdp_owner.set_trains(self._sharding.slot, value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        self.requires_grad = requires_grad  # type: ignore[method-assign]
        return self

    def take_rows(self, rows: torch.Tensor) -> None:
        """Makes the parameter, in place, a view of other rows, perhaps in another dtype."""
        now = ShardedDTensor(rows, self._sharding)
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, now)  # type: ignore[attr-defined]
        self._local_tensor, self._spec = now._local_tensor, now._spec

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:  # type: ignore[override]
        """Registers ``hook(grad)``, called once per backward that reduces, with the reduced gradient, a DTensor, before
        it is added to ``.grad``; it may return another one. This includes gradients that `no_sync` left unreduced
        before.
        """
        return self._hook("grad_hooks", hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Registers ``hook(param)``, called once per backward that synchronises, when ``.grad`` is complete. It may
        step an optimizer and set ``.grad`` to ``None``: this backward no longer reads the parameter.
        """
        return self._hook("post_hooks", hook)

    def _hook(self, where: str, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if self._mfsdp_owner is None:
            raise RuntimeError("a sharded parameter without a model gets no gradients that a hook could see")
        if self._sharding.slot in self._mfsdp_owner.gradients.accumulator.tied:
            raise NotImplementedError(
                "mfsdp: a gradient hook would see the gradient of one copy of a tied weight: read .grad after the step"
            )
        self._mfsdp_owner.gradients.arrive()  # deferred gradients are not for this hook
        hooks = getattr(self._mfsdp_owner.gradients.hooks, where).setdefault(self._sharding.slot, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _plain(self, whole: torch.Tensor) -> torch.Tensor:
        return torch.nn.Parameter(whole, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedDTensor:
        if self._mfsdp_owner is not None:
            copy.deepcopy(self._mfsdp_owner, memo)  # copies all of its parameters
            return memo[id(self)]  # type: ignore[no-any-return]
        return super().__deepcopy__(memo)


def _autograd_view(param: torch.Tensor) -> None:
    """Adds a gradient that autograd itself accumulated, outside of forward, to ``.grad``."""
    assert isinstance(param, ShardedParameter)
    with torch._C.DisableTorchFunctionSubclass():
        grad = torch.Tensor.grad.__get__(param)  # type: ignore[union-attr]
        torch.Tensor.grad.__set__(param, None)  # type: ignore[union-attr]
    cut = isinstance(grad, DTensor) and grad._spec.placements == param._spec.placements  # torch 2.11 makes it a DTensor
    rows = grad._local_tensor if cut else param._sharding.part(grad)
    if param._mfsdp_owner is not None:
        param._mfsdp_owner.gradients.bring(param._sharding.slot, rows)
    elif param._mfsdp_grad is None:
        param._mfsdp_grad = ShardedDTensor(rows.clone(), param._sharding)
    else:
        param._mfsdp_grad += rows


take_foreach_paths(ShardedParameter)
