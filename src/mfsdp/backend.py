"""``torch.compile(model, backend="mfsdp")``."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._logging import trace_structured

from . import listing, lowering, ops, page, pipeline, runtime
from .capture import Capture, sources
from .config import Options
from .estimate import estimate
from .hardware import KNOWN, Hardware
from .profile import remember
from .program import Phase, Program, lane_of
from .roles import role
from .state import FlatBuffer

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
    folder = Path(chosen.folder) if chosen.folder else None
    number = next(_graphs)
    passes = pipeline.table(chosen.prefetch, chosen.reduce_lag, chosen.max_unsharded, chosen.pool)

    seen: list[tuple[Program, list[pipeline.Stage]]] = []
    about = _about(example_inputs) if folder is not None else None

    def transform(graph: fx.GraphModule, phase: Phase) -> Callable[[str], None] | None:
        program = capture.program(graph, phase)
        stages = pipeline.run(
            program,
            upto=chosen.upto,
            passes=passes,
            checked=chosen.check,
            listings=folder is not None or _traced(),
        )
        for stage in stages:
            log.debug("mfsdp: graph%d %s %s: %.1f ms", number, phase, stage.name, 1e3 * stage.seconds)
        log.info("mfsdp: graph%d %s: %s, %s", number, phase, program.name, listing.schedule(program))
        _artifacts(number, phase, stages)
        for group, sequence in collectives(program).items():
            runtime.agree(group, sequence)
        remember(program)
        if folder is None or about is None or runtime.rank() != 0:
            return None
        write(folder, number, phase, stages)
        seen.append((program.copy(), stages))
        if phase != "forward":
            report(folder / f"graph{number}.report.html", seen, *about, chosen)
        code = folder / f"graph{number}.{phase}.code.py"

        def show(text: str) -> None:
            code.write_text(text, encoding="utf-8")

        return show

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


def write(folder: Path, number: int, phase: str, stages: Sequence[pipeline.Stage]) -> None:
    """One file per pass: ``graph0.forward.1.gather.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, stage in enumerate(stages):
        name = f"graph{number}.{phase}.{i}.{stage.name}.txt"
        (folder / name).write_text(stage.listing, encoding="ascii", errors="replace")


def _about(inputs: Sequence[Any]) -> tuple[list[FlatBuffer], list[torch.Tensor]]:
    """Flat buffers among the inputs of a graph, and its other inputs without their storage."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    buffers = {id(b): b for x in tensors if (b := runtime.owner(x)) is not None}
    plain = [x for x in tensors if runtime.owner(x) is None and not isinstance(x, torch.nn.Parameter)]
    return list(buffers.values()), [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in plain]


def report(
    path: Path,
    seen: Sequence[tuple[Program, list[pipeline.Stage]]],
    buffers: Sequence[FlatBuffer],
    inputs: Sequence[torch.Tensor],
    options: Options,
) -> None:
    """The page of programs that are about to run (:func:`mfsdp.explain`), for the hardware that they run on, or for an
    H100 if it is not known. Nothing that goes wrong here stops a run.
    """
    programs, stages = [p for p, _ in seen], [s for _, s in seen]
    try:
        facts = estimate(programs, stages, buffers, inputs, machine=_machine(), options=options)
        path.write_text(page.render(facts), encoding="utf-8")
    except ImportError as error:
        log.info("mfsdp: no report beside the listings: %s", error)
    except Exception:
        log.warning("mfsdp: could not write the report %s", path, exc_info=True)


def _machine() -> Hardware:
    """This accelerator as its maker describes it; H100 if it is not known."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((machine for key, machine in KNOWN.items() if key in name), KNOWN["h100"])


def _traced() -> bool:
    """Whether somebody collects artifacts for tlparse (``TORCH_TRACE=folder``)."""
    return bool(os.environ.get("TORCH_TRACE"))


def _artifacts(number: int, phase: str, stages: Sequence[pipeline.Stage]) -> None:
    """Hands the listings to tlparse. Private in torch (``trace_structured``); tried on 2.11 to 2.13."""
    for i, stage in enumerate(stages) if _traced() else ():
        about = {"name": f"mfsdp_graph{number}_{phase}_{i}_{stage.name}", "encoding": "string"}
        trace_structured("artifact", metadata_fn=partial(dict, about), payload_fn=partial(str, stage.listing))


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
