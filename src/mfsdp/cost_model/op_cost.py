"""Estimates the time of each line of a program on given hardware.

A matrix product takes the longer of its compute time and its memory time, at the rates that the hardware reaches. A
GPU's attention takes a factor more or less (`CAUSAL`). Other kernels take the time of their bytes: a kernel
(`mfsdp.cost_model.fusion`) reads each value from outside once, and writes values that are read outside. For collectives
see `mfsdp.config.hardware.transfer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, TypedDict

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..config.hardware import Group, Hardware, Transfer, host_copy, transfer
from ..config.options import SHORT
from ..config.units import Axis, GroupIndex, UnitSpec
from ..ir import ops
from ..ir.byte_costs import escapes, nbytes, numel, travels
from ..ir.program import Program, base_of, lane_of, operator, operator_name
from ..ir.roles import Kind, is_kind
from . import fusion

aten = torch.ops.aten


@dataclass(frozen=True)
class OpTime:
    """The time of one line."""

    seconds: float
    """Seconds of a kernel; 0 for a collective, which compute does not wait for."""
    flops: int = 0
    limit: str = ""
    """What limits it: ``"compute"``, ``"memory"`` or ``"launch"``; ``"measured"`` if it was measured."""
    transfer: Transfer | None = None
    """Cost of a collective or host copy."""


class Measured(TypedDict, total=False):
    """Arguments of `op_times` for a program that was measured."""

    measured: Mapping[str, float]
    compute: float


class Measurements(Protocol):
    """Measured times of a step, such as `mfsdp.profile`. Its attribute ``optimizer``, if it has one, is the seconds of
    the optimizer's step.
    """

    def given(self, program: Program) -> Measured: ...


def op_times(
    program: Program,
    machine: Hardware,
    *,
    fused: bool = True,
    measured: Mapping[str, float] | None = None,
    compute: float | None = None,
    memo: dict[Any, Any] | None = None,
) -> dict[Node, OpTime]:
    """Returns the time of every line.

    Args:
        program: after any pass.
        fused: whether neighbouring kernels fuse (Inductor) or not (ATen).
        measured: measured seconds by line name, which replace estimates.
        compute: measured seconds of all kernels together; estimates are scaled to this sum.
        memo: cache of earlier calls, if lines have only moved since: unchanged kernels keep their times.
    """
    out: dict[Node, OpTime] = {}
    memo = {} if memo is None else memo
    host = _Host(machine.launch if fused else machine.dispatch)
    for run in fusion.together(program, fused, memo):
        kernel = tuple(run)
        if kernel not in memo:
            memo[kernel] = _kernel(program, run, machine)
        out.update(host.launched({n: _known(n, t, measured or {}) for n, t in memo[kernel].items()}))
    total = sum(time.seconds for time in out.values())
    if compute is not None and total > 0:
        out = {node: replace(time, seconds=time.seconds * compute / total) for node, time in out.items()}
    return out


def _known(node: Node, time: OpTime, measured: Mapping[str, float]) -> OpTime:
    """Returns the measured time of a line if there is one, else ``time``."""
    seconds = measured.get(node.name)
    if seconds is None or time.transfer is not None or node.target is ops.wait:
        return time
    return OpTime(seconds, time.flops, "measured")


class _Host:
    """Models launch overhead: the host launches kernels one after another, and a kernel starts when the host has
    launched it and the device is free. Waits are ignored; as a wait lets the host get further ahead, this is an upper
    bound. The first kernel of a program is never late: the host comes from the program before, or a gather is awaited.
    """

    def __init__(self, launch: float) -> None:
        self.launch = launch
        self.lead = math.inf
        """Seconds from the host's last launch until the device is idle."""

    def launched(self, kernel: dict[Node, OpTime]) -> dict[Node, OpTime]:
        """Returns the times of a kernel's lines; adds the device's wait for the host to the first one."""
        busy = sum(time.seconds for time in kernel.values())
        if not self.launch or not (busy or any(time.transfer for time in kernel.values())):
            return kernel
        self.lead -= self.launch
        if not busy:
            return kernel
        late, self.lead = max(0.0, -self.lead), busy + (max(0.0, self.lead) if self.lead < math.inf else 0.0)
        first, time = next(iter(kernel.items()))
        return {**kernel, first: replace(time, seconds=time.seconds + late, limit="launch")} if late else kernel


