"""Queries of autograd's engine while it runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd.graph import Node


def accumulates(node: Node) -> bool:
    """Whether the running backward will accumulate into a leaf, given its accumulation node; ``True`` outside a
    backward. Private in torch (``_will_engine_execute_node``); tried on 2.11 to 2.15.
    """
    return _number() < 0 or bool(torch._C._will_engine_execute_node(node))


def backward_number() -> int:
    """A unique number per backward, -1 outside. Private in torch; tried on 2.11 to 2.15."""
    return _number()


_number: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]


def nested() -> bool:
    """Whether this thread runs a backward inside another (reentrant checkpointing). Counts frames of torch's
    ``_engine_run_backward``; the outer backward has none in a thread of autograd's, which Python has not started. Tried
    on 2.13, on a CPU.
    """
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return count > (0 if isinstance(threading.current_thread(), threading._DummyThread) else 1)  # type: ignore[attr-defined]


def accumulation_node(leaf: torch.Tensor) -> Node:
    """A leaf's accumulation node; a new one on each call until a computation uses the leaf. Not torch's
    ``get_gradient_edge``: its ``view_as`` raises in 2.11 for a DTensor of which this rank has no rows.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        used = torch.ops.aten.alias(leaf).grad_fn
        assert used is not None
        return used.next_functions[0][0]  # type: ignore[no-any-return]


def after_backward(callback: Callable[[], None]) -> None:
    """Calls something at the end of the running backward. Private in torch (``_execution_engine.queue_callback``);
    tried on 2.11 to 2.15.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def transformed() -> bool:
    """Whether a ``torch.func`` transform or forward-mode AD is running. Private in torch; tried on 2.11 to 2.14."""
    level = torch.autograd.forward_ad._current_level
    return level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def in_transform(value: torch.Tensor) -> bool:
    """Whether a tensor is inside of a ``torch.func`` transform or forward-mode AD, where it has no storage. Private in
    torch; tried on 2.13.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]] | None:
    """The active saved-tensor hooks, as (pack, unpack). Private in torch; tried on 2.11 to 2.15."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks  # type: ignore[no-any-return]
