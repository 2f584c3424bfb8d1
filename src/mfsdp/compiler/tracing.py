"""`trace`: returns a toy model's programs, on a laptop: no process group, no accelerator, no memory for the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch._dynamo.config as dynamo_config
from functorch.compile import config as functorch_config
from torch import fx, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import fake_tensor_tls
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from ..buffers.flat_buffer import buffers_in, refs
from ..dtensor.mesh import TENSOR
from ..dtensor.shard_spec import local_mesh
from ..dtensor.tp_shards import sizes_along
from ..ir.program import Phase, Program
from ..sharding import mutation_check
from ..sharding.meta_clone import MetaClone, clone_on_meta
from ..sharding.module import FSDPModule, own_code
from ..sharding.shard import fully_shard
from . import attention_masks, layer_regions, outlining
from .capture import Capture, sources
from .lowering import CAPTURES, CompiledFn, overwrites_results, raising

log = logging.getLogger("mfsdp")


@dataclass
class Programs:
    """Programs before any pass, as `trace` returns them. ``inference`` is set when nothing requires gradients."""

    forward: Program | None = None
    backward: Program | None = None
    inference: Program | None = None
    all: list[Program] = field(default_factory=list)
    model: nn.Module | None = None
    """The traced model, sharded, on the meta device."""
    capture: Capture | None = None
    """The model's capture; it keeps the joint graph, to be partitioned again (Note [Partition tags])."""

    def __iter__(self) -> Iterator[Program]:
        return iter(self.all)


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world: int | None = None,
    mesh_shape: tuple[int, int] | None = None,
    train: bool = True,
    name: str | None = None,
    lowering: str = "eager",
    together: int = 1,
    hold: bool = False,
    cuda_graph: bool = False,
    **sharding: Any,
) -> Programs:
    """Returns the forward and backward programs of a model as ``world`` ranks would run them, before any pass.

    Args:
        model: any module; it is copied to the meta device, not changed. A sharded model is traced as it is sharded.
            A model that another parallelism has split keeps its process groups (`fake_ranks`), and if it is sharded,
            its ranks.
        args, kwargs: example inputs (values do not matter).
        world: ranks to shard over. Default: those of a model that is sharded over several, else 8.
        mesh_shape: (outer, shard) ranks of a two-level mesh instead.
        train: ``False`` traces under ``torch.no_grad()``: one inference program.
        name: the programs' name in listings; default: the class of the model.
        lowering: ``"eager"`` keeps operators as autograd wrote them, ``"inductor"`` applies Inductor's decompositions.
        together: microbatches in one program, as with `mfsdp.together`; then the passes are
            ``mfsdp.pipeline.table(interleave=True)``.
        hold: whether gradients may be added up unreduced, as in `mfsdp.PipelineStage`, which also holds results.
        cuda_graph: whether CUDA graphs replay the programs, as with the option of that name.
        **sharding: arguments of `mfsdp.fully_shard` (``units``, ``mp_policy``, ...).

    Raises:
        ValueError: bad arguments, or arguments of fully_shard for a model that is sharded already.
        RuntimeError: Dynamo finds a graph break (its own error, naming the place), or forward writes to a parameter.
    """
    if lowering not in CAPTURES:
        raise ValueError(f"trace: lowering={lowering!r}: choose one of {', '.join(CAPTURES)}")
    if together < 1:
        raise ValueError(f"trace: together={together!r}: give a positive number")
    model = getattr(model, "_orig_mod", model)
    clone = clone_on_meta(model)
    meta = clone.model
    _shard(model, clone, world, mesh_shape, sharding)
    _settings(model, meta)
    for buffer in buffers_in(meta) if hold else ():
        if buffer.spec.world > 1:
            buffer.respec(hold=True)
    kind = type(meta)
    forward = own_code(kind.forward, kind.__name__)  # so that traces do not count as recompilations of the model
    meta.__class__ = type(kind.__name__, (kind,), {"forward": forward})

    def to_meta(x: Any) -> Any:
        return x.detach().to("meta", copy=True).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    calls = [pytree.tree_map(to_meta, (args, dict(kwargs or {}))) for _ in range(together)]
    called = meta if together == 1 else own_code(each, "together")
    # A function: where Lightning is imported, torch.compile deep-copies its arguments, also objects of bound methods.
    recorder = _Recorder(name, lowering, together, overwrites_results(lowering, cuda_graph) and not hold)
    run: Any = torch.compile(called, backend=lambda *graph: recorder.compile(*graph), fullgraph=True, dynamic=False)

    def traced() -> Programs:
        recorder.found = [out := Programs(model=meta)]
        try:
            with torch.set_grad_enabled(train), _constants_on_meta(), _logs_nothing(), suppress(_Traced):
                if together == 1:
                    run(*calls[0][0], **calls[0][1])
                else:
                    run(meta, calls)
        finally:
            recorder.found.clear()
        return out

    with layer_regions.marked(meta) as any_alike:
        try:
            if any_alike:
                return traced()
        except Exception as error:
            if recorder.cut:
                raise
            log.debug("mfsdp: Dynamo traces each layer: %s: %s", type(error).__name__, error)
    return traced()