def _kernel(program: Program, run: Sequence[Node], machine: Hardware) -> dict[Node, OpTime]:
    """Returns the times of the lines of one kernel."""
    out: dict[Node, OpTime] = {}
    inside, read = set(run), set[Node]()
    for node in run:
        out[node] = _time(program, node, inside, read, machine, first=node is run[0])
        read |= {base_of(a) for a in node.all_input_nodes}
    return out


def _time(program: Program, node: Node, inside: set[Node], read: set[Node], machine: Hardware, first: bool) -> OpTime:
    """Returns the time of a line.

    Args:
        inside: the lines of its kernel.
        read: values that earlier lines of the kernel have read.
        first: whether it is the kernel's first line.
    """
    if node.target is ops.wait:
        coding = _coding(program, node) / (machine.bandwidth * machine.reached_bandwidth)
        return OpTime(coding, limit="memory" if coding else "")
    if node.target in ops.COLLECTIVES:
        return OpTime(0.0, transfer=_transfer(program, node, machine))
    if node.target in ops.HOST:
        return OpTime(0.0, transfer=host_copy(_size(node), machine, back=node.target is ops.reload))
    moved = _bytes(node, inside, read) / (machine.bandwidth * machine.reached_bandwidth)
    count = fusion.flops(node)
    busy = count / (machine.peak(_short(node)) * machine.reached) if count else 0.0
    busy *= _attention(node) if count and machine.cuda else 1.0
    launch = machine.kernel if first and moved + busy > 0 else 0.0
    seconds = max(moved, busy, launch)
    return OpTime(seconds, count, "launch" if seconds == launch else "compute" if busy >= moved else "memory")


CAUSAL, UNMASKED, MASKED = 0.90, 1.8, 2.86
"""Seconds of a GPU's attention, forward or backward, relative to a matrix product of equal operations. torch's formulas
count all pairs of tokens, masked or not. Measured on one H100 80 GB, torch 2.11.0+cu130, on 2026-11-26: 16 layers of
Llama-3.2-1B (32 heads of 64, 8 of keys and values, bf16, 2 x 4,096 tokens) count 15.4e12 operations, 22.2 ms at 0.7 of
the peak. With ``is_causal`` they took 20.1 ms: FlashAttention skips half of the pairs. With an explicit mask they took
63.6 ms, 3.16 times as long: the memory-efficient kernels compute all pairs and read the mask once per head, which the
figure includes. ``UNMASKED`` was not measured: it assumes FlashAttention on twice as many pairs.
"""


def _attention(node: Node) -> float:
    """Returns the factor on a line's seconds if it is a GPU's attention, else 1."""
    target, args, kwargs = operator(node)
    if "attention" not in str(target) or not hasattr(target, "_schema"):
        return 1.0
    names = (argument.name for argument in target._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(given.get(name) is not None for name in ("attn_mask", "attn_bias", "bias")):
        return MASKED
    return CAUSAL if given.get("is_causal") or given.get("custom_mask_type") else UNMASKED


def _short(node: Node) -> str:
    """Returns the dtype of a product's narrowest operand, which decides its rate; accumulators and scales do not."""
    values = pytree.tree_leaves([a.meta.get("val") for a in node.all_input_nodes])
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]
    dtype = min(dtypes, key=lambda d: d.itemsize, default=torch.float32)
    return SHORT.get(dtype, "f8" if dtype.itemsize == 1 else "f32")


