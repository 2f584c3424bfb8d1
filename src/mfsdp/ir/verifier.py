"""Verifies the invariants that a graph can violate, one function each, after every pass.

Each yields faulty nodes with a description; `check` raises for the first. See docs/internals/invariants.md; the tests
violate each one on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from torch.fx import Node

from ..config.units import GroupIndex, Unit
from . import ops, saved_copies
from .byte_costs import nbytes
from .fp8_patterns import pointwise
from .program import Program, base_of, lane_of, mutates, product_of, slot_of, storage_of, view_of
from .roles import Kind, Role, is_kind, role, unit_of

Fault = tuple[Node, str]


class InvariantError(AssertionError):
    """A program violates an invariant and did not run: a bug of a pass, not of the model."""

    def __init__(self, invariant: int, node: Node, text: str):
        super().__init__(f"{text} (invariant {invariant})")
        self.invariant, self.node = invariant, node


def check(p: Program) -> None:
    """Checks every invariant.

    Raises:
        InvariantError: names the first violated invariant and the node at fault.
    """
    p.graph.lint()
    for invariant, function in INVARIANTS:
        for node, text in function(p):
            raise InvariantError(invariant, node, text)


def stored(p: Program) -> Iterator[Fault]:
    """2: every element of a gradient buffer is written once, by a gradient or by zeros."""
    for node in p.calls(ops.bucket):
        holes: list[int] = node.args[1]  # type: ignore[assignment]
        spans = [(a, b) for a, b in zip(holes[::2], holes[1::2], strict=True)]
        spans += [(offset, offset + numel) for _, offset, numel in _written(p, node)]
        end, last, full = 0, -1, node.meta["val"].numel()
        for start, stop in sorted(spans):
            if last < start < end:
                yield node, f"{node.name}: elements from {start} on are written twice"
            if start > end:
                yield node, f"{node.name}: elements {end} to {start} are never written"
            end, last = max(end, stop), start
        if end < full:
            yield node, f"{node.name}: elements {end} to {full} are never written"
        if end > full:
            yield node, f"{node.name} is written beyond its end"


def _written(p: Program, gfull: Node) -> Iterator[tuple[Node, int, int]]:
    """Writes to a gradient buffer: (writing node, first element, number of elements)."""
    for user in p.readers(gfull):
        if user.target is ops.pack:
            for grad, offset in zip(user.args[1], user.args[2], strict=True):  # type: ignore[arg-type]
                yield user, offset, grad.meta["val"].numel()  # type: ignore[misc]
        elif user.target is ops.mm:
            yield user, user.args[1], prod(user.args[2])  # type: ignore[misc, arg-type]


def one_path(p: Program) -> Iterator[Fault]:
    """3: a unit's gradient reaches its accumulator once per program."""
    seen: set[str] = set()
    for node in p.calls(ops.accumulate):
        if unit_of(node) in seen:
            yield node, f"{unit_of(node)}_grad is accumulated twice"
        seen.add(unit_of(node))


def apart(p: Program) -> Iterator[Fault]:
    """4: source and destination of an accumulate never alias; nothing uses the source afterwards, which may become the
    destination.
    """
    for node in p.calls(ops.accumulate):
        shard, gshard = map(base_of, node.args[:2])  # type: ignore[arg-type]
        if shard is gshard:
            yield node, f"{node.name} adds a buffer to itself"
        for reader in p.readers(gshard):
            if reader > node and reader.target is not ops.accumulate:  # checked by 3 and 14
                yield reader, f"{reader.name} uses {gshard.name} after it was accumulated"


def freed(p: Program) -> Iterator[Fault]:
    """5: a buffer is freed once, after its last reader. If a program frees any, no gathered buffer is alive at its
    end.
    """
    dead: dict[Node, Node] = {}
    for node in p.calls(ops.free):
        owner = base_of(node.args[0])  # type: ignore[arg-type]
        if owner in dead:
            yield node, f"{owner.name} is freed twice"
        dead[owner] = node
    for owner, free in dead.items():
        for reader in p.readers(owner):
            if reader is not free and reader > free:
                yield reader, f"{owner.name} is read after it is freed"
    for full in p.find(Kind.FULL) if dead else ():
        if full not in dead and p.output not in p.readers(full):
            yield full, f"{full.name} is never freed"


