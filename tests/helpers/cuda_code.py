"""What Inductor writes for a GPU, without one: Triton kernels and the code that calls them. Nothing of it is loaded.

A model is traced, sharded and scheduled as everywhere; then its programs' tensors are said to be on a GPU that Inductor
is told of. What autograd and decompositions choose by device (attention, random numbers) is what CPUs have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from functorch.compile import config as functorch_config
from torch import fx, nn
from torch._dynamo import device_interface
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.fx.node import map_aggregate
from torch.utils import _triton

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import attention_masks, lowering, schedule_check, stitched, tracing
from mfsdp.compiler.capture import Capture
from mfsdp.ir import ops
from mfsdp.ir.program import Phase, Program, view_of
from tests.helpers.models import Case

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.addmm.default: (1, 2), ops.mm: (4, 5)}
"""Matrix products, and which of their arguments are the matrices."""

EXTERN = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
"""What Inductor calls, instead of writing a kernel for it."""

Place = tuple[int, int]
"""A parameter: which all-gather of the program brings it, and its offset in what comes."""


@dataclass
class Written:
    """A program, and what Inductor has made of it."""

    operations: list[schedule_check.Operation]
    listing: str
    reads: list[Place]
    """Parameters that matrix products read where they lie."""
    code: str = ""
    padded: bool = False
    """Whether Inductor was free to pad strides."""
    nbytes: int = 0
    """Bytes that Triton's kernels read and write."""


def write(
    case: Case, policy: mfsdp.MixedPrecisionPolicy, lower: Callable[..., Any] = lowering.inductor
) -> dict[Phase, Written]:
    """Forward and backward of one of eight ranks. ``lower`` is one of `lowering` that ends in a given compiler."""
    with torch.device("meta"):
        model = case.build()
    return written(model, {}, case.units, policy, args=(case.batch(),), lower=lower)


def written(
    model: nn.Module,
    kwargs: dict[str, Any],
    units: Sequence[Any],
    policy: mfsdp.MixedPrecisionPolicy,
    *,
    args: tuple[Any, ...] = (),
    world: int = 8,
    lower: Callable[..., Any] = lowering.inductor,
    passes: pipeline.Table = pipeline.PIPELINE,
    split: bool = False,
) -> dict[Phase, Written]:
    """The same of a model and its inputs, through given passes. ``split``: as the default lowering compiles it, in
    subgraphs; the code of each stands as often as it is called.
    """
    out: dict[Phase, Written] = {}

    def lowered(gm: fx.GraphModule, inputs: Sequence[Any], capture: Capture, keep: lowering.Transform) -> Any:
        def transform(graph: fx.GraphModule, phase: Phase) -> None:
            program = capture.program(graph, phase)
            text = pipeline.run(program, passes=passes)[-1].listing
            out[phase] = Written(schedule_check.listed(program), text, reads(program))

        def compile(graph: fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> Any:
            mine = out["backward" if kwargs.get("is_backward") else "forward"]
            with pretended():
                mine.code, mine.padded, mine.nbytes = (subgraphs if split else inductors)(graph, moved(graph), **kwargs)
            return lowering._nothing(graph, example)

        return lower(gm, inputs, capture, transform, compile=compile)

    with patch.dict(tracing.CAPTURES, inductor=lowered):
        mfsdp.trace(model, args, kwargs, world=world, units=units, mp_policy=policy, lowering="inductor")
    return out


def plain(model: nn.Module, kwargs: dict[str, Any]) -> dict[Phase, Written]:
    """What ``torch.compile`` alone makes of a model on the meta device, its constant masks left out all the same."""
    out: dict[Phase, Written] = {}

    def inner(graph: fx.GraphModule, example: Sequence[Any], **more: Any) -> Any:
        mine = out["backward" if more.get("is_backward") else "forward"] = Written([], "", [])
        with pretended():
            mine.code, mine.padded, mine.nbytes = inductors(graph, moved(graph), **more)
        return lowering._nothing(graph, example)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        attention_masks.fold_masks(gm, ["" for _ in inputs])
        fakes = tracing._on_cpu(gm, inputs)
        with functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
            compile_fx.compile_fx(gm, fakes, inner_compile=inner)
        return tracing._stop

    with tracing._constants_on_meta(), tracing._logs_nothing(), suppress(tracing._Traced):
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(**kwargs)
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


def _traffic(node: Any) -> int:
    """Bytes that a kernel reads and writes, of a value no more than there is of it. Not what it keeps to itself, what
    it only comes behind, or what it indexes by numbers that it has read (rows of an embedding).
    """
    total, made = 0, {dep.name for dep in node.read_writes.writes}
    for deps, skipped in ((node.read_writes.reads, made), (node.read_writes.writes, set())):
        most: dict[str, int] = {}
        for dep in (d for d in deps if isinstance(d, MemoryDep) and d.name not in skipped and not d.is_indirect()):
            if dep.name not in V.graph.removed_buffers:
                size = min(int(dep.get_numel()), int(V.graph.get_numel(dep.name)))
                most[dep.name] = max(most.get(dep.name, 0), size * V.graph.get_dtype(dep.name).itemsize)
        total += sum(most.values())
    return total


def _added() -> int:
    """Bytes of matrices that products add to theirs, which are a kernel's where they are not fused."""
    calls = [n.node for n in V.graph.scheduler.nodes if isinstance(n, EXTERN)]
    added = [c.inputs[0] for c in calls if str(getattr(c, "python_kernel_name", "")).endswith("addmm")]
    sizes = [[int(n) for n in x.get_size()] for x in added]
    return sum(s[0] * s[1] * x.get_dtype().itemsize for s, x in zip(sizes, added) if len(s) == 2 and _dense(x))


def _dense(x: Any) -> bool:
    """Whether a matrix is one, and not a row that is read again for each of its rows."""
    return 0 not in [int(n) for n in x.get_stride()]


def inductors(graph: fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> tuple[str, bool, int]:
    """Inductor's code of a graph, whether strides could be padded in it, and the bytes that its own kernels move.
    Private in torch (``compile_fx_inner``, ``save_output_code``, ``comprehensive_padding``,
    and what `_traffic` asks of schedulers' nodes); tried on 2.13.
    """
    found: list[tuple[str, bool, int]] = []

    def save(code: str) -> None:
        own = [n for n in V.graph.scheduler.nodes if not isinstance(n, EXTERN)]
        found.append((code, config.comprehensive_padding, sum(map(_traffic, own)) + _added()))
        raise _Enough

    with config.patch(fx_graph_cache=False), patch.object(GraphLowering, "save_output_code", staticmethod(save)):
        try:
            compile_fx.compile_fx_inner(graph, example, **kwargs)
        except Exception:
            if not found:
                raise
    return found[0]


@dataclass
class _Body:
    """A compiled kind of subgraph."""

    source_code: str
    nbytes: int


def subgraphs(graph: fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> tuple[str, bool, int]:
    """The same of a graph's subgraphs, in the order of their calls, behind the driver that calls them; the caller holds
    no results.
    """

    def each(part: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> _Body:
        code, _, nbytes = inductors(part, inputs, **more)
        return _Body(code, nbytes)

    found: Any = stitched.stitched(each, each)(graph, example, **kwargs)
    names = re.findall(r"(Body\d+)(?:'.*\))?\(Given\)", found.driver)
    called = [found.bodies.get(f"{name}{stitched.IN_PLACE}", found.bodies[name]) for name in names]
    assert called
    return "\n".join([found.driver, *(body.source_code for body in called)]), False, sum(b.nbytes for b in called)
