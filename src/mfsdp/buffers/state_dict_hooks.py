"""Wraps torch's functions on state dicts for sharded tensors; everything else passes through.

``torch.distributed.checkpoint.state_dict`` cuts full tensors into even chunks. ``dcp.load`` fills only entries that
exist, which is none for an optimizer that has not stepped.
"""

from __future__ import annotations

import functools
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.patches import wrap
from ..dtensor import bitsandbytes, parameter_names, torchao
from ..dtensor import transformer_engine as te
from ..dtensor.shard_spec import ShardSpec
from ..dtensor.sharded_dtensor import ShardedDTensor
from ..runtime import buffer_registry, devices, sync_collectives
from ..runtime.transport_registry import record_load
from .flat_buffer import refs

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import Metadata

StateDict = dict[str, Any]


def teach() -> None:
    """Wraps torch's functions, and peft's if imported; called when a model is sharded.

    Private in peft (``_reshard_dtensor_values_for_load``); tried with 0.21.
    """
    _teach_torch()
    peft = sys.modules.get("peft.utils.save_and_load")
    if hasattr(peft, "_reshard_dtensor_values_for_load"):
        wrap(peft, "_reshard_dtensor_values_for_load", _keep_adapters)


@functools.cache
def _teach_torch() -> None:
    """Wraps torch's functions, and restores original names below torch.compile's wrappers.

    Private in torch (``_distribute_tensors``, ``_broadcast_state_dict``, ``_distribute_state_dict``, ``_get_fqns``);
    tried on 2.12 to 2.15, not on the others of 2.11 to 2.15; ``_maybe_full_or_cpu_state_dict`` on 2.11,
    2.13 and 2.15.
    """
    import torch.distributed._state_dict_utils as utils
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    wrap(utils, "_distribute_tensors", _keep_broadcast)
    wrap(state_dict, "_broadcast_state_dict", _keep_numbers)
    wrap(state_dict, "_distribute_state_dict", _keep_whole)
    wrap(state_dict, "_maybe_full_or_cpu_state_dict", _in_one_piece)
    wrap(state_dict, "_get_fqns", _with_wrappers)
    wrap(DefaultLoadPlanner, "set_up_planner", _ready)
    wrap(DefaultLoadPlanner, "commit_tensor", _committed)
    parameter_names.keep_original_names()


# Full tensors


@torch.no_grad()
def _keep_broadcast(theirs: Callable[..., Any], local: StateDict, keys: list[str], *rest: Any, **more: Any) -> Any:
    """Replaces each pair (local tensor, full tensor) by the local one, with values copied in."""
    for key in keys:
        pair = local.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], ShardedDTensor):
            mine, whole = pair
            local[key] = mine.copy_(_fitting(key, mine, whole))
    return theirs(local, keys, *rest, **more)


@torch.no_grad()
def _keep_numbers(theirs: Callable[..., Any], full: StateDict, local: StateDict, *rest: Any, **more: Any) -> Any:
    """Keeps scalar tensors sharded; torch returns them as plain tensors. Torch cannot broadcast torchao's tensors."""
    full = torchao.in_parts(full)
    ours = {key: mine for key, mine in local.items() if isinstance(mine, ShardedDTensor) and not mine.dim()}
    out = theirs(full, local, *rest, **more)
    for key, mine in ours.items():
        if isinstance(local.get(key), torch.Tensor) and local[key] is not mine:
            local[key] = mine.copy_(local[key])
    return out


@torch.no_grad()
def _keep_whole(theirs: Callable[..., Any], full: StateDict, local: StateDict, *rest: Any, **more: Any) -> Any:
    """Copies local rows of full tensors that every rank has. Communicates only a check that all have them."""
    ours = {
        key: (mine, value)
        for key, value in full.items()
        if isinstance(mine := local.get(key), ShardedDTensor) and torch.is_tensor(value)
    }
    _agree(ours, {mine.sharding.over: mine.sharding for mine, _ in ours.values()}.values())
    for key, (mine, value) in ours.items():
        local[key] = mine.copy_(_fitting(key, mine, value))
    return theirs({k: v for k, v in full.items() if k not in ours}, local, *rest, **more)


def _in_one_piece(theirs: Callable[..., StateDict], state: StateDict, info: Any) -> StateDict:
    """Joins the parts of quantized weights that unsharded models have in one piece, if whole values are asked for."""
    out = theirs(state, info)
    layers: dict[str, tuple[Any, dict[str, str]]] = {}
    for key in out if info.full_state_dict else ():
        if (part := getattr(state[key], "_mfsdp_part", None)) is not None:
            layers.setdefault(key.rpartition(".")[0], (part[1], {}))[1][part[0]] = key
    joined: dict[str, tuple[str, torch.Tensor] | None] = {}
    for path, (form, keys) in layers.items():
        whole = form.whole({name: out[key] for name, key in keys.items()})
        if whole is not None:
            joined |= dict.fromkeys(keys.values()) | {keys["weight"]: (f"{path}.weight".removeprefix("."), whole)}
    pairs = [joined.get(key, (key, value)) for key, value in out.items()]
    return dict(pair for pair in pairs if pair is not None)


def _keep_adapters(theirs: Callable[..., Any], model: nn.Module, state: StateDict) -> StateDict:
    """Keeps tensors of sharded parameters full, which peft would cut into even chunks; copying cuts them."""
    params = dict(model.named_parameters())
    ours = {name for name in state if isinstance(params.get(name), ShardedDTensor)}
    others = theirs(model, {name: value for name, value in state.items() if name not in ours})
    return {name: value if name in ours else others[name] for name, value in state.items()}