def regathered(p: Program) -> Iterator[Fault]:
    """6: forward saves no view of a gathered buffer, except of units that stay gathered on request."""
    for result in p.results():
        if not isinstance(result, Node):
            continue
        owner = base_of(result)
        r = role(owner) or role(result)
        if r is None or r.kind not in (Kind.FULL, Kind.CAST, Kind.PARAM):
            continue
        unit = p.unit(r.unit)
        if unit.spec.reshard and unit.spec.gathers:
            yield result, f"{result.name} leaves the graph but is a view of {owner.name}"


def computed_again(p: Program) -> Iterator[Fault]:
    """47: forward saves nothing computed from parameters alone, except of units that stay gathered on request."""
    for node, how in saved_copies.copies(p):
        if how == saved_copies.ALONE:
            yield node, f"{node.name} is saved for backward, and computed from parameters alone"


def inside(p: Program) -> Iterator[Fault]:
    """7: parameters lie inside their unit's full buffer and do not overlap."""
    params = p.by_unit(Kind.PARAM)
    for unit in p.units:
        end = 0
        for slot in sorted(unit.layout.slots, key=lambda s: (s.offset, s.numel)):
            if slot.numel and (slot.offset < end or slot.offset + slot.numel > unit.layout.full_numel):
                yield p.output, f"{unit.name}: {slot.name} overlaps its neighbour or the end"
            end = max(end, slot.offset + slot.numel)
        known = {(s.offset, s.numel) for s in unit.layout.slots}
        for node in params.get(unit, ()):
            value = node.meta["val"]
            if node.target is ops.param or view_of(node) is None:
                continue
            if (node.args[3], value.numel()) not in known:
                yield node, f"{node.name} is no parameter of {unit.name}"
            yield from _own(unit, node)


def _own(unit: Unit, param: Node) -> Iterator[Fault]:
    """A parameter is a view of its own unit's gathered or persistent buffer."""
    owner = base_of(param)
    r = role(owner)
    if r is None or r.unit != unit.name or (r.kind is Kind.FULL) is not unit.spec.gathers:
        yield param, f"{param.name} is a view of {owner.name}, not of what {unit.name} gathers"
    while owner.target in (ops.all_gather, ops.refresh_codes) or is_kind(owner, Kind.CAST):
        owner = base_of(owner.args[0])  # type: ignore[arg-type]
    if role(owner) != Role(Kind.SHARD, unit.name):
        yield param, f"{param.name} comes from {owner.name}, not from {unit.name}'s shard"


def tied(p: Program) -> Iterator[Fault]:
    """8: each parameter's gradient is packed once, after all its uses."""
    for gfull in p.calls(ops.bucket):
        seen: set[int] = set()
        for node, offset, _ in _written(p, gfull):
            if offset in seen:
                yield node, f"{gfull.name}: a parameter's gradient is packed twice"
            seen.add(offset)


def slotted(p: Program) -> Iterator[Fault]:
    """9: a static buffer holds one tensor at a time, no larger than itself."""
    busy: dict[str, tuple[Node, Node]] = {}
    for node in p.nodes:
        slot = slot_of(node)
        if not slot:
            continue
        if nbytes(node.meta["val"]) > p.slots.get(slot, 0):
            yield node, f"{node.name} is larger than slot {slot}"
        holder, end = busy.get(slot, (node, node))
        if node < end:
            yield node, f"{node.name} takes slot {slot} from {holder.name}, which is alive"
        ends = p.readers(node)
        for launch in node.users:
            if launch.target is ops.reduce_scatter:
                ends += [u for u in launch.users if u.target is ops.wait]
        busy[slot] = (node, max(ends, default=node))


def fresh(p: Program) -> Iterator[Fault]:
    """10: persistent parameters are read only after forward's refresh."""
    if p.phase in ("backward", "overlapped"):
        return
    for source in p.find(Kind.SHARD):
        if not p.spec_of(source).persistent:
            continue
        asked = min((u for u in source.users if u.target is ops.refresh), default=None)
        for reader in p.readers(source):
            if reader is p.output or reader.target in (ops.param, ops.refresh, ops.wait, *_OF_MAIN):
                continue  # saved for backward; refreshes itself; is the refresh; reads main weights
            if asked is None or reader < asked:
                yield reader, f"{source.name} is read before it is refreshed"


