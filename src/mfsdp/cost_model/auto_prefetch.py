"""Chooses the prefetch depth for the option ``prefetch="auto"``.

The passes that follow `prefetch` run once on a copy of the program. Then each depth in `DEPTHS` is tried: the cost
model predicts its time, the memory ledger whether it fits. The result is the smallest depth within `WITHIN` of the
fastest one that fits, as a larger depth only takes more memory. (Gather launches and reduction waits move
independently, so the order of these passes does not matter.)

Note [One prefetch depth]
Ranks may run the same collectives with different programs: sequence lengths, uneven TP shards and hardware may differ,
and with them the predicted times. Different depths would order reductions and gathers differently (invariant 13). So
the first rank that decides for a program writes the depth to the process group's store, under a key that is the same on
all ranks (`alike`), and the other ranks read it. No rank waits for another. A rank that compiles later, for another
length or with a cold cache, finds the depth there. A depth from the compile cache was decided in an earlier job: it is
written to the store too, and if another rank has already stored a different depth, the cache entry does not hit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from .. import pipeline
from ..buffers.flat_buffer import FlatBuffer, owner_of
from ..config.best_effort import only_tells
from ..config.hardware import Hardware
from ..config.options import Options
from ..ir import ops
from ..ir.byte_costs import nbytes
from ..ir.program import Program
from ..ir.roles import unit_of
from ..runtime import groups
from . import op_cost
from .machine import machine_of
from .memory_model import ledger
from .offload_schedule import OffloadTiming
from .timeline import simulate

DEPTHS = range(5)
"""Depths to try. 0 is for programs in which nothing waits for a gather. There is no depth above 4: each one takes the
memory of another unit, and with equal units 3 was never more than 0.2% faster than 2 (a saturated link stays
saturated). 4 is for small units between large ones."""

WITHIN = 0.005
"""Fraction by which the chosen depth may be slower than the fastest one."""

DEFAULT = int(Options.prefetch)

Key = str


@dataclass
class AutoPrefetch:
    """Chooses the prefetch depth of each program. `pipeline.table` accepts it in place of a number.

    Args:
        machine: hardware that the programs run on; with ``None`` the option's default depth is used.
        options: backend options, which the following passes use. User passes are not run.
        wide: as in `pipeline.table`.
        held: bytes that the rank holds throughout the step: weights, optimizer state, accumulators.
        profile: measured times.
        pace: timing that places copies to the host, if there are any.
        shared: whether all ranks must use the same depth.
    """

    machine: Hardware | None
    options: Options = field(default_factory=partial(Options, prefetch="auto"))
    wide: bool | None = None
    held: int = 0
    profile: op_cost.Measurements | None = None
    pace: OffloadTiming | None = None
    shared: bool = False
    found: dict[Key, int] = field(default_factory=dict, repr=False)
    """Depths decided so far, by `alike`."""

    @classmethod
    def of_run(cls, options: Options, inputs: Sequence[object]) -> AutoPrefetch | None:
        """Returns one for a graph that the backend compiles, or ``None`` unless ``prefetch="auto"``. It assumes AdamW,
        as the backend does not know the optimizer. ``inputs``: of the graph.
        """
        if options.prefetch != "auto":
            return None
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        machine = machine_of(tensors)
        buffers = list({id(b): b for x in tensors if (b := owner_of(x)) is not None}.values())
        plain = sum(
            nbytes(x) for x in tensors if isinstance(x, nn.Parameter) and x.requires_grad and owner_of(x) is None
        )
        held = always(buffers, other=plain, plain=plain)
        return cls(machine, replace(options, passes=None, dump=None), None, held, shared=True)

    def __call__(self, program: Program) -> tuple[int, str]:
        """Returns the depth and the reason, for the listing. Does not change the program, which is the input of the
        pass `prefetch`.
        """
        otherwise = DEFAULT, f"auto: depth {DEFAULT}, the default, as estimating has failed"
        missing = f"an estimate for prefetch='auto', depth {DEFAULT} is taken"
        depth, words = only_tells(missing, otherwise, self._best, program)
        if self.shared:
            key = alike(program, self.options)
            chosen = self.found[key] = agree(key, depth)
            if chosen != depth:
                return chosen, f"auto: depth {chosen}, as has been decided elsewhere; here it would be {depth}"
        return depth, words

    def _best(self, program: Program) -> tuple[int, str]:
        if self.machine is None:
            return DEFAULT, f"auto: depth {DEFAULT}, as nothing is known of this hardware"
        tried = _Tried(program, self, self.machine)
        times = {depth: tried.seconds(depth) for depth in DEPTHS}
        fit = list(DEPTHS) if tried.fits(DEPTHS[-1]) else [depth for depth in DEPTHS if tried.fits(depth)] or [0]
        best = min(times[depth] for depth in fit)
        chosen = next(depth for depth in fit if times[depth] <= best * (1 + WITHIN))
        others = ", ".join(
            f"{depth}: {1e3 * times[depth]:.2f}{'' if depth in fit else ' and does not fit'}"
            for depth in DEPTHS
            if depth != chosen
        )
        words = f"auto: depth {chosen} of 0 to {DEPTHS[-1]}: {1e3 * times[chosen]:.2f} ms on {self.machine.name}"
        return chosen, f"{words} against {others}"


class Schedules:
    """A program after all passes except those that place launches and buffers, which can run on it again and again:
    launches of gathers move past the results of the passes in between. So prefetch depths are tried one after another.

    Args:
        program: after the first of its passes (`pipeline.Phases`); it is rewritten.
        options, wide, pace: as for `pipeline.chosen`.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        machine: Hardware,
        wide: bool | None,
        pace: OffloadTiming | None,
        profile: op_cost.Measurements | None,
    ):
        self.program, self.options, self.machine, self.wide, self.pace = program, options, machine, wide, pace
        self.fused = options.lowering != "eager"
        pipeline.rewrite(program, self._phases(options).deferred)
        self.nodes, self.memo = program.nodes[:-1], dict[Any, Any]()
        self.measured: op_cost.Measured = profile.given(program) if profile is not None else {}

    def _phases(self, options: Options) -> pipeline.Phases:
        return pipeline.phases(pipeline.chosen(options, self.wide, pace=self.pace))

    def launch(self, depth: int) -> Program:
        """Returns the program with its gathers prefetched at this depth."""
        self.program.move(self.nodes, self.program.output)
        pipeline.rewrite(self.program, self._phases(replace(self.options, prefetch=depth)).again)
        return self.program

    def times(self) -> dict[Node, op_cost.OpTime]:
        """Returns the time of every line, as launched last."""
        return op_cost.op_times(self.program, self.machine, fused=self.fused, memo=self.memo, **self.measured)


