"""A reference interpreter of programs: all data-parallel ranks of a model, node by node, in one process.

It shares nothing with the kernels. What each operation means is spelled out here, as slowly as that is easy to read:
what a collective launches holds NaN until its wait, and what it reads must not change until then; freed memory and
memory of an unfinished sum hold NaN; a static buffer is one piece of memory for all that is placed in it. A step may
have several microbatches, of which the last one synchronises; the host is memory that is not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._prims import rng_prims
from torch.fx import Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from mfsdp.config.block_grid import Grid, decode
from mfsdp.config.units import GroupIndex, Unit, UnitSpec
from mfsdp.ir import ops
from mfsdp.ir.program import INPUT, KEPT, STORAGE, Program, operator
from mfsdp.ir.roles import Kind, is_kind, role

Values = list[torch.Tensor]
"""One tensor per rank."""


def packed(unit: Unit, tensors: Mapping[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A full flat buffer: tensors at their offsets, zeros elsewhere."""
    full = torch.zeros(unit.spec.full_numel, dtype=dtype)
    for offset, tensor in tensors.items():
        full[offset : offset + tensor.numel()] = tensor.reshape(-1)
    return full


def part(full: torch.Tensor, splits: Sequence[int], ranks: int, index: int) -> torch.Tensor:
    """A rank's chunk of every segment."""
    start, out = 0, []
    for n in splits:
        out.append(full[start + index * n : start + (index + 1) * n])
        start += ranks * n
    return torch.cat(out)