_OF_MAIN = (ops.maxima, ops.spread, ops.cast, ops.refresh_codes, ops.probe)
"""Operations that take the source as an argument but read main weights."""


def finished(p: Program) -> Iterator[Fault]:
    """11: the output of a collective or host copy is waited for once and read only then; its input lives, unwritten,
    until then.
    """
    for node in p.calls(*ops.LAUNCHED):
        product, source = product_of(node), node.args[0]
        assert isinstance(source, Node)
        waits = sorted(u for u in product.users if u.target is ops.wait and u.args[0] is product)
        wait = next((w for w in waits if node < w), None)
        if wait is None and waits:
            yield waits[0], f"{product.name} is waited for before it is launched"
        if wait is None:
            yield node, f"{node.name} is never waited for"
            continue
        again = next((w for w in waits if wait < w), node)
        if wait < again and not any(wait < u < again for u in product.users if u.target in ops.LAUNCHED):
            yield again, f"{product.name} is waited for twice"
        for reader in p.readers(product):
            if node < reader < wait:
                yield reader, f"{product.name} is read before it is waited for"
        if product is source:
            continue
        if source not in wait.args[1]:  # type: ignore[operator]
            yield wait, f"{source.name} may be gone before {node.name} has read it"
        read = storage_of(source)
        for writer in p.readers(base_of(source)):  # a check writes nothing, whatever its schema says
            if node < writer < wait and writer.target is not ops.probe and read in map(storage_of, mutates(writer)):
                yield writer, f"{source.name} is overwritten while {node.name} reads it"


def joined(p: Program) -> Iterator[Fault]:
    """14: every gradient is packed before its reduction starts; every reduction reaches its destination, summed over
    all ranks.
    """
    results = {base_of(r) for r in p.results() if isinstance(r, Node)}
    for node in p.calls(ops.reduce_scatter, ops.all_reduce, ops.probe):
        gfull, checks = base_of(node.args[0]), node.target is ops.probe  # type: ignore[arg-type]
        for writer, _, _ in _written(p, gfull) if not checks or gfull.target is ops.bucket else ():
            if writer > node:
                yield writer, f"{gfull.name} is written after {node.name} has {'looked at' if checks else 'sent'} it"
        product = gfull if node.target is ops.all_reduce else node
        onwards = (ops.accumulate, ops.reduce_scatter, ops.all_reduce)
        if not checks and gfull not in results and not any(u.target in onwards and node < u for u in product.users):
            yield node, f"{node.name} reaches neither an accumulator nor an output"
    for node in p.calls(ops.accumulate):
        yield from _over_all_ranks(p, node, node.args[1])  # type: ignore[arg-type]
        if role(base_of(node.args[0])) != Role(Kind.SHARD, unit_of(node)):  # type: ignore[arg-type]
            yield node, f"{node.name} adds {unit_of(node)}'s gradients to {node.args[0].name}"  # type: ignore[union-attr]
    for i, (unit, _) in p.gradients.items() if p.reduced else ():
        result = p.results()[i]
        if isinstance(result, Node):
            yield from _over_all_ranks(p, p.output, result, unit)


def _over_all_ranks(p: Program, end: Node, grads: Node, name: str | None = None) -> Iterator[Fault]:
    """A unit's gradient was reduced over each axis of its ranks, once, from the unit's own buffer."""
    name = name or unit_of(end)
    spec, axes, buffer = p.unit(name).spec, [], base_of(grads)
    while True:
        axes += [GroupIndex(lane_of(n)).outer for n in p.readers(buffer) if n.target is ops.all_reduce and n < end]
        if buffer.target is not ops.reduce_scatter:
            break
        axes.append(GroupIndex(lane_of(buffer)).outer)
        buffer = base_of(buffer.args[0])  # type: ignore[arg-type]
    want = [0] * (spec.world > 1) + [1] * (spec.outer > 1)
    if sorted(axes) != want:
        yield end, f"{grads.name} is summed over {len(axes)} axes of {name}'s ranks, not over {len(want)}"
    if buffer.target is not ops.bucket or unit_of(buffer) != name:
        yield end, f"{grads.name} does not come from {name}'s gradient buffer"


