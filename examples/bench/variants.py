"""The contenders: same model, same data, same optimizer; each gives a model to call and the parameters to optimise."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mfsdp


def fresh_gpt(layers: int, width: int) -> nn.Module:
    """The model, from code of its own: Dynamo caches and gives up by code object, and contenders must not share one."""
    return _load(Path(__file__).parent / "gpt.py").GPT(layers, width)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Contender:
    model: Any
    parameters: list[nn.Parameter]
    averaged: bool = True
    """Whether gradients are averaged over ranks, in float32: all losses of averaged contenders must agree."""
    ahead: bool = False
    """Whether the optimizer launches what the next forward begins with."""


def local(model: Any) -> Contender:
    """One process, no communication: the compute that nobody can avoid."""
    return Contender(torch.compile(model, dynamic=False), list(model.parameters()), averaged=False)


NARROW = mfsdp.MixedPrecisionPolicy(param_comm_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)
"""Half the bytes on the link; weights, compute and sums stay in float32."""


def ours(
    policy: mfsdp.MixedPrecisionPolicy | None = None, *, ahead: bool = False, **options: Any
) -> Callable[[Any], Contender]:
    def make(model: Any) -> Contender:
        shard(model, policy)
        compiled = torch.compile(model, backend="mfsdp", dynamic=False, options=options)
        return Contender(compiled, list(model.parameters()), policy is None, ahead)

    return make


def shard(model: Any, policy: mfsdp.MixedPrecisionPolicy | None = None, **more: Any) -> None:
    """Backward needs the last block first; forward and backward need the root at both ends. As FSDP2 does by itself."""
    for block in model.blocks:
        mfsdp.fully_shard(block, mp_policy=policy, reshard_after_forward=block is not model.blocks[-1], **more)
    mfsdp.fully_shard(model, mp_policy=policy, reshard_after_forward=False, **more)


def fsdp2(compiled: str = "") -> Callable[[Any], Contender]:
    """FSDP2 at its best on a CPU: asynchronous, with explicit prefetch in both directions, and what backward needs
    first kept from forward.
    """

    def make(model: Any) -> Contender:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, reshard_after_forward=block is not model.blocks[-1])
        fully_shard(model)
        units = [model, *model.blocks]
        for unit in units:
            unit._set_unshard_async_op(True)
        for here, there in pairwise(units):
            here.set_modules_to_forward_prefetch([there])
        for here, there in pairwise(units[::-1]):
            here.set_modules_to_backward_prefetch([there])
        run: Any = model
        if compiled == "blocks":
            for block in model.blocks:
                block.compile(dynamic=False)
        elif compiled == "whole":
            run = torch.compile(model, dynamic=False)
        return Contender(run, list(model.parameters()))

    return make


def ddp(model: Any) -> Contender:
    from torch.nn.parallel import DistributedDataParallel

    return Contender(torch.compile(DistributedDataParallel(model), dynamic=False), list(model.parameters()))


def simple_fsdp(checkout: Path) -> Callable[[Any], Contender]:
    """torchtitan's SimpleFSDP under Inductor with its own overlap scheduling and bucketing."""

    def make(model: Any) -> Contender:
        import torch.utils._runtime_estimation as machine
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
        model = _data_parallel(checkout)(model, mesh, mode="fully_shard")
        machine.get_gpu_dram_gbps = lambda: 8.0  # Inductor asks a GPU, there is none
        machine.get_device_tflops = lambda *_: 0.04
        overlap = {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            "aten_distributed_optimizations.collective_bucketing": True,
            "aten_distributed_optimizations.insert_overlap_deps": True,
            "aten_distributed_optimizations.custom_runtime_estimation": estimate,
            "reorder_for_peak_memory": False,
        }
        return Contender(torch.compile(model, dynamic=False, options=overlap), list(model.parameters()))

    return make


def estimate(node: torch.fx.Node, size: int | None) -> float:
    """Milliseconds of a node for Inductor's scheduler, which otherwise takes the machine for a GPU: it is told the
    link's speed (BENCH_LINK, bytes a second, measured before) and what a core multiplies (4e10 operations a second).
    """
    value = node.meta.get("val")
    elements = value.numel() if isinstance(value, torch.Tensor) else 0
    name = str(node.target)
    if "all_gather" in name or "reduce_scatter" in name:
        source = node.args[0].meta["val"]
        moved = size if size is not None else max(elements, source.numel()) * source.dtype.itemsize / 2
        return moved / float(os.environ.get("BENCH_LINK", "7e7")) * 1e3
    if "mm" in name:
        return 2 * elements * node.args[-1].meta["val"].shape[-2] / 4e10 * 1e3
    return elements * 4 / 4e9 * 1e3


def _data_parallel(checkout: Path) -> Callable[..., Any]:
    """The one file of torchtitan that is needed, without the package's other dependencies: of those it uses only a base
    class for modules.
    """
    experiments = checkout / "torchtitan" / "experiments"
    places = [experiments / folder / "simple_fsdp.py" for folder in ("graph_trainer", "simple_fsdp")]
    path = next(p for p in places if p.exists())
    for name in ("torchtitan", "torchtitan.protocols", "torchtitan.protocols.module"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["torchtitan.protocols.module"].Module = nn.Module  # type: ignore[attr-defined]
    return _load(path).data_parallel


def contenders(torchtitan: Path | None) -> dict[str, Callable[[Any], Contender]]:
    out: dict[str, Callable[[Any], Contender]] = {
        "one process": local,
        "mfsdp, prefetch 0": ours(prefetch=0, reduce_lag=0),
        "mfsdp, prefetch 1": ours(prefetch=1, reduce_lag=1),
        "mfsdp, prefetch 2": ours(prefetch=2, reduce_lag=2),
        "mfsdp, borders": ours(prefetch=2, reduce_lag=2, ahead=True),
        "bf16 on the link": ours(NARROW, prefetch=1, reduce_lag=1),
        "FSDP2, eager": fsdp2(),
        "FSDP2, blocks compiled": fsdp2("blocks"),
        "FSDP2, whole compiled": fsdp2("whole"),
        "DDP, compiled": ddp,
    }
    if torchtitan is not None:
        out["SimpleFSDP, overlap"] = simple_fsdp(torchtitan)
    return out
