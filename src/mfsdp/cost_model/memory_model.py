"""Predicts the memory of one rank before anything runs: the memory ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..buffers.flat_buffer import FlatBuffer
from ..config.layout import Layout
from ..config.units import Unit
from ..ir import ops
from ..ir.byte_costs import Line, Move, accumulator, lines, nbytes, saved, size
from ..ir.program import Program, first_launches, slot_of
from ..ir.roles import Kind, unit_of
from ..optim.parameter_ranges import TOGETHER
from . import fusion, whole_matrices

OPTIMIZER_STATES = {
    "adamw": 2, "adam": 2, "fused_adamw": 2, "fused_adam": 2, "sgd": 0, "momentum": 1, "lion": 1, "adagrad": 1,
    "rmsprop": 1, "muon": 1, "none": 0,
}  # fmt: skip
"""State tensors per parameter, in the dtype of the main weights. ``fused_adamw`` and ``fused_adam``: torch's with
``fused=True``, whose kernels need no temporaries. ``muon``: `torch.optim.Muon` of the layers' matrices
beside AdamW of the rest, which has another one (`whole_matrices.stepped`); both by `fully_shard_optimizer`."""

TEMPORARIES = {"adamw": (1, 2), "adam": (1, 2), "adagrad": (2, 1), "rmsprop": (1, 1)}
"""Temporary tensors per parameter in an optimizer step: with ``foreach``, for all parameters at once; without, for one
parameter at a time."""

STEPPING = ("whole", "flat", "offloaded")
"""How the optimizer steps: all parameters at once, as in torch; some units at a time (`fully_shard_optimizer`); one
unit at a time, with state from the host (its ``offload``)."""


@dataclass(frozen=True)
class Entry:
    """One line of the ledger."""

    name: str
    nbytes: int
    """Bytes at the peak."""
    what: str


@dataclass(frozen=True)
class Ledger:
    """The memory of one rank in a step after the first: static buffers and optimizer state exist, backward allocates
    the accumulators (Note [Accumulator memory]). For a step with several backwards it describes one after the first,
    in which accumulators exist from forward on. It has many fields because one pass over the programs gives the whole
    account, which reports show together.
    """

    entries: tuple[Entry, ...]
    peak: int
    """Bytes: the sum of the entries."""
    phase: str
    """Title of the program of the peak, or ``"optimizer"``."""
    line: str
    """Name of the line of the peak."""
    padding: int
    """Bytes of `peak` that belong to no parameter."""
    live: dict[str, dict[str, int]]
    """Total bytes while a line runs, by the program's title and line name."""
    after: dict[str, dict[str, int]]
    """Total bytes after a line, by the program's title and line name."""
    lasting: int = 0
    """Bytes held throughout the step, with static buffers."""
    at_step: int = 0
    """Peak bytes while the optimizer steps."""
    on_host: tuple[Entry, ...] = ()
    """Host memory, which no other number includes."""
    tensors: tuple[int, ...] = ()
    """Bytes of tensors held throughout, without `FIXED`; a unit's tensors of one kind count as one."""
    temporaries: tuple[int, ...] = ()
    """Bytes of tensors that exist only while the optimizer steps."""
    blocks: int = 0
    """Peak bytes of blocks in CUDA's caching allocator (`mfsdp.cost_model.caching_allocator`); 0: not known."""
    reserved: int = 0
    """Bytes of that allocator's segments, none of which is returned."""
    first: bool = True
    """Whether it describes a step's first microbatch, whose backward allocates the accumulators."""
    occasions: tuple[Entry, ...] = ()
    """Peak memory outside of steps: while the model is initialised, while it is saved."""

    @property
    def host(self) -> int:
        """Bytes of host memory: the sum of `on_host`."""
        return sum(e.nbytes for e in self.on_host)

    def __str__(self) -> str:
        rows = [f"{e.name:<34}{size(e.nbytes):>9}   {e.what}" for e in self.entries]
        where = f"{self.phase}: {self.line}" if self.line else self.phase
        return "\n".join(
            [
                *rows,
                f"{'peak':<34}{size(self.peak):>9}   in {where}",
                f"{'of which padding':<34}{size(self.padding):>9}",
                *([f"{'taken':<34}{size(self.taken):>9}   {self.beside}"] if self.reserved else ()),
                *(f"{e.name:<34}{size(e.nbytes):>9}   {e.what}" for e in self.occasions),
                *(f"{'on the host: ' + e.name:<34}{size(e.nbytes):>9}   {e.what}" for e in self.on_host),
            ]
        )

    @property
    def taken(self) -> int:
        """Device bytes in total: reserved by the allocator, and fixed; 0: not known."""
        return self.reserved + self._fixed if self.reserved else 0

    @property
    def beside(self) -> str:
        """Text that explains the difference between `taken` and the peak."""
        rounding = max(0, self.blocks - (self.peak - self._fixed))
        return (
            f"reserved by CUDA's caching allocator, about: {size(rounding)} of rounding, "
            f"{size(self.reserved - self.blocks)} of fragments"
        )

    @property
    def _fixed(self) -> int:
        return next((e.nbytes for e in self.entries if e.name == FIXED), 0)


