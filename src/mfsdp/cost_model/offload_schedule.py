"""Gives the pass `mfsdp.passes.schedule_offload` the times of lines and host copies.

Ranks on different hardware may place copies differently, as no other rank takes part in a copy. Kernel measurements are
not used: a plan names the hardware it was made for, and compilation must place the copies where the plan did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..config.hardware import Hardware, Transfer
from ..ir import ops
from ..ir.program import Program
from ..ir.roles import Lane
from . import op_cost
from .machine import machine_of
from .op_cost import OpTime
from .timeline import simulate


@dataclass(frozen=True)
class OffloadTiming:
    """Returns the seconds of a program's lines. `pipeline.table` takes it.

    Args:
        machine: the hardware.
        fused: whether neighbouring kernels fuse (Inductor) or not (ATen).
    """

    machine: Hardware
    fused: bool = True

    @classmethod
    def of_run(cls, inputs: Sequence[object], fused: bool) -> OffloadTiming | None:
        """Returns one for a graph with these inputs; ``None`` if this machine is not known."""
        machine = machine_of(inputs)
        return None if machine is None else cls(machine, fused)

    def __call__(self, program: Program) -> dict[Node, float]:
        """Returns the seconds of each compute line, with exposed time at waits for collectives, as if host copies took
        no time; and the seconds of each host copy on its link.
        """
        times = op_cost.op_times(program, self.machine, fused=self.fused)
        copies = {node: t.transfer.seconds for node, t in times.items() if node.target in ops.HOST and t.transfer}
        spans = simulate(program, times | dict.fromkeys(copies, OpTime(0.0, transfer=Transfer(0.0, 0.0))))
        return {span.node: span.end - span.start for span in spans if span.lane is Lane.COMPUTE} | copies