def joined(parts: Sequence[torch.Tensor], splits: Sequence[int]) -> torch.Tensor:
    """The inverse of `part`."""
    return torch.cat(
        [chunk for chunks in zip(*(p.split(list(splits)) for p in parts), strict=True) for chunk in chunks]
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def blocks(grid: Grid) -> tuple[slice, torch.Tensor]:
    """Where a parameter is in the full buffer, and the number of the block of each of its elements."""
    elements = torch.arange(math.prod(d.size for d in grid.digits))
    numbers = sum((elements // d.stride % d.size * d.place for d in grid.digits), torch.zeros_like(elements))
    return slice(grid.offset, grid.offset + len(elements)), numbers


class SimulatedRanks:
    """The ranks of a mesh (outer, shard), and what they keep between programs.

    Args:
        units: of the programs.
        weights: full parameters by unit and offset.
    """

    def __init__(self, units: Sequence[Unit], weights: Mapping[tuple[str, int], torch.Tensor]):
        self.units = {u.name: u for u in units}
        spec = units[0].spec
        self.shard, self.outer = max(u.spec.world for u in units), spec.outer
        self.ranks = range(self.shard * self.outer)
        self.main: dict[str, Values] = {}
        self.source: dict[str, Values] = {}
        self.accumulators: dict[str, Values] = {}
        self.sync = True
        """Whether the microbatch that runs synchronises."""
        self.unreduced: dict[tuple[str, int], Values] = {}
        """Gradients of earlier microbatches that wait for that, by unit and elements."""
        for unit in units:
            mine = {offset: w for (name, offset), w in weights.items() if name == unit.name}
            full = packed(unit, mine, unit.spec.precision.main)
            self.main[unit.name] = [self._rows(unit.spec, full, r) for r in self.ranks]
            self.source[unit.name] = self.main[unit.name]
            if unit.spec.persistent:
                self.source[unit.name] = self.unwritten(unit.spec.source_numel, unit.spec.precision.comm)
            self.accumulators[unit.name] = [
                torch.zeros(unit.spec.main_numel, dtype=unit.spec.precision.grad) for _ in self.ranks
            ]

    def unwritten(self, numel: int, dtype: torch.dtype) -> Values:
        return [torch.full((numel,), torch.nan, dtype=dtype) for _ in self.ranks]

    def _peers(self, group: int, rank: int) -> list[int]:
        """The ranks of a rank's group, in order."""
        o, s = divmod(rank, self.shard)
        if GroupIndex(group).outer:
            return [x * self.shard + s for x in range(self.outer)]
        return [o * self.shard + x for x in range(self.shard)]

    def _rows(self, s: UnitSpec, full: torch.Tensor, rank: int) -> torch.Tensor:
        o, i = divmod(rank, self.shard)
        rows = part(full, s.splits, s.world, i) if s.world > 1 else full
        return part(rows, s.splits_on(GroupIndex.OUTER_GATHER), s.outer, o) if s.outer_optim else rows.clone()

    def whole(self, s: UnitSpec, shards: Values, rank: int) -> torch.Tensor:
        """The full buffer, from the shards of a rank's group."""
        peers = self._peers(GroupIndex.SHARD_GATHER, rank)
        return joined([shards[r] for r in peers], s.splits) if s.world > 1 else shards[rank]

    def refreshed(self, s: UnitSpec, rows: Values) -> Values:
        """Persistent parameters, from every rank's main weights in the dtype that is communicated."""
        if s.outer_optim:
            splits = s.splits_on(GroupIndex.OUTER_GATHER)
            rows = [joined([rows[p] for p in self._peers(GroupIndex.OUTER_GATHER, r)], splits) for r in self.ranks]
        return [self.whole(s, rows, r).clone() for r in self.ranks] if s.replica else rows

    def full(self, unit: Unit, rank: int) -> torch.Tensor:
        """All parameters of a unit, in the compute dtype."""
        s = unit.spec
        rows = [r.to(s.precision.comm) for r in self.main[unit.name]]
        rows = self.refreshed(s, rows) if s.persistent else rows
        return (rows[rank] if s.replica else self.whole(s, rows, rank)).to(s.precision.compute)

    def sums(self, s: UnitSpec, values: Values, group: int) -> Values:
        """For each rank the sum over its group, in rank order, in the sum's dtype."""
        dtype = s.sum_dtype(group)
        return [functools.reduce(torch.add, (values[p].to(dtype) for p in self._peers(group, r))) for r in self.ranks]

    def scattered(self, s: UnitSpec, values: Values, group: int) -> Values:
        """Every rank's part of the sum."""
        splits, dtype, out = s.splits_on(group), s.scatter_dtype(group), []
        for r, total in enumerate(self.sums(s, values, group)):
            peers = self._peers(group, r)
            out.append(part(total, splits, len(peers), peers.index(r)).to(dtype))
        return out

    def reduced(self, unit: Unit, microbatches: Sequence[Values]) -> Values:
        """What a step adds to the accumulators, from every rank's gradients, [full_numel] in the compute dtype."""
        s = unit.spec
        each = [[g.to(s.precision.grad_comm) * s.predivide for g in gfull] for gfull in microbatches]
        for group in (GroupIndex.SHARD_GATHER, GroupIndex.OUTER_GATHER):
            if s.ranks_on(group) == 1:
                continue
            if s.hold or group.outer:
                each = [[self.joint(s, parts) for parts in zip(*each, strict=True)]]
            if group.outer and not s.outer_optim:
                each = [[t.to(s.precision.grad_comm) for t in self.sums(s, total, group)] for total in each]
            else:
                each = [self.scattered(s, total, group) for total in each]
        scale = 1 / (s.divide * s.predivide)
        return [sum(t.to(s.precision.grad) * scale for t in parts) for parts in zip(*each, strict=True)]

    @staticmethod
    def joint(s: UnitSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A rank's gradients of several microbatches: the last one's dtype, added up in the accumulator's."""
        *before, last = parts
        return (sum(g.to(s.precision.grad) for g in before) + last).to(last.dtype) if before else last

    def run(self, program: Program, given: list[Values], live: dict[Node, int] | None = None) -> list[Values | None]:
        """Runs a program on all ranks.

        Args:
            program: after any pass.
            given: what its placeholders that are no shards get, in order; emptied, so that values go when they are
                read for the last time.
            live: receives the bytes that rank 0 has allocated after each node, saved values included.
        """
        return _Run(self, program, live).run(given)


class _Run:
    """One run of a program."""

    def __init__(self, ranks: SimulatedRanks, program: Program, live: dict[Node, int] | None):
        self.ranks, self.program, self.live = ranks, program, live
        self.env: dict[Node, Any] = {}
        self.pending: dict[Node, tuple[Callable[[], Values], Values, Values, Values]] = {}
        """By launch: how its result is computed, where it goes, what it reads, and what that was at the launch."""
        self.messages: dict[Node, torch.Tensor] = {}
        self.held: set[Node] = set()
        """Gradients that stay unreduced: what reduces and adds them does nothing."""
        self.slots = {
            (name, r): torch.empty(numel, dtype=torch.uint8)
            for name, numel in program.slots.items()
            for r in ranks.ranks
        }
        self.allocated: dict[int, tuple[StorageWeakRef, int]] = {}
        """Rank 0's memory: bytes by storage, 0 for the caller's."""
        for (_, r), room in self.slots.items():
            if r == 0:
                storage = room.untyped_storage()
                self.allocated[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def run(self, given: list[Values]) -> list[Values | None]:
        nodes = self.program.nodes
        last = {value: node for node in nodes for value in node.all_input_nodes}
        last |= {node: self.program.output for node in nodes if KEPT in node.meta}
        done: dict[Node, list[Node]] = {}
        for value, node in last.items():
            done.setdefault(node, []).append(value)
        for node in nodes:
            if node.op == "output":
                break
            if node.op != "placeholder":
                self.env[node] = self._call(node)
            elif is_kind(node, Kind.SHARD):
                self.env[node] = self.ranks.source[self._unit(node).name]
            else:
                self.env[node] = given.pop(0)
            for value in (*done.get(node, ()), *(() if node in last else (node,))):
                del self.env[value]
            if self.live is not None:
                self._count(node)
        assert not self.pending, f"never waited for: {list(self.pending)}"
        return [self.env[r] if isinstance(r, Node) else None for r in self.program.results()]

    def _count(self, node: Node) -> None:
        for tensor in pytree.tree_leaves(list(self.env.get(node, ()))[:1]):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                outlives = INPUT in node.meta or node.target in (ops.kept_cast, ops.refresh_codes)
                owned = (
                    not outlives and node.target is not ops.offload and node.meta.get(STORAGE, (0, True))[1] is not None
                )
                self.allocated.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes() * owned))
        self.allocated = {k: v for k, v in self.allocated.items() if not v[0].expired()}
        self.live[node] = sum(n for _, n in self.allocated.values())  # type: ignore[index]

    def _on(self, rank: int, args: Any) -> Any:
        return map_arg(args, lambda n: self.env[n][rank])

    def _call(self, node: Node) -> Any:
        target, args, kwargs = operator(node)
        name = getattr(target, "namespace", "") == "mfsdp" and target._schema.name.removeprefix("mfsdp::")
        if name:
            return getattr(self, f"_{name}")(node, *args, **kwargs)
        out = [target(*self._on(r, args), **self._on(r, kwargs)) for r in self.ranks.ranks]
        if node.target is rng_prims.run_and_save_rng_state:
            out = [(torch.get_rng_state(), x) for x in out]
        if isinstance(out[0], tuple):  # results that nobody reads go at once
            read = {user.args[1] for user in node.users}
            out = [tuple(x if i in read else None for i, x in enumerate(results)) for results in out]
        return out

    def _unit(self, node: Node) -> Unit:
        return self.ranks.units[role(node).unit]  # type: ignore[union-attr]

    def _memory(self, node: Node, numel: int, dtype: torch.dtype, slot: str) -> Values:
        """NaN, in a static buffer if it has one."""
        if not slot:
            return self.ranks.unwritten(numel, dtype)
        size = numel * dtype.itemsize
        return [self.slots[slot, r][:size].view(dtype).fill_(torch.nan) for r in self.ranks.ranks]

    # launches and waits

    def _launch(self, node: Node, out: Values, reads: Values, result: Callable[[], Values], messages: int = 0) -> None:
        """``messages``: bytes that arrive before they are summed."""
        self.pending[node] = result, out, reads, [r.clone() for r in reads]
        if messages:
            received = self.messages[node] = torch.empty(messages, dtype=torch.uint8)
            storage = received.untyped_storage()
            self.allocated[storage._cdata] = StorageWeakRef(storage), messages

    def _wait(self, node: Node, out: Node, inputs: list[Node]) -> None:
        launch = next(n for n in reversed(self.pending) if n is out or (n.target in ops.IN_PLACE and n.args[0] is out))
        result, where, reads, were = self.pending.pop(launch)
        self.messages.pop(launch, None)
        if launch is out or launch.target is ops.refresh:
            for a, b in zip(reads, were, strict=True):
                assert torch.equal(bits(a), bits(b)), f"{launch}: what it sends was written to"
        for w, value in zip(where, result(), strict=True):
            w.copy_(value)

    def _refresh(self, node: Node, source: Node) -> None:
        s, main = self._unit(node).spec, self.ranks.main[self._unit(node).name]
        rows = [m.to(s.precision.comm) for m in main]
        self._launch(node, self.env[source], main, lambda: self.ranks.refreshed(s, rows))

    def _refresh_codes(self, node: Node, code: Node, source: Node, key: str, back: bool, spec: str) -> Values:
        s, rows = UnitSpec.decode(spec), self.env[code]
        out = self.ranks.unwritten(s.source_numel, rows[0].dtype)
        self._launch(node, out, rows, lambda: self.ranks.refreshed(s, rows))
        return out

    def _maxima(self, node: Node, shard: Node, grids: str, spec: str) -> Values:
        unit, found = self._unit(node), []
        for grid in decode(grids):
            where, number = blocks(grid)
            largest = torch.zeros(grid.numel).scatter_reduce(
                0, number, self.ranks.full(unit, 0)[where].abs().float(), "amax"
            )
            found.append(largest)
        out = self.ranks.unwritten(sum(g.numel for g in decode(grids)), torch.float32)
        self._launch(node, out, self.ranks.main[unit.name], lambda: [torch.cat(found) for _ in self.ranks.ranks])
        return out

    def _all_gather(self, node: Node, shard: Node, spec: str, slot: int = -1) -> Values:
        s, shards = UnitSpec.decode(spec), self.env[shard]
        dtype = shards[0].dtype if shards[0].dtype.itemsize == 1 else s.precision.comm
        out = self._memory(node, s.full_numel, dtype, f"p{slot}" if slot >= 0 else "")

        def result() -> Values:
            return [self.ranks.whole(s, [x.to(dtype) for x in shards], r) for r in self.ranks.ranks]

        self._launch(node, out, shards, result)
        return out

    def _reduce_scatter(self, node: Node, gfull: Node, spec: str, lane: int) -> Values:
        s, sent = UnitSpec.decode(spec), self.env[gfull]
        out = self._memory(node, sum(s.splits_on(lane)), s.scatter_dtype(lane), "")
        if gfull in self.held:
            self.held.add(node)
            self._launch(node, out, [], lambda: out)
            return out
        messages = sent[0].nbytes if s.sum_dtype(lane) is not s.precision.grad_comm else 0
        self._launch(node, out, sent, lambda: self.ranks.scattered(s, sent, lane), messages)
        return out

    def _all_reduce(self, node: Node, gfull: Node, spec: str, lane: int) -> None:
        s, values = UnitSpec.decode(spec), self.env[gfull]
        if gfull in self.held:
            self._launch(node, values, [], lambda: values)
            return
        total = [t.to(values[0].dtype) for t in self.ranks.sums(s, values, lane)]
        for v in values:
            v.fill_(torch.nan)
        messages = 0
        if s.sum_dtype(lane) is not s.precision.grad_comm:  # a reduce-scatter, whose parts are then gathered
            messages = values[0].nbytes * (1 + s.ranks_on(lane)) // s.ranks_on(lane)
        self._launch(node, values, [], lambda: total, messages)

    def _free(self, node: Node, full: Node) -> None:
        for f in self.env[full]:
            f.fill_(torch.nan)

    def _offload(self, node: Node, x: Node) -> Values:
        out = [torch.empty_like(v).fill_(torch.nan if v.is_floating_point() else 1) for v in self.env[x]]
        values = self.env[x]
        self._launch(node, out, values, lambda: values)
        return out

    def _reload(self, node: Node, host: Node, device: torch.device) -> Values:
        return self._offload(node, host)

    # parameters

    def _param(self, node: Node, shard: Node, offset: int, shape: list[int], spec: str) -> Values:
        unit, n = self._unit(node), torch.Size(shape).numel()
        return [self.ranks.full(unit, r)[offset : offset + n].view(shape).clone() for r in self.ranks.ranks]

    def _kept_cast(self, node: Node, shard: Node, spec: str) -> Values:
        return [x.to(UnitSpec.decode(spec).precision.comm, copy=True) for x in self.ranks.main[self._unit(node).name]]

    _cast = _kept_cast

    def _spread(self, node: Node, shard: Node, scales: list[Node], grids: str, spec: str) -> Values:
        s, out = UnitSpec.decode(spec), []
        for r in self.ranks.ranks:
            full = torch.ones(s.full_numel, dtype=node.meta["val"].dtype)
            for scale, grid in zip(scales, decode(grids), strict=True):
                where, number = blocks(grid)
                full[where] = self.env[scale][r].reshape(-1)[number]
            out.append(self.ranks._rows(s, full, r))
        return out

    def _returned(self, node: Node, param: Node) -> Values:
        return [x.clone() for x in self.env[param]]

    # gradients

    def _param_grad(self, node: Node, grad: Node, shard: Node, offset: int, spec: str) -> Values:
        """Not reduced yet, [full_numel]: `SimulatedRanks.reduced` does that."""
        return [packed(self._unit(node), {offset: g}, g.dtype) for g in self.env[grad]]

    def _bucket(self, node: Node, like: Node, holes: list[int], spec: str, slot: int = -1) -> Values:
        s = UnitSpec.decode(spec)
        out = self._memory(node, s.full_numel, s.precision.grad_comm, f"g{slot}" if slot >= 0 else "")
        for g in out:
            for start, end in zip(holes[::2], holes[1::2], strict=True):
                g[start:end] = 0
        return out

    def _pack(self, node: Node, gfull: Node, grads: list[Node], offsets: list[int], scale: float) -> None:
        for r, g in enumerate(self.env[gfull]):
            for grad, offset in zip(grads, offsets, strict=True):
                value = self.env[grad][r]
                g[offset : offset + value.numel()] = (value.to(g.dtype) * scale).reshape(-1)

    def _mm(self, node: Node, gfull: Node, offset: int, size: list[int], stride: list[int], a: Node, b: Node) -> None:
        for r, g in enumerate(self.env[gfull]):
            g.as_strided(size, stride, offset).copy_(torch.mm(self.env[a][r], self.env[b][r]))

    def _hold(self, node: Node, source: Node, grads: Node, offsets: list[int]) -> None:
        unit, values = self._unit(node), self.env[grads]
        where, kept = (unit.name, values[0].numel()), self.ranks.unreduced
        if grads in self.held:  # before an earlier reduction
            return
        if self.ranks.sync:
            for value, before in zip(values, kept.pop(where, ()), strict=False):
                value.copy_(before + value)
        else:
            before = kept.get(where, [0] * len(values))
            kept[where] = [b + v.to(unit.spec.precision.grad) for b, v in zip(before, values, strict=True)]
            self.held.add(grads)

    def _accumulate(
        self, node: Node, shard: Node, gshard: Node, offsets: list[int], scale: float, reused: bool = False
    ) -> None:
        if gshard in self.held:
            return
        for total, g in zip(self.ranks.accumulators[self._unit(node).name], self.env[gshard], strict=True):
            total += g.to(total.dtype) * scale

    def _probe(
        self, node: Node, value: Node, source: Node | None, starts: Any, sizes: Any, names: str, what: str
    ) -> None:
        if what != "weights" and value not in self.held:  # checks the main weights behind its value
            assert all(torch.isfinite(v).all() for v in self.env[value]), f"{node} looks at what is not complete"