FIXED = "fixed"


Played = dict[tuple[Program, bool, bool], tuple[list[Line], list[Move]]]
"""Lines and moves by program, whether neighbouring kernels fuse, and whether accumulators are allocated."""


def lines_and_moves(program: Program, fused: bool, accumulators: bool, known: Played) -> tuple[list[Line], list[Move]]:
    """Returns a program's lines and its allocations and frees. The program must not have changed since the last call
    with the same cache.
    """
    key = program, fused, accumulators
    if key not in known:
        moves: list[Move] = []
        known[key] = lines(program, fusion.fused(program) if fused else (), moves, accumulators=accumulators), moves
    return known[key]


def ledger(
    programs: Sequence[Program],
    buffers: Sequence[FlatBuffer],
    *,
    inputs: int,
    other: int,
    plain: int = 0,
    optimizer: str,
    stepping: str = "whole",
    fused: bool = False,
    foreach: bool = True,
    fixed: int = 0,
    on_host: Sequence[Entry] = (),
    waiting: int = 0,
    rounds: int = 1,
    captured: bool = False,
    stands: Mapping[str, str] | None = None,
    played: Played | None = None,
) -> Ledger:
    """Returns the memory ledger of a step.

    Args:
        programs: a step's programs after all passes, in execution order.
        buffers: every flat buffer of the model.
        inputs: bytes of the batch.
        other: bytes that are not sharded: buffers, ignored parameters.
        plain: bytes among them of trainable parameters.
        optimizer: a name in `OPTIMIZER_STATES`.
        stepping: one of `STEPPING`.
        fused: whether neighbouring kernels fuse (Inductor) or not (ATen).
        foreach: whether the optimizer works on all tensors at once (torch's default on CUDA) or one at a time.
        fixed: bytes in use before the first tensor (`mfsdp.cost_model.machine.fixed`).
        on_host: entries in host memory instead of device memory.
        waiting: number of other microbatches whose activations are held meanwhile.
        rounds: number of backwards in a step.
        captured: whether CUDA graphs hold what forward saves (Note [Captured programs]).
        stands: for modules missing in the programs, the module whose parameters are read in the same way.
        played: cache of the programs' lines, for other ledgers and `mfsdp.cost_model.caching_allocator`.

    Raises:
        ValueError: ``optimizer`` or ``stepping`` is unknown.
    """
    check_names(optimizer, stepping)
    states, streamed, temporaries = _optimizer_memory(buffers, plain, optimizer, stepping, foreach)
    first = rounds == 1 and not waiting and not any(p.phase == "overlapped" for p in programs)
    gradients = [b.layout.shard_numel * b.precision.grad.itemsize for b in buffers if b.trainable]
    accumulators = gradients if not first and any(p.phase == "backward" for p in programs) else []
    slots: dict[str, int] = {}
    for p in programs:
        slots |= {name: max(n, slots.get(name, 0)) for name, n in p.slots.items()}
    kept = _kept_parameters(programs, buffers, stands or {})
    mains = [b.weights.main.nbytes for b in buffers]
    held = _Held(mains, states, *kept, other, inputs, accumulators, slots)
    accumulated = sum(accumulators)
    lasting = fixed + sum(held.tensors)
    in_flight = waiting and waiting * sum(sum(saved(p)[0].values()) for p in programs if p.phase == "backward")
    given_back = {p.title: _given_back(p) for p in programs if captured and p.phase == "backward"}
    live, after, top = _totals(
        programs, fused, lasting + in_flight, first, given_back, {} if played is None else played
    )
    stepped = accumulated if optimizer == "none" else plain + sum(gradients)
    early = sum(nbytes(n.meta["val"]) for n in _prefetched_gathers(programs)) if optimizer != "none" else 0
    graphs = sum(max(freed.values(), default=0) for freed in given_back.values())
    at_step = lasting - accumulated + stepped + sum(temporaries) + early + graphs
    if top is None or top.nbytes <= at_step:
        peak, phase, line = at_step, "optimizer", ""
        how = "of a foreach optimizer" if foreach else "of an optimizer that takes one tensor after another"
        how = "staging of whole matrices, a batch of them, momentum of a unit" if optimizer == "muon" else how
        changing = [
            Entry("gradients", stepped, "accumulators, until zero_grad"),
            Entry("temporaries", sum(temporaries), how),
            Entry("gathered ahead", early, "of forward, behind fully_shard_optimizer's step"),
            Entry("activations saved by forward", graphs, "held by CUDA graphs"),
        ]
    else:
        peak, phase, line = top.nbytes, top.program.title, top.row.node.name
        changing = _entries_at(top, accumulated, in_flight, waiting, first)
        graphs = given_back.get(top.program.title, {}).get(top.row.node, 0)
        changing.append(Entry("activations used by backward", graphs, "held by CUDA graphs"))
    entries = [*held.entries(optimizer + (", two rooms for what is on the host" if streamed else ""), fixed), *changing]
    padding = sum(b.layout.pad // b.layout.world * b.weights.main.itemsize for b in buffers)
    padding *= 1 if streamed else 1 + OPTIMIZER_STATES[optimizer]
    on_host_state = [Entry("optimizer state", streamed, "streamed through the device")] if streamed else []
    return Ledger(
        tuple(e for e in entries if e.nbytes), peak, phase, line, padding, live, after, lasting, at_step,
        (*on_host_state, *on_host), tuple(filter(None, held.tensors)), tuple(filter(None, temporaries)), first=first,
    )  # fmt: skip


@dataclass(frozen=True)
class _Held:
    """Bytes that exist throughout a step; a list has one number per unit."""

    mains: list[int]
    states: list[int]
    persistent: list[int]
    """Parameters in the communication dtype."""
    payloads: int
    casts: list[int]
    other: int
    inputs: int
    accumulators: list[int]
    """Empty if backward allocates them."""
    slots: dict[str, int]
    """Static buffers by name."""

    @property
    def tensors(self) -> list[int]:
        """Bytes of each tensor."""
        units = [*self.mains, *self.states, *self.persistent, self.payloads, *self.casts]
        return [*units, self.other, self.inputs, *self.accumulators, *self.slots.values()]

    def entries(self, optimizer: str, fixed: int) -> list[Entry]:
        """Returns the ledger's entries, without the accumulators."""
        gathered = {name: n for name, n in self.slots.items() if name.startswith("p")}
        buckets = {name: n for name, n in self.slots.items() if name.startswith("g")}
        return [
            Entry("main weights", sum(self.mains), "this rank's shards, as the optimizer sees them"),
            Entry("optimizer state", sum(self.states), optimizer),
            Entry("parameters that last", sum(self.persistent), "from step to step"),
            Entry("persistent FP8 weights", self.payloads, "from step to step, one byte per element and recipe"),
            Entry("shards in what travels", sum(self.casts), "kept from step to step (keep_cast)"),
            Entry("gathered parameters", sum(gathered.values()), "static buffers " + " ".join(gathered)),
            Entry("gradient buckets", sum(buckets.values()), "static buffers " + " ".join(buckets)),
            Entry("not sharded", self.other, "buffers and ignored parameters"),
            Entry("inputs", self.inputs, "the batch"),
            Entry(FIXED, fixed, "context, communicators, libraries: as measured"),
        ]


def _kept_parameters(
    programs: Sequence[Program], buffers: Sequence[FlatBuffer], stands: Mapping[str, str]
) -> tuple[list[int], int, list[int]]:
    """Returns bytes that exist from step to step besides the main weights: parameters in the communication dtype by
    unit, all FP8 payloads, and kept casts by unit.
    """
    read = [(stands.get(b.unit.fqn, b.unit.fqn), b.layout) for b in buffers]
    missing = [key for b, key in zip(buffers, read, strict=True) if key[0] != b.unit.fqn]
    payloads, only_payloads = _fp8_payloads(programs)
    casts = {key: u.layout.shard_numel * u.spec.precision.comm.itemsize for key, u in _kept_casts(programs).items()}
    persistent = [b for b, key in zip(buffers, read, strict=True) if b.spec.persistent and key not in only_payloads]
    return (
        [b.weights.source.nbytes for b in persistent],
        sum(payloads.values()) + sum(payloads.get(key, 0) for key in missing),
        [*casts.values(), *(casts[key] for key in missing if key in casts)],
    )


@dataclass(frozen=True)
class _Top:
    """The line with the most memory."""

    nbytes: int
    program: Program
    row: Line


def _totals(
    programs: Sequence[Program],
    fused: bool,
    held: int,
    first: bool,
    given_back: Mapping[str, Mapping[Node, int]],
    played: Played,
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]], _Top | None]:
    """Returns `Ledger.live`, `Ledger.after` and the first line with the most bytes, given the bytes held throughout,
    and those that CUDA graphs hold though a program has given them back.
    """
    live: dict[str, dict[str, int]] = {}
    after: dict[str, dict[str, int]] = {}
    top: _Top | None = None
    for p in programs:
        rows, _ = lines_and_moves(p, fused, first, played)
        base, more = held - sum(p.slots.values()), given_back.get(p.title, {})
        live[p.title] = {row.node.name: base + row.top + more.get(row.node, 0) for row in rows}
        after[p.title] = {row.node.name: base + row.live + more.get(row.node, 0) for row in rows}
        highest = max(rows, key=lambda row: live[p.title][row.node.name], default=None)
        if highest is not None and (top is None or live[p.title][highest.node.name] > top.nbytes):
            top = _Top(live[p.title][highest.node.name], p, highest)
    return live, after, top


