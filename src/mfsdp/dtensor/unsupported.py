"""Errors for what autograd and optimizers cannot do with sharded parameters, instead of silent or unclear failures.

The gather's backward produces gradients of sharded parameters (`Weights.source` is the leaf). The parameters' own
accumulation nodes run only for computations outside of ``forward``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from ..config.patches import wrap

Ends = torch.Tensor | GradientEdge | Sequence[torch.Tensor | GradientEdge]
"""Where a backward begins or ends."""

AS_IT_IS = frozenset(["view_as", "expand_as"])
"""Functions that expose a tensor's accumulation node if given the tensor twice."""


before_backward: dict[str, Callable[[Iterable[torch.Tensor]], None]] = {}
"""Called with the leaves that a backward will give gradients, by name."""

_INSTEAD = {"Muon": "mfsdp.fully_shard_optimizer(torch.optim.Muon(...)) steps whole matrices. "}
"""What to do with an optimizer by its name."""


def explained(error: NotImplementedError) -> NotImplementedError:
    """Returns an operator's error in terms of its caller, an optimizer or DistributedDataParallel; unchanged for other
    code that an optimizer's step calls (a closure).
    """
    frame: FrameType | None = sys._getframe()
    between = set[str]()
    while frame is not None:
        between.add(str(frame.f_globals.get("__name__")))
        asks = frame.f_locals.get("self")
        own = {base.__module__ for base in type(asks).__mro__}
        if not all(name in own or name.partition(".")[0] in ("torch", "mfsdp") for name in between):
            asks = None
        if isinstance(asks, Optimizer):
            name = type(asks).__name__
            return NotImplementedError(
                f"mfsdp: {name} cannot step sharded parameters: its update of one element depends on others "
                f"({error}). {_INSTEAD.get(name, '')}Choose an elementwise optimizer (SGD, Adam, AdamW, Adagrad, "
                f"RMSprop, ...), or give {name} parameters of its own that are not sharded "
                "(fully_shard(ignored_params=...))"
            )
        if isinstance(asks, torch.nn.parallel.DistributedDataParallel):
            return NotImplementedError(
                "mfsdp: DistributedDataParallel has no place around a sharded model, which averages gradients itself: "
                "leave it out"
            )
        frame = frame.f_back
    return error


def not_sharded(caller: str, model: torch.nn.Module) -> ValueError:
    """The error for a model that has no sharded parameter."""
    return ValueError(
        f"{caller}: the model is not sharded; {sharded_by_torch(model) or 'call mfsdp.fully_shard first'}"
    )


def torch_fsdp() -> dict[type, str]:
    """Returns the classes of modules that torch has sharded, with names: none if torch's FSDP is not imported."""
    theirs = sys.modules.get("torch.distributed.fsdp")
    return {} if theirs is None else {theirs.FSDPModule: "FSDP2", theirs.FullyShardedDataParallel: "FSDP"}


def sharded_by_torch(*models: torch.nn.Module) -> str:
    """Returns what to do with models that torch's FSDP2 or FSDP has sharded; empty for others."""
    kinds = torch_fsdp()
    name = next((kinds[kind] for model in models for m in model.modules() for kind in kinds if isinstance(m, kind)), "")
    instead = f"torch's {name} has sharded it: build it without {name}, and call mfsdp.fully_shard in its place"
    return instead if name else ""


def refuse_blocks(optimizer: Optimizer) -> None:
    """Refuses optimizers that keep state in blocks of low-bit numbers: shards do not end where blocks do.

    Raises:
        NotImplementedError: it is torchao's or bitsandbytes'.
    """
    packages = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    if found := packages & {"torchao", "bitsandbytes"}:
        raise NotImplementedError(
            f"mfsdp: {found.pop()}'s {type(optimizer).__name__} keeps state in blocks of low-bit numbers, which do not "
            "end where sharded parameters are cut. Where memory is short: mfsdp.fully_shard_optimizer(optimizer, "
            'offload="state") of a torch.optim one, or more ranks'
        )


