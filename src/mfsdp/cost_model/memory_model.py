"""Predicts the memory of one rank before anything runs: the memory ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..config.layout import Layout
from ..config.units import Unit
from ..ir import ops
from ..ir.byte_costs import accumulator, lines, nbytes, saved, size
from ..ir.program import Program, first_launches, slot_of
from ..ir.roles import Kind, role
from ..state.flat_buffer import FlatBuffer
from ..state.flat_optimizer import TOGETHER
from . import fusion

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "lion": 1, "adagrad": 1, "rmsprop": 1, "none": 0}
"""State tensors per parameter, in the dtype of the main weights."""

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
    in which accumulators exist from forward on.
    """

    entries: tuple[Entry, ...]
    peak: int
    """Bytes: the sum of the entries."""
    phase: str
    """Program of the peak, or ``"optimizer"``."""
    line: str
    """Name of the line of the peak."""
    padding: int
    """Bytes of `peak` that belong to no parameter."""
    live: dict[str, dict[str, int]]
    """Total bytes while a line runs, by phase and line name."""
    after: dict[str, dict[str, int]]
    """Total bytes after a line, by phase and line name."""
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
    stands: Mapping[str, str] | None = None,
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
        stands: for modules missing in the programs, the module whose parameters are read in the same way.

    Raises:
        ValueError: ``optimizer`` or ``stepping`` is unknown.
    """
    check_names(optimizer, stepping)
    states = OPTIMIZER_STATES[optimizer]
    mains = [b.weights.main.nbytes for b in buffers]
    stepped, at_once, host = _stepped(buffers, plain, states, stepping)
    stood = [((stands or {}).get(b.unit.fqn, b.unit.fqn), b.layout) for b in buffers]
    lasting_codes, coded = _lasting(programs)
    lasts = [
        b.weights.source.nbytes for b, key in zip(buffers, stood, strict=True) if b.spec.persistent and key not in coded
    ]
    casting = {key: u.layout.shard_numel * u.spec.precision.comm.itemsize for key, u in _casting(programs).items()}
    again = [key for b, key in zip(buffers, stood, strict=True) if key[0] != b.unit.fqn]
    codes = sum(lasting_codes.values()) + sum(lasting_codes.get(key, 0) for key in again)
    narrow = [*casting.values(), *(casting[key] for key in again if key in casting)]
    added = [b.layout.shard_numel * b.precision.grad.itemsize for b in buffers if b.trainable]
    main, there, kept, casts, gradients = sum(mains), sum(stepped), sum(lasts), sum(narrow), plain + sum(added)
    slots: dict[str, int] = {}
    for p in programs:
        for name, n in p.slots.items():
            slots[name] = max(n, slots.get(name, 0))
    trains = any(p.phase == "backward" for p in programs)
    first = rounds == 1 and not waiting and not any(p.phase == "overlapped" for p in programs)
    staying = gradients - plain if trains and not first else 0
    tensors = [*mains, *stepped, *lasts, codes, *narrow, other, inputs, *(added if staying else ()), *slots.values()]
    lasting = fixed + sum(tensors)
    live: dict[str, dict[str, int]] = {}
    after: dict[str, dict[str, int]] = {}
    foreach_holds, one_holds = TEMPORARIES.get(optimizer, (0, 0))
    works = at_once * foreach_holds if foreach else [max([plain, *map(_largest, buffers)])] * one_holds
    temporaries = sum(works)
    early = sum(nbytes(n.meta["val"]) for n in _early(programs)) if optimizer != "none" else 0
    back = [p for p in programs if p.phase == "backward"] if waiting else []
    others = waiting * sum(sum(saved(p)[0].values()) for p in back)
    at_step = lasting + (0 if optimizer == "none" else gradients - staying + temporaries + early)
    peak, where = at_step, None
    for p in programs:
        pooled = sum(p.slots.values())
        live[p.phase], after[p.phase] = {}, {}
        for row in lines(p, fusion.fused(p) if fused else (), accumulators=first):
            base = lasting - pooled + others
            live[p.phase][row.node.name], after[p.phase][row.node.name] = base + row.top, base + row.live
            if base + row.top > peak:
                peak, where = base + row.top, (p, row.node, row.top - pooled)
    entries = [
        Entry("main weights", main, "this rank's shards, as the optimizer sees them"),
        Entry("optimizer state", there, optimizer + (", two rooms for what is on the host" if host else "")),
        Entry("parameters that last", kept, "from step to step"),
        Entry("codes that last", codes, "from step to step, one byte per element and recipe"),
        Entry("shards in what travels", casts, "kept from step to step (keep_cast)"),
        Entry("gathered parameters", _sum(slots, "p"), "static buffers " + _names(slots, "p")),
        Entry("gradient buckets", _sum(slots, "g"), "static buffers " + _names(slots, "g")),
        Entry("not sharded", other, "buffers and ignored parameters"),
        Entry("inputs", inputs, "the batch"),
        Entry(FIXED, fixed, "context, communicators, libraries: as measured"),
    ]
    if where is None:
        entries += [
            Entry("gradients", staying if optimizer == "none" else gradients, "accumulators, until zero_grad"),
            Entry(
                "temporaries",
                0 if optimizer == "none" else temporaries,
                "of a foreach optimizer" if foreach else "of an optimizer that takes one tensor after another",
            ),
            *([Entry("gathered ahead", early, "of forward, behind fully_shard_optimizer's step")] if early else ()),
        ]
        phase, line = "optimizer", ""
    else:
        program, node, used = where
        still = _saved(program, node) if program.phase in ("backward", "overlapped") else 0
        found = (n for n in program.find(Kind.ACCUMULATE) if first and not n > node)
        some = sum(accumulator(program, n) for n in found)
        entries += [
            Entry("gradients", staying + some, "accumulators, until zero_grad"),
            Entry("activations saved by forward", still, "still there"),
            Entry("activations in flight", others, f"of {waiting} more microbatches in the pipeline"),
            Entry("temporaries", used - still - some, "what the lines around the peak hold"),
        ]
        phase, line = program.phase, node.name
    padding = sum(b.layout.pad // b.layout.world * b.weights.main.itemsize for b in buffers) * (1 + states * (not host))
    beside = [*([Entry("optimizer state", host, "streamed through the device")] if host else ()), *on_host]
    there_are = tuple(e for e in entries if e.nbytes)
    return Ledger(
        there_are, peak, phase, line, padding, live, after, lasting, at_step, tuple(beside),
        tuple(filter(None, tensors)), tuple(filter(None, works if optimizer != "none" else ())), first=first,
    )  # fmt: skip


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


def _stepped(buffers: Sequence[FlatBuffer], plain: int, states: int, stepping: str) -> tuple[list[int], list[int], int]:
    """Returns bytes by unit of optimizer state on the device and of weights that are stepped at once, and the bytes of
    state on the host. Assumes one parameter group, so that each buffer is one range.
    """
    runs = [b.weights.main.nbytes for b in buffers if b.trainable]
    largest = max(runs, default=0)
    if stepping == "offloaded":
        there = [states * n for n in (*[largest] * min(2, len(runs)), plain)]
        return there, [max(largest, plain)], states * sum(runs)
    there = [n for n in (*runs, plain) for _ in range(states)]
    return there, [*runs, plain] if stepping == "whole" else [min(sum(runs), max(largest, TOGETHER)), plain], 0


def _early(programs: Sequence[Program]) -> list[Node]:
    """Returns the gathers of Note [Step prefetch] that have no static buffer; a flat optimizer launches them early."""
    forward = next((p for p in programs if p.phase == "forward"), None)
    first = [] if forward is None else first_launches(forward)
    return [n for n in first if n.target is ops.all_gather and not slot_of(n)]


Read = tuple[str, Layout]
"""Parameters that are communicated together: path of their module, and their layout."""


def _lasting(programs: Sequence[Program]) -> tuple[dict[Read, int], set[Read]]:
    """Returns bytes of persistent FP8 payloads, of forward's recipe and of backward's if it differs; and the units that
    are read only as FP8.
    """
    codes: dict[tuple[Read, Any], int] = {}
    filled: set[Read] = set()
    for p in programs:
        for node in p.nodes:
            if node.target in (ops.refresh, ops.refresh_codes):
                unit = p.unit(role(node).unit)  # type: ignore[union-attr]
                if node.target is ops.refresh:
                    filled.add((unit.fqn, unit.layout))
                else:
                    codes[(unit.fqn, unit.layout), node.args[2]] = nbytes(node.meta["val"])
    out: dict[Read, int] = {}
    for (key, _), taken in codes.items():
        out[key] = out.get(key, 0) + taken
    return out, out.keys() - filled


def _casting(programs: Sequence[Program]) -> dict[Read, Unit]:
    """Returns the units with kept casts (Note [Kept casts])."""
    found: dict[Read, Unit] = {}
    for p in programs:
        for node in p.nodes:
            if node.target in (ops.all_gather, ops.kept_cast) and (r := role(node)) is not None:
                source: Any = node.args[0]
                unit = p.unit(r.unit)
                if node.target is ops.kept_cast or (
                    source.meta["val"].dtype is not node.meta["val"].dtype and unit.spec.precision.wire is None
                ):
                    found[unit.fqn, unit.layout] = unit
    return found


def _sum(slots: dict[str, int], family: str) -> int:
    return sum(n for name, n in slots.items() if name.startswith(family))


def _names(slots: dict[str, int], family: str) -> str:
    return " ".join(name for name in slots if name.startswith(family))


def _saved(program: Program, at: Node) -> int:
    """Returns the bytes of saved activations that backward still holds at a line."""
    held, shared = saved(program)
    last = {node: max(program.readers(node), default=node) for node in [*held, *shared]}
    for node, owner in shared.items():
        last[owner] = max(last[owner], last[node])
    return sum(n for node, n in held.items() if not last[node] < at)