def _entries_at(top: _Top, accumulated: int, in_flight: int, waiting: int, first: bool) -> list[Entry]:
    """Returns the entries of gradients, activations and temporaries at a line, given the bytes of accumulators that
    exist throughout and of the activations of ``waiting`` other microbatches.
    """
    program, node = top.program, top.row.node
    still = _saved(program, node) if program.phase in ("backward", "overlapped") else 0
    found = (n for n in program.find(Kind.ACCUMULATE) if first and not n > node)
    allocated = sum(accumulator(program, n) for n in found)
    used = top.row.top - sum(program.slots.values())
    return [
        Entry("gradients", accumulated + allocated, "accumulators, until zero_grad"),
        Entry("activations saved by forward", still, "still there"),
        Entry("activations in flight", in_flight, f"of {waiting} more microbatches in the pipeline"),
        Entry("temporaries", used - still - allocated, "what the lines around the peak hold"),
    ]


def _largest(buffer: FlatBuffer) -> int:
    """Returns the main-weight bytes of the largest part of a parameter on any rank."""
    layout = buffer.layout
    if not buffer.trainable:
        return 0
    parts = (min(slot.numel, layout.segment(i).chunk) for i, slot in enumerate(layout.slots))
    return max(parts, default=0) * buffer.weights.main.itemsize


