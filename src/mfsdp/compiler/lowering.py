"""Lowers a finished program to Inductor's code, or to ATen kernels that are called one by one.

Note [Lowerings]
All lowerings use the same passes. ``"stitched"`` and ``"whole"`` go through Inductor's front end with its
decompositions and joint-graph passes, so that sharding loses no optimization. ``"whole"`` gives Inductor the graph as
it is. ``"stitched"``, also called ``"inductor"``, compiles each kind of subgraph once (Note [Subgraphs]), so that
compile time does not grow with depth. ``"eager"`` calls the kernels of the ATen graph, as autograd wrote it, in the
listing's order: the reference for the other lowerings, bitwise equal to eager PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from functorch.compile import config as functorch_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.backends.registry import CompiledFn
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ..ir import ops
from ..ir.program import STORAGE, Phase, Program
from ..ir.split_backward import SplitBackward
from ..runtime.weight_parts import SplitProgram
from .capture import Capture
from .compile_workers import parallel
from .stitched import Compile, donated_indices, kept, part, stitched

Run = Callable[[list[Any]], Any]
"""A compiled graph: takes its arguments as one list."""

Finish = Callable[[Run, str], Run]
"""Takes a compiled graph and its code, and may wrap the graph."""

Transform = Callable[[fx.GraphModule, Phase], "Finish | Parts | None"]
"""Runs the pipeline on a graph, in place, or on the parts of it that are compiled instead."""


@dataclass(frozen=True)
class Parts:
    """The two programs of a split backward (`ir.split_backward`), and what wraps them."""

    whole: Program
    split: SplitBackward
    finishes: tuple[Finish, Finish]

    def lower(self, compile: Callable[[fx.GraphModule, Sequence[Any]], Run]) -> Run:
        """Compiles both, and returns what runs as the whole."""
        place = {node.name: i for i, node in enumerate(self.whole.graph.find_nodes(op="placeholder"))}
        donated, saved = donated_indices(), self.split.saved
        runs: list[Any] = []
        takes: list[list[int]] = []  # the whole's arguments; the weight part then takes all saved values
        for program, finish, more in zip((self.split.input, self.split.weight), self.finishes, (0, saved), strict=True):
            inputs = program.graph.find_nodes(op="placeholder")
            takes.append([place[node.name] for node in inputs[: len(inputs) - more]])
            free = {i for i, n in enumerate(inputs) if STORAGE not in n.meta or n.meta[STORAGE].overwrite != "no"}
            mine = [i for i, at in enumerate(takes[-1]) if at in donated and i in free]
            with part(mine):
                runs.append(
                    _finished(program.gm, finish, partial(compile, program.gm, [n.meta["val"] for n in inputs]))
                )
        return SplitProgram(runs[0], runs[1], (takes[0], takes[1]), saved)


INDUCTOR = {
    # Passes (`prefetch`, `defer`, `inplace_wgrad`) decide the order: Inductor must not move launches or waits.
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    # A CUDA graph would replay decisions that Python makes in every step: whether to refresh, hold, add or store.
    "triton.cudagraphs": False,
}


def patches() -> dict[str, bool]:
    """Returns Inductor's configuration for our graphs: `INDUCTOR`, with Inductor's own overlap of collectives off where
    this version has it (on by default since 2.14). Private in torch (``aten_distributed_optimizations``); tried on 2.13
    and 2.14, of 2.11 to 2.15 that are supported.
    """
    options = inductor_config.aten_distributed_optimizations
    overlaps = [name for name in ("enable_simple_overlap", "enable_overlap_scheduling") if hasattr(options, name)]
    return {**INDUCTOR, **{f"aten_distributed_optimizations.{name}": False for name in overlaps}}


def inductor(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    capture: Capture,
    transform: Transform,
    *,
    compile: Compile,
) -> CompiledFn:
    """Compiles with Inductor, never into CUDA graphs. Private in torch (``compile_fx``); tried on 2.11 to 2.15.

    Args:
        capture: without its ``key`` AOTAutograd's cache is off: it would return graphs that the passes have not seen.
        compile: takes a finished program, as ``compile_fx_inner`` does.
    """
    gm.meta.pop("cudagraph_annotation", None)  # of torch._dynamo.override_cudagraphs; it overrides the configuration
    _tell_of_async_tp()

    def inner(graph: fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> Run:
        phase: Phase = (
            "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        )
        return _lower(graph, example, phase, transform, partial(compile, **kwargs))

    with functorch_config.patch(enable_autograd_cache=bool(capture.key) and functorch_config.enable_autograd_cache):
        return compile_fx(  # type: ignore[return-value, no-any-return]
            gm,
            inputs,  # type: ignore[arg-type]
            inner_compile=inner,  # type: ignore[arg-type]
            config_patches={**patches(), "custom_partitioner_fn": capture},
        )


def _tell_of_async_tp() -> None:
    """Warns that Inductor's asynchronous tensor parallelism finds nothing in our graphs: `passes.collective` has
    replaced the collectives that it would fuse with products. Private in torch (``_micro_pipeline_tp``); tried on 2.11
    to 2.15.
    """
    if inductor_config._micro_pipeline_tp:
        warnings.warn(
            "mfsdp: torch._inductor.config._micro_pipeline_tp (async tensor parallelism) changes nothing in a graph "
            "whose collectives mfsdp schedules. mfsdp.together and mfsdp.overlapped hide those of tensor parallelism.",
            stacklevel=2,
        )


def eager(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], capture: Capture, transform: Transform, *, compile: Compile
) -> CompiledFn:
    """Runs the ATen graph as it is. Private in torch (``aot_autograd``, ``_use_lazy_graph_module``); tried on 2.11 to
    2.15.
    """

    def compiler(phase: Phase) -> Callable[[fx.GraphModule, Sequence[torch.Tensor]], Run]:
        def inner(graph: fx.GraphModule, example: Sequence[torch.Tensor]) -> Run:
            if phase == "forward":
                _donates_nothing()
            return _lower(graph, example, phase, transform, compile)

        return inner

    # Nothing here overwrites what forward has saved, so backward may be called twice (``retain_graph=True``).
    settings = functorch_config.patch(enable_autograd_cache=False, donated_buffer=False)
    with settings, _use_lazy_graph_module(True):  # code of graphs that passes change would be generated again and again
        return aot_autograd(  # type: ignore[no-any-return]
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=capture,
            keep_inference_input_mutations=True,
        )(gm, inputs)


def _lower(
    graph: fx.GraphModule, example: Sequence[Any], phase: Phase, transform: Transform, compile: Callable[..., Run]
) -> Run:
    finish = transform(graph, phase)
    if isinstance(finish, Parts):
        return finish.lower(partial(compile, static_input_idxs=()))
    return _finished(graph, finish, partial(compile, graph, example))


def _finished(graph: fx.GraphModule, finish: Finish | None, compile: Callable[[], Run]) -> Run:
    strip(graph)
    forget_visible(graph)
    with parallel():
        compiled = compile()
        return compiled if finish is None else finish(compiled, str(getattr(compiled, "source_code", "")))


def _donates_nothing() -> None:
    """Records that the backward of the graph being compiled has no donated buffers: without a record torch refuses
    ``retain_graph=True`` after a backward without it. Private in torch (``TracingContext``, ``bw_donated_idxs``); tried
    on 2.11, 2.13 and 2.14, not on 2.12 and 2.15.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _whole(graph: fx.GraphModule, example: Sequence[torch.Tensor], **kwargs: Any) -> Run:
    keep_order(graph)
    keep_codes(graph)
    keep_accumulators(graph)
    graph.recompile()
    with kept(graph):
        return _each(graph, example, **kwargs)