def everywhere(p: Program) -> Iterator[Fault]:
    """15: a unit with gradients in the captured program reduces all of them in one buffer; none is lost."""
    buckets: set[str] = set()
    of: dict[str, list[Node]] = {}
    for node in p.nodes:
        if (r := role(node)) is None:
            continue
        of.setdefault(r.unit, []).append(node)
        if node.target is ops.bucket:
            if r.unit in buckets:
                yield node, f"{r.unit} has two gradient buffers: its reductions would differ from rank to rank"
            buckets.add(r.unit)
    for node in p.find(Kind.GRAD):
        if unit_of(node) in buckets:
            yield node, f"{node.name} is left out of {unit_of(node)}_gfull"
    for name, offsets in p.trained.items():
        starts = {slot.offset for slot in p.unit(name).layout.slots if slot.numel}
        for node, found in _brought(p, name, of.get(name, [])):
            for offset in offsets ^ (found & starts):
                what = f"{name}: the gradient of {p.unit(name).offset_name(offset)}"
                yield node, f"{what} {'is lost' if offset in offsets else 'comes from nowhere'}"


def _brought(p: Program, name: str, mine: list[Node]) -> Iterator[tuple[Node, set[int]]]:
    """Offsets of a unit's parameters whose gradients reach each stage, with a node of it (``mine``: the unit's)."""
    unit, results = p.unit(name), p.results()
    if not unit.sharded:
        yield p.output, {o for i, (u, o) in p.gradients.items() if u == name and isinstance(results[i], Node)}
    elif not p.reduced:
        yield p.output, {n.args[2] for n in mine if is_kind(n, Kind.GRAD)}  # type: ignore[misc]
    if p.reduced:
        buckets = [n for n in mine if n.target is ops.bucket]
        yield next(iter(buckets), p.output), {o for b in buckets for _, o, numel in _written(p, b) if numel}
        ends = [n for n in mine if n.target in (ops.accumulate, ops.hold)]
        for node in ends:
            yield node, set(node.args[2])  # type: ignore[arg-type]
        if unit.sharded and not any(n.target is ops.accumulate for n in ends):
            yield p.output, set()


def scaled(p: Program) -> Iterator[Fault]:
    """17: on every gradient path the product of scale factors is 1/divide."""
    for node in p.calls(ops.accumulate, ops.all_reduce):
        if node.target is ops.accumulate:
            factor, buffer = float(node.args[3]), node.args[1]  # type: ignore[arg-type]
        elif p.unit(unit_of(node)).sharded:
            continue
        else:
            factor, buffer = 1.0, node.args[0]
        assert isinstance(buffer, Node)
        while buffer.target is ops.reduce_scatter:
            buffer = base_of(buffer.args[0])  # type: ignore[arg-type]
        want = 1 / p.spec_of(node).divide
        for writer, _, _ in _written(p, base_of(buffer)):
            got = factor * (float(writer.args[3]) if writer.target is ops.pack else 1.0)  # type: ignore[arg-type]
            if abs(got - want) > 1e-12 * want:
                yield writer, f"{unit_of(node)}: gradients are scaled by {got:g}, not by {want:g}"


def wide(p: Program) -> Iterator[Fault]:
    """18: parameters and gradients are communicated in the policy's dtypes; the last reduction returns the dtype it
    sums in.
    """
    for node in p.calls(ops.all_gather, ops.bucket, ops.reduce_scatter):
        spec = p.spec_of(node)
        if node.target is ops.all_gather:
            want = ops.gathered(node.args[0].meta["val"], spec)  # type: ignore[union-attr]
        else:
            want = spec.precision.grad_comm if node.target is ops.bucket else spec.scatter_dtype(lane_of(node))
        if node.meta["val"].dtype is not want:
            yield node, f"{node.name} is {node.meta['val'].dtype}, the policy says {want}"