def check_names(optimizer: str, stepping: str) -> None:
    """Raises ValueError if ``optimizer`` or ``stepping`` is unknown."""
    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"optimizer={optimizer!r}: choose one of {', '.join(OPTIMIZER_STATES)}")
    if stepping not in STEPPING:
        raise ValueError(f"stepping={stepping!r}: choose one of {', '.join(STEPPING)}")


def _optimizer_memory(
    buffers: Sequence[FlatBuffer], plain: int, optimizer: str, stepping: str, foreach: bool
) -> tuple[list[int], int, list[int]]:
    """Returns bytes by tensor of state on the device, bytes of state on the host, and bytes by tensor of temporaries.
    Assumes one parameter group, so that each buffer is one range.
    """
    if optimizer == "muon":
        return _muon_memory(buffers, plain, stepping)
    count = OPTIMIZER_STATES[optimizer]
    runs = [b.weights.main.nbytes for b in buffers if b.trainable]
    largest = max(runs, default=0)
    states, on_host, at_once = [n for n in (*runs, plain) for _ in range(count)], 0, [*runs, plain]
    if stepping == "flat":
        at_once = [min(sum(runs), max(largest, TOGETHER)), plain]
    elif stepping == "offloaded":
        states = [count * n for n in (*[largest] * min(2, len(runs)), plain)]
        on_host, at_once = count * sum(runs), [max(largest, plain)]
    foreach_holds, one_holds = TEMPORARIES.get(optimizer, (0, 0))
    one = max([plain, *map(_largest, buffers)])
    return states, on_host, at_once * foreach_holds if foreach else [one] * one_holds