def _bytes(node: Node, inside: set[Node], before: set[Node]) -> int:
    """Returns the bytes that a line reads and writes in memory, as part of its kernel."""
    if node.target is ops.bucket:
        holes = node.args[1]
        return sum(b - a for a, b in zip(holes[::2], holes[1::2], strict=True)) * node.meta["val"].dtype.itemsize  # type: ignore
    if node.target in (ops.kept_cast, ops.hold, ops.probe, ops.add_tangent):
        return 0  # computed once for all programs of a step; no work outside of no_sync, in most steps, without tangent
    if node.target is ops.pack:
        return 2 * sum(nbytes(g.meta["val"]) for g in node.args[1])  # type: ignore
    if node.target is ops.accumulate:
        if node.args[3] == 1.0 and base_of(node.args[1]).target is ops.bucket:  # type: ignore[arg-type]
            return 0  # the bucket becomes the accumulator
        return 3 * nbytes(node.args[1].meta["val"])  # type: ignore[union-attr]
    if node.target is ops.spread:
        return _size(node) + sum(_size(scale) for scale in node.args[1])  # type: ignore
    if node.target is aten.embedding.default:
        return 2 * _size(node)  # only the rows that are looked up
    reads = {base_of(a): a for a in node.all_input_nodes}
    read = sum(min(_size(a), _size(b)) for b, a in reads.items() if b not in inside and b not in before)
    if node.target is ops.mm:  # it writes a part of the gradient buffer, and reads nothing of it
        gfull, _, shape, *_ = node.args
        written: int = math.prod(shape) * gfull.meta["val"].dtype.itemsize  # type: ignore[arg-type, union-attr]
        return read - _size(gfull) + written  # type: ignore[arg-type]
    return read + (_size(node) if escapes(node, inside) else 0)


def _size(node: Node) -> int:
    return nbytes(node.meta.get("val"))


def _transfer(program: Program, node: Node, machine: Hardware) -> Transfer:
    if node.target is ops.collective:
        return _others(node, machine)
    spec = program.spec_of(node)
    if node.target in (ops.refresh, ops.refresh_codes):
        return _refresh(spec, machine, codes=node.target is ops.refresh_codes)
    group = groups(spec, machine)[GroupIndex(lane_of(node)).outer]
    if node.target is ops.maxima:
        axes = [g for g, ranks in zip(groups(spec, machine), (spec.world, spec.outer), strict=True) if ranks > 1]
        return _maxima(program, node, axes if spec.persistent else [group], machine)
    return transfer(operator_name(node.target).removeprefix("mfsdp::"), travels(node), group, machine)


def _maxima(program: Program, node: Node, over: Sequence[Group], machine: Hardware) -> Transfer:
    """Returns the cost of reducing amax after an optimizer step: forward's first all-reduce brings all amax at once, so
    the later ones have no latency (Note [Amax]).
    """
    found = _together([transfer("all_reduce", _size(node), group, machine) for group in over])
    return found if node is program.calls(ops.maxima)[0] and program.phase != "backward" else replace(found, fixed=0.0)


WRITE, READ, ADD = 17, 5, 12
"""Bytes of memory traffic per int8 element: to write it (a quotient, rounded in place, then a byte), besides reading
its source twice; to read it in float32; to add that to a sum."""


def _coding(program: Program, wait: Node) -> int:
    """Returns the memory traffic, in bytes, of encoding and decoding int8. All of it counts at the wait. Persistent
    parameters are not counted.
    """
    product = wait.args[0]
    assert isinstance(product, Node)
    launches = [product] if wait.args[1] else [u for u in product.users if u.target is ops.all_reduce and u < wait]
    total = 0
    for node in launches:
        if node.target not in (ops.all_gather, ops.reduce_scatter, ops.all_reduce):
            continue
        spec, source = UnitSpec.decode(node.args[1]).precision, node.args[0]  # type: ignore[arg-type]
        given = 2 * nbytes(source.meta["val"]) + WRITE * numel(source.meta["val"])  # type: ignore[union-attr]
        if node.target is ops.all_gather and spec.wire:
            total += given + numel(node.meta["val"]) * (1 + spec.comm.itemsize)
        elif node.target is not ops.all_gather and spec.grad_wire:
            total += given + (READ + ADD) * numel(source.meta["val"])  # type: ignore[union-attr]
            total += READ * numel(source.meta["val"]) if node.target is ops.all_reduce else 0  # type: ignore[union-attr]
    return total