def own_rows(p: Program) -> Iterator[Fault]:
    """46: an FP8 shard depends only on this rank's own rows, elementwise, and on amax over all rows of the same
    weights.
    """
    for full in p.calls(ops.all_gather, ops.refresh_codes):
        unit, spec, dtype = unit_of(full), p.spec_of(full), full.meta["val"].dtype
        if dtype.itemsize > 1 or dtype is spec.precision.comm:  # bytes of quantized weights are no FP8 payload
            continue
        if full.target is ops.all_gather and spec.persistent:
            source = full.args[0]
            if source.target is not ops.refresh_codes or unit_of(source) != unit:  # type: ignore[union-attr, arg-type]
                yield full, f"{full.name} is not gathered from {unit}'s persistent FP8 payload"
            continue
        seen, todo = {full}, [(full.args[0], True)]
        while todo:
            node, flat = todo.pop()
            assert isinstance(node, Node)
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder":
                if role(node) != Role(Kind.SHARD, unit):
                    yield node, f"{full.name} depends on {node.name}, which may differ between ranks"
                elif not flat:
                    yield node, f"a scale of {full.name} is computed from this rank's rows alone"
            elif node.target in (ops.cast, ops.maxima):
                if role(base_of(node.args[0])) != Role(Kind.SHARD, unit):  # type: ignore[arg-type]
                    yield node, f"{node.name} is not of {unit}'s weights"
                if node.target is ops.cast and not flat:
                    yield node, f"a scale of {full.name} is computed from this rank's rows alone"
            elif node.target is ops.spread:
                todo += [(scale, False) for scale in node.args[1]]  # type: ignore[union-attr, misc]
            else:
                if flat and not (pointwise(node) and node.meta["val"].numel() == spec.main_numel):
                    yield node, f"{node.name}, on the way to {full.name}, mixes elements of this rank's rows"
                todo += [(source, flat) for source in node.all_input_nodes]


def one_way(p: Program) -> Iterator[Fault]:
    """53: an offloaded activation is copied once, as its full storage, does not stay on the device too, and is fetched
    once.
    """
    results = [r for r in p.results() if isinstance(r, Node)]
    gone: set[Node] = set()
    for node in p.find(Kind.OFFLOAD):
        if node.op == "placeholder":
            readers = [u for u in node.users if u.target is not ops.wait]
            if [u.target for u in readers] != [ops.reload]:
                yield (readers or [node])[0], f"{node.name} is a host copy, which backward has to reload exactly once"
            continue
        source: Node = node.args[0]  # type: ignore[assignment]
        owner = storage_of(source)
        if owner is not source:
            yield node, f"{source.name} is a view of {owner.name}, whose whole storage has to be offloaded"
        if owner.op == "placeholder" or is_kind(owner, Kind.PARAM, Kind.FULL, Kind.CAST):
            yield node, f"{owner.name} is offloaded, but is an argument, a parameter or a gathered buffer"
        if owner in gone:
            yield node, f"{owner.name} is offloaded twice"
        if node not in results:
            yield node, f"{node.name} is a host copy, but no output of forward"
        gone.add(owner)
    for result in results:
        if storage_of(result) in gone:
            yield result, f"{result.name} is saved on the device although its storage is offloaded"


def complete(p: Program) -> Iterator[Fault]:
    """72: nothing reads a gradient before the tangents are added to it (Note [Optional tangents])."""
    for node in p.calls(ops.add_tangent):
        for reader in p.readers(base_of(node.args[0])):  # type: ignore[arg-type]
            if reader < node and reader.target is not ops.add_tangent:
                yield reader, f"{reader.name} reads {base_of(node.args[0]).name} before a tangent is added to it"  # type: ignore[arg-type]


INVARIANTS: tuple[tuple[int, Callable[[Program], Iterator[Fault]]], ...] = (
    (2, stored),
    (3, one_path),
    (4, apart),
    (5, freed),
    (6, regathered),
    (7, inside),
    (8, tied),
    (9, slotted),
    (10, fresh),
    (11, finished),
    (14, joined),
    (15, everywhere),
    (17, scaled),
    (18, wide),
    (46, own_rows),
    (47, computed_again),
    (53, one_way),
    (72, complete),
)
"""Number (docs/internals/invariants.md) and function."""