class _Tried(Schedules):
    """A copy of a program, with the time and memory of each depth."""

    def __init__(self, program: Program, auto: AutoPrefetch, machine: Hardware):
        options = replace(auto.options, passes=None)
        super().__init__(program.copy(), options, machine, auto.wide, auto.pace, auto.profile)
        self.held = auto.held

    def seconds(self, depth: int) -> float:
        spans = simulate(self.launch(depth), self.times())
        return max((span.end for span in spans), default=0.0)

    def fits(self, depth: int) -> bool:
        account = ledger([self.launch(depth)], [], inputs=0, other=self.held, optimizer="none", fused=self.fused)
        return account.peak <= self.machine.memory


def always(
    buffers: Sequence[FlatBuffer],
    *,
    inputs: int = 0,
    other: int = 0,
    plain: int = 0,
    optimizer: str = "adamw",
    stepping: str = "whole",
) -> int:
    """Returns the bytes that a rank holds throughout a step. Arguments as for `ledger`."""
    account = ledger([], buffers, inputs=inputs, other=other, plain=plain, optimizer=optimizer, stepping=stepping)
    return sum(e.nbytes for e in account.entries if e.name not in ("temporaries", "gradients"))


def alike(program: Program, options: Options) -> Key:
    """Returns a key that is equal on all ranks that must run the same collectives. It hashes the program's gathers and
    reductions in order, its units, and the options that place collectives. It includes unit sizes, except with tensor
    parallelism, where they may be uneven.
    """
    knobs = f"{options.reduce_lag} {options.max_unsharded} {options.lowering} {options.keep_cast}"
    units = [
        f"{u.name} {u.trainable} {u.spec.ranks} {u.spec.full_numel if u.spec.stride == 1 else ''}"
        for u in program.units
    ]
    marked = program.calls(*ops.OURS, ops.accumulate)
    lines = [program.name, program.title, knobs, *units, *(f"{node.target} {unit_of(node)}" for node in marked)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def agree(key: Key, depth: int) -> int:
    """Returns the depth of the first rank that decided for this key."""
    return int(groups.agreed(f"prefetch/{key}", str(depth)))