def _others(node: Node, machine: Hardware) -> Transfer:
    """Returns the cost of another parallelism's collective. An all-to-all sends as many bytes as a reduce-scatter."""
    axis = Axis.decode(node.args[2])  # type: ignore[arg-type]
    group = Group.of(range(0, axis.ranks * axis.stride, axis.stride), machine.linked)
    kind = str(node.args[1]).partition(" ")[0]
    whole = node if kind == "all_gather" else node.args[0]
    return transfer("reduce_scatter" if kind == "all_to_all" else kind, nbytes(whole.meta["val"]), group, machine)  # type: ignore[union-attr]


def _refresh(spec: UnitSpec, machine: Hardware, codes: bool) -> Transfer:
    """Returns the cost of gathering persistent parameters or FP8 payloads after an optimizer step: over the outer axis,
    then over the shard axis.
    """
    shard, outer = groups(spec, machine)
    parts = []

    def whole(lane: int, ranks: int) -> int:
        if spec.precision.wire and not codes:
            return ranks * spec.int8_bytes(lane)
        return ranks * sum(spec.splits_on(lane)) * (1 if codes else spec.precision.comm.itemsize)

    if spec.outer_optim:
        parts.append(transfer("all_gather", whole(2, spec.outer), outer, machine))
    if spec.replica:
        parts.append(transfer("all_gather", whole(0, spec.world), shard, machine))
    return _together(parts)


def _together(parts: Sequence[Transfer]) -> Transfer:
    """Returns the cost of several transfers in sequence."""
    link = "between" if any(p.link == "between" for p in parts) else "inside"
    fixed, moving, cpu, restart = (sum(getattr(p, x) for p in parts) for x in ("fixed", "moving", "cpu", "restart"))
    return Transfer(fixed, moving, cpu, restart, link)


def groups(spec: UnitSpec, machine: Hardware) -> tuple[Group, Group]:
    """Returns the slowest group of the shard axis and of the outer axis."""
    shard, outer = _kinds((spec.world, spec.stride), (spec.outer, spec.outer_stride or spec.world), machine.linked)
    return _worst(shard, machine), _worst(outer, machine)


@cache
def _kinds(shard: tuple[int, int], outer: tuple[int, int], per_node: int) -> tuple[list[Group], list[Group]]:
    """Returns the distinct groups of the shard axis and of the outer axis. The placement of groups on nodes repeats
    after at most ``per_node`` groups.

    Args:
        shard: ranks of the shard axis, and the stride between them.
        outer: the same of the outer axis.
        per_node: ranks per node.
    """

    def found(axis: tuple[int, int], other: tuple[int, int]) -> list[Group]:
        (n, step), (others, apart) = axis, other
        ranks = [range(i * apart, i * apart + n * step, step) for i in range(min(others, per_node))]
        return list(dict.fromkeys(Group.of(r, per_node) for r in ranks))

    return found(shard, outer), found(outer, shard)


def _worst(found: Sequence[Group], machine: Hardware) -> Group:
    return max(found, key=lambda g: transfer("all_gather", 2**26, g, machine).seconds)


def kernel_kind(node: Node, time: OpTime | None) -> str:
    """Returns a line's kind in one word, for colours."""
    if node.target is ops.wait:
        return "wait"
    if node.target in ops.LAUNCHED:
        return "collective"
    if time is not None and time.flops:
        return "matrix"
    return "sharding" if is_kind(node, Kind.PACK, Kind.GFULL, Kind.ACCUMULATE, Kind.HOLD, Kind.CAST) else "other"
