"""``torch.compile(model, backend="mfsdp")``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import dump, listing, lowering, ops, pipeline, runtime
from .capture import Capture, sources
from .config import Options
from .dump import Dump
from .profile import outline
from .program import Phase, Program, lane_of
from .roles import role

log = logging.getLogger("mfsdp")

_graphs = itertools.count()
_told = False


def mfsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as Dynamo calls it: found by name through the ``torch_dynamo_backends`` entry point.

    Args:
        gm: what Dynamo traced.
        example_inputs: its inputs, real tensors.
        options: see :class:`mfsdp.config.Options`.
        mode: ``torch.compile``'s mode; only the default is supported.

    Raises:
        ValueError: bad options (raised by the first call of the model).
    """
    try:
        if mode not in (None, "default"):
            raise ValueError(f"backend 'mfsdp' does not support mode={mode!r}; use options={{...}}")
        chosen = Options.parse(options)
    except (ValueError, TypeError) as error:
        return _raise(error)
    capture = Capture(example_inputs, sources(gm))
    if not capture.shards:
        _tell_unsharded(capture)
    number = next(_graphs)
    passes = pipeline.table(chosen.prefetch, chosen.reduce_lag, chosen.max_unsharded, chosen.pool)
    dumped = Dump(Path(chosen.folder), number, chosen, example_inputs) if chosen.folder else None

    def transform(graph: fx.GraphModule, phase: Phase) -> Callable[[lowering.Run, str], lowering.Run]:
        program = capture.program(graph, phase)
        stages = pipeline.run(
            program,
            upto=chosen.upto,
            passes=passes,
            checked=chosen.check,
            listings=dumped is not None or dump.traced(),
        )
        for stage in stages:
            log.debug("mfsdp: graph%d %s %s: %.1f ms", number, phase, stage.name, 1e3 * stage.seconds)
        log.info("mfsdp: graph%d %s: %s, %s", number, phase, program.name, listing.schedule(program))
        dump.artifacts(number, phase, stages)
        for group, sequence in collectives(program).items():
            runtime.agree(group, sequence)
        outlined = outline(program)
        show = dumped.add(program, stages) if dumped is not None and runtime.rank() == 0 else None

        def finish(compiled: lowering.Run, code: str) -> lowering.Run:
            if show is not None:
                show(code)
            return runtime.marked(outlined, compiled)

        return finish

    return lowering.LOWERINGS[chosen.lowering](gm, example_inputs, capture, transform)


def collectives(program: Program) -> dict[str, list[str]]:
    """The collectives of a program by group (that of the gathers), in order, and which gradients they bring: what all
    of its ranks must have alike.
    """
    out: dict[str, list[str]] = {}
    for node in program.nodes:
        r = role(node)
        if node.target in ops.COLLECTIVES and r is not None:
            spec = program.unit(r.unit).spec
            outer = lane_of(node) >= 2 or (node.target is ops.refresh and spec.outer_optim)
            out.setdefault(spec.outer_group if outer else spec.group, []).append(
                f"{listing.text(node)}  {r.lane.value}  {'+'.join(map(str, spec.splits))} x {spec.world}"
            )
        elif node.target is ops.accumulate and r is not None:
            spec = program.unit(r.unit).spec
            for group in filter(None, (spec.group, spec.outer_group)):
                out.setdefault(group, []).append(f"{listing.text(node)}  of {listing.operand(node.args[2])}")
    return out


def _raise(error: Exception) -> Callable[..., Any]:
    """A compiled function that raises: from inside of a backend Dynamo would wrap the error in its own."""

    def compiled(*args: Any) -> Any:
        raise error

    return compiled


def _tell_unsharded(capture: Capture) -> None:
    global _told
    if _told or not torch.is_grad_enabled():
        return
    _told = True
    how = "gradients are averaged over all ranks" if capture.plain else "one process, nothing to communicate"
    log.warning(
        "mfsdp: the model is not sharded (%s). To shard it, call mfsdp.fully_shard(model, units=[YourBlock]) before "
        "building the optimizer.",
        how,
    )