def _each(graph: fx.GraphModule, example: Sequence[torch.Tensor], **kwargs: Any) -> Run:
    """Compiles without the partitioner, which has already run: equal graphs share entries of Inductor's cache."""
    with inductor_config.patch(custom_partitioner_fn=None):
        return compile_fx_inner(graph, example, **kwargs)


def _kernels(graph: fx.GraphModule, example: Sequence[torch.Tensor], **kwargs: Any) -> Run:
    """Calls the graph's kernels. Private in torch (``boxed_nop``); tried on 2.11 to 2.15."""
    return boxed_nop(graph, list(example))


def _nothing(graph: fx.GraphModule, example: Sequence[torch.Tensor], **kwargs: Any) -> Run:
    def never(args: list[Any]) -> NoReturn:
        raise AssertionError("a captured graph does not run")

    return never


_stitched = partial(inductor, compile=stitched(_whole, _each))

LOWERINGS: dict[str, Callable[..., CompiledFn]] = {
    "inductor": _stitched,
    "stitched": _stitched,
    "whole": partial(inductor, compile=_whole),
    "eager": partial(eager, compile=_kernels),
}
"""By the backend's option ``lowering``."""

CAPTURES: dict[str, Callable[..., CompiledFn]] = {
    **dict.fromkeys(("inductor", "stitched", "whole"), partial(inductor, compile=_nothing)),
    "eager": partial(eager, compile=_nothing),
}
"""The same graphs without code generation: for inspection, not for execution."""