def state_bytes(buffers: Sequence[FlatBuffer], optimizer: str) -> list[int]:
    """Returns the bytes of optimizer state of every buffer."""
    more = whole_matrices.rest(buffers) if optimizer == "muon" else [0] * len(buffers)
    mains = [b.weights.main.nbytes if b.trainable else 0 for b in buffers]
    return [OPTIMIZER_STATES[optimizer] * main + n for main, n in zip(mains, more, strict=True)]


def _muon_memory(buffers: Sequence[FlatBuffer], plain: int, stepping: str) -> tuple[list[int], int, list[int]]:
    """Returns the same as `_optimizer_memory`, of Muon and AdamW. They step one after the other."""
    states, more = state_bytes(buffers, "muon"), whole_matrices.temporaries(buffers)
    if stepping == "offloaded":
        rooms = sorted(states)[-2:]
        return [*rooms, 2 * plain], sum(states), more
    return [*states, 2 * plain], 0, more


def _prefetched_gathers(programs: Sequence[Program]) -> list[Node]:
    """Returns the gathers of Note [Step prefetch] that have no static buffer; a flat optimizer launches them early."""
    forward = next((p for p in programs if p.phase == "forward"), None)
    first = [] if forward is None else first_launches(forward)
    return [n for n in first if n.target is ops.all_gather and not slot_of(n)]


Read = tuple[str, Layout]
"""Parameters that are communicated together: path of their module, and their layout."""


def _fp8_payloads(programs: Sequence[Program]) -> tuple[dict[Read, int], set[Read]]:
    """Returns bytes of persistent FP8 payloads, of forward's recipe and of backward's if it differs; and the units that
    are read only as FP8.
    """
    codes: dict[tuple[Read, Any], int] = {}
    filled: set[Read] = set()
    for p in programs:
        for node in p.calls(ops.refresh, ops.refresh_codes):
            unit = p.unit(unit_of(node))
            if node.target is ops.refresh:
                filled.add((unit.fqn, unit.layout))
            else:
                codes[(unit.fqn, unit.layout), node.args[2]] = nbytes(node.meta["val"])
    out: dict[Read, int] = {}
    for (key, _), taken in codes.items():
        out[key] = out.get(key, 0) + taken
    return out, out.keys() - filled


def _kept_casts(programs: Sequence[Program]) -> dict[Read, Unit]:
    """Returns the units with kept casts (Note [Kept casts])."""
    found: dict[Read, Unit] = {}
    for p in programs:
        for node in p.calls(ops.all_gather, ops.kept_cast):
            source, unit = node.args[0], p.unit(unit_of(node))
            casts = source.meta["val"].dtype is not node.meta["val"].dtype  # type: ignore[union-attr]
            if node.target is ops.kept_cast or (casts and unit.spec.precision.wire is None):
                found[unit.fqn, unit.layout] = unit
    return found


def _saved(program: Program, at: Node) -> int:
    """Returns the bytes of saved activations that backward still holds at a line."""
    held, last = _last_readers(program)
    return sum(n for node, n in held.items() if not last[node] < at)


def _given_back(program: Program) -> dict[Node, int]:
    """Returns the bytes of saved activations that a backward has given back before each line, and at its output."""
    held, last = _last_readers(program)
    freed, total = Counter[Node](), 0
    for node, n in held.items():
        freed[last[node]] += n
    out = {}
    for node in program.nodes:
        out[node] = total
        total += freed[node]
    return {**out, program.output: total}


def _last_readers(program: Program) -> tuple[dict[Node, int], dict[Node, Node]]:
    """Returns the bytes of saved activations, and the last reader of each."""
    held, shared = saved(program)
    last = {node: max(program.readers(node), default=node) for node in [*held, *shared]}
    for node, owner in shared.items():
        last[owner] = max(last[owner], last[node])
    return held, last
