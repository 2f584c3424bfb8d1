"""What Inductor writes for a GPU, without one: Triton kernels and the code that calls them. Nothing of it is loaded.

A model is traced, sharded and scheduled as everywhere; then its programs' tensors are said to be on a GPU that Inductor
is told of. What autograd and decompositions choose by device (attention, random numbers) is what CPUs have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.graph import GraphLowering
from torch.fx.node import map_aggregate
from torch.utils import _triton

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import lowering, order, tracing
from mfsdp.compiler.capture import Capture
from mfsdp.graph import ops
from mfsdp.graph.program import Phase, Program, view_of
from tests.models import Case

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.addmm.default: (1, 2), ops.mm: (4, 5)}
"""Matrix products, and which of their arguments are the matrices."""

Place = tuple[int, int]
"""A parameter: which all-gather of the program brings it, and its offset in what comes."""


@dataclass
class Written:
    """A program, and what Inductor has made of it."""

    operations: list[order.Operation]
    listing: str
    reads: list[Place]
    """Parameters that matrix products read where they lie."""
    code: str = ""
    padded: bool = False
    """Whether Inductor was free to pad strides."""


def write(
    case: Case, policy: mfsdp.MixedPrecisionPolicy, lower: Callable[..., Any] = lowering.inductor
) -> dict[Phase, Written]:
    """Forward and backward of one of eight ranks. ``lower`` is one of `lowering` that ends in a given compiler."""
    out: dict[Phase, Written] = {}

    def lowered(gm: fx.GraphModule, inputs: Sequence[Any], capture: Capture, keep: lowering.Transform) -> Any:
        def transform(graph: fx.GraphModule, phase: Phase) -> None:
            program = capture.program(graph, phase)
            text = pipeline.run(program)[-1].listing
            out[phase] = Written(order.listed(program), text, reads(program))

        def compile(graph: fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> Any:
            mine = out["backward" if kwargs.get("is_backward") else "forward"]
            with pretended():
                mine.code, mine.padded = inductors(graph, moved(graph), **kwargs)
            return lowering._nothing(graph, example)

        return lower(gm, inputs, capture, transform, compile=compile)

    with torch.device("meta"):
        model = case.build()
    with patch.dict(tracing.CAPTURES, inductor=lowered):
        mfsdp.trace(model, (case.batch(),), world=8, units=case.units, mp_policy=policy, lowering="inductor")
    return out


def reads(program: Program) -> list[Place]:
    """What a program's matrix products read of gathered buffers, without a cast between."""
    fulls = [n for n in program.nodes if n.target is ops.all_gather]
    matrices = [n.args[i] for n in program.nodes for i in PRODUCTS.get(n.target, ())]
    found = []
    for node in matrices:
        while isinstance(node, fx.Node) and (whole := view_of(node)) is not None:
            if whole in fulls:
                found.append((fulls.index(whole), node.args[3]))
            node = whole
    return found


PROPERTIES = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, L2_cache_size=50 << 20,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block_optin=232448, gcnArchName="",
)  # fmt: skip


class Pretended(device_interface.CudaInterface):  # type: ignore[misc]
    """What Inductor asks a device. Private in torch (``device_interface``); tried on 2.13."""

    class Worker:
        get_device_properties = staticmethod(lambda device=None: PROPERTIES)
        current_device = staticmethod(lambda: 0)

    get_device_properties = staticmethod(lambda device=None: PROPERTIES)
    get_compute_capability = staticmethod(lambda device=None: 90)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)


@contextmanager
def pretended() -> Iterator[None]:
    """A GPU, and Triton, as far as Inductor asks before it has written its code. Builds of torch without CUDA have no
    device guard for it, which some methods of tensors ask for, where operators do not. Private in torch
    (``device_interfaces``, ``has_triton``, ``triton_hash_with_backend``); tried on 2.13.
    """
    device_interface.get_interface_for_device("cpu")  # registers them all, once
    with ExitStack() as stack:
        stack.enter_context(patch.dict(device_interface.device_interfaces, {"cuda": Pretended, "cuda:0": Pretended}))
        for owner, name, value in (
            (torch.cuda, "get_device_properties", lambda *device: PROPERTIES),
            (torch.cuda, "get_device_capability", lambda *device: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (scheduler, "has_triton", lambda: True),
            (compile_fx, "has_triton", lambda: True),
            (_triton, "triton_hash_with_backend", lambda: ""),
            (torch.Tensor, "__invert__", lambda x: aten.bitwise_not(x)),
            (torch.Tensor, "copy_", lambda x, y: aten.copy_(x, y)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def moved(graph: fx.GraphModule) -> list[Any]:
    """Puts a graph's fake tensors on the GPU, in place, and gives its inputs."""
    inputs = graph.graph.find_nodes(op="placeholder")
    mode = next(v.fake_mode for n in inputs if isinstance(v := n.meta["val"], torch.Tensor))
    gpu = torch.device("cuda", 0)

    def move(x: Any) -> Any:
        if isinstance(x, torch.device):
            return gpu if x.type == "cpu" else x
        if not isinstance(x, torch.Tensor):
            return x
        room = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device=gpu)
        return room.as_strided(x.shape, x.stride(), x.storage_offset())

    with mode, torch.no_grad():
        for node in graph.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, move), map_aggregate(node.kwargs, move)
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], move)
            node.meta.pop("tensor_meta", None)
    graph.recompile()
    return [node.meta["val"] for node in inputs]


class _Enough(Exception):
    """There is code; it need not be loaded."""


def inductors(graph: fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> tuple[str, bool]:
    """Inductor's code of a graph, and whether strides could be padded in it. Private in torch (``compile_fx_inner``,
    ``save_output_code``, ``comprehensive_padding``); tried on 2.13.
    """
    found: list[tuple[str, bool]] = []

    def save(code: str) -> None:
        found.append((code, config.comprehensive_padding))
        raise _Enough

    with config.patch(fx_graph_cache=False), patch.object(GraphLowering, "save_output_code", staticmethod(save)):
        try:
            compile_fx.compile_fx_inner(graph, example, **kwargs)
        except Exception:
            if not found:
                raise
    return found[0]