def node_of(name: str, args: tuple[Any, ...]) -> None:
    """Refuses to expose a parameter's accumulation node, where a hook would not run.

    Raises:
        NotImplementedError: the function gets a model's parameter twice, to obtain its node.
    """
    if name in AS_IT_IS and len(args) == 2 and args[0] is args[1] and _slot_of(args[0]) and torch.is_grad_enabled():
        raise NotImplementedError(
            f"mfsdp: the accumulation node of the sharded parameter {_slot_of(args[0])} (register_multi_grad_hook, "
            "get_gradient_edge, view_as(itself)) does not run when the model's backward does, and nor would a hook on "
            "it. param.register_post_accumulate_grad_hook(hook) runs when .grad is complete, param.register_hook(hook) "
            "sees the reduced gradient; both work on sharded parameters. Zero-bubble schedules of "
            "torch.distributed.pipelining: mfsdp.PipelineStage"
        )


@functools.cache
def refuse_inputs() -> None:
    """Wraps ``torch.autograd.backward`` once; torch has no hook that sees ``inputs=``."""
    wrap(torch.autograd, "backward", functools.partial(_backward, inspect.signature(torch.autograd.backward)))


@functools.cache
def suggest_backend() -> None:
    """Wraps torch's search for a backend's name once: a misspelt one is never ours to answer. Private in torch
    (``lookup_backend``); tried on 2.13, there in 2.11 to 2.15.
    """
    from torch._dynamo.backends import registry

    wrap(registry, "lookup_backend", _look_up)


def _look_up(theirs: Callable[[Any], Any], name: Any) -> Any:
    try:
        return theirs(name)
    except Exception as error:
        if isinstance(name, str) and difflib.get_close_matches(name.lower(), ["mfsdp"]):
            error.add_note('mfsdp: did you mean backend="mfsdp"?')
        raise


def _backward(signature: inspect.Signature, theirs: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    given = signature.bind(*args, **kwargs)
    inputs = given.arguments.get("inputs")
    for look in list(before_backward.values()) if inputs is None else ():
        look(_leaves(given.arguments["tensors"]))
    if inputs is not None:
        given.arguments["inputs"] = inputs = _several(inputs)
        _by_way_of_a_model(given.arguments["tensors"], inputs, "backward(inputs=...)")
    theirs(*given.args, **given.kwargs)


def derivatives(outputs: Ends, inputs: Ends, *_: object, **__: object) -> None:
    """Refuses arguments of ``torch.autograd.grad`` for which it would find no gradient."""
    _by_way_of_a_model(outputs, _several(inputs), "torch.autograd.grad(...)")


def _by_way_of_a_model(outputs: Ends, inputs: tuple[Any, ...], what: str) -> None:
    """Refuses gradients of sharded parameters on which outputs depend through a model's forward."""
    sources = {id(p._mfsdp_owner.weights.source): p for p in inputs if _slot_of(p)}
    found = next((sources[id(leaf)] for leaf in _leaves(outputs) if id(leaf) in sources), None) if sources else None
    if found is not None:
        raise NotImplementedError(
            f"mfsdp: {what} asks for the gradient of the sharded parameter {_slot_of(found)}, which autograd does not "
            "have: the model's backward reduces it and adds it to .grad. Call backward() without inputs, and "
            "requires_grad_(False) on what is to have no gradient; activations may be inputs"
        )


def _several(given: Ends) -> tuple[torch.Tensor | GradientEdge, ...]:
    """Returns tensors or edges, one or several, as a tuple."""
    return (given,) if isinstance(given, (torch.Tensor, GradientEdge)) else tuple(given)


def _leaves(outputs: Ends) -> Iterable[torch.Tensor]:
    """Yields the leaves that a backward of the outputs would give gradients."""
    nodes = [t.grad_fn if isinstance(t, torch.Tensor) else t.node for t in _several(outputs)]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += (new := {n for n, _ in node.next_functions} - seen)
        seen |= new


def _slot_of(tensor: Any) -> str:
    """Returns a model parameter's name in its unit, or an empty string."""
    owner = getattr(tensor, "_mfsdp_owner", None)
    return "" if owner is None else str(owner.layout.slots[tensor._sharding.slot].name)