def overwrites_results(lowering: str, cuda_graph: bool) -> bool:
    """Returns whether a lowering's backward may overwrite results of forward (Note [Overwritten results]): not if CUDA
    graphs replay it, nor against torch's setting. Private in torch (``donated_buffer``); tried on 2.11 to 2.15.
    """
    return lowering in ("inductor", "stitched") and not cuda_graph and functorch_config.donated_buffer


def raising(error: BaseException) -> CompiledFn:
    """Returns a compiled function that raises: Dynamo would wrap an error raised inside a backend."""

    def compiled(*args: torch.Tensor) -> NoReturn:
        raise error

    return compiled


def strip(graph: fx.GraphModule) -> None:
    """Drops `free` nodes: they stand at a buffer's last reader, where both lowerings drop its last reference."""
    for node in graph.graph.find_nodes(op="call_function", target=ops.free):
        graph.graph.erase_node(node)
    graph.recompile()


def keep_order(graph: fx.GraphModule) -> None:
    """Keeps the order of other parallelisms' collectives: each is declared to write to the same empty tensor.

    Otherwise Inductor may fuse the kernel that computes a collective's source with one that reads a later collective's
    result, and so launch the later one first. (mfsdp's own collectives read data that stays in place or was packed.)
    """
    launches = graph.graph.find_nodes(op="call_function", target=ops.collective)
    if len(launches) < 2:
        return
    first = launches[0].args[0]
    with graph.graph.inserting_before(launches[0]):
        token = graph.graph.call_function(torch.ops.aten.new_empty.default, (first, [0]))
    token.meta["val"] = first.meta["val"].new_empty([0])
    for launch in launches:
        launch.args = (*launch.args, token)


def keep_codes(graph: fx.GraphModule) -> None:
    """Adds a last reader for persistent FP8 payloads and kept casts: otherwise Inductor reuses their memory."""
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        for target in (ops.refresh_codes, ops.kept_cast):
            for lasting in graph.graph.find_nodes(op="call_function", target=target):
                graph.graph.call_function(ops.free, (lasting,))


def keep_accumulators(graph: fx.GraphModule) -> None:
    """Tells accumulates that their sources cannot become accumulators: Inductor reuses the sources' memory."""
    for node in graph.graph.find_nodes(op="call_function", target=ops.accumulate):
        node.args = (*node.args[:4], True)


def forget_visible(graph: fx.GraphModule) -> None:
    """Removes outputs that the passes have set to ``None`` from Inductor's earlier list of user-visible outputs: where
    it pads strides (on GPUs), it looks each of them up. Private in torch (``user_visible_output_idxs``); tried on 2.13.
    """
    output = graph.graph.output_node()
    results: Any = output.args[0]
    visible = output.meta.get("user_visible_output_idxs")
    if visible is not None:
        output.meta["user_visible_output_idxs"] = [i for i in visible if isinstance(results[i], fx.Node)]
