"""Writes files for debugging (``MFSDP_DUMP=folder``) and tlparse artifacts.

graph0.forward.4.gather.txt     the listing after every pass
graph0.forward.code.py          what Inductor made of it
graph0.report.html              the page of `explain`, for the GPU that the run is on; if that is not known, for another
                                machine, which the page says
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch._logging import trace_structured

from ..buffers.flat_buffer import FlatBuffer, owner_of
from ..config.hardware import KNOWN
from ..config.options import Options
from ..cost_model.estimate import estimate
from ..cost_model.machine import this_machine
from ..ir.byte_costs import nbytes
from ..ir.program import Program
from ..ir.symbolic_sizes import shape_of
from ..pipeline import Stage
from . import page

log = logging.getLogger("mfsdp")


class Dump:
    """Writes the files of one graph that Dynamo traced. One rank writes them. After the report it holds no references.

    Args:
        folder: created when needed.
        number, inputs: of the graph.
    """

    def __init__(self, folder: Path, number: int, options: Options, inputs: Sequence[object]):
        self.folder, self.number, self.options = folder, number, options
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        read = {id(b): b for x in tensors if (b := owner_of(x)) is not None}
        plain = [x for x in tensors if owner_of(x) is None and not isinstance(x, torch.nn.Parameter)]
        self.buffers: list[FlatBuffer] = list(read.values())
        self.inputs = [torch.empty(shape_of(x), dtype=x.dtype, device="meta") for x in plain]
        params = [x for x in tensors if isinstance(x, torch.nn.Parameter) and owner_of(x) is None]
        self.other = sum(nbytes(x) for x in params)
        self.plain = sum(nbytes(x) for x in params if x.requires_grad)
        self.seen: list[tuple[Program, Sequence[Stage]]] = []

    def add(self, program: Program, stages: Sequence[Stage]) -> Callable[[str], None]:
        """Writes a program's listings, and the report after a backward or inference program. Returns a function that
        writes the generated code.
        """
        stem = f"graph{self.number}.{program.title.replace(' ', '_')}"
        for i, stage in enumerate(stages):
            self._write(f"{stem}.{i}.{stage.name}.txt", stage.listing.encode("ascii", "replace").decode())
        self.seen.append((program.copy(), stages))
        if program.phase != "forward":
            self._report()

        def show(code: str) -> None:
            if code:
                self._write(f"{stem}.code.py", code)

        return show

    def _write(self, name: str, text: str) -> None:
        """Writes a file. If that fails, it logs a warning and training continues."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("mfsdp: could not write %s: %s", self.folder / name, error)

    def _report(self) -> None:
        """Writes the report. Errors are logged and never stop training."""
        programs, stages = [p for p, _ in self.seen], [s for _, s in self.seen]
        path = self.folder / f"graph{self.number}.report.html"
        try:
            here = this_machine()
            facts = estimate(
                programs, stages, self.buffers, self.inputs, machine=here or KNOWN["h100"],
                options=self.options, other=self.other, plain=self.plain,
            )  # fmt: skip
            if here is None:
                facts.notes.append(
                    f"all times and the limit of memory are estimates for another machine, {facts.machine.name}: "
                    "of the one that this ran on, no data is known"
                )
            self._write(path.name, page.render(facts))
        except ImportError as error:
            log.info("mfsdp: no report beside the listings: %s", error)
        except Exception:
            log.warning("mfsdp: could not write the report %s", path, exc_info=True)
        self.buffers, self.inputs, self.seen = [], [], []


def traced() -> bool:
    """Returns whether torch collects artifacts for tlparse (``TORCH_TRACE=folder``)."""
    return bool(os.environ.get("TORCH_TRACE"))


def artifacts(number: int, phase: str, stages: Sequence[Stage]) -> None:
    """Logs the listings for tlparse. Private in torch (``trace_structured``); tried on 2.11 to 2.15."""
    for i, stage in enumerate(stages) if traced() else ():
        about = {"name": f"mfsdp_graph{number}_{phase}_{i}_{stage.name}", "encoding": "string"}
        trace_structured("artifact", metadata_fn=partial(dict, about), payload_fn=partial(str, stage.listing))
