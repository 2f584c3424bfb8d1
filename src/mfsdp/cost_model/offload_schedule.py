"""How long compute stands at each line, for whoever places copies to the host (`mfsdp.passes.schedule_offload`).

Ranks on unlike hardware may place them differently: no other rank takes part in a copy. What was measured of kernels is
not asked: a plan says for which hardware it was made, and copies have to stand where it has put them when it compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..config.hardware import Hardware, Transfer
from ..ir import ops
from ..ir.program import Program
from ..ir.roles import Lane
from . import op_cost
from .machine import this_machine
from .op_cost import OpTime
from .timeline import simulate


@dataclass(frozen=True)
class OffloadTiming:
    """Seconds of the lines of a program; `pipeline.table` takes it.

    Args:
        machine: on what they run.
        fused: whether neighbouring kernels fuse (Inductor) or not (ATen).
    """

    machine: Hardware
    fused: bool = True

    @classmethod
    def of_run(cls, inputs: Sequence[Any], fused: bool) -> OffloadTiming | None:
        """For a graph with these inputs; ``None`` where nothing is known of the machine."""
        gpu = any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs)
        machine = this_machine() if gpu else None
        return None if machine is None else cls(machine, fused)

    def __call__(self, program: Program) -> dict[Node, float]:
        """Of compute's lines how long they take, waits for collectives with what is exposed of them, as if copies took
        no time; and of each copy how long that takes on its link.
        """
        times = op_cost.op_times(program, self.machine, fused=self.fused)
        copies = {node: t.transfer.seconds for node, t in times.items() if node.target in ops.HOST and t.transfer}
        spans = simulate(program, times | dict.fromkeys(copies, OpTime(0.0, transfer=Transfer(0.0, 0.0))))
        return {span.node: span.end - span.start for span in spans if span.lane is Lane.COMPUTE} | copies