class _Recorder:
    """Records a graph's programs and runs nothing. torch keeps backends alive: clear `found` to free the programs."""

    def __init__(self, name: str | None, lowering: str, together: int, overwrites: bool):
        self.found, self.name, self.lowering, self.together = list[Programs](), name, lowering, together
        self.overwrites = overwrites
        self.cut = False
        """Whether a graph has been partitioned: later errors are not about regions."""

    def compile(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> CompiledFn:
        """Is a backend for Dynamo: captures a graph and returns a function that stops the run."""
        layer_regions.expand(gm)
        try:
            mutation_check.traced(gm, inputs)
        except RuntimeError as error:
            return raising(error)
        capture = self.found[0].capture = Capture(inputs, sources(gm), self.name)
        capture.keeps, capture.notes = True, attention_masks.fold_masks(gm, capture.input_names)
        capture.optional_tangents = self.together == 1
        capture.overwrites_results = self.overwrites
        fakes = _on_cpu(gm, inputs)

        def keep(graph: fx.GraphModule, phase: Phase) -> None:
            program = capture.program(graph, phase)
            setattr(self.found[0], phase, program)
            self.found[0].all.append(program)
            if phase != "forward":
                raise _Traced

        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            outlining.captured(
                gm, lambda: CAPTURES[self.lowering](gm, fakes, capture, keep), lambda: self._is_cut(capture)
            )
        return _stop

    def _is_cut(self, capture: Capture) -> bool:
        self.cut = capture.cut
        return self.cut


def each(model: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """Runs a model on each of several microbatches: `mfsdp.together` compiles this function."""
    return [model(*args, **kwargs) for args, kwargs in calls]


def _shard(
    model: nn.Module,
    clone: MetaClone,
    world: int | None,
    mesh_shape: tuple[int, int] | None,
    sharding: dict[str, Any],
) -> None:
    """Shards a clone as its model is sharded, or else as the arguments of `trace` say.

    Raises:
        ValueError: bad arguments.
    """
    meta = clone.model
    if clone.calls and sharding:
        raise ValueError(f"trace: {type(model).__name__} is sharded already; leave out {', '.join(sharding)}")
    for unwanted in ("mesh", "dp_mesh_dims", "device"):
        if unwanted in sharding:
            raise ValueError(f"trace: {unwanted}= is not needed: give world= or mesh_shape=")
    cut = any(ref.piece is not None for m in model.modules() for ref in refs(m).values())
    cut = cut or len({str(grid) for *_, grid in clone.calls}) > 1
    if cut and (world is not None or mesh_shape is not None):
        raise ValueError(
            f"trace: {type(model).__name__} is sharded beside another parallelism, or over meshes of its own for some "
            "modules, and is traced over the ranks of these; leave out world= and mesh_shape="
        )
    several = any(torch.tensor(grid).numel() > 1 for *_, grid in clone.calls)
    as_it_is = cut or (several and world is None and mesh_shape is None)
    shape = mesh_shape or (world or 8,)
    meshes = [p.device_mesh for p in meta.parameters() if isinstance(p, DTensor)]
    apart = math.prod(sizes_along(meshes, TENSOR).values())
    new_mesh = local_mesh("cpu", shape, numbers=range(0, math.prod(shape) * apart, apart))
    if "ignored_params" in sharding:
        sharding["ignored_params"] = [clone.twins.get(id(p), p) for p in sharding["ignored_params"] or ()]
    clone.twins.clear()  # `fully_shard` looks for optimizers only if others hold the parameters
    ignored = [p for p in meta.parameters() if getattr(p, "_mfsdp_ignored", False)]
    for module, call, grid in clone.calls or [(meta, sharding, [])]:
        mesh = _as_sharded(grid) if as_it_is else new_mesh
        fully_shard(module, **{"mesh": mesh, "device": "meta", "ignored_params": ignored, **call})


def _as_sharded(grid: Sequence[object]) -> DeviceMesh:
    """Returns the mesh of a `fully_shard` call, without process groups."""
    ranks = torch.tensor(grid, device="cpu")
    numbers = ranks.flatten().tolist()
    return local_mesh("cpu", tuple(ranks.shape), numbers[0], numbers)


@contextmanager
def _constants_on_meta() -> Iterator[None]:
    """Lets a model create constants on its input's device: ``torch.tensor(0.5, device=x.device)`` on the meta device is
    no fake tensor, which fake tensors refuse by default. Private in torch; tried on 2.11 to 2.15.
    """
    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = True
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before


def _logs_nothing() -> AbstractContextManager[None]:
    """Lets a model log in its forward, which is a graph break otherwise: tracing runs nothing worth logging. Private in
    torch (``ignore_logging_functions``, ``ignore_logger_methods`` before 2.12); tried on 2.11 to 2.15.
    """
    names = ("debug", "info", "warning", "error", "exception", "critical", "log", "warning_once", "info_once")
    methods = {getattr(logging.Logger, n) for n in (*names, "warning_advice") if hasattr(logging.Logger, n)}
    known = "ignore_logging_functions"
    name = known if hasattr(dynamo_config, known) else "ignore_logger_methods"
    return dynamo_config.patch({name: _Unlisted({*getattr(dynamo_config, name), *methods})})  # type: ignore[no-any-return]


class _Unlisted(set[Any]):
    """Seems empty to who lists it: torch 2.11 sorts sets of its configuration for a log. Functions have no order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Traced(BaseException):
    """The programs exist; nothing has to run, so that Dynamo needs no guards. It wraps an `Exception` of a backend."""


def _stop(*args: torch.Tensor) -> NoReturn:
    raise _Traced


def _on_cpu(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns fake CPU tensors like the inputs, and adapts the graph. On the meta device some composite operators
    (``nll_loss``) have their own kernels, which autograd does not see through. Private in torch (``TracingContext``,
    ``force_non_lazy_backward_lowering``); tried on 2.11 to 2.15.
    """
    context = TracingContext.try_get()
    assert context is not None and context.fake_mode is not None, "a backend runs inside of Dynamo"
    meta, cpu = torch.device("meta"), torch.device("cpu")

    def moved(x: Any) -> Any:
        return cpu if isinstance(x, torch.device) and x == meta else x

    for node in list(gm.graph.nodes):
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
        if node.target is torch.histc:  # of integers, which CPUs lack and accelerators have (transformers' experts)
            with gm.graph.inserting_before(node), context.fake_mode:
                counted = gm.graph.call_method("float", (node.args[0],))
                value = node.args[0].meta["example_value"].float()
                counted.meta = {**node.meta, "example_value": value}  # a part of its layer, which is outlined
            node.args = (counted, *node.args[1:])
    gm.recompile()
    with context.fake_mode, torch.no_grad():
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=cpu).requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor)
            else x
            for x in inputs
        ]


def _settings(model: nn.Module, meta: nn.Module) -> None:
    """Copies settings that were changed after the model was sharded."""
    for old, new in zip(model.modules(), meta.modules(), strict=True):
        if not (isinstance(old, FSDPModule) and isinstance(new, FSDPModule)):
            continue
        for theirs, mine in zip(old._mfsdp_unit.buffers, new._mfsdp_unit.buffers, strict=True):
            mine.respec(reshard=theirs.spec.reshard, hold=theirs.spec.hold)
            if theirs.unit.divides:
                mine.respec(divide=theirs.spec.divide)
            if theirs.precision != mine.precision:
                mine.widen()
            for param, trains in zip(mine.params, theirs.trains, strict=True):
                param.requires_grad_(trains)
