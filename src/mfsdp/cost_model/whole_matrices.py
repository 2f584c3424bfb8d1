"""Predicts a step of Muon beside AdamW, from the plan of its waves (Note [Owners])."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

from ..buffers.flat_buffer import FlatBuffer
from ..config.hardware import Hardware, transfer
from ..ir.byte_costs import size
from ..optim.matrix_step import BATCH, MAX_STAGING
from ..optim.muon import Muon
from ..optim.owners import Matrix, Plan, counted, describe, plan
from ..optim.rings import matrices_of
from .op_cost import groups

ITERATIONS = 5
"""Newton-Schulz iterations, torch's default."""

_plans: weakref.WeakKeyDictionary[FlatBuffer, tuple[tuple[int, ...], Plan]] = weakref.WeakKeyDictionary()
"""Plans by a model's first buffer, with the ``id`` of all of its buffers."""


def stepped(buffers: Sequence[FlatBuffer]) -> list[set[int]]:
    """Returns the slots of every buffer that Muon steps: matrices and stacked matrices of units that are repeated
    (layers). AdamW steps the rest: embeddings, head, vectors. If no unit is repeated, Muon steps all matrices.
    """
    alike = Counter(_shapes(b) for b in buffers if b.trainable)
    several = any(n > 1 for n in alike.values())
    taken = [b.trainable and (alike[_shapes(b)] > 1 or not several) for b in buffers]
    return [
        {i for i, slot in enumerate(b.layout.slots) if len(slot.shape) in (2, 3)} if yes else set()
        for b, yes in zip(buffers, taken, strict=True)
    ]


def _shapes(buffer: FlatBuffer) -> tuple[tuple[int, ...], ...]:
    return tuple(slot.shape for slot in buffer.layout.slots)


def step_of(buffers: Sequence[FlatBuffer]) -> Plan:
    """Returns the waves and owners of a step, with default staging memory. Cached per model."""
    key = tuple(map(id, buffers))
    known = _plans.get(buffers[0]) if buffers else None
    if known is not None and known[0] == key:
        return known[1]
    units = [
        [m for slot in sorted(slots) for m in _matrices(b, i, slot)]
        for i, (b, slots) in enumerate(zip(buffers, stepped(buffers), strict=True))
    ]
    found = plan(units, Muon.wire.itemsize, MAX_STAGING)
    if buffers:
        _plans[buffers[0]] = key, found
    return found


def _matrices(buffer: FlatBuffer, unit: int, slot: int) -> list[Matrix]:
    """Returns a parameter's matrices; of one that tensor parallelism has cut, where that cannot be planned, pieces."""
    try:
        return matrices_of(buffer, unit, slot, 0, {}, Muon())
    except NotImplementedError:
        return matrices_of(buffer, unit, slot, 0, {"blockwise": True}, Muon())


def listing(buffers: Sequence[FlatBuffer]) -> str:
    """Returns the step as text."""
    return describe(step_of(buffers), "Muon", [b.unit.fqn for b in buffers])


def rest(buffers: Sequence[FlatBuffer]) -> list[int]:
    """Returns the bytes of this rank's main weights that AdamW steps, by buffer."""
    found = []
    for b, slots in zip(buffers, stepped(buffers), strict=True):
        mine = sum(at.numel for slot, at in enumerate(b.weights.locals) if slot in slots)
        found.append(b.weights.main.nbytes - mine * b.weights.main.itemsize if b.trainable else 0)
    return found


def temporaries(buffers: Sequence[FlatBuffer]) -> list[int]:
    """Returns the bytes of what a step holds besides weights, gradients and state, by tensor: staging memory, a batch
    of Newton-Schulz with its products, and the momentum of one unit before it is rounded.
    """
    found = step_of(buffers)
    owned = max((m.numel * found.itemsize for wave in found.waves for m in wave.matrices), default=0)
    most = max((load.owned for wave in found.waves for each in wave.sizes.values() for load in each), default=0)
    batch = max(owned, min(BATCH, most * found.itemsize))
    return [found.staging, 3 * batch, max((b.weights.main.nbytes for b in buffers if b.trainable), default=0)]


def seconds(buffers: Sequence[FlatBuffer], machine: Hardware) -> float:
    """Returns the seconds of the matrices: Newton-Schulz of the busiest owners, and exchanges that it does not hide,
    always the first one there and the last one back. An iteration takes products with a Gram matrix of the shorter
    side n, 4 m n n + 2 n^3 operations in bfloat16.
    """
    found = step_of(buffers)
    every = [m for wave in found.waves for m in wave.matrices]
    cost = sum(m.cost for m in every)
    if not cost:
        return 0.0
    flops = ITERATIONS * sum(4 * m.cost + 2 * min(m.rows, m.columns) ** 3 for m in every) / cost
    rate = machine.peak("bf16") * machine.reached
    mean = sum(sum(loads) / len(loads) for loads in found.loads.values())
    moving, working = [], []
    spec = buffers[every[0].unit].spec
    group = max(groups(spec, machine), key=lambda g: g.ranks)
    for wave in found.waves:
        held = max((load.held for each in wave.sizes.values() for load in each), default=0)
        over = max(ring.size for ring in wave.rings)
        moving.append(transfer("reduce_scatter", found.itemsize * held, group, machine).seconds if over > 1 else 0.0)
        working.append(sum(max(load.cost for load in each) for each in wave.sizes.values()) * flops / rate)
    exposed = moving[0] + moving[-1]
    for k, busy in enumerate(working):
        beside = (moving[k + 1] if k + 1 < len(moving) else 0.0) + (moving[k - 1] if k else 0.0)
        exposed += max(0.0, beside - busy)
    return found.critical * mean * flops / rate + exposed


def summary(buffers: Sequence[FlatBuffer]) -> str:
    """Returns a line for reports: loads, staging, bytes."""
    found = step_of(buffers)
    sent = max((n for ring in found.loads for n in found.sent(ring)), default=0)
    waves = counted(len(found.waves), "wave")
    return (
        f"{waves} of whole matrices: load max/mean {found.imbalance:.2f}, critical path/mean {found.critical:.2f}, "
        f"staging {size(found.staging)}, at most {size(sent)} sent per rank"
    )