def _fitting(name: str, mine: ShardedDTensor, whole: torch.Tensor) -> torch.Tensor:
    if whole.shape != mine.shape:
        how = (
            ". It is part of a quantized weight: call load_state_dict of the model" if mine.dtype is torch.uint8 else ""
        )
        raise ValueError(f"mfsdp: {name} is {list(whole.shape)} in the state dict, {list(mine.shape)} here{how}")
    return whole


def _agree(here: Iterable[str], shardings: Iterable[ShardSpec]) -> None:
    """Checks that all ranks give the same names; a rank that gives none would keep old values."""
    digest = zlib.crc32("\n".join(sorted(here)).encode())
    for sharding in shardings:
        for group in sharding.over if sharding.parts > 1 else ():
            bounds = torch.tensor([digest, -digest], device=devices.collective_device(group))
            largest, smallest = sync_collectives.reduced(bounds, "max", group).tolist()
            if largest != -smallest:
                raise RuntimeError(
                    "mfsdp: full_state_dict=True without broadcast_from_rank0=True, and the ranks give different "
                    "names: give every rank the whole state dict, or rank 0 alone with broadcast_from_rank0=True"
                )


# Counts of loads, which ranks compare


def loaded(module: nn.Module, state: StateDict, prefix: str) -> None:
    """Counts what a module loads from a state dict, which ranks compare."""
    for name, ref in refs(module).items():
        param, value = module._parameters.get(name), state.get(prefix + name)
        if param is not None and value is not None:
            record_load(ref.buffer.spec.peer_groups, f"{prefix}{name}", value, param.dtype)


# Names


def _with_wrappers(theirs: Callable[..., Any], model: nn.Module, name: str, *rest: Any, **more: Any) -> Any:
    """Finds an original name (`parameter_names`) below torch.compile's wrappers."""
    return theirs(model, parameter_names.spelled(model, name), *rest, **more)


# Checkpoints


def _ready(
    theirs: Callable[..., None],
    planner: DefaultLoadPlanner,
    state: StateDict,
    metadata: Metadata | None = None,
    *rest: Any,
    **more: Any,
) -> None:
    """Checks a checkpoint's entries before loading."""
    there = metadata.state_dict_metadata if metadata is not None and buffer_registry.sharded() else {}
    if there:
        _refuse_lost_state(there, state)
    theirs(planner, state, metadata, *rest, **more)
    if there:
        _find_wrapped(there, planner)
        _make_room(there, planner)
        _tell_of_lost_scales(te.lost_scales(there.items(), planner.state_dict))


def _committed(theirs: Callable[..., None], planner: DefaultLoadPlanner, item: Any, tensor: torch.Tensor) -> None:
    """Tells quantized layers what was read in place."""
    theirs(planner, item, tensor)
    read: Any = planner.state_dict.get(item.dest_index.fqn)
    if (target := getattr(read, "_mfsdp_read_for", None)) is not None:
        read = target.resize_(read.shape).copy_(read)
    bitsandbytes.was_read(read)


def _make_room(there: Mapping[str, Any], planner: DefaultLoadPlanner) -> None:
    """Has entries that may change their length read into memory of the checkpoint's size: nothing changes before the
    checkpoint is known to fit.
    """
    for name, tensor in planner.state_dict.items():
        size = getattr(there.get(name), "size", None)
        if hasattr(tensor, "_mfsdp_resizes") and size is not None and size != tensor.shape:
            room = tensor.new_empty(size)
            room._mfsdp_read_for = tensor
            planner.state_dict = {**planner.state_dict, name: room}


def _tell_of_lost_scales(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"mfsdp: the checkpoint has scales of TransformerEngine's DelayedScaling ({names[0]}, {len(names)} in all) "
            "and the model none yet: they are not loaded, and amax histories begin anew. Run one forward under "
            "te.autocast(recipe=DelayedScaling()) before state_dict(), and load into that, to keep them.",
            stacklevel=3,
        )


def _refuse_lost_state(there: Iterable[str], state: object) -> None:
    """Refuses a checkpoint with state for an optimizer that has none yet: it would not be loaded."""
    for path in _stateless(state):
        lost = [name for name in there if name.startswith(f"{path}.")]
        if lost:
            raise ValueError(
                f"mfsdp: the checkpoint has optimizer state ({len(lost)} entries under {path!r}), and the optimizer "
                "that it is loaded into has none before its first step: none of it would be read. Give it its state "
                "first, torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), or use "
                "get_state_dict and set_state_dict, or mfsdp.Checkpoints, which do."
            )


def _stateless(state: object, path: str = "") -> Iterator[str]:
    """Yields the paths of optimizers without state in a state dict."""
    if not isinstance(state, Mapping):
        return
    if state.get("param_groups") and isinstance(state.get("state"), Mapping) and not state["state"]:
        yield f"{path}state"
    for key, value in state.items():
        yield from _stateless(value, f"{path}{key}.")


def _find_wrapped(there: Iterable[str], planner: DefaultLoadPlanner) -> None:
    """Reads original names from a checkpoint with a wrapper's names."""
    wrapped = {parameter_names.original(name): name for name in there if parameter_names.original(name) != name}
    for name in [n for n in planner.state_dict if n in wrapped and n not in there]:
        planner.state_dict[wrapped[name]] = planner.state_dict.pop(name)
        if name in planner.mappings:
            planner.mappings[wrapped[name]] = planner.mappings.pop(name)
