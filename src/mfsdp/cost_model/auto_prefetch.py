"""How far ahead gathers are launched where nobody has said: the option ``prefetch="auto"``.

On a copy of the program what follows in the pipeline is done once, then gathers are launched as far ahead as every
depth of `DEPTHS` says; the clock tells how long each takes, the ledger whether it fits. The smallest depth within
`WITHIN` of the best that fits is taken: what is gathered earlier than it has to be only takes memory. (Launches of
gathers and waits for reductions move past each other without meeting, so that it does not matter which goes first.)

Note [One prefetch depth]
Ranks need not have the same programs to run the same collectives: lengths of sequences may differ, and what tensor
parallelism leaves of an uneven matrix, so that clocks may differ too; so may hardware. A depth that differed would put
reductions between other gathers (law 13). So the first rank that decides for a program writes the depth down in the
process group's store, under what all of them have alike, and the others take it: nobody waits for anybody, whoever
compiles later, for another length or because its cache was cold, finds it there. What comes from a cache was decided in
an earlier run: it is written down too, and where another rank was faster and has decided otherwise, it is no hit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ..config.best_effort import only_tells
from ..config.hardware import Hardware
from ..config.options import Options
from ..ir import ops
from ..ir.byte_costs import nbytes
from ..ir.program import Program
from ..ir.roles import role
from ..passes.assign_groups import assign_groups
from ..passes.defer import defer
from ..passes.inplace_wgrad import inplace_wgrad
from ..passes.plan_memory import plan_memory
from ..passes.prefetch import prefetch
from ..passes.schedule_offload import schedule_offload
from ..runtime import buffer_registry, groups
from ..state.flat_buffer import FlatBuffer
from . import op_cost
from .machine import this_machine
from .memory_model import ledger
from .offload_schedule import OffloadTiming
from .timeline import simulate

DEPTHS = range(5)
"""What is tried. None: where nothing waits for a gather there is nothing to launch early. More than 4: each takes the
memory of another unit, and where units are alike 3 has never been better than 2 by more than 0.2% (a full link stays
full, however early one begins); 4 is for small units between large ones."""

WITHIN = 0.005
"""How much longer than the best a program may take: a part of its time."""

Key = str


@dataclass
class AutoPrefetch:
    """Decides for programs; `pipeline.table` takes it for a depth.

    Args:
        machine: on what they run; of ``None`` nothing is known, and the option's default is taken.
        options: those of the backend: what follows in the pipeline obeys them. Passes of the user's are not asked.
        wide: as in `pipeline.table`.
        held: bytes of what is there whatever a program does: weights, optimizer state, accumulators.
        profile: what knows measured times: ``given(program)``, for `mfsdp.cost_model.op_cost.op_times`.
        pace: what places copies to the host, if there are any.
        shared: whether other ranks have to decide alike.
    """

    machine: Hardware | None
    options: Options = field(default_factory=partial(Options, prefetch="auto"))
    wide: bool | None = None
    held: int = 0
    profile: Any = None
    pace: OffloadTiming | None = None
    shared: bool = False
    found: dict[Key, int] = field(default_factory=dict, repr=False)
    """What has been decided, by what ranks have alike."""

    @classmethod
    def of_run(cls, options: Options, inputs: Sequence[Any]) -> AutoPrefetch | None:
        """For the graph that the backend is given, if it is asked to decide. The optimizer is not known, and taken to
        be AdamW.

        Args:
            options: those of the backend.
            inputs: of the graph.
        """
        if options.prefetch != "auto":
            return None
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        machine = this_machine() if any(x.device.type == "cuda" for x in tensors) else None
        buffers = list({id(b): b for x in tensors if (b := buffer_registry.owner(x)) is not None}.values())
        plain = sum(
            nbytes(x)
            for x in tensors
            if isinstance(x, nn.Parameter) and x.requires_grad and buffer_registry.owner(x) is None
        )
        held = always(buffers, other=plain, plain=plain)
        return cls(machine, replace(options, passes=None, dump=None), None, held, shared=True)

    def __call__(self, program: Program) -> tuple[int, str]:
        """The depth, and why, for the listing. The program, as the pass `prefetch` gets it, is not changed."""
        default = int(Options.prefetch)
        untold = default, f"auto: depth {default}, the default, as estimating has failed"
        missing = f"an estimate for prefetch='auto', depth {default} is taken"
        depth, words = only_tells(missing, untold, self._best, program)
        if self.shared:
            key = alike(program, self.options)
            chosen = self.found[key] = agree(key, depth)
            if chosen != depth:
                return chosen, f"auto: depth {chosen}, as has been decided elsewhere; here it would be {depth}"
        return depth, words

    def _best(self, program: Program) -> tuple[int, str]:
        if self.machine is None:
            default = int(Options.prefetch)
            return default, f"auto: depth {default}, as nothing is known of this hardware"
        tried = _Tried(program, self, self.machine)
        times = {depth: tried.seconds(depth) for depth in DEPTHS}
        fit = [depth for depth in DEPTHS if tried.fits(depth)] or [0]
        best = min(times[depth] for depth in fit)
        chosen = next(depth for depth in fit if times[depth] <= best * (1 + WITHIN))
        others = ", ".join(
            f"{depth}: {1e3 * times[depth]:.2f}{'' if depth in fit else ' and does not fit'}"
            for depth in DEPTHS
            if depth != chosen
        )
        words = f"auto: depth {chosen} of 0 to {DEPTHS[-1]}: {1e3 * times[chosen]:.2f} ms on {self.machine.name}"
        return chosen, f"{words} against {others}"


class _Tried:
    """A copy of a program on which depths are tried, one after the other."""

    def __init__(self, program: Program, auto: AutoPrefetch, machine: Hardware):
        options = auto.options
        self.auto, self.machine, self.fused = auto, machine, options.lowering != "eager"
        self.copy = program.copy()
        defer(self.copy, lag=options.reduce_lag)
        inplace_wgrad(self.copy, wide=auto.wide)
        assign_groups(self.copy)
        self.nodes, self.memo = self.copy.nodes[:-1], dict[Any, Any]()
        self.known = auto.profile.given(self.copy) if auto.profile is not None else {}

    def launch(self, depth: int) -> Program:
        """The copy, with its gathers launched so far ahead."""
        self.copy.move(self.nodes, self.copy.output)
        prefetch(self.copy, depth=depth, limit=self.auto.options.max_unsharded)
        if self.auto.pace is not None:
            schedule_offload(self.copy, pace=self.auto.pace)
        return self.copy

    def seconds(self, depth: int) -> float:
        copy = self.launch(depth)
        spans = simulate(copy, op_cost.op_times(copy, self.machine, fused=self.fused, memo=self.memo, **self.known))
        return max((span.end for span in spans), default=0.0)

    @cached_property
    def deepest(self) -> bool:
        """Whether all depths fit, as the deepest does."""
        return self._fits(DEPTHS[-1])

    def fits(self, depth: int) -> bool:
        return self.deepest or self._fits(depth)

    def _fits(self, depth: int) -> bool:
        copy = self.launch(depth)
        plan_memory(copy, on=self.auto.options.pool)
        account = ledger([copy], [], inputs=0, other=self.auto.held, optimizer="none", fused=self.fused)
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
    """Bytes that a rank holds throughout a step, whatever programs do: arguments as for `ledger`."""
    account = ledger([], buffers, inputs=inputs, other=other, plain=plain, optimizer=optimizer, stepping=stepping)
    return sum(e.nbytes for e in account.entries if e.name not in ("temporaries", "gradients"))


def alike(program: Program, options: Options) -> Key:
    """What ranks have alike whose collectives have to stay so: what a program gathers and reduces, in which order, of
    which units, and the options that say where. Sizes of units, too, but not beside tensor parallelism, where they may
    be uneven.
    """
    knobs = f"{options.reduce_lag} {options.max_unsharded} {options.lowering} {options.keep_cast}"
    units = [
        f"{u.name} {u.trainable} {u.spec.ranks} {u.spec.full_numel if u.spec.stride == 1 else ''}"
        for u in program.units
    ]
    marked = ((n, r) for n in program.nodes if (r := role(n)) is not None and n.target in (*ops.OURS, ops.accumulate))
    lines = [program.name, program.phase, knobs, *units, *(f"{node.target} {r.unit}" for node, r in marked)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def agree(key: Key, depth: int) -> int:
    """What the first rank has decided that came to it: this one, or another."""
    return int(groups.agreed(f"prefetch/{key}", str(depth)))
