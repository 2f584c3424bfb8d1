"""`together`: compiles several microbatches into one program."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.utils import counters

from ..sharding.module import own_code
from .backend import mfsdp
from .tracing import each

log = logging.getLogger("mfsdp")


class Together:
    """A compiled model that takes several microbatches at once; see `together`."""

    def __init__(self, model: nn.Module):
        found = settings(model, "mfsdp.together")
        options = {**found.pop("options"), "interleave": True}
        self.model = model._orig_mod
        self._run = torch.compile(own_code(each, "together"), backend="mfsdp", options=options, **found)
        self._warned = False

    def __call__(self, microbatches: Sequence[Any]) -> list[Any]:
        """Runs the model on each microbatch.

        Args:
            microbatches: for each one a tuple of positional arguments, a dict of keyword arguments, or a single tensor.

        Returns:
            the model's result for each microbatch, in order.

        Raises:
            TypeError: ``microbatches`` is no list, or a microbatch is none of these.
            ValueError: the list is empty.
        """
        if not isinstance(microbatches, (list, tuple)):
            raise TypeError(f"mfsdp.together: give a list of microbatches, not {type(microbatches).__name__}")
        if not microbatches:
            raise ValueError("mfsdp.together: there is no microbatch")
        calls = [_call(batch) for batch in microbatches]
        broken = counters["graph_break"].total()
        out: list[Any] = self._run(self.model, calls)
        if counters["graph_break"].total() > broken and not self._warned:
            self._warned = True
            log.warning(
                "mfsdp: together: the graph of %s breaks (TORCH_LOGS=graph_breaks): around a break microbatches run "
                "one after the other",
                type(self.model).__name__,
            )
        return out


def together(model: nn.Module) -> Together:
    """Runs several microbatches in one program: forwards side by side, backwards side by side, with one gather and one
    reduction per unit.

        outs = mfsdp.together(model)([a, b])
        sum(outs).backward()

    Collectives of one microbatch (all-to-alls of experts, all-reduces of tensor parallelism) overlap with compute of
    another (`mfsdp.passes.interleave`). All activations live at once. Losses equal each microbatch's own bitwise,
    except with random numbers, which are drawn in another order. Gradients are the sum of all, in another order than
    with accumulation. Call backward once, on all results together.

    Args:
        model: compiled with ``torch.compile(model, backend="mfsdp")``; its options are used, its graphs stay unchanged.

    Raises:
        TypeError: the model is not compiled with this backend.
    """
    if not isinstance(model, OptimizedModule):
        raise TypeError(
            "mfsdp.together: give it the compiled model, torch.compile(model, backend='mfsdp'), not "
            f"{type(model).__name__}"
        )
    known = model.__dict__.get(_KEY)
    if known is None:
        known = Together(model)
        object.__setattr__(model, _KEY, known)  # torch passes other attributes on to the model
    return known  # type: ignore[no-any-return]


_KEY = "_mfsdp_together"


def _call(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return batch, {}
    raise TypeError(
        "mfsdp.together: a microbatch is a tuple of positional arguments, a dict of keyword arguments or one tensor, "
        f"not {type(batch).__name__}"
    )


def settings(model: nn.Module, caller: str) -> dict[str, Any]:
    """Returns the settings that a model was compiled with. Private in torch (``dynamo_ctx``, ``innermost_backend``);
    tried on 2.13, not on the others of 2.11 to 2.15.

    Raises:
        TypeError: the backend is not mfsdp.
    """
    context = _context(model)
    backend: Any = innermost_backend(context.callback)
    if getattr(backend, "compiler_fn", None) is not mfsdp:
        name = getattr(backend, "compiler_name", backend)
        raise TypeError(f"{caller}: the model is compiled by {name!r}; use torch.compile(model, backend='mfsdp')")
    options = dict(backend.kwargs.get("options") or {})
    return {"options": options, "fullgraph": context.fullgraph, "dynamic": backend.dynamic}


def _context(model: nn.Module) -> Any:
    """Returns the context of torch.compile's wrapper or of ``model.compile()`` (private in torch as well)."""
    if isinstance(model, OptimizedModule):
        return model.dynamo_ctx
    called: Any = model._compiled_call_impl
    return dict(zip(called.__code__.co_freevars, called.__closure__))["self"].cell_contents
